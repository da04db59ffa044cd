//! Accepts connections, and ends them when the server stops.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::{Connection, Place, Tracked};
use super::connection_limiter::{ConnectionLimiter, ConnectionPermit};
use super::dispatch::Service;
use super::router::Router;

/// How long running calls may continue after the server was told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// How long to wait after a connection could not be accepted, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers on `listener` until `stop` is cancelled, then lets running calls finish, for at most
/// [`SHUTDOWN_GRACE`]. Handlers that wait long should watch the token too.
pub async fn serve<S>(listener: TcpListener, router: Router<S>, stop: CancellationToken) {
    let server = Server::new(router, stop.clone());
    let limits = server.service.routes.limits;
    let places = Arc::new(Semaphore::new(limits.connections));
    let is_insecure = server.service.routes.security.is_insecure();
    let limiter = (!is_insecure)
        .then(|| Arc::new(ConnectionLimiter::new(limits.of_connections(), limits.handshakes)));
    let (security, until) = (server.service.routes.security.clone(), stop.clone());
    server.tracker.spawn(async move { security.reload_until(until).await });
    loop {
        let accepted = match &limiter {
            // The handshakes have places of their own, and those that wait do not keep others out.
            Some(_) => {
                let place = Place::TakenLater(Arc::clone(&places));
                let accepted = stop.run_until_cancelled(listener.accept()).await;
                accepted.map(|accepted| (accepted, place))
            }
            None => stop.run_until_cancelled(next(&listener, &places)).await,
        };
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

/// Answers on connections that its owner accepts, for owners that select connections or end some
/// early. Daemons use [`serve`].
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
    /// Returns a server without connections. When `stop` is cancelled, connections end as soon as
    /// their calls are answered.
    #[must_use]
    pub fn new<S>(router: Router<S>, stop: CancellationToken) -> Self {
        let service = Arc::new(Service::new(router.routes));
        Self { service, tracker: TaskTracker::new(), abort: CancellationToken::new(), stop }
    }

    /// Returns a token that ends one connection.
    #[must_use]
    pub fn cut(&self) -> CancellationToken {
        self.abort.child_token()
    }

    /// Answers on `stream`, which comes from `address`, in separate tasks. Returns `place` when the
    /// connection ends. Cancelling `cut`, a token of [`Server::cut`], ends it at once, with all its
    /// calls.
    pub fn answer(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        place: OwnedSemaphorePermit,
        cut: CancellationToken,
    ) {
        self.start_connection(stream, address, Place::Taken { _permit: place }, cut, None);
    }

    fn start_connection(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        place: Place,
        cut: CancellationToken,
        permit: Option<ConnectionPermit>,
    ) {
        let tracked = Tracked { tracker: self.tracker.clone(), stop: cut };
        let (service, stop) = (Arc::clone(&self.service), self.stop.clone());
        let connection = Connection { service, tracked: tracked.clone(), stop, place, permit };
        hyper::rt::Executor::execute(&tracked, connection.run(stream, address));
    }

    /// Lets running calls finish, for at most [`SHUTDOWN_GRACE`], after the server was told to
    /// stop.
    pub async fn finish(self) {
        self.tracker.close();
        if tokio::time::timeout(SHUTDOWN_GRACE, self.tracker.wait()).await.is_err() {
            self.abort.cancel();
            self.tracker.wait().await;
        }
    }
}

/// Waits for a free place, then for a connection.
async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> (io::Result<(TcpStream, SocketAddr)>, Place) {
    let permit = Arc::clone(places).acquire_owned().await.expect("the semaphore is never closed");
    (listener.accept().await, Place::Taken { _permit: permit })
}
