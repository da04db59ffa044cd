//! One HTTP/2 connection of a client.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use hyper::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::exchange::{Failure, Reply, exchange};
use super::keep_alive::{LastHeard, silence};
use super::memory::FREE_BYTES;
use super::peer::Peer;
use crate::body::Body;
use crate::tls::{FilesDigest, PeerSession, Security};
use api::access::identity::MACHINE_SERVICE;
use model::display::error_chain;

/// How long connecting may take, for all addresses of the host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The part of it for the TCP connection to one of many servers. The kernel sends to a machine that
/// does not answer at 0, 1, 3 and 7 s: a machine that is back just after 3 s would be found at 7 s.
const DIAL_TIMEOUT: Duration = Duration::from_millis(3_500);

/// Names that are resolved at one time. Each holds a thread of the pool that all blocking work of
/// the process shares (512 threads in tokio), for as long as a name server does not answer.
const LOOKUPS: usize = 128;

static LOOKUP_PERMITS: Semaphore = Semaphore::const_new(LOOKUPS);

/// The flow-control window of one stream, in bytes, if the memory of replies is not limited.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The largest frame of other replies, in bytes. A connection keeps a buffer for the largest frame
/// that has arrived, so one large reply of each machine would cost a fleet that much for ever.
const NARROW_FRAME_BYTES: u32 = 16 << 10;

/// The flow-control window of a connection, in bytes. Larger than that of one stream, so that
/// unread objects do not delay calls.
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// The length of the table of former response headers that the server may refer to, in bytes (RFC
/// 7541). Each response has another date, so the table would grow with each one: after three it
/// takes 2.5 KiB of memory.
const HEADER_TABLE_BYTES: u32 = 0;

/// The most bytes that wait to be sent on one stream.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// A connection. It ends when this is dropped.
///
/// Uses h2 directly, which hyper is based on: hyper's client adds a queue of 32 requests, one more
/// task, and a task for each call. For ten thousand subs with one permanent call each that takes
/// 140 MB.
pub(super) struct Connection {
    sender: SendRequest<Bytes>,
    heard: Arc<LastHeard>,
    task: AbortOnDropHandle<()>,
    /// True if the authority of the server certifies machines only.
    is_of_machine: bool,
    /// The public key of the server.
    server_key: Option<Arc<[u8]>>,
    /// True once [`Connection::take_new_server_key`] has returned it.
    is_key_told: AtomicBool,
    /// The files of this side that it was made with.
    files: Option<FilesDigest>,
}

impl Connection {
    /// Connects to `peer`, and verifies its identity. It may be a machine whose certificate ended
    /// at most `ended_within` ago. If `is_narrow`, it is one of many servers: of a reply only as
    /// much arrives before it is read as needs no room, and one that is away is given up sooner.
    pub(super) async fn open(
        peer: &Peer,
        security: &Security,
        ended_within: Duration,
        is_narrow: bool,
    ) -> io::Result<Self> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection within 10 s");
        let name = peer.to_string();
        let open = async {
            let limit = if is_narrow { DIAL_TIMEOUT } else { CONNECT_TIMEOUT };
            let stream = connect(peer, limit).await?;
            match security {
                Security::Insecure => Self::over(stream, name, None, is_narrow).await,
                Security::Tls(config) => {
                    let (stream, session) =
                        config.connect(stream, &peer.host, ended_within).await?;
                    Self::over(stream, name, Some(session), is_narrow).await
                }
            }
        };
        tokio::time::timeout(CONNECT_TIMEOUT, open).await.map_err(|_| late())?
    }

    /// Starts HTTP/2 with the server `name` on `stream`, as long as its session is valid.
    async fn over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        name: String,
        session: Option<PeerSession>,
        is_narrow: bool,
    ) -> io::Result<Self> {
        let (window, frame) = match is_narrow {
            true => (FREE_BYTES as u32, NARROW_FRAME_BYTES),
            false => (STREAM_WINDOW_BYTES, crate::FRAME_BYTES_MAX),
        };
        let (sender, mut connection) = h2::client::Builder::new()
            .enable_push(false)
            .header_table_size(HEADER_TABLE_BYTES)
            .initial_window_size(window)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(frame)
            .max_header_list_size(crate::HEADER_BYTES_MAX)
            .max_send_buffer_size(SEND_BUFFER_BYTES)
            .handshake(stream)
            .await
            .map_err(io::Error::other)?;
        let pings = connection.ping_pong().ok_or_else(|| io::Error::other("no pings"))?;
        let heard = Arc::new(LastHeard::new());
        let listening = Arc::clone(&heard);
        let is_of_machine = session.as_ref().is_some_and(PeerSession::is_of_machines);
        let server_key = session.as_ref().and_then(PeerSession::public_key);
        let files = session.as_ref().map(|session| session.proof().files());
        let session = session.map(Box::new);
        // Boxed, because each layer of a task would reserve its memory.
        let task = Box::pin(async move {
            tokio::select! {
                why = PeerSession::lost(session) => {
                    tracing::info!("connection to {name} cut: {why}");
                }
                result = &mut connection => if let Err(error) = result {
                    tracing::debug!("connection to {name}: {}", error_chain(&error));
                },
                () = silence(pings, &listening) => {
                    tracing::debug!("connection to {name}: a ping was not answered");
                }
            }
        });
        let task = AbortOnDropHandle::new(tokio::spawn(task));
        let is_key_told = AtomicBool::new(false);
        Ok(Self { sender, heard, task, is_of_machine, server_key, is_key_told, files })
    }

    /// Returns true if the server may answer `method`, or pages if that is no method.
    pub(super) fn may_answer(&self, method: &str) -> bool {
        let is_of_sub = |(service, _)| service == MACHINE_SERVICE;
        !self.is_of_machine || method.split_once('.').is_none_or(is_of_sub)
    }

    /// Returns the public key of the server, whose private one it has shown to have.
    pub(super) fn server_key(&self) -> Option<Arc<[u8]>> {
        self.server_key.clone()
    }

    /// Returns [`Connection::server_key`] at the first call.
    pub(super) fn take_new_server_key(&self) -> Option<Arc<[u8]>> {
        match self.is_key_told.swap(true, Ordering::Relaxed) {
            true => None,
            false => self.server_key(),
        }
    }

    /// Returns true if this side uses other files now than the connection was made with.
    pub(super) fn is_of_former_files(&self, security: &Security) -> bool {
        self.files != security.files_in_use()
    }

    /// Returns true if the connection has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.task.is_finished()
    }

    /// Sends `request`; see [`exchange`].
    pub(super) async fn send(
        &self,
        request: Box<Request<Body>>,
    ) -> Result<Response<Reply>, Failure> {
        exchange(self.sender.clone(), request, &self.heard).await
    }
}

/// Makes the TCP connection to `peer`, within `limit` once its name is known.
async fn connect(peer: &Peer, limit: Duration) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = match peer.address {
        Some(address) => vec![SocketAddr::new(address, peer.port)],
        None => resolve(peer).await?,
    };
    let stream = connect_to(&addresses, limit).await?;
    crate::socket::prepare(&stream)?;
    Ok(stream)
}

/// Connects to the first address that answers. Each has its share of `limit`, so that the others
/// are tried if one does not answer at all.
async fn connect_to(addresses: &[SocketAddr], limit: Duration) -> io::Result<TcpStream> {
    let start = Instant::now();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (number, address) in (1..).zip(addresses) {
        let share = limit.mul_f64(f64::from(number) / addresses.len() as f64);
        match timeout_at(start + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => {
                let text = format!("{address} does not answer");
                last = io::Error::new(io::ErrorKind::TimedOut, text);
            }
        }
    }
    Err(last)
}

/// Asks the system's resolver. Its thread keeps the permit until it has answered, however long the
/// caller waits.
async fn resolve(peer: &Peer) -> io::Result<Vec<SocketAddr>> {
    let permit = LOOKUP_PERMITS.acquire().await.map_err(io::Error::other)?;
    let (host, port) = (peer.host.clone(), peer.port);
    let look_up = move || {
        let _permit = permit;
        (host.as_str(), port).to_socket_addrs().map(Iterator::collect)
    };
    tokio::task::spawn_blocking(look_up).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::full;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::net::{TcpListener, TcpSocket};

    #[tokio::test(start_paused = true)]
    async fn another_address_is_tried_when_one_does_not_answer() {
        // Nobody accepts, and there is room for one connection.
        let mute = TcpSocket::new_v4().unwrap();
        mute.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mute = mute.listen(0).unwrap();
        let mute_address = mute.local_addr().unwrap();
        let _taken = TcpStream::connect(mute_address).await.unwrap();
        let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let good_address = good.local_addr().unwrap();
        let start = Instant::now();
        let stream = connect_to(&[mute_address, good_address], CONNECT_TIMEOUT).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good_address);
        assert_eq!(start.elapsed().as_secs(), 5);
        let error = connect_to(&[mute_address], CONNECT_TIMEOUT).await.unwrap_err().to_string();
        assert_eq!(error, format!("{mute_address} does not answer"));
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_many_servers_is_given_up_sooner() {
        // Nobody accepts, and there is room for one connection.
        let mute = TcpSocket::new_v4().unwrap();
        mute.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mute = mute.listen(0).unwrap();
        let _taken = TcpStream::connect(mute.local_addr().unwrap()).await.unwrap();
        let peer = Peer::parse(&mute.local_addr().unwrap().to_string(), 0).unwrap();
        for (is_one_of_many, seconds) in [(true, 3.5), (false, 10.0)] {
            let start = Instant::now();
            let opened =
                Connection::open(&peer, &Security::Insecure, Duration::ZERO, is_one_of_many).await;
            assert!(opened.is_err());
            assert_eq!((start.elapsed().as_secs_f64() * 2.0).round() / 2.0, seconds);
        }
    }

    /// The types of the frames that a client has sent.
    fn frames(mut said: &[u8]) -> Vec<u8> {
        let mut types = Vec::new();
        said = said.strip_prefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap_or(said);
        while let [a, b, c, kind, ..] = said {
            types.push(*kind);
            said = &said[9 + u32::from_be_bytes([0, *a, *b, *c]) as usize..];
        }
        types
    }

    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const PING: u8 = 6;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_no_ping_is_given_up() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let server = tokio::spawn(async move {
            let settings_of_a_server = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            far.write_all(&settings_of_a_server).await.unwrap();
            let mut said = Vec::new();
            far.read_to_end(&mut said).await.unwrap();
            said
        });
        let start = Instant::now();
        let connection = Connection::over(near, "mute".to_owned(), None, false).await.unwrap();
        let frames = frames(&server.await.unwrap());
        assert_eq!(start.elapsed().as_secs(), 100);
        let pings = frames.iter().filter(|kind| **kind == PING).count();
        assert_eq!((connection.is_closed(), pings), (true, 1), "{frames:?}");
    }

    #[tokio::test]
    async fn a_server_may_not_refer_to_former_heads() {
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let _connection = Connection::over(near, "near".to_owned(), None, true).await.unwrap();
        let mut start = [0; 24 + 9];
        far.read_exact(&mut start).await.unwrap();
        let (preface, head) = start.split_at(24);
        assert_eq!(preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        assert_eq!(head, [0, 0, head[2], 4, 0, 0, 0, 0, 0], "SETTINGS come first");
        let mut settings = vec![0; usize::from(head[2])];
        far.read_exact(&mut settings).await.unwrap();
        let read = |setting: &[u8]| {
            let (id, value) = setting.split_at(2);
            (id[1], u32::from_be_bytes(value.try_into().unwrap()))
        };
        // RFC 9113, 6.5.2: the table of heads, push, the window and frame of a stream, and the
        // length of heads.
        let want = [
            (1, 0),
            (2, 0),
            (4, FREE_BYTES as u32),
            (5, NARROW_FRAME_BYTES),
            (6, crate::HEADER_BYTES_MAX),
        ];
        assert_eq!(settings.chunks(6).map(read).collect::<Vec<_>>(), want);
    }

    /// Passes on what a client says, and keeps each write.
    async fn overhear(mut client: DuplexStream, mut server: DuplexStream) -> Vec<Vec<u8>> {
        let (mut said, mut answered) = (vec![0; 4_096], vec![0; 4_096]);
        let mut all = Vec::new();
        loop {
            tokio::select! {
                Ok(count) = client.read(&mut said) => match count {
                    0 => return all,
                    count => {
                        all.push(said[..count].to_vec());
                        server.write_all(&said[..count]).await.unwrap();
                    }
                },
                Ok(count) = server.read(&mut answered) => {
                    client.write_all(&answered[..count]).await.unwrap();
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_is_pinged_only_when_it_says_nothing() {
        let (near, client) = tokio::io::duplex(1 << 16);
        let (server, far) = tokio::io::duplex(1 << 16);
        let overheard = tokio::spawn(overhear(client, server));
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(far).await.unwrap();
            while let Some(Ok((_request, mut respond))) = connection.accept().await {
                respond.send_response(Response::new(()), true).unwrap();
            }
        });
        let connection = Connection::over(near, "busy".to_owned(), None, false).await.unwrap();
        for pause in [60, 60, 60, 90, 60] {
            tokio::time::sleep(Duration::from_secs(pause)).await;
            let request = Request::post("http://host/").body(full("x")).unwrap();
            connection.send(Box::new(request)).await.map_err(drop).unwrap();
        }
        assert!(!connection.is_closed());
        drop(connection);
        let frames = frames(&overheard.await.unwrap().concat());
        let pings = frames.iter().filter(|kind| **kind == PING).count();
        assert_eq!(pings, 1, "{frames:?}");
    }

    #[tokio::test]
    async fn a_small_request_is_one_write() {
        let (near, client) = tokio::io::duplex(1 << 16);
        let (server, far) = tokio::io::duplex(1 << 16);
        let overheard = tokio::spawn(overhear(client, server));
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(far).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                tokio::spawn(async move {
                    let data = request.into_body().data().await.unwrap().unwrap();
                    assert_eq!(data, "small");
                    respond.send_response(Response::new(()), true).unwrap();
                });
            }
        });
        let connection = Connection::over(near, "near".to_owned(), None, false).await.unwrap();
        for _ in 0..3 {
            let request = Request::post("http://host/").body(full("small")).unwrap();
            connection.send(Box::new(request)).await.map_err(drop).unwrap();
        }
        drop(connection);
        let writes = overheard.await.unwrap();
        let requests = writes.iter().map(|write| frames(write));
        let requests: Vec<_> = requests.filter(|frames| frames.contains(&HEADERS)).collect();
        assert_eq!(requests.len(), 3, "{requests:?}");
        // The settings of the connection come before the first request.
        assert!(requests.iter().all(|frames| frames.ends_with(&[HEADERS, DATA])), "{requests:?}");
    }
}
