//! What is put on record of a machine: which update is ordered, and how it ended.
// tidy: core

use core::mem::{Discriminant, discriminant};
use std::sync::Arc;

use api::subd::Outcome;
use model::tree::Tree;

use super::{Effect, Sub, View};
use crate::core::changes::Ordered;
use api::planning::Planned;
use model::image::required::RequiredImage;

/// The update that was ordered last, of which the end is to be told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    id: u64,
    /// What was told of it.
    told: Option<Discriminant<Outcome>>,
}

impl Sub {
    /// Remembers that this update was ordered before the dominator was restarted: how it ended is
    /// still to be told.
    pub fn recall(&mut self, update_id: u64) {
        self.awaited = Some(Awaited { id: update_id, told: None });
    }

    /// The Commit of this update is over, and may have been carried out: how it ends is to be told.
    pub(super) fn await_end(&mut self, update_id: u64) {
        if self.awaited.is_none_or(|awaited| awaited.id != update_id) {
            self.recall(update_id);
        }
    }

    /// What is put on record of an update that is about to be ordered.
    pub(super) fn ordered(
        &self,
        update_id: u64,
        view: &View,
        image: &Arc<RequiredImage>,
        planned: &Arc<Planned>,
    ) -> Ordered {
        // There is a plan, so its tree was read; without it all would count as new.
        let tree = self.tree.clone().unwrap_or_else(|| Tree::empty(image.tree.algorithm()));
        Ordered {
            update_id,
            former: view.report.last_image.clone(),
            image: Arc::clone(image),
            tree,
            planned: Arc::clone(planned),
        }
    }

    /// Tells how the update ended that was ordered last, when the sub says so.
    pub(super) fn tell_end(&mut self, effects: &mut Vec<Effect>) {
        let (Some(awaited), Some(view)) = (&mut self.awaited, &self.view) else { return };
        let Some(last) = view.outcome_of(awaited.id) else { return };
        let outcome = discriminant(&last.outcome);
        if awaited.told != Some(outcome) {
            awaited.told = Some(outcome);
            effects.push(Effect::UpdateEnded(awaited.id, last.outcome.clone()));
        }
    }
}
