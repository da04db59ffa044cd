//! The content of the computed files that the required image has on this machine.
//!
//! Until all of it is known, the machine stays at the image that it has (`target`). Before an
//! update the content is given to the machine, because no image server has it.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::sync::Arc;

use api::dominator::Status;
use api::planning::Planned;
use api::subd::Activity;
use model::display::{counted, size};
use model::image::ComputedRule;
use model::image::computed::{ComputedFiles, Unknown};
use model::image::required::RequiredImage;
use model::object::ObjectId;

use super::calls::CallPurpose;
use super::{Call, Check, ContentsToSign, Effect, Step, Sub, View, stop};
use crate::core::computed::rollout::{ContentReport, ContentUpdate, Standing};
use crate::core::computed::{BEING_ASKED, KnownFiles};
use crate::core::image_breaker::UpdateFailure;

/// What is known of the computed files of one machine.
#[derive(Debug)]
pub(super) struct ComputedContent {
    pub(super) files: Arc<ComputedFiles>,
    /// Why other content is not known.
    unknown: Arc<[Unknown]>,
    /// Why other content is not in use yet.
    pub(super) held: Option<String>,
    /// The number of the files.
    round: u64,
    /// Why they are others than before.
    pub(super) update: ContentUpdate,
    /// True if the machine was found to be in sync in this step.
    pub(super) is_in_sync: bool,
    /// What was reported last, about the files with which number.
    reported: Option<(u64, ContentReport)>,
    /// Counts how often the content changed.
    pub(super) version: u64,
    /// True if content was asked for, perhaps before the dominator was started.
    is_wanted: bool,
}

impl Default for ComputedContent {
    fn default() -> Self {
        Self {
            files: Arc::default(),
            unknown: [].into(),
            held: None,
            round: 0,
            update: ContentUpdate::None,
            is_in_sync: false,
            reported: None,
            version: 0,
            is_wanted: true,
        }
    }
}

impl Sub {
    /// Asks for the content of the computed files of the required image, whose record or image has
    /// changed.
    pub(super) fn want_computed(&mut self, effects: &mut Vec<Effect>) {
        let Some(image) = self.image.ready() else { return };
        let is_wanted = !image.content.computed.is_empty();
        if is_wanted || self.computed.is_wanted {
            self.computed.is_wanted = is_wanted;
            effects.push(Effect::WantComputed(Arc::clone(&self.machine), Arc::clone(image)));
        }
    }

    /// Takes what is known of the computed files.
    pub(super) fn take_computed(&mut self, known: KnownFiles) {
        let KnownFiles { files, unknown, held, round, update } = known;
        if self.computed.files != files {
            self.computed.files = files;
            self.computed.version += 1;
            self.clear_failures();
            if self.was_content_undone() {
                // The image has not failed, but its former content.
                self.retry_undone();
            }
        }
        if self.computed.unknown != unknown {
            // It may be brought to the required image now: a repair of its former one is not sent.
            self.computed.unknown = unknown;
            self.kept = None;
        }
        (self.computed.held, self.computed.round, self.computed.update) = (held, round, update);
    }

    /// True if the last update was one within the image, which the machine still has.
    fn was_content_undone(&self) -> bool {
        let last = self.view.as_ref().map(|view| &view.report);
        self.identity.is_verified()
            && last.is_some_and(|report| {
                let last = report.last_update.as_ref();
                last.is_some_and(|last| report.last_image.as_ref() == Some(&last.image))
            })
    }

    /// Returns the number of the files if an update of the machine brings changed content, and no
    /// other image.
    pub(super) fn changed_content(&self, is_new_image: bool) -> Option<u64> {
        (!is_new_image && self.computed.update == ContentUpdate::Change)
            .then_some(self.computed.round)
    }

    /// Reports how the machine is with its computed files, if that has changed.
    pub(super) fn report_content(&mut self, status: Status, effects: &mut Vec<Effect>) {
        let is_in_sync = std::mem::take(&mut self.computed.is_in_sync) && status == Status::Synced;
        let failed = self.claims.take_failed_content();
        if !self.computed.is_wanted {
            return;
        }
        let view = self.view.as_ref().zip(self.image.ready());
        let has_image = view.is_some_and(|(view, image)| self.is_recorded(view, image));
        let is_held = self.view.as_ref().is_some_and(|view| self.are_updates_prevented(view));
        // While a plan with other content is being made, the status is the former one.
        let planned = self.plan.made.as_ref().map(|planned| planned.key.computed);
        let is_planned = planned == Some(self.computed.version);
        let report = match status {
            _ if let Some((round, failure)) = failed
                && round == self.computed.round =>
            {
                ContentReport::Failed(failure)
            }
            _ if is_in_sync && is_held => ContentReport::Is(Standing::Held),
            _ if is_in_sync => ContentReport::Is(Standing::InSync),
            // It is being compared.
            Status::Synced => return,
            // No plan can be made.
            Status::WaitingForComputedFiles => ContentReport::Is(Standing::Settled),
            _ if !is_planned => ContentReport::Is(Standing::Away),
            Status::UpdateFailed if has_image => ContentReport::Failed(UpdateFailure::Update),
            Status::HealthFailed if has_image => ContentReport::Failed(UpdateFailure::Health),
            Status::NotConverging if has_image => {
                ContentReport::Failed(UpdateFailure::NotConverging)
            }
            Status::PartlySynced if !self.has_blocked_computed() => {
                ContentReport::Is(Standing::InSync)
            }
            Status::UpdateFailed
            | Status::HealthFailed
            | Status::NotConverging
            | Status::TriggerFailed
            | Status::ProvisionFailed
            | Status::PartlySynced => ContentReport::Is(Standing::Settled),
            _ => ContentReport::Is(Standing::Away),
        };
        let report = (self.computed.round, report);
        if self.computed.reported != Some(report) {
            self.computed.reported = Some(report);
            effects.push(Effect::ReportContent(report.0, report.1));
        }
    }

    /// True if a computed file is among what the machine does not let be changed.
    fn has_blocked_computed(&self) -> bool {
        let (Some(image), Some(planned)) = (self.target(), &self.plan.made) else { return false };
        let rules = &image.content.computed;
        planned
            .plan
            .blocked
            .iter()
            .any(|blocked| rules.iter().any(|rule| rule.path == blocked.path))
    }

    /// Returns for which computed file of `image` the content is not known, and why.
    pub(super) fn unknown_content(&self, view: &View, image: &RequiredImage) -> Option<String> {
        let algorithm = image.tree.algorithm();
        // The image that the machine has keeps its former content until the new one is known.
        let keeps_former = self.is_recorded(view, image);
        let unknown = |rule: &ComputedRule| {
            self.computed.unknown.iter().find(|unknown| *unknown.rule == *rule)
        };
        let rule = image.content.computed.iter().find(|rule| {
            let known = self.computed.files.get(&rule.path, &rule.source);
            let is_known = known.is_some_and(|file| file.object.id().algorithm() == algorithm)
                && (keeps_former || unknown(rule).is_none());
            !is_known && !view.exclusions.covers(&rule.path)
        })?;
        let why = unknown(rule).map_or(BEING_ASKED, |unknown| &*unknown.why);
        Some(format!("{} from {}: {why}", rule.path, rule.source))
    }

    /// Continues if the content of computed files that the plan needs is in the cache of the
    /// machine; else gives it to the machine.
    pub(super) fn check_content(
        &mut self,
        view: &View,
        planned: &Planned,
        step: &mut Step<'_>,
    ) -> Check<()> {
        let missing = planned.computed.iter().filter(|(id, _)| !view.cache.contains(id));
        let (ids, bytes) = missing.fold((Vec::new(), 0), |(mut ids, bytes), (id, need)| {
            ids.push(*id);
            (ids, bytes + need.size_bytes)
        });
        let Some(last) = ids.last().copied() else { return Continue(()) };
        if matches!(view.report.activity, Activity::Preparing { .. } | Activity::Updating { .. }) {
            return stop(Status::Preparing, "still staging another update");
        }
        let detail = format!(
            "sending the content of {} ({})",
            counted(ids.len() as u64, "computed file"),
            size(bytes)
        );
        self.call(CallPurpose::AddObjects(last), Call::AddObjects(ids.into()), step);
        self.stop_unless_disabled(Status::Fetching, detail)
    }

    /// Returns what is to be signed before an update to `image`, if it names signers.
    pub(super) fn contents_to_sign(&self, image: &RequiredImage) -> Option<ContentsToSign> {
        let parts = image.used_parts().filter(|part| !part.content.signers.is_empty());
        let rules: Vec<&ComputedRule> = parts.flat_map(|part| &part.content.computed).collect();
        if rules.is_empty() {
            return None;
        }
        let known = |rule: &ComputedRule| {
            let file = self.computed.files.get(&rule.path, &rule.source)?;
            Some((Arc::clone(&file.rule), file.object.id()))
        };
        let files = rules.into_iter().filter_map(known).collect();
        Some(ContentsToSign { hostname: self.machine.hostname.clone(), files })
    }

    /// Says why the machine cannot get its image, which has `what`.
    pub(super) fn too_old(&self, what: &str) -> String {
        format!(
            "{} has {what}, which its subd does not know: require an image first that brings a \
             newer subd",
            self.image_name()
        )
    }
}

/// True if `view` shows that this content, the last of a call, has arrived.
pub(super) fn has_arrived(view: &View, last: &ObjectId) -> bool {
    view.cache.contains(last)
}
