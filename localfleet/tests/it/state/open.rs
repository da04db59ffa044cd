//! Opens what former releases wrote with the daemons of this one.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::SystemTime;

use model::object::Algorithm;
use redb::{Database, ReadableDatabase as _, TableDefinition};
use serde_json::{Value, json};
use testing::eventually;

use super::place::{HOSTS, Place};

/// The releases whose state is kept, the oldest first.
const RELEASES: [&str; 1] = ["0.1"];

/// How much later than now a pause ends that the fixture has.
const PAUSE: u64 = 86_400;

/// The fields of an object that these `names` name.
fn fields(value: &Value, names: &[&str]) -> Value {
    names.iter().map(|name| ((*name).to_owned(), value[*name].clone())).collect()
}

/// [`fields`] of each element of a list.
fn rows(value: &Value, names: &[&str]) -> Vec<Value> {
    value.as_array().unwrap().iter().map(|row| fields(row, names)).collect()
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

/// Moves all ends of pauses in `value` to a day from now: how long they last depends on the clock.
fn prolong(value: &mut Value) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    match value {
        Value::Array(elements) => elements.iter_mut().for_each(prolong),
        Value::Object(object) => {
            for (key, value) in object {
                match (key.as_str(), value.get_mut("seconds")) {
                    ("until", Some(seconds)) => *seconds = (now + PAUSE).to_string().into(),
                    _ => prolong(value),
                }
            }
        }
        _ => {}
    }
}

/// Prolongs the pauses that the dominator keeps.
fn prolong_pauses(place: &Place) {
    const SETTINGS: TableDefinition<'static, &'static str, &'static [u8]> =
        TableDefinition::new("settings");
    let database = Database::open(place.at("dominator/dominator.redb")).unwrap();
    let read = database.begin_read().unwrap().open_table(SETTINGS).unwrap();
    let mut pauses: Value =
        serde_json::from_slice(read.get("pauses").unwrap().unwrap().value()).unwrap();
    drop(read);
    let before = pauses.clone();
    prolong(&mut pauses);
    assert_ne!(pauses, before, "there is a pause");
    let write = database.begin_write().unwrap();
    let text = pauses.to_string();
    write.open_table(SETTINGS).unwrap().insert("pauses", text.as_bytes()).unwrap();
    write.commit().unwrap();
}

/// Prolongs the pause that subd keeps.
fn prolong_own_pause(place: &Place) {
    let name = "root/.subd/state/state.json";
    let mut state: Value = serde_json::from_str(&place.read(name)).unwrap();
    prolong(&mut state);
    place.write(name, &state.to_string());
}

/// Fails unless the audit log of a daemon is whole.
#[track_caller]
fn verify_log(place: &Place, directory: &str) {
    let file = format!("{directory}/audit/audit.log");
    let verdict = place.data(&format!("domtool audit verify {file}"));
    let verdict = fields(&verdict, &["is_whole", "troubles", "first"]);
    assert_eq!(verdict, json!({"is_whole": true, "troubles": [], "first": 1}), "{file}");
}

#[test]
fn an_image_server_opens_the_images_of_former_releases() {
    for release in RELEASES {
        let place = Place::of(HOSTS[1], release, &["tls", "imageserver", "replica"]);
        verify_log(&place, "imageserver");
        let checked = place.run("imageserver check --data imageserver --format json");
        assert_eq!(checked.code, 0, "{}{}", checked.out, checked.said);

        let mut server = place.start_imageserver();
        let list = place.data("imagetool list");
        assert_eq!(names(&list), ["soon/1", "web/1", "web/2", "web/3", "web/4"]);
        let show = place.data("imagetool show web/4");
        let kept = ["owner_groups", "owner_users", "tags", "release_notes", "expires_at"];
        assert_eq!(
            fields(&show["notes"], &kept),
            json!({
                "owner_groups": [], "owner_users": [], "tags": {"os": "debian"},
                "release_notes": show["notes"]["release_notes"], "expires_at": null,
            })
        );
        assert_eq!(
            show["content"]["health_check"],
            json!({"command": ["/bin/true"], "within_seconds": 60, "undo": true})
        );
        assert_eq!(show["content"]["triggers"][0]["Service"], "settings");
        assert_eq!(show["notes"]["signatures"].as_array().unwrap().len(), 1);
        assert_eq!(place.done("imagetool show web/4 --build-log"), "how it was made\n");
        assert_ne!(place.data("imagetool show soon/1")["notes"]["expires_at"], Value::Null);
        for image in ["soon/1", "web/1", "web/2", "web/3", "web/4"] {
            place.done(&format!("imagetool verify {image}"));
        }
        place.done("imagetool get web/4 got");
        let files = [
            ("etc/version", "version 4\n".to_owned()),
            ("etc/link", "the same in all versions\n".to_owned()),
            ("opt/only-in-4/file", "of one version\n".to_owned()),
            ("usr/large", "large ".repeat(16_666)),
        ];
        for (path, content) in files {
            assert_eq!(place.read(&format!("got/{path}")), content, "{path}");
        }
        let tree = rows(&place.data("imagetool tree"), &["name", "images", "owners"]);
        let want = [
            json!({"name": "soon", "images": 1, "owners": {"groups": [], "users": []}}),
            json!({"name": "web", "images": 4, "owners": {"groups": ["web"], "users": []}}),
            json!({"name": "web/made", "images": 0, "owners": {"groups": [], "users": ["ann"]}}),
        ];
        assert_eq!(tree, want);

        // What is gone stays gone, and what is in use stays.
        let states = place.data("imagetool check web/4 old/1 base/1 none");
        let want = json!([
            {"name": "web/4", "state": "there"},
            {"name": "old/1", "state": "gone"},
            {"name": "base/1", "state": "gone"},
            {"name": "none", "state": "missing"},
        ]);
        assert_eq!(states, want);
        let again = place.run("imagetool add old/1 got - - --required-paths=");
        assert_eq!(again.code, 1, "{}", again.said);
        let delete = place.run("imagetool delete --yes web/4");
        assert_eq!(delete.code, 1, "{}", delete.said);
        assert!(delete.said.contains("dominator"), "{}", delete.said);

        // What was revoked is, and the authority goes on.
        let bob = place.run_as("bob", "imagetool list");
        assert_eq!(bob.code, 1, "{}", bob.said);
        place.done("domtool cert issue --ca tls/ca --out tls/eve --name eve --set viewer");
        let list = place.run_as("eve", "imagetool list --format json").json().unwrap();
        assert_eq!(names(&list), ["soon/1", "web/1", "web/2", "web/3", "web/4"]);
        place.done("domtool cert revoke --ca tls/ca eve");
        assert_eq!(place.read("tls/ca/revoked.jsonl").lines().count(), 2);

        let mut replica = place.start_replica();
        let replication = format!("imagetool replication --imageserver {}", place.replica);
        let state = place.wait(&replication, |value| value["master"]["is_level"] == true);
        let about = ["is_archive", "troubles", "only_here"];
        let want = json!({"is_archive": true, "troubles": [], "only_here": []});
        assert_eq!(fields(&state["master"], &about), want);
        let list = place.data(&format!("imagetool list --imageserver {}", place.replica));
        assert_eq!(names(&list), ["base/1", "soon/1", "web/1", "web/2", "web/3", "web/4"]);

        place.done("imagetool add web/5 got - - --required-paths=");
        place.wait(&replication, |value| value["master"]["is_level"] == true);
        place.done(&format!("imagetool verify web/5 --imageserver {}", place.replica));
        replica.stop().unwrap();
        server.stop().unwrap();
        for directory in ["imageserver", "replica"] {
            verify_log(&place, directory);
        }
    }
}

#[test]
fn certificates_of_former_releases_are_shown_as_they_were_made() {
    for release in RELEASES {
        let place = Place::of(HOSTS[2], release, &["tls"]);
        let about = ["name", "groups", "methods", "is_authority", "faults"];
        let ann = place.data("domtool cert show tls/ann");
        let want = json!({
            "name": "ann", "groups": ["web"], "methods": ann["methods"], "is_authority": false,
            "faults": [],
        });
        assert_eq!(fields(&ann, &about), want);
        assert_eq!(ann["powers"], json!(["*.*"]));
        let ca = place.data("domtool cert show tls/ca");
        assert_eq!((&ca["name"], &ca["is_authority"]), (&json!("fixtures"), &json!(true)));
        for holder in ["dominator", "imageserver", "mdbd", "subd"] {
            let shown = place.data(&format!("domtool cert show tls/{holder}"));
            let name = json!({"name": holder, "faults": []});
            assert_eq!(fields(&shown, &["name", "faults"]), name);
        }
    }
}

/// What the dominator knows of former orders.
fn check_orders(place: &Place) {
    let status = place.data("domtool status");
    let brake = fields(&status["brake"], &["reason", "who"]);
    assert_eq!(brake, json!({"reason": "storm", "who": "ann"}));
    let default = fields(&status["default_image"], &["image", "who"]);
    assert_eq!(default, json!({"image": "web/4", "who": "ann"}));
    assert_eq!(status["paused"], 1);
    let pause = &place.data("domtool show-sub off-1")["pause"];
    assert_eq!(fields(pause, &["reason", "who"]), json!({"reason": "works", "who": "ann"}));
    assert_eq!(rows(&place.data("domtool list-stopped"), &["image"]), [json!({"image": "web/2"})]);

    let machines = place.data("domtool mdb show");
    let about = ["Hostname", "RequiredImage", "Location", "Tags"];
    let want = [
        json!({"Hostname": "off-1", "RequiredImage": "web/1", "Location": "", "Tags": {}}),
        json!({
            "Hostname": "sub-1", "RequiredImage": "web/4", "Location": "here/there",
            "Tags": {"tier": "front"},
        }),
    ];
    assert_eq!(rows(&machines, &about), want);

    let limits = place.data("domtool get-config sub-1");
    let wanted = json!({
        "cpu_percent": 40, "scan_percent": 30, "write_percent": null, "network_percent": 50
    });
    assert_eq!(limits["machine"]["wanted"], wanted);
    let from = json!({
        "cpu-percent": {"tag": {"name": "tier", "value": "front"}},
        "scan-percent": {"host": "sub-1"},
        "network-percent": "fleet",
    });
    assert_eq!(limits["machine"]["from"], from);

    let orders = place.data("domtool audit --limit 0");
    let orders: Vec<Value> = orders
        .as_array()
        .unwrap()
        .iter()
        .map(|event| {
            let order = &event["what"]["order"];
            json!([order["verb"], event["about"], order["who"], order["why"]])
        })
        .collect();
    let want = [
        json!(["set-config", "fleet: network-percent=50", "ann", "slow"]),
        json!(["set-config", "tag tier=front: cpu-percent=40", "ann", "busy"]),
        json!(["set-config", "host sub-1: scan-percent=30", "ann", "old"]),
        json!(["set-default-image", "web/4", "ann", "rescue"]),
        json!(["pause", "off-1", "ann", "works"]),
        json!(["disable-updates", "", "ann", "storm"]),
    ];
    assert_eq!(orders, want);
}

/// What the dominator knows of what happened.
fn check_history(place: &Place) {
    let updates = place.data("domtool events --kind update --host sub-1 --limit 0");
    let about = ["image", "former", "outcome"];
    let mut updates: Vec<Value> = updates
        .as_array()
        .unwrap()
        .iter()
        .map(|event| fields(&event["what"]["update"], &about))
        .collect();
    // How a health check failed is told in words.
    for update in &mut updates {
        if let Some(undone) = update["outcome"].get_mut("undone") {
            *undone = json!("");
        }
    }
    let want = [
        json!({"image": "web/1", "former": "", "outcome": "done"}),
        json!({"image": "web/2", "former": "web/1", "outcome": {"undone": ""}}),
        json!({"image": "web/3", "former": "web/1", "outcome": "done"}),
        json!({"image": "web/4", "former": "web/3", "outcome": "done"}),
    ];
    assert_eq!(updates, want);
    let changes = place.data("domtool events --path /etc/version --limit 0");
    let images: Vec<&Value> = changes
        .as_array()
        .unwrap()
        .iter()
        .map(|event| &event["what"]["change"]["update"]["image"])
        .collect();
    assert_eq!(images, ["web/1", "web/2", "web/3", "web/4"]);
    let statuses = place.data("domtool events --kind status --host sub-1 --limit 0");
    let statuses = statuses.as_array().unwrap().iter();
    let statuses: Vec<&Value> = statuses.map(|event| &event["what"]["status"]["status"]).collect();
    for status in ["updating", "synced", "health-failed"] {
        assert!(statuses.contains(&&json!(status)), "{status}: {statuses:?}");
    }
}

#[test]
fn a_fleet_goes_on_with_the_state_of_former_releases() {
    for release in RELEASES {
        let archives = ["tls", "imageserver", "dominator", "subd"];
        let place = Place::of(HOSTS[3], release, &archives);
        for directory in ["dominator", "root/.subd"] {
            verify_log(&place, directory);
        }
        prolong_pauses(&place);
        prolong_own_pause(&place);
        let mut imageserver = place.start_imageserver();
        let mut subd = place.start_subd();
        let poll = place.wait("subtool poll", |poll| poll["scanned"] == true);
        let about = ["last_image", "trigger_failures"];
        let want = json!({"last_image": "web/4", "trigger_failures": []});
        assert_eq!(fields(&poll, &about), want);
        assert_eq!(poll["paused"]["reason"], "by-hand");
        let last = fields(&poll["last_update"], &["image", "outcome", "health", "operations"]);
        let want = json!({
            "image": "web/4", "outcome": "done", "health": "passed", "operations": 5
        });
        assert_eq!(last, want);
        let told = json!({
            "cpu_percent": 40, "scan_percent": 30, "write_percent": null, "network_percent": 50
        });
        assert_eq!(poll["limits"]["told"], told);
        let full = json!({"full": ["/var/log/.*", "/etc/machine-id"]});
        assert_eq!(place.data("subtool get-config")["scan"]["coverage"], full);

        // There is no machine database, so the one that is kept is in force.
        let mut dominator = place.start_dominator();
        check_orders(&place);
        check_history(&place);
        let machines = json!([
            {
                "Hostname": "sub-1", "IpAddress": place.subd.ip(), "SubdPort": place.subd.port(),
                "RequiredImage": "web/4", "Location": "here/there", "Tags": {"tier": "front"},
            },
            {"Hostname": "off-1", "IpAddress": "127.77.0.200", "RequiredImage": "web/1"},
        ]);
        place.write("mdb.json", &machines.to_string());
        place.wait_status("synced", "web/4");
        assert_eq!(fs::read_to_string(place.at("services")).unwrap_or_default(), "");

        // It takes no image that was signed before the one that it has.
        place.done("subtool resume");
        let older = place.run("subtool push-image web/3");
        assert_eq!(older.code, 1, "{}", older.said);
        assert!(older.said.contains("web/4"), "{}", older.said);

        // It is known by its machine id.
        subd.stop().unwrap();
        place.write("root/etc/machine-id", &format!("{}\n", "f".repeat(32)));
        let mut subd = place.start_subd();
        place.wait_status("wrong-machine", "web/4");

        place.done("domtool enable-updates over");
        place.done("domtool resume off-1");
        place.done("domtool resume-image web/2 --why mended");
        dominator.stop().unwrap();
        subd.stop().unwrap();
        imageserver.stop().unwrap();
        for directory in ["dominator", "root/.subd", "imageserver"] {
            verify_log(&place, directory);
        }
    }
}

/// Writes the journal of an update anew, with the numbers that inodes have here.
fn renumber(place: &Place) {
    let listed = place.read("inodes");
    let numbers: BTreeMap<&str, u64> = listed
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(number, path)| (number, fs::symlink_metadata(place.at(path)).unwrap().ino()))
        .collect();
    let name = "root/.subd/journal/update";
    let journal = place.read(name);
    let mut text = String::new();
    for line in journal.lines().filter(|line| !line.starts_with("{\"end\":")) {
        let mut parts = line.split("\"inode\":");
        text.push_str(parts.next().unwrap());
        for part in parts {
            let end = part.find(|character: char| !character.is_ascii_digit()).unwrap();
            let (number, rest) = part.split_at(end);
            text.push_str(&format!("\"inode\":{}{rest}", numbers[number]));
        }
        text.push('\n');
    }
    // The last line has a digest of the others.
    let mut end: Value = serde_json::from_str(journal.lines().last().unwrap()).unwrap();
    assert_eq!(end["end"]["digest"], digest_of_all_but_last(&journal));
    end["end"]["digest"] = Algorithm::Blake3.digest(text.as_bytes()).to_string().into();
    place.write(name, &format!("{text}{end}\n"));
}

fn digest_of_all_but_last(journal: &str) -> Value {
    let length = journal.trim_end().rfind('\n').unwrap() + 1;
    Algorithm::Blake3.digest(&journal.as_bytes()[..length]).to_string().into()
}

#[test]
fn an_update_that_a_former_release_was_killed_in_is_carried_on() {
    for release in RELEASES {
        let cases = [
            // It had not begun to change anything.
            (HOSTS[4], "stopping", "web/3", "version 3\n", "only-in-3"),
            (HOSTS[5], "starting", "web/4", "version 4\n", "only-in-4"),
        ];
        for (host, archive, image, version, directory) in cases {
            let place = Place::of(host, release, &["tls", archive]);
            renumber(&place);
            let mut subd = place.start_subd();
            let is_over = |poll: &Value| {
                poll["activity"] == "idle" && !poll["last_update"]["verified_generation"].is_null()
            };
            let poll = place.wait("subtool poll", is_over);
            let last = fields(&poll["last_update"], &["image", "outcome", "health"]);
            let want = json!({"image": image, "outcome": "done", "health": "passed"});
            assert_eq!(last, want, "{archive}");
            assert_eq!(poll["last_image"], image);
            assert_eq!(place.read("root/etc/version"), version);
            let entries: Vec<_> = fs::read_dir(place.at("root/opt"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            assert_eq!(entries, [directory]);
            assert!(!place.at("root/.subd/journal/update").exists());
            let accepted: Value =
                serde_json::from_str(&place.read("root/.subd/state/accepted.json")).unwrap();
            assert_eq!(accepted["image"], image);
            subd.stop().unwrap();
            verify_log(&place, "root/.subd");
        }
    }
}

#[test]
fn an_mdbd_has_the_machines_that_a_former_release_kept() {
    for release in RELEASES {
        let place = Place::of(HOSTS[0], release, &["tls", "mdbd"]);
        place.write_inventory();
        let mut mdbd = place.start_mdbd();
        eventually("the MDB is written", || {
            mdbd.check().unwrap();
            place.at("made.json").exists()
        });
        let made: Value = serde_json::from_str(&place.read("made.json")).unwrap();
        let about = ["Hostname", "RequiredImage", "Tags"];
        let want = [json!({"Hostname": "web1", "RequiredImage": "web/4", "Tags": {"a": "b"}})];
        assert_eq!(rows(&made, &about), want);
        mdbd.stop().unwrap();
        verify_log(&place, "mdbd");
    }
}
