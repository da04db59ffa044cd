//! All simulated machines of a process: who is at which address, what they are told, and the work
//! that takes them time.

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
    Cleanup, Commit, EncodedDirectory, Fetch, GetDirectories, GetDirectoriesReply,
    GetDirectoriesRequest, Identity, Poll, PollReply, PollRequest, Prepare, SetConfiguration,
};
use model::escape::ByteText;
use model::image::required::RequiredImage;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use model::plan::Plan;
use model::report::report;
use model::scope::Scope;
use model::tree::{Time, Tree};
use rpc::server::{Caller, Router};
use rpc::trees::Reader;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::control::{DisturbRequest, Fate, ReportReply};
use super::patch::{drifted, own_directories, patched};
use super::sub::{Patched, Sub, Work};

/// How many trees that plans gave are remembered: a fleet is updated from few trees to few others.
const RESULTS: usize = 64;

/// The most bytes of directories in one answer.
const ANSWER_BYTES: usize = 4 << 20;

/// How often it is looked for who goes down and who comes up.
const FLAP_INTERVAL: Duration = Duration::from_millis(100);

/// How long a flapping machine is down, and how long it is up: the shortest, and how much more it
/// may be, in milliseconds.
const FLAP_DOWN_MS: (u64, u64) = (1_000, 3_000);
const FLAP_UP_MS: (u64, u64) = (4_000, 8_000);

/// How long each kind of work takes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// A scan of what has changed.
    pub scan: Duration,
    pub fetch: Duration,
    /// The staging of an update.
    pub prepare: Duration,
    /// The carrying out of an update.
    pub update: Duration,
}

/// Numbers without order, the same in each run.
#[derive(Clone, Copy, Debug)]
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

struct Machine {
    sub: Mutex<Sub>,
    news: Notify,
    line: Mutex<Line>,
}

impl Machine {
    /// Its sub, to be asked. What came before the machine went down must not be heard after it:
    /// nobody would do the work.
    fn up(&self) -> Result<MutexGuard<'_, Sub>, Fault> {
        let sub = locked(&self.sub);
        if sub.is_up { Ok(sub) } else { Err(Fault::new(FaultCode::Unavailable, "it is down")) }
    }
}

/// What a machine does with its connections.
#[derive(Default)]
struct Line {
    fate: Fate,
    is_down: bool,
    open: Vec<CancellationToken>,
    /// Connections that get no answer.
    silent: Vec<TcpStream>,
}

/// What becomes of a new connection.
#[derive(Debug)]
pub enum Taken {
    /// It is served, until the token is cancelled.
    Served(TcpStream),
    Refused(TcpStream),
    /// The machine holds it, and says nothing.
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
    pace: Pace,
    reader: Arc<Reader>,
    /// The trees of all images, by digest; while they are held the reader knows their directories.
    trees: BTreeMap<ObjectId, Tree>,
    results: Mutex<VecDeque<((ObjectId, ObjectId), Tree)>>,
    counts: Counts,
    chance: Mutex<Chance>,
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

/// What machines are made of.
#[derive(Debug)]
pub struct Plenty {
    pub count: usize,
    /// The address of the first; the others follow.
    pub first: Ipv4Addr,
    /// The port of all.
    pub port: u16,
    /// How fast they are.
    pub pace: Pace,
    /// How many of them differ from their image at first, in a file each, per cent.
    pub drifted_percent: u8,
    /// The images that they have in turns.
    pub images: Vec<Arc<RequiredImage>>,
    /// Images that they may get.
    pub updates: Vec<Arc<RequiredImage>>,
    /// What has read all of them.
    pub reader: Arc<Reader>,
}

/// Nanoseconds on the monotonic clock of the system, which all processes share.
pub fn monotonic() -> u64 {
    let now = nix::time::ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

fn wall() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Time { seconds, nanoseconds: since.subsec_nanos() }
}

/// The name of the sub with this number, from 0.
pub fn hostname(number: usize) -> String {
    format!("sub-{:05}.sim.example", number + 1)
}

/// The address of the sub with this number, from 0.
pub fn address(first: Ipv4Addr, number: usize) -> Option<Ipv4Addr> {
    let offset = u32::try_from(number).ok()?;
    let address = Ipv4Addr::from(u32::from(first).checked_add(offset)?);
    address.is_loopback().then_some(address)
}

fn identity(number: usize) -> Identity {
    let digest = |what: &str| {
        let id = Algorithm::Blake3.digest(format!("{what} {number}").as_bytes()).to_string();
        id.trim_start_matches("blake3:")[..32].to_owned()
    };
    let boot = digest("boot");
    Identity {
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
    /// Makes the machines; their work is done in `tracker` until `stop` is cancelled.
    pub fn new(plenty: Plenty, tracker: TaskTracker, stop: CancellationToken) -> Arc<Self> {
        let Plenty { count, first, port, pace, drifted_percent, images, updates, reader } = plenty;
        let mut chance = Chance(1);
        let machines = (0..count)
            .zip(images.iter().cycle())
            .map(|(number, image)| {
                let own = number * 61 % 100 < usize::from(drifted_percent);
                let drifted = own.then(|| drifted(&image.tree, chance.next())).flatten();
                let tree = drifted.unwrap_or_else(|| image.tree.clone());
                let sub = Sub::new(identity(number), tree, image.name().clone(), chance.next());
                Machine { sub: Mutex::new(sub), news: Notify::new(), line: Mutex::default() }
            })
            .collect();
        let all = images.iter().chain(&updates);
        let trees = all.map(|image| (image.tree.digest(), image.tree.clone())).collect();
        Arc::new(Self {
            machines,
            first,
            port,
            pace,
            reader,
            trees,
            results: Mutex::default(),
            counts: Counts::default(),
            chance: Mutex::new(chance),
            tracker,
            stop,
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.machines.len()
    }

    /// The number of the machine that is at an address.
    pub fn at(&self, address: IpAddr) -> Option<usize> {
        let IpAddr::V4(address) = address.to_canonical() else { return None };
        let number = u32::from(address).checked_sub(u32::from(self.first))?;
        usize::try_from(number).ok().filter(|&number| number < self.machines.len())
    }

    /// A connection to a machine has come; `cut` ends it when the machine goes down.
    pub fn take(&self, number: usize, stream: TcpStream, cut: &CancellationToken) -> Taken {
        self.counts.connections.fetch_add(1, Ordering::Relaxed);
        let mut line = locked(&self.machines[number].line);
        match line.fate {
            Fate::Silent => {
                // Whoever has given up an older one does not come back to it.
                line.silent.truncate(1);
                line.silent.push(stream);
                Taken::Held
            }
            Fate::Refusing => Taken::Refused(stream),
            Fate::Flapping if line.is_down => Taken::Refused(stream),
            Fate::Flapping | Fate::Steady => {
                line.open.retain(|open| !open.is_cancelled());
                line.open.push(cut.clone());
                Taken::Served(stream)
            }
        }
    }

    /// How they are doing.
    pub fn report(&self) -> ReportReply {
        let count = |what: fn(&Sub) -> bool| {
            let found = self.machines.iter().filter(|machine| what(&locked(&machine.sub)));
            u32::try_from(found.count()).unwrap_or(u32::MAX)
        };
        ReportReply {
            port: self.port,
            subs: u32::try_from(self.machines.len()).unwrap_or(u32::MAX),
            connections: self.counts.connections.load(Ordering::Relaxed),
            polls: self.counts.polls.load(Ordering::Relaxed),
            ordered: count(|sub| sub.marks.order().is_some()),
            verified: count(|sub| sub.marks.verified.is_some()),
        }
    }

    /// Does `look` with each machine, in the order of their addresses.
    pub fn each<T>(&self, look: impl Fn(&mut Sub) -> T) -> Vec<T> {
        self.machines.iter().map(|machine| look(&mut locked(&machine.sub))).collect()
    }

    /// Changes one file of one machine.
    ///
    /// # Errors
    ///
    /// If there is no such machine, or it has no file.
    pub fn drift(self: &Arc<Self>, number: usize, chance: u64) -> Result<Done, Fault> {
        let none = |what: &str| Fault::new(FaultCode::NotFound, what);
        let machine = self.machines.get(number).ok_or_else(|| none("no such machine"))?;
        let (work, instance) = {
            let mut sub = locked(&machine.sub);
            let tree = drifted(sub.tree(), chance).ok_or_else(|| none("it has no file"))?;
            (sub.drift(tree), sub.instance())
        };
        self.work(number, instance, work);
        Ok(Done {})
    }

    /// Lets machines fail as asked for, and others come up.
    pub fn disturb(self: &Arc<Self>, request: DisturbRequest) {
        for number in 0..self.machines.len() {
            let fate = request.fate(number);
            let mut line = locked(&self.machines[number].line);
            if std::mem::replace(&mut line.fate, fate) == fate {
                continue;
            }
            match fate {
                Fate::Refusing | Fate::Silent => self.go_down(number, &mut line),
                Fate::Steady | Fate::Flapping => self.come_up(number, &mut line),
            }
        }
    }

    /// Lets those that flap go down and come up, for ever.
    pub async fn flap(self: Arc<Self>) {
        let mut next: Vec<Option<Instant>> = vec![None; self.machines.len()];
        let mut interval = tokio::time::interval(FLAP_INTERVAL);
        loop {
            interval.tick().await;
            let now = Instant::now();
            for (number, next) in next.iter_mut().enumerate() {
                // Held to the end: nobody else may decide meanwhile that it is to be up.
                let mut line = locked(&self.machines[number].line);
                if line.fate != Fate::Flapping {
                    *next = None;
                    continue;
                }
                if next.is_some_and(|next| now < next) {
                    continue;
                }
                // A change that is due is made; the first only gets its time.
                let (least, more) = match (next.is_some(), line.is_down) {
                    (true, false) => {
                        self.go_down(number, &mut line);
                        FLAP_DOWN_MS
                    }
                    (true, true) => {
                        self.come_up(number, &mut line);
                        FLAP_UP_MS
                    }
                    (false, _) => FLAP_UP_MS,
                };
                let pause = least + locked(&self.chance).next() % more;
                *next = Some(now + Duration::from_millis(pause));
            }
        }
    }

    /// `line` is that of the machine, and held as long as the machine changes, so that they agree.
    fn go_down(&self, number: usize, line: &mut Line) {
        locked(&self.machines[number].sub).crash();
        line.is_down = true;
        line.open.drain(..).for_each(|open| open.cancel());
    }

    /// As [`Machines::go_down`].
    fn come_up(self: &Arc<Self>, number: usize, line: &mut Line) {
        line.silent.clear();
        if !std::mem::take(&mut line.is_down) {
            return;
        }
        let instance = locked(&self.chance).next();
        let sub = &self.machines[number].sub;
        let work = locked(sub).start(instance, |have, plan| self.patch(have, plan));
        self.work(number, instance, work);
    }

    /// Does some work of a machine after the time it takes, and what follows from it.
    fn work(self: &Arc<Self>, number: usize, instance: u64, work: Work) {
        let (machines, stop) = (Arc::clone(self), self.stop.clone());
        let all = async move {
            let mut next = Some(work);
            while let Some(work) = next {
                let pace = machines.pace;
                let pause = match work {
                    Work::Scan => pace.scan,
                    Work::Fetch(_) => pace.fetch,
                    Work::Prepare(_) => pace.prepare,
                    Work::Update(_) => pace.update,
                };
                tokio::time::sleep(pause).await;
                let machine = &machines.machines[number];
                let mut sub = locked(&machine.sub);
                if !sub.is_up || sub.instance() != instance {
                    return;
                }
                next = sub.over(work, monotonic(), |have, plan| machines.patch(have, plan));
                drop(sub);
                machine.news.notify_waiters();
            }
        };
        self.tracker.spawn(stop.run_until_cancelled_owned(all));
    }

    /// The tree after a plan. Most of a fleet has the same tree and gets the same plan.
    fn patch(&self, have: &Tree, plan: &Plan) -> Patched {
        let bytes = encode(Encoding::Bincode, "plan", plan).map_err(|error| report(&error))?;
        let key = (have.digest(), Algorithm::Blake3.digest(&bytes));
        let known = |results: &VecDeque<((ObjectId, ObjectId), Tree)>| {
            results.iter().find(|(other, _)| *other == key).map(|(_, tree)| tree.clone())
        };
        if let Some(tree) = known(&locked(&self.results)) {
            return Ok(tree);
        }
        let tree = patched(have, plan).map_err(|error| report(&error))?;
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
        let number = self.at(caller.local.ip()).ok_or_else(nobody)?;
        let machine = &self.machines[number];
        Ok((number, machine))
    }

    async fn poll(&self, caller: Caller, request: PollRequest) -> Result<PollReply, Fault> {
        let (_, machine) = self.called(&caller)?;
        let deadline = Instant::now() + Duration::from_millis(request.wait_ms.into());
        loop {
            // Before looking, so that no news falls between.
            let news = machine.news.notified();
            let is_late = Instant::now() >= deadline;
            {
                let sub = machine.up()?;
                if sub.has_news(request.have) || is_late {
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
        let scanned = machine.up()?.scanned().cloned();
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
                // The rest is asked for again.
                Some(_) => break,
                None => reply.absent.push(digest),
            }
        }
        Ok(reply)
    }

    /// Does what `order` has the machine do that was called.
    fn tell(
        self: &Arc<Self>,
        caller: &Caller,
        order: impl FnOnce(&mut Sub) -> Result<Option<Work>, Fault>,
    ) -> Result<Done, Fault> {
        let (number, machine) = self.called(caller)?;
        let (work, instance) = {
            let mut sub = machine.up()?;
            (order(&mut sub)?, sub.instance())
        };
        machine.news.notify_waiters();
        if let Some(work) = work {
            self.work(number, instance, work);
        }
        Ok(Done {})
    }

    /// All that the machines answer to.
    pub fn router(self: &Arc<Self>, security: &Security) -> Router {
        let all = || Arc::clone(self);
        let (polled, read, configured) = (all(), all(), all());
        let (fetching, preparing, committing, cleaning) = (all(), all(), all(), all());
        Router::new("subd", security)
            .method::<Poll, _, _>(move |caller, request| {
                let machines = Arc::clone(&polled);
                async move { machines.poll(caller, request).await }
            })
            .method::<GetDirectories, _, _>(move |caller, request| {
                let reply = read.directories(&caller, request);
                async move { reply }
            })
            .method::<SetConfiguration, _, _>(move |caller, request| {
                // The patterns of the filter would be kept for each machine.
                let scope = request.scan.map(|settings| Scope::of(&settings, &[]));
                let reply = configured.tell(&caller, |sub| {
                    if let Some(limits) = request.limits {
                        sub.limit(limits);
                    }
                    Ok(scope.and_then(|scope| sub.configure(scope)))
                });
                async move { reply }
            })
            .method::<Fetch, _, _>(move |caller, request| {
                let reply = fetching.tell(&caller, |sub| sub.fetch(request, monotonic()));
                async move { reply }
            })
            .method::<Prepare, _, _>(move |caller, request| {
                let reply = preparing.tell(&caller, |sub| sub.prepare(request, monotonic()));
                async move { reply }
            })
            .method::<Commit, _, _>(move |caller, request| {
                let id = request.update_id;
                let reply = committing.tell(&caller, |sub| sub.commit(id, monotonic()));
                async move { reply }
            })
            .method::<Cleanup, _, _>(move |caller, request| {
                let clean = |sub: &mut Sub| sub.clean(&request.objects).map(|()| None);
                let reply = cleaning.tell(&caller, clean);
                async move { reply }
            })
    }
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

    /// One machine, whose work takes no time.
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
        };
        let no = Duration::ZERO;
        let plenty = Plenty {
            count: 1,
            first: FIRST,
            port: 6969,
            pace: Pace { scan: no, fetch: no, prepare: no, update: no },
            drifted_percent: 0,
            images: vec![Arc::new(RequiredImage::new(content, tree))],
            updates: Vec::new(),
            reader: Arc::new(Reader::new(1)),
        };
        Machines::new(plenty, TaskTracker::new(), CancellationToken::new())
    }

    #[tokio::test]
    async fn what_comes_after_a_machine_went_down_is_refused_and_forgotten() {
        let machines = one();
        let local = SocketAddr::from((FIRST, 6969));
        let identity = Arc::new(api::access::Identity::insecure());
        let caller =
            || Caller { address: local, local, unpacks: false, identity: Arc::clone(&identity) };
        let fetch = |fetch_id| FetchRequest {
            fetch_id,
            sources: Vec::new(),
            objects: Vec::new(),
            ahead: false,
        };
        let tell = |id| machines.tell(&caller(), |sub| sub.fetch(fetch(id), 1));
        let poll = || machines.poll(caller(), PollRequest { have: None, wait_ms: 0 });
        machines.disturb(DisturbRequest { dead_percent: 100, flapping_percent: 0 });
        let refused = tell(1).unwrap_err();
        assert_eq!(refused, Fault::new(FaultCode::Unavailable, "it is down"));
        assert_eq!(poll().await, Err(refused.clone()));
        let request = GetDirectoriesRequest { digests: Vec::new() };
        assert_eq!(machines.directories(&caller(), request), Err(refused));
        // It is not left in the middle of what it was told.
        machines.disturb(DisturbRequest::default());
        assert_eq!(poll().await.unwrap().activity, Activity::Idle);
        assert_eq!(tell(2), Ok(Done {}));
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
