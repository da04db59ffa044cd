//! Task files: what runs, as whom, with which limits, when, and what happens when it ends.
//!
//! ```json
//! {"name": "logd", "argv": ["/opt/logd/bin/logd"], "user": "logd",
//!  "schedule": {"zone": "America/Toronto", "events": [
//!    {"action": "start", "cron": "0 9 * * MON-FRI"},
//!    {"action": "stop", "time": "17:00", "days": "MON-FRI"}]}}
//! ```

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use jiff::Timestamp;
use jiff::tz::TimeZoneDatabase;
use model::json::{self, KeyError};
use model::names::{check_account, check_name};
use model::object::ObjectId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::schedule::{Moment, Schedule};
use crate::zone;
use model::permit::EXCLUSIVE_STOP_TIMEOUT_S_MAX;

/// The longest task file, in bytes.
pub const FILE_BYTES_MAX: usize = 64 << 10;

/// A task, as its file states it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a task")]
pub struct Task {
    /// The name of the file without `.json`, and the `Service` of its trigger.
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// The program, by its absolute path, and its arguments.
    #[serde(deserialize_with = "command")]
    pub argv: Vec<String>,
    #[serde(default = "root", deserialize_with = "account")]
    pub user: String,
    /// Further groups. The first group is that of the user.
    #[serde(default, deserialize_with = "accounts")]
    pub groups: Vec<String>,
    #[serde(default, deserialize_with = "environment")]
    pub environment: BTreeMap<String, String>,
    #[serde(default = "root_directory", deserialize_with = "directory")]
    pub working_directory: String,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub stop_signal: StopSignal,
    /// How long a run may take to stop before it is killed.
    #[serde(default = "thirty", deserialize_with = "from_to::<_, 1, 3_600>")]
    pub stop_timeout_s: u32,
    #[serde(default)]
    pub output: Output,
    #[serde(default)]
    pub restart: Restart,
    pub health: Option<Health>,
    on_template_change: Option<OnTemplateChange>,
    /// Runs on one machine of all that have the task.
    #[serde(default)]
    pub exclusive: bool,
    /// Without one the task runs always.
    #[serde(default, deserialize_with = "present")]
    pub schedule: Option<Schedule>,
    /// The canonical text of the file without the schedule.
    #[serde(skip)]
    canonical: String,
}

/// Limits of all processes of a run together, but `open_files`, which is for each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_from_to::<_, 1, 16_777_216>"
    )]
    pub memory_mib: Option<u32>,
    /// 100 is one core.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_from_to::<_, 1, 102_400>"
    )]
    pub cpu_percent: Option<u32>,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_from_to::<_, 1, 4_194_304>"
    )]
    pub processes: Option<u32>,
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_from_to::<_, 16, 1_048_576>"
    )]
    pub open_files: Option<u32>,
}

/// The signal that asks a run to stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum StopSignal {
    #[default]
    Term,
    Int,
    Quit,
    Hup,
    Usr1,
    Usr2,
    Kill,
}

/// Where the output of runs goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    pub to: OutputTo,
    /// A log file of this size is put aside. A journal has its own limits.
    #[serde(deserialize_with = "from_to::<_, 1, 1_048_576>")]
    pub rotate_kib: u32,
    /// How many files are kept besides the one that is written.
    #[serde(deserialize_with = "from_to::<_, 0, 100>")]
    pub keep: u32,
}

impl Default for Output {
    fn default() -> Self {
        Self { to: OutputTo::default(), rotate_kib: 10_240, keep: 3 }
    }
}

/// A place for output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OutputTo {
    /// The journal under systemd; log files under direct.
    #[default]
    Log,
    Nowhere,
}

/// What happens when the program ends.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Restart {
    pub policy: RestartPolicy,
    /// The shortest and the longest wait before a start.
    #[serde(deserialize_with = "backoff")]
    pub backoff_s: [u32; 2],
}

impl Default for Restart {
    fn default() -> Self {
        Self { policy: RestartPolicy::default(), backoff_s: [1, 60] }
    }
}

/// When a program that has ended is started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    /// Without a schedule the task runs once for each version of it.
    Never,
}

/// How the health of a run is found.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// Exits with 0 if the run is healthy. Without one a run is healthy while it is up.
    #[serde(default, deserialize_with = "some_command")]
    pub argv: Option<Vec<String>>,
    #[serde(default = "ten", deserialize_with = "from_to::<_, 1, 86_400>")]
    pub interval_s: u32,
    #[serde(default = "ten", deserialize_with = "from_to::<_, 1, 3_600>")]
    pub timeout_s: u32,
    /// A run is not healthy before it has been up for so long.
    #[serde(default, deserialize_with = "from_to::<_, 0, 86_400>")]
    pub min_up_s: u32,
}

/// What happens to a run when the version of its task changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnTemplateChange {
    /// It is stopped, and a new one is started.
    Recreate,
    /// It goes on; the next one has the new version.
    Ignore,
}

/// The version of a task: the digest of its file without the schedule, and of its programs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Template(pub String);

impl Task {
    /// Reads a task file; lines that start with `#` or `//` are comments. A zone is looked up in
    /// `zones`, and in the copy that is built in if it is not there.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn parse(text: &str, zones: &TimeZoneDatabase) -> Result<Self, KeyError> {
        let whole = |problem: String| KeyError::new("file", problem);
        if text.len() > FILE_BYTES_MAX {
            return Err(whole(format!("has more than {FILE_BYTES_MAX} bytes")));
        }
        let text = json::without_comments(text);
        let mut task: Self = json::read_object(&text)?;
        if let Some(schedule) = &mut task.schedule {
            let at = |key, problem| KeyError::new(key, problem);
            let found = zone::find(&schedule.zone_name, zones);
            schedule.zone = found.map_err(|error| at("schedule.zone", error.to_string()))?;
            schedule.check().map_err(|error| at("schedule.events", error.to_string()))?;
        }
        if task.exclusive && task.stop_timeout_s > EXCLUSIVE_STOP_TIMEOUT_S_MAX {
            let problem =
                format!("is at most {EXCLUSIVE_STOP_TIMEOUT_S_MAX} for an exclusive task");
            return Err(KeyError::new("stop_timeout_s", problem));
        }
        let mut value: Value =
            serde_json::from_str(&text).map_err(|error| whole(error.to_string()))?;
        if let Some(file) = value.as_object_mut() {
            file.remove("schedule");
        }
        task.canonical = json::canonical(&value);
        Ok(task)
    }

    /// Returns the version of the task, whose trigger matches `programs`.
    #[must_use]
    pub fn template(&self, programs: &[ObjectId]) -> Template {
        let mut hasher = Sha256::new();
        hasher.update(&self.canonical);
        let mut programs = programs.to_vec();
        programs.sort_unstable();
        for program in programs {
            hasher.update(format!("\n{program}"));
        }
        Template(HEXLOWER.encode(&hasher.finalize()))
    }

    /// Returns where `now` lies in the schedule.
    #[must_use]
    pub fn moment(&self, now: Timestamp) -> Moment {
        self.schedule
            .as_ref()
            .map_or_else(|| Moment::of_always(now), |schedule| schedule.moment(now))
    }

    /// What happens to a run when the version changes: by default a task without a schedule is
    /// replaced, and one with a schedule goes on.
    #[must_use]
    pub fn on_template_change(&self) -> OnTemplateChange {
        let default = match self.schedule {
            None => OnTemplateChange::Recreate,
            Some(_) => OnTemplateChange::Ignore,
        };
        self.on_template_change.unwrap_or(default)
    }
}

fn root() -> String {
    "root".to_owned()
}

fn root_directory() -> String {
    "/".to_owned()
}

fn ten() -> u32 {
    10
}

fn thirty() -> u32 {
    30
}

/// Returns `text` for an error message.
fn shown(text: &str) -> String {
    model::display::safe_text(text, 80)
}

/// A schedule, which `null` is not: a task that lost its hours must not run always.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Schedule>, D::Error> {
    Schedule::deserialize(from).map(Some)
}

pub(crate) fn from_to<'de, D: Deserializer<'de>, const MIN: u32, const MAX: u32>(
    from: D,
) -> Result<u32, D::Error> {
    let number = u64::deserialize(from)?;
    let fits = u32::try_from(number).ok().filter(|number| (MIN..=MAX).contains(number));
    fits.ok_or_else(|| D::Error::custom(format!("{number} is not in {MIN}-{MAX}")))
}

pub(crate) fn some_from_to<'de, D: Deserializer<'de>, const MIN: u32, const MAX: u32>(
    from: D,
) -> Result<Option<u32>, D::Error> {
    from_to::<D, MIN, MAX>(from).map(Some)
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check_name(&name).map(|()| name).map_err(D::Error::custom)
}

fn command<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let argv = Vec::<String>::deserialize(from)?;
    let problem = match argv.first() {
        None => "is empty; it names the program and its arguments".to_owned(),
        Some(program) if !program.starts_with('/') => {
            format!("`{}` is no absolute path of a program", shown(program))
        }
        Some(_) if argv.len() > 256 => "has more than 256 words".to_owned(),
        Some(_) if argv.iter().any(|word| word.contains('\0')) => "has a zero byte".to_owned(),
        Some(_) => return Ok(argv),
    };
    Err(D::Error::custom(problem))
}

fn some_command<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<String>>, D::Error> {
    command(from).map(Some)
}

fn account<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check_account(&name).map(|()| name).map_err(D::Error::custom)
}

fn accounts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(from)?;
    if names.len() > 32 {
        return Err(D::Error::custom("has more than 32 groups"));
    }
    names.iter().try_for_each(|name| check_account(name)).map_err(D::Error::custom)?;
    Ok(names)
}

fn environment<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let variables = BTreeMap::<String, String>::deserialize(from)?;
    if variables.len() > 256 {
        return Err(D::Error::custom("has more than 256 variables"));
    }
    for (name, value) in &variables {
        let plain = |letter: u8| letter.is_ascii_alphanumeric() || letter == b'_';
        let starts_plain = !name.starts_with(|first: char| first.is_ascii_digit());
        if name.is_empty() || !starts_plain || !name.bytes().all(plain) {
            return Err(D::Error::custom(format!("`{}` is no name of a variable", shown(name))));
        }
        if value.contains('\0') {
            return Err(D::Error::custom(format!("the value of `{name}` has a zero byte")));
        }
    }
    Ok(variables)
}

fn directory<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let path = String::deserialize(from)?;
    if path.starts_with('/') && !path.contains('\0') {
        return Ok(path);
    }
    Err(D::Error::custom(format!("`{}` is no absolute path", shown(&path))))
}

fn backoff<'de, D: Deserializer<'de>>(from: D) -> Result<[u32; 2], D::Error> {
    let [shortest, longest] = <[u32; 2]>::deserialize(from)?;
    if (1..=longest).contains(&shortest) && longest <= 86_400 {
        return Ok([shortest, longest]);
    }
    let problem = "expected the shortest and the longest wait, in seconds from 1 to 86400";
    Err(D::Error::custom(problem))
}
