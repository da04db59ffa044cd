//! All orders of the steps of a collection and of those who work beside it.
//!
//! Each party is a list of steps; a step is what nothing can come between, given the locks of the
//! shell. From each state each party takes its next step, so that every order is tried. What must
//! hold is looked at in each state. That the rules are needed is seen by breaking each.

use std::collections::{BTreeMap, BTreeSet};

use model::object::{Algorithm, ObjectId};

use super::{Found, Party, World, expect_all_well, expect_loss, explore};
use imageserver::core::collection::leases::Leases;
use imageserver::core::collection::removal::{RemovalDecision, WalkedImages, decide};

const LEASE: u64 = 10;

/// A rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// It is looked for objects before they are leased.
    LeaseFirst,
    /// Objects are removed while an image is being looked through.
    OnePiece,
    /// Images that were added since the walk are not walked.
    WalkAgain,
    /// Leases are given in the middle of a removal.
    LeaseLock,
}

fn id(name: &str) -> ObjectId {
    Algorithm::Blake3.digest(name.as_bytes())
}

/// The objects of every image here: a directory, and a file that it names.
const PARTS: [&str; 2] = ["directory", "file"];

#[derive(Clone, Debug)]
struct Model {
    broken: Broken,
    objects: BTreeSet<&'static str>,
    images: BTreeSet<&'static str>,
    additions: u64,
    adding: u32,
    /// The collector has the lock that keeps images from being added, and that of the leases.
    is_removing: bool,
    leases: Leases,
    now: u64,
    /// Until when the uploader's leases last.
    leased_until: u64,
    /// What it was told of, until when.
    promised: BTreeMap<&'static str, u64>,
}

impl World for Model {
    fn is_whole(&self) -> bool {
        self.images.is_empty() || PARTS.iter().all(|part| self.objects.contains(part))
    }

    fn keeps_promises(&self) -> bool {
        let mut promised = self.promised.iter().filter(|(_, until)| self.now < **until);
        promised.all(|(part, _)| self.objects.contains(part))
    }

    fn has_garbage(&self) -> bool {
        self.objects.contains("garbage")
    }
}

/// Somebody who works beside the collection, and what comes next.
#[derive(Clone, Debug)]
enum Somebody {
    /// Leases both objects, looks, uploads what is missing, and adds the image.
    Uploader {
        step: usize,
        missing: BTreeSet<&'static str>,
    },
    /// Adds an image of what is there, without ever having asked.
    Adder {
        step: usize,
    },
    /// Deletes an image.
    Deleter(&'static str),
    /// Time passes, until all leases have ended.
    Clock,
    Collector(Collector),
    Done,
}

#[derive(Clone, Debug)]
enum Collector {
    Walk { knowledge: WalkedImages },
    Visit { knowledge: WalkedImages, additions: u64, images: usize },
    List { knowledge: WalkedImages },
    Lock { knowledge: WalkedImages, candidates: Vec<&'static str> },
    Decide { knowledge: WalkedImages, candidates: Vec<&'static str> },
    Rename { knowledge: WalkedImages, candidates: Vec<&'static str>, part: &'static str },
}

impl Party<Model> for Somebody {
    fn step(&self, world: &mut Model) -> Option<Self> {
        let may_lease = !world.is_removing || world.broken == Broken::LeaseLock;
        match self.clone() {
            Self::Done => None,
            Self::Clock => {
                world.now += LEASE;
                Some(Self::Done)
            }
            Self::Deleter(image) => {
                world.images.remove(image);
                Some(Self::Done)
            }
            Self::Uploader { step, missing } => uploader(world, step, missing, may_lease),
            Self::Adder { step } => {
                let next = add(world, step, "added")?;
                Some(next.map_or(Self::Done, |step| Self::Adder { step }))
            }
            Self::Collector(collector) => collector.step(world),
        }
    }

    fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

fn uploader(
    world: &mut Model,
    step: usize,
    mut missing: BTreeSet<&'static str>,
    may_lease: bool,
) -> Option<Somebody> {
    let lease_step = usize::from(world.broken == Broken::LeaseFirst);
    match step {
        _ if step == lease_step => {
            if !may_lease {
                return None;
            }
            world.leased_until = world.now + LEASE;
            for part in PARTS {
                world.leases.give(world.now, &id(part), LEASE);
                if step == 1 && !missing.contains(part) {
                    world.promised.insert(part, world.leased_until);
                }
            }
        }
        0 | 1 => {
            for part in PARTS {
                if !world.objects.contains(part) {
                    missing.insert(part);
                } else if step == 1 {
                    world.promised.insert(part, world.leased_until);
                }
            }
        }
        2 | 3 => {
            let part = PARTS[step - 2];
            if missing.contains(part) {
                if !may_lease {
                    return None;
                }
                world.leases.give(world.now, &id(part), LEASE);
                world.objects.insert(part);
            }
        }
        _ => {
            return match add(world, step - 4, "uploaded")? {
                None => Some(Somebody::Done),
                Some(next) => Some(Somebody::Uploader { step: next + 4, missing }),
            };
        }
    }
    Some(Somebody::Uploader { step: step + 1, missing })
}

/// Adds an image. The next step, or nothing if it was the last.
fn add(world: &mut Model, step: usize, image: &'static str) -> Option<Option<usize>> {
    match step {
        0 => {
            if world.is_removing && world.broken != Broken::OnePiece {
                return None;
            }
            world.adding += 1;
        }
        1 | 2 => {
            if !world.objects.contains(PARTS[step - 1]) {
                world.adding -= 1;
                return Some(None);
            }
        }
        3 => {
            world.images.insert(image);
            world.additions += 1;
        }
        _ => {
            world.adding -= 1;
            return Some(None);
        }
    }
    Some(Some(step + 1))
}

impl Collector {
    fn step(self, world: &mut Model) -> Option<Somebody> {
        let next = match self {
            Self::Walk { knowledge } => {
                let (additions, images) = (world.additions, world.images.len());
                Self::Visit { knowledge, additions, images }
            }
            Self::Visit { mut knowledge, additions, images } => {
                // An image was whole when it was listed, and what it needs is what it needed.
                if images > 0 {
                    knowledge.needed.add_directory(&id(PARTS[0]));
                    knowledge.needed.add(&id(PARTS[1]));
                }
                knowledge.additions = additions;
                Self::List { knowledge }
            }
            Self::List { knowledge } => {
                let is_free = |part: &&&str| {
                    !knowledge.needed.contains(&id(part))
                        && !world.leases.is_leased(world.now, &id(part))
                };
                let candidates = world.objects.iter().filter(is_free).copied().collect();
                Self::Lock { knowledge, candidates }
            }
            Self::Lock { knowledge, candidates } => {
                let is_shared = world.adding > 0 && world.broken != Broken::OnePiece;
                if is_shared || world.is_removing {
                    return None;
                }
                if world.broken != Broken::WalkAgain && world.additions != knowledge.additions {
                    Self::Walk { knowledge }
                } else {
                    world.is_removing = true;
                    Self::Decide { knowledge, candidates }
                }
            }
            Self::Decide { knowledge, mut candidates } => {
                let Some(part) = candidates.pop() else {
                    world.is_removing = false;
                    return Some(Somebody::Done);
                };
                let additions = match world.broken {
                    Broken::WalkAgain => knowledge.additions,
                    _ => world.additions,
                };
                match decide(&knowledge, additions, &world.leases, world.now, &id(part)) {
                    RemovalDecision::WalkAgain => {
                        world.is_removing = false;
                        Self::Walk { knowledge }
                    }
                    RemovalDecision::Remove => Self::Rename { knowledge, candidates, part },
                    RemovalDecision::Needed | RemovalDecision::Leased => {
                        Self::Decide { knowledge, candidates }
                    }
                }
            }
            Self::Rename { knowledge, candidates, part } => {
                world.objects.remove(part);
                Self::Decide { knowledge, candidates }
            }
        };
        Some(Somebody::Collector(next))
    }
}

/// A store with garbage; the objects of an image are there, maybe of one that was deleted.
fn world(broken: Broken, objects: &[&'static str], images: &[&'static str]) -> Model {
    Model {
        broken,
        objects: objects.iter().copied().collect(),
        images: images.iter().copied().collect(),
        additions: images.len() as u64,
        adding: 0,
        is_removing: false,
        leases: Leases::default(),
        now: 0,
        leased_until: 0,
        promised: BTreeMap::new(),
    }
}

fn collector() -> Somebody {
    Somebody::Collector(Collector::Walk { knowledge: WalkedImages::default() })
}

fn uploader_party() -> Somebody {
    Somebody::Uploader { step: 0, missing: BTreeSet::new() }
}

fn all(broken: Broken) -> Vec<Found> {
    let parts: &[&str] = &["directory", "file", "garbage"];
    let half: &[&str] = &["file", "garbage"];
    let adder = || Somebody::Adder { step: 0 };
    vec![
        explore(world(broken, parts, &[]), &[collector(), uploader_party(), adder()]),
        explore(world(broken, half, &[]), &[collector(), uploader_party(), Somebody::Clock]),
        explore(
            world(broken, parts, &["old"]),
            &[collector(), uploader_party(), Somebody::Deleter("old")],
        ),
        explore(
            world(broken, parts, &["old"]),
            &[collector(), adder(), Somebody::Deleter("old"), Somebody::Clock],
        ),
        explore(world(broken, half, &[]), &[collector(), collector(), uploader_party()]),
    ]
}

#[test]
fn in_every_order_images_stay_whole_promises_hold_and_garbage_goes() {
    expect_all_well(&all(Broken::Nothing));
}

#[test]
fn each_rule_is_needed() {
    for broken in [Broken::LeaseFirst, Broken::OnePiece, Broken::WalkAgain, Broken::LeaseLock] {
        expect_loss(&all(broken), &broken);
    }
}
