//! The machine database on disk: replaced, edited in place, damaged.

use std::time::{Duration, Instant};

use crate::stage::{PATIENCE, Stage};

async fn wait_for_hosts(stage: &Stage, hosts: &[&str]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let subs = stage.list().await;
        let names: Vec<&str> = subs.iter().map(|sub| sub.hostname.as_str()).collect();
        if names == hosts {
            return;
        }
        assert!(Instant::now() < deadline, "{names:?}, not {hosts:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn wait_for_error(stage: &Stage, part: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let error = stage.status().await.mdb_error;
        if let Some(error) = error.as_ref().filter(|error| error.contains(part)) {
            return error.clone();
        }
        assert!(Instant::now() < deadline, "no error with `{part}`: {error:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
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
    wait_for_error(&stage, "lists no machine at all, while 2 are known").await;
    std::fs::remove_file(stage.mdb()).unwrap();
    wait_for_error(&stage, "cannot read").await;
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
