//! The command that tells operators of alarms.

use std::path::Path;

use api::dominator::Status;
use serde_json::{Value, json};

use crate::fake::{FakeSub, tree};
use crate::stage::{Stage, wait_until};

/// What the command was given so far, one call after the other; without times.
pub fn told(directory: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(directory.join("told")).unwrap_or_default();
    let calls = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let timeless = |mut call: Value| {
        for list in ["begun", "ended"] {
            for alarm in call[list].as_array_mut().unwrap() {
                alarm.as_object_mut().unwrap().remove("since").unwrap();
            }
        }
        call
    };
    calls.map(timeless).collect()
}

fn call(begun: Vec<&Value>, ended: Vec<&Value>) -> Value {
    json!({"begun": begun, "more_begun": 0, "ended": ended, "more_ended": 0})
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_are_told_of_the_brake_and_of_alarms_of_machines() {
    let mut stage = Stage::new("[]").await;
    stage.kill();
    let script = stage.directory.path().join("tell");
    // It fails until it may write, as one whose network is down does.
    std::fs::write(&script, "set -e; cd \"$1\"; test -e may; cat >>told.new; cp told.new told\n")
        .unwrap();
    let mut command = stage.command();
    let line = format!("/bin/sh {} {}", script.display(), stage.directory.path().display());
    command.arg("--alarm-command").arg(line);
    stage.start_as(command).await;

    let pulled = stage.domtool(&["disable-updates", "storm"]).await;
    assert!(pulled.status.success(), "{pulled:?}");
    let who = stage.status().await.brake.unwrap().who;
    wait_until("the command fails", async || stage.status().await.alarm_error.is_some()).await;
    assert_eq!(stage.status().await.alarm_error.unwrap(), "/bin/sh: exit status: 1");
    assert_eq!(told(stage.directory.path()), Vec::<Value>::new());

    std::fs::write(stage.directory.path().join("may"), "").unwrap();
    let brake = json!({
        "kind": "updates-disabled", "about": "",
        "text": format!("updates are disabled by {who}: storm"),
    });
    wait_until("the brake is told", async || !told(stage.directory.path()).is_empty()).await;
    assert_eq!(told(stage.directory.path()), [call(vec![&brake], vec![])]);
    wait_until("the command succeeds", async || stage.status().await.alarm_error.is_none()).await;

    let released = stage.domtool(&["enable-updates"]).await;
    assert!(released.status.success(), "{released:?}");
    wait_until("its end is told", async || told(stage.directory.path()).len() > 1).await;
    let sub = FakeSub::new(tree(""));
    sub.model.lock().unwrap().stalls = Some("at /srv".to_owned());
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}}}]"));
    stage.wait("host", Status::ImageUndefined, "").await;
    wait_until("the alarm is told", async || told(stage.directory.path()).len() > 2).await;
    let stall = json!({
        "kind": "scanner-stalled", "about": "host", "text": "the scanner stalls: at /srv",
    });
    let all = [call(vec![&brake], vec![]), call(vec![], vec![&brake]), call(vec![&stall], vec![])];
    assert_eq!(told(stage.directory.path()), all);
}
