//! What happened is on record: drift with its path, orders, over kills, full disks and backups.

use std::collections::BTreeSet;
use std::time::Duration;

use api::dominator::Status;
use api::dominator::events::{
    ChangeReason, EventDetails, EventKind, HistoryEvent, ListEvents, ListEventsRequest,
    PathOperation, UpdateSummary,
};
use api::subd::UpdateOutcome;
use model::path::TreePath;
use model::tree::{Leaf, Node};

use crate::fake::{FakeSub, file, tree};
use crate::stage::Stage;
use testing::random::Random;
use testing::{eventually_async, exit_and_output};

async fn ask(stage: &Stage, request: ListEventsRequest) -> Vec<HistoryEvent> {
    let (mut request, mut events) = (request, Vec::new());
    loop {
        let reply = stage.client.call::<ListEvents>(&request).await.unwrap();
        events.extend(reply.events);
        match reply.next {
            Some(next) => request.before = Some(next),
            None => return events,
        }
    }
}

/// The updates that are on record, the newest first.
async fn updates(stage: &Stage) -> Vec<UpdateSummary> {
    let request = ListEventsRequest { kinds: vec![EventKind::Update], ..Default::default() };
    let facts = |event: HistoryEvent| match event.what {
        EventDetails::Update(facts) => facts,
        other => panic!("{other:?}"),
    };
    ask(stage, request).await.into_iter().map(facts).collect()
}

/// Waits until the end of all updates is on record.
async fn wait_for_ends(stage: &Stage, count: usize) -> Vec<UpdateSummary> {
    eventually_async("the end of all updates is recorded", async || {
        let updates = updates(stage).await;
        let have_ended = updates.iter().all(|update| update.outcome.is_some());
        if updates.len() == count && have_ended { Ok(updates) } else { Err(updates) }
    })
    .await
}

async fn wait_for_tree(sub: &FakeSub, want: &model::tree::Tree) {
    let has_tree = async || sub.model.lock().unwrap().sub.tree == *want;
    eventually_async("the machine has its tree", has_tree).await;
}

fn passwd(content: &str) -> model::tree::Tree {
    tree(
        &["d 755 0:0 /etc\n".to_owned(), file("/etc/group", "g"), file("/etc/passwd", content)]
            .concat(),
    )
}

fn object(node: Option<&Node>) -> String {
    match node {
        Some(Node::Leaf(Leaf::File(file))) => file.object.id().to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_tells_who_left_the_image_and_from_what_to_what() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base/1", &passwd("one"), Some(&[]));
    stage.images.add("base/2", &passwd("two"), Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base/1\"}}]"));
    stage.wait("host", Status::Synced, "base/1").await;

    sub.change(passwd("intruder"));
    wait_for_tree(&sub, &passwd("one")).await;
    stage.wait("host", Status::Synced, "base/1").await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base/2\"}}]"));
    stage.wait("host", Status::Synced, "base/2").await;
    let all = wait_for_ends(&stage, 3).await;
    let brief: Vec<_> = all
        .iter()
        .map(|update| {
            let UpdateSummary { image, former, drift, of_image, outcome, .. } = update;
            (&**image, &**former, *drift, *of_image, outcome.clone())
        })
        .collect();
    let done = Some(UpdateOutcome::Done);
    let expected = [
        ("base/2", "base/1", 0, 1, done.clone()),
        ("base/1", "base/1", 1, 0, done.clone()),
        ("base/1", "", 0, 3, done),
    ];
    assert_eq!(brief, expected);

    let shown = stage
        .domtool(&["events", "--path", "/etc/passwd", "--reason", "drift", "--since", "1d"])
        .await;
    let text = String::from_utf8(shown.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[1].contains("drift replace /etc/passwd (content): file 644 0:0"), "{text}");
    assert!(lines[1].contains("to base/1: done"), "{text}");

    let shown = stage.domtool(&["--format", "json", "events", "--path", "/etc/*"]).await;
    let events: Vec<HistoryEvent> = serde_json::from_slice(&shown.stdout).unwrap();
    let changes: Vec<_> = events
        .iter()
        .map(|event| match &event.what {
            EventDetails::Change { change, .. } => (change.path.to_string(), change.reason, change),
            other => panic!("{other:?}"),
        })
        .collect();
    let brief: Vec<_> = changes.iter().map(|(path, reason, _)| (path.as_str(), *reason)).collect();
    let expected = [
        ("/etc/group", ChangeReason::Image),
        ("/etc/passwd", ChangeReason::Image),
        ("/etc/passwd", ChangeReason::Drift),
        ("/etc/passwd", ChangeReason::Image),
    ];
    assert_eq!(brief, expected);
    let drift = changes[2].2;
    let id = |content: &str| {
        let path = TreePath::new("/etc/passwd").unwrap();
        object(Some(&passwd(content).get(&path).unwrap().node()))
    };
    assert_eq!(drift.operation, PathOperation::Replace);
    assert_eq!(object(drift.old.as_ref()), id("intruder"));
    assert_eq!(object(drift.new.as_ref()), id("one"));

    let (_, page) = stage.client.get("/events?path=/etc/passwd&reason=drift").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("drift replace /etc/passwd"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_are_on_record_with_who_and_why_also_over_a_kill() {
    let mut stage = Stage::new("[]").await;
    for words in [&["disable-updates", "storm"][..], &["enable-updates", "over"]] {
        let given = stage.domtool(words).await;
        assert!(given.status.success(), "{given:?}");
    }
    stage.kill();
    stage.start().await;
    let shown = stage.domtool(&["--format", "json", "audit"]).await;
    let events: Vec<HistoryEvent> = serde_json::from_slice(&shown.stdout).unwrap();
    let brief: Vec<_> = events
        .iter()
        .map(|event| match &event.what {
            EventDetails::Order { verb, who, why } => (verb.as_str(), who.is_empty(), why.as_str()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(brief, [("disable-updates", false, "storm"), ("enable-updates", false, "over")]);
    let bad = stage.domtool(&["events", "--since", "noon"]).await;
    let (_, _, talk) = exit_and_output(&bad);
    assert!(talk.contains("`noon` is no time"), "{talk}");
    let bad = stage.domtool(&["events", "--host", "web["]).await;
    let (_, _, talk) = exit_and_output(&bad);
    assert!(talk.contains("invalid filter of events"), "{talk}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_updates_and_orders_and_not_the_brake() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &passwd("one"), Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Synced, "base").await;
    wait_for_ends(&stage, 1).await;
    stage.kill();
    stage.start_for_limits().await;
    stage.wait("host", Status::Synced, "base").await;

    stage.limit_files("4096");
    let commits = || sub.calls.lock().unwrap().iter().filter(|call| **call == "commit").count();
    let before = commits();
    sub.change(passwd("intruder"));
    let why = "the update cannot be recorded, and is not ordered before it is";
    let detail = eventually_async(why, async || {
        let summary = stage.list().await.remove(0);
        if summary.detail.contains(why) { Ok(summary.detail) } else { Err(summary) }
    })
    .await;
    assert!(detail.contains("File too large"), "{detail}");
    assert_eq!(commits(), before, "what is not on record is not ordered");
    let error = stage.status().await.history_error.unwrap();
    assert!(error.contains("File too large"), "{error}");
    let refused = stage.domtool(&["retry", "host"]).await;
    let (_, _, talk) = exit_and_output(&refused);
    assert!(talk.contains("cannot write the database"), "{talk}");
    let pulled = stage.domtool(&["disable-updates", "full"]).await;
    let (_, _, talk) = exit_and_output(&pulled);
    assert!(talk.contains("updates are disabled, but only until"), "{talk}");
    assert_eq!(stage.status().await.brake.unwrap().reason, "full");
    assert_eq!(updates(&stage).await.len(), 1, "what was recorded is there to be read");

    stage.limit_files("unlimited");
    let released = stage.domtool(&["enable-updates"]).await;
    assert!(released.status.success(), "{released:?}");
    wait_for_tree(&sub, &passwd("one")).await;
    let all = wait_for_ends(&stage, 2).await;
    assert_eq!((all[0].drift, &all[0].outcome), (1, &Some(UpdateOutcome::Done)));
    assert_eq!(stage.status().await.history_error, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_is_taken_while_it_runs_and_starts_with_updates_disabled() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &passwd("one"), Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Synced, "base").await;
    wait_for_ends(&stage, 1).await;
    let backup = stage.directory.path().join("backup");
    let taken = stage.domtool(&["backup", backup.to_str().unwrap()]).await;
    assert!(taken.status.success(), "{taken:?}");
    let again = stage.domtool(&["backup", backup.to_str().unwrap()]).await;
    assert_eq!(again.status.code(), Some(1), "nothing is overwritten: {again:?}");
    assert_eq!(stage.status().await.brake, None);

    stage.kill();
    let state = stage.directory.path().join("state").join(dominator::storage::FILE);
    std::fs::rename(&backup, &state).unwrap();
    sub.change(passwd("intruder"));
    stage.start().await;
    let brake = stage.status().await.brake.expect("updates are disabled");
    assert!(brake.reason.contains("was started on the backup of"), "{brake:?}");
    stage.wait("host", Status::UpdatesDisabled, "base").await;
    assert_eq!(updates(&stage).await.len(), 1);
    let released = stage.domtool(&["enable-updates", "looked"]).await;
    assert!(released.status.success(), "{released:?}");
    wait_for_tree(&sub, &passwd("one")).await;
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.brake, None);
}

/// Kills the dominator at random moments of much work. `HISTORY_KILLS` says how often.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_ordered_is_on_record_whenever_the_dominator_is_killed() {
    let kills = std::env::var("HISTORY_KILLS").map_or(8, |kills| kills.parse().unwrap());
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &passwd("one"), Some(&[]));
    let mut records = Vec::new();
    let mut subs = Vec::new();
    for number in 0..8 {
        let sub = FakeSub::new(tree(""));
        let record = stage.sub(&format!("host{number}"), &sub).await;
        records.push(format!("{{{record}, \"RequiredImage\": \"base\"}}"));
        subs.push(sub);
    }
    stage.write_mdb(&format!("[{}]", records.join(",")));
    let drifting: Vec<_> = subs
        .iter()
        .cloned()
        .map(|sub| {
            tokio::spawn(async move {
                let mut number = 0;
                loop {
                    if sub.model.lock().unwrap().sub.tree == passwd("one") {
                        number += 1;
                        sub.change(passwd(&format!("intruder {number}")));
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
        })
        .collect();

    let mut random = Random::new(7);
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    for _ in 0..kills {
        // The moment of the kill is chance, and nothing is waited for by this.
        tokio::time::sleep(Duration::from_millis(100 + random.below(900))).await;
        let told = updates(&stage).await;
        stage.kill();
        let commits = |sub: &FakeSub| sub.commits.lock().unwrap().clone();
        let ordered: Vec<u64> = subs.iter().flat_map(commits).collect();
        stage.start().await;
        let known: BTreeSet<u64> =
            updates(&stage).await.iter().map(|update| update.update_id).collect();
        for update in told {
            assert!(known.contains(&update.update_id), "{update:?} was told and is gone");
            seen.insert(update.update_id);
        }
        let unknown: Vec<_> = ordered.iter().filter(|id| !known.contains(id)).collect();
        assert_eq!(unknown, Vec::<&u64>::new(), "ordered, and not on record");
    }
    for task in drifting {
        task.abort();
    }
    let ordered: usize = subs.iter().map(|sub| sub.commits.lock().unwrap().len()).sum();
    println!("{ordered} orders over {kills} kills, {} told before a kill", seen.len());
    assert!(ordered > 8, "{ordered}");
    for number in 0..subs.len() {
        stage.wait(&format!("host{number}"), Status::Synced, "base").await;
    }
}
