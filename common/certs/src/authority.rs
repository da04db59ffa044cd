//! Certificate authorities: issue certificates and revocation lists.
//!
//! An [`Authority`] is a key and a certificate in memory. [`Register`](super::register::Register)
//! stores one in a directory, with what it has issued and revoked.
//!
//! Keys are ECDSA on P-256: small, fast, and supported by everything that speaks TLS 1.2. A
//! daemon's certificate is for both sides of a connection, because a sub is a server to its
//! dominator and a client of its imageserver.

mod fields;

use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CustomExtension,
    DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, PublicKeyData, RevokedCertParams, SerialNumber, SubjectPublicKeyInfo,
};
use x509_parser::prelude::{FromDer as _, ParsedExtension, X509Certificate};

use api::access::IdentityKind;
use api::certificate::{
    Certificate, CertificateError, GROUPS_OID, KIND_OID, POWERS_OID, is_pattern,
};
use model::escape::escape;
use system::clock::wall;

use super::pem::{PemError, certificates_of, read_limited};
use super::record::Revocation;
use fields::{
    check_name, date_time, later, random_serial, reason_code, serial_bytes, set_time, string,
    string_list, subject_alternative,
};

/// Default lifetime of authorities.
pub const AUTHORITY_LIFETIME: Duration = Duration::from_secs(3_650 * 86_400);

/// Default lifetime of other certificates.
pub const LIFETIME: Duration = Duration::from_secs(365 * 86_400);

/// Validity of a revocation list. Each revocation makes a new list; a fleet must not stop because
/// nothing was revoked for years.
const LIST_LIFETIME: Duration = Duration::from_secs(3_650 * 86_400);

/// Parameters of a new authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityOptions {
    /// The common name.
    pub name: String,
    /// True to add the first digits of the key identifier to the name, which makes it unique.
    pub key_in_name: bool,
    /// True if all holders of its certificates are machines, whatever these say.
    pub for_machines: bool,
    pub lifetime: Duration,
    /// Start of validity in seconds since 1970; `None` for an hour ago.
    pub start: Option<i64>,
}

impl Default for AuthorityOptions {
    fn default() -> Self {
        let name = "Dominator".to_owned();
        Self {
            name,
            key_in_name: false,
            for_machines: false,
            lifetime: AUTHORITY_LIFETIME,
            start: None,
        }
    }
}

/// Parameters of a new certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The common name of the holder.
    pub name: String,
    /// What the holder is.
    pub kind: IdentityKind,
    /// Host names and addresses of the holder.
    pub hosts: Vec<String>,
    /// Patterns of the methods that the holder may call; `None` for a certificate without the
    /// extension, like certificates of foreign authorities.
    pub powers: Option<Vec<String>>,
    /// Groups of the holder.
    pub groups: Vec<String>,
    /// Lifetime; cut at the end of the authority.
    pub lifetime: Duration,
    /// Start of validity in seconds since 1970, from which the lifetime counts; `None` for an hour
    /// ago, with the lifetime counted from now.
    pub start: Option<i64>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            name: String::new(),
            kind: IdentityKind::Unstated,
            hosts: Vec::new(),
            powers: Some(Vec::new()),
            groups: Vec::new(),
            lifetime: LIFETIME,
            start: None,
        }
    }
}

/// A new certificate with its key.
pub struct Issued {
    pub certificate: Certificate,
    /// `cert.pem`: the certificate and the intermediate authorities.
    pub certificate_pem: String,
    /// `key.pem`: the key, a secret; empty if only its holder has it.
    pub key_pem: String,
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Issued").field("certificate", &self.certificate).finish()
    }
}

/// An operation of an authority that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// A value cannot be part of a certificate; `text` is escaped.
    #[error("`{text}` cannot be {what} in a certificate: {why}")]
    Invalid { what: &'static str, text: String, why: &'static str },
    #[error("invalid validity of a certificate: {why}")]
    Validity { why: &'static str },
    #[error(
        "a certificate with this key was revoked: give its holder a new key and certificate, with \
         `domtool cert issue`"
    )]
    RevokedKey,
    #[error("the authority expired on {end}: make another one")]
    Expired { end: String },
    #[error("cannot make the {what}: {source}")]
    Make { what: &'static str, source: rcgen::Error },
    /// A file of the authority is damaged; `why` says what to do.
    #[error("{path}: {why}")]
    File { path: String, why: String },
    #[error("the certificate of the authority cannot be used")]
    Certificate(#[from] CertificateError),
    #[error(transparent)]
    Pem(#[from] PemError),
    #[error(
        "{name} is an intermediate authority, which cannot make other authorities: use the \
         directory of its root"
    )]
    NotRoot { name: String },
}

/// A key that signs certificates, and its own certificate.
pub struct Authority {
    certificate: Certificate,
    der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
    /// Identifier of the key in revocation lists.
    key_id: KeyIdMethod,
    /// The own certificate and those up to the root, without the root; empty for a root.
    chain_pem: String,
    /// The trusted roots.
    ca_pem: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Authority").field("certificate", &self.certificate).finish()
    }
}

impl Authority {
    /// Makes a root authority, which signs its own certificate.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`] for invalid options.
    pub fn create(options: &AuthorityOptions) -> Result<Self, AuthorityError> {
        let key = new_key()?;
        let params = authority_params(options, &key, None, BasicConstraints::Unconstrained)?;
        let made = params.self_signed(&key).map_err(cannot_make("authority"))?;
        let ca_pem = made.pem();
        Self::new(made.der(), key, String::new(), ca_pem)
    }

    /// Makes an authority below this one, which cannot make further authorities.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::NotRoot`] if this authority is not a root; [`AuthorityError::Invalid`]
    /// also for the name of this authority, because its name identifies its revocation lists.
    pub fn create_intermediate(&self, options: &AuthorityOptions) -> Result<Self, AuthorityError> {
        if !self.chain_pem.is_empty() {
            return Err(AuthorityError::NotRoot { name: self.certificate.common_name.clone() });
        }
        if !options.key_in_name && options.name == self.certificate.common_name {
            return Err(invalid("the name of an intermediate", &options.name, "its root has it"));
        }
        let constraints = BasicConstraints::Constrained(0);
        let key = new_key()?;
        let until = Some(self.certificate.not_after);
        let params = authority_params(options, &key, until, constraints)?;
        let made = params.signed_by(&key, &self.issuer).map_err(cannot_make("authority"))?;
        Self::new(made.der(), key, made.pem(), self.ca_pem.clone())
    }

    /// Reads the authority in `directory`: `ca.pem`, `ca.key`, and for an intermediate `chain.pem`.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`] names the file.
    pub fn load(directory: &Path) -> Result<Self, AuthorityError> {
        let path = |name: &str| directory.join(name);
        let fault = |name: &str, why: String| AuthorityError::File {
            path: path(name).display().to_string(),
            why,
        };
        let ca_pem = read_limited(&path("ca.pem"))?;
        let key_pem = read_limited(&path("ca.key"))?;
        let key = KeyPair::from_pem(&key_pem).map_err(|error| {
            let command = "openssl pkcs8 -topk8 -nodes -in OLD -out ca.key";
            fault("ca.key", format!("not a key in PKCS#8 form; to convert it: {command} ({error})"))
        })?;
        let file = if path("chain.pem").exists() { "chain.pem" } else { "ca.pem" };
        let chain_pem = match file {
            "chain.pem" => read_limited(&path(file))?,
            _ => String::new(),
        };
        let candidates = certificates_of(&path(file))?;
        let der = candidates.iter().find(|der| has_key(der, &key)).ok_or_else(|| {
            fault("ca.key", format!("the key belongs to no certificate in {file}"))
        })?;
        let authority = Self::new(der, key, chain_pem, ca_pem)?;
        if !authority.certificate.is_authority {
            let why = "the certificate of the key is not that of an authority".to_owned();
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
        let issuer =
            Issuer::from_ca_cert_der(&der.into(), key).map_err(cannot_make("authority"))?;
        Ok(Self { certificate, der: der.to_vec(), issuer, key_id, chain_pem, ca_pem })
    }

    /// Returns its decoded certificate.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// Returns its certificate in DER.
    #[must_use]
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Returns the trusted roots: `ca.pem` of everyone who trusts this authority.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Returns the own certificate and those up to the root, without the root; empty for a root.
    #[must_use]
    pub fn chain_pem(&self) -> &str {
        &self.chain_pem
    }

    /// Returns the private key.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate with a new key.
    ///
    /// # Errors
    ///
    /// [`AuthorityError`] for an invalid request.
    pub fn issue(&self, request: &Request) -> Result<Issued, AuthorityError> {
        let key = new_key()?;
        self.issue_for(request, &key, key.serialize_pem())
    }

    /// Issues a certificate for a key that the holder has, in PKCS#8 form.
    ///
    /// # Errors
    ///
    /// As [`Authority::issue`].
    pub fn issue_for_key(
        &self,
        request: &Request,
        key_pem: &str,
    ) -> Result<Issued, AuthorityError> {
        let key = KeyPair::from_pem(key_pem).map_err(cannot_make("certificate for the key"))?;
        self.issue_for(request, &key, key.serialize_pem())
    }

    /// Issues a certificate for a key of which only the public part is known here, in DER
    /// (SubjectPublicKeyInfo). The caller answers for that the holder has the private part.
    ///
    /// # Errors
    ///
    /// As [`Authority::issue`]; also if that is no key.
    pub fn issue_for_public_key(
        &self,
        request: &Request,
        key: &[u8],
    ) -> Result<Issued, AuthorityError> {
        let key = SubjectPublicKeyInfo::from_der(key);
        let key = key.map_err(cannot_make("certificate for the key"))?;
        self.issue_for(request, &key, String::new())
    }

    fn issue_for(
        &self,
        request: &Request,
        key: &impl PublicKeyData,
        key_pem: String,
    ) -> Result<Issued, AuthorityError> {
        let mut params = new_params(&request.name)?;
        let until = Some(self.certificate.not_after);
        set_time(&mut params, request.start, request.lifetime, until)?;
        params.subject_alt_names =
            request.hosts.iter().map(|host| subject_alternative(host)).collect::<Result<_, _>>()?;
        if let Some(powers) = &request.powers {
            if let Some(power) = powers.iter().find(|power| !is_pattern(power)) {
                return Err(invalid("a power", power, "it is not a pattern of Service.Method"));
            }
            params.custom_extensions.push(string_list(POWERS_OID, powers)?);
        }
        if !request.groups.is_empty() {
            for group in &request.groups {
                check_name("a group", group)?;
            }
            params.custom_extensions.push(string_list(GROUPS_OID, &request.groups)?);
        }
        if request.kind != IdentityKind::Unstated {
            params.custom_extensions.push(kind_extension(request.kind, &request.name)?);
        }
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let made = params.signed_by(key, &self.issuer).map_err(cannot_make("certificate"))?;
        Ok(Issued {
            certificate: Certificate::read(made.der())?,
            certificate_pem: made.pem() + &self.chain_pem,
            key_pem,
        })
    }

    /// Makes the revocation list of `revoked`; it replaces lists with lower numbers.
    ///
    /// # Errors
    ///
    /// [`AuthorityError::Make`] if it cannot be signed.
    pub fn revocation_list(
        &self,
        revoked: &[Revocation],
        number: u64,
    ) -> Result<String, AuthorityError> {
        let now = wall().seconds;
        let revoked_certs = revoked.iter().map(|one| RevokedCertParams {
            serial_number: SerialNumber::from(serial_bytes(&one.serial)),
            revocation_time: date_time(one.revoked_at),
            reason_code: reason_code(one.reason),
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: date_time(now),
            next_update: date_time(later(now, LIST_LIFETIME)),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: self.key_id.clone(),
        };
        let what = "list of revoked certificates";
        let made = params.signed_by(&self.issuer).map_err(cannot_make(what))?;
        made.pem().map_err(cannot_make(what))
    }
}

fn cannot_make(what: &'static str) -> impl FnOnce(rcgen::Error) -> AuthorityError {
    move |source| AuthorityError::Make { what, source }
}

fn invalid(what: &'static str, text: &str, why: &'static str) -> AuthorityError {
    AuthorityError::Invalid { what, text: escape(text.as_bytes()), why }
}

fn new_key() -> Result<KeyPair, AuthorityError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(cannot_make("key"))
}

/// Returns true if the certificate `der` is for `key`.
fn has_key(der: &[u8], key: &KeyPair) -> bool {
    X509Certificate::from_der(der)
        .is_ok_and(|(_, x509)| x509.public_key().raw == key.subject_public_key_info())
}

/// Returns the key identifier in the certificate `der`.
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
    let mut params = new_params(&options.name)?;
    if options.key_in_name {
        let id = params.key_identifier(key);
        let digits: String = id.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{} {digits}", options.name);
        check_name("the name of the holder", &name)?;
        params.distinguished_name.push(DnType::CommonName, name);
    }
    set_time(&mut params, options.start, options.lifetime, until)?;
    if options.for_machines {
        params.custom_extensions.push(kind_extension(IdentityKind::Machine, &options.name)?);
    }
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = until.is_some();
    Ok(params)
}

/// Encodes what the holder called `name` is.
fn kind_extension(kind: IdentityKind, name: &str) -> Result<CustomExtension, AuthorityError> {
    let why = "this release does not know what kind of holder it is";
    let kind = kind.name().ok_or_else(|| invalid("the name of the holder", name, why))?;
    string(KIND_OID, kind)
}

fn new_params(name: &str) -> Result<CertificateParams, AuthorityError> {
    check_name("the name of the holder", name)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from(random_serial().to_vec()));
    Ok(params)
}

#[cfg(test)]
mod tests;
