//! Tests of the wire over real sockets, of its golden bytes, and of the workspace itself.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod audit;
mod golden;
mod hostile;
mod pages;
mod protocol;
mod samples;
mod tidy;
mod tls;
mod wire;
