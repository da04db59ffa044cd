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
//! * A resource is released only while no image that is wanted has it, no machine asks for it, and
//!   no other that is there needs it.
//! * What its maker has made stays with the maker while it answers and asks for it.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::subd::{
    FleetResourceNews, FleetResourceReport, MadeReport, OUTPUTS_BYTES_MAX, SharedResource,
};
use model::object::ObjectId;

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

    /// True if `hostname` may get the permit that it wants. Machines that were not heard since
    /// `since`, and those that `is_fenced` names, are not waited for.
    #[must_use]
    pub fn may_make(
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
            let is_released = self.is_released(&report.id, required);
            match resource.content_for(hostname, report) {
                Some(made) => Some(FleetResourceNews {
                    id: report.id.clone(),
                    number: resource.number,
                    maker: resource.maker.to_string(),
                    made,
                    is_released,
                }),
                None => (is_released != report.is_released).then(|| FleetResourceNews {
                    id: report.id.clone(),
                    number: 0,
                    maker: String::new(),
                    made: None,
                    is_released,
                }),
            }
        };
        said.iter().filter_map(news).collect()
    }

    fn is_released(&self, id: &str, required: Option<&BTreeSet<String>>) -> bool {
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
    /// Takes what a machine says of what is there. Returns true if that is news.
    fn take(&mut self, hostname: &str, report: &FleetResourceReport) -> bool {
        let outputs = |made: &MadeReport| {
            let told = made.outputs.as_deref().filter(|told| is_taken(told))?;
            Some(Arc::from(told))
        };
        let version = self.made.as_ref().map(|made| made.version);
        let is_maker = report.number > 0 && report.maker.is_none();
        let is_newer = report.number > self.number || is_maker && report.number == self.number;
        let is_same = report.made.as_ref().map(|made| made.version) == version;
        if is_same {
            let had_outputs = self.made.as_ref().is_none_or(|made| made.outputs.is_some());
            if let (Some(made), Some(told)) = (&mut self.made, &report.made) {
                made.outputs = made.outputs.take().or_else(|| outputs(told));
            }
            let has_outputs = self.made.as_ref().is_none_or(|made| made.outputs.is_some());
            if !is_newer {
                return has_outputs && !had_outputs;
            }
            let maker: Arc<str> = report.maker.as_deref().unwrap_or(hostname).into();
            let is_other = maker != self.maker;
            (self.number, self.maker) = (report.number, maker);
            return has_outputs && (is_other || !had_outputs);
        }
        if !is_newer {
            return false;
        }
        self.number = report.number;
        self.maker = report.maker.as_deref().unwrap_or(hostname).into();
        self.made = report.made.as_ref().map(|made| Made {
            key: made.key.clone(),
            version: made.version,
            outputs: outputs(made),
        });
        self.made.as_ref().is_none_or(|made| made.outputs.is_some())
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
