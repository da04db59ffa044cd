//! `imagetool get`: restores the tree of an image in a directory.

use std::path::PathBuf;
use std::sync::Arc;

use model::image::ImageName;
use model::path::TreePath;
use model::tree::Tree;
use tokio_util::task::TaskTracker;

use super::{Context, VerbResult};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::{plural_entries, size};
use crate::transfer::download::{self, DownloadError};
use crate::transfer::joined;
use crate::transfer::restore::{NotRestored, RestoreTarget};
use model::display::grouped;

/// Restores the tree of an image in a new directory, exactly as machines get it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  imagetool get base/debian-12.7 /srv/chroot/debian

Run it as root: only root can set owners of files and make devices. The directory appears when it
is complete; until then it is DIR.incomplete. Computed files are left out. Exit code 3: something
was left out.")]
pub struct GetArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Directory to make. It must not exist or be empty.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Restores an image. After an error the directory is unchanged.
pub async fn run(context: &Context, args: GetArgs) -> VerbResult {
    let image = context.image(&args.name).await?;
    let stop = daemon::stop_on_signals()
        .map_err(|error| Failure::from_text(format!("cannot wait for signals: {error}")))?;
    let tree = tokio::select! {
        tree = download::tree(&context.client, image.content.root, &context.meter) => {
            Arc::new(tree.map_err(|error| download::failure(&error))?)
        }
        () = stop.cancelled() => return Err(Failure::from_text("interrupted")),
    };
    let target = RestoreTarget::create(&args.directory)
        .map_err(|error| download::restore_failure(&error))?;
    let target = Arc::new(target);
    let tracker = TaskTracker::new();
    let filled = tokio::select! {
        filled = fill(context, &tree, &target, &tracker) => {
            filled.map_err(|error| download::failure(&error))
        }
        () = stop.cancelled() => {
            target.stop();
            Err(Failure::from_text("interrupted"))
        }
    };
    // Running writers end by themselves, because their channels are closed.
    tracker.close();
    tracker.wait().await;
    let finished = match filled {
        Ok(()) => finish(target, &tree, context).await,
        Err(failure) => {
            let abandoned = target.abandon();
            Err(match abandoned {
                Ok(()) => failure.hint("nothing was left behind"),
                Err(error) => failure.hint(model::display::error_chain(&error)),
            })
        }
    }?;
    let totals = tree.root().totals();
    eprintln!(
        "Got {}: {}, {} in {}.",
        args.name,
        plural_entries(totals.entries),
        size(totals.bytes),
        args.directory.display()
    );
    Ok(finished)
}

async fn fill(
    context: &Context,
    tree: &Arc<Tree>,
    target: &Arc<RestoreTarget>,
    tracker: &TaskTracker,
) -> Result<(), DownloadError> {
    let (to, from) = (Arc::clone(target), Arc::clone(tree));
    blocking(tracker, move || to.make_skeleton(&from)).await?;
    download::files(&context.client, tree, target, tracker, &context.meter).await?;
    let (to, from) = (Arc::clone(target), Arc::clone(tree));
    blocking(tracker, move || to.make_links(&from)).await?;
    Ok(())
}

async fn finish(target: Arc<RestoreTarget>, tree: &Arc<Tree>, context: &Context) -> VerbResult {
    context.meter.start("Finishing", Unit::Items, None);
    let target = Arc::into_inner(target).expect("all tasks that held it have ended");
    let from = Arc::clone(tree);
    let finished = blocking(&TaskTracker::new(), move || target.finish(&from)).await;
    context.meter.finish();
    let not_restored = finished.map_err(|error| download::restore_failure(&error))?;
    for (reason, paths) in &not_restored {
        warn(*reason, paths);
    }
    Ok(if not_restored.is_empty() { Outcome::Done } else { Outcome::Partly })
}

pub(super) fn warn(reason: NotRestored, paths: &[TreePath]) {
    let shown: Vec<String> = paths.iter().take(3).map(TreePath::to_string).collect();
    let more = if paths.len() > shown.len() { ", ..." } else { "" };
    let number = grouped(paths.len() as u64);
    eprintln!("warning: {number} {}: {}{more}", reason.describe(), shown.join(", "));
}

async fn blocking<T: Send + 'static>(
    tracker: &TaskTracker,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    joined(tracker.spawn_blocking(work)).await
}
