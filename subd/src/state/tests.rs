//! Tests of what moves which number of a version.

use api::subd::Configuration;
use model::object::Algorithm;
use model::path::TreePath;
use model::tree::Metadata;

use super::*;
use crate::root::Root;
use crate::state::persisted_state::StateDirectory;

/// A state, and the directory that it is saved in.
fn report_state(cached: &[u32]) -> (ReportState, tempfile::TempDir) {
    let place = tempfile::tempdir().unwrap();
    let directory = Root::open(place.path()).unwrap().directory(&TreePath::root()).unwrap();
    let saved = StateDirectory::lock(directory).unwrap().load().unwrap();
    let exclusions = Patterns::new::<&str>([]).unwrap();
    let cached = cached.iter().map(|number| id(*number));
    (ReportState::new(7, SubIdentity::default(), exclusions, saved, cached), place)
}

fn id(number: u32) -> ObjectId {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&number.to_be_bytes());
    ObjectId::Blake3(digest)
}

fn by(scan: &ScanSettings) -> Configuration {
    Configuration { scan: scan.clone(), ..Configuration::default() }
}

fn snapshot(revision: u64, settings: &ScanSettings, mode: Option<u32>) -> Arc<Snapshot> {
    let scope = Scope::of(settings, &[]);
    let tree = mode.map(|mode| {
        let metadata = Metadata::new(mode, 0, 0);
        let root = model::tree::Directory::new(Algorithm::Blake3, metadata, Vec::new());
        Tree::new(Arc::new(root.unwrap()))
    });
    let report = tree.as_ref().map(|tree| ScanReport::of(scope, tree));
    Arc::new(Snapshot {
        settings: Arc::new(settings.clone()),
        scope,
        revision,
        tree,
        report,
        left_alone: Vec::new(),
        index: OnceLock::new(),
    })
}

fn configure(report_state: &ReportState, settings: &ScanSettings) {
    report_state.persist(|persisted| persisted.configuration = by(settings)).unwrap();
}

fn numbers(report_state: &ReportState) -> (u64, u64, bool) {
    report_state.read(|state| (state.version.generation, state.version.status, state.is_scanned()))
}

#[test]
fn the_generation_tells_of_tree_and_cache_and_of_nothing_else() {
    let (report_state, _place) = report_state(&[1]);
    let take = |snapshot| report_state.take_snapshot(snapshot, SubIdentity::default());
    let settings = ScanSettings::default();
    assert_eq!(numbers(&report_state), (1, 1, false));
    take(snapshot(1, &settings, None));
    assert_eq!(numbers(&report_state), (1, 1, false));
    take(snapshot(2, &settings, Some(0o755)));
    assert_eq!(numbers(&report_state), (2, 2, true), "what is scanned is a matter of status");
    take(snapshot(3, &settings, Some(0o755)));
    assert_eq!(numbers(&report_state), (2, 2, true), "the same tree again");
    take(snapshot(5, &settings, Some(0o700)));
    take(snapshot(4, &settings, Some(0o755)));
    assert_eq!(numbers(&report_state), (3, 2, true), "an older scan is not taken");
    report_state.add_to_cache(&[id(1), id(2)], |found| *found == id(1));
    assert_eq!(numbers(&report_state), (3, 2, true), "known objects, and one that went again");
    report_state.set_cache(|| vec![id(1), id(3)]);
    assert_eq!(numbers(&report_state), (4, 2, true));
    report_state.change(|state| state.update = UpdatePhase::Preparing(9));
    assert_eq!(numbers(&report_state), (4, 3, true));
    let refused: Result<Option<()>, ()> = report_state.try_change(|_| Err(()));
    assert_eq!((refused, numbers(&report_state)), (Err(()), (4, 3, true)));
}

#[test]
fn other_settings_make_the_scan_invalid_until_there_is_a_new_one() {
    let (report_state, _place) = report_state(&[]);
    let take = |snapshot| report_state.take_snapshot(snapshot, SubIdentity::default());
    let (first, second) = (
        ScanSettings::default(),
        ScanSettings { algorithm: Algorithm::Sha512, ..ScanSettings::default() },
    );
    take(snapshot(1, &first, Some(0o755)));
    assert_eq!(numbers(&report_state), (2, 2, true));
    configure(&report_state, &second);
    assert_eq!(numbers(&report_state), (2, 3, false));
    assert_eq!(report_state.reply(None, Measured::default()).scan, None);
    configure(&report_state, &first);
    assert_eq!(numbers(&report_state), (3, 4, true), "who polled meanwhile was told of no tree");
    configure(&report_state, &second);
    take(snapshot(2, &second, None));
    assert_eq!(numbers(&report_state), (3, 5, false));
    take(snapshot(3, &second, Some(0o755)));
    assert_eq!(numbers(&report_state), (4, 6, true));
}

#[test]
fn a_reply_has_what_the_caller_does_not_know() {
    let (report_state, _place) = report_state(&[1]);
    report_state
        .take_snapshot(snapshot(1, &ScanSettings::default(), Some(0o755)), SubIdentity::default());
    let reply = |have| report_state.reply(have, Measured::default());
    let full = reply(None);
    assert_eq!(full.cache, Some(CacheReport::Full(vec![id(1)])));
    assert!(full.scan.is_some() && full.scanned);
    let same = reply(Some(full.version));
    assert_eq!((same.scan, same.cache, same.scanned), (None, None, true));
    let other_instance = SubVersion { instance: 8, ..full.version };
    assert_eq!(reply(Some(other_instance)).cache, full.cache);
    let future = SubVersion { generation: 99, ..full.version };
    assert_eq!(reply(Some(future)).cache, full.cache);
    report_state.set_cache(|| vec![id(2), id(3)]);
    let changes = CacheReport::Changes { added: vec![id(2), id(3)], removed: vec![id(1)] };
    assert_eq!(reply(Some(full.version)).cache, Some(changes));
}

#[test]
fn there_is_one_alarm_of_each_kind_and_only_a_change_is_news() {
    let (report_state, _place) = report_state(&[]);
    let alarms = || report_state.reply(None, Measured::default()).alarms;
    let failed = |text: &str| Alarm::WriteFailed(text.to_owned());
    report_state.clear(|_| true);
    report_state.raise(failed("a"));
    report_state.raise(failed("a"));
    assert_eq!((alarms(), numbers(&report_state)), (vec![failed("a")], (1, 2, false)));
    report_state.raise(Alarm::ReadOnly);
    report_state.raise(failed("b"));
    assert_eq!(
        (alarms(), numbers(&report_state)),
        (vec![Alarm::ReadOnly, failed("b")], (1, 4, false))
    );
    report_state.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_)));
    report_state.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_)));
    assert_eq!((alarms(), numbers(&report_state)), (vec![Alarm::ReadOnly], (1, 5, false)));
}

#[test]
fn failures_of_triggers_stay_until_a_good_update() {
    let failure = |service: &str, output: &str| TriggerFailure {
        service: service.to_owned(),
        verb: "start".to_owned(),
        output: output.to_owned(),
    };
    let image = model::image::ImageName::new("a").unwrap();
    let update = |operations, outcome, trigger_failures| LastUpdate {
        operations,
        trigger_failures,
        ..LastUpdate::new(1, image.clone(), outcome)
    };
    let last = |outcome, trigger_failures| update(1, outcome, trigger_failures);
    use api::subd::UpdateOutcome::{Done, RolledBack};
    let triggers = Triggers::default();
    let mut persisted = PersistedState::default();
    note_update(
        &mut persisted,
        &last(Done, vec![failure("a", "1"), failure("b", "1")]),
        Some(&triggers),
    );
    note_update(&mut persisted, &last(RolledBack(String::new()), vec![failure("a", "2")]), None);
    assert_eq!(persisted.trigger_failures, [failure("b", "1"), failure("a", "2")]);
    note_update(&mut persisted, &last(RolledBack(String::new()), Vec::new()), None);
    assert_eq!(persisted.trigger_failures.len(), 2);
    // One without changes runs no triggers.
    note_update(&mut persisted, &update(0, Done, Vec::new()), Some(&triggers));
    assert_eq!(persisted.trigger_failures.len(), 2);
    note_update(&mut persisted, &last(Done, Vec::new()), Some(&triggers));
    assert_eq!(persisted.trigger_failures, []);
}
