//! Reads the configuration and all files that it names, as one set.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::file_generator::CONTENT_BYTES_MAX;
use certs::register::{Register, RegisterError};
use clap::CommandFactory as _;
use minijinja::Value;
use minijinja::value::Serde;
use model::display::{error_chain, line_at};
use nix::unistd::User;
use system::file_stamp::FileStamp;
use tokio::sync::Semaphore;

use super::Arguments;
use super::core::contents::Content;
use super::core::settings::{self, Definition, Kind, SettingsError};
use super::core::templates::{Template, TemplateError};
use super::generators::{GeneratorSet, LoadedGenerator, Maker, Outside, PairIssuer, VersionHasher};
use super::outside;

/// The largest configuration file, in bytes.
const CONFIGURATION_BYTES_MAX: usize = 1 << 20;

/// The largest file of variables, in bytes.
const VARIABLES_BYTES_MAX: usize = 16 << 20;

/// The largest program, in bytes.
const PROGRAM_BYTES_MAX: usize = 256 << 20;

/// The most bytes of all files of a set, which stay in memory.
const SET_BYTES_MAX: usize = 512 << 20;

/// The most files of a set: they are looked at every second.
const SET_FILES_MAX: usize = 50_000;

/// The deepest directory below a directory of files.
const DEPTH_MAX: usize = 32;

/// Why a set is not taken. The source of each continues its text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error("{}", path.display())]
    Settings { path: PathBuf, source: SettingsError },
    #[error("{}: line {line}", path.display())]
    Read {
        /// The configuration file, and the line of the generator in it.
        path: PathBuf,
        line: usize,
        source: ReadError,
    },
    #[error("{}", path.display())]
    Template { path: PathBuf, source: TemplateError },
    #[error("{}: {why}", path.display())]
    Variables { path: PathBuf, why: String },
    #[error("{}: line {line}: bad authority", path.display())]
    Authority { path: PathBuf, line: usize, source: Box<RegisterError> },
    #[error(
        "{}: line {line}: the authority in {} certifies everybody, which filegen-server must not: \
         make one for it with domtool cert ca --machines-only",
        path.display(),
        directory.display()
    )]
    AuthorityForAll { path: PathBuf, line: usize, directory: PathBuf },
    #[error("{}: line {line}: there is no user `{user}`", path.display())]
    User { path: PathBuf, line: usize, user: String },
}

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    #[error("{0}")]
    Io(io::Error),
    #[error("cannot read {}: {why}", path.display())]
    Find { path: PathBuf, why: io::Error },
    #[error("{} is no regular file", .0.display())]
    Kind(PathBuf),
    #[error("{} is a symbolic link; in a directory of files they are not followed", .0.display())]
    Link(PathBuf),
    #[error("{} is empty; if that is meant, set allow_empty = true", .0.display())]
    Empty(PathBuf),
    #[error("{} has more than {limit} bytes", path.display())]
    TooLarge {
        path: PathBuf,
        /// In bytes.
        limit: usize,
    },
    #[error("{} is not UTF-8 in line {line}", path.display())]
    Text { path: PathBuf, line: usize },
    #[error("the name of {} is not UTF-8", .0.display())]
    Name(PathBuf),
    #[error("the files of all generators have more than {SET_BYTES_MAX} bytes")]
    SetBytes,
    #[error("the generators have more than {SET_FILES_MAX} files")]
    SetFiles,
    #[error("{} is more than {DEPTH_MAX} directories deep", .0.display())]
    Depth(PathBuf),
}

/// The files and directories that were looked at, as they were; `None` for one that is not there.
pub type Stamps = BTreeMap<PathBuf, Option<FileStamp>>;

/// Returns the present stamps of `paths`.
pub fn stamps<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Stamps {
    paths.into_iter().map(|path| (path.clone(), stamp(path))).collect()
}

fn stamp(path: &Path) -> Option<FileStamp> {
    std::fs::metadata(path).ok().map(|metadata| FileStamp::of(&metadata))
}

/// Reads the configuration file at `path` and all files that it names. Returns also what was looked
/// at before it was read.
pub fn load(path: &Path) -> (Stamps, Result<GeneratorSet, LoadError>) {
    // Programs run in another directory.
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let base = absolute.parent().unwrap_or(Path::new("/"));
    let mut loader = Loader { file: path, base, stamps: Stamps::new(), bytes: 0 };
    let set = loader.load();
    (loader.stamps, set)
}

struct Loader<'a> {
    /// The configuration file.
    file: &'a Path,
    /// Its directory.
    base: &'a Path,
    stamps: Stamps,
    /// The size of what was read.
    bytes: usize,
}

impl Loader<'_> {
    fn load(&mut self) -> Result<GeneratorSet, LoadError> {
        let file = self.file.to_owned();
        let text = self.text(self.file, CONFIGURATION_BYTES_MAX);
        let text = text.map_err(|source| self.at(1, source))?;
        let mut command = Arguments::command();
        command.build();
        let flags: Vec<&str> =
            command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        let definitions = settings::read(&text, &flags)
            .map_err(|source| LoadError::Settings { path: file.clone(), source })?;
        let mut set = GeneratorSet { file, ..GeneratorSet::default() };
        for definition in definitions {
            let path = definition.path.clone();
            set.by_path.insert(path, Arc::new(self.generator(definition)?));
        }
        Ok(set)
    }

    fn at(&self, line: usize, source: ReadError) -> LoadError {
        LoadError::Read { path: self.file.to_owned(), line, source }
    }

    fn generator(&mut self, definition: Definition) -> Result<LoadedGenerator, LoadError> {
        let mut version = VersionHasher::new(&definition);
        let line = definition.line;
        let maker = match &definition.kind {
            Kind::File { file } => {
                let read = self.content(&self.base.join(file), definition.allow_empty);
                let content = read.map_err(|source| self.at(line, source))?;
                version.add(&content.bytes);
                Maker::Fixed(content)
            }
            Kind::Directory { directory, by } => {
                let (top, mut files) = (self.base.join(directory), BTreeMap::new());
                self.directory(&top, "", definition.allow_empty, &mut files)
                    .map_err(|source| self.at(line, source))?;
                for (name, content) in &files {
                    version.add(name.as_bytes());
                    version.add(&content.bytes);
                }
                Maker::Chosen { by: by.clone(), files }
            }
            Kind::Template { file, variables } => {
                let file = self.base.join(file);
                let source = self.text(&file, CONTENT_BYTES_MAX);
                let source = source.map_err(|source| self.at(line, source))?;
                version.add(source.as_bytes());
                let variables = match variables {
                    Some(path) => {
                        Some(self.variables(&self.base.join(path), line, &mut version)?)
                    }
                    None => None,
                };
                let template = Template::new(source, variables);
                Maker::Template(
                    template.map_err(|source| LoadError::Template { path: file, source })?,
                )
            }
            Kind::Mdb => Maker::Mdb,
            Kind::Program(program) => {
                let file = self.base.join(&program.program);
                let bytes = self.bytes(&file, PROGRAM_BYTES_MAX);
                let bytes = bytes.map_err(|source| self.at(line, source))?;
                version.add(&bytes);
                let program = outside::Program {
                    file,
                    user: program.user.as_deref().map(|user| self.user(line, user)).transpose()?,
                    settings: program.clone(),
                };
                let permits = Arc::new(Semaphore::new(program.settings.concurrency));
                Maker::Outside(Outside::Program(program), permits)
            }
            Kind::Certificate(settings, part) => {
                let register = self.authority(line, &settings.authority)?;
                version.add(register.authority().der());
                let (settings, loaded) = (Arc::clone(settings), version.finish());
                Maker::Pair(Arc::new(PairIssuer { settings, register, loaded }), *part)
            }
            Kind::Url(url) => {
                let permits = Arc::new(Semaphore::new(url.concurrency));
                Maker::Outside(Outside::Url(url.clone()), permits)
            }
        };
        let version = version.finish();
        Ok(LoadedGenerator { definition, maker, version })
    }

    /// Opens an authority.
    fn authority(&mut self, line: usize, directory: &Path) -> Result<Register, LoadError> {
        let directory = self.base.join(directory);
        for name in ["ca.pem", "ca.key", "chain.pem"] {
            let path = directory.join(name);
            self.stamps.insert(path.clone(), stamp(&path));
        }
        let path = self.file.to_owned();
        let register = Register::open(&directory).map_err(|source| {
            let source = Box::new(source);
            LoadError::Authority { path: path.clone(), line, source }
        })?;
        if !register.authority().certificate().is_for_machines() {
            return Err(LoadError::AuthorityForAll { path, line, directory });
        }
        Ok(register)
    }

    fn user(&self, line: usize, user: &str) -> Result<User, LoadError> {
        let none = || LoadError::User { path: self.file.to_owned(), line, user: user.to_owned() };
        User::from_name(user).ok().flatten().ok_or_else(none)
    }

    /// Reads a file of variables: TOML if its name ends so, or else JSON.
    fn variables(
        &mut self,
        path: &Path,
        line: usize,
        version: &mut VersionHasher,
    ) -> Result<Value, LoadError> {
        let text = self.text(path, VARIABLES_BYTES_MAX);
        let text = text.map_err(|source| self.at(line, source))?;
        version.add(text.as_bytes());
        let wrong = |why: String| LoadError::Variables { path: path.to_owned(), why };
        if path.extension().is_some_and(|extension| extension == "toml") {
            let parsed = text.parse::<toml::Table>().map_err(|error| {
                let line = line_at(&text, error.span().map_or(0, |span| span.start));
                wrong(format!("line {line}: {}", error.message().replace('\n', ", ")))
            })?;
            return Ok(Value::from(Serde(parsed)));
        }
        let parsed = serde_json::from_str::<serde_json::Value>(&text);
        let parsed = parsed.map_err(|error| wrong(error_chain(&error)))?;
        if !parsed.is_object() {
            return Err(wrong("line 1: expected an object: {\"NAME\": VALUE, ...}".to_owned()));
        }
        Ok(Value::from(Serde(parsed)))
    }

    /// Reads the files of a directory, by their paths below `name`. Hidden ones are left out.
    fn directory(
        &mut self,
        directory: &Path,
        name: &str,
        allow_empty: bool,
        files: &mut BTreeMap<String, Arc<Content>>,
    ) -> Result<(), ReadError> {
        if name.matches('/').count() >= DEPTH_MAX {
            return Err(ReadError::Depth(directory.to_owned()));
        }
        self.stamps.insert(directory.to_owned(), stamp(directory));
        let find = |why| ReadError::Find { path: directory.to_owned(), why };
        for entry in std::fs::read_dir(directory).map_err(find)? {
            let entry = entry.map_err(ReadError::Io)?;
            let path = entry.path();
            let own = entry.file_name();
            let own = own.to_str().ok_or_else(|| ReadError::Name(path.clone()))?;
            if own.starts_with('.') {
                continue;
            }
            let kind = entry.file_type().map_err(ReadError::Io)?;
            let slash = if name.is_empty() { "" } else { "/" };
            let name = format!("{name}{slash}{own}");
            if kind.is_dir() {
                self.directory(&path, &name, allow_empty, files)?;
            } else if kind.is_symlink() {
                return Err(ReadError::Link(path));
            } else {
                files.insert(name, self.content(&path, allow_empty)?);
            }
        }
        Ok(())
    }

    fn content(&mut self, path: &Path, allow_empty: bool) -> Result<Arc<Content>, ReadError> {
        let bytes = self.bytes(path, CONTENT_BYTES_MAX)?;
        if bytes.is_empty() && !allow_empty {
            return Err(ReadError::Empty(path.to_owned()));
        }
        Ok(Content::new(bytes))
    }

    fn text(&mut self, path: &Path, limit: usize) -> Result<String, ReadError> {
        String::from_utf8(self.bytes(path, limit)?).map_err(|error| {
            let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + valid.iter().filter(|&&byte| byte == b'\n').count();
            ReadError::Text { path: path.to_owned(), line }
        })
    }

    fn bytes(&mut self, path: &Path, limit: usize) -> Result<Vec<u8>, ReadError> {
        self.stamps.insert(path.to_owned(), stamp(path));
        if self.stamps.len() > SET_FILES_MAX {
            return Err(ReadError::SetFiles);
        }
        // Opening a pipe could block for ever.
        let find = |why| ReadError::Find { path: path.to_owned(), why };
        if !std::fs::metadata(path).map_err(find)?.is_file() {
            return Err(ReadError::Kind(path.to_owned()));
        }
        let mut bytes = Vec::new();
        let file = fs_err::File::open(path).map_err(ReadError::Io)?;
        let length = file.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(ReadError::Io)?;
        self.bytes += length;
        if length > limit {
            return Err(ReadError::TooLarge { path: path.to_owned(), limit });
        }
        if self.bytes > SET_BYTES_MAX {
            return Err(ReadError::SetBytes);
        }
        Ok(bytes)
    }
}
