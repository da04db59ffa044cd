//! `imagetool get-file`: copies one file out of an image.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use api::object_server::GetObjectsRequest;
use api::object_stream::Head;
use model::image::ImageName;
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use model::tree::{File, Leaf};

use super::{Context, Ended, find, path_argument};
use crate::download::DownloadError;
use crate::failure::{Failure, Outcome};
use crate::listings::Sight;
use crate::output::size;
use crate::progress::Unit;

/// The mode of a new file, less what the umask takes.
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

/// Copies a file.
///
/// # Errors
///
/// [`Failure`]; then the output file is as it was.
pub async fn run(context: &Context, args: GetFileArgs) -> Ended {
    let stop = daemon::stop_on_signals()
        .map_err(|error| Failure::of_text(format!("cannot wait for signals: {error}")))?;
    tokio::select! {
        copied = copy(context, &args) => copied,
        // The temporary file is removed when the copying is dropped.
        () = stop.cancelled() => {
            Err(Failure::of_text("interrupted").hint("nothing was left behind"))
        }
    }
}

async fn copy(context: &Context, args: &GetFileArgs) -> Ended {
    let file = file_of(context, args).await?;
    if args.output.as_os_str() == "-" {
        receive(context, &file, &args.path, &mut io::stdout().lock(), "the standard output")
            .await?;
        return Ok(Outcome::Done);
    }
    let shown = args.output.display().to_string();
    let failed = |error: io::Error| Failure::of_text(format!("cannot write `{shown}`: {error}"));
    // In the same directory, so that it can take the place of the file in one step.
    let directory = match args.output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(MODE);
    let mut temporary = tempfile::Builder::new()
        .prefix(".imagetool-")
        .permissions(permissions)
        .tempfile_in(directory)
        // Without the name of the temporary file, which tells nobody anything.
        .map_err(|error| failed(error.kind().into()))?;
    receive(context, &file, &args.path, temporary.as_file_mut(), &shown).await?;
    temporary.as_file().sync_all().map_err(failed)?;
    temporary.persist(&args.output).map_err(|error| failed(error.error))?;
    let (name, path) = (&args.name, &args.path);
    eprintln!("Got {path} of {name}: {} in {shown}.", size(file.size_bytes));
    Ok(Outcome::Done)
}

/// The regular file at the path.
async fn file_of(context: &Context, args: &GetFileArgs) -> Result<File, Failure> {
    let (name, path) = (&args.name, &args.path);
    let mut found = find(context, name, path).await?;
    let mut sight = found.sight.clone();
    if let Sight::Leaf(Leaf::HardLink(first)) = &sight {
        let first = first.clone();
        sight = found.look_at(context, &first).await?;
    }
    let refused = |what: &str| Failure::of_text(format!("{path} of {name} is {what}"));
    match sight {
        Sight::Leaf(Leaf::File(file)) => Ok(file),
        Sight::Leaf(Leaf::Symlink(symlink)) => {
            let failure = refused(&format!("a symlink to {}", symlink.target));
            Err(failure.hint("symlinks are not followed: name the path that it leads to"))
        }
        Sight::Leaf(Leaf::Computed(computed)) => {
            let source = computed.source;
            Err(refused(&format!("computed for each machine by {source}: it has no content here")))
        }
        Sight::Directory(_) => {
            Err(refused("a directory").hint("`imagetool get` makes the whole tree of an image"))
        }
        Sight::Leaf(_) => Err(refused("no regular file")),
        Sight::Nothing | Sight::Unknown => Err(found.not_there()),
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
        Failure::of_download(&DownloadError::File { path: path.clone(), source })
    };
    let (id, want) = (file.object, file.size_bytes);
    let request = GetObjectsRequest { ids: vec![id] };
    let reader = context.client.get_objects(&request).await;
    let mut reader = reader.map_err(|source| failed(source.into()))?;
    let head = reader.head().await.map_err(|source| failed(source.into()))?;
    expect_object(&head, id, want).map_err(failed)?;
    context.meter.start("Fetching", Unit::Bytes, Some(want));
    let mut hasher = Hasher::new(id.algorithm());
    while let Some(chunk) = reader.chunk().await.map_err(|source| failed(source.into()))? {
        hasher.update(&chunk);
        match output.write_all(&chunk) {
            // A reader that has seen enough is no failure.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written
                .map_err(|error| Failure::of_text(format!("cannot write to {shown}: {error}")))?,
        }
        context.meter.add(chunk.len() as u64);
    }
    let flushed = output.flush();
    flushed.map_err(|error| Failure::of_text(format!("cannot write to {shown}: {error}")))?;
    context.meter.finish();
    let got = hasher.finish();
    if got == id { Ok(()) } else { Err(failed(DownloadError::Digest { want: id, got })) }
}

fn expect_object(head: &Head, want: ObjectId, want_bytes: u64) -> Result<(), DownloadError> {
    match head {
        Head::Object { id, size_bytes } if *id == want && *size_bytes == want_bytes => Ok(()),
        Head::Object { id, size_bytes } if *id == want => {
            Err(DownloadError::Size { id: want, want: want_bytes, got: *size_bytes })
        }
        Head::Absent(id) if *id == want => Err(DownloadError::Absent { id: want }),
        Head::Object { id, .. } | Head::Absent(id) => {
            Err(DownloadError::Other { want, got: id.to_string() })
        }
        Head::End => Err(DownloadError::Other { want, got: "the end".to_owned() }),
    }
}
