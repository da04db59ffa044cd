//! `subtool` as a process, without a machine.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod command_line;
mod killed_provisioning;
mod misbehaving_plugins;
mod provisioning;
mod site;
