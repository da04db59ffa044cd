//! Limits what subd uses of the machine, and measures what it uses.
//!
//! Four rates are limited, each by a [`Budget`] of its own: processor time of the passes that hash,
//! reads from the device of the root, writes of what is fetched, and the network. The rates follow
//! from the machine's own ceilings, from the limits that a dominator sets, which never exceed a
//! ceiling, from defaults where neither is set, and from the speed of device and network:
//! [`limits_in_force`] decides, [`Budgets`] applies them. Defaults do not hold back the fetches of
//! an installation, or of an update that an operator called urgent.
//!
//! # Invariants
//!
//! * A limit can be changed at any time; callers that wait already obey it within [`WAIT_MAX`].
//! * Usage is measured whether it is limited or not.
//!
//! [`WAIT_MAX`]: budget::WAIT_MAX

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use api::subd::{GetLimitsReply, LimitInForce, LimitReason, Limits, Load};
use model::lock::locked;
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};

use crate::limits::budget::Budget;
use crate::limits::rates::{Ceilings, Speed, Speeds, limits_in_force};

pub mod budget;
pub mod memory;
pub mod rates;
pub mod throughput;

/// How long after [`Budgets::hurry`] a fetch must start to be urgent.
const HURRY_MAX: Duration = Duration::from_secs(10 * 60);

/// The flags that limit what subd uses of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
#[command(
    next_help_heading = "Limits (a dominator can lower those that are given, never raise them)"
)]
pub struct LimitArgs {
    /// Processor time of the passes that hash all files, in per cent of one core. Without it, 5.
    #[arg(long, value_name = "PERCENT", value_parser = percent())]
    pub cpu_percent: Option<u8>,

    /// Reads by scanning, in per cent of the speed of the device. Without it, 2.
    #[arg(long, value_name = "PERCENT", value_parser = percent())]
    pub scan_percent: Option<u8>,

    /// Writes of fetched files, in per cent of the speed at which the device can be read. Without
    /// it, 10; but no limit with another root than /, or for an update that an operator called
    /// urgent.
    #[arg(long, value_name = "PERCENT", value_parser = percent())]
    pub write_percent: Option<u8>,

    /// Fetching, in per cent of the speed of the network. Without it, 10; but no limit with another
    /// root than /, or for an update that an operator called urgent.
    #[arg(long, value_name = "PERCENT", value_parser = percent())]
    pub network_percent: Option<u8>,

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
        Speeds {
            device: self.device_speed.map(Speed::configured),
            network: self.network_speed.map(Speed::configured),
        }
    }
}

/// The values that the rates are computed from.
#[derive(Clone, Copy, Debug, Default)]
struct Inputs {
    told: Limits,
    speeds: Speeds,
    is_installation: bool,
    /// When an operator called an update urgent.
    hurried: Option<Instant>,
    /// True during a fetch that an update needs.
    is_fetching: bool,
    /// True during such a fetch that is urgent.
    is_urgent: bool,
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

/// Returns the rate of a budget.
fn rate(limit: LimitInForce) -> Option<u64> {
    Some(limit.limit).filter(|limit| *limit > 0)
}

impl Budgets {
    /// Applies the limits that follow from `ceilings`, from what a dominator has `told`, and from
    /// `speeds`.
    pub fn new(ceilings: Ceilings, told: Limits, speeds: Speeds) -> Self {
        let budget = || Budget::new(None);
        let (cpu, scan, write, network) = (budget(), budget(), budget(), budget());
        let inputs = Mutex::new(Inputs { told, speeds, ..Inputs::default() });
        let budgets = Self { cpu, scan, write, network, ceilings, inputs };
        budgets.change(|_| ());
        budgets
    }

    /// Lifts the defaults for fetches if the root `is_installation`: not that of the machine.
    #[must_use]
    pub fn of_installation(self, is_installation: bool) -> Self {
        self.change(|inputs| inputs.is_installation = is_installation);
        self
    }

    fn inputs(&self) -> MutexGuard<'_, Inputs> {
        // Plain values: a panic cannot leave them half changed.
        locked(&self.inputs)
    }

    fn change(&self, change: impl FnOnce(&mut Inputs)) {
        let mut inputs = self.inputs();
        change(&mut inputs);
        let GetLimitsReply { cpu, scan, write, network } = self.decide(&inputs);
        self.cpu.set_rate(rate(cpu));
        self.scan.set_rate(rate(scan));
        self.write.set_rate(rate(write));
        self.network.set_rate(rate(network));
    }

    fn decide(&self, inputs: &Inputs) -> GetLimitsReply {
        let lifted = match inputs {
            Inputs { is_urgent: true, .. } => Some(LimitReason::Urgent),
            Inputs { is_installation: true, .. } => Some(LimitReason::Installation),
            _ => None,
        };
        limits_in_force(&self.ceilings, &inputs.told, &inputs.speeds, lifted)
    }

    /// Returns the limits that hold, and why.
    pub fn in_force(&self) -> GetLimitsReply {
        self.decide(&self.inputs())
    }

    /// Has the fetch that an update needs be urgent, and those that start soon.
    pub fn hurry(&self) {
        self.change(|inputs| {
            inputs.hurried = Some(Instant::now());
            inputs.is_urgent = inputs.is_fetching;
        });
    }

    /// A fetch begins that an update needs.
    pub fn begin_fetch(&self) {
        self.change(|inputs| {
            inputs.is_fetching = true;
            inputs.is_urgent = inputs.hurried.is_some_and(|since| since.elapsed() < HURRY_MAX);
        });
    }

    /// That fetch has ended.
    pub fn end_fetch(&self) {
        self.change(|inputs| (inputs.is_fetching, inputs.is_urgent) = (false, false));
    }

    /// Applies the limits that a dominator sets.
    pub fn set_limits(&self, told: Limits) {
        self.change(|inputs| inputs.told = told);
    }

    /// Sets the read speed of the device of the root.
    pub fn set_device_speed(&self, speed: Speed) {
        self.change(|inputs| inputs.speeds.device = Some(speed));
    }

    /// Sets the speed of the network.
    pub fn set_network_speed(&self, speed: Speed) {
        self.change(|inputs| inputs.speeds.network = Some(speed));
    }

    /// Returns the known speeds of device and network.
    pub fn speeds(&self) -> Speeds {
        self.inputs().speeds
    }

    /// Returns the machine's own ceilings, as polls report them: those that are configured.
    pub fn ceilings(&self) -> Limits {
        let Ceilings { cpu_percent, scan_percent, write_percent, network_percent } = self.ceilings;
        Limits { cpu_percent, scan_percent, write_percent, network_percent }
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
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Options {
        #[command(flatten)]
        limits: LimitArgs,
    }

    fn budgets(flags: &[&str]) -> Budgets {
        let args = Options::try_parse_from([""].iter().chain(flags)).unwrap().limits;
        Budgets::new(args.ceilings(), Limits::default(), args.speeds())
    }

    fn limits(budgets: &Budgets) -> [u64; 4] {
        let Load { cpu, scan, write, network } = budgets.load();
        [cpu, scan, write, network].map(|share| share.limit)
    }

    #[test]
    fn limits_change_at_run_time_and_never_above_the_flags_that_are_given() {
        let budgets = budgets(&["--scan-percent", "4", "--device-speed", "1000000"]);
        assert_eq!(limits(&budgets), [50_000, 40_000, 100_000, 0]);
        budgets.set_limits(Limits {
            cpu_percent: Some(50),
            scan_percent: Some(50),
            ..Limits::default()
        });
        budgets.set_network_speed(Speed::configured(5_000));
        assert_eq!(limits(&budgets), [500_000, 40_000, 100_000, 500]);
    }

    #[test]
    fn a_fetch_is_urgent_from_its_beginning_to_its_end() {
        let budgets = budgets(&["--device-speed", "1000000", "--network-speed", "5000"]);
        let held = [50_000, 20_000, 100_000, 500];
        budgets.begin_fetch();
        assert_eq!(limits(&budgets), held);
        budgets.end_fetch();
        budgets.hurry();
        assert_eq!(limits(&budgets), held);
        budgets.begin_fetch();
        assert_eq!(limits(&budgets), [50_000, 20_000, 0, 0]);
        assert_eq!(budgets.in_force().write.reason, LimitReason::Urgent);
        budgets.end_fetch();
        assert_eq!(limits(&budgets), held);
        assert_eq!(limits(&budgets.of_installation(true)), [50_000, 20_000, 0, 0]);
    }

    #[test]
    fn flags_without_sense_are_refused() {
        for flags in [["--cpu-percent", "0"], ["--scan-percent", "101"], ["--device-speed", "0"]] {
            assert!(Options::try_parse_from([""].iter().chain(&flags)).is_err(), "{flags:?}");
        }
    }
}
