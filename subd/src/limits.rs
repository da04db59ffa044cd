//! Limits what subd uses of the machine, and measures what it uses.
//!
//! Four rates are limited, each by a [`Budget`] of its own: processor time of the passes that hash,
//! reads from the device of the root, writes of what is fetched, and the network. The rates follow
//! from the machine's own ceilings, from the limits that a dominator sets, which can only be lower,
//! and from the speed of device and network: [`rates()`](rates::rates) decides, [`Budgets`] applies
//! them.
//!
//! # Invariants
//!
//! * A limit can be changed at any time; callers that wait already obey it within [`WAIT_MAX`].
//! * Usage is measured whether it is limited or not.
//!
//! [`WAIT_MAX`]: budget::WAIT_MAX

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use api::subd::{Limits, Load};
use model::lock::locked;
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};

use crate::limits::budget::Budget;
use crate::limits::rates::{Ceilings, Rates, Speeds, rates};

pub mod budget;
pub mod memory;
pub mod rates;
pub mod throughput;

/// The flags that limit what subd uses of the machine.
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

    /// The read speed of the device of the root in bytes per second, instead of measuring it at the
    /// first start.
    #[arg(long, value_name = "BYTES", value_parser = speed())]
    pub device_speed: Option<u64>,

    /// The speed of the network in bytes per second, instead of what its interface reports or
    /// fetching measures.
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
    pub fn ceilings(&self) -> Ceilings {
        let Self { cpu_percent, scan_percent, write_percent, network_percent, .. } = *self;
        Ceilings { cpu_percent, scan_percent, write_percent, network_percent }
    }

    /// The speeds that these flags set. They take precedence over measured ones.
    pub fn speeds(&self) -> Speeds {
        Speeds { device: self.device_speed, network: self.network_speed }
    }
}

/// The values that the rates were computed from.
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
    /// Applies the rates that follow from `ceilings`, the limits of a dominator, and `speeds`.
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
        // Plain values: a panic cannot leave them half changed.
        locked(&self.inputs)
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

    /// Applies the limits that a dominator sets.
    pub fn set_limits(&self, wire: Limits) {
        self.change(|inputs| inputs.wire = wire);
    }

    /// Sets the read speed of the device of the root, in bytes per second.
    pub fn set_device_speed(&self, speed: u64) {
        self.change(|inputs| inputs.speeds.device = Some(speed));
    }

    /// Sets the speed of the network, in bytes per second.
    pub fn set_network_speed(&self, speed: u64) {
        self.change(|inputs| inputs.speeds.network = Some(speed));
    }

    /// Returns the known speeds of device and network.
    pub fn speeds(&self) -> Speeds {
        self.inputs().speeds
    }

    /// Returns the machine's own ceilings, as polls report them.
    pub fn ceilings(&self) -> Limits {
        let Ceilings { cpu_percent, scan_percent, write_percent, network_percent } = self.ceilings;
        Limits {
            cpu_percent: Some(cpu_percent),
            scan_percent: Some(scan_percent),
            write_percent: Some(write_percent),
            network_percent: Some(network_percent),
        }
    }

    /// Returns the limits in force, and what is used of them.
    pub fn load(&self) -> Load {
        Load {
            cpu: self.cpu.share(),
            scan: self.scan.share(),
            write: self.write.share(),
            network: self.network.share(),
        }
    }
}

/// The unit in which the kernel counts reads, whatever the block size of the device.
const BLOCK_BYTES: u64 = 512;

/// What a thread has used since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub cpu: Duration,
    /// Bytes read from devices, not from the page cache.
    pub read_bytes: u64,
}

impl Usage {
    /// Returns what the calling thread has used until now.
    pub fn now() -> Self {
        Self { cpu: cpu_time(), read_bytes: read_bytes() }
    }

    /// Returns what was used since `self`, and sets `self` to now.
    pub fn step(&mut self) -> Self {
        let now = Self::now();
        let step = Self {
            cpu: now.cpu.saturating_sub(self.cpu),
            read_bytes: now.read_bytes.saturating_sub(self.read_bytes),
        };
        *self = now;
        step
    }

    /// The processor time in microseconds.
    pub fn cpu_us(&self) -> u64 {
        u64::try_from(self.cpu.as_micros()).unwrap_or(u64::MAX)
    }
}

/// Returns the processor time that this thread has used.
pub fn cpu_time() -> Duration {
    // Linux always has the clock of the calling thread. Without it passes would run at the shortest
    // interval.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Returns how much this thread has read from devices, in bytes; 0 on kernels that do not count it.
pub fn read_bytes() -> u64 {
    let blocks = getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.block_reads());
    u64::try_from(blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use api::subd::ResourceUse;
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
        let limit = |limit| ResourceUse { limit, used: 0 };
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
