//! `ObjectServer.GetObjects` and `GET /objects/<id>`: sends content, one chunk at a time.
//!
//! A chunk is read when the transport asks for it, so a slow reader costs at most two chunks of
//! memory and no thread. For one who takes each at once, eight are made in one piece of memory,
//! which is held until all of it is sent, while the next eight are made: up to a megabyte. Small
//! objects are read to where they are sent from. Content is verified before its first byte is sent.
//! It is packed for clients that accept packed content, while they take it slowly; an object that
//! is stored packed is sent as it is.
//!
//! The beginning of a stream is packed. How long its reader then takes for what was sent, without
//! the time for which this server makes it, tells whether the link is slow ([`LinkUse`]), again and
//! again: packing a fast stream costs more than all the rest of the work.
//!
//! There are as many packers as processors. A stream uses one if it is free, and otherwise sends
//! the chunk unpacked: then the processor is the limit, not the network.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use api::fault::{Fault, FaultCode};
use api::object_server::GetObjects;
use api::object_stream::{ContentForm, HEAD_BYTES_MAX, ObjectHead};
use bytes::{BufMut, Bytes};
use futures_util::stream::{iter, unfold};
use futures_util::{Stream, StreamExt as _};
use model::display::error_chain;
use model::lock::locked;
use model::object::ObjectId;
use rpc::packing::{self, CONTENT_BYTES_MIN, LinkUse, Packer};
use rpc::server::{self, Page, PageRequest};

use super::{DownloadPermit, Service, expect_may};
use crate::store::content::{Content, ContentReader, Opened};
use crate::store::error::joined;
use crate::store::packed::PackedChunk;
use crate::store::{Counters, Store};

/// The content type of an object: the server knows nothing about it.
const CONTENT_TYPE: &str = "application/octet-stream";

/// How much is sent at once, in bytes. With the 9 bytes of its head, a frame of HTTP/2 is as long
/// as four records of TLS.
const CHUNK_BYTES: usize = (64 << 10) - 9;

/// The most objects that the store is asked to fetch ahead.
const AHEAD_MAX: usize = 64;

/// Returns an object stream of `ids`, packed if there are `packers`.
pub(super) fn objects(
    store: Arc<Store>,
    counters: Arc<Counters>,
    packers: Option<Packers>,
    permit: DownloadPermit,
    ids: Vec<ObjectId>,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    chunks(ObjectStream::new(store, counters, packers, permit, ids))
}

/// What is sent, in chunks.
trait Chunks: Send + 'static {
    /// Makes the next chunks, of at most so many bytes and one packed chunk; `None` at the end. May
    /// block.
    fn next(&mut self, limit: usize) -> io::Result<Option<Bytes>>;

    /// The reader took the last chunks, of this length in bytes, in this time.
    fn taken(&mut self, _bytes: u64, _waited: Duration) {}
}

/// Chunks that the reader has not taken yet.
struct Given {
    at: Instant,
    chunks: u32,
    bytes: u64,
}

/// How many chunks are read at a time for a reader who takes each within [`QUICK`]: handing one
/// over to another thread costs more than reading it.
const QUICK_CHUNKS: u32 = 8;
const QUICK: Duration = Duration::from_millis(2);

/// Streams `content`. An error ends the stream.
fn chunks(content: impl Chunks) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let steps = unfold(Some((content, None)), move |last| async move {
        let (mut content, given) = last?;
        let mut count = 1;
        if let Some(Given { at, chunks, bytes }) = given {
            let waited = at.elapsed();
            if waited < QUICK * chunks {
                count = QUICK_CHUNKS;
            }
            content.taken(bytes, waited);
        }
        let step = tokio::task::spawn_blocking(move || {
            let made = content.next(count as usize * CHUNK_BYTES);
            (made, content)
        });
        let (made, content) = match step.await {
            Ok((Ok(None), _)) => return None,
            Ok((Ok(Some(made)), content)) => (Ok(made), Some(content)),
            Ok((Err(error), _)) => {
                tracing::error!("a download was interrupted: {}", error_chain(&error));
                (Err(error), None)
            }
            Err(lost) => (Err(io::Error::other(lost)), None),
        };
        let bytes = made.as_ref().map_or(0, |made| made.len() as u64);
        let given = Given { at: Instant::now(), chunks: count, bytes };
        Some((made, content.map(|content| (content, Some(given)))))
    });
    steps.flat_map(|made| iter(Pieces(made.map(Some))))
}

/// The chunks that were made at once, one after the other.
struct Pieces(io::Result<Option<Bytes>>);

impl Iterator for Pieces {
    type Item = io::Result<Bytes>;

    fn next(&mut self) -> Option<io::Result<Bytes>> {
        match std::mem::replace(&mut self.0, Ok(None)) {
            Err(error) => Some(Err(error)),
            Ok(None) => None,
            Ok(Some(mut rest)) => {
                let piece = rest.split_to(rest.len().min(CHUNK_BYTES));
                self.0 = Ok((!rest.is_empty()).then_some(rest));
                Some(Ok(piece))
            }
        }
    }
}

/// The part of an object that was not sent yet.
struct RemainingContent {
    content: ContentReader,
    bytes: u64,
}

impl RemainingContent {
    /// Appends the next part, of at most so many bytes.
    fn read(&mut self, limit: usize, buffer: &mut Vec<u8>) -> io::Result<()> {
        let part = usize::try_from(self.bytes).map_or(limit, |bytes| bytes.min(limit));
        if self.content.append(part, buffer)? < part {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "an object became shorter"));
        }
        self.bytes -= part as u64;
        Ok(())
    }
}

/// The object that is being sent.
struct CurrentObject {
    rest: RemainingContent,
    /// If it is packed: true while packing makes it shorter.
    packing: Option<bool>,
}

/// An object stream that is being sent.
struct ObjectStream {
    store: Arc<Store>,
    counters: Arc<Counters>,
    packers: Option<Packers>,
    /// True while the reader takes so little that packing is worth its cost.
    is_slow: bool,
    /// Since that was decided.
    link: LinkUse,
    ids: std::vec::IntoIter<ObjectId>,
    /// How many of the next objects are being fetched ahead.
    ahead: usize,
    current: Option<CurrentObject>,
    /// Why nothing follows what was made.
    failed: Option<io::Error>,
    ended: bool,
    #[expect(dead_code, reason = "held until the stream ends")]
    permit: DownloadPermit,
}

impl Chunks for ObjectStream {
    fn next(&mut self, limit: usize) -> io::Result<Option<Bytes>> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.ended {
            return Ok(None);
        }
        let packed_chunk = self.packers.as_ref().map_or(0, |_| packing::CHUNK_BYTES_MAX);
        let mut buffer = Vec::with_capacity(limit + packed_chunk);
        while buffer.len() + HEAD_BYTES_MAX <= limit {
            if let Some(mut current) = self.current.take() {
                if let Err(error) = self.append_current(&mut current, limit, &mut buffer) {
                    // The objects before it are sent.
                    self.failed = Some(error);
                    break;
                }
                self.current = (current.rest.bytes > 0).then_some(current);
                continue;
            }
            let Some(id) = self.ids.next() else {
                ObjectHead::End.encode(&mut buffer);
                self.ended = true;
                break;
            };
            if self.ahead == 0 {
                let rest = self.ids.as_slice();
                self.ahead = rest.len().min(AHEAD_MAX);
                self.store.objects.ahead(&[&[id], &rest[..self.ahead]].concat());
            } else {
                self.ahead -= 1;
            }
            self.begin(id, limit, &mut buffer);
        }
        Ok(Some(buffer.into()))
    }

    fn taken(&mut self, bytes: u64, waited: Duration) {
        self.link.wire_bytes += bytes;
        self.link.waited += waited;
        if let Some(packs) = self.link.must_pack() {
            (self.is_slow, self.link) = (packs, LinkUse::default());
        }
    }
}

impl ObjectStream {
    fn new(
        store: Arc<Store>,
        counters: Arc<Counters>,
        packers: Option<Packers>,
        permit: DownloadPermit,
        ids: Vec<ObjectId>,
    ) -> Self {
        Self {
            store,
            counters,
            packers,
            is_slow: true,
            link: LinkUse::default(),
            ids: ids.into_iter(),
            ahead: 0,
            current: None,
            failed: None,
            ended: false,
            permit,
        }
    }

    /// Appends the head of an object, and its content if it is small, sent as it is, and fits into
    /// `limit`. Otherwise the content follows.
    fn begin(&mut self, id: ObjectId, limit: usize, buffer: &mut Vec<u8>) {
        let start = buffer.len();
        let head = |size_bytes| ObjectHead::Object { id, size_bytes };
        // Its length is known when the content is there.
        head(0).encode(buffer);
        let content_start = buffer.len();
        let room = match self.is_slow && self.packers.is_some() {
            true => 0,
            false => limit.saturating_sub(content_start),
        };
        let opened = self.store.objects.open_into(&id, room, buffer);
        // An unreadable object is reported as absent: other servers may have it.
        let opened = opened.unwrap_or_else(|error| {
            tracing::error!("object {id} is not served: {}", error_chain(&error));
            None
        });
        let content = match opened {
            Some(Opened::Appended) => {
                let size_bytes = (buffer.len() - content_start) as u64;
                self.count_sent(size_bytes);
                let mut known = Vec::with_capacity(HEAD_BYTES_MAX);
                head(size_bytes).encode(&mut known);
                return buffer[start..content_start].copy_from_slice(&known);
            }
            Some(Opened::Content(content)) => content,
            None => {
                buffer.truncate(start);
                self.counters.objects_absent.inc();
                return ObjectHead::Absent(id).encode(buffer);
            }
        };
        buffer.truncate(start);
        let size_bytes = content.size_bytes();
        self.count_sent(size_bytes);
        let (form, content, bytes, packing) = match (content, &self.packers) {
            // It is sent as it is stored.
            (Content::Packed(packed), Some(_)) => {
                let (content, bytes) = packed.into_chunks();
                (ContentForm::Packed, content, bytes, None)
            }
            (content, Some(packers)) if self.is_slow && packers.is_worth(size_bytes) => {
                (ContentForm::Packed, content.into_reader(), size_bytes, Some(true))
            }
            (content, _) => (ContentForm::Plain, content.into_reader(), size_bytes, None),
        };
        head(size_bytes).encode_as(form, buffer);
        self.current = Some(CurrentObject { rest: RemainingContent { content, bytes }, packing });
    }

    fn count_sent(&self, size_bytes: u64) {
        self.counters.objects_sent.inc();
        self.counters.objects_sent_bytes.inc_by(size_bytes);
    }

    /// Appends the next part of an object.
    fn append_current(
        &self,
        current: &mut CurrentObject,
        limit: usize,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        let Some(gains) = &mut current.packing else {
            return current.rest.read(limit - buffer.len(), buffer);
        };
        let mut content = Vec::new();
        current.rest.read(packing::CHUNK_BYTES_MAX, &mut content)?;
        self.pack(&content, gains, buffer);
        Ok(())
    }

    /// Appends a chunk of a packed object. `gains` is true while packing makes the object shorter.
    fn pack(&self, chunk: &[u8], gains: &mut bool, buffer: &mut Vec<u8>) {
        match &self.packers {
            Some(packers) if self.is_slow && *gains => *gains = packers.append(chunk, buffer),
            _ => packing::append(buffer, chunk, None),
        }
    }
}

/// A part of one object.
struct ObjectPart {
    rest: RemainingContent,
    packers: Option<Packers>,
    #[expect(dead_code, reason = "held until the stream ends")]
    permit: DownloadPermit,
}

impl Chunks for ObjectPart {
    fn next(&mut self, limit: usize) -> io::Result<Option<Bytes>> {
        let mut buffer = Vec::new();
        // So much content is the limit, however short its frames are.
        let end = self.rest.bytes.saturating_sub(limit as u64);
        while self.rest.bytes > end {
            let Some(packers) = &self.packers else {
                self.rest.read(limit - buffer.len(), &mut buffer)?;
                continue;
            };
            // Most chunks are frames already.
            if let ContentReader::Packed(reader) = &mut self.rest.content {
                let content_bytes = match reader.chunk()? {
                    None => break,
                    Some(PackedChunk::Frame(frame, content_bytes)) => {
                        buffer.extend_from_slice(frame);
                        content_bytes
                    }
                    Some(PackedChunk::Plain(content)) => {
                        buffer.extend(packers.frame(content)?);
                        content.len()
                    }
                };
                self.rest.bytes -= content_bytes as u64;
                continue;
            }
            let mut content = Vec::new();
            self.rest.read(packing::CHUNK_BYTES_MAX, &mut content)?;
            buffer.extend(packers.frame(&content)?);
        }
        Ok((!buffer.is_empty()).then(|| buffer.into()))
    }
}

impl Service {
    /// Answers `GET /objects/<id>`.
    pub(super) async fn object_page(self, request: PageRequest) -> Result<Page, Fault> {
        let id: ObjectId = request
            .below
            .parse()
            .map_err(|error| Fault::new(FaultCode::BadRequest, error_chain(&error)))?;
        expect_may::<GetObjects>(&request.caller, &format!("object {id}"), &[])?;
        let permit = self.download_permit(&request.caller)?;
        self.readable(&request.caller, vec![id]).await?;
        let found = self.blocking(move |store| store.objects.open_verified(&id)).await?;
        let Some(content) = found else {
            self.counters.objects_absent.inc();
            let text = format!("object {id} is not on this server");
            return Err(Fault::new(FaultCode::NotFound, text));
        };
        let total_bytes = content.size_bytes();
        let part = match request.range {
            None => None,
            Some(range) => match range.of(total_bytes) {
                None => return Ok(Page::RangeNotSatisfiable { total_bytes }),
                some => some,
            },
        };
        self.counters.objects_sent.inc();
        let packs = request.caller.unpacks && part.is_none() && self.packers.is_worth(total_bytes);
        let packers = packs.then(|| self.packers.clone());
        let body = self.body(content, part.clone(), packers, permit).await?;
        let etag = Some(id.to_string());
        Ok(Page::Stream(server::Content {
            content_type: CONTENT_TYPE,
            total_bytes,
            part,
            etag,
            immutable: true,
            is_packed: packs,
            body,
        }))
    }

    async fn body(
        &self,
        content: Content,
        part: Option<Range<u64>>,
        packers: Option<Packers>,
        permit: DownloadPermit,
    ) -> Result<server::PageBody, Fault> {
        let part = part.unwrap_or(0..content.size_bytes());
        self.counters.objects_sent_bytes.inc_by(part.end - part.start);
        match content {
            Content::Whole(bytes) => {
                let index = |offset| usize::try_from(offset).expect("a whole object is small");
                let bytes = bytes.slice(index(part.start)..index(part.end));
                let bytes = match packers {
                    None => bytes,
                    Some(packers) => {
                        let packing = move || packers.frame(&bytes);
                        let packed = joined(self.tasks.spawn_blocking(packing).await)?;
                        packed
                            .map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?
                            .into()
                    }
                };
                Ok(Box::pin(iter([bytes]).map(move |bytes| {
                    // Held until the stream is dropped, which is when they have been sent.
                    let _held = &permit;
                    Ok(bytes)
                })))
            }
            stored => {
                let mut content = stored.into_reader();
                let bytes = part.end - part.start;
                // Skipping may read the content before the range.
                let skipping = move || content.skip(part.start).map(|()| content);
                let content = joined(self.tasks.spawn_blocking(skipping).await)?
                    .map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
                let rest = RemainingContent { content, bytes };
                Ok(Box::pin(chunks(ObjectPart { rest, packers, permit })))
            }
        }
    }
}

/// Packs chunks. A clone shares everything.
#[derive(Clone)]
pub struct Packers {
    packers: Arc<[Mutex<Packer>]>,
}

impl Packers {
    /// Packs with this level of zstd; level 0 packs nothing.
    pub fn new(level: i32) -> io::Result<Self> {
        let count = match level {
            0 => 0,
            _ => available_parallelism().map_or(1, usize::from),
        };
        let packers = (0..count).map(|_| Packer::new(level).map(Mutex::new));
        Ok(Self { packers: packers.collect::<io::Result<_>>()? })
    }

    /// Returns true if an object of so many bytes is worth being packed.
    pub(super) fn is_worth(&self, size_bytes: u64) -> bool {
        !self.packers.is_empty() && size_bytes >= CONTENT_BYTES_MIN as u64
    }

    /// Appends a chunk of an object stream. Returns false if packing gained too little: then the
    /// rest of the object will not gain more.
    pub(super) fn append(&self, content: &[u8], out: &mut impl BufMut) -> bool {
        for packer in self.packers.iter() {
            let mut packer = match packer.try_lock() {
                Ok(packer) => packer,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            let packed = packer.pack(content);
            packing::append(out, content, packed);
            return packed.is_some();
        }
        packing::append(out, content, None);
        true
    }

    /// Returns `content` as a zstd frame. Waits for a packer: such callers accept nothing else.
    pub(super) fn frame(&self, content: &[u8]) -> io::Result<Vec<u8>> {
        // Spreads callers over the packers by the length of their content.
        let turn = content.len() % self.packers.len();
        let mut packer = locked(&self.packers[turn]);
        packer.frame(content)
    }
}

#[cfg(test)]
mod tests {
    use daemon::memory::FreedMemory;
    use model::object::Algorithm;
    use rpc::packing::{CHUNK_HEAD_BYTES, ChunkHead};
    use rpc::server::CallerPermits;

    use super::*;
    use crate::store::layout;

    /// The forms of the objects in a whole stream.
    fn forms(mut bytes: &[u8]) -> Vec<ContentForm> {
        let mut forms = Vec::new();
        loop {
            let (head, form, used) = ObjectHead::decode(bytes).unwrap().unwrap();
            bytes = &bytes[used..];
            let ObjectHead::Object { size_bytes, .. } = head else {
                assert_eq!((head, bytes.len()), (ObjectHead::End, 0));
                return forms;
            };
            forms.push(form);
            let mut rest_bytes = size_bytes;
            while rest_bytes > 0 {
                let (content_bytes, wire_bytes) = match form {
                    ContentForm::Plain => (rest_bytes, rest_bytes),
                    ContentForm::Packed => {
                        let (head, _) = bytes.split_first_chunk::<CHUNK_HEAD_BYTES>().unwrap();
                        let head = ChunkHead::decode(*head, rest_bytes).unwrap();
                        let length = CHUNK_HEAD_BYTES + head.packed_bytes;
                        (head.content_bytes as u64, length as u64)
                    }
                };
                rest_bytes -= content_bytes;
                bytes = &bytes[usize::try_from(wire_bytes).unwrap()..];
            }
        }
    }

    /// Returns content that cannot be packed, so that as many bytes are sent in either form.
    fn noise(number: u32, length: usize) -> Vec<u8> {
        let words = (0..).map(|index: u32| {
            Algorithm::Blake3.digest(&[number, index].map(u32::to_le_bytes).concat())
        });
        words.flat_map(|id| id.digest().to_vec()).take(length).collect()
    }

    fn store_object(store: &Store, content: &[u8]) -> ObjectId {
        let id = Algorithm::Blake3.digest(content);
        let mut receiving = store.objects.receive(id, content.len() as u64).unwrap();
        receiving.write(content).unwrap();
        receiving.finish().unwrap().wait().unwrap();
        id
    }

    /// Small objects are read to where they are sent from, and cut to chunks like large ones.
    #[tokio::test]
    async fn objects_of_all_lengths_are_sent_whole() {
        let data = tempfile::tempdir().unwrap();
        let store = Store::open(data.path()).unwrap();
        let lengths = [0, 1, 30_000, 30_000, 64 << 10, (64 << 10) + 1, 9, 65_000, 400_000, 7];
        let (mut ids, mut expected) = (Vec::new(), Vec::new());
        for (number, length) in (0..).zip(lengths) {
            let content = noise(number, length);
            let id = store_object(&store, &content);
            ObjectHead::Object { id, size_bytes: length as u64 }.encode(&mut expected);
            expected.extend(content);
            ids.push(id);
        }
        let absent = Algorithm::Blake3.digest(b"absent");
        ids.push(absent);
        ObjectHead::Absent(absent).encode(&mut expected);
        // What was damaged on the disk is as good as absent.
        let damaged = store_object(&store, b"whole");
        let object_path = data.path().join("objects").join(layout::object_path(&damaged));
        fs_err::write(object_path, b"other").unwrap();
        ids.push(damaged);
        ObjectHead::Absent(damaged).encode(&mut expected);
        ObjectHead::End.encode(&mut expected);
        let (store, counters) = (Arc::new(store), Arc::<Counters>::default());
        for chunks in [1, 3, QUICK_CHUNKS as usize] {
            let permit = (CallerPermits::new(1, 1).own().await, FreedMemory::keep());
            let (store, counters) = (Arc::clone(&store), Arc::clone(&counters));
            let mut stream = ObjectStream::new(store, counters, None, permit, ids.clone());
            let mut sent = Vec::new();
            while let Some(made) = stream.next(chunks * CHUNK_BYTES).unwrap() {
                assert!(made.len() <= chunks * CHUNK_BYTES);
                sent.extend(made);
            }
            assert!(sent == expected, "{chunks} chunks at a time");
        }
        let sent_bytes = 3 * lengths.iter().sum::<usize>() as u64;
        let counted = (counters.objects_sent.get(), counters.objects_sent_bytes.get());
        assert_eq!(counted, (3 * lengths.len() as u64, sent_bytes));
        assert_eq!(counters.objects_absent.get(), 6);
    }

    /// The forms in which 200 objects of 100,000 bytes are sent, each with how often it comes in a
    /// row, if a reader takes a megabyte in the time that `pace` has for the bytes before it.
    async fn sent(
        level: Option<i32>,
        pace: impl Fn(usize) -> Duration,
    ) -> Vec<(ContentForm, usize)> {
        let data = tempfile::tempdir().unwrap();
        let store = Store::open(data.path()).unwrap();
        let ids = (0..200).map(|number| store_object(&store, &noise(number, 100_000))).collect();
        let packers = level.map(|level| Packers::new(level).unwrap());
        let permit = (CallerPermits::new(1, 1).own().await, FreedMemory::keep());
        let mut stream = ObjectStream::new(Arc::new(store), Arc::default(), packers, permit, ids);
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next(CHUNK_BYTES).unwrap() {
            let waited = pace(bytes.len()) * u32::try_from(chunk.len()).unwrap() / 1_000_000;
            bytes.extend_from_slice(&chunk);
            stream.taken(chunk.len() as u64, waited);
        }
        forms(&bytes).chunk_by(PartialEq::eq).map(|run| (run[0], run.len())).collect()
    }

    #[tokio::test]
    async fn objects_are_packed_while_their_reader_takes_them_slowly() {
        use ContentForm::{Packed, Plain};
        let (fast, slow) = (Duration::from_millis(10), Duration::from_millis(100));
        assert_eq!(sent(Some(1), |_| slow).await, [(Packed, 200)]);
        // Until 4 MiB are sent nothing is known.
        assert_eq!(sent(Some(1), |_| fast).await, [(Packed, 42), (Plain, 158)]);
        let once = |bytes| if (7_000_000..9_000_000).contains(&bytes) { slow } else { fast };
        let forms = sent(Some(1), once).await;
        assert_eq!(forms, [(Packed, 42), (Plain, 43), (Packed, 42), (Plain, 73)]);
        assert_eq!(sent(Some(0), |_| slow).await, [(Plain, 200)]);
        assert_eq!(sent(None, |_| slow).await, [(Plain, 200)]);
    }
}
