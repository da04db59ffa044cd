//! Which objects are known to be lost or unreadable, until they are there again.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use model::lock::locked;
use model::object::ObjectId;
use nix::errno::Errno;
use tokio::sync::Notify;

/// The most objects that are remembered. A disk that fails as a whole needs no longer list.
const REMEMBERED_MAX: usize = 100_000;

/// What is wrong with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wound {
    /// It was not what its name says, and was put aside.
    Corrupt,
    /// The disk does not give it back.
    Unreadable,
    /// An image needs it, and it is not there.
    Missing,
}

impl Wound {
    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Corrupt => "corrupt",
            Self::Unreadable => "unreadable",
            Self::Missing => "missing",
        }
    }
}

/// The objects that have to come again.
#[derive(Default)]
pub struct Wounds {
    known: Mutex<BTreeMap<ObjectId, Wound>>,
    changed: Notify,
    is_changed: AtomicBool,
}

impl Wounds {
    /// Takes note that there is something wrong with `id`.
    pub fn add(&self, id: ObjectId, wound: Wound) {
        let mut known = locked(&self.known);
        if known.len() >= REMEMBERED_MAX || known.insert(id, wound) == Some(wound) {
            return;
        }
        drop(known);
        self.is_changed.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Takes note that `id` is whole.
    pub fn heal(&self, id: &ObjectId) {
        let mut known = locked(&self.known);
        if known.is_empty() || known.remove(id).is_none() {
            return;
        }
        drop(known);
        self.is_changed.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// What is wrong with `id`, if that is known.
    #[must_use]
    pub fn of(&self, id: &ObjectId) -> Option<Wound> {
        locked(&self.known).get(id).copied()
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> BTreeMap<ObjectId, Wound> {
        locked(&self.known).clone()
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        locked(&self.known).len()
    }

    /// Forgets what was missing and is not needed any more.
    pub fn forget_missing(&self, is_needed: impl Fn(&ObjectId) -> bool) {
        locked(&self.known).retain(|id, wound| *wound != Wound::Missing || is_needed(id));
    }

    /// True if they have changed since it was last asked, or since [`Wounds::changed`].
    pub fn take_changed(&self) -> bool {
        self.is_changed.swap(false, Ordering::AcqRel)
    }

    /// Resolves when they have changed since it last did. One waits for it.
    pub async fn changed(&self) {
        while !self.take_changed() {
            self.changed.notified().await;
        }
    }
}

/// True if the kernel says that the medium does not give back what it was given.
#[must_use]
pub fn is_unreadable(error: &io::Error) -> bool {
    let Some(errno) = error.raw_os_error().map(Errno::from_raw) else { return false };
    matches!(errno, Errno::EIO | Errno::ENODATA | Errno::EBADMSG | Errno::EUCLEAN | Errno::EILSEQ)
}
