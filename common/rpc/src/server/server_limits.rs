//! How much of a process the callers of its server may use together.

use std::num::NonZeroU32;

use super::connection_counts::Limits;
use super::handshakes::HandshakeLimits;

/// The flag for the memory of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub struct CallerArgs {
    /// Memory for the requests of all callers together, and for replies that they have not read, in
    /// MiB. One caller gets at most half of it. One larger request at a time comes on top
    #[arg(long, value_name = "MIB", default_value_t = SERVER_MEMORY_MIB,
          help_heading = "Security", value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    pub caller_memory: u32,
}

impl CallerArgs {
    /// Returns the limits of a daemon that serves a fleet.
    #[must_use]
    pub fn limits(&self) -> ServerLimits {
        let memory_bytes = bytes(self.caller_memory);
        ServerLimits { memory_bytes, ..ServerLimits::SERVER }
    }
}

/// The default of [`CallerArgs::caller_memory`].
const SERVER_MEMORY_MIB: u32 = 768;

const fn bytes(mib: u32) -> usize {
    (mib as usize) << 20
}

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
    /// Calls of one caller in a second that change something; `None`: any number.
    pub(super) changes: Option<NonZeroU32>,
}

impl ServerLimits {
    /// For a daemon that serves a fleet.
    pub const SERVER: Self = Self {
        connections: 4_096,
        streams: 512,
        memory_bytes: bytes(SERVER_MEMORY_MIB),
        // 1,024 from one address are enough for a rack behind it that was switched on.
        handshakes: HandshakeLimits { all: 2_048, source: 256, known_source: 1_024 },
        changes: None,
    };

    /// For the agent on each machine, which a dominator and a few people call.
    pub const AGENT: Self = Self {
        connections: 64,
        streams: 32,
        memory_bytes: 48 << 20,
        handshakes: HandshakeLimits { all: 64, source: 16, known_source: 32 },
        changes: None,
    };

    /// Limits how many calls of one caller in a second change something; 0: not.
    #[must_use]
    pub fn with_changes(self, each_second: u32) -> Self {
        Self { changes: NonZeroU32::new(each_second), ..self }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_sets_the_memory_and_nothing_else() {
        let limits = |caller_memory| CallerArgs { caller_memory }.limits();
        assert_eq!(limits(SERVER_MEMORY_MIB), ServerLimits::SERVER);
        let small = ServerLimits { memory_bytes: 16 << 20, ..ServerLimits::SERVER };
        assert_eq!(limits(16), small);
    }
}
