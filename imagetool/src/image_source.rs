//! The source of an image or of a layer: a directory, an archive, or an image of another tool. The
//! kind is detected from the content.

pub mod directory;
pub mod oci;
pub mod sub;

use std::io;
use std::path::{Path, PathBuf};

use model::filter::Filter;
use model::object::Algorithm;
use model::tree::TreeBuilder;

use self::directory::DirectoryError;
use self::oci::OciError;
use self::oci::platform::{ChoiceError, ImageSelection, Platform};
use crate::archive::input::Section;
use crate::archive::layer::{Layer, LayeredTree, Whiteouts};
use crate::archive::{Archive, ArchiveError, open_file};
use crate::output::failure::Failure;
use crate::output::progress::Meter;
use crate::service_needs::DroppedDirectory;
use crate::transfer::contents::Contents;

/// Flags that say how a source is read.
#[derive(Clone, Debug, clap::Args)]
pub struct SourceArgs {
    /// Of an OCI or Docker image for several platforms, take the one for these machines, such as
    /// linux/arm64. If not given: the only one, or the one for machines like this.
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<Platform>,
    /// Of several OCI or Docker images, take the one with this name or tag.
    #[arg(long, value_name = "NAME")]
    pub image_ref: Option<String>,
    /// Take an archive or directory as it is, even if it is an OCI or Docker image.
    #[arg(long, conflicts_with_all = ["platform", "image_ref"])]
    pub plain: bool,
}

/// The source of an image or of a layer.
pub struct Source {
    path: PathBuf,
    kind: SourceKind,
}

enum SourceKind {
    Directory,
    Archive(Archive),
}

/// The tree that was read from a source, applied to the lower layers.
pub struct SourceTree {
    /// All entries.
    pub builder: TreeBuilder,
    /// Where the contents of the files of the source are.
    pub contents: Box<dyn Contents>,
    /// Directories that were not read, because the filter keeps them.
    pub dropped: Vec<DroppedDirectory>,
}

impl Source {
    /// Opens the source at `path`; `-` is an archive on the standard input.
    pub fn open(path: &Path, args: &SourceArgs, meter: &Meter) -> Result<Self, Failure> {
        let wanted = ImageSelection {
            platform: args.platform.clone(),
            own: Platform::of_architecture(std::env::consts::ARCH),
            name: args.image_ref.clone(),
        };
        let in_image = |error: OciError| oci_failure(path, &error);
        let (found, other) = if path.is_dir() {
            let found = match args.plain {
                true => None,
                false => oci::open_directory(path, &wanted, meter).map_err(in_image)?,
            };
            (found, SourceKind::Directory)
        } else {
            let section = Section::whole(open_file(path).map_err(|error| Failure::new(&error))?);
            let found = match args.plain {
                true => None,
                false => oci::open_archive(&section, &wanted, meter).map_err(in_image)?,
            };
            (found, SourceKind::Archive(Archive::of_section(section)))
        };
        if found.is_none() && (args.platform.is_some() || args.image_ref.is_some()) {
            let message = format!("{} is not an OCI or Docker image", path.display());
            return Err(Failure::from_text(message)
                .hint("--platform and --image-ref choose among the images of one"));
        }
        Ok(Self { path: path.to_owned(), kind: found.map_or(other, SourceKind::Archive) })
    }

    /// Reads a whole tree. Paths of a directory that `filter` keeps are not read.
    pub fn read(
        self,
        algorithm: Algorithm,
        filter: Option<&Filter>,
        meter: &Meter,
    ) -> Result<SourceTree, Failure> {
        match self.kind {
            SourceKind::Directory => read_directory(&self.path, algorithm, filter, meter),
            SourceKind::Archive(mut archive) => {
                let builder = archive.read(algorithm, meter);
                let builder = builder.map_err(|error| archive_failure(&self.path, &error))?;
                Ok(SourceTree { builder, contents: Box::new(archive), dropped: Vec::new() })
            }
        }
    }

    /// Reads a layer and applies it to `lower`, with whiteouts. The root of a directory is not part
    /// of the layer: its mode, for instance, is ignored.
    pub fn read_onto(
        self,
        mut lower: LayeredTree,
        algorithm: Algorithm,
        filter: Option<&Filter>,
        meter: &Meter,
    ) -> Result<SourceTree, Failure> {
        match self.kind {
            SourceKind::Directory => {
                let read = read_directory(&self.path, algorithm, filter, meter)?;
                let mut layer = Layer::new(Whiteouts::Applied);
                let inserted = read.builder.into_nodes().filter(|(path, _)| !path.is_root());
                let refuse = |name: &[u8], source: &dyn std::error::Error| {
                    let name = model::escape::escape(name);
                    let why = model::display::error_chain(source);
                    Failure::from_text(format!("{}: {name}: {why}", self.path.display()))
                };
                for (path, node) in inserted {
                    let name = path.relative().to_owned();
                    layer.insert(path, node, &name).map_err(|source| refuse(&name, &source))?;
                }
                lower.apply(layer).map_err(|error| refuse(&error.name, &error.source))?;
                Ok(SourceTree { builder: lower.into_builder(algorithm), ..read })
            }
            SourceKind::Archive(archive) => {
                let mut archive = archive.with_whiteouts();
                let layered = archive.read_onto(lower, algorithm, meter);
                let layered = layered.map_err(|error| archive_failure(&self.path, &error))?;
                let builder = layered.into_builder(algorithm);
                Ok(SourceTree { builder, contents: Box::new(archive), dropped: Vec::new() })
            }
        }
    }
}

fn read_directory(
    path: &Path,
    algorithm: Algorithm,
    filter: Option<&Filter>,
    meter: &Meter,
) -> Result<SourceTree, Failure> {
    let found = directory::read(path, algorithm, filter, meter);
    let found = found.map_err(|error| directory_failure(&error))?;
    for warning in &found.warnings {
        eprintln!("warning: {warning}");
    }
    let directory::DirectoryTree { builder, contents, dropped, .. } = found;
    Ok(SourceTree { builder, contents: Box::new(contents), dropped })
}

fn directory_failure(error: &DirectoryError) -> Failure {
    let failure = Failure::new(error);
    match error {
        DirectoryError::Changed { .. } => {
            failure.hint("make images from a directory that nothing writes to, such as a snapshot")
        }
        DirectoryError::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
            failure.hint("run imagetool as root to read all files of a system")
        }
        _ => failure,
    }
}

fn archive_failure(path: &Path, error: &ArchiveError) -> Failure {
    let failure =
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(error)));
    match archive_hint(error) {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn archive_hint(error: &ArchiveError) -> Option<&'static str> {
    Some(match error {
        ArchiveError::Truncated { .. } => "the copy is incomplete: make or fetch it again",
        ArchiveError::Trailing { .. } => {
            "if archives were appended to each other, unpack them and make one of the result"
        }
        ArchiveError::Entry { .. } => {
            "nothing was uploaded; make the archive anew, for instance with \
             `tar --format=pax --acls --xattrs -C ROOT -cf FILE .`"
        }
        ArchiveError::NotTar => "IMAGEFILE is a tar archive or a directory",
        ArchiveError::Expands { .. } => {
            "nothing was uploaded; if that is meant, unpack it and give the directory"
        }
        ArchiveError::Layer { .. } => {
            "nothing was uploaded; make the image anew, or fetch it again"
        }
        _ => return None,
    })
}

fn oci_failure(path: &Path, error: &OciError) -> Failure {
    let failure =
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(error)));
    let hint = match error {
        OciError::Choice { source: ChoiceError::Platform { .. } } => {
            "choose one with --platform OS/ARCH"
        }
        OciError::Choice { source: ChoiceError::Name { .. } } => "choose one with --image-ref NAME",
        OciError::Choice { source: ChoiceError::Several { .. } } => {
            "choose one with --image-ref NAME, or a narrower --platform"
        }
        OciError::Choice { .. } => "with --plain it is taken as it is",
        _ => "nothing was uploaded; make the image anew, or fetch it again",
    };
    failure.hint(hint)
}
