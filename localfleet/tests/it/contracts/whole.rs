//! One fleet that does all kinds of things, and what its tools and daemons say of that: the shape
//! of JSON, metrics and exit codes.

use std::collections::{BTreeMap, BTreeSet};

use expect_test::{ExpectFile, expect_file};
use localfleet::source_trees::copy;
use serde_json::{Value, json};

use super::exits;
use super::shape::{Shape, metric_families};
use super::site::Site;
use crate::converges::CONVERGE_MAX;

/// What has been seen of each command.
#[derive(Default)]
struct Seen(BTreeMap<String, Shape>);

impl Seen {
    fn add(&mut self, command: &str, value: &Value, maps: &[&str]) {
        self.0.entry(command.to_owned()).or_default().add(value, maps);
    }

    /// Runs a command, which must end with `code`; its name is its first `words` words.
    #[track_caller]
    fn run(&mut self, site: &Site, words: usize, line: &str, code: i32) -> Value {
        self.run_with(site, words, line, code, &[])
    }

    #[track_caller]
    fn run_with(
        &mut self,
        site: &Site,
        words: usize,
        line: &str,
        code: i32,
        maps: &[&str],
    ) -> Value {
        let ended = site.run(&format!("{line} --format json"));
        assert_eq!(ended.code, code, "{line}: {}{}", ended.out, ended.said);
        let name: Vec<&str> = line.split(' ').take(words).collect();
        let name = name.join(" ");
        match ended.json() {
            Some(value) => {
                self.add(&name, &value, maps);
                value
            }
            None => {
                let text = if ended.out.is_empty() { "nothing" } else { "text" };
                self.0.entry(format!("{name} prints {text}")).or_default();
                Value::Null
            }
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (command, shape) in &self.0 {
            text.push_str(&format!("{command}\n"));
            text.extend(shape.lines().map(|line| format!("  {line}\n")));
        }
        text
    }
}

/// Adds images in all ways, and looks at them.
fn images(site: &Site, seen: &mut Seen) {
    for (tree, version) in [("one", 1), ("two", 2)] {
        site.tree(tree, version);
    }
    for (name, content) in
        [("notes", "new\n"), ("build.log", "made\n"), ("layer/etc/motd", "hello\n")]
    {
        site.write(name, content);
    }
    let status = "Package: tool\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n\n";
    site.write("one/var/lib/dpkg/status", status);
    site.write("two/var/lib/dpkg/status", &status.replace("Version: 1", "Version: 2"));
    site.write("few/etc/few", "few\n");
    site.write("bad/etc/bad", "bad\n");
    site.write("health", r#"{"command": ["/bin/true"], "within_seconds": 60, "undo": true}"#);
    site.write("ill", r#"{"command": ["/bin/false"], "within_seconds": 1, "undo": true}"#);
    site.write("computed", "/etc/few files.example\n");
    site.make_key("key");
    let key = std::fs::read_to_string(site.at("key.pub")).unwrap();
    site.write("trusted", &key);

    seen.run(site, 2, "imagetool mkdir web --owner-group web --owner-user ann", 0);
    seen.run(site, 2, "imagetool mkdir web/old", 0);
    seen.run(site, 2, "imagetool chown web --owner-group team", 0);
    seen.run(site, 3, "imagetool readers web --add host-1", 0);
    seen.run(site, 2, "imagetool readers", 0);
    seen.run(site, 2, "imagetool rmdir web/old", 0);
    let add = "imagetool add web/1 one filter triggers --required-paths= --tag os=debian \
               --release-notes notes --build-log build.log --health-check health --sign key";
    seen.run(site, 2, add, 0);
    seen.run(site, 2, "imagetool add web/2 two filter triggers --required-paths=", 0);
    seen.run(site, 2, "imagetool add few/1 few filter - --required-paths=", 0);
    seen.run(site, 2, "imagetool add bad/1 bad - - --health-check ill", 0);
    seen.run(site, 2, "imagetool add gone/1 few - - --expires-in 7d", 0);
    seen.run(site, 2, "imagetool add-overlay web/3 web/1 layer --required-paths=", 0);
    seen.run(site, 2, "imagetool add computed/1 few - - --computed computed", 0);
    seen.run(site, 2, "imagetool show-computed-files computed/1", 0);
    seen.run(site, 2, "imagetool show-file computed/1 /etc/few", 0);
    seen.run(site, 2, "imagetool diff few/1 computed/1", 3);
    let copied = seen.run(site, 2, "imagetool copy web/1 new/1", 0);
    assert_ne!(copied, Value::Null);
    seen.run(site, 2, "imagetool sign web/2 --key key", 0);
    seen.run(site, 2, "imagetool verify-signatures web/2 --trusted-keys trusted", 0);
    seen.run(site, 2, "imagetool verify-signatures web/3 --trusted-keys trusted", 3);
    seen.run_with(site, 2, "imagetool tag web/2 tested=yes", 0, &[""]);
    seen.run(site, 2, "imagetool find-latest web", 0);
    seen.run(site, 2, "imagetool list", 0);
    seen.run(site, 2, "imagetool show web/1", 0);
    seen.run(site, 2, "imagetool show web/2", 0);
    seen.run(site, 2, "imagetool show gone/1", 0);
    seen.run(site, 3, "imagetool show --packages web/1", 0);
    seen.run(site, 3, "imagetool show --tree web/1", 0);
    seen.run(site, 3, "imagetool show --build-log web/1", 0);
    for path in ["/etc/passwd", "/etc", "/bin", "/dev/null", "/dev/pipe"] {
        seen.run(site, 2, &format!("imagetool show-file web/1 {path}"), 0);
    }
    seen.run(site, 2, "imagetool get-file web/1 /etc/passwd", 0);
    seen.run(site, 2, "imagetool get web/1 got", 0);
    seen.run(site, 2, "imagetool tar web/1 -o web.tar", 0);
    seen.run(site, 2, "imagetool check web/1 none", 3);
    seen.run(site, 2, "imagetool diff web/1 web/2", 3);
    seen.run(site, 2, "imagetool diff web/1 few/1", 3);
    seen.run(site, 2, "imagetool verify web/1", 0);
    seen.run(site, 2, "imagetool estimate web/2 --against web/1", 0);
    seen.run(site, 2, "imagetool estimate file:one --against web/2", 0);
    seen.run(site, 2, "imagetool tree", 0);
    seen.run(site, 2, "imagetool change-expiry gone/1 --never", 0);
    seen.run(site, 2, "imagetool delete --yes gone/1", 0);
    seen.run(site, 2, "imagetool gc", 0);
    seen.run(site, 2, "imagetool accept-clock", 0);
    seen.run(site, 2, "imagetool merge-filters filter filter", 0);
    seen.run(site, 2, "imagetool merge-triggers triggers triggers", 0);
    seen.run(site, 2, "imagetool match-triggers triggers /etc/passwd /usr", 0);
    seen.run(site, 2, "imagetool scan-filter filter one", 0);
    let is_known = |value: &Value| !value["replicas"].as_array().unwrap().is_empty();
    site.wait("imagetool replication", is_known);
    seen.run(site, 2, "imagetool replication", 0);
    let replica = format!("imagetool replication --imageserver {}", site.replica);
    site.wait(&replica, |value| value["master"]["is_level"] == true);
    seen.run(site, 2, &replica, 0);
}

/// Looks at a machine by hand.
fn machine(site: &Site, seen: &mut Seen) {
    seen.run(site, 2, "subtool push-image web/1", 0);
    seen.run(site, 2, "subtool wait-for-image web/1", 0);
    seen.run(site, 2, "subtool poll", 0);
    seen.run(site, 2, "subtool scan --content --media", 0);
    seen.run(site, 2, "subtool show", 0);
    seen.run(site, 2, "subtool set-config scan-percent=50", 0);
    seen.run(site, 2, "subtool get-config", 0);
    seen.run(site, 2, "subtool set-config --reset", 0);
    seen.run(site, 2, "subtool pause --for 2h --reason works", 0);
    seen.run(site, 2, "subtool poll", 0);
    seen.run(site, 2, "subtool resume", 0);
    seen.run(site, 2, "subtool show-update web/1", 0);
    seen.run(site, 2, "subtool show-update web/2", 3);
    seen.run(site, 2, "subtool get-file /etc/passwd", 0);
    seen.run(site, 2, "subtool check-health", 0);
    seen.run(site, 2, "subtool cleanup", 0);
    let host = site.fleet.subs[0].address;
    let add = format!("imagetool add-from-sub web/4 {host} filter triggers --required-paths=");
    seen.run(site, 2, &add, 0);
}

/// Asks about a task at moments that have all kinds of answers.
fn schedules(site: &Site, seen: &mut Seen) {
    let events =
        r#"[{"action": "start", "cron": "0 9 * * *"}, {"action": "stop", "cron": "0 17 * * *"}]"#;
    let hours = r#""schedule": {"zone": "UTC", "start_deadline_s": 60, "events": "#;
    let task = format!(r#"{{"name": "job", "argv": ["/bin/job"], {hours}{events}}}}}"#);
    site.write("job.json", &task);
    let run = |day: u8, held: bool| {
        let due = format!("2026-11-{day}T09:00:00Z");
        json!({"name": format!("job-{day}"), "run_id": 0, "scheduled_at": due, "held": held})
    };
    site.write("former.json", &json!({"runs": [run(25, false)]}).to_string());
    site.write("held.json", &json!({"runs": [run(26, true)]}).to_string());
    let at = "domtool task schedule job.json --at 2026-11-26T09:00";
    seen.run(site, 3, &format!("{at}:30Z"), 0);
    seen.run(site, 3, &format!("{at}:30Z --runs former.json"), 0);
    seen.run(site, 3, &format!("{at}:30Z --runs held.json"), 0);
    seen.run(site, 3, "domtool task schedule job.json --at 2026-11-26T12:00:00Z", 0);
    seen.run(site, 2, "domtool cron @daily", 0);
    seen.run(site, 2, "domtool cron @yearly", 1);
}

/// Provisions by hand, with a plugin that makes one kind and fails with another.
fn resources(site: &Site, seen: &mut Seen) {
    let bindings = "[[provisioner]]\nname = 'half'\nkinds = ['good', 'bad']\nuser = 'root'\n";
    site.write("resources/provisioners.toml", bindings);
    let plugin = r#"#!/bin/sh
        case $1 in
            plan) echo '{"changes": [{"id": "db", "op": "create", "error": "no"}]}';;
            *) if grep -q '"kind":"bad"'; then exit 1; fi
                echo '{"tasks": [{"success": {"outputs": {"db": {"port": 1}}}}]}';;
        esac
    "#;
    let plugin_name = "resources/dom-provisioner-half";
    site.write(plugin_name, plugin);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(site.at(plugin_name), mode).unwrap();
    site.write("resources/db.json", r#"{"id": "db", "kind": "good"}"#);
    let provision = "subtool provision --local resources";
    seen.run(site, 2, &format!("{provision} --plan --ask-plugins"), 3);
    seen.run_with(site, 2, provision, 0, &[".outputs", ".outputs.*"]);
    site.write("resources/db.json", r#"{"id": "db", "kind": "bad"}"#);
    seen.run(site, 2, &format!("{provision} --plan"), 3);
    seen.run_with(site, 2, provision, 1, &[".outputs", ".outputs.*"]);
    site.write("resources/db.json", r#"{"id": "other", "kind": "new", "needs": ["other"]}"#);
    seen.run(site, 2, &format!("{provision} --plan"), 1);
    site.write("resources/db.json", "{}");
    seen.run(site, 2, provision, 1);
}

/// Gives all kinds of orders, and looks at what comes of them.
fn orders(site: &mut Site, seen: &mut Seen) {
    let [one, two] = [0, 1].map(|index| site.fleet.subs[index].address);
    site.write("roots/sub-1/etc/machine-id", &format!("{}\n", "1".repeat(32)));
    let all = |image| [("sub-1", one, image), ("sub-2", two, image)];
    site.require(&all("web/1"));
    site.fleet.wait_synced("web/1", CONVERGE_MAX, |_| {}).unwrap();
    seen.run(site, 2, "domtool list-subs", 0);
    seen.run(site, 2, "domtool show-sub sub-1", 0);
    seen.run(site, 2, "domtool explain sub-1", 0);
    seen.run(site, 2, "domtool status", 0);
    seen.run(site, 2, "domtool methods", 0);
    schedules(site, seen);
    resources(site, seen);

    site.write_mdb("candidate.json", &json!([{"Hostname": "sub-1", "RequiredImage": "web/2"}]));
    seen.run(site, 3, "domtool plan sub-1", 0);
    seen.run(site, 3, "domtool plan sub-1 --image web/2", 3);
    seen.run(site, 3, "domtool plan --mdb candidate.json", 3);
    seen.run(site, 3, "domtool mdb show", 0);
    seen.run(site, 3, "domtool mdb diff candidate.json", 3);

    seen.run(site, 2, "domtool set-config --fleet network-percent=50 --why slow", 0);
    seen.run(site, 2, "domtool set-config --tag tier=front cpu-percent=50 --why busy", 0);
    site.wait("domtool get-config sub-1", |value| {
        let told = &value["machine"]["reported"]["told"];
        told["network_percent"] == 50 && told["cpu_percent"] == 50
    });
    seen.run(site, 2, "domtool get-config sub-1", 0);
    seen.run(site, 2, "domtool set-default-image web/2 --yes --why meant", 0);
    seen.run(site, 2, "domtool pause sub-2 --until 2h --why works", 0);
    seen.run(site, 2, "domtool disable-updates stop", 0);
    seen.run(site, 2, "domtool status", 0);
    site.require(&all("web/2"));
    let wait_held = |host: &str| {
        site.wait_status(host, "updates-disabled");
        site.wait_idle(host);
        // What was fetched meanwhile asked for a new plan.
        site.wait_status(host, "updates-disabled");
    };
    ["sub-1", "sub-2"].into_iter().for_each(wait_held);
    seen.run(site, 2, "domtool list-pauses", 0);
    seen.run(site, 2, "domtool rollback --from web/2 sub-2 --why meant", 0);
    seen.run(site, 2, "domtool list-rollbacks", 0);
    seen.run(site, 2, "domtool rollback --end sub-2", 0);
    wait_held("sub-2");
    seen.run(site, 2, "domtool show-sub sub-2", 0);
    seen.run(site, 2, "domtool explain sub-2", 0);
    seen.run(site, 2, "domtool force-disruptive sub-1 --why meant", 0);
    seen.run(site, 2, "domtool enable-updates go", 0);
    seen.run(site, 2, "domtool resume sub-2", 0);
    seen.run(site, 2, "domtool set-default-image --none", 0);
    seen.run(site, 2, "domtool fast-update sub-1", 0);
    site.fleet.wait_synced("web/2", CONVERGE_MAX, |_| {}).unwrap();

    // An image that fails, and one that takes away too much. A second machine might not get the
    // one that fails: it stops with the first failure.
    site.require(&[("sub-1", one, "bad/1"), ("sub-2", two, "web/2")]);
    let stopped = |value: &Value| !value.as_array().unwrap().is_empty();
    site.wait("domtool list-stopped", stopped);
    site.wait_status("sub-1", "health-failed");
    site.wait_idle("sub-1");
    seen.run(site, 2, "domtool list-stopped", 0);
    seen.run(site, 2, "domtool status", 0);
    seen.run(site, 2, "domtool show-sub sub-1", 0);
    seen.run(site, 2, "domtool explain sub-1", 0);
    let last = |detail: &Value| detail["poll"]["last_update"]["update_id"].clone();
    let failed = last(&site.data("domtool show-sub sub-1"));
    seen.run(site, 2, "domtool resume-image bad/1 --why mended", 0);
    seen.run(site, 2, "domtool retry sub-1", 0);
    // Another image before its end would leave it without one.
    site.wait("domtool show-sub sub-1", |detail| last(detail) != failed);
    site.wait_status("sub-1", "health-failed");
    site.require(&all("few/1"));
    site.wait_status("sub-1", "unsafe-update");
    seen.run(site, 2, "domtool explain sub-1", 0);
    seen.run(site, 2, "domtool clear-safety-shutoff sub-1 --why meant", 0);
    site.wait_status("sub-1", "synced");
    site.require(&all("web/2"));
    site.fleet.wait_synced("web/2", CONVERGE_MAX, |_| {}).unwrap();

    // It was installed anew.
    site.fleet.subs[0].daemon.stop().unwrap();
    site.write("roots/sub-1/etc/machine-id", &format!("{}\n", "2".repeat(32)));
    site.fleet.subs[0].daemon.start_again().unwrap();
    site.wait_status("sub-1", "wrong-machine");
    site.wait_idle("sub-1");
    seen.run(site, 2, "domtool show-sub sub-1", 0);
    seen.run(site, 2, "domtool explain sub-1", 0);
    seen.run(site, 2, "domtool trust sub-1 --why anew", 0);
    site.fleet.wait_synced("web/2", CONVERGE_MAX, |_| {}).unwrap();
}

/// Has a machine database held, and puts it in force.
fn held(site: &mut Site, seen: &mut Seen) {
    let before = site.data("domtool mdb show");
    let mut many = before.as_array().unwrap().clone();
    let [first, second, third] = site.fleet.addresses().subs;
    // Nothing answers at these.
    many.extend((100..112).map(|last| {
        let address = format!("{first}.{second}.{third}.{last}");
        json!({"Hostname": format!("off-{last}"), "IpAddress": address})
    }));
    site.write_mdb("mdb.json", &many.into());
    site.wait("domtool list-subs", |value| value.as_array().unwrap().len() == 14);
    site.write_mdb("mdb.json", &before);
    site.wait("domtool status", |value| !value["mdb_held"].is_null());
    seen.run(site, 2, "domtool status", 0);
    seen.run(site, 3, "domtool mdb show --held", 0);
    seen.run(site, 3, "domtool mdb diff", 3);
    seen.run(site, 3, "domtool mdb accept --why meant", 0);
    site.wait("domtool list-subs", |value| value.as_array().unwrap().len() == 2);
}

/// What is on record of all that, at the dominator and in audit logs.
fn records(site: &Site, seen: &mut Seen) {
    site.wait("domtool events --kind order", |value| value.to_string().contains("mdb"));
    // How an update ended is on record soon after.
    let has_ended = |event: &Value| !event["what"]["update"]["outcome"].is_null();
    site.wait("domtool events --kind update --limit 0", |value| {
        value.as_array().unwrap().iter().all(has_ended)
    });
    seen.run(site, 2, "domtool events --limit 0", 0);
    // Its changes are told only where a path is asked for.
    seen.run(site, 3, "domtool events --path /etc/** --limit 0", 0);
    seen.run(site, 2, "domtool audit --limit 0", 0);
    let log = "dominator/audit/audit.log";
    seen.run(site, 3, &format!("domtool audit show {log}"), 0);
    seen.run(site, 3, "domtool audit show imageserver/audit/audit.log", 0);
    seen.run(site, 3, &format!("domtool audit verify {log}"), 0);
    seen.run(site, 2, "domtool backup copy", 0);
    // The store that is checked is one that no server uses.
    copy(&site.at("imageserver"), &site.at("store")).unwrap();
    let check = ["check", "--data", "store", "--format", "json"];
    let checked = site.run_words("imageserver", check);
    assert_eq!(checked.code, 0, "{}{}", checked.out, checked.said);
    seen.add("imageserver check", &checked.json().unwrap(), &[]);
    let told = std::fs::read_to_string(site.at("alarms/told")).unwrap();
    for line in told.lines() {
        let value = serde_json::from_str(line).unwrap();
        seen.add("dominator --alarm-command reads", &value, &[]);
    }
}

fn certificates(site: &Site, seen: &mut Seen) {
    seen.run(site, 3, "domtool cert ca ca --name test", 0);
    let issue = "domtool cert issue --ca ca --out issued --name ann --set operator --group web";
    seen.run(site, 3, issue, 0);
    let all = "domtool cert issue --mdb candidate.json --ca ca --out machines";
    seen.run(site, 4, all, 0);
    seen.run(site, 3, "domtool cert show issued", 0);
    seen.run(site, 3, "domtool cert show machines/sub-1", 0);
    seen.run(site, 3, "domtool cert show ca", 0);
    seen.run(site, 3, "domtool cert revoke --ca ca ann", 0);
}

/// What a filegen-server makes, and would make.
fn computed(site: &Site, seen: &mut Seen) {
    seen.run(site, 2, "filegen-client list", 0);
    seen.run(site, 2, "filegen-client get sub-1 /etc/resolv.conf", 0);
    seen.run(site, 2, "filegen-client get sub-1 /etc/none", 1);
    let by_path = ["", ".*.compared.changed", ".*.compared.failed"];
    let diff = |config: &str, code: i32, seen: &mut Seen| {
        seen.run_with(site, 2, &format!("filegen-client diff {config}"), code, &by_path);
    };
    diff("generators/config.toml", 0, seen);
    site.write("candidate/resolv.conf.j2", "{{ 'a' if Hostname == 'sub-1' else Tags.none }}\n");
    let config = "[[generator]]\npath = '/etc/resolv.conf'\nkind = 'template'\n\
                  file = 'resolv.conf.j2'\n";
    site.write("candidate/config.toml", config);
    diff("candidate/config.toml", 3, seen);
    seen.run(site, 2, "filegen-client bench /etc/resolv.conf --time 1s", 0);
}

/// What scripts cannot do without.
fn check_list(seen: &Seen) {
    let list = &seen.0["domtool list-subs"];
    let fields = ["hostname", "status", "required_image", "planned_image", "last_image"];
    let types = fields.map(|field| (field, list.at(&format!("[].{field}"))));
    assert_eq!(types, fields.map(|field| (field, "string".to_owned())));
}

/// Compares with a file. Shows first which lines differ, because there are thousands.
fn check(file: &ExpectFile, text: &str) {
    // A line that is indented belongs to the last one that is not.
    let lines = |text: &str| {
        let (mut title, mut lines) = ("", BTreeSet::new());
        for line in text.lines() {
            title = if line.starts_with(' ') { title } else { line };
            lines.insert(format!("{title}: {line}"));
        }
        lines
    };
    let (was, is) = (lines(&file.data()), lines(text));
    was.difference(&is).for_each(|line| println!("- {line}"));
    is.difference(&was).for_each(|line| println!("+ {line}"));
    file.assert_eq(text);
}

#[test]
fn json_and_metrics_and_exit_codes_stay() {
    let mut site = Site::start();
    let mut seen = Seen::default();
    images(&site, &mut seen);
    machine(&site, &mut seen);
    orders(&mut site, &mut seen);
    held(&mut site, &mut seen);
    certificates(&site, &mut seen);
    computed(&site, &mut seen);
    records(&site, &mut seen);
    check_list(&seen);
    let exits = exits::all(&site);
    site.run(&format!("imagetool show none --imageserver {}", site.replica));
    let addresses = site.fleet.addresses();
    let daemons = [
        ("dominator", addresses.dominator),
        ("imageserver", addresses.imageserver),
        ("imageserver that is a replica", site.replica),
        ("filegen-server", addresses.filegen),
        ("mdbd", site.mdbd),
        ("subd", site.fleet.subs[0].address),
    ];
    let mut metrics = String::new();
    for (name, address) in daemons {
        metrics.push_str(&format!("{name}\n{}", metric_families(&site.metrics(address))));
    }
    // All that differ are written at once with UPDATE_EXPECT=1.
    check(&expect_file!["json.txt"], &seen.text());
    check(&expect_file!["metrics.txt"], &metrics);
    check(&expect_file!["exits.txt"], &exits);
    site.fleet.stop().unwrap();
}
