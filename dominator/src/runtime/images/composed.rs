//! Composes images of those that the image server has.

use std::sync::Arc;

use futures_util::future::select_all;
use model::image::ImageName;
use model::image::composition::compose;
use model::image::required::RequiredImage;
use model::lock::locked;
use tokio::sync::watch;

use super::{Images, WantedImage};
use crate::core::sub::ImageState;

impl Images {
    /// Composes a wanted image, and again whenever a part changes. Returns when a part is not
    /// wanted any more.
    pub(super) async fn follow_composed(&self, name: &ImageName, wanted: &WantedImage) {
        let parts: Option<Vec<watch::Receiver<ImageState>>> =
            name.parts().map(|part| self.watch(&part)).collect();
        let Some(mut parts) = parts else { return };
        loop {
            let states = parts.iter_mut().map(|part| part.borrow_and_update().clone()).collect();
            let state = compose_ready(name, states).await;
            let remark = state.ready().map(|image| {
                let left_out = image.left_out.iter().map(ToString::to_string);
                left_out.collect::<Vec<_>>().join("; ")
            });
            *locked(&wanted.remark) = remark.filter(|remark| !remark.is_empty());
            let is_same =
                |old: &ImageState| old.digest() == state.digest() && old.is_signed_as(&state);
            if state.digest().is_none() || !is_same(&wanted.state.borrow()) {
                tracing::info!(image = %name, digest = ?state.digest(), "image composed");
                *locked(&wanted.fleet_resources) = None;
                wanted.state.send_replace(state);
            }
            self.read_fleet_resources(wanted).await;
            let changes = parts.iter_mut().map(|part| Box::pin(part.changed()));
            if select_all(changes).await.0.is_err() {
                return;
            }
        }
    }

    /// Composes an image of parts that are loaded for it. The error says why one cannot be loaded.
    pub(super) async fn compose_of(
        parts: Vec<Arc<RequiredImage>>,
    ) -> Result<Arc<RequiredImage>, String> {
        let composed = tokio::task::spawn_blocking(move || compose(parts)).await;
        let composed = composed.map_err(|error| error.to_string())?;
        composed.map(Arc::new).map_err(|error| error.to_string())
    }
}

/// Composes an image of parts that are in these states.
async fn compose_ready(name: &ImageName, states: Vec<ImageState>) -> ImageState {
    let missing = states.iter().find(|state| state.ready().is_none());
    match missing {
        Some(ImageState::Missing(why)) => ImageState::Missing(Arc::clone(why)),
        Some(_) => ImageState::Missing(format!("a part of {name} is not loaded yet").into()),
        None => {
            let parts = states.iter().filter_map(ImageState::ready).cloned().collect();
            match Images::compose_of(parts).await {
                Ok(image) => ImageState::Ready(image),
                Err(why) => ImageState::Missing(why.into()),
            }
        }
    }
}
