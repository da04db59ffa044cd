//! Certificates that openssl and rcgen make, and what is read of them.

use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue, IsCa,
    KeyPair, SanType,
};
use x509_parser::asn1_rs::{Sequence, ToDer as _, Utf8String};

use super::*;

/// A `SEQUENCE OF UTF8String`.
fn sequence(items: &[&str]) -> Vec<u8> {
    let items = items.iter().map(|item| Utf8String::new(item));
    Sequence::from_iter_to_der(items).unwrap().to_der_vec().unwrap()
}

/// What a certificate is made of; the extensions as bytes.
#[derive(Clone, Copy, Default)]
struct Made<'a> {
    name: &'a str,
    alternatives: &'a [&'a str],
    powers: Option<&'a [u8]>,
    groups: Option<&'a [u8]>,
    kind: Option<&'a [u8]>,
    is_authority: bool,
}

fn make(made: Made<'_>) -> Vec<u8> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    if !made.name.is_empty() {
        params.distinguished_name.push(DnType::CommonName, DnValue::Utf8String(made.name.into()));
    }
    params.subject_alt_names = made.alternatives.iter().map(|text| alternative(text)).collect();
    let extensions = [(POWERS_OID, made.powers), (GROUPS_OID, made.groups), (KIND_OID, made.kind)];
    params.custom_extensions = extensions
        .into_iter()
        .filter_map(|(oid, content)| {
            content.map(|content| CustomExtension::from_oid_content(oid, content.to_vec()))
        })
        .collect();
    if made.is_authority {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    }
    params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
}

fn alternative(text: &str) -> SanType {
    if let Ok(address) = text.parse() {
        SanType::IpAddress(address)
    } else if text.contains("://") {
        SanType::URI(text.try_into().unwrap())
    } else if text.contains('@') {
        SanType::Rfc822Name(text.try_into().unwrap())
    } else {
        SanType::DnsName(text.try_into().unwrap())
    }
}

/// Runs openssl in `directory` and gives back what it prints.
fn openssl(directory: &Path, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("openssl").args(arguments).current_dir(directory).output();
    let output = output.expect("these tests need the program openssl");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn patterns_look_like_methods_and_hosts_do_not() {
    let table = [
        ("Subd.Poll", true),
        ("Subd.*", true),
        ("*.*", true),
        ("*.Get*", true),
        ("*Server.GetImage", true),
        ("ImageServer.*Image*", true),
        ("", false),
        (".", false),
        ("*", false),
        ("Subd", false),
        ("Subd.", false),
        (".Poll", false),
        ("Subd.Poll.More", false),
        ("*.*.*", false),
        ("Subd.poll", false),
        ("subd.Poll", false),
        (" Subd.Poll", false),
        ("Subd.Poll ", false),
        ("Subd.Poll,Subd.Fetch", false),
        ("localhost", false),
        ("web1.example.org", false),
        ("web1.example", false),
        ("*.example", false),
        ("*.example.org", false),
        ("*.Example.Org", false),
        ("Web-1.Example", false),
        ("Web1.example", false),
        ("192.0.2.1", false),
        ("1.1", false),
        ("Süb.Poll", false),
        ("Subd.\u{202e}Poll", false),
        ("alice@Example.Org", false),
    ];
    for (text, want) in table {
        assert_eq!(is_pattern(text), want, "{text}");
    }
}

/// A certificate, and the user, the groups and the powers of its holder.
type Row<'a> = (Made<'a>, Option<&'a str>, &'a [&'a str], &'a [&'a str]);

#[test]
fn a_certificate_tells_who_holds_it_and_what_they_may_do() {
    let both = sequence(&["Subd.*", "ObjectServer.GetObjects"]);
    let none = sequence(&[]);
    let odd = sequence(&["]ubd.*", "Subd.*"]);
    let web = sequence(&["web", "dba"]);
    let made = Made::default();
    #[rustfmt::skip]
    let table: [Row<'_>; 18] = [
        // made                                                        user  groups  powers
        (Made { name: "dominator", powers: Some(&both), ..made },
            Some("dominator"), &[], &["Subd.*", "ObjectServer.GetObjects"]),
        (Made { name: "alice", alternatives: &["a.example"], powers: Some(&none), ..made },
            Some("alice"), &[], &[]),
        (Made { name: "alice", powers: Some(&none), groups: Some(&web), ..made },
            Some("alice"), &["dba", "web"], &[]),
        // What is no pattern is no power.
        (Made { name: "bob", powers: Some(&odd), ..made }, Some("bob"), &[], &["Subd.*"]),
        // The name is no list where there is an extension.
        (Made { name: "Subd.*", powers: Some(&none), ..made }, Some("Subd.*"), &[], &[]),
        // Without one it is.
        (Made { name: "Subd.*", alternatives: &["dominator"], ..made },
            Some("dominator"), &[], &["Subd.*"]),
        (Made { name: "Subd.*,ObjectServer.GetObjects", alternatives: &["a@example.org"], ..made },
            Some("a@example.org"), &[], &["Subd.*", "ObjectServer.GetObjects"]),
        (Made { name: "Subd.*, *.Get*,,junk", alternatives: &["10.0.0.1", "x"], ..made },
            Some("10.0.0.1"), &[], &["Subd.*", "*.Get*"]),
        (Made { name: "Subd.*", ..made }, Some("Subd.*"), &[], &["Subd.*"]),
        (Made { name: "*.*", alternatives: &["spiffe://x/root", "x"], groups: Some(&web), ..made },
            Some("spiffe://x/root"), &["dba", "web"], &["*.*"]),
        // Servers with no powers.
        (Made { name: "web1.example.org", alternatives: &["web1.example.org"], ..made },
            Some("web1.example.org"), &[], &[]),
        (Made { name: "web1.example.org", ..made }, Some("web1.example.org"), &[], &[]),
        (Made { name: "*.example", alternatives: &["*.example"], ..made },
            Some("*.example"), &[], &[]),
        (Made { alternatives: &["web1", "web2"], ..made }, Some("web1"), &[], &[]),
        (made, None, &[], &[]),
        // Authorities have none either, whatever they say.
        (Made { name: "Root", powers: Some(&both), groups: Some(&web), is_authority: true, ..made },
            Some("Root"), &[], &[]),
        (Made { name: "*.*", alternatives: &["root"], is_authority: true, ..made },
            Some("*.*"), &[], &[]),
        (Made { is_authority: true, ..made }, None, &[], &[]),
    ];
    for (made, user, groups, powers) in table {
        let certificate = Certificate::read(&make(made)).unwrap();
        let want = Identity {
            user: user.map(str::to_owned),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
            powers: Powers::new(powers.iter().copied()),
            ..Identity::default()
        };
        assert_eq!(certificate.identity, want, "{} {:?}", made.name, made.alternatives);
        assert_eq!(certificate.common_name, made.name);
        assert_eq!(certificate.is_authority, made.is_authority);
    }
}

#[test]
fn a_certificate_tells_what_its_holder_is() {
    use IdentityKind::{Machine, Service, Unknown, Unstated, User};
    let none = sequence(&[]);
    let made = Made { name: "alice", powers: Some(&none), ..Made::default() };
    let older = Made { name: "Subd.*", alternatives: &["alice"], ..Made::default() };
    #[rustfmt::skip]
    let table: [(Made<'_>, IdentityKind); 10] = [
        (made,                                                    Unstated),
        (Made { kind: Some(b"\x0c\x04user"), ..made },            User),
        (Made { kind: Some(b"\x0c\x07service"), ..made },         Service),
        (Made { kind: Some(b"\x0c\x07machine"), ..made },         Machine),
        // Other types of strings.
        (Made { kind: Some(b"\x13\x07machine"), ..made },         Machine),
        (Made { kind: Some(b"\x16\x07machine"), ..made },         Machine),
        // A later release may have more kinds.
        (Made { kind: Some(b"\x0c\x05robot"), ..made },           Unknown),
        (Made { kind: Some(b"\x0c\x04User"), ..made },            Unknown),
        (older,                                                   Unstated),
        (Made { kind: Some(b"\x0c\x07machine"), ..older },        Machine),
    ];
    for (made, kind) in table {
        let identity = Certificate::read(&make(made)).unwrap().identity;
        assert_eq!((identity.user.as_deref(), identity.kind), (Some("alice"), kind));
    }
    // An authority says what the holders of its certificates are, and has no powers.
    let authority = Made { kind: Some(b"\x0c\x07machine"), is_authority: true, ..made };
    let read = Certificate::read(&make(authority)).unwrap();
    let user = Some("alice".to_owned());
    assert_eq!(read.identity, Identity { user, kind: Machine, ..Identity::default() });
    assert!(read.is_for_machines());
    let authority = Certificate::read(&make(Made { is_authority: true, ..made })).unwrap();
    let machine = Made { kind: Some(b"\x0c\x07machine"), ..made };
    let machine = Certificate::read(&make(machine)).unwrap();
    assert!(!authority.is_for_machines() && !machine.is_for_machines());
}

#[test]
fn what_could_deceive_is_refused() {
    let made = Made::default();
    let part = |part: &str, why: &str| {
        Some(format!("the {part} of the certificate cannot be used: {why}"))
    };
    let name = |name: &str, part: &str, why: &str| {
        Some(format!("`{name}` in the {part} of the certificate cannot be used: {why}"))
    };
    let good = sequence(&["Subd.*"]);
    let trailing = [good.as_slice(), b"\x00"].concat();
    let cut = [0x30, 0x04, 0x0c, 0x09, b'S', b'u'];
    let many = sequence(&vec!["Subd.Poll"; NAMES_MAX + 1]);
    let most = sequence(&vec!["Subd.Poll"; NAMES_MAX]);
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    let long_list = sequence(&[&long]);
    let shown = format!("{}...", "x".repeat(SHOWN_MAX));
    let escaping = sequence(&["Subd.\u{1b}[2J"]);
    let empty = sequence(&[""]);
    let plain = sequence(&["web"]);
    let with_kind = |kind| Made { name: "a", powers: Some(&good), kind: Some(kind), ..made };
    let no_string = || part("kind", "the extension is no ASN.1 UTF8String");
    #[rustfmt::skip]
    let table = [
        (with_kind(b""), no_string()),
        (with_kind(b"\x0c"), no_string()),
        (with_kind(b"\x0c\x05user"), no_string()),
        (with_kind(b"\x0c\x84\xff\xff\xff\xffuser"), no_string()),
        (with_kind(b"\x04\x04user"), no_string()),
        (with_kind(b"\x30\x06\x0c\x04user"), no_string()),
        (with_kind(b"\x0c\x04user\x00"),
            part("kind", "bytes follow upon the ASN.1 UTF8String")),
        (with_kind(b"\x0c\x04user\x0c\x04user"),
            part("kind", "bytes follow upon the ASN.1 UTF8String")),
        (with_kind(b"\x0c\x00"), name("", "kind", "it is empty")),
        (with_kind(b"\x0c\x05user "), name("user ", "kind", "it begins or ends with a space")),
        (with_kind(b"\x2c\x06\x0c\x04user"),
            name("\\x0c\\x04user", "kind", "it holds a control character")),
        (Made { is_authority: true, ..with_kind(b"\x05\x00") }, no_string()),
        (Made { name: "a", powers: Some(&good), ..made }, None),
        (Made { name: "a", powers: Some(&most), ..made }, None),
        (Made { powers: Some(&good), alternatives: &["a"], ..made }, part("subject",
            "it has no common name, which tells who has the powers in the extension")),
        (Made { name: "a", powers: Some(b""), ..made },
            part("powers", "the extension is no ASN.1 SEQUENCE")),
        (Made { name: "a", powers: Some(b"\x0c\x06Subd.*"), ..made },
            part("powers", "the extension is no ASN.1 SEQUENCE")),
        (Made { name: "a", powers: Some(&trailing), ..made },
            part("powers", "bytes follow upon the ASN.1 SEQUENCE")),
        (Made { name: "a", groups: Some(&cut), ..made },
            part("groups", "an element of the ASN.1 SEQUENCE is cut off")),
        (Made { name: "a", groups: Some(b"\x30\x03\x02\x01\x05"), ..made },
            part("groups", "an element of the ASN.1 SEQUENCE is no UTF8String")),
        (Made { name: "a", powers: Some(&many), groups: Some(&plain), ..made },
            Some("the powers of the certificate have 1025 names, at most 1024 are read".into())),
        (Made { name: "a", groups: Some(&long_list), ..made },
            name(&shown, "groups", "it is longer than 1024 bytes")),
        (Made { name: "a", powers: Some(&escaping), ..made },
            name("Subd.\\x1b[2J", "powers", "it holds a control character")),
        (Made { name: "a", groups: Some(&empty), ..made }, name("", "groups", "it is empty")),
        (Made { name: "a", groups: Some(b"\x30\x03\x0c\x01\xff"), ..made },
            name("\\xff", "groups", "it is not UTF-8")),
        (Made { name: "al\u{0}ice", ..made },
            name("al\\x00ice", "common name", "it holds a control character")),
        (Made { name: "alice ", ..made },
            name("alice ", "common name", "it begins or ends with a space")),
        (Made { name: "ali\u{200b}ce", ..made }, name("ali\u{fffd}ce", "common name",
            "it holds a character that cannot be seen or turns the direction of writing")),
        (Made { name: "a", alternatives: &["web1\n"], ..made },
            name("web1\\n", "subject alternative names", "it holds a control character")),
        (Made { name: "a", alternatives: &[""], ..made },
            name("", "subject alternative names", "it is empty")),
    ];
    for (made, want) in table {
        let got = Certificate::read(&make(made)).err().map(|error| error.to_string());
        assert_eq!(got, want, "{}", made.name);
    }
    let too_long = Certificate::read(&vec![0x30; CERTIFICATE_BYTES_MAX + 1]);
    assert_eq!(too_long, Err(CertificateError::TooLong { bytes: CERTIFICATE_BYTES_MAX + 1 }));
    let twice = [make(made), vec![0]].concat();
    let error = Certificate::read(&twice).unwrap_err().to_string();
    assert_eq!(error, "this is no X.509 certificate: bytes follow upon it");
}

/// As the script of the first Dominator makes them.
const CONFIG: &str = "
[req]
distinguished_name = name
prompt = no
[name]
CN = alice
[leaf]
basicConstraints = CA:FALSE
keyUsage = digitalSignature, keyEncipherment
extendedKeyUsage = clientAuth, serverAuth
subjectAltName = DNS:web1.example.org, IP:192.0.2.7, IP:2001:db8::7, email:alice@example.org
1.3.6.1.4.1.9586.100.7.1 = ASN1:SEQUENCE:methods
1.3.6.1.4.1.9586.100.7.2 = ASN1:SEQUENCE:groups
1.3.6.1.4.1.9586.100.7.3 = ASN1:UTF8String:user
[methods]
method0 = UTF8String:Subd.*
method1 = UTF8:ObjectServer.GetObjects
[groups]
group0 = FORMAT:UTF8,UTF8String:Grün & co
[umlaut]
subjectAltName = DNS:grün.example
";

#[test]
fn certificates_made_by_openssl_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    std::fs::write(path.join("config"), CONFIG).unwrap();
    let made = |options: &[&str]| {
        let request = ["req", "-x509", "-config", "config", "-nodes", "-utf8", "-outform", "DER"];
        openssl(path, &[&request, options, &["-keyout", "key", "-out", "cert"]].concat());
        std::fs::read(path.join("cert")).unwrap()
    };
    let ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let rsa = ["-newkey", "rsa:2048"];
    for kind in [ec.as_slice(), &rsa] {
        let start = ["-set_serial", "0x00ab0102", "-extensions", "leaf", "-days", "90"];
        let der = made(&[kind, &start].concat());
        let print = openssl(
            path,
            &["x509", "-inform", "DER", "-in", "cert", "-noout", "-fingerprint", "-sha256"],
        );
        let print = String::from_utf8(print).unwrap();
        let (_, print) = print.trim().split_once('=').unwrap();
        let read = Certificate::read(&der).unwrap();
        assert_eq!(read.not_after - read.not_before, 90 * 86_400);
        let want = Certificate {
            common_name: "alice".into(),
            issuer: "alice".into(),
            hosts: vec!["web1.example.org".into(), "192.0.2.7".into(), "2001:db8::7".into()],
            identity: Identity {
                user: Some("alice".into()),
                kind: IdentityKind::User,
                groups: BTreeSet::from(["Grün & co".to_owned()]),
                powers: Powers::new(["Subd.*", "ObjectServer.GetObjects"]),
                zone: None,
            },
            not_before: read.not_before,
            not_after: read.not_after,
            serial: "ab0102".into(),
            fingerprint: format!("sha256:{}", print.replace(':', "").to_lowercase()),
            key: read.key.clone(),
            is_authority: false,
        };
        assert_eq!(read, want);
    }
    let short = |options: &[&str]| Certificate::read(&made(&[&ec, options].concat()));
    let authority = short(&["-subj", "/O=Example/CN=Root \\x1b", "-extensions", "umlaut"]);
    assert_eq!(
        authority.unwrap_err().to_string(),
        "the subject alternative names of the certificate cannot be used: the name of a host is \
         not ASCII; write xn--... for other letters"
    );
    let addext = ["-addext", "basicConstraints=critical,CA:TRUE"];
    let authority = short(&[["-subj", "/O=Example/CN=Root"], addext].concat()).unwrap();
    assert_eq!((authority.is_authority, authority.issuer.as_str()), (true, "Root"));
    let two_names = short(&["-subj", "/CN=alice/CN=bob"]).unwrap_err();
    assert_eq!(
        two_names.to_string(),
        "the subject of the certificate cannot be used: it has several common names, so that it \
         is not clear who this is"
    );
    let no_name = short(&["-subj", "/O=Example"]).unwrap();
    assert_eq!(no_name.identity, Identity::default());
    let bytes = short(&["-subj", "/CN=Subd.*\\,ObjectServer.*"]).unwrap();
    assert_eq!(bytes.identity.powers, Powers::new(["Subd.*", "ObjectServer.*"]));
}

#[test]
fn an_extension_that_is_there_twice_is_refused() {
    let table =
        [(POWERS_OID, sequence(&["Subd.*"]), "powers"), (KIND_OID, b"\x0c\x04user".into(), "kind")];
    for (oid, content, part) in table {
        let mut params = CertificateParams::default();
        params.custom_extensions = vec![CustomExtension::from_oid_content(oid, content); 2];
        let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
        assert_eq!(
            Certificate::read(&der).unwrap_err().to_string(),
            format!(
                "the {part} of the certificate cannot be used: there are several such extensions"
            )
        );
    }
}

proptest! {
    /// Whatever comes, reading ends, and without a panic.
    #[test]
    fn bytes_changed_by_chance_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<Option<prop::sample::Index>>(),
    ) {
        static WHOLE: std::sync::LazyLock<Vec<u8>> = std::sync::LazyLock::new(|| {
            make(Made {
                name: "alice",
                alternatives: &["web1.example.org", "192.0.2.7", "a@example.org"],
                powers: Some(&sequence(&["Subd.*", "*.Get*"])),
                groups: Some(&sequence(&["web"])),
                kind: Some(b"\x0c\x07machine"),
                is_authority: false,
            })
        });
        let mut der = WHOLE.clone();
        for (index, byte) in changes {
            let at = index.index(der.len());
            der[at] = byte;
        }
        if let Some(cut) = cut {
            der.truncate(cut.index(der.len()));
        }
        if let Ok(certificate) = Certificate::read(&der) {
            let shown = [certificate.common_name, certificate.issuer];
            for text in shown.iter().chain(&certificate.hosts) {
                prop_assert!(!text.chars().any(char::is_control), "{text:?}");
            }
        }
    }
}
