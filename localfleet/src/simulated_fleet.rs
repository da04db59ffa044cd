//! A real imageserver and a real dominator, with simulated subs.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::dominator::Status;
use api::method::Method;
use certs::sets::Set;
use model::mdb::Machine;
use rpc::client::Client;

use crate::fleet::daemon_process::Daemon;
use crate::fleet::{Fleet, client_of};
use crate::programs::FLEET_SIMULATOR;
use crate::simulator::control::{GetFirstTimes, GetSimulatorStatus, SimulatorStatus};
use crate::simulator::machines::{address, hostname};
use crate::simulator::sub::FirstTimes;

/// The address of the first simulated sub.
const FIRST: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 1);

/// How long the simulator may take to read its images.
const READY_MAX: Duration = Duration::from_secs(120);

/// How often a condition is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub struct SimulatedFleet {
    /// The process with all subs.
    pub simulator: Daemon,
    /// The imageserver and the dominator, without subs of their own.
    pub fleet: Fleet,
    control: Client,
    port: u16,
    subs: usize,
}

impl SimulatedFleet {
    /// Adds `subs` simulated subs to `fleet`, which must have no subs. They start with the trees of
    /// `images` in turn, and may be updated to `updates`. No machine is in the database yet.
    ///
    /// # Errors
    ///
    /// If the simulator does not start.
    pub fn start(
        fleet: Fleet,
        programs: &Path,
        subs: usize,
        images: &[String],
        updates: &[String],
        flags: &[&str],
    ) -> anyhow::Result<Self> {
        let addresses = fleet.addresses();
        let [one, two, three] = addresses.subs;
        let control = IpAddr::V4(Ipv4Addr::new(one, two, three, 1));
        let control = SocketAddr::new(control, addresses.subd_port);
        let mut words: Vec<String> = vec![
            format!("--subs={subs}"),
            format!("--first={FIRST}"),
            format!("--control={control}"),
            format!("--imageserver={}", addresses.imageserver),
        ];
        let hosts = ["*.sim.example", &*control.ip().to_string()];
        fleet.certificates().for_daemon(FLEET_SIMULATOR, Set::Dominator, &hosts)?;
        words.extend(fleet.certificates().flags(FLEET_SIMULATOR));
        words.extend(images.iter().map(|name| format!("--image={name}")));
        words.extend(updates.iter().map(|name| format!("--update={name}")));
        words.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        let log = fleet.mdb().with_file_name("log").join("simulator.log");
        let program = programs.join(FLEET_SIMULATOR);
        let mut simulator = Daemon::start(FLEET_SIMULATOR, &program, words, log)?;
        fleet.wait_for(control, &mut simulator, READY_MAX)?;
        let control = client_of(control, fleet.security());
        let port = fleet.call::<GetSimulatorStatus>(&control, &())?.port;
        Ok(Self { simulator, fleet, control, port, subs })
    }

    /// Calls the simulator.
    ///
    /// # Errors
    ///
    /// If the call fails.
    pub fn ask<M: Method>(&self, request: &M::Request) -> anyhow::Result<M::Reply> {
        self.fleet.call::<M>(&self.control, request)
    }

    /// Returns the counters of the simulator.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn report(&self) -> anyhow::Result<SimulatorStatus> {
        self.ask::<GetSimulatorStatus>(&())
    }

    /// Returns the first times of all subs.
    ///
    /// # Errors
    ///
    /// If the simulator does not answer.
    pub fn first_times(&self) -> anyhow::Result<Vec<FirstTimes>> {
        self.ask::<GetFirstTimes>(&())
    }

    /// Returns all subs as machines, each with the image that `image_of` returns for its number.
    ///
    /// # Errors
    ///
    /// If there are more subs than addresses.
    pub fn machines<'name>(
        &self,
        image_of: impl Fn(usize) -> &'name String,
    ) -> anyhow::Result<Vec<Machine>> {
        let mut machines = Vec::with_capacity(self.subs);
        for number in 0..self.subs {
            let address = address(FIRST, number).context("there are more subs than addresses")?;
            machines.push(Machine {
                hostname: hostname(number),
                ip_address: Some(IpAddr::V4(address)),
                subd_port: Some(self.port),
                required_image: image_of(number).clone(),
                ..Machine::default()
            });
        }
        Ok(machines)
    }

    /// Replaces the machine database by [`SimulatedFleet::machines`].
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn require<'name>(&self, image_of: impl Fn(usize) -> &'name String) -> anyhow::Result<()> {
        self.fleet.replace_mdb(&self.machines(image_of)?)
    }

    /// Runs `domtool plan` with [`SimulatedFleet::machines`] as the database. Returns its JSON and
    /// its duration.
    ///
    /// # Errors
    ///
    /// If nothing would change, or domtool fails.
    pub fn plan<'name>(
        &self,
        image_of: impl Fn(usize) -> &'name String,
    ) -> anyhow::Result<(serde_json::Value, Duration)> {
        let candidate = self.fleet.mdb().with_file_name("candidate.json");
        let text = serde_json::to_string(&self.machines(image_of)?)?;
        std::fs::write(&candidate, text).context("cannot write a candidate")?;
        let file = candidate.display().to_string();
        let start = Instant::now();
        let output = self.fleet.domtool(&["plan", "--mdb", &file, "--format", "json"])?;
        let took = start.elapsed();
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(3), "domtool plan: {}: {error}", output.status);
        Ok((serde_json::from_slice(&output.stdout)?, took))
    }

    /// Returns how many machines have a status, as the dominator reports.
    ///
    /// # Errors
    ///
    /// If it does not answer.
    pub fn count(&self, wanted: Status) -> anyhow::Result<usize> {
        let counts = self.fleet.status()?.counts;
        let found = counts.iter().find(|(status, _)| *status == wanted);
        Ok(found.map_or(0, |(_, count)| usize::try_from(*count).unwrap_or(usize::MAX)))
    }

    /// Waits until `condition` holds. Returns how long that took.
    ///
    /// # Errors
    ///
    /// If a daemon has ended, `condition` fails, or does not hold within `limit`.
    pub fn wait(
        &mut self,
        what: &str,
        limit: Duration,
        mut condition: impl FnMut(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Duration> {
        let start = Instant::now();
        loop {
            self.check()?;
            if condition(self)? {
                return Ok(start.elapsed());
            }
            if start.elapsed() > limit {
                let counts = self.fleet.status()?.counts;
                let report = self.report()?;
                bail!("{what}: not within {limit:?}: {counts:?}, {report:?}");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until the dominator reports all machines as synced.
    ///
    /// # Errors
    ///
    /// As [`SimulatedFleet::wait`].
    pub fn wait_all_synced(&mut self, what: &str, limit: Duration) -> anyhow::Result<Duration> {
        self.wait(what, limit, |all| Ok(all.count(Status::Synced)? == all.subs))
    }

    /// Fails if a daemon has ended by itself.
    ///
    /// # Errors
    ///
    /// Names the daemon and its exit status, or says that the run was interrupted.
    pub fn check(&mut self) -> anyhow::Result<()> {
        self.fleet.check()?;
        self.simulator.check()
    }

    /// Stops all daemons with SIGTERM.
    ///
    /// # Errors
    ///
    /// If one does not stop with success.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        self.fleet.stop()?;
        self.simulator.stop()
    }
}
