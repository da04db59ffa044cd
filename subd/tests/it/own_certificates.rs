//! Updates of the TLS files of subd itself: none may lock out who orders it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use api::access::IdentityKind;
use api::certificate::Certificate;
use api::fault::FaultCode;
use api::file_generator::ComputedContent;
use api::subd::{
    Activity, AddObjects, AddObjectsRequest, PollReply, ReplaceCertificate,
    ReplaceCertificateRequest, ScanNow, ScanNowRequest, UpdateOutcome,
};
use certs::authority::{Authority, AuthorityOptions, Issued, Request};
use certs::files::Replace;
use certs::pem::certificates_of;
use certs::record::{Reason, Revocation};
use model::escape::ByteText;
use model::tree::{Metadata, Tree};
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use testing::eventually_async;

use crate::fixture::{Edit, Source, Sub, file, request};
use crate::process::Process;

const DIRECTORY: &str = "etc/dominator/tls";

fn wanted(name: &str, hosts: &[&str]) -> Request {
    Request {
        name: name.to_owned(),
        kind: IdentityKind::Machine,
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        powers: Some(vec!["*.*".to_owned()]),
        ..Request::default()
    }
}

fn revoked(serial: &str) -> Revocation {
    Revocation {
        serial: serial.to_owned(),
        name: "somebody".to_owned(),
        reason: Reason::KeyCompromise,
        revoked_at: 1_700_000_000,
        key: None,
    }
}

fn root_authority() -> Authority {
    Authority::create(&AuthorityOptions { key_in_name: true, ..Default::default() }).unwrap()
}

/// A subd whose TLS files are below its root.
struct Machine {
    sub: Sub,
    source: Source,
    /// The tree with the files that it was started with.
    first: Tree,
    authority: Authority,
    dominator: Security,
    place: tempfile::TempDir,
    updates: u64,
}

/// The files of a machine and its dominator, before subd is started.
struct Made {
    authority: Authority,
    place: tempfile::TempDir,
    security: Security,
    dominator: Security,
}

impl Made {
    fn new() -> Self {
        Self::with(&wanted("test", &["test", "127.0.0.4", "127.0.0.5"]))
    }

    /// `of_machine` is what the certificate of the machine says.
    fn with(of_machine: &Request) -> Self {
        let authority = root_authority();
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        let own = root.join(DIRECTORY);
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        let ca_pem = authority.ca_pem();
        let issue = |request: &Request, directory: &Path| {
            let issued = authority.issue(request).unwrap();
            issued.write(directory, ca_pem, Replace::Own).unwrap();
            Security::open(directory).unwrap()
        };
        let security = issue(of_machine, &own);
        let dominator = issue(&wanted("dominator", &[]), &place.path().join("dominator"));
        Self { authority, place, security, dominator }
    }
}

impl Machine {
    async fn start() -> Self {
        let made = Made::new();
        let root = made.place.path().join("root");
        let sub = Sub::start_with(&root, &[], &made.security, &made.dominator).await;
        Self::of(made, sub).await
    }

    async fn of(made: Made, sub: Sub) -> Self {
        let Made { authority, place, dominator, .. } = made;
        let (_, first) = sub.tree().await;
        let source = Source::start().await;
        Self { sub, source, first, authority, dominator, place, updates: 0 }
    }

    /// Orders an update to `want`. Returns why it is refused; `None` if it is done.
    async fn update(&mut self, want: &Tree) -> Option<String> {
        self.updates += 1;
        let id = self.updates;
        let contents = self.source.objects.lock().unwrap().clone().into_iter();
        let contents =
            contents.map(|(id, bytes)| ComputedContent { id, bytes: ByteText(bytes.to_vec()) });
        let contents = AddObjectsRequest { contents: contents.collect() };
        self.sub.client.call::<AddObjects>(&contents).await.unwrap();
        let (reply, plan) = self.sub.plan(want).await;
        let reply = self.sub.prepare(&request(id, &reply, want, plan)).await.unwrap();
        if reply.activity == (Activity::Prepared { update_id: id }) {
            let last = self.sub.commit(id).await;
            assert_eq!(last.outcome, UpdateOutcome::Done);
            return None;
        }
        match reply.last_update.unwrap().outcome {
            UpdateOutcome::NotPrepared(why) => Some(why),
            outcome => panic!("{outcome:?}"),
        }
    }

    /// The first tree with other files.
    fn tree(&self, files: &[(&str, &str, u32)]) -> Tree {
        let mut edit = Edit::of(&self.first, &self.source);
        for (name, content, mode) in files {
            let node = file(&self.source, content, Metadata::new(*mode, 0, 0));
            edit = edit.put(&format!("/{DIRECTORY}/{name}"), node);
        }
        edit.done()
    }

    fn with_pair(&self, pair: &Issued) -> Tree {
        let files =
            [("cert.pem", &*pair.certificate_pem, 0o644), ("key.pem", &*pair.key_pem, 0o600)];
        self.tree(&files)
    }

    fn files(&self) -> Vec<Vec<u8>> {
        let read = |name| fs::read(self.sub.root.join(DIRECTORY).join(name)).unwrap();
        ["ca.pem", "cert.pem", "key.pem"].map(read).into()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_update_of_its_own_certificates_locks_the_dominator_out() {
    let mut machine = Machine::start().await;
    let good = machine.authority.issue(&wanted("test", &["test", "127.0.0.4"])).unwrap();
    let other = machine.authority.issue(&wanted("test", &["other"])).unwrap();
    let start = Some(system::clock::wall().seconds - 7_200);
    let past =
        Request { start, lifetime: Duration::from_secs(3_600), ..wanted("test", &["127.0.0.4"]) };
    let ended = machine.authority.issue(&past).unwrap();
    let foreign = root_authority();
    let of_foreign = foreign.issue(&wanted("test", &["127.0.0.4"])).unwrap();
    let dominator = certificates_of(&machine.place.path().join("dominator/cert.pem")).unwrap();
    let dominator = Certificate::read(&dominator[0]).unwrap().serial;
    let lists = |serials: &[&str], number| {
        let revocation = |serial: &&str| revoked(serial);
        let all: Vec<Revocation> = serials.iter().map(revocation).collect();
        machine.authority.revocation_list(&all, number).unwrap()
    };
    let list = machine.tree(&[("crl.pem", &lists(&[&dominator], 1), 0o644)]);
    let no_list = machine.tree(&[("crl.pem", "", 0o644)]);
    let harmless = machine.tree(&[("crl.pem", &lists(&["0102"], 2), 0o644)]);
    let before = machine.files();
    let gone =
        Edit::of(&machine.first, &machine.source).remove(&format!("/{DIRECTORY}/key.pem")).done();
    let link = Edit::of(&machine.first, &machine.source)
        .symlink(&format!("/{DIRECTORY}/cert.pem"), "elsewhere.pem")
        .done();
    let authority = &machine.authority.certificate().common_name;
    let zones =
        format!("[[zone]]\nauthority = '{authority}'\nmethods = ['ObjectServer.*', 'Subd.Poll']\n");
    let zones = machine.tree(&[("zones.toml", &zones, 0o644)]);
    let all_gone = Edit::of(&machine.first, &machine.source).remove("/etc/dominator").done();
    let key = String::from_utf8(before[2].clone()).unwrap();
    let own = "the new certificate would not be accepted as that of 127.0.0.4: ";
    let table = [
        (
            machine.tree(&[("cert.pem", &good.certificate_pem, 0o644)]),
            "is not of the key in key.pem",
        ),
        (machine.tree(&[("key.pem", &key, 0o644)]), "can be read by every user of this machine"),
        (machine.tree(&[("cert.pem", "no certificate", 0o644)]), "it holds no certificate in PEM"),
        (
            machine.tree(&[("ca.pem", foreign.ca_pem(), 0o644)]),
            "not accept the certificate of the caller: ",
        ),
        (machine.with_pair(&other), own),
        (machine.with_pair(&ended), own),
        (machine.with_pair(&of_foreign), own),
        (gone, "key.pem"),
        (link, "it would not be a regular file any more"),
        (zones, "it may not call "),
        (list, "not accept the certificate of the caller: its certificate was revoked"),
        (no_list, "crl.pem: it holds no list of revoked certificates"),
        (all_gone, "cannot be used"),
    ];
    for (want, part) in table {
        let why = machine.update(&want).await.unwrap_or_else(|| panic!("{part}: it is done"));
        let text = "with the new TLS files of subd nobody could give it orders any more: ";
        assert!(why.starts_with(text) && why.contains(part), "{part}: {why}");
        assert_eq!(machine.files(), before, "{part}");
    }

    // Other revocations are taken.
    assert_eq!(machine.update(&harmless).await, None);

    // Those of an authority for machines, below the same root, are taken without a restart.
    let options = AuthorityOptions {
        name: "Machines".to_owned(),
        for_machines: true,
        ..AuthorityOptions::default()
    };
    let machines = machine.authority.create_intermediate(&options).unwrap();
    let renewed = machines.issue(&wanted("test", &["127.0.0.4"])).unwrap();
    let want = machine.with_pair(&renewed);
    assert_eq!(machine.update(&want).await, None);
    let port = machine.sub.client.peer().port;
    let path = machine.sub.root.join(DIRECTORY).join("cert.pem");
    assert_eq!(certificates_of(&path).unwrap().len(), 2);
    let key = machine.sub.root.join(DIRECTORY).join("key.pem");
    assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o7777, 0o600);
    eventually_async("new connections get the new certificate", async || {
        let peer = Peer::parse(&format!("127.0.0.4:{port}"), 0).unwrap();
        let client = Client::new(peer, &machine.dominator);
        // No other daemon has a certificate of that authority.
        let list = client.call::<api::dominator::ListSubs>(&Default::default()).await;
        let error = model::display::error_chain(&list.unwrap_err());
        error.contains("certifies machines only").then_some(()).ok_or(error)
    })
    .await;
    let client = {
        let peer = Peer::parse(&format!("127.0.0.4:{port}"), 0).unwrap();
        Client::new(peer, &machine.dominator)
    };
    client.call::<api::subd::Poll>(&Default::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_has_ended_is_replaced_by_an_equal_one_only() {
    const GET: &str = "ObjectServer.GetObjects";
    let now = system::clock::wall().seconds;
    let with = |powers: &[&str]| Request {
        powers: Some(powers.iter().map(|power| (*power).to_owned()).collect()),
        ..wanted("test", &["test", "127.0.0.4"])
    };
    let good = with(&[GET]);
    let (start, lifetime) = (Some(now - 7_200), Duration::from_secs(3_600));
    let past = Request { start, lifetime, ..good.clone() };
    let made = Made::with(&past);
    let root = made.place.path().join("root");
    let own = root.join(DIRECTORY);
    let cert = own.join("cert.pem");
    let before = fs::read(&cert).unwrap();
    let key = fs::read_to_string(own.join("key.pem")).unwrap();
    let lists = made.authority.revocation_list(&[revoked("0102")], 1).unwrap();
    fs::write(own.join("crl.pem"), lists).unwrap();
    fs::set_permissions(&cert, fs::Permissions::from_mode(0o640)).unwrap();
    let security = Security::open(&own).unwrap();
    let sub = Sub::start_with(&root, &[], &security, &made.dominator).await;
    let replace = async |caller: &Security, chain: &str| {
        let peer = sub.client.peer().clone();
        let client = Client::of_ended(peer, caller, Duration::from_secs(86_400));
        let request = ReplaceCertificateRequest { chain: ByteText(chain.as_bytes().to_vec()) };
        let fault = client.call::<ReplaceCertificate>(&request).await.err()?;
        let fault = fault.fault().cloned().unwrap_or_else(|| panic!("{fault}"));
        Some((fault.code, fault.message))
    };
    let issue =
        |request: &Request| made.authority.issue_for_key(request, &key).unwrap().certificate_pem;
    let renewed = issue(&good);
    let alone = made.authority.create_intermediate(&AuthorityOptions {
        name: "Machines".to_owned(),
        for_machines: true,
        ..AuthorityOptions::default()
    });
    let of_machines = alone.unwrap().issue_for_key(&with(&["*.*"]), &key).unwrap();
    let foreign = root_authority().issue_for_key(&good, &key).unwrap().certificate_pem;
    let other_key = made.authority.issue(&good).unwrap().certificate_pem;
    let refused = |why: &str| format!("the certificate is refused: {why}");
    let not_accepted =
        |why: &str| refused(&format!("it is not accepted as that of 127.0.0.4: {why}"));
    let holder =
        |next| refused(&format!("it is that of {next}, and the present one that of machine test"));
    let bad = FaultCode::BadRequest;
    let named = |name: &str| Request { name: name.to_owned(), ..good.clone() };
    let of_hosts = |host: &str| Request { hosts: vec![host.to_owned()], ..good.clone() };
    let table = [
        ("nothing".to_owned(), refused("it cannot be used: ")),
        (other_key, refused("it cannot be used: ")),
        (issue(&past), not_accepted("its certificate has ended")),
        (foreign, not_accepted("its certificate is of no authority")),
        (issue(&of_hosts("other")), not_accepted("its certificate is for other")),
        (issue(&named("web2")), holder("machine web2")),
        (issue(&Request { kind: IdentityKind::User, ..good.clone() }), holder("test")),
        (
            issue(&with(&[GET, "Subd.Poll"])),
            refused("it gives more than the present one: Subd.Poll"),
        ),
    ];
    for (chain, text) in table {
        let replaced = replace(&made.dominator, &chain).await;
        let (code, said) = replaced.unwrap_or_else(|| panic!("done: {text}"));
        assert!(code == bad && said.starts_with(&text), "{text}: {said}");
        assert_eq!(fs::read(&cert).unwrap(), before, "{text}");
    }

    // An authority for machines takes all other powers away.
    assert_eq!(replace(&made.dominator, &of_machines.certificate_pem).await, None);
    assert_eq!(fs::read_to_string(&cert).unwrap(), of_machines.certificate_pem);
    assert_eq!(fs::metadata(&cert).unwrap().permissions().mode() & 0o7777, 0o640);
    let client = Client::new(sub.client.peer().clone(), &made.dominator);
    let polled = eventually_async("a dominator connects", async || {
        let polled = client.call::<api::subd::Poll>(&Default::default()).await;
        polled.map_err(|error| model::display::error_chain(&error))
    });
    assert_eq!(polled.await.activity, Activity::Idle);
    // Only an update replaces one that is valid.
    let (code, said) = replace(&made.dominator, &renewed).await.unwrap();
    let text = refused("by the clock of this machine its certificate is valid until 2");
    assert!(code == bad && said.starts_with(&text), "{said}");
}

/// Starts the program on the machine's root. Returns it, and what a dominator with `dominator`
/// calls.
fn start_process(root: &Path, dominator: &Security, within: &str) -> (Process, Sub) {
    let own = root.join(DIRECTORY);
    let flags = ["--tls", own.to_str().unwrap(), "--hostname", "test", "--put-back-after", within];
    let process = Process::start_with(root, &flags);
    let client = Client::new(process.client.peer().clone(), dominator);
    (process, Sub::elsewhere(root, client))
}

/// Waits until the files are `want`, and are in use: new connections are made with them.
async fn wait_for_files(machine: &Machine, want: &[Vec<u8>]) -> PollReply {
    eventually_async("the former files are back", async || {
        if machine.files() == want { Ok(()) } else { Err("others are there") }
    })
    .await;
    eventually_async("a dominator connects", async || {
        let client = Client::new(machine.sub.client.peer().clone(), &machine.dominator);
        let polled = client.call::<api::subd::Poll>(&Default::default()).await;
        let idle = polled.map_err(|error| model::display::error_chain(&error))?;
        if idle.activity == Activity::Idle { Ok(idle) } else { Err(format!("{idle:?}")) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn former_files_are_put_back_if_no_dominator_comes() {
    let made = Made::new();
    let root = made.place.path().join("root");
    let (process, sub) = start_process(&root, &made.dominator, "15s");
    let mut machine = Machine::of(made, sub).await;
    let record = root.join(".subd/state/tls-files.json");
    let recorded = || fs::read_to_string(&record).unwrap();
    // The machine trusts another authority, and has a certificate of it. The dominator does not.
    let other = root_authority();
    let pair = other.issue(&wanted("test", &["test", "127.0.0.5"])).unwrap();
    let both = format!("{}{}", machine.authority.ca_pem(), other.ca_pem());
    let good = machine.authority.issue(&wanted("test", &["test", "127.0.0.5"])).unwrap();
    let want = machine.with_pair(&good);
    assert_eq!(machine.update(&want).await, None);
    // The dominator comes with the other files, and the former ones are gone. The first polls may
    // come before these are in use.
    let files = machine.files();
    eventually_async("no former key is kept", async || {
        wait_for_files(&machine, &files).await;
        if recorded().contains("PRIVATE KEY") { Err(recorded()) } else { Ok(()) }
    })
    .await;
    let before = machine.files();

    let foreign = [
        ("ca.pem", &*both, 0o644),
        ("cert.pem", &*pair.certificate_pem, 0o644),
        ("key.pem", &*pair.key_pem, 0o600),
    ];
    let want = machine.tree(&foreign);
    assert_eq!(machine.update(&want).await, None);
    assert_ne!(machine.files(), before);
    assert_eq!(fs::metadata(&record).unwrap().permissions().mode() & 0o7777, 0o600);
    let kept = recorded();
    let reply = wait_for_files(&machine, &before).await;
    let key = root.join(DIRECTORY).join("key.pem");
    assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o7777, 0o600);
    assert!(!recorded().contains("PRIVATE KEY"), "{}", recorded());
    let why = "no dominator reached subd within 15s after its own TLS files had changed";
    let text = format!("{why}: the former ones were put back");
    assert_eq!(reply.last_update.unwrap().outcome, UpdateOutcome::RolledBack(text));
    // The same files are refused, until an operator looks again.
    let refused = format!(
        ": {why}. Find out why no dominator connected, and order others, or let these be tried \
         at once with `subtool scan-now`"
    );
    let is_refused = |said: Option<String>| {
        said.is_some_and(|said| {
            said.starts_with("these TLS files of subd are not tried again before ")
                && said.ends_with(&refused)
        })
    };
    assert!(is_refused(machine.update(&want).await));
    assert_eq!(machine.files(), before);
    let scan = ScanNowRequest { content: false, media: false };
    machine.sub.client.call::<ScanNow>(&scan).await.unwrap();
    assert_eq!(machine.update(&want).await, None);

    // A kill starts the time again.
    drop(process);
    let (process, sub) = start_process(&root, &machine.dominator, "15s");
    machine.sub = sub;
    wait_for_files(&machine, &before).await;
    assert!(is_refused(machine.update(&want).await));

    // The power was cut while they were put back: one of them is the former already.
    drop(process);
    let mut cut: serde_json::Value = serde_json::from_str(&kept).unwrap();
    let ordered = cut["former"]["ordered"][0].clone();
    cut["former"]["putting_back"] = serde_json::json!({
        "files": ordered, "why": "cut", "times": 1, "until": {"seconds": 0, "nanoseconds": 0}
    });
    fs::write(&record, cut.to_string()).unwrap();
    fs::write(root.join(DIRECTORY).join("key.pem"), &*pair.key_pem).unwrap();
    let (process, sub) = start_process(&root, &machine.dominator, "15s");
    machine.sub = sub;
    wait_for_files(&machine, &before).await;
    drop(process);
}
