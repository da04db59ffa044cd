//! The `[[generator]]` tables of the configuration file.
// tidy: core

use core::fmt;
use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use api::access::identity::MACHINE_METHODS;
use model::display::{line_at, rough_duration};
use model::path::{PathError, TreePath};
use model::time_parse::positive_duration;
use model::unknown_keys::nearest;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use web::{AddressError, WebAddress};

use super::certificates::{
    CertificateSettings, LIFETIME as CERTIFICATE_LIFETIME, PairPart, keeps_key,
};
use super::selection::{Selector, SelectorError};

/// The key of the tables.
pub const KEY: &str = "generator";

const GENERATORS_MAX: usize = 1_000;

/// The default time limit of a program or web server.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The longest lifetime of a certificate.
const CERTIFICATE_LIFETIME_MAX: Duration = Duration::from_secs(825 * 86_400);

const TIMEOUT_MAX: Duration = Duration::from_secs(3_600);

/// How many runs of a program, or requests to a web server, there are at once.
const CONCURRENCY: usize = 4;

const CONCURRENCY_MAX: usize = 256;

/// An error of the configuration.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct SettingsError {
    /// From 1.
    pub line: usize,
    pub why: Fault,
}

/// What is wrong with the configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("{0}")]
    Syntax(String),
    #[error("the key `{key}` is unknown{}", question(nearest))]
    Unknown { key: String, nearest: Option<String> },
    #[error("there is no [[generator]]: add one that says how a file is made")]
    None,
    #[error("{count} generators are too many: at most {GENERATORS_MAX}")]
    TooMany { count: usize },
    #[error("`{key}` is missing")]
    Missing { key: &'static str },
    #[error("`{key}` must be {expected}")]
    Type { key: &'static str, expected: &'static str },
    #[error("the kind `{kind}` is unknown; there are {}", KINDS.map(|(kind, _)| kind).join(", "))]
    Kind { kind: String },
    #[error("bad path: {0}")]
    Path(PathError),
    #[error("`/` is no file")]
    Root,
    #[error("{path} has a generator already, in line {first}")]
    Twice { path: TreePath, first: usize },
    #[error("bad `by`: {0}")]
    By(SelectorError),
    #[error("bad url: {0}")]
    Address(AddressError),
    #[error("bad {key}: {why}")]
    Duration { key: &'static str, why: String },
    #[error("no machine may call `{power}`: powers are of {}", MACHINE_METHODS.join(", "))]
    Power { power: String },
}

fn question(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |nearest| format!("; is `{nearest}` meant?"))
}

/// The configuration of a generator. Paths are as they were written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// The path of the files that it makes, on machines.
    pub path: TreePath,
    pub kind: Kind,
    pub is_secret: bool,
    pub allow_empty: bool,
    /// The line of its table, from 1.
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The same file for all machines.
    File {
        file: PathBuf,
    },
    /// A file of a directory.
    Directory {
        directory: PathBuf,
        by: Selector,
    },
    Template {
        file: PathBuf,
        variables: Option<PathBuf>,
    },
    /// The record of the machine, as JSON.
    Mdb,
    Program(Program),
    Url(Url),
    /// A certificate for the machine, or the key that was made for it.
    Certificate(Arc<CertificateSettings>, PairPart),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// The user that it runs as; `None` for that of filegen-server.
    pub user: Option<String>,
    pub timeout: Duration,
    pub concurrency: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    pub address: WebAddress,
    pub timeout: Duration,
    pub concurrency: usize,
}

/// The kinds, each with its keys.
const KINDS: [(&str, &[&str]); 7] = [
    ("file", &["file"]),
    ("directory", &["directory", "by"]),
    ("template", &["file", "variables"]),
    ("mdb", &[]),
    ("program", &["command", "user", "timeout", "concurrency"]),
    ("url", &["url", "timeout", "concurrency"]),
    (
        "certificate",
        &["authority", "key", "key_path", "powers", "with_address", "lifetime", "renew_after"],
    ),
];

/// The keys of all kinds.
const COMMON: [&str; 4] = ["path", "kind", "secret", "allow_empty"];

impl Kind {
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Directory { .. } => "directory",
            Self::Template { .. } => "template",
            Self::Mdb => "mdb",
            Self::Program(_) => "program",
            Self::Url(_) => "url",
            Self::Certificate(..) => "certificate",
        }
    }
}

impl fmt::Display for Kind {
    /// Omits queries and arguments, which may be secret.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file } | Self::Template { file, .. } => {
                write!(formatter, "{}", file.display())
            }
            Self::Directory { directory, by } => {
                write!(formatter, "{} by {by}", directory.display())
            }
            Self::Mdb => formatter.write_str("the record of the machine"),
            Self::Program(Program { program, .. }) => write!(formatter, "{}", program.display()),
            Self::Url(Url { address, .. }) => write!(formatter, "{address}"),
            Self::Certificate(settings, part) => {
                write!(formatter, "{part} by {}", settings.authority.display())
            }
        }
    }
}

/// Reads a configuration file, in which keys may be `flags` besides.
///
/// # Errors
///
/// [`SettingsError`] names the line.
pub fn read(text: &str, flags: &[&str]) -> Result<Vec<Definition>, SettingsError> {
    let parsed = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let why = error.message().lines().collect::<Vec<_>>().join(", ");
        SettingsError { line: line_at(text, at), why: Fault::Syntax(why) }
    })?;
    let file = Table { text, line: 1, table: parsed.get_ref() };
    file.check_keys(&[flags, &[KEY]].concat())?;
    let none = || file.error(Fault::None);
    let value = file.table.get(KEY).ok_or_else(none)?;
    let line = line_at(text, value.span().start);
    let wrong = Fault::Type { key: KEY, expected: "a list of tables, each under [[generator]]" };
    let wrong = SettingsError { line, why: wrong };
    let Some(tables) = value.get_ref().as_array() else { return Err(wrong) };
    match tables.len() {
        0 => return Err(none()),
        count if count > GENERATORS_MAX => return Err(file.error(Fault::TooMany { count })),
        _ => {}
    }
    let mut definitions: Vec<Definition> = Vec::new();
    let mut lines = BTreeMap::new();
    for value in tables.iter() {
        let line = line_at(text, value.span().start);
        let Some(table) = value.get_ref().as_table() else { return Err(wrong) };
        let table = Table { text, line, table };
        for (key, definition) in ["path", "key_path"].into_iter().zip(table.definitions()?) {
            let path = definition.path.clone();
            if let Some(first) = lines.insert(path.clone(), line) {
                return Err(table.at(key, Fault::Twice { path, first }));
            }
            definitions.push(definition);
        }
    }
    Ok(definitions)
}

/// A table of the file.
struct Table<'a> {
    text: &'a str,
    line: usize,
    table: &'a DeTable<'a>,
}

impl Table<'_> {
    fn error(&self, why: Fault) -> SettingsError {
        SettingsError { line: self.line, why }
    }

    /// Returns an error in the line of `key`.
    fn at(&self, key: &str, why: Fault) -> SettingsError {
        let value = self.table.get(key);
        let line = value.map_or(self.line, |value| line_at(self.text, value.span().start));
        SettingsError { line, why }
    }

    fn check_keys(&self, known: &[&str]) -> Result<(), SettingsError> {
        let unknown = |key: &&Spanned<_>| {
            let key: &str = <Spanned<std::borrow::Cow<'_, str>>>::get_ref(key);
            !known.contains(&key)
        };
        match self.table.keys().filter(unknown).min_by_key(|key| key.span().start) {
            None => Ok(()),
            Some(key) => {
                let line = line_at(self.text, key.span().start);
                let key = key.get_ref().clone().into_owned();
                let nearest = nearest(&key, known).map(str::to_owned);
                Err(SettingsError { line, why: Fault::Unknown { key, nearest } })
            }
        }
    }

    /// Returns the value of `key` as `read` sees it; `None` if there is no such key.
    fn get<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl Fn(&DeValue<'_>) -> Option<T>,
    ) -> Result<Option<T>, SettingsError> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        let wrong = || self.at(key, Fault::Type { key, expected });
        read(value.get_ref()).map(Some).ok_or_else(wrong)
    }

    fn text(&self, key: &'static str) -> Result<Option<String>, SettingsError> {
        let not_empty =
            |value: &DeValue<'_>| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        self.get(key, "a text", not_empty)
    }

    fn truth(&self, key: &'static str, default: bool) -> Result<bool, SettingsError> {
        Ok(self.get(key, "true or false", |value| value.as_bool())?.unwrap_or(default))
    }

    fn need<T>(&self, key: &'static str, value: Option<T>) -> Result<T, SettingsError> {
        value.ok_or_else(|| self.error(Fault::Missing { key }))
    }

    fn file(&self, key: &'static str) -> Result<PathBuf, SettingsError> {
        Ok(PathBuf::from(self.need(key, self.text(key)?)?))
    }

    /// Returns what makes the file at `path`, and for a certificate that at `key_path` besides.
    fn definitions(&self) -> Result<Vec<Definition>, SettingsError> {
        let kind = self.need("kind", self.text("kind")?)?;
        let Some((_, keys)) = KINDS.iter().find(|(known, _)| *known == kind) else {
            return Err(self.at("kind", Fault::Kind { kind }));
        };
        self.check_keys(&[&COMMON, *keys].concat())?;
        let path = self.path("path")?;
        let kind = self.kind(&kind, &path)?;
        let key_path = match &kind {
            Kind::Certificate(settings, _) => settings.key_path.clone(),
            _ => None,
        };
        // A certificate whose key is elsewhere is for everybody to see.
        let is_default = matches!(kind, Kind::Program(_)) || key_path.is_some();
        let is_secret = self.truth("secret", is_default)?;
        let allow_empty = self.truth("allow_empty", false)?;
        let key = match (&kind, key_path) {
            (Kind::Certificate(settings, _), Some(path)) => Some(Definition {
                path,
                kind: Kind::Certificate(Arc::clone(settings), PairPart::Key),
                is_secret: true,
                allow_empty,
                line: self.line,
            }),
            _ => None,
        };
        let definition = Definition { path, kind, is_secret, allow_empty, line: self.line };
        Ok([definition].into_iter().chain(key).collect())
    }

    fn path(&self, key: &'static str) -> Result<TreePath, SettingsError> {
        let path = self.need(key, self.text(key)?)?;
        let path = TreePath::new(path).map_err(|why| self.at(key, Fault::Path(why)))?;
        if path.is_root() { Err(self.at(key, Fault::Root)) } else { Ok(path) }
    }

    fn certificate(&self, path: &TreePath) -> Result<CertificateSettings, SettingsError> {
        let authority = self.file("authority")?;
        let is_on_machine = match self.text("key")?.as_deref() {
            None => keeps_key(path),
            Some("machine") => true,
            Some("server") => false,
            Some(_) => {
                let expected = "\"machine\", where the key is and stays, or \"server\"";
                return Err(self.at("key", Fault::Type { key: "key", expected }));
            }
        };
        let powers = self.words("powers", "a list of methods that machines call")?;
        let powers = powers.unwrap_or_default();
        if let Some(power) = powers.iter().find(|power| !MACHINE_METHODS.contains(&power.as_str()))
        {
            return Err(self.at("powers", Fault::Power { power: power.clone() }));
        }
        let lifetime = self.duration("lifetime", CERTIFICATE_LIFETIME, CERTIFICATE_LIFETIME_MAX)?;
        let (default, latest) = (lifetime.mul_f64(2.0 / 3.0), lifetime.mul_f64(0.9));
        let renew_after = self.duration("renew_after", default, latest)?;
        let key_path = match is_on_machine {
            true if self.table.get("key_path").is_some() => {
                let expected = "left out, because the key stays on the machine";
                return Err(self.at("key_path", Fault::Type { key: "key_path", expected }));
            }
            true => None,
            false => Some(self.path("key_path")?),
        };
        Ok(CertificateSettings {
            authority,
            path: path.clone(),
            key_path,
            powers,
            with_address: self.truth("with_address", false)?,
            lifetime,
            renew_after,
        })
    }

    fn kind(&self, kind: &str, path: &TreePath) -> Result<Kind, SettingsError> {
        Ok(match kind {
            "file" => Kind::File { file: self.file("file")? },
            "directory" => {
                let by = self.need("by", self.text("by")?)?;
                let by = by.parse().map_err(|why| self.at("by", Fault::By(why)))?;
                Kind::Directory { directory: self.file("directory")?, by }
            }
            "template" => {
                let variables = self.text("variables")?.map(PathBuf::from);
                Kind::Template { file: self.file("file")?, variables }
            }
            "mdb" => Kind::Mdb,
            "program" => {
                let expected = "a list: the program and its arguments";
                let words = self.words("command", expected)?;
                let mut words = self.need("command", words)?.into_iter();
                if words.len() == 0 {
                    return Err(self.at("command", Fault::Type { key: "command", expected }));
                }
                let program = words.next().map(PathBuf::from).unwrap_or_default();
                let (arguments, user) = (words.collect(), self.text("user")?);
                let (timeout, concurrency) = (self.timeout()?, self.concurrency()?);
                Kind::Program(Program { program, arguments, user, timeout, concurrency })
            }
            "certificate" => {
                Kind::Certificate(Arc::new(self.certificate(path)?), PairPart::Certificate)
            }
            _ => {
                let address = self.need("url", self.text("url")?)?;
                let address = WebAddress::parse(&address)
                    .map_err(|why| self.at("url", Fault::Address(why)))?;
                let (timeout, concurrency) = (self.timeout()?, self.concurrency()?);
                Kind::Url(Url { address, timeout, concurrency })
            }
        })
    }

    /// Returns a list of texts, the first of which is not empty, if there is one.
    fn words(
        &self,
        key: &'static str,
        expected: &'static str,
    ) -> Result<Option<Vec<String>>, SettingsError> {
        self.get(key, expected, |value| {
            let words = value.as_array()?.iter();
            let words = words.map(|word| word.get_ref().as_str().map(str::to_owned));
            let words: Vec<String> = words.collect::<Option<_>>()?;
            words.first().is_none_or(|first| !first.is_empty()).then_some(words)
        })
    }

    fn timeout(&self) -> Result<Duration, SettingsError> {
        self.duration("timeout", TIMEOUT, TIMEOUT_MAX)
    }

    fn duration(
        &self,
        key: &'static str,
        default: Duration,
        longest: Duration,
    ) -> Result<Duration, SettingsError> {
        let text = |value: &DeValue<'_>| match value {
            DeValue::String(text) => Some(text.clone().into_owned()),
            DeValue::Integer(number) => Some(number.as_str().to_owned()),
            _ => None,
        };
        let Some(text) = self.get(key, "a duration such as 30 or \"2m\"", text)? else {
            return Ok(default);
        };
        let duration = positive_duration(&text).and_then(|duration| match duration > longest {
            true => Err(format!("must be at most {}", rough_duration(longest.as_secs()))),
            false => Ok(duration),
        });
        duration.map_err(|why| self.at(key, Fault::Duration { key, why }))
    }

    fn concurrency(&self) -> Result<usize, SettingsError> {
        let count = |value: &DeValue<'_>| {
            let count = value.as_integer()?.as_str().parse().ok()?;
            (1..=CONCURRENCY_MAX).contains(&count).then_some(count)
        };
        Ok(self.get("concurrency", "a number from 1 to 256", count)?.unwrap_or(CONCURRENCY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generators_of_all_kinds_are_read() {
        let text = r#"
listen = ":1"
[[generator]]
path = "/etc/motd"
kind = "file"
file = "motd"
allow_empty = true
[[generator]]
path = "/etc/ca.pem"
kind = "directory"
directory = "/etc/filegen/ca"
by = "Tags.zone"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"
variables = "servers.toml"
secret = true
[[generator]]
path = "/etc/mdb.json"
kind = "mdb"
[[generator]]
path = "/etc/key"
kind = "program"
command = ["keys", "--word", "x"]
user = "nobody"
timeout = "2m"
concurrency = 9
[[generator]]
path = "/etc/token"
kind = "url"
url = "https://tokens/of?key=x"
timeout = 5
[[generator]]
path = "/etc/tls/cert.pem"
kind = "certificate"
authority = "ca"
key = "server"
key_path = "/etc/tls/key.pem"
secret = false
with_address = true
powers = ["ObjectServer.GetObjects"]
lifetime = "9d"
"#;
        let shown: Vec<String> = read(text, &["listen"])
            .unwrap()
            .into_iter()
            .map(|definition| {
                let Definition { path, kind, is_secret, allow_empty, line } = definition;
                format!("{line} {path} {}: {kind} {is_secret} {allow_empty}", kind.name())
            })
            .collect();
        let expected = [
            "3 /etc/motd file: motd false true",
            "8 /etc/ca.pem directory: /etc/filegen/ca by Tags.zone false false",
            "13 /etc/resolv.conf template: resolv.conf.j2 true false",
            "19 /etc/mdb.json mdb: the record of the machine false false",
            "22 /etc/key program: keys true false",
            "29 /etc/token url: https://tokens/of false false",
            "34 /etc/tls/cert.pem certificate: certificate by ca false false",
            "34 /etc/tls/key.pem certificate: key by ca true false",
        ];
        assert_eq!(shown, expected);
        let [.., program, url, certificate, key] = &*read(text, &["listen"]).unwrap() else {
            panic!()
        };
        let Kind::Program(program) = &program.kind else { panic!("{program:?}") };
        let expected = Program {
            program: "keys".into(),
            arguments: vec!["--word".into(), "x".into()],
            user: Some("nobody".into()),
            timeout: Duration::from_secs(120),
            concurrency: 9,
        };
        assert_eq!(*program, expected);
        let Kind::Url(Url { timeout, concurrency, .. }) = &url.kind else { panic!("{url:?}") };
        assert_eq!((timeout.as_secs(), *concurrency), (5, CONCURRENCY));
        let settings = CertificateSettings {
            authority: "ca".into(),
            path: "/etc/tls/cert.pem".parse().unwrap(),
            key_path: Some("/etc/tls/key.pem".parse().unwrap()),
            powers: vec!["ObjectServer.GetObjects".to_owned()],
            with_address: true,
            lifetime: Duration::from_secs(9 * 86_400),
            renew_after: Duration::from_secs(6 * 86_400),
        };
        for (definition, part) in [(certificate, PairPart::Certificate), (key, PairPart::Key)] {
            assert_eq!(definition.kind, Kind::Certificate(Arc::new(settings.clone()), part));
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let of = |rest: &str| format!("\n[[generator]]\npath = \"/a\"\n{rest}");
        let file = "kind = \"file\"\nfile = \"a\"\n";
        let pair = "kind = \"certificate\"\nauthority = \"a\"\nkey = \"server\"\n";
        let table = [
            (String::new(), "line 1: there is no [[generator]]: "),
            ("generator = []".into(), "line 1: there is no [[generator]]: "),
            ("\ngenerator = 1".into(), "line 2: `generator` must be a list of tables"),
            ("generator = [1]".into(), "line 1: `generator` must be a list of tables"),
            ("[[generater]]".into(), "the key `generater` is unknown; is `generator` meant?"),
            ("\n[[gener".into(), "line 2: unclosed array table"),
            (
                of("kind = \"file\"\nfil = \"x\""),
                "line 5: the key `fil` is unknown; is `file` meant?",
            ),
            (of("kind = \"mdb\"\nfile = \"x\""), "line 5: the key `file` is unknown"),
            (of("kind = \"templ\""), "line 4: the kind `templ` is unknown; there are file, dir"),
            (of(""), "line 2: `kind` is missing"),
            (of("kind = \"file\""), "line 2: `file` is missing"),
            (of("kind = \"file\"\nfile = 1"), "line 5: `file` must be a text"),
            (of("kind = \"file\"\nfile = \"\""), "line 5: `file` must be a text"),
            (of(&format!("{file}secret = 1")), "line 6: `secret` must be true or false"),
            ("[[generator]]\nkind = \"mdb\"".into(), "line 1: `path` is missing"),
            ("[[generator]]\nkind = \"mdb\"\npath = \"a\"".into(), "line 3: bad path: "),
            ("[[generator]]\nkind = \"mdb\"\npath = \"/\"".into(), "line 3: `/` is no file"),
            (of(&format!("{file}{}", of(file))), "line 8: /a has a generator already, in line 2"),
            (
                of("kind = \"directory\"\ndirectory = \"a\"\nby = \"Rack\""),
                "line 6: bad `by`: expected \"Location\", ",
            ),
            (of("kind = \"program\"\ncommand = []"), "line 5: `command` must be a list: the pro"),
            (of("kind = \"program\"\ncommand = \"a\""), "line 5: `command` must be a list: the"),
            (of("kind = \"url\"\nurl = \"ftp://a\""), "line 5: bad url: `ftp://a` does not begin"),
            (
                of("kind = \"url\"\nurl = \"http://a\"\ntimeout = \"2h\""),
                "line 6: bad timeout: must be at most 60 min",
            ),
            (
                of("kind = \"url\"\nurl = \"http://a\"\nconcurrency = 0"),
                "line 6: `concurrency` must be a number from 1 to 256",
            ),
            (of(pair), "line 2: `key_path` is missing"),
            (of(&format!("{pair}powers = [\"\"]")), "line 7: `powers` must be a list of methods"),
            (
                of("kind = \"certificate\"\nauthority = \"a\"\nkey = \"sub\""),
                "line 6: `key` must be \"machine\", where the key is and stays, or \"server\"",
            ),
            (
                of("kind = \"certificate\"\nauthority = \"a\"\nkey = \"machine\"\n\
                     key_path = \"/b\""),
                "line 7: `key_path` must be left out, because the key stays on the machine",
            ),
            (of("kind = \"certificate\"\nauthority = \"a\""), "line 2: `key_path` is missing"),
            (
                "[[generator]]\npath = \"/etc/dominator/tls/cert.pem\"\nkind = \"certificate\"\n\
                 authority = \"a\"\nkey_path = \"/b\""
                    .into(),
                "line 5: `key_path` must be left out",
            ),
            (
                of(&format!("{pair}key_path = \"/a\"")),
                "line 7: /a has a generator already, in line 2",
            ),
            (
                of(&format!("{pair}key_path = \"/b\"\npowers = [\"Subd.Fetch\"]")),
                "line 8: no machine may call `Subd.Fetch`: powers are of ObjectServer.GetObjects",
            ),
            (
                of(&format!("{pair}key_path = \"/b\"\nlifetime = 100\nrenew_after = 95")),
                "line 9: bad renew_after: must be at most 90 s",
            ),
        ];
        for (text, part) in table {
            let error = read(&text, &[]).unwrap_err().to_string();
            assert!(error.contains(part), "{part}: {error}");
        }
        let many: String = (0..1_001)
            .map(|n| format!("[[generator]]\npath = \"/{n}\"\nkind = \"mdb\"\n"))
            .collect();
        let error = read(&many, &[]).unwrap_err().to_string();
        assert_eq!(error, "line 1: 1001 generators are too many: at most 1000");
    }
}
