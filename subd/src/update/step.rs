//! The steps and the phases of an update, as data.
//!
//! A [`Script`] is all that is needed to carry an update out, to carry it out again after it was
//! interrupted anywhere, and to undo it: each step names the inode that it puts in place and the
//! inode that was there. It is complete before the first step is taken, and
//! [`activate`](crate::update::activate) only follows it. The [journal](crate::update::journal)
//! keeps it over a crash.
//!
//! The [`Phase`] is the name of the directory that holds the slots. A change of the phase is one
//! rename, which is atomic and needs no space. The name counts only together with the journal of
//! the same update; the slots of an update that is over may be freed at any time.
//!
//! | phase | directory | the tree | what is to be done |
//! |---|---|---|---|
//! | staged | `staging/ID` | as it was | all of it |
//! | begun | `undo/ID` | anywhere between | the rest of the steps |
//! | live | `undo/ID.live.BOOT` | as planned, synced | services, health check |
//! | back | `undo/ID.back` | anywhere between | undo all steps, services |
//! | undoing | `undo/ID.undoing` | anywhere between | the same, after a health check |
//! | done | `undo/ID.done` | as planned, synced | record it, free the slots |
//! | rolled back | `undo/ID.rolled-back` | as it was, synced | record it, free the slots |
//! | undone | `undo/ID.undone` | as it was, synced | the same, after a health check |
//!
//! [`unlock`] decides which immutable and append-only flags are cleared for an update, and set
//! again. Only what a step touches is unlocked: the entry that it renames or changes, and the
//! directory that holds it if an entry is added or removed there. A flag is cleared right before
//! the first step that needs it. What still exists after the last step gets its flags back; what
//! was replaced or removed does not, because it is no part of the tree any more.
// tidy: core

use std::collections::BTreeSet;

use model::path::TreePath;
use model::scope::Attributes;
use model::tree::{Metadata, Time};
use serde::{Deserialize, Serialize};

use crate::root::Locks;
use crate::update::step_plan::SlotPath;

/// All steps of one update, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Script {
    pub update_id: u64,
    /// Which extended attributes are managed.
    pub managed: Attributes,
    pub steps: Vec<Step>,
}

/// The entry that was at a path when the update was staged. It must still be the same inode, or a
/// file of the same length and time; its content may have changed, because the image decides what
/// is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerEntry {
    pub inode: u64,
    pub directory: bool,
    /// Its length, in bytes.
    pub size_bytes: u64,
    /// When its content was changed. Not ctime: renaming another name of the inode changes that.
    pub mtime: Time,
}

/// The metadata that is changed in place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryMetadata {
    /// Mode, owner, managed extended attributes.
    pub metadata: Metadata,
    /// Time of modification, where it is managed.
    pub mtime: Option<Time>,
}

/// One step. Each can be repeated, and can be undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Link a file of the tree into a slot. Nothing visible changes.
    Link { carrier: TreePath, inode: u64, place: SlotPath },
    /// Move a slot's entry to a free path.
    Appear {
        path: TreePath,
        slot: u32,
        /// The inode in the slot.
        inode: u64,
    },
    /// Exchange a slot's entry with the entry at a path.
    Exchange {
        path: TreePath,
        slot: u32,
        /// The inode in the slot.
        inode: u64,
        /// The entry at the path.
        former: FormerEntry,
        /// If that is a directory: all that it holds.
        displaced: Vec<TreePath>,
    },
    /// Move the entry at a path into a slot. A directory must be empty.
    Vanish {
        path: TreePath,
        slot: u32,
        /// The entry at the path.
        former: FormerEntry,
    },
    /// Remove an empty directory that cannot be moved or exchanged.
    RemoveDirectory {
        path: TreePath,
        /// What it gets when it is made again.
        former: EntryMetadata,
    },
    /// Clear the immutable and append-only flags of an inode.
    Unlock {
        path: TreePath,
        inode: u64,
        /// The flags that it has.
        locks: Locks,
    },
    /// Set the flags again that [`Step::Unlock`] cleared.
    Lock {
        path: TreePath,
        inode: u64,
        /// The flags that it had.
        locks: Locks,
    },
    /// Change the metadata at a path in place.
    Change { path: TreePath, inode: u64, former: EntryMetadata, wanted: EntryMetadata },
}

impl Step {
    /// The path that the step is for.
    pub fn path(&self) -> &TreePath {
        match self {
            Self::Link { carrier: path, .. }
            | Self::Appear { path, .. }
            | Self::Exchange { path, .. }
            | Self::Vanish { path, .. }
            | Self::RemoveDirectory { path, .. }
            | Self::Unlock { path, .. }
            | Self::Lock { path, .. }
            | Self::Change { path, .. } => path,
        }
    }

    /// True if other programs can see the step.
    pub fn is_visible(&self) -> bool {
        !matches!(self, Self::Link { .. } | Self::Unlock { .. } | Self::Lock { .. })
    }
}

/// The phase of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    Staged,
    /// The steps are being taken.
    Begun,
    /// The tree is as planned.
    Live {
        /// The boot in which it became live.
        boot_id: String,
    },
    /// A step failed: all steps are being undone.
    Back,
    /// The health check failed: all steps are being undone.
    Undoing,
    /// It has ended, and the tree is as planned.
    Done,
    /// It has ended, and the tree is as it was, because a step failed.
    RolledBack,
    /// It has ended, and the tree is as it was, because the health check failed.
    Undone,
}

const ENDINGS: [(Phase, &str); 5] = [
    (Phase::Back, "back"),
    (Phase::Undoing, "undoing"),
    (Phase::Done, "done"),
    (Phase::RolledBack, "rolled-back"),
    (Phase::Undone, "undone"),
];

impl Phase {
    /// The phases of updates that have ended.
    pub const OVER: [Self; 3] = [Self::Done, Self::RolledBack, Self::Undone];

    /// True if only reporting the result is left.
    pub fn is_over(&self) -> bool {
        Self::OVER.contains(self)
    }

    /// The name of the phase, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Begun => "begun",
            Self::Live { .. } => "live",
            other => other.ending(),
        }
    }

    /// The ending of the directory, for phases in [`ENDINGS`].
    fn ending(&self) -> &'static str {
        let ending = ENDINGS.iter().find(|(phase, _)| phase == self);
        ending.expect("the others have endings").1
    }

    /// The name of the directory with the slots.
    pub fn directory(&self, update_id: u64) -> Vec<u8> {
        let name = match self {
            Self::Staged | Self::Begun => update_id.to_string(),
            Self::Live { boot_id } => format!("{update_id}.live.{boot_id}"),
            other => format!("{update_id}.{}", other.ending()),
        };
        name.into_bytes()
    }

    /// Parses the name of a directory in `undo`; `None` for a name that subd does not make.
    pub fn of_directory(name: &[u8]) -> Option<(u64, Self)> {
        let name = std::str::from_utf8(name).ok()?;
        let (update_id, ending) = name.split_once('.').unwrap_or((name, ""));
        let phase = match ending.strip_prefix("live.") {
            _ if name == update_id => Self::Begun,
            Some(boot_id) => Self::Live { boot_id: boot_id.to_owned() },
            None => ENDINGS.iter().find(|(_, known)| *known == ending)?.0.clone(),
        };
        let update_id: u64 = update_id.parse().ok()?;
        (phase.directory(update_id) == name.as_bytes()).then_some((update_id, phase))
    }
}

/// The most unlocked paths that are reported.
pub const UNLOCKED_MAX: usize = 100;

/// Adds to `steps` those that clear flags, and set them again. `find` returns the inode at a path
/// of the tree before the first step, with its flags; `None` if nothing is there.
pub fn unlock<E>(
    steps: Vec<Step>,
    mut find: impl FnMut(&TreePath) -> Result<Option<(u64, Locks)>, E>,
) -> Result<Vec<Step>, E> {
    let mut seen: BTreeSet<TreePath> = BTreeSet::new();
    // What is locked again after the last step.
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

/// Returns the paths that must be unlocked for a step.
fn needed(step: &Step) -> Vec<TreePath> {
    let path = step.path();
    let (parent, itself) = match step {
        Step::Change { .. } => (false, true),
        Step::Appear { .. } => (true, false),
        Step::Exchange { .. } | Step::Vanish { .. } | Step::RemoveDirectory { .. } => (true, true),
        // A link is made before all other steps, and clears the flags of its file itself.
        Step::Link { .. } | Step::Unlock { .. } | Step::Lock { .. } => (false, false),
    };
    let parent = path.parent().filter(|_| parent);
    parent.into_iter().chain(itself.then(|| path.clone())).collect()
}

/// True if the step replaces or removes the entry at its path.
fn goes(step: &Step) -> bool {
    matches!(step, Step::Exchange { .. } | Step::Vanish { .. } | Step::RemoveDirectory { .. })
}

impl Script {
    /// Returns the paths that are unlocked, at most [`UNLOCKED_MAX`].
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
    use super::*;

    #[test]
    fn names_and_phases_fit() {
        #[rustfmt::skip]
        let table = [
            (Phase::Begun,                              "7"),
            (Phase::Live { boot_id: "1-2".to_owned() }, "7.live.1-2"),
            (Phase::Live { boot_id: String::new() },    "7.live."),
            (Phase::Back,                               "7.back"),
            (Phase::Undoing,                            "7.undoing"),
            (Phase::Done,                               "7.done"),
            (Phase::RolledBack,                         "7.rolled-back"),
            (Phase::Undone,                             "7.undone"),
        ];
        for (phase, name) in table {
            assert_eq!(phase.directory(7), name.as_bytes());
            assert_eq!(Phase::of_directory(name.as_bytes()), Some((7, phase)));
        }
        for name in ["", "07", "7.", "+7", "7.gone", "7.live", ".done", "x", "7.done.", "\u{e9}"] {
            assert_eq!(Phase::of_directory(name.as_bytes()), None, "{name}");
        }
    }
}

#[cfg(test)]
mod locking_tests {
    use std::convert::Infallible;

    use model::scope::Attributes;
    use model::tree::{Metadata, Time};

    use super::*;
    use crate::update::step::{EntryMetadata, FormerEntry};
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
                Step::RemoveDirectory { .. } => "remove directory",
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
        let former =
            FormerEntry { inode: 1, directory: false, size_bytes: 0, mtime: Time::default() };
        let entry_metadata = EntryMetadata { metadata: Metadata::new(0, 0, 0), mtime: None };
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
                former: entry_metadata.clone(),
                wanted: entry_metadata,
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
