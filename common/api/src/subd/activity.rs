//! What a sub is doing: how it is told, and what that is made of.
//!
//! A fetch and an update may be under way at the same time, and a reply to a poll tells of one of
//! them. Which, is decided here, for subd and for those who imitate it in tests.

use serde::{Deserialize, Serialize};

/// What a sub is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Nothing but scanning.
    Idle,
    /// Getting objects.
    Fetching {
        /// Which fetch.
        #[serde(with = "model::wide")]
        fetch_id: u64,
        /// Objects it has got so far.
        #[serde(with = "model::wide")]
        objects: u64,
        /// Bytes it has got so far.
        #[serde(with = "model::wide")]
        bytes: u64,
    },
    /// Staging an update.
    Preparing {
        /// Which update.
        #[serde(with = "model::wide")]
        update_id: u64,
    },
    /// An update is staged and waits for its Commit.
    Prepared {
        /// Which update.
        #[serde(with = "model::wide")]
        update_id: u64,
    },
    /// Changing the tree, or running triggers.
    Updating {
        /// Which update.
        #[serde(with = "model::wide")]
        update_id: u64,
    },
}

/// What the update machinery is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpdatePhase {
    /// Nothing.
    #[default]
    Idle,
    /// Staging.
    Preparing(u64),
    /// Staged.
    Prepared(u64),
    /// Changing the tree or driving services.
    Updating(u64),
}

/// A fetch that is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchProgress {
    /// Which fetch.
    pub fetch_id: u64,
    /// Nobody waits for it: one that is needed ends it.
    pub ahead: bool,
    /// Objects it has got so far.
    pub objects: u64,
    /// Bytes it has got so far.
    pub bytes: u64,
}

impl Activity {
    /// What is told of a sub whose update is at `update`, while `fetch` runs.
    #[must_use]
    pub fn of(update: UpdatePhase, fetch: Option<FetchProgress>) -> Self {
        match (update, fetch) {
            (UpdatePhase::Preparing(update_id), _) => Self::Preparing { update_id },
            (UpdatePhase::Updating(update_id), _) => Self::Updating { update_id },
            // Whoever waits for a staged update must not wait for what nobody needs.
            (UpdatePhase::Prepared(update_id), None | Some(FetchProgress { ahead: true, .. })) => {
                Self::Prepared { update_id }
            }
            (_, Some(FetchProgress { fetch_id, objects, bytes, .. })) => {
                Self::Fetching { fetch_id, objects, bytes }
            }
            (UpdatePhase::Idle, None) => Self::Idle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_told_of_all_that_is_under_way() {
        let fetch = |ahead| Some(FetchProgress { fetch_id: 1, ahead, objects: 2, bytes: 3 });
        let (needed, ahead) = (fetch(false), fetch(true));
        let fetching = Activity::Fetching { fetch_id: 1, objects: 2, bytes: 3 };
        let (preparing, prepared, updating) = (
            Activity::Preparing { update_id: 9 },
            Activity::Prepared { update_id: 9 },
            Activity::Updating { update_id: 9 },
        );
        let table = [
            // update                    no fetch    needed     ahead of need
            (UpdatePhase::Idle, [&Activity::Idle, &fetching, &fetching]),
            (UpdatePhase::Preparing(9), [&preparing, &preparing, &preparing]),
            (UpdatePhase::Prepared(9), [&prepared, &fetching, &prepared]),
            (UpdatePhase::Updating(9), [&updating, &updating, &updating]),
        ];
        for (update, expected) in table {
            let told = [None, needed, ahead].map(|fetch| Activity::of(update, fetch));
            assert_eq!(told.each_ref(), expected, "{update:?}");
        }
    }
}
