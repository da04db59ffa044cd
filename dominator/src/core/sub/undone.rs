//! Images whose health check failed: the machine was put back to its former image. It is kept at
//! that, its drift repaired, until another image is required or an operator orders a retry.
// tidy: core

use api::subd::UpdateOutcome;
use model::image::ImageName;

use super::{Sub, View};

/// An update that was undone because the health check of its image failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndoneUpdate {
    pub update_id: u64,
    pub image: ImageName,
    /// The end of what the health check said.
    pub why: String,
}

/// What is known of updates that were undone.
#[derive(Debug, Default)]
pub(super) struct UndoneUpdates {
    /// The last one to the required image, or before that was known. A machine that was repaired
    /// since reports it no more.
    last: Option<UndoneUpdate>,
    /// The one for which an operator has ordered a retry.
    retried: Option<u64>,
}

impl Sub {
    /// Remembers an update that was undone before the dominator was restarted.
    pub fn remember_undone(&mut self, undone: UndoneUpdate) {
        self.undone.last = Some(undone);
    }

    /// Takes what the machine says of its last update. It must be the right machine.
    pub(super) fn note_undone(&mut self, view: &View) {
        let Some(last) = &view.report.last_update else { return };
        let required = match self.image.ready() {
            Some(image) => Some(image.name().clone()),
            None => self.required(),
        };
        let known = self.undone.last.as_ref().map(|undone| &undone.image);
        let is_of_other_image = known.is_some_and(|known| *known != last.image);
        // A repair of the image at which it is kept says nothing of the required one.
        if is_of_other_image && known == required.as_ref() {
            return;
        }
        self.undone.last = match &last.outcome {
            UpdateOutcome::Undone(why) => Some(UndoneUpdate {
                update_id: last.update_id,
                image: last.image.clone(),
                why: why.clone(),
            }),
            UpdateOutcome::Done => None,
            UpdateOutcome::NotPrepared(_)
            | UpdateOutcome::RolledBack(_)
            | UpdateOutcome::Stuck(_) => return,
        };
    }

    /// Returns the update to `image` that failed its health check, unless it is to be retried.
    #[must_use]
    pub fn undone(&self, image: &ImageName) -> Option<&UndoneUpdate> {
        let is_to_be_kept = |undone: &&UndoneUpdate| {
            undone.image == *image && self.undone.retried != Some(undone.update_id)
        };
        self.undone.last.as_ref().filter(is_to_be_kept)
    }

    /// True if the required image failed its health check, and is not to be retried.
    pub(super) fn is_undone(&self) -> bool {
        self.image.ready().is_some_and(|image| self.undone(image.name()).is_some())
    }

    /// Has the required image tried once more.
    pub(super) fn retry_undone(&mut self) {
        if self.is_undone() {
            self.undone.retried = self.undone.last.as_ref().map(|undone| undone.update_id);
        }
    }
}
