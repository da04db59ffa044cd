//! Reads one entry of a directory: file, symlink, device, fifo or directory.

use std::io;
use std::time::Instant;

use model::escape::ByteText;
use model::path::{DEPTH_MAX, TreePath};
use model::tree::{Leaf, Name, Xattrs};
use nix::errno::Errno;
use system::clock::wall;

use crate::limits::cpu_time;
use crate::root::{Directory, Kind, RootError, Status};
use crate::scan::known_entries::{
    KnownEntry, KnownLeaf, Mark, Stamp, file_leaf, special_leaf, symlink_leaf,
};
use crate::scan::pass::directory_walk::DirectoryWalk;
use crate::scan::pass::{Interrupted, UNFINISHED_MAX, Walk};
use crate::scan::reading::{HOLE_BYTES_MAX, Reading};

/// Why a file is named that is not read to its end.
const TOO_SLOW: &str = "it takes too long to read: it counts as different from any image until \
                        later passes have read the rest";

/// The result of reading an entry once.
#[expect(clippy::large_enum_variant, reason = "one at a time; a box is an allocation an entry")]
pub(super) enum EntryRead {
    Leaf(Leaf, Mark),
    Directory(DirectoryWalk),
    /// It was removed or changed its kind: read it again.
    Changed,
    Foreign,
    Unreadable(String),
    /// Not an error of the entry: the pass must end.
    Shortage(RootError),
}

impl Walk<'_> {
    /// Reads an entry once; `None` if it does not exist. `left` more tries may follow.
    pub(super) fn read_entry(
        &mut self,
        directory_walk: &DirectoryWalk,
        path: &TreePath,
        name: &Name,
        former: &mut Option<KnownEntry>,
        left: usize,
    ) -> Result<Option<EntryRead>, Interrupted> {
        let Some(directory) = &directory_walk.directory else {
            return Ok(Some(EntryRead::Changed));
        };
        let status = match directory.stat(name.as_bytes()) {
            Ok(status) => status,
            Err(error) if error.is_absent() => return Ok(None),
            Err(error) => return Ok(Some(failure(&error))),
        };
        let seen = match status.kind {
            Kind::File => {
                let former = former.take().and_then(KnownEntry::into_leaf);
                self.read_file_entry(directory, path, name, status, former, left)?
            }
            Kind::Symlink | Kind::Special(_) => {
                if matches!(status.kind, Kind::Special(_)) {
                    self.links.special(&status, path);
                }
                let former = former.take().and_then(KnownEntry::into_leaf);
                self.read_small_entry(directory, path, name, status, former)
            }
            Kind::Directory => self.open_directory(directory_walk, directory, name, former.take()),
            Kind::Other => EntryRead::Unreadable("a socket cannot be part of an image".to_owned()),
        };
        Ok(Some(seen))
    }

    fn read_file_entry(
        &mut self,
        directory: &Directory,
        path: &TreePath,
        name: &Name,
        status: Status,
        former: Option<KnownLeaf>,
        left: usize,
    ) -> Result<EntryRead, Interrupted> {
        if status.links > 1
            && let Some(carrier) = self.links.meet(&status)
        {
            return Ok(EntryRead::Leaf(Leaf::HardLink(carrier.clone()), Mark::Nothing));
        }
        let settings = self.task.coverage.settings();
        let attributes = settings.attributes;
        let must_read = self.task.reread_paths.contains(path);
        let known = former
            .filter(|_| !must_read)
            .and_then(|known| known.with_status(&status, settings.algorithm));
        let (known, status) = match known {
            Some(known) if known.stamp.holds_attributes(&status, attributes) => (known, status),
            Some(KnownLeaf { leaf: Leaf::File(file), .. }) => {
                let stamp = Stamp::new(&status, wall(), attributes, self.task.root.times());
                match directory.xattrs(name.as_bytes(), attributes) {
                    Ok(xattrs) => {
                        let leaf = file_leaf(&status, Xattrs::from_iter(xattrs), file.object);
                        (KnownLeaf { stamp, leaf }, status)
                    }
                    Err(error) => return Ok(failure(&error)),
                }
            }
            _ => match self.read_content(directory, path, name, &status, left)? {
                Ok(read) => read,
                Err(seen) => return Ok(seen),
            },
        };
        self.links.carry(&status, path);
        Ok(EntryRead::Leaf(known.leaf, Mark::Leaf(known.stamp)))
    }

    /// Reads a file. Returns what is known of it, and its status with the size that was read.
    fn read_content(
        &mut self,
        directory: &Directory,
        path: &TreePath,
        name: &Name,
        expected: &Status,
        left: usize,
    ) -> Result<Result<(KnownLeaf, Status), EntryRead>, Interrupted> {
        let settings = self.task.coverage.settings();
        let start = cpu_time();
        self.task.progress.at(path);
        let mut reading = match Reading::start(directory, name.as_bytes(), settings.algorithm) {
            Ok(reading) => reading,
            Err(error) => return Ok(Err(failure(&error))),
        };
        if self.task.medium.has(path, reading.status())
            && let Err(errno) = reading.go_around_cache()
        {
            return Ok(Err(EntryRead::Unreadable(errno.desc().to_owned())));
        }
        let is_skipped = reading.hole_bytes > self.hole_bytes_left;
        match is_skipped {
            true => reading.skip(),
            false => self.hole_bytes_left -= reading.hole_bytes,
        }
        let is_late = match self.read_in_time(path, &mut reading)? {
            Ok(is_whole) => !is_whole,
            Err(error) => return Ok(Err(EntryRead::Unreadable(error.to_string()))),
        };
        // There may be room for it in the next pass.
        let is_settled = !is_late && (!is_skipped || reading.hole_bytes > HOLE_BYTES_MAX);
        self.hashing += cpu_time().saturating_sub(start);
        let was = match reading.finish(directory, name.as_bytes(), Some(settings.attributes)) {
            Ok(was) => was,
            Err(error) => return Ok(Err(failure(&error))),
        };
        if was.status.inode != expected.inode || (!was.stable && left > 0 && !is_late) {
            return Ok(Err(EntryRead::Changed));
        }
        let stamp = if was.stable && is_settled {
            Stamp::new(&was.status, was.started, settings.attributes, self.task.root.times())
        } else {
            Stamp::unsettled(&was.status, settings.attributes)
        };
        let leaf = file_leaf(&was.status, was.xattrs, was.object.into());
        Ok(Ok((KnownLeaf { stamp, leaf }, was.status)))
    }

    /// Reads a file to its end, from where an earlier pass has left it, as long as there is time.
    /// Returns false if there was too little: it counts as a file that no image has, and the next
    /// pass reads on.
    fn read_in_time(
        &mut self,
        path: &TreePath,
        reading: &mut Reading,
    ) -> Result<io::Result<bool>, Interrupted> {
        let former = self.unfinished.remove(path);
        if let Some(former) = former.filter(|_| !self.task.reread_paths.contains(path)) {
            reading.resume(former);
        }
        let (start, min) = (Instant::now(), self.task.reading_min);
        let time_max = self.reading_left.max(min);
        let is_whole = loop {
            if self.interrupted() {
                self.leave(path, reading);
                return Err(Interrupted);
            }
            match reading.step(self.buffer) {
                Ok(0) => break true,
                Ok(length) => {
                    self.task.counters.add_hashed(length);
                    (self.task.throttle)();
                }
                Err(error) => return Ok(Err(error)),
            }
            if start.elapsed() > time_max && !reading.is_at_end() {
                break false;
            }
        };
        let late = start.elapsed().saturating_sub(min);
        self.reading_left = self.reading_left.saturating_sub(late);
        if !is_whole {
            self.leave(path, reading);
            reading.skip();
            self.give_up(path, TOO_SLOW.to_owned());
        }
        Ok(Ok(is_whole))
    }

    fn leave(&mut self, path: &TreePath, reading: &mut Reading) {
        if self.unfinished.len() < UNFINISHED_MAX {
            self.unfinished.insert(path.clone(), reading.leave());
        }
    }

    /// Reads a symlink, device or fifo.
    fn read_small_entry(
        &self,
        directory: &Directory,
        path: &TreePath,
        name: &Name,
        status: Status,
        former: Option<KnownLeaf>,
    ) -> EntryRead {
        let settings = self.task.coverage.settings();
        if let Some(known) = former
            && !self.task.reread_paths.contains(path)
            && known.stamp.holds_attributes(&status, settings.attributes)
            && let Some(known) = known.with_status(&status, settings.algorithm)
        {
            return EntryRead::Leaf(known.leaf, Mark::Leaf(known.stamp));
        }
        let stamp = Stamp::new(&status, wall(), settings.attributes, self.task.root.times());
        let xattrs =
            || directory.xattrs(name.as_bytes(), settings.attributes).map(Xattrs::from_iter);
        let leaf = match status.kind {
            Kind::Special(device) => match directory.is_mount_point(name.as_bytes()) {
                Ok(false) => xattrs().map(|xattrs| special_leaf(&status, xattrs, device)),
                Ok(true) => return EntryRead::Foreign,
                Err(error) => Err(error),
            },
            _ => directory
                .read_link(name.as_bytes())
                .and_then(|target| Ok(symlink_leaf(&status, xattrs()?, ByteText(target)))),
        };
        match leaf {
            Ok(leaf) => EntryRead::Leaf(leaf, Mark::Leaf(stamp)),
            Err(error) => failure(&error),
        }
    }

    /// Opens a directory below `directory_walk`.
    fn open_directory(
        &self,
        directory_walk: &DirectoryWalk,
        directory: &Directory,
        name: &Name,
        former: Option<KnownEntry>,
    ) -> EntryRead {
        let depth = directory_walk.depth + 1;
        if depth >= DEPTH_MAX {
            return EntryRead::Unreadable(format!("it is deeper than {DEPTH_MAX} directories"));
        }
        let opened = directory.open_child(name.as_bytes()).and_then(|below| {
            let status = below.status()?;
            Ok((below, status))
        });
        let (below, status) = match opened {
            Ok(opened) => opened,
            Err(error) => return failure(&error),
        };
        if status.filesystem != self.filesystem {
            return EntryRead::Foreign;
        }
        let former = former.and_then(KnownEntry::into_directory);
        match self.start_directory(below, status, Some(name.clone()), depth, former) {
            Ok(directory_walk) => EntryRead::Directory(directory_walk),
            Err((error, _)) => failure(&error),
        }
    }
}

/// Returns what an error means for the entry that was read.
fn failure(error: &RootError) -> EntryRead {
    match error.errno() {
        Some(Errno::EXDEV) => EntryRead::Foreign,
        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => EntryRead::Shortage(error.clone()),
        // It existed before, or was of another kind.
        Some(
            Errno::ENOENT
            | Errno::ELOOP
            | Errno::ENOTDIR
            | Errno::EINVAL
            | Errno::ESTALE
            | Errno::ENXIO,
        ) => EntryRead::Changed,
        Some(errno) => EntryRead::Unreadable(errno.desc().to_owned()),
        None if matches!(error, RootError::NotRegular { .. }) => EntryRead::Changed,
        None => EntryRead::Unreadable(error.to_string()),
    }
}
