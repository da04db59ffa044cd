//! The machines that have one machine id, and who of them shows that another is a copy.
// tidy: core

use std::collections::BTreeSet;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;

/// How much it means that a machine has a machine id. The order matters: the first is the best
/// witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// It was last known by it.
    Owner,
    /// It is called as its record.
    Called,
    /// It has it.
    Other,
    /// It may have it from its image: no witness against others.
    Bystander,
}

/// A machine that has a machine id, or was known by it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holder {
    pub(super) rank: Rank,
    /// The boot id; `None` if it has not been seen with this machine id.
    pub(super) boot: Option<String>,
    pub(super) name: Arc<str>,
}

/// The best witness, and the best that was booted apart from it: for every machine one of them was
/// booted apart from it, if any holder was.
pub(super) fn witnesses(holders: &BTreeSet<Holder>) -> [Option<Holder>; 2] {
    let is_witness = |holder: &&Holder| holder.rank != Rank::Bystander;
    let Some(first) = holders.first().filter(is_witness) else { return [None, None] };
    let mut second = None;
    for rank in [Rank::Owner, Rank::Called, Rank::Other] {
        // Holders of a rank are sorted by boot id: this skips those of the one.
        let start = Holder { rank, boot: None, name: "".into() };
        let next = holders.range((Excluded(start), Unbounded)).next();
        let Some(mut found) = next.filter(|next| next.rank == rank) else { continue };
        if found.boot == first.boot {
            let last = Holder { name: "\u{10ffff}".into(), ..found.clone() };
            match holders.range((Excluded(last), Unbounded)).next() {
                Some(next) if next.rank == rank => found = next,
                _ => continue,
            }
        }
        second = Some(found.clone());
        break;
    }
    [Some(first.clone()), second]
}
