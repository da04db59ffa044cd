//! The runs of a task, as they are observed on a machine.

use std::cmp::Ordering;

use jiff::Timestamp;
use model::json::{self, KeyError};
use model::trigger::compare_versions;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::file::{Task, Template};
use crate::schedule::Moment;

/// What is known about a task on a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Observed {
    /// An operator wants no runs.
    pub suspended: bool,
    /// Whether this machine may run the task now. Unknown, it may if the task is not exclusive.
    pub permit: Option<bool>,
    pub runs: Vec<Run>,
}

/// One execution of a task.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub name: String,
    /// Counts the runs of a period. `None` if its record cannot be read.
    #[serde(default, deserialize_with = "readable")]
    pub run_id: Option<u32>,
    /// The start of its period. `None` if its record cannot be read.
    #[serde(default, deserialize_with = "readable")]
    pub scheduled_at: Option<Timestamp>,
    #[serde(default)]
    pub template: RunTemplate,
    #[serde(default)]
    pub state: RunState,
    /// It waits for its release and was never started.
    #[serde(default)]
    pub held: bool,
    /// The operator who holds it, so that it is not started.
    #[serde(default)]
    pub held_by: Option<String>,
    /// An operator made it, so that it may run outside of the hours.
    #[serde(default)]
    pub manual: bool,
    /// It is being stopped for good.
    #[serde(default)]
    pub deleting: bool,
}

/// Which version of the task a run is of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunTemplate {
    /// The present one.
    #[default]
    Same,
    Other,
    /// The one with this digest.
    Of(Template),
}

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// It may be anything, so it may be live.
    #[default]
    Unknown,
    Held,
    Starting,
    Running,
    Succeeded,
    Failed,
    Stopping,
    /// Nothing of it is left.
    Gone,
}

impl RunState {
    /// Says it in a sentence about the run.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Unknown => "may be live",
            Self::Held => "is held",
            Self::Starting => "is starting",
            Self::Running => "is running",
            Self::Succeeded => "has succeeded",
            Self::Failed => "has failed",
            Self::Stopping => "is stopping",
            Self::Gone => "is gone",
        }
    }
}

impl Observed {
    /// Reads JSON as `{"suspended": false, "permit": true, "runs": [..]}`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        json::read_object(text)
    }

    /// True if this machine may run the task now.
    #[must_use]
    pub fn permits(&self, task: &Task) -> bool {
        self.permit.unwrap_or(!task.exclusive)
    }

    /// The runs of which something is left.
    pub(crate) fn present(&self) -> Vec<&Run> {
        self.runs.iter().filter(|run| run.state != RunState::Gone).collect()
    }
}

impl Run {
    /// True if it has ended by itself.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.state, RunState::Succeeded | RunState::Failed)
    }

    /// True if it is held, by whomever.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held || self.held_by.is_some() || self.state == RunState::Held
    }

    /// True if it is being stopped for good.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.deleting || self.state == RunState::Stopping
    }

    /// True if it is of the version `template`.
    #[must_use]
    pub fn is_of(&self, template: &Template) -> bool {
        match &self.template {
            RunTemplate::Same => true,
            RunTemplate::Other => false,
            RunTemplate::Of(own) => own == template,
        }
    }

    /// Why it belongs to a period that is over, if it does. Without a schedule a period is a
    /// version of the task.
    pub(crate) fn outdated(
        &self,
        task: &Task,
        template: &Template,
        moment: &Moment,
    ) -> Option<String> {
        let Some(scheduled_at) = self.scheduled_at else {
            return Some("its record does not say which period it belongs to".to_owned());
        };
        if let Some(stop) = moment.last_stop.filter(|stop| scheduled_at < *stop) {
            return Some(format!("it belongs to a period that ended at {stop}"));
        }
        let is_former = task.schedule.is_none() && self.is_finished() && !self.is_of(template);
        is_former.then(|| "it has ended, and was of a former version of the task".to_owned())
    }

    /// Which of two runs is kept: that which is not being deleted, then that of the present
    /// version, then that of the higher name.
    pub(crate) fn compare(&self, other: &Self, template: &Template) -> Ordering {
        let rank = |run: &Self| (!run.is_deleting(), run.is_of(template));
        rank(self).cmp(&rank(other)).then_with(|| compare_versions(&self.name, &other.name))
    }
}

impl<'de> Deserialize<'de> for RunTemplate {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        match text.as_str() {
            "same" => Ok(Self::Same),
            "other" => Ok(Self::Other),
            digest if digest.len() == 64 && digest.bytes().all(|one| one.is_ascii_hexdigit()) => {
                Ok(Self::Of(Template(digest.to_ascii_lowercase())))
            }
            _ => Err(D::Error::custom("expected `same`, `other` or a digest of 64 digits")),
        }
    }
}

/// A value of a record; `None` if it cannot be read.
fn readable<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    Ok(serde_json::from_value(Value::deserialize(from)?).ok())
}
