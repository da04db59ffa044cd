//! The machine database on disk: replaced, edited in place, damaged.

use std::process::Output;

use api::dominator::mdb::HeldMdb;
use testing::{eventually_async, exit_and_output};

use crate::fake::tree;
use crate::stage::{Stage, wait_until};

async fn wait_for_hosts(stage: &Stage, hosts: &[&str]) {
    eventually_async(&format!("the subs are {hosts:?}"), async || {
        let subs = stage.list().await;
        let names: Vec<String> = subs.into_iter().map(|sub| sub.hostname).collect();
        if names == hosts { Ok(()) } else { Err(names) }
    })
    .await;
}

async fn wait_for_error(stage: &Stage, part: &str) -> String {
    eventually_async(&format!("the error of the MDB has `{part}`"), async || {
        match stage.status().await.mdb_error {
            Some(error) if error.contains(part) => Ok(error),
            other => Err(other),
        }
    })
    .await
}

/// Waits until a database is held for this reason.
async fn wait_for_held(stage: &Stage, why: &str) -> HeldMdb {
    eventually_async(&format!("the MDB is held: {why}"), async || {
        match stage.status().await.mdb_held {
            Some(held) if held.why == why => Ok(held),
            other => Err(other),
        }
    })
    .await
}

/// Returns the exit code and the stdout of domtool.
fn exit_and_stdout(output: &Output) -> (Option<i32>, String) {
    let (code, data, _) = exit_and_output(output);
    (code, data)
}

/// A database of the first `count` of twelve machines, with this image.
fn database(count: usize, image: &str) -> String {
    let records: Vec<String> = (0..count)
        .map(|number| format!("{{\"Hostname\": \"m{number:02}\", \"RequiredImage\": \"{image}\"}}"))
        .collect();
    format!("[{}]", records.join(",\n"))
}

fn hosts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("m{number:02}")).collect()
}

async fn wait_for_first(stage: &Stage, count: usize) {
    let hosts = hosts(count);
    wait_for_hosts(stage, &hosts.iter().map(String::as_str).collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_changes_too_much_waits_for_an_operator_also_over_a_restart() {
    let mut stage = Stage::new(&database(12, "x")).await;
    wait_for_first(&stage, 12).await;
    let why = "it lacks 9 of the 12 machines that are known, more than 50 %";
    stage.write_mdb(&database(3, "x"));
    let held = wait_for_held(&stage, why).await;
    wait_for_first(&stage, 12).await;

    // What is in force is remembered over a kill, and so is what the file is compared with.
    stage.kill();
    stage.start().await;
    let again = wait_for_held(&stage, why).await;
    assert_eq!(again.digest, held.digest);
    wait_for_first(&stage, 12).await;

    let gone: Vec<String> = hosts(12)[3..].iter().map(|host| format!("- {host} x\n")).collect();
    let diff = stage.domtool(&["mdb", "diff"]).await;
    assert_eq!(exit_and_stdout(&diff), (Some(3), gone.concat()));
    let (_, page) = stage.client.get("/mdb").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains(why) && page.contains("- m11 x"), "{page}");
    let shown = stage.domtool(&["status"]).await;
    assert!(exit_and_stdout(&shown).1.contains("machine database: mdb-held since"), "{shown:?}");

    // Another one than was looked at is not accepted.
    let other = "blake3:0000000000000000000000000000000000000000000000000000000000000000";
    let refused = stage.domtool(&["mdb", "accept", other]).await;
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(text.contains("another machine database is held by now"), "{text}");

    let accepted = stage.domtool(&["mdb", "accept", "--why", "nine were sold"]).await;
    assert!(accepted.status.success(), "{accepted:?}");
    wait_for_first(&stage, 3).await;
    assert_eq!(stage.status().await.mdb_held, None);
    let audit = exit_and_output(&stage.domtool(&["audit"]).await).1;
    assert!(audit.trim_end().ends_with(": nine were sold"), "{audit}");
    let same = stage.domtool(&["mdb", "diff"]).await;
    assert_eq!(
        (same.status.code(), &*same.stderr),
        (Some(0), &b"No machine database is held.\n"[..])
    );
    let none = stage.domtool(&["mdb", "accept"]).await;
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8(none.stderr).unwrap().contains("no machine database is held"));
    stage.kill();
    stage.start().await;
    wait_for_first(&stage, 3).await;
    assert_eq!(stage.status().await.mdb_held, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_beside_a_bad_file_goes_on_with_what_was_in_force() {
    let mut stage = Stage::new(&database(2, "x")).await;
    wait_for_first(&stage, 2).await;
    // A database is in force a moment before it is kept.
    assert!(stage.terminate().success());
    stage.write_mdb("[{\"Hostname\": \"m00\"},\n{\"Hostname\": \"m00\"},\n{\"Hostname\": \" \"}]");
    stage.start().await;
    let error = wait_for_error(&stage, "line 2").await;
    let records = "line 2: host name m00 was given already, in line 1; line 3: ` ` is no host name";
    assert!(error.ends_with(records), "{error}");
    wait_for_first(&stage, 2).await;
    // An edit while the dominator is down is taken as one while it runs.
    stage.kill();
    stage.write_mdb(&database(1, "x"));
    stage.start().await;
    wait_for_first(&stage, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_moves_too_many_machines_is_held_if_that_is_asked_for() {
    let mut stage = Stage::new(&database(12, "x")).await;
    wait_for_first(&stage, 12).await;
    stage.kill();
    let mut command = stage.command();
    command.args(["--mdb-reimage-max", "25"]);
    stage.start_as(command).await;
    stage.write_mdb(&database(12, "y"));
    let why = "it has another image for 12 of the 12 machines that are known, more than 25 %";
    wait_for_held(&stage, why).await;
    let file = stage.directory.path().join("candidate");
    std::fs::write(&file, database(12, "x")).unwrap();
    let diff = stage.domtool(&["mdb", "diff", file.to_str().unwrap()]).await;
    assert_eq!(exit_and_stdout(&diff), (Some(0), String::new()));
    // One that changes little is taken, and nothing is held any more.
    stage.write_mdb(&database(11, "x"));
    wait_for_first(&stage, 11).await;
    assert_eq!(stage.status().await.mdb_held, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_good_database_stays_in_force() {
    let stage = Stage::new("[{\"Hostname\": \"a\"}, {\"Hostname\": \"b\"}]").await;
    wait_for_hosts(&stage, &["a", "b"]).await;

    // In place, with the same length.
    std::fs::write(stage.mdb(), "[{\"Hostname\": \"a\"}, {\"Hostname\": \"c\"}]").unwrap();
    wait_for_hosts(&stage, &["a", "c"]).await;

    stage.write_mdb("[\n{\"Hostname\": \"a\"},\n{\"Hostname\": ");
    let error = wait_for_error(&stage, "line 3").await;
    assert!(error.contains("mdb.json: the machine database is not valid"), "{error}");
    wait_for_hosts(&stage, &["a", "c"]).await;
    let (_, page) = stage.client.get("/").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("The machine database is not taken"), "{page}");
    let said = stage.domtool(&["status"]).await;
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("machine database: NOT TAKEN"), "{said}");

    stage.write_mdb("[]");
    wait_for_held(&stage, "it lists no machine at all, while 2 are known").await;
    wait_for_hosts(&stage, &["a", "c"]).await;
    std::fs::remove_file(stage.mdb()).unwrap();
    wait_for_error(&stage, "cannot read").await;
    assert_eq!(stage.status().await.mdb_held, None);
    wait_for_hosts(&stage, &["a", "c"]).await;

    // What cannot be read at all must not hold up the next good file.
    nix::unistd::mkfifo(&stage.mdb(), nix::sys::stat::Mode::S_IRUSR).unwrap();
    wait_for_error(&stage, "mdb.json is no regular file").await;
    std::fs::remove_file(stage.mdb()).unwrap();
    std::fs::write(stage.mdb(), b"[\n{\"Hostname\": \"\xfc\"}]").unwrap();
    wait_for_error(&stage, "mdb.json: line 2 is not UTF-8").await;
    stage.write_mdb("\u{feff}[{\"Hostname\": \"marked\"}]");
    wait_for_hosts(&stage, &["marked"]).await;

    stage.write_mdb("// better now\n[{\"Hostname\": \"d\"}]");
    wait_for_hosts(&stage, &["d"]).await;
    assert_eq!(stage.status().await.mdb_error, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_misspelt_key_is_told_and_refused_if_that_is_wanted() {
    let text = "[{\"Hostname\": \"a\",\n\"RequiredImge\": \"x\"}]";
    let told = "line 2: the key `RequiredImge` is unknown; is `RequiredImage` meant?";
    let mut stage = Stage::new(text).await;
    wait_for_hosts(&stage, &["a"]).await;
    let (code, said) = exit_and_stdout(&stage.domtool(&["status"]).await);
    assert!(code == Some(0) && said.contains(&format!("\nmachine database: {told}\n")), "{said}");
    let (_, page) = stage.client.get("/").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("the key `RequiredImge` is unknown"), "{page}");
    let file = stage.mdb();
    let check =
        async || exit_and_stdout(&stage.domtool(&["mdb", "check", file.to_str().unwrap()]).await);
    assert_eq!(check().await, (Some(3), format!("{told}\n1 machine\n")));
    stage.write_mdb("[{\"Hostname\": \"b\"}]");
    assert_eq!(check().await, (Some(0), "1 machine\n".to_owned()));
    wait_for_hosts(&stage, &["b"]).await;
    assert_eq!(stage.status().await.image_remarks, [""; 0]);
    stage.write_mdb("[");
    assert_eq!(check().await, (Some(1), String::new()));
    stage.kill();
    stage.write_mdb(text);
    let mut strict = stage.command();
    strict.arg("--mdb-strict");
    stage.start_as(strict).await;
    let error = wait_for_error(&stage, "RequiredImge").await;
    assert!(error.ends_with(told), "{error}");
    wait_for_hosts(&stage, &["b"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_that_machines_should_not_depend_on_are_told() {
    let stage = Stage::new("[]").await;
    stage.images.add("old", &tree(""), Some(&[]));
    stage.images.deprecate("old", "use new");
    let record = |host: &str, image: &str| {
        format!("{{\"Hostname\": \"{host}\", \"RequiredImage\": \"{image}\"}}")
    };
    let records = [record("a", "old"), record("b", "old"), record("c", "gone")];
    stage.write_mdb(&format!("[{}]", records.join(",")));
    let expected = [
        "gone, for 1 machine: the image server has no image gone yet",
        "old, for 2 machines: is deprecated: use new",
    ];
    eventually_async("the status has the remarks", async || {
        let remarks = stage.status().await.image_remarks;
        if remarks == expected { Ok(()) } else { Err(remarks) }
    })
    .await;
    let shown = exit_and_stdout(&stage.domtool(&["status"]).await).1;
    assert!(shown.contains(&format!("image: {}\n", expected[1])), "{shown}");
    let (_, page) = stage.client.get("/").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains(expected[1]), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_kept_is_kept_when_there_is_room() {
    let mut stage = Stage::new(&database(3, "")).await;
    stage.kill();
    stage.start_for_limits().await;
    let names = hosts(5);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    wait_for_hosts(&stage, &names[..3]).await;
    stage.limit_files("4096");
    stage.write_mdb(&database(5, ""));
    wait_for_hosts(&stage, &names).await;
    wait_until("it is not kept", async || stage.status().await.mdb_unkept.is_some()).await;
    let status = stage.domtool(&["status"]).await;
    let (_, text) = exit_and_stdout(&status);
    assert!(text.contains("machine database: NOT KEPT over a restart: "), "{text}");
    stage.limit_files("unlimited");
    // Nobody writes it again.
    wait_until("it is kept", async || stage.status().await.mdb_unkept.is_none()).await;
    stage.kill();
    stage.write_mdb("[");
    stage.start().await;
    wait_for_hosts(&stage, &names).await;
}
