//! All orders of the steps of a server that collects and of others that take uploads and add
//! images, all on one bucket.
//!
//! A step is one request to the bucket: nothing comes between its parts, anything between two. What
//! must hold is looked at in each state. That the rules are needed is seen by breaking each.

use std::collections::BTreeSet;

use super::{Found, Party, World, expect_all_well, expect_loss, explore};

/// A rule of `store::bucket::collecting` that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// It is looked for objects before they are leased.
    LeaseFirst,
    /// Who has leased an object does not look whether it is condemned.
    ReadList,
    /// What is removed is not written down first.
    WriteList,
    /// The leases are read before the list is written.
    LeasesLast,
    /// Images that were added since the walk are not walked.
    WalkAgain,
    /// The list is taken back before the removals are answered.
    AnswerFirst,
    /// Another collector takes the turn and the list at once, whoever has them.
    Patience,
}

/// The objects of every image here.
const PARTS: [&str; 2] = ["directory", "file"];

#[derive(Clone, Debug)]
struct Model {
    broken: Broken,
    objects: BTreeSet<&'static str>,
    images: BTreeSet<&'static str>,
    /// Who has leased all objects of the images.
    leases: BTreeSet<&'static str>,
    /// Who was told that which objects are there.
    promised: BTreeSet<(&'static str, &'static str)>,
    condemned: BTreeSet<&'static str>,
    turn: Option<&'static str>,
}

impl World for Model {
    fn is_whole(&self) -> bool {
        self.images.is_empty() || PARTS.iter().all(|part| self.objects.contains(part))
    }

    fn keeps_promises(&self) -> bool {
        let mut held = self.promised.iter().filter(|(who, _)| self.leases.contains(who));
        held.all(|(_, part)| self.objects.contains(part))
    }

    fn has_garbage(&self) -> bool {
        self.objects.contains("garbage")
    }
}

/// Somebody, and what comes next.
#[derive(Clone, Debug)]
enum Somebody {
    /// Leases, looks, stores what is missing, adds an image, and gives the lease back.
    Uploader {
        who: &'static str,
        step: usize,
        missing: BTreeSet<&'static str>,
    },
    /// Deletes an image.
    Deleter(&'static str),
    Collector {
        who: &'static str,
        step: Collecting,
    },
    Done,
}

#[derive(Clone, Debug)]
enum Collecting {
    Turn,
    Walk,
    List { needed: bool },
    Condemn { needed: bool, leased: bool, batch: BTreeSet<&'static str> },
    ReadLeases { needed: bool, batch: BTreeSet<&'static str> },
    WalkAgain { needed: bool, leased: bool, batch: BTreeSet<&'static str> },
    Remove { batch: BTreeSet<&'static str> },
    Withdraw,
    End,
}

impl Party<Model> for Somebody {
    fn step(&self, world: &mut Model) -> Option<Self> {
        match self.clone() {
            Self::Done => None,
            Self::Deleter(image) => {
                world.images.remove(image);
                Some(Self::Done)
            }
            Self::Uploader { who, step, missing } => uploader(world, who, step, missing),
            Self::Collector { who, step } => {
                let next = step.step(world, who)?;
                Some(next.map_or(Self::Done, |step| Self::Collector { who, step }))
            }
        }
    }

    fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }
}

fn uploader(
    world: &mut Model,
    who: &'static str,
    step: usize,
    mut missing: BTreeSet<&'static str>,
) -> Option<Somebody> {
    let order = if world.broken == Broken::LeaseFirst { [2, 0, 1] } else { [0, 1, 2] };
    match order.get(step).copied().unwrap_or(step) {
        0 => {
            world.leases.insert(who);
        }
        1 => {
            let is_condemned = PARTS.iter().any(|part| world.condemned.contains(part));
            if is_condemned && world.broken != Broken::ReadList {
                return None;
            }
        }
        2 => {
            for part in PARTS {
                if world.objects.contains(part) {
                    world.promised.insert((who, part));
                } else {
                    missing.insert(part);
                }
            }
        }
        3 | 4 => {
            let part = PARTS[step - 3];
            if missing.contains(part) {
                world.objects.insert(part);
                world.promised.insert((who, part));
            }
        }
        // What is needed was seen to be there, by whoever stored it or looked for it.
        5 => {
            world.images.insert(who);
        }
        _ => {
            world.leases.remove(who);
            return Some(Somebody::Done);
        }
    }
    Some(Somebody::Uploader { who, step: step + 1, missing })
}

impl Collecting {
    fn step(self, world: &mut Model, who: &'static str) -> Option<Option<Self>> {
        let broken = world.broken;
        Some(Some(match self {
            Self::Turn => {
                if world.turn.is_some() && broken != Broken::Patience {
                    return None;
                }
                world.turn = Some(who);
                if broken == Broken::Patience {
                    world.condemned.clear();
                }
                Self::Walk
            }
            Self::Walk => Self::List { needed: !world.images.is_empty() },
            Self::List { needed } => {
                let is_free = |part: &&&'static str| !needed || !PARTS.contains(part);
                let batch: BTreeSet<&'static str> =
                    world.objects.iter().filter(is_free).copied().collect();
                match broken {
                    _ if batch.is_empty() => Self::End,
                    Broken::LeasesLast | Broken::WriteList => Self::ReadLeases { needed, batch },
                    _ => Self::Condemn { needed, leased: false, batch },
                }
            }
            Self::Condemn { needed, leased, batch } => {
                world.condemned = batch.clone();
                if broken == Broken::LeasesLast {
                    Self::WalkAgain { needed, leased, batch }
                } else {
                    Self::ReadLeases { needed, batch }
                }
            }
            Self::ReadLeases { needed, batch } => {
                let leased = !world.leases.is_empty();
                if broken == Broken::LeasesLast {
                    Self::Condemn { needed, leased, batch }
                } else {
                    Self::WalkAgain { needed, leased, batch }
                }
            }
            Self::WalkAgain { needed, leased, mut batch } => {
                let needed = match broken {
                    Broken::WalkAgain => needed,
                    _ => !world.images.is_empty(),
                };
                if needed || leased {
                    batch.retain(|part| !PARTS.contains(part));
                }
                if broken == Broken::AnswerFirst {
                    world.condemned.clear();
                }
                Self::Remove { batch }
            }
            Self::Remove { mut batch } => match batch.pop_first() {
                Some(part) => {
                    world.objects.remove(part);
                    Self::Remove { batch }
                }
                None => Self::Withdraw,
            },
            Self::Withdraw => {
                if broken != Broken::WriteList && world.turn == Some(who) {
                    world.condemned.clear();
                }
                Self::End
            }
            Self::End => {
                if world.turn == Some(who) {
                    world.turn = None;
                }
                return Some(None);
            }
        }))
    }
}

fn world(broken: Broken, objects: &[&'static str], images: &[&'static str]) -> Model {
    Model {
        broken,
        objects: objects.iter().copied().collect(),
        images: images.iter().copied().collect(),
        leases: BTreeSet::new(),
        promised: BTreeSet::new(),
        condemned: BTreeSet::new(),
        turn: None,
    }
}

fn all(broken: Broken) -> Vec<Found> {
    let parts: &[&str] = &["directory", "file", "garbage"];
    let half: &[&str] = &["file", "garbage"];
    let collector = |who| Somebody::Collector { who, step: Collecting::Turn };
    let uploader = |who| Somebody::Uploader { who, step: 0, missing: BTreeSet::new() };
    vec![
        explore(world(broken, parts, &[]), &[collector("c"), uploader("a"), uploader("b")]),
        explore(world(broken, half, &[]), &[collector("c"), uploader("a"), uploader("b")]),
        explore(
            world(broken, parts, &["old"]),
            &[collector("c"), uploader("a"), Somebody::Deleter("old")],
        ),
        explore(world(broken, half, &[]), &[collector("c"), collector("d"), uploader("a")]),
        explore(
            world(broken, parts, &["old"]),
            &[collector("c"), collector("d"), uploader("a"), Somebody::Deleter("old")],
        ),
    ]
}

#[test]
fn in_every_order_images_stay_whole_promises_hold_and_garbage_goes() {
    expect_all_well(&all(Broken::Nothing));
}

#[test]
fn each_rule_is_needed() {
    let rules = [
        Broken::LeaseFirst,
        Broken::ReadList,
        Broken::WriteList,
        Broken::LeasesLast,
        Broken::WalkAgain,
        Broken::AnswerFirst,
        Broken::Patience,
    ];
    for broken in rules {
        expect_loss(&all(broken), &broken);
    }
}
