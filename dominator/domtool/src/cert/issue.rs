//! `domtool cert issue`: makes a certificate, or those of a fleet.

use std::path::{Path, PathBuf};
use std::time::Duration;

use api::certificate::Certificate;
use certs::authority::now;
use certs::pem::{certificates_of, is_signed_by, key_belongs, read_limited};
use certs::record::Record;
use certs::register::Held;
use certs::sets::{Set, allowed, pattern};
use certs::{
    authority::{Issued, Request},
    place::{Replace, may_write},
    register::Register,
};
use clap::Args;
use model::words::counted;
use tool::{Format, Output, json};

use super::need::{Found, Need, Wanted};
use super::{CertError, fleet, lifetime, until};

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of the authority, as domtool cert ca makes it
    #[arg(long, value_name = "DIR")]
    pub(super) ca: PathBuf,
    /// Directory to write ca.pem, cert.pem and key.pem into; with --mdb, one below it for each
    /// machine
    #[arg(long, value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Who the holder is: a machine, a daemon or a person
    #[arg(long, required_unless_present = "mdb", conflicts_with = "mdb")]
    name: Option<String>,
    /// Host name or address by which others reach the holder, if it is a daemon
    #[arg(long = "host", value_name = "HOST", conflicts_with = "mdb")]
    hosts: Vec<String>,
    /// Make one for each machine of this machine database, for its host name and address; they
    /// have the powers of the set subd, unless others are given
    #[arg(long, value_name = "FILE")]
    mdb: Option<PathBuf>,
    /// What a daemon or person of this kind needs; may be given several times
    #[arg(long = "set", value_enum, value_name = "SET")]
    sets: Vec<Set>,
    /// What the holder may call: Service.Method, with * for any letters; '*' for everything
    #[arg(long = "method", value_name = "PATTERN", value_parser = pattern)]
    methods: Vec<String>,
    /// A group that the holder is in: groups own images and machines
    #[arg(long = "group", value_name = "GROUP")]
    groups: Vec<String>,
    /// How long it lasts; never longer than the authority
    #[arg(long, value_name = "DURATION", default_value = "365d", value_parser = lifetime)]
    pub(super) lifetime: Duration,
    /// With --mdb: renew what ends in less time; unless given, 30 days, or a third of --lifetime
    /// if that is less
    #[arg(long, value_name = "DURATION", requires = "mdb", value_parser = lifetime)]
    pub(super) renew_before: Option<Duration>,
    /// Make another key, also where there is one
    #[arg(long)]
    pub(super) new_key: bool,
    /// Overwrite what belongs to others, and what is there of other authorities
    #[arg(long)]
    pub(super) force: bool,
}

impl Arguments {
    /// The certificate of `name`, for `hosts`, with all else that was asked for.
    pub(super) fn wanted(&self, name: &str, hosts: Vec<String>) -> Wanted {
        let mut sets = self.sets.clone();
        if self.mdb.is_some() && sets.is_empty() && self.methods.is_empty() {
            sets.push(Set::Subd);
        }
        let mut powers: Vec<String> = sets.into_iter().flat_map(Set::powers).collect();
        powers.extend(self.methods.iter().cloned());
        powers.sort_unstable();
        powers.dedup();
        Wanted { name: name.to_owned(), hosts, powers, groups: self.groups.clone() }
    }

    /// What may be overwritten.
    pub(super) fn replace(&self) -> Replace {
        if self.force { Replace::Any } else { Replace::Own }
    }
}

pub(super) async fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let register = Register::open(&arguments.ca)?;
    if let Some(mdb) = &arguments.mdb {
        return fleet::run(format, arguments, register, mdb).await;
    }
    let name = arguments.name.as_deref().unwrap_or_default();
    let wanted = arguments.wanted(name, arguments.hosts.clone());
    let held = register.lock()?;
    let found = look(&register, &held, &arguments.out);
    // A certificate that is asked for by name is made, also if there is a good one.
    let need = match super::need::need(&wanted, found.as_ref(), now(), i64::MAX, Duration::MAX) {
        Need::Renewal if !arguments.new_key => Need::Renewal,
        _ => Need::New,
    };
    let issued = make(&held, &wanted, need, arguments, &arguments.out)?;
    drop(held);
    tell(&issued, need, &arguments.out);
    Ok(match format {
        Format::Table => String::new(),
        Format::Json => json(&Record::of(&issued.certificate)),
    }
    .into())
}

/// Makes a certificate and puts it into `directory`.
pub(super) fn make(
    held: &Held<'_>,
    wanted: &Wanted,
    need: Need,
    arguments: &Arguments,
    directory: &Path,
) -> Result<Issued, CertError> {
    let request = Request {
        name: wanted.name.clone(),
        hosts: wanted.hosts.clone(),
        powers: Some(wanted.powers.clone()),
        groups: wanted.groups.clone(),
        lifetime: arguments.lifetime,
        start: None,
    };
    let replace = arguments.replace();
    // What may not be overwritten is found before a certificate is on record that nobody gets.
    let ca_pem = held.ca_pem();
    may_write(directory, &wanted.name, ca_pem, replace)?;
    let key_pem = match need {
        Need::Renewal => Some(read_limited(&directory.join("key.pem"))?),
        Need::New | Need::Nothing => None,
    };
    let issued = held.issue(&request, key_pem.as_deref())?;
    issued.write(directory, ca_pem, replace)?;
    Ok(issued)
}

/// The certificate in `directory`, if there is one that can be read.
pub(super) fn look(register: &Register, held: &Held<'_>, directory: &Path) -> Option<Found> {
    let all = certificates_of(&directory.join("cert.pem")).ok()?;
    let der = all.first()?;
    let certificate = Certificate::read(der).ok()?;
    let is_revoked = held.is_key_revoked(&certificate).ok()?;
    Some(Found {
        key_belongs: key_belongs(&directory.join("key.pem"), der).unwrap_or(false),
        is_ours: is_signed_by(der, register.authority().der()),
        is_revoked,
        certificate,
    })
}

/// Says what was made.
fn tell(issued: &Issued, need: Need, directory: &Path) {
    let certificate = &issued.certificate;
    let done = match need {
        Need::Renewal => "Renewed the certificate of",
        Need::New | Need::Nothing => "Made a key and a certificate for",
    };
    eprintln!(
        "{done} {} in {}, valid until {}.",
        certificate.common_name,
        directory.display(),
        until(now(), certificate.not_after)
    );
    match allowed(certificate.identity.powers.patterns()).len() {
        0 => eprintln!("It gives no powers beyond what any certificate gives."),
        count => eprintln!(
            "It gives the power to call {}: domtool cert show {}",
            counted(count as u64, "method"),
            directory.display()
        ),
    }
    if certificate.hosts.is_empty() {
        eprintln!("It names no host: it is for a person or a program, no daemon can use it.");
    }
}
