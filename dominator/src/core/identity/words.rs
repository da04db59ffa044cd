//! Names of machines, and why one is doubted, in words.
// tidy: core

use core::net::IpAddr;

use super::Sighting;

/// The part of a name before its first dot, in lower case; all of an address.
pub(super) fn first_label(name: &str) -> String {
    let label = if is_address(name) { name } else { name.split('.').next().unwrap_or(name) };
    label.to_lowercase()
}

fn is_address(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok()
}

/// True if a machine may go by this name; those that every machine has by itself are no names.
pub(super) fn is_name(hostname: &str) -> bool {
    !matches!(first_label(hostname).as_str(), "" | "localhost" | "(none)")
}

/// True if a machine that reports `hostname` may be the one called `name`: both are the same, or
/// one of them is short for the other.
pub(super) fn is_called(name: &str, hostname: &str) -> bool {
    let is_short = |word: &str| !word.contains('.') && !is_address(word);
    let is_like =
        (is_short(name) || is_short(hostname)) && !is_address(name) && !is_address(hostname);
    is_name(hostname)
        && (name.eq_ignore_ascii_case(hostname)
            || is_like && first_label(name) == first_label(hostname))
}

/// Who answers.
fn found(sighting: &Sighting) -> String {
    let Sighting { hostname, machine_id, .. } = sighting;
    let hostname = if hostname.is_empty() { "a machine without a name" } else { hostname };
    match machine_id.as_str() {
        "" => format!("{hostname} answers, which has no machine id"),
        id => format!("{hostname} answers, with machine id {id}"),
    }
}

fn hint(name: &str) -> String {
    format!(
        "correct its address in the machine database, or if it is meant: domtool trust {name} \
         --why TEXT"
    )
}

pub(super) fn subd_of(sighting: &Sighting, other: &str) -> String {
    format!(
        "{}: the same subd answers for {other}, whose name fits better; correct the address in \
         the machine database",
        found(sighting)
    )
}

pub(super) fn same_subd(sighting: &Sighting, other: &str) -> String {
    format!(
        "{}: the same subd answers for {other}, and neither name fits better; correct the \
         addresses in the machine database, or remove one of the records",
        found(sighting)
    )
}

pub(super) fn other_id(name: &str, sighting: &Sighting, expected: &str) -> String {
    format!(
        "{}: when {name} was last synced it had {expected}, so this is another machine, or it was \
         installed anew; {}",
        found(sighting),
        hint(name)
    )
}

pub(super) fn other_name(name: &str, sighting: &Sighting, other: &str) -> String {
    format!(
        "{}: by its name this is {other}, which has a record of its own, and not {name}; {}",
        found(sighting),
        hint(name)
    )
}
