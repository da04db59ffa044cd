//! Permits for what one machine does for all, as a machine keeps them: exclusive tasks, and
//! resources of the fleet.
//!
//! A dominator gives a permit to one machine at a time, and counts on it that nothing of the task,
//! and no plugin, is left on that machine when the permit has ended. So a machine stops them before
//! that, whatever becomes of its subd.
//!
//! # Invariants
//!
//! * A permit lasts no longer than the dominator thinks: its end is counted from a moment that the
//!   machine has named before the dominator gave it.
//! * A permit with a lower number than one that was heard of is not taken, nor one that was given
//!   up or has ended: the dominator may have given it to another machine, and what it has sent may
//!   come late.
//! * A permit ends with the boot.

use crate::JsonSchema;
use crate::boot_time::BootTime;
use serde::{Deserialize, Serialize};

/// The longest `stop_timeout_s` of an exclusive task.
pub const EXCLUSIVE_STOP_TIMEOUT_S_MAX: u32 = 120;

/// How long a killed process may take to be gone, in milliseconds.
const GONE_WITHIN_MS: u64 = 10_000;

/// The permit of a machine for a task or a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Permit {
    /// The highest number that was heard of.
    pub number: u64,
    /// When nothing of the task may be left. `None` without a permit.
    pub until: Option<BootTime>,
}

/// Why a permit is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PermitError {
    #[error("a later permit is known, or this one was given up")]
    Superseded,
    #[error("the permit was given before the last boot, or has ended")]
    Ended,
    #[error("it is no exclusive task, and no resource of the fleet, of this machine")]
    NotExclusive,
}

impl Permit {
    /// Takes permit `number`, which lasts until `until`.
    ///
    /// # Errors
    ///
    /// [`PermitError`] if it comes too late. The number is known then, too.
    pub fn take(
        &mut self,
        number: u64,
        until: &BootTime,
        now: &BootTime,
    ) -> Result<(), PermitError> {
        let is_given_up = number == self.number && self.until.is_none();
        if number < self.number || is_given_up {
            return Err(PermitError::Superseded);
        }
        self.number = number;
        if has_ended(until, now) {
            return Err(PermitError::Ended);
        }
        // What comes late shortens nothing.
        let is_longer = |former: &BootTime| former.ms_since(until).is_some();
        if !self.until.as_ref().is_some_and(is_longer) {
            self.until = Some(until.clone());
        }
        Ok(())
    }

    /// Gives it up when it has ended, or if it is not needed. Nothing that it is for is live.
    pub fn give_up(&mut self, is_needed: bool, now: &BootTime) {
        self.until.take_if(|until| !is_needed || has_ended(until, now));
    }

    /// Returns when what takes up to `stop_timeout_s` to stop must begin to, in milliseconds since
    /// the boot; `None` if that moment has passed, or if there is no permit.
    #[must_use]
    pub fn stop_at_ms(&self, stop_timeout_s: u32, now: &BootTime) -> Option<u64> {
        let until = self.until.as_ref().filter(|until| until.boot_id == now.boot_id)?;
        let stop_ms = u64::from(stop_timeout_s) * 1_000 + GONE_WITHIN_MS;
        until.ms.checked_sub(stop_ms).filter(|stop_at| *stop_at > now.ms)
    }
}

fn has_ended(until: &BootTime, now: &BootTime) -> bool {
    until.ms_since(now).is_none_or(|left_ms| left_ms == 0)
}
