//! Bodies of HTTP messages: their type on both sides, reading with a limit, and whether they may be
//! packed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::HeaderMap;
use hyper::body::{Frame, SizeHint};
use hyper::header::ACCEPT_ENCODING;

use super::client::Room;
use super::pace::{MESSAGE_PACE_BYTES, PACE_WINDOW, Pace};
use super::packing;
use tokio::time::Instant;

/// What hyper accepts as the error of a body.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body that is sent.
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Returns true if the sender of these headers accepts packed objects.
pub(super) fn takes_packed(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(ACCEPT_ENCODING).iter();
    values.any(|value| value.to_str().is_ok_and(packing::is_accepted))
}

/// Returns a body of bytes in memory.
pub(super) fn full(bytes: impl Into<Bytes>) -> Body {
    Full(bytes.into()).boxed_unsync()
}

/// Bytes in memory that are sent in slices, to know how much a peer has read.
struct Full(Bytes);

/// The longest slice, in bytes. Each becomes a frame of HTTP/2, with a head of 9 bytes: h2 reads
/// frames into a buffer of 8 KiB, which a longer frame enlarges for the life of the connection.
pub(super) const SLICE_BYTES: usize = 8_000;

impl hyper::body::Body for Full {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let length = self.0.len().min(SLICE_BYTES);
        let slice = (length > 0).then(|| Ok(Frame::data(self.0.split_to(length))));
        Poll::Ready(slice)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

/// Returns a body from a stream of chunks.
pub(super) fn streamed<S>(stream: S) -> Body
where
    S: Stream<Item = std::io::Result<Bytes>> + Send + 'static,
{
    let frames = gathered(stream).map(|chunk| chunk.map(Frame::data).map_err(BoxError::from));
    StreamBody::new(frames).boxed_unsync()
}

/// Returns `body`, which keeps `kept` until it was sent or dropped.
pub(super) fn keeping(body: Body, kept: impl Send + 'static) -> Body {
    let keep = move |frame| {
        let _kept = &kept;
        frame
    };
    body.map_frame(keep).boxed_unsync()
}

/// Chunks shorter than this are joined with the next ones, in bytes: the size of a frame.
const GATHERED_BYTES: usize = 16 << 10;

/// Joins short chunks that are ready, so that they do not become a frame each: HTTP/2 peers treat a
/// flood of tiny frames as an attack and close the connection.
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

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("a body of more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the body was cut")]
    Cut(#[source] BoxError),
    #[error("nothing of the body came for {} s", .limit.as_secs())]
    Stalled {
        /// How long was waited.
        limit: Duration,
    },
    #[error(
        "the body comes too slowly: it has to be whole, or {} more bytes of it have to come, \
         within {} s", MESSAGE_PACE_BYTES, PACE_WINDOW.as_secs()
    )]
    Slow,
}

/// Reads `body` of at most `limit` bytes. A part must arrive within each `stall`, at the speed of
/// `pace`. A length that the sender states is checked, and no memory is allocated for it.
pub(super) async fn read<B>(
    body: B,
    limit: usize,
    stall: Duration,
    pace: Pace,
) -> Result<Bytes, ReadError>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    read_into(&mut Room::default(), body, limit, stall, pace).await
}

/// As [`read`], with `room` for what has arrived.
pub(super) async fn read_into<B>(
    room: &mut Room,
    mut body: B,
    limit: usize,
    stall: Duration,
    mut pace: Pace,
) -> Result<Bytes, ReadError>
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
        let begun = Instant::now();
        let frame = match tokio::time::timeout(stall.min(pace.left()), body.frame()).await {
            Err(_) if pace.left() < stall => return Err(ReadError::Slow),
            Err(_) => return Err(ReadError::Stalled { limit: stall }),
            Ok(None) => break,
            Ok(Some(frame)) => frame.map_err(|error| ReadError::Cut(error.into()))?,
        };
        let data = frame.into_data().unwrap_or_default();
        if !pace.came(data.len(), begun.elapsed()) {
            return Err(ReadError::Slow);
        }
        if first.len() + all.len() + data.len() > limit {
            return Err(ReadError::TooLarge { limit });
        }
        room.grow(first.len() + all.len() + data.len()).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `count` pieces of `length` bytes, of which one comes each `seconds`.
    async fn read_slowly(count: usize, length: usize, seconds: u64) -> (String, u64) {
        let pieces = futures_util::stream::iter(0..count).then(move |_| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok(Bytes::from(vec![7; length]))
        });
        let begun = Instant::now();
        let pace = Pace::new(MESSAGE_PACE_BYTES);
        let read = read(streamed(pieces), 1 << 30, Duration::from_secs(30), pace).await;
        let told = read.map_or_else(|error| error.to_string(), |body| body.len().to_string());
        (told, begun.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_ends() {
        let slow = "the body comes too slowly: it has to be whole, or 4194304 more bytes of it \
                    have to come, within 60 s";
        let stalled = "nothing of the body came for 30 s";
        let table = [
            ((1_000, 1, 29), (slow, 60)),
            ((1_000, 1, 1), (slow, 60)),
            ((59, 1, 1), ("59", 59)),
            ((1_000, 1, 31), (stalled, 30)),
            ((100, 1 << 20, 10), ("104857600", 1_000)),
            ((100, 600_000, 10), (slow, 60)),
        ];
        for ((count, length, seconds), (want, took)) in table {
            let got = read_slowly(count, length, seconds).await;
            assert_eq!(got, (want.to_owned(), took), "{count} {length} {seconds}");
        }
    }
}
