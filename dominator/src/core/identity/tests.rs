//! Fleets of a few machines, who says what, and who is doubted.

use super::*;

/// A sub on a machine of its own: the instance and the boot are those of `machine`.
fn sighting(machine: u64, hostname: &str, machine_id: &str) -> Sighting {
    let own = Origin::Machine;
    Sighting {
        instance: machine,
        hostname: hostname.to_owned(),
        machine_id: machine_id.to_owned(),
        boot_id: format!("boot {machine}"),
        origins: Origins { machine_id: own, hostname: own },
    }
}

/// A machine of an image that brings these as host name and machine id.
fn of_image(sighting: Sighting, hostname: &str, machine_id: &str) -> Sighting {
    let content = |word: &str| {
        let digest = model::object::Algorithm::Blake3.digest(format!("{word}\n").as_bytes());
        Origin::Image(digest)
    };
    let origins = Origins { machine_id: content(machine_id), hostname: content(hostname) };
    Sighting { origins, ..sighting }
}

/// A roster with those who look after its records.
#[derive(Default)]
struct Fleet {
    roster: IdentityTable,
    seats: BTreeMap<String, u64>,
    number: u64,
    verdicts: BTreeMap<String, Option<String>>,
}

impl Fleet {
    fn new(names: &[&str]) -> Self {
        let mut fleet = Self::default();
        names.iter().for_each(|name| fleet.enter(name));
        fleet
    }

    fn take(&mut self, changed: Vec<(Arc<str>, IdentityVerdict)>) {
        for (name, verdict) in changed {
            self.verdicts.insert(name.to_string(), verdict.wrong.map(|why| why.to_string()));
        }
    }

    fn enter(&mut self, name: &str) {
        let (seat, changed) = self.roster.enter(name);
        self.seats.insert(name.to_owned(), seat);
        self.take(changed);
    }

    fn leave(&mut self, name: &str) {
        let changed = self.roster.leave(name);
        self.verdicts.remove(name);
        self.take(changed);
    }

    fn hear(&mut self, name: &str, news: IdentityReport) {
        let changed = self.roster.hear(name, self.seats[name], news);
        self.take(changed);
    }

    /// Who answers for the record; says whether it is the machine that is meant.
    fn sees(&mut self, name: &str, sighting: Sighting) -> bool {
        self.number += 1;
        let number = self.number;
        let changed =
            self.roster.hear(name, self.seats[name], IdentityReport::Seen(number, sighting.into()));
        let own = changed.iter().find(|(other, _)| **other == *name).expect("it is answered");
        assert_eq!(own.1.number, number);
        self.take(changed);
        self.verdicts[name].is_none()
    }

    /// It is seen and synced.
    fn syncs(&mut self, name: &str, sighting: Sighting) {
        assert!(self.sees(name, sighting), "{name}: {:?}", self.verdicts[name]);
        self.hear(name, IdentityReport::Synced);
    }

    fn trust(&mut self, name: &str) -> Result<(), TrustError> {
        let known = self.roster.trusted(name, "ann", "installed anew", Time::default())?;
        let changed = self.roster.take_trust(name, known);
        self.take(changed);
        Ok(())
    }

    /// Those that are doubted.
    fn doubted(&self) -> Vec<&str> {
        let doubted = self.verdicts.iter().filter(|(_, why)| why.is_some());
        doubted.map(|(name, _)| name.as_str()).collect()
    }

    fn why(&self, name: &str) -> &str {
        self.verdicts[name].as_deref().unwrap_or_default()
    }

    /// A roster that knows what this one has kept.
    fn restarted(&mut self) -> Self {
        let kept = self.roster.take_dirty().into_iter();
        let kept = kept.filter_map(|(name, known)| Some((name, known?))).collect();
        let mut fleet = Self { roster: IdentityTable::new(kept), ..Self::default() };
        self.seats.keys().for_each(|name| fleet.enter(name));
        fleet
    }
}

#[test]
fn machines_that_are_who_they_should_be_are_not_doubted() {
    let mut fleet = Fleet::new(&["web1.nyc", "web2.nyc", "db", "10.0.0.7"]);
    assert!(fleet.sees("web1.nyc", sighting(1, "web1", "a")));
    assert!(fleet.sees("web2.nyc", sighting(2, "WEB2.nyc", "b")));
    assert!(fleet.sees("db", sighting(3, "db.lon", "c")));
    assert!(fleet.sees("10.0.0.7", sighting(4, "whatever", "")));
}

#[test]
fn one_subd_answers_for_one_record() {
    for order in [["a", "b"], ["b", "a"]] {
        // One of the names fits.
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, sighting(1, "b", ""));
        });
        assert_eq!(fleet.doubted(), ["a"]);
        assert!(fleet.why("a").contains("the same subd answers for b, "), "{}", fleet.why("a"));
        assert!(matches!(fleet.trust("a"), Err(TrustError::SameSubd { .. })));
        // None does.
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, sighting(1, "elsewhere", ""));
        });
        assert_eq!(fleet.doubted(), ["a", "b"]);
        // The database is corrected, in one way or another.
        fleet.leave("a");
        assert_eq!(fleet.doubted(), Vec::<&str>::new());
        fleet.enter("a");
        assert!(!fleet.sees("a", sighting(1, "elsewhere", "")));
        fleet.enter("a");
        assert!(fleet.sees("a", sighting(2, "elsewhere", "")));
        assert_eq!(fleet.doubted(), Vec::<&str>::new());
    }
}

#[test]
fn a_reused_address_is_seen_by_the_name() {
    let mut fleet = Fleet::new(&["web", "db.lon", "old"]);
    assert!(!fleet.sees("web", sighting(1, "db", "")));
    assert!(fleet.why("web").contains("by its name this is db.lon"), "{}", fleet.why("web"));
    // Whether or not the other one is reached too.
    assert!(fleet.sees("db.lon", sighting(2, "DB", "")));
    assert_eq!(fleet.doubted(), ["web"]);
    // A record that goes, and one that comes.
    fleet.leave("db.lon");
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    fleet.enter("db");
    assert_eq!(fleet.doubted(), ["web"]);
    fleet.trust("web").unwrap();
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    // The word is given for what was there.
    assert!(!fleet.sees("web", sighting(3, "old", "")));
}

#[test]
fn a_name_that_many_have_proves_nothing() {
    let names = ["host", "sub1", "sub2", "sub3"];
    let mut fleet = Fleet::new(&names);
    let shared = |instance, boot: &str| Sighting {
        boot_id: boot.to_owned(),
        ..sighting(instance, "host", "")
    };
    // Subds of one host: the first waits until the second shows what the name is worth.
    assert!(!fleet.sees("sub1", shared(1, "b")));
    assert!(fleet.sees("sub2", shared(2, "b")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    assert!(fleet.sees("host", shared(3, "b")));
    // That stays so.
    fleet.hear("sub1", IdentityReport::Lost);
    fleet.hear("sub2", IdentityReport::Lost);
    assert!(fleet.sees("sub3", shared(4, "b")));

    // One that has gone is no witness: the machine may have moved.
    let mut fleet = Fleet::new(&names);
    assert!(!fleet.sees("sub1", shared(1, "b")));
    fleet.hear("sub1", IdentityReport::Lost);
    assert!(!fleet.sees("sub2", shared(2, "c")));

    // An image that brings the name.
    let mut fleet = Fleet::new(&names);
    assert!(fleet.sees("sub1", of_image(sighting(1, "host", ""), "host", "")));
    assert!(fleet.sees("sub2", sighting(2, "host", "")));
    // An image that brings another one is no excuse.
    let mut fleet = Fleet::new(&names);
    assert!(!fleet.sees("sub1", of_image(sighting(1, "host", ""), "golden", "")));
    // What machines are called that have no name yet.
    let mut fleet = Fleet::new(&["localhost", "sub1"]);
    assert!(fleet.sees("sub1", sighting(1, "localhost.localdomain", "")));
}

#[test]
fn a_machine_is_known_by_the_id_that_it_was_synced_with() {
    let mut fleet = Fleet::new(&["a", "b"]);
    fleet.syncs("a", sighting(1, "x", "id a"));
    // No id proves nothing, and is not taken for the machine's.
    fleet.syncs("a", sighting(2, "x", ""));
    assert!(!fleet.sees("a", sighting(3, "a", "other")));
    assert!(fleet.why("a").contains("with machine id other: when a was last synced it had id a"));
    fleet.hear("a", IdentityReport::Synced);
    let mut fleet = fleet.restarted();
    assert!(!fleet.sees("a", sighting(3, "a", "other")));
    // The id outweighs the name, once it is known.
    assert!(fleet.sees("a", sighting(1, "b", "id a")));
    assert!(!fleet.sees("a", sighting(3, "a", "other")));
    assert!(matches!(fleet.trust("b"), Err(TrustError::NotSeen { .. })));
    fleet.trust("a").unwrap();
    assert!(matches!(fleet.trust("a"), Err(TrustError::NoDoubt { .. })));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    assert!(!fleet.sees("a", sighting(1, "b", "id a")));
    // A record that goes takes it along.
    fleet.leave("a");
    fleet.enter("a");
    assert!(fleet.sees("a", sighting(1, "x", "id a")));
    assert_eq!(fleet.roster.take_dirty(), [("a".into(), None)]);
}

#[test]
fn an_id_that_the_image_brings_proves_nothing() {
    let of = |machine, id: &str, image: &str| of_image(sighting(machine, "x", id), "x", image);
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    fleet.syncs("a", sighting(1, "x", "own"));
    // An update brings the id of the image; a crash may have cost the note of it.
    assert!(fleet.sees("a", of(1, "own", "golden")));
    assert!(fleet.sees("a", of(1, "golden", "golden")));
    fleet.hear("a", IdentityReport::Synced);
    fleet.syncs("b", of(2, "golden", "golden"));
    // The next image leaves the id alone: all have the old one.
    assert!(fleet.sees("a", sighting(1, "x", "golden")));
    assert!(fleet.sees("b", sighting(2, "x", "golden")));
    assert!(fleet.sees("c", sighting(3, "x", "golden")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    let mut fleet = fleet.restarted();
    assert!(fleet.sees("c", sighting(3, "x", "golden")));
    // One that is given an id of its own then.
    assert!(fleet.sees("a", sighting(1, "x", "new")));

    // An image without an id: the next boot makes one.
    let nobody = |machine, id: &str| {
        let origins = Origins { machine_id: Origin::Nobody, hostname: Origin::Nobody };
        Sighting { origins, ..sighting(machine, "x", id) }
    };
    let mut fleet = Fleet::new(&["a"]);
    fleet.syncs("a", sighting(1, "x", "own"));
    assert!(!fleet.sees("a", nobody(1, "another")));
    assert!(fleet.sees("a", nobody(1, "own")));
    fleet.hear("a", IdentityReport::Changing);
    assert!(fleet.sees("a", nobody(1, "from this boot")));
    assert!(fleet.sees("a", nobody(1, "from the next")));
}

#[test]
fn a_copy_of_a_machine_is_left_alone() {
    // The original is known.
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    fleet.syncs("a", sighting(1, "x", "id"));
    assert!(!fleet.sees("b", sighting(2, "x", "id")));
    assert!(fleet.why("b").contains("a was last known by this id"), "{}", fleet.why("b"));
    assert_eq!(fleet.doubted(), ["b"]);
    // It makes no difference that it was not reached yet.
    let mut fleet = fleet.restarted();
    assert!(!fleet.sees("b", sighting(2, "x", "id")));
    assert!(fleet.sees("a", sighting(1, "x", "id")));
    assert_eq!(fleet.doubted(), ["b"]);
    fleet.trust("b").unwrap();
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    // A third one, and a directory with a copy of a tree on the host of the first.
    assert!(!fleet.sees("c", sighting(3, "x", "id")));
    let here = Sighting { boot_id: "boot 1".into(), ..sighting(4, "x", "id") };
    let mut fleet = Fleet::new(&["a", "b"]);
    fleet.syncs("a", sighting(1, "x", "id"));
    assert!(fleet.sees("b", here.clone()));
    let mut fleet = fleet.restarted();
    assert!(!fleet.sees("b", here));
    assert!(fleet.sees("a", sighting(1, "x", "id")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());

    // Nobody was known. One is called as it should be.
    for order in [["a", "b"], ["b", "a"]] {
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, sighting(u64::from(*name == "a"), "a.example", "id"));
        });
        assert_eq!(fleet.doubted(), ["b"]);
        // Both are: they were copied, and named.
        assert!(fleet.sees("b", sighting(2, "b", "id")));
        // None is.
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, sighting(u64::from(*name == "a"), "x", "id"));
        });
        assert_eq!(fleet.doubted(), ["a", "b"]);
        assert!(fleet.why("b").contains("a has the same id"), "{}", fleet.why("b"));
        fleet.trust("a").unwrap();
        assert_eq!(fleet.doubted(), ["b"]);
    }
}

#[test]
fn the_order_in_which_machines_are_reached_makes_no_difference() {
    let story = |machine: usize| match machine {
        0 => ("a", sighting(1, "a", "1")),
        1 => ("b", sighting(2, "f", "2")),
        2 => ("c", sighting(1, "a", "1")),
        3 => ("d", sighting(4, "x", "4")),
        4 => ("e", sighting(5, "x", "4")),
        _ => ("f", sighting(6, "f", "1")),
    };
    let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
    for machine in 0..6 {
        let longer = |order: &Vec<usize>| {
            let order = order.clone();
            (0..=order.len()).map(move |at| {
                let mut order = order.clone();
                order.insert(at, machine);
                order
            })
        };
        orders = orders.iter().flat_map(longer).collect();
    }
    assert_eq!(orders.len(), 720);
    for order in orders {
        let mut fleet = Fleet::new(&["a", "b", "c", "d", "e", "f"]);
        for &machine in &order {
            let (name, sighting) = story(machine);
            fleet.sees(name, sighting);
        }
        assert_eq!(fleet.doubted(), ["b", "c", "d", "e"], "{order:?}");
    }
}

#[test]
fn news_of_an_earlier_run_are_not_heard() {
    let mut fleet = Fleet::new(&["a"]);
    let before = fleet.seats["a"];
    fleet.enter("a");
    let news = IdentityReport::Seen(9, sighting(1, "a", "1").into());
    assert_eq!(fleet.roster.hear("a", before, news.clone()), []);
    assert_eq!(fleet.roster.hear("nobody", before, news), []);
}

#[test]
fn ten_thousand_machines_of_one_kind_are_judged_in_no_time() {
    let names: Vec<String> = (0..10_000).map(|number| format!("m{number}")).collect();
    let kinds: [fn(u64) -> Sighting; 4] = [
        |machine| sighting(machine, "m7", "template"),
        |_| sighting(1, "x", "one"),
        |machine| of_image(sighting(machine, "x", "id"), "x", "id"),
        |machine| Sighting { boot_id: "one".into(), ..sighting(machine, "x", "id") },
    ];
    for (kind, sighting) in kinds.into_iter().enumerate() {
        let started = std::time::Instant::now();
        let mut fleet = Fleet::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
        for (machine, name) in names.iter().enumerate() {
            fleet.sees(name, sighting(machine as u64));
        }
        let doubted = fleet.doubted().len();
        assert_eq!(doubted, [9_999, 10_000, 0, 0][kind], "{kind}");
        println!("kind {kind}: {:?}", started.elapsed());
    }
}
