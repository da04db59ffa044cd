//! How much subd may take: pure arithmetic over ceilings and speeds.
// tidy: core

use api::subd::Limits;

/// The speed of a device that could not be measured, in bytes per second: that of a slow one.
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
    /// Nothing is limited but what cannot be had anyway.
    pub const NONE: Self =
        Self { cpu_percent: 100, scan_percent: 100, write_percent: 100, network_percent: 100 };
}

/// How fast device and network are, in bytes per second; `None` where that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speeds {
    /// How fast the device of the root can be read.
    pub device: Option<u64>,
    /// How fast the network is.
    pub network: Option<u64>,
}

/// What may be taken in a second; `None` for as much as can be had.
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

/// What may be taken, given the machine's own ceilings, those that came over the wire, and the
/// speeds. The lower of two ceilings holds; 100 per cent is no limit.
pub fn rates(ceilings: &Ceilings, wire: &Limits, speeds: &Speeds) -> Rates {
    let device = speeds.device.unwrap_or(DEVICE_SPEED_UNKNOWN);
    let of = |ceiling: u8, wire: Option<u8>, speed: Option<u64>| {
        // A value without sense must not stop subd: nought would.
        let percent = u64::from(wire.map_or(ceiling, |wire| wire.clamp(1, ceiling.max(1))));
        let rate = |speed: u64| (speed / 100 * percent + speed % 100 * percent / 100).max(1);
        speed.filter(|_| percent < 100).map(rate)
    };
    Rates {
        cpu: of(ceilings.cpu_percent, wire.cpu_percent, Some(1_000_000)),
        scan: of(ceilings.scan_percent, wire.scan_percent, Some(device)),
        write: of(ceilings.write_percent, wire.write_percent, Some(device)),
        network: of(ceilings.network_percent, wire.network_percent, speeds.network),
    }
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
