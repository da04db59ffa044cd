//! The flags for the protection of connections.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::{EXIT_MISUSE, exit};
use model::display::error_chain;
use rpc::tls::Security;
use rpc::tls::TlsError;

/// The default directory of certificates of daemons, and of tools whose user has none.
const SYSTEM_DIR: &str = "/etc/dominator/tls";

/// The directory of a user's certificates, below the home directory.
const USER_DIR: &str = ".config/dominator/tls";

/// How connections are protected.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SecurityArgs {
    /// Run without TLS: anyone who reaches a port can read and change everything. Use it on a
    /// trusted network only
    #[arg(long, global = true, help_heading = "Security")]
    pub insecure: bool,

    /// Directory with the certificates: cert.pem, key.pem and ca.pem, and where there are such
    /// crl.pem (what was revoked) and zones.toml (what each authority may vouch for); domtool cert
    /// makes them. Files that change are read again. Default: /etc/dominator/tls, and for tools
    /// first ~/.config/dominator/tls
    #[arg(long, value_name = "DIR", global = true, help_heading = "Security")]
    pub tls: Option<PathBuf>,
}

/// Why a program does not start.
#[derive(Debug, thiserror::Error)]
pub enum SecurityError {
    #[error("--insecure and --tls {} contradict each other", dir.display())]
    Both { dir: PathBuf },
    #[error(
        "{program} does not run unprotected by itself, and there are no certificates in {}",
        dir.display()
    )]
    Absent { program: &'static str, dir: PathBuf },
    /// The certificates cannot be used.
    #[error("{}", error_chain(.0))]
    Unusable(TlsError),
    /// The certificate of a tool has expired.
    #[error("{0}")]
    Ended(String),
}

impl SecurityError {
    /// Prints the error with hints, and returns the exit code.
    #[must_use]
    pub fn exit(&self) -> ExitCode {
        let hints = self.hints();
        let hints: Vec<&str> = hints.iter().map(String::as_str).collect();
        exit(EXIT_MISUSE, &self.to_string(), &hints)
    }

    /// Returns hints on what to do.
    #[must_use]
    pub fn hints(&self) -> Vec<String> {
        match self {
            Self::Both { .. } => {
                vec!["leave one of them out, in the configuration file, too".to_owned()]
            }
            Self::Absent { program, dir } => {
                let host = match nix::unistd::gethostname() {
                    Ok(name) => name.to_string_lossy().into_owned(),
                    Err(_) => "HOST".to_owned(),
                };
                let dir = dir.display();
                let set = match *program {
                    "imagetool" | "domtool" | "subtool" => "operator",
                    daemon => daemon,
                };
                vec![
                    "make an authority, once for the whole fleet, and a certificate of it:"
                        .to_owned(),
                    "  domtool cert ca ./ca".to_owned(),
                    format!(
                        "  domtool cert issue --ca ./ca --out {dir} --name {host} --host {host} \
                         --set {set}"
                    ),
                    "or start with --insecure, on a trusted network only: anyone who reaches the \
                     port can then read and change everything"
                        .to_owned(),
                ]
            }
            Self::Unusable(_) => {
                vec!["domtool cert show DIR says what is in the files".to_owned()]
            }
            Self::Ended(_) => vec!["renew it with domtool cert issue".to_owned()],
        }
    }
}

impl SecurityArgs {
    /// Opens the certificates of a daemon; logs a warning if connections are not protected.
    ///
    /// # Errors
    ///
    /// [`SecurityError`]; [`SecurityError::exit`] is for it.
    pub fn for_daemon(&self, daemon: &'static str) -> Result<Security, SecurityError> {
        let security = self.open(daemon, &[PathBuf::from(SYSTEM_DIR)])?;
        if security.is_insecure() {
            tracing::warn!(
                "INSECURE: {daemon} runs with --insecure; anyone who reaches its port can read \
                 and change everything"
            );
        }
        Ok(security)
    }

    /// Opens the certificates of a tool. Fails if its certificate has expired.
    ///
    /// # Errors
    ///
    /// [`SecurityError`], also if the certificate has ended.
    pub fn for_tool(&self, tool: &'static str) -> Result<Security, SecurityError> {
        let of_user = std::env::var_os("HOME").map(|home| Path::new(&home).join(USER_DIR));
        let places: Vec<_> = of_user.into_iter().chain([PathBuf::from(SYSTEM_DIR)]).collect();
        let security = self.open(tool, &places)?;
        if let Some(warning) = security.warning() {
            if security.has_expired() {
                return Err(SecurityError::Ended(warning));
            }
            eprintln!("warning: {warning}");
        }
        Ok(security)
    }

    /// Opens the directory of `--tls`, or else the first of `places` that exists.
    fn open(&self, program: &'static str, places: &[PathBuf]) -> Result<Security, SecurityError> {
        if self.insecure {
            return match &self.tls {
                Some(dir) => Err(SecurityError::Both { dir: dir.clone() }),
                None => Ok(Security::Insecure),
            };
        }
        let places = self.tls.as_ref().map_or(places, std::slice::from_ref);
        for dir in places {
            match Security::open(dir) {
                Err(TlsError::Absent { .. }) => {}
                opened => return opened.map_err(SecurityError::Unusable),
            }
        }
        let dir = places.first().cloned().unwrap_or_default();
        Err(SecurityError::Absent { program, dir })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(insecure: bool, tls: Option<&str>) -> Result<Security, SecurityError> {
        let args = SecurityArgs { insecure, tls: tls.map(Into::into) };
        args.open("subd", &["/nonexistent/user".into(), "/nonexistent/system".into()])
    }

    #[test]
    fn nothing_runs_unprotected_by_itself() {
        assert!(matches!(open(true, None), Ok(Security::Insecure)));
        let error = open(true, Some("/t")).unwrap_err();
        assert_eq!(error.to_string(), "--insecure and --tls /t contradict each other");
        let said = |tls| {
            let error = open(false, tls).unwrap_err();
            (error.to_string(), error.hints()[1].clone())
        };
        let want = |dir: &str| {
            let text = "subd does not run unprotected by itself, and there are no certificates in";
            (format!("{text} {dir}"), "  domtool cert ca ./ca".to_owned())
        };
        assert_eq!(said(None), want("/nonexistent/user"));
        assert_eq!(said(Some("/nonexistent/t")), want("/nonexistent/t"));
    }
}
