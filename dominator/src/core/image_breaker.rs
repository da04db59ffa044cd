//! Stops updates to an image when too many of them fail.
//!
//! Counts for each image the machines that were updated to it, and those of them that failed after
//! the update. Repairs are not counted. The last result of each machine counts. Updates to an image
//! stop when at least `failures_min` machines have failed, and
//!
//! * they are more than `percent` of all that were updated to it, and so many that the probability
//!   is less than 1 in 10,000 if one machine in a hundred fails for reasons of its own. Of the few
//!   first machines of a rollout three may fail by chance. With `failures_min` below three there is
//!   no such test;
//! * they are so many more than with other images that the probability is less than 1 in 10,000
//!   (Fisher's exact test, one-sided). The bound is that low because the test is repeated after
//!   each failure; or
//! * machines that cannot get the image, because paths are blocked, are more than `blocked_percent`
//!   of all that could or could not. They count for nothing else.
//!
//! When an operator resumes the updates, counting starts from zero.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::dominator::orders::StoppedImage;
use model::display::counted;
use model::image::ImageName;
use model::tree::Time;

use super::budget::ClaimantId;

/// The bound of both tests, as the reciprocal of a probability.
const IMPROBABILITY: f64 = 10_000.0;

/// The share of machines that fail for reasons of their own.
const BACKGROUND: f64 = 0.01;

/// The least `failures_min` with which chance is considered.
const FAILURES_MIN_BY_CHANCE: u32 = 3;

/// How many stopped images are kept that no machine must have any more.
pub const IDLE_STOPS_MAX: usize = 100;

/// How a machine failed after an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpdateFailure {
    /// A step failed, and the update was rolled back.
    Update,
    /// The update could not be rolled back.
    Stuck,
    /// The health check failed.
    Health,
    /// The update succeeded, and later the image or a task of it was not healthy.
    Unhealthy,
    /// A service could not be stopped, started or reloaded.
    Trigger,
    /// The same changes are needed again.
    NotConverging,
    /// The machine has not answered since the update.
    Vanished,
    /// The update has not ended in time.
    Overdue,
    /// Paths that cannot be changed hold the update back.
    Blocked,
}

impl UpdateFailure {
    /// Returns the text that follows the number of failed machines.
    fn text(self) -> &'static str {
        match self {
            Self::Update => "rolled back",
            Self::Stuck => "stuck",
            Self::Health => "failed the health check",
            Self::Unhealthy => "unhealthy later",
            Self::Trigger => "with failed triggers",
            Self::NotConverging => "not converging",
            Self::Vanished => "vanished",
            Self::Overdue => "not done in time",
            Self::Blocked => "blocked",
        }
    }
}

/// When updates to an image stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureLimits {
    /// The share of the machines that may fail, in percent.
    pub percent: u8,
    /// The share of the machines that may be blocked, in percent.
    pub blocked_percent: u8,
    /// Updates do not stop before so many machines have failed; at least one.
    pub failures_min: u32,
}

/// The number of machines by result; `None` is a success.
type ResultCounts = BTreeMap<Option<UpdateFailure>, u32>;

/// The results of the updates to one image, or to one change of content, by machine.
#[derive(Clone, Debug)]
pub struct UpdateResults<Who> {
    results: BTreeMap<Who, Option<UpdateFailure>>,
    /// Includes the results of removed machines.
    counts: ResultCounts,
}

impl<Who> Default for UpdateResults<Who> {
    fn default() -> Self {
        Self { results: BTreeMap::new(), counts: ResultCounts::new() }
    }
}

impl<Who: Ord> UpdateResults<Who> {
    /// Returns how many machines were updated.
    #[must_use]
    pub fn updated(&self) -> u32 {
        self.counts.values().sum::<u32>() - self.blocked()
    }

    fn blocked(&self) -> u32 {
        self.counts.get(&Some(UpdateFailure::Blocked)).copied().unwrap_or_default()
    }

    /// Returns how many of the updated machines failed.
    #[must_use]
    pub fn failed(&self) -> u32 {
        self.updated() - self.counts.get(&None).copied().unwrap_or_default()
    }

    /// Records how the update of a machine ended.
    pub fn record(&mut self, who: Who, result: Option<UpdateFailure>) {
        if let Some(before) = self.results.insert(who, result)
            && let Some(count) = self.counts.get_mut(&before)
        {
            *count -= 1;
        }
        *self.counts.entry(result).or_default() += 1;
    }

    /// True if the result of the update of `who` counts.
    #[must_use]
    pub fn has(&self, who: &Who) -> bool {
        self.results.contains_key(who)
    }

    /// Removes a machine. Its result still counts.
    pub fn forget(&mut self, who: &Who) {
        self.results.remove(who);
    }

    /// Returns why updates must stop, if they must. `others` has how many machines were updated to
    /// anything else, and how many of them failed.
    #[must_use]
    pub fn stop_reason(&self, limits: FailureLimits, others: (u32, u32)) -> Option<String> {
        let (updated, failed) = (self.updated(), self.failed());
        let (blocked, percent) = (self.blocked(), limits.blocked_percent);
        if blocked >= limits.failures_min
            && u64::from(blocked) * 100 > u64::from(updated + blocked) * u64::from(percent)
        {
            let machines = counted((updated + blocked).into(), "machine");
            return Some(format!("{blocked} of {machines} are blocked, more than {percent} %"));
        }
        if failed < limits.failures_min {
            return None;
        }
        let is_share_passed =
            u64::from(failed) * 100 > u64::from(updated) * u64::from(limits.percent);
        let is_improbable = limits.failures_min < FAILURES_MIN_BY_CHANCE
            || by_chance(failed, updated) < 1.0 / IMPROBABILITY;
        if is_share_passed && is_improbable {
            return Some(format!("{}, more than {} %", self.summary(), limits.percent));
        }
        let (all, bad) = others;
        if probability(failed, updated, bad, all) >= 1.0 / IMPROBABILITY {
            return None;
        }
        let summary = self.summary();
        Some(format!("{summary}, far more often than after other updates: {bad} of {all}"))
    }

    /// Returns `3 of 8 machines failed after the update to it (2 vanished, 1 stuck)`.
    #[must_use]
    pub fn summary(&self) -> String {
        let kind = |(result, count): (&Option<UpdateFailure>, &u32)| {
            let failed = result.filter(|failed| *failed != UpdateFailure::Blocked && *count > 0)?;
            Some(format!("{count} {}", failed.text()))
        };
        let kinds: Vec<String> = self.counts.iter().filter_map(kind).collect();
        format!(
            "{} of {} failed after the update to it ({})",
            self.failed(),
            counted(self.updated().into(), "machine"),
            kinds.join(", ")
        )
    }
}

#[derive(Clone, Debug)]
pub struct ImageBreaker {
    limits: FailureLimits,
    results: BTreeMap<ImageName, UpdateResults<ClaimantId>>,
    stopped: BTreeMap<ImageName, StoppedImage>,
}

impl ImageBreaker {
    /// Starts counting; updates to `stopped` had stopped before the restart.
    #[must_use]
    pub fn new(limits: FailureLimits, stopped: Vec<StoppedImage>) -> Self {
        let stopped = stopped.into_iter().map(|stop| (stop.image.clone(), stop)).collect();
        Self { limits, results: BTreeMap::new(), stopped }
    }

    /// Sets the limits. Stopped images stay stopped.
    pub fn set_limits(&mut self, limits: FailureLimits) {
        self.limits = limits;
    }

    /// Records how an update of a machine to `image` ended. Returns true if updates to it stop now.
    pub fn record(
        &mut self,
        claimant: ClaimantId,
        image: &ImageName,
        result: Option<UpdateFailure>,
        now: Time,
    ) -> bool {
        self.results.entry(image.clone()).or_default().record(claimant, result);
        if result.is_none() || self.stopped.contains_key(image) {
            return false;
        }
        let Some(why) = self.stop_reason(image) else { return false };
        self.stopped.insert(image.clone(), StoppedImage { image: image.clone(), why, since: now });
        true
    }

    /// True if the machine was updated to `image`, and that counts.
    #[must_use]
    pub fn has_result(&self, claimant: ClaimantId, image: &ImageName) -> bool {
        self.results.get(image).is_some_and(|results| results.has(&claimant))
    }

    /// Returns why updates to an image must stop, if they must.
    fn stop_reason(&self, image: &ImageName) -> Option<String> {
        let others = self.results.iter().filter(|(other, _)| *other != image);
        let others = others
            .fold((0, 0), |(all, bad), (_, other)| (all + other.updated(), bad + other.failed()));
        self.results.get(image)?.stop_reason(self.limits, others)
    }

    /// Returns when and why updates to an image have stopped, if they have.
    #[must_use]
    pub fn stop_of(&self, image: &ImageName) -> Option<&StoppedImage> {
        self.stopped.get(image)
    }

    /// Returns all images to which updates have stopped, by name.
    #[must_use]
    pub fn stopped(&self) -> Vec<StoppedImage> {
        self.stopped.values().cloned().collect()
    }

    /// Resumes updates to an image, and counts from zero. Returns false if they had not stopped.
    pub fn resume(&mut self, image: &ImageName) -> bool {
        let was_stopped = self.stopped.remove(image).is_some();
        if was_stopped {
            self.results.remove(image);
        }
        was_stopped
    }

    /// Removes a machine. Its result still counts.
    pub fn forget(&mut self, claimant: ClaimantId) {
        for results in self.results.values_mut() {
            results.forget(&claimant);
        }
    }

    /// Removes the results of images that no machine must have any more, and the oldest of their
    /// stops if there are many. Returns true if a stop was removed.
    pub fn retain(&mut self, wanted: &BTreeSet<ImageName>) -> bool {
        self.results.retain(|image, _| wanted.contains(image));
        let mut idle: Vec<(Time, ImageName)> = self
            .stopped
            .values()
            .filter(|stop| !wanted.contains(&stop.image))
            .map(|stop| (stop.since, stop.image.clone()))
            .collect();
        idle.sort();
        let surplus = idle.len().saturating_sub(IDLE_STOPS_MAX);
        for (_, image) in &idle[..surplus] {
            self.stopped.remove(image);
        }
        surplus > 0
    }
}

/// Returns the probability that at least `failed` of all `failed + others_failed` failures are on
/// the `updated` machines, if the image makes no difference.
fn probability(failed: u32, updated: u32, others_failed: u32, others: u32) -> f64 {
    let (all, bad) = (u64::from(updated) + u64::from(others), failed + others_failed);
    let most = bad.min(updated);
    let ways = |of: u64, chosen: u64| {
        log_factorial(of) - log_factorial(chosen) - log_factorial(of - chosen)
    };
    let (updated, others, bad) = (u64::from(updated), u64::from(others), u64::from(bad));
    let total = ways(all, bad);
    (u64::from(failed)..=u64::from(most))
        .filter(|hit| bad - hit <= others)
        .map(|hit| (ways(updated, hit) + ways(others, bad - hit) - total).exp())
        .sum()
}

/// Returns the probability that at least `failed` of the `updated` machines fail for reasons of
/// their own.
fn by_chance(failed: u32, updated: u32) -> f64 {
    let ways = |chosen: u32| {
        log_factorial(updated.into())
            - log_factorial(chosen.into())
            - log_factorial((updated - chosen).into())
    };
    let exactly = |count: u32| {
        let (bad, good) = (f64::from(count), f64::from(updated - count));
        (ways(count) + bad * BACKGROUND.ln() + good * (1.0 - BACKGROUND).ln()).exp()
    };
    (failed..=updated).map(exactly).sum()
}

/// The natural logarithm of `number!`.
fn log_factorial(number: u64) -> f64 {
    const EXACT: u64 = 20;
    if number <= EXACT {
        return (2..=number).map(|factor| precise(factor).ln()).sum();
    }
    // Stirling's series; the error is less than 1e-9 above 20.
    let value = precise(number);
    let half_log_of_two_pi = 0.918_938_533_204_672_7;
    (value + 0.5) * value.ln() - value + half_log_of_two_pi + 1.0 / (12.0 * value)
        - 1.0 / (360.0 * value.powi(3))
}

#[expect(clippy::cast_precision_loss, reason = "fleets have fewer than 2^52 machines")]
fn precise(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: FailureLimits =
        FailureLimits { percent: 10, blocked_percent: 20, failures_min: 3 };

    fn image(name: &str) -> ImageName {
        ImageName::new(name).unwrap()
    }

    /// Records results of machines numbered from `first`. Returns after how many failures updates
    /// stopped.
    fn record(
        breaker: &mut ImageBreaker,
        name: &str,
        first: u64,
        good: u64,
        failed: u64,
    ) -> Option<u64> {
        for claimant in first..first + good {
            assert!(!breaker.record(ClaimantId(claimant), &image(name), None, Time::default()));
        }
        let bad = first + good..first + good + failed;
        let mut stops = bad.map(|claimant| {
            breaker.record(
                ClaimantId(claimant),
                &image(name),
                Some(UpdateFailure::Health),
                Time::default(),
            )
        });
        stops.position(|is_stop| is_stop).map(|at| at as u64 + 1)
    }

    #[test]
    fn updates_stop_beyond_the_rate_or_when_they_fail_far_more_often_than_others() {
        // Successes and failures of other images, and of this one; the failure at which it stops.
        let table = [
            ((0, 0), (0, 2), None),
            ((0, 0), (0, 5), Some(3)),
            ((0, 0), (6, 3), Some(3)),
            ((0, 0), (7, 3), None),
            ((0, 0), (26, 3), None),
            ((0, 0), (27, 5), Some(5)),
            ((0, 0), (1_000, 100), None),
            ((100, 0), (100, 9), None),
            ((1_000, 0), (100, 9), Some(4)),
            ((1_000, 10), (100, 9), Some(9)),
            ((1_000, 50), (100, 9), None),
            ((9_000, 90), (900, 90), Some(24)),
        ];
        for ((good, failed), (mine, bad), expected) in table {
            let mut breaker =
                ImageBreaker::new(FailureLimits { percent: 100, ..LIMITS }, Vec::new());
            assert_eq!(record(&mut breaker, "other", 100_000, good, failed), None);
            breaker.limits = LIMITS;
            let stopped = record(&mut breaker, "mine", 0, mine, bad);
            assert_eq!(stopped, expected, "{good} {failed}, {mine} {bad}");
            assert_eq!(breaker.stop_of(&image("mine")).is_some(), expected.is_some());
        }
    }

    #[test]
    fn the_reason_has_numbers_and_a_resumed_image_is_counted_anew() {
        let mut breaker = ImageBreaker::new(LIMITS, Vec::new());
        let (one, wall) = (image("one"), Time { seconds: 5, nanoseconds: 0 });
        let results = [UpdateFailure::Vanished, UpdateFailure::Trigger, UpdateFailure::Vanished];
        // The last result of a machine counts, also after the machine is removed.
        breaker.record(ClaimantId(9), &one, Some(UpdateFailure::Health), wall);
        breaker.record(ClaimantId(9), &one, None, wall);
        let mut stops = Vec::new();
        for (claimant, failed) in results.into_iter().enumerate() {
            stops.push(breaker.record(ClaimantId(claimant as u64), &one, Some(failed), wall));
            breaker.forget(ClaimantId(claimant as u64));
        }
        assert_eq!(stops, [false, false, true]);
        let why = "3 of 4 machines failed after the update to it (1 with failed triggers, 2 \
                   vanished), more than 10 %";
        let stop = StoppedImage { image: one.clone(), why: why.into(), since: wall };
        assert_eq!(breaker.stopped(), std::slice::from_ref(&stop));
        assert!(
            !breaker.record(ClaimantId(7), &one, Some(UpdateFailure::Stuck), wall),
            "it has stopped already"
        );
        // A stop lasts over a restart, and while no machine must have the image.
        let mut breaker = ImageBreaker::new(LIMITS, breaker.stopped());
        assert!(!breaker.retain(&BTreeSet::new()));
        assert_eq!(breaker.stop_of(&one), Some(&stop));
        assert!(breaker.resume(&one) && !breaker.resume(&one));
        assert_eq!(record(&mut breaker, "one", 0, 0, 3), Some(3));
    }

    #[test]
    fn blocked_machines_are_counted_apart_from_failed_ones() {
        let mut breaker = ImageBreaker::new(LIMITS, Vec::new());
        let (one, wall) = (image("one"), Time::default());
        for claimant in 0..12 {
            assert!(!breaker.record(ClaimantId(claimant), &one, None, wall));
        }
        let blocked = Some(UpdateFailure::Blocked);
        let stops: Vec<bool> = (12..16)
            .map(|claimant| breaker.record(ClaimantId(claimant), &one, blocked, wall))
            .collect();
        assert_eq!(stops, [false, false, false, true]);
        let why = "4 of 16 machines are blocked, more than 20 %";
        assert_eq!(breaker.stop_of(&one).unwrap().why, why);
        // A machine that got the image in the end is not blocked any more.
        assert!(breaker.resume(&one));
        for claimant in 0..2 {
            breaker.record(ClaimantId(claimant), &one, blocked, wall);
        }
        breaker.record(ClaimantId(1), &one, None, wall);
        assert!(!breaker.record(ClaimantId(2), &one, blocked, wall));
        // Blocked machines are no failures.
        assert!(!breaker.record(ClaimantId(3), &one, Some(UpdateFailure::Health), wall));
    }

    #[test]
    fn chances_are_those_of_the_books() {
        // Fisher's example: three of four cups found among eight.
        assert!((probability(3, 4, 1, 4) - 17.0 / 70.0).abs() < 1e-9);
        assert!((probability(0, 10, 3, 10) - 1.0).abs() < 1e-9);
        assert!((probability(3, 3, 0, 0) - 1.0).abs() < 1e-9);
        assert!((by_chance(1, 2) - 0.0199).abs() < 1e-9);
        assert!((by_chance(3, 3) - 1e-6).abs() < 1e-12);
        assert!((by_chance(0, 50) - 1.0).abs() < 1e-9);
        assert!((log_factorial(21) - log_factorial(20) - 21_f64.ln()).abs() < 1e-8);
    }
}
