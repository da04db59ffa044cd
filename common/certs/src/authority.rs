//! Authorities: they make certificates, and lists of those that count no more.
//!
//! An [`Authority`] is a key and a certificate in memory. [`Register`](super::register::Register)
//! keeps one in a directory, with what it has issued and revoked.
//!
//! Keys are ECDSA on P-256: small, fast, and understood by everything that speaks TLS 1.2. A
//! certificate of a daemon is for both sides of a connection, because a sub is a server to its
//! dominator and a client to its imageserver.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CustomExtension,
    DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, RevocationReason, RevokedCertParams, SanType,
    SerialNumber,
};
use x509_parser::asn1_rs::{Sequence, ToDer as _, Utf8String};
use x509_parser::prelude::{FromDer as _, ParsedExtension, X509Certificate};

use super::pem::{PemError, certificates_of, read_limited};
use super::record::{Reason, Revocation};
use api::certificate::reading::name_fault;
use api::certificate::{Certificate, CertificateError, GROUPS_OID, POWERS_OID, is_pattern};
use model::escape::escape;

/// How long an authority lasts, if it is not said.
pub const AUTHORITY_LIFETIME: Duration = Duration::from_secs(3_650 * 86_400);

/// How long other certificates last, if it is not said.
pub const LIFETIME: Duration = Duration::from_secs(365 * 86_400);

/// The longest that anything may last.
const LIFETIME_MAX: Duration = Duration::from_secs(100 * 366 * 86_400);

/// How long ago a certificate becomes valid, because clocks differ.
const LEEWAY: Duration = Duration::from_secs(3_600);

/// How long a list of revoked certificates may be used. It is made anew with each revocation; that
/// nothing was revoked for years must not stop a fleet.
const LIST_LIFETIME: Duration = Duration::from_secs(3_650 * 86_400);

/// The last second that a certificate can name.
const END_OF_TIME: i64 = 253_402_300_799;

/// The longest name of a holder, group or host, in bytes: longer ones could own nothing.
const NAME_BYTES_MAX: usize = 256;

/// What an authority is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityOptions {
    /// Its common name, which people see, and by which others name it.
    pub name: String,
    /// True to add the first digits of its key's identifier to the name, so that no two authorities
    /// have one name.
    pub key_in_name: bool,
    /// How long it lasts.
    pub lifetime: Duration,
    /// From when on, in seconds since 1970; `None` for an hour ago.
    pub start: Option<i64>,
}

impl Default for AuthorityOptions {
    fn default() -> Self {
        let name = "Dominator".to_owned();
        Self { name, key_in_name: false, lifetime: AUTHORITY_LIFETIME, start: None }
    }
}

/// A certificate that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The common name: who the holder is.
    pub name: String,
    /// The host names and addresses by which others reach the holder.
    pub hosts: Vec<String>,
    /// Patterns of the methods that the holder may call; `None` for a certificate that says
    /// nothing of powers, as those of other authorities do.
    pub powers: Option<Vec<String>>,
    /// The groups that the holder is in.
    pub groups: Vec<String>,
    /// How long it lasts; no longer than its authority, whatever this is.
    pub lifetime: Duration,
    /// From when on, in seconds since 1970, so that its end is this and the lifetime; `None` for
    /// an hour ago, its end being the lifetime from now.
    pub start: Option<i64>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            name: String::new(),
            hosts: Vec::new(),
            powers: Some(Vec::new()),
            groups: Vec::new(),
            lifetime: LIFETIME,
            start: None,
        }
    }
}

/// A certificate that was made, with its key.
pub struct Issued {
    /// What it says.
    pub certificate: Certificate,
    /// `cert.pem`: the certificate, and those of the authorities between it and the root.
    pub certificate_pem: String,
    /// `key.pem`: its key. A secret.
    pub key_pem: String,
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Issued").field("certificate", &self.certificate).finish()
    }
}

/// Why an authority cannot do what is asked of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// Something that is wanted cannot be in a certificate.
    #[error("`{text}` cannot be {what} in a certificate: {why}")]
    Wish {
        /// What it was to be.
        what: &'static str,
        /// What is wanted, escaped.
        text: String,
        /// Why not.
        why: &'static str,
    },
    /// The time is over, or has no end.
    #[error("no certificate can be made {when}: {why}")]
    Time {
        /// Which time.
        when: &'static str,
        /// Why not.
        why: String,
    },
    /// The key cannot sign, or nothing can be made.
    #[error("cannot make the {what}: {source}")]
    Make {
        /// What was to be made.
        what: &'static str,
        /// What the library says.
        source: rcgen::Error,
    },
    /// A file of the authority does not hold what it must.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it, and what may be done.
        why: String,
    },
    /// The certificate that was made cannot be read, or the one of the authority.
    #[error("the certificate of the authority cannot be used")]
    Certificate(#[from] CertificateError),
    /// A file cannot be read.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// An authority below a root makes no further authorities.
    #[error(
        "{name} is an intermediate authority itself, and may make no other: use the directory of \
         its root"
    )]
    NotRoot {
        /// Its name.
        name: String,
    },
    /// The kernel gives no random numbers.
    #[error("cannot read random numbers: {source}")]
    Random {
        /// What the kernel says.
        source: std::io::Error,
    },
}

/// A key that may sign certificates.
pub struct Authority {
    certificate: Certificate,
    der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
    /// By which others find its key.
    key_id: KeyIdMethod,
    /// Its certificate and those of the authorities between it and the root; empty for a root.
    chain_pem: String,
    /// The roots, which those who trust it must have.
    ca_pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Authority").field("certificate", &self.certificate).finish()
    }
}

impl Authority {
    /// Makes a root: an authority that vouches for itself.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::Wish`] and [`AuthorityError::Time`] for options that cannot be.
    pub fn create(options: &AuthorityOptions) -> Result<Self, AuthorityError> {
        let key = new_key()?;
        let params = authority_params(options, &key, None, BasicConstraints::Unconstrained)?;
        let made = params.self_signed(&key).map_err(making("authority"))?;
        let ca_pem = made.pem();
        Self::new(made.der(), key, String::new(), ca_pem)
    }

    /// Makes an authority for which this one vouches. It can make no further ones.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::NotRoot`] if this one is not a root; [`AuthorityError::Wish`] also for
    /// the name of this one, because lists of revoked certificates are known by it.
    pub fn create_intermediate(&self, options: &AuthorityOptions) -> Result<Self, AuthorityError> {
        if !self.chain_pem.is_empty() {
            return Err(AuthorityError::NotRoot { name: self.certificate.common_name.clone() });
        }
        if !options.key_in_name && options.name == self.certificate.common_name {
            return Err(wish("the name of an intermediate", &options.name, "its root has it"));
        }
        let constraints = BasicConstraints::Constrained(0);
        let key = new_key()?;
        let until = Some(self.certificate.not_after);
        let params = authority_params(options, &key, until, constraints)?;
        let made = params.signed_by(&key, &self.issuer).map_err(making("authority"))?;
        Self::new(made.der(), key, made.pem(), self.ca_pem.clone())
    }

    /// Reads the authority in `directory`: `ca.pem`, `ca.key`, and, if it is no root, `chain.pem`.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`] says what is wrong with which file.
    pub fn load(directory: &Path) -> Result<Self, AuthorityError> {
        let path = |name: &str| directory.join(name);
        let fault = |name: &str, why: String| AuthorityError::File {
            path: path(name).display().to_string(),
            why,
        };
        let ca_pem = read_limited(&path("ca.pem"))?;
        let key_pem = read_limited(&path("ca.key"))?;
        let key = KeyPair::from_pem(&key_pem).map_err(|error| {
            let how = "openssl pkcs8 -topk8 -nodes -in OLD -out ca.key";
            fault("ca.key", format!("no key in PKCS#8 form, which this makes: {how} ({error})"))
        })?;
        let file = if path("chain.pem").exists() { "chain.pem" } else { "ca.pem" };
        let chain_pem = match file {
            "chain.pem" => read_limited(&path(file))?,
            _ => String::new(),
        };
        let candidates = certificates_of(&path(file))?;
        let own = candidates.iter().find(|der| belongs(der, &key)).ok_or_else(|| {
            fault("ca.key", format!("the key belongs to no certificate in {file}"))
        })?;
        let authority = Self::new(own, key, chain_pem, ca_pem)?;
        if !authority.certificate.is_authority {
            let why = "the certificate of the key is not one of an authority".to_owned();
            return Err(fault(file, why));
        }
        Ok(authority)
    }

    fn new(
        der: &[u8],
        key: KeyPair,
        chain_pem: String,
        ca_pem: String,
    ) -> Result<Self, AuthorityError> {
        let certificate = Certificate::read(der)?;
        let key_id = key_id(der);
        let issuer = Issuer::from_ca_cert_der(&der.into(), key).map_err(making("authority"))?;
        Ok(Self { certificate, der: der.to_vec(), issuer, key_id, chain_pem, ca_pem })
    }

    /// What its certificate says.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Its certificate.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// The certificates of the roots: `ca.pem` of whoever trusts this authority.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Its own certificate and those between it and the root; empty for a root.
    #[must_use]
    pub fn chain_pem(&self) -> &str {
        &self.chain_pem
    }

    /// Its key. A secret.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Makes a certificate with a new key.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::Wish`] and [`AuthorityError::Time`] for a request that cannot be.
    pub fn issue(&self, request: &Request) -> Result<Issued, AuthorityError> {
        self.issue_for(request, &new_key()?)
    }

    /// Makes a certificate for the key that its holder has, in PKCS#8 form.
    ///
    /// # Errors
    ///
    /// As [`Authority::issue`].
    pub fn issue_for_key(
        &self,
        request: &Request,
        key_pem: &str,
    ) -> Result<Issued, AuthorityError> {
        let key = KeyPair::from_pem(key_pem).map_err(making("certificate for the key"))?;
        self.issue_for(request, &key)
    }

    fn issue_for(&self, request: &Request, key: &KeyPair) -> Result<Issued, AuthorityError> {
        let mut params = params_of(&request.name)?;
        let until = Some(self.certificate.not_after);
        set_time(&mut params, request.start, request.lifetime, until)?;
        params.subject_alt_names =
            request.hosts.iter().map(|host| alternative(host)).collect::<Result<_, _>>()?;
        if let Some(powers) = &request.powers {
            if let Some(power) = powers.iter().find(|power| !is_pattern(power)) {
                return Err(wish("a power", power, "it is no pattern of Service.Method"));
            }
            params.custom_extensions.push(list(POWERS_OID, powers)?);
        }
        if !request.groups.is_empty() {
            for group in &request.groups {
                check_name("a group", group)?;
            }
            params.custom_extensions.push(list(GROUPS_OID, &request.groups)?);
        }
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let made = params.signed_by(key, &self.issuer).map_err(making("certificate"))?;
        Ok(Issued {
            certificate: Certificate::read(made.der())?,
            certificate_pem: made.pem() + &self.chain_pem,
            key_pem: key.serialize_pem(),
        })
    }

    /// The list of all that is `revoked`, which takes the place of those with lower numbers.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::Make`] if it cannot be signed.
    pub fn revocation_list(
        &self,
        revoked: &[Revocation],
        number: u64,
    ) -> Result<String, AuthorityError> {
        let now = now();
        let revoked_certs = revoked.iter().map(|one| RevokedCertParams {
            serial_number: SerialNumber::from(bytes_of(&one.serial)),
            revocation_time: moment(one.revoked_at),
            reason_code: reason_code(one.reason),
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: moment(now),
            next_update: moment(later(now, LIST_LIFETIME)),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: self.key_id.clone(),
        };
        let what = "list of revoked certificates";
        let made = params.signed_by(&self.issuer).map_err(making(what))?;
        made.pem().map_err(making(what))
    }
}

/// The time of day, in seconds since 1970.
#[must_use]
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn making(what: &'static str) -> impl FnOnce(rcgen::Error) -> AuthorityError {
    move |source| AuthorityError::Make { what, source }
}

fn wish(what: &'static str, text: &str, why: &'static str) -> AuthorityError {
    AuthorityError::Wish { what, text: escape(text.as_bytes()), why }
}

fn new_key() -> Result<KeyPair, AuthorityError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(making("key"))
}

/// True if the certificate `der` is for `key`.
fn belongs(der: &[u8], key: &KeyPair) -> bool {
    X509Certificate::from_der(der)
        .is_ok_and(|(_, x509)| x509.public_key().raw == key.subject_public_key_info())
}

/// By which the lists of the authority `der` name its key: as its certificate does.
fn key_id(der: &[u8]) -> KeyIdMethod {
    let read = X509Certificate::from_der(der).ok();
    let extensions = read.as_ref().map(|(_, x509)| x509.extensions()).unwrap_or_default();
    let id = extensions.iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    });
    id.map_or(KeyIdMethod::Sha256, KeyIdMethod::PreSpecified)
}

fn authority_params(
    options: &AuthorityOptions,
    key: &KeyPair,
    until: Option<i64>,
    constraints: BasicConstraints,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = params_of(&options.name)?;
    if options.key_in_name {
        let id = params.key_identifier(key);
        let digits: String = id.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{} {digits}", options.name);
        check_name("the name of the holder", &name)?;
        params.distinguished_name.push(DnType::CommonName, name);
    }
    set_time(&mut params, options.start, options.lifetime, until)?;
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = until.is_some();
    Ok(params)
}

fn params_of(name: &str) -> Result<CertificateParams, AuthorityError> {
    check_name("the name of the holder", name)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from(random_serial()?.to_vec()));
    Ok(params)
}

/// A name that others read and compare, as owners of things too.
fn check_name(what: &'static str, name: &str) -> Result<(), AuthorityError> {
    match name_fault(name.as_bytes()) {
        Some(why) => Err(wish(what, name, why)),
        None if name.len() > NAME_BYTES_MAX => Err(wish(what, name, "it is longer than 256 bytes")),
        None if name.contains(',') => Err(wish(what, name, "it holds a comma")),
        None => Ok(()),
    }
}

/// 128 random bits, but for the first two, which make each number positive and as long.
fn random_serial() -> Result<[u8; 16], AuthorityError> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| AuthorityError::Random { source: error.into() })?;
    }
    bytes[0] = bytes[0] & 0x3f | 0x40;
    Ok(bytes)
}

fn set_time(
    params: &mut CertificateParams,
    start: Option<i64>,
    lifetime: Duration,
    until: Option<i64>,
) -> Result<(), AuthorityError> {
    let refuse = |why: &str| AuthorityError::Time { when: "for this time", why: why.to_owned() };
    if lifetime.is_zero() {
        return Err(refuse("it has no lifetime"));
    }
    if lifetime > LIFETIME_MAX {
        return Err(refuse("its lifetime is longer than a hundred years"));
    }
    let now = now();
    let begin = start.unwrap_or_else(|| now.saturating_sub(seconds(LEEWAY)));
    let end = later(start.unwrap_or(now), lifetime);
    let end = until.map_or(end, |until| end.min(until));
    if begin < 0 || end > END_OF_TIME {
        return Err(refuse("it begins before 1970 or ends after 9999"));
    }
    if end <= begin {
        let until = model::when::moment(model::tree::Time { seconds: end, nanoseconds: 0 });
        return Err(AuthorityError::Time {
            when: "any more",
            why: format!("the authority has ended on {until}; make another one"),
        });
    }
    params.not_before = moment(begin);
    params.not_after = moment(end);
    Ok(())
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

fn later(time: i64, more: Duration) -> i64 {
    time.saturating_add(seconds(more))
}

/// `seconds` since 1970, which are neither less than none nor after the end of time.
fn moment(seconds: i64) -> time::OffsetDateTime {
    time::OffsetDateTime::from_unix_timestamp(seconds.clamp(0, END_OF_TIME))
        .expect("years until 9999 can be written")
}

/// A host or address that a certificate is for.
fn alternative(host: &str) -> Result<SanType, AuthorityError> {
    if let Ok(address) = host.parse() {
        return Ok(SanType::IpAddress(address));
    }
    let why = match host.strip_prefix("*.").unwrap_or(host) {
        _ if host.len() > 253 => "it is longer than 253 bytes",
        "" => "it is empty",
        name if name.split('.').any(str::is_empty) => "a part of it is empty",
        name if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) => {
            let name = host.try_into().map_err(making("certificate"))?;
            return Ok(SanType::DnsName(name));
        }
        _ => "the name of a host has letters, digits, hyphens and dots; write xn--... for others",
    };
    Err(wish("a host", host, why))
}

/// An extension that is a list of texts.
fn list(oid: &[u64], texts: &[String]) -> Result<CustomExtension, AuthorityError> {
    if texts.len() > api::certificate::NAMES_MAX {
        return Err(wish("a list", &format!("{} names", texts.len()), "at most 1024 are read"));
    }
    let elements = texts.iter().map(|text| Utf8String::new(text));
    let der = Sequence::from_iter_to_der(elements).and_then(|sequence| sequence.to_der_vec());
    let der = der.map_err(|_| wish("a list", &texts.join(", "), "it cannot be encoded"))?;
    Ok(CustomExtension::from_oid_content(oid, der))
}

/// The bytes of a serial number in hexadecimal digits; none for a text that has others.
fn bytes_of(serial: &str) -> Vec<u8> {
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

fn reason_code(reason: Reason) -> Option<RevocationReason> {
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

#[cfg(test)]
mod tests;
