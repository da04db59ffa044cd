//! Carries calls over HTTP and TLS, in both directions.
//!
//! A call is `POST /rpc/Service.Method` over HTTP/1.1 or HTTP/2, with a body in bincode or JSON and
//! the header `dominator-protocol`. `docs/PROTOCOL.md` specifies it. Only [`client`] and [`server`]
//! know the HTTP between daemons. [`trees`] reads trees and images; [`audit_log`] writes the audit
//! log.

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

/// How often a silent peer is sent a ping. The interval is longer than the wait of a poll, because
/// a ping to ten thousand subs every 20 s took more processor time than a poll every minute. The
/// kernel notices a machine that is gone sooner ([`socket`]); the limit of each call covers one
/// that is there and does not answer.
const KEEP_ALIVE_INTERVAL: std::time::Duration = std::time::Duration::from_secs(80);

/// How long a peer may take to answer a ping.
const KEEP_ALIVE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

/// The most content in one frame of HTTP/2, in bytes. Longer frames than the default of 16 KiB need
/// fewer system calls. A peer may make a connection allocate one frame before it sends any of it.
const FRAME_BYTES_MAX: u32 = 64 << 10;

/// The most bytes of headers of one message.
const HEADER_BYTES_MAX: u32 = 16 << 10;
