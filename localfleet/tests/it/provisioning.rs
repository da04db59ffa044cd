//! Resources from image to plugin: a machine is provisioned before it gets its image.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use api::dominator::Status;
use model::mdb::Machine;
use testing::eventually;

use crate::computed::add;
use crate::converges::{CONVERGE_MAX, Scenario};
use crate::tasks::{lines, make_tree};
use localfleet::source_trees::copy_programs;

pub const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/dominator/resources\\.d/.*"],
    "Service": "resources", "Kind": "provision"}]"#;

const BINDINGS: &str = "[[provisioner]]\nname = \"mark\"\nkinds = [\"marked\"]\nuser = \"root\"\n";

/// Makes a directory for each resource, and records that; waits while it is told to.
const PLUGIN: &str = r#"#!/bin/sh
request=$(cat)
[ "$1" = provision ] && [ -n "$request" ] || exit 1
case ${request%%'"previous"'*} in *'"fail":true'*) echo 'the quota is used up' >&2; exit 1 ;; esac
for id in db user; do
    case $request in
    *'"desired":[{"id":"'$id'"'*)
        while [ -e /srv/data/wait ]; do sleep 0.1; done
        mkdir "/srv/data/$id" 2>/dev/null && echo "created $id" >> /var/log/plugin
        echo '{"tasks": [{"success": {"outputs": {"'$id'": {"path": "/srv/data/'$id'"}}}}]}'
        exit ;;
    *'"desired":[],"previous":[{"id":"'$id'"'*)
        rmdir "/srv/data/$id" && echo "destroyed $id" >> /var/log/plugin
        echo '{"tasks": [{"success": {}}]}'
        exit ;;
    esac
done
echo "unexpected: $request" >&2
exit 1
"#;

const DB: &str = r#"{"id": "db", "kind": "marked", "spec": {}}"#;
const USER: &str = r#"{"id": "user", "kind": "marked", "needs": ["db"], "spec": {},
    "on_removal": "destroy"}"#;

/// Has images keep /run, where outputs are.
pub fn keep_run(scenario: &Scenario) {
    let filter = scenario.directory.path().join("filter");
    fs::write(&filter, fs::read_to_string(&filter).unwrap() + "/run/.*\n").unwrap();
}

/// Adds an image with these resources, and a file that tells its version.
fn make_image(scenario: &Scenario, version: &str, resources: &[(&str, &str)]) {
    let tree = make_tree_with(scenario, version, resources);
    scenario.add(&format!("test/{version}"), &tree);
}

/// Makes the tree of such an image, and its triggers.
fn make_tree_with(scenario: &Scenario, version: &str, resources: &[(&str, &str)]) -> PathBuf {
    let tree = scenario.directory.path().join(version);
    make_tree(&tree);
    copy_programs(["/usr/bin/cat", "/usr/bin/mkdir", "/usr/bin/rmdir"], &tree).unwrap();
    fs::create_dir_all(tree.join("run")).unwrap();
    fs::write(tree.join("etc/version"), version).unwrap();
    if !resources.is_empty() {
        let directory = tree.join("etc/dominator/resources.d");
        fs::create_dir_all(&directory).unwrap();
        for (id, text) in resources {
            fs::write(directory.join(format!("{id}.json")), text).unwrap();
        }
        fs::write(tree.join("etc/dominator/provisioners.toml"), BINDINGS).unwrap();
        let plugin = tree.join("usr/lib/dominator/dom-provisioner-mark");
        fs::create_dir_all(plugin.parent().unwrap()).unwrap();
        fs::write(&plugin, PLUGIN).unwrap();
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let triggers = if resources.is_empty() { "[]" } else { TRIGGERS };
    fs::write(scenario.directory.path().join("triggers"), triggers).unwrap();
    tree
}

fn version(root: &Path) -> String {
    fs::read_to_string(root.join("etc/version")).unwrap_or_default()
}

/// What `domtool resource list` says: the id and the state of each resource.
fn listed(scenario: &Scenario) -> Vec<(String, String)> {
    let output = scenario.fleet.domtool(&["resource", "list", "--format", "json"]).unwrap();
    let (out, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let machines: serde_json::Value = serde_json::from_str(&out).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let resources = machines
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|machine| machine["report"]["resources"].as_array().into_iter().flatten());
    let state = |resource: &serde_json::Value| match resource["is_orphan"].as_bool() {
        Some(true) => "orphan".to_owned(),
        _ => text(&resource["state"]),
    };
    resources.map(|resource| (text(&resource["id"]), state(resource))).collect()
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(id, state)| ((*id).to_owned(), (*state).to_owned())).collect()
}

#[test]
fn a_bundle_brings_resources_for_the_provisioners_of_an_image() {
    let mut scenario = Scenario::start_with_tasks(1);
    keep_run(&scenario);
    make_image(&scenario, "plain", &[]);
    make_image(&scenario, "base", &[("db", DB)]);
    let tree = scenario.directory.path().join("bundle");
    fs::create_dir_all(tree.join("etc/dominator/resources.d")).unwrap();
    fs::write(tree.join("etc/dominator/resources.d/user.json"), USER).unwrap();
    let triggers = scenario.directory.path().join("triggers").into_os_string();
    let words = ["--format", "json", "add", "bundles/user/1"].map(Into::into);
    let files = [tree.into_os_string(), "-".into(), triggers];
    scenario.imagetool(&[&words[..], &files[..]].concat());

    scenario.converge("test/plain");
    scenario.converge("test/base");
    scenario.converge("test/base + bundles/user/1");
    let made = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    assert_eq!(lines(&scenario.fleet.subs[0], "plugin"), made(&["created db", "created user"]));
    assert_eq!(listed(&scenario), pairs(&[("db", "made"), ("user", "made")]));
    scenario.converge("test/base");
    let all = made(&["created db", "created user", "destroyed user"]);
    eventually("the resource of the bundle goes", || {
        let now = lines(&scenario.fleet.subs[0], "plugin");
        if now == all { Ok(()) } else { Err(now) }
    });
}

#[test]
fn a_machine_gets_its_resources_before_its_image_and_loses_them_after() {
    let mut scenario = Scenario::start_with_tasks(1);
    keep_run(&scenario);
    make_image(&scenario, "plain", &[]);
    make_image(&scenario, "bad", &[("db", &DB.replace("{}", r#"{"fail": true}"#))]);
    make_image(&scenario, "full", &[("db", DB), ("user", USER)]);
    scenario.converge("test/plain");
    let root = scenario.fleet.subs[0].root.clone();

    // A failure says why, and nothing is activated.
    scenario.fleet.require(Some("test/bad")).unwrap();
    scenario.wait_until("the plugin fails", |subs| {
        subs[0].status == Status::ProvisionFailed && subs[0].detail.contains("the quota is used up")
    });
    assert_eq!(version(&root), "plain");

    // A newer image replaces it. Its first wave takes long.
    fs::write(root.join("srv/data/wait"), "").unwrap();
    scenario.fleet.require(Some("test/full")).unwrap();
    let is_in_first_wave = |subs: &[api::dominator::SubSummary]| {
        subs[0].status == Status::Provisioning && subs[0].detail.contains("wave 1 of 2")
    };
    scenario.wait_until("plugins work", is_in_first_wave);
    fs::write(root.join("etc/drift"), "").unwrap();
    eventually("the drift is repaired", || !root.join("etc/drift").exists());
    let sub = &mut scenario.fleet.subs[0];
    sub.daemon.kill().unwrap();
    sub.daemon.start_again().unwrap();
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.wait_until("plugins work again", is_in_first_wave);
    assert_eq!(version(&root), "plain");
    fs::remove_file(root.join("srv/data/wait")).unwrap();
    scenario.fleet.wait_synced("test/full", CONVERGE_MAX, |_| {}).unwrap();
    assert_eq!(version(&root), "full");
    assert_eq!(lines(&scenario.fleet.subs[0], "plugin"), ["created db", "created user"]);
    assert_eq!(listed(&scenario), pairs(&[("db", "made"), ("user", "made")]));
    let outputs = root.join("run/dominator/resources/user.json");
    let outputs: serde_json::Value = serde_json::from_slice(&fs::read(outputs).unwrap()).unwrap();
    assert_eq!(outputs["path"], "/srv/data/user");

    // What says so is destroyed when no image has it any more, and what does not is an orphan.
    scenario.converge("test/plain");
    eventually("what nothing needs is destroyed", || match listed(&scenario) {
        left if left == pairs(&[("db", "orphan")]) => Ok(()),
        left => Err(left),
    });
    let done = ["created db", "created user", "destroyed user"];
    assert_eq!(lines(&scenario.fleet.subs[0], "plugin"), done);

    // The dominator remembers them when the machine has left the machine database.
    let other = Machine { hostname: "other".to_owned(), ..Machine::default() };
    scenario.fleet.replace_mdb(&[other]).unwrap();
    let departing = |scenario: &Scenario, words: &[&str]| {
        let words: Vec<&str> =
            ["--format", "json", "departing"].iter().chain(words).copied().collect();
        let output = scenario.fleet.domtool(&words).unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    eventually("it has told them", || match departing(&scenario, &["list"]) {
        listed if listed[0]["resources"] == 1 => Ok(()),
        listed => Err(listed),
    });
    scenario.fleet.subs[0].daemon.kill().unwrap();
    assert_eq!(listed(&scenario), pairs(&[("db", "orphan")]));
    departing(&scenario, &["forget", "*", "--why", "it is deleted"]);
    assert_eq!(listed(&scenario), pairs(&[]));
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.converge("test/plain");

    // Until an operator has it destroyed.
    let order = |id: &str| {
        let words = ["resource", "destroy", "sub-1", id, "--why", "not needed any more"];
        let output = scenario.fleet.domtool(&words).unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = order("user");
    assert!(code == Some(1) && said.contains("the machine has no resource `user`"), "{said}");
    let (code, said) = order("db");
    assert_eq!(code, Some(0), "{said}");
    eventually("the orphan is destroyed", || match listed(&scenario) {
        left if left.is_empty() => Ok(()),
        left => Err(left),
    });
    assert_eq!(lines(&scenario.fleet.subs[0], "plugin").last().unwrap(), "destroyed db");
    let orders = scenario.fleet.domtool(&["audit", "--format", "json"]).unwrap();
    let orders = String::from_utf8_lossy(&orders.stdout).into_owned();
    let is_known = ["resource-destroy", "resource db", "not needed any more"];
    assert!(is_known.iter().all(|words| orders.contains(words)), "{orders}");
    scenario.fleet.stop().unwrap();
}

#[test]
fn a_template_sees_the_outputs_of_resources_that_the_machine_has() {
    let mut scenario = Scenario::start_with_tasks(1);
    let directory = scenario.directory.path().to_owned();
    keep_run(&scenario);
    let config = directory.join("filegen.toml");
    let generator = "[[generator]]\npath = \"/etc/app.conf\"\nkind = \"template\"\n\
                     file = \"app.conf.j2\"\n";
    fs::write(&config, generator).unwrap();
    fs::write(directory.join("app.conf.j2"), "data = {{ Resources.db.path }}\n").unwrap();
    let mut server = scenario.fleet.start_filegen(&config).unwrap();
    let list = directory.join("computed");
    let source = scenario.fleet.addresses().filegen;
    fs::write(&list, format!("/etc/app.conf {source}\n")).unwrap();
    make_image(&scenario, "plain", &[]);

    // An image that brings both could never be had.
    let tree = make_tree_with(&scenario, "app", &[("db", DB)]);
    fs::write(tree.join("etc/app.conf"), "a placeholder").unwrap();
    let file = |name: &str| directory.join(name).into_os_string();
    let words = ["add".into(), "--computed".into(), file("computed"), "test/app".into()];
    let files = [tree.clone().into_os_string(), file("filter"), file("triggers")];
    let words = [&words[..], &files[..], &["--required-paths=".into()]].concat();
    let refused = scenario.fleet.imagetool(&words).unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let why = "/etc/app.conf is made of the outputs of the resource `db`, which only this image \
               brings";
    assert!(refused.status.code() == Some(1) && said.contains(why), "{said}");

    scenario.converge("test/plain");
    make_image(&scenario, "full", &[("db", DB)]);
    scenario.converge("test/full");
    add(&scenario, "test/app", &tree, &list);
    scenario.converge("test/app");
    let root = scenario.fleet.subs[0].root.clone();
    let content = fs::read_to_string(root.join("etc/app.conf")).unwrap();
    assert_eq!(content, "data = /srv/data/db\n");

    // What is known of them outlasts the dominator, and the subd.
    scenario.fleet.subs[0].daemon.kill().unwrap();
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    fs::write(directory.join("app.conf.j2"), "# {{ Hostname }}: {{ Resources.db.path }}\n")
        .unwrap();
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    eventually("it has the new content", || {
        let content = fs::read_to_string(root.join("etc/app.conf")).unwrap();
        if content == "# sub-1: /srv/data/db\n" { Ok(()) } else { Err(content) }
    });
    server.kill().unwrap();
    scenario.fleet.stop().unwrap();
}

#[test]
fn drift_of_a_resource_is_an_alarm_until_it_is_over() {
    let mut scenario = Scenario::start_with_tasks_and_checks(1);
    let directory = scenario.directory.path().to_owned();
    keep_run(&scenario);
    let tree = directory.join("tree");
    make_tree(&tree);
    fs::create_dir_all(tree.join("run")).unwrap();
    // It is built with the workspace.
    let program =
        Path::new(env!("CARGO_BIN_EXE_localfleet")).with_file_name("dom-provisioner-file");
    copy_programs([program.to_str().unwrap()], &tree).unwrap();
    fs::rename(tree.join(program.strip_prefix("/").unwrap()), tree.join("usr/bin/files")).unwrap();
    fs::write(directory.join("triggers"), "[]").unwrap();
    scenario.add("test/plain", &tree);
    scenario.converge("test/plain");

    // What is linked dynamically is no plugin of an image, and so is called by one.
    let resources = tree.join("etc/dominator/resources.d");
    fs::create_dir_all(&resources).unwrap();
    let plugin = tree.join("usr/lib/dominator/dom-provisioner-file");
    fs::create_dir_all(plugin.parent().unwrap()).unwrap();
    fs::write(&plugin, "#!/bin/sh\nexec /usr/bin/files \"$1\"\n").unwrap();
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let page = |id: &str, more: &str| {
        let spec = format!(r#"{{"path": "/srv/data/{id}", "content": "x"}}"#);
        let text = format!(r#"{{"id": "{id}", "kind": "file", "spec": {spec}{more}}}"#);
        fs::write(resources.join(format!("{id}.json")), text).unwrap();
    };
    page("page", "");
    page("mended", r#", "on_drift": "repair""#);
    let bindings = BINDINGS.replace("mark\"", "file\"").replace("marked", "file");
    fs::write(tree.join("etc/dominator/provisioners.toml"), bindings).unwrap();
    fs::write(directory.join("triggers"), TRIGGERS).unwrap();
    scenario.add("test/file", &tree);
    scenario.converge("test/file");
    let root = scenario.fleet.subs[0].root.clone();
    let data = |id: &str| fs::read_to_string(root.join("srv/data").join(id)).unwrap_or_default();
    assert_eq!((data("page"), data("mended")), ("x".to_owned(), "x".to_owned()));

    fs::write(root.join("srv/data/page"), "by hand").unwrap();
    fs::write(root.join("srv/data/mended"), "by hand").unwrap();
    let is_so = |wanted: &[(&str, &str)]| match listed(&scenario) {
        found if found == pairs(wanted) => Ok(()),
        found => Err(found),
    };
    eventually("one drifts and one is repaired", || {
        is_so(&[("mended", "made"), ("page", "drifted")])
    });
    assert_eq!((data("page"), data("mended")), ("by hand".to_owned(), "x".to_owned()));
    let told = |what: &'static str| {
        eventually("the event is there", || {
            let output = scenario.fleet.domtool(&["events", "--format", "json"]).unwrap();
            let events = String::from_utf8_lossy(&output.stdout).into_owned();
            if events.contains(what) { Ok(()) } else { Err(events) }
        });
    };
    told("page: write /srv/data/page");
    told("resource-drift");
    // By hand.
    fs::write(root.join("srv/data/page"), "x").unwrap();
    eventually("all is well", || is_so(&[("mended", "made"), ("page", "made")]));
    told("resource-drift-over");

    // Plugins say what they would do for an image that is not there yet.
    fs::remove_file(resources.join("mended.json")).unwrap();
    let text = fs::read_to_string(resources.join("page.json")).unwrap();
    fs::write(resources.join("page.json"), text.replace("\"x\"", "\"y\"")).unwrap();
    scenario.add("test/next", &tree);
    let host = scenario.fleet.subs[0].hostname.clone();
    let words = ["plan", &host, "--image", "test/next", "--resources"];
    let output = scenario.fleet.domtool(&words).unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let plans: Vec<&str> = said.lines().filter(|line| line.starts_with("resources of")).collect();
    let expected = [
        "resources of test/next: leave as an orphan mended (file) on 1 machine: its on_removal is \
         keep",
        "resources of test/next: change page (file) on 1 machine: write /srv/data/page",
    ];
    assert_eq!(plans, expected, "{output:?}");
    assert_eq!(data("page"), "x");
    scenario.fleet.stop().unwrap();
}

#[test]
fn subtool_has_one_machine_provision() {
    let mut scenario = Scenario::start_with_tasks(1);
    keep_run(&scenario);
    make_image(&scenario, "plain", &[]);
    make_image(&scenario, "bad", &[("db", &DB.replace("{}", r#"{"fail": true}"#))]);
    make_image(&scenario, "full", &[("db", DB), ("user", USER)]);
    let subtool = |words: &[&str]| {
        let output = scenario.fleet.subtool(scenario.fleet.subs[0].address, words).unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    // Plugins that are scripts need what runs them before their image is there.
    let (code, _, said) = subtool(&["push-image", "test/bad"]);
    assert!(
        code == Some(1) && said.contains("what runs it, or /proc, is not in the root"),
        "{said}"
    );
    let (code, _, said) = subtool(&["push-image", "test/plain"]);
    assert_eq!(code, Some(0), "{said}");
    // Also again, what has failed fails with the words of the plugin.
    for _ in 0..2 {
        let (code, _, said) = subtool(&["push-image", "test/bad"]);
        assert!(
            code == Some(1) && said.contains("db: mark: exit status: 1: the quota is"),
            "{said}"
        );
    }
    let (code, _, said) = subtool(&["push-image", "test/full"]);
    assert_eq!(code, Some(0), "{said}");
    let root = &scenario.fleet.subs[0].root;
    assert_eq!(version(root), "full");
    assert_eq!(lines(&scenario.fleet.subs[0], "plugin"), ["created db", "created user"]);
    let (_, listed, said) = subtool(&["resource", "list"]);
    let text = "test/full: all are as asked for\n\n\
        ID    KIND    STATE  BY    WHY\n\
        db    marked  made   mark\n\
        user  marked  made   mark\n";
    assert_eq!(listed, text, "{said}");
    scenario.fleet.stop().unwrap();
}
