//! How many machines may be under way at once, as operators say it.
// tidy: core

use core::str::FromStr;
use std::collections::BTreeMap;
use std::fmt;

use model::words::counted;

use crate::core::selectors::trimmed;

/// How many machines may do something at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// So many; at least one.
    Count(u32),
    /// So many of a hundred of those that there are, rounded up: from 1 to 100.
    Percent(u8),
}

/// A text that is no limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// It is neither a number nor a share.
    #[error("`{0}` is no limit: expected a number of machines, PERCENT%, or none")]
    Kind(String),
    /// It would never let a machine do anything.
    #[error("`{0}` would keep all machines from being updated: domtool disable-updates does so")]
    Nothing(String),
    /// There is no location before the equals sign.
    #[error("`{0}` names no location before `=`")]
    Location(String),
}

impl Limit {
    /// Reads `NUMBER` or `PERCENT%`; `none` is no limit.
    ///
    /// # Errors
    ///
    /// [`LimitError`].
    pub fn parse(text: &str) -> Result<Option<Self>, LimitError> {
        let wrong = || LimitError::Kind(text.to_owned());
        let limit = match text.strip_suffix('%') {
            _ if text == "none" => return Ok(None),
            Some(percent) => {
                let percent = percent.trim_end().parse::<u8>().map_err(|_| wrong())?;
                if percent > 100 {
                    return Err(wrong());
                }
                Self::Percent(percent)
            }
            None => Self::Count(text.parse::<u32>().map_err(|_| wrong())?),
        };
        match limit {
            Self::Count(0) | Self::Percent(0) => Err(LimitError::Nothing(text.to_owned())),
            limit => Ok(Some(limit)),
        }
    }

    /// How many of so many `machines` that is; at least one.
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

impl fmt::Display for Limit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(formatter, "{count}"),
            Self::Percent(percent) => write!(formatter, "{percent}%"),
        }
    }
}

/// `[LOCATION=]LIMIT`: a limit, and where it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitAt {
    /// The machines at this location and below; the whole fleet if `None`.
    pub location: Option<String>,
    /// The limit; none if `None`.
    pub limit: Option<Limit>,
}

impl FromStr for LimitAt {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let (location, limit) = match text.rsplit_once('=') {
            None => (None, text),
            Some((location, limit)) => (Some(trimmed(location)), limit),
        };
        if location == Some("") {
            return Err(LimitError::Location(text.to_owned()));
        }
        Ok(Self { location: location.map(str::to_owned), limit: Limit::parse(limit)? })
    }
}

/// All limits of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of the whole fleet.
    pub fleet: Option<Limit>,
    /// Of all machines at a location and below it, by location.
    pub below: BTreeMap<String, Limit>,
    /// Of the machines at each location, taken for itself. Machines without one are not counted.
    pub each: Option<Limit>,
}

impl Limits {
    /// Puts together what was given; of two limits for one place the later one holds. That of the
    /// whole fleet is `fleet` if none was given for it.
    #[must_use]
    pub fn new(fleet: Option<Limit>, given: &[LimitAt], each: Option<Limit>) -> Self {
        let mut limits = Self { fleet, below: BTreeMap::new(), each };
        for LimitAt { location, limit } in given {
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

/// The places of one limit, and how they are shared: a quarter, but at least one, is for repairs
/// alone, and the rest for rollouts alone, so that neither delays the other. A single place is for
/// both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// All of them.
    pub all: u32,
    /// Those of repairs; 0 if there is one place for both.
    pub repairs: u32,
}

impl Places {
    /// Shares so many places.
    #[must_use]
    pub fn share(all: u32) -> Self {
        let repairs = if all < 2 { 0 } else { (all / 4).max(1) };
        Self { all, repairs }
    }

    /// True if both use the same.
    #[must_use]
    pub fn is_common(self) -> bool {
        self.repairs == 0
    }
}

/// How many machines, in words.
pub(super) fn machines(count: u32) -> String {
    counted(u64::from(count), "machine")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_operators_write_them() {
        let at = |location: Option<&str>, limit| {
            Ok(LimitAt { location: location.map(str::to_owned), limit })
        };
        let wrong = |text: &str| Err(LimitError::Kind(text.to_owned()));
        let nothing = |text: &str| Err(LimitError::Nothing(text.to_owned()));
        let table = [
            ("5", at(None, Some(Limit::Count(5)))),
            ("10%", at(None, Some(Limit::Percent(10)))),
            ("10 %", at(None, Some(Limit::Percent(10)))),
            ("100%", at(None, Some(Limit::Percent(100)))),
            ("none", at(None, None)),
            ("nyc=3", at(Some("nyc"), Some(Limit::Count(3)))),
            ("/nyc/r4/=1%", at(Some("nyc/r4"), Some(Limit::Percent(1)))),
            ("a=b=none", at(Some("a=b"), None)),
            ("=3", Err(LimitError::Location("=3".into()))),
            ("0", nothing("0")),
            ("nyc=0%", nothing("0%")),
            ("101%", wrong("101%")),
            ("-1", wrong("-1")),
            ("ten", wrong("ten")),
            ("", wrong("")),
        ];
        for (text, expected) in table {
            assert_eq!(text.parse::<LimitAt>(), expected, "{text}");
        }
        let given = ["10%", "nyc=3", "sfo=4", "20%", "nyc=none"].map(|text| text.parse().unwrap());
        let limits = Limits::new(Some(Limit::Count(9)), &given, None);
        let below = BTreeMap::from([("sfo".to_owned(), Limit::Count(4))]);
        assert_eq!(limits, Limits { fleet: Some(Limit::Percent(20)), below, each: None });
    }

    #[test]
    fn shares_are_rounded_up_and_a_quarter_is_for_repairs() {
        let of = |machines| Limit::Percent(10).of(machines);
        assert_eq!([0, 3, 10, 11, 10_000].map(of), [1, 1, 1, 2, 1_000]);
        let repairs = [1, 2, 3, 7, 8, 100].map(|all| Places::share(all).repairs);
        assert_eq!(repairs, [0, 1, 1, 1, 2, 25]);
    }
}
