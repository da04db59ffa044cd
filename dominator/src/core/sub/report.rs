//! What operators are shown of a sub.
// tidy: core

use core::net::SocketAddr;

use api::dominator::orders::UpdatePause;
use api::dominator::{Status, SubDetail, SubSummary};
use model::tree::Time;

use super::{Sub, View};
use crate::core::sub::missing_objects::Missing;

/// How many operations of a plan are shown.
pub const OPERATIONS_SHOWN: usize = 200;

impl Sub {
    /// What it is doing or waits for.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status
    }

    /// The same in words.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// What the sub last reported; `None` before the first poll.
    #[must_use]
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// True if an unsafe update waits for an operator's word.
    #[must_use]
    pub fn has_pending_danger(&self) -> bool {
        self.pending_danger().is_some()
    }

    /// The machine in a list; `address` is where it was last reached.
    #[must_use]
    pub fn summary(&self, address: Option<SocketAddr>) -> SubSummary {
        let last_image = self.view.as_ref().and_then(|view| view.report.last_image.clone());
        SubSummary {
            hostname: self.machine.hostname.clone(),
            address,
            status: self.status,
            detail: self.detail.clone(),
            since: self.since,
            required_image: self
                .required()
                .map_or_else(String::new, |name| name.as_str().to_owned()),
            planned_image: self
                .machine
                .planned()
                .map_or_else(String::new, |name| name.as_str().to_owned()),
            last_image: last_image.map_or_else(String::new, String::from),
            last_seen: self.last_seen,
            last_synced: self.last_synced,
            alarms: self
                .view
                .as_ref()
                .map_or(0, |view| u32::try_from(view.report.alarms.len()).unwrap_or(u32::MAX)),
        }
    }

    /// All there is to tell, at this time of day.
    #[must_use]
    pub fn detailed(&self, address: Option<SocketAddr>, now: Time) -> SubDetail {
        let image = self.image.digest();
        let planned = self.planned.as_ref().filter(|planned| Some(planned.key.image) == image);
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
            plan: lines.take(OPERATIONS_SHOWN).collect(),
            plan_operations: plan
                .map_or(0, |plan| u32::try_from(plan.operations.len()).unwrap_or(u32::MAX)),
            missing_objects: u32::try_from(missing.count).unwrap_or(u32::MAX),
            missing_bytes: missing.bytes,
            history: self.history.newest_first(),
            pause: self.paused(now).map(|pause| UpdatePause::clone(pause)),
        }
    }
}
