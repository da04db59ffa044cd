//! Answers calls and pages.
//!
//! A daemon makes one [`Router`], with a handler for each method and page, and passes it to
//! [`serve`]. HTTP/1.1 and HTTP/2 (by prior knowledge) share one port. Every server has `/healthz`
//! and `/metrics`.
//!
//! # Invariants
//!
//! * Memory for a length that a peer claims is allocated only after the length was checked against
//!   a limit.
//! * A handler that panics fails only its call.
//! * No peer can take all connections, or more than its share of the memory
//!   ([`ServerLimits`]).
//! * When a caller disconnects, its handler is dropped at the next await. A handler that must
//!   finish its work runs it as a separate task.

mod audit;
mod caller;
mod change_rates;
mod connection;
mod connection_counts;
mod connection_limiter;
mod dispatch;
mod form;
mod handshakes;
mod listen;
mod metrics;
mod page;
mod range;
mod replies;
mod router;
mod server_limits;
mod unstated_owners;

pub use super::object_reader::{ObjectReader, StreamError, head_bytes, object_chunks};
pub use caller::{Caller, CallerPermit, CallerPermits};
pub use form::TOKEN_FIELD;
pub use listen::{SHUTDOWN_GRACE, Server, serve};
pub use page::{Content, Page, PageBody, PageRequest, PostRequest, Query};
pub use range::ByteRange;
pub use router::{Proven, Router};
pub use server_limits::{CallerArgs, ServerLimits};
