//! The decisions of the dominator: functions of their arguments, without clock, disk or network.
//!
//! The shell (`crate::runtime`) and the simulation of `tests/it` carry out the same effects.
// tidy: core

pub mod alarms;
pub mod analysis;
pub mod budget;
pub mod changes;
pub mod claims;
pub mod computed;
pub mod departing;
pub mod drift;
pub mod environment_owners;
pub mod event_filter;
pub mod fleet_resources;
pub mod identity;
pub mod image_breaker;
pub mod kept_files;
pub mod mdb_admission;
pub mod mdb_diff;
pub mod network_budget;
pub mod orders;
pub mod permits;
pub mod required_image;
pub mod rollback;
pub mod rollout_notices;
pub mod rollouts;
pub mod selectors;
pub mod settings;
pub mod sources;
pub mod sub;
pub mod task_orders;
pub mod tasks;
pub mod timing;
pub mod vote_links;
pub mod webhooks;
