//! The clocks and chance, which the shell reads and hands to the cores.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

use model::tree::Time;
use nix::time::{ClockId, clock_gettime};

use crate::core::clock_trust::Reading;

/// The time of day, which may be set and be wrong.
#[must_use]
pub fn wall() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}

/// Both clocks, read one after the other.
#[must_use]
pub fn reading() -> Reading {
    let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .expect("every Linux that this program runs on has the clock");
    Reading { wall: wall().seconds, since_boot: since_boot.tv_sec() }
}

/// Which boot of the machine this is. If the kernel does not say so, no other is the same.
#[must_use]
pub fn boot_id() -> String {
    match fs_err::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) => id.trim().to_owned(),
        Err(error) => {
            tracing::warn!("which boot of the machine this is, is not known: {error}");
            format!("unknown, at {}", wall().seconds)
        }
    }
}

/// A random number. The standard library seeds its hash maps from the kernel.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
