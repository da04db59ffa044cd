//! How fast a peer must send at least.
//!
//! A pause that is too long ends what is read; but a peer that sends a byte from time to time makes
//! no such pause. It is held to a number of bytes in each minute that was waited for it: time in
//! which nobody reads, because what was read before is being written, is not its fault.
// tidy: core

use core::time::Duration;

/// The time over which the speed is averaged.
pub const PACE_WINDOW: Duration = Duration::from_secs(60);

/// The least that a request of one piece must bring in each window, in bytes: less than
/// that it must bring whole. Its memory is held while it comes.
pub const MESSAGE_PACE_BYTES: u64 = 4 << 20;

/// The least that a stream of objects must bring in each window, in bytes.
pub const STREAM_PACE_BYTES: u64 = 64 << 10;

/// What came, and how long was waited for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    least_bytes: u64,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// A peer that must send so much in each [`PACE_WINDOW`].
    pub(super) fn new(least_bytes: u64) -> Self {
        Self { least_bytes, waited: Duration::ZERO, bytes: 0 }
    }

    /// A peer that may be as slow as it is: something else ends the wait.
    pub(super) fn any() -> Self {
        Self::new(0)
    }

    /// How long may be waited for what comes next.
    pub(super) fn left(&self) -> Duration {
        PACE_WINDOW.saturating_sub(self.waited)
    }

    /// Notes that `bytes` have come after one more wait; false if the peer is too slow.
    pub(super) fn came(&mut self, bytes: usize, waited: Duration) -> bool {
        self.waited += waited;
        self.bytes = self.bytes.saturating_add(bytes as u64);
        let is_fast = self.bytes >= self.least_bytes;
        if is_fast {
            // The next window begins early for whoever is fast: it can save up nothing.
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
