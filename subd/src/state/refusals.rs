//! The changes that this machine refuses, and when each may be tried again.
//!
//! A change is refused after it failed, or after staging has found that it would fail. Plans leave
//! it out until its time is over; if it fails again, that time doubles. It is longer if services
//! were stopped for the attempt. What failed because another process changed the path meanwhile may
//! have been a coincidence, and is refused only when it happens again.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;

use api::subd::REFUSED_MAX;
use model::backoff::doubled;
use model::path::TreePath;
use model::plan::{RefusedChange, RefusedKind};
use model::tree::{Child, Tree, only_root_writes};

/// How long a change is refused that staging has found, and the longest such time.
const STAGED: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3_600));

/// The same for a change that failed after services were stopped.
const CARRIED_OUT: (Duration, Duration) =
    (Duration::from_secs(600), Duration::from_secs(24 * 3_600));

/// Of two failures because of another process that are further apart, both may be coincidences.
const COINCIDENCE: Duration = Duration::from_secs(600);

/// How long a failure is remembered after its time is over.
const REMEMBERED: Duration = Duration::from_secs(2 * 24 * 3_600);

/// When a change failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedIn {
    /// While it was staged: nothing was disturbed.
    Staging,
    /// While the update was carried out.
    Commit,
}

/// A change that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedChange {
    pub refused: RefusedChange,
    /// True if another process has changed the path since it was scanned.
    pub is_race: bool,
}

impl FailedChange {
    /// Returns a change that fails whatever other processes do.
    pub fn lasting(path: &TreePath, kind: RefusedKind, why: String) -> Self {
        Self { refused: RefusedChange { path: path.clone(), kind, why }, is_race: false }
    }

    /// Returns a change that failed because another process has changed the path. Where others than
    /// root may do so, all that they can change is refused together: one path at a time would take
    /// for ever.
    pub fn race(path: &TreePath, kind: RefusedKind, why: String, scanned: &Tree) -> Self {
        let refused = match first_writable(scanned, path) {
            Some(directory) => {
                let why = format!("its content changes during updates: {path}: {why}");
                RefusedChange { path: directory, kind: RefusedKind::Below, why }
            }
            None => RefusedChange { path: path.clone(), kind, why },
        };
        Self { refused, is_race: true }
    }
}

/// Returns the topmost directory above `path` that others than root may write to.
fn first_writable(tree: &Tree, path: &TreePath) -> Option<TreePath> {
    let mut above: Vec<TreePath> = path.ancestors().skip(1).collect();
    above.reverse();
    above.into_iter().find(|directory| match tree.get(directory) {
        Some(Child::Directory(directory)) => {
            !only_root_writes(directory.metadata().uid, directory.metadata().mode)
        }
        _ => false,
    })
}

#[derive(Clone, Debug)]
struct Refusal {
    refused: RefusedChange,
    failures: u32,
    /// When it may be tried again; `None` if it may be tried now.
    until: Option<Duration>,
    failed: Duration,
}

/// The refused changes by path. Times are those since subd was started.
#[derive(Clone, Debug, Default)]
pub struct Refusals(BTreeMap<TreePath, Refusal>);

impl Refusals {
    /// Records that a change failed at the time `now`. Returns false if there are too many.
    pub fn add(&mut self, change: FailedChange, failed_in: FailedIn, now: Duration) -> bool {
        let FailedChange { refused, is_race } = change;
        if self.0.len() >= REFUSED_MAX && !self.0.contains_key(&refused.path) {
            return false;
        }
        let known = self.0.entry(refused.path.clone());
        let refusal = known.or_insert_with(|| Refusal {
            refused: refused.clone(),
            failures: 0,
            until: None,
            failed: now,
        });
        if is_race && refusal.until.is_none() && now.saturating_sub(refusal.failed) > COINCIDENCE {
            refusal.failures = 0;
        }
        refusal.failures += 1;
        (refusal.refused, refusal.failed) = (refused, now);
        let (first, longest) = match failed_in {
            FailedIn::Staging => STAGED,
            FailedIn::Commit => CARRIED_OUT,
        };
        let repeated = if is_race { refusal.failures - 1 } else { refusal.failures };
        refusal.until = (repeated > 0).then(|| now + doubled(first, longest, repeated));
        true
    }

    /// Lets changes be tried again whose time is over at `now`.
    pub fn expire(&mut self, now: Duration) {
        self.0.retain(|_, refusal| {
            refusal.until.take_if(|until| *until <= now);
            refusal.until.is_some() || now.saturating_sub(refusal.failed) < REMEMBERED
        });
    }

    /// Lets all changes be tried again, as if they had never failed.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// When the next change may be tried again.
    pub fn next_end(&self) -> Option<Duration> {
        self.0.values().filter_map(|refusal| refusal.until).min()
    }

    /// The changes that are refused now, by path.
    pub fn in_force(&self) -> impl Iterator<Item = &RefusedChange> {
        self.0.values().filter(|refusal| refusal.until.is_some()).map(|refusal| &refusal.refused)
    }

    /// Returns all changes that have failed lately, also those that may be tried again.
    pub fn known(&self) -> impl Iterator<Item = &RefusedChange> {
        self.0.values().map(|refusal| &refusal.refused)
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    fn change(path: &str) -> FailedChange {
        FailedChange::lasting(&path.parse().unwrap(), RefusedKind::Any, "no".to_owned())
    }

    fn paths(refusals: &Refusals) -> Vec<String> {
        refusals.in_force().map(|refused| refused.path.to_string()).collect()
    }

    #[test]
    fn a_change_that_fails_again_is_refused_for_longer() {
        let (mut refusals, start) = (Refusals::default(), Duration::from_secs(1_000));
        let after = |seconds| start + Duration::from_secs(seconds);
        refusals.add(change("/a"), FailedIn::Staging, start);
        refusals.add(change("/b"), FailedIn::Commit, start);
        assert_eq!(paths(&refusals), ["/a", "/b"]);
        assert_eq!(refusals.next_end(), Some(after(60)));
        refusals.expire(after(60));
        assert_eq!(paths(&refusals), ["/b"]);
        refusals.add(change("/a"), FailedIn::Staging, after(61));
        assert_eq!(refusals.next_end(), Some(after(61 + 120)));
        refusals.expire(after(600));
        assert_eq!(paths(&refusals), Vec::<String>::new());
        assert!(refusals.known().eq([&change("/a").refused, &change("/b").refused]));
        refusals.expire(after(61 + REMEMBERED.as_secs()));
        assert_eq!(refusals.known().next(), None);
    }

    #[test]
    fn a_race_is_refused_when_it_happens_again_with_all_that_its_user_can_change() {
        let tree = "d 755 0:0 /home\nd 755 7:7 /home/u\nd 755 7:7 /home/u/d\n\
                    p 644 7:7 1.000000000 /home/u/d/f\np 644 0:0 1.000000000 /home/f";
        let tree = from_text(Algorithm::Blake3, tree).unwrap();
        let race = |path: &str| {
            let path = path.parse().unwrap();
            FailedChange::race(&path, RefusedKind::Removal, "it moved".to_owned(), &tree)
        };
        let (mut refusals, now) = (Refusals::default(), 3 * COINCIDENCE);
        for time in [Duration::ZERO, 2 * COINCIDENCE] {
            for path in ["/home/u/d/f", "/home/f"] {
                refusals.add(race(path), FailedIn::Commit, time);
            }
            assert_eq!(paths(&refusals), Vec::<String>::new());
        }
        for path in ["/home/u/d/other", "/home/f"] {
            refusals.add(race(path), FailedIn::Commit, now);
        }
        let kinds: Vec<_> = refusals.in_force().map(|refused| refused.kind.clone()).collect();
        assert_eq!(paths(&refusals), ["/home/f", "/home/u"]);
        assert_eq!(kinds, [RefusedKind::Removal, RefusedKind::Below]);
    }

    #[test]
    fn not_more_are_remembered_than_one_reply_carries() {
        let (mut refusals, now) = (Refusals::default(), Duration::ZERO);
        for number in 0..REFUSED_MAX {
            assert!(refusals.add(change(&format!("/{number}")), FailedIn::Staging, now));
        }
        assert!(!refusals.add(change("/more"), FailedIn::Staging, now));
        assert!(refusals.add(change("/7"), FailedIn::Staging, now));
        refusals.clear();
        assert_eq!(refusals.next_end(), None);
    }
}
