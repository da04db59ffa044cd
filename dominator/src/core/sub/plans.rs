//! The tree that the sub has, and the plan from it to an image.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::{PlanJob, PlanKey, Planned};
use api::subd::ScanReport;
use model::filter::Patterns;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::scope::Scope;
use model::tree::Tree;

use super::identity_check::origins;
use super::next_effects::{Check, stop};
use super::{Effect, Now, Sub, Ticket, View};
use crate::core::identity::Origins;
use crate::core::timing::Attempt;

/// The tree that the sub last reported, and the reading of it.
#[derive(Debug, Default)]
pub(super) struct Trees {
    pub(super) tree: Option<Tree>,
    pub(super) asked: Option<(Ticket, ObjectId)>,
    pub(super) attempt: Attempt,
}

/// The plan to one image.
#[derive(Debug, Default)]
pub(super) struct Planning {
    pub(super) asked: Option<(Ticket, PlanKey)>,
    pub(super) made: Option<Arc<Planned>>,
    /// Why no plan can be made.
    pub(super) failed: Option<(PlanKey, String)>,
}

impl Planning {
    /// Takes a plan, or why it cannot be made; false if this is not the answer to its question.
    pub(super) fn take(&mut self, ticket: Ticket, result: &Result<Arc<Planned>, String>) -> bool {
        let Some((_, key)) = self.asked.take_if(|(asked, _)| *asked == ticket) else {
            return false;
        };
        match result {
            Ok(planned) => self.made = Some(Arc::clone(planned)),
            Err(text) => self.failed = Some((key, text.clone())),
        }
        true
    }
}

/// The scope that an image has on a machine with these exclusions, and what it brings of what tells
/// machines apart; kept, because a sparse image has as many lines as paths.
#[derive(Clone, Debug)]
pub(super) struct KnownScope {
    pub(super) image: ObjectId,
    pub(super) exclusions: Patterns,
    pub(super) scope: Scope,
    pub(super) origins: Origins,
}

impl Sub {
    /// What is known of the image on this machine.
    pub(super) fn scope_known(&mut self, image: &RequiredImage, view: &View) -> &KnownScope {
        let is_same =
            |known: &KnownScope| known.image == image.digest && known.exclusions == view.exclusions;
        match self.known_scope.take().filter(is_same) {
            Some(known) => self.known_scope.insert(known),
            None => {
                let exclusions = view.exclusions.clone();
                self.known_scope.insert(KnownScope {
                    image: image.digest,
                    scope: Scope::of(&image.scan, exclusions.lines()),
                    origins: origins(image, |path| exclusions.covers(path)),
                    exclusions,
                })
            }
        }
    }

    /// The plan from the last scan to the image.
    pub(super) fn plan_at_hand(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        scan: &Arc<ScanReport>,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<Arc<Planned>> {
        let key = PlanKey { image: image.digest, scan: view.scan_number };
        if let Some(planned) = &self.plan.made
            && planned.key == key
        {
            return Continue(Arc::clone(planned));
        }
        if let Some((failed, text)) = &self.plan.failed
            && *failed == key
        {
            return stop(Status::Blocked, format!("no plan can be made: {text}"));
        }
        let tree = self.tree_at_hand(scan, now, effects)?;
        if self.plan.asked.is_none() {
            self.plan.asked = Some((self.ask_for_plan(key, view, scan, tree, image, effects), key));
        }
        stop(Status::Rescanning, format!("comparing the new scan with {}", image.name()))
    }

    /// Asks for the plan from a scan to an image.
    pub(super) fn ask_for_plan(
        &mut self,
        key: PlanKey,
        view: &View,
        scan: &Arc<ScanReport>,
        tree: Tree,
        image: &Arc<RequiredImage>,
        effects: &mut Vec<Effect>,
    ) -> Ticket {
        let (scan, image) = (Arc::clone(scan), Arc::clone(image));
        let job = PlanJob { key, tree, scan, exclusions: view.exclusions.clone(), image };
        let ticket = self.next_ticket();
        effects.push(Effect::Plan(ticket, Box::new(job)));
        ticket
    }

    fn tree_at_hand(
        &mut self,
        scan: &ScanReport,
        now: Now,
        effects: &mut Vec<Effect>,
    ) -> Check<Tree> {
        if let Some(tree) = self.trees.tree.as_ref().filter(|tree| tree.digest() == scan.root) {
            return Continue(tree.clone());
        }
        if self.trees.asked.is_none() {
            if let Some(at) = self.trees.attempt.held_until(now.elapsed) {
                let why = self.trees.attempt.why().unwrap_or_default().to_owned();
                self.wake_by(at);
                return stop(Status::PollFailed, format!("its tree could not be read: {why}"));
            }
            let ticket = self.next_ticket();
            self.trees.asked = Some((ticket, scan.root));
            effects.push(Effect::ReadTree(ticket, scan.root));
        }
        stop(Status::Rescanning, "reading the new scan")
    }
}
