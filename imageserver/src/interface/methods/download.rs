//! `ObjectServer.GetObjects` and `GET /objects/<id>`: content, a chunk at a time.
//!
//! A chunk is read when the transport asks for it, so that a slow reader costs two chunks of memory
//! at most and no thread. Content is checked before the first byte of it is sent. It is packed for
//! who takes it packed; what is packed in the store is sent as it is.

use std::io::{self, Read as _};
use std::ops::Range;
use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::object_server::GetObjects;
use api::object_stream::{Form, Head};
use bytes::Bytes;
use futures_util::stream::{iter, unfold};
use futures_util::{Stream, StreamExt as _};
use model::object::ObjectId;
use model::report::report;
use rpc::packing;
use rpc::server::{self, Page, PageRequest, Share};

use super::Service;
use super::access::expect_may;
use super::packing::Packers;
use crate::store::Store;
use crate::store::content::{Content, ContentReader};
use crate::store::counters::Counters;
use crate::store::error::joined;
use crate::store::local::objects::CHUNK_BYTES;
use crate::store::packed::Chunk;

/// The content type of an object: the server knows nothing about it.
const CONTENT_TYPE: &str = "application/octet-stream";

/// Of how many objects the store is told before they are read.
const AHEAD_MAX: usize = 64;

/// An object stream of `ids`, packed if there are `packers`.
pub(super) fn objects(
    store: Arc<Store>,
    counters: Arc<Counters>,
    packers: Option<Packers>,
    place: Share,
    ids: Vec<ObjectId>,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let (ids, current, ended) = (ids.into_iter(), None, false);
    let state = Batch { store, counters, packers, ids, ahead: 0, current, ended, place };
    chunks(state, Batch::next)
}

/// Asks `state` for one chunk after the other, where it may block. An error ends the stream.
fn chunks<S: Send + 'static>(
    state: S,
    next: fn(&mut S) -> io::Result<Option<Bytes>>,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let chunks = unfold(Some(state), move |state| async move {
        let mut state = state?;
        let step = tokio::task::spawn_blocking(move || {
            let chunk = next(&mut state);
            (chunk, state)
        });
        match step.await {
            Err(lost) => Some((Err(io::Error::other(lost)), None)),
            Ok((Err(error), _)) => {
                tracing::error!("a download was cut: {}", report(&error));
                Some((Err(error), None))
            }
            Ok((Ok(None), _)) => None,
            Ok((Ok(Some(chunk)), state)) => Some((Ok(chunk), Some(state))),
        }
    });
    chunks.flat_map(|chunk| iter(Pieces(chunk.map(Some))))
}

/// A chunk in pieces: the transport has up to three of what it is given in memory for each reader.
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

/// What is still to be sent of an object.
struct Rest {
    content: ContentReader,
    bytes: u64,
}

impl Rest {
    /// Appends the next part, of at most so many bytes.
    fn read(&mut self, limit: usize, buffer: &mut Vec<u8>) -> io::Result<()> {
        let part = self.bytes.min(limit as u64);
        let got = self.content.by_ref().take(part).read_to_end(buffer)? as u64;
        if got < part {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "an object became shorter"));
        }
        self.bytes -= got;
        Ok(())
    }
}

/// A large object in the middle of a stream.
struct Current {
    rest: Rest,
    /// If it is packed: whether that gains anything.
    packing: Option<bool>,
}

/// An object stream that is being sent.
struct Batch {
    store: Arc<Store>,
    counters: Arc<Counters>,
    packers: Option<Packers>,
    ids: std::vec::IntoIter<ObjectId>,
    /// How many of the next ones the store was told of.
    ahead: usize,
    current: Option<Current>,
    ended: bool,
    #[expect(dead_code, reason = "held until the stream ends")]
    place: Share,
}

impl Batch {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        if self.ended {
            return Ok(None);
        }
        let mut buffer = Vec::with_capacity(CHUNK_BYTES);
        while buffer.len() < CHUNK_BYTES {
            if let Some(mut current) = self.current.take() {
                self.go_on(&mut current, &mut buffer)?;
                self.current = (current.rest.bytes > 0).then_some(current);
                continue;
            }
            let Some(id) = self.ids.next() else {
                Head::End.encode(&mut buffer);
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
            self.begin(id, &mut buffer);
        }
        Ok(Some(buffer.into()))
    }

    /// Appends the head of an object, and all of a small one.
    fn begin(&mut self, id: ObjectId, buffer: &mut Vec<u8>) {
        // An object that the medium does not give back is as good as absent: others may have it.
        let content = self.store.objects.open_verified(&id).unwrap_or_else(|error| {
            tracing::error!("object {id} is not served: {}", report(&error));
            None
        });
        let Some(content) = content else {
            self.counters.objects_absent.inc();
            return Head::Absent(id).encode(buffer);
        };
        let size_bytes = content.size_bytes();
        self.counters.objects_sent.inc();
        self.counters.objects_sent_bytes.inc_by(size_bytes);
        let stored = match (content, &self.packers) {
            // As it is, without a thought.
            (Content::Packed(packed), Some(_)) => {
                Head::Object { id, size_bytes }.encode_as(Form::Packed, buffer);
                let (content, bytes) = packed.into_chunks();
                self.current = Some(Current { rest: Rest { content, bytes }, packing: None });
                return;
            }
            (content, _) => content,
        };
        let is_packed = self.packers.as_ref().is_some_and(|packers| packers.is_worth(size_bytes));
        let form = if is_packed { Form::Packed } else { Form::Plain };
        Head::Object { id, size_bytes }.encode_as(form, buffer);
        match stored {
            Content::Whole(bytes) if is_packed => {
                let mut gains = true;
                for chunk in bytes.chunks(packing::CHUNK_BYTES_MAX) {
                    self.pack(chunk, &mut gains, buffer);
                }
            }
            Content::Whole(bytes) => buffer.extend_from_slice(&bytes),
            stored => {
                let (content, bytes) = (stored.into_reader(), size_bytes);
                let packing = is_packed.then_some(true);
                self.current = Some(Current { rest: Rest { content, bytes }, packing });
            }
        }
    }

    /// Appends the next part of a large object.
    fn go_on(&self, current: &mut Current, buffer: &mut Vec<u8>) -> io::Result<()> {
        let Some(gains) = &mut current.packing else {
            return current.rest.read(CHUNK_BYTES, buffer);
        };
        let mut content = Vec::new();
        current.rest.read(packing::CHUNK_BYTES_MAX, &mut content)?;
        self.pack(&content, gains, buffer);
        Ok(())
    }

    /// Appends a chunk of a packed object, of which is known whether packing it `gains` anything.
    fn pack(&self, chunk: &[u8], gains: &mut bool, buffer: &mut Vec<u8>) {
        match &self.packers {
            Some(packers) if *gains => *gains = packers.append(chunk, buffer),
            _ => packing::append(buffer, chunk, None),
        }
    }
}

/// A part of one object.
struct Part {
    rest: Rest,
    packers: Option<Packers>,
    #[expect(dead_code, reason = "held until the stream ends")]
    place: Share,
}

impl Part {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        if self.rest.bytes == 0 {
            return Ok(None);
        }
        let mut buffer = Vec::new();
        match (&self.packers, &mut self.rest.content) {
            (None, _) => self.rest.read(CHUNK_BYTES, &mut buffer)?,
            // Its chunks are frames already, most of them.
            (Some(packers), ContentReader::Packed(reader)) => {
                let (frame, content_bytes) = match reader.chunk()? {
                    None => return Ok(None),
                    Some(Chunk::Frame(frame, content_bytes)) => (frame.to_vec(), content_bytes),
                    Some(Chunk::Plain(content)) => (packers.frame(content)?, content.len()),
                };
                (buffer, self.rest.bytes) = (frame, self.rest.bytes - content_bytes as u64);
            }
            (Some(packers), _) => {
                self.rest.read(packing::CHUNK_BYTES_MAX, &mut buffer)?;
                buffer = packers.frame(&buffer)?;
            }
        }
        Ok(Some(buffer.into()))
    }
}

impl Service {
    /// Answers `GET /objects/<id>`.
    pub(super) async fn object_page(self, request: PageRequest) -> Result<Page, Fault> {
        let id: ObjectId = request
            .below
            .parse()
            .map_err(|error| Fault::new(FaultCode::BadRequest, report(&error)))?;
        expect_may::<GetObjects>(&request.caller, &format!("object {id}"), &[])?;
        let place = self.download_place(&request.caller)?;
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
        let body = self.body(content, part.clone(), packers, place).await?;
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
        place: Share,
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
                            .map_err(|error| Fault::new(FaultCode::Internal, report(&error)))?
                            .into()
                    }
                };
                Ok(Box::pin(iter([bytes]).map(move |bytes| {
                    // Held until the stream is dropped, which is when they have been sent.
                    let _held = &place;
                    Ok(bytes)
                })))
            }
            stored => {
                let mut content = stored.into_reader();
                let bytes = part.end - part.start;
                // It may have to read what comes before.
                let skipping = move || content.skip(part.start).map(|()| content);
                let content = joined(self.tasks.spawn_blocking(skipping).await)?
                    .map_err(|error| Fault::new(FaultCode::Internal, report(&error)))?;
                let rest = Rest { content, bytes };
                Ok(Box::pin(chunks(Part { rest, packers, place }, Part::next)))
            }
        }
    }
}
