//! `--config FILE`: a TOML file that takes every flag of a program by its long name.
//!
//! The file becomes arguments that stand before those of the command line, so that there is one
//! definition of every flag, and one check of its value. A flag that is on the command line is
//! left out of the file's, so that the command line wins; so does a variable of the environment.
//!
//! Tools share one file, `~/.config/dominator/config.toml` ([`parse_tool`]): each takes the keys
//! that are its own flags, and leaves the others' alone.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

/// The largest configuration file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The configuration file of all tools, below the home directory.
const TOOLS_FILE: &str = ".config/dominator/config.toml";

/// Keys that the file of the tools may hold, whichever tool reads it.
const TOOLS_KEYS: [&str; 7] =
    ["dominator", "filegen-server", "format", "imageserver", "insecure", "subd", "tls"];

/// Why a configuration file is not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("cannot read configuration file `{}`", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` is not TOML", .path.display())]
    Toml { path: PathBuf, source: Box<toml::de::Error> },
    #[error("`{}`: there is no flag --{key}; known: {known}", .path.display())]
    UnknownKey { path: PathBuf, key: String, known: String },
    #[error("`{}`: {key} must be {expected}", .path.display())]
    WrongKind {
        path: PathBuf,
        key: String,
        /// What it must be.
        expected: &'static str,
    },
}

/// Parses the arguments of this process, and the configuration file that they name with
/// `--config FILE`, or else `/etc/<program>/config.toml` if there is one. The program's flags
/// must have a `--config`, for instance by flattening [`ConfigArgs`]. Prints and exits with 2 if
/// anything is wrong, as clap does.
#[must_use]
pub fn parse<T: CommandFactory + FromArgMatches>(program: &str) -> T {
    parse_with_tables(program, &[]).0
}

/// As [`parse`], for a program whose file has tables that are not flags: their keys are `keys`, and
/// their values are returned.
#[must_use]
pub fn parse_with_tables<T: CommandFactory + FromArgMatches>(
    program: &str,
    keys: &[&str],
) -> (T, ExtraTables) {
    or_exit(parse_from(std::env::args_os().collect(), Some(&file_of(program)), keys))
}

/// Parses again, for a daemon whose configuration file was changed while it runs.
///
/// # Errors
///
/// [`ParseError`]; the former configuration should stay in force.
pub fn parse_again<T: CommandFactory + FromArgMatches>(program: &str) -> Result<T, ParseError> {
    let parsed = parse_from(std::env::args_os().collect(), Some(&file_of(program)), &[]);
    parsed.map(|(parsed, _)| parsed)
}

/// Parses the arguments of this process, a tool, with defaults from the file that all tools
/// share. Prints and exits with 2 if anything is wrong.
#[must_use]
pub fn parse_tool<T: CommandFactory + FromArgMatches>() -> T {
    let file = std::env::home_dir().map(|home| home.join(TOOLS_FILE));
    or_exit(parse_from(std::env::args_os().collect(), file.as_deref(), &TOOLS_KEYS)).0
}

/// Returns the default configuration file of a daemon.
fn file_of(program: &str) -> PathBuf {
    Path::new("/etc").join(program).join("config.toml")
}

fn or_exit<T>(parsed: Result<T, ParseError>) -> T {
    match parsed {
        Ok(parsed) => parsed,
        Err(ParseError::Clap(error)) => error.exit(),
        Err(ParseError::Config(error)) => {
            eprintln!("error: {}", model::display::error_chain(&error));
            std::process::exit(i32::from(super::EXIT_MISUSE));
        }
    }
}

/// The tables of a configuration file that are not flags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraTables {
    /// The configuration file; `None` without one.
    pub path: Option<PathBuf>,
    /// The keys that are no flags, with their values.
    pub table: toml::Table,
}

/// The flag for the configuration file; flatten it into a program's flags.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ConfigArgs {
    /// TOML file that takes every flag by its long name; flags on the command line win.
    /// Without it, `/etc/<program>/config.toml` is read if it exists.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Why the arguments of a program are not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// The flags, from the command line or the file, are invalid.
    #[error(transparent)]
    Clap(Box<clap::Error>),
    /// The configuration file cannot be used.
    #[error(transparent)]
    Config(ConfigError),
}

/// Parses `arguments`, the program first, with defaults from the file that they name, or else from
/// `default_file` if it exists. `others` are keys that are accepted and returned if no flag has
/// their name.
fn parse_from<T: CommandFactory + FromArgMatches>(
    arguments: Vec<OsString>,
    default_file: Option<&Path>,
    others: &[&str],
) -> Result<(T, ExtraTables), ParseError> {
    let clap = |error| ParseError::Clap(Box::new(error));
    // The file may set required flags, so this pass ignores errors and only finds the file.
    let lenient = T::command().ignore_errors(true);
    let first = lenient.try_get_matches_from(arguments.clone()).map_err(clap)?;
    let named = first.try_get_one::<PathBuf>("config").ok().flatten().cloned();
    let path = match (named, default_file) {
        (Some(path), _) => path,
        (None, Some(path)) if may_be_there(path) => path.to_owned(),
        (None, _) => return Ok((parse_strictly(arguments)?, ExtraTables::default())),
    };
    let mut command = T::command();
    command.build();
    let table = read(&path).map_err(ParseError::Config)?;
    let from_file = as_arguments(&command, &first, &path, &table, others);
    let from_file = from_file.map_err(ParseError::Config)?;
    let mut all = arguments;
    let at = all.len().min(1);
    all.splice(at..at, from_file);
    let parsed = parse_strictly(all)?;
    let is_flag = |key: &str| command.get_arguments().any(|flag| flag.get_long() == Some(key));
    let table = table.into_iter().filter(|(key, _)| !is_flag(key)).collect();
    Ok((parsed, ExtraTables { path: Some(path), table }))
}

/// Returns false only if nothing is at `path`. A dangling link or a read error must not make the
/// program ignore its configuration.
fn may_be_there(path: &Path) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound};
    match path.symlink_metadata() {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), NotFound | NotADirectory),
    }
}

fn parse_strictly<T: CommandFactory + FromArgMatches>(
    arguments: Vec<OsString>,
) -> Result<T, ParseError> {
    let clap = |error| ParseError::Clap(Box::new(error));
    let matches = T::command().try_get_matches_from(arguments).map_err(clap)?;
    T::from_arg_matches(&matches).map_err(clap)
}

fn read(path: &Path) -> Result<toml::Table, ConfigError> {
    use std::io::Read as _;
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    let length = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if length as u64 > FILE_BYTES_MAX {
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, "more than 1 MiB")));
    }
    text.parse()
        .map_err(|error| ConfigError::Toml { path: path.to_owned(), source: Box::new(error) })
}

/// Converts `table` to arguments, except for flags that `given` has from the command line.
fn as_arguments(
    command: &Command,
    given: &ArgMatches,
    path: &Path,
    table: &toml::Table,
    others: &[&str],
) -> Result<Vec<OsString>, ConfigError> {
    let mut arguments = Vec::new();
    for (key, value) in table {
        let known = |argument: &&Arg| {
            argument.get_long() == Some(key) && !matches!(&**key, "config" | "help" | "version")
        };
        let Some(argument) = command.get_arguments().find(known) else {
            if others.contains(&key.as_str()) {
                continue;
            }
            return Err(ConfigError::UnknownKey {
                path: path.to_owned(),
                key: key.clone(),
                known: flags(command, others),
            });
        };
        let source = given.value_source(argument.get_id().as_str());
        if let Some(ValueSource::CommandLine | ValueSource::EnvVariable) = source {
            continue;
        }
        let wrong =
            |expected| ConfigError::WrongKind { path: path.to_owned(), key: key.clone(), expected };
        match (argument.get_action(), value) {
            (ArgAction::SetTrue, toml::Value::Boolean(true)) => {
                arguments.push(format!("--{key}").into());
            }
            (ArgAction::SetTrue, toml::Value::Boolean(false)) => {}
            (ArgAction::SetTrue, _) => return Err(wrong("true or false")),
            (ArgAction::Append, toml::Value::Array(values)) => {
                for value in values {
                    let text = scalar(value).ok_or_else(|| wrong("a list of texts"))?;
                    arguments.push(format!("--{key}={text}").into());
                }
            }
            (_, value) => {
                let text = scalar(value).ok_or_else(|| wrong("a text or a number"))?;
                arguments.push(format!("--{key}={text}").into());
            }
        }
    }
    Ok(arguments)
}

fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

fn flags(command: &Command, others: &[&str]) -> String {
    let mut flags: Vec<&str> = command
        .get_arguments()
        .filter_map(Arg::get_long)
        .filter(|flag| !matches!(*flag, "config" | "help" | "version"))
        .chain(others.iter().copied())
        .collect();
    flags.sort_unstable();
    flags.dedup();
    flags.join(", ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// Tests flags.
    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        security: crate::SecurityArgs,
        #[arg(long)]
        data: PathBuf,
        #[arg(long, default_value_t = 7)]
        shelves: u32,
        #[arg(long)]
        exclude: Vec<String>,
    }

    /// What the flags are with `line` on the command line and `text` in the file.
    fn parsed(line: &[&str], text: &str) -> Result<Flags, ParseError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        let line = std::iter::once("testd").chain(line.iter().copied());
        parse_from(line.map(OsString::from).collect(), Some(&path), &[]).map(|(flags, _)| flags)
    }

    #[track_caller]
    fn check(line: &[&str], text: &str, expected: &str) {
        let got = match parsed(line, text) {
            Ok(flags) => format!(
                "{} {} {:?} {}",
                flags.data.display(),
                flags.shelves,
                flags.exclude,
                flags.security.insecure
            ),
            Err(ParseError::Config(error)) => {
                let error = model::display::error_chain(&error);
                error.split_once("config.toml`").unwrap().1.to_owned()
            }
            Err(ParseError::Clap(error)) => error.to_string(),
        };
        assert!(got.starts_with(expected), "{line:?} {text}: {got}");
    }

    #[test]
    fn the_file_gives_every_flag_and_the_command_line_wins() {
        let file = "data = '/d'\nshelves = 9\nexclude = ['/a', '-b']\ninsecure = true\n";
        check(&[], file, "/d 9 [\"/a\", \"-b\"] true");
        check(&["--shelves", "1"], file, "/d 1 [\"/a\", \"-b\"] true");
        check(&["--exclude=/c", "--data=/e"], file, "/e 9 [\"/c\"] true");
        check(&["--data=/e"], "insecure = false", "/e 7 [] false");
        check(&["--data=/e"], "exclude = '/a'", "/e 7 [\"/a\"] false");
    }

    #[test]
    fn what_is_wrong_with_the_file_is_said() {
        check(&[], "sheves = 1", ": there is no flag --sheves; known: data, exclude, insecure, ");
        check(&[], "config = 'x'", ": there is no flag --config");
        check(&[], "shelves = [1]", ": shelves must be a text or a number");
        check(&[], "insecure = 'yes'", ": insecure must be true or false");
        check(&[], "exclude = [[1]]", ": exclude must be a list of texts");
        check(&[], "[data]", ": data must be a text or a number");
        check(&[], "data", " is not TOML: TOML parse error at line 1, column 5");
        check(&[], "shelves = 'x'\ndata='/'", "error: invalid value 'x' for '--shelves <SHELVES>'");
        check(&[], "", "error: the following required arguments were not provided:\n  --data");
        check(&["--data=/", "--shelvs=1"], "", "error: unexpected argument '--shelvs' found");
        check(&["--help"], "", "Tests flags\n\nUsage: testd");
    }

    #[test]
    fn tables_beside_flags_are_given_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        let line = || ["testd", "--data=/d"].map(OsString::from).to_vec();
        std::fs::write(&path, "shelves = 3\n[[source]]\nname = 'a'\n[[source]]\n").unwrap();
        let parsed = parse_from::<Flags>(line(), Some(&path), &["source"]);
        let (flags, beside) = parsed.unwrap();
        assert_eq!(flags.shelves, 3);
        assert_eq!(beside.path, Some(path.clone()));
        let sources = beside.table["source"].as_array().unwrap();
        assert_eq!((beside.table.len(), sources.len()), (1, 2));
        assert_eq!(sources[0]["name"].as_str(), Some("a"));

        let (_, beside) = parse_from::<Flags>(line(), None, &["source"]).unwrap();
        assert_eq!(beside, ExtraTables::default());
        std::fs::write(&path, "[[sources]]\n").unwrap();
        let error = parse_from::<Flags>(line(), Some(&path), &["source"]).unwrap_err();
        assert!(error.to_string().contains("known: data, exclude, insecure, shelves, source"));
    }

    /// Tests what a tool has.
    #[derive(Debug, Parser)]
    struct Tool {
        #[arg(long, global = true, default_value = "localhost")]
        dominator: String,
        #[command(flatten)]
        security: crate::SecurityArgs,
        #[command(subcommand)]
        verb: Verb,
    }

    #[derive(Debug, clap::Subcommand)]
    enum Verb {
        /// Lists.
        List,
    }

    #[test]
    fn tools_share_a_file_and_each_takes_what_it_knows() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        let parsed = |line: &[&str], text: &str| {
            std::fs::write(&path, text).unwrap();
            let line = std::iter::once("tool").chain(line.iter().copied());
            let arguments = line.map(OsString::from).collect();
            match parse_from(arguments, Some(&path), &TOOLS_KEYS) {
                Ok((Tool { dominator, security, verb: Verb::List }, _)) => {
                    format!("{dominator} {}", security.insecure)
                }
                Err(ParseError::Config(error)) => {
                    let error = model::display::error_chain(&error);
                    error.split_once("config.toml`").unwrap().1.to_owned()
                }
                Err(ParseError::Clap(error)) => error.to_string(),
            }
        };
        let file = "dominator = 'dom:1'\nimageserver = 'is'\nsubd = 'x'\ninsecure = true\n";
        assert_eq!(parsed(&["list"], file), "dom:1 true");
        assert_eq!(parsed(&["list", "--dominator", "b"], file), "b true");
        assert_eq!(parsed(&["--dominator=b", "list"], file), "b true");
        assert_eq!(parsed(&["--insecure", "list"], "subd = 'x'"), "localhost true");
        let error = ": there is no flag --domimator; known: dominator, filegen-server, format, \
                     imageserver, insecure, subd, tls";
        assert_eq!(parsed(&["list"], "domimator = 'x'"), error);
        assert_eq!(parsed(&["list"], "verb = 'x'").get(..27), Some(": there is no flag --verb; "));
        let none = ["tool", "list"].map(OsString::from).to_vec();
        let absent = Path::new("/nowhere/config.toml");
        let (tool, _) = parse_from::<Tool>(none, Some(absent), &TOOLS_KEYS).unwrap();
        assert_eq!(tool.dominator, "localhost");
    }

    #[test]
    fn a_file_that_is_named_must_exist() {
        let line = ["testd", "--config", "/nowhere/config.toml", "--data=/"];
        let result = parse_from::<Flags>(line.map(OsString::from).to_vec(), None, &[]);
        let Err(ParseError::Config(error)) = result else { panic!("{result:?}") };
        let text = "cannot read configuration file `/nowhere/config.toml`: \
                    No such file or directory (os error 2)";
        assert_eq!(model::display::error_chain(&error), text);
        let line = ["testd", "--data=/"].map(OsString::from).to_vec();
        let absent = Path::new("/nowhere/config.toml");
        let (none, _) = parse_from::<Flags>(line, Some(absent), &[]).unwrap();
        assert_eq!(none.config.config, None);
    }

    #[test]
    fn a_file_that_cannot_be_followed_is_not_taken_for_none() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        std::os::unix::fs::symlink("round", at("round")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        let parsed = |path: &Path| {
            let line = ["testd", "--data=/"].map(OsString::from).to_vec();
            match parse_from::<Flags>(line, Some(path), &[]) {
                Ok(_) => "parsed",
                Err(ParseError::Config(ConfigError::Read { .. })) => "unreadable",
                Err(_) => "wrong",
            }
        };
        let long = "x".repeat(300);
        let table = [
            ("dangling", "unreadable"),
            ("round", "unreadable"),
            (&long, "unreadable"),
            ("file", "parsed"),
            ("absent", "parsed"),
            ("file/config.toml", "parsed"),
        ];
        for (name, expected) in table {
            assert_eq!(parsed(&at(name)), expected, "{name}");
        }
    }
}
