//! `fs2objectcache`: moves the regular files of a tree into subd's object cache.
//!
//! A machine that is installed again then fetches only what it does not have: its old files are
//! objects of the new tree. Nothing of the old tree is trusted, because an object is used only by
//! its hash.

pub mod import_files;
pub mod writers;

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use daemon::{EXIT_DONE, EXIT_FAILED, EXIT_MISUSE, EXIT_PARTLY, exit};
use model::display::{counted, error_chain, size};
use model::filter::{Filter, PatternError, Patterns};
use model::machine_specific::MACHINE_SPECIFIC;
use model::object::Algorithm;
use model::path::TreePath;
use model::scope::SUBD_DIRECTORY;
use tool::Format;

use crate::import_files::{Import, ImportError, Sums};
use subd::cache::{Cache, CacheError};
use subd::root::{Directory, Root, RootError, subd_directory};
use subd::state::directories::{Directories, own_directory};
use subd::state::persisted_state::{PersistError, StateDirectory};
use subd::update::journal;

/// How often progress is shown.
const PACE: Duration = Duration::from_millis(250);

/// Empties a tree: moves its regular files into subd's object cache, for a fast new installation.
///
/// Each file is hashed and becomes an object of the cache; equal ones become one. Directories,
/// symlinks and devices stay. An update to an image afterwards fetches only what was not there:
///
///   fs2objectcache --root /mnt --filter filter
///
///   subd --root /mnt --listen 127.0.0.1:6969 &
///
///   subtool --imageserver images push-image base/debian-12
///
/// Files that only root could write are moved, all others are copied and then removed, so that no
/// process can change an object through an open descriptor. Files that are being written stay. It
/// can be killed at any time and started again: no content is lost.
///
/// Host keys, /etc/fstab, network settings and other files that differ on each machine stay.
///
/// Exit codes: 0 done, 1 failed, 2 misuse, 3 some files stay.
#[derive(Debug, Parser)]
#[command(name = "fs2objectcache", version, verbatim_doc_comment)]
pub struct Arguments {
    /// The tree to empty. No subd may be running on it.
    #[arg(long, value_name = "DIR")]
    root: PathBuf,

    /// The object cache, instead of /.subd/objects below the root. On another file-system
    /// everything is copied.
    #[arg(long, value_name = "DIR")]
    objects: Option<PathBuf>,

    /// The digest of the images that will be installed.
    #[arg(long, value_enum, default_value_t = Digest::Blake3)]
    digest: Digest,

    /// Skip paths that match this regular expression, which is anchored at the start of the path,
    /// and what lies below them. May be repeated.
    #[arg(long, value_name = "REGEX")]
    exclude: Vec<String>,

    /// Skip paths that the filter of an image keeps: a file as for `imagetool add`.
    #[arg(long, value_name = "FILE")]
    filter: Option<PathBuf>,

    /// Take host keys, /etc/fstab and other files that differ on each machine too. No image brings
    /// them back.
    #[arg(long)]
    take_own: bool,

    /// Do not ask.
    #[arg(long)]
    yes: bool,

    /// Do not ask, and empty even the root of the running system.
    #[arg(long)]
    really_empty_this_tree: bool,

    /// How to print what was done.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Digest {
    /// BLAKE3
    Blake3,
    /// SHA-512
    Sha512,
}

/// An error of the program.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("invalid --exclude")]
    Exclude {
        #[from]
        source: PatternError,
    },
    #[error("cannot read the filter `{}`", path.display())]
    ReadFilter { path: PathBuf, source: std::io::Error },
    #[error("invalid filter `{}`", path.display())]
    Filter { path: PathBuf, source: PatternError },
    #[error("`{}` is the root of the running system: it would not survive that", path.display())]
    Running { path: PathBuf },
    #[error("not confirmed: nothing was done")]
    NotConfirmed,
    #[error("cannot read the status of `{}`", path.display())]
    Look { path: PathBuf, source: std::io::Error },
    #[error("`{}` cannot be the directory of a cache", path.display())]
    Objects { path: PathBuf },
    #[error("cannot use `{}`", path.display())]
    Root { path: PathBuf, source: RootError },
    #[error("cannot use `{}`", path.display())]
    Locked { path: PathBuf, source: PersistError },
    #[error("an update of `{}` was cut short, and has to be finished first", path.display())]
    Unfinished { path: PathBuf },
    #[error("cannot open the object cache")]
    Cache {
        #[from]
        source: CacheError,
    },
    #[error("stopped; files that were taken are in the cache, the others are in the tree")]
    Import {
        #[from]
        source: ImportError,
    },
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Exclude { .. }
            | Self::ReadFilter { .. }
            | Self::Filter { .. }
            | Self::Running { .. }
            | Self::NotConfirmed => EXIT_MISUSE,
            _ => EXIT_FAILED,
        }
    }

    fn hints(&self) -> &'static [&'static str] {
        match self {
            Self::Running { .. } => &["boot another system, mount this one, and use --root DIR"],
            Self::NotConfirmed => &["--yes confirms without being asked"],
            Self::Locked { source: PersistError::Locked, .. } => {
                &["stop the subd that manages this tree first"]
            }
            Self::Unfinished { .. } => &["start subd on this tree, or subd --recover"],
            Self::Import { .. } => &["start it again: it goes on where it stopped"],
            _ => &[],
        }
    }
}

/// Runs the program, with the arguments of this process.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(sums) => print(&arguments, &sums),
        Err(failure) => exit(failure.exit_code(), &error_chain(&failure), failure.hints()),
    }
}

fn print(arguments: &Arguments, sums: &Sums) -> ExitCode {
    let text = match arguments.format {
        Format::Json => {
            serde_json::to_string_pretty(sums).expect("sums are plain structures") + "\n"
        }
        Format::Table => format!(
            "moved    {}\ncopied   {}\nequal    {}\nbytes    {}\nleft     {}\nobjects  {}\n",
            sums.moved,
            sums.copied,
            sums.duplicates,
            size(sums.bytes),
            sums.left,
            sums.objects
        ),
    };
    for (path, why) in &sums.left_paths {
        eprintln!("left: {path}: {why}");
    }
    if let Err(error) = std::io::stdout().write_all(text.as_bytes()) {
        return exit(EXIT_FAILED, &format!("cannot write to stdout: {error}"), &[]);
    }
    ExitCode::from(if sums.left == 0 { EXIT_DONE } else { EXIT_PARTLY })
}

/// What is opened before anything is moved.
struct Opened {
    root: Root,
    /// The root of the cache, if that is not below the root of the tree.
    elsewhere: Option<Root>,
    cache: Cache,
    intake: Directory,
    _lock: StateDirectory,
}

fn run(arguments: &Arguments) -> Result<Sums, Failure> {
    let mut lines = arguments.exclude.clone();
    if let Some(path) = &arguments.filter {
        lines.extend_from_slice(read_filter(path)?.lines());
    }
    if !arguments.take_own {
        lines.extend(MACHINE_SPECIFIC.map(|one| one.line.to_owned()));
    }
    let mut exclusions = Patterns::new(&lines)?;
    if is_running_system(&arguments.root)? && !arguments.really_empty_this_tree {
        return Err(Failure::Running { path: arguments.root.clone() });
    }
    confirm(arguments)?;
    let opened = open(arguments)?;
    if let Some(objects) = &arguments.objects {
        // The cache may lie in the tree that is emptied.
        lines.extend(below(&arguments.root, objects)?);
        exclusions = Patterns::new(&lines)?;
    }
    let algorithm = match arguments.digest {
        Digest::Blake3 => Algorithm::Blake3,
        Digest::Sha512 => Algorithm::Sha512,
    };
    let (shows, mut shown) = (std::io::stderr().is_terminal(), Instant::now());
    let mut progress = |files, bytes| {
        if shows && shown.elapsed() >= PACE {
            eprint!("\r\x1b[K  {}, {}", counted(files, "file"), size(bytes));
            shown = Instant::now();
        }
    };
    let Opened { root, elsewhere, cache, intake, _lock } = &opened;
    let home = elsewhere.as_ref().unwrap_or(root);
    let import = Import::new(root, home, intake, cache, algorithm, &exclusions, &mut progress);
    let sums = import.run();
    if shows {
        eprint!("\r\x1b[K");
    }
    Ok(sums?)
}

fn read_filter(path: &Path) -> Result<Filter, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Failure::ReadFilter { path: path.to_owned(), source })?;
    Filter::from_text(&text).map_err(|source| Failure::Filter { path: path.to_owned(), source })
}

/// True if `path` is the root directory of this very process, under whatever name.
fn is_running_system(path: &Path) -> Result<bool, Failure> {
    let look = |path: &Path| {
        std::fs::metadata(path).map_err(|source| Failure::Look { path: path.to_owned(), source })
    };
    let (given, running) = (look(path)?, look(Path::new("/"))?);
    Ok((given.dev(), given.ino()) == (running.dev(), running.ino()))
}

/// Prints what will be done, and asks for confirmation unless a flag confirms it.
fn confirm(arguments: &Arguments) -> Result<(), Failure> {
    let root = arguments.root.display();
    let objects = match &arguments.objects {
        Some(objects) => objects.display().to_string(),
        None => arguments.root.join(&SUBD_DIRECTORY[1..]).join("objects").display().to_string(),
    };
    let but = match arguments.take_own {
        true => "",
        false => ", except the machine's own, such as /etc/fstab",
    };
    eprintln!(
        "All regular files of {root} are taken out of the tree and become objects in {objects}\
         {but}.\n\
         What uses {root} cannot work until an image is pushed to it. Other file-systems below it \
         stay as they are."
    );
    if arguments.yes || arguments.really_empty_this_tree {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::NotConfirmed);
    }
    eprint!("Type `yes` to go on: ");
    let mut answer = String::new();
    match std::io::stdin().lock().read_line(&mut answer) {
        Ok(_) if answer.trim() == "yes" => Ok(()),
        _ => Err(Failure::NotConfirmed),
    }
}

fn open(arguments: &Arguments) -> Result<Opened, Failure> {
    let bad = |source| Failure::Root { path: arguments.root.clone(), source };
    let root = Root::open(&arguments.root).map_err(bad)?;
    let state = Directories::state(&root, None).map_err(bad)?;
    let lock = StateDirectory::lock(state)
        .map_err(|source| Failure::Locked { path: arguments.root.clone(), source })?;
    let home = Directories::open(&root).map_err(bad)?;
    // The entries that the journal names must stay where the update left them.
    if !matches!(journal::read(&home.journal), Ok(None)) {
        return Err(Failure::Unfinished { path: arguments.root.clone() });
    }
    let Some(objects) = &arguments.objects else {
        let intake =
            root.directory(&subd_directory()).and_then(|own| own_directory(&own, b"intake"));
        let (cache, _) = Cache::open(home.objects)?;
        return Ok(Opened {
            intake: intake.map_err(bad)?,
            elsewhere: None,
            cache,
            root,
            _lock: lock,
        });
    };
    let no_cache = || Failure::Objects { path: objects.clone() };
    let name = objects.file_name().ok_or_else(no_cache)?.as_encoded_bytes();
    let parent = match objects.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Err(no_cache()),
    };
    let bad = |source| Failure::Root { path: parent.to_owned(), source };
    let elsewhere = Root::open(parent).map_err(bad)?;
    let top = elsewhere.directory(&TreePath::root()).map_err(bad)?;
    let intake = own_directory(&top, &[name, b".intake"].concat()).map_err(bad)?;
    let (cache, _) = Cache::open(Arc::new(own_directory(&top, name).map_err(bad)?))?;
    Ok(Opened { root, elsewhere: Some(elsewhere), cache, intake, _lock: lock })
}

/// Returns the exclusions that keep a cache at `objects` out of the import of `root`, if it is
/// there.
fn below(root: &Path, objects: &Path) -> Result<Vec<String>, Failure> {
    let look = |path: &Path| {
        let real = path.canonicalize();
        real.map_err(|source| Failure::Look { path: path.to_owned(), source })
    };
    let (root, objects) = (look(root)?, look(objects)?);
    let Ok(inside) = objects.strip_prefix(&root) else { return Ok(Vec::new()) };
    let literal: String = inside
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .map(|byte| match byte {
            byte if byte.is_ascii_alphanumeric() || *byte == b'/' => char::from(*byte).to_string(),
            byte => format!("\\x{byte:02x}"),
        })
        .collect();
    Ok(vec![format!("/{literal}(\\.intake)?$")])
}
