//! The image that the machine is brought to: the required one; or, while that cannot be installed,
//! the one that the machine has. Drift from that is repaired. With the update to an image without a
//! base, the files of bundles that leave go too.
// tidy: core

use core::ops::ControlFlow::{Break, Continue};
use std::sync::Arc;

use api::dominator::Status;
use model::image::ImageName;
use model::image::composition::nothing;
use model::image::required::RequiredImage;

use super::{Check, Effect, RequestId, StatusAndDetail, Step, Sub, View, stop};
use crate::core::timing::{Attempt, HOLD_FIRST, HOLD_LONGEST};

/// For which image bundles leave, and from which.
#[derive(Debug)]
pub(super) struct LeavingOf {
    required: Arc<RequiredImage>,
    /// The image that the machine has.
    former: ImageName,
}

/// The required image together with the bundles that leave with the update to it.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    asked: Option<(RequestId, LeavingOf)>,
    known: Option<(LeavingOf, Arc<RequiredImage>)>,
    attempt: Attempt,
}

impl Sub {
    /// Returns the image that the machine is brought to: the required one, or the one at which it
    /// is kept. `None` if the required one is not ready.
    pub(super) fn target(&self) -> Option<&Arc<RequiredImage>> {
        let leaving = self.leaving.known.as_ref().map(|(_, image)| image);
        self.kept.as_ref().or(leaving).or_else(|| self.image.ready())
    }

    /// Returns the image without files if no image is required of the machine, and it has bundles
    /// alone: their files go.
    pub(super) fn emptied(&self, view: &View) -> Option<Arc<RequiredImage>> {
        view.report.last_image.as_ref()?.has_only_bundles().then(nothing)
    }

    /// Brings the machine to the required image, or keeps it at the one that it has.
    pub(super) fn bring_to_target(
        &mut self,
        view: &View,
        required: &Arc<RequiredImage>,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        if let Some(undone) = self.undone(required.name()) {
            let detail = format!(
                "the update to {} was undone, because its health check failed: {}; require \
                 another image, or: domtool retry {}",
                required.name(),
                undone.why.trim_end(),
                self.machine.hostname
            );
            return self.keep(view, required, (Status::HealthFailed, detail), step);
        }
        if let Some(unknown) = self.unknown_content(view, required) {
            let detail = format!("the content of computed files is not known: {unknown}");
            return self.keep(view, required, (Status::WaitingForComputedFiles, detail), step);
        }
        if let Some(status) = self.check_resources(view, required, step)? {
            return self.keep(view, required, status, step);
        }
        self.kept = None;
        let image = self.check_leaving(view, required, step)?;
        self.bring_to(view, &image, step)
    }

    /// Continues with the image, together with the bundles that leave with the update to it.
    fn check_leaving(
        &mut self,
        view: &View,
        required: &Arc<RequiredImage>,
        step: &mut Step<'_>,
    ) -> Check<Arc<RequiredImage>> {
        let former = view.report.last_image.as_ref();
        let former = former.filter(|former| !required.name().leaving(former).is_empty());
        let Some(former) = former else {
            self.leaving = Leaving::default();
            return Continue(Arc::clone(required));
        };
        let is_of_it =
            |known: &LeavingOf| Arc::ptr_eq(&known.required, required) && known.former == *former;
        if let Some((_, image)) = self.leaving.known.as_ref().filter(|(of, _)| is_of_it(of)) {
            return Continue(Arc::clone(image));
        }
        self.leaving.known = None;
        let names: Vec<String> =
            required.name().leaving(former).into_iter().map(String::from).collect();
        let names = names.join(", ");
        if let Some(at) = self.leaving.attempt.held_until(step.now.elapsed) {
            self.wake_by(at);
            let why = self.leaving.attempt.why().unwrap_or_default();
            let detail = format!("the files of {names} go with the next update: {why}");
            return stop(Status::ImageNotReady, detail);
        }
        if !self.leaving.asked.as_ref().is_some_and(|(_, of)| is_of_it(of)) {
            let request_id = self.next_request_id();
            let of = LeavingOf { required: Arc::clone(required), former: former.clone() };
            self.leaving.asked = Some((request_id, of));
            let required = Arc::clone(required);
            step.effects.push(Effect::ReadLeaving(request_id, required, former.clone()));
        }
        stop(Status::ImageNotReady, format!("reading {names}, whose files go"))
    }

    /// Takes an image together with the bundles that leave, or why these are not known now.
    pub(super) fn take_leaving(
        &mut self,
        request_id: RequestId,
        image: Result<Arc<RequiredImage>, String>,
        step: &mut Step<'_>,
    ) {
        let leaving = &mut self.leaving;
        let Some((_, of)) = leaving.asked.take_if(|(asked, _)| *asked == request_id) else {
            return;
        };
        match image {
            Ok(image) => {
                leaving.attempt = Attempt::default();
                leaving.known = Some((of, image));
            }
            Err(why) => {
                let pause = leaving.attempt.count(HOLD_FIRST, HOLD_LONGEST, step.context.jitter);
                leaving.attempt.hold(step.now.elapsed + pause, why);
            }
        }
    }

    /// Keeps the machine at the image that it has, for this reason.
    fn keep(
        &mut self,
        view: &View,
        required: &Arc<RequiredImage>,
        (status, mut detail): StatusAndDetail,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        // Of computed files whose content is not known, the machine keeps what it has.
        let is_required = status == Status::WaitingForComputedFiles
            && self.is_recorded(view, required)
            && view.undone(required.name()).is_none();
        let kept = match is_required {
            true => {
                self.kept = None;
                Some(Arc::clone(required))
            }
            false => self.check_kept(view, required, step)?,
        };
        let Some(kept) = kept else {
            detail.push_str("; its former image is not known, so drift is not repaired");
            return stop(status, detail);
        };
        if view.undone(kept.name()).is_some() {
            detail.push_str("; its former image failed its health check too");
            return stop(status, detail);
        }
        match self.bring_to(view, &kept, step) {
            Continue((_, more)) => Continue((status, format!("{detail}; {more}"))),
            Break((status, more)) => Break((status, format!("repairing {}: {more}", kept.name()))),
        }
    }

    /// Continues with the image that the machine had before; `None` if that is not known, or
    /// cannot be loaded.
    fn check_kept(
        &mut self,
        view: &View,
        required: &RequiredImage,
        step: &mut Step<'_>,
    ) -> Check<Option<Arc<RequiredImage>>> {
        let is_last =
            |kept: &Arc<RequiredImage>| view.report.last_image.as_ref() == Some(kept.name());
        let kept = match self.kept.take().filter(is_last) {
            Some(kept) => Some(kept),
            None => self.check_former(view, step)?.flatten(),
        };
        self.kept = kept.filter(|kept| kept.digest != required.digest);
        Continue(self.kept.clone())
    }
}
