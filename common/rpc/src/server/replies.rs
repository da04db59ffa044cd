//! Tracks replies that are being sent to a caller that may not read them.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::time::Instant;

use super::caller::CallerPermit;
use crate::body::{Body, BoxError};
use model::lock::locked;

/// The replies of one connection that wait for the caller to read. Replies that wait for this
/// server, for a disk or for a network limit do not count.
#[derive(Default)]
pub(super) struct Replies(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    last: u64,
    open: usize,
    /// The total length of the counted replies.
    bytes: usize,
    since: BTreeMap<u64, Instant>,
}

impl Replies {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        locked(&self.0)
    }

    /// Returns the longest time for which the caller has read nothing of a waiting reply.
    pub(super) fn longest(&self) -> Duration {
        let waiting = self.waiting();
        waiting.since.values().map(Instant::elapsed).max().unwrap_or_default()
    }

    /// Returns true if a reply is being sent.
    pub(super) fn are_open(&self) -> bool {
        self.waiting().open > 0
    }

    /// Returns how many bytes of the replies that are being sent are counted.
    pub(super) fn bytes(&self) -> usize {
        self.waiting().bytes
    }

    /// Tracks `body` until it was sent or dropped. Until then `bytes` of it are counted, and `held`
    /// is kept.
    pub(super) fn watch(
        self: &Arc<Self>,
        body: Body,
        bytes: usize,
        held: Option<CallerPermit>,
    ) -> Body {
        if body.is_end_stream() {
            return body;
        }
        let number = {
            let mut waiting = self.waiting();
            waiting.last += 1;
            waiting.open += 1;
            waiting.bytes += bytes;
            waiting.last
        };
        let watched = Watched { replies: Arc::clone(self), number, body, bytes, _held: held };
        http_body_util::BodyExt::boxed_unsync(watched)
    }
}

struct Watched {
    replies: Arc<Replies>,
    number: u64,
    body: Body,
    bytes: usize,
    _held: Option<CallerPermit>,
}

impl hyper::body::Body for Watched {
    type Data = Bytes;
    type Error = BoxError;

    /// hyper calls this when the caller has read what was sent before.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let number = self.number;
        self.replies.waiting().since.remove(&number);
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_some() {
            self.replies.waiting().since.insert(number, Instant::now());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut waiting = self.replies.waiting();
        waiting.since.remove(&self.number);
        waiting.open -= 1;
        waiting.bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{full, streamed};
    use crate::server::caller::CallerPermits;
    use http_body_util::BodyExt as _;

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_that_is_not_read_is_told_from_one_that_is_slow_to_make() {
        let replies = Arc::new(Replies::default());
        let mut unread = replies.watch(full(vec![7; 200 << 10]), 200 << 10, None);
        let slow = after(Duration::from_secs(500));
        let mut slow = replies.watch(slow, 0, None);
        assert_eq!((replies.longest(), replies.are_open()), (Duration::ZERO, true));
        pass(1_000).await;
        // The first byte was not polled yet: nothing waits for the caller.
        assert_eq!(replies.longest(), Duration::ZERO);
        unread.frame().await.unwrap().unwrap();
        pass(100).await;
        assert_eq!(replies.longest(), Duration::from_secs(100));
        slow.frame().await.unwrap().unwrap();
        assert_eq!(replies.longest(), Duration::from_secs(600));
        unread.frame().await.unwrap().unwrap();
        assert_eq!(replies.longest(), Duration::ZERO);
        pass(50).await;
        drop(unread);
        assert_eq!(replies.longest(), Duration::from_secs(50));
        drop(slow);
        assert_eq!((replies.longest(), replies.are_open()), (Duration::ZERO, false));
    }

    /// One byte after a delay.
    fn after(wait: Duration) -> Body {
        streamed(futures_util::stream::once(async move {
            tokio::time::sleep(wait).await;
            Ok(Bytes::from_static(b"x"))
        }))
    }

    #[tokio::test]
    async fn what_is_held_is_given_back_with_the_last_of_a_reply() {
        let replies = Arc::new(Replies::default());
        let shares = CallerPermits::new(3, 3);
        let held = shares.own().await;
        let reply = replies.watch(full(vec![7; 200 << 10]), 7, Some(held));
        assert_eq!((shares.free(), replies.bytes()), (2, 7));
        assert_eq!(reply.size_hint().exact(), Some(200 << 10));
        let bytes = reply.collect().await.unwrap().to_bytes();
        assert_eq!((bytes, shares.free(), replies.bytes()), (vec![7; 200 << 10].into(), 3, 0));
    }
}
