//! subd on real directories and real sockets. Runs as root, like subd itself.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod attack;
mod fixture;
mod process;
mod refusal;
mod rollback;
mod root;
mod scan;
mod trigger;
mod update;
