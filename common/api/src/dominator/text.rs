//! What the dominator reports, as texts for people: `domtool` and the dominator's pages show the
//! same.

pub mod events;
pub mod explain;
pub mod facts;
