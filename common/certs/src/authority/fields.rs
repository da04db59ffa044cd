//! The fields of certificates: checks and encodes names, times, hosts and lists.

use std::time::Duration;

use rcgen::{CertificateParams, CustomExtension, RevocationReason, SanType};
use x509_parser::asn1_rs::{Sequence, ToDer as _, Utf8String};

use api::certificate::reading::name_fault;
use model::mdb::HOSTNAME_BYTES_MAX;
use system::clock::wall;
use system::random::random_bytes;

use super::{AuthorityError, cannot_make, invalid};
use crate::record::Reason;

/// Longest lifetime.
const LIFETIME_MAX: Duration = Duration::from_secs(100 * 366 * 86_400);

/// A certificate is valid from this long ago, because clocks differ.
const LEEWAY: Duration = Duration::from_secs(3_600);

/// The last second that a certificate can express, in seconds since 1970.
const END_OF_TIME: i64 = 253_402_300_799;

/// Longest name of a holder, group or host, in bytes: longer names cannot own images or machines.
const NAME_BYTES_MAX: usize = 256;

/// Checks a name of a holder or group, which others compare with owners.
pub(super) fn check_name(what: &'static str, name: &str) -> Result<(), AuthorityError> {
    match name_fault(name.as_bytes()) {
        Some(why) => Err(invalid(what, name, why)),
        None if name.len() > NAME_BYTES_MAX => {
            Err(invalid(what, name, "it is longer than 256 bytes"))
        }
        None if name.contains(',') => Err(invalid(what, name, "it has a comma")),
        None => Ok(()),
    }
}

/// Returns 128 random bits, of which the first two are fixed: serial numbers must be positive, and
/// all have the same length.
pub(super) fn random_serial() -> [u8; 16] {
    let mut bytes: [u8; 16] = random_bytes();
    bytes[0] = bytes[0] & 0x3f | 0x40;
    bytes
}

pub(super) fn set_time(
    params: &mut CertificateParams,
    start: Option<i64>,
    lifetime: Duration,
    until: Option<i64>,
) -> Result<(), AuthorityError> {
    if lifetime.is_zero() {
        return Err(AuthorityError::Validity { why: "the lifetime is zero" });
    }
    if lifetime > LIFETIME_MAX {
        return Err(AuthorityError::Validity { why: "the lifetime exceeds a hundred years" });
    }
    let now = wall().seconds;
    let begin = start.unwrap_or_else(|| now.saturating_sub(seconds(LEEWAY)));
    let end = later(start.unwrap_or(now), lifetime);
    let end = until.map_or(end, |until| end.min(until));
    if begin < 0 || end > END_OF_TIME {
        return Err(AuthorityError::Validity { why: "it begins before 1970 or ends after 9999" });
    }
    let is_over = start.is_none() && until.is_some_and(|until| until <= now);
    if end <= begin || is_over {
        let end = model::tree::Time { seconds: end, nanoseconds: 0 };
        return Err(AuthorityError::Expired { end: model::display::utc(end) });
    }
    params.not_before = date_time(begin);
    params.not_after = date_time(end);
    Ok(())
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

pub(super) fn later(time: i64, more: Duration) -> i64 {
    time.saturating_add(seconds(more))
}

/// Converts `seconds` since 1970, cut to the range of certificates.
pub(super) fn date_time(seconds: i64) -> time::OffsetDateTime {
    time::OffsetDateTime::from_unix_timestamp(seconds.clamp(0, END_OF_TIME))
        .expect("years until 9999 can be written")
}

/// Encodes a host name or address.
pub(super) fn subject_alternative(host: &str) -> Result<SanType, AuthorityError> {
    if let Ok(address) = host.parse() {
        return Ok(SanType::IpAddress(address));
    }
    let why = match host.strip_prefix("*.").unwrap_or(host) {
        _ if host.len() > HOSTNAME_BYTES_MAX => "it is longer than 253 bytes",
        "" => "it is empty",
        name if name.split('.').any(str::is_empty) => "a part of it is empty",
        name if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) => {
            let name = host.try_into().map_err(cannot_make("certificate"))?;
            return Ok(SanType::DnsName(name));
        }
        _ => "a host name has letters, digits, hyphens and dots; write other letters as xn--...",
    };
    Err(invalid("a host", host, why))
}

/// Encodes an extension that is a list of strings.
pub(super) fn string_list(
    oid: &[u64],
    texts: &[String],
) -> Result<CustomExtension, AuthorityError> {
    if texts.len() > api::certificate::NAMES_MAX {
        return Err(invalid(
            "a list",
            &format!("{} names", texts.len()),
            "at most 1024 are allowed",
        ));
    }
    let elements = texts.iter().map(|text| Utf8String::new(text));
    let der = Sequence::from_iter_to_der(elements).and_then(|sequence| sequence.to_der_vec());
    let der = der.map_err(|_| invalid("a list", &texts.join(", "), "it cannot be encoded"))?;
    Ok(CustomExtension::from_oid_content(oid, der))
}

/// Encodes an extension that is one string.
pub(super) fn string(oid: &[u64], text: &str) -> Result<CustomExtension, AuthorityError> {
    let der = Utf8String::new(text).to_der_vec();
    let der = der.map_err(|_| invalid("a text", text, "it cannot be encoded"))?;
    Ok(CustomExtension::from_oid_content(oid, der))
}

/// Decodes a serial number in hexadecimal digits; other characters are skipped.
pub(super) fn serial_bytes(serial: &str) -> Vec<u8> {
    let digits: Vec<u8> = serial
        .chars()
        .filter_map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect();
    digits
        .rchunks(2)
        .rev()
        .map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit))
        .collect()
}

pub(super) fn reason_code(reason: Reason) -> Option<RevocationReason> {
    match reason {
        Reason::Unspecified => None,
        Reason::KeyCompromise => Some(RevocationReason::KeyCompromise),
        Reason::CaCompromise => Some(RevocationReason::CaCompromise),
        Reason::AffiliationChanged => Some(RevocationReason::AffiliationChanged),
        Reason::Superseded => Some(RevocationReason::Superseded),
        Reason::CessationOfOperation => Some(RevocationReason::CessationOfOperation),
        Reason::PrivilegeWithdrawn => Some(RevocationReason::PrivilegeWithdrawn),
    }
}
