//! Puts certificates and keys where they belong.
//!
//! A key is never readable by others, not for a moment: it gets its mode when it is made. What is
//! put in place is whole and on the medium before it gets its name. A new directory appears with
//! all of its files at once. In a directory that is there, each file is replaced at once; when the
//! key is another one, whoever reads between the certificate and the key sees two that do not
//! match, and a daemon then keeps those that it has.

use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::authority::Issued;
use super::pem::{certificates_of, read_limited};
use api::certificate::{Certificate, CertificateError};

/// What may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// The certificate of the same holder.
    Own,
    /// Whatever is there.
    Any,
}

/// Why files were not put in place. The old ones are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// Somebody else's certificate is there.
    #[error("{} holds the certificate of {holder}, not of {name}", path.display())]
    Other {
        /// The directory.
        path: PathBuf,
        /// Whose certificate it has.
        holder: String,
        /// Whose it was to have.
        name: String,
    },
    /// A key is there that nobody knows.
    #[error("{} is there, and no certificate beside it tells whose it is", path.display())]
    Key {
        /// The key.
        path: PathBuf,
    },
    /// Other authorities are trusted there.
    #[error("{} does not hold the authority that issues this certificate", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
    },
    /// Something is there that may not be overwritten at all.
    #[error("{} is there already, and is not overwritten", path.display())]
    Exists {
        /// What is there.
        path: PathBuf,
    },
    /// A certificate that is there cannot be read.
    #[error("cannot read {}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: CertificateError,
    },
    /// The disk.
    #[error(transparent)]
    File(#[from] io::Error),
}

/// One file that is to be.
pub(super) struct Content<'a> {
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    pub(super) mode: u32,
}

impl Issued {
    /// Writes `ca.pem`, `cert.pem` and `key.pem` into `directory`, which is made with all of them
    /// at once if it is not there. Everybody may look into it: certificates are no secret, and
    /// daemons that have a user of their own must read them.
    ///
    /// Of files that are there, owner and mode stay, but a key is never left readable by others.
    /// The directory's list of revoked certificates and other files are not touched.
    ///
    /// # Errors
    ///
    /// [`PlaceError`]; all old files are then in place, or, if the disk failed in the middle, some
    /// new ones, and it can be done again.
    pub fn write(
        &self,
        directory: &Path,
        ca_pem: &str,
        replace: Replace,
    ) -> Result<(), PlaceError> {
        let mut contents = vec![
            Content { name: "ca.pem", text: ca_pem, mode: 0o644 },
            Content { name: "cert.pem", text: &self.certificate_pem, mode: 0o644 },
            Content { name: "key.pem", text: &self.key_pem, mode: 0o600 },
        ];
        if !fs::exists(directory)? {
            return new_directory(directory, &contents, 0o755);
        }
        may_write(directory, &self.certificate.common_name, ca_pem, replace)?;
        if replace == Replace::Own && fs::exists(directory.join("ca.pem"))? {
            contents.remove(0);
        }
        // Nothing is written that would be the same: a key that stays is not replaced.
        contents.retain(|content| {
            read_limited(&directory.join(content.name)).ok().as_deref() != Some(content.text)
        });
        into(directory, &contents)
    }
}

/// Whether [`Issued::write`] would write a certificate of `name` into `directory`, or refuse to
/// overwrite what is there. Looked at before it is issued, none is issued for nothing.
///
/// # Errors
///
/// [`PlaceError`].
pub fn may_write(
    directory: &Path,
    name: &str,
    ca_pem: &str,
    replace: Replace,
) -> Result<(), PlaceError> {
    if replace == Replace::Any {
        return Ok(());
    }
    expect_own(directory, name)?;
    expect_authority(&directory.join("ca.pem"), ca_pem)
}

/// Refuses a directory with the certificate of somebody else.
fn expect_own(directory: &Path, name: &str) -> Result<(), PlaceError> {
    let path = directory.join("cert.pem");
    if !fs::exists(&path)? {
        let key = directory.join("key.pem");
        return if fs::exists(&key)? { Err(PlaceError::Key { path: key }) } else { Ok(()) };
    }
    let all = certificates_of(&path).map_err(|error| io::Error::other(error.to_string()))?;
    let read = Certificate::read(&all[0]);
    let holder = read.map_err(|source| PlaceError::Certificate { path, source })?.common_name;
    if holder == name {
        return Ok(());
    }
    Err(PlaceError::Other { path: directory.to_owned(), holder, name: name.to_owned() })
}

/// Refuses a file that has not the authorities in `ca_pem`; it may have others too.
fn expect_authority(path: &Path, ca_pem: &str) -> Result<(), PlaceError> {
    if !fs::exists(path)? {
        return Ok(());
    }
    let text = read_limited(path).map_err(|error| io::Error::other(error.to_string()))?;
    // Both are as the same program has written them, or as an operator has joined them.
    let blocks = |text: &str| -> Vec<String> {
        let parts = text.split("-----BEGIN CERTIFICATE-----").skip(1);
        let bodies = parts.filter_map(|part| part.split("-----END").next());
        bodies.map(|body| body.split_whitespace().collect()).collect()
    };
    let have = blocks(&text);
    if blocks(ca_pem).iter().all(|block| have.contains(block)) {
        return Ok(());
    }
    Err(PlaceError::Authorities { path: path.to_owned() })
}

/// Makes `directory` with all of `contents` at once.
pub(super) fn new_directory(
    directory: &Path,
    contents: &[Content<'_>],
    mode: u32,
) -> Result<(), PlaceError> {
    let name = directory.file_name().ok_or_else(|| {
        let text = format!("{} is no name of a directory", directory.display());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    let parent = parent_of(directory);
    fs::create_dir_all(parent)?;
    let partial = Partial(parent.join(format!(".{}.new", name.display())));
    // What a run that was killed has left.
    partial.remove()?;
    std::fs::DirBuilder::new().mode(mode).create(&partial.0).map_err(|source| {
        io::Error::new(source.kind(), format!("cannot make {}: {source}", partial.0.display()))
    })?;
    for content in contents {
        write(&partial.0.join(content.name), content, None)?;
    }
    sync(&partial.0)?;
    if fs::exists(directory)? {
        return Err(PlaceError::Exists { path: directory.to_owned() });
    }
    fs::rename(&partial.0, directory)?;
    sync(parent)?;
    Ok(())
}

/// Replaces the files `contents` in `directory`, one after the other: each is on the medium before
/// the next one is replaced.
pub(super) fn into(directory: &Path, contents: &[Content<'_>]) -> Result<(), PlaceError> {
    let mut partials = Vec::new();
    for content in contents {
        let path = directory.join(content.name);
        let partial = Partial(directory.join(format!(".{}.new", content.name)));
        partial.remove()?;
        let old = match fs::metadata(&path) {
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        write(&partial.0, content, old.as_ref())?;
        partials.push((partial, path));
    }
    for (partial, path) in &partials {
        fs::rename(&partial.0, path)?;
        sync(directory)?;
    }
    Ok(())
}

/// Removes the file `path`, if it is there, also from the medium.
pub(super) fn remove(path: &Path) -> Result<(), PlaceError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(sync(parent_of(path))?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Adds `text` to the end of the file `path`, and to the medium, behind its last whole line.
pub(super) fn append(path: &Path, text: &str, mode: u32) -> Result<(), PlaceError> {
    let is_new = !fs::exists(path)?;
    let mut file = fs::OpenOptions::new();
    let mut file =
        file.read(true).write(true).create(true).truncate(false).mode(mode).open(path)?;
    let end = file.seek(SeekFrom::End(0))?;
    if !ends_line(&mut file, end)? {
        file.seek(SeekFrom::Start(0))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = super::record::whole(&bytes) as u64;
        file.set_len(whole)?;
        file.seek(SeekFrom::Start(whole))?;
    }
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    if is_new {
        sync(parent_of(path))?;
    }
    Ok(())
}

/// True if the last of `end` bytes ends a line, and leaves the file there.
fn ends_line(file: &mut fs::File, end: u64) -> io::Result<bool> {
    let Some(last) = end.checked_sub(1) else { return Ok(true) };
    file.seek(SeekFrom::Start(last))?;
    let mut byte = [0];
    file.read_exact(&mut byte)?;
    Ok(byte == *b"\n")
}

/// Where `path` is.
pub(super) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes a file that is not there yet; with the owner and mode of `old`, if there is one.
fn write(path: &Path, content: &Content<'_>, old: Option<&std::fs::Metadata>) -> io::Result<()> {
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(content.mode).open(path)?;
    file.write_all(content.text.as_bytes())?;
    if let Some(old) = old {
        let new = file.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            let given = std::os::unix::fs::fchown(file.file(), Some(old.uid()), Some(old.gid()));
            given.map_err(|error| {
                let path = path.display();
                let text = format!("cannot give {path} the owner of the file it replaces: {error}");
                io::Error::new(error.kind(), text)
            })?;
        }
        // A secret may stay readable by a group, and not by everybody.
        let allowed = if content.mode & 0o077 == 0 { 0o640 } else { 0o777 };
        let mode = old.permissions().mode() & allowed;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    }
    file.sync_all()
}

fn sync(directory: &Path) -> io::Result<()> {
    fs::File::open(directory)?.sync_all()
}

/// A file or directory that has not got its name yet; it goes unless it gets it.
struct Partial(PathBuf);

impl Partial {
    fn remove(&self) -> io::Result<()> {
        let removed = match fs::symlink_metadata(&self.0) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&self.0),
            Ok(_) => fs::remove_file(&self.0),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests;
