//! A configuration that is changed while the dominator runs.

use crate::alarms::told;
use crate::stage::{Stage, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_changes_is_taken_while_the_dominator_runs() {
    let machines = |count: usize| {
        let records = (0..count).map(|number| format!(r#"{{"Hostname": "host{number}"}}"#));
        format!("[{}]", records.collect::<Vec<_>>().join(","))
    };
    let mut stage = Stage::new(&machines(20)).await;
    stage.kill();
    let directory = stage.directory.path().to_owned();
    let config = directory.join("config.toml");
    std::fs::write(&config, "mdb-drop-max = 50\n").unwrap();
    let mut command = stage.command();
    command.arg("--config").arg(&config);
    stage.start_as(command).await;
    wait_until("20 machines", async || stage.list().await.len() == 20).await;

    // What is wrong leaves all as it was.
    std::fs::write(&config, "mdb-drop-maximum = 10\n").unwrap();
    stage.hang_up();
    stage.write_mdb(&machines(12));
    wait_until("12 machines", async || stage.list().await.len() == 12).await;

    let script = directory.join("tell");
    std::fs::write(&script, "cd \"$1\"; cat >>told.new; cp told.new told\n").unwrap();
    let line = format!("/bin/sh {} {}", script.display(), directory.display());
    let text = format!("mdb-drop-max = 10\nalarm-command = \"{line}\"\nsubd-port = 1\n");
    std::fs::write(&config, text).unwrap();
    stage.domtool(&["disable-updates", "storm"]).await;
    stage.hang_up();
    wait_until("the brake is told", async || !told(&directory).is_empty()).await;
    assert_eq!(told(&directory)[0]["begun"][0]["kind"], "updates-disabled");
    stage.write_mdb(&machines(10));
    wait_until("a database is held", async || stage.status().await.mdb_held.is_some()).await;
    let held = stage.status().await.mdb_held.unwrap();
    let why = "it lacks 2 of the 12 machines that are known, more than 10 %";
    assert_eq!((held.why.as_str(), stage.list().await.len()), (why, 12));
}
