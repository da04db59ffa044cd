//! Whether what answers is the machine that is meant: the roster is told what the sub says of
//! itself, and nothing is done to the machine before it has said that it is the right one.
// tidy: core

use std::sync::Arc;

use api::dominator::Status;
use model::path::TreePath;
use model::scope::Coverage;

use super::decide::{Stage, stop};
use super::{Effect, ImageState, Sub, View};
use crate::core::identity::{News, Origin, Origins, Sighting, Verdict};
use model::image::required::RequiredImage;

/// What was told, and what was answered.
#[derive(Debug, Default)]
pub(super) struct Recognition {
    /// Counts sightings.
    last: u64,
    sighting: Option<Arc<Sighting>>,
    /// The verdict on that sighting, once there is one.
    verdict: Option<Verdict>,
    /// The roster was told that the machine is synced, since it was last seen or changed.
    is_settled: bool,
}

impl Recognition {
    /// Takes a verdict; one on another sighting than the last is late.
    pub(super) fn take(&mut self, verdict: Verdict) {
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
    pub(super) fn recognized(&mut self, view: &View, effects: &mut Vec<Effect>) -> Stage<()> {
        let origins = match &self.image {
            ImageState::Ready(image) => {
                let image = Arc::clone(image);
                self.scope_known(&image, view).origins
            }
            ImageState::Undefined | ImageState::Missing(_) => Origins::UNKNOWN,
        };
        let (instance, identity) = (view.report.version.instance, &view.report.identity);
        let recognition = &mut self.recognition;
        let is_known = recognition
            .sighting
            .as_ref()
            .is_some_and(|sighting| sighting.is_of(instance, identity, origins));
        if !is_known {
            let sighting = Arc::new(Sighting::of(instance, identity, origins));
            recognition.last += 1;
            recognition.sighting = Some(Arc::clone(&sighting));
            (recognition.verdict, recognition.is_settled) = (None, false);
            effects.push(Effect::Tell(News::Seen(recognition.last, sighting)));
        }
        match &recognition.verdict {
            None => match self.status {
                Status::Synced | Status::TriggerFailed => {
                    stop(Status::Rescanning, "answers anew; is it the machine that is meant?")
                }
                status => stop(status, self.detail.clone()),
            },
            Some(Verdict { wrong: Some(why), .. }) => stop(Status::WrongMachine, &**why),
            Some(Verdict { wrong: None, .. }) => Stage::Continue(()),
        }
    }

    /// The sub does not answer: who answers next may be another one.
    pub(super) fn lost(&mut self, effects: &mut Vec<Effect>) {
        if self.recognition.sighting.take().is_some() {
            self.recognition.verdict = None;
            effects.push(Effect::Tell(News::Lost));
        }
    }

    /// An update is carried out that may change the machine id.
    pub(super) fn changing(&mut self, effects: &mut Vec<Effect>) {
        let origins = self.recognition.sighting.as_ref().map(|sighting| sighting.origins);
        if origins.is_some_and(|origins| origins.machine_id != Origin::Machine) {
            self.recognition.is_settled = false;
            effects.push(Effect::Tell(News::Changing));
        }
    }

    /// The machine equals its image: this is who it is.
    pub(super) fn settled(&mut self, effects: &mut Vec<Effect>) {
        if !std::mem::replace(&mut self.recognition.is_settled, true) {
            effects.push(Effect::Tell(News::Synced));
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
