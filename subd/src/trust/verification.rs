//! Decides whether an update is what trusted keys have signed, and nothing else.
//!
//! It does not matter who made the plan: it is applied to the scanned tree in memory, and the
//! result must comply with the signed tree. Triggers and health check must be those of the image.
//! Which paths have changed, and so which triggers fire, is computed here, because a plan could lie
//! about its reasons.
//!
//! # Invariants
//!
//! * If the plan is accepted, the plan from its result to the signed tree is empty, except for
//!   paths that this machine has found to be blocked; and it has put or changed nothing at paths
//!   that the signed tree does not have. Or it only removes, to make room on a full disk, paths
//!   that the image that was accepted last does not have.
//! * The scan used the settings of the signed image, so that the filter in force is the signed one.
//! * Of computed files path, mode, owner and attributes are signed with the image. Their content is
//!   signed for this machine, if the image names signers of it ([`super::contents`]).
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use api::subd::{PrepareRequest, ScanReport};
use model::display::utc;
use model::filter::Patterns;
use model::image::required::{RequiredImage, required_tree};
use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{
    Action, ApplyError, Blocked, Difference, Obstacle, Operation, Plan, RefusedChanges,
    ScannedTree, apply, plan,
};
use model::scope::Scope;
use model::signing::{Endorsed, Policy, Signature, TrustedKeys, endorse};
use model::tree::{Child, Leaf, Node, Time, Tree, TreeBuilder, TreeError};
use serde::{Deserialize, Serialize};

use super::contents::{AcceptedContents, ContentsPolicy, verify_contents};
use crate::state::Snapshot;

/// The image that was accepted last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedImage {
    pub image: ImageName,
    /// The digest of its signed part, or of what is composed of signed parts.
    pub digest: ObjectId,
    /// When it was signed by as many keys as are needed, in seconds after 1970-01-01 UTC; of a
    /// composed image when the newest part was.
    pub signed: u64,
    /// The digests of what it is composed of, or its own.
    #[serde(default)]
    pub parts: BTreeSet<ObjectId>,
    /// Of each line of parts the one that was signed last. All images with a filter are one line
    /// (`/`), and so are the bundles of each directory. In the file also of lines that it does not
    /// have.
    #[serde(default)]
    pub lines: BTreeMap<String, AcceptedPart>,
    /// In the file: the signed content that computed files have, or had last. Of an update: what
    /// is accepted with it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub contents: AcceptedContents,
}

/// A signed image that was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedPart {
    pub image: ImageName,
    pub digest: ObjectId,
    pub signed: u64,
}

impl fmt::Display for AcceptedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}, signed at {}", self.image, time_text(self.signed))
    }
}

impl fmt::Display for AcceptedPart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}, signed at {}", self.image, time_text(self.signed))
    }
}

impl AcceptedImage {
    /// Returns the record with its lines, if an earlier release has written it without. Of what
    /// kind the image is was not written: it counts as both.
    #[must_use]
    pub fn with_lines(mut self) -> Self {
        if self.lines.is_empty() {
            let (image, digest) = (self.image.clone(), self.digest);
            let directory = image.directory().unwrap_or(NO_DIRECTORY).to_owned();
            let part = AcceptedPart { image, digest, signed: self.signed };
            self.lines = [(FULL.to_owned(), part.clone()), (directory, part)].into();
        }
        self
    }

    /// True if the machine has the image with this digest, or an image that is composed of it.
    fn has(&self, digest: &ObjectId) -> bool {
        self.digest == *digest || self.parts.contains(digest)
    }

    /// True if the machine has this image beside another one, which comes first.
    fn has_bundle(&self, content: &Content) -> bool {
        let mut bundles = self.image.parts().skip(1);
        bundles.any(|bundle| bundle == content.name) && self.parts.contains(&content.digest())
    }

    /// Returns a time that is known to have passed, in seconds after 1970-01-01 UTC.
    fn passed(&self) -> u64 {
        self.lines.values().map(|part| part.signed).fold(self.signed, u64::max)
    }
}

/// The line of images with a filter.
const FULL: &str = "/";

/// The line of bundles in no directory.
const NO_DIRECTORY: &str = ".";

/// The most lines that are remembered.
const LINES_MAX: usize = 1_000;

/// Returns the line of an image: none is accepted that was signed before another one of its line.
/// All images with a filter are one line, and the bundles of each directory.
fn line_of(content: &Content) -> &str {
    match content.is_sparse() {
        true => content.name.directory().unwrap_or(NO_DIRECTORY),
        false => FULL,
    }
}

/// Adds what is newly accepted to what lines had before. If that is too much, forgets the lines
/// whose image was signed first.
pub fn merge_lines(
    before: &mut BTreeMap<String, AcceptedPart>,
    new: &BTreeMap<String, AcceptedPart>,
) {
    before.extend(new.iter().map(|(line, part)| (line.clone(), part.clone())));
    let surplus = before.len().saturating_sub(LINES_MAX);
    let others = before.iter().filter(|(line, _)| !new.contains_key(*line));
    let mut others: Vec<(u64, String)> =
        others.map(|(line, part)| (part.signed, line.clone())).collect();
    others.sort();
    for (_, line) in others.into_iter().take(surplus) {
        before.remove(&line);
    }
}

/// The time that is so many seconds after 1970-01-01 UTC, for people.
pub(super) fn time_text(seconds: u64) -> String {
    utc(Time { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanoseconds: 0 })
}

/// The requirements of the machine's own configuration and history.
#[derive(Clone, Copy, Debug)]
pub struct SigningPolicy<'a> {
    pub keys: &'a TrustedKeys,
    /// How many different keys must have signed.
    pub needed: u32,
    /// The machine's clock, in seconds after 1970-01-01 UTC.
    pub now: u64,
    /// True if images may be older than the one that was accepted last.
    pub allow_older: bool,
    /// The image that was accepted last.
    pub last: Option<&'a AcceptedImage>,
    /// The names of the machine, for content that is signed for it.
    pub names: &'a [String],
}

impl SigningPolicy<'_> {
    /// True if a bundle may be taken away: the machine has accepted it beside another image, or
    /// never accepted anything.
    pub fn may_leave(&self, bundle: &Content) -> bool {
        self.last.is_none_or(|last| last.has_bundle(bundle))
    }
}

/// An update to verify.
#[derive(Clone, Copy, Debug)]
pub struct UpdateCase<'a> {
    pub request: &'a PrepareRequest,
    /// The signed image, whose tree is known to be its tree, with its signatures.
    pub image: &'a RequiredImage,
    /// The signatures of the content of its computed files.
    pub contents: &'a [Signature],
    /// The scan that the plan is staged upon.
    pub scan: &'a Snapshot,
    /// Changes that have failed on this machine.
    pub refused: &'a RefusedChanges,
    pub exclusions: &'a Patterns,
}

/// An update that is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedUpdate {
    /// Recorded when the update has succeeded.
    pub accepted: AcceptedImage,
    /// The paths that may fire triggers.
    pub changed: Vec<TreePath>,
}

/// Why an update is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    #[error("{why}; no update is accepted until that is repaired on the machine itself")]
    Local { why: String },
    #[error(
        "this machine accepts only signed images, and subd was started without --trusted-keys: \
         give them again (was a config.toml removed?), or, to accept every image from now on, \
         remove accepted.json from /.subd/state (and from --state) and start subd again"
    )]
    KeysGone,
    #[error(
        "this machine accepts only signed images, and no signatures of {image} were offered: \
         `imagetool sign` makes them"
    )]
    Unsigned { image: ImageName },
    #[error("this machine accepts only signed images: {why}")]
    Unendorsed {
        /// Which signatures do not count, and why.
        why: String,
    },
    #[error(
        "{image} was signed at {}, and {} was accepted before ({last}): sign it again if the \
         machine is to go back", time_text(*.signed), newness(*.signed, last)
    )]
    Older { image: ImageName, signed: u64, last: AcceptedPart },
    #[error("the {what} of the update are not those that are signed with {image}")]
    Other { what: &'static str, image: ImageName },
    #[error("the machine does not scan with the settings of {image}, so they cannot be compared")]
    Scope { image: ImageName },
    #[error("the plan does not fit the machine")]
    Misfit {
        #[source]
        source: ApplyError,
    },
    #[error("the signed tree cannot be compared")]
    Tree {
        #[source]
        source: TreeError,
    },
    #[error("{path} would not be the computed file that is signed")]
    Computed { path: TreePath },
    #[error("the content of {path} is not signed as {path} needs it: {why}")]
    Content { path: TreePath, why: String },
    #[error("the plan changes {path}, which the signed image does not have")]
    NotSigned { path: TreePath },
    #[error("the plan changes {path} in place, where only a new file is safe ({why})")]
    InPlace { path: TreePath, why: &'static str },
    #[error("with this plan {path} would not be as it is signed ({why}){}", others(*.more))]
    Elsewhere {
        /// The first path that would differ.
        path: TreePath,
        why: String,
        /// How many other paths would differ.
        more: usize,
    },
}

fn newness(signed: u64, last: &AcceptedPart) -> &'static str {
    if signed == last.signed { "one of the same second" } else { "a newer one" }
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(", nor would {more} others") }
}

/// Verifies the signatures of an image that is offered, which may become a part of another one. One
/// that the machine has may leave it, whoever has signed it; a part is verified with the update.
///
/// # Errors
///
/// [`Refusal::Unendorsed`], [`Refusal::Older`].
pub fn verify_offer(
    content: &Content,
    signatures: &[Signature],
    policy: &SigningPolicy<'_>,
) -> Result<(), Refusal> {
    if policy.last.is_some_and(|last| last.has_bundle(content)) {
        return Ok(());
    }
    verify_part(content, signatures, true, policy).map(drop)
}

/// Returns the record of an image that is not composed, if enough trusted keys have signed it, and
/// it is not older than what was accepted last of its line. A bundle is neither older than the last
/// image with a filter, unless it `has_base`: it comes beside such an image.
fn verify_part(
    content: &Content,
    signatures: &[Signature],
    has_base: bool,
    policy: &SigningPolicy<'_>,
) -> Result<AcceptedPart, Refusal> {
    let (image, digest) = (content.name.clone(), content.digest());
    let is_kept = policy.last.is_some_and(|last| last.has(&digest));
    let passed = policy.last.map_or(0, AcceptedImage::passed);
    let SigningPolicy { keys, needed, now, .. } = *policy;
    // The present image may be repaired even when its signatures have expired.
    let endorsing = Policy { keys, needed, now, passed, even_expired: is_kept };
    let Endorsed { signed, .. } = endorse(&image, &digest, signatures, &endorsing)
        .map_err(|error| Refusal::Unendorsed { why: error.to_string() })?;
    let line = line_of(content);
    let lines = [Some(line), (!has_base).then_some(FULL)];
    let last_of = |line: &str| policy.last.and_then(|last| last.lines.get(line));
    for last in lines.into_iter().flatten().filter_map(last_of) {
        // Of two images that were signed in the same second it is not known which is newer.
        let is_older = signed <= last.signed && last.digest != digest;
        if is_older && !is_kept && !policy.allow_older {
            return Err(Refusal::Older { image, signed, last: last.clone() });
        }
    }
    // An accepted image stays as new as it was when it was accepted.
    let before = last_of(line).filter(|last| last.digest == digest).map_or(0, |last| last.signed);
    Ok(AcceptedPart { image, digest, signed: signed.max(before) })
}

/// Returns the record of an image, if each of its parts is accepted. Those that are left out of it
/// are not recorded.
fn verify_image(
    image: &RequiredImage,
    policy: &SigningPolicy<'_>,
) -> Result<AcceptedImage, Refusal> {
    let has_base = !image.content.is_sparse();
    let (mut parts, mut lines) = (BTreeSet::new(), BTreeMap::<String, AcceptedPart>::new());
    // The part without files is made here, and nobody has signed it.
    let signed_parts = image.signed_parts().enumerate();
    for (index, part) in signed_parts.filter(|(_, part)| !part.name().is_nothing()) {
        let accepted = verify_part(&part.content, &part.signatures, has_base, policy)?;
        if !image.is_used(index) {
            continue;
        }
        parts.insert(accepted.digest);
        let line = line_of(&part.content).to_owned();
        let newest = lines.entry(line).or_insert_with(|| accepted.clone());
        if newest.signed < accepted.signed {
            *newest = accepted;
        }
    }
    let signed = lines.values().map(|part| part.signed).max().unwrap_or_default();
    let (image, digest) = (image.name().clone(), image.digest);
    let contents = AcceptedContents::new();
    Ok(AcceptedImage { image, digest, signed, parts, lines, contents })
}

/// Verifies an update.
pub fn verify_update(
    case: &UpdateCase<'_>,
    policy: &SigningPolicy<'_>,
) -> Result<VerifiedUpdate, Refusal> {
    let UpdateCase { request, image, contents, scan, refused, exclusions } = *case;
    let mut accepted = verify_image(image, policy)?;
    expect_same_order(request, image)?;
    let name = || image.name().clone();
    let (Some(have), Some(report)) = (&scan.tree, &scan.report) else {
        return Err(Refusal::Scope { image: name() });
    };
    if scan.scope != Scope::of(&image.scan, exclusions.lines()) || *scan.settings != image.scan {
        return Err(Refusal::Scope { image: name() });
    }
    let after = apply(have, &request.plan).map_err(|source| Refusal::Misfit { source })?;
    let want = required_tree(image, exclusions).map_err(|source| Refusal::Tree { source })?;
    let want = with_computed(&want, &after)?;
    let left = plan_between(&after, &want, report, refused);
    let is_last = policy.last.is_some_and(|last| last.digest == accepted.digest);
    let makes_room = is_last && removes_extras_alone(&request.plan, &want);
    if let [first, others @ ..] = &*left.operations
        && !makes_room
    {
        let (path, why, more) = (first.path.clone(), in_words(first), others.len());
        return Err(Refusal::Elsewhere { path, why, more });
    }
    if !makes_room {
        let before = policy.last.map(|last| &last.contents);
        let (names, now) = (policy.names, policy.now);
        let contents_policy = ContentsPolicy { names, now, before, have, refused };
        accepted.contents = verify_contents(image, contents, &want, &contents_policy)?;
    }
    expect_blocked_unchanged(&request.plan, &left.blocked)?;
    expect_tame(&request.plan, have, &want, report)?;
    let is_blocked = |path: &TreePath| left.blocked.iter().any(|blocked| blocked.path == *path);
    let end = if makes_room { &after } else { &want };
    let all = plan_between(have, end, report, &RefusedChanges::default());
    let changed = all.changed_paths().filter(|path| !is_blocked(path)).cloned().collect();
    Ok(VerifiedUpdate { accepted, changed })
}

/// True if `plan` removes paths that the signed tree does not have, and does nothing else.
fn removes_extras_alone(plan: &Plan, want: &Tree) -> bool {
    let is_extra = |Operation { path, action, .. }: &Operation| {
        *action == Action::Remove && want.get(path).is_none()
    };
    !plan.operations.is_empty() && plan.operations.iter().all(is_extra)
}

fn in_words(operation: &Operation) -> String {
    let names: Vec<&str> = operation.reason.iter().copied().map(Difference::name).collect();
    names.join(", ")
}

/// Refuses a request whose name, triggers or health check are not those of the image.
fn expect_same_order(request: &PrepareRequest, image: &RequiredImage) -> Result<(), Refusal> {
    let content = &image.content;
    let table = [
        (request.image == content.name && request.image_digest == image.digest, "name and digest"),
        (request.triggers == content.triggers, "triggers"),
        (request.health_check == content.health_check, "health checks"),
    ];
    match table.into_iter().find(|(is_same, _)| !is_same) {
        None => Ok(()),
        Some((_, what)) => Err(Refusal::Other { what, image: content.name.clone() }),
    }
}

/// Refuses operations on paths that are not as signed afterwards, because they are blocked: these
/// stay as they are.
fn expect_blocked_unchanged(plan: &Plan, blocked: &[Blocked]) -> Result<(), Refusal> {
    let why_of: BTreeMap<&TreePath, &Obstacle> =
        blocked.iter().map(|Blocked { path, why }| (path, why)).collect();
    let changed = plan.operations.iter().find_map(|operation| {
        let why = why_of.get(&operation.path)?;
        Some(Refusal::Elsewhere { path: operation.path.clone(), why: why.to_string(), more: 0 })
    });
    changed.map_or(Ok(()), Err)
}

/// Refuses operations that a comparison of the trees does not show, and that no planner makes. A
/// directory with kept content that the image does not have keeps its owner, mode and ACL. And a
/// file with privileges is not changed in place, because a process may have it open or hold another
/// name of it.
fn expect_tame(plan: &Plan, have: &Tree, want: &Tree, report: &ScanReport) -> Result<(), Refusal> {
    for Operation { path, action, .. } in &plan.operations {
        if *action != Action::Remove && want.get(path).is_none() {
            return Err(Refusal::NotSigned { path: path.clone() });
        }
        let Action::Change(Node::Leaf(new)) = action else { continue };
        let first = match have.get(path) {
            Some(Child::Leaf(Leaf::HardLink(first))) => first,
            _ => path.clone(),
        };
        let may_become = match (have.file(path), new) {
            (Some(old), Leaf::File(new)) => old.metadata.may_become(&new.metadata),
            _ => true,
        };
        let why = if !may_become {
            "it has privileges, or others than root could write to it"
        } else if report.externally_linked.contains(&first) {
            "it has names that are not signed"
        } else {
            continue;
        };
        return Err(Refusal::InPlace { path: path.clone(), why });
    }
    Ok(())
}

fn plan_between(have: &Tree, want: &Tree, report: &ScanReport, refused: &RefusedChanges) -> Plan {
    let kept_directories: BTreeSet<TreePath> = report.kept_directories.iter().cloned().collect();
    let externally_linked: BTreeSet<TreePath> = report.externally_linked.iter().cloned().collect();
    let occupied: BTreeMap<_, _> = report.occupied.iter().cloned().collect();
    let times = report.times;
    let have = ScannedTree {
        tree: have,
        kept_directories: &kept_directories,
        externally_linked: &externally_linked,
        occupied: &occupied,
        refused,
        times,
    };
    plan(&have, want)
}

/// Returns the signed tree with the computed files of the plan.
fn with_computed(want: &Tree, after: &Tree) -> Result<Tree, Refusal> {
    if want.root().totals().computed == 0 {
        return Ok(want.clone());
    }
    let mut brought: BTreeMap<TreePath, Node> =
        after.nodes().filter(|(_, node)| matches!(node, Node::Leaf(Leaf::File(_)))).collect();
    let mut builder = TreeBuilder::new(want.algorithm());
    for (path, node) in want.nodes() {
        let node = match node {
            Node::Leaf(Leaf::Computed(computed)) => match brought.remove(&path) {
                Some(file) if file.metadata() == Some(&computed.metadata) => file,
                _ => return Err(Refusal::Computed { path }),
            },
            other => other,
        };
        builder.insert(path, node).map_err(|source| Refusal::Tree { source })?;
    }
    builder.finish().map_err(|source| Refusal::Tree { source })
}

#[cfg(test)]
mod tests;
