//! Reboots the machine and restarts subd, as an update asks.
//!
//! A reboot is requested in the system's own way. If the machine is still up after a while, systemd
//! forces it, also when subd has been stopped by then; elsewhere it is reported, and requested
//! again and again. Services that were stopped for the reboot are started if it does not come. When
//! the machine has started in another boot the update is complete.

use std::sync::Arc;

use api::subd::TriggerFailure;
use model::trigger::REBOOT;
use model::trigger::services::{ServiceCall, ServiceVerb};

use crate::state::persisted_state::{InsteadOfReboot, PersistedState};
use crate::state::{State, note_failures};
use crate::update::Updater;

impl Updater {
    /// Asks the system to reboot the machine. If that fails, carries out `instead` at once, and if
    /// the machine is still up after a while, then. Returns what failed.
    pub(super) async fn reboot_or(&self, instead: InsteadOfReboot) -> Vec<TriggerFailure> {
        let mut failures: Vec<TriggerFailure> = self.reboot().await.into_iter().collect();
        if failures.is_empty() {
            // Write-behind: until the next write the journal of the update is there, with all this.
            let change = |_: &mut State, persisted: &mut PersistedState| {
                let before = persisted.instead_of_reboot.take().unwrap_or_default();
                persisted.instead_of_reboot = Some(instead.after(before));
            };
            self.report_state.persist_behind(change).await;
        } else {
            failures.extend(self.go_on(instead).await);
        }
        failures
    }

    /// Starts what was stopped for a reboot that does not come. Returns what failed.
    async fn go_on(&self, instead: InsteadOfReboot) -> Vec<TriggerFailure> {
        let failures = self.drive(instead.calls).await;
        if let Some(running) = &self.daemon_tasks {
            running.define(&instead.tasks);
        }
        failures
    }

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
            self.report(reboot_failure(text)).await;
            let instead = self.report_state.read(|state| state.persisted.instead_of_reboot.clone());
            if let Some(instead) = instead {
                for failure in self.go_on(instead.clone()).await {
                    self.report(failure).await;
                }
                // Write-behind: after a crash all is started once more.
                let change = move |_: &mut State, persisted: &mut PersistedState| {
                    // An update may have stopped others meanwhile.
                    persisted.instead_of_reboot.take_if(|kept| *kept == instead);
                };
                self.report_state.persist_behind(change).await;
            }
            if let Some(failure) = self.reboot().await {
                self.report(failure).await;
            }
        }
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

impl InsteadOfReboot {
    /// Adds the services that an earlier update has stopped for the same reboot.
    fn after(mut self, earlier: Self) -> Self {
        let is_new = |call: &ServiceCall| !self.calls.contains(call);
        let mut calls: Vec<ServiceCall> = earlier.calls.into_iter().filter(is_new).collect();
        calls.append(&mut self.calls);
        Self { calls, ..self }
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
    use ::tasks::image::ImageTasks;

    use super::*;

    #[test]
    fn services_of_an_earlier_update_are_started_too_and_before() {
        let of = |names: &[&str]| {
            let calls = names.iter().map(|name| ServiceCall::new(name, ServiceVerb::Start));
            InsteadOfReboot { calls: calls.collect(), tasks: ImageTasks::default() }
        };
        assert_eq!(of(&["b", "c"]).after(of(&["a", "b"])), of(&["a", "b", "c"]));
    }
}
