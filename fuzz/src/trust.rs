//! Certificates, and what authorities may vouch for.

use api::certificate::{Certificate, NAME_BYTES_MAX, NAMES_MAX};
use rpc::tls::zones;

/// A certificate, as a peer shows it before anybody has verified it.
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
    // An authority is nobody who calls.
    let powers = certificate.identity.powers.patterns().count();
    assert!(!certificate.is_authority || powers == 0);
}

/// The file `zones.toml`.
pub fn zones(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(zones) = zones::parse(text) else { return };
    for zone in &zones {
        assert!(zone.methods.patterns().all(|pattern| pattern.split('.').count() == 2));
        let _any = (zone.methods.has("Subd.Poll"), zone.has_server("web-1.example.com"));
    }
    // Without authorities each zone is of none.
    assert_eq!(zones::assign(&zones, &[]).is_ok(), zones.is_empty());
}
