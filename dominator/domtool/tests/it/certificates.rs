//! `domtool cert` as operators use it: authorities, certificates, fleets, revocation; killed and
//! by several at once.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use api::access::IdentityKind;
use api::certificate::Certificate;
use certs::authority::{Authority, AuthorityOptions, Request};
use certs::files::Replace;
use certs::pem::{certificates_of, is_signed_by, key_belongs, revocation_lists_of};
use certs::register::Register;
use expect_test::expect;

use testing::exit_and_output;

fn domtool(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_domtool"));
    command.args(arguments).current_dir(directory).env("HOME", directory);
    command
}

pub fn run(directory: &Path, arguments: &[&str]) -> Output {
    domtool(directory, arguments).output().unwrap()
}

/// Runs it, and fails the test if it fails.
pub fn done(directory: &Path, arguments: &[&str]) -> Output {
    let output = run(directory, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {:?}", exit_and_output(&output));
    output
}

fn read(path: &Path) -> Certificate {
    Certificate::read(&certificates_of(path).unwrap()[0]).unwrap()
}

/// What it exits with, prints and says, without what differs each time, or with each new method.
pub fn plain(output: &Output) -> String {
    let (code, data, talk) = exit_and_output(output);
    let text = format!("{data}{talk}exit {}\n", code.unwrap());
    let mut plain = String::new();
    for line in text.lines() {
        let varies = ["serial", "fingerprint", "valid until"];
        match varies.iter().find(|name| line.trim_start().starts_with(**name)) {
            Some(name) => plain += name,
            None => {
                let line = line.split(", valid until").next().unwrap();
                let line = line.split_inclusive(" expired on").next().unwrap().trim_end();
                let is_count = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
                let words = line.split(' ').map(|word| match word {
                    _ if word.is_empty() || !line.contains(" method") => word,
                    _ if is_count(word) => "N",
                    _ => word,
                });
                plain += &words.collect::<Vec<_>>().join(" ");
            }
        }
        plain += "\n";
    }
    plain
}

#[test]
fn a_newcomer_needs_two_commands() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let output = run(path, &["cert", "ca", "ca", "--name", "Example Inc"]);
    expect![[r#"
        Made the authority Example Inc in ca
        Keep ca/ca.key secret, and keep a copy of it in a safe place.
        exit 0
    "#]]
    .assert_eq(&plain(&output));
    let everything = [
        "cert",
        "issue",
        "--ca",
        "ca",
        "--out",
        "tls",
        "--name",
        "images",
        "--host",
        "images.example.org",
        "--method",
        "*",
    ];
    expect![[r#"
        Made a key and a certificate for images in tls
        Its holder may call N methods: domtool cert show tls
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &everything)));
    expect![[r#"
         holder       images
         kind         user
         may call     Dominator: everything
                      FileGenerator: everything
                      ImageServer: everything
                      MdbServer: everything
                      ObjectServer: everything
                      Subd: everything
                      and the N methods that any certificate may
         by           *.*
         hosts        images.example.org
        valid until
         issued by    Example Inc
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls"])));
    expect![[r#"
         authority    Example Inc
        valid until
         issued by    Example Inc
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "ca"])));
    let mode = |file: &str| std::fs::metadata(path.join(file)).unwrap().permissions().mode();
    assert_eq!(
        ["ca", "ca/ca.key", "tls", "tls/key.pem"].map(|file| mode(file) & 0o777),
        [0o700, 0o600, 0o755, 0o600]
    );
    let verify = Command::new("openssl")
        .args(["verify", "-x509_strict", "-CAfile", "tls/ca.pem", "-purpose", "sslserver"])
        .args(["-verify_hostname", "images.example.org", "tls/cert.pem"])
        .current_dir(path)
        .output()
        .expect("these tests need the program openssl");
    assert_eq!(String::from_utf8(verify.stdout).unwrap(), "tls/cert.pem: OK\n");
}

#[test]
fn what_is_there_is_renewed_or_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Example Inc"]);
    expect![[r#"
        error: ca/ca.key exists: an authority is never overwritten
        exit 1
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "ca", "ca"])));
    let issue = |name: &str, more: &[&str]| {
        let start = ["cert", "issue", "--ca", "ca", "--out", "tls", "--name", name];
        run(path, &[&start, more].concat())
    };
    let key = || std::fs::read_to_string(path.join("tls/key.pem")).unwrap();
    expect![[r#"
        Made a key and a certificate for alice in tls
        Its holder may call N methods: domtool cert show tls
        It has no host name: it is for a person or a program, not for a daemon.
        exit 0
    "#]]
    .assert_eq(&plain(&issue("alice", &["--set", "viewer", "--group", "web"])));
    let (first, first_key) = (read(&path.join("tls/cert.pem")), key());
    expect![[r#"
        Renewed the certificate of alice in tls
        It gives only the powers that any certificate gives.
        It has no host name: it is for a person or a program, not for a daemon.
        exit 0
    "#]]
    .assert_eq(&plain(&issue("alice", &["--lifetime", "90d"])));
    let second = read(&path.join("tls/cert.pem"));
    assert_ne!(first.serial, second.serial);
    assert_eq!(key(), first_key);
    expect![[r#"
        error: tls has the certificate of alice, not of bob
        hint: give another directory, or overwrite the files with --force
        exit 1
    "#]]
    .assert_eq(&plain(&issue("bob", &[])));
    assert_eq!(read(&path.join("tls/cert.pem")), second);
    issue("alice", &["--new-key"]);
    assert_ne!(key(), first_key);
    let second_key = key();
    // Who has had the key of a revoked certificate does not get another one for it.
    expect![[r#"
        error: this authority has issued no certificate with the name or serial number bob
        exit 1
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "revoke", "--ca", "ca", "bob"])));
    let revoked = run(path, &["cert", "revoke", "--ca", "ca", "alice", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&revoked.stdout).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 3, "{json}");
    std::fs::copy(path.join("ca/crl.pem"), path.join("tls/crl.pem")).unwrap();
    let shown = run(path, &["cert", "show", "tls", "--format", "json"]);
    let json: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(json["faults"][0], "the certificate is revoked: crl.pem lists it", "{json}");
    assert_eq!(shown.status.code(), Some(3));
    issue("alice", &[]);
    assert_ne!(key(), second_key);
    done(path, &["cert", "show", "tls"]);
    issue("bob", &["--force"]);
    assert_eq!(read(&path.join("tls/cert.pem")).common_name, "bob");
    let bad = issue("bob", &["--method", "ObjectServer.Get"]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(
        exit_and_output(&bad).2.contains("there are ObjectServer.AddObjects"),
        "{:?}",
        exit_and_output(&bad)
    );
}

#[test]
fn what_is_wrong_in_a_directory_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let now = system::clock::wall().seconds;
    let day = std::time::Duration::from_secs(86_400);
    let authority = Authority::create(&AuthorityOptions {
        name: "Old".into(),
        lifetime: day * 9,
        start: Some(now - 10 * 86_400),
        ..AuthorityOptions::default()
    });
    let authority = authority.unwrap();
    let request = Request {
        name: "web1".into(),
        start: Some(now - 9 * 86_400),
        lifetime: day,
        ..Default::default()
    };
    let issued = authority.issue(&request).unwrap();
    let tls = path.join("tls");
    issued.write(&tls, authority.ca_pem(), Replace::Own).unwrap();
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(tls.join("key.pem"), mode).unwrap();
    expect![[r#"
         holder       web1
         kind         not stated: an owner in this release only; issue it again with --kind
         may call     only the N methods that any certificate may
         hosts        none: for a person or a program, not for a daemon
        valid until
         issued by    Old
        serial
        fingerprint
        WRONG: the certificate expired on
        WRONG: everybody can read key.pem: chmod 600 key.pem, or make a new key
        WRONG: the authority Old expired on
        exit 3
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls"])));
    let other = Authority::create(&AuthorityOptions::default()).unwrap();
    std::fs::write(tls.join("ca.pem"), other.ca_pem()).unwrap();
    std::fs::write(tls.join("key.pem"), other.key_pem()).unwrap();
    expect![[r#"
         holder       web1
         kind         not stated: an owner in this release only; issue it again with --kind
         may call     only the N methods that any certificate may
         hosts        none: for a person or a program, not for a daemon
        valid until
         issued by    Old
        serial
        fingerprint
        WRONG: the certificate expired on
        WRONG: key.pem is not the key of the certificate
        WRONG: everybody can read key.pem: chmod 600 key.pem, or make a new key
        WRONG: the chain does not lead to an authority in ca.pem; it ends with Old
        exit 3
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls"])));
    expect![[r#"
        error: tls/key.pem: the file has no certificate
        exit 1
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls/key.pem"])));
    expect![[r#"
        error: . has neither cert.pem nor ca.pem
        exit 1
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "."])));
}

#[test]
fn no_two_authorities_get_one_name_by_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "first"]);
    done(path, &["cert", "ca", "second"]);
    done(path, &["cert", "ca", "below", "--intermediate-of", "first"]);
    let files = ["first/ca.pem", "second/ca.pem", "below/chain.pem"];
    let names = files.map(|file| read(&path.join(file)).common_name);
    let digits = names.each_ref().map(|name| name.rsplit_once(' ').unwrap().1.to_owned());
    for (name, digits) in names.iter().zip(&digits) {
        assert!(name.starts_with("Dominator authority"), "{name}");
        let is_digit = |byte: u8| byte.is_ascii_hexdigit();
        assert!(digits.len() == 8 && digits.bytes().all(is_digit), "{name}");
    }
    assert_eq!(BTreeSet::from(digits).len(), 3, "{names:?}");
    let again = ["cert", "ca", "again", "--intermediate-of", "first", "--name", &names[0]];
    let refused = plain(&run(path, &again)).replace(&names[0], "NAME");
    expect![[r#"
        error: `NAME` cannot be the name of an intermediate in a certificate: its root has it
        exit 1
    "#]]
    .assert_eq(&refused);
}

#[test]
fn an_intermediate_issues_and_only_its_root_is_trusted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    done(path, &["cert", "ca", "zone", "--name", "Zone", "--intermediate-of", "ca"]);
    let host = ["--name", "web1", "--host", "web1", "--set", "subd"];
    done(path, &[&["cert", "issue", "--ca", "zone", "--out", "tls"][..], &host].concat());
    let ca = |directory: &str| std::fs::read(path.join(directory).join("ca.pem")).unwrap();
    assert_eq!((ca("zone"), ca("tls")), (ca("ca"), ca("ca")));
    expect![[r#"
         holder       web1
         kind         machine
         may call     ObjectServer: GetObjects
                      and the N methods that any certificate may
         by           ObjectServer.GetObjects
         hosts        web1
        valid until
         issued by    Zone, by Root
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls"])));
    expect![[r#"
         authority    Zone
        valid until
         issued by    Root
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "zone"])));
    let again = ["cert", "ca", "further", "--name", "Further", "--intermediate-of", "zone"];
    let refused = run(path, &again);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        exit_and_output(&refused).2.contains("Zone is an intermediate authority"),
        "{:?}",
        exit_and_output(&refused)
    );
    // What another authority has issued is revoked there; the zone itself by its root.
    let foreign = run(path, &["cert", "revoke", "--ca", "ca", "tls/cert.pem"]);
    expect![[r#"
        error: tls/cert.pem was issued by another authority
        hint: give the directory of the authority that issued it
        exit 1
    "#]]
    .assert_eq(&plain(&foreign));
    done(path, &["cert", "revoke", "--ca", "zone", "tls/cert.pem"]);
    done(path, &["cert", "revoke", "--ca", "ca", "Zone", "--reason", "ca-compromise"]);
}

#[test]
fn an_authority_for_machines_certifies_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    let below = ["--name", "Machines", "--intermediate-of", "ca", "--machines-only"];
    done(path, &[&["cert", "ca", "machines"][..], &below].concat());
    let host = ["--name", "images", "--host", "images", "--set", "imageserver"];
    done(path, &[&["cert", "issue", "--ca", "machines", "--out", "tls"][..], &host].concat());
    expect![[r#"
         holder       images
         kind         machine
         may call     ObjectServer: GetObjects
                      and the N methods that any certificate may
         by           ObjectServer.GetObjects
         hosts        images
        valid until
         issued by    Machines, by Root
                      an authority that certifies machines only, whatever the certificate says
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "tls"])));
    expect![[r#"
         authority    Machines
         certifies    machines only
        valid until
         issued by    Root
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "machines"])));
}

/// The certificates of a fleet in `out`, each of which must be whole.
fn whole(out: &Path, authority: &Authority) -> BTreeMap<String, Certificate> {
    let mut found = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir(out) else { return found };
    for entry in entries {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // What has no name yet is taken away by whoever comes next.
        if name.starts_with('.') {
            continue;
        }
        let der = certificates_of(&entry.path().join("cert.pem")).unwrap().remove(0);
        assert!(key_belongs(&entry.path().join("key.pem"), &der).unwrap(), "{name}");
        assert!(is_signed_by(&der, authority.der()), "{name}");
        let ca_pem = std::fs::read_to_string(entry.path().join("ca.pem")).unwrap();
        assert_eq!(ca_pem, authority.ca_pem(), "{name}");
        let certificate = Certificate::read(&der).unwrap();
        assert_eq!(certificate.common_name, name);
        found.insert(name, certificate);
    }
    found
}

#[test]
fn a_fleet_gets_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    let authority = Authority::load(&path.join("ca")).unwrap();
    let mdb = |text: &str| std::fs::write(path.join("mdb"), text).unwrap();
    mdb(r#"[{"Hostname": "web1", "IpAddress": "192.0.2.1"}, {"Hostname": "web2"}]"#);
    let issue = |more: &[&str]| {
        let start = ["cert", "issue", "--ca", "ca", "--out", "out", "--mdb", "mdb"];
        run(path, &[&start, more].concat())
    };
    let brief = |output: &Output| {
        let (code, _, talk) = exit_and_output(output);
        format!("{talk}exit {}\n", code.unwrap())
    };
    expect![[r#"
        2 machines: 2 made, 0 renewed, 0 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&brief(&issue(&[])));
    let first = whole(&path.join("out"), &authority);
    assert_eq!(
        (first["web1"].hosts.clone(), first["web1"].identity.kind),
        (vec!["web1".to_owned()], IdentityKind::Machine)
    );
    let powers: Vec<&str> = first["web2"].identity.powers.patterns().collect();
    assert_eq!(powers, ["ObjectServer.GetObjects"]);
    expect![[r#"
        2 machines: 0 made, 0 renewed, 2 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&brief(&issue(&[])));
    assert_eq!(whole(&path.join("out"), &authority), first);
    // Addresses are in certificates only where they are asked for.
    expect![[r#"
        2 machines: 0 made, 1 renewed, 1 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&brief(&issue(&["--with-addresses"])));
    let with_addresses = whole(&path.join("out"), &authority);
    assert_eq!(with_addresses["web1"].hosts, ["web1", "192.0.2.1"]);
    // One has another address now, one is gone, one is new, one cannot be.
    mdb(r#"[{"Hostname": "web1", "IpAddress": "192.0.2.2"}, {"Hostname": "web3"},
            {"Hostname": "*.example"}, {"Hostname": "web2"}]"#);
    let key = std::fs::read(path.join("out/web1/key.pem")).unwrap();
    let output = issue(&["--with-addresses", "--format", "json"]);
    expect![[r#"
        *.example: *.example cannot be the name of a directory
        4 machines: 1 made, 1 renewed, 1 unchanged, 1 failed.
        exit 3
    "#]]
    .assert_eq(&brief(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows: Vec<(&str, &str)> = json
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["hostname"].as_str().unwrap(), row["done"].as_str().unwrap()))
        .collect();
    let want = [("*.example", "failed"), ("web1", "renewed"), ("web2", "kept"), ("web3", "made")];
    assert_eq!(rows, want);
    assert_eq!(std::fs::read(path.join("out/web1/key.pem")).unwrap(), key);
    // What is revoked, or ends soon, is made anew.
    done(path, &["cert", "revoke", "--ca", "ca", "web3"]);
    mdb(r#"[{"Hostname": "web3"}, {"Hostname": "web2"}]"#);
    expect![[r#"
        2 machines: 1 made, 0 renewed, 1 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&brief(&issue(&[])));
    expect![[r#"
        2 machines: 0 made, 2 renewed, 0 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&brief(&issue(&["--renew-before", "400d"])));
}

/// Writes a certificate without a kind, as earlier releases made them.
fn issue_without_kind(path: &Path, out: &str, name: &str, hosts: &[&str]) {
    let register = Register::open(&path.join("ca")).unwrap();
    let request = Request {
        name: name.to_owned(),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        ..Request::default()
    };
    let issued = register.lock().unwrap().issue(&request, None).unwrap();
    issued.write(&path.join(out), register.authority().ca_pem(), Replace::Any).unwrap();
}

#[test]
fn each_certificate_says_what_its_holder_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    let issue = |out: &str, more: &str| {
        let start = ["cert", "issue", "--ca", "ca", "--out", out, "--name", "alice"];
        let more: Vec<&str> = more.split_whitespace().collect();
        run(path, &[&start[..], &more].concat())
    };
    let kind = |out: &str| read(&path.join(out).join("cert.pem")).identity.kind.name();
    let table = [
        ("", "user"),
        ("--set operator", "user"),
        ("--host alice", "user"),
        ("--set contributor --host alice", "user"),
        ("--set imageserver --host alice", "service"),
        ("--set viewer --set mdbd", "service"),
        ("--set subd --host alice", "machine"),
        ("--kind machine --set dominator", "machine"),
        ("--kind service", "service"),
    ];
    for (index, (flags, want)) in table.into_iter().enumerate() {
        let out = format!("new{index}");
        assert_eq!(issue(&out, flags).status.code(), Some(0), "{flags}");
        assert_eq!(kind(&out), Some(want), "{flags}");
        // A renewal keeps it, whatever the sets are now.
        assert_eq!(issue(&out, "--set viewer").status.code(), Some(0), "{flags}");
        assert_eq!(kind(&out), Some(want), "{flags}");
    }
    // What is stated in another way is another holder, and has another key.
    expect![[r#"
        error: new8 has the certificate of service alice, not of alice
        hint: give another directory, or overwrite the files with --force
        exit 1
    "#]]
    .assert_eq(&plain(&issue("new8", "--kind user")));
    let key = || std::fs::read(path.join("new8/key.pem")).unwrap();
    let former = key();
    expect![[r#"
        Made a key and a certificate for alice in new8
        It gives only the powers that any certificate gives.
        It has no host name: it is for a person or a program, not for a daemon.
        exit 0
    "#]]
    .assert_eq(&plain(&issue("new8", "--kind user --force")));
    assert_ne!(key(), former);
    // One that does not say it gets the right kind, or is as before.
    let table = [
        ("--set subd --host alice", &["alice"][..], Some("machine")),
        ("--set dominator --host alice", &["alice"], Some("service")),
        ("--set viewer --host alice", &["alice"], Some("user")),
        ("--kind service --host alice", &["alice"], Some("service")),
        ("", &[], Some("user")),
    ];
    for (flags, hosts, want) in table {
        issue_without_kind(path, "old", "alice", hosts);
        assert_eq!(issue("old", flags).status.code(), Some(0), "{flags}");
        assert_eq!(kind("old"), want, "{flags}");
    }
    issue_without_kind(path, "old", "alice", &["alice"]);
    expect![[r#"
        Renewed the certificate of alice in old
        It gives only the powers that any certificate gives.
        It does not say what its holder is, as before: give --kind user, service or machine.
        exit 0
    "#]]
    .assert_eq(&plain(&issue("old", "--host alice")));
    expect![[r#"
         holder       alice
         kind         not stated: an owner in this release only; issue it again with --kind
         may call     only the N methods that any certificate may
         hosts        alice
        valid until
         issued by    Root
        serial
        fingerprint
        exit 0
    "#]]
    .assert_eq(&plain(&run(path, &["cert", "show", "old"])));
    let shown = |out: &str| {
        let output = done(path, &["cert", "show", out, "--format", "json"]);
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["kind"].clone()
    };
    assert_eq!(
        [shown("new0"), shown("new6"), shown("old")],
        ["user".into(), "machine".into(), serde_json::Value::Null]
    );
    let register = Register::open(&path.join("ca")).unwrap();
    let issued = register.lock().unwrap().issued().unwrap();
    assert_eq!(issued[8].kind.as_deref(), Some("service"));
    assert_eq!(issued.last().unwrap().kind, None);
}

#[test]
fn machines_and_people_of_one_name_are_apart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    std::fs::write(path.join("mdb"), r#"[{"Hostname": "alice"}, {"Hostname": "bob"}]"#).unwrap();
    done(path, &["cert", "issue", "--ca", "ca", "--out", "out/alice", "--name", "alice"]);
    issue_without_kind(path, "out/bob", "bob", &[]);
    let fleet = |out: &str, more: &[&str]| {
        let issue = ["cert", "issue", "--ca", "ca", "--out", out, "--mdb", "mdb"];
        let (code, _, talk) = exit_and_output(&run(path, &[&issue[..], more].concat()));
        format!("{talk}exit {}\n", code.unwrap())
    };
    expect![[r#"
        alice: out/alice has the certificate of alice, not of machine alice
        bob: out/bob has the certificate of bob, not of machine bob
        2 machines: 0 made, 0 renewed, 0 unchanged, 2 failed.
        exit 1
    "#]]
    .assert_eq(&fleet("out", &[]));
    let kind = |file: &str| read(&path.join(file).join("cert.pem")).identity.kind;
    assert_eq!(["out/alice", "out/bob"].map(kind), [IdentityKind::User, IdentityKind::Unstated]);
    // A machine's certificate of an earlier release becomes one of a machine, with the same key.
    issue_without_kind(path, "machines/alice", "alice", &["alice", "192.0.2.1"]);
    let key = || std::fs::read(path.join("machines/alice/key.pem")).unwrap();
    let former = key();
    expect![[r#"
        2 machines: 1 made, 1 renewed, 0 unchanged, 0 failed.
        exit 0
    "#]]
    .assert_eq(&fleet("machines", &[]));
    assert_eq!((kind("machines/alice"), key()), (IdentityKind::Machine, former));
    expect![[r#"
        error: the argument '--mdb <FILE>' cannot be used with '--kind <KIND>'
        exit 2
    "#]]
    .assert_eq(&first_line_and_exit(&fleet("machines", &["--kind", "user"])));
    // To revoke a machine is not to revoke a person.
    let revoked = |more: &[&str]| {
        let revoke = ["cert", "revoke", "--ca", "ca", "alice", "--format", "json"];
        let output = done(path, &[&revoke[..], more].concat());
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = rows.as_array().unwrap().iter().map(|row| row["serial"].clone());
        rows.map(|serial| serial.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let serial = |file: &str| read(&path.join(file).join("cert.pem")).serial;
    assert_eq!(revoked(&["--kind", "machine"]), [serial("machines/alice")]);
    let rest = revoked(&[]);
    assert!(rest.len() == 2 && rest.contains(&serial("out/alice")), "{rest:?}");
}

fn first_line_and_exit(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    format!("{}\n{}\n", lines[0], lines[lines.len() - 1])
}

/// A fleet of one machine whose certificate was renewed after a backup was made of the first one.
fn renewed_since_a_backup(path: &Path) {
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    std::fs::write(path.join("mdb"), r#"[{"Hostname": "web1"}]"#).unwrap();
    let issue = ["cert", "issue", "--ca", "ca", "--out", "out", "--mdb", "mdb"];
    done(path, &issue);
    std::fs::copy(path.join("out/web1/cert.pem"), path.join("backup.pem")).unwrap();
    done(path, &[&issue[..], &["--renew-before", "400d"]].concat());
    let [old, new] = ["backup.pem", "out/web1/cert.pem"].map(|file| read(&path.join(file)));
    assert_ne!(old.serial, new.serial);
    assert_eq!(old.key, new.key);
}

/// Which of the two certificates of [`renewed_since_a_backup`] are revoked.
fn revoked(path: &Path) -> [bool; 2] {
    let lists = revocation_lists_of(&path.join("ca/crl.pem")).unwrap();
    ["backup.pem", "out/web1/cert.pem"].map(|file| {
        let der = certificates_of(&path.join(file)).unwrap().remove(0);
        lists[0].lists(&der)
    })
}

/// What revoking the backup says, without serial numbers, and what the next run for the fleet does.
fn revoked_then_issued(path: &Path, more: &[&str]) -> String {
    let serials = ["backup.pem", "out/web1/cert.pem"].map(|file| read(&path.join(file)).serial);
    let revoke = ["cert", "revoke", "--ca", "ca", "backup.pem"];
    let told = done(path, &[&revoke[..], more].concat());
    let mut text = plain(&told).replace(&serials[0], "FIRST").replace(&serials[1], "SECOND");
    let listed = revoked(path);
    for _ in 0..2 {
        let issued = ["cert", "issue", "--ca", "ca", "--out", "out", "--mdb", "mdb"];
        text += &exit_and_output(&done(path, &issued)).2;
    }
    format!("{text}in the list: {listed:?}\n")
}

#[test]
fn a_stolen_key_is_revoked_with_all_of_its_certificates() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    renewed_since_a_backup(path);
    let key = || std::fs::read(path.join("out/web1/key.pem")).unwrap();
    let stolen = key();
    let got = revoked_then_issued(path, &["--reason", "key-compromise"]);
    expect![[r#"
        Revoked the certificate FIRST of web1.
        Revoked the certificate SECOND of web1: it has or may have the same key.
        ca/crl.pem lists 2 certificates. Copy it into the TLS directory of each daemon.
        exit 0
        1 machine: 1 made, 0 renewed, 0 unchanged, 0 failed.
        1 machine: 0 made, 0 renewed, 1 unchanged, 0 failed.
        in the list: [true, true]
    "#]]
    .assert_eq(&got);
    assert_ne!(key(), stolen);
}

#[test]
fn a_key_is_not_used_again_for_whatever_reason_a_certificate_was_revoked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    renewed_since_a_backup(path);
    let got = revoked_then_issued(path, &[]);
    expect![[r#"
        Revoked the certificate FIRST of web1.
        Not revoked: 1 certificate that has or may have the same key.
        If others may have the key, revoke again with --reason key-compromise.
        ca/crl.pem lists 1 certificate. Copy it into the TLS directory of each daemon.
        exit 0
        1 machine: 1 made, 0 renewed, 0 unchanged, 0 failed.
        1 machine: 0 made, 0 renewed, 1 unchanged, 0 failed.
        in the list: [true, false]
    "#]]
    .assert_eq(&got);
}

#[test]
fn where_keys_are_not_on_record_all_certificates_of_the_holder_are_revoked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    renewed_since_a_backup(path);
    // As earlier versions have written them.
    let forget = |file: &str| {
        let text = std::fs::read_to_string(path.join(file)).unwrap();
        let mut lines = String::new();
        for line in text.lines() {
            let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
            row.as_object_mut().unwrap().remove("key").unwrap();
            lines += &format!("{row}\n");
        }
        std::fs::write(path.join(file), lines).unwrap();
    };
    forget("ca/issued.jsonl");
    let got = revoked_then_issued(path, &["--reason", "key-compromise"]);
    expect![[r#"
        Revoked the certificate FIRST of web1.
        Revoked the certificate SECOND of web1: it has or may have the same key.
        ca/crl.pem lists 2 certificates. Copy it into the TLS directory of each daemon.
        exit 0
        1 machine: 1 made, 0 renewed, 0 unchanged, 0 failed.
        1 machine: 0 made, 0 renewed, 1 unchanged, 0 failed.
        in the list: [true, true]
    "#]]
    .assert_eq(&got);
    // What an earlier version revoked for its key makes an old key doubtful, and no new one.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    renewed_since_a_backup(path);
    let first = read(&path.join("backup.pem")).serial;
    let reason = "key-compromise";
    let row = serde_json::json!(
        { "serial": first, "name": "web1", "reason": reason, "revoked_at": 5 }
    );
    std::fs::write(path.join("ca/revoked.jsonl"), format!("{row}\n")).unwrap();
    let issue = ["cert", "issue", "--ca", "ca", "--out", "out", "--mdb", "mdb"];
    let kept = "1 machine: 0 made, 0 renewed, 1 unchanged, 0 failed.\n";
    assert_eq!(exit_and_output(&done(path, &issue)).2, kept);
    let issued = path.join("ca/issued.jsonl");
    let text = std::fs::read_to_string(&issued).unwrap();
    std::fs::write(&issued, text.replace("\"key\"", "\"formerly\"")).unwrap();
    let made = "1 machine: 1 made, 0 renewed, 0 unchanged, 0 failed.\n";
    assert_eq!(exit_and_output(&done(path, &issue)).2, made);
    assert_eq!(exit_and_output(&done(path, &issue)).2, kept);
}

#[test]
fn killed_at_any_moment_a_fleet_has_whole_certificates_or_none() {
    const MACHINES: usize = 60;
    const KILLS: usize = 5;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    let authority = Authority::load(&path.join("ca")).unwrap();
    let hosts: Vec<String> =
        (0..MACHINES).map(|index| format!("{{\"Hostname\": \"web{index}\"}}")).collect();
    std::fs::write(path.join("mdb"), format!("[{}]", hosts.join(","))).unwrap();
    let arguments = ["cert", "issue", "--ca", "ca", "--out", "out", "--mdb", "mdb"];
    let out = path.join("out");
    for kill in 1..=KILLS {
        let silent = std::process::Stdio::null();
        let mut child = domtool(path, &arguments).stderr(silent).spawn().unwrap();
        // Some more each time, whatever the machine is doing.
        let wanted = kill * MACHINES / (KILLS + 1);
        let count = || std::fs::read_dir(&out).map_or(0, Iterator::count);
        while count() < wanted && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        whole(&out, &authority);
    }
    done(path, &arguments);
    let found = whole(&out, &authority);
    assert_eq!(found.len(), MACHINES);
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), MACHINES, "nothing else is there");
    let register = Register::open(&path.join("ca")).unwrap();
    let issued = register.lock().unwrap().issued().unwrap();
    for certificate in found.values() {
        assert!(issued.iter().any(|record| record.serial == certificate.serial));
    }
}

#[test]
fn several_can_work_with_one_authority() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    done(path, &["cert", "ca", "ca", "--name", "Root"]);
    done(path, &["cert", "issue", "--ca", "ca", "--out", "old", "--name", "old"]);
    let mut children = Vec::new();
    for index in 0..4 {
        let (out, name) = (format!("out{index}"), format!("name{index}"));
        let issue = ["cert", "issue", "--ca", "ca", "--out", &out, "--name", &name];
        children.push(domtool(path, &issue).spawn().unwrap());
        let revoke = ["cert", "revoke", "--ca", "ca", "old"];
        children.push(domtool(path, &revoke).spawn().unwrap());
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let register = Register::open(&path.join("ca")).unwrap();
    let held = register.lock().unwrap();
    let mut names: Vec<String> =
        held.issued().unwrap().into_iter().map(|record| record.name).collect();
    names.sort();
    assert_eq!(names, ["name0", "name1", "name2", "name3", "old"]);
    assert_eq!(held.revoked().unwrap().len(), 1);
}
