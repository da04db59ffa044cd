//! Tests of calls over real sockets, and of the golden bytes of everything that travels.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod audit;
mod call_memory;
mod golden;
mod hostile;
mod methods;
mod openapi;
mod pages;
mod protocol;
mod samples;
mod tls;
mod trees;
mod wire;
