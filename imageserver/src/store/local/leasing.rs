//! Gives leases, and keeps over a restart for how long any may last.
//!
//! Which objects are leased is known in memory only. But how long the longest lease lasts is on the
//! medium before it is given, and for so long all objects are held after a start. What is kept is
//! a length, not a time of day: whatever the clock of the machine shows after a restart, a lease
//! that was given lasts. The file is of one length and is changed in place, so that a full disk
//! does not hinder it; one that cannot be read stands for the longest lease there is.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use api::object_server::LEASE_SECONDS_MAX;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::lock::locked;
use model::object::ObjectId;

use crate::core::collection::leases::Leases;
use crate::store::contract::Leasing;
use crate::store::{
    error::{StoreError, failed},
    layout,
};

/// By which part of it more than the longest lease is kept, so that not each lease changes the
/// file.
const SLACK_PART: u64 = 24;

/// The most that the file may say.
const KEPT_MAX: u64 = with_slack(LEASE_SECONDS_MAX as u64);

/// The digits of the file; a line feed follows.
const DIGITS: usize = 15;

/// The leases of a store.
pub struct LocalLeasing {
    started: Instant,
    file: fs_err::File,
    /// Until when the file says that leases may last. Locked before the table.
    kept_until: Mutex<u64>,
    table: Mutex<Leases>,
    /// The longest lease that is given, in seconds.
    longest: AtomicU32,
}

impl LocalLeasing {
    /// Holds all objects for as long as leases of a former server may last. A store that is new
    /// never had one.
    pub(in crate::store) fn open(data: &Path, is_new: bool) -> Result<Self, StoreError> {
        let why = || failed("open the file of leases");
        let file = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(data.join(layout::LEASES))
            .map_err(why())?;
        let held = if is_new { 0 } else { read(&file).unwrap_or(KEPT_MAX).min(KEPT_MAX) };
        let leasing = Self {
            started: Instant::now(),
            file,
            kept_until: Mutex::new(held),
            table: Mutex::new(Leases::new(held)),
            longest: AtomicU32::new(LEASE_SECONDS_MAX),
        };
        leasing.write(held)?;
        leasing.file.sync_all().map_err(why())?;
        crate::store::files::sync_directory(data)?;
        Ok(leasing)
    }

    /// Gives no lease that is longer than so many seconds from now on.
    pub fn set_longest(&self, seconds: u32) {
        self.longest.store(seconds.min(LEASE_SECONDS_MAX), Ordering::Relaxed);
    }

    /// Seconds since the server started, by a clock that nobody can set.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Holds `ids` for `seconds`, or as long as leases are at most. Whoever then finds one of them
    /// there will find it there until the lease ends.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError> {
        let seconds = match seconds.min(self.longest.load(Ordering::Relaxed)) {
            0 => return Ok(()),
            // One more, because a part of the present second has passed.
            seconds => u64::from(seconds) + 1,
        };
        let mut kept_until = locked(&self.kept_until);
        let now = self.now();
        if now + seconds > *kept_until {
            self.write(with_slack(seconds))?;
            self.file.sync_data().map_err(failed("keep how long leases last"))?;
            *kept_until = now + with_slack(seconds);
        }
        let mut table = self.table();
        for id in ids {
            table.give(now, id, seconds);
        }
        Ok(())
    }

    /// Keeps that time has passed. It need not be on the medium: what is there lasts longer.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn count_down(&self) -> Result<(), StoreError> {
        let mut kept_until = locked(&self.kept_until);
        let now = self.now();
        let left = with_slack(self.table().longest_for(now));
        self.write(left)?;
        *kept_until = now + left;
        Ok(())
    }

    /// For how many seconds more nothing at all is removed.
    #[must_use]
    pub fn everything_for(&self) -> u64 {
        self.table().everything_for(self.now())
    }

    /// How many objects are leased.
    #[must_use]
    pub fn count(&self) -> usize {
        self.table().count()
    }

    /// All leases. While they are locked none is given.
    pub fn table(&self) -> MutexGuard<'_, Leases> {
        locked(&self.table)
    }

    fn write(&self, seconds: u64) -> Result<(), StoreError> {
        let text = format!("{seconds:0DIGITS$}\n");
        let written = self.file.file().write_all_at(text.as_bytes(), 0);
        written.map_err(failed("keep how long leases last"))
    }
}

impl Leasing for LocalLeasing {
    fn set_longest(&self, seconds: u32) {
        self.set_longest(seconds);
    }

    fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError> {
        self.give(ids, seconds)
    }

    fn count_down(&self) -> Result<(), StoreError> {
        self.count_down()
    }

    fn everything_for(&self) -> u64 {
        self.everything_for()
    }

    fn count(&self) -> usize {
        self.count()
    }
}

const fn with_slack(seconds: u64) -> u64 {
    seconds + seconds.div_ceil(SLACK_PART)
}

fn read(file: &fs_err::File) -> Option<u64> {
    let mut bytes = [0; DIGITS + 1];
    file.file().read_exact_at(&mut bytes, 0).ok()?;
    std::str::from_utf8(&bytes).ok()?.strip_suffix('\n')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn held_after_restart(data: &Path) -> u64 {
        LocalLeasing::open(data, false).unwrap().everything_for()
    }

    #[test]
    fn after_a_restart_everything_is_held_for_as_long_as_a_lease_may_last() {
        let data = tempfile::tempdir().unwrap();
        let leasing = LocalLeasing::open(data.path(), true).unwrap();
        assert_eq!(leasing.everything_for(), 0);
        assert_eq!(held_after_restart(data.path()), 0);
        leasing.give(&[Algorithm::Blake3.digest(b"x")], 2_400).unwrap();
        assert_eq!(leasing.everything_for(), 0);
        let held = held_after_restart(data.path());
        assert!((2_400..=2_502).contains(&held), "{held}");
        // A lease is not longer than it may be, and a shorter one takes nothing back.
        leasing.give(&[Algorithm::Blake3.digest(b"y")], u32::MAX).unwrap();
        leasing.give(&[Algorithm::Blake3.digest(b"y")], 1).unwrap();
        leasing.count_down().unwrap();
        let held = held_after_restart(data.path());
        assert!((KEPT_MAX - 100..=KEPT_MAX + 2).contains(&held), "{held}");
    }

    #[test]
    fn a_server_may_give_shorter_leases_or_none() {
        let data = tempfile::tempdir().unwrap();
        let leasing = LocalLeasing::open(data.path(), true).unwrap();
        let id = Algorithm::Blake3.digest(b"x");
        leasing.set_longest(0);
        leasing.give(&[id], u32::MAX).unwrap();
        assert_eq!((leasing.table().count(), held_after_restart(data.path())), (0, 0));
        leasing.set_longest(240);
        leasing.give(&[id], u32::MAX).unwrap();
        assert_eq!(leasing.table().count(), 1);
        let held = held_after_restart(data.path());
        assert!((200..=252).contains(&held), "{held}");
    }

    #[test]
    fn what_cannot_be_read_stands_for_the_longest_lease() {
        let data = tempfile::tempdir().unwrap();
        for content in ["", "00000000000000", "garbage garbage\n", "999999999999999\n"] {
            std::fs::write(data.path().join(layout::LEASES), content).unwrap();
            let held = held_after_restart(data.path());
            assert!((KEPT_MAX - 100..=KEPT_MAX).contains(&held), "{content}: {held}");
        }
        std::fs::write(data.path().join(layout::LEASES), "000000000000000\n").unwrap();
        assert_eq!(held_after_restart(data.path()), 0);
    }
}
