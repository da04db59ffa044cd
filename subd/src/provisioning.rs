//! Provisioning: has plugins make what an image needs before the image is there.
//!
//! What is to be done next decides [`provisioning::machine`]. This is the shell around it.
//!
//! | module | what |
//! |---|---|
//! | [`provisioner`] | carries out what is decided, and answers the methods |
//! | [`check`] | asks plugins whether resources have drifted |
//! | [`fleet`] | tells of resources of the fleet, and takes permits for them |
//! | [`records`] | what is kept of provisioning |
//! | [`plugins`] | finds plugins, keeps copies of them, and says how they are run |
//! | [`stage`] | becomes the plugin: its user and root |
//! | [`staged`] | what the image of an update asks for |
//! | [`outputs`] | the files with outputs for the programs of the machine |
//! | [`report`] | what is told of resources |
//!
//! # Invariants
//!
//! * A call of a plugin is on the medium before the plugin runs, and so is a token before it is
//!   asked about.
//! * Nothing is provisioned without an order, and nothing is removed before an image is active.
//! * Nothing is called drift while an update or provisioning is going on.
//! * No plugin runs from where others could have written it: a copy of it is run.

pub mod check;
pub mod fleet;
pub mod outputs;
pub mod plugins;
pub mod preview;
pub mod provisioner;
pub mod records;
pub mod report;
pub mod stage;
pub mod staged;

use std::process::ExitCode;

/// The first argument of what becomes a plugin.
pub const STAGE: &str = "provision-stage";

/// The first argument of what starts that with process numbers of its own. The second one is when
/// it kills that, in milliseconds since the boot, or [`NO_END`].
pub const INIT: &str = "provision-init";

/// Says that a plugin is not killed at any certain moment.
pub const NO_END: &str = "-";

/// Runs this process as part of provisioning, if it was started as one.
#[must_use]
pub fn dispatch() -> Option<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).take(7).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match *words {
        [INIT, ends_at_ms, root, user, plugin, verb] => {
            Some(stage::init(ends_at_ms, &[root, user, plugin, verb]))
        }
        [STAGE, root, user, plugin, verb] => {
            Some(stage::become_plugin(root.as_ref(), user, plugin.as_ref(), verb))
        }
        _ => None,
    }
}
