//! `dom-provisioner-file` makes files.
//!
//! ```json
//! {"path": "/etc/motd", "content": "hello\n", "mode": "0644"}
//! ```
//!
//! A file belongs to the user that the binding names. It is replaced as a whole, so that a reader
//! sees the old or the new content. Outputs are its path and the SHA-256 of its content.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use provisioning::protocol::{Operation, Outputs};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::{Item, Provisioner, specification};

/// Makes files.
#[derive(Debug)]
pub struct Files;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Specification {
    path: PathBuf,
    content: String,
    #[serde(default = "readable")]
    mode: String,
}

fn readable() -> String {
    "0644".to_owned()
}

impl Specification {
    fn of(item: &Item) -> Result<Self, String> {
        let spec: Self = specification(item)?;
        spec.mode()?;
        if !spec.path.is_absolute() {
            return Err("spec: the path is not absolute".to_owned());
        }
        Ok(spec)
    }

    fn mode(&self) -> Result<u32, String> {
        let mode = u32::from_str_radix(&self.mode, 8).ok().filter(|mode| *mode <= 0o7777);
        mode.ok_or_else(|| format!("spec: `{}` is no mode such as 0644", self.mode))
    }

    /// Returns true if the file is there as asked for.
    fn is_there(&self) -> Result<bool, String> {
        let metadata = match fs::symlink_metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(self.failed(&error)),
        };
        if metadata.is_dir() {
            return Err(self.failed(&io::Error::from(ErrorKind::IsADirectory)));
        }
        if !metadata.is_file() || metadata.permissions().mode() & 0o7777 != self.mode()? {
            return Ok(false);
        }
        let content = fs::read(&self.path).map_err(|error| self.failed(&error))?;
        Ok(content == self.content.as_bytes())
    }

    fn write(&self) -> Result<(), String> {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".dom-provisioner-new");
        let temporary = self.path.with_file_name(name);
        let mode = self.mode()?;
        let write = || {
            remove(&temporary)?;
            let mut file =
                File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.write_all(self.content.as_bytes())?;
            // Not as it was made: the umask would be taken off.
            file.set_permissions(fs::Permissions::from_mode(mode))?;
            file.sync_all()?;
            fs::rename(&temporary, &self.path)?;
            sync_parent(&self.path)
        };
        write().map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("{}: {error}", self.path.display())
    }
}

impl Provisioner for Files {
    fn plan(&self, item: &Item, previous: &[Item]) -> Result<(Operation, String), String> {
        let spec = Specification::of(item)?;
        let path = spec.path.display();
        let moved = former_paths(&spec, previous).next().is_some();
        Ok(match (spec.is_there()?, spec.path.exists()) {
            (true, _) if !moved => (Operation::None, format!("{path} is as asked for")),
            (_, true) => (Operation::Update, format!("write {path}")),
            (_, false) => (Operation::Create, format!("write {path}")),
        })
    }

    fn make(&self, item: &Item, previous: &[Item]) -> Result<Outputs, String> {
        let spec = Specification::of(item)?;
        if !spec.is_there()? {
            spec.write()?;
        }
        for former in former_paths(&spec, previous) {
            remove(&former).map_err(|error| format!("{}: {error}", former.display()))?;
        }
        let digest = HEXLOWER.encode(&Sha256::digest(&spec.content));
        Ok(Outputs::from_iter([
            ("path".to_owned(), Value::from(spec.path.to_string_lossy())),
            ("sha256".to_owned(), Value::from(digest)),
        ]))
    }

    fn destroy(&self, item: &Item) -> Result<(), String> {
        let spec = Specification::of(item)?;
        remove(&spec.path)
            .and_then(|()| sync_parent(&spec.path))
            .map_err(|error| spec.failed(&error))
    }
}

/// Returns the other paths that the file had.
fn former_paths(spec: &Specification, previous: &[Item]) -> impl Iterator<Item = PathBuf> {
    let former = previous.iter().filter_map(|old| Specification::of(old).ok());
    former.map(|old| old.path).filter(|path| *path != spec.path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Writes the entries of the directory of `path`, if there is one.
fn sync_parent(path: &Path) -> io::Result<()> {
    match File::open(path.parent().unwrap_or(path)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        directory => directory?.sync_all(),
    }
}
