//! Fleets of a few machines, their reported identities, and the mismatches.

use super::*;

/// A sub on a separate machine: `machine` is its instance and its boot.
fn reported(machine: u64, hostname: &str, machine_id: &str) -> ReportedIdentity {
    let own = FileOrigin::Machine;
    ReportedIdentity {
        instance: machine,
        hostname: hostname.to_owned(),
        machine_id: machine_id.to_owned(),
        boot_id: format!("boot {machine}"),
        origins: FileOrigins { machine_id: own, hostname: own },
    }
}

/// A machine of an image that contains this host name and machine id.
fn of_image(reported: ReportedIdentity, hostname: &str, machine_id: &str) -> ReportedIdentity {
    let content = |word: &str| {
        let digest = model::object::Algorithm::Blake3.digest(format!("{word}\n").as_bytes());
        FileOrigin::Image(digest)
    };
    let origins = FileOrigins { machine_id: content(machine_id), hostname: content(hostname) };
    ReportedIdentity { origins, ..reported }
}

/// A table with the state machines of its records.
#[derive(Default)]
struct Fleet {
    table: IdentityTable,
    runs: BTreeMap<String, u64>,
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
            self.verdicts.insert(name.to_string(), verdict.mismatch.map(|why| why.to_string()));
        }
    }

    fn enter(&mut self, name: &str) {
        let (run, changed) = self.table.enter(name);
        self.runs.insert(name.to_owned(), run);
        self.take(changed);
    }

    fn leave(&mut self, name: &str) {
        let changed = self.table.leave(name);
        self.verdicts.remove(name);
        self.take(changed);
    }

    fn hear(&mut self, name: &str, report: IdentityReport) {
        let changed = self.table.take_report(name, self.runs[name], report);
        self.take(changed);
    }

    /// Reports an identity. Returns true if it is the right machine.
    fn sees(&mut self, name: &str, reported: ReportedIdentity) -> bool {
        self.number += 1;
        let number = self.number;
        let changed = self.table.take_report(
            name,
            self.runs[name],
            IdentityReport::Seen(number, reported.into()),
        );
        let own = changed.iter().find(|(other, _)| **other == *name).expect("it is answered");
        assert_eq!(own.1.number, number);
        self.take(changed);
        self.verdicts[name].is_none()
    }

    /// Reports an identity and `Synced`.
    fn syncs(&mut self, name: &str, reported: ReportedIdentity) {
        assert!(self.sees(name, reported), "{name}: {:?}", self.verdicts[name]);
        self.hear(name, IdentityReport::Synced);
    }

    fn trust(&mut self, name: &str) -> Result<(), TrustError> {
        let known = self.table.trusted(name, "ann", "installed anew", Time::default())?;
        let changed = self.table.take_trust(name, known);
        self.take(changed);
        Ok(())
    }

    /// The records with a mismatch.
    fn doubted(&self) -> Vec<&str> {
        let doubted = self.verdicts.iter().filter(|(_, why)| why.is_some());
        doubted.map(|(name, _)| name.as_str()).collect()
    }

    fn why(&self, name: &str) -> &str {
        self.verdicts[name].as_deref().unwrap_or_default()
    }

    /// A table with the saved identities of this one.
    fn restarted(&mut self) -> Self {
        let kept = self.table.take_dirty().into_iter();
        let kept = kept.filter_map(|(name, known)| Some((name, known?))).collect();
        let mut fleet = Self { table: IdentityTable::new(kept), ..Self::default() };
        self.runs.keys().for_each(|name| fleet.enter(name));
        fleet
    }
}

#[test]
fn machines_that_are_who_they_should_be_are_not_doubted() {
    let mut fleet = Fleet::new(&["web1.nyc", "web2.nyc", "db", "10.0.0.7"]);
    assert!(fleet.sees("web1.nyc", reported(1, "web1", "a")));
    assert!(fleet.sees("web2.nyc", reported(2, "WEB2.nyc", "b")));
    assert!(fleet.sees("db", reported(3, "db.lon", "c")));
    assert!(fleet.sees("10.0.0.7", reported(4, "whatever", "")));
}

#[test]
fn one_subd_answers_for_one_record() {
    for order in [["a", "b"], ["b", "a"]] {
        // One of the names matches.
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, reported(1, "b", ""));
        });
        assert_eq!(fleet.doubted(), ["a"]);
        assert!(fleet.why("a").contains("the same subd answers for b, "), "{}", fleet.why("a"));
        assert!(matches!(fleet.trust("a"), Err(TrustError::SameSubd { .. })));
        // No name matches.
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, reported(1, "elsewhere", ""));
        });
        assert_eq!(fleet.doubted(), ["a", "b"]);
        // The database is corrected.
        fleet.leave("a");
        assert_eq!(fleet.doubted(), Vec::<&str>::new());
        fleet.enter("a");
        assert!(!fleet.sees("a", reported(1, "elsewhere", "")));
        fleet.enter("a");
        assert!(fleet.sees("a", reported(2, "elsewhere", "")));
        assert_eq!(fleet.doubted(), Vec::<&str>::new());
    }
}

#[test]
fn a_reused_address_is_seen_by_the_name() {
    let mut fleet = Fleet::new(&["web", "db.lon", "old"]);
    assert!(!fleet.sees("web", reported(1, "db", "")));
    assert!(fleet.why("web").contains("by its name this is db.lon"), "{}", fleet.why("web"));
    // The same if the other machine is reached too.
    assert!(fleet.sees("db.lon", reported(2, "DB", "")));
    assert_eq!(fleet.doubted(), ["web"]);
    // A record is removed, and one is added.
    fleet.leave("db.lon");
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    fleet.enter("db");
    assert_eq!(fleet.doubted(), ["web"]);
    fleet.trust("web").unwrap();
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    // The confirmation is for the machine that answered then.
    assert!(!fleet.sees("web", reported(3, "old", "")));
}

#[test]
fn a_name_that_many_have_proves_nothing() {
    let names = ["host", "sub1", "sub2", "sub3"];
    let mut fleet = Fleet::new(&names);
    let shared = |instance, boot: &str| ReportedIdentity {
        boot_id: boot.to_owned(),
        ..reported(instance, "host", "")
    };
    // Subds of one host: the first has a mismatch until the second reports the same name.
    assert!(!fleet.sees("sub1", shared(1, "b")));
    assert!(fleet.sees("sub2", shared(2, "b")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    assert!(fleet.sees("host", shared(3, "b")));
    // The name stays common.
    fleet.hear("sub1", IdentityReport::Lost);
    fleet.hear("sub2", IdentityReport::Lost);
    assert!(fleet.sees("sub3", shared(4, "b")));

    // A subd that does not answer proves nothing: the machine may have moved.
    let mut fleet = Fleet::new(&names);
    assert!(!fleet.sees("sub1", shared(1, "b")));
    fleet.hear("sub1", IdentityReport::Lost);
    assert!(!fleet.sees("sub2", shared(2, "c")));

    // The name comes from the image.
    let mut fleet = Fleet::new(&names);
    assert!(fleet.sees("sub1", of_image(reported(1, "host", ""), "host", "")));
    assert!(fleet.sees("sub2", reported(2, "host", "")));
    // The image contains another name.
    let mut fleet = Fleet::new(&names);
    assert!(!fleet.sees("sub1", of_image(reported(1, "host", ""), "golden", "")));
    // Default names of machines without a name.
    let mut fleet = Fleet::new(&["localhost", "sub1"]);
    assert!(fleet.sees("sub1", reported(1, "localhost.localdomain", "")));
}

#[test]
fn a_machine_is_known_by_the_id_that_it_was_synced_with() {
    let mut fleet = Fleet::new(&["a", "b"]);
    fleet.syncs("a", reported(1, "x", "id a"));
    // A missing id is not saved.
    fleet.syncs("a", reported(2, "x", ""));
    assert!(!fleet.sees("a", reported(3, "a", "other")));
    assert!(fleet.why("a").contains("with machine id other: when a was last synced it had id a"));
    fleet.hear("a", IdentityReport::Synced);
    let mut fleet = fleet.restarted();
    assert!(!fleet.sees("a", reported(3, "a", "other")));
    // A known id overrides the name.
    assert!(fleet.sees("a", reported(1, "b", "id a")));
    assert!(!fleet.sees("a", reported(3, "a", "other")));
    assert!(matches!(fleet.trust("b"), Err(TrustError::NotSeen { .. })));
    fleet.trust("a").unwrap();
    assert!(matches!(fleet.trust("a"), Err(TrustError::NoMismatch { .. })));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    assert!(!fleet.sees("a", reported(1, "b", "id a")));
    // The known identity is removed with the record.
    fleet.leave("a");
    fleet.enter("a");
    assert!(fleet.sees("a", reported(1, "x", "id a")));
    assert_eq!(fleet.table.take_dirty(), [("a".into(), None)]);
}

#[test]
fn an_id_that_the_image_brings_proves_nothing() {
    let of = |machine, id: &str, image: &str| of_image(reported(machine, "x", id), "x", image);
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    fleet.syncs("a", reported(1, "x", "own"));
    // An update sets the id of the image; the report of it may have been lost in a crash.
    assert!(fleet.sees("a", of(1, "own", "golden")));
    assert!(fleet.sees("a", of(1, "golden", "golden")));
    fleet.hear("a", IdentityReport::Synced);
    fleet.syncs("b", of(2, "golden", "golden"));
    // The next image does not manage the id: all machines keep the old one.
    assert!(fleet.sees("a", reported(1, "x", "golden")));
    assert!(fleet.sees("b", reported(2, "x", "golden")));
    assert!(fleet.sees("c", reported(3, "x", "golden")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    let mut fleet = fleet.restarted();
    assert!(fleet.sees("c", reported(3, "x", "golden")));
    // A machine that gets its own id then.
    assert!(fleet.sees("a", reported(1, "x", "new")));

    // An image without an id: the next boot creates one.
    let nobody = |machine, id: &str| {
        let origins =
            FileOrigins { machine_id: FileOrigin::NoContent, hostname: FileOrigin::NoContent };
        ReportedIdentity { origins, ..reported(machine, "x", id) }
    };
    let mut fleet = Fleet::new(&["a"]);
    fleet.syncs("a", reported(1, "x", "own"));
    assert!(!fleet.sees("a", nobody(1, "another")));
    assert!(fleet.sees("a", nobody(1, "own")));
    fleet.hear("a", IdentityReport::Changing);
    assert!(fleet.sees("a", nobody(1, "from this boot")));
    assert!(fleet.sees("a", nobody(1, "from the next")));
}

#[test]
fn a_copy_with_the_host_name_of_its_original_is_left_alone() {
    for order in [["a", "b"], ["b", "a"]] {
        let mut fleet = Fleet::new(&["a", "b"]);
        order.iter().for_each(|name| {
            fleet.sees(name, reported(u64::from(*name == "a"), "a.example", "id"));
        });
        assert_eq!(fleet.doubted(), ["b"]);
        fleet.trust("b").unwrap();
        assert_eq!(fleet.doubted(), Vec::<&str>::new());
    }
    // Other subds on the host of the original report the same name.
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    let here =
        |instance| ReportedIdentity { boot_id: "boot 1".into(), ..reported(instance, "a", "id") };
    assert!(fleet.sees("a", here(1)));
    assert!(!fleet.sees("b", here(2)));
    assert!(fleet.sees("c", here(3)));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    // Copies with different boots do not make the name common.
    let mut fleet = Fleet::new(&["a", "b", "c"]);
    assert!(!fleet.sees("b", reported(2, "a", "id")));
    assert!(!fleet.sees("c", reported(3, "a", "id")));
    assert_eq!(fleet.doubted(), ["b", "c"]);
}

/// A known limitation; see docs/decisions/0007-machine-identity.md.
#[test]
fn a_copy_whose_host_name_was_changed_is_not_noticed() {
    let mut fleet = Fleet::new(&["a", "b"]);
    fleet.syncs("a", reported(1, "x", "id"));
    assert!(fleet.sees("b", reported(2, "x", "id")));
    assert!(fleet.sees("b", reported(2, "b", "id")));
    assert_eq!(fleet.doubted(), Vec::<&str>::new());
    let mut fleet = fleet.restarted();
    assert!(fleet.sees("b", reported(2, "x", "id")));
    assert!(fleet.sees("a", reported(1, "x", "id")));
    // At the address of the original it counts as the original.
    assert!(fleet.sees("a", reported(7, "x", "id")));
}

#[test]
fn the_order_in_which_machines_are_reached_makes_no_difference() {
    let story = |machine: usize| match machine {
        0 => ("a", reported(1, "a", "1")),
        1 => ("b", reported(2, "f", "2")),
        2 => ("c", reported(1, "a", "1")),
        3 => ("d", reported(4, "x", "4")),
        4 => ("e", reported(5, "x", "4")),
        _ => ("f", reported(6, "f", "1")),
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
            let (name, reported) = story(machine);
            fleet.sees(name, reported);
        }
        // `d` and `e` have the same machine id, and neither has the name of another record.
        assert_eq!(fleet.doubted(), ["b", "c"], "{order:?}");
    }
}

#[test]
fn news_of_an_earlier_run_are_not_heard() {
    let mut fleet = Fleet::new(&["a"]);
    let before = fleet.runs["a"];
    fleet.enter("a");
    let report = IdentityReport::Seen(9, reported(1, "a", "1").into());
    assert_eq!(fleet.table.take_report("a", before, report.clone()), []);
    assert_eq!(fleet.table.take_report("nobody", before, report), []);
}

#[test]
fn ten_thousand_machines_of_one_kind_are_judged_in_no_time() {
    let names: Vec<String> = (0..10_000).map(|number| format!("m{number}")).collect();
    let kinds: [fn(u64) -> ReportedIdentity; 4] = [
        |machine| reported(machine, "m7", "template"),
        |_| reported(1, "x", "one"),
        |machine| of_image(reported(machine, "x", "id"), "x", "id"),
        |machine| ReportedIdentity { boot_id: "one".into(), ..reported(machine, "x", "id") },
    ];
    for (kind, reported) in kinds.into_iter().enumerate() {
        let started = std::time::Instant::now();
        let mut fleet = Fleet::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
        for (machine, name) in names.iter().enumerate() {
            fleet.sees(name, reported(machine as u64));
        }
        let doubted = fleet.doubted().len();
        assert_eq!(doubted, [9_999, 10_000, 0, 0][kind], "{kind}");
        println!("kind {kind}: {:?}", started.elapsed());
    }
}
