//! The timers of a guard: when its attempt must stop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::tasks::attempt::Deadlines;

/// Timers of the kernel. That of the wall clock follows the clock when it is set.
pub struct DeadlineTimers {
    wall: TimerFd,
    boot: TimerFd,
}

impl DeadlineTimers {
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let new = |clock| TimerFd::new(clock, flags);
        Ok(Self { wall: new(ClockId::CLOCK_REALTIME)?, boot: new(ClockId::CLOCK_BOOTTIME)? })
    }

    /// Has them fire at `deadlines` only. One that has passed fires at once.
    pub fn set(&self, deadlines: &Deadlines) -> io::Result<()> {
        let Deadlines { stop_at, stop_at_boot_ms } = deadlines;
        let wall = stop_at.map(|at| (at.as_second(), at.subsec_nanosecond().into()));
        let boot = stop_at_boot_ms.map(|ms| {
            let seconds = i64::try_from(ms / 1_000).unwrap_or(i64::MAX);
            (seconds, i64::try_from(ms % 1_000).unwrap_or(0) * 1_000_000)
        });
        for (timer, at) in [(&self.wall, wall), (&self.boot, boot)] {
            match at {
                None => timer.unset()?,
                // The kernel takes the beginning of a clock as "never".
                Some((seconds, nanoseconds)) => timer.set(
                    Expiration::OneShot(TimeSpec::new(seconds.max(1), nanoseconds)),
                    TimerSetTimeFlags::TFD_TIMER_ABSTIME,
                )?,
            }
        }
        Ok(())
    }

    /// What becomes readable when one fires.
    pub fn as_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.wall, &self.boot].into_iter().map(AsFd::as_fd)
    }

    /// Returns true if a timer has fired since the last call.
    pub fn have_passed(&self) -> bool {
        let mut buffer = [0; 8];
        let fired = [&self.wall, &self.boot]
            .map(|timer| nix::unistd::read(timer, &mut buffer) != Err(Errno::EAGAIN));
        fired.contains(&true)
    }
}
