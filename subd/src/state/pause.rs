//! The pause of updates that an operator asked for.
//!
//! A caller says until when, by the machine's clock. That is turned into a length at once, and the
//! pause ends when that time has elapsed since it began, also over restarts of subd, whatever
//! becomes of the clock. After a reboot nobody knows how long the machine was off: then the clock
//! decides, but no clock can make the pause last longer than its whole length after the boot.
// tidy: core

use core::time::Duration;

use api::subd::Paused;
use model::boot_time::BootTime;
use model::time_parse::later;
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// The longest pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);

/// How much the clock may differ from the elapsed time before the end by the clock is corrected.
const CLOCK_ERROR_MAX: Duration = Duration::from_secs(60);

/// A pause as it is saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedPause {
    /// When it ends, by the machine's clock.
    pub until: Time,
    pub reason: String,
    /// `None` if an earlier release saved it.
    #[serde(default)]
    pub length: Option<PauseLength>,
}

/// How long a pause lasts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseLength {
    pub began: BootTime,
    pub whole_ms: u64,
}

impl SavedPause {
    /// Returns the pause that begins now: at `now` by the machine's clock.
    pub fn new(paused: Paused, now: Time, boot: BootTime) -> Self {
        let Paused { until, reason } = paused;
        let whole_ms = u64::try_from(time_until(until, now).as_millis()).unwrap_or(u64::MAX);
        Self { until, reason, length: Some(PauseLength { began: boot, whole_ms }) }
    }

    /// Returns the rest of it; zero if it has ended.
    pub fn left(&self, now: Time, boot: &BootTime) -> Duration {
        let by_clock = time_until(self.until, now).min(PAUSE_MAX);
        let Some(PauseLength { began, whole_ms }) = &self.length else { return by_clock };
        let left = |elapsed_ms: u64| Duration::from_millis(whole_ms.saturating_sub(elapsed_ms));
        match boot.ms_since(began) {
            Some(elapsed_ms) => left(elapsed_ms),
            // It began before this boot, so at most the time since the boot is known to be over.
            None => by_clock.min(left(boot.ms)),
        }
    }

    /// Returns it as people are shown it: with its end by the clock as that is now.
    pub fn shown(&self, now: Time, boot: &BootTime) -> Paused {
        let end = later(now, self.left(now, boot));
        let error = time_until(end, self.until).max(time_until(self.until, end));
        let until = if error > CLOCK_ERROR_MAX { end } else { self.until };
        Paused { until, reason: self.reason.clone() }
    }

    /// Returns it as people are shown it, if it is in force.
    pub fn in_force(&self, now: Time, boot: &BootTime) -> Option<Paused> {
        (!self.left(now, boot).is_zero()).then(|| self.shown(now, boot))
    }

    /// Returns what must be saved instead: the clock was set since it was saved, or an earlier
    /// release saved it. Then it begins now, because nobody knows when it began.
    pub fn corrected(&self, now: Time, boot: &BootTime) -> Option<Self> {
        let shown = self.shown(now, boot);
        let Some(length) = &self.length else {
            // A clock by which it would be longer than it can be will be set.
            let is_clock_right = time_until(self.until, now) <= PAUSE_MAX;
            return is_clock_right.then(|| Self::new(shown, now, boot.clone()));
        };
        // After a reboot the clock may be wrong only until it is set: the known end is kept.
        let is_of_this_boot = boot.ms_since(&length.began).is_some();
        let is_wrong = is_of_this_boot && shown.until != self.until;
        is_wrong.then(|| Self { until: shown.until, ..self.clone() })
    }
}

/// Returns the time from `now` to `end`; zero if that is over.
pub fn time_until(end: Time, now: Time) -> Duration {
    let nanoseconds = |time: Time| {
        i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds.min(999_999_999))
    };
    let left = (nanoseconds(end) - nanoseconds(now)).max(0);
    let seconds = u64::try_from(left / 1_000_000_000).unwrap_or(u64::MAX);
    let rest = u32::try_from(left % 1_000_000_000).unwrap_or(0);
    Duration::new(seconds, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600;

    /// When the pause of these tests begins: 1,000 s after the boot "a".
    const BEGIN: i64 = 1_900_000_000;

    const LATER: i64 = BEGIN + HOUR;
    const END: i64 = BEGIN + 2 * HOUR;

    /// Clocks that are wrong by twenty years.
    const AHEAD: i64 = BEGIN + 20 * 365 * 24 * HOUR;
    const BEHIND: i64 = BEGIN - 20 * 365 * 24 * HOUR;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn boot(boot_id: &str, seconds: u64) -> BootTime {
        BootTime { boot_id: boot_id.to_owned(), ms: seconds * 1_000 }
    }

    fn until(seconds: i64) -> Paused {
        Paused { until: at(seconds), reason: "works".to_owned() }
    }

    #[test]
    fn a_pause_ends_by_elapsed_time_and_after_a_reboot_by_the_clock_or_after_its_length() {
        let pause = SavedPause::new(until(END), at(BEGIN), boot("a", 1_000));
        // What a subd has that was restarted.
        let text = serde_json::to_string(&pause).unwrap();
        let pause: SavedPause = serde_json::from_str(&text).unwrap();
        #[rustfmt::skip]
        let table = [
            // what, clock, since the boot, left, shown until, is corrected
            ("it begins",           BEGIN,      ("a", 1_000), 7_200, END,            false),
            ("an hour later",       LATER,      ("a", 4_600), 3_600, END,            false),
            ("nearly right",        LATER + 60, ("a", 4_600), 3_600, END,            false),
            ("wrong",               LATER + 61, ("a", 4_600), 3_600, END + 61,       true),
            ("set forward",         AHEAD,      ("a", 4_600), 3_600, AHEAD + HOUR,   true),
            ("set back",            BEHIND,     ("a", 4_600), 3_600, BEHIND + HOUR,  true),
            ("over",                END,        ("a", 8_200), 0,     END,            false),
            ("over, set back",      BEHIND,     ("a", 9_999), 0,     BEHIND,         true),
            ("rebooted",            LATER,      ("b", 100),   3_600, END,            false),
            ("off until after it",  END + HOUR, ("b", 100),   0,     END + HOUR,     false),
            ("booted in 1970",      50,         ("b", 100),   7_100, 7_150,          false),
            ("1970 for long",       7_150,      ("b", 7_200), 0,     7_150,          false),
            ("booted, set back",    BEHIND,     ("b", 7_000), 200,   BEHIND + 200,   false),
            ("booted, set forward", AHEAD,      ("b", 100),   0,     AHEAD,          false),
        ];
        for (what, now, (boot_id, since), left, end, is_corrected) in table {
            let (now, boot) = (at(now), boot(boot_id, since));
            let in_force = (left > 0).then(|| until(end));
            let corrected = is_corrected.then(|| SavedPause { until: at(end), ..pause.clone() });
            let expected = (Duration::from_secs(left), until(end), in_force, corrected);
            let got = (
                pause.left(now, &boot),
                pause.shown(now, &boot),
                pause.in_force(now, &boot),
                pause.corrected(now, &boot),
            );
            assert_eq!(got, expected, "{what}");
        }
    }

    #[test]
    fn what_is_corrected_stays_and_ends_by_the_corrected_clock_after_a_reboot() {
        let pause = SavedPause::new(until(AHEAD + 2 * HOUR), at(AHEAD), boot("a", 1_000));
        let pause = pause.corrected(at(LATER), &boot("a", 4_600)).unwrap();
        assert_eq!(pause.until, at(END));
        assert_eq!(pause.corrected(at(LATER + 30), &boot("a", 4_630)), None);
        let left = pause.left(at(LATER + 1_800), &boot("b", 10));
        assert_eq!(left, Duration::from_secs(1_800));
    }

    #[test]
    fn a_pause_of_an_earlier_release_begins_when_it_is_read_and_outlasts_no_month() {
        let text = r#"{"until": {"seconds": "1900007200", "nanoseconds": 0}, "reason": "works"}"#;
        let pause: SavedPause = serde_json::from_str(text).unwrap();
        let (until, reason) = (at(END), "works".to_owned());
        assert_eq!(pause, SavedPause { until, reason, length: None });
        let month = 30 * 24 * HOUR;
        #[rustfmt::skip]
        let table = [
            // clock, left, shown until
            (LATER,    HOUR,  END),
            (END,      0,     END),
            (AHEAD,    0,     AHEAD),
            (BEHIND,   month, BEHIND + month),
            (i64::MIN, month, i64::MIN + month),
        ];
        let boot = boot("a", 4_600);
        for (now, left, end) in table {
            let now = at(now);
            let whole_ms = left.unsigned_abs() * 1_000;
            let length = Some(PauseLength { began: boot.clone(), whole_ms });
            let corrected = SavedPause { until: at(end), length, ..pause.clone() };
            let corrected = (left < month).then_some(corrected);
            assert_eq!(pause.left(now, &boot), Duration::from_millis(whole_ms), "{now:?}");
            assert_eq!(pause.corrected(now, &boot), corrected, "{now:?}");
        }
    }

    #[test]
    fn the_end_by_the_clock_does_not_waver() {
        let whole = Time { seconds: 8_200, nanoseconds: 900_000_000 };
        let paused = Paused { until: whole, reason: "works".to_owned() };
        let pause = SavedPause::new(paused, Time { seconds: 1_000, ..whole }, boot("a", 1_000));
        for ms in (0..2_000).step_by(100) {
            let now = later(at(0), Duration::from_millis(ms));
            let boot = BootTime { boot_id: "b".to_owned(), ms: 5_000 + ms };
            assert_eq!(pause.shown(now, &boot).until, at(7_200 - 5), "{ms}");
        }
    }
}
