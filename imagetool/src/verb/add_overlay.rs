//! `imagetool add-overlay`: makes an image from another one and a layer.

use std::path::{Path, PathBuf};

use model::filter::Filter;
use model::image::{Content, Image, ImageName, Notes, computed_rules};
use model::object::ObjectId;

use super::add::{FinishedTree, ImageOptions, check_name_is_free, finish_tree, make_image};
use super::signatures::SignerArgs;
use super::{Context, VerbResult};
use crate::archive::layer::LayeredTree;
use crate::image_checks::{self, RequiredPaths};
use crate::image_source::{Source, SourceArgs};
use crate::input_files::{
    ComputedList, is_dash, read_filter, read_health_check, read_signers, read_triggers,
};
use crate::output::failure::Failure;
use crate::transfer::download;
use crate::transfer::joined;
use crate::transfer::upload::UploadScope;

/// Makes an image from another one and a layer.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool add-overlay web/9 base/debian-12.7 nginx.tar.zst
  imagetool add-overlay web/10 web/9 /srv/build/changes = triggers.json
  imagetool add-overlay web/11 base/debian-12.7 web.oci.tar

The layer replaces the entries of the base at its paths, except that directories keep their entries.
As in the layers of OCI images, a file `.wh.NAME` in it takes NAME away, and `.wh..wh..opq` all
that the base has in that directory. An OCI or Docker image is as many layers as it has.

Only what the image server does not have yet is sent, and no file of the base is fetched.")]
pub struct AddOverlayArgs {
    /// The name of the new image, such as web/9.
    pub name: ImageName,
    /// The base image, which is not changed.
    pub base: ImageName,
    /// The layer: a tar archive, a directory (without the attributes of its root), or an OCI
    /// or Docker image; or `-` for an archive on the standard input.
    pub layer: PathBuf,
    /// Filter of the new image. Default, and `=`: that of the base; `-` for none.
    #[arg(value_name = "FILTERFILE")]
    pub filter_file: Option<PathBuf>,
    /// Triggers of the new image. Default, and `=`: those of the base; `-` for none.
    #[arg(value_name = "TRIGGERFILE")]
    pub trigger_file: Option<PathBuf>,
    /// Lines `PATH HOST:PORT`, as for `add`: computed files besides those of the base, or other
    /// sources of those.
    #[arg(long, value_name = "FILE")]
    pub computed: Option<PathBuf>,
    /// Public keys that sign the content of computed files, as for `add`; those of the base without
    /// it. `-` for none.
    #[arg(long, value_name = "FILE")]
    pub computed_signer: Option<PathBuf>,
    /// Health check of the new image, as for `add`. Default: that of the base; `-` for none.
    #[arg(long, value_name = "FILE")]
    pub health_check: Option<PathBuf>,
    /// Paths that the new image must have, as for `add`.
    #[arg(long, value_name = "PATHS", default_value = image_checks::REQUIRED_PATHS)]
    pub required_paths: RequiredPaths,
    /// How the image is signed.
    #[command(flatten)]
    pub signer: SignerArgs,
    /// How the layer is read.
    #[command(flatten)]
    pub source: SourceArgs,
}

/// Adds an image. After an error the image does not exist, but the server keeps objects that were
/// sent for a while.
pub async fn run(context: &Context, args: AddOverlayArgs) -> VerbResult {
    // Errors in the given files come before anything is fetched.
    let signer = args.signer.signer()?;
    let filter = read_unless_base(args.filter_file.as_deref(), read_filter)?;
    let triggers = read_unless_base(args.trigger_file.as_deref(), read_triggers)?;
    let health_check = match args.health_check.as_deref() {
        Some(path) if is_dash(path) => Some(None),
        Some(path) => Some(Some(read_health_check(path)?)),
        None => None,
    };
    let computed = ComputedList::read(args.computed.as_deref())?;
    let signers = match args.computed_signer.as_deref() {
        Some(path) if is_dash(path) => Some(Vec::new()),
        path @ Some(_) => Some(read_signers(path)?),
        None => None,
    };
    check_name_is_free(context, &args.name).await?;
    let Image { content: base, notes: _ } = context.image(&args.base).await?;
    let filter = filter.unwrap_or(base.filter);
    let finished = read(context, &args, base.root, filter.as_ref(), computed).await?;
    let signers = signers.unwrap_or(base.signers);
    let content = Content {
        format: Content::format_for(&signers),
        name: args.name,
        root: finished.tree.digest(),
        filter,
        triggers: triggers.unwrap_or(base.triggers),
        computed: computed_rules(&finished.tree),
        health_check: health_check.unwrap_or(base.health_check),
        signers,
    };
    let notes = Notes { source_image: Some(args.base.clone()), ..Notes::default() };
    let required = &args.required_paths;
    let former = Some(args.base);
    let scope = UploadScope::Missing;
    let options = ImageOptions { expires_in: None, required, scope, signer, former };
    make_image(context, content, notes, finished, options).await
}

/// Reads the file at `path`; `None` stands for the file of the base.
fn read_unless_base<T>(
    path: Option<&Path>,
    read: impl FnOnce(&Path) -> Result<T, Failure>,
) -> Result<Option<T>, Failure> {
    path.filter(|path| path.as_os_str() != "=").map(read).transpose()
}

/// Reads the tree of the base, and the layer upon it.
async fn read(
    context: &Context,
    args: &AddOverlayArgs,
    base: ObjectId,
    filter: Option<&Filter>,
    computed: ComputedList,
) -> Result<FinishedTree, Failure> {
    let tree = download::tree(&context.client, base, &context.meter).await;
    let tree = tree.map_err(|error| download::failure(&error))?;
    let (path, source) = (args.layer.clone(), args.source.clone());
    let (filter, meter) = (filter.cloned(), context.meter.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let lower = LayeredTree::of_tree(&tree).map_err(|error| Failure::new(&error))?;
        let source = Source::open(&path, &source, &meter)?;
        let read = source.read_onto(lower, tree.algorithm(), filter.as_ref(), &meter)?;
        finish_tree(&path, read, filter.as_ref(), &computed)
    });
    joined(reading).await
}
