//! Other machines than those that are meant are left alone.

use api::dominator::Status;
use testing::exit_and_output;

use crate::fake::{FakeSub, file, tree};
use crate::stage::{Stage, record, wait_until};

fn with_image(records: &[String]) -> String {
    let machines: Vec<String> =
        records.iter().map(|record| format!("{{{record}, \"RequiredImage\": \"base\"}}")).collect();
    format!("[{}]", machines.join(","))
}

/// The same machine at the address of another.
fn moved(hostname: &str, record_of_other: &str) -> String {
    let port = record_of_other.rsplit(' ').next().unwrap();
    record(hostname, port.parse().unwrap())
}

async fn stage() -> Stage {
    let stage = Stage::new("[]").await;
    // It leaves alone what tells machines apart.
    let kept = Some(["/etc/machine-id", "/etc/hostname"].as_slice());
    stage.images.add("base", &tree(&file("/one", "1")), kept);
    stage
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_took_over_an_address_is_left_alone_until_it_is_trusted() {
    let mut stage = stage().await;
    let web = FakeSub::named("web", "id-web", tree(""));
    let other = FakeSub::named("web", "id-other", tree(&file("/its", "own")));
    let (web, other_record) = (stage.sub("web", &web).await, stage.sub("web", &other).await);
    stage.write_mdb(&with_image(std::slice::from_ref(&web)));
    stage.wait("web", Status::Synced, "base").await;
    // By what it was known is kept over a restart.
    assert!(stage.terminate().success());
    stage.write_mdb(&with_image(&[other_record]));
    stage.start_for_limits().await;
    let wrong = stage.wait("web", Status::WrongMachine, "base").await;
    assert_eq!(
        wrong.detail,
        "web answers, with machine id id-other: when web was last synced it had id-web, so this \
         is another machine, or it was installed anew; correct its address in the machine \
         database, or if it is meant: domtool trust web --why TEXT"
    );
    // It is polled, and nothing else.
    other.change(tree(&file("/its", "news")));
    let seen = wrong.last_seen;
    let is_seen = async || stage.show("web").await.summary.last_seen != seen;
    wait_until("the other machine is polled", is_seen).await;
    stage.wait("web", Status::WrongMachine, "base").await;
    assert_eq!(*other.calls.lock().unwrap(), Vec::<&str>::new());
    // Nor is it asked for its tree by those who want to know what would be done.
    stage.images.add("plain", &tree(""), Some(&[]));
    let planned = stage.domtool(&["plan", "web", "--image", "plain"]).await;
    let text = String::from_utf8(planned.stderr).unwrap();
    let why = "not-reached: it may be another machine than the one that is meant";
    assert!(text.contains(why), "{text}");
    assert_eq!(*other.calls.lock().unwrap(), Vec::<&str>::new());

    let misuse = stage.domtool(&["trust", "web"]).await;
    assert_eq!(misuse.status.code(), Some(2), "{misuse:?}");
    let idle = stage.domtool(&["trust", "web", "--why", " "]).await;
    assert_eq!(idle.status.code(), Some(1), "{idle:?}");
    // What cannot be kept does not count.
    stage.limit_files("4096");
    let unkept = stage.domtool(&["trust", "web", "--why", "new disk"]).await;
    let (_, _, talk) = exit_and_output(&unkept);
    assert!(talk.contains("not carried out, because it cannot be saved"), "{talk}");
    stage.wait("web", Status::WrongMachine, "base").await;
    assert_eq!(*other.calls.lock().unwrap(), Vec::<&str>::new());
    stage.limit_files("unlimited");
    let trusted = stage.domtool(&["trust", "web", "--why", "new disk"]).await;
    assert_eq!(String::from_utf8(trusted.stdout).unwrap(), "web\n", "{:?}", trusted.stderr);
    // From now on this one counts, and the former one does not.
    stage.kill();
    stage.start().await;
    stage.wait("web", Status::Synced, "base").await;
    stage.write_mdb(&with_image(&[web]));
    stage.wait("web", Status::WrongMachine, "base").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_whose_addresses_were_exchanged_are_left_alone_until_that_is_mended() {
    let mut stage = stage().await;
    let subs = ["a", "b", "c"].map(|name| FakeSub::named(name, "", tree("")));
    let mut records = Vec::new();
    for (name, sub) in ["a", "b", "c"].iter().zip(&subs) {
        records.push(stage.sub(name, sub).await);
    }
    let exchanged = [moved("a", &records[1]), moved("b", &records[0]), records[2].clone()];
    stage.write_mdb(&with_image(&exchanged));
    stage.wait("c", Status::Synced, "base").await;
    let wrong = stage.wait("a", Status::WrongMachine, "base").await;
    assert!(wrong.detail.contains("by its name this is b, "), "{}", wrong.detail);
    stage.wait("b", Status::WrongMachine, "base").await;
    // Two records for one machine: the name tells whose it is, and no word can help.
    let doubled = [records[0].clone(), moved("b", &records[0]), records[2].clone()];
    stage.write_mdb(&with_image(&doubled));
    stage.wait("a", Status::Synced, "base").await;
    let wrong = stage.wait("b", Status::WrongMachine, "base").await;
    assert!(wrong.detail.contains("the same subd answers for a, "), "{}", wrong.detail);
    let refused = stage.domtool(&["trust", "b", "--why", "it is fine"]).await;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(*subs[1].calls.lock().unwrap(), Vec::<&str>::new());
    stage.write_mdb(&with_image(&records));
    stage.wait("b", Status::Synced, "base").await;
    assert_eq!(stage.domtool(&["trust", "a", "--why", "why"]).await.status.code(), Some(1));
    // They were meant to be exchanged.
    stage.write_mdb(&with_image(&exchanged));
    stage.wait("a", Status::WrongMachine, "base").await;
    stage.wait("b", Status::WrongMachine, "base").await;
    for (pattern, part) in [
        ("x*", "no machine of the machine database is called x*"),
        ("[c-z]", "no machine that matches [c-z] has the status wrong-machine"),
        ("[", "error parsing glob"),
    ] {
        let refused = stage.domtool(&["trust", pattern, "a", "--why", "renamed"]).await;
        let (code, _, talk) = exit_and_output(&refused);
        assert!(code == Some(1) && talk.contains(part), "{pattern}: {talk}");
    }
    stage.wait("a", Status::WrongMachine, "base").await;
    let trusted =
        stage.domtool(&["--format", "json", "trust", "{a,b}", "[ac]", "--why", "renamed"]).await;
    let names: Vec<String> = serde_json::from_slice(&trusted.stdout).unwrap();
    assert_eq!(names, ["a", "b"]);
    stage.wait("a", Status::Synced, "base").await;
    stage.wait("b", Status::Synced, "base").await;
    assert!(stage.terminate().success());
}
