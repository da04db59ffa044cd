//! The rates that subd may use and why, computed from ceilings and speeds, and the average of what
//! it uses.
// tidy: core

use std::time::Duration;

use api::subd::{GetLimitsReply, LimitInForce, LimitReason, Limits, SpeedSource};

/// The assumed speed of a device that could not be measured, in bytes per second.
pub const DEVICE_SPEED_UNKNOWN: u64 = 100_000_000;

/// The speeds at which a device can plausibly be read, in bytes per second.
const DEVICE_SPEEDS: std::ops::RangeInclusive<u64> = 5_000_000..=50_000_000_000;

/// The plausible speeds of a network, in bytes per second: up to 400 Gbit/s. A source that was slow
/// for other reasons gives less.
const NETWORK_SPEEDS: std::ops::RangeInclusive<u64> = 10_000..=50_000_000_000;

/// The machine's own ceilings, in per cent: 1 to 100. `None` where its configuration sets none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ceilings {
    /// Of one core, for passes that hash.
    pub cpu_percent: Option<u8>,
    /// Of the speed of the device, for scanning.
    pub scan_percent: Option<u8>,
    /// Of the speed of the device, for writing what is fetched.
    pub write_percent: Option<u8>,
    /// Of the speed of the network, for fetching.
    pub network_percent: Option<u8>,
}

impl Ceilings {
    /// No limits.
    pub const NONE: Self = Self {
        cpu_percent: Some(100),
        scan_percent: Some(100),
        write_percent: Some(100),
        network_percent: Some(100),
    };
}

/// The shares that hold where nobody sets others, in per cent.
const CPU_DEFAULT: u8 = 5;
const SCAN_DEFAULT: u8 = 2;
const WRITE_DEFAULT: u8 = 10;
const NETWORK_DEFAULT: u8 = 10;

/// A speed, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speed {
    pub bytes: u64,
    pub source: SpeedSource,
}

impl Speed {
    /// Returns the speed that the machine's own configuration sets.
    pub fn configured(bytes: u64) -> Self {
        Self { bytes, source: SpeedSource::Configured }
    }

    /// Returns a measured speed of a device, if it is plausible.
    pub fn of_device(bytes: u64) -> Option<Self> {
        let source = SpeedSource::Measured;
        DEVICE_SPEEDS.contains(&bytes).then_some(Self { bytes, source })
    }

    /// Returns the speed of a network by `source`, if it is plausible.
    pub fn of_network(bytes: u64, source: SpeedSource) -> Option<Self> {
        NETWORK_SPEEDS.contains(&bytes).then_some(Self { bytes, source })
    }
}

/// The speeds of device and network; `None` if not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speeds {
    /// The read speed of the device of the root.
    pub device: Option<Speed>,
    /// The speed of the network.
    pub network: Option<Speed>,
}

/// Returns what may be used and why: by the machine's own ceilings, by what a dominator has `told`,
/// and by the speeds. A ceiling always holds, and what was told holds up to it. Where neither is
/// set a default holds; `lifted` is why the defaults of fetching do not.
pub fn limits_in_force(
    ceilings: &Ceilings,
    told: &Limits,
    speeds: &Speeds,
    lifted: Option<LimitReason>,
) -> GetLimitsReply {
    let limit = |ceiling: Option<u8>, told: Option<u8>, otherwise, speed: (u64, SpeedSource)| {
        let (speed, speed_source) = speed;
        // An invalid value must not stop subd, as 0 would.
        let (percent, reason) = match (ceiling, told.map(|told| told.clamp(1, 100))) {
            (Some(ceiling), Some(told)) if told < ceiling => (told, LimitReason::Told),
            (Some(ceiling), _) => (ceiling.max(1), LimitReason::Ceiling),
            (None, Some(told)) => (told, LimitReason::Told),
            (None, None) => otherwise,
        };
        let share = u64::from(percent);
        let limit = match percent < 100 && speed_source != SpeedSource::Unknown {
            true => (speed / 100 * share + speed % 100 * share / 100).max(1),
            false => 0,
        };
        LimitInForce { limit, percent, reason, speed, speed_source }
    };
    let by_default = |percent| (percent, LimitReason::Default);
    let of_fetch = |percent| lifted.map_or(by_default(percent), |reason| (100, reason));
    let core = (1_000_000, SpeedSource::Core);
    let device = speeds
        .device
        .unwrap_or(Speed { bytes: DEVICE_SPEED_UNKNOWN, source: SpeedSource::Assumed });
    let network = speeds.network.unwrap_or(Speed { bytes: 0, source: SpeedSource::Unknown });
    let (device, network) = ((device.bytes, device.source), (network.bytes, network.source));
    GetLimitsReply {
        cpu: limit(ceilings.cpu_percent, told.cpu_percent, by_default(CPU_DEFAULT), core),
        scan: limit(ceilings.scan_percent, told.scan_percent, by_default(SCAN_DEFAULT), device),
        write: limit(ceilings.write_percent, told.write_percent, of_fetch(WRITE_DEFAULT), device),
        network: limit(
            ceilings.network_percent,
            told.network_percent,
            of_fetch(NETWORK_DEFAULT),
            network,
        ),
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
    use LimitReason::{Ceiling, Default as ByDefault, Installation, Told, Urgent};

    use super::*;

    #[test]
    fn a_ceiling_always_holds_and_a_default_only_where_nothing_else_does() {
        let measured = |bytes| Some(Speed { bytes, source: SpeedSource::Measured });
        #[rustfmt::skip]
        let table = [
            // ceiling told      speed          lifted                 limit percent reason
            (Some(2),  None,      Some(1_000),   None,                 20,   2,   Ceiling),
            (Some(2),  Some(1),   Some(1_000),   None,                 10,   1,   Told),
            (Some(2),  Some(50),  Some(1_000),   None,                 20,   2,   Ceiling),
            (Some(2),  Some(0),   Some(1_000),   None,                 10,   1,   Told),
            (Some(2),  Some(255), Some(1_000),   None,                 20,   2,   Ceiling),
            (Some(2),  None,      Some(1_000),   Some(Installation),   20,   2,   Ceiling),
            (Some(2),  None,      Some(1_000),   Some(Urgent),         20,   2,   Ceiling),
            (Some(100), None,     Some(1_000),   None,                 0,    100, Ceiling),
            (Some(100), Some(99), Some(1_000),   None,                 990,  99,  Told),
            (Some(0),  None,      Some(1_000),   None,                 10,   1,   Ceiling),
            (None,     None,      Some(1_000),   None,                 100,  10,  ByDefault),
            (None,     None,      Some(1_000),   Some(Installation),   0,    100, Installation),
            (None,     None,      Some(1_000),   Some(Urgent),         0,    100, Urgent),
            // What was told may be more than the default, and holds for whatever is fetched.
            (None,     Some(50),  Some(1_000),   None,                 500,  50,  Told),
            (None,     Some(3),   Some(1_000),   Some(Installation),   30,   3,   Told),
            (None,     Some(3),   Some(1_000),   Some(Urgent),         30,   3,   Told),
            (None,     Some(255), Some(1_000),   None,                 0,    100, Told),
            (None,     None,      None,          None,                 0,    10,  ByDefault),
            (Some(1),  None,      Some(7),       None,                 1,    1,   Ceiling),
            (Some(2),  None,      Some(155),     None,                 3,    2,   Ceiling),
            (Some(99), None,      Some(u64::MAX), None, u64::MAX / 100 * 99 + 14, 99, Ceiling),
        ];
        for (ceiling, told, speed, lifted, limit, percent, reason) in table {
            let ceilings = Ceilings { network_percent: ceiling, ..Ceilings::default() };
            let limits = Limits { network_percent: told, ..Limits::default() };
            let speeds = Speeds { device: None, network: speed.and_then(measured) };
            let got = limits_in_force(&ceilings, &limits, &speeds, lifted).network;
            let (speed, source) =
                speed.map_or((0, SpeedSource::Unknown), |speed| (speed, SpeedSource::Measured));
            let expected = LimitInForce { limit, percent, reason, speed, speed_source: source };
            assert_eq!(got, expected, "{ceiling:?} {told:?} {lifted:?}");
        }
    }

    #[test]
    fn each_limit_comes_from_its_own_ceiling_and_speed() {
        let limits = |reply: GetLimitsReply| {
            [reply.cpu, reply.scan, reply.write, reply.network].map(|one| (one.limit, one.reason))
        };
        let none = (Ceilings::default(), Limits::default());
        let of = |ceilings: &Ceilings, told: &Limits, speeds: &Speeds, lifted| {
            limits(limits_in_force(ceilings, told, speeds, lifted))
        };
        let (scan, write) = (DEVICE_SPEED_UNKNOWN / 50, DEVICE_SPEED_UNKNOWN / 10);
        let held = [50_000, scan, write, 0].map(|limit| (limit, ByDefault));
        assert_eq!(of(&none.0, &none.1, &Speeds::default(), None), held);
        // Scanning is held back in an installation too.
        let lifted = of(&none.0, &none.1, &Speeds::default(), Some(Installation));
        assert_eq!(lifted, [held[0], held[1], (0, Installation), (0, Installation)]);
        let told = Limits {
            cpu_percent: Some(4),
            scan_percent: Some(1),
            write_percent: Some(3),
            network_percent: Some(2),
        };
        let speeds = Speeds {
            device: Some(Speed::configured(1_000_000)),
            network: Some(Speed::configured(1_000)),
        };
        let known = [40_000, 10_000, 30_000, 20].map(|limit| (limit, Told));
        assert_eq!(of(&none.0, &told, &speeds, None), known);
        assert_eq!(of(&Ceilings::NONE, &none.1, &speeds, None), [(0, Ceiling); 4]);
    }

    #[test]
    fn only_plausible_speeds_count() {
        let interface = SpeedSource::Interface;
        #[rustfmt::skip]
        let table = [
            (9_999, false, false), (10_000, false, true), (4_999_999, false, true),
            (5_000_000, true, true), (50_000_000_000, true, true), (50_000_000_001, false, false),
        ];
        for (bytes, of_device, of_network) in table {
            assert_eq!(Speed::of_device(bytes).is_some(), of_device, "{bytes}");
            assert_eq!(Speed::of_network(bytes, interface).is_some(), of_network, "{bytes}");
        }
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
