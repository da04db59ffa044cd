//! `subtool provision` with plugins that do what they should.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use expect_test::expect;
use serde_json::{Value, json};

use crate::site::{Ended, LOGS, Site, binding};

/// Without what is the same each time.
fn lists(ended: &Ended) -> Value {
    let mut lists = json!({});
    let all = ended.out.as_object().unwrap();
    for (name, value) in all.iter().filter(|(name, _)| !["machine", "waves"].contains(&&***name)) {
        let is_empty = value.as_array().is_some_and(Vec::is_empty)
            || value.as_object().is_some_and(serde_json::Map::is_empty);
        if !is_empty {
            lists[name] = value.clone();
        }
    }
    lists
}

#[test]
fn resources_are_created_left_alone_changed_and_destroyed() {
    let site = Site::new(
        r#"cat >>"$log"; echo >>"$log"
        echo '{"tasks": [{"success": {"outputs": {}}}]}'"#,
    );
    site.resource("net", &json!({"spec": {"size": 1}}));
    site.resource("db", &json!({"needs": ["net"], "on_removal": "destroy"}));
    let ended = site.run(&[]);
    assert_eq!(ended.out["waves"], json!([["net"], ["db"]]));
    let outputs = json!({"net": {}, "db": {}});
    assert_eq!(lists(&ended), json!({"created": ["db", "net"], "outputs": outputs}));
    assert_eq!(ended.code, Some(0));
    expect![[r#"
        provision net with dom-provisioner-shell
        provision db with dom-provisioner-shell
        as asked for: 2 resources
    "#]]
    .assert_eq(&ended.said);
    let ended = site.run(&[]);
    assert_eq!(lists(&ended), json!({"unchanged": ["db", "net"], "outputs": outputs}));
    assert_eq!(site.log().lines().count(), 2);

    site.resource("net", &json!({"spec": {"size": 2}}));
    site.remove("db");
    let ended = site.run(&[]);
    let expected = json!({"changed": ["net"], "destroyed": ["db"], "outputs": {"net": {}}});
    assert_eq!(lists(&ended), expected);
    let calls: Vec<Value> =
        site.log().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let brief = |item: &Value| json!([item["id"], item["spec"]]);
    let brief = |items: &Value| items.as_array().unwrap().iter().map(brief).collect::<Vec<_>>();
    let seen: Vec<_> =
        calls.iter().map(|call| (brief(&call["desired"]), brief(&call["previous"]))).collect();
    let net = |size: u8| vec![json!(["net", {"size": size}])];
    let db = || vec![json!(["db", {}])];
    let expected = [(net(1), vec![]), (db(), vec![]), (net(2), net(1)), (vec![], db())];
    assert_eq!(seen, expected);

    site.remove("net");
    let ended = site.run(&[]);
    let orphan = json!({"id": "net", "kind": "k", "provisioner": "shell",
        "reason": "its on_removal is keep"});
    assert_eq!(lists(&ended), json!({"orphans": [orphan]}));
}

#[test]
fn a_plan_changes_nothing() {
    let site = Site::new(LOGS);
    site.resource("a", &json!({}));
    site.resource("b", &json!({"needs": ["a"]}));
    let ended = site.run(&["--plan"]);
    assert_eq!((ended.code, &*ended.said), (Some(3), ""));
    let calls = ended.out["calls"].as_array().unwrap();
    let brief = |call: &Value| {
        json!([call["wave"], call["provisioner"], call["user"], call["desired"][0]["id"]])
    };
    let brief: Vec<Value> = calls.iter().map(brief).collect();
    assert_eq!(brief, [json!([1, "shell", "root", "a"]), json!([2, "shell", "root", "b"])]);
    assert_eq!(calls[0]["key"], calls[0]["desired"][0]["key"]);
    assert!(!site.has("state") && !site.has("log"));
    let text = String::from_utf8(site.command(&["--plan"]).output().unwrap().stdout).unwrap();
    expect![[r#"
        wave 1  create   a  with shell as root
        wave 2  create   b  with shell as root
        2 to create, 0 unchanged
    "#]]
    .assert_eq(&text);
    site.run(&[]);
    let ended = site.run(&["--plan"]);
    assert_eq!((ended.code, &ended.out["unchanged"]), (Some(0), &json!(["a", "b"])));
    assert_eq!(ended.out["calls"], json!([]));
}

#[test]
fn plugins_may_say_what_they_would_do() {
    let site = Site::new(
        r#"[ "$1" = plan ] || exit 9
        echo '{"changes": [{"id": "a", "op": "create", "text": "makes 10 GiB"},
            {"id": "b", "op": "none", "error": "cannot shrink"}]}'"#,
    );
    site.resource("a", &json!({}));
    site.resource("b", &json!({}));
    site.resource("c", &json!({"kind": "other"}));
    site.write(
        "provisioners.toml",
        &(binding("shell", "k", "root") + &binding("none", "other", "root")),
    );
    let output = site.command(&["--plan", "--ask-plugins"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let text: Vec<&str> = text.lines().map(|line| line.split(" of ").next().unwrap()).collect();
    expect![[r#"
        wave 1  create   c  with none as root
                NOT KNOWN: dom-provisioner-none is in none
        wave 1  create   a  with shell as root
                makes 10 GiB
        wave 1  create   b  with shell as root
                refused: cannot shrink
        3 to create, 0 unchanged"#]]
    .assert_eq(&text.join("\n"));
    assert!(!site.has("state"));
}

#[test]
fn what_is_wrong_is_printed_and_nothing_runs() {
    let site = Site::new(LOGS);
    site.resource("base", &json!({}));
    site.resource("a", &json!({"needs": ["b"]}));
    site.resource("b", &json!({"needs": ["a", "base"]}));
    site.resource("c", &json!({"needs": ["b"]}));
    site.resource("d", &json!({"kind": "other"}));
    let twice = binding("shell", "k", "root") + &binding("two", "k", "root");
    site.write("provisioners.toml", &twice);
    for words in [&["--plan"][..], &[]] {
        let ended = site.run(words);
        assert_eq!(ended.code, Some(1));
        let keys = ["waves", "unbound", "bound_twice", "cycle"];
        assert_eq!(
            keys.map(|key| ended.out[key].clone()),
            [
                json!([["base", "d"]]),
                json!(["other"]),
                json!(["k"]),
                json!({"members": ["a", "b"], "dependants": ["c"]}),
            ]
        );
        expect![[r#"
            error: provisioners.toml: provisioner: the kind `k` is bound to shell and to two
            error: a.json: needs: these need each other: a, b; and these need them: c
            error: d.json: kind: no provisioner is bound to the kind `other`
        "#]]
        .assert_eq(&ended.said);
    }
    assert!(!site.has("log"));
    site.write("e.json", "{\"id\": \"e\", \"knd\": \"k\"}");
    let ended = site.run(&[]);
    let expected = json!({"at": "e.json: knd",
        "error": "the key `knd` is unknown; is `kind` meant? at line 1 column 17"});
    assert_eq!((ended.code, ended.out), (Some(1), expected));
}

#[test]
fn plugins_run_as_the_bound_user_in_an_environment_of_their_own() {
    let site = Site::new(
        r#"printf '{"tasks": [{"success": {"outputs": {"a": {"who": "%s", "env": "%s"}}}}]}' \
            "$(id -un) $(id -Gn)" "$(env | grep -v '^_=\|^PWD=' | sort | tr '\n' ' ')""#,
    );
    site.write("provisioners.toml", &binding("shell", "k", "nobody"));
    site.resource("a", &json!({}));
    let ended = site.run(&[]);
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let env = format!("HOME=/nonexistent LOGNAME=nobody PATH={path} USER=nobody ");
    assert_eq!(
        ended.out["outputs"]["a"],
        json!({"who": "nobody nogroup", "env": env}),
        "{ended:?}"
    );
}

#[test]
fn secret_outputs_reach_only_what_needs_them() {
    let site = Site::new(
        r#"cat >>"$log"; echo >>"$log"
        case $1 in
            status) echo '{"tasks": [{"failed": {"error": "no"}}]}';;
            *) echo '{"tasks": [{"success": {"outputs":
                {"db": {"port": 1, "password": "hunter2"}}}}]}';;
        esac"#,
    );
    site.resource("db", &json!({"sensitive": ["password"]}));
    let mut printed = String::new();
    let mut run = |words: &[&str]| {
        for format in ["json", "table"] {
            let output = site.command(words).args(["--format", format]).output().unwrap();
            printed.push_str(&String::from_utf8(output.stdout).unwrap());
            printed.push_str(&String::from_utf8(output.stderr).unwrap());
        }
    };
    run(&[]);
    site.resource("app", &json!({"needs": ["db"], "kind": "other"}));
    site.plugin("other", "cat >>\"$log\"\necho '{\"tasks\": [{\"success\": {}}]}'");
    let both = binding("shell", "k", "root") + &binding("other", "other", "root");
    site.write("provisioners.toml", &both);
    site.resource("db", &json!({"sensitive": ["password"], "spec": {"n": 2}}));
    run(&["--plan"]);
    run(&[]);
    run(&[]);
    assert!(printed.contains("\"port\": 1") && !printed.contains("hunter2"), "{printed}");
    let inputs = site.log().contains(r#""inputs":{"db":{"password":"hunter2","port":1}}"#);
    assert!(inputs, "{}", site.log());
    for (name, mode) in [("state", 0o700), ("state/state.json", 0o600)] {
        let metadata = fs::metadata(site.path(name)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "{name}");
    }
}

#[test]
fn a_directory_may_be_as_an_image_has_it() {
    let site = Site::new(LOGS);
    fs::create_dir(site.resources().join("resources.d")).unwrap();
    site.write("resources.d/a.json", r#"{"id": "a", "kind": "k"}"#);
    site.write("ignored.txt", "x");
    assert_eq!(site.run(&[]).out["created"], json!(["a"]));
}

#[test]
fn what_others_can_write_is_not_run() {
    let site = Site::new(LOGS);
    site.resource("a", &json!({}));
    let said = |name: &str, mode: u32| {
        let path = site.resources().join(name);
        let former = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let ended = site.run(&[]);
        fs::set_permissions(&path, former).unwrap();
        assert_eq!(ended.code, Some(1));
        ended.out.to_string().replace(&site.resources().display().to_string(), "DIR")
    };
    let wide = "can be written by others: chmod go-w it";
    assert_eq!(
        said("", 0o777),
        format!(r#"{{"at":"DIR/","error":"{wide}"}}"#).replace("DIR/", "DIR")
    );
    assert_eq!(said("a.json", 0o622), format!(r#"{{"at":"DIR/a.json","error":"{wide}"}}"#));
    let plugin = "dom-provisioner-shell";
    let expected = format!(r#"{{"at":"provisioner shell","error":"DIR/{plugin} {wide}"}}"#);
    assert_eq!(said(plugin, 0o775), expected);
    // A plan reads only.
    fs::set_permissions(site.resources(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(site.run(&["--plan"]).code, Some(3));
    fs::set_permissions(site.resources(), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(!site.has("log"));
    std::os::unix::fs::chown(site.resources().join("a.json"), Some(1), None).unwrap();
    let ended = site.run(&[]);
    assert_eq!(ended.out["error"], "belongs to user 1: only root and who runs this may own it");
}

#[test]
fn a_state_that_cannot_be_read_is_named() {
    let site = Site::new(LOGS);
    site.resource("a", &json!({}));
    site.run(&[]);
    let path = site.path("state/state.json");
    let good = fs::read(&path).unwrap();
    let mut newer: Value = serde_json::from_slice(&good).unwrap();
    newer["version"] = json!(2);
    let tables = [
        (good[..good.len() - 9].to_vec(), "file: EOF while parsing a string"),
        (newer.to_string().into_bytes(), "version: is 2, and this release reads 1"),
        (vec![0xff; 9], "file: expected value"),
        (Vec::new(), "file: EOF while parsing"),
    ];
    for (bytes, expected) in tables {
        fs::write(&path, &bytes).unwrap();
        for words in [&["--plan"][..], &[]] {
            let ended = site.run(words);
            let (at, error) =
                (ended.out["at"].as_str().unwrap(), ended.out["error"].as_str().unwrap());
            let said = format!("{at}: {error}");
            let said = said.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&said);
            assert!(said.starts_with(expected), "{said}");
            assert_eq!(ended.code, Some(1));
        }
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    assert_eq!(site.log().lines().count(), 1);
}
