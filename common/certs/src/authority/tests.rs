//! What authorities make, as openssl sees it, and authorities that openssl has made.

use std::path::Path;
use std::process::Command;

use expect_test::expect;

use super::super::record::{Reason, Revocation};
use super::*;

/// Runs openssl in `directory`: what it prints, or what it complains of.
fn openssl(directory: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("openssl").args(arguments).current_dir(directory).output();
    let output = output.expect("these tests need the program openssl");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn root() -> Authority {
    let options = AuthorityOptions { name: "Example root".into(), ..AuthorityOptions::default() };
    Authority::create(&options).unwrap()
}

fn request() -> Request {
    Request {
        name: "web1".into(),
        hosts: ["web1.example.org", "*.example.net", "192.0.2.7", "::7"].map(str::to_owned).into(),
        powers: Some(vec!["Subd.*".into(), "ObjectServer.GetObjects".into()]),
        groups: vec!["Grün & Söhne".into()],
        kind: IdentityKind::Machine,
        ..Request::default()
    }
}

/// Returns a certificate as openssl prints it, without what differs each time.
fn printed(directory: &Path, file: &str) -> String {
    let text = openssl(directory, &["x509", "-in", file, "-noout", "-text"]).unwrap();
    let mut lines = Vec::new();
    for line in text.lines() {
        let is_bytes = |line: &str| {
            let line = line.trim();
            line.contains(':') && line.bytes().all(|byte| byte == b':' || byte.is_ascii_hexdigit())
        };
        match line.trim() {
            _ if is_bytes(line) => continue,
            text if text.starts_with("Not ") => continue,
            text if text.starts_with("DirName") => continue,
            _ => lines.push(
                line.trim_end()
                    .replace(" = ", "=")
                    .replace("    ", " ")
                    .replace("IP Address", "IP"),
            ),
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn openssl_reads_and_verifies_what_is_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let root = root();
    let options = AuthorityOptions { name: "Example zone".into(), ..AuthorityOptions::default() };
    let below = root.create_intermediate(&options).unwrap();
    std::fs::write(path.join("ca.pem"), root.ca_pem()).unwrap();
    std::fs::write(path.join("chain.pem"), below.chain_pem()).unwrap();
    assert_eq!(below.ca_pem(), root.ca_pem());
    for (authority, chain) in [(&root, None), (&below, Some("chain.pem"))] {
        let issued = authority.issue(&request()).unwrap();
        std::fs::write(path.join("cert.pem"), &issued.certificate_pem).unwrap();
        std::fs::write(path.join("key.pem"), &issued.key_pem).unwrap();
        for purpose in ["sslserver", "sslclient"] {
            for wanted in [
                ["-verify_hostname", "web1.example.org"],
                ["-verify_hostname", "other.example.net"],
                ["-verify_ip", "192.0.2.7"],
            ] {
                let mut arguments =
                    vec!["verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca.pem"];
                arguments.extend(wanted);
                arguments.extend(chain.iter().flat_map(|chain| ["-untrusted", chain]));
                arguments.push("cert.pem");
                assert_eq!(openssl(path, &arguments), Ok("cert.pem: OK\n".into()));
            }
        }
        let modulus = |kind: &[&str]| openssl(path, kind).unwrap();
        assert_eq!(
            modulus(&["x509", "-in", "cert.pem", "-noout", "-pubkey"]),
            modulus(&["pkey", "-in", "key.pem", "-pubout"]),
        );
    }
    expect![[r#"
        Certificate:
         Data:
          Version: 3 (0x2)
          Serial Number:
          Signature Algorithm: ecdsa-with-SHA256
          Issuer: CN=Example zone
          Validity
          Subject: CN=web1
          Subject Public Key Info:
           Public Key Algorithm: id-ecPublicKey
            Public-Key: (256 bit)
            pub:
            ASN1 OID: prime256v1
            NIST CURVE: P-256
          X509v3 extensions:
           X509v3 Authority Key Identifier:
           X509v3 Subject Alternative Name:
            DNS:web1.example.org, DNS:*.example.net, IP:192.0.2.7, IP:0:0:0:0:0:0:0:7
           X509v3 Key Usage: critical
            Digital Signature
           X509v3 Extended Key Usage:
            TLS Web Server Authentication, TLS Web Client Authentication
           X509v3 Subject Key Identifier:
           X509v3 Basic Constraints: critical
            CA:FALSE
           1.3.6.1.4.1.9586.100.7.1:
            0!..Subd.*..ObjectServer.GetObjects
           1.3.6.1.4.1.9586.100.7.2:
            0...Gr..n & S..hne
           1.3.6.1.4.1.9586.100.7.3:
            ..machine
         Signature Algorithm: ecdsa-with-SHA256
         Signature Value:
    "#]]
    .assert_eq(&printed(path, "cert.pem"));
    expect![[r#"
        Certificate:
         Data:
          Version: 3 (0x2)
          Serial Number:
          Signature Algorithm: ecdsa-with-SHA256
          Issuer: CN=Example root
          Validity
          Subject: CN=Example zone
          Subject Public Key Info:
           Public Key Algorithm: id-ecPublicKey
            Public-Key: (256 bit)
            pub:
            ASN1 OID: prime256v1
            NIST CURVE: P-256
          X509v3 extensions:
           X509v3 Authority Key Identifier:
           X509v3 Key Usage: critical
            Certificate Sign, CRL Sign
           X509v3 Subject Key Identifier:
           X509v3 Basic Constraints: critical
            CA:TRUE, pathlen:0
         Signature Algorithm: ecdsa-with-SHA256
         Signature Value:
    "#]]
    .assert_eq(&printed(path, "chain.pem"));
    expect![[r#"
        Certificate:
         Data:
          Version: 3 (0x2)
          Serial Number:
          Signature Algorithm: ecdsa-with-SHA256
          Issuer: CN=Example root
          Validity
          Subject: CN=Example root
          Subject Public Key Info:
           Public Key Algorithm: id-ecPublicKey
            Public-Key: (256 bit)
            pub:
            ASN1 OID: prime256v1
            NIST CURVE: P-256
          X509v3 extensions:
           X509v3 Key Usage: critical
            Certificate Sign, CRL Sign
           X509v3 Subject Key Identifier:
           X509v3 Basic Constraints: critical
            CA:TRUE
         Signature Algorithm: ecdsa-with-SHA256
         Signature Value:
    "#]]
    .assert_eq(&printed(path, "ca.pem"));
    let error = below.create_intermediate(&options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Example zone is an intermediate authority, which cannot make other authorities: use \
         the directory of its root"
    );
}

#[test]
fn what_is_asked_for_is_what_is_read() {
    let authority = root();
    let issued = authority.issue(&request()).unwrap();
    let again = authority.issue_for_key(&request(), &issued.key_pem).unwrap();
    assert_eq!(again.key_pem, issued.key_pem);
    assert_ne!(again.certificate.serial, issued.certificate.serial);
    let read = issued.certificate;
    assert_eq!(read.serial.len(), 32);
    let want = Certificate {
        common_name: "web1".into(),
        issuer: "Example root".into(),
        hosts: request().hosts,
        identity: api::access::Identity {
            user: Some("web1".into()),
            groups: ["Grün & Söhne".to_owned()].into(),
            kind: IdentityKind::Machine,
            powers: api::access::Powers::new(["Subd.*", "ObjectServer.GetObjects"]),
            ..Default::default()
        },
        not_before: read.not_before,
        not_after: read.not_before + 3_600 + 365 * 86_400,
        serial: read.serial.clone(),
        fingerprint: read.fingerprint.clone(),
        key: again.certificate.key.clone(),
        is_authority: false,
    };
    assert_eq!(read, want);
    let silent = Request { powers: None, name: "web1".into(), ..Request::default() };
    let silent = authority.issue(&silent).unwrap().certificate;
    assert_eq!(silent.identity.powers.patterns().count(), 0);
    assert!(!format!("{authority:?} {again:?}").contains("PRIVATE"));
}

#[test]
fn kinds_are_encoded_as_the_document_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/PROTOCOL.md");
    let document = std::fs::read_to_string(path).unwrap();
    for kind in IdentityKind::STATED {
        let name = kind.name().unwrap();
        let extension = fields::string(KIND_OID, name).unwrap();
        let bytes: Vec<String> =
            extension.content().iter().map(|byte| format!("{byte:02x}")).collect();
        let row = format!("| `{name}` | `{}` |", bytes.join(" "));
        assert!(document.contains(&row), "PROTOCOL.md lacks the row {row}");
    }
}

#[test]
fn times_are_within_those_of_the_authority() {
    let day = Duration::from_secs(86_400);
    let options = |start, days| AuthorityOptions {
        name: "Short".into(),
        lifetime: day * days,
        start: Some(start),
        ..AuthorityOptions::default()
    };
    let start = wall().seconds - 86_400;
    let short = Authority::create(&options(start, 10)).unwrap();
    let end = |request: Request| short.issue(&request).map(|issued| issued.certificate.not_after);
    let plain = || Request { name: "web1".into(), ..Request::default() };
    assert_eq!(end(plain()).unwrap(), start + 10 * 86_400);
    let begun = Request { start: Some(start), lifetime: day / 2, ..plain() };
    assert_eq!(end(begun).unwrap(), start + 43_200);
    let over = Authority::create(&options(0, 10)).unwrap();
    let error = |authority: &Authority, request: Request| {
        authority.issue(&request).unwrap_err().to_string()
    };
    assert_eq!(
        error(&over, plain()),
        "the authority expired on 1970-01-11T00:00:00Z: make another one"
    );
    let table = [
        (Request { lifetime: Duration::ZERO, ..plain() }, "the lifetime is zero"),
        (Request { lifetime: Duration::MAX, ..plain() }, "the lifetime exceeds a hundred years"),
        (Request { start: Some(-1), ..plain() }, "it begins before 1970 or ends after 9999"),
    ];
    for (request, why) in table {
        let want = format!("invalid validity of a certificate: {why}");
        assert_eq!(error(&short, request), want);
    }
}

#[test]
fn what_others_could_not_read_is_refused() {
    let authority = root();
    let plain = || Request { name: "web1".into(), ..Request::default() };
    let host = |host: &str| Request { hosts: vec![host.into()], ..plain() };
    let letters =
        "a host name has letters, digits, hyphens and dots; write other letters as xn--...";
    let long = "x".repeat(257);
    let table = [
        (Request { name: String::new(), ..plain() }, "", "the name of the holder", "it is empty"),
        (
            Request { name: "a,b".into(), ..plain() },
            "a,b",
            "the name of the holder",
            "it has a comma",
        ),
        (
            Request { name: " a".into(), ..plain() },
            " a",
            "the name of the holder",
            "it begins or ends with a space",
        ),
        (
            Request { name: "a\n".into(), ..plain() },
            "a\\n",
            "the name of the holder",
            "it holds a control character",
        ),
        (
            Request { name: long.clone(), ..plain() },
            long.as_str(),
            "the name of the holder",
            "it is longer than 256 bytes",
        ),
        (
            Request { kind: IdentityKind::Unknown, ..plain() },
            "web1",
            "the name of the holder",
            "this release does not know what kind of holder it is",
        ),
        (Request { groups: vec!["a,b".into()], ..plain() }, "a,b", "a group", "it has a comma"),
        (
            Request { powers: Some(vec!["*".into()]), ..plain() },
            "*",
            "a power",
            "it is not a pattern of Service.Method",
        ),
        (host(""), "", "a host", "it is empty"),
        (host("a b"), "a b", "a host", letters),
        (host("grün.example"), "grün.example", "a host", letters),
        (host("a.*.example"), "a.*.example", "a host", letters),
        (host("a..example"), "a..example", "a host", "a part of it is empty"),
        (host(".example"), ".example", "a host", "a part of it is empty"),
    ];
    for (request, text, what, why) in table {
        let error = authority.issue(&request).unwrap_err().to_string();
        assert_eq!(error, format!("`{text}` cannot be {what} in a certificate: {why}"));
    }
}

#[test]
fn openssl_sees_what_is_revoked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let authority = root();
    let certificates = ["good", "bad"].map(|name| {
        let request = Request { name: name.into(), ..Request::default() };
        let issued = authority.issue(&request).unwrap();
        std::fs::write(path.join(name), &issued.certificate_pem).unwrap();
        issued.certificate
    });
    let revoked = Revocation {
        serial: certificates[1].serial.clone(),
        name: "bad".into(),
        reason: Reason::KeyCompromise,
        revoked_at: wall().seconds - 60,
        key: None,
    };
    std::fs::write(path.join("ca.pem"), authority.ca_pem()).unwrap();
    let list = |revoked: &[Revocation], number| {
        let list = authority.revocation_list(revoked, number).unwrap();
        std::fs::write(path.join("crl.pem"), list).unwrap();
        let arguments = ["crl", "-in", "crl.pem", "-CAfile", "ca.pem", "-noout", "-text"];
        openssl(path, &arguments).unwrap()
    };
    let verify = |name: &str| {
        let start = ["verify", "-x509_strict", "-CAfile", "ca.pem", "-CRLfile", "crl.pem"];
        openssl(path, &[&start, ["-crl_check", name].as_slice()].concat())
    };
    let text = list(&[], 7);
    assert!(text.contains("No Revoked Certificates") && text.contains("7"), "{text}");
    assert_eq!(verify("bad"), Ok("bad: OK\n".into()));
    let text = list(&[revoked], 1_700_000_000);
    assert!(text.contains(&certificates[1].serial.to_uppercase()), "{text}");
    assert!(text.contains("Key Compromise") && text.contains("1700000000"), "{text}");
    assert_eq!(verify("good"), Ok("good: OK\n".into()));
    assert!(verify("bad").unwrap_err().contains("certificate revoked"));
}

#[test]
fn an_authority_that_openssl_has_made_issues_too() {
    let kinds: [&[&str]; 2] = [&["ec", "-pkeyopt", "ec_paramgen_curve:P-384"], &["rsa:2048"]];
    for kind in kinds {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let start = ["req", "-x509", "-nodes", "-subj", "/O=Example/CN=Old root", "-days", "99"];
        let end = ["-keyout", "ca.key", "-out", "own.pem", "-newkey"];
        openssl(path, &[&start, end.as_slice(), kind].concat()).unwrap();
        // Others are trusted too.
        let own = std::fs::read_to_string(path.join("own.pem")).unwrap();
        std::fs::write(path.join("ca.pem"), root().ca_pem().to_owned() + &own).unwrap();
        let authority = Authority::load(path).unwrap();
        assert_eq!(authority.certificate().common_name, "Old root");
        let issued = authority.issue(&request()).unwrap();
        std::fs::write(path.join("cert.pem"), &issued.certificate_pem).unwrap();
        let list = authority.revocation_list(&[], 1).unwrap();
        std::fs::write(path.join("crl.pem"), list).unwrap();
        let verify = ["verify", "-CAfile", "ca.pem", "-CRLfile", "crl.pem", "-crl_check"];
        let verify = openssl(path, &[&verify, ["cert.pem"].as_slice()].concat());
        assert_eq!(verify, Ok("cert.pem: OK\n".into()));
        // With the key of another, or one in a form that cannot be read.
        let other = root();
        std::fs::write(path.join("ca.pem"), other.ca_pem()).unwrap();
        assert_eq!(
            Authority::load(path).unwrap_err().to_string(),
            format!(
                "{}: the key belongs to no certificate in ca.pem",
                path.join("ca.key").display()
            )
        );
        let arguments = ["pkey", "-in", "ca.key", "-traditional", "-out", "old.key"];
        openssl(path, &arguments).unwrap();
        std::fs::rename(path.join("old.key"), path.join("ca.key")).unwrap();
        let error = Authority::load(path).unwrap_err().to_string();
        assert!(error.contains("openssl pkcs8 -topk8 -nodes -in OLD -out ca.key"), "{error}");
    }
}
