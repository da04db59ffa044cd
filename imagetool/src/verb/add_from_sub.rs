//! `imagetool add-from-sub`: makes an image from a running machine.

use std::path::PathBuf;

use api::image_server::{AddImage, AddImageRequest};
use daemon::SUBD_PORT;
use model::filter::Filter;
use model::image::{Content, ImageName, Notes, computed_rules};
use model::path::TreePath;
use model::scope::Coverage;
use model::tree::Tree;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use rpc::client::{Client, Peer};

use super::add::{
    ADD_LIMIT, check_name_is_free, packages_of, refuse_large_directories, report, require,
    upload_failure, verify, warn,
};
use super::{Context, VerbResult, service_warnings};
use crate::image_checks::{self, RequiredPaths};
use crate::image_source::sub::{Snapshot, SubError, SubReader};
use crate::input_files::{
    ComputedList, read_filter, read_health_check, read_signers, read_triggers,
};
use crate::output::failure::Failure;
use crate::transfer::contents::TreeObjects;
use crate::transfer::upload::{UploadError, UploadScope, upload};

/// Number of attempts to read a machine that changes meanwhile.
const ATTEMPTS_MAX: u32 = 5;

/// Number of paths or lines that an error names.
const NAMED_MAX: usize = 5;

/// Makes an image from a running machine.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool add-from-sub rescue/web1-2024-05-01 web1 filter triggers.json
  imagetool add-from-sub golden/7 10.0.0.7:6969 filter -

The machine scans its tree again, and the image is exactly the result. If files change while they
are read, it scans again. Only contents that the image server lacks are read from the machine. Paths
that the machine does not scan, because of its image's filter or its configuration, are not in the
image.")]
pub struct AddFromSubArgs {
    /// The name of the new image.
    pub name: ImageName,
    /// The machine, as HOST or HOST:PORT of its subd.
    #[arg(value_name = "HOST")]
    pub host: String,
    /// Regular expressions, one a line, of the paths that each machine keeps as its own; what they
    /// match on this machine is left out. `-` for none.
    #[arg(value_name = "FILTERFILE")]
    pub filter_file: PathBuf,
    /// JSON: which services are restarted when which paths change. `-` for none.
    #[arg(value_name = "TRIGGERFILE")]
    pub trigger_file: PathBuf,
    /// Lines `PATH HOST:PORT`, as for `add`: files of the machine that are computed for each
    /// machine. Their content is not read.
    #[arg(long, value_name = "FILE")]
    pub computed: Option<PathBuf>,
    /// Public keys that sign the content of computed files, as for `add`.
    #[arg(long, value_name = "FILE")]
    pub computed_signer: Option<PathBuf>,
    /// JSON: how a machine is checked after an update to the image; see `add --help`.
    #[arg(long, value_name = "FILE")]
    pub health_check: Option<PathBuf>,
    /// Paths that the image must have, as for `add`.
    #[arg(long, value_name = "PATHS", default_value = image_checks::REQUIRED_PATHS)]
    pub required_paths: RequiredPaths,
}

/// Adds an image. After an error the image does not exist, but the server keeps objects that were
/// sent for a while.
pub async fn run(context: &Context, args: AddFromSubArgs) -> VerbResult {
    let filter = read_filter(&args.filter_file)?;
    let triggers = read_triggers(&args.trigger_file)?;
    let computed = ComputedList::read(args.computed.as_deref())?;
    let signers = read_signers(args.computed_signer.as_deref())?;
    let health_check = args.health_check.as_deref().map(read_health_check).transpose()?;
    let peer = Peer::parse(&args.host, SUBD_PORT).map_err(|error| Failure::new(&error).misuse())?;
    check_name_is_free(context, &args.name).await?;
    let host = peer.authority();
    let sub = SubReader::new(Client::new(peer, &context.security));
    let failed = |error: SubError| sub_failure(&host, &error);
    let configuration = sub.configuration().await.map_err(failed)?;
    let Coverage::Full(kept) = &configuration.scan.coverage else {
        let message = format!("{host} has a sparse image, and scans only the paths of that");
        return Err(Failure::from_text(message)
            .hint("require an image with a filter of it first, or make the image of a directory"));
    };
    let mut attempt = 1;
    let (tree, sent) = loop {
        let snapshot = sub.snapshot(&context.meter).await.map_err(failed)?;
        refuse_unread(&host, &snapshot, filter.as_ref())?;
        let tree = without_kept(&snapshot.tree, filter.as_ref())?;
        let tree = computed.apply(&tree, filter.as_ref())?;
        if attempt == 1 {
            warn_unscanned(&host, kept, &snapshot, filter.as_ref());
            refuse_large_directories(&tree, DIRECTORY_BYTES_MAX)?;
            require(&tree, filter.as_ref(), &args.required_paths)?;
            warn(&tree, filter.as_ref());
        }
        let contents = Box::new(sub.contents(&tree));
        let (algorithm, objects) = (tree.algorithm(), TreeObjects::of(&tree));
        let meter = &context.meter;
        match upload(&context.client, algorithm, objects, contents, UploadScope::Missing, meter)
            .await
        {
            Ok(sent) => break (tree, sent),
            Err(error @ UploadError::Send { .. }) if attempt < ATTEMPTS_MAX => {
                let error = model::display::error_chain(&error);
                eprintln!("note: {host}: {error}; reading it again");
                attempt += 1;
            }
            Err(error @ UploadError::Send { .. }) => {
                return Err(upload_failure(&error).hint(format!(
                    "files on {host} change all the time: stop what writes them, or add \
                     their paths to the filter"
                )));
            }
            Err(error) => return Err(upload_failure(&error)),
        }
    };
    let content = Content {
        format: Content::format_for(&signers),
        name: args.name.clone(),
        root: tree.digest(),
        filter,
        triggers,
        computed: computed_rules(&tree),
        health_check,
        signers,
    };
    verify(&content, &tree)?;
    let packages = packages_of(context, &tree).await?;
    warn_of_services(context, &content, &tree).await;
    let notes =
        Notes { packages, release_notes: Some(format!("what {host} had")), ..Notes::default() };
    let request = AddImageRequest { content, notes };
    let reply = context.client.call_within::<AddImage>(&request, ADD_LIMIT).await;
    let reply = reply.map_err(|error| Failure::from_image_call(&error, &args.name))?;
    report(context, &args.name, reply.digest, &tree, sent).await
}

/// Warns of what the image would take from services, and of users that have other numbers than in
/// the newest image of the same directory, which machines may have now.
async fn warn_of_services(context: &Context, content: &Content, tree: &Tree) {
    let former = service_warnings::latest_beside(context, &content.name).await;
    let filter = content.filter.as_ref();
    service_warnings::warn(context, tree, filter, &[], former.as_ref()).await;
}

fn sub_failure(host: &str, error: &SubError) -> Failure {
    let failure = Failure::from_text(format!("{host}: {}", model::display::error_chain(error)));
    match error {
        SubError::Call { source: rpc::client::CallError::Connect { .. } } => {
            failure.hint("is subd running there, and is this its address?")
        }
        _ => failure,
    }
}

fn without_kept(tree: &Tree, filter: Option<&Filter>) -> Result<Tree, Failure> {
    match filter {
        None => Ok(tree.clone()),
        Some(filter) => tree
            .without(|path| filter.keeps_below_unkept(path))
            .map_err(|error| Failure::new(&error)),
    }
}

/// Refuses a machine with unreadable paths: an image without them would remove them elsewhere.
fn refuse_unread(host: &str, snapshot: &Snapshot, filter: Option<&Filter>) -> Result<(), Failure> {
    let is_kept = |path: &TreePath| filter.is_some_and(|filter| filter.keeps(path));
    let unread = snapshot.scan.unreadable.iter().filter(|(path, _)| !is_kept(path));
    let mut unread = unread.map(|(path, why)| format!("{path} ({why})"));
    let named: Vec<String> = unread.by_ref().take(NAMED_MAX).collect();
    if named.is_empty() {
        return Ok(());
    }
    let more = if unread.next().is_some() { ", ..." } else { "" };
    let message = format!("{host} cannot read {}{more}", named.join(", "));
    Err(Failure::from_text(message).hint("fix that, or add the paths to the filter"))
}

/// Warns of paths that are missing in the image because the machine does not scan them, and that
/// the new filter does not keep.
fn warn_unscanned(host: &str, kept: &Filter, snapshot: &Snapshot, filter: Option<&Filter>) {
    let Some(filter) = filter else { return };
    let lines = kept.lines().iter().chain(&snapshot.exclusions);
    let mut lines = lines.filter(|line| !filter.lines().contains(line)).map(String::as_str);
    let named: Vec<&str> = lines.by_ref().take(NAMED_MAX).collect();
    if !named.is_empty() {
        let more = if lines.next().is_some() { "\n  ..." } else { "" };
        eprintln!(
            "warning: {host} does not scan what these lines match, so the image has none of it, \
             and machines would lose theirs unless the new filter keeps it:\n  {}{more}",
            named.join("\n  ")
        );
    }
}
