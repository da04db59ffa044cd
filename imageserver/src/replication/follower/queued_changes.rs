//! Makes the changes of the master that are in the queue.
//! [`crate::core::replication::decision`] decides what is done,
//! [`crate::replication::image_steps`] does it.

use api::fault::FaultCode;
use api::image_server::replication::{ImageChange, ReplicationTrouble};
use api::image_server::{GetImage, GetImageRequest};
use model::display::{error_chain, safe_text};
use model::image::{Image, ImageName};
use system::clock::wall;
use system::random::random;

use super::Follower;
use crate::core::replication::decision::{ImageDecision, explain};
use crate::core::replication::queue::{ERROR_BYTES_MAX, Outcome};
use crate::replication::image_steps;

impl Follower {
    /// Makes the changes in the queue, one after the other.
    pub(super) async fn work(&self) {
        loop {
            let mut woken = std::pin::pin!(self.work.notified());
            // From here on no queued change is missed.
            woken.as_mut().enable();
            let now = self.now();
            let (next, due) = {
                let mut state = self.state();
                (state.queue.next(now), state.queue.due())
            };
            let Some(change) = next else {
                match due {
                    None => woken.await,
                    Some(at) => tokio::select! {
                        () = woken => {}
                        () = tokio::time::sleep_until(self.started + at) => {}
                    },
                }
                continue;
            };
            let outcome = self.carry_out(&change).await;
            self.ended(change.name(), outcome);
        }
    }

    fn ended(&self, name: &ImageName, outcome: Outcome) {
        let now = self.now();
        let mut state = self.state();
        let former = state.queue.trouble(name);
        match &outcome {
            Outcome::Done => {}
            Outcome::Blocked(trouble, text) if former != Some(*trouble) => {
                tracing::error!(image = %name, trouble = trouble.name(), "{text}");
            }
            Outcome::Failed(why) => {
                if former != Some(ReplicationTrouble::Failing) {
                    tracing::error!(image = %name, "an image failed, trying again: {why}");
                }
                let text = safe_text(&format!("{name}: {why}"), ERROR_BYTES_MAX);
                state.last_error = Some((wall(), text));
            }
            Outcome::Blocked(..) => {}
        }
        if !matches!(outcome, Outcome::Failed(_)) {
            state.forced.remove(name);
        }
        state.queue.end(now, name, outcome, random());
        state.note_level();
        drop(state);
        // The name may be due at once, because it changed meanwhile.
        self.work.notify_waiters();
        self.progress.notify_waiters();
    }

    async fn carry_out(&self, change: &ImageChange) -> Outcome {
        let name = change.name();
        let master = self.master().to_string();
        let is_forced = self.state().forced.contains(name);
        let here = self.store.images.local_image(name, || !is_forced && self.is_held(name));
        let done = match (self.rules.decide(change, &here), change) {
            (ImageDecision::Nothing, _) => Ok(()),
            (ImageDecision::Blocked(trouble), _) => {
                let holders = self.store.holding.holders(name).unwrap_or_default();
                let holders: Vec<String> = holders.into_iter().map(|holder| holder.name).collect();
                let text = explain(trouble, name, &master, &holders);
                return Outcome::Blocked(trouble, text);
            }
            (ImageDecision::Fetch, _) => self.fetch(change).await,
            (ImageDecision::UpdateNotes, _) => self.update_notes(change).await,
            (ImageDecision::End, ImageChange::Ended { how, digest: Some(digest), .. }) => {
                let (ending, how, digest) = (name.clone(), *how, *digest);
                let ended = self
                    .fetcher
                    .blocking(move |store| image_steps::end(store, &ending, digest, how, &master));
                // If it did not end there is another image by now, which is decided on again.
                ended.await.map(|ended| {
                    if ended {
                        tracing::info!(image = %name, "{} on the master, and here", how.word());
                        self.fetcher.counters.images_replicated_ends.inc();
                    }
                })
            }
            (ImageDecision::AddTombstone, ImageChange::Ended { how, digest, .. }) => {
                let (ended, how, digest) = (name.clone(), *how, *digest);
                let added = self.fetcher.blocking(move |store| {
                    image_steps::add_tombstone(store, &ended, digest, how, &master)
                });
                added.await
            }
            (ImageDecision::End | ImageDecision::AddTombstone, _) => Ok(()),
        };
        match done {
            Ok(()) => Outcome::Done,
            Err(why) => Outcome::Failed(why),
        }
    }

    /// Fetches the record of the image of `change`; `None` if the master has no such image any
    /// more.
    async fn ask(&self, change: &ImageChange) -> Result<Option<Image>, String> {
        let ImageChange::Image { name, digest, .. } = change else { return Ok(None) };
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        let image = match self.fetcher.client.call::<GetImage>(&request).await {
            Ok(image) => image,
            Err(error) => {
                return match error.code() {
                    Some(FaultCode::NotFound | FaultCode::Gone) => Ok(None),
                    _ => Err(error_chain(&error)),
                };
            }
        };
        if image.content.name != *name || image.content.digest() != *digest {
            return Err(format!("the master gave another image than {name} with {digest}"));
        }
        Ok(Some(image))
    }

    async fn fetch(&self, change: &ImageChange) -> Result<(), String> {
        match self.ask(change).await? {
            None => Ok(()),
            Some(image) => self.receive(image).await,
        }
    }

    /// Fetches all objects of an image of the master, then makes it visible here.
    pub(crate) async fn receive(&self, image: Image) -> Result<(), String> {
        let name = image.content.name.clone();
        self.fetcher.bring(&image, |bytes| self.state().queue.left(&name, bytes)).await?;
        let image = self.as_here(image);
        if self.fetcher.blocking(move |store| image_steps::receive(store, image)).await? {
            let master = self.master();
            tracing::info!(image = %name, %master, "took an image from the master");
            self.fetcher.counters.images_replicated.inc();
        }
        self.progress.notify_waiters();
        Ok(())
    }

    async fn update_notes(&self, change: &ImageChange) -> Result<(), String> {
        let Some(image) = self.ask(change).await? else { return Ok(()) };
        self.fetcher.bring(&image, |_| ()).await?;
        let image = self.as_here(image);
        let updated = self.fetcher.blocking(move |store| image_steps::update_notes(store, &image));
        updated.await.map(drop)
    }

    /// Returns the image as it is stored here.
    fn as_here(&self, mut image: Image) -> Image {
        image.notes.expires_at = self.rules.expiry(image.notes.expires_at);
        image
    }
}
