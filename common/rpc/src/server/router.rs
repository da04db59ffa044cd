//! The methods and pages of a daemon, with their handlers.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::Stream;
use prometheus_client::registry::Registry;

use super::audit::{self, Recorder};
use super::caller::Caller;
use super::form::FormTokens;
use super::metrics::Metrics;
use super::page::{Page, PageRequest, PostRequest, Query};
use super::server_limits::ServerLimits;
use crate::audit_log::{AuditCollector, AuditLog};
use crate::body::{Body, streamed};
use crate::object_reader::ObjectReader;
use crate::page_frame::Frame;
use crate::tls::Security;
use api::access::Access;
use api::codec::{self, Encoding};
use api::fault::{Fault, FaultCode};
use api::method::{Effect, Method};

/// The future of a handler.
pub(super) type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Fault>> + Send>>;

pub(super) type Unary = Arc<dyn Fn(Caller, Encoding, Bytes) -> Answer<Vec<u8>> + Send + Sync>;
pub(super) type Upload =
    Arc<dyn Fn(Caller, Encoding, ObjectReader) -> Answer<Vec<u8>> + Send + Sync>;
pub(super) type Download = Arc<dyn Fn(Caller, Encoding, Bytes) -> Answer<Body> + Send + Sync>;
pub(super) type ReadForm = Arc<dyn Fn(&Query) -> Result<FormCall, Fault> + Send + Sync>;
pub(super) type PostHandler = Arc<dyn Fn(PostRequest) -> Answer<Page> + Send + Sync>;
pub(super) type PageHandler = Arc<dyn Fn(PageRequest) -> Answer<Page> + Send + Sync>;

/// The handler of a method.
#[derive(Clone)]
pub(super) enum Kind {
    Unary(Unary),
    Upload(Upload),
    Download(Download),
}

/// A method with its handler.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) name: &'static str,
    pub(super) effect: Effect,
    /// The rule that the server checks before the handler, which checks owners itself.
    pub(super) access: Access,
    pub(super) request_bytes_max: usize,
    pub(super) kind: Kind,
}

/// A form that calls a method.
#[derive(Clone)]
pub(super) struct Form {
    pub(super) method: &'static str,
    /// True if its fields prove who sends it. Then it needs no certificate, and may be sent
    /// although pages are private.
    pub(super) has_proof: bool,
    pub(super) read: ReadForm,
}

/// What a form with a proof calls: the request, the path of the page that follows, and the user.
pub type Proven<M> = (<M as Method>::Request, String, String);

/// The call of a form.
pub(super) struct FormCall {
    /// The request as JSON.
    pub(super) request: Vec<u8>,
    /// The path of the page that follows.
    pub(super) next: String,
    /// Who sends it, if its fields prove that.
    pub(super) user: Option<String>,
}

/// A path that takes bodies of any kind.
#[derive(Clone)]
pub(super) struct Post {
    pub(super) bytes_max: usize,
    pub(super) handler: PostHandler,
}

/// The methods and pages of a server.
pub(super) struct Routes {
    pub(super) security: Security,
    pub(super) frame: Frame,
    pub(super) methods: BTreeMap<&'static str, Entry>,
    pub(super) pages: BTreeMap<&'static str, PageHandler>,
    pub(super) posts: BTreeMap<&'static str, Post>,
    pub(super) forms: BTreeMap<&'static str, Form>,
    pub(super) form_tokens: FormTokens,
    pub(super) metrics: Metrics,
    pub(super) recorder: Recorder,
    pub(super) private_pages: bool,
    pub(super) limits: ServerLimits,
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
    pub(super) routes: Routes,
}

impl<S> std::fmt::Debug for Router<S> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Router")
            .field("methods", &self.routes.methods.keys())
            .field("pages", &self.routes.pages.keys())
            .finish_non_exhaustive()
    }
}

impl Router {
    /// Returns a router of `daemon` that answers only `/healthz` and `/metrics`, over connections
    /// that are protected by `security`.
    pub fn new(daemon: &'static str, security: &Security) -> Self {
        let routes = Routes {
            security: security.clone(),
            frame: Frame::new(daemon, security),
            methods: BTreeMap::new(),
            pages: BTreeMap::new(),
            posts: BTreeMap::new(),
            forms: BTreeMap::new(),
            form_tokens: FormTokens::new(),
            metrics: Metrics::new(daemon, security),
            recorder: Recorder::default(),
            private_pages: false,
            limits: ServerLimits::SERVER,
        };
        Self { state: (), routes }
    }
}

impl<S: Clone + Send + Sync + 'static> Router<S> {
    /// Passes `state` to the handlers that are added after this.
    pub fn with_state<T>(self, state: T) -> Router<T> {
        Router { state, routes: self.routes }
    }

    /// Uses `frame` for error pages.
    pub fn frame(mut self, frame: Frame) -> Self {
        self.routes.frame = frame;
        self
    }

    /// Limits how much of the process callers may use; [`ServerLimits::SERVER`] if not called.
    pub fn limits(mut self, limits: ServerLimits) -> Self {
        self.routes.limits = limits;
        self
    }

    /// Shows pages and metrics only to callers with a certificate, if `is_private`.
    pub fn private_pages(mut self, is_private: bool) -> Self {
        self.routes.private_pages = is_private;
        self
    }

    /// Adds metrics of the daemon; the prefix `dominator_` is added to their names.
    pub fn metrics(mut self, add: impl FnOnce(&mut Registry)) -> Self {
        add(self.routes.metrics.registry());
        self
    }

    /// Records every call that changes something in `log`, and adds the page `/audit`. Methods may
    /// be added before or after this.
    pub fn audit(mut self, log: &AuditLog) -> Self {
        if !self.routes.recorder.set(log) {
            tracing::error!("a server has two audit logs: only the first is written");
            return self;
        }
        self.routes.metrics.registry().register_collector(Box::new(AuditCollector(log.clone())));
        let (frame, log) = (self.routes.frame.clone(), log.clone());
        let handler: PageHandler = Arc::new(move |_| {
            let html = frame.render("Audit log", &audit::page(log.status().as_ref()));
            Box::pin(async move { Ok(Page::Html(html)) })
        });
        self.routes.pages.insert("/audit", handler);
        self
    }

    /// Answers `M` with `handler`. Callers need the power if the rule of `M` says so.
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

    /// Answers `M`, which owners may call, with `handler`. The handler gets every caller with the
    /// power and every one that may be an owner, and must check whether it is one
    /// ([`api::access::authorize`]).
    pub fn method_of_owners<M, Fut>(
        self,
        handler: impl Fn(S, Caller, M::Request) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        M: Method,
        Fut: Future<Output = Result<M::Reply, Fault>> + Send + 'static,
    {
        let kind = self.unary::<M, Fut>(handler);
        self.add::<M>(Access::PowerOrOwner, kind)
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

    /// Answers `M`, whose reply is an object stream, with `handler`. A stream that returns an error
    /// is truncated, which its reader notices.
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

    /// Answers GET of exactly `path`. A path that ends with `/`, other than `/` itself, stands for
    /// every path below it; [`PageRequest::below`] is what follows.
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

    /// Answers POST of a form to exactly `path`: calls `M`, which must be added too, with what
    /// `read` makes of the fields, and then shows the page of the path that `read` returns. The
    /// form must have the field [`TOKEN_FIELD`](super::TOKEN_FIELD).
    pub fn form<M: Method>(
        mut self,
        path: &'static str,
        read: impl Fn(&Query) -> Result<(M::Request, String), Fault> + Send + Sync + 'static,
    ) -> Self {
        let read = Arc::new(move |fields: &Query| {
            let (request, next) = read(fields)?;
            Ok(FormCall { request: encode_request::<M>(&request)?, next, user: None })
        });
        self.routes.forms.insert(path, Form { method: M::NAME, has_proof: false, read });
        self
    }

    /// As [`Router::form`], of a form whose fields prove who sends it: no certificate is needed.
    /// `read` checks them against the state, and returns the user too. A page at the same path is
    /// shown to all, even if pages are private.
    pub fn form_with_proof<M: Method>(
        mut self,
        path: &'static str,
        read: impl Fn(&S, &Query) -> Result<Proven<M>, Fault> + Send + Sync + 'static,
    ) -> Self
    where
        S: Sync,
    {
        let state = self.state.clone();
        let read = Arc::new(move |fields: &Query| {
            let (request, next, user) = read(&state, fields)?;
            Ok(FormCall { request: encode_request::<M>(&request)?, next, user: Some(user) })
        });
        self.routes.forms.insert(path, Form { method: M::NAME, has_proof: true, read });
        self
    }

    /// Answers POST of at most `bytes_max` bytes to what is below `path`, which ends with `/`. Any
    /// caller may send it, even if pages are private: the handler must check what proves who did.
    pub fn post<Fut>(
        mut self,
        path: &'static str,
        bytes_max: usize,
        handler: impl Fn(S, PostRequest) -> Fut + Send + Sync + 'static,
    ) -> Self
    where
        Fut: Future<Output = Result<Page, Fault>> + Send + 'static,
    {
        let state = self.state.clone();
        let handler: PostHandler =
            Arc::new(move |request| Box::pin(handler(state.clone(), request)));
        self.routes.posts.insert(path, Post { bytes_max, handler });
        self
    }

    fn add<M: Method>(mut self, access: Access, kind: Kind) -> Self {
        let request_bytes_max = M::REQUEST_BYTES_MAX;
        let entry = Entry { name: M::NAME, effect: M::EFFECT, access, request_bytes_max, kind };
        self.routes.methods.insert(M::NAME, entry);
        self
    }
}

/// Decodes a request. An empty JSON body means `null`, so that curl needs no body for methods
/// without a request.
fn decode_request<M: Method>(encoding: Encoding, bytes: &[u8]) -> Result<M::Request, Fault> {
    let bytes = if bytes.is_empty() && encoding == Encoding::Json { b"null" } else { bytes };
    codec::decode(encoding, "request", bytes, M::REQUEST_BYTES_MAX)
        .map_err(|error| Fault::new(FaultCode::BadRequest, format!("{}: {error}", M::NAME)))
}

fn encode_request<M: Method>(request: &M::Request) -> Result<Vec<u8>, Fault> {
    codec::encode(Encoding::Json, "request", request)
        .map_err(|error| Fault::new(FaultCode::Internal, format!("{}: {error}", M::NAME)))
}

fn encode_reply<M: Method>(encoding: Encoding, reply: &M::Reply) -> Result<Vec<u8>, Fault> {
    let bytes = codec::encode(encoding, "reply", reply)
        .map_err(|error| Fault::new(FaultCode::Internal, format!("{}: {error}", M::NAME)))?;
    // The limit does not apply to JSON, which is longer and for people.
    if encoding == Encoding::Bincode && bytes.len() > M::REPLY_BYTES_MAX {
        let (length, limit) = (bytes.len(), M::REPLY_BYTES_MAX);
        let text = format!("{}: the reply has {length} bytes, {limit} are allowed", M::NAME);
        return Err(Fault::new(FaultCode::Internal, text));
    }
    Ok(bytes)
}
