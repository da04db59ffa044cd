//! Writes certificates and keys into directories.
//!
//! A key file is created with its mode, so that others can never read it. A file is complete and
//! synced before it gets its name. A new directory appears with all of its files at once. In an
//! existing directory each file is replaced atomically; when the key changes, a reader between the
//! certificate and the key sees two that do not match, and a daemon then keeps those that it has.

use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;

use api::access::IdentityKind;
use api::certificate::{Certificate, CertificateError};

use super::authority::Issued;
use super::pem::{certificates_of, read_limited};

/// Which existing files may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// Only the certificate of the same holder.
    Own,
    /// Any files.
    Any,
}

/// Files that were not written. The old files are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilesError {
    #[error("{} has the certificate of {holder}, not of {name}", path.display())]
    OtherHolder { path: PathBuf, holder: String, name: String },
    #[error("{} exists without a certificate that names its holder", path.display())]
    UnknownKey { path: PathBuf },
    #[error("{} does not have the authority that issues this certificate", path.display())]
    OtherAuthority { path: PathBuf },
    #[error("{} exists and is not overwritten", path.display())]
    Exists { path: PathBuf },
    #[error("cannot read {}", path.display())]
    Certificate { path: PathBuf, source: CertificateError },
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl FilesError {
    /// Returns the error for `directory`, which has `certificate` and not one of `name`.
    #[must_use]
    pub fn other_holder(directory: &Path, certificate: &Certificate, name: String) -> Self {
        let holder = certificate.identity.kind.in_words(&certificate.common_name);
        Self::OtherHolder { path: directory.to_owned(), holder, name }
    }
}

/// A file to write.
pub(super) struct Content<'a> {
    pub(super) name: &'a str,
    pub(super) text: &'a str,
    pub(super) mode: u32,
}

impl Issued {
    /// Writes `ca.pem`, `cert.pem` and `key.pem` into `directory`, which is created with all of
    /// them at once if it does not exist. Everybody may read a new directory: certificates are not
    /// secret, and daemons with a user of their own must read them.
    ///
    /// Existing files keep owner and mode, except that others can never read the key. The
    /// revocation list and other files in the directory are not touched.
    ///
    /// # Errors
    ///
    /// [`FilesError`]; after a write error some of the files may be new, and the call can be
    /// repeated.
    pub fn write(
        &self,
        directory: &Path,
        ca_pem: &str,
        replace: Replace,
    ) -> Result<(), FilesError> {
        let mut contents = vec![
            Content { name: "ca.pem", text: ca_pem, mode: 0o644 },
            Content { name: "cert.pem", text: &self.certificate_pem, mode: 0o644 },
            Content { name: "key.pem", text: &self.key_pem, mode: 0o600 },
        ];
        if !fs::exists(directory)? {
            return new_directory(directory, &contents, 0o755);
        }
        let Certificate { common_name, identity, .. } = &self.certificate;
        check_overwrite(directory, common_name, identity.kind, ca_pem, replace)?;
        if replace == Replace::Own && fs::exists(directory.join("ca.pem"))? {
            contents.remove(0);
        }
        // Unchanged files are not rewritten.
        contents.retain(|content| {
            read_limited(&directory.join(content.name)).ok().as_deref() != Some(content.text)
        });
        replace_files(directory, &contents)
    }
}

/// Checks that [`Issued::write`] would not refuse to write a certificate of `name` and `kind` into
/// `directory`. Called before a certificate is issued, so that none is issued in vain.
///
/// # Errors
///
/// [`FilesError`] if files exist that must not be overwritten.
pub fn check_overwrite(
    directory: &Path,
    name: &str,
    kind: IdentityKind,
    ca_pem: &str,
    replace: Replace,
) -> Result<(), FilesError> {
    if replace == Replace::Any {
        return Ok(());
    }
    check_holder(directory, name, kind)?;
    check_authority(&directory.join("ca.pem"), ca_pem)
}

/// Refuses a directory with the certificate of another holder.
fn check_holder(directory: &Path, name: &str, kind: IdentityKind) -> Result<(), FilesError> {
    let path = directory.join("cert.pem");
    if !fs::exists(&path)? {
        let key = directory.join("key.pem");
        return if fs::exists(&key)? { Err(FilesError::UnknownKey { path: key }) } else { Ok(()) };
    }
    let all = certificates_of(&path).map_err(|error| io::Error::other(error.to_string()))?;
    let read = Certificate::read(&all[0]);
    let read = read.map_err(|source| FilesError::Certificate { path, source })?;
    if read.common_name == name && read.identity.kind.agrees(kind) {
        return Ok(());
    }
    Err(FilesError::other_holder(directory, &read, kind.in_words(name)))
}

/// Refuses a file without the authorities in `ca_pem`; it may have others too.
fn check_authority(path: &Path, ca_pem: &str) -> Result<(), FilesError> {
    if !fs::exists(path)? {
        return Ok(());
    }
    let text = read_limited(path).map_err(|error| io::Error::other(error.to_string()))?;
    // Operators may have joined several files.
    let blocks = |text: &str| -> Vec<String> {
        let parts = text.split("-----BEGIN CERTIFICATE-----").skip(1);
        let bodies = parts.filter_map(|part| part.split("-----END").next());
        bodies.map(|body| body.split_whitespace().collect()).collect()
    };
    let have = blocks(&text);
    if blocks(ca_pem).iter().all(|block| have.contains(block)) {
        return Ok(());
    }
    Err(FilesError::OtherAuthority { path: path.to_owned() })
}

/// Creates `directory` with all of `contents` at once.
pub(super) fn new_directory(
    directory: &Path,
    contents: &[Content<'_>],
    mode: u32,
) -> Result<(), FilesError> {
    let name = directory.file_name().ok_or_else(|| {
        let text = format!("{} is not the name of a directory", directory.display());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    let parent = parent_of(directory);
    fs::create_dir_all(parent)?;
    let partial = Partial(parent.join(format!(".{}.new", name.display())));
    // A killed run may have left one.
    partial.remove()?;
    std::fs::DirBuilder::new().mode(mode).create(&partial.0).map_err(|source| {
        io::Error::new(source.kind(), format!("cannot create {}: {source}", partial.0.display()))
    })?;
    for content in contents {
        write(&partial.0.join(content.name), content, None)?;
    }
    sync(&partial.0)?;
    if fs::exists(directory)? {
        return Err(FilesError::Exists { path: directory.to_owned() });
    }
    fs::rename(&partial.0, directory)?;
    sync(parent)?;
    Ok(())
}

/// Replaces the files `contents` in `directory` one after the other; each is synced before the next
/// is replaced.
pub(super) fn replace_files(directory: &Path, contents: &[Content<'_>]) -> Result<(), FilesError> {
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

/// Removes the file `path` if it exists, and syncs its directory.
pub(super) fn remove(path: &Path) -> Result<(), FilesError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(sync(parent_of(path))?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Appends `text` to the file `path` after its last complete line, and syncs it.
pub(super) fn append(path: &Path, text: &str, mode: u32) -> Result<(), FilesError> {
    let is_new = !fs::exists(path)?;
    let mut file = fs::OpenOptions::new();
    let mut file =
        file.read(true).write(true).create(true).truncate(false).mode(mode).open(path)?;
    let end = file.seek(SeekFrom::End(0))?;
    if !ends_line(&mut file, end)? {
        file.seek(SeekFrom::Start(0))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = super::record::complete_lines(&bytes) as u64;
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

/// Returns true if a file of `end` bytes ends with a line feed, and moves to its end.
fn ends_line(file: &mut fs::File, end: u64) -> io::Result<bool> {
    let Some(last) = end.checked_sub(1) else { return Ok(true) };
    file.seek(SeekFrom::Start(last))?;
    let mut byte = [0];
    file.read_exact(&mut byte)?;
    Ok(byte == *b"\n")
}

/// Returns the directory of `path`.
pub(super) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes a new file, with the owner and mode of `old` if given.
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
        // A secret may stay readable by its group, but not by others.
        let allowed = if content.mode & 0o077 == 0 { 0o640 } else { 0o777 };
        let mode = old.permissions().mode() & allowed;
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    }
    file.sync_all()
}

fn sync(directory: &Path) -> io::Result<()> {
    fs::File::open(directory)?.sync_all()
}

/// A file or directory under its temporary name, which is removed on drop.
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
