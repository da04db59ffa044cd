//! Daemon tasks: the [`file`](mod@file) that states a task, the [`schedule`] that says when it
//! runs, and what is to be done about its runs.
//!
//! * [`cron`]: expressions, and the moments that they name.
//! * [`zone`]: time zones by name.
//! * [`runs`]: the runs of a task as they are observed.
//! * [`mod@decide`]: which runs are to be made, deleted and released.
//! * [`mod@condition`]: whether the task runs, and whether that is expected.
//! * [`image`]: the tasks of an image, and which of them stop before an update.
//! * [`planned`]: what a plan tells of that before the task files are read.
//! * [`supervise`]: what a machine does next about a task, from its records and what is observed.
//!
//! Everything here is a function of its arguments: it is told the time and the zones.
//!
//! # Invariants
//!
//! * A decision depends on what is observed now and on nothing that happened before.
//! * A run is made held, unless no other can be live. Only the last that can be live is released.
//! * Carried out and asked again at the same moment, [`decide()`] has nothing more to do.

pub mod condition;
pub mod cron;
pub mod decide;
pub mod file;
pub mod image;
pub mod planned;
pub mod runs;
pub mod schedule;
pub mod supervise;
pub mod zone;

pub use condition::{Condition, condition};
pub use decide::{Decision, decide};
pub use file::{Task, Template};
pub use runs::{Observed, Run, RunState};
pub use schedule::{Moment, Occurrence};
