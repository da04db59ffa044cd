//! Schedules: the start and stop events of a task, and where a moment lies among them.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::cron::Cron;
use crate::file::some_from_to;

/// The most events of a schedule.
const EVENTS_MAX: usize = 64;

/// The farthest that events may be moved: 14 days.
const OFFSET_S_MAX: i64 = 14 * 86_400;

/// When a task runs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a schedule")]
pub struct Schedule {
    #[serde(rename = "zone")]
    pub zone_name: String,
    #[serde(skip, default = "utc")]
    pub(crate) zone: TimeZone,
    /// How many seconds earlier than the wall clock says events happen; later if it is negative.
    #[serde(default, deserialize_with = "offset")]
    pub offset_s: i64,
    /// How long after the start of a period a run may still be made.
    #[serde(default, deserialize_with = "some_from_to::<_, 1, 31_622_400>")]
    pub start_deadline_s: Option<u32>,
    pub events: Vec<Event>,
}

/// An event of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "EventText")]
pub struct Event {
    pub action: Action,
    pub cron: Cron,
}

/// What an event does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    Start,
    Stop,
}

/// An event as files write it: by an expression, or by a time and days.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventText {
    action: Action,
    #[serde(default, deserialize_with = "cron")]
    cron: Option<Cron>,
    time: Option<String>,
    days: Option<String>,
}

impl TryFrom<EventText> for Event {
    type Error = String;

    fn try_from(text: EventText) -> Result<Self, String> {
        let EventText { action, cron, time, days } = text;
        let cron = match (cron, time, days) {
            (Some(cron), None, None) => cron,
            (None, Some(time), Some(days)) => {
                Cron::daily(&time, &days).map_err(|error| error.to_string())?
            }
            _ => return Err("expected either `cron`, or `time` and `days`".to_owned()),
        };
        Ok(Self { action, cron })
    }
}

/// A schedule whose events make no sense together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("has more than {EVENTS_MAX} events")]
    TooMany,
    /// Whether such a task should be started again, or be kept running, cannot be told.
    #[error("there are start events, and no stop event that can ever happen")]
    NeverStops,
}

/// A moment at which an event happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Occurrence {
    pub time: Timestamp,
    pub action: Action,
    /// The text of the event.
    pub matched: String,
}

/// Where a moment lies in a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    #[serde(skip)]
    pub now: Timestamp,
    /// The last event, which may be now. None is farther away than five years.
    pub previous: Option<Occurrence>,
    /// The first event after now.
    pub next: Option<Occurrence>,
    pub last_stop: Option<Timestamp>,
    /// The first start after the last stop. It may be in the future.
    pub period_start: Option<Timestamp>,
    pub should_run: bool,
}

impl Moment {
    /// Returns a moment of a task without a schedule.
    #[must_use]
    pub fn of_always(now: Timestamp) -> Self {
        let (previous, next, last_stop, period_start) = (None, None, None, None);
        Self { now, previous, next, last_stop, period_start, should_run: true }
    }
}

impl Schedule {
    /// Refuses events that make no sense together.
    pub(crate) fn check(&self) -> Result<(), ScheduleError> {
        if self.events.len() > EVENTS_MAX {
            return Err(ScheduleError::TooMany);
        }
        let starts = self.events.iter().any(|event| event.action == Action::Start);
        let stops = |event: &Event| event.action == Action::Stop && event.cron.can_fire();
        if starts && !self.events.iter().any(stops) {
            return Err(ScheduleError::NeverStops);
        }
        Ok(())
    }

    /// The zone whose wall clock it follows.
    #[must_use]
    pub fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// Returns where `now` lies in the schedule.
    #[must_use]
    pub fn moment(&self, now: Timestamp) -> Moment {
        let last_stop = self.previous(now, Some(Action::Stop)).map(|event| event.time);
        let last_start = self.previous(now, Some(Action::Start)).map(|event| event.time);
        let period_start = match last_stop {
            Some(stop) => self.next(stop, Some(Action::Start)).map(|event| event.time),
            None => last_start,
        };
        Moment {
            now,
            previous: self.previous(now, None),
            next: self.next(now, None),
            last_stop,
            period_start,
            should_run: last_start > last_stop,
        }
    }

    /// Returns the events after `now`, at most `count`.
    #[must_use]
    pub fn upcoming(&self, now: Timestamp, count: usize) -> Vec<Occurrence> {
        let first = self.next(now, None);
        let after = |event: &Occurrence| self.next(event.time, None);
        std::iter::successors(first, after).take(count).collect()
    }

    /// Returns the first stop after `now`.
    #[must_use]
    pub fn next_stop(&self, now: Timestamp) -> Option<Timestamp> {
        self.next(now, Some(Action::Stop)).map(|event| event.time)
    }

    /// Returns the last event at or before `now`. Of two at once a stop counts, then the first in
    /// the file.
    fn previous(&self, now: Timestamp, only: Option<Action>) -> Option<Occurrence> {
        let all = self.occurrences(only, |cron| {
            let found = cron.previous(&self.zone, now.checked_add(self.offset()).ok()?)?;
            found.checked_sub(self.offset()).ok()
        });
        // `max_by_key` returns the last of equals.
        all.into_iter().rev().max_by_key(|event| (event.time, event.action == Action::Stop))
    }

    /// Returns the first event after `now`. Of two at once a stop counts, then the first in the
    /// file.
    fn next(&self, now: Timestamp, only: Option<Action>) -> Option<Occurrence> {
        let all = self.occurrences(only, |cron| {
            let found = cron.next(&self.zone, now.checked_add(self.offset()).ok()?)?;
            found.checked_sub(self.offset()).ok()
        });
        all.into_iter().min_by_key(|event| (event.time, event.action == Action::Start))
    }

    fn occurrences(
        &self,
        only: Option<Action>,
        find: impl Fn(&Cron) -> Option<Timestamp>,
    ) -> Vec<Occurrence> {
        let wanted = |event: &&Event| only.is_none_or(|action| event.action == action);
        let occurrence = |event: &Event| {
            let (action, matched) = (event.action, event.cron.to_string());
            find(&event.cron).map(|time| Occurrence { time, action, matched })
        };
        self.events.iter().filter(wanted).filter_map(occurrence).collect()
    }

    fn offset(&self) -> SignedDuration {
        SignedDuration::from_secs(self.offset_s)
    }
}

fn utc() -> TimeZone {
    TimeZone::UTC
}

fn offset<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    let offset_s = i64::deserialize(from)?;
    if (-OFFSET_S_MAX..=OFFSET_S_MAX).contains(&offset_s) {
        return Ok(offset_s);
    }
    Err(D::Error::custom(format!("{offset_s} is not in -{OFFSET_S_MAX} to {OFFSET_S_MAX}")))
}

fn cron<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Cron>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}
