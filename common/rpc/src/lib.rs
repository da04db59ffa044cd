//! Carries calls over HTTP and TLS, in both directions.
//!
//! A call is `POST /rpc/Service.Method` over HTTP/1.1 or HTTP/2, with a body in bincode or JSON
//! and the header `dominator-protocol`. `docs/PROTOCOL.md` specifies it. Only [`client`] and
//! [`server`] know the HTTP between daemons. [`trees`] reads trees and images over it;
//! [`audit_log`] writes what was called to the medium.

pub mod audit_log;
mod body;
pub mod client;
pub mod object_reader;
mod pace;
pub mod packing;
pub mod page_frame;
pub mod server;
mod socket;
pub mod tls;
pub mod trees;

/// How often a peer that says nothing is sent a ping. Longer than a poll waits, because to ping ten
/// thousand subs every 20 s took more of a processor than to poll them every minute. A machine that
/// is gone is noticed sooner, by the kernel ([`socket`]); one that is there and gives no answer, by
/// the limit of each call.
const KEEP_ALIVE_INTERVAL: std::time::Duration = std::time::Duration::from_secs(80);

/// How long it may take to answer that.
const KEEP_ALIVE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

/// The most content in one frame of HTTP/2, in bytes. A longer frame than the usual 16 KiB takes
/// fewer system calls for the same content; a peer may claim one in each connection before it
/// sends any of it.
const FRAME_BYTES_MAX: u32 = 64 << 10;

/// The most bytes of headers of one message.
const HEADER_BYTES_MAX: u32 = 16 << 10;
