//! Images that no machine must have, and that operators ask about: got once, and kept at hand for
//! a while, because whoever asks about a fleet asks in pieces.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use common::api::image_server::{GetImage, GetImageRequest};
use common::image::ImageName;
use common::image::required::RequiredImage;
use common::report::report;
use common::trigger::Triggers;

use super::{Images, NOTES_LIMIT};
use crate::core::sub::ImageState;

/// How many such images are at hand. Each takes some ten megabytes.
const IMAGES_MAX: usize = 8;

/// How long one stays at hand that nobody asks about.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// The images at hand; the one that was asked for last comes last.
#[derive(Debug, Default)]
pub(super) struct Asked {
    images: VecDeque<(Instant, Arc<RequiredImage>)>,
    /// There is a task that lets go of those that nobody asks about.
    is_swept: bool,
}

impl Asked {
    fn find(&mut self, name: &ImageName, now: Instant) -> Option<Arc<RequiredImage>> {
        let at = self.images.iter().position(|(_, image)| image.name() == name)?;
        let (_, image) = self.images.remove(at)?;
        self.keep(Arc::clone(&image), now);
        Some(image)
    }

    fn keep(&mut self, image: Arc<RequiredImage>, now: Instant) {
        self.images.push_back((now, image));
        while self.images.len() > IMAGES_MAX {
            self.images.pop_front();
        }
    }

    /// Lets go of those that nobody has asked about since `then`.
    fn forget(&mut self, then: Instant) {
        self.images.retain(|(asked, _)| *asked > then);
    }
}

impl Images {
    /// The image called `name`, whether machines must have it or not. Nothing is written anywhere.
    ///
    /// # Errors
    ///
    /// Why it is not at hand, in words.
    pub async fn look_up(self: &Arc<Self>, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        if let Some(image) = self.at_hand(name) {
            return Ok(image);
        }
        let got = self.reader.image(&self.client, name, Duration::ZERO).await;
        let image = got.map_err(|error| report(&error))?;
        let is_swept = {
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            asked.keep(Arc::clone(&image), Instant::now());
            std::mem::replace(&mut asked.is_swept, true)
        };
        if !is_swept {
            let (images, stop) = (Arc::clone(self), self.stop.clone());
            self.tracker.spawn(stop.run_until_cancelled_owned(images.sweep()));
        }
        Ok(image)
    }

    /// Lets go of images that nobody asks about, until none is left.
    async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(IDLE_MAX).await;
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(then) = Instant::now().checked_sub(IDLE_MAX) {
                asked.forget(then);
            }
            if asked.images.is_empty() {
                asked.is_swept = false;
                return;
            }
        }
    }

    fn at_hand(&self, name: &ImageName) -> Option<Arc<RequiredImage>> {
        let wanted = self.watch(name).and_then(|state| match &*state.borrow() {
            ImageState::Ready(image) => Some(Arc::clone(image)),
            ImageState::Undefined | ImageState::Missing(_) => None,
        });
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.or_else(|| asked.find(name, Instant::now()))
    }

    /// The triggers of the image called `name`; its tree is not read for that.
    ///
    /// # Errors
    ///
    /// Why they are not known, in words.
    pub async fn triggers(&self, name: &ImageName) -> Result<Triggers, String> {
        if let Some(image) = self.at_hand(name) {
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
    use common::filter::Filter;
    use common::image::{Content, FORMAT};
    use common::object::Algorithm;
    use common::tree::text::from_text;

    fn image(name: &str) -> Arc<RequiredImage> {
        let tree = from_text(Algorithm::Blake3, "").unwrap();
        let content = Content {
            format: FORMAT,
            name: ImageName::new(name).unwrap(),
            root: tree.digest(),
            filter: Some(Filter::new::<&str>([]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
        };
        Arc::new(RequiredImage::new(content, tree))
    }

    #[test]
    fn few_images_are_at_hand_and_none_for_long() {
        let start = Instant::now();
        let mut asked = Asked::default();
        let name = |name: &str| ImageName::new(name).unwrap();
        asked.keep(image("often"), start);
        for number in 0..2 * IMAGES_MAX {
            asked.keep(image(&format!("once/{number}")), start);
            assert!(asked.find(&name("often"), start + IDLE_MAX).is_some());
        }
        assert_eq!(asked.images.len(), IMAGES_MAX);
        assert!(asked.find(&name("once/0"), start).is_none());
        asked.forget(start);
        assert_eq!(asked.images.len(), 1);
        assert!(asked.find(&name("often"), start).is_some());
    }
}
