//! The limits of subs: given, told, kept, taken back.

use api::subd::Limits;
use serde_json::{Value, json};
use testing::{eventually_async, exit_and_output};

use crate::fake::{FakeSub, tree};
use crate::stage::{Stage, wait_until};

async fn set(stage: &Stage, words: &[&str]) -> (Option<i32>, String, String) {
    let words: Vec<&str> = [&["set-config"], words, &["--why", "slow links"]].concat();
    exit_and_output(&stage.domtool(&words).await)
}

async fn get(stage: &Stage, words: &[&str]) -> Value {
    let words: Vec<&str> = [&["get-config"], words, &["--format", "json"]].concat();
    let (code, text, complaints) = exit_and_output(&stage.domtool(&words).await);
    assert_eq!(code, Some(0), "{complaints}");
    serde_json::from_str(&text).unwrap()
}

fn limits(cpu: Option<u8>, network: Option<u8>) -> Limits {
    Limits { cpu_percent: cpu, network_percent: network, ..Limits::default() }
}

/// Waits until the subs were told these limits.
async fn wait(subs: &[&FakeSub], expected: &[Limits]) {
    eventually_async(&format!("the limits are {expected:?}"), async || {
        let limits = |sub: &&FakeSub| sub.model.lock().unwrap().sub.limits;
        let limits: Vec<Limits> = subs.iter().map(limits).collect();
        if limits == expected { Ok(()) } else { Err(limits) }
    })
    .await;
}

fn times_told(sub: &FakeSub) -> usize {
    sub.calls.lock().unwrap().iter().filter(|call| **call == "set-configuration").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_reach_their_machines_and_outlive_a_kill() {
    let mut stage = Stage::new("[]").await;
    let (web, mail) = (FakeSub::new(tree("")), FakeSub::new(tree("")));
    let records = [stage.sub("web", &web).await, stage.sub("mail", &mail).await];
    let front = "\"Tags\": {\"tier\": \"front\"}";
    let database = |tags: &str| format!("[{{{}, {tags}}}, {{{}}}]", records[0], records[1]);
    stage.write_mdb(&database(front));
    let subs = [&web, &mail];
    for host in ["web", "mail"] {
        stage.wait(host, api::dominator::Status::ImageUndefined, "").await;
    }

    let (code, _, text) = set(&stage, &["--fleet", "network-percent=8", "cpu-percent=4"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("Saved for fleet: 2 machines now."), "{text}");
    wait(&subs, &[limits(Some(4), Some(8)); 2]).await;
    let (_, _, text) = set(&stage, &["--tag", "tier=front", "network-percent=5"]).await;
    assert!(text.starts_with("Saved for tag tier=front: 1 machine now."), "{text}");
    set(&stage, &["--host", "mail", "cpu-percent=2"]).await;
    let expected = [limits(Some(4), Some(5)), limits(Some(2), Some(8))];
    wait(&subs, &expected).await;

    let told = get(&stage, &["web"]).await;
    let machine = &told["machine"];
    assert_eq!(machine["wanted"], serde_json::to_value(expected[0]).unwrap());
    let tag = json!({"tag": {"name": "tier", "value": "front"}});
    assert_eq!(machine["from"], json!({"cpu-percent": "fleet", "network-percent": tag}));
    let level = &told["levels"][0];
    assert_eq!(level["level"], tag);
    let setting = &level["values"]["network-percent"];
    assert_eq!((&setting["percent"], &setting["why"]), (&json!(5), &json!("slow links")));
    assert!(setting["who"].as_str().is_some_and(|who| !who.is_empty()), "{setting}");
    assert_eq!(get(&stage, &[]).await["levels"].as_array().unwrap().len(), 3);

    // Whoever was told is not told again, by a dominator that starts anew neither.
    let before = subs.map(times_told);
    stage.kill();
    stage.start().await;
    let is_polled = async || get(&stage, &["web"]).await["machine"]["reported"] != Value::Null;
    wait_until("it is polled", is_polled).await;
    assert_eq!(get(&stage, &["web"]).await["machine"]["wanted"], machine["wanted"]);
    assert_eq!(get(&stage, &["web"]).await["levels"], told["levels"]);
    assert_eq!(subs.map(times_told), before);

    // A machine that loses its tag, values that are taken back.
    stage.write_mdb(&database("\"Tags\": {}"));
    wait(&subs, &[limits(Some(4), Some(8)), expected[1]]).await;
    set(&stage, &["--host", "mail", "cpu-percent="]).await;
    set(&stage, &["--fleet", "--unset", "network-percent"]).await;
    wait(&subs, &[limits(Some(4), None); 2]).await;
    stage.kill();
    stage.start().await;
    let words = ["audit", "--limit", "2", "--format", "json"];
    let (_, text, _) = exit_and_output(&stage.domtool(&words).await);
    let orders: Vec<Value> = serde_json::from_str(&text).unwrap();
    let told: Vec<[&Value; 3]> = orders
        .iter()
        .map(|order| {
            let what = &order["what"]["order"];
            [&what["verb"], &order["about"], &what["why"]]
        })
        .collect();
    let expected = [
        ["set-config", "host mail: cpu-percent=", "slow links"],
        ["set-config", "fleet: network-percent=", "slow links"],
    ];
    assert_eq!(told, expected);
    assert_eq!(get(&stage, &[]).await["levels"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_kept_is_not_in_force() {
    let mut stage = Stage::new("[]").await;
    stage.kill();
    stage.start_for_limits().await;
    set(&stage, &["--fleet", "network-percent=8"]).await;
    let before = get(&stage, &[]).await;
    stage.limit_files("4096");
    let (code, _, text) = set(&stage, &["--fleet", "network-percent=5"]).await;
    assert!(code == Some(1) && text.contains("the order was not carried out"), "{text}");
    assert!(text.contains("File too large"), "{text}");
    assert_eq!(get(&stage, &[]).await, before);
    stage.limit_files("unlimited");
    stage.kill();
    stage.start().await;
    assert_eq!(get(&stage, &[]).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused_and_nothing_is_kept() {
    let stage = Stage::new("[{\"Hostname\": \"web\"}]").await;
    let table: [(&[&str], i32, &str); 6] = [
        (&["--host", "wbe", "cpu-percent=2"], 1, "there is no machine wbe"),
        (&["--tag", "=x", "cpu-percent=2"], 1, "the name of a tag has 1 to 1000 bytes"),
        (&["--fleet", "cpu-percent=101"], 2, "`101` is not a number from 1 to 100"),
        (&["--fleet", "disk-percent=2"], 2, "the limits are cpu-percent, scan-percent"),
        (&["--fleet"], 2, "required arguments were not provided"),
        (&["cpu-percent=2"], 2, "<--fleet|--tag <NAME[=VALUE]>|--host <HOST>>"),
    ];
    for (words, expected, complaint) in table {
        let (code, _, text) = set(&stage, words).await;
        let is_so = code == Some(expected) && text.contains(complaint);
        assert!(is_so, "{words:?}: {code:?}: {text}");
    }
    // To take back what nobody gave, of a machine that nobody knows, does no harm.
    assert_eq!(set(&stage, &["--host", "gone", "--unset", "cpu-percent"]).await.0, Some(0));
    assert_eq!(get(&stage, &[]).await["levels"], json!([]));
}
