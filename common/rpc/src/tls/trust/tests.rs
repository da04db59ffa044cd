//! Authorities of one name, and their lists, in one program.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;

use super::*;
use crate::tls::explain::explain;
use api::access::{Identity, IdentityKind, Powers};
use certs::authority::{self, AuthorityOptions, Issued, Request};
use certs::record::{Reason, Revocation};
use system::clock::since_epoch;

const GOOD: &str = "good";
const REVOKED: &str = "its certificate was revoked";
const NAMESAKE: &str =
    "an authority below a root has the root's name, and crl.pem holds lists of both";

fn options(name: &str) -> AuthorityOptions {
    AuthorityOptions { name: name.into(), ..AuthorityOptions::default() }
}

fn root(name: &str) -> authority::Authority {
    authority::Authority::create(&options(name)).unwrap()
}

fn issued(authority: &authority::Authority) -> Issued {
    authority.issue(&Request { name: "web1".into(), ..Request::default() }).unwrap()
}

/// The list `number` of `authority`, with `all`.
fn list(authority: &authority::Authority, number: u64, all: &[&Issued]) -> String {
    let revoke = |issued: &&Issued| Revocation {
        serial: issued.certificate.serial.clone(),
        name: issued.certificate.common_name.clone(),
        reason: Reason::KeyCompromise,
        revoked_at: 1_700_000_000,
        key: None,
    };
    let all: Vec<Revocation> = all.iter().map(revoke).collect();
    authority.revocation_list(&all, number).unwrap()
}

fn trust(roots: &[&authority::Authority], lists: &str) -> Trust {
    let authorities: String = roots.iter().map(|root| root.ca_pem()).collect();
    let authorities: Vec<_> =
        CertificateDer::pem_slice_iter(authorities.as_bytes()).map(Result::unwrap).collect();
    let lists = CertificateRevocationListDer::pem_slice_iter(lists.as_bytes());
    let lists: Vec<_> = lists.map(Result::unwrap).collect();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Trust::new(&authorities, &lists, None, provider).unwrap()
}

/// What is said of each of `shown`.
fn judged<const N: usize>(trust: &Trust, shown: [&Issued; N]) -> [String; N] {
    shown.map(|one| {
        let chain = CertificateDer::pem_slice_iter(one.certificate_pem.as_bytes());
        let chain: Vec<_> = chain.map(Result::unwrap).collect();
        let now = UnixTime::since_unix_epoch(since_epoch() + Duration::from_secs(1));
        match trust.caller(&chain, now) {
            Ok(_) => GOOD.to_owned(),
            Err(error) => explain(&error),
        }
    })
}

#[test]
fn the_newest_list_of_an_authority_counts() {
    let root = root("Site");
    let [kept, stolen] = [issued(&root), issued(&root)];
    let [old, new] = [list(&root, 8, &[]), list(&root, 9, &[&stolen])];
    for lists in [format!("{old}{new}"), format!("{new}{old}"), new] {
        assert_eq!(judged(&trust(&[&root], &lists), [&kept, &stolen]), [GOOD, REVOKED]);
    }
    assert_eq!(judged(&trust(&[&root], &old), [&kept, &stolen]), [GOOD, GOOD]);
}

#[test]
fn an_authority_takes_the_place_of_one_of_its_name() {
    let [former, next] = [root("Site"), root("Site")];
    let [kept, stolen] = [issued(&former), issued(&former)];
    let [fresh, lost] = [issued(&next), issued(&next)];
    let [of_former, of_next] = [list(&former, 5, &[&stolen]), list(&next, 3, &[&lost])];
    let shown = [&kept, &stolen, &fresh, &lost];
    // Both are trusted while certificates are made anew.
    let both = [GOOD, REVOKED, GOOD, REVOKED];
    for lists in [format!("{of_former}{of_next}"), format!("{of_next}{of_former}")] {
        assert_eq!(judged(&trust(&[&former, &next], &lists), shown), both);
        assert_eq!(judged(&trust(&[&next, &former], &lists), shown), both);
    }
    // The list of the former one, which has gone, is in nobody's way.
    let unsigned = judged(&trust(&[&next], ""), [&kept])[0].clone();
    let want = [unsigned.as_str(), &unsigned, GOOD, GOOD];
    assert_eq!(judged(&trust(&[&next], &of_former), shown), want);
}

#[test]
fn lists_of_authorities_below_a_root_count_too() {
    let root = root("Site");
    let below = |name| root.create_intermediate(&options(name)).unwrap();
    let [build, web] = [below("Build"), below("Web")];
    let [kept, stolen, other] = [issued(&build), issued(&build), issued(&web)];
    let lists = [list(&build, 4, &[]), list(&root, 7, &[]), list(&build, 5, &[&stolen])].concat();
    let shown = [&kept, &stolen, &other];
    assert_eq!(judged(&trust(&[&root], &lists), shown), [GOOD, REVOKED, GOOD]);
    // The root revokes one as a whole.
    let web_itself = Issued {
        certificate: web.certificate().clone(),
        certificate_pem: String::new(),
        key_pem: String::new(),
    };
    let lists = format!("{lists}{}", list(&root, 8, &[&web_itself]));
    assert_eq!(judged(&trust(&[&root], &lists), shown), [GOOD, REVOKED, REVOKED]);
}

#[test]
fn holders_of_an_authority_for_machines_are_machines_whatever_they_say() {
    let only = |name: &str| AuthorityOptions { for_machines: true, ..options(name) };
    let root = root("Site");
    let below = root.create_intermediate(&only("Machines")).unwrap();
    let alone = authority::Authority::create(&only("Alone")).unwrap();
    let under = alone.create_intermediate(&options("Under")).unwrap();
    let trust = trust(&[&root, &alone], "");
    let wanted = |powers: &[&str]| Request {
        name: "alice".into(),
        hosts: vec!["images".to_owned()],
        kind: IdentityKind::User,
        groups: vec!["web".to_owned()],
        powers: Some(powers.iter().map(|power| (*power).to_owned()).collect()),
        ..Request::default()
    };
    let judged = |authority: &authority::Authority, powers: &[&str]| {
        let issued = authority.issue(&wanted(powers)).unwrap();
        let chain = CertificateDer::pem_slice_iter(issued.certificate_pem.as_bytes());
        let chain: Vec<_> = chain.map(Result::unwrap).collect();
        let now = UnixTime::since_unix_epoch(since_epoch() + Duration::from_secs(1));
        let server = trust.server(&chain, &"images".try_into().unwrap(), now).unwrap();
        let caller = trust.caller(&chain, now).unwrap();
        (caller.identity, [caller.is_of_machines, server.is_of_machines])
    };
    let machine = |powers: &[&str]| Identity {
        user: Some("alice".to_owned()),
        kind: IdentityKind::Machine,
        powers: Powers::new(powers.iter().copied()),
        ..Identity::default()
    };
    let get = "ObjectServer.GetObjects";
    for authority in [&below, &alone, &under] {
        assert_eq!(judged(authority, &["*.*"]), (machine(&[get]), [true; 2]));
        assert_eq!(judged(authority, &["Subd.*"]), (machine(&[]), [true; 2]));
    }
    let (user, is_of_machines) = judged(&root, &["*.*"]);
    let want = Identity {
        kind: IdentityKind::User,
        groups: ["web".to_owned()].into(),
        ..machine(&["*.*"])
    };
    assert_eq!((user, is_of_machines), (want, [false; 2]));
}

/// A root that openssl has made in `dir`, and one below it of the same name.
fn namesakes(dir: &Path) -> [authority::Authority; 2] {
    let root = root("Site");
    let below = dir.join("below");
    std::fs::create_dir(&below).unwrap();
    std::fs::write(dir.join("ca.key"), root.key_pem()).unwrap();
    std::fs::write(dir.join("ca.pem"), root.ca_pem()).unwrap();
    std::fs::write(below.join("ca.pem"), root.ca_pem()).unwrap();
    let made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=Site \
                -CA ca.pem -CAkey ca.key -keyout below/ca.key -out below/chain.pem -days 9";
    openssl(dir, made);
    [root, authority::Authority::load(&below).unwrap()]
}

fn openssl(dir: &Path, arguments: &str) {
    let mut openssl = Command::new("openssl");
    let output = openssl.args(arguments.split(' ')).current_dir(dir).output();
    let output = output.expect("these tests need the program openssl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_authority_below_a_root_of_its_name_hides_no_list() {
    let dir = tempfile::tempdir().unwrap();
    let [root, below] = namesakes(dir.path());
    let [kept, stolen] = [issued(&below), issued(&below)];
    assert_eq!(judged(&trust(&[&root], ""), [&kept, &stolen]), [GOOD, GOOD]);
    let lists = list(&below, 4, &[&stolen]);
    assert_eq!(judged(&trust(&[&root], &lists), [&kept, &stolen]), [NAMESAKE, NAMESAKE]);
}

/// The list that openssl makes for `authority`, with `revoked`; `settings` are those of its
/// configuration.
fn of_openssl(authority: &authority::Authority, revoked: &Issued, settings: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let serial = revoked.certificate.serial.to_uppercase();
    write("index", &format!("R\t400101000000Z\t240101000000Z\t{serial}\tunknown\t/CN=web1\n"));
    write("number", "2A\n");
    write("ca.pem", authority.ca_pem());
    write("ca.key", &authority.key_pem());
    let start = "[ca]\ndefault_ca = it\n[it]\ndatabase = index\ndefault_md = sha256\n\
                 default_crl_days = 30\n";
    let end = "[with_id]\nauthorityKeyIdentifier = keyid:always\n";
    write("config", &format!("{start}{settings}{end}"));
    openssl(dir.path(), "ca -gencrl -config config -cert ca.pem -keyfile ca.key -out crl.pem");
    std::fs::read_to_string(dir.path().join("crl.pem")).unwrap()
}

#[test]
fn lists_of_openssl_count_with_and_without_identifier_and_number() {
    let [first, second] = [root("Site"), root("Site")];
    let [kept, stolen] = [issued(&first), issued(&first)];
    let [fresh, lost] = [issued(&second), issued(&second)];
    let number = "crlnumber = number\n";
    let id = "crl_extensions = with_id\n";
    for settings in [number.to_owned(), id.to_owned(), format!("{number}{id}")] {
        let lists = [of_openssl(&first, &stolen, &settings), of_openssl(&second, &lost, &settings)];
        let got = judged(&trust(&[&first], &lists[0]), [&kept, &stolen]);
        assert_eq!(got, [GOOD, REVOKED], "{settings}");
        let shown = [&kept, &stolen, &fresh, &lost];
        let got = judged(&trust(&[&first, &second], &lists.concat()), shown);
        assert_eq!(got, [GOOD, REVOKED, GOOD, REVOKED], "{settings}");
    }
    // Without an identifier nobody knows whose it is, if its authority has gone: nothing is
    // believed, and not everything.
    let lists = of_openssl(&first, &stolen, number);
    let got = judged(&trust(&[&second], &lists), [&fresh]);
    assert_ne!(got, [GOOD]);
    let plain = of_openssl(&first, &stolen, "");
    let plain = [CertificateRevocationListDer::from_pem_slice(plain.as_bytes()).unwrap()];
    let error = lists::read(&plain).err().unwrap().to_string();
    assert!(error.starts_with("list 1 cannot be used: it is of version 1"), "{error}");
}
