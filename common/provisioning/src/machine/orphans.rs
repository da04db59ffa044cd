//! Orders about orphans: resources that stay although no image of the machine has them any more.

use model::display::safe_text;

use super::{Condition, Machine, Standing, goal};
use crate::image::Definition;
use crate::plan::plan_with;

/// The longest id in a text, in bytes.
const ID_BYTES_MAX: usize = 80;

/// What is to become of an orphan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrphanOrder {
    /// Nothing is known of it any more. It stays as it is.
    Forget,
    /// Its plugin destroys it.
    Destroy,
}

/// Why an order about an orphan is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrphanError {
    #[error("the machine has no resource `{}`", safe_text(.id, ID_BYTES_MAX))]
    Unknown { id: String },
    #[error("`{id}` is no orphan: an image of the machine has it")]
    Asked { id: String },
    #[error("`{id}` is no orphan: it is to be destroyed already")]
    Leaving { id: String },
    #[error("`{id}` is no orphan: it is of the fleet, and its dominator has to say when it may go")]
    Fleet { id: String },
    #[error("its plugin works on `{id}`: try again when that has ended")]
    Working { id: String },
    #[error("`{id}` cannot be destroyed: {why}; forget or destroy that first")]
    Needed { id: String, why: String },
}

impl Machine {
    /// Carries out an order about an orphan. What is to be destroyed is removed as what an image
    /// says `destroy` of: [`Machine::next`]. What cannot be removed may be forgotten too.
    ///
    /// # Errors
    ///
    /// [`OrphanError`]: nothing is changed.
    pub fn order_orphan(&mut self, id: &str, order: OrphanOrder) -> Result<(), OrphanError> {
        let id = id.to_owned();
        let standing = self.standings().into_iter().find(|one| one.id == id);
        let Some(Standing { condition, is_orphan, .. }) = standing else {
            return Err(OrphanError::Unknown { id });
        };
        let is_in = |of: &Definition| of.read().is_ok_and(|(all, _)| all.get(&id).is_some());
        let is_to_come = self.open_target().is_some_and(|target| is_in(&target.definition));
        if is_to_come || is_in(&self.active) {
            return Err(OrphanError::Asked { id });
        }
        let rights = self.rights();
        if !is_orphan && self.fleet_record(&id).is_some() && !rights.removes.contains(&id) {
            return Err(OrphanError::Fleet { id });
        }
        let Some(state) = &mut self.state else { return Err(OrphanError::Unknown { id }) };
        match order {
            OrphanOrder::Forget if !is_orphan && condition != Condition::Failed => {
                Err(OrphanError::Leaving { id })
            }
            OrphanOrder::Forget => match state.forget(&id) {
                true => Ok(()),
                false => Err(OrphanError::Working { id }),
            },
            OrphanOrder::Destroy if !is_orphan => Err(OrphanError::Leaving { id }),
            OrphanOrder::Destroy => {
                let mut changed = state.clone();
                changed.destroy_orphan(&id);
                let after = goal(&self.active, &changed, plan_with, Some(&rights));
                let stays = after.and_then(|after| {
                    after.plan.orphans.into_iter().find(|orphan| orphan.id == id)
                });
                if let Some(orphan) = stays {
                    return Err(OrphanError::Needed { id, why: orphan.reason });
                }
                *state = changed;
                Ok(())
            }
        }
    }
}
