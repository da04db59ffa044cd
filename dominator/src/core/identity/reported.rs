//! The identity that a sub reports of its machine, the saved identity of a machine, how host names
//! are compared, and the texts that explain a mismatch.
// tidy: core

use core::net::IpAddr;

use api::subd::SubIdentity;
use model::object::ObjectId;
use model::tree::Time;
use serde::{Deserialize, Serialize};

/// The longest host name, machine id or boot id that is compared, in bytes: a machine may report
/// any text.
const NAME_BYTES_MAX: usize = 256;

/// Where the content of a file of a machine comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOrigin {
    /// The image is not available yet.
    Unknown,
    /// The machine: the image leaves the path to it.
    Machine,
    /// The image: all machines of the image have this content.
    Image(ObjectId),
    /// The image manages the path, and has no content for it.
    NoContent,
}

impl FileOrigin {
    /// True if `text` is the content that the image has for the file.
    pub(super) fn is_content(self, text: &str) -> bool {
        let Self::Image(object) = self else { return false };
        let digest = |text: &str| object.algorithm().digest(text.as_bytes());
        digest(text) == object || digest(&format!("{text}\n")) == object
    }
}

/// The origins of the files that identify a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOrigins {
    /// Of `/etc/machine-id`.
    pub machine_id: FileOrigin,
    /// Of `/etc/hostname`.
    pub hostname: FileOrigin,
}

impl FileOrigins {
    /// While the image is not available.
    pub const UNKNOWN: Self =
        Self { machine_id: FileOrigin::Unknown, hostname: FileOrigin::Unknown };
}

/// The identity that a sub reports of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedIdentity {
    /// Identifies the start of subd.
    pub instance: u64,
    pub hostname: String,
    /// The machine id; empty if the machine reports none.
    pub machine_id: String,
    /// The boot id of the kernel; empty if it is not known.
    pub boot_id: String,
    /// Which of these may come from the image.
    pub origins: FileOrigins,
}

impl ReportedIdentity {
    #[must_use]
    pub fn new(instance: u64, identity: &SubIdentity, origins: FileOrigins) -> Self {
        Self {
            instance,
            hostname: bounded(&identity.hostname).to_owned(),
            machine_id: bounded(&identity.machine_id).to_owned(),
            boot_id: bounded(&identity.boot_id).to_owned(),
            origins,
        }
    }

    /// True if [`ReportedIdentity::new`] with these arguments equals this.
    #[must_use]
    pub fn is_of(&self, instance: u64, identity: &SubIdentity, origins: FileOrigins) -> bool {
        self.instance == instance
            && self.hostname == bounded(&identity.hostname)
            && self.machine_id == bounded(&identity.machine_id)
            && self.boot_id == bounded(&identity.boot_id)
            && self.origins == origins
    }

    /// True if its machine id comes from its image.
    pub(super) fn has_id_of_image(&self) -> bool {
        self.origins.machine_id.is_content(&self.machine_id)
    }

    /// Describes the machine that answers.
    fn describe(&self) -> String {
        let Self { hostname, machine_id, .. } = self;
        let hostname = if hostname.is_empty() { "a machine without a name" } else { hostname };
        match machine_id.as_str() {
            "" => format!("{hostname} answers, which has no machine id"),
            id => format!("{hostname} answers, with machine id {id}"),
        }
    }
}

fn bounded(text: &str) -> &str {
    &text[..text.floor_char_boundary(NAME_BYTES_MAX)]
}

/// An operator's confirmation that a machine is the right one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustRecord {
    /// The host name that the machine had at that time.
    pub hostname: String,
    pub who: String,
    pub why: String,
    pub since: Time,
}

/// The last known identity of a machine, which is saved over restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownIdentity {
    /// The machine id; empty if any is accepted.
    pub machine_id: String,
    /// True if the id does not come from the image: a machine with another id is another machine.
    pub is_own: bool,
    /// What an operator confirmed, if one did.
    pub trust: Option<TrustRecord>,
}

impl KnownIdentity {
    /// True if this is the machine's own id.
    pub(super) fn owns(&self, machine_id: &str) -> bool {
        self.is_own && self.machine_id == machine_id
    }
}

/// Returns the part of a name before its first dot, in lower case; an address as a whole.
pub(super) fn first_label(name: &str) -> String {
    let label = if is_address(name) { name } else { name.split('.').next().unwrap_or(name) };
    label.to_lowercase()
}

fn is_address(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok()
}

/// True if a host name can identify a machine. The names that every machine has by default cannot.
pub(super) fn is_identifying(hostname: &str) -> bool {
    !matches!(first_label(hostname).as_str(), "" | "localhost" | "(none)")
}

/// True if a machine that reports `hostname` may have the record called `name`: both are equal, or
/// one is the first label of the other.
pub(super) fn names_match(name: &str, hostname: &str) -> bool {
    let is_short = |name: &str| !name.contains('.') && !is_address(name);
    let are_similar =
        (is_short(name) || is_short(hostname)) && !is_address(name) && !is_address(hostname);
    is_identifying(hostname)
        && (name.eq_ignore_ascii_case(hostname)
            || are_similar && first_label(name) == first_label(hostname))
}

/// Explains that the subd of another record answers.
pub(super) fn subd_of_other(reported: &ReportedIdentity, other: &str) -> String {
    format!(
        "{}: the same subd answers for {other}, whose name matches better; correct the address in \
         the machine database",
        reported.describe()
    )
}

/// Explains that one subd answers for two records.
pub(super) fn same_subd(reported: &ReportedIdentity, other: &str) -> String {
    format!(
        "{}: the same subd answers for {other}, and neither name matches better; correct the \
         addresses in the machine database, or remove one of the records",
        reported.describe()
    )
}

/// Explains that the machine has another machine id than expected.
pub(super) fn other_id(name: &str, reported: &ReportedIdentity, expected: &str) -> String {
    format!(
        "{}: when {name} was last synced it had {expected}, so this is another machine, or it was \
         installed anew; {}",
        reported.describe(),
        hint(name)
    )
}

/// Explains that the machine has the host name of another record.
pub(super) fn other_name(name: &str, reported: &ReportedIdentity, other: &str) -> String {
    format!(
        "{}: by its name this is {other}, which has a record of its own, and not {name}; {}",
        reported.describe(),
        hint(name)
    )
}

fn hint(name: &str) -> String {
    format!(
        "correct its address in the machine database, or if it is meant: domtool trust {name} \
         --why TEXT"
    )
}
