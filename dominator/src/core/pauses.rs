//! Which machines an operator has paused: what a pause is, and what is kept over a restart.
//!
//! A pause ends by the time of day, so nothing has to happen for it to end; those that are over are
//! left out when the record is next written.
// tidy: core

use std::collections::BTreeMap;
use std::sync::Arc;

use api::dominator::orders::{PAUSE_REASON_BYTES_MAX, PAUSE_SECONDS_MAX, PauseEnd, UpdatePause};
use model::tree::Time;
use model::when::moment;
use model::when::written::later;

/// Why machines are not paused, or do not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PauseError {
    /// It does not say why.
    #[error("a pause needs a reason, for those who will wonder")]
    NoReason,
    /// The reason is too long.
    #[error("the reason of a pause has at most {PAUSE_REASON_BYTES_MAX} bytes")]
    LongReason,
    /// Its end has come already.
    #[error("{} is over: the dominator's clock says {}", moment(*until), moment(*now))]
    Over {
        /// When it was to end.
        until: Time,
        /// What the clock says.
        now: Time,
    },
    /// Its end is too far away.
    #[error(
        "{} is too far away: a pause lasts at most {} days; for longer, the record of a machine \
         may say DisableUpdates",
        moment(*until),
        PAUSE_SECONDS_MAX / (24 * 3_600)
    )]
    TooFar {
        /// When it was to end.
        until: Time,
    },
    /// None of the machines is paused.
    #[error("no operator has paused {}", hosts.join(", "))]
    NotPaused {
        /// What was asked for.
        hosts: Vec<String>,
    },
}

/// Makes a pause of what was asked for.
///
/// # Errors
///
/// [`PauseError`] if it makes no sense.
pub fn pause(
    end: PauseEnd,
    reason: String,
    who: String,
    now: Time,
) -> Result<UpdatePause, PauseError> {
    if reason.trim().is_empty() {
        return Err(PauseError::NoReason);
    }
    if reason.len() > PAUSE_REASON_BYTES_MAX || who.len() > PAUSE_REASON_BYTES_MAX {
        return Err(PauseError::LongReason);
    }
    let after = |seconds| later(now, core::time::Duration::from_secs(seconds));
    let until = match end {
        PauseEnd::At(until) => Time { nanoseconds: until.nanoseconds.min(999_999_999), ..until },
        PauseEnd::After(seconds) => after(seconds),
    };
    if until <= now {
        return Err(PauseError::Over { until, now });
    }
    if until > after(PAUSE_SECONDS_MAX) {
        return Err(PauseError::TooFar { until });
    }
    Ok(UpdatePause { until, reason, who, since: now })
}

/// A pause, and the machines that have it: how it is kept over a restart.
pub type KeptPause = (UpdatePause, Vec<String>);

/// The pauses of all machines. Machines that were paused by one order share what it said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    by_host: BTreeMap<String, Arc<UpdatePause>>,
}

impl Pauses {
    /// What was kept.
    #[must_use]
    pub fn from_kept(kept: Vec<KeptPause>) -> Self {
        let mut pauses = Self::default();
        for (pause, hostnames) in kept {
            pauses.pause(hostnames, &Arc::new(pause));
        }
        pauses
    }

    /// What is to be kept.
    #[must_use]
    pub fn kept(&self) -> Vec<KeptPause> {
        let mut kept: BTreeMap<&UpdatePause, Vec<String>> = BTreeMap::new();
        for (hostname, pause) in &self.by_host {
            kept.entry(pause).or_default().push(hostname.clone());
        }
        kept.into_iter().map(|(pause, hostnames)| (pause.clone(), hostnames)).collect()
    }

    /// Pauses machines; an earlier pause of them is replaced.
    pub fn pause(&mut self, hostnames: Vec<String>, pause: &Arc<UpdatePause>) {
        self.by_host.extend(hostnames.into_iter().map(|hostname| (hostname, Arc::clone(pause))));
    }

    /// Ends the pauses of machines, and gives those that were paused.
    pub fn resume(&mut self, hostnames: Vec<String>, now: Time) -> Vec<String> {
        let was_paused =
            |hostname: &String| self.by_host.remove(hostname).is_some_and(|pause| pause.holds(now));
        hostnames.into_iter().filter(was_paused).collect()
    }

    /// Forgets pauses that are over, and those of machines that are not `known`; true if there were
    /// such of unknown machines.
    pub fn tidy<V>(&mut self, known: &BTreeMap<String, V>, now: Time) -> bool {
        let before = self.by_host.len();
        self.by_host.retain(|hostname, _| known.contains_key(hostname));
        let has_changed = self.by_host.len() < before;
        self.by_host.retain(|_, pause| pause.holds(now));
        has_changed
    }

    /// The pause of a machine, over or not.
    #[must_use]
    pub fn of(&self, hostname: &str) -> Option<&Arc<UpdatePause>> {
        self.by_host.get(hostname)
    }

    /// How many machines are paused now.
    #[must_use]
    pub fn count(&self, now: Time) -> usize {
        self.by_host.values().filter(|pause| pause.holds(now)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn text(text: &str) -> String {
        text.to_owned()
    }

    fn made(end: PauseEnd, reason: &str) -> Result<UpdatePause, PauseError> {
        pause(end, text(reason), text("ann"), at(1_000))
    }

    fn works(until: i64) -> UpdatePause {
        made(PauseEnd::At(at(until)), "works").unwrap()
    }

    fn known(hosts: &[&str]) -> BTreeMap<String, ()> {
        hosts.iter().map(|host| (text(host), ())).collect()
    }

    #[test]
    fn a_pause_has_a_reason_and_an_end_that_comes() {
        let year = i64::try_from(PAUSE_SECONDS_MAX).unwrap();
        let good = |until| {
            let (reason, who) = (text("works"), text("ann"));
            Ok(UpdatePause { until, reason, who, since: at(1_000) })
        };
        let too_far = |until| Err(PauseError::TooFar { until });
        let over = |until| Err(PauseError::Over { until, now: at(1_000) });
        let at_time = |seconds| PauseEnd::At(at(seconds));
        let table = [
            (made(at_time(1_001), "works"), good(at(1_001))),
            (made(PauseEnd::After(3_600), "works"), good(at(4_600))),
            (made(at_time(1_000 + year), "works"), good(at(1_000 + year))),
            (made(at_time(1_000), "works"), over(at(1_000))),
            (made(at_time(i64::MIN), "works"), over(at(i64::MIN))),
            (made(PauseEnd::After(0), "works"), over(at(1_000))),
            (made(at_time(1_001 + year), "works"), too_far(at(1_001 + year))),
            (made(PauseEnd::After(u64::MAX), "works"), too_far(at(i64::MAX))),
            (made(at_time(2_000), " "), Err(PauseError::NoReason)),
            (made(at_time(2_000), &"x".repeat(1_001)), Err(PauseError::LongReason)),
        ];
        for (got, expected) in table {
            assert_eq!(got, expected);
        }
        let said = PauseError::Over { until: at(1_000), now: at(1_001) }.to_string();
        let expected = "1970-01-01T00:16:40Z is over: the dominator's clock says \
                        1970-01-01T00:16:41Z";
        assert_eq!(said, expected);
    }

    #[test]
    fn pauses_are_kept_ended_and_forgotten() {
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| text(host)).collect::<Vec<_>>();
        let mut pauses = Pauses::default();
        pauses.pause(hosts(&["a", "b", "c"]), &Arc::new(works(2_000)));
        pauses.pause(hosts(&["c", "d"]), &Arc::new(works(3_000)));
        let kept = [(works(2_000), hosts(&["a", "b"])), (works(3_000), hosts(&["c", "d"]))];
        assert_eq!(pauses.kept(), kept);
        assert_eq!(Pauses::from_kept(kept.to_vec()), pauses);
        assert_eq!((pauses.count(at(1_999)), pauses.count(at(2_000))), (4, 2));
        // One that is over is none, but it holds again if the clock is set back.
        assert_eq!(pauses.clone().resume(hosts(&["a", "c", "x"]), at(2_500)), hosts(&["c"]));
        assert_eq!(pauses.clone().resume(hosts(&["a", "c", "x"]), at(1_500)), hosts(&["a", "c"]));
        assert!(!pauses.tidy(&known(&["a", "b", "c", "d"]), at(2_500)));
        assert_eq!(pauses.kept(), [(works(3_000), hosts(&["c", "d"]))]);
        assert!(pauses.tidy(&known(&["d"]), at(2_500)));
        assert_eq!(pauses.kept(), [(works(3_000), hosts(&["d"]))]);
        assert_eq!(pauses.of("d").map(|pause| pause.until), Some(at(3_000)));
        assert_eq!(pauses.of("c"), None);
    }
}
