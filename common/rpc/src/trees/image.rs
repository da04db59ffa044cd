//! Gets one image, with its tree, from an image server, and verifies that they belong together.

use std::sync::Arc;
use std::time::Duration;

use super::{ReadError, Reader};
use crate::client::{CallError, Client};
use api::fault::FaultCode;
use api::image_server::{GetImage, GetImageRequest};
use model::image::required::RequiredImage;
use model::image::{ImageError, ImageName};

/// How much longer than it was asked to wait the image server may take to answer.
const SLACK: Duration = Duration::from_secs(15);

/// An image that is not at hand.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetImageError {
    /// It may come.
    #[error("the image server has no image {name} yet")]
    NotThere {
        /// Which.
        name: ImageName,
    },
    /// It will never come.
    #[error("the image {name} was deleted: its name is never used again")]
    Gone {
        /// Which.
        name: ImageName,
    },
    /// The call failed.
    #[error("the image server does not give {name}")]
    Call {
        /// Which image.
        name: ImageName,
        /// Why.
        #[source]
        source: CallError,
    },
    /// The image server lies.
    #[error("the image server gives {got} for {want}")]
    OtherName {
        /// What was asked for.
        want: ImageName,
        /// What came.
        got: ImageName,
    },
    /// The tree cannot be read.
    #[error("the tree of {name} cannot be read")]
    Tree {
        /// Of which image.
        name: ImageName,
        /// Why.
        #[source]
        source: ReadError,
    },
    /// No machine could ever equal it, or this release cannot serve it.
    #[error("{name} cannot be used")]
    Image {
        /// Which.
        name: ImageName,
        /// Why.
        #[source]
        source: ImageError,
    },
}

impl Reader {
    /// Gets the image called `name` with its tree; an image that is not there is waited for by
    /// the server, for `wait`.
    ///
    /// # Errors
    ///
    /// [`GetImageError`].
    pub async fn image(
        self: &Arc<Self>,
        client: &Client,
        name: &ImageName,
        wait: Duration,
    ) -> Result<Arc<RequiredImage>, GetImageError> {
        let name = name.clone();
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let request = GetImageRequest { name: name.clone(), wait_ms };
        let image = match client.call_within::<GetImage>(&request, wait + SLACK).await {
            Ok(image) => image,
            Err(error) => {
                return Err(match error.code() {
                    Some(FaultCode::NotFound) => GetImageError::NotThere { name },
                    Some(FaultCode::Gone) => GetImageError::Gone { name },
                    _ => GetImageError::Call { name, source: error },
                });
            }
        };
        let (content, signatures) = (image.content, image.notes.signatures);
        if content.name != name {
            return Err(GetImageError::OtherName { want: name, got: content.name });
        }
        let tree = self.from_image_server(client, content.root).await;
        let tree = tree.map_err(|source| GetImageError::Tree { name: name.clone(), source })?;
        let verified = self.compute(move || {
            content.verify(&tree)?;
            Ok(Arc::new(RequiredImage::new(content, tree).with_signatures(signatures)))
        });
        match verified.await {
            Ok(Ok(image)) => Ok(image),
            Ok(Err(source)) => Err(GetImageError::Image { name, source }),
            Err(source) => Err(GetImageError::Tree { name, source }),
        }
    }
}
