//! `domtool cert revoke`: writes the list of revoked certificates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use api::access::IdentityKind;
use api::certificate::Certificate;
use certs::pem::{certificates_of, is_signed_by};
use certs::record::{Reason, Record, RevocationTarget};
use certs::register::Register;
use clap::Args;
use model::display::counted;
use system::clock::wall;
use tool::{Format, Output};

use super::{CertError, Kind};
use crate::silent;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the authority that issued the certificates
    #[arg(long, value_name = "DIR")]
    ca: PathBuf,
    /// Serial number of a certificate, its file, or the name of a holder for all certificates of
    /// the holder
    #[arg(value_name = "CERTIFICATE")]
    certificates: Vec<String>,
    /// With the name of a holder: only certificates that say that it is this
    #[arg(long, value_enum, value_name = "KIND")]
    kind: Option<Kind>,
    /// Reason, which the list contains. key-compromise and ca-compromise revoke all certificates
    /// that have or may have the same key
    #[arg(long, value_enum, default_value_t)]
    reason: Reason,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let register = Register::open(&arguments.ca)?;
    let locked = register.lock()?;
    let issued = locked.issued()?;
    let mut named = BTreeSet::new();
    for target in &arguments.certificates {
        let kind = arguments.kind.and_then(|kind| IdentityKind::from(kind).name());
        named.extend(find_targets(&register, &issued, target, kind)?);
    }
    let same_key = same_key(&issued, &named, wall().seconds);
    let mut found: Vec<RevocationTarget> = named.into_iter().collect();
    let by_name = found.len();
    if arguments.reason.is_key() {
        found.extend(same_key.iter().cloned());
    }
    let revoked = locked.revoke(&found, arguments.reason)?;
    let all = locked.revoked()?;
    drop(locked);
    for one in &revoked.new {
        let is_named = found[..by_name].iter().any(|target| target.serial == one.serial);
        let why = if is_named { "" } else { ": it has or may have the same key" };
        eprintln!("Revoked the certificate {} of {}{why}.", one.serial, one.name);
    }
    let already = found.len() - revoked.new.len();
    if already > 0 {
        eprintln!("Already revoked: {}.", counted(already as u64, "certificate"));
    }
    let left = same_key.iter().filter(|target| all.iter().all(|one| one.serial != target.serial));
    let left = left.count();
    if left > 0 {
        eprintln!(
            "Not revoked: {} that has or may have the same key.\nIf others may have the key, \
             revoke again with --reason key-compromise.",
            counted(left as u64, "certificate")
        );
    }
    eprintln!(
        "{} lists {}. Copy it into the TLS directory of each daemon.",
        revoked.path.display(),
        counted(revoked.count as u64, "certificate")
    );
    Ok(silent(format, &revoked.new))
}

/// Returns the other valid certificates that have or may have the key of one in `named`.
fn same_key(
    issued: &[Record],
    named: &BTreeSet<RevocationTarget>,
    now: i64,
) -> Vec<RevocationTarget> {
    let is_other = |record: &&Record| {
        record.not_after >= now
            && named.iter().all(|one| one.serial != record.serial)
            && named.iter().any(|one| one.may_share_key(record))
    };
    issued.iter().filter(is_other).map(RevocationTarget::from_record).collect()
}

/// Finds the certificates that `target` names: a file, a serial number, or a holder of `kind`.
fn find_targets(
    register: &Register,
    issued: &[Record],
    target: &str,
    kind: Option<&str>,
) -> Result<Vec<RevocationTarget>, CertError> {
    let path = Path::new(target);
    if path.is_file() {
        let all = certificates_of(path)?;
        if !is_signed_by(&all[0], register.authority().der()) {
            return Err(CertError::OtherIssuer { path: target.to_owned() });
        }
        let read = Certificate::read(&all[0]);
        let read = read.map_err(|source| CertError::Certificate { path: target.into(), source })?;
        return Ok(vec![RevocationTarget::from_certificate(&read)]);
    }
    let now = wall().seconds;
    // A name stands only for certificates that are still valid.
    let is_target = |record: &&Record| {
        record.serial == target.to_ascii_lowercase()
            || (record.name == target
                && record.not_after >= now
                && (kind.is_none() || record.kind.as_deref() == kind))
    };
    let found: Vec<RevocationTarget> =
        issued.iter().filter(is_target).map(RevocationTarget::from_record).collect();
    if found.is_empty() { Err(CertError::Unknown { target: target.to_owned() }) } else { Ok(found) }
}
