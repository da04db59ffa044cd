//! Stops updates to an image that fails too often.
//!
//! For each image it is counted how many machines were updated to it, and how many failed after
//! that. Repairs of machines that have the image already are not counted. Of each machine the last
//! result counts. Updates to an image stop
//!
//! * when at least `failures_min` machines have failed, and they are more than `percent` of all
//!   that were updated to it; or
//! * when at least `failures_min` have failed, and that is so much more often than with other
//!   images that chance would do it less than once in 10,000 times (Fisher's exact test,
//!   one-sided). The bound is that low because the question is asked after each failure.
//!
//! An operator lets them go on; then counting begins anew.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::dominator::budgets::StoppedImage;
use model::image::ImageName;
use model::tree::Time;
use model::words::counted;

use super::budget::ClaimantId;

/// See the module's text.
const CHANCE: f64 = 10_000.0;

/// How many stopped images are remembered that no machine must have any more.
pub const IDLE_STOPS_MAX: usize = 100;

/// How a machine failed after an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpdateFailure {
    /// A step failed, and the update was put back.
    Update,
    /// The update could not even be put back.
    Stuck,
    /// The health check failed.
    Health,
    /// A service could not be stopped, started or reloaded.
    Trigger,
    /// The same is to be done again.
    NotConverging,
    /// The machine has not answered since.
    Vanished,
    /// The update has not ended.
    Overdue,
}

impl UpdateFailure {
    const ALL: [Self; 7] = [
        Self::Update,
        Self::Stuck,
        Self::Health,
        Self::Trigger,
        Self::NotConverging,
        Self::Vanished,
        Self::Overdue,
    ];

    /// In words, after a number.
    fn words(self) -> &'static str {
        match self {
            Self::Update => "put back",
            Self::Stuck => "stuck",
            Self::Health => "failed the health check",
            Self::Trigger => "with failed triggers",
            Self::NotConverging => "not converging",
            Self::Vanished => "vanished",
            Self::Overdue => "not done in time",
        }
    }
}

/// When updates to an image stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureLimits {
    /// How many of the machines may fail, per cent.
    pub percent: u8,
    /// How many must have failed, whatever share that is; at least one.
    pub failures_min: u32,
}

/// ResultCounts by kind; those that are good are under `None`.
type ResultCounts = BTreeMap<Option<UpdateFailure>, u32>;

/// What is known of the updates to one image.
#[derive(Clone, Debug, Default)]
struct ImageResults {
    results: BTreeMap<ClaimantId, Option<UpdateFailure>>,
    /// The results of all, those that are looked after no more included.
    counts: ResultCounts,
}

impl ImageResults {
    fn updated(&self) -> u32 {
        self.counts.values().sum()
    }

    fn failed(&self) -> u32 {
        self.updated() - self.counts.get(&None).copied().unwrap_or_default()
    }

    fn note(&mut self, claimant: ClaimantId, result: Option<UpdateFailure>) {
        if let Some(before) = self.results.insert(claimant, result)
            && let Some(count) = self.counts.get_mut(&before)
        {
            *count -= 1;
        }
        *self.counts.entry(result).or_default() += 1;
    }

    /// `3 of 21 machines failed after the update to it (2 vanished, 1 stuck)`.
    fn sentence(&self) -> String {
        let kind = |failed| {
            let count = self.counts.get(&Some(failed)).copied().filter(|&count| count > 0)?;
            Some(format!("{count} {}", failed.words()))
        };
        let kinds: Vec<String> = UpdateFailure::ALL.into_iter().filter_map(kind).collect();
        format!(
            "{} of {} failed after the update to it ({})",
            self.failed(),
            counted(self.updated().into(), "machine"),
            kinds.join(", ")
        )
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct ImageBreaker {
    limits: FailureLimits,
    breaker: BTreeMap<ImageName, ImageResults>,
    stopped: BTreeMap<ImageName, StoppedImage>,
}

impl ImageBreaker {
    /// Nothing was counted yet; updates to `stopped` had stopped before a restart.
    #[must_use]
    pub fn new(limits: FailureLimits, stopped: Vec<StoppedImage>) -> Self {
        let stopped = stopped.into_iter().map(|stop| (stop.image.clone(), stop)).collect();
        Self { limits, breaker: BTreeMap::new(), stopped }
    }

    /// Other limits hold from now on. What has stopped stays so.
    pub fn set_limits(&mut self, limits: FailureLimits) {
        self.limits = limits;
    }

    /// Notes how an update of a machine to `image` ended. True if updates to it stop upon that.
    pub fn note(
        &mut self,
        claimant: ClaimantId,
        image: &ImageName,
        result: Option<UpdateFailure>,
        now: Time,
    ) -> bool {
        self.breaker.entry(image.clone()).or_default().note(claimant, result);
        if result.is_none() || self.stopped.contains_key(image) {
            return false;
        }
        let Some(why) = self.verdict(image) else { return false };
        self.stopped.insert(image.clone(), StoppedImage { image: image.clone(), why, since: now });
        true
    }

    /// Why updates to an image must stop, if they must.
    fn verdict(&self, image: &ImageName) -> Option<String> {
        let results = self.breaker.get(image)?;
        let (updated, failed) = (results.updated(), results.failed());
        if failed < self.limits.failures_min {
            return None;
        }
        if u64::from(failed) * 100 > u64::from(updated) * u64::from(self.limits.percent) {
            return Some(format!("{}, more than {} %", results.sentence(), self.limits.percent));
        }
        let others = self.breaker.iter().filter(|(other, _)| *other != image);
        let (all, bad) = others
            .fold((0, 0), |(all, bad), (_, other)| (all + other.updated(), bad + other.failed()));
        if tail(failed, updated, bad, all) >= 1.0 / CHANCE {
            return None;
        }
        Some(format!(
            "{}, far more often than after updates to other images: {bad} of {all}",
            results.sentence()
        ))
    }

    /// The stop of an image, if updates to it have stopped.
    #[must_use]
    pub fn stop_of(&self, image: &ImageName) -> Option<&StoppedImage> {
        self.stopped.get(image)
    }

    /// All images to which updates have stopped, by name.
    #[must_use]
    pub fn stopped(&self) -> Vec<StoppedImage> {
        self.stopped.values().cloned().collect()
    }

    /// Lets updates to an image go on, and begins to count anew; false if they had not stopped.
    pub fn resume(&mut self, image: &ImageName) -> bool {
        let was_stopped = self.stopped.remove(image).is_some();
        if was_stopped {
            self.breaker.remove(image);
        }
        was_stopped
    }

    /// A machine is looked after no more. Its result counts on, but changes no more.
    pub fn forget(&mut self, claimant: ClaimantId) {
        for results in self.breaker.values_mut() {
            results.results.remove(&claimant);
        }
    }

    /// Forgets what was counted of images that no machine must have any more, and the oldest of
    /// their stops if there are many. True if a stop was forgotten.
    pub fn retain(&mut self, wanted: &BTreeSet<ImageName>) -> bool {
        self.breaker.retain(|image, _| wanted.contains(image));
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

/// How likely it is that of `failed + others_failed` failures so many or more meet these `updated`
/// machines, if the image made no difference.
fn tail(failed: u32, updated: u32, others_failed: u32, others: u32) -> f64 {
    let (all, bad) = (u64::from(updated) + u64::from(others), failed + others_failed);
    let most = bad.min(updated);
    let ways = |of: u64, chosen: u64| {
        log_factorial(of) - log_factorial(chosen) - log_factorial(of - chosen)
    };
    let (updated, others, bad) = (u64::from(updated), u64::from(others), u64::from(bad));
    let total = ways(all, bad);
    (u64::from(failed)..=u64::from(most))
        .filter(|met| bad - met <= others)
        .map(|met| (ways(updated, met) + ways(others, bad - met) - total).exp())
        .sum()
}

/// The natural logarithm of `number!`.
fn log_factorial(number: u64) -> f64 {
    const EXACT: u64 = 20;
    if number <= EXACT {
        return (2..=number).map(|factor| precise(factor).ln()).sum();
    }
    // Stirling's series; what is left out is less than 1e-9 from 20 on.
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

    const LIMITS: FailureLimits = FailureLimits { percent: 10, failures_min: 3 };

    fn image(name: &str) -> ImageName {
        ImageName::new(name).unwrap()
    }

    /// Notes so many results of machines numbered from `first`; gives after how many of the
    /// failures updates stopped.
    fn note(
        breaker: &mut ImageBreaker,
        name: &str,
        first: u64,
        good: u64,
        failed: u64,
    ) -> Option<u64> {
        for claimant in first..first + good {
            assert!(!breaker.note(ClaimantId(claimant), &image(name), None, Time::default()));
        }
        let bad = first + good..first + good + failed;
        let mut stops = bad.map(|claimant| {
            breaker.note(
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
        // Of other images so many good and failed; of this one; the failure upon which it stops.
        let table = [
            ((0, 0), (0, 2), None),
            ((0, 0), (0, 5), Some(3)),
            ((0, 0), (26, 3), Some(3)),
            ((0, 0), (27, 3), None),
            ((0, 0), (27, 5), Some(4)),
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
            assert_eq!(note(&mut breaker, "other", 100_000, good, failed), None);
            breaker.limits = LIMITS;
            let stopped = note(&mut breaker, "mine", 0, mine, bad);
            assert_eq!(stopped, expected, "{good} {failed}, {mine} {bad}");
            assert_eq!(breaker.stop_of(&image("mine")).is_some(), expected.is_some());
        }
    }

    #[test]
    fn the_reason_has_numbers_and_a_resumed_image_is_counted_anew() {
        let mut breaker = ImageBreaker::new(LIMITS, Vec::new());
        let (one, wall) = (image("one"), Time { seconds: 5, nanoseconds: 0 });
        let results = [UpdateFailure::Vanished, UpdateFailure::Trigger, UpdateFailure::Vanished];
        // The last result of a machine counts, and whoever is gone counts on.
        breaker.note(ClaimantId(9), &one, Some(UpdateFailure::Health), wall);
        breaker.note(ClaimantId(9), &one, None, wall);
        let mut stops = Vec::new();
        for (claimant, failed) in results.into_iter().enumerate() {
            stops.push(breaker.note(ClaimantId(claimant as u64), &one, Some(failed), wall));
            breaker.forget(ClaimantId(claimant as u64));
        }
        assert_eq!(stops, [false, false, true]);
        let why = "3 of 4 machines failed after the update to it (1 with failed triggers, 2 \
                   vanished), more than 10 %";
        let stop = StoppedImage { image: one.clone(), why: why.into(), since: wall };
        assert_eq!(breaker.stopped(), std::slice::from_ref(&stop));
        assert!(
            !breaker.note(ClaimantId(7), &one, Some(UpdateFailure::Stuck), wall),
            "it has stopped already"
        );
        // It outlasts a restart, and that nobody wants it for a while.
        let mut breaker = ImageBreaker::new(LIMITS, breaker.stopped());
        assert!(!breaker.retain(&BTreeSet::new()));
        assert_eq!(breaker.stop_of(&one), Some(&stop));
        assert!(breaker.resume(&one) && !breaker.resume(&one));
        assert_eq!(note(&mut breaker, "one", 0, 0, 3), Some(3));
    }

    #[test]
    fn chances_are_those_of_the_books() {
        // Fisher's tea: four cups of eight, three found.
        assert!((tail(3, 4, 1, 4) - 17.0 / 70.0).abs() < 1e-9);
        assert!((tail(0, 10, 3, 10) - 1.0).abs() < 1e-9);
        assert!((tail(3, 3, 0, 0) - 1.0).abs() < 1e-9);
        assert!((log_factorial(21) - log_factorial(20) - 21_f64.ln()).abs() < 1e-8);
    }
}
