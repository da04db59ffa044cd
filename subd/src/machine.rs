//! What subd does to its machine, or asks of it, besides the tree; and the identity of the machine.
//!
//! | module | what |
//! |---|---|
//! | [`services`] | stops, starts and reloads services, reboots, reports to systemd |
//! | [`command`] | runs a program with a time limit |
//! | [`command_runner`] | runs operators' commands in a cgroup of their own |
//! | [`health`] | runs the health checks of images |
//! | [`disruption`] | asks whether the machine may be disturbed now |
//! | [`probe`] | checks that the root can be written |

use std::io::Read;

use api::subd::SubIdentity;
use model::path::TreePath;

use crate::root::{Root, RootError};

pub mod command;
pub mod command_runner;
pub mod disruption;
pub mod health;
pub mod probe;
pub mod services;

/// The kernel's file with the boot id.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The longest machine id that is read, in bytes.
const MACHINE_ID_BYTES_MAX: u64 = 64;

/// Reads the identity of the machine.
#[derive(Clone, Debug)]
pub struct IdentitySource {
    hostname: Option<String>,
    boot_id: String,
}

impl IdentitySource {
    /// Reads the boot id. `hostname` is reported instead of the system's, if given.
    pub fn new(hostname: Option<String>) -> Self {
        let boot_id = fs_err::read_to_string(BOOT_ID).unwrap_or_else(|error| {
            tracing::warn!(%error, "the boot id is not known");
            String::new()
        });
        Self { hostname, boot_id: boot_id.trim().to_owned() }
    }

    /// Returns the boot id of the kernel; empty if it is not known.
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Reads the host name that is reported; empty if it is not known.
    pub fn hostname(&self) -> String {
        let system = || match nix::unistd::gethostname() {
            Ok(name) => name.to_string_lossy().into_owned(),
            Err(error) => {
                tracing::warn!(%error, "the host name is not known");
                String::new()
            }
        };
        self.hostname.clone().unwrap_or_else(system)
    }

    /// Reads the identity as it is now.
    pub fn read(&self, root: &Root) -> SubIdentity {
        let machine_id = machine_id(root).unwrap_or_else(|error| {
            if !error.is_absent() {
                tracing::debug!("{}", model::display::error_chain(&error));
            }
            String::new()
        });
        SubIdentity {
            hostname: self.hostname(),
            machine_id,
            boot_id: self.boot_id.clone(),
            subd_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

fn machine_id(root: &Root) -> Result<String, RootError> {
    let path = TreePath::new("/etc/machine-id").expect("the constant is a path");
    let (parent, name) = root.parent(&path)?;
    let mut text = Vec::new();
    match parent.open_file(name)?.take(MACHINE_ID_BYTES_MAX).read_to_end(&mut text) {
        Ok(_) => Ok(String::from_utf8_lossy(&text).trim().to_owned()),
        Err(error) => {
            tracing::debug!(%error, "cannot read the machine id");
            Ok(String::new())
        }
    }
}
