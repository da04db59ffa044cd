//! X.509 certificates, and what they state about their holders.
//!
//! A certificate names its holder and the methods that the holder may call: its *powers* are
//! patterns of `Service.Method` in the extension [`POWERS_OID`], its *groups* are in
//! [`GROUPS_OID`]; both are an ASN.1 `SEQUENCE OF UTF8String`. What the holder is, is in
//! [`KIND_OID`], a `UTF8String`. If the extension of powers is
//! present, the common name is the identity. Otherwise the common name is a comma-separated list of
//! patterns, as in the first certificates of this design, and the first subject alternative name is
//! the identity.
//!
//! **Reading verifies nothing.** Use a certificate only after TLS has verified that a trusted
//! authority signed it. The powers of an authority's own certificate never count.
//!
//! The crate `certs` makes certificates.

pub mod reading;

pub use reading::is_pattern;

use crate::access::{Identity, IdentityKind};

/// The extension that lists the powers of the holder, as patterns of methods.
pub const POWERS_OID: &[u64] = &[1, 3, 6, 1, 4, 1, 9586, 100, 7, 1];

/// The extension that lists the groups of the holder.
pub const GROUPS_OID: &[u64] = &[1, 3, 6, 1, 4, 1, 9586, 100, 7, 2];

/// The extension that says what the holder is: `user`, `service` or `machine`. For an authority, it
/// is what all holders of its certificates are: `machine`, if it is there.
pub const KIND_OID: &[u64] = &[1, 3, 6, 1, 4, 1, 9586, 100, 7, 3];

/// The most bytes that one certificate may have.
pub const CERTIFICATE_BYTES_MAX: usize = 65_536;

/// The most bytes of a common name, a host name or the name of a group.
pub const NAME_BYTES_MAX: usize = 1_024;

/// The most host names, powers or groups in one certificate, of each kind.
pub const NAMES_MAX: usize = 1_024;

/// The content of one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The common name of the holder, or an empty text.
    pub common_name: String,
    /// The common name of the authority that issued it, escaped, or an empty text.
    pub issuer: String,
    /// The host names and addresses that it is valid for, as text, in its order.
    pub hosts: Vec<String>,
    /// User, kind, groups and powers of the holder. An authority has only a name and, if it
    /// certifies nothing but machines, the kind of these ([`Certificate::is_for_machines`]).
    pub identity: Identity,
    /// Not valid before, in seconds since 1970.
    pub not_before: i64,
    /// Not valid after, in seconds since 1970.
    pub not_after: i64,
    /// The serial number, in hexadecimal digits, two for each byte, without leading zero bytes.
    pub serial: String,
    /// `sha256:` and the digest of the whole certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// `sha256:` and the digest of its public key.
    pub key: String,
    /// True if it may issue other certificates.
    pub is_authority: bool,
}

impl Certificate {
    /// Returns true for an authority that certifies machines only: whatever its certificates say,
    /// their holders are machines.
    #[must_use]
    pub fn is_for_machines(&self) -> bool {
        self.is_authority && self.identity.kind == IdentityKind::Machine
    }
}

/// Why a certificate is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// It is too long.
    #[error("the certificate has {bytes} bytes, at most {CERTIFICATE_BYTES_MAX} are read")]
    TooLong { bytes: usize },
    /// It is not a certificate.
    #[error("this is no X.509 certificate: {why}")]
    Encoding {
        /// The error of the parser.
        why: String,
    },
    /// A part of it is invalid.
    #[error("the {part} of the certificate cannot be used: {why}")]
    Part { part: &'static str, why: &'static str },
    /// A name cannot be displayed, or looks like another.
    #[error("`{name}` in the {part} of the certificate cannot be used: {why}")]
    Name {
        part: &'static str,
        /// The name, escaped and shortened.
        name: String,
        why: &'static str,
    },
    /// There are too many names.
    #[error("the {part} of the certificate have {count} names, at most {NAMES_MAX} are read")]
    TooMany { part: &'static str, count: usize },
}
