//! Finds plugins, and runs them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use daemon::program::{CommandError, output_of};
use nix::unistd::{User, geteuid};
use provisioning::Bindings;
use provisioning::binding::PLUGIN_PREFIX;
use provisioning::protocol::{ANSWER_BYTES_MAX, Request, Verb};
use tokio::process::Command;

use super::directory::check_owner;

/// Where plugins are looked up after the directories that the caller names.
const DIRECTORIES: [&str; 4] =
    ["/usr/local/lib/dominator", "/usr/lib/dominator", "/usr/local/bin", "/usr/bin"];

/// The search path of plugins.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long a plugin may take that no binding names any more.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where plugins are, and how long each may take.
pub(super) struct Plugins {
    directories: Vec<PathBuf>,
    bindings: Bindings,
}

/// A plugin that can be run.
pub(super) struct Plugin {
    path: PathBuf,
    user: User,
    timeout: Duration,
}

/// Returns the name of a provisioner's plugin.
pub(super) fn program(provisioner: &str) -> String {
    format!("{PLUGIN_PREFIX}{provisioner}")
}

impl Plugins {
    pub fn new(local: &Path, named: &[PathBuf], bindings: &Bindings) -> Self {
        let own = std::env::current_exe().ok();
        let own = own.as_deref().and_then(Path::parent).map(Path::to_owned);
        let mut directories = named.to_vec();
        directories.push(local.to_owned());
        directories.extend(own);
        directories.extend(DIRECTORIES.map(PathBuf::from));
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
        Ok(Plugin { path, user, timeout })
    }
}

impl Plugin {
    /// Runs the plugin, and returns what it prints; or says what is wrong with it.
    pub async fn ask(&self, verb: Verb, request: &Request) -> Result<Vec<u8>, String> {
        let input = serde_json::to_vec(request).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.path);
        command
            .arg(verb.name())
            .env_clear()
            .env("PATH", PATH)
            .env("HOME", &self.user.dir)
            .env("USER", &self.user.name)
            .env("LOGNAME", &self.user.name);
        if self.user.uid != geteuid() {
            command.uid(self.user.uid.as_raw()).gid(self.user.gid.as_raw());
        }
        let answer = output_of(command, &input, ANSWER_BYTES_MAX);
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(printed)) => Ok(printed),
            Ok(Err(error)) => Err(said(error)),
            Err(_) => {
                let seconds = self.timeout.as_secs();
                Err(format!(
                    "has not answered `{}` within {seconds} s, and was killed",
                    verb.name()
                ))
            }
        }
    }
}

/// Says what is wrong, without the path: who reads it knows the plugin.
fn said(error: CommandError) -> String {
    match error {
        CommandError::Start { program, source } => format!("cannot be run as {program}: {source}"),
        CommandError::TooLarge { limit, .. } => format!("prints more than {limit} bytes"),
        CommandError::Failed { status, stderr_line, .. } if stderr_line.is_empty() => {
            format!("{status}")
        }
        CommandError::Failed { status, stderr_line, .. } => format!("{status}: {stderr_line}"),
        error => model::display::error_chain(&error),
    }
}
