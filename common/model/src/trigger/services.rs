//! Decides which services are stopped, started and reloaded around an update: for subd, which does
//! it, and for previews.
//!
//! The triggers of the old and of the new image are taken together: a service is concerned if a
//! trigger of either that names it fires. Those concerned are stopped before the tree changes; what
//! the new image knows of them is started after it. A service of which all triggers that fire only
//! reload is reloaded instead. If a trigger of the new image reboots the machine, services of the
//! old image are stopped all the same, and the reboot starts them; if it does not come, they are
//! started without it. Services whose own trigger asks for the reboot are started before it.
//! Triggers of daemon tasks stop and start no service, but may be of high impact.
//! Services are taken in the order of their sort names, the new image's before the old one's, both
//! for stopping and for starting.
//!
//! # Differences from the founding implementation
//!
//! * The sort name counts for stopping too; there it is lost when triggers are merged.
//! * A service that only the new image names is stopped as there, because it may run already when
//!   a machine gets its first image; but if that fails it is no failure of the update, because the
//!   service may not be there yet.
//! * A service that was stopped is started if the new image names it at all; there only if a
//!   trigger of the new image fires.
//! * A reload stays a reload when triggers are merged; there a merged trigger restarts.
//! * A trigger of the old image does not reboot; there it keeps services from being stopped.
//! * A trigger is of high impact by itself; there its service is, with all its triggers.
//! * Triggers without a service are refused; there they fail when they fire.
//!
//! # Invariants
//!
//! * No service is named twice before the change, or twice after it.
//! * The service `reboot` and subd itself are never stopped or started.
//! * A service that was stopped is started again if any trigger of the new image knows it, fired
//!   or not.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Kind, REBOOT, Trigger, Triggers, compare_versions};
use crate::JsonSchema;
use crate::path::TreePath;

/// The name of subd's own service, unless a machine gives it another.
pub const SUBD_SERVICE: &str = "subd";

/// What is done to a service.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceVerb {
    /// Stops it, before the change.
    Stop,
    /// Starts it, after the change.
    Start,
    /// Makes it read its configuration again.
    Reload,
    /// Stops and starts it at once: only for subd itself.
    Restart,
    /// Reboot the machine.
    Reboot,
}

impl ServiceVerb {
    const ALL: [Self; 5] = [Self::Stop, Self::Start, Self::Reload, Self::Restart, Self::Reboot];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.name() == name)
    }

    /// Returns the name in commands and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Start => "start",
            Self::Reload => "reload",
            Self::Restart => "restart",
            Self::Reboot => "reboot",
        }
    }
}

/// One action on one service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceCall {
    pub service: String,
    pub verb: ServiceVerb,
    /// True if a failure is ignored.
    #[serde(default)]
    pub may_fail: bool,
}

impl ServiceCall {
    /// Returns a call that must succeed.
    #[must_use]
    pub fn new(service: &str, verb: ServiceVerb) -> Self {
        Self { service: service.to_owned(), verb, may_fail: false }
    }
}

/// The actions around an update, each list in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceCalls {
    /// Before the tree changes.
    pub before: Vec<ServiceCall>,
    /// After it changed.
    pub after: Vec<ServiceCall>,
    /// True if subd itself is restarted after all that, when the update is complete and recorded.
    #[serde(default)]
    pub own: bool,
    /// True if the machine is rebooted at the end, if nothing failed.
    pub reboot: bool,
    /// True if any of it disturbs the machine's users, as a reboot always does.
    #[serde(default)]
    pub high_impact: bool,
}

impl ServiceCalls {
    /// Returns the calls that undo those before the change, if the change was not made.
    #[must_use]
    pub fn restart(&self) -> Vec<ServiceCall> {
        let start = |call: &ServiceCall| ServiceCall { verb: ServiceVerb::Start, ..call.clone() };
        self.before.iter().map(start).collect()
    }

    /// Returns the calls for the services that a reboot would have started and that `new`, the
    /// triggers of the new image, name.
    #[must_use]
    pub fn instead_of_reboot(&self, new: &Triggers) -> Vec<ServiceCall> {
        let is_started = |name: &str| self.after.iter().any(|call| call.service == name);
        let calls = self.restart().into_iter();
        calls.filter(|call| new.name(&call.service) && !is_started(&call.service)).collect()
    }

    /// Returns the calls for a change that was interrupted at an unknown point: everything that was
    /// stopped is started, and everything that the change was for is reloaded. Nothing is rebooted.
    #[must_use]
    pub fn resume(&self) -> Vec<ServiceCall> {
        let mut calls = self.restart();
        let stopped = calls.len();
        let is_new = |call: &&ServiceCall| {
            !calls[..stopped].iter().any(|stopped| stopped.service == call.service)
        };
        let after: Vec<ServiceCall> = self.after.iter().filter(is_new).cloned().collect();
        calls.extend(after);
        calls
    }

    /// Returns the calls around the undo of a change: what was started is stopped, what was stopped
    /// is started, and what was reloaded is reloaded again. If the update rebooted the undo does
    /// too: then what was stopped is stopped again, and started if the reboot does not come.
    #[must_use]
    pub fn undo(&self) -> Self {
        let is_start = |call: &&ServiceCall| call.verb == ServiceVerb::Start;
        let stop = |call: &ServiceCall| ServiceCall { verb: ServiceVerb::Stop, ..call.clone() };
        let back = Self {
            own: self.own,
            reboot: self.reboot,
            high_impact: self.high_impact,
            ..Self::default()
        };
        if self.reboot {
            return Self { before: self.before.clone(), after: self.restart(), ..back };
        }
        let before = self.after.iter().filter(is_start).map(stop).collect();
        Self { before, after: self.resume(), ..back }
    }
}

/// Decides from the triggers of the old and of the new image and the paths that change. `own` is
/// the name of subd's own service.
#[must_use]
pub fn service_calls<'path>(
    old: &Triggers,
    new: &Triggers,
    paths: impl Iterator<Item = &'path TreePath> + Clone,
    own: &str,
) -> ServiceCalls {
    let disturbs =
        |all: &Triggers| all.fired(paths.clone()).iter().any(|trigger| trigger.high_impact);
    let high_impact = disturbs(old) || disturbs(new);
    let (old, new) = (&of_services(old), &of_services(new));
    let old_fired = old.fired(paths.clone());
    let new_fired = new.fired(paths);
    let fired = || new_fired.iter().chain(&old_fired);
    let reboot = new_fired.iter().any(Trigger::reboots);
    let mut calls = ServiceCalls {
        own: !reboot && fired().any(|trigger| is_own(&trigger.service, own)),
        reboot,
        high_impact: reboot || high_impact,
        ..ServiceCalls::default()
    };
    let is_driven = |service: &&str| *service != REBOOT && !is_own(service, own);
    let restarted: BTreeSet<&str> =
        fired().filter(|trigger| !trigger.do_reload).map(service).collect();
    let of_old: BTreeSet<&str> = old.0.iter().map(service).collect();
    let of_new: BTreeSet<&str> = new.0.iter().map(service).collect();
    let concerned = in_order(fired().filter(|trigger| is_driven(&service(trigger))), new);
    let stops = concerned.iter().filter(|service| restarted.contains(*service)).map(|service| {
        let may_fail = !of_old.contains(service);
        ServiceCall { may_fail, ..ServiceCall::new(service, ServiceVerb::Stop) }
    });
    if reboot {
        push_each_once(&mut calls.before, stops.filter(|stop| !stop.may_fail));
        let asking = new_fired.iter().filter(|trigger| trigger.do_reboot).map(service);
        let starts =
            asking.filter(is_driven).map(|name| ServiceCall::new(name, ServiceVerb::Start));
        push_each_once(&mut calls.after, starts);
        return calls;
    }
    push_each_once(&mut calls.before, stops);
    let verb = |service| {
        if restarted.contains(service) { ServiceVerb::Start } else { ServiceVerb::Reload }
    };
    let known = concerned.iter().filter(|service| of_new.contains(*service));
    push_each_once(&mut calls.after, known.map(|service| ServiceCall::new(service, verb(service))));
    calls
}

/// Returns the triggers without those of tasks, which are no services.
fn of_services(triggers: &Triggers) -> Triggers {
    let services = triggers.0.iter().filter(|trigger| trigger.kind == Kind::Service);
    Triggers(services.cloned().collect())
}

/// Returns the calls that run triggers again that failed, each given as a service and a verb.
/// `in_force` are the triggers of the image: a service of theirs that could not be stopped is also
/// started. `awaits_reboot` is false if the machine was rebooted since.
#[must_use]
pub fn retry_calls<'a>(
    failed: impl Iterator<Item = (&'a str, &'a str)>,
    in_force: &Triggers,
    awaits_reboot: bool,
) -> ServiceCalls {
    let mut calls = ServiceCalls::default();
    for (name, verb) in failed {
        let call = |verb| std::iter::once(ServiceCall::new(name, verb));
        match ServiceVerb::named(verb) {
            Some(ServiceVerb::Stop) => {
                push_each_once(&mut calls.before, call(ServiceVerb::Stop));
                if in_force.name(name) {
                    push_each_once(&mut calls.after, call(ServiceVerb::Start));
                }
            }
            Some(verb @ (ServiceVerb::Start | ServiceVerb::Reload)) => {
                push_each_once(&mut calls.after, call(verb));
            }
            Some(ServiceVerb::Restart) => calls.own = true,
            Some(ServiceVerb::Reboot) => calls.reboot = awaits_reboot,
            None => {}
        }
    }
    calls
}

/// The services of `triggers`, by the sort names that `new` gives them, or else by their own.
fn in_order<'a>(triggers: impl Iterator<Item = &'a Trigger>, new: &'a Triggers) -> Vec<&'a str> {
    let order = |trigger: &'a Trigger| {
        let mut of_new = new.0.iter().filter(|one| one.service == trigger.service);
        of_new.find(|one| !one.sort_name.is_empty()).unwrap_or(trigger).order()
    };
    let mut services: Vec<(&str, &str)> =
        triggers.map(|trigger| (order(trigger), service(trigger))).collect();
    services.sort_by(|(left, _), (right, _)| compare_versions(left, right));
    services.into_iter().map(|(_, service)| service).collect()
}

/// True if `service` is subd's own, also by the full name of its unit.
fn is_own(service: &str, own: &str) -> bool {
    service.strip_suffix(".service").unwrap_or(service)
        == own.strip_suffix(".service").unwrap_or(own)
}

fn service(trigger: &Trigger) -> &str {
    &trigger.service
}

fn push_each_once(calls: &mut Vec<ServiceCall>, wanted: impl Iterator<Item = ServiceCall>) {
    for call in wanted {
        if !calls.iter().any(|known| known.service == call.service) {
            calls.push(call);
        }
    }
}

#[cfg(test)]
mod tests;
