//! Finishes or undoes the tree changes of an interrupted update when subd starts, before it answers
//! calls.
//!
//! In early boot, with `--recover`, nothing else is done: no service runs yet, and those that
//! systemd starts next find a complete tree. The journal stays. The daemon then starts the services
//! that were stopped, checks the health, and reports the result.

use model::display::error_chain;

use crate::root::{Directory, RootError};
use crate::state::directories::{Directories, directory_name, remove_all};
use crate::update::executor::Executor;
use crate::update::journal::{self, JournalError};
use crate::update::running_update::{FinalTree, RunningUpdate, ServiceState, Stuck, UpdateOrigin};
use crate::update::step::Phase;

/// The interrupted update that was found at the start.
#[derive(Debug)]
pub enum Resumed {
    Nothing,
    /// Found; the tree is as planned or as it was, or is stuck.
    Update(Box<RunningUpdate>, Result<(), Stuck>),
    /// Found, but its journal or its phase cannot be read; nothing was changed.
    Lost(String),
}

impl Resumed {
    /// Looks for an interrupted update, and finishes or undoes its tree changes.
    pub fn at_start(executor: &Executor<'_>) -> Self {
        match executor.find() {
            Ok(None) => Self::Nothing,
            Ok(Some(mut update)) => {
                let update_id = update.update_id();
                let (image, phase) = (&update.journal.head.image, update.phase.name());
                tracing::warn!(update_id, %image, phase, "this update was interrupted");
                let settled_tree = executor.settle_tree(&mut update);
                match &settled_tree {
                    Ok(()) => tracing::info!(update_id, "{}", tree_text(&update)),
                    Err(stuck) => tracing::error!(update_id, "the update is stuck: {stuck}"),
                }
                Self::Update(Box::new(update), settled_tree)
            }
            Err(error) => {
                let why = error_chain(&error);
                tracing::error!("{why}");
                Self::Lost(why)
            }
        }
    }

    /// The update whose staging and undo directories are needed.
    pub fn update_id(&self) -> Option<u64> {
        match self {
            Self::Update(update, _) => Some(update.update_id()),
            Self::Nothing | Self::Lost(_) => None,
        }
    }

    /// Describes what was done; the error is why the tree is mixed.
    ///
    /// # Errors
    ///
    /// A text that says what an operator must repair.
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

/// An interrupted update can be neither finished nor undone with what is on the medium.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LostError {
    #[error("an update was interrupted and its journal cannot be used")]
    Journal { source: JournalError },
    #[error(
        "an update was interrupted and has no journal; what it displaced is in \
         /.subd/undo/{name}: repair the tree, then remove that directory"
    )]
    NoJournal {
        /// The directory with what it displaced.
        name: String,
    },
    #[error("cannot read whether an update was interrupted")]
    Directories {
        #[from]
        source: RootError,
    },
}

impl Executor<'_> {
    /// Looks for an update that was interrupted.
    ///
    /// # Errors
    ///
    /// [`LostError`] if there is one that can be neither finished nor undone. Nothing was changed.
    pub fn find(&self) -> Result<Option<RunningUpdate>, LostError> {
        let lost = |source| LostError::Journal { source };
        let journal = match journal::read(&self.directories.journal) {
            Ok(journal) => journal,
            Err(error @ JournalError::Damaged { .. }) => {
                self.expect_nothing_begun()?;
                tracing::error!(
                    "renaming the damaged journal, no update was begun: {}",
                    error_chain(&error)
                );
                journal::set_aside(&self.directories.journal)?;
                None
            }
            Err(error) => return Err(lost(error)),
        };
        let Some(journal) = journal else {
            self.expect_nothing_begun()?;
            // Remove a journal that was only partly written.
            if let Err(error) = journal::remove(&self.directories.journal) {
                tracing::warn!("{}", error_chain(&error));
            }
            return Ok(None);
        };
        match self.phase_of(journal.head.update_id)? {
            Some(phase) => {
                let mut update = RunningUpdate::new(journal, phase);
                update.origin = UpdateOrigin::Resumed;
                if update.phase.is_over() {
                    update.services = ServiceState::Complete;
                }
                Ok(Some(update))
            }
            None => {
                let update_id = journal.head.update_id;
                tracing::warn!(update_id, "the journal of an update that was never begun");
                journal::remove(&self.directories.journal)?;
                Ok(None)
            }
        }
    }

    fn expect_nothing_begun(&self) -> Result<(), LostError> {
        for name in self.directories.undo.names()? {
            if !Phase::of_directory(&name).is_some_and(|(_, phase)| phase.is_over()) {
                let name = model::escape::escape(&name);
                return Err(LostError::NoJournal { name });
            }
        }
        Ok(())
    }

    fn phase_of(&self, update_id: u64) -> Result<Option<Phase>, LostError> {
        let names = self.directories.undo.names()?;
        let phases = names.iter().filter_map(|name| Phase::of_directory(name));
        let mut phases: Vec<Phase> =
            phases.filter(|(id, _)| *id == update_id).map(|(_, phase)| phase).collect();
        // Leftovers of an earlier update with the same id come last.
        phases.sort_by_key(Phase::is_over);
        let staged = self.directories.staging.names()?;
        let is_staged = staged.iter().any(|name| **name == *directory_name(update_id));
        Ok(match phases.into_iter().next() {
            Some(phase) if !is_staged || !phase.is_over() => Some(phase),
            _ => is_staged.then_some(Phase::Staged),
        })
    }
}

/// Removes the leftovers of updates of a former run in `staging`, and in `undo` if they have ended,
/// except for the update `kept`. Returns the number of removed directories. What cannot be removed,
/// as on a root that is read-only, is logged and stays until the next start.
pub fn remove_leftovers(directories: &Directories, kept: Option<u64>) -> usize {
    let staged = kept.map(directory_name);
    let is_kept = |name: &[u8]| staged.as_deref() == Some(name);
    let is_over = |name: &[u8]| {
        Phase::of_directory(name).is_some_and(|(id, phase)| phase.is_over() && Some(id) != kept)
    };
    remove_if(&directories.staging, |name| !is_kept(name)) + remove_if(&directories.undo, is_over)
}

/// Removes the entries of `directory` whose name fits, and returns their number.
fn remove_if(directory: &Directory, is_leftover: impl Fn(&[u8]) -> bool) -> usize {
    let failed = |error: &RootError| {
        tracing::warn!("leftovers of former updates stay: {}", error_chain(error));
    };
    let names = directory.names().inspect_err(failed).unwrap_or_default();
    let leftovers = names.iter().filter(|name| is_leftover(name));
    leftovers.filter(|name| remove_all(directory, name).inspect_err(failed).is_ok()).count()
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
        assert_eq!(remove_leftovers(&directories, Some(7)), 2);
        assert_eq!(remove_leftovers(&directories, Some(7)), 0);
        assert_eq!(remove_leftovers(&directories, None), 2);
        let left = ["7", "7.back", "9.live.x", "strange"].map(|name| Box::from(name.as_bytes()));
        assert_eq!(directories.undo.names().unwrap(), left);
    }
}
