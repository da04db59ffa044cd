//! The work of one machine that is under way: few futures, so all are polled together.
//!
//! `FuturesUnordered` wakes its task again whenever it has polled all its futures. With one future,
//! as for an idle machine, that is always: each call woke another thread of the runtime for
//! nothing.

use std::future::poll_fn;
use std::task::Poll;

use futures_util::future::BoxFuture;

/// Futures that run at the same time.
pub(super) struct Running<T> {
    /// The oldest first.
    futures: Vec<BoxFuture<'static, T>>,
}

impl<T> Running<T> {
    pub(super) fn new() -> Self {
        Self { futures: Vec::new() }
    }

    /// Adds a future, which runs when [`Running::next`] is next awaited.
    pub(super) fn push(&mut self, future: BoxFuture<'static, T>) {
        self.futures.push(future);
    }

    /// Waits until one of the futures has ended, the oldest if there are several, and removes it.
    /// Waits forever if it has no futures. May be dropped at any time.
    pub(super) async fn next(&mut self) -> T {
        poll_fn(|context| {
            for index in 0..self.futures.len() {
                if let Poll::Ready(output) = self.futures[index].as_mut().poll(context) {
                    drop(self.futures.remove(index));
                    return Poll::Ready(output);
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};
    use tokio::sync::oneshot;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn added(running: &mut Running<usize>) -> oneshot::Sender<usize> {
        let (sender, receiver) = oneshot::channel();
        running.push(receiver.map(|received| received.unwrap()).boxed());
        sender
    }

    #[test]
    fn those_that_have_ended_are_returned_and_others_wait() {
        let mut running = Running::new();
        let [first, second, third] = [(); 3].map(|()| added(&mut running));
        assert_eq!(running.next().now_or_never(), None);
        third.send(3).unwrap();
        first.send(1).unwrap();
        assert_eq!(running.next().now_or_never(), Some(1));
        assert_eq!(running.next().now_or_never(), Some(3));
        assert_eq!(running.next().now_or_never(), None);
        second.send(2).unwrap();
        assert_eq!(running.next().now_or_never(), Some(2));
        assert_eq!(running.next().now_or_never(), None);
    }

    #[test]
    fn the_task_is_woken_only_when_one_has_ended() {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut running = Running::new();
        let sender = added(&mut running);
        assert!(pin!(running.next()).poll(&mut context).is_pending());
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        sender.send(1).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    }
}
