//! Limits fetching to its share of the network, and measures the speed of the network.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::limits::Budgets;

/// How much is fetched without a limit to measure the network, in bytes. A source that is slow for
/// other reasons leads to a speed that is too low, which is the safe side.
const MEASURED_BYTES: u64 = 8 << 20;

/// The shortest time that gives a speed.
const MEASURED_TIME_MIN: Duration = Duration::from_millis(1);

/// The bytes that arrived since the first of them.
#[derive(Debug)]
struct Stretch {
    since: Instant,
    bytes: u64,
}

/// Counts the bytes that arrive over the network.
#[derive(Debug)]
pub struct Network {
    budgets: Arc<Budgets>,
    stretch: Mutex<Option<Stretch>>,
    measured: Mutex<Option<u64>>,
}

impl Network {
    /// Counts against `budgets`.
    pub fn new(budgets: Arc<Budgets>) -> Self {
        Self { budgets, stretch: Mutex::new(None), measured: Mutex::new(None) }
    }

    /// Starts a new measurement, for example after a pause without requests.
    pub fn begin(&self) {
        *self.stretch.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Notes that `bytes` came, and waits until more may come. What comes from this very machine
    /// (`local`) takes nothing of the network. False while the network is measured: nothing else
    /// should slow it down then.
    pub async fn take(&self, bytes: u64, local: bool) -> bool {
        if local {
            return true;
        }
        let measured = self.measure(bytes);
        self.budgets.network.take(bytes).await;
        measured
    }

    /// Measures; true if it is known how fast the network is.
    fn measure(&self, bytes: u64) -> bool {
        if self.budgets.speeds().network.is_some() {
            return true;
        }
        let mut stretch = self.stretch.lock().unwrap_or_else(PoisonError::into_inner);
        // What came first says nothing of how long it took.
        let Some(Stretch { since, bytes: sum }) = &mut *stretch else {
            *stretch = Some(Stretch { since: Instant::now(), bytes: 0 });
            return false;
        };
        *sum += bytes;
        let time = since.elapsed();
        if *sum < MEASURED_BYTES || time < MEASURED_TIME_MIN {
            return false;
        }
        let speed = u128::from(*sum) * 1_000_000_000 / time.as_nanos().max(1);
        let speed = u64::try_from(speed).unwrap_or(u64::MAX).max(1);
        tracing::info!(bytes_per_second = speed, "the speed of the network was measured");
        self.budgets.set_network_speed(speed);
        *self.measured.lock().unwrap_or_else(PoisonError::into_inner) = Some(speed);
        true
    }

    /// Takes the speed in bytes per second that was measured since it was asked last.
    pub fn take_measured(&self) -> Option<u64> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
