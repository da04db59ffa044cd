//! Reads the PEM files of certificates and keys, and looks whether they belong together.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

/// The most bytes that a file of certificates or keys may have.
pub const FILE_BYTES_MAX: u64 = 4 << 20;

/// A file of certificates or of a key that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// It cannot be read.
    #[error(transparent)]
    Read(std::io::Error),
    /// It is no text, or too long.
    #[error("{}: {why}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Something in it is no PEM.
    #[error("{}: {source}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: rustls::pki_types::pem::Error,
    },
    /// There is no certificate in it.
    #[error("{}: it holds no certificate", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A key that nothing here can use.
    #[error("{}: no key that can be used: {why}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What the library says.
        why: String,
    },
}

/// The text of a file of at most [`FILE_BYTES_MAX`] bytes.
///
/// # Errors
///
/// [`PemError::Read`] with the path, [`PemError::Text`].
pub fn read_limited(path: &Path) -> Result<String, PemError> {
    let text_error = |why| PemError::Text { path: path.to_owned(), why };
    let file = fs_err::File::open(path).map_err(PemError::Read)?;
    // Reading a pipe would wait for ever.
    if !file.metadata().map_err(PemError::Read)?.is_file() {
        return Err(text_error("it is no regular file"));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(PemError::Read)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(text_error("it has more than 4 MiB"));
    }
    String::from_utf8(bytes).map_err(|_| text_error("it is no text in PEM form"))
}

/// All certificates in a file, in its order: at least one.
///
/// # Errors
///
/// [`PemError`].
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

/// True if the key in the file `key` belongs to the certificate `der`.
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
    let public = signing.public_key().ok_or_else(|| bad("it has no public half".to_owned()))?;
    Ok(X509Certificate::from_der(der).is_ok_and(|(_, x509)| x509.public_key().raw == &*public))
}

/// True if the holder of the certificate `issuer` has signed the certificate `der`.
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

/// A list of revoked certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    /// The name of the authority that made it, encoded.
    issuer: Vec<u8>,
    /// The serial numbers in it.
    serials: BTreeSet<Vec<u8>>,
    /// When the next one is to come, in seconds since 1970.
    pub next_update: Option<i64>,
    /// The higher, the newer, of those of one authority.
    pub number: Option<u64>,
}

impl RevocationList {
    /// True if it is of the authority that issued the certificate `der`, and lists it. Who has
    /// signed it is not looked at.
    #[must_use]
    pub fn lists(&self, der: &[u8]) -> bool {
        X509Certificate::from_der(der).is_ok_and(|(_, x509)| {
            x509.issuer().as_raw() == self.issuer && self.serials.contains(x509.raw_serial())
        })
    }
}

/// All lists of revoked certificates in a file, in its order.
///
/// # Errors
///
/// [`PemError`].
pub fn revocation_lists_of(path: &Path) -> Result<Vec<RevocationList>, PemError> {
    let text = read_limited(path)?;
    let pem_error = |source| PemError::Pem { path: path.to_owned(), source };
    let mut lists = Vec::new();
    for der in CertificateRevocationListDer::pem_slice_iter(text.as_bytes()) {
        let der = der.map_err(pem_error)?;
        let (_, list) = CertificateRevocationList::from_der(&der).map_err(|_| PemError::Text {
            path: path.to_owned(),
            why: "it holds a list of revoked certificates that cannot be read",
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
