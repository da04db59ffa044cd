//! Composes images of those that the image server has.

use std::sync::Arc;

use futures_util::future::select_all;
use model::backoff::jittered;
use model::display::error_chain;
use model::image::ImageName;
use model::image::composition::compose;
use model::image::required::RequiredImage;
use model::lock::locked;
use tokio::sync::watch;

use super::{Images, NOTES_INTERVAL, WantedImage};
use crate::core::sub::ImageState;
use crate::runtime::clock::jitter;

impl Images {
    /// Composes a wanted image, and again whenever a part changes. Returns when a part is not
    /// wanted any more.
    pub(super) async fn follow_composed(&self, name: &ImageName, wanted: &WantedImage) {
        let parts: Option<Vec<watch::Receiver<ImageState>>> =
            name.parts().map(|part| self.watch(&part)).collect();
        let Some(mut parts) = parts else { return };
        loop {
            let states = parts.iter_mut().map(|part| part.borrow_and_update().clone()).collect();
            let state = self.compose_ready(name, states).await;
            let remark = state.ready().map(|image| {
                let left_out = image.left_out.iter().map(ToString::to_string);
                left_out.collect::<Vec<_>>().join("; ")
            });
            *locked(&wanted.remark) = remark.filter(|remark| !remark.is_empty());
            let is_same =
                |old: &ImageState| old.digest() == state.digest() && old.is_signed_as(&state);
            if state.digest().is_none() || !is_same(&wanted.state.borrow()) {
                match &state {
                    ImageState::Ready(image) => {
                        tracing::info!(image = %name, digest = %image.digest, "image composed");
                    }
                    ImageState::Missing(why) => {
                        tracing::info!(image = %name, "image not composed: {why}");
                    }
                    ImageState::Undefined => {}
                }
                *locked(&wanted.fleet_resources) = None;
                wanted.state.send_replace(state);
            }
            self.read_fleet_resources(wanted).await;
            let has_all = locked(&wanted.fleet_resources).is_some();
            let changes = parts.iter_mut().map(|part| Box::pin(part.changed()));
            let is_wanted = tokio::select! {
                (changed, ..) = select_all(changes) => changed.is_ok(),
                () = tokio::time::sleep(jittered(NOTES_INTERVAL, jitter())), if !has_all => true,
            };
            if !is_wanted {
                return;
            }
        }
    }

    /// Composes an image of parts that are loaded for it. The error says why one cannot be loaded.
    pub(super) async fn compose_of(
        &self,
        parts: Vec<Arc<RequiredImage>>,
    ) -> Result<Arc<RequiredImage>, String> {
        let composed = self.reader.compute(move || compose(parts)).await;
        let composed = composed.map_err(|error| error_chain(&error))?;
        composed.map(Arc::new).map_err(|error| error.to_string())
    }

    /// Composes an image of parts that are in these states.
    async fn compose_ready(&self, name: &ImageName, states: Vec<ImageState>) -> ImageState {
        let missing = states.iter().find(|state| state.ready().is_none());
        match missing {
            Some(ImageState::Missing(why)) => ImageState::Missing(Arc::clone(why)),
            Some(_) => ImageState::Missing(format!("a part of {name} is not loaded yet").into()),
            None => {
                let parts = states.iter().filter_map(ImageState::ready).cloned().collect();
                match self.compose_of(parts).await {
                    Ok(image) => ImageState::Ready(image),
                    Err(why) => ImageState::Missing(why.into()),
                }
            }
        }
    }
}
