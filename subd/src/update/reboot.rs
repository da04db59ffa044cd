//! Reboots and restarts: of the machine, and of subd itself, as an update wants them.
//!
//! A reboot is asked for in the system's own way, once. A machine that is still there after a while
//! is reported, and asked again and again; it is never forced, because what keeps it up may be what
//! must not be cut off. When it has come up in another boot the update is complete.

use std::sync::Arc;

use api::subd::TriggerFailure;
use model::trigger::REBOOT;
use model::trigger::services::Verb;

use super::Updater;
use crate::state::report_state::{State, note_failures};

impl Updater {
    /// Asks the system to reboot the machine.
    pub(super) async fn reboot(&self) -> Option<TriggerFailure> {
        let (driver, limit) = (self.driver.clone(), self.service_time_max);
        match tokio::task::spawn_blocking(move || driver.reboot(limit)).await {
            Ok(failure) => failure,
            Err(error) => Some(reboot_failure(error.to_string())),
        }
    }

    /// Has subd's own service restarted, which stops this process. All that is to be remembered
    /// must have been noted.
    pub(super) async fn restart_own(&self) {
        let (driver, limit) = (self.driver.clone(), self.service_time_max);
        let own = self.own_service.clone();
        let restarting = tokio::task::spawn_blocking(move || driver.restart_own(&own, limit));
        match restarting.await {
            Ok(None) => {}
            Ok(Some(failure)) => self.report(failure).await,
            Err(error) => tracing::error!(%error, "cannot restart subd"),
        }
    }

    /// At the start: an update that waited for a boot waits no more if this is another one.
    pub async fn note_boot(&self) {
        let completed = self.report_state.try_change(|state| {
            let due_in = state.persisted.reboot_due_in.as_ref();
            if due_in.is_none_or(|boot_id| *boot_id == state.identity.boot_id) {
                return Err(());
            }
            state.persisted.reboot_due_in = None;
            if let Some(last) = &mut state.persisted.last_update {
                last.awaits_boot = false;
            }
            Ok(Some(()))
        });
        if completed.is_ok() {
            tracing::info!("the reboot that was due is done");
            self.store().await;
        }
    }

    /// Reports a machine that does not go down although it was told to, and tells it again, until
    /// subd is stopped, as it is when the machine goes down.
    pub async fn watch_reboots(self: Arc<Self>) {
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
            let text = format!("the machine was told to reboot and is still up after {seconds} s");
            self.report(reboot_failure(text)).await;
            if let Some(failure) = self.reboot().await {
                self.report(failure).await;
            }
        }
    }

    /// Notes, durably, what failed after the update had ended.
    async fn report(&self, failure: TriggerFailure) {
        self.report_state.change(|state| {
            note_failures(&mut state.persisted.trigger_failures, std::slice::from_ref(&failure));
        });
        self.store().await;
    }
}

fn reboot_failure(output: String) -> TriggerFailure {
    tracing::error!(output, "the machine does not reboot");
    TriggerFailure { service: REBOOT.to_owned(), verb: Verb::Reboot.name().to_owned(), output }
}
