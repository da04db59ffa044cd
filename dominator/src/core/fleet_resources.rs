//! Resources that one machine makes for all: what is there of them, who is told, and when they are
//! removed. The permits to make them are those of [`super::permits`].
//!
//! Nothing of this is stored: the machines tell it after a start of the dominator.
//!
//! # Invariants
//!
//! * What was made with a higher number counts; of the same number, what its maker says. Only a
//!   machine whose image has a resource says what is there of it.
//! * A machine gets a permit that it does not have only if it asks for what is there, or no other
//!   machine does that answers.
//! * A resource is unwanted only while no image that is wanted has it, no machine asks for it, and
//!   no other that is there needs it.
//! * What its maker has made stays with the maker while it answers and asks for it.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::subd::{
    FleetResourceNews, FleetResourceReport, OUTPUTS_BYTES_MAX, PermitReport, SharedResource,
};
use model::object::ObjectId;

use super::permits::resource_permit;

/// How far numbers may be ahead of the seconds since 1970: the clock may have been set back.
const NUMBERS_AHEAD: u64 = 10_000_000;

/// The resources of the fleet, by id.
#[derive(Debug, Default)]
pub struct FleetResources(BTreeMap<String, FleetResource>);

#[derive(Debug, Default)]
struct FleetResource {
    /// The number with which it was made last.
    number: u64,
    /// Who made it; empty if that is not known.
    maker: Arc<str>,
    made: Option<Made>,
    machines: BTreeMap<Arc<str>, Concerned>,
}

/// What is there.
#[derive(Debug)]
struct Made {
    key: Option<String>,
    version: ObjectId,
    /// `None` until a machine has told them.
    outputs: Option<Arc<str>>,
}

/// What a machine says about a resource.
#[derive(Debug, PartialEq, Eq)]
struct Concerned {
    heard_at: Duration,
    asked_key: Option<String>,
    is_needed: bool,
}

/// What follows from what a machine said.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// The ids of the resources whose outputs it must tell.
    pub outputs_of: Vec<String>,
    /// The machines that have to be told of a change.
    pub to_tell: BTreeSet<Arc<str>>,
}

/// True if the numbers of a report are some that a dominator may have given until `now`, in seconds
/// since 1970. Others would keep all machines from being believed.
#[must_use]
pub fn has_given_numbers(report: &FleetResourceReport, now: u64) -> bool {
    report.number.max(report.permit.number) <= now.saturating_add(NUMBERS_AHEAD)
}

impl FleetResources {
    /// Takes what `hostname` says now, whose image has the resources `of_image`.
    pub fn take(
        &mut self,
        hostname: &str,
        said: &[FleetResourceReport],
        of_image: &BTreeSet<String>,
        heard_at: Duration,
    ) -> Heard {
        let mut heard = Heard::default();
        for (id, resource) in &mut self.0 {
            if said.iter().all(|report| report.id != *id) {
                resource.machines.remove(hostname);
            }
        }
        for report in said {
            let resource = self.0.entry(report.id.clone()).or_default();
            let (asked_key, is_needed) = (report.asked_key.clone(), report.is_needed);
            let concerned = Concerned { heard_at, asked_key, is_needed };
            resource.machines.insert(hostname.into(), concerned);
            let is_gone = report.made.is_none() && *resource.maker == *hostname;
            if (of_image.contains(&report.id) || is_gone) && resource.take(hostname, report) {
                heard.to_tell.extend(resource.machines.keys().cloned());
            }
            if let Some(made) = &resource.made
                && made.outputs.is_none()
                && report.made.as_ref().is_some_and(|told| told.version == made.version)
            {
                heard.outputs_of.push(report.id.clone());
            }
        }
        heard.to_tell.remove(hostname);
        self.0.retain(|_, resource| !resource.machines.is_empty());
        heard
    }

    /// Takes that a machine is in the database no more.
    pub fn leave(&mut self, hostname: &str) {
        self.0.values_mut().for_each(|resource| drop(resource.machines.remove(hostname)));
        self.0.retain(|_, resource| !resource.machines.is_empty());
    }

    /// Returns how `hostname`, which has said this, is about the permits of resources, by their
    /// names. Machines that were not heard since `since`, and those that `is_fenced` names, are not
    /// waited for.
    #[must_use]
    pub fn permits(
        &self,
        hostname: &str,
        said: &[FleetResourceReport],
        since: Duration,
        is_fenced: impl Fn(&str) -> bool,
    ) -> BTreeMap<String, PermitReport> {
        let permit = |report: &FleetResourceReport| {
            let is_wanted =
                report.permit.is_wanted && self.may_make(hostname, report, since, &is_fenced);
            // What is there was made with a lower number than permits to come have.
            let number = report.permit.number.max(report.number);
            let permit = PermitReport { is_wanted, number, ..report.permit.clone() };
            (resource_permit(&report.id), permit)
        };
        said.iter().map(permit).collect()
    }

    fn may_make(
        &self,
        hostname: &str,
        report: &FleetResourceReport,
        since: Duration,
        is_fenced: impl Fn(&str) -> bool,
    ) -> bool {
        let Some(resource) = self.0.get(&report.id) else { return true };
        let Some(made) = &resource.made else { return true };
        if report.permit.until.is_some() {
            return true;
        }
        let maker = resource.machines.get(&resource.maker);
        if let Some(maker) = maker.filter(|maker| maker.heard_at >= since)
            && maker.asked_key.is_some()
            && !is_fenced(&resource.maker)
        {
            return *resource.maker == *hostname;
        }
        let is_it = |key: &Option<String>| key.is_some() && *key == made.key;
        is_it(&report.asked_key)
            || !resource
                .machines
                .values()
                .any(|machine| machine.heard_at >= since && is_it(&machine.asked_key))
    }

    /// Returns what `hostname` has to be told, which has said this. `required` are the resources of
    /// the images that are wanted; `None` if they are not known.
    #[must_use]
    pub fn news(
        &self,
        hostname: &str,
        said: &[FleetResourceReport],
        required: Option<&BTreeSet<String>>,
    ) -> Vec<FleetResourceNews> {
        let news = |report: &FleetResourceReport| {
            let resource = self.0.get(&report.id)?;
            let is_unwanted = self.is_unwanted(&report.id, required);
            match resource.content_for(hostname, report) {
                Some(made) => Some(FleetResourceNews {
                    id: report.id.clone(),
                    number: resource.number,
                    maker: resource.maker.to_string(),
                    made,
                    is_unwanted,
                }),
                None => (is_unwanted != report.is_unwanted).then(|| FleetResourceNews {
                    id: report.id.clone(),
                    number: 0,
                    maker: String::new(),
                    made: None,
                    is_unwanted,
                }),
            }
        };
        said.iter().filter_map(news).collect()
    }

    fn is_unwanted(&self, id: &str, required: Option<&BTreeSet<String>>) -> bool {
        let Some(resource) = self.0.get(id) else { return false };
        required.is_some_and(|required| !required.contains(id))
            && resource.machines.values().all(|one| one.asked_key.is_none() && !one.is_needed)
    }
}

/// True if machines take these outputs.
fn is_taken(outputs: &str) -> bool {
    outputs.len() <= OUTPUTS_BYTES_MAX
        && serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(outputs).is_ok()
}

impl FleetResource {
    /// Takes what a machine says of what is there. Returns true if there is something new to tell.
    fn take(&mut self, hostname: &str, report: &FleetResourceReport) -> bool {
        let before = self.content();
        let is_maker = report.number > 0 && report.maker.is_none();
        if report.number > self.number || is_maker && report.number == self.number {
            self.number = report.number;
            self.maker = report.maker.as_deref().unwrap_or(hostname).into();
            let former = self.made.take();
            self.made = report.made.as_ref().map(|told| Made {
                key: told.key.clone(),
                version: told.version,
                outputs: former
                    .filter(|made| made.version == told.version)
                    .and_then(|one| one.outputs),
            });
        }
        if let (Some(made), Some(told)) = (&mut self.made, &report.made)
            && (made.version == told.version && made.outputs.is_none())
        {
            made.outputs = told.outputs.as_deref().filter(|told| is_taken(told)).map(Arc::from);
        }
        let content = self.content();
        content.is_some() && content != before
    }

    /// Who has made what, if that can be told.
    fn content(&self) -> Option<(Arc<str>, Option<ObjectId>)> {
        let is_known = self.made.as_ref().is_none_or(|made| made.outputs.is_some());
        let version = self.made.as_ref().map(|made| made.version);
        is_known.then(|| (Arc::clone(&self.maker), version))
    }

    /// Returns what is there, for a machine that knows something else.
    fn content_for(
        &self,
        hostname: &str,
        report: &FleetResourceReport,
    ) -> Option<Option<SharedResource>> {
        let version = self.made.as_ref().map(|made| made.version);
        let knows = report.made.as_ref().map(|made| made.version) == version
            && (report.maker.as_deref() == Some(&*self.maker) || version.is_none());
        if self.number == 0 || *self.maker == *hostname || self.number < report.number || knows {
            return None;
        }
        match &self.made {
            None => Some(None),
            Some(made) => {
                let outputs = made.outputs.as_ref()?.to_string();
                Some(Some(SharedResource { key: made.key.clone(), outputs }))
            }
        }
    }
}

#[cfg(test)]
mod tests;
