//! Images that no machine must have: former images of machines, with which their trees are compared
//! at the next update, and images that operators ask about. Each is loaded once and cached, because
//! a question about one machine is usually asked about others too. An image that nobody needed
//! lately is forgotten, and loaded again when it is needed.

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use api::image_server::{GetImage, GetImageRequest};
use model::display::error_chain;
use model::image::composition::nothing;
use model::image::required::RequiredImage;
use model::image::{Content, ImageName};
use model::lock::locked;
use model::trigger::Triggers;
use rpc::trees::GetImageError;

use super::{Images, NOTES_LIMIT};
use crate::core::sub::ImageState;
use crate::runtime::unused::UNUSED_MAX;

/// The most images in the cache. Each takes some ten megabytes.
const IMAGES_MAX: usize = 8;

/// How long a failure to load a former image stays.
const FORGOTTEN: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct CachedImage {
    name: ImageName,
    /// The image, or why it cannot be loaded.
    image: Result<Arc<RequiredImage>, LoadError>,
    /// When it was last asked for, or when loading failed.
    asked: Duration,
}

impl CachedImage {
    fn is_over(&self, now: Duration) -> bool {
        let since = now.saturating_sub(self.asked);
        match self.image {
            Ok(_) => since >= UNUSED_MAX,
            Err(_) => since >= FORGOTTEN,
        }
    }
}

/// The cached images; the one that was used last comes last.
#[derive(Debug, Default)]
pub(super) struct ImageCache {
    entries: VecDeque<CachedImage>,
}

impl ImageCache {
    fn find(
        &mut self,
        name: &ImageName,
        now: Duration,
    ) -> Option<Result<Arc<RequiredImage>, LoadError>> {
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
        self.entries.retain(|entry| entry.name != new.name);
        self.entries.push_back(new);
        if self.entries.len() > IMAGES_MAX {
            self.entries.pop_front();
        }
    }

    fn sweep(&mut self, now: Duration) {
        self.entries.retain(|entry| !entry.is_over(now));
    }
}

/// Why an image cannot be loaded.
#[derive(Clone, Debug)]
pub(super) struct LoadError {
    pub(super) why: String,
    /// True if it never can be: it was deleted.
    pub(super) is_gone: bool,
}

impl LoadError {
    fn of(error: &GetImageError) -> Self {
        let is_gone = matches!(error, GetImageError::Gone { .. });
        Self { why: error_chain(error), is_gone }
    }

    fn passing(why: String) -> Self {
        Self { why, is_gone: false }
    }
}

/// Why an image is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A machine had it, and its update is to be recorded.
    Record,
    /// An operator asks about it: a former failure does not count.
    Question,
}

impl Images {
    /// Returns the image `name`, which a machine had before; `None` if it cannot be loaded.
    pub async fn former(&self, name: &ImageName) -> Option<Arc<RequiredImage>> {
        self.get(name, Purpose::Record).await.ok()
    }

    /// Returns the image `name`, whether machines must have it or not. The error says why it cannot
    /// be loaded.
    pub async fn look_up(&self, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        self.get(name, Purpose::Question).await.map_err(|error| error.why)
    }

    pub(super) async fn get(
        &self,
        name: &ImageName,
        purpose: Purpose,
    ) -> Result<Arc<RequiredImage>, LoadError> {
        if let Some(image) = self.find_loaded(name, purpose) {
            return image;
        }
        if name.is_composed() {
            return self.get_composed(name, purpose).await;
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
        let image = got.map_err(|error| LoadError::of(&error));
        let is_former = purpose == Purpose::Record;
        if let Err(LoadError { why, .. }) = &image
            && is_former
        {
            tracing::warn!(image = %name, "what changes because of drift is not known: {why}");
        }
        if image.is_ok() || is_former {
            self.remember(name.clone(), image.clone());
        }
        image
    }

    async fn get_composed(
        &self,
        name: &ImageName,
        purpose: Purpose,
    ) -> Result<Arc<RequiredImage>, LoadError> {
        let mut parts = Vec::new();
        for part in name.parts() {
            parts.push(Box::pin(self.get(&part, purpose)).await?);
        }
        let image = self.compose_of(parts).await.map_err(LoadError::passing)?;
        self.remember(name.clone(), Ok(Arc::clone(&image)));
        Ok(image)
    }

    /// Caches an image that machines had until now.
    pub(super) fn cache_former(&self, name: &ImageName, image: &Arc<RequiredImage>) {
        self.remember(name.clone(), Ok(Arc::clone(image)));
    }

    fn remember(&self, name: ImageName, image: Result<Arc<RequiredImage>, LoadError>) {
        self.known().insert(CachedImage { name, image, asked: self.clock.elapsed() });
    }

    /// Forgets the images and plans that nobody needed lately.
    pub fn forget_unused(&self) {
        self.known().sweep(self.clock.elapsed());
        self.plans.forget_unused(UNUSED_MAX);
    }

    fn find_loaded(
        &self,
        name: &ImageName,
        purpose: Purpose,
    ) -> Option<Result<Arc<RequiredImage>, LoadError>> {
        if name.is_nothing() {
            return Some(Ok(nothing()));
        }
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

    /// Returns the image `name` if it is loaded.
    pub(super) fn loaded(&self, name: &ImageName) -> Option<Arc<RequiredImage>> {
        self.find_loaded(name, Purpose::Question)?.ok()
    }

    fn known(&self) -> MutexGuard<'_, ImageCache> {
        locked(&self.known)
    }

    /// Returns the triggers of the image `name` without reading its tree. The error says why they
    /// are not known.
    pub async fn triggers(&self, name: &ImageName) -> Result<Triggers, String> {
        if let Some(image) = self.loaded(name) {
            return Ok(image.content.triggers.clone());
        }
        self.get_content(name).await.map(|content| content.triggers)
    }

    /// Asks the image server for the content of the image `name`, without its tree unless it is
    /// composed. The error says why it is not known.
    pub async fn get_content(&self, name: &ImageName) -> Result<Content, String> {
        if name.is_composed() || name.is_nothing() {
            return self.look_up(name).await.map(|image| image.content.clone());
        }
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        match self.client.call_within::<GetImage>(&request, NOTES_LIMIT).await {
            Ok(image) if image.content.name == *name => Ok(image.content),
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

    fn entry(of: &str, asked: Duration) -> CachedImage {
        let tree = from_text(Algorithm::Blake3, "").unwrap();
        let content = Content {
            format: FORMAT,
            name: name(of),
            root: tree.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
            signers: Vec::new(),
        };
        let image = Ok(Arc::new(RequiredImage::new(content, tree)));
        CachedImage { name: name(of), image, asked }
    }

    #[test]
    fn few_images_are_known_and_those_that_are_of_use_stay() {
        let start = Duration::from_secs(9);
        let mut known = ImageCache::default();
        known.insert(entry("often", start));
        for number in 0..2 * IMAGES_MAX {
            known.insert(entry(&format!("once/{number}"), start));
            assert!(known.find(&name("often"), start).is_some());
        }
        assert_eq!(known.entries.len(), IMAGES_MAX);
        assert!(known.find(&name("once/0"), start).is_none());
    }

    #[test]
    fn images_that_nobody_needs_are_forgotten() {
        let start = Duration::from_secs(9);
        let mut known = ImageCache::default();
        known.insert(entry("asked", start));
        known.insert(entry("idle", start));
        let nobody =
            CachedImage { image: Err(LoadError::passing(String::new())), ..entry("gone", start) };
        known.insert(nobody);
        let mut left = |after: Duration| -> Vec<String> {
            known.sweep(start + after);
            let _asked = known.find(&name("asked"), start + after);
            let mut names: Vec<String> =
                known.entries.iter().map(|entry| entry.name.to_string()).collect();
            names.sort();
            names
        };
        let second = Duration::from_secs(1);
        assert_eq!(left(UNUSED_MAX - second), ["asked", "gone", "idle"]);
        assert_eq!(left(UNUSED_MAX), ["asked", "gone"]);
        assert_eq!(left(FORGOTTEN - second), ["asked", "gone"]);
        assert_eq!(left(FORGOTTEN), ["asked"]);
        assert_eq!(left(FORGOTTEN + UNUSED_MAX), [""; 0]);
    }
}
