//! A resource of the fleet, of three machines: one makes it, and all get its outputs.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use api::dominator::permits::ListPermits;
use localfleet::fleet::client_of;
use localfleet::source_trees::copy_programs;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::provisioning::{TRIGGERS, keep_run};
use crate::tasks::make_tree;

const BINDINGS: &str = "[[provisioner]]\nname = \"sql\"\nkinds = [\"sql\"]\nuser = \"root\"\n";

/// Records what it is asked to do in a file that all machines have, and whether another one is at
/// work.
const PLUGIN: &str = r#"#!/bin/sh
request=$(cat)
[ "$1" = provision ] && [ -n "$request" ] || exit 1
exec 9>>/var/log/lock; flock -n 9 || echo two >> /var/log/overlaps
sleep 1
read name < /var/log/own
case $request in
*'"desired":[]'*) echo "destroyed" >> /var/log/done; echo '{"tasks": [{"success": {}}]}' ;;
*)
    size=${request#*'"size":'}; size=${size%%\}*}
    echo "$size $name" >> /var/log/done
    echo '{"tasks": [{"success": {"outputs": {"db": {"size": '$size', "password": "x"}}}}]}' ;;
esac
"#;

const SHARED: [&str; 3] = ["lock", "overlaps", "done"];

/// Adds an image whose database has this size; without one if it is zero.
fn add_image(scenario: &Scenario, name: &str, size: u32) {
    let tree = scenario.directory.path().join(name);
    make_tree(&tree);
    copy_programs(["/usr/bin/cat"], &tree).unwrap();
    fs::create_dir_all(tree.join("run")).unwrap();
    let mut triggers = "[]";
    if size > 0 {
        let directory = tree.join("etc/dominator/resources.d");
        fs::create_dir_all(&directory).unwrap();
        let text = format!(
            r#"{{"id": "db", "kind": "sql", "per": "fleet", "on_removal": "destroy",
                "sensitive": ["password"], "spec": {{"size": {size}}}}}"#
        );
        fs::write(directory.join("db.json"), text).unwrap();
        fs::write(tree.join("etc/dominator/provisioners.toml"), BINDINGS).unwrap();
        let plugin = tree.join("usr/lib/dominator/dom-provisioner-sql");
        fs::create_dir_all(plugin.parent().unwrap()).unwrap();
        fs::write(&plugin, PLUGIN).unwrap();
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
        triggers = TRIGGERS;
    }
    fs::write(scenario.directory.path().join("triggers"), triggers).unwrap();
    scenario.add(&format!("test/{name}"), &tree);
}

fn lines(scenario: &Scenario, name: &str) -> Vec<String> {
    let text = fs::read_to_string(scenario.directory.path().join(name)).unwrap();
    text.lines().map(|line| line.trim_end_matches('\0').to_owned()).collect()
}

fn outputs(scenario: &Scenario) -> Vec<serde_json::Value> {
    let of = |root: &std::path::Path| {
        let text = fs::read(root.join("run/dominator/resources/db.json"));
        text.map_or(serde_json::Value::Null, |text| serde_json::from_slice(&text).unwrap())
    };
    scenario.fleet.subs.iter().map(|sub| of(&sub.root)).collect()
}

/// Returns the index of the machine that has the permit.
fn holder(scenario: &Scenario) -> usize {
    let fleet = &scenario.fleet;
    let client = client_of(fleet.addresses().dominator, fleet.security());
    let reply = fleet.call::<ListPermits>(&client, &()).unwrap();
    let names: Vec<String> = reply
        .tasks
        .into_iter()
        .filter(|permits| permits.task == "resource db")
        .flat_map(|permits| permits.holders.into_iter().map(|holder| holder.hostname))
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    fleet.subs.iter().position(|sub| sub.hostname == names[0]).unwrap()
}

#[test]
fn one_machine_of_three_makes_a_resource_and_all_have_its_outputs() {
    let mut scenario = Scenario::start_with_tasks_and(3, &[("--permit-time", "40s")]);
    keep_run(&scenario);
    for (name, size) in [("10", 10), ("20", 20), ("30", 30), ("none", 0)] {
        add_image(&scenario, name, size);
    }
    // A plugin is run by what the machine has.
    scenario.converge("test/none");
    for name in SHARED {
        let shared = scenario.directory.path().join(name);
        fs::write(&shared, "").unwrap();
        for sub in &scenario.fleet.subs {
            fs::hard_link(&shared, sub.root.join("var/log").join(name)).unwrap();
        }
    }
    scenario.fleet.require(Some("test/10")).unwrap();
    scenario.wait_until("it waits for another one", |subs| {
        subs.iter().any(|sub| sub.detail.contains("db: one machine makes it for the fleet"))
    });
    scenario.converge("test/10");
    let maker = holder(&scenario);
    let name = scenario.fleet.subs[maker].hostname.clone();
    assert_eq!(lines(&scenario, "done"), [format!("10 {name}")]);
    let of_size = |size: u32| {
        let mut expected = vec![serde_json::json!({"size": size}); 3];
        expected[maker]["password"] = "x".into();
        expected
    };
    assert_eq!(outputs(&scenario), of_size(10));

    // The dominator learns all of it from the machines.
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.converge("test/20");
    assert_eq!(lines(&scenario, "done")[1..], [format!("20 {name}")]);
    assert_eq!(outputs(&scenario), of_size(20));

    // Another one takes its place, when its permit has ended.
    scenario.fleet.subs[maker].daemon.kill().unwrap();
    scenario.fleet.require(Some("test/30")).unwrap();
    eventually("another machine makes it", || match &lines(&scenario, "done")[2..] {
        [line] if line.starts_with("30 ") && !line.ends_with(&name) => Ok(()),
        lines => Err(lines.to_vec()),
    });
    scenario.fleet.subs[maker].daemon.start_again().unwrap();
    scenario.fleet.wait_synced("test/30", CONVERGE_MAX, |_| {}).unwrap();
    let sizes: Vec<serde_json::Value> =
        outputs(&scenario).iter().map(|outputs| outputs["size"].clone()).collect();
    assert_eq!(sizes, [30, 30, 30]);
    assert_eq!(lines(&scenario, "done").len(), 3);

    // It is removed once, when no machine has it any more.
    scenario.converge("test/none");
    eventually("it is destroyed", || match &lines(&scenario, "done")[3..] {
        [line] if line == "destroyed" => Ok(()),
        lines => Err(lines.to_vec()),
    });
    assert_eq!(lines(&scenario, "overlaps"), Vec::<String>::new());
    scenario.fleet.stop().unwrap();
}
