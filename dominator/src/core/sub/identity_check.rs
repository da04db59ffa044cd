//! Whether what answers is the machine that is meant: the roster is told what the sub says of
//! itself, and nothing is done to the machine before it has said that it is the right one.
// tidy: core

use std::sync::Arc;

use api::dominator::Status;
use model::path::TreePath;
use model::scope::Coverage;

use super::{Effect, ImageState, Sub, View};
use crate::core::identity::{IdentityReport, IdentityVerdict, Origin, Origins, Sighting};
use crate::core::sub::next_effects::{Check, stop};
use model::image::required::RequiredImage;

/// What was told, and what was answered.
#[derive(Debug, Default)]
pub(super) struct IdentityCheck {
    /// Counts sightings.
    last: u64,
    sighting: Option<Arc<Sighting>>,
    /// The verdict on that sighting, once there is one.
    verdict: Option<IdentityVerdict>,
    /// The roster was told that the machine is synced, since it was last seen or changed.
    is_settled: bool,
}

impl IdentityCheck {
    /// Takes a verdict; one on another sighting than the last is late.
    pub(super) fn take(&mut self, verdict: IdentityVerdict) {
        if self.sighting.is_some() && verdict.number == self.last {
            self.verdict = Some(verdict);
        }
    }

    /// True if what answered last is the machine that is meant.
    pub(super) fn is_good(&self) -> bool {
        self.verdict.as_ref().is_some_and(|verdict| verdict.wrong.is_none())
    }
}

impl Sub {
    /// What answers is the machine that is meant.
    pub(super) fn identity_checked(&mut self, view: &View, effects: &mut Vec<Effect>) -> Check<()> {
        let origins = match &self.image {
            ImageState::Ready(image) => {
                let image = Arc::clone(image);
                self.scope_known(&image, view).origins
            }
            ImageState::Undefined | ImageState::Missing(_) => Origins::UNKNOWN,
        };
        let (instance, identity) = (view.report.version.instance, &view.report.identity);
        let check = &mut self.identity;
        let is_known = check
            .sighting
            .as_ref()
            .is_some_and(|sighting| sighting.is_of(instance, identity, origins));
        if !is_known {
            let sighting = Arc::new(Sighting::of(instance, identity, origins));
            check.last += 1;
            check.sighting = Some(Arc::clone(&sighting));
            (check.verdict, check.is_settled) = (None, false);
            effects.push(Effect::ReportIdentity(IdentityReport::Seen(check.last, sighting)));
        }
        match &check.verdict {
            None => match self.status {
                Status::Synced | Status::TriggerFailed => {
                    stop(Status::Rescanning, "answers anew; is it the machine that is meant?")
                }
                status => stop(status, self.detail.clone()),
            },
            Some(IdentityVerdict { wrong: Some(why), .. }) => stop(Status::WrongMachine, &**why),
            Some(IdentityVerdict { wrong: None, .. }) => Check::Continue(()),
        }
    }

    /// The sub does not answer: who answers next may be another one.
    pub(super) fn lost(&mut self, effects: &mut Vec<Effect>) {
        if self.identity.sighting.take().is_some() {
            self.identity.verdict = None;
            effects.push(Effect::ReportIdentity(IdentityReport::Lost));
        }
    }

    /// An update is carried out that may change the machine id.
    pub(super) fn changing(&mut self, effects: &mut Vec<Effect>) {
        let origins = self.identity.sighting.as_ref().map(|sighting| sighting.origins);
        if origins.is_some_and(|origins| origins.machine_id != Origin::Machine) {
            self.identity.is_settled = false;
            effects.push(Effect::ReportIdentity(IdentityReport::Changing));
        }
    }

    /// The machine equals its image: this is who it is.
    pub(super) fn settled(&mut self, effects: &mut Vec<Effect>) {
        if !std::mem::replace(&mut self.identity.is_settled, true) {
            effects.push(Effect::ReportIdentity(IdentityReport::Synced));
        }
    }
}

/// Where the files come from that tell machines apart, on machines that leave `excluded` alone.
pub(super) fn origins(image: &RequiredImage, excluded: impl Fn(&TreePath) -> bool) -> Origins {
    let of = |text: &str| {
        let path: TreePath = text.parse().expect("the constant is a path");
        let is_covered = match &image.scan.coverage {
            Coverage::Full(filter) => !filter.keeps(&path),
            Coverage::Paths(paths) => paths.contains(&path),
        };
        if !is_covered || excluded(&path) {
            return Origin::Machine;
        }
        match image.tree.file(&path) {
            Some(file) if file.size_bytes > 0 => Origin::Image(file.object),
            _ => Origin::Nobody,
        }
    };
    Origins { machine_id: of("/etc/machine-id"), hostname: of("/etc/hostname") }
}
