//! What subd knows, and what of it survives a restart.
//!
//! | module | what |
//! |---|---|
//! | [`report_state`] | the state that polls report, and the polls that wait for it |
//! | [`snapshot`] | one complete scan |
//! | [`cache_changes`] | which objects came into the cache or left it, by generation |
//! | [`persisted_state`] | `state.json` and `accepted.json` |
//! | [`accepted_image`] | the signed image that was accepted last |
//! | [`directories`] | `/.subd` and what it holds |

pub mod accepted_image;
pub mod cache_changes;
pub mod directories;
pub mod persisted_state;
pub mod report_state;
pub mod snapshot;
