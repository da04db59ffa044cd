//! Rollouts of environments: an environment names machines and what they shall have, a rollout
//! brings environments to their desired revisions, step by step.
//!
//! * [`document`]: what is known: environments, groups, the rollout, machines, and what happens.
//! * [`dependencies`]: which environments come after which, and which ones a rollout takes.
//! * [`approval`]: who has approved or rejected a step.
//! * [`batch`]: which machines a step may change now.
//! * [`machine_tasks`]: what is to be started and stopped on each machine.
//! * [`lock`]: which environments a rollout locks, and who holds the lock.
//! * [`constraints`]: which versions environments require of each other.
//! * [`content`]: which content revisions of filegen-servers may go to machines.
//! * [`steps`]: how the steps of a rollout go on, are aborted and rolled back.
//! * [`mod@decide`]: all of it together.
//! * [`strategy`]: how machines are changed, and who must say yes.
//! * [`definition`], [`selector`]: what operators say about environments.
//! * [`selector_index`]: which of many selectors select a machine.
//! * [`state`]: what is remembered, and how orders change it.
//! * [`window`]: when machines may be changed.
//! * [`gate`]: which image each machine must have because of environments.
//! * [`mod@plan`]: what a step would change on machines, and whether it may.
//! * [`view`]: what is seen of machines, images and filegen-servers.
//! * [`mod@advance`]: takes the rollouts that are remembered on, with what is seen of machines.
//!
//! Everything here is a function of its arguments.
//!
//! # Invariants
//!
//! * A vote counts only for the plan whose digest it names.
//! * A step begins only when all steps that it depends on have succeeded or had nothing to do.
//! * What a batch changes leaves as many machines healthy as the environment asks for.
//! * Of two versions of a task, one is stopped before the other is started.
//! * Applied and asked again with nothing observed in between, [`decide()`] changes nothing more.

pub mod advance;
pub mod approval;
pub mod batch;
pub mod constraints;
pub mod content;
pub mod decide;
pub mod definition;
pub mod dependencies;
pub mod document;
pub mod gate;
pub mod lock;
pub mod machine_tasks;
pub mod plan;
pub mod selector;
pub mod selector_index;
pub mod state;
pub mod steps;
pub mod strategy;
pub mod view;
pub mod window;

pub use decide::{Answer, decide};
pub use document::Document;
