//! Reboots the machine and restarts subd, as an update asks.
//!
//! A reboot is requested in the system's own way. If the machine is still up after a while, systemd
//! forces it, also when subd has been stopped by then; elsewhere it is reported, and requested
//! again and again. Services that were stopped for the reboot are started if it does not come. When
//! the machine has started in another boot the update is complete.

use std::sync::Arc;

use api::subd::{LastUpdate, TriggerFailure, UpdateOutcome};
use model::trigger::REBOOT;
use model::trigger::services::ServiceVerb;

use crate::state::persisted_state::{InsteadOfReboot, PersistedState};
use crate::state::{State, note_failures};
use crate::update::Updater;
use crate::update::journal::JournalHead;

impl Updater {
    /// Asks the system to reboot the machine.
    pub(super) async fn reboot(&self) -> Option<TriggerFailure> {
        let (driver, limit) = (self.driver.clone(), self.service_time_max);
        let force_after = self.down_time_max;
        match tokio::task::spawn_blocking(move || driver.reboot(limit, force_after)).await {
            Ok(failure) => failure,
            Err(error) => Some(reboot_failure(error.to_string())),
        }
    }

    /// Restarts subd's own service, which stops this process. All state must be saved before.
    pub(super) async fn restart_own(&self) {
        let (driver, limit) = (self.driver.clone(), self.service_time_max);
        let service = self.own_service.clone();
        let restarting = tokio::task::spawn_blocking(move || driver.restart_own(&service, limit));
        match restarting.await {
            Ok(None) => {}
            Ok(Some(failure)) => self.report(failure).await,
            Err(error) => tracing::error!(%error, "cannot restart subd"),
        }
    }

    /// Ends the wait for a reboot if the boot id has changed. Called when subd starts.
    pub(super) async fn note_boot(&self) {
        let is_done = self.report_state.read(|state| {
            let due_in = state.persisted.reboot_due_in.as_ref();
            due_in.is_some_and(|boot_id| *boot_id != state.identity.boot_id)
        });
        if is_done {
            tracing::info!("the reboot that was due is done");
            // Write-behind: the next start finds the same.
            let change = |_: &mut State, persisted: &mut PersistedState| {
                persisted.reboot_due_in = None;
                persisted.instead_of_reboot = None;
                if let Some(last) = &mut persisted.last_update {
                    last.awaits_boot = false;
                }
            };
            self.report_state.persist_behind(change).await;
        }
    }

    /// Reports a machine that does not shut down for a reboot, and requests it again, until subd is
    /// stopped, as it is when the machine shuts down.
    pub(super) async fn watch_reboots(self: Arc<Self>) {
        let mut versions = self.report_state.watch();
        let waits = |state: &State| {
            state.persisted.last_update.as_ref().is_some_and(|last| last.awaits_boot)
        };
        loop {
            let over_time = async {
                while !self.report_state.read(waits) && versions.changed().await.is_ok() {}
                tokio::time::sleep(self.down_time_max).await;
            };
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = over_time => {}
            }
            if !self.report_state.read(waits) {
                continue;
            }
            let seconds = self.down_time_max.as_secs();
            let text =
                format!("a reboot was requested and the machine is still up after {seconds} s");
            // First, because the dominator sends updates when this is reported.
            for failure in self.start_instead().await {
                self.report(failure).await;
            }
            self.report(reboot_failure(text)).await;
            if let Some(failure) = self.reboot().await {
                self.report(failure).await;
            }
        }
    }

    /// Starts what was stopped for a reboot that does not come. Returns what failed.
    pub(super) async fn start_instead(&self) -> Vec<TriggerFailure> {
        let (instead, last) = self.report_state.read(|state| {
            let PersistedState { instead_of_reboot, last_update, .. } = &*state.persisted;
            (instead_of_reboot.clone(), last_update.clone())
        });
        let Some(InsteadOfReboot { calls, tasks }) = instead else { return Vec::new() };
        let failures = self.drive(calls).await;
        if let Some(running) = &self.daemon_tasks {
            running.define(&tasks);
        }
        // Write-behind: after a crash all is started once more.
        let change = move |_: &mut State, persisted: &mut PersistedState| {
            // Another update may have stopped something meanwhile.
            if persisted.last_update == last {
                persisted.instead_of_reboot = None;
            }
        };
        self.report_state.persist_behind(change).await;
        failures
    }

    /// Reports what failed after the update had ended.
    async fn report(&self, failure: TriggerFailure) {
        // Write-behind: it was logged, and changes nothing that subd does.
        let change = move |_: &mut State, persisted: &mut PersistedState| {
            note_failures(&mut persisted.trigger_failures, std::slice::from_ref(&failure));
        };
        self.report_state.persist_behind(change).await;
    }
}

/// Records what is to be started if the reboot that is due does not come, when an update has ended.
/// What earlier updates have stopped for it is started too, and before.
pub(super) fn note_stopped(persisted: &mut PersistedState, head: &JournalHead, last: &LastUpdate) {
    if !persisted.last_update.as_ref().is_some_and(|last| last.awaits_boot) {
        persisted.instead_of_reboot = None;
        return;
    }
    let is_new = last.outcome == UpdateOutcome::Done;
    let (calls, tasks) = match is_new {
        true => (head.calls.instead_of_reboot(&head.triggers), &head.tasks.new),
        false => (head.calls.restart(), &head.tasks.old),
    };
    let kept = persisted.instead_of_reboot.get_or_insert_default();
    kept.tasks.clone_from(tasks);
    if is_new {
        // The new image may lack the others.
        kept.calls.retain(|call| head.triggers.name(&call.service));
    }
    if last.awaits_boot {
        for call in calls {
            if !kept.calls.contains(&call) {
                kept.calls.push(call);
            }
        }
    }
}

fn reboot_failure(output: String) -> TriggerFailure {
    tracing::error!(output, "the machine did not reboot");
    TriggerFailure {
        service: REBOOT.to_owned(),
        verb: ServiceVerb::Reboot.name().to_owned(),
        output,
    }
}

#[cfg(test)]
mod tests {
    use model::image::ImageName;
    use model::object::Algorithm;
    use model::trigger::Triggers;
    use model::trigger::services::{ServiceCall, ServiceCalls};

    use super::*;
    use crate::state::note_reboot;

    /// An update that stops services, to an image whose triggers name others.
    fn update(stops: &[&str], names: &[&str], reboot: bool) -> (JournalHead, LastUpdate) {
        let stop = |name: &&str| ServiceCall::new(name, ServiceVerb::Stop);
        let triggers: Vec<String> = names
            .iter()
            .map(|name| format!(r#"{{"MatchLines": ["/x"], "Service": "{name}"}}"#))
            .collect();
        let head = JournalHead {
            update_id: 1,
            image: ImageName::new("web/1").unwrap(),
            image_digest: Algorithm::Blake3.digest(b""),
            operations: 1,
            triggers: Triggers::from_json(&format!("[{}]", triggers.join(","))).unwrap(),
            health_check: None,
            calls: ServiceCalls { before: stops.iter().map(stop).collect(), ..<_>::default() },
            boot_id: "boot".to_owned(),
            managed: <_>::default(),
            accepted: None,
            tasks: <_>::default(),
            resources: <_>::default(),
        };
        let last = LastUpdate::new(1, head.image.clone(), UpdateOutcome::Done);
        (head, LastUpdate { awaits_boot: reboot, ..last })
    }

    #[test]
    fn all_that_was_stopped_for_a_reboot_is_started_if_the_newest_image_has_it() {
        let mut persisted = PersistedState::default();
        let mut note = |stops: &[&str], names: &[&str], reboot: bool| {
            let (head, last) = update(stops, names, reboot);
            persisted.last_update = Some(last.clone());
            note_reboot(&mut persisted, "boot");
            note_stopped(&mut persisted, &head, &last);
            let calls = persisted.instead_of_reboot.clone().map(|instead| instead.calls);
            calls.map(|calls| calls.into_iter().map(|call| call.service).collect::<Vec<_>>())
        };
        let some = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(note(&["a"], &["a"], false), None);
        assert_eq!(note(&["a", "b"], &["a", "b"], true), some(&["a", "b"]));
        // One that starts what it stops, and lacks `a`.
        assert_eq!(note(&["c"], &["b", "c"], false), some(&["b"]));
        assert_eq!(note(&["b", "c"], &["b", "c"], true), some(&["b", "c"]));
        persisted.reboot_due_in = Some("an earlier boot".to_owned());
        let (head, last) = update(&["b"], &["b"], false);
        persisted.last_update = Some(last.clone());
        note_reboot(&mut persisted, "boot");
        note_stopped(&mut persisted, &head, &last);
        assert_eq!(persisted.instead_of_reboot, None);
    }
}
