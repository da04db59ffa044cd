//! Decides what is done to which services around an update.
//!
//! Triggers of the old image that fire are stopped before the tree changes; those of the new image
//! that fire are started, or reloaded, after it. A service that only reloads is stopped all the
//! same if another trigger that fires restarts it. If a trigger of the new image reboots the
//! machine nothing is stopped or started one by one, because the reboot does both, save services
//! whose own trigger asks for the reboot: these are started before it.
//!
//! # Invariants
//!
//! * No service is named twice before the change, or twice after it.
//! * The service `reboot` is never stopped or started.
//! * A service that was stopped is started again if any trigger of the new image knows it, fired
//!   or not.
// tidy: core

use std::collections::BTreeSet;

use common::path::TreePath;
use common::trigger::{REBOOT, Trigger, Triggers};
use serde::{Deserialize, Serialize};

/// What is done to a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// Stop it, before the change.
    Stop,
    /// Start it, after the change.
    Start,
    /// Make it read its configuration again.
    Reload,
    /// Reboot the machine.
    Reboot,
}

impl Verb {
    /// The word, as commands and reports know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Start => "start",
            Self::Reload => "reload",
            Self::Reboot => "reboot",
        }
    }
}

/// One thing to do to one service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceCall {
    /// The service.
    pub service: String,
    /// What to do.
    pub verb: Verb,
}

/// What to do around an update, each list in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceCalls {
    /// Before the tree changes.
    pub before: Vec<ServiceCall>,
    /// After it changed.
    pub after: Vec<ServiceCall>,
    /// At the very end, if nothing failed: reboot.
    pub reboot: bool,
}

impl ServiceCalls {
    /// What undoes the calls before the change, if the change did not happen.
    #[must_use]
    pub fn restart(&self) -> Vec<ServiceCall> {
        let start =
            |call: &ServiceCall| ServiceCall { service: call.service.clone(), verb: Verb::Start };
        self.before.iter().map(start).collect()
    }

    /// What is to be done if nobody knows how far the change came: everything that was stopped
    /// runs again, and everything that the change was for has heard of it. Nothing is rebooted.
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
}

/// Decides from the triggers of the old and of the new image and the paths that change.
#[must_use]
pub fn service_calls<'path>(
    old: &Triggers,
    new: &Triggers,
    paths: impl Iterator<Item = &'path TreePath> + Clone,
) -> ServiceCalls {
    let old_fired = old.fired(paths.clone());
    let new_fired = new.fired(paths);
    let mut calls =
        ServiceCalls { reboot: new_fired.iter().any(Trigger::reboots), ..ServiceCalls::default() };
    if calls.reboot {
        let starts = new_fired.iter().filter(|trigger| trigger.do_reboot).map(service);
        push_each_once(&mut calls.after, starts.map(|service| (service, Verb::Start)));
        return calls;
    }
    let restarted: BTreeSet<&str> = old_fired
        .iter()
        .chain(&new_fired)
        .filter(|trigger| !trigger.do_reload)
        .map(service)
        .collect();
    let stops = old_fired.iter().map(service).filter(|service| restarted.contains(service));
    push_each_once(&mut calls.before, stops.map(|service| (service, Verb::Stop)));
    let verb = |service| if restarted.contains(service) { Verb::Start } else { Verb::Reload };
    let known: BTreeSet<&str> = new.0.iter().map(service).collect();
    let stopped: Vec<String> = calls.before.iter().map(|call| call.service.clone()).collect();
    let fired = new_fired.iter().map(|trigger| (service(trigger), verb(service(trigger))));
    let left = stopped.iter().map(String::as_str).filter(|service| known.contains(service));
    let left = left.map(|service| (service, Verb::Start));
    push_each_once(&mut calls.after, fired.chain(left));
    calls
}

fn service(trigger: &Trigger) -> &str {
    &trigger.service
}

fn push_each_once<'name>(
    calls: &mut Vec<ServiceCall>,
    wanted: impl Iterator<Item = (&'name str, Verb)>,
) {
    for (service, verb) in wanted {
        if service != REBOOT && !calls.iter().any(|call| call.service == service) {
            calls.push(ServiceCall { service: service.to_owned(), verb });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Triggers from words like `ssh`, `ssh:reload` or `db:reboot`; each fires on `/SERVICE`, or on
    /// `/never` if the word ends in `-`.
    fn triggers(words: &str) -> Triggers {
        let trigger = |word: &str| {
            let (word, fires) = word.strip_suffix('-').map_or((word, true), |word| (word, false));
            let (service, flag) = word.split_once(':').unwrap_or((word, ""));
            let line = if fires { format!("/{service}$") } else { "/never$".to_owned() };
            format!(
                r#"{{"MatchLines": ["{line}"], "Service": "{service}",
                "DoReload": {}, "DoReboot": {}}}"#,
                flag == "reload",
                flag == "reboot",
            )
        };
        let all: Vec<String> = words.split_whitespace().map(trigger).collect();
        Triggers::from_json(&format!("[{}]", all.join(","))).unwrap()
    }

    #[test]
    fn decides_who_is_stopped_and_started() {
        #[rustfmt::skip]
        let table = [
            // name                       old              new               before      after
            ("same on both sides",        "b a",           "b a",            "-a -b",    "+a +b"),
            ("no triggers",               "",              "",               "",         ""),
            ("only the new image has it", "",              "a",              "",         "+a"),
            ("only the old image has it", "a",             "",               "-a",       ""),
            ("the new one does not fire", "a",             "a-",             "-a",       "+a"),
            ("the old one does not fire", "a-",            "a",              "",         "+a"),
            ("reload",                    "a:reload",      "a:reload",       "",         "~a"),
            ("reload becomes restart",    "a:reload",      "a",              "-a",       "+a"),
            ("restart becomes reload",    "a",             "a:reload",       "-a",       "+a"),
            ("reload and restart",        "a:reload a",    "a:reload a",     "-a",       "+a"),
            ("reboot stops nothing",      "a reboot",      "a reboot",       "",         "!"),
            ("reboot of the old image",   "a reboot",      "a",              "-a",       "+a"),
            ("started before the reboot", "a b",           "a b:reboot",     "",         "+b !"),
            ("reboot that does not fire", "a",             "a reboot-",      "-a",       "+a"),
            ("numbers sort as such",      "s10 s9",        "s10 s9",         "-s9 -s10","+s9 +s10"),
        ];
        for (name, old, new, before, after) in table {
            let paths = ["/a", "/b", "/s9", "/s10", "/reboot"].map(|path| path.parse().unwrap());
            let calls = service_calls(&triggers(old), &triggers(new), paths.iter());
            let words = |calls: &[ServiceCall], reboot: bool| {
                let mark = |verb| match verb {
                    Verb::Stop => "-",
                    Verb::Start => "+",
                    Verb::Reload => "~",
                    Verb::Reboot => "!",
                };
                let word = |call: &ServiceCall| format!("{}{}", mark(call.verb), call.service);
                let mut words: Vec<String> = calls.iter().map(word).collect();
                if reboot {
                    words.push("!".to_owned());
                }
                words.join(" ")
            };
            let got = (words(&calls.before, false), words(&calls.after, calls.reboot));
            assert_eq!(got, (before.to_owned(), after.to_owned()), "{name}");
        }
    }
}
