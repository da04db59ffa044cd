//! The current alarms, and their differences to the alarms that were reported last.
//!
//! A failed report is repeated with the differences at that time, so there is no queue of reports.
//! An alarm that begins and ends during one report is only in the history.
// tidy: core

use std::collections::BTreeMap;

use api::dominator::DominatorStatus;
use model::display::utc;
use model::tree::Time;
use serde::Serialize;

/// The kind of the alarm that the brake is on.
pub const UPDATES_DISABLED: &str = "updates-disabled";
/// The kind of the alarm that a machine database is held.
pub const MDB_HELD: &str = "mdb-held";
/// The kind of the alarm that the machine database is invalid.
pub const MDB_REFUSED: &str = "mdb-refused";

/// The kind of the alarm that the machine database in force cannot be saved.
pub const MDB_NOT_KEPT: &str = "mdb-not-kept";

/// The kind of the alarm that the history cannot be written.
pub const HISTORY_FAILING: &str = "history-failing";

/// The kind of the alarm that updates to an image have stopped.
pub const IMAGE_STOPPED: &str = "image-stopped";

/// The kind of the alarm that an image has another content under its name than before.
pub const IMAGE_CHANGED: &str = "image-changed";

/// The kind of the alarm that the clock of the dominator's machine jumped.
pub const CLOCK_JUMPED: &str = "clock-jumped";

/// The kind of the alarm that machines take orders from another dominator.
pub const OTHER_DOMINATOR: &str = "other-dominator";

/// The kind of the alarm that a resource of a machine could not be made.
pub const PROVISION_FAILED: &str = "provision-failed";

/// The kind of the alarm, and the name of the event, that a resource is not as it was made.
pub const RESOURCE_DRIFT: &str = "resource-drift";

/// The kind of the alarm that computed files could not be made again.
pub const COMPUTED_FILES: &str = "computed-files";

/// The kind of the alarm that a change of the content of computed files is stopped.
pub const CONTENT_STOPPED: &str = "content-stopped";

/// The kind of the alarm, and the name of the event, that a task has been unhealthy for a while.
pub const TASK_UNHEALTHY: &str = "task-unhealthy";

/// The same of a task that has failed, or cannot be run.
pub const TASK_FAILED: &str = "task-failed";

/// The same of a task that ends again and again.
pub const TASK_BACK_OFF: &str = "task-back-off";

/// The kind of the alarm that two machines may run an exclusive task.
pub const PERMIT_CONFLICT: &str = "permit-conflict";

/// The kind of the alarm that machines that have left the machine database wait for an operator.
pub const DEPARTING: &str = "departing";

/// The kind of the alarm that the health check of the image of a machine fails for a while.
pub const IMAGE_UNHEALTHY: &str = "image-unhealthy";

/// The kind of the alarm that a rollout has failed.
pub const ROLLOUT_FAILED: &str = "rollout-failed";

/// The kind of the alarm that the command fails that tells of rollouts.
pub const ROLLOUT_COMMAND: &str = "rollout-command";

/// The kind of the alarm that a step of a rollout waits for votes.
pub const ROLLOUT_VOTES: &str = "rollout-votes";

/// How many begun alarms, and how many ended ones, one report lists.
const LISTED_MAX: usize = 100;

/// A condition that operators should know of. It may end by itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Alarm {
    /// One of the kinds in `docs/OPERATING.md`.
    pub kind: String,
    /// The machine, the image, or a task as `HOST/TASK`; empty for the fleet.
    pub about: String,
    /// When it began, in UTC, if that is known. An alarm that begins again is another alarm.
    pub since: Option<String>,
    /// An explanation, which may change while the alarm stays the same.
    pub text: String,
}

/// A set of alarms: kind, object and begin of each, with its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlarmSet(BTreeMap<(String, String, Option<String>), String>);

impl AlarmSet {
    /// Returns the alarms of the dominator itself.
    #[must_use]
    pub fn of(status: &DominatorStatus) -> Self {
        let mut raised = Self::default();
        if let Some(brake) = &status.brake {
            let text = format!("updates are disabled by {}: {}", brake.who, brake.reason);
            raised.add(UPDATES_DISABLED, "", Some(brake.since), text);
        }
        if let Some(held) = &status.mdb_held {
            let text = format!("a machine database is held: {}", held.why);
            raised.add(MDB_HELD, "", Some(held.since), text);
        }
        if let Some(error) = &status.mdb_error {
            let text = format!("the machine database is not taken: {error}");
            raised.add(MDB_REFUSED, "", None, text);
        }
        if let Some(error) = &status.mdb_unkept {
            let text = format!("the machine database in force is not kept over a restart: {error}");
            raised.add(MDB_NOT_KEPT, "", None, text);
        }
        if let Some(error) = &status.history_error {
            let text = format!("no update is ordered, as it cannot be put on record: {error}");
            raised.add(HISTORY_FAILING, "", None, text);
        }
        for stop in &status.budgets.stopped {
            let text = format!("updates to {} have stopped: {}", stop.image, stop.why);
            raised.add(IMAGE_STOPPED, stop.image.as_str(), Some(stop.since), text);
        }
        raised
    }

    /// Adds the alarm that the clock of the dominator's machine jumped by so many seconds.
    pub fn add_clock_jump(&mut self, seconds: i64) {
        self.add(CLOCK_JUMPED, "", None, clock_text(seconds));
    }

    pub fn add(&mut self, kind: &str, about: &str, since: Option<Time>, text: String) {
        self.0.insert((kind.to_owned(), about.to_owned(), since.map(utc)), text);
    }

    /// Returns the alarms that `others` does not have: the first ones, and how many more there are.
    fn without(&self, others: &Self) -> (Vec<Alarm>, usize) {
        let new = || self.0.iter().filter(|(key, _)| !others.0.contains_key(*key));
        let alarm = |((kind, about, since), text): (&(String, String, Option<String>), &String)| {
            let (kind, about, since) = (kind.clone(), about.clone(), since.clone());
            Alarm { kind, about, since, text: text.clone() }
        };
        let listed = new().take(LISTED_MAX).map(alarm).collect();
        (listed, new().count().saturating_sub(LISTED_MAX))
    }
}

/// Says that the clock jumped by so many seconds.
pub fn clock_text(seconds: i64) -> String {
    format!(
        "the clock of the dominator's machine jumped by {seconds} s: nothing of the history is \
         removed for its age until it is back, or you say that it is right: domtool accept-clock"
    )
}

/// The content of one report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AlarmChanges {
    /// Alarms that began, sorted by kind; at most 100.
    pub begun: Vec<Alarm>,
    /// How many more began.
    pub more_begun: usize,
    /// Alarms that ended, sorted by kind; at most 100.
    pub ended: Vec<Alarm>,
    /// How many more ended.
    pub more_ended: usize,
}

/// Returns the differences to the alarms that were reported last; `None` if nothing differs.
#[must_use]
pub fn changes(reported: &AlarmSet, now: &AlarmSet) -> Option<AlarmChanges> {
    let (begun, more_begun) = now.without(reported);
    let (ended, more_ended) = reported.without(now);
    let has_any = !begun.is_empty() || !ended.is_empty();
    has_any.then_some(AlarmChanges { begun, more_begun, ended, more_ended })
}

#[cfg(test)]
mod tests {
    use api::dominator::Brake;
    use api::dominator::mdb::HeldMdb;
    use api::dominator::orders::BudgetReport;
    use model::object::Algorithm;

    use super::*;

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 5 }
    }

    fn alarm(kind: &str, about: &str, since: Option<&str>, text: &str) -> Alarm {
        let (kind, about, text) = (kind.to_owned(), about.to_owned(), text.to_owned());
        Alarm { kind, about, since: since.map(str::to_owned), text }
    }

    fn status() -> DominatorStatus {
        DominatorStatus {
            brake: Some(Brake { reason: "storm".into(), who: "ann".into(), since: at(1) }),
            counts: Vec::new(),
            mdb_error: Some("line 3: no comma".into()),
            mdb_held: Some(HeldMdb {
                digest: Algorithm::Blake3.digest(b"mdb"),
                since: at(60),
                why: "it lists no machine at all".into(),
            }),
            mdb_read: None,
            mdb_unkept: Some("the disk is full".into()),
            image_remarks: Vec::new(),
            image_server_error: None,
            budgets: BudgetReport::default(),
            alarm_error: None,
            history_error: None,
            directories: 0,
            paused: 0,
            default_image: None,
        }
    }

    #[test]
    fn what_began_and_what_ended_is_told_once() {
        let mut now = AlarmSet::of(&status());
        now.add("scanner-stalled", "web1", None, "the scanner stalls: at /srv".into());
        let first = changes(&AlarmSet::default(), &now).unwrap();
        let begun = vec![
            alarm(
                "mdb-held",
                "",
                Some("1970-01-01T00:01:00Z"),
                "a machine database is held: it lists no machine at all",
            ),
            alarm(
                "mdb-not-kept",
                "",
                None,
                "the machine database in force is not kept over a restart: the disk is full",
            ),
            alarm("mdb-refused", "", None, "the machine database is not taken: line 3: no comma"),
            alarm("scanner-stalled", "web1", None, "the scanner stalls: at /srv"),
            alarm(
                "updates-disabled",
                "",
                Some("1970-01-01T00:00:01Z"),
                "updates are disabled by ann: storm",
            ),
        ];
        assert_eq!(first, AlarmChanges { begun, more_begun: 0, ended: Vec::new(), more_ended: 0 });
        assert_eq!(changes(&now, &now), None);

        // The brake is on again, the scanner reports another path, the other alarms have ended.
        let mut later = AlarmSet::default();
        later.add(UPDATES_DISABLED, "", Some(at(7)), "again".into());
        later.add("scanner-stalled", "web1", None, "the scanner stalls: at /home".into());
        let AlarmChanges { begun, ended, .. } = changes(&now, &later).unwrap();
        assert_eq!(begun, [alarm("updates-disabled", "", Some("1970-01-01T00:00:07Z"), "again")]);
        let kinds: Vec<&str> = ended.iter().map(|alarm| alarm.kind.as_str()).collect();
        assert_eq!(kinds, ["mdb-held", "mdb-not-kept", "mdb-refused", "updates-disabled"]);
    }

    #[test]
    fn a_call_lists_a_hundred_and_counts_the_others() {
        let mut now = AlarmSet::default();
        for machine in 0..130 {
            now.add("read-only", &format!("web{machine:03}"), None, String::new());
        }
        let AlarmChanges { begun, more_begun, ended, more_ended } =
            changes(&AlarmSet::default(), &now).unwrap();
        assert_eq!((begun.len(), more_begun, ended.len(), more_ended), (100, 30, 0, 0));
        assert_eq!(begun[99].about, "web099");
        let over = changes(&now, &AlarmSet::default()).unwrap();
        assert_eq!((over.ended.len(), over.more_ended), (100, 30));
    }
}
