//! `imagetool show-file` and `get-file`: single entries of an image.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::object_server::GetObjectsRequest;
use model::image::ImageName;
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use model::tree::encode::Listing;
use model::tree::{File, Leaf, Node};
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, path_argument, print, print_json};
use crate::directory_cache::{DirectoryCache, Lookup};
use crate::output::entry::EntryRecord;
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::size;
use crate::transfer::directories;
use crate::transfer::download::{self, DownloadError, next_object};
use model::display::grouped;

/// The result of looking up a path in an image.
struct Found {
    name: ImageName,
    path: TreePath,
    root: ObjectId,
    cache: DirectoryCache,
    lookup: Lookup,
}

/// Looks up `path` in the image `name`; fetches only the directories above it.
async fn find(context: &Context, name: &ImageName, path: &TreePath) -> Result<Found, Failure> {
    let root = context.image(name).await?.content.root;
    let (name, path, cache) = (name.clone(), path.clone(), DirectoryCache::default());
    let mut found = Found { name, path: path.clone(), root, cache, lookup: Lookup::NotFetched };
    found.lookup = found.lookup(context, &path).await?;
    Ok(found)
}

impl Found {
    /// Looks up another path of the same image.
    async fn lookup(&mut self, context: &Context, path: &TreePath) -> Result<Lookup, Failure> {
        let root = self.root;
        let fetch_for = |cache: &mut DirectoryCache| cache.find(root, path);
        let (client, meter) = (&context.client, &context.meter);
        let lookup = directories::fetch_for(client, &mut self.cache, meter, fetch_for).await;
        lookup.map_err(|error| download::failure(&error))
    }

    /// Returns the directory with that digest.
    async fn listing(&mut self, context: &Context, id: ObjectId) -> Result<Arc<Listing>, Failure> {
        let fetch_for = |cache: &mut DirectoryCache| cache.get(id);
        let (client, meter) = (&context.client, &context.meter);
        let listing = directories::fetch_for(client, &mut self.cache, meter, fetch_for).await;
        let listing = listing.map_err(|error| download::failure(&error))?;
        listing.ok_or_else(|| self.not_there())
    }

    /// Returns the failure for an absent path.
    fn not_there(&self) -> Failure {
        let Self { name, path, .. } = self;
        Failure::from_text(format!("{name} has no {path}"))
            .hint(format!("`imagetool show {name} --tree` shows all that it has"))
    }
}

/// Shows what an image has at a path: kind, mode, owner, times, digest, attributes.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool show-file base/debian-12.7 /etc/passwd
  imagetool show-file base/debian-12.7 /usr/bin/ping --format json | jq .xattrs

Symlinks are not followed. A hard link is shown with the file that it is a name of.")]
pub struct ShowFileArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The path in the image; `\\xHH` stands for a byte.
    #[arg(value_parser = path_argument())]
    pub path: TreePath,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report<'call> {
    image: &'call ImageName,
    path: &'call TreePath,
    #[serde(flatten)]
    entry: EntryRecord,
    /// Number of entries of a directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<usize>,
}

pub async fn show_file(context: &Context, args: ShowFileArgs) -> VerbResult {
    let mut found = find(context, &args.name, &args.path).await?;
    let mut entries = None;
    let node = match found.lookup.clone() {
        Lookup::Leaf(leaf) => Node::Leaf(leaf),
        Lookup::Directory(id) => {
            let listing = found.listing(context, id).await?;
            entries = Some(listing.entries.len());
            Node::Directory(listing.metadata.clone())
        }
        Lookup::Absent | Lookup::NotFetched => return Err(found.not_there()),
    };
    let entry = match &node {
        Node::Leaf(Leaf::HardLink(first)) => {
            let file = found.lookup(context, first).await?;
            let entry = match file {
                Lookup::Leaf(leaf) => EntryRecord::of(&Node::Leaf(leaf)),
                _ => EntryRecord::of(&node),
            };
            EntryRecord { link_to: Some(first.clone()), ..entry }
        }
        node => EntryRecord::of(node),
    };
    match context.format {
        Format::Json => {
            print_json(&Report { image: &args.name, path: &args.path, entry, entries })?;
        }
        Format::Table => {
            let mut lines = vec![("Path:", args.path.to_string())];
            lines.extend(entry.lines());
            lines.extend(entries.map(|entries| ("Entries:", grouped(entries as u64))));
            let lines = lines.iter().map(|(label, value)| format!("{label:<10} {value}\n"));
            print(&lines.collect::<String>())?;
        }
    }
    Ok(Outcome::Done)
}

/// Mode of a new file, before the umask.
const MODE: u32 = 0o666;

/// Copies the content of one file of an image to the standard output or to a file.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool get-file base/debian-12.7 /etc/ssh/sshd_config
  imagetool get-file base/debian-12.7 /boot/vmlinuz-6.1.0-18-amd64 -o vmlinuz

The content is verified by its digest. With -o the file appears, or is replaced, when it is
complete and verified; on the standard output an error at the end means that what was printed
is not the file. Mode and owner are not copied: `get` makes whole trees with all attributes.")]
pub struct GetFileArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The path in the image; `\\xHH` stands for a byte. Symlinks are not followed.
    #[arg(value_parser = path_argument())]
    pub path: TreePath,
    /// Write to this file; `-` is the standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
}

/// Copies a file. After an error the output file is unchanged.
pub async fn get_file(context: &Context, args: GetFileArgs) -> VerbResult {
    let stop = daemon::stop_on_signals()
        .map_err(|error| Failure::from_text(format!("cannot wait for signals: {error}")))?;
    tokio::select! {
        copied = copy_file(context, &args) => copied,
        // The temporary file is removed when the copying is dropped.
        () = stop.cancelled() => {
            Err(Failure::from_text("interrupted").hint("nothing was left behind"))
        }
    }
}

async fn copy_file(context: &Context, args: &GetFileArgs) -> VerbResult {
    let file = find_file(context, args).await?;
    if args.output.as_os_str() == "-" {
        receive(context, &file, &args.path, &mut io::stdout().lock(), "the standard output")
            .await?;
        return Ok(Outcome::Done);
    }
    let shown = args.output.display().to_string();
    let failed = |error: io::Error| Failure::from_text(format!("cannot write `{shown}`: {error}"));
    // In the same directory, so that it can replace the file atomically.
    let directory = match args.output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(MODE);
    let mut temporary = tempfile::Builder::new()
        .prefix(".imagetool-")
        .permissions(permissions)
        .tempfile_in(directory)
        // Without the name of the temporary file.
        .map_err(|error| failed(error.kind().into()))?;
    receive(context, &file, &args.path, temporary.as_file_mut(), &shown).await?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(&args.output).map_err(|error| failed(error.error))?;
    let (name, path) = (&args.name, &args.path);
    eprintln!("Got {path} of {name}: {} in {shown}.", size(file.size_bytes));
    Ok(Outcome::Done)
}

/// Returns the regular file at the path.
async fn find_file(context: &Context, args: &GetFileArgs) -> Result<File, Failure> {
    let (name, path) = (&args.name, &args.path);
    let mut found = find(context, name, path).await?;
    let mut lookup = found.lookup.clone();
    if let Lookup::Leaf(Leaf::HardLink(first)) = &lookup {
        let first = first.clone();
        lookup = found.lookup(context, &first).await?;
    }
    let refused = |what: &str| Failure::from_text(format!("{path} of {name} is {what}"));
    match lookup {
        Lookup::Leaf(Leaf::File(file)) => Ok(file),
        Lookup::Leaf(Leaf::Symlink(symlink)) => {
            let failure = refused(&format!("a symlink to {}", symlink.target));
            Err(failure.hint("symlinks are not followed: name the path that it leads to"))
        }
        Lookup::Leaf(Leaf::Computed(computed)) => {
            let source = computed.source;
            Err(refused(&format!("computed for each machine by {source}: it has no content here")))
        }
        Lookup::Directory(_) => {
            Err(refused("a directory").hint("`imagetool get` makes the whole tree of an image"))
        }
        Lookup::Leaf(_) => Err(refused("no regular file")),
        Lookup::Absent | Lookup::NotFetched => Err(found.not_there()),
    }
}

/// Receives the content of `file`, and verifies it.
async fn receive(
    context: &Context,
    file: &File,
    path: &TreePath,
    output: &mut impl Write,
    shown: &str,
) -> Result<(), Failure> {
    let failed = |error: DownloadError| {
        let source = Box::new(error);
        download::failure(&DownloadError::File { path: path.clone(), source })
    };
    let (id, want) = (file.object.id(), file.size_bytes);
    let request = GetObjectsRequest { ids: vec![id] };
    let reader = context.client.get_objects(&request).await;
    let mut reader = reader.map_err(|source| failed(source.into()))?;
    let got = next_object(&mut reader, id).await.map_err(failed)?;
    if got != want {
        return Err(failed(DownloadError::Size { id, want, got }));
    }
    context.meter.start("Fetching", Unit::Bytes, Some(want));
    let mut hasher = Hasher::new(id.algorithm());
    while let Some(chunk) = reader.chunk().await.map_err(|source| failed(source.into()))? {
        hasher.update(&chunk);
        match output.write_all(&chunk) {
            // A closed pipe is not a failure.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written
                .map_err(|error| Failure::from_text(format!("cannot write to {shown}: {error}")))?,
        }
        context.meter.add(chunk.len() as u64);
    }
    let flushed = output.flush();
    flushed.map_err(|error| Failure::from_text(format!("cannot write to {shown}: {error}")))?;
    context.meter.finish();
    let got = hasher.finish();
    if got == id { Ok(()) } else { Err(failed(DownloadError::Digest { want: id, got })) }
}
