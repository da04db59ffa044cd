//! The files of a directory with certificates.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use super::zones::ZonesError;
use model::object::{Algorithm, Hasher, ObjectId};

/// The files of a directory with certificates, and their content.
pub const FILES: [(&str, &str); 5] = [
    (CERTIFICATE, "the program's certificate, and those between it and its authority"),
    (KEY, "the key of the certificate"),
    (AUTHORITIES, "the authorities that are trusted"),
    (REVOKED, "what the authorities have revoked; may be absent"),
    (ZONES, "what each authority may vouch for; may be absent"),
];

pub(super) const CERTIFICATE: &str = "cert.pem";
const KEY: &str = "key.pem";
pub(super) const AUTHORITIES: &str = "ca.pem";
pub(super) const REVOKED: &str = "crl.pem";
pub(super) const ZONES: &str = "zones.toml";

/// The longest file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 16 << 20;

/// The most authorities: each may be asked about each peer.
const AUTHORITIES_MAX: usize = 32;

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    #[error("there is no certificate in {}", dir.display())]
    Absent {
        /// Where they should be.
        dir: PathBuf,
    },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The content of a file is invalid; `what` says why.
    #[error("{}: {what}", path.display())]
    Content { path: PathBuf, what: String },
    #[error(
        "{} can be read by every user of this machine: chmod 600 it, and have its certificate \
         revoked if somebody may have read it", path.display()
    )]
    Open {
        /// The key's file.
        path: PathBuf,
    },
    /// The content of `zones.toml` is invalid.
    #[error("{}", path.display())]
    Zones { path: PathBuf, source: ZonesError },
}

/// Returns the content and the mode of a file. For one that does not exist, [`TlsError::Read`] says
/// so.
pub type ReadFile<'a> = &'a dyn Fn(&Path) -> Result<(Vec<u8>, u32), TlsError>;

/// Detects changes of the files: the mark of each file that exists.
pub(super) type Stamp = Vec<Option<Mark>>;

/// The identity, length and times of a file. `changed` includes changes of owner and mode, which
/// can make an unusable file usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    inode: u64,
    length_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The digest of the content of all files: which files a program uses, or is to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct FilesDigest(ObjectId);

/// The content of the files.
pub(super) struct Files {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    pub(super) authorities: Vec<CertificateDer<'static>>,
    pub(super) revoked: Vec<CertificateRevocationListDer<'static>>,
    /// `None` if there is no such file.
    pub(super) zones: Option<String>,
    pub(super) digest: FilesDigest,
    pub(super) stamp: Stamp,
}

impl Files {
    /// Reads the files of `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self, TlsError> {
        // Taken before the files are read: a change meanwhile causes another read.
        let stamp = stamp(dir);
        let is_there = |name: &str| dir.join(name).symlink_metadata().is_ok();
        if ![CERTIFICATE, KEY, AUTHORITIES].into_iter().any(is_there) {
            return Err(TlsError::Absent { dir: dir.to_owned() });
        }
        Ok(Self { stamp, ..Self::of(dir, &read)? })
    }

    /// Reads the files of `dir` as `read` returns them.
    pub(super) fn of(dir: &Path, read: ReadFile<'_>) -> Result<Self, TlsError> {
        let hasher = RefCell::new(Hasher::new(Algorithm::Blake3));
        let read: ReadFile<'_> = &|path| {
            let found = read(path);
            let content = found.as_ref().ok().map(|(bytes, _mode)| bytes.as_slice());
            // Each is read once, in this order. One that is absent is not an empty one.
            let length = content.map_or(u64::MAX, |bytes| bytes.len() as u64);
            hasher.borrow_mut().update(&length.to_le_bytes());
            hasher.borrow_mut().update(content.unwrap_or_default());
            found
        };
        let chain = certificates(&dir.join(CERTIFICATE), read)?;
        let path = dir.join(KEY);
        let (bytes, mode) = read(&path)?;
        if mode & 0o004 != 0 {
            return Err(TlsError::Open { path });
        }
        let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| TlsError::Content {
            path,
            what: "it holds no private key in PEM (PKCS#8, PKCS#1 or SEC1, without passphrase)"
                .to_owned(),
        })?;
        let path = dir.join(AUTHORITIES);
        let authorities = certificates(&path, read)?;
        if authorities.len() > AUTHORITIES_MAX {
            let count = authorities.len();
            let what = format!("it holds {count} authorities, {AUTHORITIES_MAX} are allowed");
            return Err(TlsError::Content { path, what });
        }
        let revoked = match optional(&dir.join(REVOKED), read)? {
            None => Vec::new(),
            Some(bytes) => lists(dir.join(REVOKED), &bytes)?,
        };
        let zones = optional(&dir.join(ZONES), read)?.map(String::from_utf8).transpose();
        let zones = zones.map_err(|_| TlsError::Content {
            path: dir.join(ZONES),
            what: "it is not UTF-8".to_owned(),
        })?;
        let digest = FilesDigest(hasher.borrow().finish());
        Ok(Self { chain, key, authorities, revoked, zones, digest, stamp: Stamp::new() })
    }
}

/// Returns the current stamp of the files of `dir`.
pub(super) fn stamp(dir: &Path) -> Stamp {
    let one = |name: &str| {
        let metadata = dir.join(name).metadata().ok()?;
        Some(Mark {
            inode: metadata.ino(),
            length_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    };
    FILES.iter().map(|(name, _)| one(name)).collect()
}

/// Returns true if the list of revoked certificates that was there at `before` is gone at `after`:
/// certificates that were revoked are accepted again.
pub(super) fn lifts_revocations(before: &Stamp, after: &Stamp) -> bool {
    let has_lists = |stamp: &Stamp| {
        FILES.iter().zip(stamp).any(|((name, _), mark)| *name == REVOKED && mark.is_some())
    };
    has_lists(before) && !has_lists(after)
}

fn certificates(path: &Path, read: ReadFile<'_>) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let (bytes, _mode) = read(path)?;
    let content = |what| TlsError::Content { path: path.to_owned(), what };
    let found = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|error| content(format!("it is not PEM: {error}")))?;
    if found.is_empty() {
        return Err(content("it holds no certificate in PEM".to_owned()));
    }
    Ok(found)
}

/// Parses the lists in `bytes`, the content of `path`: at least one. A truncated file, such as
/// after a full disk, must not look as if nothing were revoked.
fn lists(
    path: PathBuf,
    bytes: &[u8],
) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let found = CertificateRevocationListDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
    let what = match found {
        Ok(lists) if !lists.is_empty() => return Ok(lists),
        Ok(_) => "it holds no list of revoked certificates in PEM (X509 CRL): copy it again, or \
                  remove it if nothing is revoked"
            .to_owned(),
        Err(error) => format!("it is not PEM: {error}"),
    };
    Err(TlsError::Content { path, what })
}

fn optional(path: &Path, read: ReadFile<'_>) -> Result<Option<Vec<u8>>, TlsError> {
    match read(path) {
        Ok((bytes, _mode)) => Ok(Some(bytes)),
        Err(TlsError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the content and the mode of the file `path`.
///
/// # Errors
///
/// [`TlsError`] if it cannot be read or is too long.
pub fn read(path: &Path) -> Result<(Vec<u8>, u32), TlsError> {
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode();
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        let what = format!("it is longer than {FILE_BYTES_MAX} bytes");
        return Err(TlsError::Content { path: path.to_owned(), what });
    }
    Ok((bytes, mode))
}
