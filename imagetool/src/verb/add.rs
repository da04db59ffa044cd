//! `imagetool add`: makes an image from an archive or a directory.

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::access::Owners;
use api::fault::FaultCode;
use api::image_server::{AddImage, AddImageRequest};
use api::object_server::AddObjects;
use api::object_stream::ObjectHead;
use model::filter::Filter;
use model::image::tags::{self, Tags};
use model::image::{Content, ImageName, Notes, Package, computed_rules};
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::time_parse;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use model::tree::{Child, Metadata, Totals, Tree};
use provisioning::image::{ImageError, has_bindings};
use rpc::server::{head_bytes, object_chunks};
use serde::Serialize;
use system::clock::wall;

use super::change::tag_of;
use super::directories::OwnerArgs;
use super::signatures::{Signer, SignerArgs};
use super::{Context, VerbResult, get_image, output_needs, server, service_warnings};
use crate::image_checks::{self, RequiredPaths, Warnings};
use crate::image_source::{Source, SourceArgs, SourceTree};
use crate::input_files::{
    ComputedList, read_bytes, read_filter, read_health_check, read_signers, read_text,
    read_triggers,
};
use crate::output::failure::{Failure, Outcome};
use crate::output::{plural, plural_entries, size};
use crate::packages;
use crate::service_needs::DroppedDirectory;
use crate::transfer::contents::{Contents, TreeObjects};
use crate::transfer::download;
use crate::transfer::joined;
use crate::transfer::upload::{UploadError, UploadScope, UploadSummary, upload};
use model::display::grouped;

/// Time limit for the server to add an image.
pub(super) const ADD_LIMIT: Duration = Duration::from_secs(600);

/// Largest build log, in bytes: it is held in memory.
const BUILD_LOG_BYTES_MAX: u64 = 64 << 20;

/// Makes an image from an archive or a directory.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool add base/debian-12.7 root.tar.zst filter triggers.json
  imagetool add base/debian-12.8 /srv/build/root filter -
  mmdebstrap bookworm - | imagetool add base/minimal - filter -
  imagetool add tools/2024-05-01 tools.tar.gz - -       # sparse: only its own paths
  imagetool add test/today root.tar - - --expires-in 7d
  imagetool add web/7 root.tar filter - --tag os=debian-12 --build-log build.log
  imagetool add web/8 root.tar filter triggers.json --health-check health.json
  imagetool add web/9 root.tar filter triggers.json --sign release-key
  skopeo copy docker://debian:12 oci-archive:debian.tar
  imagetool add base/debian-12 debian.tar filter - --platform linux/arm64

A health check is a JSON object; it is run on the machine, without a shell, after each update:
  {\"command\": [\"/usr/local/bin/web-answers\", \"443\"], \"within_seconds\": 60, \"undo\": true}
It passes when the command ends with exit code 0 within that time (60 s if not given). If it does
not pass, that is reported; with `undo` the update is undone as well.

Only what the image server does not have yet is sent. An image never changes: a new
version gets a new name.")]
pub struct AddArgs {
    /// The name of the new image, such as base/debian-12.7.
    pub name: ImageName,
    /// A tar archive, plain or compressed with gzip, zstd, xz or bzip2; or a directory; or an
    /// OCI or Docker image, as an archive or an OCI layout; or `-` for an archive on the standard
    /// input.
    #[arg(value_name = "IMAGEFILE")]
    pub image_file: PathBuf,
    /// Regular expressions, one a line, of the paths that each machine keeps as its own. `-` for
    /// none: a sparse image, which touches nothing but its own paths.
    #[arg(value_name = "FILTERFILE")]
    pub filter_file: PathBuf,
    /// JSON: which services are restarted when which paths change. `-` for none.
    #[arg(value_name = "TRIGGERFILE")]
    pub trigger_file: PathBuf,
    /// Lines `PATH HOST:PORT`: files of IMAGEFILE whose content a filegen-server computes for each
    /// machine. The content that they have is ignored.
    #[arg(long, value_name = "FILE")]
    pub computed: Option<PathBuf>,
    /// Public keys of OpenSSH, one a line: machines that accept only signed images accept only
    /// content of computed files that one of these keys has signed (of `filegen-server
    /// --signing-key`). `paths="/etc/a,/etc/b"` before a key lets it sign only these.
    #[arg(long, value_name = "FILE")]
    pub computed_signer: Option<PathBuf>,
    /// JSON: how a machine is checked after an update to the image; see below.
    #[arg(long, value_name = "FILE")]
    pub health_check: Option<PathBuf>,
    /// The image expires after this time.
    #[arg(long, value_name = "DURATION", value_parser = time_parse::duration)]
    pub expires_in: Option<Duration>,
    /// Tag of the image; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = tag_of)]
    pub tag: Vec<(String, String)>,
    /// Release notes, which `show` prints.
    #[arg(long, value_name = "FILE")]
    pub release_notes: Option<PathBuf>,
    /// Log of the build, which is stored with the image; `show --build-log` prints it.
    #[arg(long, value_name = "FILE")]
    pub build_log: Option<PathBuf>,
    /// Owners, who may change and delete the image besides the owners of its directory.
    #[command(flatten)]
    pub owners: OwnerArgs,
    /// Paths that the image must have, separated by commas; '' for none. Sparse images need none,
    /// and those that the filter keeps need not be there.
    #[arg(long, value_name = "PATHS", default_value = image_checks::REQUIRED_PATHS)]
    pub required_paths: RequiredPaths,
    /// Digest algorithm of the image: blake3, or sha512 where rules require it.
    #[arg(long, value_name = "ALGORITHM", default_value_t)]
    pub digest: Algorithm,
    /// Send all objects, also those that the server has. It compares them byte by byte, and refuses
    /// different content with the same digest.
    #[arg(long)]
    pub send_all: bool,
    /// How the image is signed.
    #[command(flatten)]
    pub signer: SignerArgs,
    /// How IMAGEFILE is read.
    #[command(flatten)]
    pub source: SourceArgs,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    digest: ObjectId,
    root: ObjectId,
    totals: Totals,
    objects: u64,
    sent_objects: u64,
    #[serde(with = "model::json::LargeNumber")]
    sent_bytes: u64,
}

/// Adds an image. After an error the image does not exist, but the server keeps objects that were
/// sent for a while.
pub async fn run(context: &Context, args: AddArgs) -> VerbResult {
    let filter = read_filter(&args.filter_file)?;
    let triggers = read_triggers(&args.trigger_file)?;
    let computed = ComputedList::read(args.computed.as_deref())?;
    let signers = read_signers(args.computed_signer.as_deref())?;
    let health_check = args.health_check.as_deref().map(read_health_check).transpose()?;
    let owners = args.owners.clone().owners()?;
    let signer = args.signer.signer()?;
    let tags: Tags = args.tag.iter().cloned().collect();
    tags::verify(&tags).map_err(|error| Failure::new(&error).misuse())?;
    let release_notes = args.release_notes.as_deref();
    let release_notes = release_notes.map(|path| read_text(path, "release notes")).transpose()?;
    let build_log = args
        .build_log
        .as_deref()
        .map(|path| read_bytes(path, "build log", BUILD_LOG_BYTES_MAX))
        .transpose()?;
    check_name_is_free(context, &args.name).await?;
    let finished = read(context, &args, filter.as_ref(), computed).await?;
    let former = service_warnings::latest_beside(context, &args.name).await;
    let content = Content {
        format: Content::format_for(&signers),
        name: args.name.clone(),
        root: finished.tree.digest(),
        filter,
        triggers,
        computed: computed_rules(&finished.tree),
        health_check,
        signers,
    };
    let build_log = send_build_log(context, build_log).await?;
    let Owners { groups, users } = owners.unwrap_or_default();
    let notes = Notes {
        build_log,
        tags,
        release_notes,
        owner_groups: groups.into_iter().collect(),
        owner_users: users.into_iter().collect(),
        ..Notes::default()
    };
    let scope = if args.send_all { UploadScope::All } else { UploadScope::Missing };
    let (expires_in, required) = (args.expires_in, &args.required_paths);
    let options = ImageOptions { expires_in, required, scope, signer, former };
    make_image(context, content, notes, finished, options).await
}

/// Options for making an image.
pub(super) struct ImageOptions<'call> {
    /// Time until the image expires.
    pub expires_in: Option<Duration>,
    /// Required paths.
    pub required: &'call RequiredPaths,
    pub scope: UploadScope,
    pub signer: Option<Signer>,
    /// The image that machines have before this one, as far as is known.
    pub former: Option<ImageName>,
}

/// The tree of a new image.
pub(super) struct FinishedTree {
    pub tree: Tree,
    /// Where the contents of its files are.
    pub contents: Box<dyn Contents>,
    /// Directories of the source that the filter keeps.
    pub dropped: Vec<DroppedDirectory>,
}

/// Uploads the tree, and adds the image `content`.
pub(super) async fn make_image(
    context: &Context,
    content: Content,
    mut notes: Notes,
    finished: FinishedTree,
    options: ImageOptions<'_>,
) -> VerbResult {
    let ImageOptions { expires_in, required, scope, signer, former } = options;
    let FinishedTree { tree, contents, dropped } = finished;
    let tree = &tree;
    verify(&content, tree)?;
    refuse_large_directories(tree, DIRECTORY_BYTES_MAX)?;
    require(tree, content.filter.as_ref(), required)?;
    warn(tree, content.filter.as_ref());
    let (name, algorithm) = (content.name.clone(), content.algorithm());
    let objects = TreeObjects::of(tree);
    let sent = upload(&context.client, algorithm, objects, contents, scope, &context.meter)
        .await
        .map_err(|error| upload_failure(&error))?;
    output_needs::check(context, &content, tree, former.as_ref()).await?;
    notes.packages = packages_of(context, tree).await?;
    let filter = content.filter.as_ref();
    service_warnings::warn(context, tree, filter, &dropped, former.as_ref()).await;
    // The time counts from the end of the upload.
    notes.expires_at = expires_in.map(|duration| time_parse::later(wall(), duration));
    if let Some(signer) = signer {
        notes.signatures.push(signer.sign(&content)?);
    }
    let request = AddImageRequest { content, notes };
    let reply = context
        .client
        .call_within::<AddImage>(&request, ADD_LIMIT)
        .await
        .map_err(|error| Failure::from_image_call(&error, &name))?;
    report(context, &name, reply.digest, tree, sent).await
}

/// Refuses an image that no machine could equal, and daemon tasks and resources without their
/// triggers or files. What these files say the server checks.
pub(super) fn verify(content: &Content, tree: &Tree) -> Result<(), Failure> {
    content.verify(tree).map_err(|error| Failure::new(&error))?;
    let (_, errors) = tasks::image::pairs(&content.triggers, tree);
    errors.first().map_or(Ok(()), |error| Err(Failure::new(error)))?;
    let files = provisioning::image::files(&content.triggers, tree);
    let files = files.map_err(|error| Failure::new(&error))?;
    // The base of a bundle may have them.
    match files.is_empty() || content.is_sparse() || has_bindings(tree) {
        true => Ok(()),
        false => Err(Failure::new(&ImageError::NoBindings)),
    }
}

/// Reads the packages of `tree`, which must be uploaded.
pub(super) async fn packages_of(context: &Context, tree: &Tree) -> Result<Vec<Package>, Failure> {
    let packages = packages::fetch::packages_of_tree(&context.client, tree, &context.meter).await;
    packages.map_err(|error| download::failure(&error))
}

/// Uploads the build log. If the server has it already, its lease is renewed.
async fn send_build_log(
    context: &Context,
    log: Option<Vec<u8>>,
) -> Result<Option<ObjectId>, Failure> {
    let Some(log) = log else { return Ok(None) };
    let id = Algorithm::Blake3.digest(&log);
    let [head, content] = object_chunks(id, log.into());
    let chunks = [head, content, head_bytes(&ObjectHead::End)].map(Ok::<_, io::Error>);
    let sent = context.client.upload::<AddObjects>(futures_util::stream::iter(chunks)).await;
    sent.map(|_| Some(id)).map_err(|error| Failure::from_call(&error))
}

pub(super) async fn report(
    context: &Context,
    name: &ImageName,
    digest: ObjectId,
    tree: &Tree,
    sent: UploadSummary,
) -> VerbResult {
    let totals = tree.root().totals();
    eprintln!(
        "Added {name}: {}, {}; sent {} ({}), {} {} there already.",
        plural_entries(totals.entries),
        size(totals.bytes),
        plural(sent.sent, "new object"),
        size(sent.sent_bytes),
        grouped(sent.objects.saturating_sub(sent.sent)),
        if sent.objects.saturating_sub(sent.sent) == 1 { "was" } else { "were" },
    );
    if let Some(remark) = server::unfollowed(context, name).await {
        eprintln!("{remark}");
    }
    context.print_if_json(&Report {
        name,
        digest,
        root: tree.digest(),
        totals,
        objects: sent.objects,
        sent_objects: sent.sent,
        sent_bytes: sent.sent_bytes,
    })?;
    Ok(Outcome::Done)
}

/// Refuses a name that no new image may have, or that exists, before any work is done.
pub(super) async fn check_name_is_free(context: &Context, name: &ImageName) -> Result<(), Failure> {
    name.check_new().map_err(|error| Failure::from_text(error.to_string()))?;
    match get_image(&context.client, name).await {
        Ok(_) => Err(Failure::from_text(format!("{name} already exists"))
            .hint("an image never changes: take a new name, such as one with a version or a date")),
        Err(error) if error.code() == Some(FaultCode::NotFound) => Ok(()),
        Err(error) => Err(Failure::from_image_call(&error, name)),
    }
}

/// Reads the archive or directory without the paths that the filter keeps, and marks the computed
/// files.
async fn read(
    context: &Context,
    args: &AddArgs,
    filter: Option<&Filter>,
    computed: ComputedList,
) -> Result<FinishedTree, Failure> {
    let (path, algorithm) = (args.image_file.clone(), args.digest);
    let (filter, meter) = (filter.cloned(), context.meter.clone());
    let source = args.source.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let source = Source::open(&path, &source, &meter)?;
        let read = source.read(algorithm, filter.as_ref(), &meter)?;
        finish_tree(&path, read, filter.as_ref(), &computed)
    });
    joined(reading).await
}

/// Removes the paths that the filter keeps from the tree from `path`, and marks the computed files.
pub(super) fn finish_tree(
    path: &Path,
    read: SourceTree,
    filter: Option<&Filter>,
    computed: &ComputedList,
) -> Result<FinishedTree, Failure> {
    let failed = |error: &dyn std::error::Error| {
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(error)))
    };
    let SourceTree { builder, contents, dropped } = read;
    let tree = builder.finish().map_err(|error| failed(&error))?;
    let Some(filter) = filter else {
        let tree = computed.apply(&tree, None)?;
        return Ok(FinishedTree { tree, contents, dropped });
    };
    let dropped = RefCell::new(dropped);
    let is_kept = |path: &TreePath| {
        let is_kept = filter.keeps_below_unkept(path);
        if is_kept && let Some(Child::Directory(directory)) = tree.get(path) {
            let Metadata { uid, gid, .. } = *directory.metadata();
            dropped.borrow_mut().push(DroppedDirectory { path: path.clone(), uid, gid });
        }
        is_kept
    };
    let tree = tree.without(is_kept).map_err(|error| failed(&error))?;
    let tree = computed.apply(&tree, Some(filter))?;
    Ok(FinishedTree { tree, contents, dropped: dropped.into_inner() })
}

pub(super) fn upload_failure(error: &UploadError) -> Failure {
    match error {
        UploadError::Call { source } => Failure::from_call(source),
        UploadError::Send { .. } => Failure::new(error)
            .hint("nothing is visible on the image server; run the command again"),
    }
}

/// Refuses a tree without the required paths.
pub(super) fn require(
    tree: &Tree,
    filter: Option<&Filter>,
    required: &RequiredPaths,
) -> Result<(), Failure> {
    image_checks::check_required_paths(tree, filter, required).map_err(|error| {
        let failure = Failure::new(&error);
        let failure = match &error.nested {
            Some(path) => failure.hint(format!(
                "the system seems to be in {path}: make the image of that directory"
            )),
            None => failure,
        };
        failure.hint(
            "an image with a filter is all that a machine has. For one that adds to machines give \
             `-` for the filter; for a tree that is no system give --required-paths ''",
        )
    })
}

/// Prints warnings about effects that are probably not intended.
pub(super) fn warn(tree: &Tree, filter: Option<&Filter>) {
    print_warnings(&image_checks::warnings(tree, filter));
}

/// Prints warnings, and the filter lines that would prevent them.
pub(super) fn print_warnings(found: &Warnings) {
    for warning in &found.warnings {
        eprintln!("warning: {warning}");
    }
    if !found.filter_lines.is_empty() {
        let lines = found.filter_lines.join("\n  ");
        eprintln!("hint: to leave this to the machines, add to the filter:\n  {lines}");
    }
}

/// Refuses a tree with a directory that exceeds the limits of servers, before anything is sent.
pub(super) fn refuse_large_directories(tree: &Tree, limit: usize) -> Result<(), Failure> {
    let mut stack = vec![(TreePath::root(), tree.root())];
    while let Some((path, directory)) = stack.pop() {
        let length = directory.encode().len();
        if length > limit {
            let entries = plural_entries(directory.entries().len() as u64);
            let message = format!("{path} has {entries}, too many for one directory of an image");
            let hint = format!("its list takes {length} bytes, and {limit} are accepted");
            return Err(Failure::from_text(message).hint(hint));
        }
        for entry in directory.entries() {
            if let Child::Directory(below) = &entry.child {
                let below_path = path.join(entry.name.as_bytes());
                stack.push((below_path.map_err(|error| Failure::new(&error))?, below));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use model::tree::{Node, TreeBuilder};

    use super::*;

    #[test]
    fn a_directory_that_no_server_takes_is_named() {
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        for path in ["/a", "/a/b", "/a/b/c", "/a/b/d"] {
            let directory = Node::Directory(Metadata::new(0o755, 0, 0));
            builder.insert(TreePath::new(path).unwrap(), directory).unwrap();
        }
        let tree = builder.finish().unwrap();
        assert!(refuse_large_directories(&tree, 200).is_ok());
        let failure = refuse_large_directories(&tree, 90).unwrap_err().to_string();
        let want = "error: /a/b has 2 entries, too many for one directory of an image\nhint: ";
        assert!(failure.starts_with(want), "{failure}");
    }
}
