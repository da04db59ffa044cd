//! The real filegen-server as a process, with real files, programs and web servers.

#![expect(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod certificates;
mod changes;
mod command;
mod kinds;
mod outside;
mod secrets;
mod server;
mod starts;
mod web;
