//! What plugins are asked, and what they answer: JSON on standard input and output of
//! `dom-provisioner-NAME plan|provision|status`.

use std::collections::{BTreeMap, BTreeSet};

use model::display::safe_text;
use model::json::KeyError;
use model::unknown_keys;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::resource::{self, Resource};

/// The longest answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The longest token, in bytes.
const TOKEN_BYTES_MAX: usize = 4 << 10;

/// How much is kept of what a plugin says of a failure, in bytes.
pub(crate) const WORDS_BYTES_MAX: usize = 2 << 10;

/// Values by name, that a plugin tells of a resource.
pub type Outputs = Map<String, Value>;

/// What a plugin is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To say what it would do, and to change nothing.
    Plan,
    /// To make what is desired of what is there. It is safe to ask again.
    Provision,
    /// To say how far the work with a token is.
    Status,
}

impl Verb {
    /// Returns the first argument of the plugin.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Provision => "provision",
            Self::Status => "status",
        }
    }
}

/// The standard input of a plugin.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Request {
    /// The work that is asked about; only for `status`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// The key of the resource; of several, the digest of their keys.
    pub key: String,
    /// What must be there.
    pub desired: Vec<Desired>,
    /// What is there of the same resources, and of those that must go.
    pub previous: Vec<Previous>,
    /// The other resources of the plugin, which stay as they are.
    pub unchanged: Vec<Previous>,
}

/// A resource that must be there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Desired {
    #[serde(flatten)]
    pub resource: Resource,
    /// The digest of its scope, id and inputs.
    pub key: String,
    /// The outputs of what it needs, by id.
    pub inputs: BTreeMap<String, Outputs>,
}

/// A resource that is there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Previous {
    #[serde(flatten)]
    pub resource: Resource,
    pub key: String,
    pub outputs: Outputs,
    /// False if it was asked for, and it is not known how far that came.
    pub finished: bool,
}

/// The answer to `provision` and `status`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an answer")]
pub struct Answer {
    pub(crate) tasks: Vec<Task>,
}

/// A part of the work.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a task")]
pub(crate) struct Task {
    /// The resources that it is about. Without this key, it is about all of the call.
    ids: Option<Vec<String>>,
    running: Option<Running>,
    success: Option<Success>,
    failed: Option<Failed>,
    unknown: Option<Unknown>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the token")]
struct Running {
    token: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with outputs")]
struct Success {
    #[serde(default)]
    outputs: BTreeMap<String, Outputs>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with the error")]
struct Failed {
    error: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct Unknown {
    #[serde(rename = "token")]
    _token: Option<String>,
}

/// What has become of a task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Running(String),
    Success(BTreeMap<String, Outputs>),
    Failed(String),
    /// The plugin does not know the token.
    Unknown,
}

impl Answer {
    /// Reads what a plugin printed.
    ///
    /// # Errors
    ///
    /// What is wrong, without values: these may be secret.
    pub fn parse(printed: &[u8]) -> Result<Self, KeyError> {
        read(printed)
    }

    /// Returns each task's resources and outcome, if the answer is one about `ids`.
    pub(crate) fn check(
        self,
        ids: &BTreeSet<String>,
    ) -> Result<Vec<(BTreeSet<String>, Outcome)>, String> {
        let mut silent = ids.clone();
        let mut checked = Vec::new();
        for task in self.tasks {
            let about: BTreeSet<String> = match &task.ids {
                Some(about) => about.iter().cloned().collect(),
                None => ids.clone(),
            };
            let foreign = |id: &&String| !ids.contains(*id);
            if let Some(id) = about.iter().find(foreign) {
                return Err(format!("its answer is about `{}` too", safe_text(id, 80)));
            }
            silent.retain(|id| !about.contains(id));
            let outcome = task.outcome()?;
            if let Outcome::Success(outputs) = &outcome
                && let Some(id) = outputs.keys().find(|id| !about.contains(*id))
            {
                return Err(format!("its answer has outputs of `{}`", safe_text(id, 80)));
            }
            checked.push((about, outcome));
        }
        match silent.first() {
            Some(id) => Err(format!("its answer says nothing about `{id}`")),
            None => Ok(checked),
        }
    }
}

impl Task {
    fn outcome(self) -> Result<Outcome, String> {
        match (self.running, self.success, self.failed, self.unknown) {
            (Some(Running { token }), None, None, None) => {
                if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
                    let length = token.len();
                    let problem =
                        format!("its token has {length} bytes, and not 1-{TOKEN_BYTES_MAX}");
                    return Err(problem);
                }
                Ok(Outcome::Running(token))
            }
            (None, Some(Success { outputs }), None, None) => {
                for (id, values) in &outputs {
                    let check = values.values().try_for_each(resource::check_depth);
                    check.map_err(|problem| {
                        format!("its answer: an output of `{}` {problem}", safe_text(id, 80))
                    })?;
                }
                Ok(Outcome::Success(outputs))
            }
            (None, None, Some(Failed { error }), None) => {
                Ok(Outcome::Failed(safe_text(error.trim(), WORDS_BYTES_MAX)))
            }
            (None, None, None, Some(_)) => Ok(Outcome::Unknown),
            _ => {
                Err("its answer has a task that is not one of `running`, `success`, `failed` and \
                      `unknown`"
                    .to_owned())
            }
        }
    }
}

/// The answer to `plan`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an answer")]
pub struct PlanAnswer {
    pub changes: Vec<Change>,
}

/// What would be done about a resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a change")]
pub struct Change {
    pub id: String,
    pub op: Operation,
    /// What that means, for people.
    #[serde(default)]
    pub text: String,
    /// Why it would be refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    Create,
    Update,
    Delete,
    None,
}

impl PlanAnswer {
    /// Reads what a plugin printed.
    ///
    /// # Errors
    ///
    /// What is wrong, without values.
    pub fn parse(printed: &[u8]) -> Result<Self, KeyError> {
        let mut answer: Self = read(printed)?;
        for change in &mut answer.changes {
            change.text = safe_text(&change.text, WORDS_BYTES_MAX);
            change.error = change.error.take().map(|error| safe_text(&error, WORDS_BYTES_MAX));
        }
        Ok(answer)
    }
}

fn read<T: DeserializeOwned>(printed: &[u8]) -> Result<T, KeyError> {
    let whole = |problem: &str| KeyError::new("its answer", problem);
    if printed.len() > ANSWER_BYTES_MAX {
        return Err(whole(&format!("has more than {ANSWER_BYTES_MAX} bytes")));
    }
    let first = printed.iter().find(|byte| !byte.is_ascii_whitespace());
    if first != Some(&b'{') {
        return Err(whole("is no JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(printed);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let at = match path.as_str() {
            "." | "?" => "its answer".to_owned(),
            key => format!("its answer: {}", safe_text(key, 80)),
        };
        KeyError { at, problem: without_values(error.inner()) }
    })?;
    reader.end().map_err(|_| whole("has more than one JSON object"))?;
    Ok(value)
}

/// Returns the text of an error without the value that it is about, which may be secret.
fn without_values(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (problem, place) = text.split_at(text.rfind(" at line ").unwrap_or(text.len()));
    if let Some(explained) = unknown_keys::explain(problem) {
        return explained + place;
    }
    let quotes = problem.starts_with("invalid ") || problem.starts_with("unknown variant ");
    match problem.rsplit_once(", expected ") {
        Some((_, expected)) if quotes => format!("expected {expected}{place}"),
        _ if quotes => format!("has a value that is not taken{place}"),
        _ => format!("{}{place}", safe_text(problem, 200)),
    }
}
