//! Trials in a directory of subd's own: what its file-system makes of times, and whether it can be
//! written at all.

use std::fs::File;
use std::io::Write;

use model::tree::{Time, Times};

use super::directory::{Directory, errno_of};
use super::{RootError, Status};

/// The name of the file that is made for a moment. What a crash leaves of it is taken away by the
/// next trial.
const NAME: &[u8] = b"trial";

/// How much is written as a trial: a block of most file-systems, so that it is not kept in the
/// inode.
const TRIAL_BYTES: usize = 4_096;

/// Long ago and far ahead: outside what any file-system keeps.
const OUTSIDE: [i64; 2] = [i64::MIN, i64::MAX];

/// Finds out what the file-system keeps of a time that is set.
pub(super) fn times(directory: &Directory) -> Result<Times, RootError> {
    with_file(directory, |_| {
        let kept = |time: Time| -> Result<Time, RootError> {
            directory.set_mtime(NAME, time)?;
            directory.stat(NAME).map(|Status { mtime, .. }| mtime)
        };
        let trial = kept(Times::TRIAL)?;
        let [first, last] = OUTSIDE.map(|seconds| {
            let time = Time { seconds, nanoseconds: 0 };
            // One that takes no such time at all tells nothing of its range.
            kept(time).unwrap_or(time)
        });
        Ok(Times::learned(trial, first, last))
    })
}

/// Writes a file and waits until it is on the medium.
pub(super) fn write(directory: &Directory) -> Result<(), RootError> {
    with_file(directory, |file| {
        let written = file.write_all(&[0; TRIAL_BYTES]).and_then(|()| file.sync_all());
        written.map_err(|error| directory.error("write", NAME, errno_of(&error)))
    })
}

/// Makes the file, has it used, and takes it away whatever happens.
fn with_file<T>(
    directory: &Directory,
    act: impl FnOnce(&mut File) -> Result<T, RootError>,
) -> Result<T, RootError> {
    match directory.unlink(NAME) {
        Err(error) if !error.is_absent() => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = directory.create_file(NAME, 0o600)?;
    let result = act(&mut file);
    let removed = directory.unlink(NAME);
    result.and_then(|value| removed.map(|()| value))
}
