//! Shell completions and manual pages, generated from the flags of a program.
//!
//! All tools have the same two commands for that; they need no server. Daemons have no such
//! commands; [`write_pages`] writes their pages.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::aot::{self, generate};

use super::Output;
use daemon::{EXIT_FAILED, exit};

/// Shells with completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shell {
    /// bash, with the package bash-completion
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
}

/// Commands that all tools have.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Documents {
    /// Print the script for a shell that completes commands, flags and values
    #[command(after_long_help = "Examples, with the name of this program for TOOL:\n  \
        TOOL completions bash > ~/.local/share/bash-completion/completions/TOOL\n  \
        TOOL completions zsh > /usr/local/share/zsh/site-functions/_TOOL\n  \
        TOOL completions fish > ~/.config/fish/completions/TOOL.fish")]
    Completions {
        /// Shell to complete in
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write the manual pages of this program and its commands into a directory
    #[command(after_long_help = "Example: TOOL man /usr/local/share/man/man1")]
    Man {
        /// Directory; it is created if it does not exist
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Runs `documents` for the program whose flags are `T`.
#[must_use]
pub fn run<T: CommandFactory>(documents: &Documents) -> ExitCode {
    match documents {
        Documents::Completions { shell } => Output::from(completions::<T>(*shell)).print(),
        Documents::Man { directory } => match write_pages(T::command(), directory) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let error = format!("cannot write to {}: {error}", directory.display());
                exit(EXIT_FAILED, &error, &[])
            }
        },
    }
}

/// Returns the completion script of the program whose flags are `T`.
#[must_use]
pub fn completions<T: CommandFactory>(shell: Shell) -> String {
    let mut command = T::command();
    let name = command.get_name().to_owned();
    let dialect = match shell {
        Shell::Bash => aot::Shell::Bash,
        Shell::Zsh => aot::Shell::Zsh,
        Shell::Fish => aot::Shell::Fish,
    };
    let mut script = Vec::new();
    generate(dialect, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes the manual pages of a program into `directory`: `NAME.1`, and `NAME-COMMAND.1` for each
/// of its commands.
///
/// # Errors
///
/// If a file cannot be written.
pub fn write_pages(command: clap::Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(command, directory)
}
