//! What is set on the socket of each connection, by both sides.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;

/// After how long without a word the kernel asks whether the other machine is there, how much later
/// it asks again, and after how many questions it gives up: 40 s in all.
const PROBE_AFTER: Duration = Duration::from_secs(20);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// Sends small messages at once, and has the kernel find out when the other machine is gone.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_kernel_looks_after_idle_connections() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        prepare(&stream).unwrap();
        assert!(stream.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let after = sockopt::tcp_keepidle(&stream).unwrap();
        let every = sockopt::tcp_keepintvl(&stream).unwrap();
        let count = sockopt::tcp_keepcnt(&stream).unwrap();
        assert_eq!(after + every * count, Duration::from_secs(40));
    }
}
