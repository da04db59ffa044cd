//! Images that no machine must have: those that machines had before, with which they are compared
//! when they get the next one, and those that operators ask about. Each is got once and kept at
//! hand, because whoever asks about one machine of a fleet asks about others too.

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::image_server::{GetImage, GetImageRequest};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::report::report;
use model::trigger::Triggers;

use super::{Images, NOTES_LIMIT};
use crate::core::sub::ImageState;

/// How many such images are known. Each takes some ten megabytes.
const IMAGES_MAX: usize = 8;

/// How long one stays at hand that no machine had and that nobody asks about.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// After how long one that nobody gave is asked for again, if machines had it.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// What is known of an image.
#[derive(Debug)]
struct Entry {
    name: ImageName,
    /// The image, or why nobody gives it.
    image: Result<Arc<RequiredImage>, String>,
    /// When it was last asked for; of one that nobody gives, when it was first.
    asked: Instant,
    /// Machines had it, and may be compared with it for as long as a rollout takes.
    is_former: bool,
}

impl Entry {
    fn is_over(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.asked);
        match self.image {
            Ok(_) => !self.is_former && since >= IDLE_MAX,
            Err(_) => since >= FORGOTTEN,
        }
    }
}

/// What is known of images; the one that was of use last comes last.
#[derive(Debug, Default)]
pub(super) struct Known {
    entries: VecDeque<Entry>,
    /// There is a task that lets go of those that nobody asks about.
    is_swept: bool,
}

impl Known {
    fn find(
        &mut self,
        name: &ImageName,
        now: Instant,
    ) -> Option<Result<Arc<RequiredImage>, String>> {
        self.sweep(now);
        let at = self.entries.iter().position(|entry| entry.name == *name)?;
        let mut entry = self.entries.remove(at)?;
        if entry.image.is_ok() {
            entry.asked = now;
        }
        let image = entry.image.clone();
        self.entries.push_back(entry);
        Some(image)
    }

    fn keep(&mut self, new: Entry) {
        let was_former = self.entries.iter().any(|entry| entry.name == new.name && entry.is_former);
        self.entries.retain(|entry| entry.name != new.name);
        self.entries.push_back(Entry { is_former: new.is_former || was_former, ..new });
        if self.entries.len() > IMAGES_MAX {
            self.entries.pop_front();
        }
    }

    fn sweep(&mut self, now: Instant) {
        self.entries.retain(|entry| !entry.is_over(now));
    }
}

/// For what an image is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    /// A machine had it.
    Record,
    /// Somebody wants to know of it, and at once when there is one.
    Question,
}

impl Images {
    /// The image called `name`, which a machine had before; `None` if nobody gives it.
    pub async fn former(self: &Arc<Self>, name: &ImageName) -> Option<Arc<RequiredImage>> {
        self.get(name, For::Record).await.ok()
    }

    /// The image called `name`, whether machines must have it or not. Nothing is written anywhere.
    ///
    /// # Errors
    ///
    /// Why it is not at hand, in words.
    pub async fn look_up(self: &Arc<Self>, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        self.get(name, For::Question).await
    }

    async fn get(
        self: &Arc<Self>,
        name: &ImageName,
        what_for: For,
    ) -> Result<Arc<RequiredImage>, String> {
        if let Some(image) = self.at_hand(name, what_for) {
            return image;
        }
        // Machines must not wait for what an operator wants to know.
        let _asking = match what_for {
            For::Record => Some(self.asking.lock().await),
            For::Question => None,
        };
        // Another may have got it while this one waited.
        if let Some(image) = self.at_hand(name, what_for) {
            return image;
        }
        let got = self.reader.image(&self.client, name, Duration::ZERO).await;
        let image = got.map_err(|error| report(&error));
        let is_former = what_for == For::Record;
        if let Err(why) = &image
            && is_former
        {
            tracing::warn!(image = %name, "what changes because of drift is not known: {why}");
        }
        if image.is_ok() || is_former {
            self.remember(name.clone(), image.clone(), is_former);
        }
        image
    }

    /// Remembers an image that machines had until now.
    pub(super) fn was_wanted(self: &Arc<Self>, name: &ImageName, image: &Arc<RequiredImage>) {
        self.remember(name.clone(), Ok(Arc::clone(image)), true);
    }

    fn remember(
        self: &Arc<Self>,
        name: ImageName,
        image: Result<Arc<RequiredImage>, String>,
        is_former: bool,
    ) {
        let is_swept = {
            let mut known = self.known();
            known.keep(Entry { name, image, asked: Instant::now(), is_former });
            std::mem::replace(&mut known.is_swept, true)
        };
        if !is_swept {
            let (images, stop) = (Arc::clone(self), self.stop.clone());
            self.tracker.spawn(stop.run_until_cancelled_owned(images.sweep()));
        }
    }

    /// Lets go of images that nobody asks about, until all that are left stay.
    async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(IDLE_MAX).await;
            let mut known = self.known();
            known.sweep(Instant::now());
            if known.entries.iter().all(|entry| entry.is_former && entry.image.is_ok()) {
                known.is_swept = false;
                return;
            }
        }
    }

    fn at_hand(
        &self,
        name: &ImageName,
        what_for: For,
    ) -> Option<Result<Arc<RequiredImage>, String>> {
        let wanted = self.watch(name).and_then(|state| match &*state.borrow() {
            ImageState::Ready(image) => Some(Arc::clone(image)),
            ImageState::Undefined | ImageState::Missing(_) => None,
        });
        if let Some(image) = wanted {
            return Some(Ok(image));
        }
        let found = self.known().find(name, Instant::now());
        found.filter(|image| image.is_ok() || what_for == For::Record)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The triggers of the image called `name`; its tree is not read for that.
    ///
    /// # Errors
    ///
    /// Why they are not known, in words.
    pub async fn triggers(&self, name: &ImageName) -> Result<Triggers, String> {
        if let Some(Ok(image)) = self.at_hand(name, For::Question) {
            return Ok(image.content.triggers.clone());
        }
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        match self.client.call_within::<GetImage>(&request, NOTES_LIMIT).await {
            Ok(image) if image.content.name == *name => Ok(image.content.triggers),
            Ok(image) => Err(format!("the image server gives {}", image.content.name)),
            Err(error) => Err(report(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::filter::Filter;
    use model::image::{Content, FORMAT};
    use model::object::Algorithm;
    use model::tree::text::from_text;

    fn name(name: &str) -> ImageName {
        ImageName::new(name).unwrap()
    }

    fn entry(of: &str, asked: Instant, is_former: bool) -> Entry {
        let tree = from_text(Algorithm::Blake3, "").unwrap();
        let content = Content {
            format: FORMAT,
            name: name(of),
            root: tree.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
        };
        let image = Ok(Arc::new(RequiredImage::new(content, tree)));
        Entry { name: name(of), image, asked, is_former }
    }

    #[test]
    fn few_images_are_known_and_those_that_are_of_use_stay() {
        let start = Instant::now();
        let mut known = Known::default();
        known.keep(entry("often", start, false));
        for number in 0..2 * IMAGES_MAX {
            known.keep(entry(&format!("once/{number}"), start, true));
            assert!(known.find(&name("often"), start).is_some());
        }
        assert_eq!(known.entries.len(), IMAGES_MAX);
        assert!(known.find(&name("once/0"), start).is_none());
    }

    #[test]
    fn images_that_machines_had_stay_longer_than_those_that_are_asked_about() {
        let start = Instant::now();
        let mut known = Known::default();
        known.keep(entry("former", start, true));
        known.keep(entry("asked", start, false));
        known.keep(entry("idle", start, false));
        let nobody = Entry { image: Err("is not there".to_owned()), ..entry("gone", start, true) };
        known.keep(nobody);
        // It stays one that machines had, whoever asks next.
        known.keep(entry("former", start, false));
        let mut left = |after: Duration| -> Vec<String> {
            known.sweep(start + after);
            let _asked = known.find(&name("asked"), start + after);
            let mut names: Vec<String> =
                known.entries.iter().map(|entry| entry.name.to_string()).collect();
            names.sort();
            names
        };
        let second = Duration::from_secs(1);
        assert_eq!(left(FORGOTTEN - second), ["asked", "former", "gone", "idle"]);
        assert_eq!(left(FORGOTTEN), ["asked", "former", "idle"]);
        assert_eq!(left(IDLE_MAX), ["asked", "former"]);
        assert_eq!(left(FORGOTTEN + IDLE_MAX), ["asked", "former"]);
        assert_eq!(left(FORGOTTEN + 2 * IDLE_MAX), ["former"]);
    }
}
