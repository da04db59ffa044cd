//! Options of the sockets of all connections, on both sides.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// After which silence the kernel probes whether the other machine is there.
const PROBE_AFTER: Duration = Duration::from_secs(20);

/// The most seconds of a random delay of the first probe. Ten thousand connections that were made
/// within a second would otherwise be probed within a second, again and again. That overflows
/// packet queues, and live machines were given up.
const PROBE_SPREAD_SECONDS: u64 = 20;

/// The interval of further probes, and after how many the kernel gives up.
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// Sends small messages at once, and lets the kernel detect a lost machine within 40 to 60 s.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut hasher = DefaultHasher::new();
    (stream.local_addr()?, stream.peer_addr()?).hash(&mut hasher);
    let later = Duration::from_secs(hasher.finish() % (PROBE_SPREAD_SECONDS + 1));
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER + later)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[tokio::test]
    async fn the_kernel_looks_after_idle_connections_at_different_times() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut times = BTreeSet::new();
        for _ in 0..100 {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            prepare(&stream).unwrap();
            assert!(stream.nodelay().unwrap());
            assert!(sockopt::socket_keepalive(&stream).unwrap());
            let every = sockopt::tcp_keepintvl(&stream).unwrap();
            let count = sockopt::tcp_keepcnt(&stream).unwrap();
            times.insert((sockopt::tcp_keepidle(&stream).unwrap() + every * count).as_secs());
        }
        assert!(times.iter().all(|time| (40..=60).contains(time)), "{times:?}");
        assert!(times.len() > 10, "{times:?}");
    }
}
