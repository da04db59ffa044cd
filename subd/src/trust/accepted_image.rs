//! The file `accepted.json` in the state directory: which signed image was accepted last.
//!
//! It is written when an update has succeeded, before its journal is removed. It is a file of its
//! own, because nothing that a dominator sends gets into it but the name and the digest of an image
//! that was signed. If it cannot be read, no update is accepted.
//!
//! Its presence says that the machine accepts only signed images. So it is created as soon as subd
//! starts with trusted keys, with `null` in it until an image is accepted; and in `/.subd/state`
//! even if the state is elsewhere. A subd that is then started without keys accepts nothing.

use std::sync::{Arc, Mutex};

use model::lock::locked;
use model::path::TreePath;
use system::durable::{Durable, DurableError, PrettyJson};

use crate::root::{Directory, RootError};
use crate::state::persisted_state::{PersistError, StateDirectory};
use crate::trust::contents;
use crate::trust::verification::{self, AcceptedImage};

const NAME: &str = "accepted.json";

/// The largest file that is read, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// Locked while the file is read to be changed.
static TURN: Mutex<()> = Mutex::new(());

/// The file cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(
    "accepted.json in the state directory, which says which image was accepted last, cannot be \
     read: remove it to have that forgotten"
)]
pub struct UnreadableError {
    #[from]
    source: DurableError,
}

fn write(
    state: &StateDirectory,
    directory: &Arc<Directory>,
    accepted: Option<AcceptedImage>,
) -> Result<(), PersistError> {
    let saved = Durable::new(state.file(directory, NAME, BYTES_MAX), PrettyJson, accepted);
    saved.doubt();
    Ok(saved.save()?)
}

fn exists(directory: &Directory) -> Result<bool, RootError> {
    match directory.open_file(NAME.as_bytes()) {
        Ok(_) => Ok(true),
        Err(error) if error.is_absent() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reads which image was accepted last; `None` if there was none. It is read each time, because an
/// operator may remove the file.
pub fn load(state: &StateDirectory) -> Result<Option<AcceptedImage>, UnreadableError> {
    let saved: Durable<Option<AcceptedImage>, _, _> =
        Durable::load_or_default_as(state.file(state.directory(), NAME, BYTES_MAX), PrettyJson)?;
    Ok(Option::clone(&saved.get()).map(AcceptedImage::with_lines))
}

/// Writes which image was accepted last, with the content that was accepted with it, durably. Of
/// other computed files and bundles what was accepted before stays.
pub fn store(state: &StateDirectory, accepted: &AcceptedImage) -> Result<(), PersistError> {
    let _turn = locked(&TURN);
    let before = load(state).ok().flatten();
    let (mut lines, mut contents) =
        before.map(|before| (before.lines, before.contents)).unwrap_or_default();
    verification::merge_lines(&mut lines, &accepted.lines);
    contents::merge(&mut contents, &accepted.contents);
    write(state, state.directory(), Some(AcceptedImage { lines, contents, ..accepted.clone() }))
}

/// Why it cannot be forgotten when content was signed.
#[derive(Debug, thiserror::Error)]
pub enum ForgetError {
    #[error(transparent)]
    Unreadable(#[from] UnreadableError),
    #[error("accepted.json in the state directory cannot be written")]
    Unwritable(#[from] PersistError),
}

/// Forgets when the content of a computed file was signed, durably. The content itself stays
/// accepted. Returns what is forgotten.
pub fn forget_issued(state: &StateDirectory, path: &TreePath) -> Result<Option<u64>, ForgetError> {
    let _turn = locked(&TURN);
    let Some(mut last) = load(state)? else { return Ok(None) };
    let Some(content) = last.contents.get_mut(path) else { return Ok(None) };
    let issued = std::mem::take(&mut content.issued);
    write(state, state.directory(), Some(last))?;
    Ok((issued > 0).then_some(issued))
}

/// True unless it is certain that this machine was never told to accept only signed images, or that
/// an operator has ended that. Looks into both directories: where the state is may have been in the
/// configuration file that was removed.
pub fn takes_only_signed(state: &StateDirectory) -> bool {
    state.directories().any(|directory| exists(directory).unwrap_or(true))
}

/// Records that this machine accepts only signed images, durably. The image that was accepted last
/// stays recorded.
pub fn store_only_signed(state: &StateDirectory) -> Result<(), PersistError> {
    for directory in state.directories() {
        if !exists(directory)? {
            write(state, directory, None)?;
        }
    }
    Ok(())
}
