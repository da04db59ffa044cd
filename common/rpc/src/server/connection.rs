//! One connection of a server: its handshake, its requests, and when it is closed.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::caller::Caller;
use super::connection_counts::Refusal;
use super::connection_limiter::ConnectionPermit;
use super::dispatch::Service;
use super::metrics::Running;
use super::replies::Replies;
use crate::tls::{CallerProof, PeerSession, Security};
use crate::{HEADER_BYTES_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, body};
use api::access::Identity;

/// The most calls at one time on one connection of a caller without a certificate, who can only
/// read pages.
const ANONYMOUS_STREAMS_MAX: u32 = 32;

/// The longest handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest wait for the first request of a connection, and for the headers of any request.
/// Callers without a certificate must send a request in each such period.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a caller may read nothing of a waiting reply. A sub may be limited to a kilobyte a
/// second, and buffers a megabyte.
const REPLY_STALL_MAX: Duration = Duration::from_secs(900);

/// The flow-control window of one call, in bytes.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The flow-control window of a connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// The most bytes of a reply that are buffered for a slow caller, for each stream.
const SEND_BUFFER_BYTES: usize = 64 << 10;

/// The byte stream of a caller, plain or from TLS.
type Bytestream = Either<TcpStream, Box<tokio_rustls::server::TlsStream<TcpStream>>>;

/// A connection that was accepted.
pub(super) struct Connection {
    pub(super) service: Arc<Service>,
    pub(super) tracked: Tracked,
    pub(super) stop: CancellationToken,
    pub(super) place: Place,
    pub(super) permit: Option<ConnectionPermit>,
}

/// The place of a connection among those that may be open.
pub(super) enum Place {
    /// Returned when the connection ends.
    Taken { _permit: OwnedSemaphorePermit },
    /// It takes one when its handshake has ended.
    TakenLater(Arc<Semaphore>),
}

/// The requests and replies of one connection.
#[derive(Default)]
struct Activity {
    /// How many requests were received.
    requests: AtomicU64,
    /// Notified of the first of them.
    first_request: Notify,
    /// How many of them are not answered yet.
    running: AtomicUsize,
    replies: Arc<Replies>,
}

/// Counts a request as running until it is dropped.
struct RunningRequest(Arc<Activity>);

impl RunningRequest {
    fn start(activity: &Arc<Activity>) -> Self {
        if activity.requests.fetch_add(1, Ordering::Relaxed) == 0 {
            activity.first_request.notify_one();
        }
        activity.running.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    /// Answers on `stream`, which comes from `address`, until one side ends the connection.
    pub(super) async fn run(mut self, stream: TcpStream, address: SocketAddr) {
        let service = Arc::clone(&self.service);
        service.routes.metrics.accepted.inc();
        let _counted = Running::of(&service.routes.metrics.connections);
        // Tasks of the connection end with it, however it ends.
        let _end = self.tracked.stop.clone().drop_guard();
        let accepted = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.accept(stream));
        let gives_way = async {
            match &self.permit {
                Some(permit) => permit.gives_way().await,
                None => std::future::pending().await,
            }
        };
        // Boxed, because the handshake needs its memory for a moment only.
        let accepted = tokio::select! {
            accepted = Box::pin(accepted) => accepted.map_err(|_| Refusal::Slow),
            () = gives_way => Err(Refusal::Arriving),
        };
        let (stream, local, session, place) = match accepted {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) => {
                tracing::debug!(%address, "handshake failed: {error}");
                return self.refuse(address, Refusal::Handshake);
            }
            Err(refusal) => return self.refuse(address, refusal),
        };
        let is_insecure = service.routes.security.is_insecure();
        let identity = match &session {
            Some(session) => session.identity(),
            None if is_insecure => Arc::new(Identity::unrestricted()),
            None => Arc::new(Identity::default()),
        };
        let user = identity.in_words();
        let settled = self.permit.as_mut().map(|permit| permit.settle(user.as_deref()));
        if let Err(refusal) = settled.transpose() {
            return self.refuse(address, refusal);
        }
        let is_anonymous = !is_insecure && session.is_none();
        let proof = session.as_ref().map(PeerSession::proof);
        let caller = Caller { address, local, unpacks: false, identity, proof };
        self.serve(stream, session, caller, is_anonymous).await;
        drop(place);
    }

    /// Answers the requests of `caller`.
    async fn serve(
        self,
        stream: Bytestream,
        session: Option<PeerSession>,
        caller: Caller,
        is_anonymous: bool,
    ) {
        let (service, address) = (Arc::clone(&self.service), caller.address);
        let activity = Arc::new(Activity::default());
        let valid_until = session.as_ref().map(PeerSession::until);
        let handler = {
            let activity = Arc::clone(&activity);
            service_fn(move |request| {
                let running = RunningRequest::start(&activity);
                let unpacks = body::takes_packed(request.headers());
                let identity = match valid_until {
                    Some(until) if until.is_over() => Arc::new(Identity::default()),
                    _ => Arc::clone(&caller.identity),
                };
                let proof = caller.proof.clone();
                let caller = Caller { unpacks, identity, proof, ..caller };
                let service = Arc::clone(&service);
                async move {
                    let response = Arc::clone(&service).answer(caller.clone(), request).await;
                    let replies = &running.0.replies;
                    Ok::<_, Infallible>(service.send(response, &caller, replies, is_anonymous))
                }
            })
        };
        let proof = session.as_ref().map(PeerSession::proof);
        let mut replaced = std::pin::pin!(self.is_replaced(proof.as_deref(), &activity));
        let mut lost = std::pin::pin!(PeerSession::lost(session.map(Box::new)));
        let streams_max = match self.service.routes.limits.streams {
            streams if is_anonymous => streams.min(ANONYMOUS_STREAMS_MAX),
            streams => streams,
        };
        let builder = builder(self.tracked.clone(), streams_max);
        let connection = builder.serve_connection(TokioIo::new(stream), handler);
        let mut connection = std::pin::pin!(connection);
        let mut stopping = false;
        let mut ticks = tokio::time::interval_at(Instant::now() + HEADER_TIMEOUT, HEADER_TIMEOUT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut requests_before = 0;
        let result = loop {
            tokio::select! {
                result = connection.as_mut() => break result,
                why = lost.as_mut() => return tracing::info!(%address, "connection closed: {why}"),
                () = async { tokio::select! {
                    () = self.stop.cancelled() => {}
                    () = replaced.as_mut() => {}
                } }, if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
                _ = ticks.tick() => {
                    let requests = activity.requests.load(Ordering::Relaxed);
                    let is_idle = requests == requests_before;
                    if let Some(why) = activity.fault(requests, is_idle, is_anonymous) {
                        self.service.routes.metrics.cut.inc();
                        return tracing::debug!(%address, "connection closed: {why}");
                    }
                    requests_before = requests;
                }
            }
        };
        if let Err(error) = result {
            tracing::debug!(%address, "connection ended: {error}");
        }
    }

    /// Waits until the program uses other files than this connection was made with, and it has had
    /// a request: before that, hyper would cut the connection, and the request with it.
    async fn is_replaced(&self, proof: Option<&CallerProof>, activity: &Activity) {
        self.service.routes.security.replaced(proof).await;
        activity.first_request.notified().await;
    }

    /// Ends a connection that is refused.
    fn refuse(self, address: SocketAddr, refusal: Refusal) {
        let limiter = self.permit.as_ref().map(|permit| {
            if matches!(refusal, Refusal::Handshake | Refusal::Slow) {
                permit.failed();
            }
            permit.limiter()
        });
        self.service.refuse(limiter, address, refusal);
    }

    /// Makes the handshake and waits for a place. Returns the byte stream, the local address, the
    /// session of a caller with a certificate, and the place.
    async fn accept(
        &self,
        stream: TcpStream,
    ) -> io::Result<(Bytestream, SocketAddr, Option<PeerSession>, Option<OwnedSemaphorePermit>)>
    {
        crate::socket::prepare(&stream)?;
        let local = stream.local_addr()?;
        let (stream, session) = match &self.service.routes.security {
            Security::Insecure => (Either::Left(stream), None),
            Security::Tls(config) => {
                let (stream, session) = config.accept(stream).await?;
                (Either::Right(Box::new(stream)), session)
            }
        };
        let place = match &self.place {
            Place::Taken { .. } => None,
            Place::TakenLater(places) => Arc::clone(places).acquire_owned().await.ok(),
        };
        Ok((stream, local, session, place))
    }
}

impl Activity {
    /// Returns why the connection should be closed, if so. `is_idle` is true if no request came
    /// since the last check.
    fn fault(&self, requests: u64, is_idle: bool, is_anonymous: bool) -> Option<&'static str> {
        if requests == 0 {
            return Some("no request came");
        }
        if self.replies.longest() > REPLY_STALL_MAX {
            return Some("a reply is not read");
        }
        let is_busy = self.running.load(Ordering::Relaxed) > 0 || self.replies.are_open();
        (is_anonymous && is_idle && !is_busy).then_some("nothing is asked for")
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
        .max_frame_size(crate::FRAME_BYTES_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(HEADER_BYTES_MAX);
    builder
}

/// Spawns tasks that end when `stop` is cancelled.
#[derive(Clone)]
pub(super) struct Tracked {
    /// Tracks the running tasks.
    pub(super) tracker: TaskTracker,
    /// Ends the tasks.
    pub(super) stop: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Tracked
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let stop = self.stop.clone();
        // Boxed, because hyper's futures take kilobytes, and each layer around one would reserve
        // that.
        let future = Box::pin(future);
        self.tracker.spawn(async move { stop.run_until_cancelled_owned(future).await.map(drop) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn connections_of_which_nothing_comes_are_not_worth_their_places() {
        let activity = Arc::new(Activity::default());
        let fault = |is_idle, is_anonymous| {
            let requests = activity.requests.load(Ordering::Relaxed);
            activity.fault(requests, is_idle, is_anonymous)
        };
        assert_eq!([fault(true, false), fault(true, true)], [Some("no request came"); 2]);
        let running = RunningRequest::start(&activity);
        assert_eq!([fault(true, false), fault(true, true)], [None; 2]);
        drop(running);
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
