//! Tests of imagetool: archives and directories as they are read, trees as they are made, the
//! command line against a small server in memory, and the documentation's examples.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod archives;
mod command;
mod computed;
mod directories;
mod format;
mod hostile;
mod image_checks;
mod inspection;
mod layouts;
mod oci;
mod overlay;
mod packages;
mod rule_files;
mod server;
mod tar_out;
mod tars;
mod tools;
mod trees;
