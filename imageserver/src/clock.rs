//! Reads the clocks of the machine.

use nix::time::{ClockId, clock_gettime};
use system::clock::wall;

use crate::core::image_expiry::ClockReading;

/// Reads both clocks, one after the other.
#[must_use]
pub fn reading() -> ClockReading {
    let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME)
        .expect("every Linux that this program runs on has the clock");
    ClockReading { wall: wall().seconds, since_boot: since_boot.tv_sec() }
}

/// Which boot of the machine this is. If the kernel does not say so, no other is the same.
#[must_use]
pub fn boot_id() -> String {
    match fs_err::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) => id.trim().to_owned(),
        Err(error) => {
            tracing::warn!("cannot read the boot id of the machine: {error}");
            format!("unknown, at {}", wall().seconds)
        }
    }
}
