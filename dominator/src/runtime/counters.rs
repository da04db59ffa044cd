//! What the drivers of all machines count.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// The upper limits of the buckets of plan durations, in seconds.
const PLAN_SECONDS: [f64; 9] = [0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0];

/// Counters of all drivers together.
#[derive(Debug)]
pub struct Counters {
    polls: Counter,
    polls_failed: Counter,
    plans: Histogram,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            polls: Counter::default(),
            polls_failed: Counter::default(),
            plans: Histogram::new(PLAN_SECONDS),
        }
    }
}

impl Counters {
    /// Counts a poll.
    pub fn polled(&self, answered: bool) {
        if answered { &self.polls } else { &self.polls_failed }.inc();
    }

    /// Counts a plan.
    pub fn planned(&self, took: Duration) {
        self.plans.observe(took.as_secs_f64());
    }

    /// Makes the counters known.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("polls", "Polls that subs have answered", self.polls.clone());
        registry.register(
            "polls_failed",
            "Polls that subs have not answered",
            self.polls_failed.clone(),
        );
        registry.register_with_unit(
            "plan",
            "Time that it took to make a plan; the count is that of plans",
            Unit::Seconds,
            self.plans.clone(),
        );
    }
}
