//! Bodies of HTTP messages: the one type that both sides send, reading with a limit, and whether
//! they may be packed.

use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::HeaderMap;
use hyper::body::Frame;
use hyper::header::ACCEPT_ENCODING;

use super::packing;

/// What hyper accepts as the error of a body.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body that is sent.
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// True if who sent these headers takes packed objects.
pub(super) fn takes_packed(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(ACCEPT_ENCODING).iter();
    values.any(|value| value.to_str().is_ok_and(packing::is_accepted))
}

/// A body of bytes that are in memory.
pub(super) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A body that is asked for one chunk after the other.
pub(super) fn streamed<S>(stream: S) -> Body
where
    S: Stream<Item = std::io::Result<Bytes>> + Send + 'static,
{
    let frames = gathered(stream).map(|chunk| chunk.map(Frame::data).map_err(BoxError::from));
    StreamBody::new(frames).boxed_unsync()
}

/// Chunks shorter than this are joined with those that follow, in bytes: the size of a frame.
const GATHERED_BYTES: usize = 16 << 10;

/// Joins short chunks that are ready, so that they do not become a frame each: HTTP/2 takes a
/// flood of tiny frames for an attack, and ends the connection.
fn gathered<S, E>(stream: S) -> impl Stream<Item = Result<Bytes, E>> + Send
where
    S: Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: Send + 'static,
{
    let mut stream = Box::pin(stream.fuse());
    let mut held = None;
    futures_util::stream::poll_fn(move |context| {
        if let Some(held) = held.take() {
            return Poll::Ready(Some(held));
        }
        let mut joined = BytesMut::new();
        loop {
            match stream.as_mut().poll_next(context) {
                Poll::Ready(Some(Ok(chunk))) if chunk.len() < GATHERED_BYTES => {
                    joined.extend_from_slice(&chunk);
                    if joined.len() >= GATHERED_BYTES {
                        return Poll::Ready(Some(Ok(joined.freeze())));
                    }
                }
                other if joined.is_empty() => return other,
                Poll::Ready(Some(other)) => {
                    held = Some(other);
                    return Poll::Ready(Some(Ok(joined.freeze())));
                }
                Poll::Ready(None) | Poll::Pending => {
                    return Poll::Ready(Some(Ok(joined.freeze())));
                }
            }
        }
    })
}

/// Why a body was not read to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// It is longer than is accepted.
    #[error("a body of more than {limit} bytes")]
    TooLarge {
        /// What is accepted.
        limit: usize,
    },
    /// The connection broke.
    #[error("the body was cut")]
    Cut(#[source] BoxError),
    /// The sender stopped sending.
    #[error("nothing of the body came for {} s", .limit.as_secs())]
    Stalled {
        /// How long was waited.
        limit: Duration,
    },
}

/// Reads `body`, which must not have more than `limit` bytes, and of which a part must come
/// within each `stall`. A length that the sender claims is checked, and never allocated for.
pub(super) async fn read<B>(mut body: B, limit: usize, stall: Duration) -> Result<Bytes, ReadError>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    let claimed = body.size_hint().lower();
    if claimed > u64::try_from(limit).unwrap_or(u64::MAX) {
        return Err(ReadError::TooLarge { limit });
    }
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    loop {
        let frame = match tokio::time::timeout(stall, body.frame()).await {
            Err(_) => return Err(ReadError::Stalled { limit: stall }),
            Ok(None) => break,
            Ok(Some(frame)) => frame.map_err(|error| ReadError::Cut(error.into()))?,
        };
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + all.len() + data.len() > limit {
            return Err(ReadError::TooLarge { limit });
        }
        // Most bodies are one chunk, which need not be copied.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}
