//! All programs of the project in one binary, each under its own name.
//!
//! `cargo run -p localfleet` builds only this crate's binary, so it contains all programs: started
//! under the name `subd` it runs the same function as subd's own binary. [`install`] fills a
//! directory with symlinks to this binary, from which a fleet starts its programs.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::CommandFactory as _;

/// Stands in for service(8): started with `FILE SERVICE VERB` it appends `SERVICE VERB` to the
/// file as a line.
pub const RECORD_SERVICE: &str = "record-service";

/// The name of the simulator ([`crate::simulator`]).
pub const FLEET_SIMULATOR: &str = "fleet-simulator";

/// The main function of a program.
type Main = fn() -> ExitCode;

/// The programs, by name.
const PROGRAMS: [(&str, Main); 12] = [
    ("subd", subd::daemon::command_line::main),
    ("subtool", subtool::main),
    ("fs2objectcache", fs2objectcache::main),
    ("imageserver", imageserver::daemon::command::main),
    ("imagetool", imagetool::command::main),
    ("dominator", dominator::daemon::command::main),
    ("domtool", domtool::main),
    ("mdbd", mdbd::main),
    ("filegen-server", filegen::main),
    ("filegen-client", filegen_client::main),
    (RECORD_SERVICE, record_service),
    (FLEET_SIMULATOR, crate::simulator::main),
];

/// Runs the program under whose name this process was started, if it is in the list.
pub fn dispatch() -> Option<ExitCode> {
    let started_as = std::env::args_os().next()?;
    let name = Path::new(&started_as).file_name()?.to_str()?;
    let (_, run) = PROGRAMS.iter().find(|(program, _)| *program == name)?;
    Some(run())
}

/// Makes `directory`, with a symlink to `binary` for each program.
///
/// # Errors
///
/// If the directory or a link cannot be made.
pub fn install(binary: &Path, directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    for (name, _) in PROGRAMS {
        symlink(binary, directory.join(name)).context("cannot link a program")?;
    }
    Ok(())
}

/// Returns the command line definitions of all programs that operators use.
#[must_use]
pub fn command_lines() -> [clap::Command; 10] {
    [
        subd::daemon::command_line::Options::command(),
        subtool::Arguments::command(),
        fs2objectcache::Arguments::command(),
        imageserver::daemon::command::Flags::command(),
        imagetool::command::Arguments::command(),
        dominator::daemon::Arguments::command(),
        domtool::Arguments::command(),
        mdbd::Arguments::command(),
        filegen::Arguments::command(),
        filegen_client::Arguments::command(),
    ]
}

/// Writes the manual pages of all programs that operators use into `directory`.
///
/// # Errors
///
/// If a page cannot be written.
pub fn write_pages(directory: &Path) -> anyhow::Result<()> {
    for program in command_lines() {
        let name = program.get_name().to_owned();
        tool::documents::write_pages(program, directory)
            .with_context(|| format!("cannot write the pages of {name}"))?;
    }
    Ok(())
}

fn record_service() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let [_, file, words @ ..] = arguments.as_slice() else { return ExitCode::from(2) };
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let line = format!("{}\n", words.join(" "));
    let write = || -> std::io::Result<()> {
        let mut options = std::fs::OpenOptions::new();
        options.create(true).append(true).open(file)?.write_all(line.as_bytes())
    };
    match write() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: cannot append to {}: {error}", file.to_string_lossy());
            ExitCode::FAILURE
        }
    }
}
