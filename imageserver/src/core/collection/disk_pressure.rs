//! Decides when the disk is full enough to collect without a request.
// tidy: core

/// How long to wait after a collection that did not free enough, in seconds.
const RETRY_INTERVAL: u64 = 600;

/// Bounds, in per cent of the file-system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Above this use, objects are removed. 100 for never.
    pub above_percent: u8,
    /// Objects are removed until the use is down to this.
    pub down_to_percent: u8,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { above_percent: 95, down_to_percent: 90 }
    }
}

/// The space of a file-system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The used space.
    pub used: u64,
    /// The space that programs without privileges may still use.
    pub free: u64,
}

impl Space {
    /// Returns `percent` of the space that programs may use.
    fn share(self, percent: u8) -> u64 {
        let all = u128::from(self.used) + u128::from(self.free);
        u64::try_from(all * u128::from(percent) / 100).unwrap_or(u64::MAX)
    }

    /// Returns the used share in per cent, as `df` shows it.
    #[must_use]
    pub fn percent(self) -> u8 {
        let all = u128::from(self.used) + u128::from(self.free);
        let percent = (u128::from(self.used) * 100).div_ceil(all.max(1));
        u8::try_from(percent).unwrap_or(100)
    }
}

/// The results of automatic collections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// When a collection last failed to free enough.
    failed_at: Option<u64>,
}

impl Pressure {
    /// Returns how many bytes should be freed now; `None` if none.
    #[must_use]
    pub fn goal(&self, bounds: Bounds, space: Space, now: u64) -> Option<u64> {
        let has_failed = self.failed_at.is_some_and(|at| now < at.saturating_add(RETRY_INTERVAL));
        if has_failed || bounds.above_percent >= 100 {
            return None;
        }
        if space.used < space.share(bounds.above_percent) {
            return None;
        }
        let goal = space.used.saturating_sub(space.share(bounds.down_to_percent));
        (goal > 0).then_some(goal)
    }

    /// Records that a collection freed `bytes` of `goal`, or failed and freed none.
    pub fn note(&mut self, now: u64, goal: u64, bytes: u64) {
        self.failed_at = (bytes < goal).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_brought_down_and_no_further() {
        let bounds = Bounds { above_percent: 90, down_to_percent: 80 };
        let space = |used| Space { used, free: 1_000 - used };
        let table = [(0, None), (899, None), (900, Some(100)), (1_000, Some(200))];
        for (used, goal) in table {
            assert_eq!(Pressure::default().goal(bounds, space(used), 0), goal, "{used}");
        }
        let never = Bounds { above_percent: 100, down_to_percent: 80 };
        assert_eq!(Pressure::default().goal(never, space(1_000), 0), None);
        assert_eq!(Pressure::default().goal(bounds, Space { used: 0, free: 0 }, 0), None);
        assert_eq!(
            (space(0).percent(), space(901).percent(), space(1_000).percent()),
            (0, 91, 100)
        );
    }

    #[test]
    fn what_did_not_help_is_not_tried_again_at_once() {
        let bounds = Bounds::default();
        let full = Space { used: 1_000, free: 0 };
        let mut pressure = Pressure::default();
        pressure.note(1_000, 100, 99);
        assert_eq!(pressure.goal(bounds, full, 1_599), None);
        assert_eq!(pressure.goal(bounds, full, 1_600), Some(100));
        pressure.note(1_700, 100, 100);
        assert_eq!(pressure.goal(bounds, full, 1_701), Some(100));
    }
}
