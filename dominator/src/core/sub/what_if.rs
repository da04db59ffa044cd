//! What a plan that nobody carries out is made from: the machine as it is known now.
// tidy: core

use std::sync::Arc;

use api::dominator::Status;
use api::dominator::plan::Gap;
use api::planning::Planned;
use api::planning::preview::Lack;
use api::subd::{Activity, ScanReport};
use model::filter::Patterns;
use model::image::ImageName;
use model::mdb::Machine;
use model::object::set::ObjectSet;
use model::scope::Scope;
use model::tree::Tree;
use model::when::moment;

use super::{Reach, Sub};
use crate::core::default_image;

/// A machine as it is known now.
#[derive(Clone, Debug)]
pub struct WhatIfInput {
    /// The last complete scan.
    pub scan: Arc<ScanReport>,
    /// Its number.
    pub scan_number: u64,
    /// The tree that it found, if it was read.
    pub tree: Option<Tree>,
    /// True if what answers is the machine that is meant: another is asked nothing.
    pub is_right_machine: bool,
    /// The machine's own exclusions.
    pub exclusions: Patterns,
    /// What the machine scans.
    pub scope: Scope,
    /// The image that it was last updated to.
    pub last_image: Option<ImageName>,
}

impl Sub {
    /// The machine as it is known now.
    ///
    /// # Errors
    ///
    /// What is missing for a plan, also in words.
    pub fn what_if(&self) -> Result<WhatIfInput, (Gap, String)> {
        if let Reach::Bad(failure) = &self.reach {
            return Err((Gap::NotReached, failure.text.clone()));
        }
        let Some(view) = &self.view else {
            return Err((Gap::NotReached, self.detail.clone()));
        };
        let Some(scan) = &view.scan else {
            return Err((Gap::NotScanned, "its first complete scan is awaited".to_owned()));
        };
        Ok(WhatIfInput {
            scan: Arc::clone(scan),
            scan_number: view.scan_number,
            tree: self.tree.clone().filter(|tree| tree.digest() == scan.root),
            is_right_machine: self.identity.is_good(),
            exclusions: view.exclusions.clone(),
            scope: view.report.scope,
            last_image: view.report.last_image.clone(),
        })
    }

    /// The objects and bytes that the machine would fetch for `planned`, whose lack is `lack`.
    #[must_use]
    pub fn would_fetch(&self, lack: Lack, planned: &Planned) -> (u32, u64) {
        match &self.view {
            Some(view) => lack.beside(planned, &view.cache),
            None => lack.beside(planned, &ObjectSet::default()),
        }
    }

    /// Why an update would not be made now, whatever is in it, if the record of the machine was
    /// `machine`; the brake and budgets, which are not this machine's, aside.
    #[must_use]
    pub fn would_wait(&self, machine: &Machine) -> Vec<(Status, String)> {
        let required = default_image::required(machine, self.default_image());
        let mut waits = Vec::new();
        if machine.disable_updates {
            let why = "the machine database says DisableUpdates".to_owned();
            waits.push((Status::UpdatesDisabled, why));
        }
        if let Some(why) = self.pause_in_words() {
            waits.push((Status::Paused, why));
        }
        if self.status == Status::WrongMachine {
            waits.push((self.status, self.detail.clone()));
        }
        if self.status == Status::ImageStopped && required == self.required() {
            waits.push((self.status, self.detail.clone()));
        }
        let Some(view) = &self.view else { return waits };
        if matches!(view.report.activity, Activity::Updating { .. }) || view.is_unverified() {
            let why = "its last update is not over, or not scanned yet: it may differ by then";
            waits.push((Status::Updating, why.to_owned()));
        }
        if let Some(paused) = &view.report.paused {
            let (until, reason) = (moment(paused.until), &paused.reason);
            let why = format!("paused on the machine itself until {until}: {reason}");
            waits.push((Status::Held, why));
        }
        if let Some(why) = view.stuck() {
            waits.push((Status::UpdateStuck, why.to_owned()));
        } else if let Some(name) = required
            && let Some((_, why)) = view.undone(&name)
        {
            let why = format!("its health check failed there: {}", why.trim_end());
            waits.push((Status::HealthFailed, why));
        }
        waits
    }
}
