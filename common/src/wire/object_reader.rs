//! Reads batches of objects as they arrive, and makes the chunks that a sender sends.
//!
//! [`ObjectReader`] is a pull parser: nothing is read before it is asked for, and it never holds
//! more than one chunk of the transport and one head. A stream that ends without its end mark
//! was cut, and that is an error. The reader does not hash: whoever stores the content does.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::Stream;
use http_body_util::BodyExt as _;

use super::body::{Body, BoxError, streamed};
use super::object_stream::{HEAD_BYTES_MAX, Head, HeadError};
use crate::object::ObjectId;

/// The longest pause between two chunks of a stream.
pub const CHUNK_WAIT_MAX: Duration = Duration::from_secs(60);

/// A stream of objects that cannot be read on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The transport failed.
    #[error("the object stream broke")]
    Transport {
        /// What it said.
        source: BoxError,
    },
    /// The stream ended before its end mark.
    #[error("the object stream was cut: {expected}")]
    Cut {
        /// What should have followed.
        expected: &'static str,
    },
    /// Something follows the end mark.
    #[error("the object stream goes on after its end mark")]
    Trailing,
    /// A head cannot be understood.
    #[error("the object stream is garbled")]
    Head {
        /// What is wrong with it.
        source: HeadError,
    },
    /// Nothing came for too long.
    #[error("the object stream stalled: nothing came for {} s", .limit.as_secs())]
    Stalled {
        /// How long was waited.
        limit: Duration,
    },
}

/// Reads a stream of objects, one after the other.
pub struct ObjectReader {
    body: Body,
    /// The rest of the chunk that was read last.
    chunk: Bytes,
    /// What is still to come of the current object's content, in bytes.
    rest: u64,
    ended: bool,
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
    fn new(body: Body) -> Self {
        Self { body, chunk: Bytes::new(), rest: 0, ended: false, keep: None }
    }

    pub(super) fn of_body<B>(body: B) -> Self
    where
        B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::new(body.map_err(Into::into).boxed_unsync())
    }

    /// Holds `keep` until the reader is dropped.
    pub(super) fn keeping(mut self, keep: impl Send + Sync + 'static) -> Self {
        self.keep = Some(Box::new(keep));
        self
    }

    /// Reads a stream of chunks, such as one that is stored in a file.
    pub fn of_stream<S>(stream: S) -> Self
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        Self::new(streamed(stream))
    }

    /// Reads the head of the next frame; what was not read of the object before is skipped.
    /// After [`Head::End`] it gives that again.
    ///
    /// # Errors
    ///
    /// [`StreamError`] if the stream is cut, garbled or stalls.
    pub async fn head(&mut self) -> Result<Head, StreamError> {
        while self.chunk().await?.is_some() {}
        if self.ended {
            return Ok(Head::End);
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
            let decoded = Head::decode(&bytes).map_err(|source| StreamError::Head { source })?;
            let Some((head, used)) = decoded else {
                self.chunk.advance(take);
                continue;
            };
            self.chunk.advance(used - had);
            match head {
                Head::Object { size_bytes, .. } => self.rest = size_bytes,
                Head::Absent(_) => {}
                Head::End => self.end().await?,
            }
            return Ok(head);
        }
    }

    /// Reads a part of the current object's content; `None` at its end.
    ///
    /// # Errors
    ///
    /// [`StreamError`] if the stream is cut or stalls.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, StreamError> {
        if self.rest == 0 {
            return Ok(None);
        }
        if self.chunk.is_empty() {
            self.chunk = self
                .next()
                .await?
                .ok_or(StreamError::Cut { expected: "the content of an object is incomplete" })?;
        }
        let rest = usize::try_from(self.rest).unwrap_or(usize::MAX);
        let part = self.chunk.split_to(rest.min(self.chunk.len()));
        self.rest -= part.len() as u64;
        Ok(Some(part))
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

    /// The next chunk that is not empty; `None` at the end of the body.
    async fn next(&mut self) -> Result<Option<Bytes>, StreamError> {
        loop {
            let frame = match tokio::time::timeout(CHUNK_WAIT_MAX, self.body.frame()).await {
                Err(_) => return Err(StreamError::Stalled { limit: CHUNK_WAIT_MAX }),
                Ok(None) => return Ok(None),
                Ok(Some(frame)) => frame.map_err(|source| StreamError::Transport { source })?,
            };
            if let Ok(data) = frame.into_data()
                && !data.is_empty()
            {
                return Ok(Some(data));
            }
        }
    }
}

/// The bytes of `head`, for a sender.
#[must_use]
pub fn head_bytes(head: &Head) -> Bytes {
    let mut bytes = Vec::with_capacity(HEAD_BYTES_MAX);
    head.encode(&mut bytes);
    bytes.into()
}

/// The chunks of an object whose content is in memory.
#[must_use]
pub fn object_chunks(id: ObjectId, content: Bytes) -> [Bytes; 2] {
    [head_bytes(&Head::Object { id, size_bytes: content.len() as u64 }), content]
}
