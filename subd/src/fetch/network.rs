//! Limits fetching to its share of the network, and measures the speed of the network.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::subd::SpeedSource;
use model::lock::locked;

use crate::limits::Budgets;
use crate::limits::rates::Speed;

/// How much is fetched without a limit to measure the network, in bytes. A source that is slow for
/// other reasons leads to a speed that is too low, which is the safe side.
const MEASURED_BYTES: u64 = 8 << 20;

/// The shortest time of a measurement.
const MEASURED_TIME_MIN: Duration = Duration::from_millis(1);

/// The bytes since the first of them.
#[derive(Debug)]
struct Measurement {
    since: Instant,
    bytes: u64,
}

/// Counts the bytes that arrive over the network.
#[derive(Debug)]
pub struct Network {
    budgets: Arc<Budgets>,
    measurement: Mutex<Option<Measurement>>,
    measured: Mutex<Option<u64>>,
}

impl Network {
    /// Counts against `budgets`.
    pub fn new(budgets: Arc<Budgets>) -> Self {
        Self { budgets, measurement: Mutex::new(None), measured: Mutex::new(None) }
    }

    /// Starts a new measurement, for example after a pause without requests.
    pub fn begin(&self) {
        *locked(&self.measurement) = None;
    }

    /// Charges `bytes`, and waits until more may be received. Bytes from this very machine
    /// (`local`) are not charged. False while the network is measured: nothing else should slow it
    /// down then.
    pub async fn take(&self, bytes: u64, local: bool) -> bool {
        if local {
            return true;
        }
        let measured = self.measure(bytes);
        self.budgets.network.take(bytes).await;
        measured
    }

    /// Measures. True if the speed of the network is known.
    fn measure(&self, bytes: u64) -> bool {
        if self.budgets.speeds().network.is_some() {
            return true;
        }
        let mut measurement = locked(&self.measurement);
        // The time of the first bytes is not known.
        let Some(Measurement { since, bytes: sum }) = &mut *measurement else {
            *measurement = Some(Measurement { since: Instant::now(), bytes: 0 });
            return false;
        };
        *sum += bytes;
        let time = since.elapsed();
        if *sum < MEASURED_BYTES || time < MEASURED_TIME_MIN {
            return false;
        }
        let speed = u128::from(*sum) * 1_000_000_000 / time.as_nanos().max(1);
        let speed = u64::try_from(speed).unwrap_or(u64::MAX).max(1);
        let Some(plausible) = Speed::of_network(speed, SpeedSource::Measured) else {
            tracing::info!(
                bytes_per_second = speed,
                "no network is so slow or fast: measured again"
            );
            *measurement = None;
            return false;
        };
        tracing::info!(bytes_per_second = speed, "the speed of the network was measured");
        self.budgets.set_network_speed(plausible);
        *locked(&self.measured) = Some(speed);
        true
    }

    /// Takes the speed in bytes per second that was measured since the last call.
    pub fn take_measured(&self) -> Option<u64> {
        locked(&self.measured).take()
    }
}
