//! Counts the entries that a scan leaves out by their owners, beside the scanner: a walk of its own
//! that reads no content. It takes what the budgets of the scanner leave, and ends early when the
//! scanner pauses, as for an update.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::fault::{Fault, FaultCode};
use api::subd::{COUNT_MS_MAX, CountOwnersReply, CountOwnersRequest, OWNERS_MAX};
use model::display::error_chain;
use model::path::TreePath;
use nix::errno::Errno;
use tokio::sync::oneshot;

use crate::limits::Usage;
use crate::root::{Directory, Kind, Root, RootError};
use crate::scan::coverage::{PathAction, PathCoverage};
use crate::scan::thread::ScanControl;
use crate::scan::worker::lower_priority;

/// The most entries that are looked at, kept or not: the walk holds the paths of directories.
const ENTRIES_MAX: u32 = 1_000_000;

/// The budgets are charged after so many entries.
const THROTTLE_ENTRIES: u32 = 256;

/// Starts to count in a thread of its own. Nothing is counted if the answer is dropped.
///
/// # Errors
///
/// `TooLarge`, `Busy` while another count runs, or `Internal`.
pub(super) fn start(
    shared: &Arc<ScanControl>,
    root: Arc<Root>,
    request: CountOwnersRequest,
) -> Result<oneshot::Receiver<CountOwnersReply>, Fault> {
    if request.users.len() + request.groups.len() > OWNERS_MAX {
        let text = format!("at most {OWNERS_MAX} users and groups are counted at once");
        return Err(Fault::new(FaultCode::TooLarge, text));
    }
    let turn = Arc::clone(&shared.counting).try_acquire_owned().map_err(|_| {
        Fault::new(FaultCode::Busy, "it counts files by their owners for another caller")
    })?;
    let (sender, answer) = oneshot::channel();
    let shared = Arc::clone(shared);
    let count = move || {
        lower_priority();
        let time = Duration::from_millis(request.time_ms.min(COUNT_MS_MAX).into());
        let end = Instant::now() + time;
        let mut taken = Usage::now();
        let go_on = || shared.throttle_count(&mut taken, end, || !sender.is_closed());
        let exclusions = shared.exclusions.clone();
        let coverage = PathCoverage::new(Arc::new(request.scan), exclusions);
        let (users, groups) = (&request.users, &request.groups);
        let found = Count::new(&coverage, users, groups, ENTRIES_MAX, go_on).run(&root);
        drop(turn);
        // The caller may have gone.
        drop(sender.send(found));
    };
    let thread = std::thread::Builder::new().name("count".to_owned()).spawn(count);
    let fault = |error: std::io::Error| Fault::new(FaultCode::Internal, error.to_string());
    thread.map_err(fault).map(|_| answer)
}

/// How often each of some numbers was met.
struct Tally<'count> {
    wanted: &'count [u32],
    met: BTreeMap<u32, u32>,
}

impl<'count> Tally<'count> {
    fn new(wanted: &'count [u32]) -> Self {
        Self { wanted, met: wanted.iter().map(|number| (*number, 0)).collect() }
    }

    fn meet(&mut self, number: u32) {
        if let Some(met) = self.met.get_mut(&number) {
            *met += 1;
        }
    }

    fn counts(&self) -> Vec<u32> {
        self.wanted.iter().map(|number| self.met[number]).collect()
    }
}

/// A walk that counts. `go_on` is called again and again; it sleeps to stay within the budgets, and
/// says why the walk must end.
struct Count<'count, F> {
    coverage: &'count PathCoverage,
    users: Tally<'count>,
    groups: Tally<'count>,
    entries_max: u32,
    looked_at: u32,
    go_on: F,
    /// Directories that are still to be read, and whether they are kept.
    pending: Vec<(TreePath, bool)>,
    /// Why the walk has ended early.
    ended: Option<String>,
    /// What could not be read first, and why.
    missed: Option<String>,
}

impl<'count, F: FnMut() -> Result<(), String>> Count<'count, F> {
    fn new(
        coverage: &'count PathCoverage,
        users: &'count [u32],
        groups: &'count [u32],
        entries_max: u32,
        go_on: F,
    ) -> Self {
        Self {
            coverage,
            users: Tally::new(users),
            groups: Tally::new(groups),
            entries_max,
            looked_at: 0,
            go_on,
            pending: vec![(TreePath::root(), false)],
            ended: None,
            missed: None,
        }
    }

    fn run(mut self, root: &Root) -> CountOwnersReply {
        let mut filesystem = None;
        while let Some((path, is_kept)) = self.pending.pop() {
            self.check();
            if self.ended.is_some() {
                break;
            }
            if let Err(error) = self.directory(root, &path, is_kept, &mut filesystem) {
                self.miss(&error);
            }
        }
        CountOwnersReply {
            users: self.users.counts(),
            groups: self.groups.counts(),
            looked_at: self.looked_at,
            unfinished: self.ended.or(self.missed),
        }
    }

    fn check(&mut self) {
        if self.ended.is_none() {
            self.ended = (self.go_on)().err();
        }
    }

    /// Notes an error, unless what it is about has changed or is mounted.
    fn miss(&mut self, error: &RootError) {
        let foreign = [Errno::ENOENT, Errno::ENOTDIR, Errno::ELOOP, Errno::EXDEV];
        if !error.errno().is_some_and(|errno| foreign.contains(&errno)) {
            self.missed.get_or_insert_with(|| error_chain(error));
        }
    }

    /// Looks at the entries of the directory `path`. The first one is the root, which says which
    /// `filesystem` is not left.
    fn directory(
        &mut self,
        root: &Root,
        path: &TreePath,
        is_kept: bool,
        filesystem: &mut Option<u64>,
    ) -> Result<(), RootError> {
        let directory = root.directory(path)?;
        let own = directory.status()?.filesystem;
        if *filesystem.get_or_insert(own) == own {
            directory.names_that(0, |name| {
                self.look(&directory, name, is_kept);
                false
            })?;
        }
        Ok(())
    }

    fn look(&mut self, directory: &Directory, name: &[u8], is_below_kept: bool) {
        if self.looked_at >= self.entries_max {
            let max = self.entries_max;
            self.ended.get_or_insert_with(|| format!("it has more than {max} entries"));
        }
        if self.ended.is_some() {
            return;
        }
        self.looked_at += 1;
        if self.looked_at.is_multiple_of(THROTTLE_ENTRIES) {
            self.check();
        }
        let path = directory.path().join(name);
        let action = path.as_ref().map(|path| self.coverage.action(path));
        if action == Ok(PathAction::Ignore) {
            return;
        }
        // No scan records a name that no image can hold.
        let is_kept = is_below_kept || action != Ok(PathAction::Record);
        let status = match directory.stat(name) {
            Ok(status) => status,
            Err(error) => return self.miss(&error),
        };
        if is_kept {
            self.users.meet(status.uid);
            self.groups.meet(status.gid);
        }
        match path {
            Ok(path) if status.kind == Kind::Directory => self.pending.push((path, is_kept)),
            Err(error) if status.kind == Kind::Directory => {
                let text = format!("a directory in {}: {error}", directory.path());
                self.missed.get_or_insert(text);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use model::filter::{Filter, Patterns};
    use model::scope::{Coverage, ScanSettings};

    use super::*;

    /// Counts by the numbers of the user that runs the test, and by numbers that nobody has.
    fn count(
        place: &std::path::Path,
        filter: &[&str],
        entries_max: u32,
        go_on: impl FnMut() -> Result<(), String>,
    ) -> CountOwnersReply {
        let own = place.metadata().unwrap();
        let coverage = Coverage::Full(Filter::new(filter).unwrap());
        let settings = Arc::new(ScanSettings { coverage, ..ScanSettings::default() });
        let exclusions = Patterns::new(["/opt"]).unwrap();
        let coverage = PathCoverage::new(settings, exclusions);
        let (users, groups) = ([4_000_000_001, own.uid()], [own.gid(), 4_000_000_001]);
        let root = Root::open(place).unwrap();
        Count::new(&coverage, &users, &groups, entries_max, go_on).run(&root)
    }

    #[test]
    fn kept_entries_of_every_kind_are_counted_and_no_others() {
        let place = tempfile::tempdir().unwrap();
        let at = |path: &str| place.path().join(path);
        for directory in ["etc", "var/lib/db/deep", "var/log", ".subd/cache", "opt/own"] {
            std::fs::create_dir_all(at(directory)).unwrap();
            std::fs::write(at(directory).join("file"), "x").unwrap();
        }
        std::fs::write(at("var/lib/db/file"), "x").unwrap();
        symlink("/etc", at("var/lib/db/link")).unwrap();
        std::fs::hard_link(at("var/lib/db/file"), at("var/lib/db/other")).unwrap();
        // Of /opt all: itself, own, own/file. Of /var/lib/db: deep, deep/file, file, link, other.
        let table: [(&[&str], u32); 4] = [
            (&[], 3),
            (&["/var/lib/db/.*"], 3 + 5),
            (&["/var/lib"], 3 + 7),
            (&["/var/log/.*", "/etc/none"], 3 + 1),
        ];
        for (filter, expected) in table {
            let reply = count(place.path(), filter, 100, || Ok(()));
            assert_eq!(reply.users, [0, expected], "{filter:?}");
            assert_eq!(reply.groups, [expected, 0], "{filter:?}");
            assert_eq!(reply.unfinished, None);
        }
    }

    #[test]
    fn a_count_that_ends_early_says_why() {
        let place = tempfile::tempdir().unwrap();
        for number in 0..2_000 {
            std::fs::write(place.path().join(number.to_string()), "").unwrap();
        }
        let keep_all: &[&str] = &["/.*"];
        let many = count(place.path(), keep_all, 700, || Ok(()));
        assert_eq!((many.users[1], many.looked_at), (700, 700));
        assert_eq!(many.unfinished.unwrap(), "it has more than 700 entries");
        let just = count(place.path(), keep_all, 2_000, || Ok(()));
        assert_eq!((just.users[1], just.unfinished), (2_000, None));
        let mut calls = 0;
        let ended = count(place.path(), keep_all, 100_000, || {
            calls += 1;
            if calls > 3 { Err("an update".to_owned()) } else { Ok(()) }
        });
        assert_eq!(ended.unfinished.unwrap(), "an update");
        assert!(ended.users[1] < 1_000 && ended.users[1] > 0, "{}", ended.users[1]);
    }
}
