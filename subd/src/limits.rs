//! What subd may take of the machine, and what it takes.
//!
//! Four rates are limited, each by a [`Budget`] of its own: processor time of the passes that hash,
//! reads from the device of the root, writes of what is fetched, and the network. How much that is
//! follows from the machine's own ceilings, from what a dominator asks for, which can only be less,
//! and from how fast device and network are: [`rates()`] decides, [`Budgets`] puts it in force.
//!
//! # Invariants
//!
//! * A limit can be changed at any time; who waits already is told within [`WAIT_MAX`].
//! * What is used is counted whether it is limited or not.
//!
//! [`WAIT_MAX`]: budget::WAIT_MAX

pub mod budget;
pub mod meter;
pub mod rates;
pub mod throughput;
pub mod usage;

use std::sync::{Mutex, MutexGuard, PoisonError};

use api::subd::{Limits, Load};

pub use budget::Budget;
pub use rates::{Ceilings, Rates, Speeds, rates};

/// The flags that say what subd may take of the machine at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Limits (a dominator can lower them, never raise them)")]
pub struct LimitArgs {
    /// Processor time of the passes that hash all files, in per cent of one core.
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = percent())]
    pub cpu_percent: u8,

    /// Reads by scanning, in per cent of the speed of the device.
    #[arg(long, value_name = "PERCENT", default_value_t = 2, value_parser = percent())]
    pub scan_percent: u8,

    /// Writes of fetched files, in per cent of the speed at which the device can be read.
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = percent())]
    pub write_percent: u8,

    /// Fetching, in per cent of the speed of the network.
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = percent())]
    pub network_percent: u8,

    /// How fast the device of the root can be read, in bytes per second, instead of measuring it
    /// at the first start.
    #[arg(long, value_name = "BYTES", value_parser = speed())]
    pub device_speed: Option<u64>,

    /// How fast the network is, in bytes per second, instead of what its interface says or
    /// fetching shows.
    #[arg(long, value_name = "BYTES", value_parser = speed())]
    pub network_speed: Option<u64>,
}

fn percent() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..=100)
}

fn speed() -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..)
}

impl LimitArgs {
    /// The ceilings that these flags set.
    #[must_use]
    pub fn ceilings(&self) -> Ceilings {
        let Self { cpu_percent, scan_percent, write_percent, network_percent, .. } = *self;
        Ceilings { cpu_percent, scan_percent, write_percent, network_percent }
    }

    /// The speeds that these flags say; what was measured is of no interest beside them.
    #[must_use]
    pub fn speeds(&self) -> Speeds {
        Speeds { device: self.device_speed, network: self.network_speed }
    }
}

/// What the rates were made of.
#[derive(Clone, Copy, Debug, Default)]
struct Inputs {
    wire: Limits,
    speeds: Speeds,
}

/// The budgets in force.
#[derive(Debug)]
pub struct Budgets {
    /// Processor time of the passes, in microseconds.
    pub cpu: Budget,
    /// Bytes read from the device of the root.
    pub scan: Budget,
    /// Bytes of fetched files written.
    pub write: Budget,
    /// Bytes fetched over the network.
    pub network: Budget,
    ceilings: Ceilings,
    inputs: Mutex<Inputs>,
}

impl Budgets {
    /// Puts in force what follows from `ceilings`, what a dominator asked for, and `speeds`.
    #[must_use]
    pub fn new(ceilings: Ceilings, wire: Limits, speeds: Speeds) -> Self {
        let Rates { cpu, scan, write, network } = rates(&ceilings, &wire, &speeds);
        Self {
            cpu: Budget::new(cpu),
            scan: Budget::new(scan),
            write: Budget::new(write),
            network: Budget::new(network),
            ceilings,
            inputs: Mutex::new(Inputs { wire, speeds }),
        }
    }

    fn inputs(&self) -> MutexGuard<'_, Inputs> {
        // Plain values: there is nothing that a panic could leave half done.
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Inputs)) {
        let mut inputs = self.inputs();
        change(&mut inputs);
        let Rates { cpu, scan, write, network } =
            rates(&self.ceilings, &inputs.wire, &inputs.speeds);
        self.cpu.set_rate(cpu);
        self.scan.set_rate(scan);
        self.write.set_rate(write);
        self.network.set_rate(network);
    }

    /// Puts in force what a dominator asks for now.
    pub fn set_limits(&self, wire: Limits) {
        self.change(|inputs| inputs.wire = wire);
    }

    /// Notes how fast the device of the root can be read, in bytes per second.
    pub fn set_device_speed(&self, speed: u64) {
        self.change(|inputs| inputs.speeds.device = Some(speed));
    }

    /// Notes how fast the network is, in bytes per second.
    pub fn set_network_speed(&self, speed: u64) {
        self.change(|inputs| inputs.speeds.network = Some(speed));
    }

    /// How fast device and network are, as far as that is known.
    #[must_use]
    pub fn speeds(&self) -> Speeds {
        self.inputs().speeds
    }

    /// The machine's own ceilings, as polls report them.
    #[must_use]
    pub fn ceilings(&self) -> Limits {
        let Ceilings { cpu_percent, scan_percent, write_percent, network_percent } = self.ceilings;
        Limits {
            cpu_percent: Some(cpu_percent),
            scan_percent: Some(scan_percent),
            write_percent: Some(write_percent),
            network_percent: Some(network_percent),
        }
    }

    /// The limits in force, and what is used of them.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            cpu: self.cpu.share(),
            scan: self.scan.share(),
            write: self.write.share(),
            network: self.network.share(),
        }
    }
}

#[cfg(test)]
mod tests {
    use api::subd::Share;
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Options {
        #[command(flatten)]
        limits: LimitArgs,
    }

    #[test]
    fn limits_change_at_run_time_and_never_above_the_flags() {
        let flags = ["", "--scan-percent", "4", "--device-speed", "1000000"];
        let args = Options::try_parse_from(flags).unwrap().limits;
        let budgets = Budgets::new(args.ceilings(), Limits::default(), args.speeds());
        let limit = |limit| Share { limit, used: 0 };
        assert_eq!(
            budgets.load(),
            Load {
                cpu: limit(50_000),
                scan: limit(40_000),
                write: limit(100_000),
                network: limit(0)
            }
        );
        budgets.set_limits(Limits {
            cpu_percent: Some(50),
            scan_percent: Some(1),
            ..Limits::default()
        });
        budgets.set_network_speed(5_000);
        assert_eq!(
            budgets.load(),
            Load {
                cpu: limit(50_000),
                scan: limit(10_000),
                write: limit(100_000),
                network: limit(500)
            }
        );
    }

    #[test]
    fn flags_without_sense_are_refused() {
        for flags in [["--cpu-percent", "0"], ["--scan-percent", "101"], ["--device-speed", "0"]] {
            assert!(Options::try_parse_from([""].iter().chain(&flags)).is_err(), "{flags:?}");
        }
    }
}
