//! Servers in a tree, by chance: the cores of replication with models of their stores.
//!
//! Images are added, changed, copied and ended, directories made, given away and removed; servers
//! are killed and links are cut at any moment; fetching fails. At the end all links are whole. Then
//! each replica has exactly what its patterns say and all directories, nothing was lost on the way,
//! and no name means two images without being told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::access::Owners;
use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectoriesReply,
};
use api::image_server::replication::{
    Cursor, GetImageUpdatesReply, ImageChange, ImageEnd, ReplicationPosition, ReplicationTrouble,
    ServerId,
};
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;

use imageserver::core::directories::Directories;
use imageserver::core::replication::decision::{
    ImageDecision, LocalImage, NamePatterns, ReplicationRules,
};
use imageserver::core::replication::directories::{
    self, DirectoriesDecision, Draft, LocalState, PageOutcome,
};
use imageserver::core::replication::master::ChangeLog;
use imageserver::core::replication::queue::{Outcome, Queue};
use imageserver::core::replication::sync_cursor::SyncCursor;

/// How many names are on a page: few, so that lists have many.
const PAGE: usize = 3;

/// A generator of numbers that a seed repeats.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Image { digest: u64, notes: u64 },
    Ended(Option<u64>),
}

fn id(number: u64) -> ObjectId {
    Algorithm::Blake3.digest(&number.to_le_bytes())
}

/// A server: what is on its disk, and what a restart forgets.
struct Server {
    disk: BTreeMap<ImageName, Kept>,
    directories: Directories,
    /// What its master has told of its own, and what has come of them.
    directories_told: Option<DirectoriesVersion>,
    draft: Draft,
    held: BTreeSet<ImageName>,
    log: ChangeLog<ImageName>,
    master: Option<usize>,
    is_cut: bool,
    rules: ReplicationRules,
    sync_cursor: SyncCursor,
    queue: Queue,
}

impl Server {
    fn new(master: Option<usize>, rules: ReplicationRules, instance: u64) -> Self {
        Self {
            disk: BTreeMap::new(),
            directories: Directories::default(),
            directories_told: None,
            draft: Draft::default(),
            held: BTreeSet::new(),
            log: ChangeLog::new(instance),
            master,
            is_cut: false,
            rules,
            sync_cursor: SyncCursor::default(),
            queue: Queue::default(),
        }
    }

    fn kill(&mut self, instance: u64) {
        self.log = ChangeLog::new(instance);
        (self.sync_cursor, self.queue) = (SyncCursor::default(), Queue::default());
        (self.directories_told, self.draft) = (None, Draft::default());
    }

    fn decide_directories(&self, theirs: Option<DirectoriesVersion>) -> DirectoriesDecision {
        let own = LocalState::Known(self.directories.version(), self.directories.count());
        directories::decide(theirs, own)
    }

    fn keep(&mut self, name: &ImageName, kept: Kept) {
        self.disk.insert(name.clone(), kept);
        self.log.note(name);
    }

    fn change(&self, name: &ImageName) -> Option<ImageChange> {
        let name = name.clone();
        Some(match *self.disk.get(&name)? {
            Kept::Image { digest, notes } => {
                let (digest, notes) = (id(digest), id(notes));
                ImageChange::Image { name, digest, notes, expires_at: None, bytes: 1 }
            }
            Kept::Ended(digest) => {
                ImageChange::Ended { name, how: ImageEnd::Deleted, digest: digest.map(id) }
            }
        })
    }

    fn here(&self, name: &ImageName) -> LocalImage {
        match self.disk.get(name) {
            None => LocalImage::Nothing,
            Some(Kept::Ended(_)) => LocalImage::Ended,
            Some(Kept::Image { digest, notes }) => LocalImage::Image {
                digest: id(*digest),
                notes: id(*notes),
                expires_at: None,
                is_held: self.held.contains(name),
            },
        }
    }

    fn answer(&self, position: &ReplicationPosition) -> GetImageUpdatesReply {
        let known = match position {
            ReplicationPosition::Since(cursor) => self.log.since(*cursor, PAGE),
            _ => None,
        };
        let Cursor { instance: own, .. } = self.log.cursor();
        let (is_list, names, cursor, more) = match (known, position) {
            (Some((names, cursor, more)), _) => (false, names, cursor, more),
            (None, position) => {
                let after = match position {
                    ReplicationPosition::After { instance, name } if *instance == own => Some(name),
                    _ => None,
                };
                let mut rest =
                    self.disk.keys().filter(|name| after.is_none_or(|after| *name > after));
                let names: Vec<ImageName> = rest.by_ref().take(PAGE).cloned().collect();
                (true, names, self.log.cursor(), rest.next().is_some())
            }
        };
        let changes = names.iter().filter_map(|name| self.change(name)).collect();
        let server = ServerId::from(u128::from(own));
        let directories = self.directories.version();
        GetImageUpdatesReply {
            server,
            upstream: vec![],
            cursor,
            is_list,
            changes,
            more,
            directories,
        }
    }

    /// Takes a reply, as the follower does.
    fn take(&mut self, now: Duration, reply: GetImageUpdatesReply) {
        self.sync_cursor.take(&reply).unwrap();
        self.directories_told = reply.directories;
        for change in reply.changes {
            let is_idle =
                self.rules.decide(&change, &self.here(change.name())) == ImageDecision::Nothing;
            if !is_idle || !self.queue.is_empty_of(change.name()) {
                self.queue.put(now, change);
            }
        }
    }
}

struct World {
    servers: Vec<Server>,
    chance: Chance,
    now: Duration,
    instances: u64,
    digests: u64,
    /// Names that ended on the first server: nothing else may end anywhere.
    ended: BTreeSet<ImageName>,
}

impl World {
    /// A root, two replicas of it, one of these that follows a part, and one that is an archive.
    fn new(seed: u64) -> Self {
        let plain = ReplicationRules::default;
        let part = NamePatterns::new(&["base/*".to_owned()], &["**/3".to_owned()]).unwrap();
        let part = ReplicationRules { patterns: part, is_archive: false };
        let archive = ReplicationRules { is_archive: true, ..ReplicationRules::default() };
        let tree = [
            (None, plain()),
            (Some(0), plain()),
            (Some(0), plain()),
            (Some(1), plain()),
            (Some(3), part),
            (Some(2), archive),
        ];
        let server = |(index, (master, rules))| Server::new(master, rules, index as u64);
        let servers = tree.into_iter().enumerate().map(server).collect();
        let chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let ended = BTreeSet::new();
        Self { servers, chance, now: Duration::ZERO, instances: 100, digests: 0, ended }
    }

    fn name(&mut self) -> ImageName {
        let directory = ["base", "web"][self.chance.below(2) as usize];
        ImageName::new(&format!("{directory}/{}", self.chance.below(12))).unwrap()
    }

    /// What operators do on the root, over whichever server.
    fn write(&mut self) {
        let name = self.name();
        self.digests += 1;
        let (what, digests) = (self.chance.below(4), self.digests);
        let root = &mut self.servers[0];
        match (root.disk.get(&name).copied(), what) {
            (None, _) => root.keep(&name, Kept::Image { digest: digests, notes: 0 }),
            (Some(Kept::Image { digest, .. }), 0) => {
                root.keep(&name, Kept::Ended(Some(digest)));
                self.ended.insert(name);
            }
            (Some(Kept::Image { digest, .. }), _) => {
                root.keep(&name, Kept::Image { digest, notes: digests });
            }
            (Some(Kept::Ended(_)), _) => {}
        }
    }

    /// What operators do with directories, on the root too.
    fn write_directories(&mut self) {
        let (name, digits) = (self.name(), self.chance.below(1 << 20));
        let owners = Owners::new([format!("group{digits}").as_str()], []);
        let what = self.chance.below(3);
        let (line, id) = (self.chance.below(u64::MAX), self.chance.below(u64::MAX));
        let directories = &mut self.servers[0].directories;
        let (now, none) = (Time::default(), |_: &ImageName| false);
        let done = match what {
            0 => directories.remove(&name, 0),
            1 => directories.give(&name, owners, now, none),
            _ => directories
                .to_make(&name, true, none)
                .and_then(|names| directories.make(&name, names, Some(owners), now).map(drop)),
        };
        if done.is_ok() {
            directories.note_change(line, id);
        }
    }

    /// A replica asks for a page of the directories that it lacks; the page may be lost.
    fn take_directories(&mut self, index: usize) {
        let Some(master) = self.servers[index].master else { return };
        let server = &self.servers[index];
        let wanted = server.decide_directories(server.directories_told);
        if server.is_cut || wanted != DirectoriesDecision::Fetch || self.chance.below(8) == 0 {
            return;
        }
        let theirs = &self.servers[master].directories;
        let (page, more) = theirs.page(server.draft.request().after.as_ref(), PAGE);
        let version = theirs.version();
        let page = GetMadeDirectoriesReply { version, directories: page, more };
        let server = &mut self.servers[index];
        match server.draft.take(page).unwrap() {
            PageOutcome::More => {}
            PageOutcome::Changed => server.draft = Draft::default(),
            PageOutcome::Whole(whole) => {
                server.draft = Draft::default();
                if server.decide_directories(whole.version()) == DirectoriesDecision::Fetch {
                    let changes = |of: &Directories| of.version().map_or(0, |of| of.changes);
                    assert!(changes(&whole) > changes(&server.directories));
                    server.directories = whole;
                }
            }
        }
    }

    /// A replica asks its master; the reply may be lost.
    fn ask(&mut self, index: usize) {
        let Some(master) = self.servers[index].master else { return };
        if self.servers[index].is_cut {
            return;
        }
        let reply = self.servers[master].answer(&self.servers[index].sync_cursor.position());
        if self.chance.below(8) > 0 {
            self.servers[index].take(self.now, reply);
        }
    }

    /// A replica does what is next. `fails` says whether fetching does.
    fn work(&mut self, index: usize, fails: bool) {
        let Some(master) = self.servers[index].master else { return };
        let Some(change) = self.servers[index].queue.next(self.now) else { return };
        let name = change.name().clone();
        let theirs = self.servers[master].disk.get(&name).copied();
        let fails = fails || self.servers[index].is_cut;
        let server = &mut self.servers[index];
        let here = server.here(&name);
        let decision = server.rules.decide(&change, &here);
        let done = match (decision, &change) {
            (ImageDecision::Nothing, _) => Outcome::Done,
            (ImageDecision::Blocked(trouble), _) => Outcome::Blocked(trouble, String::new()),
            (ImageDecision::Fetch | ImageDecision::UpdateNotes, _) if fails => {
                Outcome::Failed("cut".to_owned())
            }
            (
                ImageDecision::Fetch | ImageDecision::UpdateNotes,
                ImageChange::Image { digest: told, .. },
            ) => {
                match theirs {
                    Some(Kept::Image { digest, notes }) if id(digest) == *told => {
                        server.keep(&name, Kept::Image { digest, notes });
                        Outcome::Done
                    }
                    Some(Kept::Image { .. }) => Outcome::Failed("another".to_owned()),
                    // It will be told what has become of it.
                    Some(Kept::Ended(_)) | None => Outcome::Done,
                }
            }
            (ImageDecision::End, _) => {
                assert!(self.ended.contains(&name), "{name} ends here and not on the root");
                let Some(Kept::Image { digest, .. }) = server.disk.get(&name).copied() else {
                    panic!("{name} ends and is not here");
                };
                server.keep(&name, Kept::Ended(Some(digest)));
                Outcome::Done
            }
            (ImageDecision::AddTombstone, _) => {
                assert!(self.ended.contains(&name), "{name} ends here and not on the root");
                server.keep(&name, Kept::Ended(None));
                Outcome::Done
            }
            (decision, change) => panic!("{decision:?} for {change:?}"),
        };
        let chance = self.chance.below(1_000) as u16;
        self.servers[index].queue.end(self.now, &name, done, chance.into());
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.chance.below(500));
        let index = self.chance.below(self.servers.len() as u64) as usize;
        match self.chance.below(24) {
            0..3 => self.write(),
            20 => self.write_directories(),
            21.. => self.take_directories(index),
            3..9 => self.ask(index),
            9..16 => {
                let fails = self.chance.below(4) == 0;
                self.work(index, fails);
            }
            16 => {
                self.instances += 1;
                self.servers[index].kill(self.instances);
            }
            17 => self.servers[index].is_cut ^= true,
            18 => {
                let name = self.name();
                self.servers[index].held.insert(name);
            }
            _ => self.servers[index].held.clear(),
        }
    }

    /// All is whole again, and nobody changes anything.
    fn settle(&mut self) {
        for server in &mut self.servers {
            server.is_cut = false;
            server.held.clear();
        }
        for _ in 0..400 {
            self.now += Duration::from_secs(1);
            for index in 0..self.servers.len() {
                self.ask(index);
                for _ in 0..3 {
                    self.work(index, false);
                    self.take_directories(index);
                }
            }
        }
    }
}

#[test]
fn servers_in_a_tree_end_with_what_their_patterns_say_and_lose_nothing() {
    let (mut steps, mut images, mut marks, mut made) = (0, 0, 0, 0);
    for seed in 1..=300 {
        let mut world = World::new(seed);
        for _ in 0..400 {
            world.step();
            steps += 1;
        }
        world.settle();
        let root = &world.servers[0].disk;
        made += world.servers[0].directories.count();
        for (index, server) in world.servers.iter().enumerate().skip(1) {
            let all = &world.servers[0].directories;
            assert_eq!(&server.directories, all, "seed {seed}, server {index}");
            assert!(server.sync_cursor.follows(), "seed {seed}, server {index}");
            let troubles: Vec<_> = server.queue.troubles().collect();
            assert_eq!(troubles, [], "seed {seed}, server {index}");
            assert_eq!(server.queue.behind(), (0, 0), "seed {seed}, server {index}");
            for (name, kept) in root.iter().filter(|(name, _)| server.rules.follow(name)) {
                let here = server.disk.get(name).copied();
                let is_same = match (kept, here) {
                    (Kept::Image { .. }, here) => here == Some(*kept),
                    (Kept::Ended(_), Some(Kept::Image { .. })) => server.rules.is_archive,
                    (Kept::Ended(_), here) => matches!(here, Some(Kept::Ended(_))),
                };
                assert!(is_same, "seed {seed}, server {index}: {name} {kept:?} {here:?}");
                images += u64::from(matches!(here, Some(Kept::Image { .. })));
                marks += u64::from(matches!(here, Some(Kept::Ended(_))));
            }
            let others = server.disk.keys().find(|name| !server.rules.follow(name));
            assert_eq!(others, None, "seed {seed}, server {index}");
        }
    }
    println!("{steps} steps, then {images} images and {marks} ended names on replicas");
    assert!(made > 1_000, "{made}");
}

#[test]
fn a_master_that_lost_its_directories_takes_none_away() {
    for seed in 1..=100 {
        let mut world = World::new(seed);
        for _ in 0..300 {
            world.step();
        }
        world.settle();
        let before = world.servers[0].directories.clone();
        if before.count() == 0 {
            continue;
        }
        // Its disk is new; and later somebody makes directories on it.
        world.servers[0].directories = Directories::default();
        world.servers[0].kill(1_000);
        world.settle();
        let expected = DirectoriesDecision::Blocked(DirectoriesTrouble::OnlyHere);
        assert_eq!(world.servers[1].decide_directories(None), expected, "seed {seed}");
        for _ in 0..300 {
            world.step();
        }
        world.settle();
        for server in &world.servers[1..] {
            assert_eq!(server.directories, before, "seed {seed}");
        }
        let theirs = world.servers[0].directories.version();
        let told = world.servers[1].decide_directories(theirs);
        let kept = [DirectoriesTrouble::OnlyHere, DirectoriesTrouble::Conflict];
        assert!(kept.map(DirectoriesDecision::Blocked).contains(&told), "seed {seed}: {told:?}");
    }
}

#[test]
fn a_replica_that_was_a_master_keeps_what_it_has_and_tells_of_every_conflict() {
    for seed in 1..=100 {
        let mut world = World::new(seed);
        // It was a master for itself, and its images are others.
        let mut own = BTreeMap::new();
        for number in 0..6 {
            let name = ImageName::new(&format!("base/{number}")).unwrap();
            let kept = match number {
                0 => Kept::Ended(Some(900)),
                number => Kept::Image { digest: 1_000 + number, notes: 0 },
            };
            own.insert(name, kept);
        }
        world.servers[1].disk.clone_from(&own);
        // Its replicas are told so by it.
        world.ended.insert(ImageName::new("base/0").unwrap());
        for _ in 0..300 {
            world.step();
        }
        world.settle();
        let (root, server) = (&world.servers[0].disk, &world.servers[1]);
        for (name, kept) in &own {
            assert_eq!(server.disk.get(name), Some(kept), "seed {seed}: {name}");
            let expected = match (root.get(name), kept) {
                (Some(Kept::Image { .. }), Kept::Image { .. }) => {
                    Some(ReplicationTrouble::Conflict)
                }
                (Some(Kept::Image { .. }), Kept::Ended(_)) => Some(ReplicationTrouble::EndedHere),
                (Some(Kept::Ended(_)), Kept::Image { .. }) => Some(ReplicationTrouble::EndedOther),
                (Some(Kept::Ended(_)), Kept::Ended(_)) | (None, _) => None,
            };
            assert_eq!(server.queue.trouble(name), expected, "seed {seed}: {name}");
        }
    }
}
