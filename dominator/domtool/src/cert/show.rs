//! `domtool cert show`: describes a certificate and its faults.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use api::access::IdentityKind;
use api::certificate::Certificate;
use certs::pem::{certificates_of, is_signed_by, key_belongs, revocation_lists_of};
use certs::sets::{allowed, allowed_to_all};
use clap::Args;
use daemon::EXIT_DONE;
use model::display::{counted, safe_lines};
use serde::Serialize;
use system::clock::wall;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::faults::{Chain, Facts, Key, Link, faults};
use super::{CertError, time_and_distance};
use crate::{columns, text_of};

/// Longest chain of authorities that is followed.
const LINKS_MAX: usize = 8;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// File of certificates, or directory with cert.pem or of an authority
    #[arg(value_name = "PATH")]
    path: PathBuf,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    user: Option<String>,
    kind: Option<&'static str>,
    is_authority: bool,
    powers: Vec<String>,
    methods: Vec<&'static str>,
    groups: Vec<String>,
    hosts: Vec<String>,
    not_before: i64,
    not_after: i64,
    days_left: i64,
    issuer: String,
    chain: Vec<String>,
    serial: String,
    fingerprint: String,
    key: String,
    faults: Vec<String>,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> Result<Output, CertError> {
    let facts = read_facts(&arguments.path)?;
    let now = wall().seconds;
    let faults = faults(&facts, now);
    let code = if faults.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = match format {
        Format::Table => safe_lines(&table(&facts, &faults, now)),
        Format::Json => tool::json(&shown(facts, faults, now)),
    };
    Ok(Output { text, code })
}

/// Reads a certificate and the files beside it.
fn read_facts(path: &Path) -> Result<Facts, CertError> {
    if !fs_err::metadata(path)?.is_dir() {
        return read_files(path, None, false);
    }
    let existing = |name: &str| Some(path.join(name)).filter(|path| path.exists());
    match (existing("cert.pem"), existing("ca.key"), existing("chain.pem"), existing("ca.pem")) {
        (Some(certificate), ..) => read_files(&certificate, Some(path), false),
        (None, Some(_), Some(chain), _) => read_files(&chain, Some(path), true),
        (None, _, _, Some(root)) => read_files(&root, Some(path), true),
        (None, ..) => Err(CertError::NothingToShow { path: path.display().to_string() }),
    }
}

fn read_files(
    file: &Path,
    directory: Option<&Path>,
    as_authority: bool,
) -> Result<Facts, CertError> {
    let all = certificates_of(file)?;
    let read = |der: &[u8]| {
        Certificate::read(der)
            .map_err(|source| CertError::Certificate { path: file.display().to_string(), source })
    };
    let der = &all[0];
    let certificate = read(der)?;
    let roots = match directory.map(|directory| directory.join("ca.pem")) {
        Some(path) if path.exists() => Some(certificates_of(&path)?),
        _ => None,
    };
    let key = match directory {
        None => Key::NotChecked,
        Some(directory) => {
            read_key(&directory.join(if as_authority { "ca.key" } else { "key.pem" }), der)
        }
    };
    let chain = chain(der, &all[1..], roots.as_deref());
    let mut certificate = certificate;
    if chain.links.iter().any(|link| link.is_for_machines) && !certificate.is_authority {
        certificate.identity = certificate.identity.as_machine();
    }
    // The list in the directory of an authority is about the certificates that it has issued.
    let lists = directory.filter(|_| !as_authority).map(|directory| directory.join("crl.pem"));
    let lists = match lists {
        Some(path) if path.exists() => revocation_lists_of(&path)?,
        _ => Vec::new(),
    };
    Ok(Facts {
        key,
        chain,
        is_revoked: lists.iter().any(|list| list.lists(der)),
        list_until: lists.iter().filter_map(|list| list.next_update).min(),
        as_authority: as_authority || (directory.is_none() && certificate.is_authority),
        certificate,
    })
}

fn read_key(path: &Path, der: &[u8]) -> Key {
    let mode = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Key::Missing,
        Err(error) => return Key::Unreadable { why: error.to_string() },
        Ok(metadata) => metadata.permissions().mode(),
    };
    match key_belongs(path, der) {
        Ok(true) => Key::Belongs { mode },
        Ok(false) => Key::Other { mode },
        Err(error) => Key::Unreadable { why: error.to_string() },
    }
}

/// Follows the issuers of `der` through `others` up to one of `roots`.
fn chain(der: &[u8], others: &[Vec<u8>], roots: Option<&[Vec<u8>]>) -> Chain {
    let mut links = Vec::new();
    let mut last = der.to_vec();
    let is_root = |der: &Vec<u8>| roots.is_some_and(|roots| roots.contains(der));
    while !is_root(&last) && links.len() < LINKS_MAX {
        let above = roots.unwrap_or_default().iter().chain(others);
        let Some(next) = above.clone().find(|one| **one != last && is_signed_by(&last, one)) else {
            break;
        };
        let Ok(certificate) = Certificate::read(next) else { break };
        links.push(Link {
            is_for_machines: certificate.is_for_machines(),
            name: certificate.common_name,
            not_after: certificate.not_after,
        });
        last.clone_from(next);
    }
    Chain { links, is_trusted: roots.map(|_| is_root(&last)) }
}

fn table(facts: &Facts, faults: &[String], now: i64) -> String {
    let certificate = &facts.certificate;
    let identity = &certificate.identity;
    let mut table = columns(&[]);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    let label = if certificate.is_authority { "authority" } else { "holder" };
    let user =
        identity.user.clone().unwrap_or_else(|| "none: the certificate has no name".to_owned());
    let holder = if certificate.is_authority { certificate.common_name.clone() } else { user };
    row(label, holder);
    if certificate.is_for_machines() {
        row("certifies", "machines only".to_owned());
    }
    if !certificate.is_authority {
        row("kind", kind_text(identity.kind).to_owned());
        let powers: Vec<&str> = identity.powers.patterns().collect();
        let any = counted(allowed_to_all().len() as u64, "method");
        let mut lines = by_service(&allowed(powers.iter().copied()));
        lines.push(match lines.len() {
            0 => format!("only the {any} that any certificate may"),
            _ => format!("and the {any} that any certificate may"),
        });
        row("may call", lines.join("\n"));
        if !powers.is_empty() {
            row("by", powers.join(", "));
        }
        if !identity.groups.is_empty() {
            row("groups", identity.groups.iter().cloned().collect::<Vec<_>>().join(", "));
        }
        let hosts = match certificate.hosts.as_slice() {
            [] => "none: for a person or a program, not for a daemon".to_owned(),
            hosts => hosts.join(", "),
        };
        row("hosts", hosts);
    }
    row("valid until", time_and_distance(now, certificate.not_after));
    let links: Vec<&str> = facts.chain.links.iter().map(|link| link.name.as_str()).collect();
    row(
        "issued by",
        if links.is_empty() { certificate.issuer.clone() } else { links.join(", by ") },
    );
    if facts.chain.links.iter().any(|link| link.is_for_machines) {
        row("", "an authority that certifies machines only, whatever the certificate says".into());
    }
    row("serial", certificate.serial.clone());
    row("fingerprint", certificate.fingerprint.clone());
    let mut text = text_of(&table);
    for fault in faults {
        text.push_str(&format!("WRONG: {fault}\n"));
    }
    text
}

fn kind_text(kind: IdentityKind) -> &'static str {
    match kind {
        IdentityKind::Unstated => {
            "not stated: an owner in this release only; issue it again with --kind"
        }
        IdentityKind::Unknown => "not known to this release: no owner",
        kind => kind.name().unwrap_or_default(),
    }
}

/// Lists `methods` in a line for each service.
fn by_service(methods: &[&str]) -> Vec<String> {
    let mut services: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (service, name) in methods.iter().filter_map(|method| method.split_once('.')) {
        services.entry(service).or_default().push(name);
    }
    let all = |service: &str| allowed([format!("{service}.*")]).len();
    let line = |(service, names): (&str, Vec<&str>)| match names.len() {
        count if count == all(service) => format!("{service}: everything"),
        _ => format!("{service}: {}", names.join(", ")),
    };
    services.into_iter().map(line).collect()
}

fn shown(facts: Facts, faults: Vec<String>, now: i64) -> Shown {
    let certificate = facts.certificate;
    let powers: Vec<String> = certificate.identity.powers.patterns().map(str::to_owned).collect();
    Shown {
        name: certificate.common_name,
        kind: certificate.identity.kind.name(),
        user: certificate.identity.user,
        is_authority: certificate.is_authority,
        methods: allowed(powers.iter().cloned()),
        powers,
        groups: certificate.identity.groups.into_iter().collect(),
        hosts: certificate.hosts,
        not_before: certificate.not_before,
        not_after: certificate.not_after,
        days_left: certificate.not_after.saturating_sub(now) / 86_400,
        issuer: certificate.issuer,
        chain: facts.chain.links.into_iter().map(|link| link.name).collect(),
        serial: certificate.serial,
        fingerprint: certificate.fingerprint,
        key: certificate.key,
        faults,
    }
}
