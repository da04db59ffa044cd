//! subd on real directories and real sockets. Runs as root, like subd itself.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod attack;
mod callers;
mod debian;
mod disk;
mod executor;
mod fetch;
mod fixture;
mod former;
mod fs2objectcache;
mod impact;
mod large_directories;
mod liars;
mod limits;
mod locks;
mod memory;
mod mounts;
mod odd;
mod operator;
mod plans;
mod preview;
mod process;
mod recovery;
mod refusal;
mod rollback;
mod root;
mod scan;
mod signed;
mod stopping;
mod subtool;
mod systemd;
mod sysv;
mod trigger;
mod unusable_filter;
mod update;
mod virtual_machine;
