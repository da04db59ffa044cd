//! Certificates for machines: made once, kept, renewed in time, by an authority that certifies
//! nobody else.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use api::access::{Identity, IdentityKind, Powers};
use api::certificate::Certificate;
use api::fault::FaultCode;
use api::file_generator::{
    GeneratedFile, RenewCertificates, RenewCertificatesRequest, WantedFiles,
};
use certs::authority::{Authority, AuthorityOptions};
use certs::pem::{certificates_of, is_signed_by, key_belongs};
use certs::record::{Reason, RevocationTarget};
use certs::register::Register;
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::Algorithm;
use testing::eventually_async;

use crate::server::{Server, machine};

const CERTIFICATE: &str = "/etc/redis/tls/cert.pem";
const KEY: &str = "/etc/redis/tls/key.pem";

fn config(more: &str) -> String {
    format!(
        "[[generator]]\npath = '{CERTIFICATE}'\nkind = 'certificate'\nauthority = 'ca'\n\
         key = 'server'\nkey_path = '{KEY}'\n{more}"
    )
}

/// A server with an authority that certifies machines only.
async fn with_authority(more: &str) -> Server {
    let mut server = Server::new();
    make_authority(&server, "ca", true);
    server.configure(&config(more));
    server.start().await;
    server
}

fn make_authority(server: &Server, name: &str, for_machines: bool) {
    let root = Authority::create(&AuthorityOptions::default()).unwrap();
    let name_of = format!("Machines {name}");
    let options = AuthorityOptions { name: name_of, for_machines, ..AuthorityOptions::default() };
    let authority = root.create_intermediate(&options).unwrap();
    Register::create(&server.path(name), authority).unwrap();
}

/// The certificate and the key that a machine gets.
async fn pair(server: &Server, machine: &Machine) -> [String; 2] {
    let files = server.files(machine, &[CERTIFICATE, KEY]).await;
    let files: Vec<String> = files.into_iter().map(Result::unwrap).collect();
    files.try_into().unwrap()
}

fn read(server: &Server, [certificate, key]: &[String; 2]) -> Certificate {
    fs::write(server.path("cert.pem"), certificate).unwrap();
    fs::write(server.path("key.pem"), key).unwrap();
    let chain = certificates_of(&server.path("cert.pem")).unwrap();
    let [leaf, between] = &chain[..] else { panic!("{} certificates", chain.len()) };
    assert!(is_signed_by(leaf, between) && key_belongs(&server.path("key.pem"), leaf).unwrap());
    Certificate::read(leaf).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_gets_a_certificate_with_its_key_and_keeps_it() {
    let more = "powers = ['ObjectServer.GetObjects']\nwith_address = true\n";
    let mut server = with_authority(more).await;
    let address = Some("10.1.2.3".parse().unwrap());
    let web1 = Machine { ip_address: address, ..machine("web1", "nyc") };
    let made = pair(&server, &web1).await;
    let certificate = read(&server, &made);
    let identity = Identity {
        user: Some("web1".to_owned()),
        kind: IdentityKind::Machine,
        powers: Powers::new(["ObjectServer.GetObjects"]),
        ..Identity::default()
    };
    assert_eq!(
        (certificate.identity, certificate.hosts),
        (identity, vec!["web1".to_owned(), "10.1.2.3".to_owned()])
    );
    let days = (certificate.not_after - system::clock::wall().seconds + 60) / 86_400;
    assert_eq!(days, 30);

    // Another location changes nothing, nor does a kill; each part alone is that of the pair.
    let moved = Machine { location: "sfo".to_owned(), ..web1.clone() };
    assert_eq!(pair(&server, &moved).await, made);
    server.kill();
    server.start().await;
    assert_eq!(pair(&server, &web1).await, made);
    assert_eq!(server.file(&web1, KEY).await.as_ref(), Ok(&made[1]));
    // Another name or address, and other terms, do.
    let other = Machine { hostname: "web2".to_owned(), ..web1.clone() };
    assert_ne!(pair(&server, &other).await, made);
    let address = Some("10.1.2.4".parse().unwrap());
    let readdressed = pair(&server, &Machine { ip_address: address, ..web1.clone() }).await;
    assert_eq!(read(&server, &readdressed).hosts, ["web1", "10.1.2.4"]);
    assert_eq!(pair(&server, &web1).await, made);
    let (version, _) = server.next(None).await;
    server.configure(&config(&format!("lifetime = '9d'\n{more}")));
    server.next(Some(version)).await;
    assert_ne!(pair(&server, &web1).await, made);

    // Its authority knows what it has issued, and nobody else can read the keys.
    let register = Register::open(&server.path("ca")).unwrap();
    let issued = register.lock().unwrap().issued().unwrap();
    let names: Vec<&str> = issued.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(names, ["web1", "web2", "web1", "web1"]);
    let mode = fs::metadata(server.path("state/certificates.jsonl")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let key = made[1].lines().nth(1).unwrap();
    let told = format!("{}{}{}", server.page("/").await, server.metrics().await, server.log());
    assert!(!told.contains(key) && !server.audit_log().contains(key), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_renewed_long_before_it_ends() {
    let server = with_authority("lifetime = 30\nrenew_after = 3\n").await;
    let web1 = machine("web1", "nyc");
    let first = pair(&server, &web1).await;
    let made = server.generate(std::slice::from_ref(&web1), &[CERTIFICATE, KEY]).await.remove(0);
    let ends: Vec<u64> = made
        .into_iter()
        .map(|file| match file {
            GeneratedFile::Made(made) => made.valid_until_seconds,
            GeneratedFile::Failed(why) => panic!("{why}"),
        })
        .collect();
    assert_eq!(ends[0], ends[1], "both are renewed at once");
    let end = read(&server, &first).not_after;
    assert!(ends[0].cast_signed() <= end - 26, "{ends:?} {end}");
    let second = eventually_async("it is renewed", async || {
        let made = pair(&server, &web1).await;
        (made != first).then_some(made)
    });
    let second = second.await;
    assert!(read(&server, &second).not_after > end && second[1] != first[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_certified_or_read_concerns_one_machine() {
    let mut server = with_authority("").await;
    let [web1, web2] = ["web1", "web2"].map(|name| machine(name, "nyc"));
    let before = [pair(&server, &web1).await, pair(&server, &web2).await];
    let bad = server.file(&machine("a b", "nyc"), KEY).await;
    let why = "`a b` cannot be a host in a certificate: a host name has letters, digits, hyphens \
               and dots; write other letters as xn--...";
    assert_eq!(bad, Err(why.to_owned()));
    server.kill();
    // A line that is damaged, and one that was cut off.
    let path = server.path("state/certificates.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let [first, second] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    let damaged = format!("{{{first}\n{second}\n{}", &first[..first.len() / 2]);
    fs::write(&path, damaged).unwrap();
    server.start().await;
    let after = [pair(&server, &web1).await, pair(&server, &web2).await];
    assert_eq!([after[0] == before[0], after[1] == before[1]], [false, true]);
    let log = server.log();
    assert!(log.contains("certificates.jsonl is damaged in line 1"), "{log}");
    let key = before[0][1].lines().nth(1).unwrap();
    assert!(!log.contains(key));
    server.kill();
    server.start().await;
    assert_eq!([pair(&server, &web1).await, pair(&server, &web2).await], after);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authority_that_certifies_everybody_or_is_not_there_is_not_taken() {
    let server = with_authority("").await;
    let web1 = machine("web1", "nyc");
    let before = pair(&server, &web1).await;
    make_authority(&server, "all", false);
    let (version, _) = server.next(None).await;
    server.configure(&config("").replace("'ca'", "'all'"));
    let (version, generators) = server.next(Some(version)).await;
    let file = server.text("config.toml");
    let why = format!(
        "{file}: line 4: the authority in {} certifies everybody, which filegen-server must not: \
         make one for it with domtool cert ca --machines-only",
        server.text("all")
    );
    assert_eq!(generators.error, why);
    server.configure(&config("").replace("'ca'", "'none'"));
    let (version, generators) = server.next(Some(version)).await;
    let why = format!(
        "{file}: line 4: bad authority: {} is not the directory of an authority: it has no ca.key",
        server.text("none")
    );
    assert_eq!(generators.error, why);
    assert_eq!(pair(&server, &web1).await, before);
    // Another authority in the same place is another generator.
    fs::remove_dir_all(server.path("ca")).unwrap();
    make_authority(&server, "ca", true);
    server.configure(&config(""));
    server.next(Some(version)).await;
    let after = pair(&server, &web1).await;
    assert_ne!(after, before);
    assert_eq!(pair(&server, &web1).await, after);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_by_order_and_their_readers_are_told() {
    let mut server = Server::secured();
    make_authority(&server, "ca", true);
    server.configure(&config(""));
    server.start().await;
    let [web1, web2] = ["web1", "web2"].map(|name| machine(name, "nyc"));
    let before = [pair(&server, &web1).await, pair(&server, &web2).await];
    let (version, generators) = server.next(None).await;

    server.issue("operator", IdentityKind::User, &["FileGenerator.RenewCertificates"]);
    let words = ["renew", "web1", "web9", "--why", "it was in a backup"];
    let said = server.tool(&words);
    let text = "The certificates of 1 machine are made anew when their dominator asks for them.\n";
    let warning = "warning: no certificates were made for web9\n";
    assert_eq!(said, (Some(3), text.to_owned(), warning.to_owned()));
    let (renewed, after) = server.next(Some(version)).await;
    let versions = |of: &api::file_generator::Generators| {
        of.generators.iter().map(|one| one.version).collect::<Vec<_>>()
    };
    let [former, new] = [versions(&generators), versions(&after)];
    assert!(former.iter().zip(&new).all(|(former, new)| former != new), "{former:?} {new:?}");
    let now = [pair(&server, &web1).await, pair(&server, &web2).await];
    assert_eq!([now[0] == before[0], now[1] == before[1]], [false, true]);

    // A restart renews nothing, and is no news.
    server.kill();
    server.start().await;
    assert_eq!(server.next(None).await, (renewed, after));
    assert_eq!([pair(&server, &web1).await, pair(&server, &web2).await], now);
    let (code, text, _) = server.tool(&["renew", "--all", "--format", "json"]);
    let reply: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, reply), (Some(0), serde_json::json!({ "hostnames": ["web1", "web2"] })));
    server.next(Some(renewed)).await;
    let last = [pair(&server, &web1).await, pair(&server, &web2).await];
    assert!(last[0] != now[0] && last[1] != now[1]);

    let records = server.audited("FileGenerator.RenewCertificates");
    let begun: Vec<String> =
        records.into_iter().filter(|record| record.contains(" begun ")).collect();
    assert_eq!(begun, ["operator begun machines=web1,web9", "operator begun machines=all"]);
    let sub = server.client_with("sub", IdentityKind::Machine, &["*.*"]);
    let refused = sub.call::<RenewCertificates>(&RenewCertificatesRequest::default()).await;
    assert_eq!(refused.unwrap_err().code(), Some(FaultCode::Denied));
}

const OWN: &str = "/etc/dominator/tls/cert.pem";

/// A key, and its public part in DER.
fn machine_key(server: &Server, name: &str) -> ByteText {
    let made = Authority::create(&AuthorityOptions::default()).unwrap();
    fs::write(server.path(name), made.key_pem()).unwrap();
    // SubjectPublicKeyInfo of P-256.
    let head = [0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01];
    let at = made.der().windows(head.len()).position(|bytes| bytes == head).unwrap();
    ByteText(made.der()[at..at + 91].to_vec())
}

/// The certificate that a machine with this key gets, or why it gets none.
async fn own_certificate(
    server: &Server,
    hostname: &str,
    key: Option<&ByteText>,
) -> Result<String, String> {
    let wanted = WantedFiles {
        machine: machine(hostname, "nyc"),
        algorithm: Algorithm::Blake3,
        paths: vec![OWN.parse().unwrap()],
        key: key.cloned(),
        outputs: String::new(),
    };
    match server.generate_for(vec![wanted]).await.remove(0).remove(0) {
        GeneratedFile::Failed(why) => Err(why),
        GeneratedFile::Made(made) if made.is_secret => Err("it is secret".to_owned()),
        GeneratedFile::Made(made) => Ok(server.content(&made, hostname).await),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_gets_a_certificate_for_the_key_that_it_has() {
    let mut server = Server::secured();
    make_authority(&server, "ca", true);
    let config = format!("[[generator]]\npath = '{OWN}'\nkind = 'certificate'\nauthority = 'ca'\n");
    server.configure(&config);
    server.start().await;
    let [one, two] = ["one", "two"].map(|name| machine_key(&server, name));
    let unknown = "the key of the machine is not known: a dominator tells it that has connected to \
                   the machine by TLS, and that may call FileGenerator.GetSecrets";
    assert_eq!(own_certificate(&server, "web1", None).await, Err(unknown.to_owned()));
    let made = own_certificate(&server, "web1", Some(&one)).await.unwrap();
    let chain = |text: &str| {
        fs::write(server.path("cert.pem"), text).unwrap();
        certificates_of(&server.path("cert.pem")).unwrap()
    };
    let issued = chain(&made);
    assert!(key_belongs(&server.path("one"), &issued[0]).unwrap());
    let first = Certificate::read(&issued[0]).unwrap();
    assert_eq!((first.hosts, first.identity.kind), (vec!["web1".into()], IdentityKind::Machine));
    assert!(!made.contains("PRIVATE KEY"));

    // It is the same one for the same key, also after a restart, and another one for another.
    server.kill();
    server.start().await;
    assert_eq!(own_certificate(&server, "web1", Some(&one)).await.as_ref(), Ok(&made));
    let other = own_certificate(&server, "web1", Some(&two)).await.unwrap();
    fs::write(server.path("cert.pem"), &other).unwrap();
    let issued = certificates_of(&server.path("cert.pem")).unwrap();
    assert!(key_belongs(&server.path("two"), &issued[0]).unwrap());
    assert_eq!(own_certificate(&server, "web1", Some(&one)).await.as_ref(), Ok(&made));
    let renew = RenewCertificatesRequest {
        hostnames: Some(vec!["web1".to_owned()]),
        why: "a test".to_owned(),
    };
    let powers = ["FileGenerator.RenewCertificates"];
    let operator = server.client_with("operator", IdentityKind::User, &powers);
    assert_eq!(operator.call::<RenewCertificates>(&renew).await.unwrap().hostnames, ["web1"]);
    let renewed = own_certificate(&server, "web1", Some(&one)).await.unwrap();
    assert_ne!(renewed, made);

    // What is no key, and a key that was revoked.
    let bad = ByteText(vec![0x30, 0x03, 0x02, 0x01, 0x00]);
    let why = own_certificate(&server, "web1", Some(&bad)).await.unwrap_err();
    assert!(why.starts_with("cannot make the certificate for the key"), "{why}");
    let register = Register::open(&server.path("ca")).unwrap();
    let serial = Certificate::read(&issued[0]).unwrap();
    let target = RevocationTarget::from_certificate(&serial);
    register.lock().unwrap().revoke(&[target], Reason::KeyCompromise).unwrap();
    operator.call::<RenewCertificates>(&renew).await.unwrap();
    let why = own_certificate(&server, "web1", Some(&two)).await.unwrap_err();
    assert!(why.starts_with("a certificate with this key was revoked"), "{why}");

    // Who may not read secrets could pretend to be a machine.
    let powers = ["FileGenerator.Generate"];
    server.client = server.client_with("viewer", IdentityKind::User, &powers);
    assert_eq!(own_certificate(&server, "web1", Some(&one)).await, Err(unknown.to_owned()));
}
