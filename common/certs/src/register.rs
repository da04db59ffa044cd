//! The directory of an authority.
//!
//! ```text
//! DIR/ca.pem         the certificate of the root: what everybody who trusts it must have
//! DIR/ca.key         the key of this authority, a secret
//! DIR/chain.pem      only of an authority below a root: its certificate
//! DIR/issued.jsonl   what was issued: a line each, only ever added to
//! DIR/revoked.jsonl  what was revoked: a line each, only ever added to
//! DIR/crl.pem        the list of revoked certificates, signed, made of revoked.jsonl
//! ```
//!
//! The directory is only for its owner. A certificate is on record, and the record on the medium,
//! before it is given to anybody; so is a revocation before the list is made, which is made anew
//! by each. Whoever changes something holds a lock on the directory, so that several programs can
//! work with one authority.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::authority::{Authority, AuthorityError, Issued, Request, now};
use super::pem::revocation_lists_of;
use super::place::{self, Content, PlaceError};
use super::record::{
    KeyStanding, LineError, Meant, Reason, Record, Revocation, key_standing, line, rows,
};
use api::certificate::Certificate;

/// An authority in a directory.
#[derive(Debug)]
pub struct Register {
    directory: PathBuf,
    authority: Authority,
}

/// Why the directory of an authority cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The authority does not do it.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// Files cannot be put in place.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The disk.
    #[error(transparent)]
    File(#[from] io::Error),
    /// There is an authority already.
    #[error("{} is there already: an authority is never overwritten", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The directory is that of a daemon or tool.
    #[error("{} is there: make the authority in a directory of its own", path.display())]
    Holder {
        /// The file.
        path: PathBuf,
    },
    /// There is no authority.
    #[error("{} is not the directory of an authority: it has no ca.key", path.display())]
    None {
        /// The directory.
        path: PathBuf,
    },
    /// What was written there cannot be read.
    #[error("{}", path.display())]
    Lines {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: LineError,
    },
}

/// What [`Held::revoke`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// What is revoked since now.
    pub new: Vec<Revocation>,
    /// How many are revoked in all.
    pub count: usize,
    /// The signed list of all.
    pub path: PathBuf,
}

impl Register {
    /// Puts `authority` into `directory`, which may be there, but not with an authority.
    ///
    /// The key gets its name last: without it nothing is an authority, and what a run that was
    /// killed has left of one is replaced.
    ///
    /// # Errors
    ///
    /// [`RegisterError::Exists`], [`RegisterError::Holder`], or what the disk says.
    pub fn make(directory: &Path, authority: Authority) -> Result<Self, RegisterError> {
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
        // Of two who make one at the same time, one must see the other's.
        fs::create_dir_all(place::parent_of(directory))?;
        let lock = fs::File::open(place::parent_of(directory))?;
        lock.file().lock()?;
        if fs::exists(directory)? {
            expect_none(directory)?;
            if is_root {
                // It would make an intermediate of the root.
                place::remove(&directory.join("chain.pem"))?;
            }
            place::into(directory, &contents)?;
        } else {
            place::new_directory(directory, &contents, 0o700)?;
        }
        Ok(Self { directory: directory.to_owned(), authority })
    }

    /// The authority in `directory`.
    ///
    /// # Errors
    ///
    /// [`RegisterError::None`] if there is none, or what is wrong with it.
    pub fn open(directory: &Path) -> Result<Self, RegisterError> {
        if !fs::exists(directory.join("ca.key"))? {
            return Err(RegisterError::None { path: directory.to_owned() });
        }
        Ok(Self { directory: directory.to_owned(), authority: Authority::load(directory)? })
    }

    /// The authority.
    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until nobody else changes anything here, and keeps others from it.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn lock(&self) -> Result<Held<'_>, RegisterError> {
        let lock = fs::File::open(&self.directory)?;
        lock.file().lock()?;
        Ok(Held { register: self, _lock: lock })
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

/// An authority while nobody else uses it.
#[derive(Debug)]
pub struct Held<'a> {
    register: &'a Register,
    _lock: fs::File,
}

impl Held<'_> {
    /// What those who trust the authority must have.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        self.register.authority.ca_pem()
    }

    /// What was issued, the oldest first.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if it cannot be read.
    pub fn issued(&self) -> Result<Vec<Record>, RegisterError> {
        self.register.rows("issued.jsonl")
    }

    /// What was revoked, the oldest first.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if it cannot be read.
    pub fn revoked(&self) -> Result<Vec<Revocation>, RegisterError> {
        self.register.rows("revoked.jsonl")
    }

    /// Makes a certificate: with a new key, or for `key_pem` if there is one.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; nothing was issued then.
    pub fn issue(&self, request: &Request, key_pem: Option<&str>) -> Result<Issued, RegisterError> {
        let authority = &self.register.authority;
        let issued = match key_pem {
            Some(key_pem) => authority.issue_for_key(request, key_pem)?,
            None => authority.issue(request)?,
        };
        self.keep(&issued.certificate)?;
        Ok(issued)
    }

    /// Keeps on record that this authority has made the authority of `certificate`.
    ///
    /// # Errors
    ///
    /// What the disk says.
    pub fn keep(&self, certificate: &Certificate) -> Result<(), RegisterError> {
        let line = line(&Record::of(certificate));
        Ok(place::append(&self.register.path("issued.jsonl"), &line, 0o600)?)
    }

    /// True if the key of `certificate`, which this authority has issued, must not be vouched for
    /// again.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] if what was revoked cannot be read.
    pub fn is_key_revoked(&self, certificate: &Certificate) -> Result<bool, RegisterError> {
        Ok(match key_standing(certificate, &self.revoked()?) {
            KeyStanding::Good => false,
            KeyStanding::Revoked => true,
            KeyStanding::Doubtful => {
                let issued = self.issued()?;
                let own = issued.iter().find(|record| record.serial == certificate.serial);
                own.is_none_or(|record| record.key.is_none())
            }
        })
    }

    /// Revokes `certificates`, and makes the list anew, also if there are none. Those that are
    /// revoked already stay so.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; done again, it goes on where it stopped.
    pub fn revoke(&self, certificates: &[Meant], reason: Reason) -> Result<Revoked, RegisterError> {
        let mut all = self.revoked()?;
        let mut new: Vec<Revocation> = Vec::new();
        for Meant { serial, name, key } in certificates {
            if all.iter().chain(&new).all(|one| one.serial != *serial) {
                let (serial, name, key) = (serial.clone(), name.clone(), key.clone());
                new.push(Revocation { serial, name, reason, revoked_at: now(), key });
            }
        }
        let lines: String = new.iter().map(line).collect();
        if !lines.is_empty() {
            place::append(&self.register.path("revoked.jsonl"), &lines, 0o600)?;
        }
        all.extend(new.iter().cloned());
        let path = self.register.path("crl.pem");
        // Also if the last list is lost, the next one has a higher number.
        let next = list_number(&path).map_or(0, |number| number.saturating_add(1));
        let number = next.max(u64::try_from(now()).unwrap_or_default());
        let list = self.register.authority.revocation_list(&all, number)?;
        let content = Content { name: "crl.pem", text: &list, mode: 0o644 };
        place::into(&self.register.directory, &[content])?;
        Ok(Revoked { new, count: all.len(), path })
    }
}

/// Refuses a directory that has the key of an authority, or what one has recorded whose key is
/// kept elsewhere, or belongs to somebody who trusts one.
fn expect_none(directory: &Path) -> Result<(), RegisterError> {
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

/// The number of the list in the file `path`, if it is there and can be read: one that was damaged
/// keeps nobody from revoking.
fn list_number(path: &Path) -> Option<u64> {
    revocation_lists_of(path).ok()?.first()?.number
}

#[cfg(test)]
mod tests;
