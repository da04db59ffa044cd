//! The status of a sub, and what operators are shown of it: summaries, details, and the input of
//! the preview of a plan.
// tidy: core

use core::net::SocketAddr;
use std::collections::VecDeque;
use std::sync::Arc;

use api::dominator::orders::UpdatePause;
use api::dominator::plan::NoPlanReason;
use api::dominator::{Status, SubDetail, SubSummary};
use api::planning::Planned;
use api::planning::preview::FetchTotals;
use api::subd::{Activity, ScanReport};
use model::display::safe_text;
use model::filter::Patterns;
use model::image::ImageName;
use model::image::composition::LeftOut;
use model::mdb::Machine;
use model::object::ObjectSet;
use model::plan::RefusedChanges;
use model::scope::Scope;
use model::tree::{Time, Tree};

use super::plans::Missing;
use super::polls::Reachability;
use super::{Check, Effect, StatusAndDetail, Step, Sub, View, stop};

/// How many operations of a plan are shown.
const OPERATIONS_MAX: usize = 200;

/// The longest detail of a status, in bytes. Parts of it come from machines and image servers.
const DETAIL_BYTES_MAX: usize = 1_000;

/// How many changes of the status are kept of each machine: those of two updates. The history of
/// the dominator has more.
const CHANGES_MAX: usize = 20;

/// The last changes of the status of one machine, kept in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StatusHistory {
    changes: VecDeque<(Time, Status, Box<str>)>,
}

impl StatusHistory {
    /// Adds a change; removes the oldest if there are more than [`CHANGES_MAX`].
    fn record(&mut self, time: Time, status: Status, detail: &str) {
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back((time, status, detail.into()));
    }

    pub(super) fn newest_first(&self) -> Vec<(Time, Status, String)> {
        let newest = self.changes.iter().rev();
        newest.map(|(time, status, detail)| (*time, *status, detail.to_string())).collect()
    }
}

/// The current status.
#[derive(Debug)]
pub(super) struct ShownStatus {
    pub(super) status: Status,
    pub(super) detail: String,
    /// When the status changed last.
    pub(super) since: Time,
    pub(super) history: StatusHistory,
    pub(super) last_synced: Option<Time>,
}

/// What is known of a machine, as the input of the preview of a plan.
#[derive(Clone, Debug)]
pub struct PreviewInput {
    /// The last complete scan.
    pub scan: Arc<ScanReport>,
    pub scan_number: u64,
    /// The tree that it found, if it was read.
    pub tree: Option<Tree>,
    /// Changes that the machine refuses.
    pub refused: Arc<RefusedChanges>,
    /// True if the identity of the machine was verified. Another machine gets no calls.
    pub is_right_machine: bool,
    /// The local exclusions.
    pub exclusions: Patterns,
    /// What the machine scans.
    pub scope: Scope,
    /// The image of its last update.
    pub last_image: Option<ImageName>,
}

impl Sub {
    pub(super) fn set_status(&mut self, (status, detail): StatusAndDetail, step: &mut Step<'_>) {
        let detail = safe_text(&detail, DETAIL_BYTES_MAX);
        if status != self.shown.status {
            self.shown.since = step.now.wall;
            self.shown.history.record(step.now.wall, status, &detail);
            step.effects.push(Effect::StatusChanged(status, detail.clone()));
        }
        if status == Status::Synced {
            self.shown.last_synced = Some(step.now.wall);
        }
        let has_changed = status != self.shown.status || detail != self.shown.detail;
        self.shown.status = status;
        self.shown.detail = detail;
        self.count_watch_version(has_changed);
    }

    /// Stops with the status and detail of the last step.
    pub(super) fn stop_unchanged<T>(&self) -> Check<T> {
        stop(self.shown.status, self.shown.detail.clone())
    }

    #[must_use]
    pub fn status(&self) -> Status {
        self.shown.status
    }

    /// Returns what explains the status, as text.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.shown.detail
    }

    /// Returns what the sub has reported; `None` before the first poll.
    #[must_use]
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// True if an unsafe update waits for the approval of an operator.
    #[must_use]
    pub fn has_unsafe_plan(&self) -> bool {
        self.unsafe_plan().is_some()
    }

    /// Returns the row of the machine in a list; `address` is where it was last reached.
    #[must_use]
    pub fn summary(&self, address: Option<SocketAddr>) -> SubSummary {
        let text = |name: Option<ImageName>| name.map_or_else(String::new, String::from);
        let view = self.view.as_ref();
        SubSummary {
            hostname: self.machine.hostname.clone(),
            address,
            status: self.shown.status,
            detail: self.shown.detail.clone(),
            since: self.shown.since,
            required_image: text(self.required()),
            planned_image: text(self.machine.planned()),
            last_image: text(view.and_then(|view| view.report.last_image.clone())),
            last_seen: self.polls.last_seen,
            last_synced: self.shown.last_synced,
            alarms: view.map_or(0, |view| number(view.report.alarms.len())),
        }
    }

    /// Returns all that operators are shown of the machine.
    #[must_use]
    pub fn full_report(&self, address: Option<SocketAddr>, now: Time) -> SubDetail {
        let image = self.target().map(|image| image.digest);
        let planned = self.plan.made.as_ref().filter(|planned| Some(planned.key.image) == image);
        let missing = match (planned, &self.view) {
            (Some(planned), Some(view)) => Missing::of(planned, view),
            _ => Missing::default(),
        };
        let plan = planned.map(|planned| &planned.plan);
        let blocked = plan.iter().flat_map(|plan| &plan.blocked);
        let operations = plan.iter().flat_map(|plan| &plan.operations);
        let lines = blocked
            .map(|blocked| format!("blocked {}: {}", blocked.path, blocked.why))
            .chain(operations.map(ToString::to_string));
        SubDetail {
            summary: self.summary(address),
            machine: (*self.machine).clone(),
            poll: self.view.as_ref().map(View::summary),
            plan: lines.take(OPERATIONS_MAX).collect(),
            plan_operations: plan.map_or(0, |plan| number(plan.operations.len())),
            missing_objects: number(missing.count),
            missing_bytes: missing.bytes,
            history: self.shown.history.newest_first(),
            pause: self.paused(now).map(|pause| UpdatePause::clone(pause)),
        }
    }

    /// Checks that the machine answers and is the one that is meant. The error says what is not so.
    pub fn expect_right_machine(&self) -> Result<(), String> {
        if let Reachability::Failed(failure) = &self.polls.reachability {
            return Err(failure.text.clone());
        }
        if self.view.is_none() {
            return Err(self.shown.detail.clone());
        }
        let why = "it may be another machine than the one that is meant";
        self.identity.is_verified().then_some(()).ok_or_else(|| why.to_owned())
    }

    /// Returns the name of the required image, if it is loaded.
    #[must_use]
    pub fn loaded_image(&self) -> Option<&ImageName> {
        self.image.ready().map(|image| image.name())
    }

    /// Returns the bundles that are left out of the required image, if it is loaded.
    #[must_use]
    pub fn left_out(&self) -> &[LeftOut] {
        self.image.ready().map_or(&[], |image| &image.left_out)
    }

    /// Returns the image of the machine's last update, if the right machine answers.
    #[must_use]
    pub fn verified_image(&self) -> Option<ImageName> {
        self.expect_right_machine().ok()?;
        self.view.as_ref()?.report.last_image.clone()
    }

    /// Returns the input of the preview of a plan, or what is missing for one, with a text.
    pub fn preview_input(&self) -> Result<PreviewInput, (NoPlanReason, String)> {
        if let Reachability::Failed(failure) = &self.polls.reachability {
            return Err((NoPlanReason::NotReached, failure.text.clone()));
        }
        let Some(view) = &self.view else {
            return Err((NoPlanReason::NotReached, self.shown.detail.clone()));
        };
        let Some(scan) = &view.scan else {
            return Err((
                NoPlanReason::NotScanned,
                "its first complete scan has not ended".to_owned(),
            ));
        };
        Ok(PreviewInput {
            scan: Arc::clone(scan),
            scan_number: view.scan_number,
            tree: self.trees.tree_of(scan.root),
            refused: self.trees.refused.clone().unwrap_or_default(),
            is_right_machine: self.identity.is_verified(),
            exclusions: view.exclusions.clone(),
            scope: view.report.scope,
            last_image: view.report.last_image.clone(),
        })
    }

    /// Returns the number and bytes of the objects that the machine would fetch for `planned`.
    /// `lack` is what it would lack with an empty cache.
    #[must_use]
    pub fn objects_to_fetch(&self, lack: FetchTotals, planned: &Planned) -> (u32, u64) {
        match &self.view {
            Some(view) => lack.beside(planned, &view.cache),
            None => lack.beside(planned, &ObjectSet::default()),
        }
    }

    /// Returns what would prevent an update now if the record of the machine was `machine`, and its
    /// image `required`. Does not consider the brake and budgets, which are not those of one
    /// machine.
    #[must_use]
    pub fn update_obstacles(
        &self,
        machine: &Machine,
        required: Option<&ImageName>,
    ) -> Vec<(Status, String)> {
        let mut obstacles = Vec::new();
        if machine.disable_updates {
            let why = "the machine database says DisableUpdates".to_owned();
            obstacles.push((Status::UpdatesDisabled, why));
        }
        obstacles.extend(self.pause_text().map(|why| (Status::Paused, why)));
        if self.shown.status == Status::WrongMachine {
            obstacles.push((self.shown.status, self.shown.detail.clone()));
        }
        if self.shown.status == Status::ImageStopped && required == self.required().as_ref() {
            obstacles.push((self.shown.status, self.shown.detail.clone()));
        }
        let Some(view) = &self.view else { return obstacles };
        if matches!(view.report.activity, Activity::Updating { .. }) || view.is_unverified() {
            let why = "its last update has not ended or was not scanned yet: the tree may change";
            obstacles.push((Status::Updating, why.to_owned()));
        }
        obstacles.extend(view.pause_text().map(|why| (Status::Held, why)));
        if let Some(why) = view.stuck() {
            obstacles.push((Status::UpdateStuck, why.to_owned()));
        } else if let Some(name) = required
            && let Some(undone) = self.undone(name)
        {
            let why = format!("its health check failed there: {}", undone.why.trim_end());
            obstacles.push((Status::HealthFailed, why));
        }
        obstacles
    }
}

pub(super) fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_keeps_the_newest_changes() {
        let mut history = StatusHistory::default();
        for seconds in 0..60 {
            let time = Time { seconds, nanoseconds: 0 };
            history.record(time, Status::Synced, &format!("number {seconds}"));
        }
        let changes = history.newest_first();
        assert_eq!(changes.len(), CHANGES_MAX);
        assert_eq!(changes[0].2, "number 59");
        assert_eq!(changes[CHANGES_MAX - 1].2, "number 40");
    }
}
