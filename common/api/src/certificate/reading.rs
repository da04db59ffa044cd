//! Reads a certificate.
//!
//! Any peer that can connect can send one before it is verified. So its form is not trusted, and
//! names that could deceive readers of a log or a page are refused.

use core::net::IpAddr;
use std::collections::BTreeSet;

use sha2::Digest as _;
use x509_parser::asn1_rs::{Any, FromDer as _, Oid, Sequence, Tag};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use super::{
    CERTIFICATE_BYTES_MAX, Certificate, CertificateError, GROUPS_OID, KIND_OID, NAME_BYTES_MAX,
    NAMES_MAX, POWERS_OID,
};
use crate::access::{Identity, IdentityKind, Powers};
use model::escape::escape;

#[cfg(test)]
mod tests;

/// How much of a bad name an error shows, in characters.
const SHOWN_MAX: usize = 64;

impl Certificate {
    /// Reads the certificate `der`. Verifies nothing: see the module's text.
    ///
    /// # Errors
    ///
    /// Fails for invalid bytes, and never panics.
    pub fn read(der: &[u8]) -> Result<Self, CertificateError> {
        if der.len() > CERTIFICATE_BYTES_MAX {
            return Err(CertificateError::TooLong { bytes: der.len() });
        }
        let (rest, x509) = X509Certificate::from_der(der).map_err(|error| {
            CertificateError::Encoding { why: escape_short(&error.to_string()) }
        })?;
        if !rest.is_empty() {
            return Err(CertificateError::Encoding { why: "bytes follow upon it".to_owned() });
        }
        let is_authority = is_authority(&x509)?;
        let common_name = common_name(x509.subject())?;
        let names = names(&x509)?;
        Ok(Self {
            issuer: issuer(x509.issuer()),
            hosts: names.hosts,
            identity: identity(&x509, is_authority, &common_name, names.first)?,
            common_name,
            not_before: x509.validity().not_before.timestamp(),
            not_after: x509.validity().not_after.timestamp(),
            serial: serial(x509.raw_serial())?,
            fingerprint: sha256(der),
            key: sha256(x509.public_key().raw),
            is_authority,
        })
    }
}

/// Returns true if `text` has the form of a pattern of `Service.Method`: two words of ASCII
/// letters, digits and `*`, each beginning with a capital letter or `*`.
///
/// The name of a host in the common name must not become a power. A host name has a `*` only at its
/// beginning and is rarely written with capitals. As a pattern it would match only a service that
/// is called as the host, and no service is.
#[must_use]
pub fn is_pattern(text: &str) -> bool {
    let is_word = |word: &str| {
        let begins = word.starts_with(|first: char| first == '*' || first.is_ascii_uppercase());
        begins && word.bytes().all(|byte| byte == b'*' || byte.is_ascii_alphanumeric())
    };
    text.split_once('.').is_some_and(|(service, method)| is_word(service) && is_word(method))
}

/// The subject alternative names that can be used.
struct Names {
    /// The names and addresses of hosts.
    hosts: Vec<String>,
    /// The first name that is text, of a host or not.
    first: Option<String>,
}

fn is_authority(x509: &X509Certificate<'_>) -> Result<bool, CertificateError> {
    let constraints = x509.basic_constraints().map_err(|_| CertificateError::Part {
        part: "basic constraints",
        why: "they are malformed or there are several",
    })?;
    Ok(constraints.is_some_and(|constraints| constraints.value.ca))
}

/// Returns the identity of the holder.
fn identity(
    x509: &X509Certificate<'_>,
    is_authority: bool,
    common_name: &str,
    first_name: Option<String>,
) -> Result<Identity, CertificateError> {
    let powers = list(x509, POWERS_OID, "powers")?;
    let groups = list(x509, GROUPS_OID, "groups")?;
    let kind = kind(x509)?;
    if is_authority {
        let user = Some(common_name.to_owned()).filter(|name| !name.is_empty());
        return Ok(Identity { user, kind, ..Identity::default() });
    }
    let groups: BTreeSet<String> = groups.unwrap_or_default().into_iter().collect();
    let Some(powers) = powers else {
        let user = first_name.unwrap_or_else(|| common_name.to_owned());
        let patterns = common_name.split(',').map(|item| item.trim_matches(' '));
        return Ok(Identity {
            user: Some(user).filter(|user| !user.is_empty()),
            kind,
            groups,
            powers: Powers::new(patterns.filter(|item| is_pattern(item))),
            zone: None,
        });
    };
    if common_name.is_empty() {
        return Err(CertificateError::Part {
            part: "subject",
            why: "it has no common name, which tells who has the powers in the extension",
        });
    }
    Ok(Identity {
        user: Some(common_name.to_owned()),
        kind,
        groups,
        powers: Powers::new(powers.into_iter().filter(|power| is_pattern(power))),
        zone: None,
    })
}

/// Returns what the holder is. A name that is not known is a kind of a later release.
fn kind(x509: &X509Certificate<'_>) -> Result<IdentityKind, CertificateError> {
    const PART: &str = "kind";
    let bad = |why| CertificateError::Part { part: PART, why };
    let Some(value) = extension(x509, KIND_OID, PART)? else { return Ok(IdentityKind::Unstated) };
    let (rest, any) =
        Any::from_der(value).map_err(|_| bad("the extension is no ASN.1 UTF8String"))?;
    if !is_string(&any) {
        return Err(bad("the extension is no ASN.1 UTF8String"));
    }
    if !rest.is_empty() {
        return Err(bad("bytes follow upon the ASN.1 UTF8String"));
    }
    Ok(IdentityKind::from_name(&name(PART, any.data)?))
}

/// Returns the content of the extension `oid`; `None` without that extension.
fn extension<'a>(
    x509: &'a X509Certificate<'_>,
    oid: &[u64],
    part: &'static str,
) -> Result<Option<&'a [u8]>, CertificateError> {
    let oid = Oid::from(oid).expect("the identifiers of extensions are constants that are valid");
    match x509.get_extension_unique(&oid) {
        Ok(extension) => Ok(extension.map(|extension| extension.value)),
        Err(_) => Err(CertificateError::Part { part, why: "there are several such extensions" }),
    }
}

fn is_string(any: &Any<'_>) -> bool {
    [Tag::Utf8String, Tag::PrintableString, Tag::Ia5String].contains(&any.tag())
}

/// Returns the strings of the extension `oid`; `None` without that extension.
fn list(
    x509: &X509Certificate<'_>,
    oid: &[u64],
    part: &'static str,
) -> Result<Option<Vec<String>>, CertificateError> {
    let bad = |why| CertificateError::Part { part, why };
    let Some(value) = extension(x509, oid, part)? else { return Ok(None) };
    let (rest, sequence) =
        Sequence::from_der(value).map_err(|_| bad("the extension is no ASN.1 SEQUENCE"))?;
    if !rest.is_empty() {
        return Err(bad("bytes follow upon the ASN.1 SEQUENCE"));
    }
    let mut content: &[u8] = &sequence.content;
    let mut strings = Vec::new();
    while !content.is_empty() {
        let (rest, any) = Any::from_der(content)
            .map_err(|_| bad("an element of the ASN.1 SEQUENCE is cut off"))?;
        if !is_string(&any) {
            return Err(bad("an element of the ASN.1 SEQUENCE is no UTF8String"));
        }
        strings.push(name(part, any.data)?);
        if strings.len() > NAMES_MAX {
            return Err(CertificateError::TooMany { part, count: strings.len() });
        }
        content = rest;
    }
    Ok(Some(strings))
}

/// Returns the common name of the holder, or an empty text.
fn common_name(subject: &X509Name<'_>) -> Result<String, CertificateError> {
    let mut all = subject.iter_common_name();
    match (all.next(), all.next()) {
        (None, _) => Ok(String::new()),
        (Some(attribute), None) => name("common name", text_of(attribute)?),
        (Some(_), Some(_)) => Err(CertificateError::Part {
            part: "subject",
            why: "it has several common names, so that it is not clear who this is",
        }),
    }
}

fn text_of<'a>(attribute: &'a AttributeTypeAndValue<'_>) -> Result<&'a [u8], CertificateError> {
    let text = attribute.as_str().map_err(|_| CertificateError::Part {
        part: "common name",
        why: "it is neither UTF-8 nor ASCII",
    })?;
    Ok(text.as_bytes())
}

/// Returns the common name of the issuer, for display only.
fn issuer(issuer: &X509Name<'_>) -> String {
    let last = issuer.iter_common_name().last();
    last.map(|attribute| escape_short_bytes(attribute.as_slice())).unwrap_or_default()
}

fn names(x509: &X509Certificate<'_>) -> Result<Names, CertificateError> {
    const PART: &str = "subject alternative names";
    let mut names = Names { hosts: Vec::new(), first: None };
    let bad = |why| CertificateError::Part { part: PART, why };
    let oid = x509_parser::oid_registry::OID_X509_EXT_SUBJECT_ALT_NAME;
    let extension = x509.get_extension_unique(&oid);
    let extension = extension.map_err(|_| bad("there are several such extensions"))?;
    let Some(extension) = extension else { return Ok(names) };
    let ParsedExtension::SubjectAlternativeName(alternatives) = extension.parsed_extension() else {
        return Err(bad("the extension is malformed"));
    };
    let count = alternatives.general_names.len();
    if count > NAMES_MAX {
        return Err(CertificateError::TooMany { part: PART, count });
    }
    for alternative in &alternatives.general_names {
        let (text, is_host) = match alternative {
            GeneralName::DNSName(text) if !text.is_ascii() => {
                return Err(bad(
                    "the name of a host is not ASCII; write xn--... for other letters",
                ));
            }
            GeneralName::DNSName(text) => (name(PART, text.as_bytes())?, true),
            GeneralName::IPAddress(bytes) => {
                (address(bytes).ok_or_else(|| bad("an address has neither 4 nor 16 bytes"))?, true)
            }
            GeneralName::RFC822Name(text) | GeneralName::URI(text) => {
                (name(PART, text.as_bytes())?, false)
            }
            GeneralName::Invalid(..) => return Err(bad("one of them is malformed")),
            _ => continue,
        };
        if is_host {
            names.hosts.push(text.clone());
        }
        names.first.get_or_insert(text);
    }
    Ok(names)
}

fn address(bytes: &[u8]) -> Option<String> {
    let address = match *bytes {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    Some(address.to_string())
}

fn serial(bytes: &[u8]) -> Result<String, CertificateError> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    // A serial number of only zeros keeps one of them.
    let bytes = &bytes[zeros.min(bytes.len().saturating_sub(1))..];
    if bytes.len() > 32 {
        return Err(CertificateError::Part {
            part: "serial number",
            why: "it is longer than 32 bytes, and 20 are allowed",
        });
    }
    Ok(hex(bytes))
}

/// Checks a name that is displayed and compared with others.
fn name(part: &'static str, bytes: &[u8]) -> Result<String, CertificateError> {
    match (name_fault(bytes), String::from_utf8(bytes.to_vec())) {
        (None, Ok(text)) => Ok(text),
        (why, _) => Err(CertificateError::Name {
            part,
            name: escape_short_bytes(bytes),
            why: why.unwrap_or(NOT_UTF8),
        }),
    }
}

const NOT_UTF8: &str = "it is not UTF-8";

/// Returns why `bytes` cannot be a name; `None` if they can.
#[must_use]
pub fn name_fault(bytes: &[u8]) -> Option<&'static str> {
    match std::str::from_utf8(bytes) {
        Err(_) => Some(NOT_UTF8),
        Ok("") => Some("it is empty"),
        Ok(_) if bytes.len() > NAME_BYTES_MAX => Some("it is longer than 1024 bytes"),
        Ok(text) if text.chars().any(char::is_control) => Some("it holds a control character"),
        Ok(text) if text.trim() != text => Some("it begins or ends with a space"),
        Ok(text) if text.chars().any(is_unseen) => {
            Some("it holds a character that cannot be seen or turns the direction of writing")
        }
        Ok(_) => None,
    }
}

/// Returns true for characters that make different names look alike.
fn is_unseen(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}')
}

fn escape_short(text: &str) -> String {
    escape_short_bytes(text.as_bytes())
}

fn escape_short_bytes(bytes: &[u8]) -> String {
    // `escape` does not escape invisible characters.
    let text = escape(&bytes[..bytes.len().min(4 * NAME_BYTES_MAX)]).replace(is_unseen, "\u{fffd}");
    match text.char_indices().nth(SHOWN_MAX) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&sha2::Sha256::digest(bytes)))
}
