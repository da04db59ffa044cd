//! `docs/PROVISIONING.md` shows what is said, and its template works.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use expect_test::expect_file;
use serde_json::json;
use testing::document::{blocks, with_outputs};
use testing::program;

use crate::{ask, directory, install, made};

fn document() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/PROVISIONING.md")
}

#[test]
fn the_document_shows_what_is_said() {
    let directory = directory();
    let text = fs::read_to_string(document()).unwrap();
    let web = directory.path().join("srv-web");
    fs::create_dir(&web).unwrap();
    let of_document = |text: &str| text.replace(&web.display().to_string(), "/srv/web");
    let of_test = |text: &str| text.replace("/srv/web", &web.display().to_string());
    let resources = directory.path().join("resources");
    fs::create_dir(&resources).unwrap();
    let json = blocks(&text, "json");
    fs::write(resources.join("page.json"), of_test(json[0])).unwrap();
    fs::write(resources.join("notice.json"), json[1]).unwrap();
    fs::write(resources.join("provisioners.toml"), blocks(&text, "toml")[0]).unwrap();
    // Each program is beside the others.
    let subtool = program("subtool");
    let programs = Path::new(&subtool).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let said = with_outputs(&text, |command| {
        if command.starts_with("domtool ") {
            return None;
        }
        let output = Command::new("bash")
            .args(["-c", command])
            .current_dir(directory.path())
            .env("PATH", &path)
            .env("HOME", directory.path())
            .output()
            .unwrap();
        let out = String::from_utf8(output.stdout).unwrap();
        Some(of_document(&out) + &String::from_utf8(output.stderr).unwrap())
    });
    expect_file![document()].assert_eq(&said);
}

#[test]
fn the_template_works() {
    let directory = directory();
    let text = fs::read_to_string(document()).unwrap();
    let template = blocks(&text, "bash")[0];
    let lines = template.lines().count();
    assert!((45..=60).contains(&lines), "{lines}");
    let plugin = directory.path().join("dom-provisioner-directory");
    install(&plugin, template);
    let at = |name: &str| directory.path().join(name);
    let spec = |name: &str| json!({"path": at(name), "mode": "0750"});
    fs::write(at("file"), "").unwrap();
    let both = [("a", spec("one/a")), ("b", spec("file"))];
    let plan = ask(&plugin, "plan", &both, &[]);
    let change = |id: &str, name: &str| json!({"id": id, "op": "create", "text": at(name)});
    assert_eq!(plan, json!({"changes": [change("a", "one/a"), change("b", "file")]}));
    let answer = ask(&plugin, "provision", &both, &[]);
    let error = format!("mkdir: cannot create directory '{}': File exists", at("file").display());
    let outputs = json!({"path": at("one/a")});
    let error = answer["tasks"][1]["failed"]["error"]
        .as_str()
        .unwrap()
        .replace(['\u{2018}', '\u{2019}'], "'")
        .replace(&error, "as expected");
    assert_eq!((&answer["tasks"][0], &*error), (&made("a", &outputs), "as expected"));
    let mode = fs::metadata(at("one/a")).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode, 0o750);
    let plan = ask(&plugin, "plan", &[("a", spec("one/a"))], &[]);
    assert_eq!(plan["changes"][0]["op"], "none");
    let delete = json!({"id": "a", "op": "delete", "text": at("one/a")});
    let plan = ask(&plugin, "plan", &[], &[("a", spec("one/a"))]);
    assert_eq!(plan, json!({"changes": [delete]}));
    let gone = || ask(&plugin, "provision", &[], &[("a", spec("one/a"))]);
    let done = json!({"tasks": [made("a", &outputs)]});
    assert_eq!((gone(), at("one/a").exists(), gone()), (done.clone(), false, done));
    assert_eq!(ask(&plugin, "status", &[], &[]), json!({"tasks": [{"unknown": {}}]}));
}
