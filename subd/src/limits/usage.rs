//! What the calling thread takes of the machine, as the kernel counts it.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};

/// The unit in which the kernel tells of reads, whatever the blocks of the device are.
const BLOCK_BYTES: u64 = 512;

/// What a thread has taken since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time.
    pub cpu: Duration,
    /// Bytes read from devices: what the page cache has is not among them.
    pub read_bytes: u64,
}

impl Usage {
    /// What the calling thread has taken until now.
    #[must_use]
    pub fn now() -> Self {
        Self { cpu: cpu_time(), read_bytes: read_bytes() }
    }

    /// What was taken since `self`, which becomes now.
    pub fn step(&mut self) -> Self {
        let now = Self::now();
        let step = Self {
            cpu: now.cpu.saturating_sub(self.cpu),
            read_bytes: now.read_bytes.saturating_sub(self.read_bytes),
        };
        *self = now;
        step
    }

    /// The processor time in microseconds.
    #[must_use]
    pub fn cpu_us(&self) -> u64 {
        u64::try_from(self.cpu.as_micros()).unwrap_or(u64::MAX)
    }
}

/// The processor time that this thread has used.
#[must_use]
pub fn cpu_time() -> Duration {
    // The clock of the calling thread is always there on Linux; without it passes cost nothing,
    // and run as often as the shortest interval allows.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// How much this thread has read from devices, in bytes. Always 0 on kernels that do not count it.
#[must_use]
pub fn read_bytes() -> u64 {
    let blocks = getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.block_reads());
    u64::try_from(blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES)
}
