//! Gives leases and records holds, and saves what of them must outlast a restart.
//!
//! While a server runs the leased objects are known in memory only. But the length of the longest
//! lease is on the medium before the lease is given. A server that stops cleanly saves each lease
//! with the time that remains; the next one removes that file before it gives a lease. After a
//! crash, or if the file is not of the last server, all objects are held for the length of the
//! longest lease. Both files have lengths, not times of day: a lease lasts whatever the clock shows
//! after a restart. The file of the length has a fixed size and is changed in place, so a full disk
//! does not prevent it. One that cannot be read counts as the longest possible lease. It is written
//! regularly, so that a disk that cannot be written is found ([`Leasing::write_error`]).
//!
//! Holds are saved as a whole, without their times.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use api::object_server::LEASE_SECONDS_MAX;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::object::ObjectId;
use serde::{Deserialize, Serialize};

use crate::core::collection::leases::{Leases, RemainingLeases};
use crate::core::image_holds::{Holder, Holds, TooManyError};
use crate::store::contract::{Holding, Leasing};
use crate::store::error::{StoreError, failed};
use crate::store::{files, layout};

/// The fraction by which the saved time is longer than the longest lease, so that few leases change
/// the file.
const SLACK_PART: u64 = 24;

/// The most that the file may say.
const SAVED_MAX: u64 = with_slack(LEASE_SECONDS_MAX as u64);

/// The digits of the file; a line feed follows.
const DIGITS: usize = 15;

/// The leases of a store.
pub struct LocalLeasing {
    started: Instant,
    data: PathBuf,
    /// The saved end of the longest lease. Locked before the table.
    saved_until: Mutex<u64>,
    write_error: Mutex<Option<String>>,
    table: Mutex<Leases>,
    /// The longest lease that is given, in seconds.
    longest: AtomicU32,
}

impl LocalLeasing {
    /// Resumes the leases of the former server. If it did not save them, holds all objects for as
    /// long as they may last; none in a new store. A disk that cannot be written is served.
    pub(in crate::store) fn open(data: &Path, is_new: bool) -> Self {
        let held = if is_new { 0 } else { read(data).unwrap_or(SAVED_MAX).min(SAVED_MAX) };
        let saved = read_leases(data);
        let leasing = Self {
            started: Instant::now(),
            data: data.to_owned(),
            // What cannot be written now is written before the next lease is given.
            saved_until: Mutex::new(0),
            write_error: Mutex::default(),
            table: Mutex::new(saved.map_or_else(|| Leases::new(held), Leases::resume)),
            longest: AtomicU32::new(LEASE_SECONDS_MAX),
        };
        match leasing.begin(held) {
            Ok(()) => *locked(&leasing.saved_until) = held,
            Err(error) => {
                tracing::error!("all objects are held: {}", error_chain(&error));
                *leasing.table() = Leases::new(held);
            }
        }
        leasing
    }

    /// Removes the leases that the former server saved, and saves the length of the longest.
    fn begin(&self, held: u64) -> Result<(), StoreError> {
        self.write(held, Durability::Synced)?;
        let removed = files::if_found(fs_err::remove_file(self.data.join(layout::LEASED)));
        removed.map_err(failed("remove the saved leases"))?;
        files::sync_directory(&self.data)
    }

    /// Returns the seconds since the server started, by a clock that nobody can set.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    /// Locks all leases. While they are locked none is given.
    pub fn table(&self) -> MutexGuard<'_, Leases> {
        locked(&self.table)
    }

    fn write(&self, seconds: u64, durability: Durability) -> Result<(), StoreError> {
        let text = format!("{seconds:0DIGITS$}\n");
        let written = fs_err::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.data.join(layout::LEASES))
            .and_then(|file| {
                file.file().write_all_at(text.as_bytes(), 0)?;
                if durability == Durability::Synced { file.sync_all() } else { Ok(()) }
            })
            .map_err(failed("keep how long leases last"));
        let error = written.as_ref().err().map(|error| error_chain(error));
        let mut known = locked(&self.write_error);
        match (&*known, &error) {
            (None, Some(why)) => tracing::error!("the store cannot be written: {why}"),
            (Some(_), None) => tracing::info!("the store can be written again"),
            _ => {}
        }
        *known = error;
        written
    }
}

impl Leasing for LocalLeasing {
    fn set_longest(&self, seconds: u32) {
        self.longest.store(seconds.min(LEASE_SECONDS_MAX), Ordering::Relaxed);
    }

    fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError> {
        let seconds = match seconds.min(self.longest.load(Ordering::Relaxed)) {
            0 => return Ok(()),
            // One more, because a part of the current second has passed.
            seconds => u64::from(seconds) + 1,
        };
        let mut saved_until = locked(&self.saved_until);
        let now = self.now();
        if now + seconds > *saved_until {
            let left = with_slack(seconds.max(self.table().longest_held_for(now)));
            self.write(left, Durability::Synced)?;
            *saved_until = now + left;
        }
        let mut table = self.table();
        for id in ids {
            table.give(now, id, seconds);
        }
        Ok(())
    }

    fn note_time_passed(&self) -> Result<(), StoreError> {
        let mut saved_until = locked(&self.saved_until);
        let now = self.now();
        let left = with_slack(self.table().longest_held_for(now));
        self.write(left, Durability::Cached)?;
        *saved_until = now + left;
        Ok(())
    }

    fn write_error(&self) -> Option<String> {
        locked(&self.write_error).clone()
    }

    fn close(&self) -> Result<(), StoreError> {
        let left = with_slack(self.table().longest_held_for(self.now()));
        self.write(left, Durability::Synced)?;
        let version = version(&self.data).map_err(failed("keep how long leases last"))?;
        let leases = self.table().remaining(self.now());
        files::write(&self.data, layout::LEASED, &SavedLeases { version, leases })
    }

    fn everything_held_for(&self) -> u64 {
        self.table().everything_held_for(self.now())
    }

    fn count(&self) -> usize {
        self.table().count()
    }
}

/// Whether what was written must be on the medium before the call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durability {
    Synced,
    Cached,
}

/// The leases when a server stopped.
#[derive(Serialize, Deserialize)]
struct SavedLeases {
    /// Of the file with the longest lease: a server that does not know this file changes that one.
    version: (u64, i64, i64),
    leases: RemainingLeases,
}

/// Returns the inode of the file with the longest lease, and when it was changed last, in seconds
/// and nanoseconds.
fn version(data: &Path) -> io::Result<(u64, i64, i64)> {
    let metadata = fs_err::metadata(data.join(layout::LEASES))?;
    Ok((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

/// Returns the leases that the last server saved when it stopped, if it did.
fn read_leases(data: &Path) -> Option<RemainingLeases> {
    let saved: SavedLeases = match files::read(data, layout::LEASED) {
        Ok(saved) => saved?,
        Err(error) => {
            let why = error_chain(&error);
            tracing::warn!("cannot read the leases, so all objects are held: {why}");
            return None;
        }
    };
    let is_of_last = version(data).is_ok_and(|version| version == saved.version);
    is_of_last.then_some(saved.leases)
}

const fn with_slack(seconds: u64) -> u64 {
    seconds + seconds.div_ceil(SLACK_PART)
}

fn read(data: &Path) -> Option<u64> {
    let file = fs_err::File::open(data.join(layout::LEASES)).ok()?;
    let mut bytes = [0; DIGITS + 1];
    file.file().read_exact_at(&mut bytes, 0).ok()?;
    std::str::from_utf8(&bytes).ok()?.strip_suffix('\n')?.parse().ok()
}

/// The images that are in use.
pub struct LocalHolding {
    data: PathBuf,
    started: Instant,
    holds: Mutex<Holds>,
}

impl LocalHolding {
    pub(in crate::store) fn open(data: &Path) -> Self {
        let saved = files::read(data, layout::HOLDS).unwrap_or_else(|error| {
            let why = error_chain(&error);
            tracing::error!("cannot read which images were in use: {why}");
            None
        });
        Self {
            data: data.to_owned(),
            started: Instant::now(),
            holds: Mutex::new(Holds::new(saved.unwrap_or_default())),
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        locked(&self.holds)
    }
}

impl Holding for LocalHolding {
    fn note(
        &self,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u32,
    ) -> Result<(), TooManyError> {
        let mut holds = self.holds();
        if holds.note(self.now(), holder, names, seconds.into())?
            && let Err(error) = files::write(&self.data, layout::HOLDS, &holds.saved())
        {
            // The hold is in force until the server is restarted.
            tracing::error!("cannot save which images are in use: {}", error_chain(&error));
        }
        Ok(())
    }

    fn holders(&self, name: &ImageName) -> Result<Vec<Holder>, StoreError> {
        Ok(self.holds().holders(self.now(), name))
    }

    fn count(&self) -> usize {
        self.holds().held(self.now()).len()
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn held_after_restart(data: &Path) -> u64 {
        LocalLeasing::open(data, false).everything_held_for()
    }

    #[test]
    fn after_a_restart_everything_is_held_for_as_long_as_a_lease_may_last() {
        let data = tempfile::tempdir().unwrap();
        let leasing = LocalLeasing::open(data.path(), true);
        assert_eq!(leasing.everything_held_for(), 0);
        assert_eq!(held_after_restart(data.path()), 0);
        leasing.give(&[Algorithm::Blake3.digest(b"x")], 2_400).unwrap();
        assert_eq!(leasing.everything_held_for(), 0);
        let held = held_after_restart(data.path());
        assert!((2_400..=2_502).contains(&held), "{held}");
        // A lease is not longer than it may be, and a shorter one takes nothing back.
        leasing.give(&[Algorithm::Blake3.digest(b"y")], u32::MAX).unwrap();
        leasing.give(&[Algorithm::Blake3.digest(b"y")], 1).unwrap();
        leasing.note_time_passed().unwrap();
        let held = held_after_restart(data.path());
        assert!((SAVED_MAX - 100..=SAVED_MAX + 2).contains(&held), "{held}");
    }

    #[test]
    fn a_server_that_stops_passes_its_leases_on_once() {
        let data = tempfile::tempdir().unwrap();
        std::fs::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let id = Algorithm::Blake3.digest(b"x");
        let stop = || {
            let leasing = LocalLeasing::open(data.path(), true);
            leasing.give(&[id], 2_400).unwrap();
            leasing.close().unwrap();
        };
        let start = || {
            let leasing = LocalLeasing::open(data.path(), false);
            let is_leased = leasing.table().is_leased(leasing.now(), &id);
            (is_leased, leasing.count(), leasing.everything_held_for() > 0)
        };
        stop();
        assert_eq!(start(), (true, 1, false));
        // That one was killed.
        assert_eq!(start(), (true, 0, true));
        let saved = data.path().join(layout::LEASED);
        stop();
        std::fs::write(&saved, "garbage").unwrap();
        assert_eq!(start(), (true, 0, true));
        // A former release ran since.
        stop();
        let length = data.path().join(layout::LEASES);
        std::fs::write(&length, std::fs::read(&length).unwrap()).unwrap();
        assert_eq!(start(), (true, 0, true));
    }

    #[test]
    fn a_server_may_give_shorter_leases_or_none() {
        let data = tempfile::tempdir().unwrap();
        let leasing = LocalLeasing::open(data.path(), true);
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
            assert!((SAVED_MAX - 100..=SAVED_MAX).contains(&held), "{content}: {held}");
        }
        std::fs::write(data.path().join(layout::LEASES), "000000000000000\n").unwrap();
        assert_eq!(held_after_restart(data.path()), 0);
    }
}
