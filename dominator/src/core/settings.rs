//! The limits of subs, which are set for the fleet, for tags and for hosts.
//!
//! # Invariants
//!
//! * The limits of a machine depend only on its name, its tags and the settings: host before tag
//!   before fleet; of several tags the one whose name sorts first, and of one name `NAME=VALUE`
//!   before `NAME`.
//! * The size of all settings is limited.
// tidy: core

use std::collections::BTreeMap;

use api::dominator::TagFilter;
use api::dominator::settings::{Level, LevelSettings, Limit, SetSubConfigurationRequest, Setting};
use api::subd::Limits;
use model::mdb::Machine;
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// The most levels that may have values.
pub const LEVELS_MAX: usize = 20_000;

/// The longest text of a request, in bytes.
pub const TEXT_BYTES_MAX: usize = 1_000;

/// The values of one level.
type Values = BTreeMap<Limit, Setting>;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    #[error("say which value is to be set or removed")]
    Nothing,
    #[error("say why the configuration is to be changed")]
    NoReason,
    #[error("invalid {}: {percent} is not from 1 to 100", limit.name())]
    Percent { limit: Limit, percent: u8 },
    #[error("{what} has 1 to {TEXT_BYTES_MAX} bytes")]
    Text { what: &'static str },
    #[error("values are given for {LEVELS_MAX} hosts and tags already: give them for fewer tags")]
    TooMany,
}

/// The values of all levels. Saved as a list of levels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<LevelSettings>", into = "Vec<LevelSettings>")]
pub struct Settings {
    levels: BTreeMap<Level, Values>,
}

impl From<Vec<LevelSettings>> for Settings {
    fn from(levels: Vec<LevelSettings>) -> Self {
        let levels = levels.into_iter().map(|settings| (settings.level, settings.values));
        Self { levels: levels.collect() }
    }
}

impl From<Settings> for Vec<LevelSettings> {
    fn from(settings: Settings) -> Self {
        settings.all()
    }
}

fn level_settings(level: &Level, values: &Values) -> LevelSettings {
    LevelSettings { level: level.clone(), values: values.clone() }
}

impl Settings {
    /// Returns the settings after `request`, which was made at the time `now`.
    pub fn after(
        &self,
        request: &SetSubConfigurationRequest,
        now: Time,
    ) -> Result<Self, SettingsError> {
        check(request)?;
        let mut settings = self.clone();
        let values = settings.levels.entry(request.level.clone()).or_default();
        for (&limit, &percent) in &request.values {
            match percent {
                None => {
                    values.remove(&limit);
                }
                Some(percent) => {
                    let (who, why) = (request.who.clone(), request.why.clone());
                    values.insert(limit, Setting { percent, who, why, since: now });
                }
            }
        }
        if values.is_empty() {
            settings.levels.remove(&request.level);
        }
        if settings.levels.len() > LEVELS_MAX {
            return Err(SettingsError::TooMany);
        }
        Ok(settings)
    }

    /// Returns all levels that have values: the fleet, tags, hosts.
    #[must_use]
    pub fn all(&self) -> Vec<LevelSettings> {
        self.levels.iter().map(|(level, values)| level_settings(level, values)).collect()
    }

    /// Returns the levels of `machine` that have values, the first in precedence first.
    #[must_use]
    pub fn about(&self, machine: &Machine) -> Vec<LevelSettings> {
        self.levels_with_values(machine)
            .map(|(level, values)| level_settings(level, values))
            .collect()
    }

    fn levels_with_values(&self, machine: &Machine) -> impl Iterator<Item = (&Level, &Values)> {
        levels_of(machine).filter_map(|level| self.levels.get_key_value(&level))
    }

    /// Returns the limits of `machine`.
    #[must_use]
    pub fn limits_of(&self, machine: &Machine) -> Limits {
        let mut limits = Limits::default();
        if self.levels.is_empty() {
            return limits;
        }
        for (_, values) in self.levels_with_values(machine) {
            for (limit, setting) in values {
                limit.of_mut(&mut limits).get_or_insert(setting.percent);
            }
        }
        limits
    }

    /// Returns the level from which each limit of `machine` comes.
    #[must_use]
    pub fn origins_of(&self, machine: &Machine) -> BTreeMap<Limit, Level> {
        let mut origins = BTreeMap::new();
        for (level, values) in self.levels_with_values(machine) {
            for limit in values.keys() {
                origins.entry(*limit).or_insert_with(|| level.clone());
            }
        }
        origins
    }
}

/// Refuses invalid values and texts.
fn check(request: &SetSubConfigurationRequest) -> Result<(), SettingsError> {
    if request.values.is_empty() {
        return Err(SettingsError::Nothing);
    }
    if request.why.trim().is_empty() {
        return Err(SettingsError::NoReason);
    }
    for (&limit, &percent) in &request.values {
        if let Some(percent) = percent.filter(|percent| !(1..=100).contains(percent)) {
            return Err(SettingsError::Percent { limit, percent });
        }
    }
    let mut texts = vec![("a reason", &request.why), ("the name of an operator", &request.who)];
    match &request.level {
        Level::Fleet => {}
        Level::Tag(TagFilter { name, value }) => {
            texts.push(("the name of a tag", name));
            if let Some(value) = value.as_ref().filter(|value| !value.is_empty()) {
                texts.push(("the value of a tag", value));
            }
        }
        Level::Host(hostname) => texts.push(("a host name", hostname)),
    }
    let is_valid = |text: &str| (1..=TEXT_BYTES_MAX).contains(&text.len());
    match texts.into_iter().find(|(_, text)| !is_valid(text)) {
        Some((what, _)) => Err(SettingsError::Text { what }),
        None => Ok(()),
    }
}

/// Returns all levels of `machine`, the first in precedence first.
fn levels_of(machine: &Machine) -> impl Iterator<Item = Level> {
    let tags = machine.tags.iter().flat_map(|(name, value)| {
        [Some(value.clone()), None].map(|value| Level::Tag(TagFilter { name: name.clone(), value }))
    });
    let host = std::iter::once(Level::Host(machine.hostname.clone()));
    host.chain(tags).chain(std::iter::once(Level::Fleet))
}

/// True if `level` applies to `machine`.
#[must_use]
pub fn is_about(level: &Level, machine: &Machine) -> bool {
    match level {
        Level::Fleet => true,
        Level::Tag(tag) => tag.is_of(machine),
        Level::Host(hostname) => *hostname == machine.hostname,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Limit::{CpuPercent, NetworkPercent, ScanPercent};

    fn level(text: &str) -> Level {
        match text.split_once(' ') {
            None => Level::Fleet,
            Some(("tag", tag)) => Level::Tag(TagFilter::parse(tag)),
            Some((_, host)) => Level::Host(host.to_owned()),
        }
    }

    fn request(at: &str, values: &[(Limit, Option<u8>)]) -> SetSubConfigurationRequest {
        let (why, who) = ("slow links".to_owned(), "ann".to_owned());
        SetSubConfigurationRequest {
            level: level(at),
            values: values.iter().copied().collect(),
            why,
            who,
        }
    }

    /// A level and its values.
    type Given<'a> = (&'a str, &'a [(Limit, Option<u8>)]);

    fn given(all: &[Given<'_>]) -> Settings {
        let now = Time::default();
        all.iter().fold(Settings::default(), |settings, (at, values)| {
            settings.after(&request(at, values), now).unwrap()
        })
    }

    fn machine(hostname: &str, tags: &[(&str, &str)]) -> Machine {
        let tags = tags.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Machine { hostname: hostname.to_owned(), tags: tags.collect(), ..Machine::default() }
    }

    fn limits(cpu: Option<u8>, scan: Option<u8>, network: Option<u8>) -> Limits {
        Limits {
            cpu_percent: cpu,
            scan_percent: scan,
            write_percent: None,
            network_percent: network,
        }
    }

    #[test]
    fn the_host_counts_before_its_tags_and_these_before_the_fleet() {
        let settings = given(&[
            ("fleet", &[(CpuPercent, Some(4)), (ScanPercent, Some(2)), (NetworkPercent, Some(8))]),
            ("tag tier=front", &[(NetworkPercent, Some(5))]),
            ("tag tier", &[(NetworkPercent, Some(6)), (ScanPercent, Some(1))]),
            ("tag rack", &[(NetworkPercent, Some(7))]),
            ("tag zone=", &[(CpuPercent, Some(9))]),
            ("host web1", &[(CpuPercent, Some(3))]),
        ]);
        let (front, back) = (("tier", "front"), ("tier", "back"));
        /// A machine, its tags, and its limits.
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], Limits);
        #[rustfmt::skip]
        let table: [Row<'_>; 8] = [
            ("web1", &[],                       limits(Some(3), Some(2), Some(8))),
            ("web2", &[],                       limits(Some(4), Some(2), Some(8))),
            ("web1", &[front],                  limits(Some(3), Some(1), Some(5))),
            ("web2", &[front],                  limits(Some(4), Some(1), Some(5))),
            ("web2", &[back],                   limits(Some(4), Some(1), Some(6))),
            // The tag whose name sorts first counts, with or without a value.
            ("web2", &[front, ("rack", "7")],   limits(Some(4), Some(1), Some(7))),
            ("web2", &[("zone", "")],           limits(Some(9), Some(2), Some(8))),
            ("web2", &[("zone", "x")],          limits(Some(4), Some(2), Some(8))),
        ];
        for (hostname, tags, expected) in table {
            assert_eq!(
                settings.limits_of(&machine(hostname, tags)),
                expected,
                "{hostname} {tags:?}"
            );
        }
        let web1 = machine("web1", &[front]);
        let origins = settings.origins_of(&web1);
        let expected = [
            (CpuPercent, level("host web1")),
            (ScanPercent, level("tag tier")),
            (NetworkPercent, level("tag tier=front")),
        ];
        assert_eq!(origins, expected.into());
        let about: Vec<String> =
            settings.about(&web1).iter().map(|settings| settings.level.to_string()).collect();
        assert_eq!(about, ["host web1", "tag tier=front", "tag tier", "fleet"]);
        let wanted = [true, true, true, false, false, true];
        let levels = ["fleet", "tag tier=front", "tag tier", "tag rack", "host web2", "host web1"];
        assert_eq!(levels.map(|at| is_about(&level(at), &web1)), wanted);
    }

    #[test]
    fn values_are_taken_back_and_leave_no_trace() {
        let settings = given(&[
            ("fleet", &[(CpuPercent, Some(4)), (ScanPercent, Some(2))]),
            ("fleet", &[(CpuPercent, None), (ScanPercent, Some(1))]),
        ]);
        let web1 = machine("web1", &[]);
        assert_eq!(settings.limits_of(&web1), limits(None, Some(1), None));
        let none =
            settings.after(&request("fleet", &[(ScanPercent, None)]), Time::default()).unwrap();
        assert_eq!(none, Settings::default());
        // Removing a value that was not set is no error.
        let same = none.after(&request("host a", &[(CpuPercent, None)]), Time::default());
        assert_eq!(same, Ok(Settings::default()));
    }

    #[test]
    fn they_are_kept_as_json() {
        let settings = given(&[
            ("tag tier=front", &[(NetworkPercent, Some(5))]),
            ("host web1", &[(CpuPercent, Some(3))]),
        ]);
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let good = || request("host a", &[(CpuPercent, Some(1))]);
        let long = || "x".repeat(TEXT_BYTES_MAX + 1);
        type Bad = (fn(&mut SetSubConfigurationRequest, String), &'static str);
        let table: [Bad; 7] = [
            (|request, _| request.values.clear(), "say which value is to be set or removed"),
            (|request, _| request.why = " ".into(), "say why the configuration is to be changed"),
            (
                |request, _| request.values = [(CpuPercent, Some(101))].into(),
                "invalid cpu-percent: 101 is not from 1 to 100",
            ),
            (
                |request, _| request.values = [(NetworkPercent, Some(0))].into(),
                "invalid network-percent: 0 is not from 1 to 100",
            ),
            (|request, long| request.why = long, "a reason has 1 to 1000 bytes"),
            (|request, _| request.level = level("host "), "a host name has 1 to 1000 bytes"),
            (|request, _| request.level = level("tag =x"), "the name of a tag has 1 to 1000 bytes"),
        ];
        for (spoil, error) in table {
            let mut bad = good();
            spoil(&mut bad, long());
            let refused = Settings::default().after(&bad, Time::default()).unwrap_err();
            assert_eq!(refused.to_string(), error);
        }
        let mut many = Settings::default();
        for number in 0..LEVELS_MAX {
            let at = Level::Host(number.to_string());
            many.levels.insert(at, Values::default());
        }
        assert_eq!(many.after(&good(), Time::default()), Err(SettingsError::TooMany));
        let known = request("host 7", &[(CpuPercent, Some(1))]);
        assert!(many.after(&known, Time::default()).is_ok());
    }
}
