//! Common parts of all daemons and tools: security flags, configuration files, logging, the
//! allocator, listening and stopping, and running programs and plugins.

pub mod config;
pub mod mdb_file;
pub mod memory;
pub mod plugins;
pub mod program;
mod run;
mod security;

pub use config::ConfigError;
pub use run::{
    ListenError, LogArgs, LogFormat, exit, exit_on_error, ignore_hangup, listen, listen_text,
    print_error, raise_file_limit, set_log_filter, start_logging, stop_on_signals,
};
pub use security::{SecurityArgs, SecurityError};

/// The allocator of every daemon: each `main.rs` makes it the global one. It gives freed memory
/// back to the kernel by itself, with the settings in `.cargo/config.toml`
/// (docs/decisions/0012-allocator.md).
pub use tikv_jemallocator::Jemalloc;

/// The port of subd.
pub const SUBD_PORT: u16 = 6969;

/// The port of the dominator.
pub const DOMINATOR_PORT: u16 = 6970;

/// The port of the imageserver.
pub const IMAGESERVER_PORT: u16 = 6971;

/// The port of filegen-server.
pub const FILEGEN_PORT: u16 = 6972;

/// The port of mdbd.
pub const MDBD_PORT: u16 = 6973;

/// The exit code of success.
pub const EXIT_DONE: u8 = 0;

/// The exit code of a failure.
pub const EXIT_FAILED: u8 = 1;

/// The exit code of wrong flags or arguments.
pub const EXIT_MISUSE: u8 = 2;

/// The exit code of a partial success.
pub const EXIT_PARTLY: u8 = 3;
