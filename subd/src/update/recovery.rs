//! At the start: makes whole the tree of an update that was interrupted, before anything is
//! served, offline.
//!
//! In early boot, with `--recover`, that is all: no service runs yet, and those that systemd starts
//! next start upon a whole tree. The journal stays, and the daemon, when it starts, has nothing
//! left to do but to start what was stopped, to check the health, and to tell how it ended.

use model::report::report;

use super::executor::{Executor, FinalTree, RunningUpdate, Stuck};
use super::phase::Phase;
use crate::root::RootError;
use crate::state::directories::{Directories, directory_name, remove_all};

/// What was found of an update at the start.
#[derive(Debug)]
pub enum Resumed {
    /// Nothing was interrupted.
    Nothing,
    /// One was; its tree was carried to one of its ends, or is stuck.
    Update(Box<RunningUpdate>, Result<(), Stuck>),
    /// One was, and it is not known which or how far: nothing was touched.
    Lost(String),
}

impl Resumed {
    /// Looks for an update that was interrupted, and makes the tree whole.
    #[must_use]
    pub fn at_start(executor: &Executor<'_>) -> Self {
        match executor.find() {
            Ok(None) => Self::Nothing,
            Ok(Some(mut update)) => {
                let update_id = update.update_id();
                let (image, phase) = (&update.journal.head.image, &update.phase);
                tracing::warn!(update_id, %image, ?phase, "this update was interrupted");
                let carried = executor.carry(&mut update);
                match &carried {
                    Ok(()) => tracing::info!(update_id, "{}", tree_text(&update)),
                    Err(stuck) => tracing::error!(update_id, "the update is stuck: {stuck}"),
                }
                Self::Update(Box::new(update), carried)
            }
            Err(error) => {
                let why = report(&error);
                tracing::error!("{why}");
                Self::Lost(why)
            }
        }
    }

    /// The update whose staging and undo directories are needed.
    #[must_use]
    pub fn update_id(&self) -> Option<u64> {
        match self {
            Self::Update(update, _) => Some(update.update_id()),
            Self::Nothing | Self::Lost(_) => None,
        }
    }

    /// Says what was done, for people; the error is why the tree is not whole.
    ///
    /// # Errors
    ///
    /// Why somebody must look at the machine.
    pub fn text(&self) -> Result<String, String> {
        match self {
            Self::Nothing => Ok("no update was interrupted".to_owned()),
            Self::Update(update, Ok(())) => {
                let (id, image) = (update.update_id(), &update.journal.head.image);
                Ok(format!("update {id} to {image} was interrupted: {}", tree_text(update)))
            }
            Self::Update(update, Err(stuck)) => {
                let (id, image) = (update.update_id(), &update.journal.head.image);
                Err(format!("update {id} to {image} is stuck: {stuck}"))
            }
            Self::Lost(why) => Err(why.clone()),
        }
    }
}

fn tree_text(update: &RunningUpdate) -> &'static str {
    match update.settled() {
        Some(FinalTree::New) => "the tree is as the update planned it",
        Some(FinalTree::Old) => "the tree is as it was before the update",
        None => "the tree is mixed",
    }
}

/// Removes what updates of a former run left in `staging`, and in `undo` if they are over; all but
/// what belongs to the update `kept`. Returns the number of directories removed.
///
/// # Errors
///
/// [`RootError`] if something cannot be removed.
pub fn remove_leftovers(directories: &Directories, kept: Option<u64>) -> Result<usize, RootError> {
    let mut removed = 0;
    let staged = kept.map(directory_name);
    for name in directories.staging.names()? {
        if staged.as_deref() != Some(&name) {
            remove_all(&directories.staging, &name)?;
            removed += 1;
        }
    }
    for name in directories.undo.names()? {
        let update = Phase::of_directory(&name);
        if update.is_some_and(|(id, phase)| phase.is_over() && Some(id) != kept) {
            remove_all(&directories.undo, &name)?;
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::Root;

    #[test]
    fn what_is_left_of_updates_that_are_over_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        let directories = Directories::open(&root).unwrap();
        directories.staging.make_directory(b"7", 0o755).unwrap();
        let slot = directories.staging.open_child(b"7").unwrap();
        slot.make_directory(b"0", 0o755).unwrap();
        slot.open_child(b"0").unwrap().create_file(b"\xff", 0o600).unwrap();
        slot.make_symlink(b"1", b"/etc").unwrap();
        directories.staging.make_directory(b"8", 0o755).unwrap();
        for name in ["strange", "7", "7.back", "7.done", "8.rolled-back", "9.live.x"] {
            directories.undo.make_directory(name.as_bytes(), 0o700).unwrap();
        }
        assert_eq!(remove_leftovers(&directories, Some(7)).unwrap(), 2);
        assert_eq!(remove_leftovers(&directories, Some(7)).unwrap(), 0);
        assert_eq!(remove_leftovers(&directories, None).unwrap(), 2);
        let left = ["7", "7.back", "9.live.x", "strange"].map(|name| Box::from(name.as_bytes()));
        assert_eq!(directories.undo.names().unwrap(), left);
    }
}
