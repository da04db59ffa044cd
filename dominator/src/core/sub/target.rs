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

use super::{Check, StatusAndDetail, Step, Sub, View, stop};

/// The required image together with the bundles that leave with the update to it.
#[derive(Debug)]
pub(super) struct Leaving {
    required: Arc<RequiredImage>,
    /// The image that the machine has.
    former: ImageName,
    image: Arc<RequiredImage>,
}

impl Sub {
    /// Returns the image that the machine is brought to: the required one, or the one at which it
    /// is kept. `None` if the required one is not ready.
    pub(super) fn target(&self) -> Option<&Arc<RequiredImage>> {
        let leaving = self.leaving.as_ref().map(|leaving| &leaving.image);
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

    /// Continues with the image, together with the bundles that leave with the update to it. The
    /// files of those that cannot be loaded stay.
    fn check_leaving(
        &mut self,
        view: &View,
        required: &Arc<RequiredImage>,
        step: &mut Step<'_>,
    ) -> Check<Arc<RequiredImage>> {
        let former = view.report.last_image.as_ref();
        let former = former.filter(|former| !required.name().leaving(former).is_empty());
        let Some(name) = former else {
            self.leaving = None;
            return Continue(Arc::clone(required));
        };
        let is_same =
            |known: &&Leaving| Arc::ptr_eq(&known.required, required) && known.former == *name;
        if let Some(known) = self.leaving.as_ref().filter(is_same) {
            return Continue(Arc::clone(&known.image));
        }
        let former = self.check_former(view, step)?.flatten();
        let image = former.and_then(|former| required.after(&former).ok());
        let image = image.map_or_else(|| Arc::clone(required), Arc::new);
        let (required, former) = (Arc::clone(required), name.clone());
        self.leaving = Some(Leaving { required, former, image: Arc::clone(&image) });
        Continue(image)
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
