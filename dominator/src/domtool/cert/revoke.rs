//! `domtool cert revoke`: writes the list of certificates that count no more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use common::certificate::authority::now;
use common::certificate::pem::{certificates_of, is_signed_by};
use common::certificate::record::{Reason, Record};
use common::certificate::{Certificate, Register};
use common::tool::{Format, Output, json};
use common::words::counted;

use super::CertError;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the authority that issued them
    #[arg(long, value_name = "DIR")]
    ca: PathBuf,
    /// A certificate's serial number, the name of its holder (then all of the holder's), or its
    /// file
    #[arg(value_name = "CERTIFICATE")]
    certificates: Vec<String>,
    /// Why: it stands in the list
    #[arg(long, value_enum, default_value_t)]
    reason: Reason,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let register = Register::open(&arguments.ca)?;
    let held = register.lock()?;
    let issued = held.issued()?;
    let mut found = BTreeSet::new();
    for target in &arguments.certificates {
        found.extend(meant(&register, &issued, target)?);
    }
    let found: Vec<(String, String)> = found.into_iter().collect();
    let revoked = held.revoke(&found, arguments.reason)?;
    drop(held);
    for one in &revoked.new {
        eprintln!("Revoked the certificate {} of {}.", one.serial, one.name);
    }
    let already = found.len() - revoked.new.len();
    if already > 0 {
        let words = counted(already as u64, "certificate");
        eprintln!("{words} had been revoked before.");
    }
    eprintln!(
        "{} lists {}. Copy it into the TLS directory of each daemon.",
        revoked.path.display(),
        counted(revoked.count as u64, "certificate")
    );
    Ok(match format {
        Format::Table => String::new(),
        Format::Json => json(&revoked.new),
    }
    .into())
}

/// The serial numbers and holders of what an operator means.
fn meant(
    register: &Register,
    issued: &[Record],
    target: &str,
) -> Result<Vec<(String, String)>, CertError> {
    let path = Path::new(target);
    if path.is_file() {
        let all = certificates_of(path)?;
        let foreign = || CertError::Foreign { path: target.to_owned() };
        if !is_signed_by(&all[0], register.authority().der()) {
            return Err(foreign());
        }
        let read = Certificate::read(&all[0]);
        let read = read.map_err(|source| CertError::Certificate { path: target.into(), source })?;
        return Ok(vec![(read.serial, read.common_name)]);
    }
    let now = now();
    // What has ended counts no more anyway, unless it is named by its number.
    let is_meant = |record: &&Record| {
        record.serial == target.to_ascii_lowercase()
            || (record.name == target && record.not_after >= now)
    };
    let found: Vec<_> = issued
        .iter()
        .filter(is_meant)
        .map(|record| (record.serial.clone(), record.name.clone()))
        .collect();
    if found.is_empty() { Err(CertError::Unknown { target: target.to_owned() }) } else { Ok(found) }
}
