//! `domtool cert signing-key`: makes the key with which a filegen-server signs contents.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use certs::signing_key::SigningKey;
use clap::Args;
use serde::Serialize;
use system::random::random_bytes;
use tool::{Format, Output};

use super::CertError;
use crate::silent;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// File for the private key; the public key gets the same name with .pub at its end. Neither
    /// may exist
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What the public key is called
    #[arg(long, default_value = "filegen-server")]
    comment: String,
}

#[derive(Debug, Serialize)]
struct Made<'a> {
    private_file: &'a Path,
    public_file: &'a Path,
    public_key: &'a str,
    fingerprint: String,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let key = SigningKey::from_seed(&random_bytes(), &arguments.comment)?;
    let mut public = arguments.file.clone().into_os_string();
    public.push(".pub");
    let (private_file, public_file) = (arguments.file.as_path(), PathBuf::from(public));
    let line = key.public_line()?;
    write_new(&public_file, 0o644, &format!("{line}\n"))?;
    if let Err(error) = write_new(private_file, 0o600, &key.private_text()?) {
        // The public key alone is of no use.
        let _ = std::fs::remove_file(&public_file);
        return Err(error);
    }
    let fingerprint = key.fingerprint();
    let made = Made { private_file, public_file: &public_file, public_key: &line, fingerprint };
    eprintln!(
        "Made the key {}: {} is for filegen-server --signing-key, {} for imagetool add \
         --computed-signer.",
        made.fingerprint,
        private_file.display(),
        public_file.display()
    );
    Ok(silent(format, &made))
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), CertError> {
    let failed = |source: io::Error| CertError::Write { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(|error| {
        let _ = std::fs::remove_file(path);
        failed(error)
    })
}
