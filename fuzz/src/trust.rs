//! Certificates, zones of authorities, signatures, trusted keys and the audit log.

use api::access::{IdentityKind, Owners};
use api::audit::verify::Verifier;
use api::certificate::{Certificate, NAME_BYTES_MAX, NAMES_MAX};
use model::signing::{ContentSigner, ContentsStatement, Signature, Statement, TrustedKeys};
use rpc::tls::zones;

/// Reads a certificate before it is verified.
pub fn certificate(bytes: &[u8]) {
    let Ok(certificate) = Certificate::read(bytes) else { return };
    assert!(certificate.common_name.len() <= NAME_BYTES_MAX);
    assert!(certificate.hosts.len() <= NAMES_MAX);
    assert!(certificate.identity.groups.len() <= NAMES_MAX);
    let shown = [&certificate.common_name, &certificate.issuer, &certificate.serial];
    for text in shown {
        assert!(!text.contains(char::is_control), "{text:?}");
    }
    for pattern in certificate.identity.powers.patterns() {
        assert!(api::certificate::is_pattern(pattern), "{pattern:?}");
    }
    // An authority may not call methods and is in no group, whatever its holders are.
    let identity = &certificate.identity;
    let is_bare = identity.powers.patterns().count() == 0 && identity.groups.is_empty();
    assert!(!certificate.is_authority || is_bare);
    let is_for_machines = certificate.is_authority && identity.kind == IdentityKind::Machine;
    assert_eq!(certificate.is_for_machines(), is_for_machines);
    let machine = identity.clone().as_machine();
    assert_eq!((machine.kind, &machine.user), (IdentityKind::Machine, &identity.user));
    assert!(machine.powers.patterns().all(|method| identity.powers.has(method)));
    let owners = Owners::new(identity.groups.clone(), identity.user.clone());
    let is_owner = identity.user.is_some() && identity.kind.may_own();
    assert_eq!(owners.include(identity), is_owner);
}

/// Reads `zones.toml`.
pub fn zones(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(zones) = zones::parse(text) else { return };
    for zone in &zones {
        assert!(zone.methods.patterns().all(|pattern| pattern.split('.').count() == 2));
        let _any = (zone.methods.has("Subd.Poll"), zone.has_server("web-1.example.com"));
    }
    // Without authorities, no zone can be assigned.
    assert_eq!(zones::assign(&zones, &[]).is_ok(), zones.is_empty());
}

/// Reads a statement, a zero, and its signature.
pub fn signature(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (statement, signature) = text.split_once('\0').unwrap_or((text, ""));
    let read = statement.parse::<Statement>();
    if let Ok(read) = &read {
        assert_eq!(read.to_string(), statement, "two texts of one statement");
    }
    let contents = statement.parse::<ContentsStatement>();
    if let Ok(contents) = &contents {
        assert_eq!(contents.to_string(), statement, "two texts of one statement");
        assert!(read.is_err(), "a text for two purposes");
    }
    let signature = Signature { statement: statement.to_owned(), signature: signature.to_owned() };
    if let Ok(checked) = signature.check() {
        assert_eq!(Ok(checked.statement), read);
    }
    if let Ok((checked, _)) = signature.check_contents() {
        assert_eq!(Ok(checked), contents);
    }
}

/// Reads a file of trusted keys.
pub fn keys(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(signers) = ContentSigner::read_list(text) {
        assert!(signers.iter().all(|signer| signer.public_key().is_ok()));
    }
    let Ok(keys) = TrustedKeys::read(text, 1) else { return };
    assert!(!keys.is_empty() && keys.len() <= text.lines().count());
    assert_eq!(keys.names().count(), keys.len());
    // Keys must not be listed twice.
    assert!(TrustedKeys::read(&format!("{text}\n{text}"), 1).is_err());
}

/// Reads the lines of an audit log.
pub fn audit(bytes: &[u8]) {
    let mut verifier = Verifier::new(Vec::new());
    verifier.file("audit.1");
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        verifier.line(line);
    }
    let report = verifier.finish();
    assert_eq!(report.files, 1);
    // A made-up line has a wrong hash.
    let told = report.troubles.len() + report.remarks.len();
    assert!(bytes.is_empty() || report.records > 0 || told > 0, "{report:?}");
}
