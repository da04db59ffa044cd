//! The text of fleet plans.

use api::dominator::{Brake, Status};
use expect_test::{Expect, expect};
use model::plan::{Blocked, Difference, Obstacle};
use model::tree::Time;
use model::trigger::services::{ServiceCall, ServiceVerb};
use tasks::planned::PlannedTask;

use super::*;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn same(from: Option<&str>, image: &str) -> PlanSummary {
    PlanSummary {
        image: name(image),
        from: from.map(name),
        same: true,
        changes: ChangeCounts::default(),
        blocked: Vec::new(),
        dangers: Vec::new(),
        services: ServiceCalls::default(),
        tasks: BTreeMap::new(),
        former_unknown: None,
    }
}

/// So many new files, for which a service and a task are restarted.
fn new(from: Option<&str>, image: &str, create: u32) -> PlanSummary {
    let reasons = [(Difference::Missing, create)].into();
    let call = |verb| ServiceCall::new("db", verb);
    let services = ServiceCalls {
        before: vec![call(ServiceVerb::Stop)],
        after: vec![call(ServiceVerb::Start)],
        ..ServiceCalls::default()
    };
    let changes = ChangeCounts { create, reasons, ..ChangeCounts::default() };
    let tasks = [("web".to_owned(), PlannedTask::Restart)].into();
    PlanSummary { same: false, changes, services, tasks, ..same(from, image) }
}

fn machine(hostname: &str, update: u32, fetch_bytes: u64) -> MachinePlan {
    let outlook = PlanOutcome::Update { update, fetch_objects: 1, fetch_bytes };
    MachinePlan { hostname: hostname.to_owned(), outlook, waits: Vec::new() }
}

fn unknown(hostname: &str, gap: NoPlanReason, why: &str) -> MachinePlan {
    let outlook = PlanOutcome::Unknown { gap, why: why.to_owned() };
    MachinePlan { outlook, ..machine(hostname, 0, 0) }
}

fn check(plan: &FleetPlan, verbose: bool, expected: Expect) {
    expected.assert_eq(&plan.text(verbose));
}

#[test]
fn answers_are_put_together_by_pairs_of_images() {
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    let brake = Brake { reason: "storm".into(), who: "ann".into(), since: Time::default() };
    let mut plan = FleetPlan::new(CheckMdbReply {
        held: Some("it lacks 6 of the 10 machines".to_owned()),
        brake: Some(brake),
        added: texts(&["n"]),
        removed: texts(&["r1", "r2"]),
        changed: texts(&["a"]),
    });
    let mut waiting = machine("b", 0, 20);
    waiting.waits = vec![(Status::UpdatesDisabled, "its record says so".to_owned())];
    plan.add(PlanMachinesReply {
        updates: vec![new(Some("base/1"), "base/2", 2)],
        machines: vec![machine("a", 0, 10), waiting],
    });
    // The same update has another number in another answer.
    let mut severe = new(None, "base/2", 1);
    severe.services = ServiceCalls { reboot: true, high_impact: true, ..Default::default() };
    severe.tasks = BTreeMap::new();
    severe.dangers = vec!["it would remove all".to_owned()];
    severe.blocked = vec![Blocked { path: "/var".parse().unwrap(), why: Obstacle::MountPoint }];
    let mut strange = new(Some("base/0"), "base/2", 3);
    strange.former_unknown = Some("it was deleted".to_owned());
    plan.add(PlanMachinesReply {
        updates: vec![
            severe,
            new(Some("base/1"), "base/2", 2),
            same(Some("base/1"), "base/2"),
            strange,
        ],
        machines: vec![
            machine("c", 1, 30),
            machine("d", 0, 5),
            machine("e", 2, 0),
            machine("f", 3, 0),
            unknown("g", NoPlanReason::NotReached, "connection refused"),
            unknown("h", NoPlanReason::NotReached, "timed out"),
            unknown("n", NoPlanReason::NewMachine, "it is not managed yet"),
        ],
    });
    assert!(plan.is_change());
    assert_eq!(plan.updates.len(), 4);
    check(
        &plan,
        false,
        expect![[r#"
        HELD: the database would wait for domtool mdb accept: it lacks 6 of the 10 machines
        WAITS: updates of all machines are disabled: storm
        database: 1 machine added, 2 machines removed and left as they are, 1 machine changed
          added        n
          removed      r1, r2
        (no image) -> base/2: 1 machine
          changes      1: create 1
          reasons      missing 1
          to fetch     1 object, 5 bytes
          reboot       1 machine
          high impact  1 machine
          UNSAFE       1 machine: d: it would remove all
          BLOCKED      1 machine: d: /var: it is or holds a mount point
        base/0 -> base/2: 1 machine
          changes      3: create 3
          reasons      missing 3
          to fetch     1 object, 0 bytes
          services     start db on 1 machine
          services     stop db on 1 machine
          tasks        restart task web (unless it ignores changes) on 1 machine
          NOT KNOWN    triggers of the former image, on 1 machine: f: it was deleted
        base/1 -> base/2: 4 machines
          no change    1 machine
          changes      6: create 6
          reasons      missing 6
          to fetch     3 objects, 60 bytes
          services     start db on 3 machines
          services     stop db on 3 machines
          tasks        restart task web (unless it ignores changes) on 3 machines
        WAITS updates-disabled: 1 machine: b: its record says so
        NOT KNOWN new-machine: 1 machine: n: it is not managed yet
        NOT KNOWN not-reached: 2 machines: g, h: connection refused
    "#]],
    );
    let lines: Vec<String> =
        plan.machines.iter().map(|machine| plan.machine_line(machine)).collect();
    let expected = [
        "a: base/1 -> base/2; 2 changes; to fetch 1 object, 10 bytes; stop db; start db; \
         restart task web (unless it ignores changes)",
        "b: base/1 -> base/2; 2 changes; to fetch 1 object, 20 bytes; stop db; start db; \
         restart task web (unless it ignores changes); WAITS updates-disabled: its record says so",
        "c: base/1 -> base/2; 2 changes; to fetch 1 object, 30 bytes; stop db; start db; \
         restart task web (unless it ignores changes)",
        "d: (no image) -> base/2; 1 change; to fetch 1 object, 5 bytes; reboot; high impact; \
         UNSAFE it would remove all; BLOCKED /var: it is or holds a mount point",
        "e: base/1 -> base/2; no change",
        "f: base/0 -> base/2; 3 changes; to fetch 1 object, 0 bytes; stop db; start db; \
         restart task web (unless it ignores changes)",
        "g: not known: not-reached: connection refused",
        "h: not known: not-reached: timed out",
        "n: not known: new-machine: it is not managed yet",
    ];
    assert_eq!(lines, expected);
    let all: String = lines.iter().map(|line| format!("{line}\n")).collect();
    assert!(plan.text(true).ends_with(&all), "{}", plan.text(true));
}

#[test]
fn only_what_is_known_to_change_nothing_is_no_change() {
    let mut plan = FleetPlan::default();
    assert!(!plan.is_change());
    plan.add(PlanMachinesReply {
        updates: vec![same(Some("base/1"), "base/1")],
        machines: vec![machine("a", 0, 0), unknown("b", NoPlanReason::ImageUndefined, "no image")],
    });
    assert!(!plan.is_change());
    check(
        &plan,
        false,
        expect![[r#"
        database: 0 machines added, 0 machines removed and left as they are, 0 machines changed
        base/1 -> base/1: 1 machine
          no change    1 machine
        NOT KNOWN image-undefined: 1 machine: b: no image
        Nothing would change.
    "#]],
    );
    plan.add(PlanMachinesReply {
        updates: Vec::new(),
        machines: vec![unknown("c", NoPlanReason::NotScanned, "awaited")],
    });
    assert!(plan.is_change());
    let gone = CheckMdbReply { removed: vec!["a".to_owned()], ..CheckMdbReply::default() };
    assert!(FleetPlan::new(gone).is_change());
}

#[test]
fn many_machines_are_counted_and_a_few_are_named() {
    let mut plan = FleetPlan::default();
    let machines =
        (0..7).map(|number| unknown(&format!("m{number}"), NoPlanReason::OtherScan, "so"));
    plan.add(PlanMachinesReply { updates: Vec::new(), machines: machines.collect() });
    assert_eq!(
        plan.unknown[&NoPlanReason::OtherScan].text(),
        "7 machines: m0, m1, m2, m3, m4, ...: so"
    );
}

#[test]
fn only_machines_that_get_another_image_and_change_are_asked_about_it() {
    let mut plan = FleetPlan::default();
    plan.add(PlanMachinesReply {
        updates: vec![
            new(Some("base/1"), "base/2", 1),
            new(Some("base/2"), "base/2", 1),
            new(None, "base/2", 1),
            same(Some("base/1"), "base/2"),
        ],
        machines: vec![
            machine("other", 0, 1),
            machine("drift", 1, 1),
            machine("first", 2, 1),
            machine("equal", 3, 0),
            unknown("dead", NoPlanReason::NotReached, "it does not answer"),
        ],
    });
    let asked = |hostname: &str| {
        let (hostname, image) = (hostname.to_owned(), name("base/2"));
        ImageOfMachine { hostname, image }
    };
    assert_eq!(plan.changing_machines(), [asked("other"), asked("first")]);
}
