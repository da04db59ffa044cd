//! What all daemons and tools do alike: security flags, configuration files, logging, listening and
//! stopping.

pub mod config;
pub mod mdb_file;
pub mod program;
mod run;
mod security;

pub use config::ConfigError;
pub use run::stop_on_signals;
pub use run::{
    ListenError, LogArgs, LogFormat, exit, exit_on_error, listen, listen_text, raise_file_limit,
    set_log_filter, start_logging,
};
pub use security::{SecurityArgs, SecurityError};

/// The port of subd.
pub const SUBD_PORT: u16 = 6969;

/// The port of the dominator.
pub const DOMINATOR_PORT: u16 = 6970;

/// The port of the imageserver.
pub const IMAGESERVER_PORT: u16 = 6971;

/// The port of mdbd.
pub const MDBD_PORT: u16 = 6973;

/// The exit code when all was done.
pub const EXIT_DONE: u8 = 0;

/// The exit code when what was asked for failed.
pub const EXIT_FAILED: u8 = 1;

/// The exit code when flags or arguments are wrong.
pub const EXIT_MISUSE: u8 = 2;

/// The exit code when a part was done.
pub const EXIT_PARTLY: u8 = 3;
