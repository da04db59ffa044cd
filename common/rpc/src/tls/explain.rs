//! Explains errors of rustls, and what to do about them.
// tidy: core

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// Explains `error`.
#[must_use]
pub fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(error) => of_certificate(error),
        Error::AlertReceived(alert) => of_alert(*alert),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "what answers does not speak TLS: is it started with --insecure?".to_owned()
        }
        Error::NoCertificatesPresented => "it shows no certificate".to_owned(),
        Error::InconsistentKeys(_) => {
            "the certificate in cert.pem is not of the key in key.pem".to_owned()
        }
        Error::General(text) => text.clone(),
        _ => error.to_string(),
    }
}

/// Returns true if `error` is that the certificate of the other side has ended.
pub(super) fn has_ended(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. }
        )
    )
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has ended (or a clock is wrong)".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet (or a clock is wrong)".to_owned()
        }
        CertificateError::Revoked => "its certificate was revoked".to_owned(),
        CertificateError::UnknownIssuer => {
            "its certificate is of no authority in our ca.pem".to_owned()
        }
        CertificateError::NotValidForName => "its certificate is for another name".to_owned(),
        CertificateError::NotValidForNameContext { expected, presented } => {
            let expected = expected.to_str();
            match presented.as_slice() {
                [] => format!("its certificate is for no name, {expected} was expected"),
                names => {
                    let names: Vec<&str> = names.iter().map(|name| plain_name(name)).collect();
                    format!(
                        "its certificate is for {}, and not for {expected}: use a name that it \
                         has, or make it anew for both",
                        names.join(", ")
                    )
                }
            }
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate may not be used for this side of a connection".to_owned()
        }
        _ => format!("its certificate is wrong: {error}"),
    }
}

/// Returns the name in a text of rustls such as `DnsName("dom1")`.
fn plain_name(text: &str) -> &str {
    let name = text.split_once('(').and_then(|(_, name)| name.strip_suffix(')'));
    name.unwrap_or(text).trim_matches('"')
}

fn of_alert(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::CertificateExpired => "has ended, or is not valid yet, by its clock",
        AlertDescription::CertificateRevoked => "was revoked",
        AlertDescription::UnknownCA => "is of no authority that it trusts",
        AlertDescription::CertificateRequired => "is missing",
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate => "is not accepted",
        AlertDescription::DecryptError => "is not signed by the authority that it names",
        AlertDescription::AccessDenied => "is denied access",
        _ => return format!("the other side ended the handshake: {}", alert_text(alert)),
    };
    format!("the other side refuses our certificate: it {why}")
}

/// Names an alert as RFC 8446 does, in words, with its number: `protocol version (TLS alert 70)`.
fn alert_text(alert: AlertDescription) -> String {
    let number = u8::from(alert);
    let Some(name) = alert.as_str() else { return format!("TLS alert {number}") };
    let mut words = String::new();
    let mut was_small = false;
    for character in name.chars() {
        if was_small && character.is_ascii_uppercase() {
            words.push(' ');
        }
        was_small = character.is_ascii_lowercase();
        words.push(character.to_ascii_lowercase());
    }
    format!("{words} (TLS alert {number})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_are_told_in_words() {
        let refused = "the other side refuses our certificate: it was revoked";
        let table = [
            (AlertDescription::CertificateRevoked, refused),
            (
                AlertDescription::HandshakeFailure,
                "the other side ended the handshake: handshake failure (TLS alert 40)",
            ),
            (AlertDescription::Unknown(200), "the other side ended the handshake: TLS alert 200"),
        ];
        for (alert, text) in table {
            assert_eq!(explain(&Error::AlertReceived(alert)), text);
        }
    }
}
