//! Memory for the large messages of all calls that a process makes: requests that are sent, and
//! replies that are read until they are decoded.
//!
//! A message of at most [`FREE_BYTES`] needs no room. A larger one takes room for twice its length,
//! as it grows: for its bytes, and for what they are decoded to. Without free room it waits, in
//! turn. Messages that have some room and wait for more could wait for each other, so one at a time
//! gets all that it needs on top.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The longest message that needs no room, in bytes. Also the flow-control window of a reply, so
/// that no more than this arrives while it waits.
pub(super) const FREE_BYTES: usize = 128 << 10;

/// The memory for large messages of all clients that share it ([`super::Client::sharing`]). Half of
/// it is for requests, so that servers whose replies take long delay no requests to others.
#[derive(Clone, Debug)]
pub struct CallMemory {
    pub(super) requests: Budget,
    pub(super) replies: Budget,
}

impl CallMemory {
    /// Returns room for `bytes`.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { requests: Budget::new(bytes / 2), replies: Budget::new(bytes / 2) }
    }
}

/// Room that messages share.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    room: Arc<Semaphore>,
    /// For the one message that gets all that it needs.
    largest: Arc<Semaphore>,
}

impl Budget {
    fn new(bytes: usize) -> Self {
        Self { room: Arc::new(Semaphore::new(bytes)), largest: Arc::new(Semaphore::new(1)) }
    }
}

/// The room of one message. It is given back when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Without it no room is needed.
    budget: Option<Budget>,
    bytes: usize,
    taken: Option<OwnedSemaphorePermit>,
    largest: Option<OwnedSemaphorePermit>,
}

impl Room {
    pub(super) fn of(budget: Option<&Budget>) -> Self {
        Self { budget: budget.cloned(), ..Self::default() }
    }

    /// True if the message is large.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.is_some() || self.largest.is_some()
    }

    /// Waits until there is room for a message of `bytes`.
    pub(crate) async fn grow(&mut self, bytes: usize) {
        if self.budget.is_some() && bytes > self.bytes.max(FREE_BYTES) && self.largest.is_none() {
            // Boxed, because every call would reserve the memory of the wait, and few wait.
            Box::pin(self.wait(bytes)).await;
        }
    }

    async fn wait(&mut self, bytes: usize) {
        let Some(budget) = &self.budget else { return };
        let wanted = bytes.next_multiple_of(FREE_BYTES);
        let more = u32::try_from(2 * (wanted - self.bytes)).unwrap_or(u32::MAX);
        tokio::select! {
            biased;
            Ok(more) = Arc::clone(&budget.room).acquire_many_owned(more) => {
                match &mut self.taken {
                    Some(taken) => taken.merge(more),
                    None => self.taken = Some(more),
                }
                self.bytes = wanted;
            }
            Ok(largest) = Arc::clone(&budget.largest).acquire_owned() => {
                self.largest = Some(largest);
            }
            else => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    const KIB: usize = 1 << 10;

    /// A message that has grown to so many KiB, if there is room for it.
    fn grown(room: &mut Room, kib: usize) -> bool {
        room.grow(kib * KIB).now_or_never().is_some()
    }

    #[tokio::test]
    async fn small_messages_and_other_clients_need_no_room() {
        let memory = Budget::new(0);
        let mut rooms: Vec<Room> = (0..100).map(|_| Room::of(Some(&memory))).collect();
        assert!(rooms.iter_mut().all(|room| grown(room, 1) && grown(room, 128)));
        let mut unlimited: Vec<Room> = (0..100).map(|_| Room::of(None)).collect();
        assert!(unlimited.iter_mut().all(|room| grown(room, 1 << 20)));
    }

    #[tokio::test]
    async fn large_messages_share_the_room_and_one_more_gets_all_it_needs() {
        let memory = Budget::new(1024 * KIB);
        let room = || Room::of(Some(&memory));
        let (mut one, mut two, mut three) = (room(), room(), room());
        assert!(grown(&mut one, 129), "512 KiB are taken");
        assert!(grown(&mut one, 256), "it has this room already");
        assert!(grown(&mut two, 128) && grown(&mut two, 200), "the rest is taken");
        assert!(grown(&mut three, 64 << 10), "this one comes on top");
        assert!(!grown(&mut two, 257) && !grown(&mut one, 257), "all is taken");
        drop(one);
        assert!(grown(&mut two, 257));
        drop(three);
        assert!(grown(&mut two, 64 << 10), "it comes on top now");
        drop(two);
        assert_eq!(memory.room.available_permits(), 1024 * KIB);
        assert_eq!(memory.largest.available_permits(), 1);
    }

    #[tokio::test]
    async fn messages_that_wait_for_each_other_all_end() {
        let memory = Budget::new(1024 * KIB);
        let ended = (0..100).map(|number| {
            let mut room = Room::of(Some(&memory));
            async move {
                for step in 1..=(number % 10 + 1) * 2 {
                    room.grow(step * FREE_BYTES).await;
                    tokio::task::yield_now().await;
                }
            }
        });
        futures_util::future::join_all(ended).await;
        assert_eq!(memory.room.available_permits(), 1024 * KIB);
    }

    #[tokio::test]
    async fn they_wait_in_turn() {
        let memory = Budget::new(512 * KIB);
        let room = || Room::of(Some(&memory));
        let (mut first, mut largest) = (room(), room());
        assert!(grown(&mut first, 256) && grown(&mut largest, 256));
        let (mut second, mut third) = (room(), room());
        let mut waiting = Box::pin(second.grow(256 * KIB));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(first);
        assert!(!grown(&mut third, 129), "another one came before");
        waiting.await;
    }
}
