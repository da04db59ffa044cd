//! Resources of a machine that are not as they were made, as the machine tells it.
// tidy: core

use api::subd::{ResourceReport, ResourceState};
use model::display::safe_text;

use crate::core::alarms::RESOURCE_DRIFT;
use crate::core::tasks::TaskEvent;

/// The most resources with drift that are kept of a machine.
const DRIFTED_MAX: usize = 100;

/// The longest id and text that are kept, in bytes. They come from the machine.
const ID_BYTES_MAX: usize = 80;
const TEXT_BYTES_MAX: usize = 500;

/// The drift of the resources of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drift(Vec<Drifted>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Drifted {
    id: Box<str>,
    /// How it differs.
    text: Box<str>,
    state: ResourceState,
    /// Why it could not be made again.
    failure: Option<Box<str>>,
}

impl Drifted {
    fn of(report: &ResourceReport) -> Option<Self> {
        let text = report.drift.as_ref().filter(|_| !report.is_orphan)?;
        let clipped = |text: &str| Box::from(safe_text(text, TEXT_BYTES_MAX));
        let has_failed = report.state == ResourceState::Failed;
        Some(Self {
            id: safe_text(&report.id, ID_BYTES_MAX).into(),
            text: clipped(text),
            state: report.state,
            failure: has_failed.then(|| clipped(&report.text)),
        })
    }

    fn is_raised(&self) -> bool {
        matches!(self.state, ResourceState::Drifted | ResourceState::Failed)
    }

    fn is_repaired(&self) -> bool {
        self.state == ResourceState::Made
    }
}

impl Drift {
    /// Takes how the resources are now. Returns what operators are told.
    pub fn take(&mut self, reports: &[ResourceReport]) -> Vec<TaskEvent> {
        let former = std::mem::take(&mut self.0);
        self.0 = reports.iter().filter_map(Drifted::of).take(DRIFTED_MAX).collect();
        let mut events = Vec::new();
        let mut tell = |name: &str, Drifted { id, text, .. }: &Drifted| {
            let text = format!("{id}: {text}");
            events.push(TaskEvent { name: name.to_owned(), text });
        };
        for one in &self.0 {
            let former = former.iter().find(|former| former.id == one.id);
            let is_new = former.is_none_or(|former| {
                former.text != one.text || former.is_repaired() && !one.is_repaired()
            });
            if is_new {
                tell(RESOURCE_DRIFT, one);
            }
            if one.is_repaired() && (is_new || former.is_some_and(|former| !former.is_repaired())) {
                tell("resource-repaired", one);
            }
        }
        for gone in former.iter().filter(|former| former.is_raised()) {
            if self.0.iter().all(|one| one.id != gone.id) {
                tell("resource-drift-over", gone);
            }
        }
        events
    }

    /// Those of which operators are told: the id, and how it differs.
    pub fn raised(&self) -> impl Iterator<Item = (&str, String)> {
        self.0.iter().filter(|one| one.is_raised()).map(|one| {
            let text = match &one.failure {
                Some(why) => format!("{}; it could not be made again: {why}", one.text),
                None => one.text.to_string(),
            };
            (&*one.id, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(state: ResourceState, drift: Option<&str>) -> ResourceReport {
        ResourceReport {
            id: "page".to_owned(),
            kind: "file".to_owned(),
            provisioner: "file".to_owned(),
            state,
            text: "no room".to_owned(),
            drift: drift.map(str::to_owned),
            is_orphan: false,
            needs: Vec::new(),
            outputs: "{}".to_owned(),
        }
    }

    #[test]
    fn drift_is_told_once() {
        use ResourceState::{Drifted, Failed, Made, Running};
        // What is known of the resource one after the other, the events, and the alarm.
        let table: [(_, _, &[&str], Option<&str>); 11] = [
            (Made, None, &[], None),
            (Drifted, Some("write it"), &["resource-drift"], Some("write it")),
            (Drifted, Some("write it"), &[], Some("write it")),
            (Drifted, Some("chmod it"), &["resource-drift"], Some("chmod it")),
            (Made, None, &["resource-drift-over"], None),
            // It is repaired, slowly and at once.
            (Running, Some("write it"), &["resource-drift"], None),
            (Made, Some("write it"), &["resource-repaired"], None),
            (Made, Some("write it"), &[], None),
            (Made, Some("chmod it"), &["resource-drift", "resource-repaired"], None),
            (
                Failed,
                Some("chmod it"),
                &["resource-drift"],
                Some("chmod it; it could not be made again: no room"),
            ),
            (Made, Some("chmod it"), &["resource-repaired"], None),
        ];
        let mut drift = Drift::default();
        for (row, (state, text, events, alarm)) in table.into_iter().enumerate() {
            let told = drift.take(&[report(state, text)]);
            let names: Vec<&str> = told.iter().map(|event| event.name.as_str()).collect();
            assert_eq!(names, events, "row {row}");
            let raised: Vec<(&str, String)> = drift.raised().collect();
            let alarm = alarm.map(|text| ("page", text.to_owned()));
            assert_eq!(raised, Vec::from_iter(alarm), "row {row}");
        }
    }
}
