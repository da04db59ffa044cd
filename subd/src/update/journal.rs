//! The journal: everything needed to finish or undo an update after a crash, in the file
//! `/.subd/journal/update`.
//!
//! It is on the medium before anything changes, and is removed after the result is. It is written
//! to a temporary file, synced and renamed, so that there is a complete journal or none. Each line
//! is a record in JSON: the head, the objects that were taken, the steps, and at the end their
//! numbers and a digest of all lines before. So damage is detected, and a later release, which the
//! update may have installed, can read it.
//!
//! # Invariants
//!
//! * A journal that was read is exactly the one that was written.
//! * At most [`JOURNAL_BYTES_MAX`] are written or read.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};

use model::image::{HealthCheck, ImageName};
use model::object::{Algorithm, Hasher, ObjectId};
use model::scope::Attributes;
use model::trigger::Triggers;
use model::trigger::services::ServiceCalls;
use provisioning::image::Definition;
use serde::{Deserialize, Serialize};

use crate::root::{Directory, RootError, is_full};
use crate::state::reserve::Reserve;
use crate::tasks::staged::TaskChange;
use crate::trust::verification::AcceptedImage;
use crate::update::stage::TakenObject;
use crate::update::step::{Script, Step};

/// The largest journal, in bytes.
pub const JOURNAL_BYTES_MAX: u64 = 1 << 30;

/// The version of the format.
const FORMAT: u32 = 2;

/// The version of journals that releases before [`Step::RemoveDirectory`] can read. It is written
/// where no such step is needed.
const FORMAT_WITHOUT_REMOVAL: u32 = 1;

const NAME: &[u8] = b"update";
const TEMPORARY: &[u8] = b"update.new";
const BAD: &[u8] = b"update.bad";

/// The update of a journal, without its steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHead {
    /// Which update.
    #[serde(with = "model::json::LargeNumber")]
    pub update_id: u64,
    /// The image that it is for.
    pub image: ImageName,
    /// The digest of the content of the image.
    pub image_digest: ObjectId,
    pub operations: u32,
    /// The triggers of the image.
    pub triggers: Triggers,
    /// The health check of the image.
    pub health_check: Option<HealthCheck>,
    /// The service calls of the update.
    pub calls: ServiceCalls,
    /// The boot in which it was committed.
    pub boot_id: String,
    /// Which extended attributes are managed.
    pub managed: Attributes,
    /// Recorded when the update has succeeded, if the image had to be signed.
    #[serde(default)]
    pub accepted: Option<AcceptedImage>,
    /// What the update does to daemon tasks.
    #[serde(default, skip_serializing_if = "TaskChange::is_nothing")]
    pub tasks: TaskChange,
    /// What the image asks for.
    #[serde(default, skip_serializing_if = "Definition::is_empty")]
    pub resources: Definition,
}

/// The whole journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journal {
    pub head: JournalHead,
    /// The objects that are in its slots.
    pub taken: Vec<TakenObject>,
    pub script: Script,
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Record {
    /// The first line: the version of the format.
    Journal {
        /// At most [`FORMAT`].
        format: u32,
    },
    Head(Box<JournalHead>),
    Taken(TakenObject),
    Step(Step),
    End {
        taken: usize,
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
    Head(&'a JournalHead),
    Taken(&'a TakenObject),
    Step(&'a Step),
    End { taken: usize, steps: usize, digest: ObjectId },
}

/// A journal that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    #[error("the journal cannot be used")]
    Directory {
        #[from]
        source: RootError,
    },
    #[error("cannot {operation} the journal")]
    Content { operation: &'static str, source: io::Error },
    #[error("the journal of another update is not closed")]
    Occupied,
    #[error("the journal would have more than {JOURNAL_BYTES_MAX} bytes")]
    TooLarge,
    #[error("the journal has format {format}, this release knows {FORMAT}")]
    Format { format: u32 },
    #[error("the journal is damaged: {why}")]
    Damaged { why: String },
}

impl JournalError {
    fn is_full(&self) -> bool {
        match self {
            Self::Directory { source } => source.is_full(),
            Self::Content { source, .. } => is_full(source),
            _ => false,
        }
    }
}

impl Journal {
    /// Writes it to `out`.
    fn write(&self, out: &mut impl Write) -> Result<(), JournalError> {
        let mut lines = Lines { out, hasher: Hasher::new(Algorithm::Blake3), length: 0 };
        let is_new = |step: &Step| matches!(step, Step::RemoveDirectory { .. });
        let format = match self.script.steps.iter().any(is_new) {
            true => FORMAT,
            false => FORMAT_WITHOUT_REMOVAL,
        };
        lines.put(&RecordOf::Journal { format })?;
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
                (1, Record::Journal { format: FORMAT_WITHOUT_REMOVAL | FORMAT }) => {}
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
        let head: JournalHead = *head.expect("the second line is the head");
        let script = Script { update_id: head.update_id, managed: head.managed, steps };
        Ok(Self { head, taken, script })
    }
}

fn damaged(why: String) -> JournalError {
    JournalError::Damaged { why }
}

/// Writes lines and computes their digest.
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
pub fn write(
    directory: &Directory,
    reserve: &Reserve,
    journal: &Journal,
) -> Result<(), JournalError> {
    let fail = |source| JournalError::Content { operation: "write", source };
    match directory.stat(NAME) {
        Err(error) if error.is_absent() => {}
        Err(error) => return Err(error.into()),
        Ok(_) => return Err(JournalError::Occupied),
    }
    crate::state::directories::remove_all(directory, TEMPORARY)?;
    reserve.write_file(directory, TEMPORARY, JournalError::is_full, |file| {
        let mut file = BufWriter::new(file);
        journal.write(&mut file)?;
        let file = file.into_inner().map_err(|error| fail(error.into_error()))?;
        file.sync_all().map_err(fail)
    })?;
    directory.rename_over(TEMPORARY, directory, NAME)?;
    Ok(directory.sync()?)
}

/// Reads the journal in `directory`; `None` if the file is missing.
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

/// Removes the journal durably, and an incomplete temporary file.
///
/// # Errors
///
/// [`RootError`]; then it may come back with a crash.
pub fn remove(directory: &Directory) -> Result<(), RootError> {
    crate::state::directories::remove_all(directory, NAME)?;
    crate::state::directories::remove_all(directory, TEMPORARY)?;
    directory.sync()
}

/// Renames a damaged journal, so that it can be examined.
pub fn set_aside(directory: &Directory) -> Result<(), RootError> {
    directory.rename_over(NAME, directory, BAD)?;
    directory.sync()
}

#[cfg(test)]
mod tests;
