//! The wire: how a call gets from one daemon to another.
//!
//! A call is `POST /rpc/Service.Method` over HTTP/1.1 or HTTP/2, with a body in bincode or JSON
//! and the header `dominator-protocol`. `docs/PROTOCOL.md` specifies it. The encodings are cores;
//! [`client`] and [`server`] are the only modules of the project that know HTTP.

pub mod access;
pub mod codec;
pub mod fault;
pub mod method;
pub mod object_stream;

pub use access::Access;
pub use fault::{Fault, FaultCode};
pub use method::{Method, MethodInfo};

/// The version of the protocol that this release speaks.
pub const PROTOCOL: u32 = 1;

/// The oldest version that this release still answers.
pub const PROTOCOL_OLDEST: u32 = 1;

/// The header that carries the protocol version on every call and reply.
pub const PROTOCOL_HEADER: &str = "dominator-protocol";
