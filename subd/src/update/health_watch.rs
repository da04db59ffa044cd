//! Asks for the health of the image again and again, as long as the machine has it.

use std::sync::Arc;
use std::time::Duration;

use api::subd::{Activity, Health};
use model::image::{HealthCheck, ImageName};

use crate::state::State;
use crate::update::Updater;

/// The pause between two checks.
const INTERVAL: Duration = Duration::from_secs(60);

/// The longest time of one check, in seconds, whatever the image says.
const WITHIN_S_MAX: u32 = 60;

/// What is known between updates of the image that a machine has.
type Installed = (ImageName, HealthCheck);

/// Returns the image with its check; `None` without a check, and during an update.
fn installed(state: &State) -> Option<Installed> {
    let (image, check) =
        (state.persisted.last_image.clone()?, state.persisted.health_check.clone()?);
    let is_calm = matches!(state.activity(), Activity::Idle | Activity::Fetching { .. });
    is_calm.then_some((image, check))
}

impl Updater {
    /// Asks for the health of the image each minute until subd is stopped. Nothing is undone.
    pub async fn watch_health(self: Arc<Self>) {
        let pause = || self.stop.run_until_cancelled(tokio::time::sleep(INTERVAL));
        while self.health_checker.is_some() && pause().await.is_some() {
            if let Some((image, health)) = self.health_now().await {
                self.report_health(image, health);
            }
        }
    }

    /// Runs the check once; `None` if the image has no check, or an update has come in between: it
    /// stops services.
    async fn health_now(self: &Arc<Self>) -> Option<(ImageName, Health)> {
        let _turn = self.checking.lock().await;
        let before = self.report_state.read(installed)?;
        let (_, check) = before.clone();
        let within_seconds = check.within_seconds.min(WITHIN_S_MAX);
        let check = HealthCheck { within_seconds, ..check };
        let updater = Arc::clone(self);
        let checking = tokio::task::spawn_blocking(move || updater.run_check(&check));
        let health = checking.await.ok()??;
        let after = self.report_state.read(installed)?;
        (before == after).then_some((before.0, health))
    }

    /// Tells polls of a health that differs. What a check that fails again says is no news.
    fn report_health(&self, image: ImageName, health: Health) {
        let is_passed = matches!(health, Health::Passed);
        let noted = self.report_state.try_change(|state| {
            let known = state.image_health.as_ref().filter(|(known, _)| *known == image);
            let was_passed = known.map(|(_, health)| matches!(health, Health::Passed));
            if was_passed == Some(is_passed) {
                return Ok::<_, std::convert::Infallible>(None);
            }
            state.image_health = Some((image, health));
            Ok(Some(()))
        });
        if let Ok(Some(())) = noted {
            tracing::info!(is_passed, "the health check of the image");
        }
    }
}
