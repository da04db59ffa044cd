//! `domtool cert issue`: makes a certificate.

use std::path::{Path, PathBuf};
use std::time::Duration;

use api::access::IdentityKind;
use api::certificate::Certificate;
use certs::authority::{Issued, Request};
use certs::files::{Replace, check_overwrite};
use certs::pem::{certificates_of, is_signed_by, key_belongs, read_limited};
use certs::record::Record;
use certs::register::{LockedRegister, Register};
use certs::sets::{Set, allowed, parse_pattern};
use clap::Args;
use model::display::counted;
use model::time_parse::positive_duration;
use system::clock::wall;
use tool::{Format, Output};

use super::renewal::{Found, Step, Wanted, next_step, wanted_kind};
use super::{CertError, Kind, time_and_distance};
use crate::silent;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the authority, made by domtool cert ca
    #[arg(long, value_name = "DIR")]
    pub(super) ca: PathBuf,
    /// Directory for ca.pem, cert.pem and key.pem; with --mdb, it gets a directory for each machine
    #[arg(long, value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Name of the holder: a machine, a daemon or a person
    #[arg(long, required_unless_present = "mdb", conflicts_with = "mdb")]
    name: Option<String>,
    /// Host name or address of the holder, for daemons; may be repeated
    #[arg(long = "host", value_name = "HOST", conflicts_with = "mdb")]
    hosts: Vec<String>,
    /// What the holder is; default: what the holder was if its certificate says so, else service
    /// for the set of a daemon, machine for the set subd, and user
    #[arg(long, value_enum, value_name = "KIND", conflicts_with = "mdb")]
    kind: Option<Kind>,
    /// Make a certificate for each machine of this machine database, with its host name; default
    /// powers: the set subd
    #[arg(long, value_name = "FILE")]
    pub(super) mdb: Option<PathBuf>,
    /// With --mdb: for the address of each machine too, so that it can be dialled by its address
    /// alone, without its name
    #[arg(long, requires = "mdb")]
    pub(super) with_addresses: bool,
    /// Give the powers of a role; may be repeated
    #[arg(long = "set", value_enum, value_name = "SET")]
    sets: Vec<Set>,
    /// Give the power to call methods: Service.Method, with * for any letters; '*' for everything
    #[arg(long = "method", value_name = "PATTERN", value_parser = parse_pattern)]
    methods: Vec<String>,
    /// Group of the holder: groups own images and machines; may be repeated
    #[arg(long = "group", value_name = "GROUP")]
    groups: Vec<String>,
    /// Lifetime; cut at the end of the authority
    #[arg(long, value_name = "DURATION", default_value = "365d", value_parser = positive_duration)]
    pub(super) lifetime: Duration,
    /// With --mdb: renew certificates that expire within this time; default: 30 days, or a third of
    /// --lifetime if that is less
    #[arg(long, value_name = "DURATION", requires = "mdb", value_parser = positive_duration)]
    pub(super) renew_before: Option<Duration>,
    /// Make a new key even if there is one
    #[arg(long)]
    pub(super) new_key: bool,
    /// Overwrite certificates of other holders and files of other authorities
    #[arg(long)]
    pub(super) force: bool,
}

impl Arguments {
    /// Returns the certificate to make for `name` and `hosts`, where `found` is.
    pub(super) fn wanted(&self, name: &str, hosts: Vec<String>, found: Option<&Found>) -> Wanted {
        let mut sets = self.sets.clone();
        if self.mdb.is_some() && sets.is_empty() && self.methods.is_empty() {
            sets.push(Set::Subd);
        }
        let stated = match (self.kind, &self.mdb) {
            (_, Some(_)) => Some(IdentityKind::Machine),
            (kind, None) => kind.map(IdentityKind::from),
        };
        let found = found.map(|found| &found.certificate).filter(|found| found.common_name == name);
        let kind = wanted_kind(stated, found, &sets);
        let mut powers: Vec<String> = sets.into_iter().flat_map(Set::powers).collect();
        powers.extend(self.methods.iter().cloned());
        powers.sort_unstable();
        powers.dedup();
        Wanted { name: name.to_owned(), kind, hosts, powers, groups: self.groups.clone() }
    }

    pub(super) fn replace(&self) -> Replace {
        if self.force { Replace::Any } else { Replace::Own }
    }
}

pub(super) fn run(
    format: Format,
    arguments: &Arguments,
    register: &Register,
) -> Result<Output, CertError> {
    let name = arguments.name.as_deref().unwrap_or_default();
    let locked = register.lock()?;
    let found = find_certificate(register, &locked, &arguments.out);
    let wanted = arguments.wanted(name, arguments.hosts.clone(), found.as_ref());
    // A certificate for one name is always renewed, however long it is valid.
    let now = wall().seconds;
    let step = match next_step(&wanted, found.as_ref(), now, i64::MAX, Duration::MAX) {
        Step::Renew if !arguments.new_key => Step::Renew,
        _ => Step::Create,
    };
    let issued = issue(&locked, &wanted, step, arguments, &arguments.out)?;
    drop(locked);
    print_summary(&issued, step, &arguments.out);
    Ok(silent(format, &Record::new(&issued.certificate)))
}

/// Issues a certificate and writes it into `directory`.
pub(super) fn issue(
    locked: &LockedRegister<'_>,
    wanted: &Wanted,
    step: Step,
    arguments: &Arguments,
    directory: &Path,
) -> Result<Issued, CertError> {
    let request = Request {
        name: wanted.name.clone(),
        kind: wanted.kind,
        hosts: wanted.hosts.clone(),
        powers: Some(wanted.powers.clone()),
        groups: wanted.groups.clone(),
        lifetime: arguments.lifetime,
        start: None,
    };
    let replace = arguments.replace();
    // A refusal must come before a certificate is issued and recorded in vain.
    let ca_pem = locked.ca_pem();
    check_overwrite(directory, &wanted.name, wanted.kind, ca_pem, replace)?;
    let key_pem = match step {
        Step::Renew => Some(read_limited(&directory.join("key.pem"))?),
        Step::Create | Step::Keep => None,
    };
    let issued = locked.issue(&request, key_pem.as_deref())?;
    issued.write(directory, ca_pem, replace)?;
    Ok(issued)
}

/// Reads the certificate in `directory`; `None` if it is absent or unreadable.
pub(super) fn find_certificate(
    register: &Register,
    locked: &LockedRegister<'_>,
    directory: &Path,
) -> Option<Found> {
    let all = certificates_of(&directory.join("cert.pem")).ok()?;
    let der = all.first()?;
    let certificate = Certificate::read(der).ok()?;
    let is_revoked = locked.is_key_revoked(&certificate).ok()?;
    Some(Found {
        key_belongs: key_belongs(&directory.join("key.pem"), der).unwrap_or(false),
        is_same_issuer: is_signed_by(der, register.authority().der()),
        is_revoked,
        certificate,
    })
}

fn print_summary(issued: &Issued, step: Step, directory: &Path) {
    let certificate = &issued.certificate;
    let done = match step {
        Step::Renew => "Renewed the certificate of",
        Step::Create | Step::Keep => "Made a key and a certificate for",
    };
    eprintln!(
        "{done} {} in {}, valid until {}.",
        certificate.identity.kind.in_words(&certificate.common_name),
        directory.display(),
        time_and_distance(wall().seconds, certificate.not_after)
    );
    match allowed(certificate.identity.powers.patterns()).len() {
        0 => eprintln!("It gives only the powers that any certificate gives."),
        count => eprintln!(
            "Its holder may call {}: domtool cert show {}",
            counted(count as u64, "method"),
            directory.display()
        ),
    }
    if certificate.identity.kind == IdentityKind::Unstated {
        eprintln!(
            "It does not say what its holder is, as before: give --kind user, service or machine."
        );
    }
    if certificate.hosts.is_empty() {
        eprintln!("It has no host name: it is for a person or a program, not for a daemon.");
    }
}
