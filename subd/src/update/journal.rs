//! The journal: all that is needed to finish or to undo an update after a crash, in one file,
//! `/.subd/journal/update`.
//!
//! It is on the medium before anything changes, and goes when the result is. Written to a
//! temporary, synced and renamed, so that there is one that is whole or none. Each line is a record
//! in JSON: the head, the objects that were taken, the steps, and at the end their numbers and a
//! digest of all the lines before. So one that was damaged is known, and a later release, which may
//! be what the update brings, can read it.
//!
//! # Invariants
//!
//! * A journal that was read is the one that was written.
//! * At most [`JOURNAL_BYTES_MAX`] are written or read.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};

use model::image::{HealthCheck, ImageName};
use model::object::{Algorithm, Hasher, ObjectId};
use model::scope::Attributes;
use model::trigger::Triggers;
use model::trigger::services::ServiceCalls;
use serde::{Deserialize, Serialize};

use super::stage::TakenObject;
use super::step::{Script, Step};
use crate::root::{Directory, RootError};
use crate::state::accepted_image::AcceptedImage;

/// The largest journal, in bytes.
pub const JOURNAL_BYTES_MAX: u64 = 1 << 30;

/// The version of the format.
const FORMAT: u32 = 1;

const NAME: &[u8] = b"update";
const TEMPORARY: &[u8] = b"update.new";
const BAD: &[u8] = b"update.bad";

/// An update that is to be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Which update.
    #[serde(with = "model::wide")]
    pub update_id: u64,
    /// The image that it is for.
    pub image: ImageName,
    /// The digest of the content of the image.
    pub image_digest: ObjectId,
    /// Operations of its plan.
    pub operations: u32,
    /// The triggers of the image.
    pub triggers: Triggers,
    /// The health check of the image.
    pub health_check: Option<HealthCheck>,
    /// What is done to which services.
    pub calls: ServiceCalls,
    /// The boot in which it was committed.
    pub boot_id: String,
    /// Which extended attributes are managed.
    pub managed: Attributes,
    /// What is to be remembered when the update has succeeded, of an image that had to be signed.
    #[serde(default)]
    pub accepted: Option<AcceptedImage>,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    /// The update.
    pub head: Head,
    /// The objects that are in its slots.
    pub taken: Vec<TakenObject>,
    /// Its steps.
    pub script: Script,
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Record {
    /// The first: the version of the format. It is read before the rest is.
    Journal {
        /// [`FORMAT`].
        format: u32,
    },
    Head(Box<Head>),
    Taken(TakenObject),
    Step(Step),
    End {
        /// How many objects.
        taken: usize,
        /// How many steps.
        steps: usize,
        /// Of all lines before this one.
        digest: ObjectId,
    },
}

/// As [`Record`], without a copy.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum RecordOf<'a> {
    Journal { format: u32 },
    Head(&'a Head),
    Taken(&'a TakenObject),
    Step(&'a Step),
    End { taken: usize, steps: usize, digest: ObjectId },
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The directory refused something.
    #[error("the journal cannot be used")]
    Directory {
        /// What and why.
        #[from]
        source: RootError,
    },
    /// The file cannot be read or written.
    #[error("cannot {operation} the journal")]
    Content {
        /// What was tried.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// One of another update is there.
    #[error("the journal of another update is not closed")]
    Occupied,
    /// The update has too many steps.
    #[error("the journal would have more than {JOURNAL_BYTES_MAX} bytes")]
    TooLarge,
    /// A release that is not this one wrote it.
    #[error("the journal has format {format}, this release knows {FORMAT}")]
    Format {
        /// What it says.
        format: u32,
    },
    /// It is not what was written.
    #[error("the journal is damaged: {why}")]
    Damaged {
        /// What is wrong.
        why: String,
    },
}

impl Journal {
    /// Writes it to `out`.
    fn write(&self, out: &mut impl Write) -> Result<(), JournalError> {
        let mut lines = Lines { out, hasher: Hasher::new(Algorithm::Blake3), length: 0 };
        lines.put(&RecordOf::Journal { format: FORMAT })?;
        lines.put(&RecordOf::Head(&self.head))?;
        for taken in &self.taken {
            lines.put(&RecordOf::Taken(taken))?;
        }
        for step in &self.script.steps {
            lines.put(&RecordOf::Step(step))?;
        }
        let (taken, steps) = (self.taken.len(), self.script.steps.len());
        let digest = lines.hasher.finish();
        lines.put(&RecordOf::End { taken, steps, digest })
    }

    /// Reads one.
    fn read(from: impl Read) -> Result<Self, JournalError> {
        let mut from = BufReader::new(from.take(JOURNAL_BYTES_MAX + 1));
        let mut hasher = Hasher::new(Algorithm::Blake3);
        let (mut head, mut taken, mut steps) = (None, Vec::new(), Vec::new());
        let (mut line, mut number) = (Vec::new(), 0_u64);
        loop {
            line.clear();
            number += 1;
            let fail = |source| JournalError::Content { operation: "read", source };
            from.read_until(b'\n', &mut line).map_err(fail)?;
            if line.last() != Some(&b'\n') {
                return Err(damaged(format!("line {number} is cut short")));
            }
            let record = serde_json::from_slice(&line)
                .map_err(|error| damaged(format!("line {number}: {error}")))?;
            match (number, record) {
                (1, Record::Journal { format: FORMAT }) => {}
                (1, Record::Journal { format }) => return Err(JournalError::Format { format }),
                (2, Record::Head(read)) => head = Some(read),
                (3.., Record::Taken(one)) => taken.push(one),
                (3.., Record::Step(step)) => steps.push(step),
                (3.., Record::End { taken: objects, steps: count, digest }) => {
                    if (objects, count, digest) != (taken.len(), steps.len(), hasher.finish()) {
                        return Err(damaged("its digest is another".to_owned()));
                    }
                    line.clear();
                    if from.read_until(b'\n', &mut line).map_err(fail)? > 0 {
                        return Err(damaged("something follows its end".to_owned()));
                    }
                    break;
                }
                _ => return Err(damaged(format!("line {number} is out of order"))),
            }
            hasher.update(&line);
        }
        let head: Head = *head.expect("the second line is the head");
        let script = Script { update_id: head.update_id, managed: head.managed, steps };
        Ok(Self { head, taken, script })
    }
}

fn damaged(why: String) -> JournalError {
    JournalError::Damaged { why }
}

/// Writes lines, and knows the digest of those before.
struct Lines<'a, W> {
    out: &'a mut W,
    hasher: Hasher,
    length: u64,
}

impl<W: Write> Lines<'_, W> {
    fn put(&mut self, record: &RecordOf<'_>) -> Result<(), JournalError> {
        let fail = |source| JournalError::Content { operation: "write", source };
        let mut line = serde_json::to_vec(record).map_err(|error| fail(error.into()))?;
        line.push(b'\n');
        self.length += line.len() as u64;
        if self.length > JOURNAL_BYTES_MAX {
            return Err(JournalError::TooLarge);
        }
        self.hasher.update(&line);
        self.out.write_all(&line).map_err(fail)
    }
}

/// Writes `journal` into `directory`, durably.
///
/// # Errors
///
/// [`JournalError`]; then there may be one or not, so it must be removed, unless it is
/// [`JournalError::Occupied`]: then that of another update is there still.
pub fn write(directory: &Directory, journal: &Journal) -> Result<(), JournalError> {
    let fail = |source| JournalError::Content { operation: "write", source };
    match directory.stat(NAME) {
        Err(error) if error.is_absent() => {}
        Err(error) => return Err(error.into()),
        Ok(_) => return Err(JournalError::Occupied),
    }
    crate::state::directories::remove_all(directory, TEMPORARY)?;
    let mut file = BufWriter::new(directory.create_file(TEMPORARY, 0o600)?);
    journal.write(&mut file)?;
    let file = file.into_inner().map_err(|error| fail(error.into_error()))?;
    file.sync_all().map_err(fail)?;
    directory.rename_over(TEMPORARY, directory, NAME)?;
    Ok(directory.sync()?)
}

/// Reads the journal in `directory`, if there is one.
///
/// # Errors
///
/// [`JournalError`]; `Damaged` if it is not what was written.
pub fn read(directory: &Directory) -> Result<Option<Journal>, JournalError> {
    match directory.open_file(NAME) {
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error.into()),
        Ok(file) => Journal::read(file).map(Some),
    }
}

/// Removes the journal, durably, and what is left of one that was not written to its end.
///
/// # Errors
///
/// [`RootError`]; then it may come back with a crash.
pub fn remove(directory: &Directory) -> Result<(), RootError> {
    crate::state::directories::remove_all(directory, NAME)?;
    crate::state::directories::remove_all(directory, TEMPORARY)?;
    directory.sync()
}

/// Sets a damaged journal aside, for whoever wants to look at it.
///
/// # Errors
///
/// [`RootError`] if it cannot be renamed.
pub fn set_aside(directory: &Directory) -> Result<(), RootError> {
    directory.rename_over(NAME, directory, BAD)?;
    directory.sync()
}

#[cfg(test)]
mod tests;
