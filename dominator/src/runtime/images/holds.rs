//! Tells the image server which images machines must have or will get next, so that none of them
//! goes away.

use std::sync::Arc;
use std::time::Duration;

use api::image_server::holds::{HoldImages, HoldImagesRequest, NAMES_MAX};
use model::report::report;

use super::{Images, jitter};
use model::backoff::jittered;

/// How often it is told, before jitter.
const INTERVAL: Duration = Duration::from_secs(60);

/// For how long it holds: a dominator may be down for this long.
const HOLD_SECONDS: u32 = 900;

/// How long the image server may take to answer.
const LIMIT: Duration = Duration::from_secs(30);

impl Images {
    /// Holds the images that are wanted, for ever, in the name of `holder`.
    pub async fn hold(self: Arc<Self>, holder: String) {
        let mut is_failing = false;
        loop {
            let names: Vec<_> = {
                let wanted = self.wanted.lock().expect("no holder panics");
                wanted.keys().take(NAMES_MAX).cloned().collect()
            };
            // Before there is a machine database, what was held before the start stays held.
            if !names.is_empty() {
                let request =
                    HoldImagesRequest { holder: holder.clone(), names, seconds: HOLD_SECONDS };
                match self.client.call_within::<HoldImages>(&request, LIMIT).await {
                    Ok(_) => is_failing = false,
                    Err(error) if !is_failing => {
                        is_failing = true;
                        let why = report(&error);
                        tracing::warn!(
                            "the image server does not know which images are in use: {why}"
                        );
                    }
                    Err(_) => {}
                }
            }
            // What comes into use meanwhile is told at once.
            let pause = tokio::time::sleep(jittered(INTERVAL, jitter()));
            tokio::select! {
                () = pause => {}
                () = self.changed.notified() => {}
            }
        }
    }
}
