//! The lowest speed at which a peer must send.
//!
//! Long pauses end a read; but a peer that sends a byte from time to time makes no long pause. So a
//! peer must send a number of bytes in each minute of waiting for it. Time in which this side does
//! not read, because it writes what was read before, does not count.
// tidy: core

use core::time::Duration;

/// The time over which the speed is averaged.
pub const PACE_WINDOW: Duration = Duration::from_secs(60);

/// The fewest bytes of a unary request in each window, or the whole request if it is shorter. It
/// takes memory while it arrives.
pub const MESSAGE_PACE_BYTES: u64 = 4 << 20;

/// The fewest bytes of an object stream in each window.
pub const STREAM_PACE_BYTES: u64 = 64 << 10;

/// The received bytes, and the time of waiting for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    least_bytes: u64,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// Requires `least_bytes` in each [`PACE_WINDOW`].
    pub(super) fn new(least_bytes: u64) -> Self {
        Self { least_bytes, waited: Duration::ZERO, bytes: 0 }
    }

    /// Requires nothing: something else limits the wait.
    pub(super) fn any() -> Self {
        Self::new(0)
    }

    /// Returns how long to wait for the next bytes.
    pub(super) fn left(&self) -> Duration {
        PACE_WINDOW.saturating_sub(self.waited)
    }

    /// Notes that `bytes` have arrived after a wait. Returns false if the peer is too slow.
    pub(super) fn came(&mut self, bytes: usize, waited: Duration) -> bool {
        self.waited += waited;
        self.bytes = self.bytes.saturating_add(bytes as u64);
        let is_fast = self.bytes >= self.least_bytes;
        if is_fast {
            // The next window begins early for a fast peer, so that it gains no credit.
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        }
        is_fast || self.waited < PACE_WINDOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many chunks of `bytes`, each of which took `seconds`, the peer is too slow.
    fn ends(bytes: usize, seconds: u64) -> Option<usize> {
        let mut pace = Pace::new(1_000);
        (1..=1_000).find(|_| !pace.came(bytes, Duration::from_secs(seconds)))
    }

    #[test]
    fn a_peer_that_trickles_is_too_slow() {
        let table = [
            (1, 29, Some(3)),
            (1, 1, Some(60)),
            (0, 1, Some(60)),
            (16, 1, Some(60)),
            (17, 1, None),
            (500, 29, None),
            (500, 31, None),
            (499, 29, None),
            (400, 29, None),
            (300, 29, Some(3)),
            (1_000, 59, None),
            (1_000, 200, None),
        ];
        for (bytes, seconds, want) in table {
            assert_eq!(ends(bytes, seconds), want, "{bytes} in {seconds} s");
        }
    }

    #[test]
    fn what_was_fast_gives_no_credit() {
        let mut pace = Pace::new(1_000);
        assert!(pace.came(1 << 30, Duration::from_secs(1)));
        assert_eq!(pace.left(), PACE_WINDOW);
        assert!(pace.came(1, Duration::from_secs(40)));
        assert_eq!(pace.left(), Duration::from_secs(20));
        assert!(!pace.came(1, Duration::from_secs(20)));
    }
}
