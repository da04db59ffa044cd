//! Runs triggers again that failed, as an operator orders.
//!
//! # Invariants
//!
//! * It counts as an update that is under way: no other is accepted meanwhile.
//! * A failure is forgotten only when its trigger has succeeded, or waits for a reboot that was.

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::subd::{TriggerFailure, UpdatePhase};
use model::trigger::services::{ServiceCall, ServiceCalls, retry_calls};

use crate::state::persisted_state::PersistedState;
use crate::state::{State, note_failures};
use crate::update::Updater;
use crate::update::admission::{refuse_if_paused, refuse_if_stuck};

impl Updater {
    /// Starts to run the triggers that failed. Does nothing if no trigger failed.
    ///
    /// # Errors
    ///
    /// `Busy` while an update is staged or under way, `Held` during a pause.
    pub fn retry_triggers(self: &Arc<Self>) -> Result<(), Fault> {
        let started = self.report_state.try_change(|state| {
            let State { persisted, identity, .. } = &*state;
            let PersistedState { trigger_failures: failed, last_update, .. } = &**persisted;
            if state.update != UpdatePhase::Idle {
                return Err(Fault::new(FaultCode::Busy, "an update is staged or under way"));
            }
            refuse_if_stuck(state)?;
            refuse_if_paused(state.pause_in_force())?;
            if failed.is_empty() {
                return Ok(None);
            }
            let awaits_reboot = persisted.reboot_due_in.as_ref() == Some(&identity.boot_id);
            let names = failed.iter().map(|failure| (&*failure.service, &*failure.verb));
            let calls = retry_calls(names, &persisted.triggers, awaits_reboot);
            let failed = failed.clone();
            let update_id = last_update.as_ref().map_or(0, |last| last.update_id);
            state.update = UpdatePhase::Updating(update_id);
            Ok(Some((failed, calls)))
        })?;
        if let Some((failed, calls)) = started {
            let updater = Arc::clone(self);
            self.tasks.spawn(async move { updater.run_again(failed, calls).await });
        }
        Ok(())
    }

    /// Carries out `calls` in a blocking thread, outside of an update. Returns those that failed.
    pub(super) async fn drive(&self, calls: Vec<ServiceCall>) -> Vec<TriggerFailure> {
        let (driver, limit) = (self.driver.clone(), self.service_time_max);
        let asked = calls.clone();
        let running = tokio::task::spawn_blocking(move || driver.run_all(&calls, limit));
        running.await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot run triggers");
            let failure = |call: ServiceCall| TriggerFailure {
                service: call.service,
                verb: call.verb.name().to_owned(),
                output: error.to_string(),
            };
            asked.into_iter().map(failure).collect()
        })
    }

    async fn run_again(self: Arc<Self>, failed: Vec<TriggerFailure>, calls: ServiceCalls) {
        let ServiceCalls { before, after, own, reboot, .. } = calls;
        let mut failures = self.drive(before).await;
        failures.extend(self.drive(after).await);
        if reboot {
            failures.extend(self.reboot().await);
        }
        tracing::info!(retried = failed.len(), failed = failures.len(), "triggers were run again");
        // Write-behind: after a crash the failures that stand are run again once more.
        let change = move |state: &mut State, persisted: &mut PersistedState| {
            persisted.trigger_failures.retain(|known| !failed.contains(known));
            note_failures(&mut persisted.trigger_failures, &failures);
            state.update = UpdatePhase::Idle;
        };
        self.report_state.persist_behind(change).await;
        if own {
            self.restart_own().await;
        }
    }
}
