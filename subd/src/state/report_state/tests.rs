//! Tests of what moves which number of a version.

use api::subd::Configuration;
use model::object::Algorithm;
use model::scope::ScanSettings;
use model::tree::{Metadata, Tree};

use super::*;

fn board(cached: &[u32]) -> Board {
    let exclusions = Patterns::new::<&str>([]).unwrap();
    let cached = cached.iter().map(|number| id(*number));
    Board::new(7, Identity::default(), exclusions, Saved::default(), cached)
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
    Arc::new(Snapshot { settings: Arc::new(settings.clone()), scope, revision, tree, report })
}

fn configure(board: &Board, settings: &ScanSettings) {
    board.change_saved(|saved| saved.configuration = by(settings));
}

fn numbers(board: &Board) -> (u64, u64, bool) {
    board.read(|state| (state.version.generation, state.version.status, state.is_scanned()))
}

#[test]
fn the_generation_tells_of_tree_and_cache_and_of_nothing_else() {
    let board = board(&[1]);
    let take = |snapshot| board.take_snapshot(snapshot, Identity::default());
    let settings = ScanSettings::default();
    assert_eq!(numbers(&board), (1, 1, false));
    take(snapshot(1, &settings, None));
    assert_eq!(numbers(&board), (1, 1, false));
    take(snapshot(2, &settings, Some(0o755)));
    assert_eq!(numbers(&board), (2, 2, true), "what is scanned is a matter of status");
    take(snapshot(3, &settings, Some(0o755)));
    assert_eq!(numbers(&board), (2, 2, true), "the same tree again");
    take(snapshot(5, &settings, Some(0o700)));
    take(snapshot(4, &settings, Some(0o755)));
    assert_eq!(numbers(&board), (3, 2, true), "an older scan is not taken");
    board.add_to_cache(&[id(1), id(2)], |found| *found == id(1));
    assert_eq!(numbers(&board), (3, 2, true), "known objects, and one that went again");
    board.set_cache(|| vec![id(1), id(3)]);
    assert_eq!(numbers(&board), (4, 2, true));
    board.change(|state| state.update = UpdatePhase::Preparing(9));
    assert_eq!(numbers(&board), (4, 3, true));
    let refused: Result<Option<()>, ()> = board.try_change(|_| Err(()));
    assert_eq!((refused, numbers(&board)), (Err(()), (4, 3, true)));
}

#[test]
fn other_settings_make_the_scan_invalid_until_there_is_a_new_one() {
    let board = board(&[]);
    let take = |snapshot| board.take_snapshot(snapshot, Identity::default());
    let (first, second) = (
        ScanSettings::default(),
        ScanSettings { algorithm: Algorithm::Sha512, ..ScanSettings::default() },
    );
    take(snapshot(1, &first, Some(0o755)));
    assert_eq!(numbers(&board), (2, 2, true));
    configure(&board, &second);
    assert_eq!(numbers(&board), (2, 3, false));
    assert_eq!(board.reply(None, Measured::default()).scan, None);
    configure(&board, &first);
    assert_eq!(numbers(&board), (3, 4, true), "who polled meanwhile was told of no tree");
    configure(&board, &second);
    take(snapshot(2, &second, None));
    assert_eq!(numbers(&board), (3, 5, false));
    take(snapshot(3, &second, Some(0o755)));
    assert_eq!(numbers(&board), (4, 6, true));
}

#[test]
fn a_reply_has_what_the_caller_does_not_know() {
    let board = board(&[1]);
    board.take_snapshot(snapshot(1, &ScanSettings::default(), Some(0o755)), Identity::default());
    let reply = |have| board.reply(have, Measured::default());
    let full = reply(None);
    assert_eq!(full.cache, Some(CacheReport::Full(vec![id(1)])));
    assert!(full.scan.is_some() && full.scanned);
    let same = reply(Some(full.version));
    assert_eq!((same.scan, same.cache, same.scanned), (None, None, true));
    let other_instance = Version { instance: 8, ..full.version };
    assert_eq!(reply(Some(other_instance)).cache, full.cache);
    let future = Version { generation: 99, ..full.version };
    assert_eq!(reply(Some(future)).cache, full.cache);
    board.set_cache(|| vec![id(2), id(3)]);
    let changes = CacheReport::Changes { added: vec![id(2), id(3)], removed: vec![id(1)] };
    assert_eq!(reply(Some(full.version)).cache, Some(changes));
}

#[test]
fn there_is_one_alarm_of_each_kind_and_only_a_change_is_news() {
    let board = board(&[]);
    let alarms = || board.reply(None, Measured::default()).alarms;
    let failed = |text: &str| Alarm::WriteFailed(text.to_owned());
    board.clear(|_| true);
    board.raise(failed("a"));
    board.raise(failed("a"));
    assert_eq!((alarms(), numbers(&board)), (vec![failed("a")], (1, 2, false)));
    board.raise(Alarm::ReadOnly);
    board.raise(failed("b"));
    assert_eq!((alarms(), numbers(&board)), (vec![Alarm::ReadOnly, failed("b")], (1, 4, false)));
    board.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_)));
    board.clear(|alarm| matches!(alarm, Alarm::WriteFailed(_)));
    assert_eq!((alarms(), numbers(&board)), (vec![Alarm::ReadOnly], (1, 5, false)));
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
    use api::subd::Outcome::{Done, RolledBack};
    let triggers = Triggers::default();
    let mut saved = Saved::default();
    note_update(
        &mut saved,
        &last(Done, vec![failure("a", "1"), failure("b", "1")]),
        Some(&triggers),
    );
    note_update(&mut saved, &last(RolledBack(String::new()), vec![failure("a", "2")]), None);
    assert_eq!(saved.trigger_failures, [failure("b", "1"), failure("a", "2")]);
    note_update(&mut saved, &last(RolledBack(String::new()), Vec::new()), None);
    assert_eq!(saved.trigger_failures.len(), 2);
    // One without changes runs no triggers.
    note_update(&mut saved, &update(0, Done, Vec::new()), Some(&triggers));
    assert_eq!(saved.trigger_failures.len(), 2);
    note_update(&mut saved, &last(Done, Vec::new()), Some(&triggers));
    assert_eq!(saved.trigger_failures, []);
}
