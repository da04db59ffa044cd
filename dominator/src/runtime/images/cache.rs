//! Images that no machine must have: former images of machines, with which their trees are compared
//! at the next update, and images that operators ask about. Each is loaded once and cached, because
//! a question about one machine is usually asked about others too.

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use api::image_server::{GetImage, GetImageRequest};
use model::display::error_chain;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::lock::locked;
use model::trigger::Triggers;

use super::{Images, NOTES_LIMIT};
use crate::core::sub::ImageState;

/// The most images in the cache. Each takes some ten megabytes.
const IMAGES_MAX: usize = 8;

/// How long an image stays that no machine had and nobody asks about.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// How long a failure to load a former image stays.
const FORGOTTEN: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct CachedImage {
    name: ImageName,
    /// The image, or why it cannot be loaded.
    image: Result<Arc<RequiredImage>, String>,
    /// When it was last asked for, or when loading failed.
    asked: Duration,
    /// True if machines had it: it stays, because a rollout may take long.
    is_former: bool,
}

impl CachedImage {
    fn is_over(&self, now: Duration) -> bool {
        let since = now.saturating_sub(self.asked);
        match self.image {
            Ok(_) => !self.is_former && since >= IDLE_MAX,
            Err(_) => since >= FORGOTTEN,
        }
    }
}

/// The cached images; the one that was used last comes last.
#[derive(Debug, Default)]
pub(super) struct ImageCache {
    entries: VecDeque<CachedImage>,
    /// True if a task removes idle images.
    is_swept: bool,
}

impl ImageCache {
    fn find(
        &mut self,
        name: &ImageName,
        now: Duration,
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

    fn insert(&mut self, new: CachedImage) {
        let was_former = self.entries.iter().any(|entry| entry.name == new.name && entry.is_former);
        self.entries.retain(|entry| entry.name != new.name);
        self.entries.push_back(CachedImage { is_former: new.is_former || was_former, ..new });
        if self.entries.len() > IMAGES_MAX {
            self.entries.pop_front();
        }
    }

    fn sweep(&mut self, now: Duration) {
        self.entries.retain(|entry| !entry.is_over(now));
    }
}

/// Why an image is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A machine had it, and its update is to be recorded.
    Record,
    /// An operator asks about it: a former failure does not count.
    Question,
}

impl Images {
    /// Returns the image `name`, which a machine had before; `None` if it cannot be loaded.
    pub async fn former(self: &Arc<Self>, name: &ImageName) -> Option<Arc<RequiredImage>> {
        self.get(name, Purpose::Record).await.ok()
    }

    /// Returns the image `name`, whether machines must have it or not. The error says why it cannot
    /// be loaded.
    pub async fn look_up(self: &Arc<Self>, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        self.get(name, Purpose::Question).await
    }

    async fn get(
        self: &Arc<Self>,
        name: &ImageName,
        purpose: Purpose,
    ) -> Result<Arc<RequiredImage>, String> {
        if let Some(image) = self.find_loaded(name, purpose) {
            return image;
        }
        // Drivers must not wait for the questions of operators.
        let _asking = match purpose {
            Purpose::Record => Some(self.asking.lock().await),
            Purpose::Question => None,
        };
        // Another caller may have loaded it meanwhile.
        if let Some(image) = self.find_loaded(name, purpose) {
            return image;
        }
        let got = self.reader.image(&self.client, name, Duration::ZERO).await;
        let image = got.map_err(|error| error_chain(&error));
        let is_former = purpose == Purpose::Record;
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

    /// Caches an image that machines had until now.
    pub(super) fn cache_former(self: &Arc<Self>, name: &ImageName, image: &Arc<RequiredImage>) {
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
            known.insert(CachedImage { name, image, asked: self.clock.elapsed(), is_former });
            std::mem::replace(&mut known.is_swept, true)
        };
        if !is_swept {
            let (images, stop) = (Arc::clone(self), self.stop.clone());
            self.tracker.spawn(stop.run_until_cancelled_owned(images.sweep()));
        }
    }

    /// Removes idle images until only former images are left.
    async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(IDLE_MAX).await;
            let mut known = self.known();
            known.sweep(self.clock.elapsed());
            if known.entries.iter().all(|entry| entry.is_former && entry.image.is_ok()) {
                known.is_swept = false;
                return;
            }
        }
    }

    fn find_loaded(
        &self,
        name: &ImageName,
        purpose: Purpose,
    ) -> Option<Result<Arc<RequiredImage>, String>> {
        let wanted = self.watch(name).and_then(|state| match &*state.borrow() {
            ImageState::Ready(image) => Some(Arc::clone(image)),
            ImageState::Undefined | ImageState::Missing(_) => None,
        });
        if let Some(image) = wanted {
            return Some(Ok(image));
        }
        let found = self.known().find(name, self.clock.elapsed());
        found.filter(|image| image.is_ok() || purpose == Purpose::Record)
    }

    fn known(&self) -> MutexGuard<'_, ImageCache> {
        locked(&self.known)
    }

    /// Returns the triggers of the image `name` without reading its tree. The error says why they
    /// are not known.
    pub async fn triggers(&self, name: &ImageName) -> Result<Triggers, String> {
        if let Some(Ok(image)) = self.find_loaded(name, Purpose::Question) {
            return Ok(image.content.triggers.clone());
        }
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        match self.client.call_within::<GetImage>(&request, NOTES_LIMIT).await {
            Ok(image) if image.content.name == *name => Ok(image.content.triggers),
            Ok(image) => Err(format!("the image server gives {}", image.content.name)),
            Err(error) => Err(error_chain(&error)),
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

    fn entry(of: &str, asked: Duration, is_former: bool) -> CachedImage {
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
        CachedImage { name: name(of), image, asked, is_former }
    }

    #[test]
    fn few_images_are_known_and_those_that_are_of_use_stay() {
        let start = Duration::from_secs(9);
        let mut known = ImageCache::default();
        known.insert(entry("often", start, false));
        for number in 0..2 * IMAGES_MAX {
            known.insert(entry(&format!("once/{number}"), start, true));
            assert!(known.find(&name("often"), start).is_some());
        }
        assert_eq!(known.entries.len(), IMAGES_MAX);
        assert!(known.find(&name("once/0"), start).is_none());
    }

    #[test]
    fn images_that_machines_had_stay_longer_than_those_that_are_asked_about() {
        let start = Duration::from_secs(9);
        let mut known = ImageCache::default();
        known.insert(entry("former", start, true));
        known.insert(entry("asked", start, false));
        known.insert(entry("idle", start, false));
        let nobody =
            CachedImage { image: Err("is not there".to_owned()), ..entry("gone", start, true) };
        known.insert(nobody);
        // It stays one that machines had, whoever asks next.
        known.insert(entry("former", start, false));
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
