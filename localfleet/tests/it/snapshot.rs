//! An image is made of what a running machine has.

use std::fs;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::converges::Scenario;
use crate::trees;

#[test]
fn a_running_machine_becomes_an_image_even_while_it_changes() {
    let mut scenario = Scenario::start(1);
    let first = scenario.directory.path().join("1");
    trees::make(&first, 1);
    scenario.add("test/1", &first);
    scenario.converge("test/1");
    let host = scenario.fleet.subs[0].address.to_string();
    let root = scenario.fleet.subs[0].root.clone();
    let file = |name: &str| scenario.directory.path().join(name).display().to_string();
    let (filter, triggers) = (file("filter"), file("triggers"));
    let run = |words: &[&str]| {
        let output = scenario.fleet.imagetool(words).unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), said)
    };
    let add = |name: &str| run(&["add-from-sub", name, &host, &filter, &triggers]);

    // All contents are on the image server: nothing is read from the machine but its tree.
    let (code, _, said) = add("snap/1");
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("; sent 0 new objects (0 B), "), "{said}");
    let (code, out, said) = run(&["diff", "test/1", "snap/1"]);
    assert_eq!((code, out.as_str()), (0, ""), "{said}");

    // What is computed for each machine is not taken from this one.
    let list = file("computed");
    fs::write(&list, "/etc/setting-7 files.example\n").unwrap();
    let words = ["add-from-sub", "snap/0", &host, &filter, &triggers, "--computed", &list];
    let (code, _, said) = run(&words);
    assert_eq!(code, 0, "{said}");
    let (code, out, said) = run(&["show-computed-files", "snap/0"]);
    let want = "PATH            SOURCE\n/etc/setting-7  files.example:6972\n";
    assert_eq!((code, out.as_str()), (0, want), "{said}");

    // What was changed by hand is in the next one, and nothing else. A file of several pieces, an
    // empty one, and one that changes all the time are among it.
    scenario.fleet.domtool(&["disable-updates", "by hand"]).unwrap();
    let large: Vec<u8> = (0..3_000_001_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(root.join("etc/large"), &large).unwrap();
    fs::write(root.join("etc/none"), "").unwrap();
    fs::write(root.join("etc/growing"), "").unwrap();
    fs::remove_file(root.join("etc/setting-7")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (path, stop) = (root.join("etc/growing"), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut file = fs::File::options().append(true).open(path).unwrap();
            for _ in 0..2_000 {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                file.write_all(b"more\n").unwrap();
                std::thread::yield_now();
            }
        })
    };
    let (code, _, said) = add("snap/2");
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    assert_eq!(code, 0, "{said}");
    let (code, out, _) = run(&["diff", "test/1", "snap/2", "--format", "json"]);
    assert_eq!(code, 3);
    let diff: serde_json::Value = serde_json::from_str(&out).unwrap();
    let paths = |what: &str| -> Vec<String> {
        let entries = diff["entries"][what].as_array().unwrap().iter();
        entries.map(|entry| entry["path"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(paths("added"), ["/etc/growing", "/etc/large", "/etc/none"]);
    assert_eq!(paths("removed"), ["/etc/setting-7"]);
    assert_eq!(paths("changed"), Vec::<String>::new());
    let (code, _, said) = run(&["verify", "snap/2"]);
    assert_eq!(code, 0, "{said}");
    let copy = file("large");
    run(&["get-file", "snap/2", "/etc/large", "-o", &copy]);
    assert_eq!(fs::read(&copy).unwrap(), large);

    // What it does not scan is told.
    let other = file("other-filter");
    fs::write(&other, "/var/log/.*\n").unwrap();
    let (code, _, said) = run(&["add-from-sub", "snap/3", &host, &other, &triggers]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("does not scan what these lines match"), "{said}");
    let (code, _, said) = run(&["add-from-sub", "snap/4", "127.0.0.1:1", &filter, "-"]);
    assert_eq!(code, 1);
    assert!(said.ends_with("hint: is subd running there, and is this its address?\n"), "{said}");
}
