//! The flags that say how connections are protected.

use std::path::PathBuf;

/// How connections are protected.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct SecurityArgs {
    /// Run without TLS: anyone who reaches a port can read and change everything. Required in
    /// this release, which has no TLS yet; use it on a trusted network only.
    #[arg(long, global = true, help_heading = "Security")]
    pub insecure: bool,

    /// Directory with ca.pem, cert.pem and key.pem. Not available in this release.
    #[arg(long, value_name = "DIR", global = true, help_heading = "Security")]
    pub tls: Option<PathBuf>,
}

/// Why a program does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecurityError {
    /// `--tls` was given.
    #[error("TLS is not available in this release, so --tls cannot be used")]
    TlsUnavailable,
    /// `--insecure` is missing.
    #[error(
        "TLS is not available in this release, and {program} does not run unprotected by itself"
    )]
    NotInsecure {
        /// The program.
        program: String,
    },
}

impl SecurityError {
    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        "start with --insecure, on a trusted network only: anyone who reaches the port can then \
         read and change everything"
    }
}

impl SecurityArgs {
    /// Refuses to go on without `--insecure`.
    ///
    /// # Errors
    ///
    /// [`SecurityError`]; the program prints it and exits with
    /// [`EXIT_MISUSE`](super::EXIT_MISUSE).
    pub fn check(&self, program: &str) -> Result<(), SecurityError> {
        if self.tls.is_some() {
            return Err(SecurityError::TlsUnavailable);
        }
        if !self.insecure {
            return Err(SecurityError::NotInsecure { program: program.to_owned() });
        }
        Ok(())
    }

    /// As [`SecurityArgs::check`], for a daemon: warns loudly if it passes.
    ///
    /// # Errors
    ///
    /// [`SecurityError`].
    pub fn check_daemon(&self, daemon: &str) -> Result<(), SecurityError> {
        self.check(daemon)?;
        tracing::warn!(
            "INSECURE: {daemon} runs with --insecure; anyone who reaches its port can read and \
             change everything"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_insecure_without_tls_passes() {
        let args =
            |insecure, tls: Option<&str>| SecurityArgs { insecure, tls: tls.map(Into::into) };
        let missing = SecurityError::NotInsecure { program: "subd".to_owned() };
        #[rustfmt::skip]
        let table = [
            (args(true, None),         Ok(())),
            (args(false, None),        Err(missing)),
            (args(false, Some("/t")),  Err(SecurityError::TlsUnavailable)),
            (args(true, Some("/t")),   Err(SecurityError::TlsUnavailable)),
        ];
        for (args, expected) in table {
            assert_eq!(args.check("subd"), expected, "{args:?}");
        }
    }
}
