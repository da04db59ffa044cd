//! Decides which immutable and append-only flags are taken away for an update, and put back.
//!
//! Only what a step touches is unlocked: the entry that it renames or changes, and the directory
//! that holds it if an entry comes or goes there. A flag is taken away right before the first step
//! that needs it. What is still there when all is done gets its flags back; what was replaced or
//! taken away does not, for it is no part of the tree any more.
// tidy: core

use std::collections::BTreeSet;

use model::path::TreePath;

use super::step::{Script, Step};
use crate::root::Locks;

/// The most unlocked paths that are reported.
pub const UNLOCKED_MAX: usize = 100;

/// Adds to `steps` those that unlock what they need. `find` gives the inode at a path of the tree
/// as it is before the first step, with its flags; `None` if nothing is there.
///
/// # Errors
///
/// What `find` gives.
pub fn unlock<E>(
    steps: Vec<Step>,
    mut find: impl FnMut(&TreePath) -> Result<Option<(u64, Locks)>, E>,
) -> Result<Vec<Step>, E> {
    let mut seen: BTreeSet<TreePath> = BTreeSet::new();
    // What is locked again in the end.
    let mut open: Vec<(TreePath, u64, Locks)> = Vec::new();
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        for path in needed(&step) {
            if !seen.insert(path.clone()) {
                continue;
            }
            let found = find(&path)?.filter(|(_, locks)| *locks != Locks::NONE);
            if let Some((inode, locks)) = found {
                all.push(Step::Unlock { path: path.clone(), inode, locks });
                open.push((path, inode, locks));
            }
        }
        if goes(&step) {
            open.retain(|(path, ..)| path != step.path());
        }
        all.push(step);
    }
    let locking = open.into_iter().rev();
    all.extend(locking.map(|(path, inode, locks)| Step::Lock { path, inode, locks }));
    Ok(all)
}

/// The paths that a step cannot be done with if they are locked.
fn needed(step: &Step) -> Vec<TreePath> {
    let path = step.path();
    let (parent, itself) = match step {
        Step::Change { .. } => (false, true),
        Step::Appear { .. } => (true, false),
        Step::Exchange { .. } | Step::Vanish { .. } => (true, true),
        // A link is made before all other steps, and sees for itself to the flags of its file.
        Step::Link { .. } | Step::Unlock { .. } | Step::Lock { .. } => (false, false),
    };
    let parent = path.parent().filter(|_| parent);
    parent.into_iter().chain(itself.then(|| path.clone())).collect()
}

/// True if what was at the path of the step is not there afterwards.
fn goes(step: &Step) -> bool {
    matches!(step, Step::Exchange { .. } | Step::Vanish { .. })
}

impl Script {
    /// The paths that are unlocked, at most [`UNLOCKED_MAX`].
    #[must_use]
    pub fn unlocked(&self) -> Vec<TreePath> {
        let unlocked = self.steps.iter().filter_map(|step| match step {
            Step::Unlock { path, .. } => Some(path.clone()),
            _ => None,
        });
        unlocked.take(UNLOCKED_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use model::scope::Attributes;
    use model::tree::{Metadata, Time};

    use super::super::step::{Appearance, Former};
    use super::*;
    use crate::update::step_plan::SlotPath;

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    const IMMUTABLE: Locks = Locks { immutable: true, append_only: false };

    /// The steps in short, for steps in a tree where `locked` are immutable.
    fn run(steps: &[Step], locked: &[&str]) -> (Vec<String>, Vec<String>) {
        let mut asked = Vec::new();
        let all = unlock(steps.to_vec(), |path| {
            asked.push(path.to_string());
            let is_locked = locked.iter().any(|one| *one == path.to_string());
            Ok::<_, Infallible>(Some((7, if is_locked { IMMUTABLE } else { Locks::NONE })))
        })
        .unwrap();
        let script = Script { update_id: 1, managed: Attributes::Basic, steps: all };
        let unlocked = script.unlocked().iter().map(ToString::to_string).collect();
        let shown = script.steps.iter().map(|step| {
            let word = match step {
                Step::Link { .. } => "link",
                Step::Appear { .. } => "appear",
                Step::Exchange { .. } => "exchange",
                Step::Vanish { .. } => "vanish",
                Step::Unlock { inode: 7, locks: IMMUTABLE, .. } => "unlock",
                Step::Lock { inode: 7, locks: IMMUTABLE, .. } => "lock",
                Step::Change { .. } => "change",
                Step::Unlock { .. } | Step::Lock { .. } => "wrong",
            };
            format!("{word} {}", step.path())
        });
        (shown.collect(), unlocked)
    }

    #[test]
    fn unlocks_what_the_steps_need_and_locks_what_stays() {
        let former = Former { inode: 1, directory: false, size_bytes: 0, mtime: Time::default() };
        let appearance = Appearance { metadata: Metadata::new(0, 0, 0), mtime: None };
        let steps = [
            Step::Link {
                carrier: path("/l/carrier"),
                inode: 7,
                place: SlotPath { slot: 1, below: TreePath::root() },
            },
            Step::Appear { path: path("/d/new"), slot: 2, inode: 3 },
            Step::Appear { path: path("/top"), slot: 3, inode: 4 },
            Step::Exchange {
                path: path("/d/old"),
                slot: 4,
                inode: 5,
                former,
                displaced: vec![path("/d/old/in")],
            },
            Step::Change {
                path: path("/c"),
                inode: 7,
                former: appearance.clone(),
                wanted: appearance,
            },
            Step::Vanish { path: path("/g/gone"), slot: 5, former },
            Step::Vanish { path: path("/g"), slot: 6, former },
        ];
        let (plain, unlocked) = run(&steps, &["/d/new", "/d/old/in", "/l", "/elsewhere"]);
        assert_eq!((plain.len(), unlocked), (steps.len(), Vec::new()));
        let locked = ["/", "/c", "/d", "/d/old", "/g", "/g/gone", "/l/carrier"];
        let (shown, unlocked) = run(&steps, &locked);
        let expected = [
            "link /l/carrier",
            "unlock /d",
            "appear /d/new",
            "unlock /",
            "appear /top",
            "unlock /d/old",
            "exchange /d/old",
            "unlock /c",
            "change /c",
            "unlock /g",
            "unlock /g/gone",
            "vanish /g/gone",
            "vanish /g",
            "lock /c",
            "lock /",
            "lock /d",
        ];
        assert_eq!(shown, expected);
        assert_eq!(unlocked, ["/d", "/", "/d/old", "/c", "/g", "/g/gone"]);
    }
}
