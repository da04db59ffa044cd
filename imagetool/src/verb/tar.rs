//! `imagetool tar`: writes the tree of an image as a tar archive.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Leaf, Node, Totals, Tree};
use serde::Serialize;
use tempfile::NamedTempFile;
use tokio::sync::{mpsc, oneshot};
use tool::Format;

use super::get::warn;
use super::{Context, VerbResult, print_json};
use crate::archive::compression::{Compression, Compressor};
use crate::archive::writer::{self, WriteError};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::{plural_entries, size};
use crate::transfer::download::{self, DownloadError, ObjectSequence};
use crate::transfer::restore::NotRestored;

/// Number of pieces that may wait to be written.
const PIECES_MAX: usize = 64;

/// Small pieces are joined up to this size, in bytes.
const PIECE_BYTES: usize = 128 << 10;

/// Writes the tree of an image as a tar archive: the same image, the same bytes.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool tar base/debian-12.7 -o debian.tar.zst
  imagetool tar base/debian-12.7 | tar -t
  imagetool tar base/debian-12.7 |
      tar --xattrs --xattrs-include='*' --numeric-owner -xp -C /srv/root

The archive is a pax archive with its entries sorted by path. `imagetool add` makes the same tree
of it. GNU tar restores capabilities and access lists only with --xattrs-include='*', bsdtar with
-xp. Computed files are left out; exit code 3: there are some.")]
pub struct TarArgs {
    /// The name of the image.
    pub name: ImageName,
    /// File to write; it gets its name when it is complete. Default, and `-`: the standard output.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Compression. Default: by the extension of the file, such as .tar.gz, .tar.xz, .tar.zst or
    /// .tar.bz2.
    #[arg(long, value_enum, value_name = "HOW")]
    pub compress: Option<Compression>,
}

/// What is printed with `--format json`, if the archive does not go to the standard output.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    root: ObjectId,
    totals: Totals,
    file: String,
    left_out: Vec<String>,
}

/// An archive that could not be made.
#[derive(Debug, thiserror::Error)]
enum TarError {
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error("the image cannot be written as an archive")]
    Entry(#[from] WriteError),
    #[error("the archive cannot be written")]
    Closed,
}

/// Writes an image as an archive. After an error the output file is unchanged.
pub async fn run(context: &Context, args: TarArgs) -> VerbResult {
    let path = args.output.filter(|path| path.as_os_str() != "-");
    let by_name = || path.as_deref().map_or(Compression::None, Compression::of_name);
    let compression = args.compress.unwrap_or_else(by_name);
    if path.is_none() && io::stdout().is_terminal() {
        return Err(Failure::from_text("an archive cannot be written to a terminal")
            .hint("give a file with -o FILE, or redirect the output")
            .misuse());
    }
    let stop = daemon::stop_on_signals()
        .map_err(|error| Failure::from_text(format!("cannot wait for signals: {error}")))?;
    let work = async {
        let image = context.image(&args.name).await?;
        let tree = download::tree(&context.client, image.content.root, &context.meter).await;
        let tree = tree.map_err(|error| download::failure(&error))?;
        let output = Output::create(path.as_deref())?;
        let left_out = write(context, &tree, output.file(path.as_deref())?, compression).await?;
        output.persist(path.as_deref())?;
        Ok::<_, Failure>((tree, left_out))
    };
    let (tree, left_out) = tokio::select! {
        done = work => done?,
        () = stop.cancelled() => return Err(Failure::from_text("interrupted")),
    };
    if !left_out.is_empty() {
        warn(NotRestored::Computed, &left_out);
    }
    let totals = tree.root().totals();
    let entries = plural_entries(totals.entries);
    let file = path.as_deref().map_or("the standard output".into(), Path::to_string_lossy);
    eprintln!("Wrote {}: {entries}, {} to {file}.", args.name, size(totals.bytes));
    if context.format == Format::Json && path.is_some() {
        let left_out = left_out.iter().map(TreePath::to_string).collect();
        let (name, root, file) = (&args.name, tree.digest(), file.into_owned());
        print_json(&Report { name, root, totals, file, left_out })?;
    }
    Ok(if totals.computed == 0 { Outcome::Done } else { Outcome::Partly })
}

/// The output for an archive.
enum Output {
    /// The standard output, or an existing file that is not a regular file.
    Direct,
    /// A file that gets its name when it is complete, and is removed otherwise.
    New(NamedTempFile),
}

impl Output {
    fn create(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self::Direct) };
        if std::fs::metadata(path).is_ok_and(|status| !status.is_file()) {
            return Ok(Self::Direct);
        }
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".");
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        std::fs::metadata(directory).map_err(|error| cannot_write(path, &error))?;
        tempfile::Builder::new()
            .prefix(&name)
            .suffix(".incomplete")
            .permissions(std::fs::Permissions::from_mode(0o666))
            .tempfile_in(directory)
            .map(Self::New)
            .map_err(|error| cannot_write(path, &error))
    }

    fn file(&self, path: Option<&Path>) -> Result<File, Failure> {
        use std::os::fd::AsFd as _;
        let file = match (self, path) {
            (Self::New(file), _) => file.as_file().try_clone(),
            (Self::Direct, Some(path)) => File::options().write(true).open(path),
            (Self::Direct, None) => io::stdout().as_fd().try_clone_to_owned().map(File::from),
        };
        file.map_err(|error| cannot_write(path.unwrap_or(Path::new("-")), &error))
    }

    fn persist(self, path: Option<&Path>) -> Result<(), Failure> {
        let (Self::New(file), Some(path)) = (self, path) else { return Ok(()) };
        let persisted = file.as_file().sync_all();
        let persisted = persisted.and_then(|()| file.persist(path).map_err(|error| error.error));
        persisted.map(drop).map_err(|error| cannot_write(path, &error))
    }
}

fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    Failure::from_text(format!("cannot write `{}`: {error}", path.display()))
}

/// Writes `tree` to `file` and returns the paths that were left out.
async fn write(
    context: &Context,
    tree: &Tree,
    file: File,
    compression: Compression,
) -> Result<Vec<TreePath>, Failure> {
    let (sender, pieces) = mpsc::channel(PIECES_MAX);
    let (done, written) = oneshot::channel();
    // A separate thread: unlike a thread of the runtime, one that blocks on a pipe does not prevent
    // the exit of the program.
    std::thread::spawn(move || {
        let _ = done.send(write_pieces(pieces, file, compression));
    });
    let produced = produce(context, tree, sender).await;
    context.meter.finish();
    let written = written.await.map_err(|_| io::Error::other("the writer has panicked"));
    match (produced, written.and_then(|written| written)) {
        (Err(TarError::Download(error)), _) => Err(download::failure(&error)),
        (Err(error @ TarError::Entry(_)), _) => Err(Failure::new(&error)),
        (_, Err(error)) => Err(Failure::from_text(format!("cannot write the archive: {error}"))),
        (Err(error @ TarError::Closed), Ok(())) => Err(Failure::new(&error)),
        (Ok(left_out), Ok(())) => Ok(left_out),
    }
}

fn write_pieces(
    mut pieces: mpsc::Receiver<Bytes>,
    file: File,
    compression: Compression,
) -> io::Result<()> {
    let mut output = Compressor::new(compression, file)?;
    while let Some(piece) = pieces.blocking_recv() {
        output.write_all(&piece)?;
    }
    output.finish()?.flush()
}

/// Joins small pieces and passes them on.
struct Pieces {
    sender: mpsc::Sender<Bytes>,
    buffer: Vec<u8>,
}

impl Pieces {
    async fn add(&mut self, bytes: &[u8]) -> Result<(), TarError> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() < PIECE_BYTES { Ok(()) } else { self.flush().await }
    }

    async fn flush(&mut self) -> Result<(), TarError> {
        let piece = std::mem::take(&mut self.buffer).into();
        self.sender.send(piece).await.map_err(|_| TarError::Closed)
    }
}

async fn produce(
    context: &Context,
    tree: &Tree,
    sender: mpsc::Sender<Bytes>,
) -> Result<Vec<TreePath>, TarError> {
    let mut objects = Vec::new();
    for (_, node) in tree.nodes() {
        if let Node::Leaf(Leaf::File(file)) = node
            && file.size_bytes > 0
        {
            objects.push((file.object.id(), file.size_bytes));
        }
    }
    let total = objects.iter().fold(0_u64, |sum, (_, size_bytes)| sum.saturating_add(*size_bytes));
    context.meter.start("Fetching files", Unit::Bytes, Some(total));
    let mut contents = ObjectSequence::new(&context.client, objects);
    let mut pieces = Pieces { sender, buffer: Vec::new() };
    let mut left_out = Vec::new();
    for (path, node) in tree.nodes() {
        let carrier = match &node {
            Node::Leaf(Leaf::HardLink(target)) => tree.file(target),
            Node::Leaf(Leaf::Computed(_)) => {
                left_out.push(path);
                continue;
            }
            _ => None,
        };
        pieces.add(&writer::headers(&path, &node, carrier.as_ref())?).await?;
        let Node::Leaf(Leaf::File(file)) = node else { continue };
        if file.size_bytes == 0 {
            continue;
        }
        let in_file = |error: DownloadError| TarError::Download(error.of_file(&path));
        if let Some(mut content) = contents.next().await.map_err(in_file)? {
            while let Some(chunk) = content.chunk().await.map_err(in_file)? {
                context.meter.add(chunk.len() as u64);
                pieces.add(&chunk).await?;
            }
        }
        pieces.add(writer::padding(file.size_bytes)).await?;
    }
    pieces.add(&writer::END).await?;
    pieces.flush().await?;
    Ok(left_out)
}
