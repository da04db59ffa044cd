//! X.509 certificates: what one says of its holder.
//!
//! A certificate names its holder and says what the holder may do: its *powers* are patterns of
//! `Service.Method` in the extension [`POWERS_OID`], its *groups* are in [`GROUPS_OID`]; both are
//! an ASN.1 `SEQUENCE OF UTF8String`. Where the extension of powers is present, the common name
//! is the identity. Where it is not, the common name is the comma-separated list of patterns, as
//! the first certificates of this design were made, and the first subject alternative name is the
//! identity.
//!
//! **Reading verifies nothing.** A certificate counts only after TLS has verified that an
//! authority vouches for it; the powers of an authority's own certificate never count.
//!
//! The crate `certs` makes certificates.

pub mod reading;

pub use reading::is_pattern;

use crate::access::Identity;

/// The extension that lists the powers of the holder, as patterns of methods.
pub const POWERS_OID: &[u64] = &[1, 3, 6, 1, 4, 1, 9586, 100, 7, 1];

/// The extension that lists the groups of the holder.
pub const GROUPS_OID: &[u64] = &[1, 3, 6, 1, 4, 1, 9586, 100, 7, 2];

/// The most bytes that one certificate may have.
pub const CERTIFICATE_BYTES_MAX: usize = 65_536;

/// The most bytes of a common name, a host name or the name of a group.
pub const NAME_BYTES_MAX: usize = 1_024;

/// The most host names, powers or groups in one certificate, of each kind.
pub const NAMES_MAX: usize = 1_024;

/// What there is to know of one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The common name of the holder; empty if there is none.
    pub common_name: String,
    /// The common name of the authority that issued it, escaped; empty if there is none.
    pub issuer: String,
    /// The host names and addresses that it is for, as text, in its order.
    pub hosts: Vec<String>,
    /// Who the holder is: user, groups and powers. An authority has neither groups nor powers.
    pub identity: Identity,
    /// Not valid before, in seconds since 1970.
    pub not_before: i64,
    /// Not valid after, in seconds since 1970.
    pub not_after: i64,
    /// The serial number, in hexadecimal digits, two for each byte, without leading zero bytes.
    pub serial: String,
    /// `sha256:` and the digest of the whole certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// `sha256:` and the digest of its public key: certificates with one key have the same.
    pub key: String,
    /// True if it may issue others.
    pub is_authority: bool,
}

/// A certificate that cannot be read, or says what cannot be believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// It is longer than anybody needs.
    #[error("the certificate has {bytes} bytes, at most {CERTIFICATE_BYTES_MAX} are read")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// It is no certificate.
    #[error("this is no X.509 certificate: {why}")]
    Encoding {
        /// What the parser said.
        why: String,
    },
    /// A part of it is not as it must be.
    #[error("the {part} of the certificate cannot be used: {why}")]
    Part {
        /// Which part.
        part: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A name cannot be shown, or not be told from another.
    #[error("`{name}` in the {part} of the certificate cannot be used: {why}")]
    Name {
        /// Where the name is.
        part: &'static str,
        /// The name, escaped, shortened.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There are too many names.
    #[error("the {part} of the certificate have {count} names, at most {NAMES_MAX} are read")]
    TooMany {
        /// Which names.
        part: &'static str,
        /// How many.
        count: usize,
    },
}
