//! What would be done is told, and is not done.

use std::process::Output;
use std::time::{Duration, Instant};

use api::dominator::Status;
use model::tree::Tree;
use serde_json::{Value, json};
use testing::exit_and_output;

use crate::fake::{FakeSub, file, tree};
use crate::stage::{PATIENCE, Stage};

/// A state that did not change for so long has all that was to be written; that is gathered for a
/// second.
const QUIET: Duration = Duration::from_millis(2_500);

const RESTART: &str = r#"[{"MatchLines": ["/d/.*"], "Service": "db", "HighImpact": true}]"#;
const REBOOT: &str = r#"[{"MatchLines": ["/d/.*"], "Service": "reboot"}]"#;

/// A hundred files, so many of which are others.
fn numbered(changed: usize) -> Tree {
    let mut text = String::from("d 755 0:0 /d\n");
    for number in 0..100 {
        let content = if number < changed { "new" } else { "old" };
        text.push_str(&file(&format!("/d/f{number:03}"), content));
    }
    tree(&text)
}

/// Returns the exit code and the stdout of domtool.
fn exit_and_stdout(output: &Output) -> (i32, String) {
    let (code, data, _) = exit_and_output(output);
    (code.unwrap(), data)
}

async fn planned(stage: &Stage, arguments: &[&str]) -> (i32, Value) {
    let arguments: Vec<&str> = arguments.iter().chain(&["--format", "json"]).copied().collect();
    let output = stage.domtool(&arguments).await;
    let (code, text) = exit_and_stdout(&output);
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    (code, serde_json::from_str(&text).unwrap_or_else(|_| panic!("{complaints}")))
}

fn required(record: &str, image: &str) -> String {
    format!("{{{record}, \"RequiredImage\": \"{image}\"}}")
}

/// The file of the dominator's state, byte for byte.
fn kept(stage: &Stage) -> Vec<u8> {
    std::fs::read(stage.directory.path().join("state/dominator.redb")).unwrap()
}

/// Waits until what the dominator writes by itself is written: how machines got their status, and
/// by what they are known.
async fn settle(stage: &Stage) {
    let deadline = Instant::now() + 3 * PATIENCE;
    let (mut last, mut since) = (kept(stage), Instant::now());
    while since.elapsed() < QUIET {
        assert!(Instant::now() < deadline, "the state does not come to rest");
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = kept(stage);
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_for_a_machine_is_told_and_not_carried_out() {
    let mut stage = Stage::new("[]").await;
    stage.images.add_with("base/1", &numbered(0), Some(&[]), RESTART);
    stage.images.add_with("base/2", &numbered(2), Some(&[]), "[]");
    let sub = FakeSub::new(numbered(0));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{}]", required(&record, "base/1")));
    stage.wait("host", Status::Synced, "base/1").await;

    settle(&stage).await;
    let before = (kept(&stage), sub.calls.lock().unwrap().clone());
    let same = stage.domtool(&["plan", "host"]).await;
    assert_eq!(exit_and_stdout(&same), (0, "The machine equals base/1.\n".to_owned()));
    let output = stage.domtool(&["plan", "host", "--image", "base/2"]).await;
    let (code, text) = exit_and_stdout(&output);
    let lines: Vec<&str> = text.lines().skip(2).collect();
    let expected = [
        "before the change: stop db",
        "HIGH IMPACT: the machine's disruption command is asked first",
        "2 changes: replace 2",
        "reasons: content 2",
        "to fetch: 1 object, 3 bytes",
    ];
    assert_eq!((code, lines), (3, expected.to_vec()), "{text}");
    let (code, plan) = planned(&stage, &["plan", "host", "--image", "base/2"]).await;
    assert_eq!((code, &plan["preview"]["from"]), (3, &json!("base/1")));
    assert_eq!(plan["preview"]["plan"]["operations"].as_array().unwrap().len(), 2);
    assert_eq!(plan["waits"], json!([]));
    assert_eq!((kept(&stage), sub.calls.lock().unwrap().clone()), before);
    assert_eq!(sub.model.lock().unwrap().sub.tree, numbered(0));

    // What would keep it is told too.
    stage.domtool(&["disable-updates", "storm"]).await;
    let (_, plan) = planned(&stage, &["plan", "host", "--image", "base/2"]).await;
    let storm = json!([["updates-disabled", "updates of all machines are disabled: storm"]]);
    assert_eq!(plan["waits"], storm);

    for (arguments, complaint) in [
        (["plan", "nobody"].as_slice(), "there is no machine nobody"),
        (&["plan", "host", "--image", "gone"], "image-missing: the image server has no image gone"),
    ] {
        let output = stage.domtool(arguments).await;
        let complaints = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{complaints}");
        assert!(complaints.contains(complaint), "{complaints}");
    }
    let misuse = stage.domtool(&["plan"]).await;
    assert_eq!(misuse.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_for_a_database_names_every_machine_and_why() {
    let mut stage = Stage::new("[]").await;
    stage.images.add_with("base/1", &numbered(0), Some(&[]), RESTART);
    stage.images.add_with("base/2", &numbered(2), Some(&[]), REBOOT);
    stage.images.add_with("tiny", &tree(&file("/one", "1")), Some(&[]), "[]");
    stage.images.add_with("other", &numbered(2), Some(&["/var/log"]), "[]");
    let hosts = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let mut records = Vec::new();
    let mut subs = Vec::new();
    for host in hosts {
        let sub = FakeSub::new(numbered(0));
        records.push(stage.sub(host, &sub).await);
        subs.push(sub);
    }
    let dead = "\"Hostname\": \"z\", \"IpAddress\": \"127.0.0.1\", \"SubdPort\": 1".to_owned();
    let database = |images: &[&str]| {
        let records = records.iter().chain([&dead]).zip(images);
        let all: Vec<String> = records.map(|(record, image)| required(record, image)).collect();
        format!("[{}]", all.join(",\n"))
    };
    // The last but one machine is only watched.
    let mut in_force = ["base/1"; 10];
    in_force[8] = "";
    stage.write_mdb(&database(&in_force));
    for host in &hosts[..8] {
        stage.wait(host, Status::Synced, "base/1").await;
    }
    stage.wait("i", Status::ImageUndefined, "").await;
    stage.wait("z", Status::Unreachable, "base/1").await;

    let mut wanted = in_force;
    wanted[1..9]
        .copy_from_slice(&["base/2", "base/2", "tiny", "gone", "other", "", "base/1", "base/2"]);
    wanted[9] = "base/2";
    let text = database(&wanted)
        .replace("\"Hostname\": \"h\"", "\"DisableUpdates\": true, \"Hostname\": \"h\"")
        .replacen('[', "[{\"Hostname\": \"new\", \"RequiredImage\": \"base/2\"},", 1);
    let candidate = stage.directory.path().join("candidate.json");
    std::fs::write(&candidate, text).unwrap();
    let candidate = candidate.to_str().unwrap();
    let calls = || -> Vec<Vec<&'static str>> {
        // Trees that nobody had to compare yet are read, which changes nothing.
        let told = |sub: &FakeSub| {
            let calls = sub.calls.lock().unwrap().clone();
            calls.into_iter().filter(|call| *call != "get-directories").collect()
        };
        subs.iter().map(told).collect()
    };
    settle(&stage).await;
    let before = (kept(&stage), calls());
    let (code, plan) = planned(&stage, &["plan", "--mdb", candidate]).await;
    assert_eq!(code, 3);
    assert_eq!((kept(&stage), calls()), before);
    let update = |number: u32, objects: u32, bytes: &str| {
        let update = json!({"update": number, "fetch_objects": objects, "fetch_bytes": bytes});
        json!({ "update": update })
    };
    let unknown = |gap: &str, why: &str| json!({"unknown": {"gap": gap, "why": why}});
    let machines: Vec<(&str, &Value)> = plan["machines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|machine| (machine["hostname"].as_str().unwrap(), &machine["outlook"]))
        .collect();
    let gone = unknown("image-missing", "the image server has no image gone yet");
    let undefined = "the record names no image for it, and there is no default image";
    let other = "it does not scan with the settings of other, and its subd is of a release that \
                 cannot do so for a plan; they are sent before the update";
    let refused = plan["machines"][9]["outlook"]["unknown"]["why"].as_str().unwrap();
    let expected = [
        ("b", &update(0, 1, "3")),
        ("c", &update(0, 1, "3")),
        ("d", &update(1, 1, "1")),
        ("e", &gone),
        ("f", &unknown("other-scan", other)),
        ("g", &unknown("image-undefined", undefined)),
        ("h", &update(2, 0, "0")),
        ("i", &update(3, 1, "3")),
        ("new", &unknown("new-machine", "it is not managed yet")),
        ("z", &unknown("not-reached", refused)),
    ];
    assert_eq!(machines, expected);
    assert_eq!(plan["updates"][0]["services"]["reboot"], json!(true));
    let dangers =
        json!(["it would remove 101 of 101 entries", "the image has 1 entries, the machine 101"]);
    assert_eq!(plan["updates"][1]["dangers"], dangers);
    assert_eq!(plan["updates"][3]["from"], Value::Null);
    let (_, text) = exit_and_stdout(&stage.domtool(&["plan", "--mdb", candidate]).await);
    let expected = format!(
        "database: 1 machine added, 0 machines removed and left as they are, 9 machines changed
  added        new
(no image) -> base/2: 1 machine
  changes      2: replace 2
  reasons      content 2
  to fetch     1 object, 3 bytes
  reboot       1 machine
  high impact  1 machine
base/1 -> base/1: 1 machine
  no change    1 machine
base/1 -> base/2: 2 machines
  changes      4: replace 4
  reasons      content 4
  to fetch     2 objects, 6 bytes
  services     stop db on 2 machines
  reboot       2 machines
  high impact  2 machines
base/1 -> tiny: 1 machine
  changes      102: create 1, remove 101
  reasons      missing 1, extra 101
  to fetch     1 object, 1 byte
  services     stop db on 1 machine
  high impact  1 machine
  UNSAFE       1 machine: d: it would remove 101 of 101 entries
NOT KNOWN image-undefined: 1 machine: g: {undefined}
NOT KNOWN image-missing: 1 machine: e: the image server has no image gone yet
NOT KNOWN new-machine: 1 machine: new: it is not managed yet
NOT KNOWN not-reached: 1 machine: z: {refused}
NOT KNOWN other-scan: 1 machine: f: {other}
"
    );
    assert_eq!(text, expected);

    // With all machines, the one that does not change is told too.
    let (_, plan) = planned(&stage, &["plan", "--mdb", candidate, "--all"]).await;
    assert_eq!(plan["machines"].as_array().unwrap().len(), 11);
    let as_is = stage.domtool(&["plan", "--mdb", stage.mdb().to_str().unwrap()]).await;
    let nothing = "database: 0 machines added, 0 machines removed and left as they are, 0 \
                   machines changed\nNothing would change.\n";
    assert_eq!(exit_and_stdout(&as_is), (0, nothing.to_owned()));
    std::fs::write(candidate, format!("[{}]", required(&records[0], "base/1"))).unwrap();
    let (code, text) = exit_and_stdout(&stage.domtool(&["plan", "--mdb", candidate]).await);
    let held = "HELD: the database would wait for domtool mdb accept: it lacks 9 of the 10 \
                machines that are known, more than 50 %\n";
    assert!(code == 3 && text.starts_with(held), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_known_of_the_former_image_is_said() {
    let mut stage = Stage::new("[]").await;
    stage.images.add_with("base/1", &numbered(0), Some(&[]), RESTART);
    stage.images.add_with("base/2", &numbered(2), Some(&[]), "[]");
    let sub = FakeSub::new(numbered(0));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{}]", required(&record, "base/1")));
    stage.wait("host", Status::Synced, "base/1").await;
    stage.domtool(&["disable-updates", "only looking"]).await;
    stage.write_mdb(&format!("[{}]", required(&record, "base/2")));
    stage.wait("host", Status::UpdatesDisabled, "base/2").await;
    // The former image is no machine's any more, but is at hand even if the server loses it.
    stage.images.lose("base/1");
    let (_, plan) = planned(&stage, &["plan", "host"]).await;
    assert_eq!(plan["preview"]["services"]["before"][0]["service"], json!("db"));
    // A dominator that starts anew asks for its triggers by its name.
    stage.images.add_with("base/1", &numbered(0), Some(&[]), RESTART);
    stage.kill();
    stage.start().await;
    stage.wait("host", Status::UpdatesDisabled, "base/2").await;
    let (_, plan) = planned(&stage, &["plan", "host"]).await;
    assert_eq!(plan["preview"]["services"]["before"][0]["service"], json!("db"));
    stage.images.lose("base/1");
    let (_, text) = exit_and_stdout(&stage.domtool(&["plan", "host"]).await);
    assert!(text.contains("\nNOT KNOWN: the triggers of base/1: "), "{text}");
    assert!(!text.contains("stop db"), "{text}");
    let unknown = "\nNOT KNOWN: how many files host keeps with old numbers of users and groups: \
                   /etc/passwd of base/1: ";
    assert!(text.contains(unknown), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_users_are_not_known_where_symlinks_lead_to_them() {
    let mut stage = Stage::new("[]").await;
    let plain = tree("d 755 0:0 /d\n");
    let links = [
        ("base/2", "d 755 0:0 /etc\nl 0:0 /etc/passwd -> ../d/passwd\n", "passwd"),
        ("base/3", "d 755 0:0 /etc\nl 0:0 /etc/group -> ../d/group\n", "group"),
        ("base/4", "d 755 0:0 /d\nl 0:0 /etc -> d\n", "passwd"),
    ];
    stage.images.add("base/1", &plain, Some(&[]));
    for (image, text, _) in links {
        stage.images.add(image, &tree(text), Some(&[]));
    }
    let sub = FakeSub::new(plain);
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{}]", required(&record, "base/1")));
    stage.wait("host", Status::Synced, "base/1").await;
    // Before an image is loaded and afterwards.
    for (image, _, file) in links.into_iter().chain(links) {
        let (_, text) = exit_and_stdout(&stage.domtool(&["plan", "host", "--image", image]).await);
        let unknown = format!(
            "\nNOT KNOWN: how many files host keeps with old numbers of users and groups: \
             /etc/{file} of {image}: it is a symlink, or below one\n"
        );
        assert!(text.contains(&unknown), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_without_an_image_of_their_own_are_planned_for_the_default_image() {
    let mut stage = Stage::new("[]").await;
    stage.images.add_with("base/1", &numbered(0), Some(&[]), "[]");
    stage.images.add_with("rescue", &numbered(2), Some(&[]), "[]");
    let (bare, other) = (FakeSub::new(numbered(0)), FakeSub::new(numbered(0)));
    let records = [stage.sub("bare", &bare).await, stage.sub("other", &other).await];
    stage.write_mdb(&format!("[{{{}}}, {}]", records[0], required(&records[1], "base/1")));
    stage.wait("other", Status::Synced, "base/1").await;
    stage.wait("bare", Status::ImageUndefined, "").await;
    let undefined = stage.domtool(&["plan", "bare"]).await;
    assert_eq!(undefined.status.code(), Some(1), "{undefined:?}");
    stage.domtool(&["disable-updates", "only looking"]).await;
    stage.domtool(&["set-default-image", "rescue", "--yes"]).await;
    stage.wait("bare", Status::UpdatesDisabled, "rescue").await;

    let (code, plan) = planned(&stage, &["plan", "bare"]).await;
    assert_eq!((code, &plan["preview"]["image"]), (3, &json!("rescue")), "{plan}");
    assert_eq!(plan["preview"]["plan"]["operations"].as_array().unwrap().len(), 2);
    // A record that loses its image moves its machine to the default one.
    let candidate = stage.directory.path().join("candidate.json");
    std::fs::write(&candidate, format!("[{{{}}}, {{{}}}]", records[0], records[1])).unwrap();
    let words = ["plan", "--mdb", candidate.to_str().unwrap()];
    let (code, text) = exit_and_stdout(&stage.domtool(&words).await);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("\nbase/1 -> rescue: 1 machine\n"), "{text}");
    assert!(!text.contains("NOT KNOWN"), "{text}");
    let (_, plan) = planned(&stage, &["plan", "--all", "--mdb", words[2]]).await;
    let outlooks = plan["machines"].as_array().unwrap();
    assert!(outlooks.iter().all(|machine| machine["outlook"]["update"].is_object()), "{plan}");
}
