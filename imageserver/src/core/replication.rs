//! What a replica does about the changes of its master.
// tidy: core

pub mod change_log;
pub mod decision;
pub mod directories;
pub mod patterns;
pub mod queue;
pub mod replicas;
pub mod sync_cursor;
