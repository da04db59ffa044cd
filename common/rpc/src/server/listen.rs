//! Accepts connections and ends them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::super::tls::{PeerSession, Security};
use super::super::{HEADER_BYTES_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, body};
use super::dispatch::Service;
use super::executor::Tracked;
use super::metrics::Running;
use super::replies::Replies;
use super::{Caller, Router};
use crate::server::connection_counts::Refusal;
use crate::server::connection_limiter::{ConnectionLimiter, ConnectionPermit, LIMITS};
use api::access::Identity;

/// How long running calls may go on after the server was told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// The most connections at one time; more wait until one ends.
pub(super) const CONNECTIONS_MAX: usize = 4_096;

/// The most calls at one time on one connection; more wait at the caller.
const STREAMS_MAX: u32 = 512;

/// As [`STREAMS_MAX`], for callers without a certificate, who get nothing but pages.
const STRANGER_STREAMS_MAX: u32 = 32;

/// How long a caller may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the first request of a connection, and the headers of any, may take to come. A caller
/// without a certificate has to ask for something as often.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a caller may take nothing more of a reply that waits for it. A sub may be told to fetch
/// at a kilobyte a second, and takes a megabyte ahead.
const REPLY_STALL_MAX: Duration = Duration::from_secs(900);

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
pub async fn serve<S>(listener: TcpListener, router: Router<S>, stop: CancellationToken) {
    let server = Server::new(router, stop.clone());
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let is_insecure = server.service.routes.security.is_insecure();
    let limiter = (!is_insecure).then(|| Arc::new(ConnectionLimiter::new(LIMITS)));
    let (security, keeping) = (server.service.routes.security.clone(), stop.clone());
    server.tracker.spawn(async move { security.keep(keeping).await });
    loop {
        let accepted = stop.run_until_cancelled(next(&listener, &places)).await;
        let Some((accepted, place)) = accepted else { break };
        match accepted {
            Ok((stream, address)) => {
                match limiter.as_ref().map(|limiter| limiter.enter(address.ip())).transpose() {
                    Ok(permit) => {
                        server.start_connection(stream, address, place, server.cut(), permit);
                    }
                    Err(refusal) => server.service.refuse(limiter.as_deref(), address, refusal),
                }
            }
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
    pub fn new<S>(router: Router<S>, stop: CancellationToken) -> Self {
        let service = Arc::new(Service::new(router.routes));
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
        self.start_connection(stream, address, place, cut, None);
    }

    fn start_connection(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        place: OwnedSemaphorePermit,
        cut: CancellationToken,
        permit: Option<ConnectionPermit>,
    ) {
        let serve = Serve {
            service: Arc::clone(&self.service),
            tracked: Tracked { tracker: self.tracker.clone(), stop: cut },
            stop: self.stop.clone(),
            _place: place,
            permit,
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
    /// Given back when the connection ends.
    _place: OwnedSemaphorePermit,
    permit: Option<ConnectionPermit>,
}

/// What happens on one connection.
#[derive(Default)]
struct Activity {
    /// Requests since its beginning.
    asked: AtomicU64,
    /// Those that are not answered yet.
    running: AtomicUsize,
    replies: Arc<Replies>,
}

/// A request of a connection that is not answered yet.
struct Asking(Arc<Activity>);

impl Asking {
    fn on(activity: &Arc<Activity>) -> Self {
        activity.asked.fetch_add(1, Ordering::Relaxed);
        activity.running.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Serve {
    async fn connection(mut self, stream: TcpStream, address: SocketAddr) {
        let service = Arc::clone(&self.service);
        let metrics = &service.routes.metrics;
        metrics.accepted.inc();
        let _counted = Running::of(&metrics.connections);
        // Tasks of the connection end with it, however it ends.
        let _end = self.tracked.stop.clone().drop_guard();
        let accepted = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.accept(stream));
        // Boxed, because it needs its room for a moment only.
        let (stream, local, session) = match Box::pin(accepted).await {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => {
                tracing::debug!(%address, "no handshake: {error}");
                return self.refuse(address, Refusal::Handshake);
            }
            Err(_) => return self.refuse(address, Refusal::Slow),
        };
        let is_insecure = service.routes.security.is_insecure();
        let until = session.as_ref().map(PeerSession::until);
        let identity = match &session {
            Some(session) => session.identity(),
            None if is_insecure => Arc::new(Identity::insecure()),
            None => Arc::new(Identity::default()),
        };
        let is_stranger = !is_insecure && session.is_none();
        let settled = self.permit.as_mut().map(|permit| permit.settle(identity.user.as_deref()));
        if let Err(refusal) = settled.transpose() {
            return self.refuse(address, refusal);
        }
        let activity = Arc::new(Activity::default());
        let handler = {
            let (activity, service) = (Arc::clone(&activity), Arc::clone(&self.service));
            service_fn(move |request| {
                let asking = Asking::on(&activity);
                let unpacks = body::takes_packed(request.headers());
                let identity = match until {
                    Some(until) if until.is_over() => Arc::new(Identity::default()),
                    _ => Arc::clone(&identity),
                };
                let caller = Caller { address, local, unpacks, identity };
                let service = Arc::clone(&service);
                async move {
                    let response = Arc::clone(&service).answer(caller.clone(), request).await;
                    let replies = &asking.0.replies;
                    Ok::<_, Infallible>(service.send(response, &caller, replies, is_stranger))
                }
            })
        };
        let lost = async {
            match session {
                Some(session) => session.lost().await,
                None => std::future::pending().await,
            }
        };
        let mut lost = std::pin::pin!(lost);
        let streams_max = if is_stranger { STRANGER_STREAMS_MAX } else { STREAMS_MAX };
        let builder = builder(self.tracked.clone(), streams_max);
        let connection = builder.serve_connection(TokioIo::new(stream), handler);
        let mut connection = std::pin::pin!(connection);
        let mut stopping = false;
        let mut ticks = tokio::time::interval_at(Instant::now() + HEADER_TIMEOUT, HEADER_TIMEOUT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut seen = 0;
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
                _ = ticks.tick() => {
                    let asked = activity.asked.load(Ordering::Relaxed);
                    if let Some(why) = activity.fault(asked, asked == seen, is_stranger) {
                        tracing::debug!(%address, "connection cut: {why}");
                        metrics.cut.inc();
                        return;
                    }
                    seen = asked;
                }
            }
        };
        if let Err(error) = result {
            tracing::debug!(%address, "connection ended: {error}");
        }
    }

    /// Ends a connection whose caller is not let in.
    fn refuse(self, address: SocketAddr, refusal: Refusal) {
        let limiter = self.permit.as_ref().map(|permit| {
            if matches!(refusal, Refusal::Handshake | Refusal::Slow) {
                permit.failed();
            }
            permit.limiter()
        });
        self.service.refuse(limiter, address, refusal);
    }

    /// Prepares the stream of bytes of a caller; tells at which address it came in, and how the
    /// caller stands if it has shown a certificate.
    async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(Bytestream, SocketAddr, Option<PeerSession>)> {
        super::super::socket::prepare(&stream)?;
        let local = stream.local_addr()?;
        match &self.service.routes.security {
            Security::Insecure => Ok((Either::Left(stream), local, None)),
            Security::Tls(config) => {
                let (stream, session) = config.accept(stream).await?;
                Ok((Either::Right(Box::new(stream)), local, session))
            }
        }
    }
}

impl Activity {
    /// Why the connection is not worth its place, if it is not. Nothing was asked for since it was
    /// looked at last if it `is_idle`.
    fn fault(&self, asked: u64, is_idle: bool, is_stranger: bool) -> Option<&'static str> {
        if asked == 0 {
            return Some("no request came");
        }
        if self.replies.longest() > REPLY_STALL_MAX {
            return Some("a reply is not read");
        }
        let is_busy = self.running.load(Ordering::Relaxed) > 0 || self.replies.are_open();
        (is_stranger && is_idle && !is_busy).then_some("nothing is asked for")
    }
}

fn builder(tracked: Tracked, streams_max: u32) -> auto::Builder<Tracked> {
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
        .max_concurrent_streams(streams_max)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(super::super::FRAME_BYTES_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(HEADER_BYTES_MAX);
    builder
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn connections_of_which_nothing_comes_are_not_worth_their_places() {
        let activity = Arc::new(Activity::default());
        let fault = |is_idle, is_stranger| {
            let asked = activity.asked.load(Ordering::Relaxed);
            activity.fault(asked, is_idle, is_stranger)
        };
        assert_eq!([fault(true, false), fault(true, true)], [Some("no request came"); 2]);
        let asking = Asking::on(&activity);
        assert_eq!([fault(true, false), fault(true, true)], [None; 2]);
        drop(asking);
        assert_eq!([fault(false, true), fault(true, false)], [None; 2]);
        assert_eq!(fault(true, true), Some("nothing is asked for"));
        let mut reply = activity.replies.watch(body::full(vec![7; 200 << 10]), 0, None);
        assert_eq!(fault(true, true), None);
        http_body_util::BodyExt::frame(&mut reply).await.unwrap().unwrap();
        tokio::time::advance(REPLY_STALL_MAX).await;
        assert_eq!(fault(false, false), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!([fault(true, true), fault(false, false)], [Some("a reply is not read"); 2]);
    }
}
