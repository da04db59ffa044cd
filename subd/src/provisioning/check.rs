//! Asks plugins whether the resources of the active image are as they were made.

use std::time::Duration;

use provisioning::machine::drift::NextCheck;
use provisioning::machine::{KeptPlugin, Machine};
use provisioning::plan::Provision;
use provisioning::protocol::{PlanAnswer, Verb};
use system::clock::wall;

use crate::provisioning::provisioner::{Provisioner, RETRY_AFTER};
use crate::state::persisted_state::PersistError;

/// The longest pause before the clock is read again, because it may be set.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(600);

impl Provisioner {
    /// Checks the resources, if that is due and nothing else is going on. Returns how long to wait
    /// then; without an end if `None`.
    pub(super) async fn check(&self) -> Result<Option<Duration>, PersistError> {
        let Some(schedule) = &self.surroundings.checks else { return Ok(None) };
        let now = || u64::try_from(wall().seconds).unwrap_or_default();
        match self.machine(|machine| machine.next_check(schedule, now())) {
            NextCheck::None => return Ok(None),
            NextCheck::Begin => {
                self.change(|machine| machine.begin_checks(now()))?;
                return Ok(Some(Duration::ZERO));
            }
            NextCheck::In(0) => {}
            NextCheck::In(seconds) => {
                return Ok(Some(Duration::from_secs(seconds).min(CLOCK_CHECK_INTERVAL)));
            }
        }
        // Files that plugins look at may be those of both images.
        let later = Ok(Some(RETRY_AFTER.min(schedule.every())));
        let Some(update) = (self.surroundings.last_update)() else { return later };
        let asked = self.machine(Machine::questions);
        let answers = tokio::select! {
            answers = self.ask_all(&asked) => answers,
            () = self.disturbed(&asked) => return Ok(Some(Duration::ZERO)),
            () = self.stop.cancelled() => return Ok(None),
        };
        if (self.surroundings.last_update)() != Some(update) {
            return later;
        }
        let mut drifted = Vec::new();
        self.change(|machine| {
            // An order may have come meanwhile.
            if machine.questions() == asked {
                drifted = machine.checked(&asked, answers, now());
            }
        })?;
        for (id, text) in drifted {
            tracing::warn!(resource = id, "it is not as it was made: {text}");
        }
        Ok(Some(Duration::ZERO))
    }

    /// Waits until something else is asked for.
    async fn disturbed(&self, asked: &[Provision]) {
        while self.machine(Machine::questions) == asked {
            self.changed.notified().await;
        }
    }

    async fn ask_all(&self, asked: &[Provision]) -> Vec<Result<PlanAnswer, String>> {
        let mut answers = Vec::new();
        for call in asked {
            answers.push(self.ask(call).await);
        }
        answers
    }

    /// Asks a plugin what it would do.
    async fn ask(&self, call: &Provision) -> Result<PlanAnswer, String> {
        self.ask_plugin(&self.current_plugin(&call.provisioner)?, call).await
    }

    /// Asks this plugin what it would do.
    pub(super) async fn ask_plugin(
        &self,
        plugin: &KeptPlugin,
        call: &Provision,
    ) -> Result<PlanAnswer, String> {
        self.plugins.check(&plugin.copy)?;
        let plugin = self.plugins.plugin(&plugin.copy, &call.user, plugin.timeout_s, None);
        let printed = plugin.ask(Verb::Plan, &call.request).await?;
        PlanAnswer::parse(&printed).map_err(|error| error.to_string())
    }
}
