//! Which dominator gives orders to this machine.
//!
//! A dominator holds the machine for an hour after each of its calls, also over restarts of subd.
//! The clock decides, but no clock can make a hold longer than an hour.
// tidy: core

use api::fault::{Fault, FaultCode};
use api::subd::{DOMINATOR_BYTES_MAX, HOLD_SECONDS, HoldMachineRequest};
use model::display::{safe_text, utc};
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// A hold is not written again before so many of its seconds are over.
const SAVED_AFTER_SECONDS: i64 = 600;

/// The dominator that holds the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub dominator: String,
    /// The start of it that called last; `None` before it has called.
    pub start: Option<u64>,
    /// The start before that one. If it calls again, two run with one state.
    pub former_start: Option<u64>,
    /// When the hold ends, by the machine's clock.
    pub until: Time,
}

impl Holder {
    /// Returns the hold of a dominator that has not called, from `now` on.
    pub fn appointed(dominator: String, now: Time) -> Self {
        Self { dominator, start: None, former_start: None, until: end(now) }
    }

    /// True if the hold is in force at `now`.
    pub fn holds(&self, now: Time) -> bool {
        now < self.until && self.until <= end(now)
    }
}

fn end(now: Time) -> Time {
    Time { seconds: now.seconds.saturating_add(i64::from(HOLD_SECONDS)), ..now }
}

/// Decides whether the dominator of `request` may hold the machine, which `holder` has held, at
/// `now`. `only` is the dominator of the machine's own configuration. Returns the new hold.
///
/// # Errors
///
/// `Held` names the dominator that holds the machine.
pub fn hold(
    holder: Option<&Holder>,
    only: Option<&str>,
    request: &HoldMachineRequest,
    now: Time,
) -> Result<Holder, Fault> {
    let HoldMachineRequest { dominator, start } = request;
    if dominator.is_empty() || dominator.len() > DOMINATOR_BYTES_MAX {
        let text = format!("the name of a dominator has 1 to {DOMINATOR_BYTES_MAX} bytes");
        return Err(Fault::new(FaultCode::BadRequest, text));
    }
    let held = |text: String| Err(Fault::new(FaultCode::Held, text));
    let shown = safe_text(dominator, DOMINATOR_BYTES_MAX);
    if let Some(only) = only.filter(|only| only != dominator) {
        return held(format!(
            "its configuration lets only the dominator {only} give it orders, and this one is \
             {shown}"
        ));
    }
    match holder {
        Some(known) if known.dominator == *dominator => {
            if known.former_start == Some(*start) {
                return held(format!(
                    "two dominators run as {shown}, with copies of one state, and the other one \
                     was started later: stop one of them"
                ));
            }
            let is_same = known.start == Some(*start);
            let former_start = if is_same { known.former_start } else { known.start };
            let (dominator, start) = (dominator.clone(), Some(*start));
            Ok(Holder { dominator, start, former_start, until: end(now) })
        }
        Some(other) if other.holds(now) => held(format!(
            "it takes orders from the dominator {} until {}, and this one is {shown}; to give it \
             to this one: subtool take-over --dominator {shown}",
            safe_text(&other.dominator, DOMINATOR_BYTES_MAX),
            utc(other.until)
        )),
        _ => {
            let (dominator, start) = (dominator.clone(), Some(*start));
            Ok(Holder { dominator, start, former_start: None, until: end(now) })
        }
    }
}

/// True if the new hold must be written: it is another one, or the written one ends too early.
pub fn must_be_saved(saved: Option<&Holder>, new: &Holder) -> bool {
    saved.is_none_or(|saved| {
        Holder { until: new.until, ..saved.clone() } != *new
            || !(0..SAVED_AFTER_SECONDS)
                .contains(&new.until.seconds.saturating_sub(saved.until.seconds))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn request(dominator: &str, start: u64) -> HoldMachineRequest {
        HoldMachineRequest { dominator: dominator.to_owned(), start }
    }

    #[test]
    fn a_machine_has_one_holder_at_a_time() {
        let mut holder: Option<Holder> = None;
        let mut log = Vec::new();
        #[rustfmt::skip]
        let calls = [
            // time, dominator, start
            (0, "a", 1), (10, "b", 7), (3_599, "b", 7), (3_600, "b", 7), (3_601, "a", 1),
            // It was restarted.
            (3_700, "b", 8), (3_800, "b", 8),
            // The first start of it calls again: its state was copied.
            (3_900, "b", 7), (3_950, "b", 8),
            // The clock is set back: nobody is kept out for longer than an hour.
            (-100_000, "a", 1),
        ];
        for (time, dominator, start) in calls {
            match hold(holder.as_ref(), None, &request(dominator, start), at(time)) {
                Ok(new) => {
                    log.push(format!("{time} {dominator}{start}"));
                    holder = Some(new);
                }
                Err(fault) => log.push(format!("{time} {dominator}{start}: {}", fault.message)),
            }
        }
        let taken = "it takes orders from the dominator a until 1970-01-01T01:00:00Z, and this one \
                     is b; to give it to this one: subtool take-over --dominator b";
        let twice = "two dominators run as b, with copies of one state, and the other one was \
                     started later: stop one of them";
        let later = "it takes orders from the dominator b until 1970-01-01T02:00:00Z, and this one \
                     is a; to give it to this one: subtool take-over --dominator a";
        let expected = [
            "0 a1".to_owned(),
            format!("10 b7: {taken}"),
            format!("3599 b7: {taken}"),
            "3600 b7".to_owned(),
            format!("3601 a1: {later}"),
            "3700 b8".to_owned(),
            "3800 b8".to_owned(),
            format!("3900 b7: {twice}"),
            "3950 b8".to_owned(),
            "-100000 a1".to_owned(),
        ];
        assert_eq!(log, expected);
    }

    #[test]
    fn the_configuration_and_operators_decide() {
        let refused = hold(None, Some("a"), &request("b", 1), at(0)).unwrap_err();
        let why = "its configuration lets only the dominator a give it orders, and this one is b";
        assert_eq!((refused.code, &*refused.message), (FaultCode::Held, why));
        assert!(hold(None, Some("a"), &request("a", 1), at(0)).is_ok());
        assert_eq!(
            hold(None, None, &request("", 1), at(0)).unwrap_err().code,
            FaultCode::BadRequest
        );
        let appointed = Holder::appointed("b".to_owned(), at(0));
        assert!(hold(Some(&appointed), None, &request("a", 1), at(1)).is_err());
        let held = hold(Some(&appointed), None, &request("b", 1), at(1)).unwrap();
        assert_eq!((held.start, held.former_start), (Some(1), None));
    }

    #[test]
    fn a_hold_is_written_when_it_changes_and_every_ten_minutes() {
        let saved = hold(None, None, &request("a", 1), at(0)).unwrap();
        let renewed = |start, time| hold(Some(&saved), None, &request("a", start), at(time));
        assert!(must_be_saved(None, &saved));
        assert!(!must_be_saved(Some(&saved), &renewed(1, 599).unwrap()));
        assert!(must_be_saved(Some(&saved), &renewed(1, 600).unwrap()));
        assert!(must_be_saved(Some(&saved), &renewed(2, 1).unwrap()));
        assert!(must_be_saved(Some(&saved), &renewed(1, -1).unwrap()));
    }
}
