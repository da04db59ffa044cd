//! All simulated machines of a process: their addresses, their methods, and their tasks.

use rpc::tls::Security;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::Done;
use api::codec::{Encoding, encode};
use api::fault::{Fault, FaultCode};
use api::subd::{
    AddObjects, Cleanup, Commit, EncodedDirectory, Fetch, GetDirectories, GetDirectoriesReply,
    GetDirectoriesRequest, GetRefusedChanges, GetRefusedChangesReply, GetTaskStates, HoldMachine,
    Poll, PollReply, PollRequest, Prepare, SetConfiguration, SubIdentity,
};
use model::display::error_chain;
use model::escape::ByteText;
use model::image::required::RequiredImage;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use model::plan::Plan;
use model::scope::Scope;
use model::tree::{Time, Tree};
use rpc::server::{Caller, Router};
use rpc::trees::TreeReader;
use testing::random::Random;
use testing::sub_model::Task;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::control::{DisturbRequest, Disturbance, SimulatorStatus};
use super::patch::{drifted, own_directories, patched};
use super::sub::{Patched, Sub};

/// The most results of plans that are cached. A fleet is updated from few trees to few others.
const RESULTS: usize = 64;

/// The most bytes of directories in one reply.
const ANSWER_BYTES: usize = 4 << 20;

/// How often flapping machines are checked.
const FLAP_INTERVAL: Duration = Duration::from_millis(100);

/// The shortest time that a flapping machine is down or up, and the range that is added at random,
/// in milliseconds.
const FLAP_DOWN_MS: (u64, u64) = (1_000, 3_000);
const FLAP_UP_MS: (u64, u64) = (4_000, 8_000);

/// The duration of each kind of task.
#[derive(Clone, Copy, Debug)]
pub struct WorkTimes {
    pub scan: Duration,
    pub fetch: Duration,
    pub prepare: Duration,
    pub update: Duration,
}

struct Machine {
    sub: Mutex<Sub>,
    news: Notify,
    connections: Mutex<Connections>,
}

impl Machine {
    /// Locks the sub if the machine is up. A request from before the machine went down must not
    /// start a task afterwards.
    fn up(&self) -> Result<MutexGuard<'_, Sub>, Fault> {
        let sub = locked(&self.sub);
        if sub.is_up { Ok(sub) } else { Err(Fault::new(FaultCode::Unavailable, "it is down")) }
    }
}

/// The connections of a machine.
#[derive(Default)]
struct Connections {
    disturbance: Disturbance,
    is_down: bool,
    open: Vec<CancellationToken>,
    /// Connections that are accepted and get no answer.
    silent: Vec<TcpStream>,
}

/// What is done with a new connection.
#[derive(Debug)]
pub enum Accepted {
    /// Serve it until the token is cancelled.
    Served(TcpStream),
    Refused(TcpStream),
    /// The machine keeps it open and sends nothing.
    Held,
}

#[derive(Debug, Default)]
struct Counts {
    connections: AtomicU64,
    polls: AtomicU64,
}

pub struct Machines {
    machines: Vec<Machine>,
    first: Ipv4Addr,
    port: u16,
    work_times: WorkTimes,
    reader: Arc<TreeReader>,
    /// The trees of all images, by digest. They keep their directories in the store of the reader.
    trees: BTreeMap<ObjectId, Tree>,
    results: Mutex<VecDeque<((ObjectId, ObjectId), Tree)>>,
    counts: Counts,
    chance: Mutex<Random>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl std::fmt::Debug for Machines {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first, port, counts, .. } = self;
        let machines = self.machines.len();
        write!(formatter, "{machines} machines from {first}:{port} on, {counts:?}")
    }
}

/// The options of [`Machines::new`].
#[derive(Debug)]
pub struct MachineOptions {
    pub count: usize,
    /// The address of the first machine; the others follow.
    pub first: Ipv4Addr,
    /// The port of all machines.
    pub port: u16,
    pub work_times: WorkTimes,
    /// The percentage of machines that differ from their image at the start, in one file each.
    pub drifted_percent: u8,
    /// The images that machines have in turn.
    pub images: Vec<Arc<RequiredImage>>,
    /// Images that machines may be updated to.
    pub updates: Vec<Arc<RequiredImage>>,
    /// The reader of all these images.
    pub reader: Arc<TreeReader>,
}

/// Returns nanoseconds on the monotonic clock of the system, which all processes share.
pub fn monotonic() -> u64 {
    let now = nix::time::ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn wall() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Time { seconds, nanoseconds: since.subsec_nanos() }
}

/// Returns the name of the sub with this number, from 0.
pub fn hostname(number: usize) -> String {
    format!("sub-{:05}.sim.example", number + 1)
}

/// Returns the address of the sub with this number, from 0.
pub fn address(first: Ipv4Addr, number: usize) -> Option<Ipv4Addr> {
    let offset = u32::try_from(number).ok()?;
    let address = Ipv4Addr::from(u32::from(first).checked_add(offset)?);
    address.is_loopback().then_some(address)
}

fn identity(number: usize) -> SubIdentity {
    let digest = |what: &str| {
        let id = Algorithm::Blake3.digest(format!("{what} {number}").as_bytes()).to_string();
        id.trim_start_matches("blake3:")[..32].to_owned()
    };
    let boot = digest("boot");
    SubIdentity {
        hostname: hostname(number),
        machine_id: digest("machine"),
        boot_id: format!(
            "{}-{}-{}-{}-{}",
            &boot[..8],
            &boot[8..12],
            &boot[12..16],
            &boot[16..20],
            &boot[20..]
        ),
        subd_version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

impl Machines {
    /// Makes the machines. Their tasks run in `tracker` until `stop` is cancelled.
    pub fn new(
        options: MachineOptions,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let MachineOptions {
            count,
            first,
            port,
            work_times,
            drifted_percent,
            images,
            updates,
            reader,
        } = options;
        let mut chance = Random::new(1);
        let machines = (0..count)
            .zip(images.iter().cycle())
            .map(|(number, image)| {
                let own = number * 61 % 100 < usize::from(drifted_percent);
                let drifted = own.then(|| drifted(&image.tree, chance.number())).flatten();
                let tree = drifted.unwrap_or_else(|| image.tree.clone());
                let sub = Sub::new(identity(number), tree, image.name().clone(), chance.number());
                Machine { sub: Mutex::new(sub), news: Notify::new(), connections: Mutex::default() }
            })
            .collect();
        let all = images.iter().chain(&updates);
        let trees = all.map(|image| (image.tree.digest(), image.tree.clone())).collect();
        Arc::new(Self {
            machines,
            first,
            port,
            work_times,
            reader,
            trees,
            results: Mutex::default(),
            counts: Counts::default(),
            chance: Mutex::new(chance),
            tracker,
            stop,
        })
    }

    pub fn count(&self) -> usize {
        self.machines.len()
    }

    /// Returns the number of the machine with an address.
    pub fn number_at(&self, address: IpAddr) -> Option<usize> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        let number = u32::from(address).checked_sub(u32::from(self.first))?;
        usize::try_from(number).ok().filter(|&number| number < self.machines.len())
    }

    /// Accepts a connection to a machine. `cut` ends it when the machine goes down.
    pub fn accept(&self, number: usize, stream: TcpStream, cut: &CancellationToken) -> Accepted {
        self.counts.connections.fetch_add(1, Ordering::Relaxed);
        let mut connections = locked(&self.machines[number].connections);
        match connections.disturbance {
            Disturbance::Silent => {
                // The client has given up older connections.
                connections.silent.truncate(1);
                connections.silent.push(stream);
                Accepted::Held
            }
            Disturbance::Refusing => Accepted::Refused(stream),
            Disturbance::Flapping if connections.is_down => Accepted::Refused(stream),
            Disturbance::Flapping | Disturbance::Steady => {
                connections.open.retain(|open| !open.is_cancelled());
                connections.open.push(cut.clone());
                Accepted::Served(stream)
            }
        }
    }

    /// Returns the counters.
    pub fn report(&self) -> SimulatorStatus {
        let count = |what: fn(&Sub) -> bool| {
            let found = self.machines.iter().filter(|machine| what(&locked(&machine.sub)));
            u32::try_from(found.count()).unwrap_or(u32::MAX)
        };
        SimulatorStatus {
            port: self.port,
            subs: u32::try_from(self.machines.len()).unwrap_or(u32::MAX),
            connections: self.counts.connections.load(Ordering::Relaxed),
            polls: self.counts.polls.load(Ordering::Relaxed),
            ordered: count(|sub| sub.first_times.order().is_some()),
            verified: count(|sub| sub.first_times.verified.is_some()),
        }
    }

    /// Calls `action` with each machine, in the order of their addresses.
    pub fn each<T>(&self, action: impl Fn(&mut Sub) -> T) -> Vec<T> {
        self.machines.iter().map(|machine| action(&mut locked(&machine.sub))).collect()
    }

    /// Gives each machine `count` running tasks.
    pub fn set_tasks(&self, count: u32) {
        self.each(|sub| {
            sub.tasks = count;
            sub.model.version.status += 1;
        });
        self.machines.iter().for_each(|machine| machine.news.notify_waiters());
    }

    /// Changes one file of one machine.
    ///
    /// # Errors
    ///
    /// If there is no such machine, or it has no file.
    pub fn drift(self: &Arc<Self>, number: usize, chance: u64) -> Result<Done, Fault> {
        let none = |what: &str| Fault::new(FaultCode::NotFound, what);
        let machine = self.machines.get(number).ok_or_else(|| none("no such machine"))?;
        let (task, instance) = {
            let mut sub = locked(&machine.sub);
            let tree = drifted(&sub.model.tree, chance).ok_or_else(|| none("it has no file"))?;
            (sub.drift(tree), sub.model.version.instance)
        };
        self.run_task(number, instance, task);
        Ok(Done {})
    }

    /// Makes machines fail as requested, and others come up.
    pub fn disturb(self: &Arc<Self>, request: DisturbRequest) {
        for number in 0..self.machines.len() {
            let disturbance = request.disturbance(number);
            let mut connections = locked(&self.machines[number].connections);
            if std::mem::replace(&mut connections.disturbance, disturbance) == disturbance {
                continue;
            }
            match disturbance {
                Disturbance::Refusing | Disturbance::Silent => {
                    self.go_down(number, &mut connections);
                }
                Disturbance::Steady | Disturbance::Flapping => {
                    self.come_up(number, &mut connections);
                }
            }
        }
    }

    /// Makes flapping machines go down and come up, for ever.
    pub async fn flap(self: Arc<Self>) {
        let mut next: Vec<Option<Instant>> = vec![None; self.machines.len()];
        let mut interval = tokio::time::interval(FLAP_INTERVAL);
        loop {
            interval.tick().await;
            let now = Instant::now();
            for (number, next) in next.iter_mut().enumerate() {
                // Locked to the end: nobody else may decide meanwhile that the machine is up.
                let mut connections = locked(&self.machines[number].connections);
                if connections.disturbance != Disturbance::Flapping {
                    *next = None;
                    continue;
                }
                if next.is_some_and(|next| now < next) {
                    continue;
                }
                // A change that is due is made. The first change is only scheduled.
                let (least, more) = match (next.is_some(), connections.is_down) {
                    (true, false) => {
                        self.go_down(number, &mut connections);
                        FLAP_DOWN_MS
                    }
                    (true, true) => {
                        self.come_up(number, &mut connections);
                        FLAP_UP_MS
                    }
                    (false, _) => FLAP_UP_MS,
                };
                let pause = least + locked(&self.chance).number() % more;
                *next = Some(now + Duration::from_millis(pause));
            }
        }
    }

    /// Takes a machine down. The caller has locked its connections, so that they agree with the
    /// state.
    fn go_down(&self, number: usize, connections: &mut Connections) {
        locked(&self.machines[number].sub).crash();
        connections.is_down = true;
        connections.open.drain(..).for_each(|open| open.cancel());
    }

    /// Lets a machine come up. The caller has locked its connections.
    fn come_up(self: &Arc<Self>, number: usize, connections: &mut Connections) {
        connections.silent.clear();
        if !std::mem::take(&mut connections.is_down) {
            return;
        }
        let instance = locked(&self.chance).number();
        let sub = &self.machines[number].sub;
        let task = locked(sub).start(instance, |have, plan| self.patch(have, plan));
        self.run_task(number, instance, task);
    }

    /// Ends a task of a machine after its duration, and does the tasks that follow from it.
    fn run_task(self: &Arc<Self>, number: usize, instance: u64, task: Task) {
        let (machines, stop) = (Arc::clone(self), self.stop.clone());
        let all = async move {
            let mut next = Some(task);
            while let Some(task) = next {
                let work_times = machines.work_times;
                let pause = match task {
                    Task::Scan => work_times.scan,
                    Task::Fetch(_) => work_times.fetch,
                    Task::Prepare(_) => work_times.prepare,
                    Task::Update(_) => work_times.update,
                };
                tokio::time::sleep(pause).await;
                let machine = &machines.machines[number];
                let mut sub = locked(&machine.sub);
                if !sub.is_up || sub.model.version.instance != instance {
                    return;
                }
                next = sub.end(task, monotonic(), |have, plan| machines.patch(have, plan));
                drop(sub);
                machine.news.notify_waiters();
            }
        };
        self.tracker.spawn(stop.run_until_cancelled_owned(all));
    }

    /// Returns the tree after a plan, from the cache if possible: most of a fleet has the same tree
    /// and gets the same plan.
    fn patch(&self, have: &Tree, plan: &Plan) -> Patched {
        let bytes = encode(Encoding::Bincode, "plan", plan).map_err(|error| error_chain(&error))?;
        let key = (have.digest(), Algorithm::Blake3.digest(&bytes));
        let known = |results: &VecDeque<((ObjectId, ObjectId), Tree)>| {
            results.iter().find(|(other, _)| *other == key).map(|(_, tree)| tree.clone())
        };
        if let Some(tree) = known(&locked(&self.results)) {
            return Ok(tree);
        }
        let tree = patched(have, plan).map_err(|error| error_chain(&error))?;
        let tree = self.trees.get(&tree.digest()).cloned().unwrap_or(tree);
        let mut results = locked(&self.results);
        results.push_back((key, tree.clone()));
        if results.len() > RESULTS {
            results.pop_front();
        }
        Ok(tree)
    }

    fn called(&self, caller: &Caller) -> Result<(usize, &Machine), Fault> {
        let nobody = || Fault::new(FaultCode::Unavailable, "no machine has this address");
        let number = self.number_at(caller.local.ip()).ok_or_else(nobody)?;
        let machine = &self.machines[number];
        Ok((number, machine))
    }

    async fn poll(&self, caller: Caller, request: PollRequest) -> Result<PollReply, Fault> {
        let (_, machine) = self.called(&caller)?;
        let deadline = Instant::now() + Duration::from_millis(request.wait_ms.into());
        loop {
            // Before the check, so that no news is missed in between.
            let news = machine.news.notified();
            let is_late = Instant::now() >= deadline;
            {
                let sub = machine.up()?;
                if sub.model.has_news(request.have) || is_late {
                    self.counts.polls.fetch_add(1, Ordering::Relaxed);
                    return Ok(sub.report(request.have, wall()));
                }
            }
            tokio::select! {
                () = news => {}
                () = tokio::time::sleep_until(deadline) => {}
                () = self.stop.cancelled() => {
                    return Err(Fault::new(FaultCode::Unavailable, "the simulator stops"));
                }
            }
        }
    }

    fn directories(
        &self,
        caller: &Caller,
        request: GetDirectoriesRequest,
    ) -> Result<GetDirectoriesReply, Fault> {
        let (_, machine) = self.called(caller)?;
        let scanned = machine.up()?.model.scanned().cloned();
        let own = scanned.map(|tree| {
            own_directories(&tree, |directory| self.reader.store.get(&directory.digest()).is_some())
        });
        let own = own.unwrap_or_default();
        let mut reply = GetDirectoriesReply { directories: Vec::new(), absent: Vec::new() };
        let mut bytes = 0;
        for digest in request.digests {
            let found = own.get(&digest).cloned().or_else(|| self.reader.store.get(&digest));
            match found {
                Some(directory) if bytes < ANSWER_BYTES => {
                    let encoded = directory.encode();
                    bytes += encoded.len();
                    reply.directories.push(EncodedDirectory(ByteText(encoded)));
                }
                // The caller asks again for the rest.
                Some(_) => break,
                None => reply.absent.push(digest),
            }
        }
        Ok(reply)
    }

    /// Gives an order to the machine that was called, and starts the task that results.
    fn order(
        self: &Arc<Self>,
        caller: &Caller,
        order: impl FnOnce(&mut Sub) -> Result<Option<Task>, Fault>,
    ) -> Result<Done, Fault> {
        let (number, machine) = self.called(caller)?;
        let (task, instance) = {
            let mut sub = machine.up()?;
            (order(&mut sub)?, sub.model.version.instance)
        };
        machine.news.notify_waiters();
        if let Some(task) = task {
            self.run_task(number, instance, task);
        }
        Ok(Done {})
    }

    /// Returns the methods of the machines.
    pub fn router(self: &Arc<Self>, security: &Security) -> Router<Arc<Self>> {
        Router::new("subd", security)
            .with_state(Arc::clone(self))
            .method::<Poll, _>(async |machines, caller, request| {
                machines.poll(caller, request).await
            })
            .method::<GetDirectories, _>(async |machines, caller, request| {
                machines.directories(&caller, request)
            })
            .method::<GetRefusedChanges, _>(async |_, _, ()| Ok(GetRefusedChangesReply::default()))
            .method::<GetTaskStates, _>(async |machines, caller, request| {
                Ok(machines.called(&caller)?.1.up()?.task_states(request))
            })
            .method::<HoldMachine, _>(async |machines, caller, _| {
                machines.order(&caller, |_| Ok(None))
            })
            .method::<SetConfiguration, _>(async |machines, caller, request| {
                // The settings themselves would take memory for each machine.
                let scope = request.scan.map(|settings| Scope::of(&settings, &[]));
                machines.order(&caller, |sub| {
                    if let Some(limits) = request.limits {
                        sub.model.set_limits(limits);
                    }
                    let rescan = scope.is_some_and(|scope| sub.model.set_scope(scope));
                    Ok(rescan.then_some(Task::Scan))
                })
            })
            .method::<Fetch, _>(async |machines, caller, request| {
                machines.order(&caller, |sub| sub.fetch(request, monotonic()))
            })
            .method::<Prepare, _>(async |machines, caller, request| {
                machines.order(&caller, |sub| sub.prepare(request, monotonic()))
            })
            .method::<Commit, _>(async |machines, caller, request| {
                machines.order(&caller, |sub| sub.commit(request.update_id, monotonic()))
            })
            .method::<Cleanup, _>(async |machines, caller, request| {
                machines
                    .order(&caller, |sub| sub.model.remove_objects(&request.objects).map(|()| None))
            })
    }
}

/// Adds to `router` what releases of subd have that know computed files.
pub fn with_added_objects(router: Router<Arc<Machines>>) -> Router<Arc<Machines>> {
    router.method::<AddObjects, _>(async |machines, caller, request| {
        let ids: Vec<ObjectId> = request.contents.iter().map(|content| content.id).collect();
        machines.order(&caller, |sub| {
            sub.add(&ids, monotonic());
            Ok(None)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::subd::{Activity, FetchRequest};
    use model::image::{Content, FORMAT, ImageName};
    use model::tree::text::from_text;
    use model::trigger::Triggers;
    use std::net::SocketAddr;

    const FIRST: Ipv4Addr = Ipv4Addr::new(127, 64, 0, 1);

    /// Returns one machine whose tasks take no time.
    fn one() -> Arc<Machines> {
        let object = Algorithm::Blake3.digest(b"one");
        let text = format!("f 644 0:0 1.000000000 3 {object} /one\n");
        let tree = from_text(Algorithm::Blake3, &text).unwrap();
        let content = Content {
            format: FORMAT,
            name: ImageName::new("base").unwrap(),
            root: tree.digest(),
            filter: None,
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
            signers: Vec::new(),
        };
        let no = Duration::ZERO;
        let options = MachineOptions {
            count: 1,
            first: FIRST,
            port: 6969,
            work_times: WorkTimes { scan: no, fetch: no, prepare: no, update: no },
            drifted_percent: 0,
            images: vec![Arc::new(RequiredImage::new(content, tree))],
            updates: Vec::new(),
            reader: Arc::new(TreeReader::new(1)),
        };
        Machines::new(options, TaskTracker::new(), CancellationToken::new())
    }

    #[tokio::test]
    async fn requests_to_a_machine_that_is_down_are_refused_and_have_no_effect() {
        let machines = one();
        let local = SocketAddr::from((FIRST, 6969));
        let identity = Arc::new(api::access::Identity::unrestricted());
        let caller = || Caller {
            address: local,
            local,
            unpacks: false,
            identity: Arc::clone(&identity),
            proof: None,
        };
        let fetch = |fetch_id| FetchRequest {
            fetch_id,
            sources: Vec::new(),
            objects: [].into(),
            ahead: false,
        };
        let order = |id| machines.order(&caller(), |sub| sub.fetch(fetch(id), 1));
        let poll = || machines.poll(caller(), PollRequest { have: None, wait_ms: 0 });
        machines.disturb(DisturbRequest { dead_percent: 100, flapping_percent: 0 });
        let refused = order(1).unwrap_err();
        assert_eq!(refused, Fault::new(FaultCode::Unavailable, "it is down"));
        assert_eq!(poll().await, Err(refused.clone()));
        let request = GetDirectoriesRequest { digests: Vec::new() };
        assert_eq!(machines.directories(&caller(), request), Err(refused));
        // The refused order had no effect.
        machines.disturb(DisturbRequest::default());
        assert_eq!(poll().await.unwrap().activity, Activity::Idle);
        assert_eq!(order(2), Ok(Done {}));
    }

    #[test]
    fn each_number_has_a_name_and_an_address() {
        assert_eq!(address(FIRST, 0), Some(FIRST));
        assert_eq!(address(FIRST, 9_999), Some(Ipv4Addr::new(127, 64, 39, 16)));
        assert_eq!(address(Ipv4Addr::new(127, 255, 255, 255), 1), None);
        assert_eq!(hostname(9_999), "sub-10000.sim.example");
        let identity = identity(3);
        assert_eq!((identity.machine_id.len(), identity.boot_id.len()), (32, 36));
    }
}
