//! How much of a process the callers of its server may use together.

use super::connection_counts::Limits;
use super::handshakes::HandshakeLimits;

/// The limits of a server. Each caller gets about half of each, so that no caller keeps the others
/// out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Connections whose handshake has ended; more wait until one ends.
    pub(super) connections: usize,
    /// Calls at one time on one connection; more wait at the caller.
    pub(super) streams: u32,
    /// Memory for requests that are read or carried out, and for replies that wait to be read. One
    /// larger request at a time comes on top.
    pub(super) memory_bytes: usize,
    /// Unfinished handshakes.
    pub(super) handshakes: HandshakeLimits,
}

impl ServerLimits {
    /// For a daemon that serves a fleet.
    pub const SERVER: Self = Self {
        connections: 4_096,
        streams: 512,
        memory_bytes: 768 << 20,
        // 1,024 from one address are enough for a rack behind it that was switched on.
        handshakes: HandshakeLimits { all: 2_048, source: 256, known_source: 1_024 },
    };

    /// For the agent on each machine, which a dominator and a few people call.
    pub const AGENT: Self = Self {
        connections: 64,
        streams: 32,
        memory_bytes: 48 << 20,
        handshakes: HandshakeLimits { all: 64, source: 16, known_source: 32 },
    };

    pub(super) fn of_connections(&self) -> Limits {
        Limits {
            // All subs may share one user.
            user: self.connections / 2,
            // Browsers and monitoring, behind one proxy.
            strangers: (self.connections / 8).min(64),
            all_strangers: self.connections / 8,
        }
    }
}
