//! Saves values that change in memory first.
//!
//! These are few: a value whose last seconds may be lost, and a machine database that could not be
//! saved when it was taken.

use std::error::Error;
use std::time::Duration;

use model::display::error_chain;
use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Calls a function that saves a value, some time after the value has changed.
#[derive(Debug)]
pub struct Saver {
    /// Names the value, for the log.
    value: &'static str,
    /// How long changes are gathered.
    gather_time: Duration,
    /// The pause after a failed write.
    retry_pause: Duration,
    changed: Notify,
}

impl Saver {
    pub fn new(value: &'static str, gather_time: Duration, retry_pause: Duration) -> Self {
        Self { value, gather_time, retry_pause, changed: Notify::new() }
    }

    /// Notes that the value has changed.
    pub fn notify(&self) {
        self.changed.notify_one();
    }

    /// Calls `save`, which blocks on the disk, after changes until `stop` is cancelled, and then
    /// once more.
    pub async fn run<E: Error + Send + 'static>(
        &self,
        save: impl Fn() -> Result<(), E> + Clone + Send + 'static,
        stop: &CancellationToken,
    ) {
        let (mut pause, mut logged) = (self.gather_time, None);
        loop {
            let is_last = stop.run_until_cancelled(self.changed.notified()).await.is_none()
                || stop.run_until_cancelled(sleep(pause)).await.is_none();
            let saved = tokio::task::spawn_blocking(save.clone()).await;
            let error = saved.ok().and_then(Result::err).map(|error| error_chain(&error));
            pause = if error.is_some() { self.retry_pause } else { self.gather_time };
            match &error {
                Some(error) => {
                    self.notify();
                    if logged.as_ref() != Some(error) {
                        tracing::error!("cannot save {}: {error}", self.value);
                    }
                }
                None if logged.is_some() => tracing::info!("{}: saved again", self.value),
                None => {}
            }
            logged = error;
            if is_last {
                return;
            }
        }
    }
}
