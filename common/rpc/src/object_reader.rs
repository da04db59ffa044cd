//! Reads streams of objects, and makes the chunks that a sender sends.
//!
//! [`ObjectReader`] is a pull parser: it reads only on request, and holds at most one chunk of the
//! transport and one head. A stream without its end mark was truncated, which is an error. Packed
//! content is unpacked at most one chunk ahead. The reader does not hash: whoever stores the
//! content does.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::Stream;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use super::body::{Body, BoxError, streamed};
use super::pace::{PACE_WINDOW, Pace, STREAM_PACE_BYTES};
use super::packing::{CHUNK_HEAD_BYTES, ChunkHead, UnpackError, Unpacker};
use api::object_stream::{ContentForm, HEAD_BYTES_MAX, HeadError, ObjectHead};
use model::object::ObjectId;

/// The longest pause between two chunks of a stream.
pub const CHUNK_WAIT_MAX: Duration = Duration::from_secs(60);

/// Why a stream of objects cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    #[error("the object stream broke")]
    Transport { source: BoxError },
    #[error("the object stream was cut: {expected}")]
    Cut { expected: &'static str },
    #[error("the object stream goes on after its end mark")]
    Trailing,
    /// A frame is about an object that was not requested, or that had its frame already.
    #[error("object {id} was not requested, or was sent before")]
    Unrequested { id: ObjectId },
    /// The head of an object is invalid.
    #[error("the object stream is garbled")]
    Head { source: HeadError },
    /// Packed content cannot be unpacked.
    #[error("the object stream is garbled")]
    Unpack {
        #[from]
        source: UnpackError,
    },
    #[error(
        "the object stream is too slow: {STREAM_PACE_BYTES} bytes have to come within {} s",
        PACE_WINDOW.as_secs()
    )]
    Slow,
    #[error("the object stream stalled: nothing came for {} s", .limit.as_secs())]
    Stalled { limit: Duration },
}

/// Reads a stream of objects, one after the other.
pub struct ObjectReader {
    body: Body,
    /// The rest of the current chunk.
    chunk: Bytes,
    /// How many bytes of the current object are still to be read.
    rest: u64,
    /// The form of the current object.
    form: ContentForm,
    unpacker: Unpacker,
    /// The bytes received since the last query.
    wire_bytes: u64,
    pace: Pace,
    ended: bool,
    /// How many frames may still come for each object; `None` if any object may come.
    requested: Option<BTreeMap<ObjectId, usize>>,
    /// Keeps the connection alive while the stream is read.
    keep: Option<Box<dyn Send + Sync>>,
}

impl std::fmt::Debug for ObjectReader {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ObjectReader")
            .field("rest", &self.rest)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl ObjectReader {
    pub(super) fn new(body: Body) -> Self {
        Self {
            body,
            chunk: Bytes::new(),
            rest: 0,
            form: ContentForm::Plain,
            unpacker: Unpacker::default(),
            wire_bytes: 0,
            pace: Pace::new(STREAM_PACE_BYTES),
            ended: false,
            requested: None,
            keep: None,
        }
    }

    pub(super) fn of_body<B>(body: B) -> Self
    where
        B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::new(body.map_err(Into::into).boxed_unsync())
    }

    /// Accepts only frames for `ids`, and each only as often as it is in `ids`. So a sender cannot
    /// send frames for ever.
    pub(super) fn requesting(mut self, ids: &[ObjectId]) -> Self {
        let requested = self.requested.insert(BTreeMap::new());
        for id in ids {
            *requested.entry(*id).or_default() += 1;
        }
        self
    }

    /// Holds `keep` until the reader is dropped.
    pub(super) fn keeping(mut self, keep: impl Send + Sync + 'static) -> Self {
        self.keep = Some(Box::new(keep));
        self
    }

    /// Returns a reader of a stream of chunks, such as one from a file.
    pub fn of_stream<S>(stream: S) -> Self
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        Self::new(streamed(stream))
    }

    /// Reads the head of the next frame. Unread content of the current object is skipped. After
    /// [`ObjectHead::End`] it is returned again.
    ///
    /// # Errors
    ///
    /// [`StreamError`] if the stream is cut, garbled or stalls, or is not what was requested.
    pub async fn head(&mut self) -> Result<ObjectHead, StreamError> {
        while self.chunk().await?.is_some() {}
        if self.ended {
            return Ok(ObjectHead::End);
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(HEAD_BYTES_MAX);
        loop {
            if self.chunk.is_empty() {
                self.chunk = self
                    .next()
                    .await?
                    .ok_or(StreamError::Cut { expected: "its end mark is missing" })?;
            }
            let had = bytes.len();
            let take = (HEAD_BYTES_MAX - had).min(self.chunk.len());
            bytes.extend_from_slice(&self.chunk[..take]);
            let decoded =
                ObjectHead::decode(&bytes).map_err(|source| StreamError::Head { source })?;
            let Some((head, form, used)) = decoded else {
                self.chunk.advance(take);
                continue;
            };
            self.chunk.advance(used - had);
            match head {
                ObjectHead::Object { id, size_bytes } => {
                    self.count(id)?;
                    (self.rest, self.form) = (size_bytes, form);
                }
                ObjectHead::Absent(id) => self.count(id)?,
                ObjectHead::End => self.end().await?,
            }
            return Ok(head);
        }
    }

    /// Makes sure that a frame for `id` was requested, and counts it.
    fn count(&mut self, id: ObjectId) -> Result<(), StreamError> {
        let Some(requested) = &mut self.requested else { return Ok(()) };
        let left = requested.get_mut(&id).filter(|left| **left > 0);
        *left.ok_or(StreamError::Unrequested { id })? -= 1;
        Ok(())
    }

    /// Reads a part of the current object's content. Returns `None` at its end.
    ///
    /// # Errors
    ///
    /// [`StreamError`] if the stream is cut or stalls.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, StreamError> {
        if self.rest == 0 {
            return Ok(None);
        }
        let part = match self.form {
            ContentForm::Plain => {
                self.fill().await?;
                let rest = usize::try_from(self.rest).unwrap_or(usize::MAX);
                self.chunk.split_to(rest.min(self.chunk.len()))
            }
            ContentForm::Packed => self.unpacked().await?,
        };
        self.rest -= part.len() as u64;
        Ok(Some(part))
    }

    /// Returns how many bytes were received since the last query. Unpacked content is longer.
    pub fn take_wire_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.wire_bytes)
    }

    /// Unpacks the next chunk of the current object.
    async fn unpacked(&mut self) -> Result<Bytes, StreamError> {
        let head = self.exactly(CHUNK_HEAD_BYTES).await?;
        let head = head.as_ref().try_into().expect("as many were taken");
        let head = ChunkHead::decode(head, self.rest)?;
        let packed = self.exactly(head.packed_bytes).await?;
        if head.is_plain() {
            return Ok(packed);
        }
        Ok(self.unpacker.unpack(head, &packed)?)
    }

    /// Reads the next `length` bytes into memory.
    async fn exactly(&mut self, length: usize) -> Result<Bytes, StreamError> {
        self.fill().await?;
        if self.chunk.len() >= length {
            return Ok(self.chunk.split_to(length));
        }
        let mut bytes = BytesMut::with_capacity(length);
        while bytes.len() < length {
            self.fill().await?;
            let part = self.chunk.split_to((length - bytes.len()).min(self.chunk.len()));
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.freeze())
    }

    /// Makes sure that the current chunk is not empty.
    async fn fill(&mut self) -> Result<(), StreamError> {
        if self.chunk.is_empty() {
            self.chunk = self
                .next()
                .await?
                .ok_or(StreamError::Cut { expected: "the content of an object is incomplete" })?;
        }
        Ok(())
    }

    /// Makes sure that nothing follows the end mark.
    async fn end(&mut self) -> Result<(), StreamError> {
        self.ended = true;
        if !self.chunk.is_empty() || self.next().await?.is_some() {
            return Err(StreamError::Trailing);
        }
        self.keep = None;
        Ok(())
    }

    /// Reads the next non-empty chunk. Returns `None` at the end of the body.
    async fn next(&mut self) -> Result<Option<Bytes>, StreamError> {
        let next = next_chunk(&mut self.body, &mut self.pace).await?;
        self.wire_bytes += next.as_ref().map_or(0, |chunk| chunk.len() as u64);
        Ok(next)
    }
}

/// Reads the next non-empty chunk of `body`. Returns `None` at its end.
///
/// # Errors
///
/// [`StreamError`] if the connection breaks, nothing arrives for [`CHUNK_WAIT_MAX`], or the sender
/// is slower than `pace`.
pub(super) async fn next_chunk<B>(
    body: &mut B,
    pace: &mut Pace,
) -> Result<Option<Bytes>, StreamError>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    loop {
        let begun = Instant::now();
        let frame = match tokio::time::timeout(CHUNK_WAIT_MAX, body.frame()).await {
            Err(_) => return Err(StreamError::Stalled { limit: CHUNK_WAIT_MAX }),
            Ok(None) => return Ok(None),
            Ok(Some(frame)) => {
                frame.map_err(|error| StreamError::Transport { source: error.into() })?
            }
        };
        let data = frame.into_data().unwrap_or_default();
        if !pace.came(data.len(), begun.elapsed()) {
            return Err(StreamError::Slow);
        }
        if !data.is_empty() {
            return Ok(Some(data));
        }
    }
}

/// Encodes `head`, for a sender.
#[must_use]
pub fn head_bytes(head: &ObjectHead) -> Bytes {
    let mut bytes = Vec::with_capacity(HEAD_BYTES_MAX);
    head.encode(&mut bytes);
    bytes.into()
}

/// Returns the chunks of an object whose content is in memory.
#[must_use]
pub fn object_chunks(id: ObjectId, content: Bytes) -> [Bytes; 2] {
    [head_bytes(&ObjectHead::Object { id, size_bytes: content.len() as u64 }), content]
}
