//! Reads PEM files of certificates and keys, and checks whether they match.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

/// Largest file of certificates or keys, in bytes.
pub const FILE_BYTES_MAX: u64 = 4 << 20;

/// A PEM file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    #[error(transparent)]
    Read(std::io::Error),
    #[error("{}: {why}", path.display())]
    Text { path: PathBuf, why: &'static str },
    #[error("{}: {source}", path.display())]
    Pem { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{}: the file has no certificate", path.display())]
    Empty { path: PathBuf },
    #[error("{}: unusable key: {why}", path.display())]
    Key { path: PathBuf, why: String },
}

/// Reads a text file of at most [`FILE_BYTES_MAX`] bytes.
///
/// # Errors
///
/// [`PemError`] names the file.
pub fn read_limited(path: &Path) -> Result<String, PemError> {
    let text_error = |why| PemError::Text { path: path.to_owned(), why };
    let file = fs_err::File::open(path).map_err(PemError::Read)?;
    // Reading a pipe could block forever.
    if !file.metadata().map_err(PemError::Read)?.is_file() {
        return Err(text_error("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(PemError::Read)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(text_error("the file has more than 4 MiB"));
    }
    String::from_utf8(bytes).map_err(|_| text_error("not a text file in PEM form"))
}

/// Reads all certificates of a file, at least one.
///
/// # Errors
///
/// [`PemError`] names the file.
pub fn certificates_of(path: &Path) -> Result<Vec<Vec<u8>>, PemError> {
    let text = read_limited(path)?;
    let read = CertificateDer::pem_slice_iter(text.as_bytes());
    let all: Result<Vec<_>, _> = read.map(|one| one.map(|der| der.to_vec())).collect();
    match all {
        Err(source) => Err(PemError::Pem { path: path.to_owned(), source }),
        Ok(all) if all.is_empty() => Err(PemError::Empty { path: path.to_owned() }),
        Ok(all) => Ok(all),
    }
}

/// Returns true if the key in the file `key` is that of the certificate `der`.
///
/// # Errors
///
/// [`PemError`] if the key cannot be read.
pub fn key_belongs(key: &Path, der: &[u8]) -> Result<bool, PemError> {
    let text = read_limited(key)?;
    let bad = |why: String| PemError::Key { path: key.to_owned(), why };
    let read = PrivateKeyDer::from_pem_slice(text.as_bytes());
    let read = read.map_err(|source| PemError::Pem { path: key.to_owned(), source })?;
    let signing = any_supported_type(&read).map_err(|error| bad(error.to_string()))?;
    let public = signing.public_key().ok_or_else(|| bad("it has no public key".to_owned()))?;
    Ok(X509Certificate::from_der(der).is_ok_and(|(_, x509)| x509.public_key().raw == &*public))
}

/// Returns true if the holder of the certificate `issuer` has signed the certificate `der`.
#[must_use]
pub fn is_signed_by(der: &[u8], issuer: &[u8]) -> bool {
    let (Ok((_, one)), Ok((_, by))) =
        (X509Certificate::from_der(der), X509Certificate::from_der(issuer))
    else {
        return false;
    };
    one.issuer().as_raw() == by.subject().as_raw()
        && one.verify_signature(Some(by.public_key())).is_ok()
}

/// A certificate revocation list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// Encoded name of the authority.
    issuer: Vec<u8>,
    serials: BTreeSet<Vec<u8>>,
    /// Time of the next list, in seconds since 1970.
    pub next_update: Option<i64>,
    /// Number of the list, which grows with each list of an authority.
    pub number: Option<u64>,
}

impl RevocationList {
    /// Returns true if the authority of the certificate `der` made this list and the list names the
    /// certificate. The signature of the list is not checked.
    #[must_use]
    pub fn lists(&self, der: &[u8]) -> bool {
        X509Certificate::from_der(der).is_ok_and(|(_, x509)| {
            x509.issuer().as_raw() == self.issuer && self.serials.contains(x509.raw_serial())
        })
    }
}

/// Reads all revocation lists of a file.
///
/// # Errors
///
/// [`PemError`] names the file.
pub fn revocation_lists_of(path: &Path) -> Result<Vec<RevocationList>, PemError> {
    let text = read_limited(path)?;
    let pem_error = |source| PemError::Pem { path: path.to_owned(), source };
    let mut lists = Vec::new();
    for der in CertificateRevocationListDer::pem_slice_iter(text.as_bytes()) {
        let der = der.map_err(pem_error)?;
        let (_, list) = CertificateRevocationList::from_der(&der).map_err(|_| PemError::Text {
            path: path.to_owned(),
            why: "the file has an invalid revocation list",
        })?;
        lists.push(RevocationList {
            issuer: list.issuer().as_raw().to_vec(),
            serials: list
                .iter_revoked_certificates()
                .map(|one| one.raw_serial().to_vec())
                .collect(),
            next_update: list.next_update().map(|time| time.timestamp()),
            number: list.crl_number().and_then(|number| u64::try_from(number).ok()),
        });
    }
    Ok(lists)
}
