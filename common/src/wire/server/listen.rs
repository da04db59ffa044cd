//! Accepts connections and ends them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::super::access::Identity;
use super::super::tls::{Security, Standing};
use super::super::{HEADER_BYTES_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, body};
use super::dispatch::Service;
use super::executor::Tracked;
use super::metrics::Running;
use super::{Caller, Router};

/// How long running calls may go on after the server was told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// The most connections at one time; more wait until one ends.
const CONNECTIONS_MAX: usize = 4_096;

/// The most calls at one time on one connection; more wait at the caller.
const STREAMS_MAX: u32 = 512;

/// How long a caller may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the first request of a connection, and the headers of any, may take to come.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// The most that a caller may send ahead in one call, in bytes.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The most that a caller may send ahead in all calls of a connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// The most of a reply that waits for a slow caller, for each stream, in bytes.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// How long to wait when the kernel has no descriptor for a new connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers on `listener` until `stop` is cancelled; then lets running calls finish, for at most
/// [`SHUTDOWN_GRACE`]. Handlers that wait for long should watch the token too.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let server = Server::new(router, stop.clone());
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let (security, keeping) = (server.service.router.security.clone(), stop.clone());
    server.tracker.spawn(async move { security.keep(keeping).await });
    loop {
        let accepted = stop.run_until_cancelled(next(&listener, &places)).await;
        let Some((accepted, place)) = accepted else { break };
        match accepted {
            Ok((stream, address)) => server.answer(stream, address, place, server.cut()),
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                stop.run_until_cancelled(tokio::time::sleep(ACCEPT_PAUSE)).await;
            }
        }
    }
    drop(listener);
    server.finish().await;
}

/// Answers on connections that its owner accepts, for owners that choose among them, or end some
/// before their time. Daemons have [`serve`].
pub struct Server {
    service: Arc<Service>,
    tracker: TaskTracker,
    abort: CancellationToken,
    stop: CancellationToken,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Server").field("connections", &self.tracker).finish_non_exhaustive()
    }
}

impl Server {
    /// A server without connections. When `stop` is cancelled, connections end as soon as the
    /// calls on them are answered.
    #[must_use]
    pub fn new(router: Router, stop: CancellationToken) -> Self {
        let service = Arc::new(Service::new(router));
        Self { service, tracker: TaskTracker::new(), abort: CancellationToken::new(), stop }
    }

    /// A token for one connection, with which it can be cut.
    #[must_use]
    pub fn cut(&self) -> CancellationToken {
        self.abort.child_token()
    }

    /// Answers on `stream`, which comes from `address`, in tasks of its own; `place` is given back
    /// when the connection ends. When `cut`, which is of [`Server::cut`], is cancelled, it ends at
    /// once, with all calls on it.
    pub fn answer(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        place: OwnedSemaphorePermit,
        cut: CancellationToken,
    ) {
        let serve = Serve {
            service: Arc::clone(&self.service),
            tracked: Tracked { tracker: self.tracker.clone(), stop: cut },
            stop: self.stop.clone(),
            place,
        };
        hyper::rt::Executor::execute(&serve.tracked.clone(), serve.connection(stream, address));
    }

    /// Lets running calls finish, for at most [`SHUTDOWN_GRACE`]; for when the server was told to
    /// stop.
    pub async fn finish(self) {
        self.tracker.close();
        if tokio::time::timeout(SHUTDOWN_GRACE, self.tracker.wait()).await.is_err() {
            self.abort.cancel();
            self.tracker.wait().await;
        }
    }
}

/// Waits for a free place, and then for a connection.
async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (io::Result<(TcpStream, SocketAddr)>, OwnedSemaphorePermit) {
    let place = Arc::clone(places).acquire_owned().await.expect("the semaphore is never closed");
    (listener.accept().await, place)
}

/// The bytes of a caller, plain or out of TLS.
type Bytestream = Either<TcpStream, Box<tokio_rustls::server::TlsStream<TcpStream>>>;

/// What one connection needs.
struct Serve {
    service: Arc<Service>,
    tracked: Tracked,
    stop: CancellationToken,
    place: OwnedSemaphorePermit,
}

impl Serve {
    async fn connection(self, stream: TcpStream, address: SocketAddr) {
        let metrics = &self.service.router.metrics;
        metrics.accepted.inc();
        let _counted = Running::of(&metrics.connections);
        let _place = &self.place;
        // Tasks of the connection end with it, however it ends.
        let _end = self.tracked.stop.clone().drop_guard();
        let accepted = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.accept(stream));
        // Boxed, because it needs its room for a moment only.
        let (stream, local, standing) = match Box::pin(accepted).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => {
                metrics.refused.inc();
                tracing::debug!(%address, "connection refused: {error}");
                return;
            }
            Err(_) => {
                metrics.refused.inc();
                tracing::debug!(%address, "connection refused: the handshake took too long");
                return;
            }
        };
        let asked = Arc::new(AtomicBool::new(false));
        let until = standing.as_ref().map(Standing::until);
        let identity = match &standing {
            Some(standing) => standing.identity(),
            None if self.service.router.security.is_insecure() => Arc::new(Identity::insecure()),
            None => Arc::new(Identity::default()),
        };
        let handler = {
            let (asked, service) = (Arc::clone(&asked), Arc::clone(&self.service));
            service_fn(move |request| {
                asked.store(true, Ordering::Relaxed);
                let unpacks = body::takes_packed(request.headers());
                let identity = match until {
                    Some(until) if until.is_over() => Arc::new(Identity::default()),
                    _ => Arc::clone(&identity),
                };
                let caller = Caller { address, local, unpacks, identity };
                let answer = Arc::clone(&service).answer(caller, request);
                async move { Ok::<_, Infallible>(answer.await) }
            })
        };
        let lost = async {
            match standing {
                Some(standing) => standing.lost().await,
                None => std::future::pending().await,
            }
        };
        let mut lost = std::pin::pin!(lost);
        let builder = builder(self.tracked.clone());
        let connection = builder.serve_connection(TokioIo::new(stream), handler);
        let mut connection = std::pin::pin!(connection);
        let (mut stopping, mut waiting) = (false, true);
        let first = tokio::time::sleep(HEADER_TIMEOUT);
        let mut first = std::pin::pin!(first);
        let result = loop {
            tokio::select! {
                result = connection.as_mut() => break result,
                why = lost.as_mut() => {
                    tracing::info!(%address, "connection cut: {why}");
                    return;
                }
                () = self.stop.cancelled(), if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = first.as_mut(), if waiting => {
                    if !asked.load(Ordering::Relaxed) {
                        tracing::debug!(%address, "no request came");
                        return;
                    }
                    waiting = false;
                }
            }
        };
        if let Err(error) = result {
            tracing::debug!(%address, "connection ended: {error}");
        }
    }

    /// Prepares the stream of bytes of a caller; tells at which address it came in, and how the
    /// caller stands if it has shown a certificate.
    async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(Bytestream, SocketAddr, Option<Standing>)> {
        super::super::socket::prepare(&stream)?;
        let local = stream.local_addr()?;
        match &self.service.router.security {
            Security::Insecure => Ok((Either::Left(stream), local, None)),
            Security::Tls(keeper) => {
                let (stream, standing) = keeper.accept(stream).await?;
                Ok((Either::Right(Box::new(stream)), local, standing))
            }
        }
    }
}

fn builder(tracked: Tracked) -> auto::Builder<Tracked> {
    let mut builder = auto::Builder::new(tracked);
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(64 << 10)
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(super::super::FRAME_BYTES_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(HEADER_BYTES_MAX);
    builder
}
