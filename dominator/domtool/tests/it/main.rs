//! `domtool` as a process, without a dominator.

#![expect(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod certificates;
mod methods;
mod rollouts;
mod tasks;
