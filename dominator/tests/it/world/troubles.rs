//! Further faults of the simulation, and invariants that hold in spite of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::subd::{Activity, CacheReport, PollReply, PrepareRequest, SubIdentity};
use dominator::core::sub::{Event, Failure, FailureKind, RequestId};
use model::mdb::Machine;
use model::object::ObjectId;

use super::{Faults, Happening, World};
use crate::model::{Model, Server};
use model::tree::{Leaf, Node, Tree, TreeBuilder};
use testing::random::Random;

const MINUTE: Duration = Duration::from_secs(60);

/// The present faults, and the facts for invariants.
pub struct Troubles {
    server: Server,
    /// No machine can be reached.
    is_cut_off: bool,
    /// Machines whose answers never end.
    hanging: BTreeSet<usize>,
    /// Machines whose answers are invalid.
    babbling: BTreeSet<usize>,
    /// Machines at the addresses of others.
    exchanged: BTreeMap<usize, usize>,
    /// The percentage of Commits at which subd is killed.
    pub cut_commits: u64,
    /// Nothing that depends on the time of day is ordered.
    pub is_timeless: bool,
    /// The time of day at each second of the simulation.
    pub wall: fn(i64) -> i64,
    /// The identity that answered the last poll of each machine.
    met: BTreeMap<usize, String>,
    /// The last update that each machine was ordered to stage, and the objects that it needs.
    staged: BTreeMap<usize, (u64, Vec<ObjectId>)>,
    /// The number of polls and calls in each second.
    pub rates: BTreeMap<u64, (u64, u64)>,
}

impl Default for Troubles {
    fn default() -> Self {
        Self {
            server: Server::Good,
            is_cut_off: false,
            hanging: BTreeSet::new(),
            babbling: BTreeSet::new(),
            exchanged: BTreeMap::new(),
            cut_commits: 0,
            is_timeless: false,
            wall: |seconds| seconds,
            met: BTreeMap::new(),
            staged: BTreeMap::new(),
            rates: BTreeMap::new(),
        }
    }
}

impl World {
    pub fn troubles(&mut self) -> &mut Troubles {
        &mut self.troubles
    }

    /// Gives each machine its own name, machine id and boot id.
    pub(super) fn name_machines(&mut self) {
        for (host, model) in self.models.iter_mut().enumerate() {
            model.sub.identity = Arc::new(identity(host));
        }
    }

    pub fn set_server(&mut self, server: Server) {
        self.note(0, &format!("the image server is {server:?}"));
        self.troubles.server = server;
        self.models.iter_mut().for_each(|model| model.server = server);
    }

    pub(super) fn is_server_there(&self) -> bool {
        matches!(self.troubles.server, Server::Good | Server::Slow)
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.troubles.is_cut_off
    }

    /// Cuts off all machines, or connects them again.
    pub fn cut_off(&mut self, is_cut_off: bool) {
        self.troubles.is_cut_off = is_cut_off;
        if !is_cut_off {
            return;
        }
        for host in 0..self.models.len() {
            self.models[host].waiting.clear();
            let open = self.drivers[host].iter().flat_map(|driver| driver.open.keys());
            let open: Vec<RequestId> = open.copied().collect();
            for request_id in open {
                let kind = FailureKind::Unreachable;
                self.fail(host, request_id, Failure { kind, text: "connection reset".into() });
            }
        }
    }

    /// Exchanges the addresses of two machines, which restart.
    pub fn exchange(&mut self, one: usize, other: usize) {
        if one == other || self.models[one].server != self.models[other].server {
            return;
        }
        self.note(one, &format!("has the address of {other}"));
        for host in [one, other] {
            self.crash(host);
            self.models[host].boots = true;
        }
        self.models.swap(one, other);
        for (host, other) in [(one, other), (other, one)] {
            if self.troubles.exchanged.remove(&host).is_none() {
                self.troubles.exchanged.insert(host, other);
            }
        }
    }

    /// Reinstalls a machine with the tree of another one; it loses everything else.
    pub fn reinstall(&mut self, host: usize, tree_of: usize) {
        self.note(host, "is installed anew");
        self.crash(host);
        let mut model = Model::new(self.models[tree_of].sub.tree.clone());
        model.sub.identity = Arc::clone(&self.models[host].sub.identity);
        model.server = self.troubles.server;
        self.models[host] = model;
    }

    pub fn detail(&self, host: usize) -> &str {
        self.drivers[host].as_ref().map_or("", |driver| driver.sub.detail())
    }

    /// Ends all faults. Restarts machines whose answers were invalid.
    pub fn heal(&mut self) {
        self.set_server(Server::Good);
        self.troubles.cut_commits = 0;
        self.troubles.hanging.clear();
        for host in std::mem::take(&mut self.troubles.babbling) {
            self.crash(host);
        }
        while let Some((&one, &other)) = self.troubles.exchanged.first_key_value() {
            self.exchange(one, other);
        }
        for model in &mut self.models {
            (model.fails, model.sticks, model.sick) = (false, false, None);
            model.pause(None);
        }
        self.set_filegen_away(false);
        self.set_clock(0);
        self.fill_disk(false);
        self.disk.delay_max = 5;
        for host in 0..self.models.len() {
            self.unblock(host);
            self.pause(host, 0);
            self.disable(host, false);
            self.collect(host);
        }
        self.pull_brake(None);
    }

    /// Checks that there are only polls after `from`, and few of them.
    pub fn must_be_quiet(&mut self, from: Duration) {
        // Messages on their way, staged updates that expire, and clean-ups.
        self.run_until(from + 7 * MINUTE);
        self.effects.clear();
        self.run_until(from + 17 * MINUTE);
        let others: Vec<_> = self.effects.iter().filter(|(name, _)| **name != "poll").collect();
        assert_eq!(others, [], "a fleet that is in place must be left alone");
        let (polls, machines) = (self.effects["poll"], self.models.len() as u64);
        assert!(polls <= machines * 13, "{polls} polls of {machines} machines in ten minutes");
        assert!(self.is_converged());
    }

    /// Sets or clears `DisableUpdates` in the record of a machine.
    pub fn disable(&mut self, host: usize, disable_updates: bool) {
        let machine = Machine::clone(&self.machines[host]);
        self.machines[host] = Arc::new(Machine { disable_updates, ..machine });
        let event = self.assignment(host);
        self.step(host, event);
    }

    pub(super) fn more_trouble(&mut self, host: usize) {
        let other = self.random.below(self.models.len() as u64) as usize;
        let is_moved = |host| self.troubles.exchanged.contains_key(&host);
        match self.random.below(13) {
            0 => {
                let servers = [Server::Good, Server::Away, Server::Slow, Server::Lying];
                let server = servers[self.random.below(4) as usize];
                self.set_server(server);
            }
            1 if is_moved(host) => self.exchange(host, self.troubles.exchanged[&host]),
            1..=2 if !is_moved(host) && !is_moved(other) => self.exchange(host, other),
            3 => self.reinstall(host, other),
            4 => {
                self.note(host, "hangs, or not any more");
                if !self.troubles.hanging.remove(&host) {
                    self.troubles.hanging.insert(host);
                }
            }
            5 if self.troubles.babbling.remove(&host) => self.crash(host),
            5 => {
                self.note(host, "babbles");
                self.troubles.babbling.insert(host);
            }
            6 => self.troubles.cut_commits = self.random.below(60),
            7 => self.disable(host, !self.machines[host].disable_updates),
            8 => {
                self.disk.delay_max = 1 + self.random.below(20_000);
                let is_full = self.random.chance(50);
                self.fill_disk(is_full);
            }
            9 => self.block(host),
            10 => {
                let is_away = self.random.chance(50);
                self.set_filegen_away(is_away);
            }
            11 => self.change_generators(),
            _ => {
                // Kills a machine between the fetch and the end of the update.
                let is_staged =
                    |model: &Model| matches!(model.sub.activity(), Activity::Prepared { .. });
                if let Some(host) = self.models.iter().position(is_staged) {
                    self.crash(host);
                }
            }
        }
    }

    /// Makes a path of a machine unchangeable, or all changeable again.
    fn block(&mut self, host: usize) {
        let sub = &mut self.models[host].sub;
        if !sub.obstacles.is_empty() {
            self.note(host, "can change all paths");
            return self.unblock(host);
        }
        let paths: Vec<_> = sub.tree.nodes().map(|(path, _)| path).collect();
        let path = paths[self.random.below(paths.len() as u64) as usize].clone();
        let text = format!("cannot change {path}");
        self.models[host].sub.obstacles.insert(path);
        self.note(host, &text);
    }

    fn unblock(&mut self, host: usize) {
        self.models[host].sub.remove_obstacles();
        self.collect(host);
    }

    pub(super) fn is_cut_before_commit(&mut self) -> bool {
        self.troubles.cut_commits > 0 && self.random.chance(self.troubles.cut_commits)
    }

    /// Returns an answer as it arrives; `None` if it never ends.
    pub(super) fn as_it_arrives(&mut self, host: usize, event: Event) -> Option<Event> {
        if self.troubles.hanging.contains(&host) {
            return None;
        }
        match event {
            Event::Polled(request_id, mut reply) if self.troubles.babbling.contains(&host) => {
                if self.random.chance(30) {
                    let (kind, text) = (FailureKind::InvalidReply, "not in the format".to_owned());
                    return Some(Event::PollFailed(request_id, Failure { kind, text }));
                }
                self.mangle(&mut reply);
                Some(Event::Polled(request_id, reply))
            }
            event => Some(event),
        }
    }

    fn mangle(&mut self, reply: &mut PollReply) {
        let number = self.random.number();
        let object = model::object::Algorithm::Blake3.digest(&number.to_le_bytes());
        match number % 8 {
            0 => reply.version.generation = number,
            1 => reply.version.instance = number,
            2 => reply.scan = None,
            3 => reply.cache = None,
            4 => reply.cache = Some(CacheReport::Full(vec![object])),
            5 => reply.activity = Activity::Prepared { update_id: number },
            6 => reply.exclusions = vec!["(".to_owned()],
            _ => {
                if let Some(scan) = &mut reply.scan {
                    scan.root = object;
                }
            }
        }
    }

    /// Stores the identity that answers a poll.
    pub(super) fn meets(&mut self, host: usize, event: &Event) {
        if let Event::Polled(_, reply) = event {
            self.troubles.met.insert(host, reply.identity.hostname.clone());
        }
    }

    /// Checks that an order reaches the intended machine.
    pub(super) fn must_be_met(&self, host: usize, name: &str) {
        let met = &self.troubles.met[&host];
        assert_eq!(*met, identity(host).hostname, "{name} to a wrong machine");
    }

    /// Stores the update that a machine is ordered to stage. Checks that its record permits it.
    pub(super) fn stages(&mut self, host: usize, request: &PrepareRequest) {
        let needs = request.plan.objects().keys().copied().collect();
        self.troubles.staged.insert(host, (request.update_id, needs));
        assert!(!self.machines[host].disable_updates, "host {host} is not to be updated");
    }

    /// Checks that a committed update is staged with all objects, and that the record permits it.
    pub(super) fn must_be_staged(&self, host: usize, update_id: u64) {
        self.must_be_met(host, "commit");
        assert!(!self.machines[host].disable_updates, "host {host} is not to be updated");
        let (staged, needs) = &self.troubles.staged[&host];
        assert_eq!(*staged, update_id, "host {host} has staged another update");
        let view = self.must_be_known(host);
        if self.troubles.babbling.contains(&host) {
            // It may have said another thing of its cache while the update was recorded.
            return;
        }
        let lacks = |object: &&ObjectId| !view.cache.contains(object);
        let missing = needs.iter().find(lacks);
        assert_eq!(missing, None, "host {host} is told to go without an object");
        // Checks the machine itself too, if it is the one that was polled.
        let model = &self.models[host];
        if model.is_up && model.sub.version.instance == view.report.version.instance {
            let missing = needs.iter().find(|object| !model.sub.cache.contains(*object));
            assert_eq!(missing, None, "host {host} does not have an object");
        }
    }

    pub(super) fn count(&mut self, name: &str) {
        let (polls, calls) = self.troubles.rates.entry(self.now.as_secs()).or_default();
        if name == "poll" {
            *polls += 1;
        } else {
            *calls += 1;
        }
    }

    /// Returns the most polls and the most calls in one second after `from`.
    pub fn most_at_once(&self, from: Duration) -> (u64, u64) {
        let rates = self.troubles.rates.range(from.as_secs()..).map(|(_, rates)| *rates);
        rates.fold((0, 0), |most, rates| (most.0.max(rates.0), most.1.max(rates.1)))
    }

    /// Starts the faults.
    pub fn begin(&mut self, faults: Faults) {
        self.faults = faults;
        self.schedule(Duration::ZERO, Happening::Trouble);
    }

    /// Makes the images available to the dominator.
    pub fn load_images(&mut self) {
        self.images_loaded = true;
        for host in 0..self.models.len() {
            let event = self.assignment(host);
            self.step(host, event);
        }
    }

    /// Kills the dominator and starts it again a little later.
    pub fn restart_dominator(&mut self) {
        self.drivers.iter_mut().for_each(|driver| *driver = None);
        self.run += 1;
        self.schedule(Duration::from_secs(3), Happening::StartDominator);
    }
}

fn identity(host: usize) -> SubIdentity {
    SubIdentity {
        hostname: format!("host{host}"),
        machine_id: format!("machine {host}"),
        boot_id: format!("boot {host}"),
        subd_version: String::new(),
    }
}

/// Returns `tree` with one random change.
pub(super) fn drifted(tree: &Tree, random: &mut Random) -> Tree {
    let mut builder = TreeBuilder::new(tree.algorithm());
    let nodes: Vec<_> = tree.nodes().collect();
    let files: Vec<usize> = nodes
        .iter()
        .enumerate()
        .filter(|(_, (_, node))| matches!(node, Node::Leaf(Leaf::File(_))))
        .map(|(index, _)| index)
        .collect();
    let chosen =
        if files.is_empty() { 0 } else { files[random.below(files.len() as u64) as usize] };
    let linked = nodes.iter().any(|(_, node)| {
        matches!(node, Node::Leaf(Leaf::HardLink(target)) if *target == nodes[chosen].0)
    });
    let kind = random.below(4);
    for (index, (path, mut node)) in nodes.into_iter().enumerate() {
        if index == chosen {
            match (&mut node, kind) {
                (_, 0) if !linked && !path.is_root() => continue,
                (Node::Leaf(Leaf::File(file)), 1) => {
                    file.object = tree.algorithm().digest(&random.number().to_le_bytes()).into();
                }
                (node, 2) => node.metadata_mut().unwrap().mode ^= 0o011,
                (Node::Leaf(Leaf::File(file)), _) => file.mtime.seconds += 1,
                _ => {}
            }
        }
        builder.insert(path, node).unwrap();
    }
    builder.finish().unwrap()
}
