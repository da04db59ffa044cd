//! Calls methods of another daemon.
//!
//! A [`Client`] has one HTTP/2 connection to one server, which is made when first needed, and made
//! again after it was lost or when other certificates are in use. Any number of calls share it.
//! Every call has a limit of time and of size. Dropping the future of a call cancels it, also at
//! the server.

mod connection;
mod download;
mod error;
mod exchange;
mod keep_alive;
mod memory;
mod peer;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use hyper::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderValue, ORIGIN};
use hyper::http::uri::{Authority, InvalidUri};
use hyper::{Request, Response, StatusCode, Uri};

pub use download::{Download, Extent};
pub use error::{CallError, Remedy};
pub use memory::CallMemory;
pub(super) use memory::Room;
pub use peer::{Peer, PeerError};

use super::body::{self, Body, BoxError, ReadError};
pub use super::object_reader::{ObjectReader, StreamError};
use super::pace::Pace;
use super::packing;
use super::tls::Security;
use api::codec::{self, CodecError, Encoding};
use api::fault::Fault;
use api::method::Method;
use api::object_server::{GetObjects, GetObjectsRequest};
use api::subd::ReplaceCertificate;
use api::{PROTOCOL, PROTOCOL_HEADER, object_stream};
use connection::Connection;
use exchange::{Failure, Reply};
use model::lock::locked;
use tokio::time::Instant;

/// The default time limit of a call.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);

/// How long an upload or its reply may make no progress.
pub const UPLOAD_STALL_MAX: Duration = Duration::from_secs(120);

/// How long no large message may have come before a connection is replaced that one has enlarged.
const GROWN_FOR: Duration = Duration::from_secs(15);

/// The largest page of [`Client::get`], in bytes.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// The longest text of a fault that is accepted, in bytes.
const FAULT_BYTES_MAX: usize = 64 << 10;

/// A client of one server. Clones share its connection.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    peer: Peer,
    /// That of each URI; or why the host can be in none.
    authority: Result<Authority, InvalidUri>,
    security: Security,
    /// True if objects may be packed.
    packs: AtomicBool,
    /// True if the server has announced that it accepts packed objects.
    is_packing_known: AtomicBool,
    /// For large messages; without limit if `None`.
    memory: Option<CallMemory>,
    /// How long ago the certificate of the server may have ended. Unless it is 0, only
    /// [`ReplaceCertificate`] is called.
    ended_within: Duration,
    /// When the last large message was sent or read, if one was since the connection was made. The
    /// buffers of the connection stay as large as the message has made them, so it is replaced.
    grown: Mutex<Option<Instant>>,
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Client({})", self.inner.peer)
    }
}

impl Client {
    /// Returns a client of `peer`, which connects when first used. Objects are packed
    /// ([`super::packing`]) unless `peer` is this machine. The connection is protected by
    /// `security`.
    #[must_use]
    pub fn new(peer: Peer, security: &Security) -> Self {
        let packs = !peer.is_local();
        Self::packing(peer, security, packs)
    }

    /// As [`Client::new`], but `packs` decides whether objects are packed.
    #[must_use]
    pub fn packing(peer: Peer, security: &Security, packs: bool) -> Self {
        Self::with(peer, security, packs, None, Duration::ZERO)
    }

    /// As [`Client::new`], for one of many servers, whose large messages share `memory`. One that
    /// does not answer is given up after 3.5 s instead of 10.
    #[must_use]
    pub fn sharing(peer: Peer, security: &Security, memory: &CallMemory) -> Self {
        let packs = !peer.is_local();
        Self::with(peer, security, packs, Some(memory.clone()), Duration::ZERO)
    }

    /// Returns a client of a machine whose certificate may have ended, at most `ended_within` ago.
    /// All else about it is verified as always. It can call [`ReplaceCertificate`] only.
    #[must_use]
    pub fn of_ended(peer: Peer, security: &Security, ended_within: Duration) -> Self {
        Self::with(peer, security, false, None, ended_within.max(Duration::from_secs(1)))
    }

    fn with(
        peer: Peer,
        security: &Security,
        packs: bool,
        memory: Option<CallMemory>,
        ended_within: Duration,
    ) -> Self {
        let inner = Inner {
            authority: Authority::try_from(peer.authority()),
            peer,
            security: security.clone(),
            packs: AtomicBool::new(packs),
            is_packing_known: AtomicBool::new(false),
            memory,
            ended_within,
            grown: Mutex::default(),
            connection: tokio::sync::Mutex::new(None),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Decides whether objects are packed from now on.
    pub fn set_packing(&self, packs: bool) {
        self.inner.packs.store(packs, Ordering::Relaxed);
    }

    /// Returns true if objects of an upload may be packed: the server has announced in an earlier
    /// reply that it accepts them.
    #[must_use]
    pub fn may_pack(&self) -> bool {
        self.inner.packs.load(Ordering::Relaxed)
            && self.inner.is_packing_known.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.inner.peer
    }

    /// Returns the public key of the server's certificate (SubjectPublicKeyInfo in DER), whose
    /// private one the server has shown to have: to the first who asks on a connection. `None` also
    /// before there is a connection, and without TLS.
    pub async fn take_new_server_key(&self) -> Option<Arc<[u8]>> {
        self.inner.connection.lock().await.as_ref()?.take_new_server_key()
    }

    /// Connects, and returns the public key of the server's certificate; `None` without TLS.
    ///
    /// # Errors
    ///
    /// [`CallError::Connect`].
    pub async fn connected_key(&self) -> Result<Option<Arc<[u8]>>, CallError> {
        Ok(self.connection().await?.server_key())
    }

    /// Calls `M`, within [`CALL_LIMIT`].
    pub async fn call<M: Method>(&self, request: &M::Request) -> Result<M::Reply, CallError> {
        self.call_within::<M>(request, CALL_LIMIT).await
    }

    /// Calls `M`, within `limit`, which includes connecting.
    pub async fn call_within<M: Method>(
        &self,
        request: &M::Request,
        limit: Duration,
    ) -> Result<M::Reply, CallError> {
        // The future is made where it is awaited: passing it would reserve its memory twice.
        let call = tokio::time::timeout(limit, async {
            let (response, _connection) = {
                let room = self.room_for::<M>(request).await?;
                let sent = self.send(M::NAME, self.encoded::<M>(request)?).await?;
                self.note_size(&room);
                sent
            };
            let reply = self.accept(M::NAME, response).await?;
            self.decode_reply::<M>(reply, limit).await
        });
        call.await.unwrap_or_else(|_| Err(self.timed_out(M::NAME, limit)))
    }

    /// Sends an object stream to `M`; `body` is polled one chunk after the other. The whole has no
    /// time limit, but each part must arrive within [`UPLOAD_STALL_MAX`].
    pub async fn upload<M: Method>(
        &self,
        body: impl Stream<Item = Result<Bytes, io::Error>> + Send + 'static,
    ) -> Result<M::Reply, CallError> {
        let progress = Arc::new(AtomicU64::new(0));
        let failure = Arc::new(Mutex::new(None));
        let (count, failed) = (Arc::clone(&progress), Arc::clone(&failure));
        let body = body.map(move |chunk| {
            count.fetch_add(1, Ordering::Relaxed);
            chunk.map_err(|error| {
                let again = io::Error::new(error.kind(), error.to_string());
                *locked(&failed) = Some(error);
                again
            })
        });
        let request = self.request(M::NAME, object_stream::CONTENT_TYPE, body::streamed(body))?;
        let call = async {
            let (response, _connection) = self.send(M::NAME, request).await?;
            let reply = self.accept(M::NAME, response).await?;
            self.decode_reply::<M>(reply, UPLOAD_STALL_MAX).await
        };
        let mut call = std::pin::pin!(call);
        let result = loop {
            let before = progress.load(Ordering::Relaxed);
            match tokio::time::timeout(UPLOAD_STALL_MAX, &mut call).await {
                Ok(result) => break result,
                Err(_) if progress.load(Ordering::Relaxed) != before => {}
                Err(_) => break Err(self.timed_out(M::NAME, UPLOAD_STALL_MAX)),
            }
        };
        let failure = locked(&failure).take();
        match failure {
            Some(source) if result.is_err() => {
                Err(CallError::Source { method: M::NAME, peer: self.name(), source })
            }
            _ => result,
        }
    }

    /// Requests objects. They arrive one after the other, with unverified hashes. The reader
    /// refuses a frame for an object that was not requested.
    pub async fn get_objects(
        &self,
        request: &GetObjectsRequest,
    ) -> Result<ObjectReader, CallError> {
        let method = GetObjects::NAME;
        let mut http_request = self.encoded::<GetObjects>(request)?;
        if self.inner.packs.load(Ordering::Relaxed) {
            let encoding = HeaderValue::from_static(packing::ENCODING);
            http_request.headers_mut().insert(ACCEPT_ENCODING, encoding);
        }
        let call = async {
            let (response, connection) = self.send(method, http_request).await?;
            let response = self.accept(method, response).await?;
            let kind = response.headers().get(CONTENT_TYPE).cloned();
            if kind.as_ref().map(HeaderValue::as_bytes)
                != Some(object_stream::CONTENT_TYPE.as_bytes())
            {
                return Err(self.odd(method, "the reply is not a stream of objects".to_owned()));
            }
            let reader = ObjectReader::of_body(response.into_body());
            Ok(reader.requesting(&request.ids).keeping(connection))
        };
        self.within(method, CALL_LIMIT, call).await
    }

    /// Gets a small page. Returns its status and body.
    pub async fn get(&self, path_and_query: &str) -> Result<(u16, Bytes), CallError> {
        let method = "GET";
        let request = Request::get(self.uri(method, path_and_query.to_owned())?)
            .body(body::full(Bytes::new()))
            .map_err(|error| self.odd(method, error.to_string()))?;
        self.page(method, Box::new(request)).await
    }

    /// Sends the form of a page, as a browser does. Returns the status and body of the answer.
    pub async fn submit(
        &self,
        path: &str,
        fields: &[(&str, &str)],
    ) -> Result<(u16, Bytes), CallError> {
        let method = "POST";
        let uri = self.uri(method, path.to_owned())?;
        let host = uri.authority().map_or("", Authority::as_str);
        let origin = format!("{}://{host}", self.inner.security.scheme());
        let form = form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let request = Request::post(uri)
            .header(ORIGIN, origin)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(body::full(form))
            .map_err(|error| self.odd(method, error.to_string()))?;
        self.page(method, Box::new(request)).await
    }

    async fn page(
        &self,
        method: &'static str,
        request: Box<Request<Body>>,
    ) -> Result<(u16, Bytes), CallError> {
        let call = async {
            let (response, _connection) = self.send(method, request).await?;
            let status = response.status().as_u16();
            let bytes =
                body::read(response.into_body(), PAGE_BYTES_MAX, CALL_LIMIT, Pace::any()).await;
            Ok((status, bytes.map_err(|error| self.unread(method, error))?))
        };
        self.within(method, CALL_LIMIT, call).await
    }

    /// Waits until there is room for `request`.
    async fn room_for<M: Method>(&self, request: &M::Request) -> Result<Room, CallError> {
        let memory = self.inner.memory.as_ref();
        let mut room = Room::of(memory.map(|memory| &memory.requests));
        if memory.is_some() {
            let codec = |source| CallError::Codec { method: M::NAME, peer: self.name(), source };
            room.grow(codec::length("request", request).map_err(codec)?).await;
        }
        Ok(room)
    }

    fn encoded<M: Method>(&self, request: &M::Request) -> Result<Box<Request<Body>>, CallError> {
        let codec = |source| CallError::Codec { method: M::NAME, peer: self.name(), source };
        let bytes = codec::encode(Encoding::Bincode, "request", request).map_err(codec)?;
        if bytes.len() > M::REQUEST_BYTES_MAX {
            let (length, limit) = (bytes.len(), M::REQUEST_BYTES_MAX);
            return Err(codec(CodecError::TooLarge { what: "request", length, limit }));
        }
        self.request(M::NAME, Encoding::Bincode.content_type(), body::full(bytes))
    }

    /// Boxed, because each future that passes it on would reserve its memory twice.
    fn request(
        &self,
        method: &'static str,
        content_type: &'static str,
        body: Body,
    ) -> Result<Box<Request<Body>>, CallError> {
        Request::post(self.uri(method, format!("/rpc/{method}"))?)
            .header(PROTOCOL_HEADER, PROTOCOL)
            .header(CONTENT_TYPE, content_type)
            .body(body)
            .map(Box::new)
            .map_err(|error| self.odd(method, error.to_string()))
    }

    fn uri(&self, method: &'static str, path_and_query: String) -> Result<Uri, CallError> {
        let Inner { authority, security, .. } = &*self.inner;
        let authority =
            authority.as_ref().map_err(|error| self.odd(method, error.to_string()))?.clone();
        let uri = Uri::builder().scheme(security.scheme()).authority(authority);
        let uri = uri.path_and_query(path_and_query).build();
        uri.map_err(|error| self.odd(method, error.to_string()))
    }

    /// Sends `request` and waits for the head of the response. The connection must be held until
    /// the body has been read.
    async fn send(
        &self,
        method: &'static str,
        request: Box<Request<Body>>,
    ) -> Result<(Response<Reply>, Arc<Connection>), CallError> {
        if !self.inner.ended_within.is_zero() && method != ReplaceCertificate::NAME {
            let what = "a machine whose certificate has ended is called for nothing else than to \
                        replace it";
            return Err(self.odd(method, what.to_owned()));
        }
        let mut request = request;
        let mut again = true;
        loop {
            let connection = self.connection().await?;
            if !connection.may_answer(method) {
                let what = "the authority of the server certifies machines only, and no machine \
                            answers this: another server is at this address";
                return Err(self.odd(method, what.to_owned()));
            }
            match connection.send(request).await {
                Ok(response) => return Ok((response, connection)),
                // The connection had just ended.
                Err(Failure::Unsent(unsent, _)) if again => {
                    again = false;
                    request = unsent;
                }
                Err(Failure::Unsent(_, error) | Failure::Lost(error)) => {
                    return Err(self.lost(method, error));
                }
            }
            self.forget(&connection).await;
        }
    }

    async fn connection(&self) -> Result<Arc<Connection>, CallError> {
        let mut kept = self.inner.connection.lock().await;
        if let Some(connection) = kept.as_ref()
            && !connection.is_closed()
            && !connection.is_of_former_files(&self.inner.security)
            && !(Arc::strong_count(connection) == 1 && self.must_be_replaced())
        {
            return Ok(Arc::clone(connection));
        }
        *kept = None;
        *locked(&self.inner.grown) = None;
        // Boxed, because every call would reserve its memory, and few need to connect.
        let Inner { peer, security, memory, ended_within, .. } = &*self.inner;
        let connection = Connection::open(peer, security, *ended_within, memory.is_some());
        let connection = Box::pin(connection)
            .await
            .map_err(|source| CallError::Connect { peer: self.name(), source })?;
        let connection = Arc::new(connection);
        *kept = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Notes that the message of `room` was large, if it was.
    fn note_size(&self, room: &Room) {
        if room.is_taken() {
            *locked(&self.inner.grown) = Some(Instant::now());
        }
    }

    /// True if large messages have made the buffers of the connection large, and none came for a
    /// while: other large messages may follow soon, and memory that was freed may not be given back
    /// yet, so that new buffers would get pages that are in use.
    fn must_be_replaced(&self) -> bool {
        let grown = *locked(&self.inner.grown);
        grown.is_some_and(|grown| grown.elapsed() >= GROWN_FOR)
    }

    /// Does not use `connection` again.
    async fn forget(&self, connection: &Arc<Connection>) {
        let mut kept = self.inner.connection.lock().await;
        if kept.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, connection)) {
            *kept = None;
        }
    }

    /// Returns the response, or the fault that it contains.
    async fn accept(
        &self,
        method: &'static str,
        response: Response<Reply>,
    ) -> Result<Response<Reply>, CallError> {
        let status = response.status();
        if !response.headers().contains_key(PROTOCOL_HEADER) {
            let what = format!("the server is not a daemon of this product (status {status})");
            return Err(self.odd(method, what));
        }
        if body::takes_packed(response.headers()) {
            self.inner.is_packing_known.store(true, Ordering::Relaxed);
        }
        if status == StatusCode::OK {
            return Ok(response);
        }
        let kind = response.headers().get(CONTENT_TYPE);
        let json = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
        let encoding = if json { Encoding::Json } else { Encoding::Bincode };
        let bytes = body::read(response.into_body(), FAULT_BYTES_MAX, CALL_LIMIT, Pace::any())
            .await
            .map_err(|error| self.unread(method, error))?;
        let fault: Fault = codec::decode(encoding, "fault", &bytes, FAULT_BYTES_MAX)
            .map_err(|source| CallError::Codec { method, peer: self.name(), source })?;
        Err(CallError::Fault { method, peer: self.name(), source: fault })
    }

    async fn decode_reply<M: Method>(
        &self,
        response: Response<Reply>,
        stall: Duration,
    ) -> Result<M::Reply, CallError> {
        // Kept until the reply is decoded.
        let mut room = Room::of(self.inner.memory.as_ref().map(|memory| &memory.replies));
        let (body, limit) = (response.into_body(), M::REPLY_BYTES_MAX);
        let bytes = body::read_into(&mut room, body, limit, stall, Pace::any())
            .await
            .map_err(|error| self.unread(M::NAME, error))?;
        self.note_size(&room);
        codec::decode(Encoding::Bincode, "reply", &bytes, M::REPLY_BYTES_MAX)
            .map_err(|source| CallError::Codec { method: M::NAME, peer: self.name(), source })
    }

    async fn within<T>(
        &self,
        method: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        match tokio::time::timeout(limit, call).await {
            Ok(result) => result,
            Err(_) => Err(self.timed_out(method, limit)),
        }
    }

    fn name(&self) -> String {
        self.inner.peer.to_string()
    }

    fn timed_out(&self, method: &'static str, limit: Duration) -> CallError {
        CallError::TimedOut { method, peer: self.name(), limit }
    }

    fn lost(&self, method: &'static str, source: BoxError) -> CallError {
        CallError::Lost { method, peer: self.name(), source }
    }

    fn odd(&self, method: &'static str, what: String) -> CallError {
        CallError::Protocol { method, peer: self.name(), what }
    }

    fn unread(&self, method: &'static str, error: ReadError) -> CallError {
        match error {
            ReadError::TooLarge { .. } => self.odd(method, format!("the reply is {error}")),
            ReadError::Cut(error) => self.lost(method, error),
            ReadError::Stalled { limit } => self.timed_out(method, limit),
            ReadError::Slow => self.lost(method, error.into()),
        }
    }
}
