//! What operators script against, pinned: flags, words, JSON, metrics and exit codes.
//!
//! A change of one of the snapshots breaks scripts, dashboards or alerts of operators. What is
//! added is no harm; what goes or gets another name needs a note in CHANGELOG.md. Texts for people
//! are not pinned. `UPDATE_EXPECT=1 cargo test -p localfleet --test it contracts` writes the
//! snapshots.

mod exits;
mod flags;
mod shape;
pub mod site;
mod whole;
mod words;
