//! Decides whether an update is what trusted keys have signed, and nothing else.
//!
//! The question is not who made the plan, nor how: it is carried out on the scanned tree, in
//! memory, and what comes out must comply with the signed tree. Whatever else the update does must
//! be the image's own: its triggers and its health check. Which paths have changed, and so which
//! triggers fire, is found out here, because a plan could lie about its reasons.
//!
//! # Invariants
//!
//! * If the plan is accepted, the plan from its result to the signed tree is empty, and it has put
//!   or changed nothing at paths that the signed tree does not have.
//! * It was scanned as the signed image asks, so that the filter in force is the signed one.
//! * Of computed files the content is not signed; path, mode, owner and attributes are.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::subd::{PrepareRequest, ScanReport};
use model::filter::Patterns;
use model::image::required::{RequiredImage, required_tree};
use model::image::{Content, ImageName};
use model::path::TreePath;
use model::plan::{Action, ApplyError, Blocked, Difference, Have, Operation, Plan, apply, plan};
use model::scope::Scope;
use model::signing::{Endorsed, Policy, Signature, TrustedKeys, endorse};
use model::tree::{Child, Leaf, Node, Tree, TreeBuilder, TreeError};

use crate::state::accepted_image::{AcceptedImage, at};
use crate::state::snapshot::Snapshot;

/// What the machine's own configuration and history ask for.
#[derive(Clone, Copy, Debug)]
pub struct SigningPolicy<'a> {
    /// Whose signatures count.
    pub keys: &'a TrustedKeys,
    /// How many different ones are needed.
    pub needed: u32,
    /// The machine's clock, in seconds after 1970-01-01 UTC.
    pub now: u64,
    /// True if images may be older than the one that was accepted last.
    pub allow_older: bool,
    /// The one that was accepted last.
    pub last: Option<&'a AcceptedImage>,
}

/// What is judged.
#[derive(Clone, Copy, Debug)]
pub struct UpdateCase<'a> {
    /// The order.
    pub request: &'a PrepareRequest,
    /// The signed image, whose tree is known to be its tree.
    pub image: &'a RequiredImage,
    /// What was signed, and by whom.
    pub signatures: &'a [Signature],
    /// The scan that the plan is staged upon.
    pub scan: &'a Snapshot,
    /// The machine's own exclusions.
    pub exclusions: &'a Patterns,
}

/// An update that is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedUpdate {
    /// What is to be remembered when it has succeeded.
    pub accepted: AcceptedImage,
    /// The paths that may fire triggers.
    pub changed: Vec<TreePath>,
}

/// Why an update is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The machine cannot judge.
    #[error("{why}; no update is accepted until that is mended on the machine itself")]
    Local {
        /// Why not.
        why: String,
    },
    /// The machine was told whose images it takes, and is not any more.
    #[error(
        "this machine takes only signed images, and subd was started without --trusted-keys: give \
         them again (was a config.toml taken away?), or, if it shall take every image from now on, \
         remove accepted.json from /.subd/state (and from --state) and start subd again"
    )]
    KeysGone,
    /// Nobody has shown that it is signed.
    #[error(
        "this machine takes only signed images, and no signatures of {image} were offered: \
         `imagetool sign` makes them"
    )]
    Unsigned {
        /// The image.
        image: ImageName,
    },
    /// Too few keys stand behind it.
    #[error("this machine takes only signed images: {why}")]
    Unendorsed {
        /// Which signatures do not count, and why.
        why: String,
    },
    /// One that is not older was accepted before.
    #[error(
        "{image} was signed at {}, and {} was accepted before ({last}): sign it again if the \
         machine is to go back", at(*.signed), newness(*.signed, last)
    )]
    Older {
        /// The image.
        image: ImageName,
        /// When it was signed.
        signed: u64,
        /// What was accepted.
        last: AcceptedImage,
    },
    /// The order is not that of the signed image.
    #[error("the {what} of the update are not those that are signed with {image}")]
    Other {
        /// What differs.
        what: &'static str,
        /// The image.
        image: ImageName,
    },
    /// The machine does not scan as the image asks.
    #[error("the machine does not scan as {image} asks, so that it cannot be compared with it")]
    Scope {
        /// The image.
        image: ImageName,
    },
    /// The plan does not fit.
    #[error("the plan does not fit the machine")]
    Misfit {
        /// Where and why.
        #[source]
        source: ApplyError,
    },
    /// A tree cannot be made.
    #[error("the signed tree cannot be compared")]
    Tree {
        /// Why.
        #[source]
        source: TreeError,
    },
    /// A computed file is not as its rule asks.
    #[error("{path} would not be the computed file that is signed")]
    Computed {
        /// The path.
        path: TreePath,
    },
    /// The plan puts or changes something at a path that nobody has signed.
    #[error("the plan changes {path}, which the signed image does not have")]
    NotSigned {
        /// The path.
        path: TreePath,
    },
    /// The plan changes an inode in place that others can reach by other ways.
    #[error("the plan changes {path} in place, where only a new file is safe ({why})")]
    InPlace {
        /// The path.
        path: TreePath,
        /// Why.
        why: &'static str,
    },
    /// The plan leads elsewhere.
    #[error("with this plan {path} would not be as it is signed ({why}){}", others(*.more))]
    Elsewhere {
        /// The first path that would differ.
        path: TreePath,
        /// In what.
        why: String,
        /// How many other paths would differ.
        more: usize,
    },
}

fn newness(signed: u64, last: &AcceptedImage) -> &'static str {
    if signed == last.signed { "one of the same second" } else { "a newer one" }
}

fn others(more: usize) -> String {
    if more == 0 { String::new() } else { format!(", nor would {more} others") }
}

/// Says how new the image is, if enough trusted keys vouch for it and it is newer than the one that
/// was accepted last, or that one.
///
/// # Errors
///
/// [`Refusal`].
pub fn verify_signatures(
    content: &Content,
    signatures: &[Signature],
    policy: &SigningPolicy<'_>,
) -> Result<AcceptedImage, Refusal> {
    let (image, digest) = (&content.name, content.digest());
    let is_last = policy.last.is_some_and(|last| last.digest == digest);
    let passed = policy.last.map_or(0, |last| last.signed);
    let SigningPolicy { keys, needed, now, .. } = *policy;
    // What the machine has is kept up even when it may not be gone to any more.
    let endorsing = Policy { keys, needed, now, passed, even_expired: is_last };
    let Endorsed { signed, .. } = endorse(image, &digest, signatures, &endorsing)
        .map_err(|error| Refusal::Unendorsed { why: error.to_string() })?;
    // What was accepted once was signed then, whatever is shown now.
    let signed = if is_last { signed.max(passed) } else { signed };
    match policy.last {
        // Of two that were signed in the same second nobody can tell which is newer.
        Some(last) if signed <= last.signed && !is_last && !policy.allow_older => {
            Err(Refusal::Older { image: image.clone(), signed, last: last.clone() })
        }
        _ => Ok(AcceptedImage { image: image.clone(), digest, signed }),
    }
}

/// Judges an update.
///
/// # Errors
///
/// [`Refusal`] says what is not as it was signed.
pub fn verify_update(
    case: &UpdateCase<'_>,
    policy: &SigningPolicy<'_>,
) -> Result<VerifiedUpdate, Refusal> {
    let UpdateCase { request, image, signatures, scan, exclusions } = *case;
    let accepted = verify_signatures(&image.content, signatures, policy)?;
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
    let left = plan_between(&after, &want, report);
    let first = left.operations.first().map(|operation| (&operation.path, in_words(operation)));
    let blocked = || left.blocked.first().map(|Blocked { path, why }| (path, why.to_string()));
    if let Some((path, why)) = first.or_else(blocked) {
        let more = left.operations.len() + left.blocked.len() - 1;
        return Err(Refusal::Elsewhere { path: path.clone(), why, more });
    }
    expect_tame(&request.plan, have, &want, report)?;
    let changed = plan_between(have, &want, report).changed_paths().cloned().collect();
    Ok(VerifiedUpdate { accepted, changed })
}

fn in_words(operation: &Operation) -> String {
    let names: Vec<&str> = operation.reason.iter().copied().map(Difference::name).collect();
    names.join(", ")
}

/// Refuses an order that brings anything along that is not the image's own.
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

/// Refuses operations that the trees do not tell of, and that no planner makes. A directory that
/// holds what the machine keeps, and that the image does not have, stays: with the owner, mode and
/// ACL that it has. And who has a file open, or a name of it outside of what is signed, must not
/// find it changed to something that has privileges.
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
        let was = have.file(path).is_some_and(|file| file.metadata.is_privileged());
        let will = matches!(new, Leaf::File(file) if file.metadata.is_privileged());
        let why = if was || will {
            "it has privileges"
        } else if report.externally_linked.contains(&first) {
            "it has names that are not signed"
        } else {
            continue;
        };
        return Err(Refusal::InPlace { path: path.clone(), why });
    }
    Ok(())
}

fn plan_between(have: &Tree, want: &Tree, report: &ScanReport) -> Plan {
    let kept_directories: BTreeSet<TreePath> = report.kept_directories.iter().cloned().collect();
    let externally_linked: BTreeSet<TreePath> = report.externally_linked.iter().cloned().collect();
    let occupied: BTreeMap<_, _> = report.occupied.iter().cloned().collect();
    let times = report.times;
    let have = Have {
        tree: have,
        kept_directories: &kept_directories,
        externally_linked: &externally_linked,
        occupied: &occupied,
        times,
    };
    plan(&have, want)
}

/// The signed tree with the computed files that the plan brings, whose content nobody signs.
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
