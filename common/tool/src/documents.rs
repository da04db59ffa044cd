//! Completions for shells and manual pages, made of what a program says of its flags.
//!
//! All tools have the same two commands for that; they need no server. The pages of daemons, which
//! have no commands, are written by [`write_pages`] alone.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::aot::{Shell as Dialect, generate};

use super::Output;
use daemon::{EXIT_FAILED, exit};

/// Shells that completions are made for.
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
    /// Print what a shell needs to complete commands, flags and their values
    #[command(after_long_help = "Examples, each once, with TOOL for this program:\n  \
        TOOL completions bash > ~/.local/share/bash-completion/completions/TOOL\n  \
        TOOL completions zsh > /usr/local/share/zsh/site-functions/_TOOL\n  \
        TOOL completions fish > ~/.config/fish/completions/TOOL.fish")]
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write manual pages of this program and its commands into a directory
    #[command(after_long_help = "Example: TOOL man /usr/local/share/man/man1")]
    Man {
        /// The directory; it is made if it is not there
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Carries `documents` out for the program whose flags are `T`.
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

/// The script that completes the program whose flags are `T`.
#[must_use]
pub fn completions<T: CommandFactory>(shell: Shell) -> String {
    let mut command = T::command();
    let name = command.get_name().to_owned();
    let dialect = match shell {
        Shell::Bash => Dialect::Bash,
        Shell::Zsh => Dialect::Zsh,
        Shell::Fish => Dialect::Fish,
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
/// What the kernel says.
pub fn write_pages(command: clap::Command, directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    clap_mangen::generate_to(command, directory)
}
