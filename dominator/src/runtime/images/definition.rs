//! Reads what images ask for of provisioning.

use std::collections::{BTreeMap, BTreeSet};

use model::display::error_chain;
use model::image::required::RequiredImage;
use provisioning::image::{Definition, ImageError, has_bindings, texts, unchecked_definition};

use model::lock::locked;

use super::{Images, WantedImage};
use crate::core::sub::ImageState;

impl Images {
    /// Reads the resources of the fleet of a wanted image that is loaded, unless they are known.
    pub(super) async fn read_fleet_resources(&self, wanted: &WantedImage) {
        let ImageState::Ready(image) = wanted.state.borrow().clone() else { return };
        if locked(&wanted.fleet_resources).is_some() {
            return;
        }
        // A bundle without bindings provisions nothing by itself.
        if image.content.is_sparse() && !has_bindings(&image.tree) {
            *locked(&wanted.fleet_resources) = Some(BTreeSet::new());
            return;
        }
        match self.definition(&image).await {
            Ok(definition) => *locked(&wanted.fleet_resources) = Some(definition.of_fleet()),
            Err(error) => {
                tracing::warn!(image = %image.name(), "its resources cannot be read: {error}");
            }
        }
    }

    /// Returns what `image` asks for. The error says why it cannot be read.
    pub async fn definition(&self, image: &RequiredImage) -> Result<Definition, String> {
        let (triggers, tree) = (&image.content.triggers, &image.tree);
        let chain = |error: ImageError| error_chain(&error);
        let mut contents = BTreeMap::new();
        for file in texts(triggers, tree).map_err(chain)? {
            contents.insert(file.object, self.object(file.object, file.bytes_max()).await?);
        }
        let definition = unchecked_definition(triggers, tree, |file| {
            Ok(contents.get(&file.object).cloned().unwrap_or_default())
        });
        definition.map(Option::unwrap_or_default).map_err(chain)
    }
}
