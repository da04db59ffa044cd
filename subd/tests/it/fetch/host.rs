//! Object servers that misbehave, and lines that break.

use rpc::tls::Security;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use api::fault::{Fault, FaultCode};
use api::object_server::GetObjects;
use api::object_stream::ObjectHead;
use bytes::Bytes;
use model::object::{Algorithm, ObjectId};
use rpc::server::{Content, Page, Router, head_bytes, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How much is sent at once.
const CHUNK_BYTES: usize = 64 << 10;

/// What is wrong with a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vice {
    /// Nothing.
    #[default]
    None,
    /// It sends all of an object when it is asked for a part.
    NoRanges,
    /// It sends a part that begins this many bytes too late.
    OtherRange(u64),
    /// It sends an object that nobody asked for behind the first one.
    Unasked,
    /// It says for ever that it does not have the first object.
    AbsentForever,
    /// It says that objects are this much longer than they are, and sends that.
    Longer(u64),
}

/// What hosts of a test hold and note.
#[derive(Clone, Default)]
struct Shelf {
    objects: Arc<Mutex<BTreeMap<ObjectId, Bytes>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

/// An object server.
pub struct Host {
    pub address: String,
    shelf: Shelf,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Content that looks random.
pub fn content(seed: u8, length: usize) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn chunks(content: &Bytes, part: Range<usize>) -> Vec<Bytes> {
    let part = content.slice(part);
    (0..part.len())
        .step_by(CHUNK_BYTES)
        .map(|start| part.slice(start..(start + CHUNK_BYTES).min(part.len())))
        .collect()
}

fn batch(shelf: &Shelf, fault: Vice, ids: Vec<ObjectId>) -> Vec<Bytes> {
    shelf.asked.lock().unwrap().push(format!("batch of {}", ids.len()));
    let objects = shelf.objects.lock().unwrap();
    let mut all = Vec::new();
    let add = |all: &mut Vec<Bytes>, id: ObjectId, content: &Bytes| {
        let size_bytes = content.len() as u64;
        all.push(head_bytes(&ObjectHead::Object { id, size_bytes }));
        all.extend(chunks(content, 0..content.len()));
    };
    for id in ids {
        match (objects.get(&id), fault) {
            (None, _) => all.push(head_bytes(&ObjectHead::Absent(id))),
            (Some(content), Vice::Longer(more)) => {
                let longer = vec![7; content.len() + usize::try_from(more).unwrap()];
                add(&mut all, id, &longer.into());
            }
            (Some(content), Vice::Unasked) => {
                add(&mut all, id, content);
                add(
                    &mut all,
                    Algorithm::Blake3.digest(b"unasked"),
                    &Bytes::from_static(b"unasked"),
                );
            }
            (Some(content), _) => add(&mut all, id, content),
        }
    }
    all.push(head_bytes(&ObjectHead::End));
    all
}

fn page(shelf: &Shelf, fault: Vice, id: &str, first: u64) -> Result<Page, Fault> {
    shelf.asked.lock().unwrap().push(format!("from {first}"));
    let objects = shelf.objects.lock().unwrap();
    let content = objects.get(&id.parse().unwrap());
    let content = content.ok_or_else(|| Fault::new(FaultCode::NotFound, "absent"))?;
    let total_bytes = content.len() as u64;
    let part = match fault {
        Vice::NoRanges => None,
        Vice::OtherRange(late) => Some(first + late..total_bytes),
        _ => Some(first..total_bytes),
    };
    let sent = part.clone().unwrap_or(0..total_bytes);
    let index = |at: u64| usize::try_from(at).unwrap();
    let chunks = chunks(content, index(sent.start)..index(sent.end));
    let body = Box::pin(futures_util::stream::iter(chunks.into_iter().map(io::Result::Ok)));
    let content_type = "application/octet-stream";
    let (etag, immutable, is_packed) = (None, true, false);
    Ok(Page::Stream(Content { content_type, total_bytes, part, etag, immutable, is_packed, body }))
}

impl Host {
    pub async fn start(fault: Vice) -> Self {
        Self::start_at("127.0.0.3:0", fault).await
    }

    pub async fn start_at(address: &str, fault: Vice) -> Self {
        let shelf = Shelf::default();
        let (batches, pages) = (shelf.clone(), shelf.clone());
        let router = Router::new("test", &Security::Insecure)
            .download::<GetObjects, _, _>(move |(), _, request| {
                let absent = head_bytes(&ObjectHead::Absent(request.ids[0]));
                let absent = (fault == Vice::AbsentForever).then_some(absent);
                let forever = absent.into_iter().flat_map(std::iter::repeat);
                let chunks = forever.chain(batch(&batches, fault, request.ids));
                let stream = futures_util::stream::iter(chunks.map(Ok));
                async move { Ok::<_, Fault>(stream) }
            })
            .page("/objects/", move |(), request| {
                let first = match request.range {
                    Some(rpc::server::ByteRange::From { first, last: None }) => first,
                    other => panic!("{other:?}"),
                };
                let page = page(&pages, fault, &request.below, first);
                async move { page }
            });
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, router, stop.clone()));
        Self { address, shelf, stop, task }
    }

    /// Gives it an object; its id is that of `content`.
    pub fn add(&self, content: &[u8]) -> ObjectId {
        let id = Algorithm::Blake3.digest(content);
        self.lie(id, content);
        id
    }

    /// Gives it `content` as the object `id`.
    pub fn lie(&self, id: ObjectId, content: &[u8]) {
        self.shelf.objects.lock().unwrap().insert(id, Bytes::copy_from_slice(content));
    }

    /// What it was asked for since it was asked last.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.shelf.asked.lock().unwrap())
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// What a line does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// It ends after so many bytes came from the server.
    Cut(u64),
    /// Nothing more comes after so many bytes, and it stays open.
    Stall(u64),
    /// It waits for [`Line::go`] after so many bytes.
    Wait(u64),
}

/// A line to a host, which breaks.
pub struct Line {
    pub address: String,
    /// Bytes that came from the server and were passed on.
    pub passed: Arc<AtomicU64>,
    /// Told when a connection waits.
    pub waits: Arc<Notify>,
    /// Lets it go on.
    pub go: Arc<Notify>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Line {
    /// A line to `host` of which the first connections break as in `breaks`. Later ones are whole;
    /// or refused, if `then_refused`.
    pub async fn start(host: &str, breaks: &[Break], then_refused: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.3:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (passed, waits, go) =
            (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()), Arc::new(Notify::new()));
        let stop = CancellationToken::new();
        let host: SocketAddr = host.parse().unwrap();
        let mut breaks: VecDeque<Break> = breaks.iter().copied().collect();
        let shared = (Arc::clone(&passed), Arc::clone(&waits), Arc::clone(&go), stop.clone());
        let task = tokio::spawn(async move {
            let (passed, waits, go, stop) = shared;
            loop {
                if breaks.is_empty() && then_refused {
                    return;
                }
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = stop.cancelled() => return,
                };
                let (near, _) = accepted.unwrap();
                let far = TcpStream::connect(host).await.unwrap();
                let pass = pass(near, far, breaks.pop_front(), [&passed], [&waits, &go]);
                tokio::select! {
                    () = pass => {}
                    () = stop.cancelled() => return,
                }
            }
        });
        Self { address, passed, waits, go, stop, task }
    }

    pub fn passed_bytes(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// Passes one connection on; one at a time is enough.
async fn pass(
    near: TcpStream,
    far: TcpStream,
    mut broken: Option<Break>,
    [passed]: [&AtomicU64; 1],
    [waits, go]: [&Notify; 2],
) {
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = far.into_split();
    let up = async {
        let _either_may_end_first = tokio::io::copy(&mut near_read, &mut far_write).await;
    };
    let down = async {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut sum = 0_u64;
        loop {
            let until = match broken {
                Some(Break::Cut(at) | Break::Stall(at) | Break::Wait(at)) => at - sum,
                None => u64::MAX,
            };
            match broken {
                Some(Break::Cut(_)) if until == 0 => return,
                Some(Break::Stall(_)) if until == 0 => std::future::pending().await,
                Some(Break::Wait(_)) if until == 0 => {
                    waits.notify_one();
                    go.notified().await;
                    broken = None;
                    continue;
                }
                _ => {}
            }
            let length = usize::try_from(until).map_or(CHUNK_BYTES, |until| until.min(CHUNK_BYTES));
            match far_read.read(&mut buffer[..length]).await {
                Ok(0) | Err(_) => return,
                Ok(length) => {
                    if near_write.write_all(&buffer[..length]).await.is_err() {
                        return;
                    }
                    sum += length as u64;
                    passed.fetch_add(length as u64, Ordering::Relaxed);
                }
            }
        }
    };
    tokio::select! {
        () = up => return,
        () = down => {}
    }
    // An end that arrives behind the data, not one that throws away what is on its way.
    let _gone_already = near_write.shutdown().await;
    let mut rest = vec![0; CHUNK_BYTES];
    while near_read.read(&mut rest).await.is_ok_and(|length| length > 0) {}
}
