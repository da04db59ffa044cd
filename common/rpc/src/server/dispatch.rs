//! Routes HTTP requests to handlers, and returns their replies.

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::caller::{Caller, CallerPermit, CallerPermits};
use super::change_rates::ChangeRates;
use super::connection_counts::Refusal;
use super::connection_limiter::ConnectionLimiter;
use super::metrics::content_type;
use super::page::{self, Page, PageRequest, PostRequest, html_response, set, small};
use super::range::ByteRange;
use super::replies::Replies;
use super::router::{Entry, Kind, PageHandler, Post, Routes};
use super::unstated_owners::UnstatedOwners;
use crate::body::{self, Body, ReadError};
use crate::object_reader::ObjectReader;
use crate::pace::{MESSAGE_PACE_BYTES, Pace};
use crate::packing;
use api::access::{Access, authorize};
use api::codec::{self, Encoding};
use api::fault::{Fault, FaultCode};
use api::method::Effect;
use api::{PROTOCOL, PROTOCOL_HEADER, PROTOCOL_OLDEST, object_stream};

/// The longest pause within the body of a request.
const BODY_STALL_MAX: Duration = Duration::from_secs(30);

/// Memory is counted in units of so many bytes.
const UNIT_BYTES: usize = 16 << 10;

/// The part of the memory that callers without a certificate share, as a divisor.
const ANONYMOUS_PART: usize = 12;

/// How many bytes of waiting replies of each connection are not counted.
const FREE_BYTES_MAX: usize = 64 << 10;

/// The longest accepted path, in bytes.
const PATH_BYTES_MAX: usize = 8 << 10;

/// How much of a request that is refused is read before the answer, in bytes, and for how long:
/// some callers, curl among them, lose the answer if the rest of their request is not wanted.
const REFUSED_BYTES_MAX: usize = 1 << 20;
const REFUSED_TIME_MAX: Duration = Duration::from_secs(2);

/// The name for unknown methods in metrics.
const UNKNOWN: &str = "unknown";

/// Answers requests with the handlers of its routes.
pub(super) struct Service {
    pub(super) routes: Routes,
    /// One permit for each [`UNIT_BYTES`] of requests in memory and of replies that wait to be
    /// read. Streams from disk do not count.
    memory: Arc<CallerPermits>,
    /// For one request at a time that is larger than what a caller may have of the memory.
    large: Arc<Semaphore>,
    unstated_owners: UnstatedOwners,
    /// `None`: callers may change things as often as they want.
    change_rates: Option<ChangeRates>,
}

/// What a request holds until it is answered.
pub(super) struct HeldMemory {
    _shared: Option<CallerPermit>,
    _large: Option<OwnedSemaphorePermit>,
}

/// The encodings of a call.
#[derive(Clone, Copy)]
struct CallEncoding {
    request: Encoding,
    reply: Encoding,
}

impl Service {
    pub(super) fn new(routes: Routes) -> Self {
        let all = routes.limits.memory_bytes / UNIT_BYTES;
        let change_rates = routes.limits.changes.map(ChangeRates::new);
        Self {
            routes,
            // A caller that takes its half leaves the other half.
            memory: CallerPermits::with_strangers(all, all / 2, all / ANONYMOUS_PART),
            large: Arc::new(Semaphore::new(1)),
            unstated_owners: UnstatedOwners::default(),
            change_rates,
        }
    }

    /// Counts a refused connection from `address`, and logs some of them.
    pub(super) fn refuse(
        &self,
        limiter: Option<&ConnectionLimiter>,
        address: SocketAddr,
        refusal: Refusal,
    ) {
        self.routes.metrics.refused(refusal);
        let (_, why) = refusal.label_and_text();
        if limiter.is_some_and(ConnectionLimiter::must_log) {
            tracing::warn!(%address, "connection refused: {why} (more are counted, not logged)");
        } else {
            tracing::debug!(%address, "connection refused: {why}");
        }
    }

    /// Tracks the response while it is sent, because its caller may not read it.
    pub(super) fn send(
        &self,
        response: Response<Body>,
        caller: &Caller,
        replies: &Arc<Replies>,
        is_anonymous: bool,
    ) -> Response<Body> {
        use hyper::body::Body as _;
        // A stream has no length here.
        let length = response.body().size_hint().exact().unwrap_or(0);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if replies.bytes().saturating_add(length) <= FREE_BYTES_MAX {
            return response.map(|body| replies.watch(body, length, None));
        }
        // The longest replies take half of what one caller can have, so that its calls go on.
        let count = length.div_ceil(UNIT_BYTES);
        let held = match is_anonymous {
            true => {
                let most = self.memory.each() / ANONYMOUS_PART / 2;
                self.memory.take_for_stranger(caller, count.min(most))
            }
            false => self.memory.take(caller, count.min(self.memory.each() / 2)),
        };
        match held {
            Some(held) => response.map(|body| replies.watch(body, 0, Some(held))),
            None => self.too_many_replies(&response),
        }
    }

    fn too_many_replies(&self, response: &Response<Body>) -> Response<Body> {
        let text = "too many large replies wait to be read: try again in a moment";
        let headers = response.headers();
        if !headers.contains_key(PROTOCOL_HEADER) {
            return self.error_page(StatusCode::SERVICE_UNAVAILABLE, text);
        }
        let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        let is_json = kind == Some(Encoding::Json.content_type().as_bytes());
        let encoding = if is_json { Encoding::Json } else { Encoding::Bincode };
        let mut refusal = fault_response(encoding, &Fault::new(FaultCode::Unavailable, text));
        refusal.headers_mut().insert(PROTOCOL_HEADER, PROTOCOL.into());
        refusal
    }

    /// Answers one request.
    pub(super) async fn answer(
        self: Arc<Self>,
        caller: Caller,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let mut request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        let mut response = self.routed(caller, &mut request).await;
        if response.status().is_client_error() || response.status().is_server_error() {
            read_rest(request.into_body()).await;
        }
        page::protect(&mut response);
        response
    }

    async fn routed(&self, caller: Caller, request: &mut Request<Body>) -> Response<Body> {
        let raw = request.uri().path();
        if raw.len() > PATH_BYTES_MAX {
            return self.error_page(StatusCode::URI_TOO_LONG, "The path is too long.");
        }
        if let Some(method) = raw.strip_prefix("/rpc/") {
            if request.method() != Method::POST {
                let text = "Methods are called with POST; see docs/PROTOCOL.md.";
                return self.wrong_http_method("POST", text);
            }
            if page::is_foreign(request.headers()) {
                let text = "A page of another site must not call methods here.";
                return self.error_page(StatusCode::FORBIDDEN, text);
            }
            let name = method.to_owned();
            return self.call(caller, &name, request).await;
        }
        let Some(path) = page::unescape(raw) else {
            return self.error_page(StatusCode::BAD_REQUEST, "The path has wrong escapes.");
        };
        if request.method() == Method::POST
            && let Some((path, below, post)) = self.post_handler(&path)
        {
            return self.posted(caller, path, below, post, request).await;
        }
        let form = self.routes.forms.get(path.as_str());
        let has_proof = form.is_some_and(|form| form.has_proof);
        let form = form.filter(|_| request.method() == Method::POST);
        if form.is_none() && !matches!(*request.method(), Method::GET | Method::HEAD) {
            return self.wrong_http_method("GET, HEAD", "Pages are only read, with GET or HEAD.");
        }
        let is_private = self.routes.private_pages && path != "/healthz" && !has_proof;
        if is_private && caller.identity.user.is_none() {
            let text = "This daemon shows its pages only to those who have a certificate that its \
                        authorities signed (--private-pages). Give one to the browser, to curl \
                        (--cert, --key) or to Prometheus (tls_config); `domtool cert issue` makes \
                        one.";
            return self.error_page(StatusCode::FORBIDDEN, text);
        }
        if let Some(form) = form {
            return self.submit(caller, form, request).await;
        }
        let head = request.method() == Method::HEAD;
        let mut response = self.page(caller, path, request.headers(), request.uri().query()).await;
        if head {
            *response.body_mut() = body::full(Bytes::new());
        }
        response
    }

    /// Returns what takes bodies at a path: the path that it was added for, what follows that, and
    /// the handler.
    fn post_handler(&self, path: &str) -> Option<(&'static str, String, Post)> {
        self.routes.posts.iter().find_map(|(prefix, post)| {
            let below = path.strip_prefix(prefix)?;
            Some((*prefix, below.to_owned(), post.clone()))
        })
    }

    /// Gives a body to its handler.
    async fn posted(
        &self,
        caller: Caller,
        path: &'static str,
        below: String,
        post: Post,
        request: &mut Request<Body>,
    ) -> Response<Body> {
        let running = self.routes.metrics.started(path);
        let answered = async {
            let (body, _held) =
                self.read(&caller, path, post.bytes_max, request.body_mut()).await?;
            let headers = std::mem::take(request.headers_mut());
            (post.handler)(PostRequest { below, headers, body }).await
        };
        let result = guarded(path, answered).await;
        drop(running);
        match result {
            Ok(page) => page.into_response(None),
            Err(fault) => {
                self.routes.metrics.failed(path, fault.code);
                self.fault_page(&fault)
            }
        }
    }

    async fn page(
        &self,
        caller: Caller,
        path: String,
        headers: &HeaderMap,
        query: Option<&str>,
    ) -> Response<Body> {
        let text = |name| {
            let value = headers.get(name).and_then(|value| value.to_str().ok());
            value.map(str::to_owned)
        };
        let Some((handler, below)) = self.page_handler(&path) else {
            return match path.as_str() {
                "/healthz" => Page::Text("ok\n".to_owned()).into_response(None),
                "/metrics" => {
                    let kind = content_type(text(header::ACCEPT).as_deref());
                    small(kind, self.routes.metrics.text().into_bytes())
                }
                _ => self.error_page(StatusCode::NOT_FOUND, "There is no such page."),
            };
        };
        let if_none_match = text(header::IF_NONE_MATCH);
        let page = PageRequest {
            form_token: self.routes.form_tokens.of(&caller),
            caller,
            path,
            below,
            query: page::parameters(query.unwrap_or_default()),
            range: text(header::RANGE).and_then(|value| ByteRange::parse(&value)),
            if_none_match: if_none_match.clone(),
        };
        match guarded("page", async { handler(page).await }).await {
            Ok(page) => page.into_response(if_none_match.as_deref()),
            Err(fault) => self.fault_page(&fault),
        }
    }

    fn page_handler(&self, path: &str) -> Option<(PageHandler, String)> {
        if let Some(handler) = self.routes.pages.get(path) {
            return Some((Arc::clone(handler), String::new()));
        }
        self.routes.pages.iter().rev().find_map(|(prefix, handler)| {
            let is_prefix = prefix.len() > 1 && prefix.ends_with('/');
            let below = path.strip_prefix(prefix).filter(|_| is_prefix)?;
            Some((Arc::clone(handler), below.to_owned()))
        })
    }

    async fn call(
        &self,
        caller: Caller,
        name: &str,
        request: &mut Request<Body>,
    ) -> Response<Body> {
        let entry = self.routes.methods.get(name);
        let label = entry.map_or(UNKNOWN, |entry| entry.name);
        let running = self.routes.metrics.started(label);
        let upload = entry.is_some_and(|entry| matches!(entry.kind, Kind::Upload(_)));
        let json = CallEncoding { request: Encoding::Json, reply: Encoding::Json };
        let form = form(request.headers(), upload);
        let admitted = match (&form, entry) {
            (Err(fault), _) => Err(fault.clone()),
            (Ok(form), entry) => match (version(request.headers(), *form), entry) {
                (Err(fault), _) => Err(fault),
                (Ok(()), None) => Err(self.no_method(name)),
                (Ok(()), Some(entry)) => self.admit(&caller, entry).await.map(|()| entry),
            },
        };
        let form = form.unwrap_or(json);
        let result = match admitted {
            Ok(entry) => guarded(label, self.run(caller, entry, form, request.body_mut())).await,
            Err(fault) => Err(fault),
        };
        if let Err(fault) = &result {
            self.routes.metrics.failed(label, fault.code);
            tracing::debug!(method = label, code = fault.code.name(), "{}", fault.message);
        }
        let mut response = match result {
            // A stream takes most of its time after its handler has ended.
            Ok(response) if entry.is_some_and(|entry| matches!(entry.kind, Kind::Download(_))) => {
                response.map(|body| body::keeping(body, running))
            }
            Ok(response) => response,
            Err(fault) => fault_response(form.reply, &fault),
        };
        let headers = response.headers_mut();
        headers.insert(PROTOCOL_HEADER, PROTOCOL.into());
        // Uploads may be packed.
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(packing::ENCODING));
        response
    }

    /// Refuses callers that do not need a decision by the handler.
    pub(super) async fn admit(&self, caller: &Caller, entry: &Entry) -> Result<(), Fault> {
        let identity = &caller.identity;
        // The handler knows the owners.
        let access = match entry.access {
            Access::PowerOrOwner if identity.kind.may_own() => Access::Authenticated,
            access => access,
        };
        let Err(error) = authorize(entry.name, access, identity, "", &[]) else {
            if entry.access == Access::PowerOrOwner {
                self.unstated_owners.warn_once(identity, entry.name);
            }
            // What only prevents changes, such as the brake, is never refused for that.
            let rates = self.change_rates.as_ref().filter(|_| entry.effect == Effect::Changes);
            return rates.map_or(Ok(()), |rates| rates.count(caller));
        };
        let fault = Fault::new(FaultCode::Denied, error.to_string());
        self.routes.recorder.denied(caller, entry.name, entry.effect, &fault);
        Err(fault)
    }

    async fn run(
        &self,
        caller: Caller,
        entry: &Entry,
        form: CallEncoding,
        body: &mut Body,
    ) -> Result<Response<Body>, Fault> {
        match &entry.kind {
            Kind::Upload(handler) => {
                let reader = ObjectReader::new(std::mem::take(body));
                let reply = handler(caller, form.reply, reader).await?;
                Ok(small(form.reply.content_type(), reply))
            }
            Kind::Unary(handler) => {
                let (bytes, _held) =
                    self.read(&caller, entry.name, entry.request_bytes_max, body).await?;
                let answer = handler(caller, form.request, bytes).await?;
                Ok(small(form.reply.content_type(), answer))
            }
            Kind::Download(handler) => {
                let (bytes, _held) =
                    self.read(&caller, entry.name, entry.request_bytes_max, body).await?;
                let mut response = Response::new(handler(caller, form.request, bytes).await?);
                set(&mut response, header::CONTENT_TYPE, object_stream::CONTENT_TYPE);
                Ok(response)
            }
        }
    }

    /// Reads a request of at most `limit` bytes, which is called `name`. Requests share the memory
    /// until they are answered, because their handlers may wait with the decoded values.
    pub(super) async fn read(
        &self,
        caller: &Caller,
        name: &str,
        limit: usize,
        body: &mut Body,
    ) -> Result<(Bytes, HeldMemory), Fault> {
        use hyper::body::Body as _;
        let hint = body.size_hint();
        let claimed = hint.upper().and_then(|upper| usize::try_from(upper).ok());
        let most = claimed.unwrap_or(usize::MAX).min(limit);
        let count = most.div_ceil(UNIT_BYTES);
        let (shared, large) = match count > self.memory.each() {
            false => (self.memory.take(caller, count), None),
            true => (None, Arc::clone(&self.large).try_acquire_owned().ok()),
        };
        if shared.is_none() && large.is_none() {
            let text = "too many requests at one time: try again in a moment";
            return Err(Fault::new(FaultCode::Unavailable, text));
        }
        let held = HeldMemory { _shared: shared, _large: large };
        let pace = Pace::new(MESSAGE_PACE_BYTES);
        let bytes = body::read(body, limit, BODY_STALL_MAX, pace).await.map_err(|error| {
            let code = match error {
                ReadError::TooLarge { .. } => FaultCode::TooLarge,
                _ => FaultCode::BadRequest,
            };
            Fault::new(code, format!("{name}: {}", model::display::error_chain(&error)))
        })?;
        Ok((bytes, held))
    }

    fn no_method(&self, name: &str) -> Fault {
        let daemon = self.routes.frame.daemon();
        let known = api::methods().into_iter().find(|method| method.name == name);
        let text = match known {
            Some(method) if method.reserved => {
                format!("{} comes with a later release", method.name)
            }
            Some(method) => format!("{} is not a method of this daemon ({daemon})", method.name),
            None => {
                let name = model::escape::escape(&name.as_bytes()[..name.len().min(100)]);
                format!("there is no method `{name}`; see docs/PROTOCOL.md")
            }
        };
        Fault::new(FaultCode::NoMethod, text)
    }

    pub(super) fn fault_page(&self, fault: &Fault) -> Response<Body> {
        let status = StatusCode::from_u16(fault.code.status());
        self.error_page(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), &fault.message)
    }

    pub(super) fn error_page(&self, status: StatusCode, text: &str) -> Response<Body> {
        html_response(status, self.routes.frame.error(status.as_u16(), text))
    }

    fn wrong_http_method(&self, allowed: &str, text: &str) -> Response<Body> {
        let mut response = self.error_page(StatusCode::METHOD_NOT_ALLOWED, text);
        set(&mut response, header::ALLOW, allowed);
        response
    }
}

/// Runs a handler so that a panic fails only this call.
pub(super) async fn guarded<T>(
    what: &str,
    handler: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(result) => result,
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no text");
            tracing::error!("handler of {what} panicked: {text}");
            Err(Fault::new(FaultCode::Internal, format!("{what}: the handler panicked: {text}")))
        }
    }
}

/// Reads and drops what a refused caller still sends.
async fn read_rest(mut body: Body) {
    let reading = async {
        let mut bytes = 0;
        while bytes < REFUSED_BYTES_MAX
            && let Some(Ok(frame)) = body.frame().await
        {
            bytes += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    let _late = tokio::time::timeout(REFUSED_TIME_MAX, reading).await;
}

/// Returns the encodings of a call.
fn form(headers: &HeaderMap, upload: bool) -> Result<CallEncoding, Fault> {
    let kind = match headers.get(header::CONTENT_TYPE) {
        None => "",
        Some(value) => value.to_str().unwrap_or("?"),
    };
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if upload {
        if kind != object_stream::CONTENT_TYPE {
            let text = format!("the content-type must be {}", object_stream::CONTENT_TYPE);
            return Err(Fault::new(FaultCode::BadRequest, text));
        }
        let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        let json = accept.is_some_and(|accept| accept.contains("application/json"));
        let reply = if json { Encoding::Json } else { Encoding::Bincode };
        return Ok(CallEncoding { request: Encoding::Bincode, reply });
    }
    match kind {
        "application/json" => Ok(CallEncoding { request: Encoding::Json, reply: Encoding::Json }),
        "" | "application/octet-stream" => {
            Ok(CallEncoding { request: Encoding::Bincode, reply: Encoding::Bincode })
        }
        _ => Err(Fault::new(
            FaultCode::BadRequest,
            "the content-type must be application/json or application/octet-stream",
        )),
    }
}

/// Checks the version of the protocol. JSON requests may omit it.
fn version(headers: &HeaderMap, form: CallEncoding) -> Result<(), Fault> {
    let served = if PROTOCOL == PROTOCOL_OLDEST {
        format!("this server speaks version {PROTOCOL}")
    } else {
        format!("this server speaks versions {PROTOCOL_OLDEST} to {PROTOCOL}")
    };
    let fault = |text| Err(Fault::new(FaultCode::Version, text));
    match headers.get(PROTOCOL_HEADER) {
        None if form.request == Encoding::Json => Ok(()),
        None => fault(format!("the header {PROTOCOL_HEADER} is missing: {served}")),
        Some(value) => {
            let text = value.to_str().unwrap_or("?");
            match text.trim().parse::<u32>() {
                Ok(version) if (PROTOCOL_OLDEST..=PROTOCOL).contains(&version) => Ok(()),
                _ => {
                    let text = model::escape::escape(&text.as_bytes()[..text.len().min(20)]);
                    fault(format!("protocol version {text} is not served: {served}"))
                }
            }
        }
    }
}

fn fault_response(encoding: Encoding, fault: &Fault) -> Response<Body> {
    let bytes = codec::encode(encoding, "fault", fault).expect("a fault is a code and a text");
    let mut response = small(encoding.content_type(), bytes);
    *response.status_mut() =
        StatusCode::from_u16(fault.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}
