//! Answers calls and pages.
//!
//! A daemon makes one [`Router`], with a handler for each method and page, and gives it to
//! [`serve`]. HTTP/1.1 and HTTP/2 (by prior knowledge) are spoken on the same port. `/healthz`
//! and `/metrics` are there without being asked for.
//!
//! # Invariants
//!
//! * No length that a peer claims is allocated for before it was held against a limit.
//! * A handler that panics fails its call only.
//! * No peer takes all connections, and none holds memory by reading nothing of what it asked for.
//! * A call whose caller goes away is dropped where it waits. A handler that must finish what it
//!   began runs that as a task of its own.

mod audit;
mod connection_counts;
mod connection_limiter;
mod dispatch;
mod executor;
mod listen;
mod metrics;
mod page;
mod range;
mod replies;
mod shares;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::Stream;
use prometheus_client::registry::Registry;

pub use super::object_reader::{ObjectReader, StreamError, head_bytes, object_chunks};
pub use listen::{SHUTDOWN_GRACE, Server, serve};
pub use page::{Content, Page, PageBody, PageRequest, Query};
pub use range::ByteRange;
pub use shares::{Share, Shares};

use super::body::{Body, streamed};
use super::tls::Security;
use crate::audit_log::AuditLog;
use crate::page_frame::Frame;
use api::access::{Access, Identity};
use api::codec::{self, Encoding};
use api::fault::{Fault, FaultCode};
use api::method::{Effect, Method};
use audit::Recorder;
use metrics::Metrics;

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Where the connection comes from.
    pub address: SocketAddr,
    /// Where it came in: one of the addresses that this server listens on.
    pub local: SocketAddr,
    /// True if packed content may be sent ([`super::packing`]).
    pub unpacks: bool,
    /// Who it is, and what they may do.
    pub identity: Arc<Identity>,
}

impl std::fmt::Display for Caller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.identity.user {
            Some(user) => write!(formatter, "{user} ({})", self.address),
            None => write!(formatter, "{}", self.address),
        }
    }
}

impl Caller {
    /// Who it is, for records: the user, or where the call came from.
    #[must_use]
    pub fn name(&self) -> String {
        self.identity.user.clone().unwrap_or_else(|| self.address.ip().to_string())
    }

    /// Who it is: the user, or else who it claims to be.
    #[must_use]
    pub fn named(&self, claimed: String) -> String {
        self.identity.user.clone().unwrap_or(claimed)
    }
}

/// What a handler gives back, sooner or later.
type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Fault>> + Send>>;

type Unary = Arc<dyn Fn(Caller, Encoding, Bytes) -> Answer<Vec<u8>> + Send + Sync>;
type Upload = Arc<dyn Fn(Caller, Encoding, ObjectReader) -> Answer<Vec<u8>> + Send + Sync>;
type Download = Arc<dyn Fn(Caller, Encoding, Bytes) -> Answer<Body> + Send + Sync>;
type PageHandler = Arc<dyn Fn(PageRequest) -> Answer<Page> + Send + Sync>;

/// How a method is answered.
#[derive(Clone)]
enum Kind {
    Unary(Unary),
    Upload(Upload),
    Download(Download),
}

/// A method that is answered.
#[derive(Clone)]
struct Entry {
    name: &'static str,
    effect: Effect,
    /// Whom the server lets through to the handler.
    access: Access,
    request_bytes_max: usize,
    kind: Kind,
}

/// Everything that a server answers.
pub(crate) struct Routes {
    security: Security,
    frame: Frame,
    methods: BTreeMap<&'static str, Entry>,
    pages: BTreeMap<&'static str, PageHandler>,
    below: BTreeMap<&'static str, PageHandler>,
    metrics: Metrics,
    recorder: Recorder,
    private_pages: bool,
}

/// Collects the methods and pages of a daemon. Each handler is given a clone of the state `S`.
///
/// ```text
/// Router::new("subd", security)
///     .with_state(service)
///     .method::<Poll, _>(poll)
///     .page("/", status_page)
///
/// async fn poll(service: Arc<Service>, caller: Caller, request: PollRequest) -> Result<..>
/// async fn status_page(service: Arc<Service>, request: PageRequest) -> Result<Page, Fault>
/// ```
pub struct Router<S = ()> {
    state: S,
    routes: Routes,
}

impl<S> std::fmt::Debug for Router<S> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Router")
            .field("methods", &self.routes.methods.keys())
            .field("pages", &self.routes.pages.keys())
            .field("below", &self.routes.below.keys())
            .finish_non_exhaustive()
    }
}

impl Router {
    /// A server for `daemon` that answers nothing but `/healthz` and `/metrics`, over connections
    /// that are protected by `security`.
    pub fn new(daemon: &'static str, security: &Security) -> Self {
        let routes = Routes {
            security: security.clone(),
            frame: Frame::new(daemon, security),
            methods: BTreeMap::new(),
            pages: BTreeMap::new(),
            below: BTreeMap::new(),
            metrics: Metrics::new(daemon, security),
            recorder: Recorder::default(),
            private_pages: false,
        };
        Self { state: (), routes }
    }
}

impl<S: Clone + Send + Sync + 'static> Router<S> {
    /// Gives `state` to the handlers that are added from here on.
    pub fn with_state<T>(self, state: T) -> Router<T> {
        Router { state, routes: self.routes }
    }

    /// Puts error pages into `frame`.
    pub fn frame(mut self, frame: Frame) -> Self {
        self.routes.frame = frame;
        self
    }

    /// Shows pages and metrics only to callers with a certificate, if `is_private`.
    pub fn private_pages(mut self, is_private: bool) -> Self {
        self.routes.private_pages = is_private;
        self
    }

    /// Lets the daemon add metrics of its own; their names begin with `dominator_` by themselves.
    pub fn metrics(mut self, add: impl FnOnce(&mut Registry)) -> Self {
        add(self.routes.metrics.registry());
        self
    }

    /// Records every call that changes something in `log`, and shows at `/audit` how that is doing.
    /// It does not matter whether methods are added before or after this.
    pub fn audit(mut self, log: &AuditLog) -> Self {
        audit::attach(&mut self.routes, log);
        self
    }

    /// Answers `M` with `handler`, for callers with the power where the rule of `M` asks for it.
    pub fn method<M, Fut>(
        self,
        handler: impl Fn(S, Caller, M::Request) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        M: Method,
        Fut: Future<Output = Result<M::Reply, Fault>> + Send + 'static,
    {
        let strict = match M::ACCESS {
            Access::PowerOrOwner => Access::Power,
            access => access,
        };
        let kind = self.unary::<M, Fut>(handler);
        self.add::<M>(strict, kind)
    }

    /// Answers `M`, which owners may call, with `handler`, which must find out whether the caller
    /// is one ([`api::access::judge`]); it is asked for every caller with a certificate.
    pub fn method_of_owners<M, Fut>(
        self,
        handler: impl Fn(S, Caller, M::Request) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        M: Method,
        Fut: Future<Output = Result<M::Reply, Fault>> + Send + 'static,
    {
        let kind = self.unary::<M, Fut>(handler);
        self.add::<M>(Access::Authenticated, kind)
    }

    fn unary<M, Fut>(
        &self,
        handler: impl Fn(S, Caller, M::Request) -> Fut + Send + Sync + 'static,
    ) -> Kind
    where
        M: Method,
        Fut: Future<Output = Result<M::Reply, Fault>> + Send + 'static,
    {
        let (recorder, state) = (self.routes.recorder.clone(), self.state.clone());
        let handler = Arc::new(handler);
        Kind::Unary(Arc::new(move |caller, encoding, bytes| {
            let request = decode_request::<M>(encoding, &bytes);
            let (recorder, state) = (recorder.clone(), state.clone());
            let handler = Arc::clone(&handler);
            Box::pin(async move {
                let request = request?;
                let call = recorder.call::<M>(&caller, Some(&request));
                let answer = call.carried_out(move || handler(state, caller, request)).await?;
                encode_reply::<M>(encoding, &answer)
            })
        }))
    }

    /// Answers `M`, whose request is an object stream, with `handler`.
    pub fn upload<M, Fut>(
        self,
        handler: impl Fn(S, Caller, ObjectReader) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        M: Method,
        Fut: Future<Output = Result<M::Reply, Fault>> + Send + 'static,
    {
        let (recorder, state) = (self.routes.recorder.clone(), self.state.clone());
        let handler = Arc::new(handler);
        let kind = Kind::Upload(Arc::new(move |caller, encoding, reader| {
            let (recorder, state) = (recorder.clone(), state.clone());
            let handler = Arc::clone(&handler);
            Box::pin(async move {
                let call = recorder.call::<M>(&caller, None);
                let answer = call.carried_out(move || handler(state, caller, reader)).await?;
                encode_reply::<M>(encoding, &answer)
            })
        }));
        self.add::<M>(M::ACCESS, kind)
    }

    /// Answers `M`, whose reply is an object stream, with `handler`. A stream that gives an error
    /// is cut, which its reader notices.
    pub fn download<M, Fut, Objects>(
        self,
        handler: impl Fn(S, Caller, M::Request) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        M: Method,
        Fut: Future<Output = Result<Objects, Fault>> + Send + 'static,
        Objects: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        const { assert!(matches!(M::EFFECT, Effect::Tells), "downloads are not recorded") }
        let state = self.state.clone();
        let kind = Kind::Download(Arc::new(move |caller, encoding, bytes| {
            let request = decode_request::<M>(encoding, &bytes);
            let answer = request.map(|request| handler(state.clone(), caller, request));
            Box::pin(async move { Ok(streamed(answer?.await?)) })
        }));
        self.add::<M>(M::ACCESS, kind)
    }

    /// Answers GET of exactly `path`.
    pub fn page<Fut>(
        mut self,
        path: &'static str,
        handler: impl Fn(S, PageRequest) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        Fut: Future<Output = Result<Page, Fault>> + Send + 'static,
    {
        let state = self.state.clone();
        let handler = move |request| -> Answer<Page> { Box::pin(handler(state.clone(), request)) };
        self.routes.pages.insert(path, Arc::new(handler));
        self
    }

    /// Answers GET of every path that begins with `prefix`, which ends with `/`; what follows it
    /// is [`PageRequest::below`].
    pub fn pages_below<Fut>(
        mut self,
        prefix: &'static str,
        handler: impl Fn(S, PageRequest) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        Fut: Future<Output = Result<Page, Fault>> + Send + 'static,
    {
        let state = self.state.clone();
        let handler = move |request| -> Answer<Page> { Box::pin(handler(state.clone(), request)) };
        self.routes.below.insert(prefix, Arc::new(handler));
        self
    }

    fn add<M: Method>(mut self, access: Access, kind: Kind) -> Self {
        let request_bytes_max = M::REQUEST_BYTES_MAX;
        let entry = Entry { name: M::NAME, effect: M::EFFECT, access, request_bytes_max, kind };
        self.routes.methods.insert(M::NAME, entry);
        self
    }
}

/// Decodes a request. In JSON no bytes at all are `null`, so that curl needs no body for methods
/// without a request.
fn decode_request<M: Method>(encoding: Encoding, bytes: &[u8]) -> Result<M::Request, Fault> {
    let bytes = if bytes.is_empty() && encoding == Encoding::Json { b"null" } else { bytes };
    codec::decode(encoding, "request", bytes, M::REQUEST_BYTES_MAX)
        .map_err(|error| Fault::new(FaultCode::BadRequest, format!("{}: {error}", M::NAME)))
}

fn encode_reply<M: Method>(encoding: Encoding, reply: &M::Reply) -> Result<Vec<u8>, Fault> {
    let bytes = codec::encode(encoding, "reply", reply)
        .map_err(|error| Fault::new(FaultCode::Internal, format!("{}: {error}", M::NAME)))?;
    // JSON of the same reply is longer, and goes to people.
    if encoding == Encoding::Bincode && bytes.len() > M::REPLY_BYTES_MAX {
        let (length, limit) = (bytes.len(), M::REPLY_BYTES_MAX);
        let text = format!("{}: the reply has {length} bytes, {limit} are allowed", M::NAME);
        return Err(Fault::new(FaultCode::Internal, text));
    }
    Ok(bytes)
}
