//! Finds plugins, keeps copies of them, and says how they are run.
//!
//! What runs is a copy in subd's own directory, named by its digest: an update may change or remove
//! the plugin while its work goes on, and what it made is destroyed by the same one.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use daemon::plugins::{Plugin, program};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::object::Algorithm;
use provisioning::image::{PLUGIN_BYTES_MAX, PLUGIN_DIRECTORIES, interpreter};
use tokio::process::Command;

use crate::provisioning::{INIT, NO_END, STAGE};

/// Makes the names of copies that are being written differ. [`Plugins::collect`] removes what is
/// left.
static NEXT_COPY: AtomicU64 = AtomicU64::new(0);

/// How plugins are found and run.
#[derive(Debug)]
pub struct Plugins {
    /// Where the copies are.
    pub copies: PathBuf,
    /// What plugins see as `/`.
    pub root: PathBuf,
    /// The path of subd's program, which becomes the plugin.
    pub program: PathBuf,
    /// True if plugins that are installed on the machine may be used, not only those of images.
    pub uses_installed: bool,
}

impl Plugins {
    /// Keeps a copy named `name`, durably.
    pub fn keep(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.copies.join(name);
        if path.exists() {
            return Ok(());
        }
        fs_err::create_dir_all(&self.copies)?;
        // Two may keep the same copy at the same time.
        let number = NEXT_COPY.fetch_add(1, Ordering::Relaxed);
        let new = self.copies.join(format!("{name}.{number}.new"));
        let mut options = fs_err::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o755);
        let mut file = options.open(&new)?;
        file.write_all(bytes)?;
        // It is opened for reading and executing by the user of the plugin.
        file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
        file.sync_all()?;
        drop(file);
        fs_err::rename(&new, &path)?;
        fs_err::File::open(&self.copies)?.sync_all()
    }

    /// True if there is a copy of that name.
    pub fn has(&self, copy: &str) -> bool {
        self.copies.join(copy).exists()
    }

    /// Removes the copies that are not in `needed`.
    pub fn collect(&self, needed: &BTreeSet<String>) -> io::Result<()> {
        let entries = match fs_err::read_dir(&self.copies) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if !entry.file_name().to_str().is_some_and(|name| needed.contains(name)) {
                fs_err::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Keeps a copy of the plugin of `provisioner` that is installed on the machine, and returns
    /// the name of the copy.
    ///
    /// # Errors
    ///
    /// It is not there, or others than root could write it.
    pub fn keep_installed(&self, provisioner: &str) -> Result<String, String> {
        let program = program(provisioner);
        if !self.uses_installed {
            return Err(format!(
                "the image has no {program}, and this machine uses only what is signed"
            ));
        }
        let root = self.root.canonicalize().map_err(|error| error.to_string())?;
        let places = PLUGIN_DIRECTORIES.map(|place| root.join(&place[1..]).join(&program));
        let Some(path) = places.iter().find_map(|path| path.canonicalize().ok()) else {
            let places = PLUGIN_DIRECTORIES.join(", ");
            return Err(format!(
                "{program} is not in the image, and on the machine in none of {places}"
            ));
        };
        if !path.starts_with(&root) {
            return Err(format!("{} is outside of the root", path.display()));
        }
        for part in path.ancestors().take_while(|part| part.starts_with(&root)) {
            let metadata = part.metadata().map_err(|error| error.to_string())?;
            if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 {
                return Err(format!("others than root may write {}", part.display()));
            }
        }
        let read = fs_err::File::open(&path).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(PLUGIN_BYTES_MAX + 1).read_to_end(&mut bytes).map(|_| bytes)
        });
        let bytes = read.map_err(|error| error.to_string())?;
        if bytes.len() as u64 > PLUGIN_BYTES_MAX {
            return Err(format!("{} has more than {PLUGIN_BYTES_MAX} bytes", path.display()));
        }
        let name = Algorithm::Blake3.digest(&bytes).to_string();
        self.keep(&name, &bytes).map_err(|error| error.to_string())?;
        Ok(name)
    }

    /// Checks that a copy is there and can be run here.
    ///
    /// # Errors
    ///
    /// Says what is missing.
    pub fn check(&self, copy: &str) -> Result<(), String> {
        let read = fs_err::File::open(self.copies.join(copy)).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(512).read_to_end(&mut bytes).map(|_| bytes)
        });
        let begin = read.map_err(|error| format!("the copy of the plugin is lost: {error}"))?;
        match interpreter(&begin) {
            // In another root, links lead elsewhere for this process.
            Some(path) if self.root == Path::new("/") && !Path::new(&path).exists() => {
                Err(format!("the plugin is a script for {path}, which is not installed"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the plugin in a copy, as `user`. `ends` is when nothing of it may be left whatever
    /// becomes of subd, and the present, in milliseconds since the boot.
    #[must_use]
    pub fn plugin(
        &self,
        copy: &str,
        user: &str,
        timeout_s: u32,
        ends: Option<(u64, u64)>,
    ) -> Plugin {
        let mut command = Command::new(&self.program);
        command.arg0("subd");
        let mut timeout = Duration::from_secs(timeout_s.into());
        if let Some((ends_at_ms, now_ms)) = ends {
            command.arg(INIT).arg(ends_at_ms.to_string());
            timeout = timeout.min(Duration::from_millis(ends_at_ms.saturating_sub(now_ms)));
        } else if self.root == Path::new("/") {
            command.arg(STAGE);
        } else {
            command.arg(INIT).arg(NO_END);
        }
        command.arg(&self.root).arg(user).arg(self.copies.join(copy));
        Plugin::new(command, timeout)
    }
}
