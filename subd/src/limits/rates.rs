//! The rates that subd may use, computed from ceilings and speeds, and the average of what it uses.
// tidy: core

use std::time::Duration;

use api::subd::Limits;

/// The assumed speed of a device that could not be measured, in bytes per second.
pub const DEVICE_SPEED_UNKNOWN: u64 = 100_000_000;

/// The machine's own ceilings, in per cent: 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceilings {
    /// Of one core, for passes that hash.
    pub cpu_percent: u8,
    /// Of the speed of the device, for scanning.
    pub scan_percent: u8,
    /// Of the speed of the device, for writing what is fetched.
    pub write_percent: u8,
    /// Of the speed of the network, for fetching.
    pub network_percent: u8,
}

impl Ceilings {
    /// No limits.
    pub const NONE: Self =
        Self { cpu_percent: 100, scan_percent: 100, write_percent: 100, network_percent: 100 };
}

/// The speeds of device and network, in bytes per second; `None` if not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speeds {
    /// The read speed of the device of the root.
    pub device: Option<u64>,
    /// The speed of the network.
    pub network: Option<u64>,
}

/// What may be used per second; `None` for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Processor time, in microseconds.
    pub cpu: Option<u64>,
    /// Bytes read from the device.
    pub scan: Option<u64>,
    /// Bytes written to the device.
    pub write: Option<u64>,
    /// Bytes fetched.
    pub network: Option<u64>,
}

/// Returns what may be used, by the machine's own ceilings, those of a dominator, and the speeds.
/// The lower of two ceilings applies; 100 per cent is no limit.
pub fn rates(ceilings: &Ceilings, wire: &Limits, speeds: &Speeds) -> Rates {
    let device = speeds.device.unwrap_or(DEVICE_SPEED_UNKNOWN);
    let rate_of = |ceiling: u8, wire: Option<u8>, speed: Option<u64>| {
        // An invalid value must not stop subd, as 0 would.
        let percent = u64::from(wire.map_or(ceiling, |wire| wire.clamp(1, ceiling.max(1))));
        let rate = |speed: u64| (speed / 100 * percent + speed % 100 * percent / 100).max(1);
        speed.filter(|_| percent < 100).map(rate)
    };
    Rates {
        cpu: rate_of(ceilings.cpu_percent, wire.cpu_percent, Some(1_000_000)),
        scan: rate_of(ceilings.scan_percent, wire.scan_percent, Some(device)),
        write: rate_of(ceilings.write_percent, wire.write_percent, Some(device)),
        network: rate_of(ceilings.network_percent, wire.network_percent, speeds.network),
    }
}

/// How far back the average goes, in seconds.
const WINDOW_SECONDS: u64 = 60;

/// The average use. Times are since it was created, and may not run backwards far.
#[derive(Clone, Debug)]
pub struct UsageAverage {
    slots: [u64; WINDOW_SECONDS as usize],
    /// The second of the newest slot.
    newest: u64,
}

impl Default for UsageAverage {
    fn default() -> Self {
        Self { slots: [0; WINDOW_SECONDS as usize], newest: 0 }
    }
}

impl UsageAverage {
    /// Counts `units` at the time `now`.
    pub fn add(&mut self, now: Duration, units: u64) {
        self.advance(now);
        let slot = &mut self.slots[slot_of(self.newest)];
        *slot = slot.saturating_add(units);
    }

    /// Returns the use per second, on average over the minute before `now`, or over the time since
    /// the start if that is shorter.
    pub fn per_second(&mut self, now: Duration) -> u64 {
        self.advance(now);
        let sum = self.slots.iter().fold(0_u64, |sum, slot| sum.saturating_add(*slot));
        sum / (self.newest + 1).min(WINDOW_SECONDS)
    }

    /// Clears the slots of seconds in which nothing was counted.
    fn advance(&mut self, now: Duration) {
        let now = now.as_secs();
        let passed = now.saturating_sub(self.newest).min(WINDOW_SECONDS);
        for second in 0..passed {
            self.slots[slot_of(now - second)] = 0;
        }
        self.newest = self.newest.max(now);
    }
}

fn slot_of(second: u64) -> usize {
    usize::try_from(second % WINDOW_SECONDS).expect("it is less than sixty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_ceiling_holds() {
        #[rustfmt::skip]
        let table = [
            // local wire         speed             rate
            (2,      None,        Some(1_000),      Some(20)),
            (2,      Some(1),     Some(1_000),      Some(10)),
            (2,      Some(2),     Some(1_000),      Some(20)),
            (2,      Some(50),    Some(1_000),      Some(20)),
            (2,      Some(0),     Some(1_000),      Some(10)),
            (2,      Some(255),   Some(1_000),      Some(20)),
            (100,    None,        Some(1_000),      None),
            (100,    Some(100),   Some(1_000),      None),
            (100,    Some(99),    Some(1_000),      Some(990)),
            (10,     None,        None,             None),
            (10,     Some(3),     None,             None),
            (1,      None,        Some(7),          Some(1)),
            (2,      None,        Some(155),        Some(3)),
            (99,     None,        Some(u64::MAX),   Some(u64::MAX / 100 * 99 + 14)),
        ];
        for (local, wire, speed, rate) in table {
            let ceilings = Ceilings { network_percent: local, ..Ceilings::NONE };
            let wire = Limits { network_percent: wire, ..Limits::default() };
            let got = rates(&ceilings, &wire, &Speeds { device: None, network: speed });
            let expected = Rates { cpu: None, scan: None, write: None, network: rate };
            assert_eq!(got, expected, "{local} {wire:?} {speed:?}");
        }
    }

    #[test]
    fn each_rate_comes_from_its_own_ceiling_and_speed() {
        let ceilings =
            Ceilings { cpu_percent: 5, scan_percent: 2, write_percent: 10, network_percent: 20 };
        let unknown = Rates {
            cpu: Some(50_000),
            scan: Some(DEVICE_SPEED_UNKNOWN / 50),
            write: Some(DEVICE_SPEED_UNKNOWN / 10),
            network: None,
        };
        assert_eq!(rates(&ceilings, &Limits::default(), &Speeds::default()), unknown);
        let wire = Limits {
            cpu_percent: Some(4),
            scan_percent: Some(1),
            write_percent: Some(3),
            network_percent: Some(2),
        };
        let speeds = Speeds { device: Some(1_000_000), network: Some(1_000) };
        let known =
            Rates { cpu: Some(40_000), scan: Some(10_000), write: Some(30_000), network: Some(20) };
        assert_eq!(rates(&ceilings, &wire, &speeds), known);
    }
}

#[cfg(test)]
mod meter_tests {
    use super::*;

    #[test]
    fn averages_over_the_last_minute() {
        let at = Duration::from_secs;
        let mut average = UsageAverage::default();
        assert_eq!(average.per_second(at(0)), 0);
        average.add(at(0), 600);
        assert_eq!(average.per_second(at(0)), 600);
        assert_eq!(average.per_second(at(9)), 60);
        assert_eq!(average.per_second(at(59)), 10);
        assert_eq!(average.per_second(at(60)), 0);
        average.add(at(61), 60);
        average.add(at(90), 60);
        average.add(at(89), 60);
        assert_eq!(average.per_second(at(120)), 3);
        assert_eq!(average.per_second(at(121)), 2);
        assert_eq!(average.per_second(at(1_000_000)), 0);
        average.add(at(1_000_000), u64::MAX);
        average.add(at(1_000_000), u64::MAX);
        assert_eq!(average.per_second(at(1_000_001)), u64::MAX / 60);
    }
}
