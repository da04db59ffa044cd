//! The limits of how many machines may be updated at once.
// tidy: core

use core::str::FromStr;
use std::collections::BTreeMap;
use std::fmt;

use model::mdb::trimmed;

/// A limit of the number of machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineLimit {
    /// This number, at least one.
    Count(u32),
    /// This share of all machines, rounded up: from 1 to 100.
    Percent(u8),
}

/// Why a text is not a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineLimitError {
    #[error("invalid limit `{0}`: expected a number of machines, PERCENT%, or none")]
    Kind(String),
    /// The limit is zero.
    #[error(
        "invalid limit `{0}`: no machine could be updated; for that use domtool disable-updates"
    )]
    Nothing(String),
    #[error("invalid limit `{0}`: no location before `=`")]
    Location(String),
}

impl MachineLimit {
    /// Parses `NUMBER` or `PERCENT%`; `none` is no limit.
    pub fn parse(text: &str) -> Result<Option<Self>, MachineLimitError> {
        let invalid = || MachineLimitError::Kind(text.to_owned());
        let limit = match text.strip_suffix('%') {
            _ if text == "none" => return Ok(None),
            Some(percent) => {
                let percent = percent.trim_end().parse::<u8>().map_err(|_| invalid())?;
                if percent > 100 {
                    return Err(invalid());
                }
                Self::Percent(percent)
            }
            None => Self::Count(text.parse::<u32>().map_err(|_| invalid())?),
        };
        match limit {
            Self::Count(0) | Self::Percent(0) => Err(MachineLimitError::Nothing(text.to_owned())),
            limit => Ok(Some(limit)),
        }
    }

    /// Returns the limit for a fleet of `machines`; at least one.
    #[must_use]
    pub fn of(self, machines: u32) -> u32 {
        match self {
            Self::Count(count) => count,
            Self::Percent(percent) => {
                let places = (u64::from(machines) * u64::from(percent)).div_ceil(100);
                u32::try_from(places).unwrap_or(u32::MAX).max(1)
            }
        }
    }
}

impl fmt::Display for MachineLimit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(formatter, "{count}"),
            Self::Percent(percent) => write!(formatter, "{percent}%"),
        }
    }
}

/// `[LOCATION=]LIMIT`: a limit and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocationLimit {
    /// Applies to the machines at this location and below; to the fleet if `None`.
    pub location: Option<String>,
    /// No limit if `None`.
    pub limit: Option<MachineLimit>,
}

impl FromStr for LocationLimit {
    type Err = MachineLimitError;

    fn from_str(text: &str) -> Result<Self, MachineLimitError> {
        let (location, limit) = match text.rsplit_once('=') {
            None => (None, text),
            Some((location, limit)) => (Some(trimmed(location)), limit),
        };
        if location == Some("") {
            return Err(MachineLimitError::Location(text.to_owned()));
        }
        Ok(Self { location: location.map(str::to_owned), limit: MachineLimit::parse(limit)? })
    }
}

/// All limits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineLimits {
    /// The limit of the whole fleet.
    pub fleet: Option<MachineLimit>,
    /// The limits of all machines at a location and below it.
    pub below: BTreeMap<String, MachineLimit>,
    /// The limit of the machines at each single location. Machines without a location do not count.
    pub each: Option<MachineLimit>,
}

impl MachineLimits {
    /// Combines the `given` limits: of two for one location, the later one holds. `fleet` is the
    /// default for the whole fleet.
    #[must_use]
    pub fn new(
        fleet: Option<MachineLimit>,
        given: &[LocationLimit],
        each: Option<MachineLimit>,
    ) -> Self {
        let mut limits = Self { fleet, below: BTreeMap::new(), each };
        for LocationLimit { location, limit } in given {
            match (location, limit) {
                (None, limit) => limits.fleet = *limit,
                (Some(location), Some(limit)) => {
                    limits.below.insert(location.clone(), *limit);
                }
                (Some(location), None) => {
                    limits.below.remove(location);
                }
            }
        }
        limits
    }
}

/// The places of one limit. A quarter of them, but at least one, is for repairs, and the rest for
/// rollouts, so that neither delays the other. A single place is for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    pub all: u32,
    /// The places of repairs; 0 if there is one place for both.
    pub repairs: u32,
}

impl Places {
    #[must_use]
    pub fn share(all: u32) -> Self {
        let repairs = if all < 2 { 0 } else { (all / 4).max(1) };
        Self { all, repairs }
    }

    /// True if repairs and rollouts use the same place.
    #[must_use]
    pub fn is_common(self) -> bool {
        self.repairs == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_operators_write_them() {
        let at = |location: Option<&str>, limit| {
            Ok(LocationLimit { location: location.map(str::to_owned), limit })
        };
        let wrong = |text: &str| Err(MachineLimitError::Kind(text.to_owned()));
        let nothing = |text: &str| Err(MachineLimitError::Nothing(text.to_owned()));
        let table = [
            ("5", at(None, Some(MachineLimit::Count(5)))),
            ("10%", at(None, Some(MachineLimit::Percent(10)))),
            ("10 %", at(None, Some(MachineLimit::Percent(10)))),
            ("100%", at(None, Some(MachineLimit::Percent(100)))),
            ("none", at(None, None)),
            ("nyc=3", at(Some("nyc"), Some(MachineLimit::Count(3)))),
            ("/nyc/r4/=1%", at(Some("nyc/r4"), Some(MachineLimit::Percent(1)))),
            ("a=b=none", at(Some("a=b"), None)),
            ("=3", Err(MachineLimitError::Location("=3".into()))),
            ("0", nothing("0")),
            ("nyc=0%", nothing("0%")),
            ("101%", wrong("101%")),
            ("-1", wrong("-1")),
            ("ten", wrong("ten")),
            ("", wrong("")),
        ];
        for (text, expected) in table {
            assert_eq!(text.parse::<LocationLimit>(), expected, "{text}");
        }
        let given = ["10%", "nyc=3", "sfo=4", "20%", "nyc=none"].map(|text| text.parse().unwrap());
        let limits = MachineLimits::new(Some(MachineLimit::Count(9)), &given, None);
        let below = BTreeMap::from([("sfo".to_owned(), MachineLimit::Count(4))]);
        assert_eq!(
            limits,
            MachineLimits { fleet: Some(MachineLimit::Percent(20)), below, each: None }
        );
    }

    #[test]
    fn shares_are_rounded_up_and_a_quarter_is_for_repairs() {
        let of = |machines| MachineLimit::Percent(10).of(machines);
        assert_eq!([0, 3, 10, 11, 10_000].map(of), [1, 1, 1, 2, 1_000]);
        let repairs = [1, 2, 3, 7, 8, 100].map(|all| Places::share(all).repairs);
        assert_eq!(repairs, [0, 1, 1, 1, 2, 25]);
    }
}
