//! The `[[source]]` tables of mdbd's configuration file.
// tidy: core

use core::fmt;
use core::time::Duration;
use std::collections::BTreeSet;
use std::path::PathBuf;

use model::object::{Algorithm, ObjectId};
use model::time_parse::positive_duration;
use serde::Deserialize;
use web::{AddressError, WebAddress};

use super::formats::{FIELDS, Format};
use super::merged_sources::{HostFilter, PatternError, Rules};

/// The key of the tables.
pub const KEY: &str = "source";

const SOURCES_MAX: usize = 64;

/// Longest name of a source, in bytes: it becomes a file name.
const NAME_BYTES_MAX: usize = 64;

/// Default time limit of a source.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Highest time limit of a source.
const TIMEOUT_MAX: Duration = Duration::from_secs(3_600);

/// Longest interval of reading sources.
const INTERVAL_MAX: Duration = Duration::from_secs(86_400);

/// An invalid configuration of sources. Tables are numbered from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    #[error("there is no [[source]]: add one that says where machines come from")]
    None,
    #[error("too many sources: {count} of at most {SOURCES_MAX}")]
    TooMany { count: usize },
    #[error("source must be a list of tables, each under a line [[source]]")]
    Kind,
    #[error("[[source]] number {number} is invalid")]
    Table { number: usize, source: Box<toml::de::Error> },
    #[error(
        "[[source]] number {number}: invalid name `{name}`: expected up to {NAME_BYTES_MAX} \
         letters, digits, `-` and `_`, and a unique name for each source"
    )]
    Name { number: usize, name: String },
    #[error("source {name}: expected one of file, url and command")]
    Origin { name: String },
    #[error("source {name}: command must be a list: the program and its arguments")]
    Command { name: String },
    #[error("source {name}: bad url")]
    Address { name: String, source: AddressError },
    #[error("source {name}: timeout: {why}")]
    Timeout { name: String, why: String },
    #[error("source {name}")]
    Pattern { name: String, source: PatternError },
    #[error("source {name}: `{field}` is no field of records: there are {}", FIELDS.join(", "))]
    Field { name: String, field: String },
}

/// Place from which a source reads machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    File(PathBuf),
    Web(WebAddress),
    /// The output of a program, with its arguments.
    Command(Vec<String>),
}

impl Origin {
    /// Returns a digest that identifies the origin without revealing its secrets.
    #[must_use]
    pub fn identity(&self) -> ObjectId {
        let text = match self {
            Self::File(path) => format!("file {}", path.display()),
            Self::Web(address) => format!("url {address} {}", address.target),
            Self::Command(line) => format!("command {}", line.join("\n")),
        };
        Algorithm::Blake3.digest(text.as_bytes())
    }
}

impl fmt::Display for Origin {
    /// Omits queries and arguments, which may be secret.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(formatter, "file {}", path.display()),
            Self::Web(address) => write!(formatter, "url {address}"),
            Self::Command(line) => {
                write!(formatter, "command {}", line.first().map_or("", String::as_str))
            }
        }
    }
}

/// Configuration of one source.
#[derive(Clone, Debug)]
pub struct Source {
    pub origin: Origin,
    /// Time limit of a reading.
    pub timeout: Duration,
    pub rules: Rules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Table {
    name: String,
    file: Option<PathBuf>,
    url: Option<String>,
    command: Option<Vec<String>>,
    #[serde(default)]
    format: Format,
    hosts: Option<String>,
    exclude_hosts: Option<String>,
    fields: Option<BTreeSet<String>>,
    timeout: Option<toml::Value>,
}

/// Parses the value of [`KEY`] in a configuration file; returns at least one source.
///
/// # Errors
///
/// [`SettingsError`] names the table.
pub fn sources(value: Option<&toml::Value>) -> Result<Vec<Source>, SettingsError> {
    let tables = match value {
        None => return Err(SettingsError::None),
        Some(value) => value.as_array().ok_or(SettingsError::Kind)?,
    };
    match tables.len() {
        0 => return Err(SettingsError::None),
        count if count > SOURCES_MAX => return Err(SettingsError::TooMany { count }),
        _ => {}
    }
    let mut names = BTreeSet::new();
    let mut sources = Vec::new();
    for (index, table) in tables.iter().enumerate() {
        let number = index + 1;
        let table: Table = table
            .clone()
            .try_into()
            .map_err(|source| SettingsError::Table { number, source: Box::new(source) })?;
        if !is_name(&table.name) || !names.insert(table.name.clone()) {
            return Err(SettingsError::Name { number, name: table.name });
        }
        sources.push(source_of(table)?);
    }
    Ok(sources)
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(plain)
}

fn source_of(table: Table) -> Result<Source, SettingsError> {
    let name = table.name;
    let origin = match (table.file, table.url, table.command) {
        (Some(path), None, None) => Origin::File(path),
        (None, Some(url), None) => match WebAddress::parse(&url) {
            Ok(address) => Origin::Web(address),
            Err(source) => return Err(SettingsError::Address { name, source }),
        },
        (None, None, Some(line)) => match line.first() {
            Some(program) if !program.is_empty() => Origin::Command(line),
            _ => return Err(SettingsError::Command { name }),
        },
        _ => return Err(SettingsError::Origin { name }),
    };
    let timeout = match table.timeout.as_ref().map_or(Ok(TIMEOUT), timeout) {
        Ok(timeout) => timeout,
        Err(why) => return Err(SettingsError::Timeout { name, why }),
    };
    let filter = HostFilter::new(table.hosts.as_deref(), table.exclude_hosts.as_deref());
    let filter = match filter {
        Ok(filter) => filter,
        Err(source) => return Err(SettingsError::Pattern { name, source }),
    };
    let is_unknown = |field: &&String| !FIELDS.contains(&field.as_str());
    if let Some(field) = table.fields.iter().flatten().find(is_unknown) {
        return Err(SettingsError::Field { name, field: field.clone() });
    }
    let rules = Rules { name, format: table.format, filter, fields: table.fields };
    Ok(Source { origin, timeout, rules })
}

/// Reads the time limit of a source: a number of seconds, or a text as in flags.
fn timeout(value: &toml::Value) -> Result<Duration, String> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match positive_duration(&text)? {
        timeout if timeout > TIMEOUT_MAX => Err("must be at most 1h".to_owned()),
        timeout => Ok(timeout),
    }
}

/// Parses the interval of reading sources.
pub fn interval(text: &str) -> Result<Duration, String> {
    match positive_duration(text)? {
        interval if interval > INTERVAL_MAX => Err("must be at most 1d".to_owned()),
        interval => Ok(interval),
    }
}

#[cfg(test)]
mod tests {
    use model::display::error_chain;

    use super::*;

    fn read(text: &str) -> Result<Vec<Source>, SettingsError> {
        let table: toml::Table = text.parse().unwrap();
        sources(table.get(KEY))
    }

    #[test]
    fn sources_are_read_in_their_order() {
        let text = r#"
            [[source]]
            name = "inventory"
            url = "https://inventory/machines.json?key=secret"
            exclude-hosts = "test-.*"
            timeout = 5
            [[source]]
            name = "racks"
            command = ["/usr/bin/racks", "--password", "secret"]
            timeout = "2m"
            format = "hosts"
            [[source]]
            name = "by-hand"
            file = "/etc/fleet.json"
        "#;
        let sources = read(text).unwrap();
        let shown: Vec<String> = sources
            .iter()
            .map(|source| {
                let (rules, seconds) = (&source.rules, source.timeout.as_secs());
                format!("{} {:?} {seconds} s: {}", rules.name, rules.format, source.origin)
            })
            .collect();
        let expected = [
            "inventory Json 5 s: url https://inventory/machines.json",
            "racks Hosts 120 s: command /usr/bin/racks",
            "by-hand Json 30 s: file /etc/fleet.json",
        ];
        assert_eq!(shown, expected);
        let accepts = |index: usize| sources[index].rules.filter.accepts("test-1");
        assert_eq!((accepts(0), accepts(1)), (false, true));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_table() {
        let one = |rest: &str| format!("[[source]]\nname = \"a\"\n{rest}");
        let table = [
            (String::new(), "there is no [[source]]"),
            ("source = []".to_owned(), "there is no [[source]]"),
            ("source = 1".to_owned(), "source must be a list of tables"),
            ("source = [1]".to_owned(), "[[source]] number 1 is invalid: "),
            ("[[source]]\nfile = \"/a\"".to_owned(), "number 1 is invalid: missing field `name`"),
            (one("fil = \"/a\""), "unknown field `fil`, expected one of `name`, `file`, "),
            (one("file = \"/a\"\nformat = \"yaml\""), "unknown variant `yaml`"),
            (one(""), "source a: expected one of file, url and command"),
            (one("file = \"/a\"\nurl = \"http://a\""), "source a: expected one of"),
            (one("command = []"), "source a: command must be a list: the program"),
            (one("url = \"ftp://a\""), "source a: bad url: `ftp://a` does not begin with"),
            (one("file = \"/a\"\ntimeout = 0"), "source a: timeout: must not be zero"),
            (one("file = \"/a\"\ntimeout = \"2h\""), "source a: timeout: must be at most 1h"),
            (one("file = \"/a\"\ntimeout = \"soon\""), "source a: timeout: `soon` is no duration"),
            (one("file = \"/a\"\nhosts = \"(\""), "source a: `(` is not a pattern of host names: "),
            (
                one("file = \"/a\"\nfields = [\"RequiredImge\"]"),
                "source a: `RequiredImge` is no field of records: there are DisableUpdates, ",
            ),
            (format!("{0}\n{0}", one("file = \"/a\"")), "number 2: invalid name `a`"),
            ("[[source]]\nname = \"a/b\"\nfile = \"/a\"".to_owned(), "invalid name `a/b`"),
            ("[[source]]\nname = \"\"\nfile = \"/a\"".to_owned(), "number 1: invalid name ``"),
        ];
        for (text, part) in table {
            let error = error_chain(&read(&text).unwrap_err());
            assert!(error.contains(part), "{part}: {error}");
        }
        let one = |number| format!("[[source]]\nname = \"s{number}\"\nfile = \"/a\"\n");
        let many: String = (0..65).map(one).collect();
        assert_eq!(read(&many).unwrap_err().to_string(), "too many sources: 65 of at most 64");
    }
}
