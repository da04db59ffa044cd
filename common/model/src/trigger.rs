//! Triggers: which service is restarted, or whether the machine reboots, when a path changes.
//!
//! The JSON is that of the founding design:
//!
//! ```json
//! [{"MatchLines": ["/etc/ssh/.*", "/usr/sbin/sshd"], "Service": "ssh", "HighImpact": false}]
//! ```

pub mod services;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::filter::{PatternError, Patterns};
use crate::path::TreePath;
use crate::unknown_keys;

/// The service name that means the machine itself.
pub const REBOOT: &str = "reboot";

/// What a trigger acts on.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A service of the machine: stopped before the change, started after it.
    #[default]
    Service,
    /// A daemon task, whose name is the service. What else is asked of it says the crate `tasks`.
    Task,
    /// Resource files: the resources are provisioned before the change. What else is asked of it
    /// says the crate `provisioning`.
    Provision,
}

impl Kind {
    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Task => "task",
            Self::Provision => "provision",
        }
    }
}

/// A rule: if a path that matches changes, act on the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "PascalCase")]
pub struct Trigger {
    /// Patterns over paths, anchored at the start as those of a filter are.
    pub match_lines: Patterns,
    /// The name of the service, or `reboot`.
    pub service: String,
    /// The place among other triggers; numbers inside compare as numbers. The service's name if
    /// empty.
    #[serde(default)]
    pub sort_name: String,
    /// Reload the service instead of stopping and starting it.
    #[serde(default)]
    pub do_reload: bool,
    /// Reboot after the update. Implied by the service `reboot`.
    #[serde(default)]
    pub do_reboot: bool,
    /// Acting on it disturbs the machine's users.
    #[serde(default)]
    pub high_impact: bool,
    /// What the trigger acts on.
    #[serde(default)]
    pub kind: Kind,
}

impl Trigger {
    /// True if the machine reboots after an update that fires this trigger.
    #[must_use]
    pub fn reboots(&self) -> bool {
        self.kind == Kind::Service && (self.do_reboot || self.service == REBOOT)
    }

    /// True if a change of `path` fires this trigger. The path itself must match.
    #[must_use]
    pub fn fires_on(&self, path: &TreePath) -> bool {
        self.match_lines.matches(path)
    }
}

/// The keys of a [`Trigger`].
const KEYS: [&str; 7] =
    ["MatchLines", "Service", "SortName", "DoReload", "DoReboot", "HighImpact", "Kind"];

/// The triggers of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Triggers(pub Vec<Trigger>);

/// A trigger file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TriggerError {
    /// The file is not the JSON that is expected.
    #[error(
        "the triggers are not valid: expected [{{\"MatchLines\": [\"/etc/ssh/.*\"], \
         \"Service\": \"ssh\"}}, ...]"
    )]
    Json {
        /// Where, and what is wrong.
        #[source]
        source: serde_json::Error,
    },
    /// Triggers have keys that nothing reads.
    #[error("{keys}")]
    Keys {
        /// Describes them.
        keys: String,
    },
    /// A trigger names no service, or one that is no service name.
    #[error("trigger {number}: `{service}` is no name of a service")]
    Service {
        /// Which one, from 1.
        number: usize,
        /// What it says.
        service: String,
    },
    /// A trigger has no match line.
    #[error("trigger {number} (`{service}`) has no MatchLines, so it would never fire")]
    NoMatchLines {
        /// Which one, from 1.
        number: usize,
        service: String,
    },
    /// A match line is bad.
    #[error("trigger {number} (`{service}`) has a bad match line")]
    Pattern {
        /// Which one, from 1.
        number: usize,
        service: String,
        /// What is wrong.
        #[source]
        source: PatternError,
    },
}

impl Triggers {
    /// Reads a trigger file: the JSON of the module's text; lines that start with `#` or `//` are
    /// comments.
    ///
    /// # Errors
    ///
    /// [`TriggerError`], also for what [`Triggers::verify`] refuses.
    pub fn from_json(text: &str) -> Result<Self, TriggerError> {
        let triggers: Self = serde_json::from_str(&crate::json::without_comments(text))
            .map_err(|source| TriggerError::Json { source })?;
        triggers.verify()?;
        Ok(triggers)
    }

    /// Refuses keys that nothing reads, in a trigger file that [`Triggers::from_json`] takes. For
    /// new images only, so that what is stored stays readable.
    ///
    /// # Errors
    ///
    /// [`TriggerError::Keys`]
    pub fn check_keys(text: &str) -> Result<(), TriggerError> {
        let unknown = unknown_keys::find(&crate::json::without_comments(text), &KEYS);
        match unknown_keys::describe(&unknown) {
            Some(keys) => Err(TriggerError::Keys { keys }),
            None => Ok(()),
        }
    }

    /// Refuses what this release cannot run.
    ///
    /// # Errors
    ///
    /// [`TriggerError`] names the trigger, counted from 1.
    pub fn verify(&self) -> Result<(), TriggerError> {
        for (index, trigger) in self.0.iter().enumerate() {
            let (number, service) = (index + 1, trigger.service.clone());
            // The name becomes an argument of a command that runs as root.
            let plain = |character: char| {
                character.is_ascii_alphanumeric() || "@._:-\\".contains(character)
            };
            let starts_plain = service.starts_with(|first: char| first.is_ascii_alphanumeric());
            if !starts_plain || !service.chars().all(plain) || service.len() > 255 {
                return Err(TriggerError::Service { number, service });
            }
            if trigger.match_lines.is_empty() {
                return Err(TriggerError::NoMatchLines { number, service });
            }
        }
        Ok(())
    }

    /// True if one of the triggers names `service`.
    #[must_use]
    pub fn name(&self, service: &str) -> bool {
        self.0.iter().any(|trigger| trigger.service == service)
    }

    /// True if there are daemon tasks.
    #[must_use]
    pub fn have_tasks(&self) -> bool {
        self.0.iter().any(|trigger| trigger.kind == Kind::Task)
    }

    /// True if there are resources to provision.
    #[must_use]
    pub fn have_resources(&self) -> bool {
        self.0.iter().any(|trigger| trigger.kind == Kind::Provision)
    }

    /// The triggers that a change of any of `paths` fires, in the order in which they run.
    pub fn fired<'path>(&self, paths: impl Iterator<Item = &'path TreePath>) -> Vec<Trigger> {
        let mut fired = vec![false; self.0.len()];
        for path in paths {
            for (trigger, fired) in self.0.iter().zip(&mut fired) {
                *fired = *fired || trigger.fires_on(path);
            }
        }
        let mut matched: Vec<Trigger> = self
            .0
            .iter()
            .zip(fired)
            .filter(|(_, fired)| *fired)
            .map(|(one, _)| one.clone())
            .collect();
        matched.sort_by(|left, right| compare_versions(left.order(), right.order()));
        matched
    }
}

impl Trigger {
    /// What it is sorted by among other triggers, by [`compare_versions`].
    #[must_use]
    pub fn order(&self) -> &str {
        if self.sort_name.is_empty() { &self.service } else { &self.sort_name }
    }
}

/// Compares texts so that runs of digits compare as numbers: `a9` before `a10`.
#[must_use]
pub fn compare_versions(left: &str, right: &str) -> std::cmp::Ordering {
    let (mut left_rest, mut right_rest) = (left, right);
    while !left_rest.is_empty() && !right_rest.is_empty() {
        let (left_part, left_next) = split_run(left_rest);
        let (right_part, right_next) = split_run(right_rest);
        let digits = |part: &str| part.starts_with(|first: char| first.is_ascii_digit());
        let order = if digits(left_part) && digits(right_part) {
            let (left_number, right_number) =
                (left_part.trim_start_matches('0'), right_part.trim_start_matches('0'));
            left_number.len().cmp(&right_number.len()).then_with(|| left_number.cmp(right_number))
        } else {
            left_part.cmp(right_part)
        };
        if order.is_ne() {
            return order;
        }
        (left_rest, right_rest) = (left_next, right_next);
    }
    left_rest.len().cmp(&right_rest.len()).then_with(|| left.cmp(right))
}

fn split_run(text: &str) -> (&str, &str) {
    let digit = text.starts_with(|first: char| first.is_ascii_digit());
    let end = text.find(|next: char| next.is_ascii_digit() != digit).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_founding_designs_json() {
        let text = r#"
            # which services
            [
              {"MatchLines": ["/etc/ssh/.*", "/usr/sbin/sshd"], "Service": "ssh",
               "HighImpact": false},
              {"MatchLines": ["/boot/vmlinuz-.*"], "Service": "reboot", "HighImpact": true}
            ]"#;
        let triggers = Triggers::from_json(text).unwrap();
        let paths: Vec<TreePath> =
            ["/etc/ssh/sshd_config", "/boot/vmlinuz-6.1"].map(|path| path.parse().unwrap()).into();
        let fired = triggers.fired(paths.iter());
        let services: Vec<_> =
            fired.iter().map(|one| (one.service.as_str(), one.reboots())).collect();
        assert_eq!(services, [("reboot", true), ("ssh", false)]);
        assert!(triggers.fired([].iter()).is_empty());
    }

    #[test]
    fn refuses_what_it_cannot_run() {
        let table = [
            (
                r#"[{"MatchLines": ["/x"], "Service": "-rf /"}]"#,
                "trigger 1: `-rf /` is no name of a service",
            ),
            (
                r#"[{"MatchLines": [], "Service": "x"}]"#,
                "trigger 1 (`x`) has no MatchLines, so it would never fire",
            ),
        ];
        for (text, error) in table {
            assert_eq!(Triggers::from_json(text).unwrap_err().to_string(), error);
        }
        assert!(Triggers::from_json("{}").is_err());
        assert!(Triggers::from_json(r#"[{"MatchLines": ["("], "Service": "x"}]"#).is_err());
    }

    #[test]
    fn numbers_in_names_compare_as_numbers() {
        let sorted = ["a1", "a2", "a10", "a10b", "b", "b0", "b00"];
        let mut shuffled = sorted;
        shuffled.reverse();
        shuffled.sort_by(|left, right| compare_versions(left, right));
        assert_eq!(shuffled, sorted);
    }
}
