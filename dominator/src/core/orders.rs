//! Orders of operators as they are recorded, and pauses of updates.
//!
//! Every order is recorded before it takes effect. An order that changes saved state is recorded in
//! the same transaction (`storage::with_order`); any other is recorded by
//! `Fleet::audit`. An order that cannot be recorded is refused, except the brake, which takes
//! effect in memory anyway.
//!
//! A pause ends by the time of day, without an event. Ended pauses are removed when the pauses are
//! next saved.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use api::dominator::orders::{PAUSE_REASON_BYTES_MAX, PAUSE_SECONDS_MAX, PauseEnd, UpdatePause};
use model::display::utc;
use model::time_parse::later;
use model::tree::Time;

/// The longest text of an order, in bytes.
pub const ORDER_TEXT_MAX: usize = 4_096;

/// The record of one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The name of the command.
    pub verb: &'static str,
    /// The machine or image; empty for the whole fleet.
    pub about: String,
    /// What exactly is ordered, such as the end of a pause; empty if `verb` says it.
    pub what: String,
    pub who: String,
    /// The reason; empty if none was given.
    pub why: String,
}

/// Why an order is refused because of its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderTextError {
    #[error("say why {ordered}")]
    NoReason { ordered: &'static str },
    #[error("a reason, and each other text of an order, has at most {ORDER_TEXT_MAX} bytes")]
    TooLong,
}

impl Order {
    /// Makes an order about the whole fleet, without a reason.
    #[must_use]
    pub fn new(verb: &'static str, who: &str) -> Self {
        let (about, what, why) = Default::default();
        Self { verb, about, what, who: who.to_owned(), why }
    }

    /// Sets the machine or image.
    #[must_use]
    pub fn about(self, about: impl Display) -> Self {
        Self { about: about.to_string(), ..self }
    }

    /// Sets what exactly is ordered.
    #[must_use]
    pub fn what(self, what: String) -> Self {
        Self { what, ..self }
    }

    /// Sets the reason.
    #[must_use]
    pub fn why(self, why: &str) -> Self {
        Self { why: why.to_owned(), ..self }
    }

    /// Checks that all texts are short enough to be recorded.
    pub fn checked(self) -> Result<Self, OrderTextError> {
        let is_short = |text: &String| text.len() <= ORDER_TEXT_MAX;
        let are_short = [&self.about, &self.what, &self.who, &self.why].into_iter().all(is_short);
        if are_short { Ok(self) } else { Err(OrderTextError::TooLong) }
    }

    /// Checks the texts of an order that needs a reason. `ordered` follows "say why" in the error.
    pub fn reasoned(self, ordered: &'static str) -> Result<Self, OrderTextError> {
        if self.why.trim().is_empty() {
            return Err(OrderTextError::NoReason { ordered });
        }
        self.checked()
    }
}

/// Why a pause, or its end, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PauseError {
    #[error("a pause needs a reason")]
    NoReason,
    #[error("the reason of a pause has at most {PAUSE_REASON_BYTES_MAX} bytes")]
    LongReason,
    #[error("{} is over: the dominator's clock says {}", utc(*until), utc(*now))]
    Over { until: Time, now: Time },
    #[error(
        "{} is too far away: a pause lasts at most {} days; for longer, the record of a machine \
         may say DisableUpdates",
        utc(*until),
        PAUSE_SECONDS_MAX / (24 * 3_600)
    )]
    TooFar { until: Time },
    #[error("no operator has paused {}", hosts.join(", "))]
    NotPaused { hosts: Vec<String> },
}

/// Makes a pause, if its reason and end are valid.
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
    let until = end_of(end, now);
    if until <= now {
        return Err(PauseError::Over { until, now });
    }
    if until > later(now, Duration::from_secs(PAUSE_SECONDS_MAX)) {
        return Err(PauseError::TooFar { until });
    }
    Ok(UpdatePause { until, reason, who, since: now })
}

/// Returns the time at which something ends that is ordered now.
#[must_use]
pub fn end_of(end: PauseEnd, now: Time) -> Time {
    match end {
        PauseEnd::At(until) => Time { nanoseconds: until.nanoseconds.min(999_999_999), ..until },
        PauseEnd::After(seconds) => later(now, Duration::from_secs(seconds)),
    }
}

/// A pause and its machines, as it is saved.
pub type SavedPause = (UpdatePause, Vec<String>);

/// The pauses of all machines. Machines that were paused by one order share one value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pauses {
    by_host: BTreeMap<String, Arc<UpdatePause>>,
}

impl Pauses {
    #[must_use]
    pub fn from_saved(saved: Vec<SavedPause>) -> Self {
        let mut pauses = Self::default();
        for (pause, hostnames) in saved {
            pauses.pause(hostnames, &Arc::new(pause));
        }
        pauses
    }

    /// Returns what is to be saved.
    #[must_use]
    pub fn saved(&self) -> Vec<SavedPause> {
        let mut saved: BTreeMap<&UpdatePause, Vec<String>> = BTreeMap::new();
        for (hostname, pause) in &self.by_host {
            saved.entry(pause).or_default().push(hostname.clone());
        }
        saved.into_iter().map(|(pause, hostnames)| (pause.clone(), hostnames)).collect()
    }

    /// Pauses machines, replacing earlier pauses.
    pub fn pause(&mut self, hostnames: Vec<String>, pause: &Arc<UpdatePause>) {
        self.by_host.extend(hostnames.into_iter().map(|hostname| (hostname, Arc::clone(pause))));
    }

    /// Ends the pauses of machines. Returns those that were paused.
    pub fn resume(&mut self, hostnames: Vec<String>, now: Time) -> Vec<String> {
        let was_paused =
            |hostname: &String| self.by_host.remove(hostname).is_some_and(|pause| pause.holds(now));
        hostnames.into_iter().filter(was_paused).collect()
    }

    /// Removes ended pauses, and those of machines that are not `known`. Returns true if there were
    /// any of unknown machines.
    pub fn remove_ended<V>(&mut self, known: &BTreeMap<String, V>, now: Time) -> bool {
        let before = self.by_host.len();
        self.by_host.retain(|hostname, _| known.contains_key(hostname));
        let has_changed = self.by_host.len() < before;
        self.by_host.retain(|_, pause| pause.holds(now));
        has_changed
    }

    /// Returns the pause of a machine, ended or not.
    #[must_use]
    pub fn get(&self, hostname: &str) -> Option<&Arc<UpdatePause>> {
        self.by_host.get(hostname)
    }

    /// Returns the number of machines that are paused now.
    #[must_use]
    pub fn count(&self, now: Time) -> usize {
        self.by_host.values().filter(|pause| pause.holds(now)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_put_together_and_their_texts_are_short_and_say_why() {
        let order = Order::new("retry", "ann").about("web1").why("repaired");
        let (about, who, why) = ("web1".to_owned(), "ann".to_owned(), "repaired".to_owned());
        let what = String::new();
        assert_eq!(order, Order { verb: "retry", about, what, who, why });
        let long = "x".repeat(ORDER_TEXT_MAX + 1);
        assert_eq!(order.clone().checked(), Ok(order.clone()));
        assert_eq!(order.clone().reasoned("it is"), Ok(order.clone()));
        assert!(order.clone().why(&long[1..]).checked().is_ok());
        for order in [order.clone().about(&long), order.why(&long), Order::new("x", &long)] {
            assert_eq!(order.checked(), Err(OrderTextError::TooLong));
        }
        for why in ["", " \t"] {
            let order = Order::new("resume-image", "ann").why(why);
            assert!(order.clone().checked().is_ok());
            let error = order.reasoned("it is to go on").unwrap_err();
            assert_eq!(error.to_string(), "say why it is to go on");
        }
    }

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
        assert_eq!(pauses.saved(), kept);
        assert_eq!(Pauses::from_saved(kept.to_vec()), pauses);
        assert_eq!((pauses.count(at(1_999)), pauses.count(at(2_000))), (4, 2));
        // An ended pause is not in force, but it is again if the clock is set back.
        assert_eq!(pauses.clone().resume(hosts(&["a", "c", "x"]), at(2_500)), hosts(&["c"]));
        assert_eq!(pauses.clone().resume(hosts(&["a", "c", "x"]), at(1_500)), hosts(&["a", "c"]));
        assert!(!pauses.remove_ended(&known(&["a", "b", "c", "d"]), at(2_500)));
        assert_eq!(pauses.saved(), [(works(3_000), hosts(&["c", "d"]))]);
        assert!(pauses.remove_ended(&known(&["d"]), at(2_500)));
        assert_eq!(pauses.saved(), [(works(3_000), hosts(&["d"]))]);
        assert_eq!(pauses.get("d").map(|pause| pause.until), Some(at(3_000)));
        assert_eq!(pauses.get("c"), None);
    }
}
