//! The audit log: which changes were requested, by whom, when and why, and how each ended.
//!
//! A log consists of files of JSON lines. Each line is a [`record::AuditRecord`] and carries the
//! hash of the line before it, across files too. So whoever changes, removes, adds or moves a line
//! must rewrite all later ones. [`verify`] finds where a chain is broken. [`quota`] limits how many
//! refused calls are recorded. `rpc::audit_log` writes the log.
//!
//! # Invariants
//!
//! * A record is on the medium before its change is made, and the outcome is recorded before the
//!   caller is answered.
//! * No text of a caller is longer than its limit, and none holds a control character.
//! * Only [`call_details::CallDetails`], which each method fills, holds arguments. It holds no
//!   content of files and no secret.

pub mod call_details;
pub mod quota;
pub mod record;
pub mod verify;

#[cfg(test)]
mod tests;
