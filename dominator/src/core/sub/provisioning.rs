//! Provisioning: the resources of a new image are made after its update was staged and before its
//! Commit. Plugins may take days for them, so this holds no claim, and the machine is kept at its
//! former image meanwhile (`target`).
//!
//! What is under way is known to the machine alone. It is read anew whenever the machine reports
//! something new, so restarts of either side need no code of their own.
// tidy: core

use core::ops::ControlFlow::{Break, Continue};
use core::time::Duration;

use api::dominator::Status;
use api::subd::{
    ContinueProvisioningRequest, GetResourcesReply, GetResourcesRequest, GiveUpProvisioningRequest,
    ProvisionRequest, ProvisioningReport, ProvisioningStage, SubVersion,
};
use model::backoff::{doubled, jittered};
use model::display::safe_text;
use model::image::required::RequiredImage;
use model::object::ObjectId;

use super::calls::CallPurpose;
use super::claims::stopped_text;
use super::{
    Call, Check, Effect, Failure, FailureKind, RequestId, StatusAndDetail, Step, Sub, TaskEffect,
    View,
};
use crate::core::drift::Drift;
use crate::core::timing::{Attempt, HOLD_FIRST, HOLD_LONGEST, RETRY_FIRST, RETRY_LONGEST};

/// The longest text of a plugin that is kept, in bytes.
const ERROR_BYTES_MAX: usize = 800;

/// The first pause before work of plugins is asked about again, if no poll brings news of it.
const ASK_FIRST: Duration = Duration::from_secs(1);

/// The longest such pause.
const ASK_LONGEST: Duration = Duration::from_secs(30);

/// What the machine has said of its resources.
#[derive(Clone, Debug)]
struct Known {
    /// The version of the sub in the last poll before it was asked.
    seen: SubVersion,
    digest: ObjectId,
    not_run: Option<String>,
    provisioning: Option<ProvisioningReport>,
    has_fleet: bool,
    has_outputs: bool,
    /// How often it said the same in a row.
    repeated: u32,
}

/// The provisioning of one machine.
#[derive(Debug, Default)]
pub(super) struct Provisioning {
    known: Option<Known>,
    asked: Option<(RequestId, SubVersion)>,
    /// When it is asked again at the latest, while plugins work.
    ask_at: Duration,
    /// Counts questions that had no answer.
    asking: Attempt,
    /// True if the release of the sub knows nothing of resources.
    is_too_old: bool,
    /// Counts failures of plugins, and says when they are called again.
    pub(super) failing: Attempt,
    /// Why resources could not be made, until they are.
    error: Option<String>,
    /// The failure that was counted last: of which image, and in which step.
    counted: Option<(ObjectId, u32)>,
    /// The drift of what is there.
    drift: Drift,
    /// True if the machine is asked also if its image has no resources: some of an image that is to
    /// come, or of the fleet, may be there, or it has told outputs.
    is_watched: bool,
    /// True if it has been asked, and has told or said that it does not.
    has_answered: bool,
    /// The instance of the sub that was told to give up the resources of this image.
    given_up: Option<Box<(u64, ObjectId)>>,
}

impl Provisioning {
    /// Forgets that something failed, so that it is tried again at once.
    pub(super) fn clear_failures(&mut self) {
        (self.failing, self.asking) = (Attempt::default(), Attempt::default());
    }

    /// Forgets the failures of another image.
    pub(super) fn image_changed(&mut self) {
        self.clear_failures();
        (self.counted, self.error) = (None, None);
    }

    /// Has the machine asked again before anything else is decided, because it was given an order.
    pub(super) fn ask_again(&mut self) {
        (self.known, self.asked, self.is_watched) = (None, None, true);
    }

    /// Handles that an order may not have reached the machine.
    pub(super) fn order_failed(&mut self) {
        self.given_up = None;
        self.ask_again();
    }

    /// Returns what is known of the resources of this image.
    fn stage_of(&self, image: &RequiredImage) -> Option<(&ProvisioningStage, u32)> {
        let report = self.known.as_ref()?.provisioning.as_ref()?;
        (report.image_digest == image.digest).then_some((&report.stage, report.step))
    }

    /// True if what is known is from before `seen`, or plugins work and it is time to ask again.
    fn must_ask(&self, seen: SubVersion, now: Duration) -> bool {
        self.known.as_ref().is_none_or(|known| {
            (known.seen.instance, known.seen.status) != (seen.instance, seen.status)
                || known.are_plugins_at_work() && now >= self.ask_at
        })
    }
}

impl Known {
    fn are_plugins_at_work(&self) -> bool {
        let stage = self.provisioning.as_ref().map(|report| &report.stage);
        matches!(stage, Some(ProvisioningStage::Running { .. }))
    }
}

impl Sub {
    /// True if the machine must not get this image before its resources are there.
    pub(super) fn needs_resources(&self, view: &View, image: &RequiredImage) -> bool {
        image.content.triggers.have_resources() && !self.is_recorded(view, image)
    }

    /// True if nothing has to be provisioned any more before the Commit of an update to this image.
    pub(super) fn is_provisioned(&self, view: &View, image: &RequiredImage) -> bool {
        let is_finished = || {
            let stage = self.provisioning.stage_of(image);
            matches!(stage, Some((ProvisioningStage::Finished, _)))
        };
        !self.needs_resources(view, image) || is_finished()
    }

    /// True if objects in the cache belong to an image whose resources are being made.
    pub(super) fn awaits_resources(&self, view: &View) -> bool {
        self.image.ready().is_some_and(|image| self.needs_resources(view, image))
    }

    /// Continues with why the machine stays at its former image, because resources of this one are
    /// not there; with `None` if its update is to be staged or carried out.
    pub(super) fn check_resources(
        &mut self,
        view: &View,
        image: &RequiredImage,
        step: &mut Step<'_>,
    ) -> Check<Option<StatusAndDetail>> {
        if !self.needs_resources(view, image) {
            if self.watch_resources(view, image, step) {
                self.give_up_others(view, image, step);
            } else {
                self.provisioning.error = None;
            }
            return Continue(None);
        }
        self.ask_for_resources(view, step);
        if self.provisioning.is_too_old {
            return Continue(Some((Status::SubdTooOld, self.too_old("resources"))));
        }
        let instance = view.report.version.instance;
        let known = self.provisioning.known.as_ref();
        let Some(known) = known.filter(|known| known.seen.instance == instance) else {
            let Some(why) = self.provisioning.asking.why() else { return self.stop_unchanged() };
            let detail = format!("the machine does not say how its resources are: {why}");
            return Continue(Some((Status::ProvisionFailed, detail)));
        };
        if let Some(why) = &known.not_run {
            let detail = format!("the machine runs no plugins: {why}");
            self.provisioning.error = Some(detail.clone());
            return Continue(Some((Status::ProvisionFailed, detail)));
        }
        let stage = self.provisioning.stage_of(image).map(|(stage, step)| (stage.clone(), step));
        if let Some((ProvisioningStage::Failed { error }, number)) = &stage
            && self.provisioning.counted.replace((image.digest, *number))
                != Some((image.digest, *number))
        {
            self.hold_provisioning(error.clone(), step);
        }
        if let Some(until) = self.provisioning.failing.held_until(step.now.elapsed) {
            let why = self.provisioning.failing.why().unwrap_or_default();
            let status = (Status::ProvisionFailed, format!("{why}; will be tried again"));
            self.wake_by(until);
            return Continue(Some(status));
        }
        self.provisioning.failing.release();
        Continue(self.stage_status(view, image, stage, step))
    }

    /// Returns why the update must wait at this stage; `None` if it need not. Has plugins go on.
    fn stage_status(
        &mut self,
        view: &View,
        image: &RequiredImage,
        stage: Option<(ProvisioningStage, u32)>,
        step: &mut Step<'_>,
    ) -> Option<StatusAndDetail> {
        match stage {
            None => None,
            Some((ProvisioningStage::Finished, _)) => {
                self.provisioning.failing = Attempt::default();
                self.provisioning.error = None;
                None
            }
            Some((ProvisioningStage::Running { wave, waves }, _)) => {
                let ask_at = self.provisioning.ask_at;
                self.wake_by(ask_at);
                let detail = match wave {
                    0 => "plugins still work on resources of a former image".to_owned(),
                    _ => format!("plugins work on wave {wave} of {waves} of its resources"),
                };
                Some((Status::Provisioning, detail))
            }
            Some((ProvisioningStage::Awaits { text }, _)) => Some((Status::Provisioning, text)),
            Some((ProvisioningStage::Waits { wave, waves }, number)) => {
                let todo = format!("wave {wave} of {waves} of its resources is next");
                Some(self.go_on_provisioning(view, image, number, todo, step))
            }
            Some((ProvisioningStage::Failed { error }, number)) => {
                let todo = format!("trying again what failed: {error}");
                Some(self.go_on_provisioning(view, image, number, todo, step))
            }
        }
    }

    /// Asks how the resources of the machine are: those of its image may drift, and those of an
    /// image that is not required any more may be there. A machine is asked once in any case.
    /// Returns false if there can be none.
    fn watch_resources(&mut self, view: &View, image: &RequiredImage, step: &mut Step<'_>) -> bool {
        let has_resources = image.content.triggers.have_resources();
        if !has_resources {
            self.provisioning.drift = Drift::default();
        }
        let Provisioning { is_watched, has_answered, .. } = self.provisioning;
        let may_be = has_resources || is_watched || !has_answered;
        if may_be {
            self.ask_for_resources(view, step);
        }
        may_be
    }

    /// Has the machine give up the resources of an image that was required before: the required one
    /// is active, so no update will do it.
    fn give_up_others(&mut self, view: &View, image: &RequiredImage, step: &mut Step<'_>) {
        let provisioning = &self.provisioning;
        if provisioning.asked.is_some()
            || provisioning.must_ask(view.report.version, step.now.elapsed)
        {
            // What is known may be from before an update.
            return;
        }
        let known = provisioning.known.as_ref().filter(|known| known.not_run.is_none());
        let target = known.and_then(|known| known.provisioning.as_ref());
        let other = target.filter(|target| target.image_digest != image.digest);
        let Some(target) = other.filter(|_| self.is_recorded(view, image)) else {
            self.provisioning.error = None;
            return;
        };
        let request = GiveUpProvisioningRequest { image_digest: target.image_digest };
        let given_up = Some(Box::new((view.report.version.instance, target.image_digest)));
        if let Some(until) = self.provisioning.failing.held_until(step.now.elapsed) {
            return self.wake_by(until);
        }
        let todo = "giving up the resources of another image";
        if self.provisioning.given_up != given_up
            && self.check_may_provision(view, image, todo, step).is_continue()
            && self.call(CallPurpose::Provision, Call::GiveUpProvisioning(request), step)
        {
            self.provisioning.given_up = given_up;
        }
    }

    /// Has plugins go on after this step, unless something prevents it.
    fn go_on_provisioning(
        &mut self,
        view: &View,
        image: &RequiredImage,
        number: u32,
        todo: String,
        step: &mut Step<'_>,
    ) -> StatusAndDetail {
        if let Break(prevented) = self.check_may_provision(view, image, &todo, step) {
            return prevented;
        }
        let request = ContinueProvisioningRequest { image_digest: image.digest, step: number };
        self.call(CallPurpose::Provision, Call::ContinueProvisioning(request), step);
        let (Break(status) | Continue(status)) =
            self.stop_waiting::<StatusAndDetail>(Status::Provisioning, todo);
        status
    }

    /// Stops if no plugin may be called now.
    fn check_may_provision(
        &self,
        view: &View,
        image: &RequiredImage,
        todo: &str,
        step: &Step<'_>,
    ) -> Check<()> {
        if self.machine.disable_updates {
            let detail = format!("{todo}; the machine database says DisableUpdates");
            return Break((Status::UpdatesDisabled, detail));
        }
        self.check_not_prevented(view, todo)?;
        let name = image.name();
        if let Some(stop) = step.context.stopped.iter().find(|stop| stop.image == *name) {
            return Break((Status::ImageStopped, stopped_text(todo, name, &stop.why)));
        }
        Continue(())
    }

    /// Has plugins make the resources of the staged update.
    pub(super) fn begin_provisioning(
        &mut self,
        view: &View,
        image: &RequiredImage,
        update_id: u64,
        todo: &str,
        step: &mut Step<'_>,
    ) -> Check<StatusAndDetail> {
        self.check_may_provision(view, image, todo, step)?;
        let call = Call::Provision(ProvisionRequest { update_id });
        (self.provisioning.is_watched, self.provisioning.given_up) = (true, None);
        self.call(CallPurpose::Provision, call, step);
        self.stop_waiting(Status::Provisioning, format!("asking for the resources of {todo}"))
    }

    /// Asks the machine how its resources are, if what is known may be old.
    fn ask_for_resources(&mut self, view: &View, step: &mut Step<'_>) {
        let seen = view.report.version;
        let provisioning = &mut self.provisioning;
        if provisioning.asked.is_some() || !provisioning.must_ask(seen, step.now.elapsed) {
            return;
        }
        if let Some(until) = provisioning.asking.held_until(step.now.elapsed) {
            return self.wake_by(until);
        }
        let have = provisioning.known.as_ref().map(|known| known.digest);
        let request_id = self.next_request_id();
        self.provisioning.asked = Some((request_id, seen));
        step.effects.push(Effect::ReadResources(request_id, GetResourcesRequest { have }));
    }

    /// Takes what the machine says of its resources.
    pub(super) fn take_resources(
        &mut self,
        request_id: RequestId,
        result: Result<GetResourcesReply, Failure>,
        step: &mut Step<'_>,
    ) {
        let provisioning = &mut self.provisioning;
        let Some((_, seen)) = provisioning.asked.take_if(|(asked, _)| *asked == request_id) else {
            return;
        };
        let failure = match result {
            Ok(GetResourcesReply { version, report: Some(report) }) => {
                let events = provisioning.drift.take(&report.resources).into_iter();
                step.effects.extend(events.map(|event| Effect::Task(TaskEffect::Tell(event))));
                let has_outputs = !report.outputs.is_empty();
                step.effects.push(Effect::ResourceOutputs(report.outputs));
                let (mut under_way, has_fleet) = (report.provisioning, report.has_fleet);
                if let Some(
                    ProvisioningStage::Failed { error: text } | ProvisioningStage::Awaits { text },
                ) = under_way.as_mut().map(|under_way| &mut under_way.stage)
                {
                    *text = safe_text(text, ERROR_BYTES_MAX);
                }
                let not_run = report.not_run.map(|why| safe_text(&why, ERROR_BYTES_MAX));
                let (digest, repeated) = (version, 0);
                let provisioning = under_way;
                let known =
                    Known { seen, digest, not_run, provisioning, has_fleet, has_outputs, repeated };
                return self.provisioning.set(known, step);
            }
            Ok(GetResourcesReply { report: None, .. }) => match provisioning.known.take() {
                Some(known) => {
                    let repeated = known.repeated.saturating_add(1);
                    return provisioning.set(Known { seen, repeated, ..known }, step);
                }
                // It was given an order meanwhile.
                None => return,
            },
            Err(failure) => failure,
        };
        provisioning.is_too_old = failure.kind == FailureKind::NoMethod;
        provisioning.has_answered |=
            provisioning.is_too_old || failure.kind == FailureKind::Refused;
        let (first, longest) = match provisioning.is_too_old {
            true => (HOLD_FIRST, HOLD_LONGEST),
            false => (RETRY_FIRST, RETRY_LONGEST),
        };
        let pause = provisioning.asking.count(first, longest, step.context.jitter);
        provisioning.asking.hold(step.now.elapsed + pause, failure.text);
    }

    /// Holds the plugins for a while, which grows with each failure.
    pub(super) fn hold_provisioning(&mut self, why: String, step: &Step<'_>) {
        let failing = &mut self.provisioning.failing;
        let pause = failing.count(HOLD_FIRST, HOLD_LONGEST, step.context.jitter);
        failing.hold(step.now.elapsed + pause, why.clone());
        self.provisioning.error = Some(why);
    }

    /// Returns the resources of which it is known that they are not as they were made, and how they
    /// differ.
    pub fn drifted(&self) -> impl Iterator<Item = (&str, String)> {
        self.provisioning.drift.raised()
    }

    /// True if the machine has to be asked for its resources of the fleet; and true if it has said
    /// something new last.
    #[must_use]
    pub fn has_fleet_resources(&self) -> (bool, bool) {
        let known = self.provisioning.known.as_ref();
        known.map_or((false, false), |known| (known.has_fleet, known.repeated == 0))
    }

    /// Returns why resources of the required image could not be made, until they are.
    #[must_use]
    pub fn provision_failure(&self) -> Option<&str> {
        self.provisioning.error.as_deref()
    }
}

impl Provisioning {
    fn set(&mut self, known: Known, step: &Step<'_>) {
        let pause = doubled(ASK_FIRST, ASK_LONGEST, known.repeated.saturating_add(1));
        self.ask_at = step.now.elapsed + jittered(pause, step.context.jitter);
        self.is_watched = known.provisioning.is_some() || known.has_fleet || known.has_outputs;
        self.has_answered = true;
        self.known = Some(known);
        (self.asking, self.is_too_old) = (Attempt::default(), false);
    }
}
