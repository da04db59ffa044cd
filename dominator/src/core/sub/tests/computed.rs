//! Computed files: what happens before their content is known, and how it gets to the machine.
// tidy: core

use api::subd::{Activity, UpdateOutcome};
use model::image::computed::{ComputedFile, ComputedFiles, Unknown};
use model::image::{ComputedRule, Content};
use model::plan::Action;
use model::tree::text::{from_text, to_text};
use model::tree::{Leaf, Node, Time};

use super::super::known_tree::KnownTree;
use super::super::*;
use super::script::{Script, image, object};
use crate::core::computed::KnownFiles;
use crate::core::computed::rollout::{ContentReport, ContentUpdate, Standing};
use crate::core::image_breaker::UpdateFailure;

const SOURCE: &str = "files:6972";

/// An image with these files and a computed file `/c`.
fn with_computed(name: &str, files: &[(&str, &str)]) -> ImageState {
    let ImageState::Ready(plain) = image(name, files) else { panic!("the image is ready") };
    let text = format!("{}g 644 0:0 {SOURCE} /c\n", to_text(&plain.tree));
    let tree = from_text(plain.tree.algorithm(), &text).unwrap();
    let content = Content {
        root: tree.digest(),
        computed: model::image::computed_rules(&tree),
        ..plain.content.clone()
    };
    ImageState::Ready(Arc::new(RequiredImage::new(content, tree)))
}

fn rule() -> Arc<ComputedRule> {
    Arc::new(ComputedRule { path: "/c".parse().unwrap(), source: SOURCE.to_owned() })
}

fn known(content: &str) -> Event {
    known_since(content, 77)
}

/// As [`known`], for content that was first seen at this time.
fn known_since(content: &str, seconds: i64) -> Event {
    let file = ComputedFile {
        rule: rule(),
        object: object(content).into(),
        size_bytes: content.len() as u64,
        since: Time { seconds, nanoseconds: 0 },
    };
    told(KnownFiles { files: Arc::new(ComputedFiles::new(vec![file])), ..KnownFiles::default() })
}

fn told(known: KnownFiles) -> Event {
    Event::ComputedKnown(Box::new(known))
}

fn unknown(why: &str) -> Event {
    let unknown = [Unknown { rule: rule(), why: why.into() }];
    told(KnownFiles { unknown: unknown.into(), ..KnownFiles::default() })
}

fn status(script: &Script) -> (Status, &str) {
    (script.sub.status(), script.sub.detail())
}

/// Takes the call of an AddObjects. The content is in the cache then.
fn push(script: &mut Script, content: &str) {
    let Some(Call::AddObjects(ids)) = script.accept() else { panic!("nothing is sent") };
    assert_eq!(*ids, [object(content)]);
    script.cache(&[content]);
    script.poll();
}

/// Takes the call of a Fetch, which ends at once.
fn fetch(script: &mut Script) {
    let Some(Call::Fetch(request)) = script.accept() else { panic!("nothing is fetched") };
    script.fetched(request.fetch_id, None);
}

#[test]
fn a_machine_stays_at_its_former_image_until_the_content_is_known() {
    let mut script = Script::scanning(image("web", &[("/a", "1")]), &[("/a", "1")]);
    assert_eq!(script.sub.status(), Status::Synced);
    script.former = script.image.ready().cloned();
    script.image = with_computed("base", &[("/a", "2")]);
    script.assign();
    let waits = "the content of computed files is not known: /c from files:6972: ";
    let (status_now, detail) = status(&script);
    assert_eq!(status_now, Status::WaitingForComputedFiles);
    assert_eq!(detail, format!("{waits}it is being asked; equals web"));
    script.step("unknown", unknown("no generator for /c"));
    assert_eq!(status(&script).1, format!("{waits}no generator for /c; equals web"));

    // Drift from the former image is repaired.
    script.scan(&[]);
    script.poll();
    assert_eq!(status(&script), (Status::Fetching, "repairing web: fetching 1 object (1 byte)"));
    fetch(&mut script);
    script.scan(&[("/a", "1")]);
    script.poll();
    assert_eq!(script.sub.status(), Status::WaitingForComputedFiles);

    // Then the content comes, and is sent after the objects of the image were fetched.
    script.step("known", known("net"));
    assert_eq!(status(&script), (Status::Fetching, "fetching 1 object (1 byte)"));
    fetch(&mut script);
    script.cache(&["2"]);
    script.poll();
    let sends = "sending the content of 1 computed file (3 bytes)";
    assert_eq!(status(&script), (Status::Fetching, sends));
    let Some(Call::AddObjects(_)) = script.accept() else { panic!("nothing is sent") };
    script.cache(&["2", "net"]);
    script.poll();
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing is staged") };
    let nodes: Vec<(String, &Action)> = request
        .plan
        .operations
        .iter()
        .map(|operation| (operation.path.to_string(), &operation.action))
        .collect();
    let [(a, _), (c, Action::Create(Node::Leaf(Leaf::File(file))))] = &nodes[..] else {
        panic!("{nodes:?}")
    };
    assert_eq!((a.as_str(), c.as_str()), ("/a", "/c"));
    assert_eq!((file.object.id(), file.mtime.seconds), (object("net"), 77));
}

/// A machine that has an image with a computed file, whose content is known.
fn synced() -> Script {
    let mut script = Script::scanning(with_computed("base", &[]), &[("/c", "net")]);
    assert_eq!(script.sub.status(), Status::WaitingForComputedFiles);
    // It may be tried with a change: nothing else is under way.
    assert_eq!(script.reports.last(), Some(&(0, ContentReport::Is(Standing::Settled))));
    script.step("known", known("net"));
    // The file has another modification time than new content would have.
    assert_eq!(status(&script), (Status::Synced, "equals base"));
    script
}

#[test]
fn a_machine_that_has_its_files_shares_the_directories_of_its_image() {
    let mut script = synced();
    let root = script.sub.trees.tree().unwrap().digest();
    let is_shared = |script: &Script| matches!(script.sub.trees.known, Some(KnownTree::Filled(..)));
    assert!(is_shared(&script), "though its file has another modification time");
    script.step("known", known_since("net", 1));
    assert_eq!(status(&script), (Status::Synced, "equals base"));
    assert!(is_shared(&script));
    // With other content the tree is still what the machine has.
    script.step("known", known("new"));
    assert!(is_shared(&script));
    let tree = script.sub.trees.tree_of(root).unwrap();
    assert_eq!(to_text(&tree), to_text(&super::script::tree(&[("/c", "net")])));
    push(&mut script, "new");
    let Some((_, Some(Call::Prepare(request, _)))) = &script.called else { panic!("not staged") };
    assert_eq!(request.plan.operations.len(), 1);
}

#[test]
fn the_tree_of_a_machine_that_has_its_files_is_not_read_again_after_a_restart() {
    let mut script = Script::new(with_computed("base", &[]));
    script.step("known", known_since("net", 1));
    script.first_scan(&[("/c", "net")]);
    assert_eq!(status(&script), (Status::Synced, "equals base"));
    let expected = script.expected.as_ref().expect("it was read");
    assert_eq!(to_text(expected), to_text(&super::script::tree(&[("/c", "net")])));
}

#[test]
fn new_content_is_an_update_of_one_file() {
    let mut script = synced();
    script.step("known", known("new"));
    push(&mut script, "new");
    let Some((_, Some(Call::Prepare(request, _)))) = &script.called else { panic!("not staged") };
    assert_eq!(request.plan.operations.len(), 1);
    // Content that comes before the Commit is sent: another update is wanted.
    let Some(Call::Prepare(request, _)) = script.accept() else { panic!("nothing is staged") };
    script.reply.activity = Activity::Prepared { update_id: request.update_id };
    script.poll();
    assert!(script.sub.is_commit_wanted(request.update_id));
    script.step("known", known("newer"));
    assert!(!script.sub.is_commit_wanted(request.update_id));
}

#[test]
fn content_that_becomes_unknown_stays_and_drift_is_repaired() {
    let mut script = synced();
    script.step("unknown", unknown("away"));
    let waits = "the content of computed files is not known: /c from files:6972: away";
    let expected = format!("{waits}; equals base");
    assert_eq!(status(&script), (Status::WaitingForComputedFiles, expected.as_str()));
    script.scan(&[("/c", "net"), ("/extra", "1")]);
    script.poll();
    assert_eq!(status(&script).1, "repairing base: staging 1 change: /extra (extra)");
}

#[test]
fn a_subd_of_a_former_release_is_named() {
    let mut script = synced();
    script.step("known", known("new"));
    script.refuse(FailureKind::NoMethod, "Subd.AddObjects is not known");
    let why = "base has computed files, which its subd does not know: require an image first that \
               brings a newer subd; will be tried again";
    assert_eq!(status(&script), (Status::SubdTooOld, why));
    let explanation = script.sub.explain(script.time());
    assert_eq!(explanation.means, "its image needs a newer subd than the machine has");
}

#[test]
fn a_subd_that_knows_no_tasks_is_named() {
    let mut script = synced();
    script.scan(&[("/c", "net"), ("/extra", "1")]);
    script.poll();
    script.refuse(FailureKind::NoMethod, "Subd.GetTasks is not known");
    let why = "base has daemon tasks, which its subd does not know: require an image first that \
               brings a newer subd; will be tried again";
    assert_eq!(status(&script), (Status::SubdTooOld, why));
}

#[test]
fn another_record_asks_again_and_an_image_without_computed_files_ends_it() {
    let mut script = synced();
    let machine = Machine { location: "nyc".into(), ..(*script.sub.machine).clone() };
    script.sub.machine = Arc::new(Machine::default());
    let (machine, planned) = (Arc::new(machine), ImageState::Undefined);
    let assigned = |image: &ImageState| Event::Assigned {
        machine: Arc::clone(&machine),
        image: image.clone(),
        planned: planned.clone(),
        rollback: None,
    };
    let wants = |script: &mut Script, image: &ImageState| -> Vec<usize> {
        let context = Context { jitter: 0, sources: &[], stopped: &[] };
        let now = script.time();
        let effects = script.sub.step(now, assigned(image), &context).into_iter();
        let wanted = effects.filter_map(|effect| match effect {
            Effect::WantComputed(machine, image) => {
                assert_eq!(machine.location, "nyc");
                Some(image.content.computed.len())
            }
            _ => None,
        });
        wanted.collect()
    };
    let required = script.image.clone();
    assert_eq!(wants(&mut script, &required), [1]);
    assert_eq!(wants(&mut script, &required), [0; 0]);
    let plain = image("plain", &[]);
    assert_eq!(wants(&mut script, &plain), [0]);
    assert_eq!(wants(&mut script, &image("other", &[])), [0; 0]);
}

#[test]
fn a_new_image_waits_for_content_of_its_own_record() {
    let mut script = synced();
    let outdated = |content: &str| {
        let Event::ComputedKnown(known) = known(content) else { unreachable!() };
        let unknown = [Unknown { rule: rule(), why: "is slow".into() }].into();
        told(KnownFiles { unknown, ..*known })
    };
    // The image that the machine has keeps the former content.
    script.step("outdated", outdated("net"));
    assert_eq!(script.sub.status(), Status::Synced);
    script.former = script.image.ready().cloned();
    script.image = with_computed("next", &[]);
    script.assign();
    let waits = "the content of computed files is not known: /c from files:6972: is slow";
    assert_eq!(
        status(&script),
        (Status::WaitingForComputedFiles, &*format!("{waits}; equals base"))
    );
    script.step("known", known("net"));
    assert_ne!(script.sub.status(), Status::WaitingForComputedFiles);
}

/// Tells the machine this content, which a change has brought it.
fn change(script: &mut Script, content: &str, round: u64) {
    let Event::ComputedKnown(known) = known(content) else { unreachable!() };
    let change = KnownFiles { round, update: ContentUpdate::Change, ..*known };
    script.step("change", told(change));
}

#[test]
fn a_machine_reports_how_it_is_with_changed_content_and_goes_back_after_a_failure() {
    let mut script = synced();
    let in_sync = ContentReport::Is(Standing::InSync);
    assert_eq!(std::mem::take(&mut script.reports).last(), Some(&(0, in_sync)));
    // The image has failed no health check, so its former content is taken at once.
    let failures = [
        ("bad", UpdateOutcome::Undone("exit code 1".into()), UpdateFailure::Health, 1),
        ("worse", UpdateOutcome::RolledBack("no space".into()), UpdateFailure::Update, 2),
    ];
    for (content, outcome, failure, update) in failures {
        change(&mut script, content, 5);
        push(&mut script, content);
        script.commit();
        script.ended(update, outcome, Some(3));
        script.poll();
        let busy = (5, ContentReport::Is(Standing::Away));
        let reports = std::mem::take(&mut script.reports);
        assert_eq!(reports, [busy, (5, ContentReport::Failed(failure))]);
        let Event::ComputedKnown(former) = known("net") else { unreachable!() };
        script.step("former", told(KnownFiles { round: 6, ..*former }));
        assert_eq!(status(&script), (Status::Synced, "equals base"));
        let busy = (6, ContentReport::Is(Standing::Away));
        assert_eq!(std::mem::take(&mut script.reports), [busy, (6, in_sync)]);
        let Some(Call::Cleanup(_)) = script.accept() else { panic!("the content stays") };
    }
    // What waits is said.
    let Event::ComputedKnown(former) = known("net") else { unreachable!() };
    let held = Some("content of files:6972/2 waits, which is stopped".to_owned());
    script.step("held", told(KnownFiles { held, round: 6, ..*former }));
    let detail = "equals base; content of files:6972/2 waits, which is stopped";
    assert_eq!(status(&script), (Status::Synced, detail));
    assert_eq!(script.reports, []);
}
