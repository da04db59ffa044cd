//! Measures time, processor time and memory of processes, and summarizes several runs.

use std::fmt;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::time::ClockId;
use nix::unistd::Pid;

/// Values of several runs.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Adds the value of one run.
    pub fn add(&mut self, value: f64) {
        let at = self.0.partition_point(|other| *other < value);
        self.0.insert(at, value);
    }

    /// Returns the percentile; 0 without values.
    pub fn percentile(&self, hundredths: usize) -> f64 {
        let rank = (self.0.len() * hundredths).div_ceil(100).max(1);
        self.0.get(rank - 1).copied().unwrap_or_default()
    }

    /// Returns the median; 0 without values.
    pub fn median(&self) -> f64 {
        self.percentile(50)
    }

    /// Returns the median and the range as a text, with `one` for each value.
    pub fn shown(&self, one: impl Fn(f64) -> String) -> String {
        match self.0.as_slice() {
            [] => "not measured".to_owned(),
            [only] => one(*only),
            [least, .., most] => {
                format!("{} ({} to {})", one(self.median()), one(*least), one(*most))
            }
        }
    }
}

/// Returns a duration in seconds as a text.
pub fn seconds(value: f64) -> String {
    match value {
        0.0..0.1 => format!("{:.2} ms", value * 1e3),
        0.1..1.0 => format!("{:.0} ms", value * 1e3),
        _ => format!("{value:.2} s"),
    }
}

/// Returns a number of bytes as a text.
pub fn mebibytes(value: f64) -> String {
    format!("{:.1} MiB", value / f64::from(1 << 20))
}

/// The cost of a command.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    pub wall: Duration,
    /// The processor time, including children.
    pub cpu: Duration,
    /// The peak of the resident memory of the process itself, in bytes.
    pub memory: u64,
}

/// Runs a command to its end and discards its output.
///
/// # Errors
///
/// If it cannot be run, or does not end with one of the codes in `good`.
pub fn run(command: &mut Command, good: &[i32]) -> anyhow::Result<Took> {
    let name = command.get_program().to_string_lossy().into_owned();
    let before = children()?;
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {name}: is it installed?"))?;
    let id = child.id();
    let ended = AtomicBool::new(false);
    let (status, memory) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0;
            while !ended.load(Ordering::Relaxed) {
                most = memory_of(id).map_or(most, |memory| memory.most.max(most));
                std::thread::sleep(Duration::from_millis(5));
            }
            most
        });
        let status = child.wait();
        ended.store(true, Ordering::Relaxed);
        (status, watcher.join().unwrap_or_default())
    });
    let (wall, status) = (start.elapsed(), status.context("cannot wait")?);
    ensure!(status.code().is_some_and(|code| good.contains(&code)), "{name}: {status}");
    Ok(Took { wall, cpu: children()?.saturating_sub(before), memory })
}

/// Returns the processor time of all children that have ended.
fn children() -> anyhow::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot ask for the usage")?;
    let of = |time: nix::sys::time::TimeVal| {
        let microseconds = time.tv_sec() * 1_000_000 + time.tv_usec();
        Duration::from_micros(u64::try_from(microseconds).unwrap_or_default())
    };
    Ok(of(usage.user_time()) + of(usage.system_time()))
}

/// Resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub now: u64,
    /// The peak.
    pub most: u64,
}

/// Returns the memory of a process; `None` if it has ended.
pub fn memory_of(id: u32) -> Option<Memory> {
    let text = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kibibytes << 10)
    };
    Some(Memory { now: of("VmRSS:")?, most: of("VmHWM:")? })
}

/// Returns the processor time of a process so far.
///
/// # Errors
///
/// If it has ended.
pub fn cpu_of(id: u32) -> anyhow::Result<Duration> {
    let id = Pid::from_raw(i32::try_from(id)?);
    let clock = ClockId::pid_cpu_clock_id(id).context("the process has ended")?;
    Ok(clock.now().context("the process has ended")?.into())
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was measured.
    pub what: String,
    /// The result of this project.
    pub ours: String,
    /// The name and the result of the peer; empty if nothing comparable was measured.
    pub peer: String,
    /// Our result divided by the peer's, or by the goal.
    pub ratio: Option<f64>,
    /// The goal, or an empty text.
    pub wanted: String,
}

impl fmt::Display for Row {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratio = self.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let Self { what, ours, peer, wanted, .. } = self;
        write!(formatter, "| {what} | {ours} | {peer} | {ratio} | {wanted} |")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_a_middle_and_a_range() {
        let mut samples = Samples::default();
        assert_eq!(samples.shown(seconds), "not measured");
        (1..=200).rev().for_each(|value| samples.add(f64::from(value) / 1e3));
        assert_eq!((samples.median(), samples.percentile(99)), (0.1, 0.198));
        assert_eq!(samples.shown(seconds), "100 ms (1.00 ms to 200 ms)");
        assert_eq!(mebibytes(3.0 * 1024.0 * 1024.0), "3.0 MiB");
    }

    #[test]
    fn a_command_is_measured() {
        let took = run(Command::new("sh").args(["-c", "sleep 0.05; exit 3"]), &[3]).unwrap();
        assert!(took.wall >= Duration::from_millis(50) && took.memory > 0, "{took:?}");
        assert!(run(&mut Command::new("false"), &[0]).is_err());
        assert!(cpu_of(std::process::id()).unwrap() > Duration::ZERO);
    }
}
