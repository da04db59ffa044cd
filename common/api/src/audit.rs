//! The audit log: which changes were asked for, by whom, when, why, and what became of them.
//!
//! A log is lines of JSON in files that follow each other. Each line is a [`record::Record`] and
//! carries the hash of the line before it, over files too, so that whoever changes, removes, adds
//! or moves a line has to write all later ones anew. [`verify`] finds where a chain is broken.
//! [`quota`] keeps callers who are refused from filling it. `rpc::audit_log` writes it.
//!
//! # Invariants
//!
//! * A record is on the medium before what it tells of is done, and what became of that is
//!   recorded before the caller is answered.
//! * No text of a caller is longer than its limit, and none holds a control character.
//! * Arguments are written by [`brief::Brief`] alone, which each method fills: no content of files
//!   and no secret is among them.

pub mod brief;
pub mod quota;
pub mod record;
pub mod verify;

#[cfg(test)]
mod tests;
