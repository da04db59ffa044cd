//! The audit logs and the pages of real daemons: what is changed is on record whatever happens to
//! them, and what is shown does no harm.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use api::audit::record::{AuditEvent, CallOutcome, check_line};
use api::image_server::directories::{ListDirectories, ListDirectoriesRequest};
use api::method::Effect;
use localfleet::fleet::client_of;
use localfleet::fleet::daemon_process::Daemon;
use rpc::audit_log::files_of;
use rpc::tls::Security;
use serde_json::json;
use testing::eventually;

use crate::converges::{Scenario, programs};
use crate::trees;

/// The requests of all methods, as `common` pins them.
const SAMPLES: [&str; 2] = [
    include_str!("../../../common/rpc/tests/it/golden/subd.txt"),
    include_str!("../../../common/rpc/tests/it/golden/image_server.txt"),
];
const SAMPLES_OF_DOMINATOR: &str =
    include_str!("../../../common/rpc/tests/it/golden/dominator.txt");

fn samples() -> BTreeMap<&'static str, &'static str> {
    let mut samples = BTreeMap::new();
    for text in SAMPLES.into_iter().chain([SAMPLES_OF_DOMINATOR]) {
        let mut lines = text.lines();
        let mut name = "";
        while let Some(line) = lines.next() {
            if let Some(method) = line.strip_prefix("== ") {
                name = method;
            } else if line == "request, JSON:" {
                samples.insert(name, lines.next().unwrap().trim());
            }
        }
    }
    samples
}

/// Sends a request by hand, and gives the whole response.
fn ask(address: SocketAddr, verb: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!(
        "{verb} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    // A daemon that is killed resets the connection.
    let _sent = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    let mut reply = Vec::new();
    let _read = stream.read_to_end(&mut reply);
    String::from_utf8_lossy(&reply).into_owned()
}

fn events(log: &Path) -> Vec<(u64, AuditEvent)> {
    let mut events = Vec::new();
    for file in files_of(log).unwrap() {
        for line in fs::read(file).unwrap().split(|byte| *byte == b'\n') {
            let sealed = check_line(line).ok();
            events
                .extend(sealed.map(|sealed| (sealed.head.sequence, sealed.record.unwrap().event)));
        }
    }
    events
}

/// The methods whose calls have begun by the log, less those without an end.
fn recorded(log: &Path) -> BTreeSet<String> {
    let (mut begun, mut ended) = (BTreeMap::new(), BTreeSet::new());
    for (sequence, event) in events(log) {
        match event {
            AuditEvent::Begun(act) => drop(begun.insert(sequence, act.method)),
            AuditEvent::Ended { of, .. } => ended.extend(begun.remove(&of)),
            _ => {}
        }
    }
    // What the dominator was asking when all were stopped may have no end.
    let ended: BTreeSet<String> = ended;
    assert!(begun.values().all(|method| ended.contains(method)), "{begun:?} in {}", log.display());
    ended
}

/// Runs `domtool audit` with these words; gives its exit code and what it prints.
fn domtool_audit(bin: &Path, words: &[&str]) -> (i32, String) {
    let output = Command::new(bin.join("domtool")).arg("audit").args(words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code().unwrap(), text + &String::from_utf8_lossy(&output.stderr))
}

#[test]
fn every_method_that_changes_something_is_recorded_by_its_daemon() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start_insecure(1);
    scenario.add("test/1", tree.path());
    scenario.converge("test/1");
    let (addresses, sub) = (scenario.fleet.addresses().clone(), scenario.fleet.subs[0].address);
    let directory = scenario.directory.path().to_owned();
    let samples = samples();
    let mut logs: BTreeMap<&str, (PathBuf, BTreeSet<String>)> = BTreeMap::new();
    for method in api::methods() {
        let (service, _) = method.name.split_once('.').unwrap();
        let (address, log) = match service {
            "Subd" => (sub, scenario.fleet.subs[0].root.join(".subd/audit/audit.log")),
            "ImageServer" | "ObjectServer" => {
                (addresses.imageserver, directory.join("imageserver/audit/audit.log"))
            }
            "Dominator" => (addresses.dominator, directory.join("dominator/audit/audit.log")),
            _ => continue,
        };
        let log = logs.entry(service).or_insert_with(|| (log, BTreeSet::new()));
        if method.effect == Effect::Tells {
            continue;
        }
        log.1.insert(method.name.to_owned());
        // An upload is no JSON; imagetool has made one.
        if let Some(sample) = samples.get(method.name) {
            let reply = ask(address, "POST", &format!("/rpc/{}", method.name), sample);
            assert!(reply.starts_with("HTTP/1.1 "), "{}: {reply}", method.name);
            assert!(!reply.contains(": bad request: "), "{}: {reply}", method.name);
        } else {
            assert_eq!(method.name, "ObjectServer.AddObjects");
        }
    }
    scenario.fleet.stop().unwrap();
    let bin = directory.join("bin");
    for (service, (log, methods)) in &logs {
        let recorded = recorded(log);
        let of_service = recorded.iter().filter(|name| name.starts_with(&format!("{service}.")));
        let of_service: BTreeSet<String> = of_service.cloned().collect();
        assert_eq!(of_service, *methods, "{service}");
        let (code, text) = domtool_audit(&bin, &["verify", log.to_str().unwrap()]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("whole: "), "{text}");
    }
    // What the dominator did to the machine is recorded there, too.
    let log = logs["Subd"].0.to_str().unwrap();
    let words = ["show", log, "--method", "Subd.Prepare", "--limit", "0", "--format", "json"];
    let (code, text) = domtool_audit(&bin, &words);
    let rows: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, 0, "{text}");
    let first = &rows[0];
    assert_eq!((&first["outcome"], &first["user"]), (&json!("done"), &json!("")), "{first}");
    assert!(first["arguments"].as_str().unwrap().contains("image=test/1"), "{first}");
    let of_dominator = events(&logs["Dominator"].0);
    let is_mdb = |event: &AuditEvent| match event {
        AuditEvent::Decided { decision, .. } => decision == "take-mdb",
        _ => false,
    };
    assert!(of_dominator.iter().any(|(_, event)| is_mdb(event)), "{of_dominator:?}");

    // Whoever changes a record is found out.
    let text = fs::read_to_string(log).unwrap();
    fs::write(log, text.replacen("image=test/1", "image=test/2", 1)).unwrap();
    let (code, text) = domtool_audit(&bin, &["verify", log]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains(": it was changed: its hash is another one\n"), "{text}");
    let (code, text) = domtool_audit(&bin, &["verify", "/nowhere/audit.log"]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("there is no audit log `/nowhere/audit.log`"), "{text}");
}

/// An image server in a directory.
fn image_server(directory: &Path, address: SocketAddr) -> Daemon {
    let bin = programs(directory);
    let data = directory.join("data").display().to_string();
    let words = ["--insecure", "--listen", &address.to_string(), "--data", &data];
    let log = directory.join("log");
    Daemon::start("imageserver", &bin.join("imageserver"), words.map(Into::into).to_vec(), log)
        .unwrap()
}

fn free_address() -> SocketAddr {
    // Bound and let go: nobody else on this address takes the same port meanwhile.
    std::net::TcpListener::bind("127.19.0.2:0").unwrap().local_addr().unwrap()
}

fn wait_for(address: SocketAddr) {
    eventually("the daemon listens", || TcpStream::connect(address).ok());
}

#[test]
fn a_killed_daemon_has_everything_on_record_that_it_did() {
    let directory = tempfile::tempdir().unwrap();
    let address = free_address();
    let mut server = image_server(directory.path(), address);
    let next = AtomicU32::new(0);
    let mut answered = BTreeSet::new();
    for round in 0..3 {
        wait_for(address);
        let stop = AtomicBool::new(false);
        let count = AtomicU32::new(0);
        answered.extend(std::thread::scope(|scope| {
            let make = || {
                let mut made = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let name = format!("d{}", next.fetch_add(1, Ordering::Relaxed));
                    let body = json!({"name": name, "parents": false, "owners": null});
                    let path = "/rpc/ImageServer.MakeDirectory";
                    if TcpStream::connect(address).is_err() {
                        continue;
                    }
                    let reply =
                        std::panic::catch_unwind(|| ask(address, "POST", path, &body.to_string()));
                    if reply.is_ok_and(|reply| reply.starts_with("HTTP/1.1 200")) {
                        made.push(name);
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
                made
            };
            let threads = [(); 4].map(|()| scope.spawn(make));
            while count.load(Ordering::Relaxed) < 20 + 15 * round {
                std::thread::yield_now();
            }
            server.kill().unwrap();
            stop.store(true, Ordering::Relaxed);
            threads.map(|thread| thread.join().unwrap()).concat()
        }));
        server.start_again().unwrap();
    }
    wait_for(address);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = client_of(address, &Security::Insecure);
    let mut there = BTreeSet::new();
    let mut request = ListDirectoriesRequest::default();
    loop {
        let reply = runtime.block_on(client.call::<ListDirectories>(&request)).unwrap();
        request.after = reply.directories.last().map(|directory| directory.name.clone());
        there.extend(reply.directories.iter().map(|directory| directory.name.to_string()));
        if !reply.more {
            break;
        }
    }
    server.stop().unwrap();

    let log = directory.path().join("data/audit/audit.log");
    let (code, text) =
        domtool_audit(&directory.path().join("bin"), &["verify", log.to_str().unwrap()]);
    assert_eq!(code, 0, "{text}");
    let (mut begun, mut done) = (BTreeMap::new(), BTreeSet::new());
    for (sequence, event) in events(&log) {
        match event {
            AuditEvent::Begun(act) => {
                let name = act.arguments.strip_prefix("directory=").unwrap();
                begun.insert(sequence, name.split(' ').next().unwrap().to_owned());
            }
            AuditEvent::Ended { of, outcome: CallOutcome::Done, .. } => {
                done.insert(begun[&of].clone());
            }
            _ => {}
        }
    }
    let begun: BTreeSet<String> = begun.into_values().collect();
    assert!(answered.len() >= 60 && answered.is_subset(&done), "{answered:?} {done:?}");
    assert!(there.is_subset(&begun), "{there:?} {begun:?}");
    assert!(done.is_subset(&there), "{done:?} {there:?}");
}

/// Reads all pages that can be reached from `/`, and gives them by their paths.
fn walk(address: SocketAddr) -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    let mut paths = vec!["/".to_owned(), "/nowhere<script>".to_owned()];
    while let Some(path) = paths.pop() {
        if pages.contains_key(&path) || pages.len() > 300 {
            continue;
        }
        let page = ask(address, "GET", &path, "");
        for link in page.split("<a href=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            if link.starts_with('/') {
                paths.push(link.replace("&amp;", "&"));
            }
        }
        pages.insert(path, page);
    }
    pages
}

#[test]
fn pages_change_nothing_and_foreign_texts_in_them_are_text() {
    const EVIL: &str = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>";
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    fs::create_dir_all(tree.path().join("etc")).unwrap();
    fs::write(tree.path().join("etc/\"><script>alert(3)<!--"), "x").unwrap();
    let mut scenario = Scenario::start_insecure(1);
    scenario.add("test/1", tree.path());
    let addresses = scenario.fleet.addresses().clone();
    let sub = scenario.fleet.subs[0].address;
    let post = |address, method: &str, body: serde_json::Value| {
        let reply = ask(address, "POST", &format!("/rpc/{method}"), &body.to_string());
        assert!(reply.starts_with("HTTP/1.1 200"), "{method}: {reply}");
    };
    let (dominator, images) = (addresses.dominator, addresses.imageserver);
    let brake = json!({"reason": EVIL, "who": EVIL});
    post(dominator, "Dominator.DisableUpdates", brake);
    let tags = json!({"name": "test/1", "set": {"note": EVIL}, "remove": []});
    post(images, "ImageServer.ChangeTags", tags);
    let owners = json!({"groups": [EVIL], "users": []});
    let made = json!({"name": "evil", "parents": false, "owners": owners});
    post(images, "ImageServer.MakeDirectory", made);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let until = json!({"seconds": (now.as_secs() + 3_600).to_string(), "nanoseconds": 0});
    post(sub, "Subd.Pause", json!({"until": until, "reason": EVIL}));
    let machine = json!({
        "Hostname": "sub-1",
        "IpAddress": sub.ip(),
        "SubdPort": sub.port(),
        "RequiredImage": "test/1",
        "Location": EVIL,
        "OwnerGroups": [EVIL],
        "Tags": {"note": EVIL},
    });
    let machine = serde_json::from_value(machine).unwrap();
    scenario.fleet.replace_mdb(&[machine]).unwrap();
    let is_planned = |subs: &[api::dominator::SubSummary]| {
        let status = |sub: &api::dominator::SubSummary| sub.status.name();
        subs.iter().any(|sub| ["updates-disabled", "held", "paused"].contains(&status(sub)))
    };
    scenario.wait_until("the plan is made", is_planned);

    // mdbd, too.
    let directory = scenario.directory.path();
    let source = directory.join("<script>alert(4)<").display().to_string();
    fs::create_dir_all(Path::new(&source).parent().unwrap()).unwrap();
    fs::write(&source, "not a database <script>").unwrap();
    let config = directory.join("mdbd.toml");
    fs::write(&config, format!("insecure = true\n[[source]]\nname = \"a\"\nfile = '{source}'\n"))
        .unwrap();
    let address = free_address();
    let words = [
        "--config",
        &config.display().to_string(),
        "--listen",
        &address.to_string(),
        "--mdb",
        &directory.join("made.json").display().to_string(),
        "--state",
        &directory.join("mdbd").display().to_string(),
    ];
    let program = directory.join("bin/mdbd");
    let words = words.map(Into::into).to_vec();
    let _mdbd = Daemon::start("mdbd", &program, words, directory.join("mdbd.log")).unwrap();
    wait_for(address);

    // And filegen-server, whose template fails for a machine.
    let template = directory.join("<script>alert(5)");
    fs::write(&template, "{{ Tags['<script>'] }}").unwrap();
    let config = directory.join("filegen.toml");
    let text = "insecure = true\n[[generator]]\npath = '/etc/<script>'\nkind = 'template'\n\
                file = '<script>alert(5)'\n";
    fs::write(&config, text).unwrap();
    let _filegen = scenario.fleet.start_filegen(&config).unwrap();
    let filegen = scenario.fleet.addresses().filegen;

    for (daemon, address) in [
        ("dominator", dominator),
        ("filegen-server", filegen),
        ("imageserver", images),
        ("subd", sub),
        ("mdbd", address),
    ] {
        let head = || {
            let page = ask(address, "GET", "/audit", "");
            let rest = page.split_once(">Head</th><td>").unwrap_or_else(|| panic!("{page}")).1;
            rest.split('<').next().unwrap().to_owned()
        };
        let before = head();
        let pages = walk(address);
        assert!(pages.len() >= 4, "{daemon}: {:?}", pages.keys());
        let mut shown = 0;
        for (path, page) in &pages {
            let status = page.split(' ').nth(1).unwrap();
            let expected = if path.starts_with("/nowhere") { "400 404" } else { "200" };
            assert!(expected.contains(status), "{daemon} {path}: {page}");
            let body = page.split_once("\r\n\r\n").unwrap().1;
            if page.contains("content-type: text/html") {
                for bad in ["<script", "<img", " style=", " onerror=alert(2)>", "javascript:"] {
                    assert!(!body.contains(bad), "{daemon} {path} has {bad}: {page}");
                }
                assert_eq!(body.matches("<style").count(), 1, "{daemon} {path}");
            }
            shown += body.matches("script&gt;").count() + body.matches("script&#62;").count();
        }
        assert!(shown > 0, "{daemon} shows no foreign text at all");
        // Whatever a verb is, nothing happens.
        for verb in ["POST", "PUT", "DELETE", "PATCH"] {
            for path in pages.keys().filter(|path| !path.contains('<')) {
                let reply = ask(address, verb, path, "");
                assert!(reply.starts_with("HTTP/1.1 405 "), "{daemon} {verb} {path}: {reply}");
            }
        }
        // The dominator may go on by itself; nobody has told it to.
        if daemon != "dominator" {
            assert_eq!(head(), before, "{daemon}");
        }
    }
}
