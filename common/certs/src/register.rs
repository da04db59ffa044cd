//! The directory of an authority.
//!
//! ```text
//! DIR/ca.pem         the certificate of the root, for everybody who trusts the authority
//! DIR/ca.key         the key of this authority, a secret
//! DIR/chain.pem      only for an intermediate authority: its certificate
//! DIR/issued.jsonl   issued certificates, one line each, append-only
//! DIR/revoked.jsonl  revoked certificates, one line each, append-only
//! DIR/crl.pem        the signed revocation list, made from revoked.jsonl
//! ```
//!
//! Only the owner can access the directory. A certificate is recorded and the record synced before
//! the certificate is handed out; a revocation is recorded before the list is made, which each
//! revocation makes anew. Each change holds a lock on the directory, so that several programs can
//! use one authority.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;

use api::certificate::Certificate;
use system::clock::wall;

use super::authority::{Authority, AuthorityError, AuthorityOptions, Issued, Request};
use super::files::{self, Content, FilesError};
use super::pem::revocation_lists_of;
use super::record::{
    KeyStatus, LineError, Reason, Record, Revocation, RevocationTarget, key_status, line, rows,
};

/// An authority in a directory.
#[derive(Debug)]
pub struct Register {
    directory: PathBuf,
    authority: Authority,
}

/// The directory of an authority that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{} exists: an authority is never overwritten", path.display())]
    Exists { path: PathBuf },
    /// The directory is that of a daemon or tool.
    #[error("{} exists: make the authority in a directory of its own", path.display())]
    Holder { path: PathBuf },
    #[error("{} is not the directory of an authority: it has no ca.key", path.display())]
    None { path: PathBuf },
    #[error("the authority has made an intermediate called {name} before: give another --name")]
    SameName { name: String },
    #[error("cannot read {}", path.display())]
    Lines { path: PathBuf, source: LineError },
}

/// The result of [`LockedRegister::revoke`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// Certificates that were not revoked before.
    pub new: Vec<Revocation>,
    /// Number of all revoked certificates.
    pub count: usize,
    /// The signed list.
    pub path: PathBuf,
}

impl Register {
    /// Stores `authority` in `directory`, which may exist, but without an authority.
    ///
    /// The key is written last: a directory without it is no authority, and what a killed run has
    /// left is replaced.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Exists`], [`RegisterError::Holder`], or an I/O error.
    pub fn create(directory: &Path, authority: Authority) -> Result<Self, RegisterError> {
        let key_pem = authority.key_pem();
        let chain = Content { name: "chain.pem", text: authority.chain_pem(), mode: 0o644 };
        let mut contents = vec![
            Content { name: "ca.pem", text: authority.ca_pem(), mode: 0o644 },
            Content { name: "ca.key", text: &key_pem, mode: 0o600 },
        ];
        let is_root = chain.text.is_empty();
        if !is_root {
            contents.insert(0, chain);
        }
        // Of two simultaneous calls, one must see the authority of the other.
        fs::create_dir_all(files::parent_of(directory))?;
        let lock = fs::File::open(files::parent_of(directory))?;
        lock.file().lock()?;
        if fs::exists(directory)? {
            check_unused(directory)?;
            if is_root {
                // It would turn the root into an intermediate.
                files::remove(&directory.join("chain.pem"))?;
            }
            files::replace_files(directory, &contents)?;
        } else {
            files::new_directory(directory, &contents, 0o700)?;
        }
        Ok(Self { directory: directory.to_owned(), authority })
    }

    /// Opens the authority in `directory`.
    ///
    /// # Errors
    ///
    /// [`RegisterError::None`] if the directory has no `ca.key`; [`RegisterError::Authority`] if
    /// one of its files cannot be used.
    pub fn open(directory: &Path) -> Result<Self, RegisterError> {
        if !fs::exists(directory.join("ca.key"))? {
            return Err(RegisterError::None { path: directory.to_owned() });
        }
        Ok(Self { directory: directory.to_owned(), authority: Authority::load(directory)? })
    }

    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits for the lock of the directory and takes it.
    ///
    /// # Errors
    ///
    /// If the directory cannot be locked.
    pub fn lock(&self) -> Result<LockedRegister<'_>, RegisterError> {
        let lock = fs::File::open(&self.directory)?;
        lock.file().lock()?;
        Ok(LockedRegister { register: self, _lock: lock })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn rows<Row: serde::de::DeserializeOwned>(
        &self,
        name: &str,
    ) -> Result<Vec<Row>, RegisterError> {
        let path = self.path(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        rows(&bytes).map_err(|source| RegisterError::Lines { path, source })
    }
}

/// A register whose directory is locked.
#[derive(Debug)]
pub struct LockedRegister<'a> {
    register: &'a Register,
    _lock: fs::File,
}

impl LockedRegister<'_> {
    /// Returns the trusted roots: `ca.pem` of everyone who trusts this authority.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        self.register.authority.ca_pem()
    }

    /// Reads the records of issued certificates, oldest first.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if the file cannot be read.
    pub fn issued(&self) -> Result<Vec<Record>, RegisterError> {
        self.register.rows("issued.jsonl")
    }

    /// Reads the records of revoked certificates, oldest first.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if the file cannot be read.
    pub fn revoked(&self) -> Result<Vec<Revocation>, RegisterError> {
        self.register.rows("revoked.jsonl")
    }

    /// Issues a certificate for `key_pem`, or for a new key without it.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; then nothing was issued.
    pub fn issue(&self, request: &Request, key_pem: Option<&str>) -> Result<Issued, RegisterError> {
        let authority = &self.register.authority;
        let issued = match key_pem {
            Some(key_pem) => authority.issue_for_key(request, key_pem)?,
            None => authority.issue(request)?,
        };
        self.record(&[&issued.certificate])?;
        Ok(issued)
    }

    /// Issues certificates, for all requests or for those that have no error: each with a new key,
    /// or for the public key of its holder, which must be in no certificate that was revoked.
    ///
    /// # Errors
    ///
    /// If they cannot be recorded; then nothing was issued.
    pub fn issue_all(
        &self,
        requests: &[(&Request, Option<&[u8]>)],
    ) -> Result<Vec<Result<Issued, AuthorityError>>, RegisterError> {
        let authority = &self.register.authority;
        let revoked = match requests.iter().any(|(_, key)| key.is_some()) {
            true => self.revoked()?,
            false => Vec::new(),
        };
        let issue = |(request, key): &(&Request, Option<&[u8]>)| {
            let Some(key) = key else { return authority.issue(request) };
            let issued = authority.issue_for_public_key(request, key)?;
            match key_status(&issued.certificate, &revoked) {
                KeyStatus::Revoked => Err(AuthorityError::RevokedKey),
                KeyStatus::Good | KeyStatus::Doubtful => Ok(issued),
            }
        };
        let issued: Vec<Result<Issued, AuthorityError>> = requests.iter().map(issue).collect();
        let certificates: Vec<&Certificate> =
            issued.iter().flatten().map(|issued| &issued.certificate).collect();
        self.record(&certificates)?;
        Ok(issued)
    }

    /// Makes an intermediate authority and records it.
    ///
    /// # Errors
    ///
    /// [`RegisterError::SameName`] if this authority has made one of that name; its revocation
    /// lists could not be told from those of the other.
    pub fn create_intermediate(
        &self,
        options: &AuthorityOptions,
    ) -> Result<Authority, RegisterError> {
        let made = self.register.authority.create_intermediate(options)?;
        let name = &made.certificate().common_name;
        if self.issued()?.iter().any(|record| record.is_authority && record.name == *name) {
            return Err(RegisterError::SameName { name: name.clone() });
        }
        self.record(&[made.certificate()])?;
        Ok(made)
    }

    /// Records that this authority has issued `certificates`.
    ///
    /// # Errors
    ///
    /// If the records cannot be written.
    fn record(&self, certificates: &[&Certificate]) -> Result<(), RegisterError> {
        let lines: String =
            certificates.iter().map(|certificate| line(&Record::new(certificate))).collect();
        Ok(files::append(&self.register.path("issued.jsonl"), &lines, 0o600)?)
    }

    /// Returns true if no new certificate may be issued for the key of `certificate`, which this
    /// authority has issued.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if the records cannot be read.
    pub fn is_key_revoked(&self, certificate: &Certificate) -> Result<bool, RegisterError> {
        Ok(match key_status(certificate, &self.revoked()?) {
            KeyStatus::Good => false,
            KeyStatus::Revoked => true,
            KeyStatus::Doubtful => {
                let issued = self.issued()?;
                let record = issued.iter().find(|record| record.serial == certificate.serial);
                record.is_none_or(|record| record.key.is_none())
            }
        })
    }

    /// Revokes `certificates` and makes a new list, also without certificates. Certificates that
    /// are already revoked keep their record.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; a repeated call completes the work.
    pub fn revoke(
        &self,
        certificates: &[RevocationTarget],
        reason: Reason,
    ) -> Result<Revoked, RegisterError> {
        let mut all = self.revoked()?;
        let mut new: Vec<Revocation> = Vec::new();
        for RevocationTarget { serial, name, key } in certificates {
            if all.iter().chain(&new).all(|one| one.serial != *serial) {
                let (serial, name, key) = (serial.clone(), name.clone(), key.clone());
                new.push(Revocation { serial, name, reason, revoked_at: wall().seconds, key });
            }
        }
        let lines: String = new.iter().map(line).collect();
        if !lines.is_empty() {
            files::append(&self.register.path("revoked.jsonl"), &lines, 0o600)?;
        }
        all.extend(new.iter().cloned());
        let path = self.register.path("crl.pem");
        // The time makes the number grow even if the last list is lost.
        let next = list_number(&path).map_or(0, |number| number.saturating_add(1));
        let number = next.max(u64::try_from(wall().seconds).unwrap_or_default());
        let list = self.register.authority.revocation_list(&all, number)?;
        let content = Content { name: "crl.pem", text: &list, mode: 0o644 };
        files::replace_files(&self.register.directory, &[content])?;
        Ok(Revoked { new, count: all.len(), path })
    }
}

/// Refuses a directory with an authority, with the records of one whose key is stored elsewhere, or
/// with the certificate of a holder.
fn check_unused(directory: &Path) -> Result<(), RegisterError> {
    for name in ["ca.key", "issued.jsonl", "revoked.jsonl"] {
        let path = directory.join(name);
        if fs::exists(&path)? {
            return Err(RegisterError::Exists { path });
        }
    }
    for name in ["cert.pem", "key.pem"] {
        let path = directory.join(name);
        if fs::exists(&path)? {
            return Err(RegisterError::Holder { path });
        }
    }
    Ok(())
}

/// Returns the number of the revocation list in the file `path`; `None` if it is absent or damaged,
/// which must not prevent a revocation.
fn list_number(path: &Path) -> Option<u64> {
    revocation_lists_of(path).ok()?.first()?.number
}

#[cfg(test)]
mod tests;
