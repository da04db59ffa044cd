//! Maintenance windows: when the machines of an environment may be changed.

use jiff::Timestamp;
use jiff::tz::TimeZoneDatabase;
use model::JsonSchema;
use model::display::utc;
use model::json::KeyError;
use model::tree::Time;
use serde::{Deserialize, Serialize};
use tasks::cron::Cron;

/// The longest window, in minutes: a week.
const MINUTES_MAX: u32 = 7 * 24 * 60;

/// A time that comes again and again. The zones are those that are built in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// No window is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outside of the maintenance windows: {}", next.map_or_else(
    || "none begins any more".to_owned(), |next| format!("the next begins {}", utc(next))))]
pub struct Closed {
    /// When the next one begins, if there is one within five years.
    pub next: Option<Time>,
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

    /// Returns when it began, if it is open.
    fn begun(&self, now: Timestamp) -> Result<Time, Closed> {
        let zone = tasks::zone::find(&self.zone, &TimeZoneDatabase::none());
        let (Ok(zone), Ok(cron)) = (zone, self.begins.parse::<Cron>()) else {
            return Err(Closed { next: None });
        };
        let time = |at: Timestamp| Time { seconds: at.as_second(), nanoseconds: 0 };
        let is_open =
            |begun: &Timestamp| now.as_second() - begun.as_second() < i64::from(self.minutes) * 60;
        match cron.previous(&zone, now).filter(is_open) {
            Some(begun) => Ok(time(begun)),
            None => Err(Closed { next: cron.next(&zone, now).map(time) }),
        }
    }
}

/// Returns since when machines may be changed: one window that is open is enough. Without any
/// window it is `None`, for always.
///
/// # Errors
///
/// [`Closed`]
pub fn opening(windows: &[Window], now: Time) -> Result<Option<Time>, Closed> {
    let Ok(now) = Timestamp::from_second(now.seconds) else { return Err(Closed { next: None }) };
    let stands: Vec<Result<Time, Closed>> = windows.iter().map(|one| one.begun(now)).collect();
    let since = stands.iter().flatten().min().copied();
    if since.is_none() && !windows.is_empty() {
        let next = stands.iter().filter_map(|stand| stand.err()?.next).min();
        return Err(Closed { next });
    }
    Ok(since)
}
