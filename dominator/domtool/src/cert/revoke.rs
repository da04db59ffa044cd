//! `domtool cert revoke`: writes the list of certificates that count no more.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use api::certificate::Certificate;
use certs::authority::now;
use certs::pem::{certificates_of, is_signed_by};
use certs::record::{Meant, Reason, Record};
use certs::register::Register;
use clap::Args;
use model::words::counted;
use tool::{Format, Output, json};

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
    /// Why: it stands in the list. With key-compromise or ca-compromise all certificates that have,
    /// or may have, the same key are revoked too
    #[arg(long, value_enum, default_value_t)]
    reason: Reason,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let register = Register::open(&arguments.ca)?;
    let held = register.lock()?;
    let issued = held.issued()?;
    let mut named = BTreeSet::new();
    for target in &arguments.certificates {
        named.extend(meant(&register, &issued, target)?);
    }
    let same_key = same_key(&issued, &named, now());
    let mut found: Vec<Meant> = named.into_iter().collect();
    let by_name = found.len();
    if arguments.reason.is_key() {
        found.extend(same_key.iter().cloned());
    }
    let revoked = held.revoke(&found, arguments.reason)?;
    let all = held.revoked()?;
    drop(held);
    for one in &revoked.new {
        let is_named = found[..by_name].iter().any(|meant| meant.serial == one.serial);
        let why = if is_named { "" } else { " too: it has, or may have, the same key" };
        eprintln!("Revoked the certificate {} of {}{why}.", one.serial, one.name);
    }
    let already = found.len() - revoked.new.len();
    if already > 0 {
        let words = counted(already as u64, "certificate");
        eprintln!("{words} had been revoked before.");
    }
    let left = same_key.iter().filter(|meant| all.iter().all(|one| one.serial != meant.serial));
    let left = left.count();
    if left > 0 {
        eprintln!(
            "Not revoked: {}, with a key that is, or may be, the same.\nIf others may have the \
             key, revoke again with --reason key-compromise.",
            counted(left as u64, "certificate")
        );
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

/// What still lasts and has, or may have, the key of one of `named`, and is none of them.
fn same_key(issued: &[Record], named: &BTreeSet<Meant>, now: i64) -> Vec<Meant> {
    let is_other = |record: &&Record| {
        record.not_after >= now
            && named.iter().all(|one| one.serial != record.serial)
            && named.iter().any(|one| one.may_share_key(record))
    };
    issued.iter().filter(is_other).map(Meant::on).collect()
}

/// The certificates that an operator means.
fn meant(register: &Register, issued: &[Record], target: &str) -> Result<Vec<Meant>, CertError> {
    let path = Path::new(target);
    if path.is_file() {
        let all = certificates_of(path)?;
        let foreign = || CertError::Foreign { path: target.to_owned() };
        if !is_signed_by(&all[0], register.authority().der()) {
            return Err(foreign());
        }
        let read = Certificate::read(&all[0]);
        let read = read.map_err(|source| CertError::Certificate { path: target.into(), source })?;
        return Ok(vec![Meant::of(&read)]);
    }
    let now = now();
    // What has ended counts no more anyway, unless it is named by its number.
    let is_meant = |record: &&Record| {
        record.serial == target.to_ascii_lowercase()
            || (record.name == target && record.not_after >= now)
    };
    let found: Vec<Meant> = issued.iter().filter(is_meant).map(Meant::on).collect();
    if found.is_empty() { Err(CertError::Unknown { target: target.to_owned() }) } else { Ok(found) }
}
