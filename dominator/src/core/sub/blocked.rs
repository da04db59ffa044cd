//! Blocked paths: whether an update goes on without them.
//!
//! A repair goes on: the other paths are made right. A new image is held back by a blocked path,
//! unless the former image requires the same of it ([`first_that_holds`]), or an operator orders
//! that it goes on.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::fmt::Write as _;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::Planned;
use model::display::counted;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::plan::{Blocked, FormerTree, Obstacle, first_that_holds};

use super::{Check, Effect, RequestId, StatusAndDetail, Step, Sub, View, stop};
use crate::core::claims::Claim;

/// How many blocked paths a status lists.
const PATHS_LISTED: usize = 3;

/// What is known of the image that a machine had before.
#[derive(Debug)]
struct FormerImage {
    name: ImageName,
    /// `None` if it cannot be loaded.
    image: Option<Arc<RequiredImage>>,
}

/// What the decisions about blocked paths remember.
#[derive(Debug, Default)]
pub(super) struct BlockedPaths {
    former: Option<FormerImage>,
    asked: Option<(RequestId, ImageName)>,
    /// The image that an operator wants although paths are blocked.
    accepted: Option<ObjectId>,
    /// The image for which the machine was counted as blocked.
    counted: Option<ObjectId>,
}

impl BlockedPaths {
    /// Takes the former image, or that it cannot be loaded.
    pub(super) fn take_former(&mut self, request_id: RequestId, image: Option<Arc<RequiredImage>>) {
        if let Some((_, name)) = self.asked.take_if(|(asked, _)| *asked == request_id) {
            self.former = Some(FormerImage { name, image });
        }
    }

    /// Forgets the former image, which is needed no more.
    pub(super) fn forget_former(&mut self) {
        self.former = None;
    }

    /// Forgets what was known and ordered about another image.
    pub(super) fn image_changed(&mut self) {
        *self = Self::default();
    }
}

impl Sub {
    /// Stops if blocked paths hold the update back.
    pub(super) fn check_blocked(
        &mut self,
        view: &View,
        image: &RequiredImage,
        planned: &Planned,
        step: &mut Step<'_>,
    ) -> Check<()> {
        let blocked = &planned.plan.blocked;
        if blocked.is_empty() {
            return Continue(());
        }
        if self.trees.refused.is_none() {
            // Its release carries out no plan that leaves something out.
            return stop(Status::Blocked, list(blocked));
        }
        if self.is_recorded(view, image) || self.blocked.accepted == Some(image.digest) {
            return Continue(());
        }
        let former = self.check_former(view, step)?;
        let former = match &former {
            None => FormerTree::Nothing,
            Some(None) => FormerTree::Unknown,
            Some(Some(former)) => FormerTree::Known(&former.tree),
        };
        let Some(Blocked { path, why }) = first_that_holds(blocked, &image.tree, former) else {
            return Continue(());
        };
        if self.blocked.counted.replace(image.digest) != Some(image.digest) {
            let claim = Claim::Blocked(self.new_parts(view, image));
            step.effects.push(Effect::Claim(claim));
        }
        let mut detail = format!("{path}: {why}");
        if blocked.len() > 1 {
            write!(detail, "; {} are blocked", counted(blocked.len() as u64, "path"))
                .expect("writing to a String cannot fail");
        }
        let hostname = &self.machine.hostname;
        write!(
            detail,
            "; {} is not installed without them, unless: domtool go-on {hostname} --why TEXT",
            image.name()
        )
        .expect("writing to a String cannot fail");
        stop(Status::Blocked, detail)
    }

    /// Continues with the image that the machine had before: `None` if it never had one,
    /// `Some(None)` if it cannot be loaded.
    pub(super) fn check_former(
        &mut self,
        view: &View,
        step: &mut Step<'_>,
    ) -> Check<Option<Option<Arc<RequiredImage>>>> {
        let Some(name) = &view.report.last_image else { return Continue(None) };
        if let Some(former) = self.blocked.former.as_ref().filter(|former| former.name == *name) {
            return Continue(Some(former.image.clone()));
        }
        if self.blocked.asked.is_none() {
            let request_id = self.next_request_id();
            self.blocked.asked = Some((request_id, name.clone()));
            step.effects.push(Effect::ReadFormer(request_id, name.clone()));
        }
        stop(Status::Rescanning, format!("reading its former image {name}"))
    }

    /// Returns the status of a machine that has its image, except for blocked paths.
    pub(super) fn finish_partly_synced(
        &mut self,
        image: &RequiredImage,
        blocked: &[Blocked],
    ) -> StatusAndDetail {
        self.updates.reset();
        self.blocked.forget_former();
        self.fetch = None;
        self.orders.forced_plan = None;
        let count = counted(blocked.len() as u64, "path");
        let detail = format!(
            "equals {}, except for {count} that cannot be changed: {}",
            image.name(),
            list(blocked)
        );
        (Status::PartlySynced, detail)
    }

    /// True if the machine is not in place for its blocked paths: other file-systems where the
    /// image has directories are no such paths.
    pub(super) fn lacks_blocked_paths(&self, status: Status) -> bool {
        let lacks = |planned: &Arc<Planned>| {
            planned.plan.blocked.iter().any(|blocked| blocked.why != Obstacle::Boundary)
        };
        status == Status::PartlySynced && self.plan.made.as_ref().is_some_and(lacks)
    }

    /// True if blocked paths hold a new image back, so that [`SubOrder::GoOn`] has an effect.
    ///
    /// [`SubOrder::GoOn`]: super::SubOrder::GoOn
    #[must_use]
    pub fn is_held_by_blocked_paths(&self) -> bool {
        let has_blocked = |planned: &Arc<Planned>| !planned.plan.blocked.is_empty();
        self.shown.status == Status::Blocked
            && self.trees.refused.is_some()
            && self.plan.made.as_ref().is_some_and(has_blocked)
    }

    /// Lets the update to the required image go on without the blocked paths.
    pub(super) fn go_on(&mut self) -> bool {
        let is_held = self.is_held_by_blocked_paths();
        if is_held {
            self.blocked.accepted = self.target().map(|image| image.digest);
            self.clear_failures();
        }
        is_held
    }
}

/// Lists the first of these paths.
fn list(blocked: &[Blocked]) -> String {
    let shown = |Blocked { path, why }: &Blocked| format!("{path}: {why}");
    let mut text = blocked.iter().take(PATHS_LISTED).map(shown).collect::<Vec<_>>().join("; ");
    if blocked.len() > PATHS_LISTED {
        write!(text, "; and {} more", blocked.len() - PATHS_LISTED)
            .expect("writing to a String cannot fail");
    }
    text
}
