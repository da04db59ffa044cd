//! Carries out what operators order about stopped images.

use model::image::ImageName;

use super::{Fleet, OrderError};
use crate::core::order::Order;

impl Fleet {
    /// Lets updates to an image go on that have stopped. Must not be called by a task: it waits for
    /// the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the image stays stopped then.
    pub fn resume_image(&self, image: &ImageName, why: &str, who: &str) -> Result<(), OrderError> {
        let order = Order::of("resume-image", who).about(image).why(why);
        let order = order.reasoned("updates to the image are to go on")?;
        let resumed = self.shared.claim_service.resume(image, &self.state, &order);
        if !resumed.map_err(|source| OrderError::State { source })? {
            return Err(OrderError::NotStopped { image: image.clone() });
        }
        tracing::warn!(who, why, %image, "updates to it go on");
        Ok(())
    }
}
