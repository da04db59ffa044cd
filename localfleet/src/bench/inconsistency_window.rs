//! Measures how long a machine is neither old nor new, with a thread that polls all the time.
//!
//! inotify reports the renames of one update in order, and so the first and the last path that it
//! changes. Then, in each run, a thread polls the inodes of these two paths.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::fs::inotify;
use rustix::io::Errno;

/// Watches directories for renames.
pub struct RenameWatch {
    queue: OwnedFd,
    directories: BTreeMap<i32, PathBuf>,
    paths: BTreeSet<PathBuf>,
}

impl RenameWatch {
    /// Starts to watch for renames to `paths`.
    ///
    /// # Errors
    ///
    /// If the kernel allows no watches.
    pub fn of(paths: impl IntoIterator<Item = PathBuf>) -> anyhow::Result<Self> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let queue = inotify::init(flags).context("cannot watch for renames")?;
        let mut directories = BTreeMap::new();
        let paths: BTreeSet<PathBuf> = paths.into_iter().collect();
        let parents: BTreeSet<&Path> = paths.iter().filter_map(|path| path.parent()).collect();
        for directory in parents {
            let watch = inotify::add_watch(&queue, directory, inotify::WatchFlags::MOVED_TO)
                .with_context(|| format!("cannot watch {}", directory.display()))?;
            directories.insert(watch, directory.to_owned());
        }
        Ok(Self { queue, directories, paths })
    }

    /// Returns the first and the last target of a rename.
    ///
    /// # Errors
    ///
    /// If there was none.
    pub fn ends(self) -> anyhow::Result<(PathBuf, PathBuf)> {
        let mut buffer = [MaybeUninit::uninit(); 64 << 10];
        let mut reader = inotify::Reader::new(&self.queue, &mut buffer);
        let mut renamed = Vec::new();
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error).context("cannot read renames"),
            };
            let Some(directory) = self.directories.get(&event.wd()) else { continue };
            let name = event.file_name().map(|name| name.to_bytes()).unwrap_or_default();
            let path = directory.join(OsStr::from_bytes(name));
            if self.paths.contains(&path) {
                renamed.push(path);
            }
        }
        ensure!(renamed.len() >= 2, "{} of the paths were renamed to", renamed.len());
        let last = renamed.pop().context("there are two")?;
        Ok((renamed.swap_remove(0), last))
    }
}

/// A thread that polls two paths.
pub struct WindowSampler {
    thread: JoinHandle<Option<Duration>>,
    stop: Arc<AtomicBool>,
}

impl WindowSampler {
    /// Starts to poll both paths.
    ///
    /// # Errors
    ///
    /// If one of them does not exist.
    pub fn start(first: PathBuf, last: PathBuf) -> anyhow::Result<Self> {
        let inode = |path: &Path| {
            let found = fs::symlink_metadata(path).map(|metadata| metadata.ino());
            found.with_context(|| format!("cannot look at {}", path.display()))
        };
        let (old_first, old_last) = (inode(&first)?, inode(&last)?);
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let moved = |path: &Path, old: u64| {
                // A path that does not exist for a moment counts as changed.
                fs::symlink_metadata(path).map_or(true, |metadata| metadata.ino() != old)
            };
            let mut began = None;
            while !is_over.load(Ordering::Relaxed) {
                if began.is_none() && moved(&first, old_first) {
                    began = Some(Instant::now());
                }
                if moved(&last, old_last) {
                    // Both at once: the window was shorter than a poll.
                    return Some(began.map_or(Duration::ZERO, |began| began.elapsed()));
                }
            }
            None
        });
        Ok(Self { thread, stop })
    }

    /// Returns the time between the two changes, after both have happened.
    ///
    /// # Errors
    ///
    /// If they were not seen.
    pub fn window(self) -> anyhow::Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        let seen = self.thread.join().ok().flatten();
        seen.context("the sampler has not seen both paths change")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_a_row_of_renames_and_the_time_between_them_are_seen() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let names = ["c", "a", "b"];
        let swap = || {
            for name in names {
                fs::write(path("new"), name).unwrap();
                fs::rename(path("new"), path(name)).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        names.iter().for_each(|name| fs::write(path(name), "old").unwrap());
        let renames = RenameWatch::of(names.map(path)).unwrap();
        swap();
        let (first, last) = renames.ends().unwrap();
        assert_eq!((&first, &last), (&path("c"), &path("b")));
        let sampler = WindowSampler::start(first, last).unwrap();
        swap();
        // How long it was depends on when the threads ran.
        assert!(!sampler.window().unwrap().is_zero());
    }
}
