//! A resource that one machine makes for all, in fleets on a bad network, with machines that decide
//! about it as real ones do: never do two work on it, and when all is well again, it is as the
//! images ask, and all machines know it. `FLEET_RESOURCE_SEEDS` sets how many fleets there are.

use std::collections::BTreeSet;
use std::time::Duration;

use api::subd::FleetResourceReport;
use dominator::core::fleet_resources::FleetResources;
use dominator::core::permits::{Permits, PermitsHeard, resource_of};
use model::boot_time::BootTime;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use provisioning::Call;
use provisioning::image::Definition;
use provisioning::machine::{Machine, Stage, Todo};
use provisioning::protocol::Answer;
use serde_json::json;
use testing::random::Random;

const ID: &str = "db";

/// In seconds, as all times here.
const PERMIT_TIME: u64 = 300;
const STEP: u64 = 5;

/// How long the bad times last, and how long it may then take until all is as it should be.
const BAD: u64 = 7_200;
const CALM: u64 = 1_800;

/// An image, and what it asks of the resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    None,
    Size(u64),
}

impl Image {
    fn definition(self) -> Definition {
        let bindings = "[[provisioner]]\nname = \"sql\"\nkinds = [\"sql\"]\nuser = \"root\"\n";
        let file = |size| {
            json!({"id": ID, "kind": "sql", "per": "fleet", "on_removal": "destroy",
                   "spec": {"size": size}})
        };
        let fields = match self {
            Self::None => json!({"bindings": "", "files": {}, "plugins": {}}),
            Self::Size(size) => json!({
                "bindings": bindings, "files": {"db.json": file(size).to_string()}, "plugins": {}
            }),
        };
        serde_json::from_value(fields).unwrap()
    }

    fn digest(self) -> ObjectId {
        Algorithm::Blake3.digest(format!("{self:?}").as_bytes())
    }
}

/// A run of the plugin.
#[derive(Clone, Debug)]
struct Run {
    call: Call,
    ends_at: u64,
    killed_at: u64,
}

#[derive(Debug)]
struct Node {
    machine: Machine,
    boot: u64,
    is_down: bool,
    is_off: bool,
    is_cut_off: bool,
    run: Option<Run>,
    required: Image,
    active: Image,
}

impl Node {
    fn now(&self, now: u64) -> BootTime {
        BootTime { boot_id: self.boot.to_string(), ms: now * 1_000 }
    }

    fn answers(&self) -> bool {
        !self.is_down && !self.is_off && !self.is_cut_off
    }

    /// Starts subd again. A plugin is killed with it.
    fn reload(&mut self) {
        self.machine =
            serde_json::from_str(&serde_json::to_string(&self.machine).unwrap()).unwrap();
        self.run = None;
    }

    /// What the machine has of the resource, for its programs.
    fn outputs(&self) -> Option<u64> {
        self.machine.outputs().get(ID)?.values["size"].as_u64()
    }
}

struct Fleet {
    random: Random,
    now: u64,
    nodes: Vec<Node>,
    permits: Permits,
    resources: FleetResources,
    /// What there is.
    database: Option<u64>,
    runs: u64,
}

fn name(node: usize) -> String {
    format!("host{node}")
}

fn permits(now: u64) -> Permits {
    let time = Duration::from_secs(PERMIT_TIME);
    Permits::new(time, time, Duration::from_secs(now), now)
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let node = |_| Node {
            machine: Machine::default(),
            boot: 0,
            is_down: false,
            is_off: false,
            is_cut_off: false,
            run: None,
            required: Image::Size(1),
            active: Image::None,
        };
        let nodes = (0..2 + random.below(4)).map(node).collect();
        let (permits, resources) = (permits(0), FleetResources::default());
        Self { random, now: 0, nodes, permits, resources, database: None, runs: 0 }
    }

    fn run_until(&mut self, end: u64, is_bad: bool) {
        while self.now < end {
            self.now += STEP;
            if is_bad && self.random.chance(10) {
                self.trouble();
            }
            for node in 0..self.nodes.len() {
                self.work(node);
                if self.now.is_multiple_of(30) && self.nodes[node].answers() {
                    self.update(node);
                    self.ask(node, is_bad);
                }
            }
            let running = self.nodes.iter().filter(|node| node.run.is_some()).count();
            assert!(running < 2, "at {}: {:#?}", self.now, self.nodes);
        }
    }

    /// What subd and the plugin do.
    fn work(&mut self, node: usize) {
        let (now, node) = (self.now, &mut self.nodes[node]);
        if let Some(run) = node.run.take_if(|run| run.ends_at <= now || run.killed_at <= now) {
            let is_done = run.ends_at <= now;
            let desired = run.call.request().desired.first();
            let size = desired.and_then(|one| one.resource.spec["size"].as_u64());
            if is_done {
                self.database = size;
            }
            let answer = match is_done {
                true => {
                    let outputs = size.map(|size| json!({ID: {"size": size}}));
                    let outputs = outputs.unwrap_or_else(|| json!({}));
                    let text = json!({"tasks": [{"success": {"outputs": outputs}}]}).to_string();
                    Ok(Answer::parse(text.as_bytes()).unwrap())
                }
                false => Err("killed".to_owned()),
            };
            node.machine.change_state(|state| state.end(&run.call, answer));
        }
        if node.is_down || node.is_off || node.run.is_some() {
            return;
        }
        let boot_now = node.now(now);
        node.machine.look_at_permits(&boot_now);
        match node.machine.next() {
            Todo::Nothing => {}
            Todo::Settle => node.machine.settle(),
            Todo::RetryLater => node.machine.retry(),
            Todo::Calls(calls) => {
                let call = calls.into_iter().next().unwrap();
                node.machine.change_state(|state| state.begin(&call));
                match node.machine.call_ends_at_ms(&call, &boot_now) {
                    Err(why) => node.machine.change_state(|state| state.end(&call, Err(why))),
                    Ok(killed_at) => {
                        let lasts = match self.random.below(10) {
                            0 => self.random.below(2 * PERMIT_TIME),
                            _ => self.random.below(60),
                        };
                        self.runs += 1;
                        let killed_at = killed_at.expect("it is of the fleet") / 1_000;
                        let ends_at = now + lasts;
                        node.run = Some(Run { call, ends_at, killed_at });
                    }
                }
            }
        }
    }

    /// Has the machine get the image that is required, as a dominator does.
    fn update(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        let (required, digest) = (node.required, node.required.digest());
        if node.active == required {
            if let Some(target) = node.machine.target()
                && target.image_digest != digest
            {
                node.machine.give_up(target.image_digest);
            }
            return;
        }
        let definition = required.definition();
        if !definition.is_empty() {
            let image = ImageName::new("test/image").unwrap();
            node.machine.provision(&image, digest, &definition, "any");
            let target = node.machine.target().unwrap();
            if target.stage != Stage::Finished {
                node.machine.go_on(digest, target.step);
                return;
            }
        }
        if node.machine.check_commit(digest, &definition).is_ok() {
            node.machine.activated(digest, &definition);
            node.active = required;
        }
    }

    /// Asks a machine, and tells it what follows; each message may be lost.
    fn ask(&mut self, node: usize, is_bad: bool) {
        let mut is_lost = || is_bad && self.random.chance(20);
        let (host, now) = (name(node), Duration::from_secs(self.now));
        let asked = &mut self.nodes[node];
        let said_at = asked.now(self.now);
        asked.machine.look_at_permits(&said_at);
        let report = |one| FleetResourceReport::new(one, true);
        let said: Vec<_> = asked.machine.fleet().into_iter().map(report).collect();
        if is_lost() {
            return;
        }
        let has_it = asked.required != Image::None;
        let of_image = has_it.then(|| ID.to_owned()).into_iter().collect();
        self.resources.take(&host, &said, &of_image, now);
        let since = now.saturating_sub(Duration::from_secs(PERMIT_TIME));
        let permits = self.resources.permits(&host, &said, since, |_| false);
        self.permits.take(&host, PermitsHeard { said_at, takes_orders: true, permits }, now);
        let given = self.permits.give(&host, now);
        let images = self.nodes.iter().map(|node| node.required);
        let required: BTreeSet<String> =
            images.filter(|image| *image != Image::None).map(|_| ID.to_owned()).collect();
        let required = self.permits.opens_in(now).is_zero().then_some(&required);
        let news = self.resources.news(&host, &said, required);
        if is_lost() {
            return;
        }
        let asked = &mut self.nodes[node];
        for one in news {
            asked.machine.take_news(one.try_into().unwrap()).unwrap();
        }
        let boot_now = asked.now(self.now);
        for permit in given {
            let id = resource_of(&permit.task).unwrap();
            let _late = asked.machine.take_permit(id, permit.number, &permit.until, &boot_now);
        }
    }

    fn trouble(&mut self) {
        let at = self.random.below(self.nodes.len() as u64) as usize;
        let image = [Image::None, Image::Size(1), Image::Size(2), Image::Size(3)]
            [self.random.below(4) as usize];
        let node = &mut self.nodes[at];
        match self.random.below(8) {
            0 => node.is_cut_off = !node.is_cut_off,
            1 => {
                node.is_down = !node.is_down;
                node.reload();
            }
            2 => {
                (node.is_off, node.boot) = (!node.is_off, node.boot + 1);
                node.reload();
            }
            3 => node.required = image,
            4 => self.nodes.iter_mut().for_each(|node| node.required = image),
            5 => self.restart_dominator(),
            _ => self.mend(at),
        }
    }

    fn restart_dominator(&mut self) {
        (self.permits, self.resources) = (permits(self.now), FleetResources::default());
    }

    fn mend(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        (node.is_cut_off, node.is_down, node.is_off) = (false, false, false);
    }

    /// Has all machines get an image when all is well, and checks what becomes of the resource.
    fn settle(&mut self, image: Image) {
        for node in 0..self.nodes.len() {
            self.mend(node);
            self.nodes[node].required = image;
        }
        self.run_until(self.now + CALM, false);
        let size = match image {
            Image::None => None,
            Image::Size(size) => Some(size),
        };
        let has = |node: &Node| (node.active, node.outputs());
        let nodes: Vec<_> = self.nodes.iter().map(has).collect();
        let expected = vec![(image, size); self.nodes.len()];
        assert_eq!((nodes, self.database), (expected, size), "{:#?}", self.nodes);
    }
}

/// Returns how often the plugin was run.
fn run(seed: u64) -> u64 {
    println!("seed {seed}");
    let mut fleet = Fleet::new(seed);
    fleet.run_until(BAD, true);
    for image in [Image::Size(1), Image::Size(2), Image::None, Image::Size(3), Image::None] {
        let before = fleet.runs;
        fleet.settle(image);
        let runs = fleet.runs - before;
        assert!(runs <= 6, "seed {seed}: the plugin was run {runs} times for {image:?}");
    }
    fleet.runs
}

#[test]
fn one_machine_at_a_time_makes_a_resource_of_the_fleet_and_all_get_it() {
    let seeds: u64 =
        std::env::var("FLEET_RESOURCE_SEEDS").map_or(20, |seeds| seeds.parse().expect("a number"));
    let runs: u64 = (0..seeds).map(run).sum();
    println!("{seeds} fleets: the plugin has run {runs} times");
    assert!(runs > 8 * seeds, "it has run {runs} times in {seeds} fleets");
}
