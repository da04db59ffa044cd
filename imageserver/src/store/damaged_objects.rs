//! The objects that are known to be lost or unreadable, until they are stored again.

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

/// The damage of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Damage {
    /// The content did not have the digest of the id, and was quarantined.
    Corrupt,
    /// It is there and cannot be read: [`is_unreadable`].
    Unreadable,
    /// An image needs it, and it is not there.
    Missing,
}

impl Damage {
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
pub struct DamagedObjects {
    known: Mutex<BTreeMap<ObjectId, Damage>>,
    changed: Notify,
    is_changed: AtomicBool,
}

impl DamagedObjects {
    /// Records that there is something wrong with `id`.
    pub fn add(&self, id: ObjectId, damage: Damage) {
        let mut known = locked(&self.known);
        if known.len() >= REMEMBERED_MAX || known.insert(id, damage) == Some(damage) {
            return;
        }
        drop(known);
        self.is_changed.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Records that `id` is whole.
    pub fn mark_repaired(&self, id: &ObjectId) {
        let mut known = locked(&self.known);
        if known.is_empty() || known.remove(id).is_none() {
            return;
        }
        drop(known);
        self.is_changed.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Returns the damage of `id`, if it is known.
    #[must_use]
    pub fn damage(&self, id: &ObjectId) -> Option<Damage> {
        locked(&self.known).get(id).copied()
    }

    /// Returns all damaged objects.
    #[must_use]
    pub fn all(&self) -> BTreeMap<ObjectId, Damage> {
        locked(&self.known).clone()
    }

    /// Returns their number.
    #[must_use]
    pub fn count(&self) -> usize {
        locked(&self.known).len()
    }

    /// Forgets missing objects that are not needed any more.
    pub fn forget_missing(&self, is_needed: impl Fn(&ObjectId) -> bool) {
        locked(&self.known).retain(|id, damage| *damage != Damage::Missing || is_needed(id));
    }

    /// Returns true if they have changed since it was last asked, or since
    /// [`DamagedObjects::changed`].
    pub fn take_changed(&self) -> bool {
        self.is_changed.swap(false, Ordering::AcqRel)
    }

    /// Resolves when the damaged objects have changed since the last call. Only one task may wait.
    pub async fn changed(&self) {
        while !self.take_changed() {
            self.changed.notified().await;
        }
    }
}

/// Returns true if an object cannot be read for as long as nobody repairs it: the medium does not
/// give back what it was given, this process may not read the file, or it is no regular file.
#[must_use]
pub fn is_unreadable(error: &io::Error) -> bool {
    let Some(errno) = error.raw_os_error().map(Errno::from_raw) else { return false };
    matches!(
        errno,
        Errno::EIO
            | Errno::ENODATA
            | Errno::EBADMSG
            | Errno::EUCLEAN
            | Errno::EILSEQ
            | Errno::EACCES
            | Errno::EPERM
            | Errno::EISDIR
            | Errno::ELOOP
    )
}
