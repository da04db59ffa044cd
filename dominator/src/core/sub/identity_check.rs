//! Checks that the right machine answers: reports to the identity table what the sub says of its
//! machine. The machine gets no calls before the verdict.
// tidy: core

use std::sync::Arc;

use api::dominator::Status;

use super::{Check, Effect, Sub, View, stop};
use crate::core::identity::{
    FileOrigin, FileOrigins, IdentityReport, IdentityVerdict, ReportedIdentity,
};

/// The last report to the identity table, and its verdict.
#[derive(Debug, Default)]
pub(super) struct IdentityCheck {
    /// The number of the last reported identity.
    last: u64,
    reported: Option<Arc<ReportedIdentity>>,
    /// The verdict on it, once there is one.
    verdict: Option<IdentityVerdict>,
    /// True if `Synced` was reported since the machine was last seen or changed.
    is_synced_reported: bool,
}

impl IdentityCheck {
    /// Takes a verdict. A late one, on another identity than the last, is ignored.
    pub(super) fn take(&mut self, verdict: IdentityVerdict) {
        if self.reported.is_some() && verdict.number == self.last {
            self.verdict = Some(verdict);
        }
    }

    /// True if the right machine answered last.
    pub(super) fn is_verified(&self) -> bool {
        self.verdict.as_ref().is_some_and(|verdict| verdict.mismatch.is_none())
    }
}

impl Sub {
    /// Continues if the right machine answers.
    pub(super) fn check_identity(&mut self, view: &View, effects: &mut Vec<Effect>) -> Check<()> {
        let origins = match self.target().map(Arc::clone) {
            Some(image) => self.known_scope(&image, view).origins,
            None => FileOrigins::UNKNOWN,
        };
        let (instance, identity) = (view.report.version.instance, &view.report.identity);
        let check = &mut self.identity;
        let is_known = check
            .reported
            .as_ref()
            .is_some_and(|reported| reported.is_of(instance, identity, origins));
        if !is_known {
            let reported = Arc::new(ReportedIdentity::new(instance, identity, origins));
            check.last += 1;
            check.reported = Some(Arc::clone(&reported));
            (check.verdict, check.is_synced_reported) = (None, false);
            effects.push(Effect::ReportIdentity(IdentityReport::Seen(check.last, reported)));
        }
        match &check.verdict {
            None => match self.shown.status {
                Status::Synced | Status::PartlySynced | Status::TriggerFailed => stop(
                    Status::Rescanning,
                    "connected again; checking the identity of the machine",
                ),
                _ => self.stop_unchanged(),
            },
            Some(IdentityVerdict { mismatch: Some(why), .. }) => stop(Status::WrongMachine, &**why),
            Some(IdentityVerdict { mismatch: None, .. }) => Check::Continue(()),
        }
    }

    /// Reports that the sub does not answer: another machine may answer next.
    pub(super) fn report_lost(&mut self, effects: &mut Vec<Effect>) {
        if self.identity.reported.take().is_some() {
            self.identity.verdict = None;
            effects.push(Effect::ReportIdentity(IdentityReport::Lost));
        }
    }

    /// Reports that an update is carried out, if it may change the machine id.
    pub(super) fn report_changing(&mut self, effects: &mut Vec<Effect>) {
        let origins = self.identity.reported.as_ref().map(|reported| reported.origins);
        if origins.is_some_and(|origins| origins.machine_id != FileOrigin::Machine) {
            self.identity.is_synced_reported = false;
            effects.push(Effect::ReportIdentity(IdentityReport::Changing));
        }
    }

    /// Reports that the machine equals its image.
    pub(super) fn report_synced(&mut self, effects: &mut Vec<Effect>) {
        if !std::mem::replace(&mut self.identity.is_synced_reported, true) {
            effects.push(Effect::ReportIdentity(IdentityReport::Synced));
        }
    }
}
