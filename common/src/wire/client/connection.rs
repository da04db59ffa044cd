//! One HTTP/2 connection of a client.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::super::body::Body;
use super::super::executor::Tracked;
use super::super::{KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT};
use super::peer::Peer;

/// How long a connection may take to come about, all addresses of the host together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Names that are resolved at one time. Each holds a thread of the pool that all blocking work of
/// the process shares (512 threads in tokio), for as long as a name server does not answer.
const LOOKUPS: usize = 128;

static LOOKUP_PLACES: Semaphore = Semaphore::const_new(LOOKUPS);

/// The most that a server may send ahead on one stream, in bytes.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The most that a server may send ahead on all streams, in bytes. Larger than one stream's, so
/// that objects that nobody reads do not hold up calls.
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// A connection. Its tasks end when it is dropped.
pub(super) struct Connection {
    pub(super) sender: http2::SendRequest<Body>,
    _stop: DropGuard,
}

impl Connection {
    /// Connects to `peer`.
    pub(super) async fn open(peer: &Peer) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let executor = Tracked { tracker: TaskTracker::new(), stop: stop.clone() };
        let guard = stop.drop_guard();
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection within 10 s");
        let stream =
            tokio::time::timeout(CONNECT_TIMEOUT, connect(peer)).await.map_err(|_| late())??;
        let (sender, connection) = http2::Builder::new(executor.clone())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_header_list_size(super::super::HEADER_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        let name = peer.to_string();
        hyper::rt::Executor::execute(&executor, async move {
            if let Err(error) = connection.await {
                tracing::debug!("connection to {name}: {}", crate::report::report(&error));
            }
        });
        Ok(Self { sender, _stop: guard })
    }
}

/// Makes the stream of bytes to `peer`. TLS goes around the stream here.
async fn connect(peer: &Peer) -> io::Result<impl AsyncRead + AsyncWrite + Unpin + Send + use<>> {
    let addresses: Vec<SocketAddr> = match peer.address {
        Some(address) => vec![SocketAddr::new(address, peer.port)],
        None => resolve(peer).await?,
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                super::super::socket::prepare(&stream)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Asks the system's resolver. Its thread keeps the place until it has answered, however long
/// the caller waits.
async fn resolve(peer: &Peer) -> io::Result<Vec<SocketAddr>> {
    let place = LOOKUP_PLACES.acquire().await.map_err(io::Error::other)?;
    let (host, port) = (peer.host.clone(), peer.port);
    let look_up = move || {
        let _place = place;
        (host.as_str(), port).to_socket_addrs().map(Iterator::collect)
    };
    tokio::task::spawn_blocking(look_up).await.map_err(io::Error::other)?
}
