//! Provisioning: what [`resource`] files ask for, which plugins make it ([`binding`]), and what is
//! to be done next.
//!
//! * [`version`]: versions that resources provide, and the ranges that others require.
//! * [`order`]: which resources come after which.
//! * [`protocol`]: what plugins are asked and what they answer.
//! * [`state`]: what has been provisioned, and what is under way.
//! * [`plan`](mod@plan): what differs, and the next calls.
//! * [`image`]: what an image says of provisioning, and what it cannot say.
//! * [`machine`]: what a machine keeps of provisioning, and what it does next.
//!
//! Everything here is a function of its arguments.
//!
//! # Invariants
//!
//! * A resource is asked for only after all that it needs is there.
//! * Resources whose inputs are as they were are in no call.
//! * A call is in the state before its plugin runs, and so is its key: after a crash at any moment
//!   the same call is made again with the same key.
//! * Nothing is forgotten: a resource leaves the state only after its plugin has destroyed it, or
//!   by order of an operator.

pub mod binding;
pub mod image;
pub mod machine;
pub mod order;
pub mod plan;
pub mod protocol;
pub mod resource;
pub mod state;
pub mod version;

pub use binding::{Binding, Bindings};
pub use plan::{Call, Next, Plan, plan};
pub use resource::{Resource, Resources};
pub use state::State;
