//! Flags, pages and the output of domtool.

use std::process::Command;

use api::dominator::Status;
use testing::exit_and_output;

use crate::fake::{FakeSub, file, tree};
use crate::stage::Stage;

#[test]
fn both_programs_refuse_to_run_unprotected_by_accident() {
    for (program, name, arguments) in [
        (env!("CARGO_BIN_EXE_dominator"), "dominator", &["--tls", "/nonexistent"][..]),
        (&testing::program("domtool"), "domtool", &["--tls", "/nonexistent", "list-subs"]),
    ] {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{program}");
        let (_, _, talk) = exit_and_output(&output);
        let error = format!(
            "error: {name} does not run unprotected by itself, and there are no certificates in \
             /nonexistent\n"
        );
        assert!(talk.starts_with(&error), "{talk}");
        for hint in ["domtool cert ca ./ca\n", "domtool cert issue --ca ./ca --out /nonexistent"] {
            assert!(talk.contains(&format!("hint:   {hint}")), "{talk}");
        }
    }
}

#[test]
fn help_teaches() {
    for (program, parts) in [
        (env!("CARGO_BIN_EXE_dominator"), ["--imageserver-for-subs", "Example", "--state"]),
        (&testing::program("domtool"), ["list-subs", "Examples", "clear-safety-shutoff"]),
    ] {
        let output = Command::new(program).arg("--help").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        for part in parts {
            assert!(help.contains(part), "{part} in {help}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_every_machine_as_table_json_page_and_metric() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &tree(&file("/one", "1")), Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!(
        "[{{{record}, \"RequiredImage\": \"/base\", \"PlannedImage\": \"next\", \
         \"Tags\": {{\"tier\": \"front\"}}}}]"
    ));
    stage.wait("host", Status::Synced, "base").await;

    let json = stage.domtool(&["list-subs", "--format", "json"]).await;
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let host = &json[0];
    for (field, value) in [
        ("hostname", "host"),
        ("status", "synced"),
        ("required_image", "base"),
        ("planned_image", "next"),
        ("last_image", "base"),
    ] {
        assert_eq!(host[field], value, "{json}");
    }
    let table = stage.domtool(&["list-subs", "--status", "synced"]).await;
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("HOST") && table.contains("equals base"), "{table}");
    let none = stage.domtool(&["list-subs", "--status", "blocked", "--format", "json"]).await;
    assert_eq!(String::from_utf8(none.stdout).unwrap(), "[]\n");
    let bad = stage.domtool(&["list-subs", "--status", "sunk"]).await;
    assert_eq!(bad.status.code(), Some(2));
    for (filters, found) in [
        (&["ho*"][..], true),
        (&["h?st", "--image", "base", "--tag", "tier=front"], true),
        (&["web*"], false),
        (&["--location", "nyc"], false),
        (&["--tag", "tier=back"], false),
    ] {
        let arguments = [&["list-subs", "--format", "json"], filters].concat();
        let json = stage.domtool(&arguments).await;
        let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
        assert_eq!(json.as_array().unwrap().len(), usize::from(found), "{filters:?}");
    }
    let bad = stage.domtool(&["list-subs", "web["]).await;
    assert_eq!(bad.status.code(), Some(1));
    let (_, _, talk) = exit_and_output(&bad);
    assert!(talk.contains("error parsing glob 'web['"), "{talk}");
    let shown = stage.domtool(&["show-sub", "host"]).await;
    let shown = String::from_utf8(shown.stdout).unwrap();
    let told = "host: synced: equals base; the planned image: the image server has no image next";
    assert!(shown.starts_with(told), "{shown}");
    assert!(shown.contains("history, the newest first:"), "{shown}");
    let unknown = stage.domtool(&["show-sub", "nobody"]).await;
    assert_eq!(unknown.status.code(), Some(1));
    let (_, _, talk) = exit_and_output(&unknown);
    assert!(talk.contains("there is no machine nobody"), "{talk}");
    assert!(talk.contains("hint: domtool list-subs"), "{talk}");

    for (path, code, part) in [
        ("/", 200, "href=\"/sub?host=host\""),
        ("/?status=synced", 200, "equals base"),
        ("/?status=%3Cb%3E", 400, "there is no status"),
        ("/?host=h*&tag=tier", 200, "<p>1 machine ("),
        ("/?location=nyc", 200, "<p>0 machines ("),
        ("/?host=%5B", 400, "error parsing glob"),
        ("/sub?host=host", 200, "History"),
        ("/sub?host=nobody", 404, "there is no machine nobody"),
        ("/metrics", 200, "dominator_subs{status=\"synced\"} 1"),
        ("/metrics", 200, "dominator_plan_seconds_count"),
        ("/healthz", 200, "ok"),
    ] {
        let (status, body) = stage.client.get(path).await.unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(status, code, "{path}: {body}");
        assert!(body.contains(part), "{part} in {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn domtool_takes_defaults_from_the_home_directory() {
    let stage = Stage::new("[{\"Hostname\": \"host\"}]").await;
    let home = stage.directory.path().join("home");
    std::fs::create_dir_all(home.join(".config/dominator")).unwrap();
    let file = home.join(".config/dominator/config.toml");
    let text = format!("dominator = \"127.0.0.1:{}\"\ninsecure = true\nsubd = \"x\"\n", stage.port);
    std::fs::write(&file, text).unwrap();
    let run = |address: Option<&str>| {
        let mut command = Command::new(testing::program("domtool"));
        command.arg("status").env("HOME", &home).env_remove("DOMINATOR_ADDR");
        command.envs(address.map(|address| ("DOMINATOR_ADDR", address)));
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(None), (Some(0), String::new()));
    let (code, said) = run(Some("127.0.0.1:1"));
    assert_eq!(code, Some(1));
    assert!(said.contains("cannot connect to 127.0.0.1:1"), "{said}");
    std::fs::write(&file, "dominato = 'x'").unwrap();
    let (code, said) = run(None);
    assert_eq!(code, Some(2));
    assert!(
        said.contains("there is no flag --dominato; known: dominator, filegen-server"),
        "{said}"
    );
}
