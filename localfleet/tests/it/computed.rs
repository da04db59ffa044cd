//! Computed files with real daemons: content by location, secrets, a server that is away, kills.

mod crashes;
mod gated;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use api::certificate::Certificate;
use api::dominator::content::{ContentChange, ContentStage};
use api::dominator::{Status, SubSummary};
use certs::pem::{certificates_of, key_belongs};
use model::mdb::Machine;
use nix::sys::signal::Signal;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::faults::signal;
use crate::orders::domtool;
use crate::own_certificates::own_files_below_root;
use crate::trees;

const SECRET: &str = "the key of the site\n";

/// The configuration of the filegen-server in a directory, and the list of computed files.
struct Generators {
    config: PathBuf,
    template: PathBuf,
    list: PathBuf,
}

impl Generators {
    fn make(directory: &Path, source: &str) -> Self {
        fs::create_dir_all(directory).unwrap();
        let path = |name: &str| directory.join(name);
        let config = "[[generator]]\npath = \"/etc/resolv.conf\"\nkind = \"template\"\n\
                      file = \"resolv.conf.j2\"\n\n[[generator]]\npath = \"/etc/site.key\"\n\
                      kind = \"file\"\nfile = \"site.key\"\nsecret = true\n";
        fs::write(path("config.toml"), config).unwrap();
        fs::write(path("site.key"), SECRET).unwrap();
        let list = format!("/etc/resolv.conf {source}\n/etc/site.key {source}\n");
        fs::write(path("computed"), list).unwrap();
        let made = Self {
            config: path("config.toml"),
            template: path("resolv.conf.j2"),
            list: path("computed"),
        };
        made.write_template("first");
        made
    }

    fn write_template(&self, word: &str) {
        let text = format!("# {word}\nsearch {{{{ Location }}}}.example\n");
        fs::write(&self.template, text).unwrap();
    }
}

fn require(scenario: &Scenario, image: &str, locations: &[&str]) {
    let machines = scenario.fleet.subs.iter().zip(locations).map(|(sub, location)| Machine {
        required_image: image.to_owned(),
        location: (*location).to_owned(),
        ..sub.record()
    });
    scenario.fleet.replace_mdb(&machines.collect::<Vec<_>>()).unwrap();
}

/// Waits until the machines have this content, and are synced again.
fn wait_for(scenario: &mut Scenario, contents: &[&str]) {
    wait_for_content(scenario, contents);
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
}

fn wait_for_content(scenario: &Scenario, contents: &[&str]) {
    let subs = &scenario.fleet.subs;
    let content = |root: &Path| fs::read_to_string(root.join("etc/resolv.conf"));
    eventually("the machines have their content", || {
        let found: Vec<String> =
            subs.iter().map(|sub| content(&sub.root).unwrap_or_default()).collect();
        if found == contents { Ok(()) } else { Err(found) }
    });
}

/// Adds an image with the computed files of `list`.
pub fn add(scenario: &Scenario, name: &str, tree: &Path, list: &Path) {
    let rules = |file: &str| scenario.directory.path().join(file).into_os_string();
    scenario.imagetool(&[
        "--format".into(),
        "json".into(),
        "add".into(),
        "--computed".into(),
        list.into(),
        name.into(),
        tree.into(),
        rules("filter"),
        rules("triggers"),
        "--required-paths=".into(),
    ]);
}

pub fn contains(directory: &Path, text: &str) -> bool {
    walkdir::WalkDir::new(directory).into_iter().any(|entry| {
        let entry = entry.unwrap();
        let content = fs::read(entry.path()).unwrap_or_default();
        entry.file_type().is_file()
            && content.windows(text.len()).any(|window| window == text.as_bytes())
    })
}

#[test]
fn machines_get_the_content_that_is_made_for_them_and_keep_it_while_its_server_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::start(2);
    let trees = [1, 2].map(|version| {
        let tree = directory.path().join(version.to_string());
        trees::make(&tree, version);
        tree
    });
    for name in ["etc/resolv.conf", "etc/site.key"] {
        fs::write(trees[1].join(name), "a placeholder").unwrap();
    }
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(trees[1].join("etc/site.key"), private).unwrap();
    scenario.add("test/1", &trees[0]);
    scenario.converge("test/1");
    let source = scenario.fleet.addresses().filegen.to_string();
    let generators = Generators::make(&directory.path().join("filegen"), &source);
    add(&scenario, "test/2", &trees[1], &generators.list);

    // There is no server: the machines stay at their former image, and drift is repaired.
    require(&scenario, "test/2", &["nyc", "sfo"]);
    let waits = |subs: &[SubSummary]| {
        let waits =
            format!("the content of computed files is not known: /etc/resolv.conf from {source}: ");
        subs.iter().all(|sub| {
            sub.status == Status::WaitingForComputedFiles && sub.detail.starts_with(&waits)
        })
    };
    scenario.wait_until("both machines wait", waits);
    let drifted = scenario.fleet.subs[0].root.join("etc/setting-1");
    fs::write(&drifted, "by hand").unwrap();
    eventually("the drift is repaired", || match fs::read_to_string(&drifted) {
        Ok(content) if content == "1 of 1\n" => Ok(()),
        other => Err(other),
    });
    scenario.wait_until("both machines wait", waits);

    let mut server = scenario.fleet.start_filegen(&generators.config).unwrap();
    let content = |word: &str, location: &str| format!("# {word}\nsearch {location}.example\n");
    wait_for(&mut scenario, &[&content("first", "nyc"), &content("first", "sfo")]);
    let key = scenario.fleet.subs[0].root.join("etc/site.key");
    assert_eq!(fs::read_to_string(&key).unwrap(), SECRET);
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);

    // Another location, and another template: each is an update of one file.
    require(&scenario, "test/2", &["sfo", "sfo"]);
    wait_for(&mut scenario, &[&content("first", "sfo"), &content("first", "sfo")]);
    generators.write_template("second");
    wait_for(&mut scenario, &[&content("second", "sfo"), &content("second", "sfo")]);
    let poll = scenario.fleet.detail("sub-1").unwrap().poll.unwrap();
    assert_eq!(poll.last_update.unwrap().operations, 1);
    let words = ["--path", "/etc/resolv.conf", "--reason", "computed", "--host", "sub-1"];
    let (code, events, said) =
        domtool(&scenario, &[&["--format", "json", "events"], &words[..]].concat());
    assert_eq!(code, 0, "{said}");
    let events: Vec<serde_json::Value> = serde_json::from_str(&events).unwrap();
    assert_eq!(events.len(), 3, "{events:#?}");

    // The server is gone. What machines have is kept and repaired, over a kill of the dominator.
    server.kill().unwrap();
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    fs::write(scenario.fleet.subs[1].root.join("etc/resolv.conf"), "by hand").unwrap();
    wait_for(&mut scenario, &[&content("second", "sfo"), &content("second", "sfo")]);

    // Content is nowhere but on the machines and in the private database of the dominator.
    let place = |name: &str| scenario.directory.path().join(name);
    let mode = fs::metadata(place("dominator/computed.redb")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for name in ["log", "imageserver", "dominator/audit", "filegen-server"] {
        assert!(!contains(&place(name), SECRET.trim_end()), "the secret is in {name}");
    }
    assert!(contains(&place("filegen-server"), "FileGenerator.GetSecrets"), "it is not recorded");
}

#[test]
fn content_stays_and_an_alarm_is_raised_while_a_program_fails() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let tell = format!("tee -a {}", path("told").display());
    let mut scenario = Scenario::start_with(1, &[("--alarm-command", &tell)]);
    let write = |script: &str| {
        fs::write(path("new"), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(path("new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(path("new"), path("key")).unwrap();
    };
    // The key of the site, in base64.
    write("echo '{\"Data\": \"dGhlIGtleSBvZiB0aGUgc2l0ZQo=\"}'");
    let config = "[[generator]]\npath = \"/etc/site.key\"\nkind = \"program\"\n\
                  command = [\"key\"]\n";
    fs::write(path("config.toml"), config).unwrap();
    let source = scenario.fleet.addresses().filegen.to_string();
    fs::write(path("computed"), format!("/etc/site.key {source}\n")).unwrap();
    trees::make(&path("tree"), 1);
    fs::write(path("tree/etc/site.key"), "a placeholder").unwrap();
    add(&scenario, "test/1", &path("tree"), &path("computed"));
    let _server = scenario.fleet.start_filegen(&path("config.toml")).unwrap();
    scenario.converge("test/1");
    let key = scenario.fleet.subs[0].root.join("etc/site.key");
    assert_eq!(fs::read_to_string(&key).unwrap(), SECRET);

    // Of each alarm, whether it begins or ends, what it is about, and its text.
    let told = || -> Vec<[String; 3]> {
        let told = fs::read_to_string(path("told")).unwrap_or_default();
        let reports = told.lines().map(|line| serde_json::from_str(line).unwrap());
        let of = |report: serde_json::Value| {
            ["begun", "ended"].map(|when| {
                let alarms = report[when].as_array().cloned().unwrap_or_default();
                alarms.into_iter().map(move |alarm| {
                    [when, alarm["about"].as_str().unwrap(), alarm["text"].as_str().unwrap()]
                        .map(str::to_owned)
                })
            })
        };
        reports.flat_map(of).flatten().collect()
    };
    write("echo the key of the site; exit 7");
    let text = format!("/etc/site.key of sub-1: {}: exit status: 7", path("key").display());
    let begun = ["begun".to_owned(), source.clone(), text];
    eventually("the alarm begins", || {
        let told = told();
        if told == [begun.clone()] { Ok(()) } else { Err(told) }
    });
    fs::write(&key, "by hand").unwrap();
    eventually("the drift is repaired", || match fs::read_to_string(&key) {
        Ok(content) if content == SECRET => Ok(()),
        other => Err(other),
    });
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();

    write("echo '{\"Data\": \"YW5vdGhlciBrZXkK\"}'");
    eventually("the machine has the other key", || match fs::read_to_string(&key) {
        Ok(content) if content == "another key\n" => Ok(()),
        other => Err(other),
    });
    eventually("the alarm ends", || {
        let told = told();
        let is_end = |[when, about, _]: &[String; 3]| when == "ended" && *about == source;
        if told.last().is_some_and(is_end) { Ok(()) } else { Err(told) }
    });
}

/// The serial numbers of the certificates of all machines, if each has the key for it.
fn serials(scenario: &Scenario) -> Result<Vec<String>, String> {
    let serial = |root: &Path| {
        let file = |name: &str| root.join("etc/tls").join(name);
        let text = |error: &dyn std::error::Error| model::display::error_chain(error);
        let chain = certificates_of(&file("cert.pem")).map_err(|error| text(&error))?;
        let certificate = Certificate::read(&chain[0]).map_err(|error| text(&error))?;
        match key_belongs(&file("key.pem"), &chain[0]) {
            Ok(true) => Ok(certificate.serial),
            Ok(false) => Err("the key is not that of the certificate".to_owned()),
            Err(error) => Err(text(&error)),
        }
    };
    scenario.fleet.subs.iter().map(|sub| serial(&sub.root)).collect()
}

#[test]
fn certificates_are_renewed_whatever_is_killed_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut scenario = Scenario::start(2);
    scenario.fleet.certificates().make_authority_for_machines(&path("ca")).unwrap();
    let config = "[[generator]]\npath = \"/etc/tls/cert.pem\"\nkind = \"certificate\"\n\
                  authority = \"ca\"\nkey = \"server\"\nkey_path = \"/etc/tls/key.pem\"\n\
                  lifetime = 60\nrenew_after = 6\n";
    fs::write(path("config.toml"), config).unwrap();
    let source = scenario.fleet.addresses().filegen.to_string();
    let list = format!("/etc/tls/cert.pem {source}\n/etc/tls/key.pem {source}\n");
    fs::write(path("computed"), list).unwrap();
    trees::make(&path("tree"), 1);
    fs::create_dir(path("tree/etc/tls")).unwrap();
    for name in ["cert.pem", "key.pem"] {
        fs::write(path("tree/etc/tls").join(name), "a placeholder").unwrap();
    }
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(path("tree/etc/tls/key.pem"), private).unwrap();
    add(&scenario, "test/1", &path("tree"), &path("computed"));
    let mut server = scenario.fleet.start_filegen(&path("config.toml")).unwrap();
    scenario.converge("test/1");
    let mut before = serials(&scenario).unwrap();
    for round in 0..4 {
        match round {
            0 => {}
            1 => {
                server.kill().unwrap();
                server.start_again().unwrap();
            }
            2 => {
                scenario.fleet.dominator.kill().unwrap();
                scenario.fleet.dominator.start_again().unwrap();
            }
            _ => {
                let daemon = &mut scenario.fleet.subs[0].daemon;
                daemon.kill().unwrap();
                daemon.start_again().unwrap();
            }
        }
        before = eventually("all machines have other certificates, with their keys", || {
            match serials(&scenario) {
                Ok(now) if now.iter().zip(&before).all(|(now, before)| now != before) => Ok(now),
                other => Err(other),
            }
        });
    }
}

#[test]
fn a_changed_template_is_tried_on_first_machines_taken_back_and_corrected() {
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::start(5);
    let tree = directory.path().join("tree");
    trees::make(&tree, 1);
    for name in ["etc/resolv.conf", "etc/site.key"] {
        fs::write(tree.join(name), "a placeholder").unwrap();
    }
    let source = scenario.fleet.addresses().filegen.to_string();
    let generators = Generators::make(&directory.path().join("filegen"), &source);
    add(&scenario, "test/2", &tree, &generators.list);
    let _server = scenario.fleet.start_filegen(&generators.config).unwrap();
    require(&scenario, "test/2", &["nyc"; 5]);
    let [first, second, third] =
        ["first", "second", "third"].map(|word| format!("# {word}\nsearch nyc.example\n"));
    wait_for(&mut scenario, &[first.as_str(); 5]);

    // One of the first machines does not come to an end, so that the others wait.
    signal(&scenario.fleet.subs[1].daemon, Signal::SIGSTOP);
    generators.write_template("second");
    let [old, new] = [first.as_str(), second.as_str()];
    wait_for_content(&scenario, &[new, old, new, old, old]);
    let id = format!("{source}/2");
    let shown = |scenario: &Scenario| {
        let (code, out, said) = domtool(scenario, &["--format", "json", "computed", "show", &id]);
        assert_eq!(code, 0, "{said}");
        let shown: ContentChange = serde_json::from_str(&out).unwrap();
        (shown.stage, shown.verified, shown.trying, shown.waiting)
    };
    let trying = vec![scenario.fleet.subs[1].record().hostname];
    let expected = (ContentStage::First, 2, trying, 2);
    eventually("the machines that have it are verified", || match shown(&scenario) {
        now if now == expected => Ok(()),
        now => Err(now),
    });

    // It is taken back everywhere, also on the machine that comes back later, and after a kill.
    let words = ["computed", "rollback", &id, "--why", "wrong servers"];
    let (code, _, said) = domtool(&scenario, &words);
    let told = format!("{id} is stopped; machines that have it go back to their former content.\n");
    assert_eq!((code, said), (0, told));
    wait_for_content(&scenario, &[first.as_str(); 5]);
    signal(&scenario.fleet.subs[1].daemon, Signal::SIGCONT);
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    wait_for(&mut scenario, &[first.as_str(); 5]);
    let why = ContentStage::Stopped("by order: wrong servers".to_owned());
    assert_eq!(shown(&scenario), (why, 2, vec![], 5));
    // The filegen-server tells it to other dominators.
    let kept = scenario.directory.path().join("filegen-server/revisions.json");
    eventually("the server knows", || match fs::read_to_string(&kept).unwrap() {
        text if text.contains("by order: wrong servers") => Ok(()),
        text => Err(text),
    });

    generators.write_template("third");
    wait_for(&mut scenario, &[third.as_str(); 5]);
}

#[test]
fn a_sub_gets_other_certificates_for_the_key_that_never_leaves_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut scenario = Scenario::start(1);
    scenario.fleet.certificates().make_authority_for_machines(&path("ca")).unwrap();
    let config = "[[generator]]\npath = \"/etc/dominator/tls/cert.pem\"\nkind = \"certificate\"\n\
                  authority = \"ca\"\npowers = [\"ObjectServer.GetObjects\"]\n\
                  with_address = true\nlifetime = 30\nrenew_after = 10\n";
    fs::write(path("config.toml"), config).unwrap();
    let source = scenario.fleet.addresses().filegen.to_string();
    fs::write(path("computed"), format!("/etc/dominator/tls/cert.pem {source}\n")).unwrap();
    trees::make(&path("tree"), 1);
    fs::create_dir_all(path("tree/etc/dominator/tls")).unwrap();
    fs::write(path("tree/etc/dominator/tls/cert.pem"), "a placeholder").unwrap();
    let filter = scenario.directory.path().join("filter");
    let lines = fs::read_to_string(&filter).unwrap() + "/etc/dominator/tls/(ca|key)[.]pem$\n";
    fs::write(&filter, lines).unwrap();
    let own = own_files_below_root(&mut scenario, 0);
    let key = fs::read(own.join("key.pem")).unwrap();
    let serial = || {
        let chain = certificates_of(&own.join("cert.pem")).map_err(|error| error.to_string())?;
        let certificate = Certificate::read(&chain[0]).map_err(|error| error.to_string())?;
        match key_belongs(&own.join("key.pem"), &chain[0]) {
            Ok(true) => Ok(certificate.serial),
            other => Err(format!("{other:?}")),
        }
    };
    let mut before = serial().unwrap();
    add(&scenario, "test/1", &path("tree"), &path("computed"));
    let server = scenario.fleet.start_filegen(&path("config.toml")).unwrap();
    scenario.fleet.keep(server);
    scenario.converge("test/1");
    let process = scenario.fleet.subs[0].daemon.id();
    // For longer than the first of them is valid.
    for _ in 0..5 {
        before = eventually("there is another certificate for the same key", || {
            scenario.fleet.check().unwrap();
            serial().and_then(|now| if now == before { Err(now) } else { Ok(now) })
        });
    }
    assert_eq!(fs::read(own.join("key.pem")).unwrap(), key);
    assert_eq!(scenario.fleet.subs[0].daemon.id(), process);
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();
    // The dominator has come with the new ones each time, so that no former key is kept.
    let record = scenario.fleet.subs[0].root.join(".subd/state/tls-files.json");
    eventually("no former key is kept", || {
        let text = fs::read_to_string(&record).unwrap();
        if text.contains("PRIVATE KEY") { Err("it is kept") } else { Ok(()) }
    });
    // Nobody else has the key.
    let text = String::from_utf8(key).unwrap();
    let line = text.lines().nth(1).unwrap();
    for name in ["dominator", "filegen-server", "imageserver", "log"] {
        assert!(!contains(&scenario.directory.path().join(name), line), "the key is in {name}");
    }
}
