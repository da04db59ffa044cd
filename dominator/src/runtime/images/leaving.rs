//! Images together with the bundles that leave with the update to them.

use std::sync::{Arc, Weak};

use model::image::ImageName;
use model::image::composition::{compose, nothing};
use model::image::required::RequiredImage;
use model::lock::locked;

use super::Images;
use super::cache::{LoadError, Purpose};

/// An image together with the bundles that leave, as long as a machine needs it.
#[derive(Debug)]
pub(super) struct LeavingImage {
    required: Weak<RequiredImage>,
    former: ImageName,
    image: Weak<RequiredImage>,
}

impl Images {
    /// Returns `required` together with those bundles of `former` that leave with the update to it.
    /// Those that were deleted are left out: their files stay. The error says why they are not
    /// known now.
    pub async fn with_leaving(
        &self,
        required: &Arc<RequiredImage>,
        former: &ImageName,
    ) -> Result<Arc<RequiredImage>, String> {
        let find = |known: &LeavingImage| {
            let is_it = known.required.as_ptr() == Arc::as_ptr(required) && known.former == *former;
            is_it.then(|| known.image.upgrade()).flatten()
        };
        // Machines that lose the same bundles share what is made first.
        let _making = self.making_leaving.lock().await;
        if let Some(known) = locked(&self.leaving).iter().find_map(find) {
            return Ok(known);
        }
        let mut parts = Vec::new();
        for (index, part) in former.parts().enumerate() {
            match self.get(&part, Purpose::Record).await {
                Ok(image) => parts.push(image),
                Err(LoadError { is_gone: true, .. }) if index == 0 => parts.push(nothing()),
                Err(LoadError { is_gone: true, why }) => {
                    tracing::warn!("files of {part} stay where it leaves: {why}");
                }
                Err(LoadError { why, .. }) => return Err(why),
            }
        }
        let own = Arc::clone(required);
        let image = self.reader.compute(move || {
            let former = compose(parts).map_err(|error| error.to_string())?;
            own.after(&former).map_err(|error| error.to_string())
        });
        let image = image.await.map_err(|error| error.to_string())??;
        let image = Arc::new(image);
        let mut all = locked(&self.leaving);
        all.retain(|known| known.image.strong_count() > 0);
        all.push(LeavingImage {
            required: Arc::downgrade(required),
            former: former.clone(),
            image: Arc::downgrade(&image),
        });
        Ok(image)
    }
}
