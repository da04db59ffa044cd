//! The tree of the sub, the plan from it to an image, and the objects that the plan needs.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::fmt::Write as _;
use std::sync::Arc;

use api::dominator::Status;
use api::object_server::IDS_MAX;
use api::planning::{PlanJob, PlanKey, Planned};
use api::subd::{FetchObject, FreeSpace, ScanReport, UpdateOutcome};
use model::display::{counted, size};
use model::filter::Patterns;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Need, Operation, Plan, RefusedChanges};
use model::scope::{Coverage, Scope};
use model::tree::Tree;

use super::known_tree::{KnownTree, filled};
use super::{Check, Effect, Failure, RequestId, Step, Sub, View, stop};
use crate::core::identity::{FileOrigin, FileOrigins};
use crate::core::timing::{Attempt, RETRY_FIRST, RETRY_LONGEST};

/// The disk space of a file is its length, rounded up to a multiple of this, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// What a report says of the tree and the refused changes. If it is the same, they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReportKey {
    root: ObjectId,
    instance: u64,
    /// The number of the scan if it lists paths that cannot be changed or read.
    scan: Option<u64>,
    /// The last update if it failed.
    failed_update: Option<u64>,
}

impl ReportKey {
    fn of(view: &View, scan: &ScanReport) -> Self {
        let last = view.report.last_update.as_ref();
        Self {
            root: scan.root,
            instance: view.report.version.instance,
            scan: (!scan.unreadable.is_empty()).then_some(view.scan_number),
            failed_update: last
                .filter(|last| last.outcome != UpdateOutcome::Done)
                .map(|last| last.update_id),
        }
    }
}

/// The tree that the sub last reported, and the request that reads it.
#[derive(Debug, Default)]
pub(super) struct Trees {
    pub(super) known: Option<KnownTree>,
    /// The changes that the machine refuses; `None` if its release does not tell.
    pub(super) refused: Option<Arc<RefusedChanges>>,
    /// The report with which they were read.
    read: Option<ReportKey>,
    asked: Option<Box<(RequestId, ReportKey)>>,
    pub(super) attempt: Attempt,
}

impl Trees {
    /// Returns the tree.
    pub(super) fn tree(&self) -> Option<Tree> {
        self.known.as_ref().map(KnownTree::tree)
    }

    /// Returns the tree if it has this digest.
    pub(super) fn tree_of(&self, root: ObjectId) -> Option<Tree> {
        self.known.as_ref().filter(|known| known.digest() == root).map(KnownTree::tree)
    }

    pub(super) fn failed(&mut self, request_id: RequestId, failure: Failure, step: &Step<'_>) {
        if self.asked.take_if(|asked| asked.0 == request_id).is_some() {
            let pause = self.attempt.count(RETRY_FIRST, RETRY_LONGEST, step.context.jitter);
            self.attempt.hold(step.now.elapsed + pause, failure.text);
        }
    }
}

/// A plan, or why none can be made.
pub(super) type PlanResult = Result<Arc<Planned>, String>;

/// The plan to one image.
#[derive(Debug, Default)]
pub(super) struct Planning {
    pub(super) asked: Option<Box<(RequestId, PlanKey)>>,
    pub(super) made: Option<Arc<Planned>>,
    /// Why no plan can be made.
    pub(super) failed: Option<Box<(PlanKey, String)>>,
}

impl Planning {
    /// Takes a plan, or why it cannot be made. Returns false if this answers another request.
    pub(super) fn take(&mut self, request_id: RequestId, result: &PlanResult) -> bool {
        let Some(asked) = self.asked.take_if(|asked| asked.0 == request_id) else {
            return false;
        };
        match result {
            Ok(planned) => self.made = Some(Arc::clone(planned)),
            Err(text) => self.failed = Some(Box::new((asked.1, text.clone()))),
        }
        true
    }
}

/// The scope of an image on a machine with these exclusions, and the origins of the files that
/// identify the machine. Cached, because a sparse image has as many lines as paths.
#[derive(Clone, Debug)]
pub(super) struct KnownScope {
    image: ObjectId,
    /// The bundles that leave with the image.
    leaving: Vec<ObjectId>,
    exclusions: Patterns,
    pub(super) scope: Scope,
    pub(super) origins: FileOrigins,
}

/// Returns the disk space of a file of this length, in bytes.
pub(super) fn on_disk(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES)
}

/// The objects that a plan needs and the sub does not have.
#[derive(Debug, Default)]
pub(super) struct Missing {
    pub(super) count: usize,
    /// The sum of their lengths.
    pub(super) bytes: u64,
    /// The disk space of all files that are made of them, in bytes.
    space: u64,
}

/// Returns what `planned` needs and a sub that reports `view` does not have.
fn needs_of<'a>(
    planned: &'a Planned,
    view: &'a View,
) -> impl Iterator<Item = (&'a ObjectId, &'a Need)> {
    let mut is_cached = view.cache.ascending();
    planned.needs.iter().filter(move |(id, _)| !is_cached(id))
}

impl Missing {
    /// Returns what `planned` needs and a sub that reports `view` does not have.
    pub(super) fn of(planned: &Planned, view: &View) -> Self {
        let mut missing = Self::default();
        for need in needs_of(planned, view).map(|(_, need)| need) {
            missing.count += 1;
            missing.bytes = missing.bytes.saturating_add(need.size_bytes);
            let files = u64::from(need.files.max(1));
            let space = on_disk(need.size_bytes).saturating_mul(files);
            missing.space = missing.space.saturating_add(space);
        }
        missing
    }

    /// Returns the first of them, as many as one Fetch takes. Machines that have none of what
    /// `planned` needs share them.
    pub(super) fn objects(&self, planned: &Planned, view: &View) -> Arc<[FetchObject]> {
        if self.count == planned.needs.len() {
            return Arc::clone(&planned.objects);
        }
        let first = needs_of(planned, view).take(IDS_MAX);
        first.map(|(&id, need)| FetchObject { id, size_bytes: need.size_bytes }).collect()
    }

    /// Returns the number and the length as text.
    pub(super) fn describe(&self) -> String {
        format!("{} ({})", counted(self.count as u64, "object"), size(self.bytes))
    }

    /// Says why they do not fit into the `free` space; `None` if they do.
    pub(super) fn shortage(&self, free: FreeSpace) -> Option<String> {
        let fits = self.space <= free.free_bytes
            && u64::try_from(self.count).is_ok_and(|count| count <= free.free_inodes);
        (!fits).then(|| {
            format!(
                "{} need {} and as many inodes; {} and {} are free",
                counted(self.count as u64, "object"),
                size(self.space),
                size(free.free_bytes),
                counted(free.free_inodes, "inode")
            )
        })
    }
}

impl Sub {
    /// Returns the scope and the file origins of the image on this machine.
    pub(super) fn known_scope(&mut self, image: &RequiredImage, view: &View) -> &KnownScope {
        let leaving = || image.leaving.iter().map(|one| one.digest);
        let is_same = |known: &KnownScope| {
            known.image == image.digest
                && known.exclusions == view.exclusions
                && known.leaving.iter().copied().eq(leaving())
        };
        match self.known_scope.take().filter(is_same) {
            Some(known) => self.known_scope.insert(known),
            None => {
                let exclusions = view.exclusions.clone();
                self.known_scope.insert(KnownScope {
                    image: image.digest,
                    leaving: leaving().collect(),
                    scope: Scope::of(&image.scan, exclusions.lines()),
                    origins: file_origins(image, |path| exclusions.covers(path)),
                    exclusions,
                })
            }
        }
    }

    /// Takes a tree, and what the machine refuses.
    pub(super) fn take_tree(
        &mut self,
        request_id: RequestId,
        tree: Tree,
        refused: Option<Arc<RefusedChanges>>,
    ) {
        let trees = &mut self.trees;
        let Some(asked) = trees.asked.take_if(|asked| asked.0 == request_id) else { return };
        let key = asked.1;
        let is_news = trees.read.is_some() && trees.refused != refused;
        (trees.known, trees.refused, trees.read) =
            (Some(KnownTree::Whole(tree)), refused, Some(key));
        trees.attempt = Attempt::default();
        // The same scan leads to another plan now.
        if is_news && let Some(view) = &mut self.view {
            self.scans += 1;
            view.scan_number = self.scans;
            let scan = key.scan.map(|_| self.scans);
            trees.read = Some(ReportKey { scan, ..key });
        }
    }

    /// Takes the plan to the target. If nothing is to be done, the machine has the tree of that
    /// with the content of its computed files.
    pub(super) fn take_plan(&mut self, request_id: RequestId, result: &PlanResult) {
        self.plan.take(request_id, result);
        let Ok(planned) = result else { return };
        let Some(image) = self.target().cloned() else { return };
        let is_of_target = planned.key.image == image.digest
            && planned.key.computed == self.computed.version
            && planned.plan.operations.is_empty()
            && image.leaving.is_empty();
        if is_of_target
            && !image.content.computed.is_empty()
            && let Some(known) = &mut self.trees.known
        {
            known.compact(&image, &self.computed.files);
        }
    }

    /// Continues with the plan from the last scan to the image.
    pub(super) fn check_plan(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &Arc<ScanReport>,
        step: &mut Step<'_>,
    ) -> Check<Arc<Planned>> {
        self.check_tree(view, scan, step)?;
        let key = self.plan_key(image, view);
        if let Some(planned) = &self.plan.made
            && planned.key == key
        {
            return Continue(Arc::clone(planned));
        }
        if let Some((failed, text)) = self.plan.failed.as_deref()
            && *failed == key
        {
            return stop(Status::Blocked, format!("no plan can be made: {text}"));
        }
        if self.plan.asked.is_none()
            && let Some(tree) = self.trees.tree()
        {
            let request_id = self.request_plan(key, view, scan, tree, image, &mut step.effects);
            self.plan.asked = Some(Box::new((request_id, key)));
        }
        stop(Status::Rescanning, format!("comparing the new scan with {}", image.name()))
    }

    /// Returns the key of the plan from the last scan to `image`.
    pub(super) fn plan_key(&self, image: &RequiredImage, view: &View) -> PlanKey {
        let (scan, computed) = (view.scan_number, self.computed.version);
        PlanKey { image: image.digest, scan, computed }
    }

    /// Requests the plan from a scan to an image.
    pub(super) fn request_plan(
        &mut self,
        key: PlanKey,
        view: &View,
        scan: &Arc<ScanReport>,
        tree: Tree,
        image: &Arc<RequiredImage>,
        effects: &mut Vec<Effect>,
    ) -> RequestId {
        let (scan, image) = (Arc::clone(scan), Arc::clone(image));
        let refused = self.trees.refused.clone().unwrap_or_default();
        let (exclusions, computed) = (view.exclusions.clone(), Arc::clone(&self.computed.files));
        let job = PlanJob { key, tree, scan, exclusions, image, computed, refused };
        let request_id = self.next_request_id();
        effects.push(Effect::Plan(request_id, Box::new(job)));
        request_id
    }

    /// Returns the tree of a machine that has its target with the content of all computed files.
    /// Without computed files it is the tree of the image, which is known anyway.
    fn expected_tree(&self) -> Option<Tree> {
        let image = self.target().filter(|image| !image.content.computed.is_empty())?;
        filled(image, &self.computed.files)
    }

    /// Continues if the tree is known that the last scan found.
    fn check_tree(&mut self, view: &View, scan: &ScanReport, step: &mut Step<'_>) -> Check<()> {
        let key = ReportKey::of(view, scan);
        if self.trees.known.is_some() && self.trees.read == Some(key) {
            return Continue(());
        }
        if self.trees.asked.is_none() {
            if let Some(at) = self.trees.attempt.held_until(step.now.elapsed) {
                let why = self.trees.attempt.why().unwrap_or_default().to_owned();
                self.wake_by(at);
                return stop(Status::PollFailed, format!("its tree could not be read: {why}"));
            }
            let request_id = self.next_request_id();
            self.trees.asked = Some(Box::new((request_id, key)));
            let expected = || self.expected_tree().filter(|tree| tree.digest() == scan.root);
            let known = self.trees.tree().or_else(expected);
            step.effects.push(Effect::ReadTree(request_id, scan.root, known));
        }
        stop(Status::Rescanning, "reading the new scan")
    }
}

/// Summarizes a plan: the number of changes, or the path if there is only one.
pub(super) fn describe(plan: &Plan) -> String {
    match plan.operations.as_slice() {
        [] => "no change but the name of the image and its triggers".to_owned(),
        [operation] => format!("1 change: {}", path_of(operation)),
        operations => counted(operations.len() as u64, "change"),
    }
}

/// Lists as many paths of a plan as fit into so many bytes, but at least one, each with the
/// differences.
pub(super) fn paths_within(plan: &Plan, bytes: usize) -> String {
    let mut text = String::new();
    for (index, operation) in plan.operations.iter().enumerate() {
        let path = path_of(operation);
        if index > 0 && text.len() + path.len() > bytes {
            write!(text, ", and {} more", plan.operations.len() - index)
                .expect("writing to a String cannot fail");
            break;
        }
        let separator = if text.is_empty() { "" } else { ", " };
        write!(text, "{separator}{path}").expect("writing to a String cannot fail");
    }
    text
}

/// Returns the path of an operation with the differences there.
pub(super) fn path_of(operation: &Operation) -> String {
    let reason: Vec<&str> = operation.reason.iter().map(|reason| reason.name()).collect();
    format!("{} ({})", operation.path, reason.join(" "))
}

/// Returns the origins of the files that identify a machine whose exclusions cover the `excluded`
/// paths.
fn file_origins(image: &RequiredImage, excluded: impl Fn(&TreePath) -> bool) -> FileOrigins {
    let origin_of = |text: &str| {
        let path: TreePath = text.parse().expect("the constant is a path");
        let is_covered = match &image.scan.coverage {
            Coverage::Full(filter) => !filter.keeps(&path),
            Coverage::Paths(paths) => paths.contains(&path),
        };
        if !is_covered || excluded(&path) {
            return FileOrigin::Machine;
        }
        match image.tree.file(&path) {
            Some(file) if file.size_bytes > 0 => FileOrigin::Image(file.object.id()),
            _ => FileOrigin::NoContent,
        }
    };
    FileOrigins { machine_id: origin_of("/etc/machine-id"), hostname: origin_of("/etc/hostname") }
}
