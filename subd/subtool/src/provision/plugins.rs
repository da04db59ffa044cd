//! Finds plugins.

use std::path::{Path, PathBuf};
use std::time::Duration;

use daemon::plugins::{Plugin, program};
use nix::unistd::{User, geteuid};
use provisioning::Bindings;
use provisioning::image::PLUGIN_DIRECTORIES;
use tokio::process::Command;

use super::directory::check_owner;

/// How long a plugin may take that no binding names any more.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where plugins are, and how long each may take.
pub(super) struct Plugins {
    directories: Vec<PathBuf>,
    bindings: Bindings,
}

impl Plugins {
    pub fn new(local: &Path, named: &[PathBuf], bindings: &Bindings) -> Self {
        let own = std::env::current_exe().ok();
        let own = own.as_deref().and_then(Path::parent).map(Path::to_owned);
        let mut directories = named.to_vec();
        directories.push(local.to_owned());
        directories.extend(own);
        directories.extend(PLUGIN_DIRECTORIES.map(PathBuf::from));
        Self { directories, bindings: bindings.clone() }
    }

    /// Returns the path of a plugin, if it is there.
    pub fn path(&self, provisioner: &str) -> Option<PathBuf> {
        let program = program(provisioner);
        let paths = self.directories.iter().map(|directory| directory.join(&program));
        paths.into_iter().find(|path| path.exists())
    }

    /// Finds the plugin of a provisioner, and the user that runs it.
    pub fn find(&self, provisioner: &str, user: &str) -> Result<Plugin, String> {
        let path = self.path(provisioner).ok_or_else(|| {
            let all: Vec<String> =
                self.directories.iter().map(|one| one.display().to_string()).collect();
            format!("{} is in none of {}", program(provisioner), all.join(", "))
        })?;
        let path = std::path::absolute(&path).map_err(|error| error.to_string())?;
        for part in [&*path, path.parent().unwrap_or(&path)] {
            check_owner(part).map_err(|error| format!("{} {error}", part.display()))?;
        }
        let found = User::from_name(user).map_err(|error| error.to_string())?;
        let user = found.ok_or_else(|| format!("there is no user `{user}`"))?;
        if !geteuid().is_root() && user.uid != geteuid() {
            return Err(format!("only root can run it as user `{}`", user.name));
        }
        let binding = self.bindings.of_name(provisioner);
        let timeout =
            binding.map_or(TIMEOUT, |binding| Duration::from_secs(binding.timeout_s.into()));
        let mut command = Command::new(path);
        if user.uid != geteuid() {
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        Ok(Plugin::new(command, timeout).with_user(&user.name, &user.dir))
    }
}
