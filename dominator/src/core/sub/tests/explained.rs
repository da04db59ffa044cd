//! The explanation of each status.
// tidy: core

use api::dominator::explain::Suggestion;
use api::subd::{Alarm, FetchFailure, FreeSpace, Paused, TriggerFailure, UpdateOutcome};
use clap::Parser as _;
use expect_test::expect_file;
use model::image::ImageName;
use model::mdb::Machine;
use model::plan::Occupant;
use model::tree::Time;

use super::super::*;
use super::held::ready;
use super::script::{Script, image};
use model::scope::Scope;

/// Machines in each status that the state machine reaches by itself.
fn scripts() -> Vec<Script> {
    let mut all = vec![Script::new(image("base", &[("/a", "1")]))];
    let mut add = |script: Script| all.push(script);
    let failure = |kind| Failure { kind, text: "no".to_owned() };

    for kind in [FailureKind::Unreachable, FailureKind::InvalidReply] {
        let mut script = Script::new(ImageState::Undefined);
        script.step("failed", Event::PollFailed(script.polled, failure(kind)));
        add(script);
    }
    for state in [ImageState::Undefined, ImageState::Missing("not uploaded".into())] {
        let mut script = Script::new(state);
        script.poll();
        add(script);
    }
    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.poll();
    add(script);
    add(Script::scanning(image("base", &[("/a", "1")]), &[]));
    let mut script = Script::new(image("base", &[("/a", "1")]));
    let ImageState::Ready(wanted) = script.image.clone() else { unreachable!() };
    script.reply.scope = Scope::of(&wanted.scan, &script.reply.exclusions);
    script.reply.space = FreeSpace { free_bytes: 100, free_inodes: 1_000 };
    script.scan(&[]);
    script.poll();
    add(script);
    let pending = || {
        let mut script = ready();
        script.scan(&[]);
        script.poll();
        script
    };
    add(pending());
    let mut script = pending();
    script.commit();
    add(script);
    let mut script = pending();
    script.commit();
    script.ended(1, UpdateOutcome::Done, None);
    script.reply.last_update.as_mut().unwrap().awaits_boot = true;
    script.poll();
    add(script);
    add(Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]));
    let mut script = pending();
    script.step("brake", Event::Brake(Some("storm".into())));
    add(script);
    let mut script = pending();
    let machine = Machine { hostname: "web".into(), disable_updates: true, ..Machine::default() };
    let (image_again, planned) = (script.image.clone(), ImageState::Undefined);
    let machine = Arc::new(machine);
    script
        .step("assigned", Event::Assigned { machine, image: image_again, planned, rollback: None });
    add(script);
    let mut script = pending();
    let until = Time { seconds: 100, nanoseconds: 0 };
    let (reason, who) = ("works".to_owned(), "ann".to_owned());
    let pause = api::dominator::orders::UpdatePause { until, reason, who, since: Time::default() };
    script.step("pause", Event::Ordered(SubOrder::Pause(Some(Arc::new(pause)))));
    add(script);
    let mut script = pending();
    script.reply.paused = Some(Paused { until, reason: "works".to_owned() });
    script.poll();
    add(script);
    let mut script = pending();
    script.refuse(FailureKind::Held, "somebody is logged in");
    add(script);
    let files: Vec<String> = (0..150).map(|number| format!("/f{number}")).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|path| (path.as_str(), "x")).collect();
    add(Script::scanning(image("base", &[]), &files));
    for former in ["base", "other"] {
        let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
        script.accept();
        script.scan(&[("/a", "0")]);
        let mounted = (model::path::TreePath::new("/a").unwrap(), Occupant::MountPoint);
        script.reply.scan.as_mut().unwrap().occupied = vec![mounted];
        script.reply.last_image = Some(ImageName::new(former).unwrap());
        script.poll();
        add(script);
    }
    let mut script = pending();
    script.commit();
    script.ended(1, UpdateOutcome::Done, Some(4));
    script.poll();
    add(script);
    for outcome in [
        UpdateOutcome::RolledBack("no space".into()),
        UpdateOutcome::Stuck("read-only".into()),
        UpdateOutcome::Undone("exit code 1".into()),
    ] {
        let mut script = pending();
        script.commit();
        script.ended(1, outcome, Some(4));
        script.poll();
        add(script);
    }
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    let (service, verb) = ("ssh".to_owned(), "start".to_owned());
    script.reply.trigger_failures =
        vec![TriggerFailure { service, verb, output: "exit code 1".to_owned() }];
    script.poll();
    add(script);
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    script.accept();
    script.fetched(1, Some(FetchFailure::Sources("images:6971 is down".into())));
    script.poll();
    add(script);
    all
}

#[test]
fn every_status_that_a_machine_can_come_to_is_explained() {
    let mut text = String::new();
    let mut seen = std::collections::BTreeSet::new();
    for script in scripts() {
        let why = script.sub.explain(script.time());
        seen.insert(why.status);
        let at = why.next_at.map_or_else(String::new, |at| format!(" (at {} s)", at.seconds));
        let differs = why.differs.map_or_else(
            || "unknown".to_owned(),
            |differs| {
                let blocked = differs.blocked.len();
                let dangers = differs.dangers.len();
                format!("{} paths, {blocked} blocked, {dangers} dangers", differs.operations)
            },
        );
        text.push_str(&format!(
            "{}: {}\n  {}\n  differs: {differs}\n",
            why.status, why.detail, why.means
        ));
        text.push_str(&format!("  waits for {}\n  next: {}{at}\n", why.waits_for, why.next));
        for remedy in why.may {
            text.push_str(&format!("  may: {}; {}\n", remedy.command, remedy.what));
        }
    }
    // Other tests cover these.
    let others = [
        Status::WrongMachine,
        Status::WaitingForBudget,
        Status::ImageStopped,
        Status::SignatureRefused,
        Status::WaitingForComputedFiles,
        Status::SubdTooOld,
        Status::Provisioning,
        Status::ProvisionFailed,
    ];
    let missing: Vec<Status> =
        Status::ALL.into_iter().filter(|status| !seen.contains(status)).collect();
    assert_eq!(missing, others);
    expect_file!["explained.txt"].assert_eq(&text);
}

#[test]
fn nothing_has_to_be_done_only_where_time_alone_helps() {
    let of = |script: &Script| {
        let why = script.sub.explain(script.time());
        let last = why.may.last().unwrap();
        (why.status.to_string(), format!("{}: {}", last.command, last.what))
    };
    let nothing = ": nothing has to be done".to_owned();
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    assert_eq!(of(&script), ("fetching".into(), nothing.clone()));
    script.refuse(FailureKind::Unavailable, "cannot be recorded: I/O error");
    let cause = "see in the detail why it fails; remove the cause, unless it soon succeeds";
    assert_eq!(of(&script), ("fetching".into(), format!(": {cause}")));

    let mut script = Script::new(image("base", &[("/a", "1")]));
    script.reply.scanned = false;
    script.reply.alarms = vec![Alarm::ScannerStalled("at /srv".into())];
    script.poll();
    let stalled = ": remove the cause of its alarms";
    assert_eq!(of(&script), ("rescanning".into(), stalled.into()));

    let mut script = Script::new(image("base", &[("/a", "1")]));
    assert_eq!(of(&script), ("connecting".into(), nothing));
    script.step("brake", Event::Brake(Some("storm".into())));
    let enable = "domtool enable-updates: enables updates of all machines again";
    assert_eq!(of(&script), ("connecting".into(), enable.into()));
    Arc::make_mut(&mut script.sub.machine).disable_updates = true;
    let edit = ": remove DisableUpdates from its record in the machine database";
    assert_eq!(of(&script), ("connecting".into(), edit.into()));
}

#[test]
fn trees_that_differ_only_in_their_digests_are_said_to() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[("/a", "1")]);
    let said = |script: &Script, root: Option<model::object::ObjectId>| {
        let mut why = script.sub.explain(script.time());
        why.has.root = root;
        let text = api::dominator::text::explanation_text(&why, Time::default());
        (why.status, text.contains("in nothing"), text.contains("the digests of the two trees"))
    };
    script.poll();
    let required = script.sub.explain(script.time()).must_have.root;
    assert_eq!(said(&script, required), (Status::Synced, true, false));
    let other = Some(model::object::Algorithm::Blake3.digest(b"other"));
    assert_eq!(said(&script, other), (Status::Synced, true, true));
}

#[test]
fn no_explanation_is_empty() {
    let mut script = Script::scanning(image("base", &[("/a", "1")]), &[]);
    for status in Status::ALL {
        script.sub.shown.status = status;
        let why = script.sub.explain(script.time());
        assert_eq!(why.status, status);
        for part in [&why.means, &why.waits_for, &why.next] {
            assert!(!part.is_empty(), "{status}: {why:?}");
        }
        assert!(!why.may.is_empty(), "{status}: nothing is said of what to do");
        let commands = why.may.iter().filter(|remedy| remedy.command.starts_with("domtool "));
        for Suggestion { command, .. } in commands {
            let read = domtool::Arguments::try_parse_from(command.split(' '));
            assert!(read.is_ok(), "{status}: {command}: {read:?}");
        }
        let text = api::dominator::text::explanation_text(&why, Time::default());
        assert!(text.contains("you may") && text.contains(&why.means), "{text}");
    }
}

#[test]
fn a_machine_that_does_not_converge_names_the_paths() {
    let files: Vec<String> = (0..150).map(|number| format!("/file-{number:03}")).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|path| (path.as_str(), "1")).collect();
    let mut script = Script::new(image("base", &files));
    script.cache(&["1"]);
    let ImageState::Ready(wanted) = script.image.clone() else { unreachable!() };
    script.reply.scope = Scope::of(&wanted.scan, &script.reply.exclusions);
    script.scan(&[]);
    script.poll();
    script.commit();
    script.ended(1, UpdateOutcome::Done, Some(4));
    script.poll();
    assert_eq!(script.sub.status(), Status::NotConverging);
    let detail = script.sub.detail().to_owned();
    let named = detail.matches("(missing)").count();
    assert!(named > 20 && detail.len() < 1_000, "{detail}");
    assert!(detail.contains(&format!("and {} more", 150 - named)), "{detail}");
    assert!(detail.ends_with("will be tried again"), "{detail}");
    let why = script.sub.explain(script.time());
    let differs = why.differs.unwrap();
    assert_eq!((differs.operations, differs.paths.len()), (150, 100));
    assert_eq!(differs.paths[99], "/file-099 (missing)");
    assert_eq!(why.next_at.map(|at| at.seconds), Some(10));
}
