//! What operators ordered about machines: pauses, and the default image.

use api::dominator::orders::DefaultImage;

use super::{State, StateError};
use crate::core::order::Order;
use crate::core::pauses::KeptPause;

const PAUSES: &str = "pauses";
const DEFAULT_IMAGE: &str = "default-image";

impl State {
    /// The pauses that operators ordered.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn pauses(&self) -> Result<Vec<KeptPause>, StateError> {
        Ok(self.get(PAUSES)?.unwrap_or_default())
    }

    /// Keeps the pauses of all machines, with the order that changed them if one did; they are on
    /// the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is changed then.
    pub fn set_pauses(
        &self,
        pauses: &[KeptPause],
        order: Option<&Order>,
    ) -> Result<(), StateError> {
        self.set(PAUSES, Some(&pauses).filter(|pauses| !pauses.is_empty()), order)
    }

    /// The image of machines whose record names none.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn default_image(&self) -> Result<Option<DefaultImage>, StateError> {
        self.get(DEFAULT_IMAGE)
    }

    /// Keeps the image of machines whose record names none; it is on the disk when this returns.
    ///
    /// # Errors
    ///
    /// [`StateError`]; nothing is changed then.
    pub fn set_default_image(
        &self,
        image: Option<&DefaultImage>,
        order: &Order,
    ) -> Result<(), StateError> {
        self.set_ordered(DEFAULT_IMAGE, image, order)
    }
}
