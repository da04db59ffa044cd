//! Maintenance windows: when the machines of an environment may be changed.

use jiff::Timestamp;
use jiff::tz::TimeZoneDatabase;
use model::display::utc;
use model::json::KeyError;
use model::tree::Time;
use serde::{Deserialize, Serialize};
use tasks::cron::Cron;

/// The longest window, in minutes: a week.
const MINUTES_MAX: u32 = 7 * 24 * 60;

/// A time that comes again and again. The zones are those that are built in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Such as `Europe/Berlin`.
    #[serde(default = "utc_zone")]
    pub zone: String,
    /// When it begins: five fields of cron.
    pub begins: String,
    /// How long it lasts.
    pub minutes: u32,
}

fn utc_zone() -> String {
    "UTC".to_owned()
}

/// How windows stand at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Machines may be changed, since then; always if it is `None`.
    Open(Option<Time>),
    /// None is open. The next one begins then, if there is one within five years.
    Closed(Option<Time>),
}

impl Opening {
    /// Returns why no machine may be changed; `None` if they may.
    #[must_use]
    pub fn closed(self) -> Option<String> {
        match self {
            Self::Open(_) => None,
            Self::Closed(Some(next)) => {
                Some(format!("outside of the maintenance windows: the next begins {}", utc(next)))
            }
            Self::Closed(None) => Some("no maintenance window begins any more".to_owned()),
        }
    }
}

impl Window {
    /// Checks that it can be understood.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn check(&self, at: &str) -> Result<(), KeyError> {
        let key = |key: &str| format!("{at}.{key}");
        let zones = TimeZoneDatabase::none();
        let zone = tasks::zone::find(&self.zone, &zones);
        zone.map_err(|why| KeyError::new(&key("zone"), why.to_string()))?;
        let begins: Result<Cron, _> = self.begins.parse();
        begins.map_err(|why| KeyError::new(&key("begins"), why.to_string()))?;
        if self.minutes == 0 || self.minutes > MINUTES_MAX {
            let problem = format!("must be from 1 to {MINUTES_MAX}");
            return Err(KeyError::new(&key("minutes"), problem));
        }
        Ok(())
    }

    /// Returns when it began, if it is open, or else when it begins next.
    fn at(&self, now: Timestamp) -> Opening {
        let zone = tasks::zone::find(&self.zone, &TimeZoneDatabase::none());
        let (Ok(zone), Ok(cron)) = (zone, self.begins.parse::<Cron>()) else {
            return Opening::Closed(None);
        };
        let time = |at: Timestamp| Time { seconds: at.as_second(), nanoseconds: 0 };
        let is_open =
            |begun: &Timestamp| now.as_second() - begun.as_second() < i64::from(self.minutes) * 60;
        match cron.previous(&zone, now).filter(is_open) {
            Some(begun) => Opening::Open(Some(time(begun))),
            None => Opening::Closed(cron.next(&zone, now).map(time)),
        }
    }
}

/// Returns how these windows stand: one that is open is enough, and without any it is always open.
#[must_use]
pub fn opening(windows: &[Window], now: Time) -> Opening {
    let Ok(now) = Timestamp::from_second(now.seconds) else { return Opening::Closed(None) };
    let (mut since, mut next) = (None, None);
    for window in windows {
        match window.at(now) {
            Opening::Open(begun) => since = [since, begun].into_iter().flatten().min(),
            Opening::Closed(Some(begins)) => {
                next = Some(next.map_or(begins, |next: Time| next.min(begins)));
            }
            Opening::Closed(None) => {}
        }
    }
    match since {
        None if !windows.is_empty() => Opening::Closed(next),
        since => Opening::Open(since),
    }
}
