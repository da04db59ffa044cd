//! Rolls machines back to their former images, and lists the orders that last.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::orders::UpdatePause;
use api::dominator::rollback::{
    EndRollbackReply, EndRollbackRequest, ListLastingOrdersReply, PausedMachine, RollBackReply,
    RollBackRequest, Rollback, RolledBackMachine,
};
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::mdb::Machine;

use super::orders::{machines, named};
use super::{DrivenMachine, Fleet, OrderError};
use crate::core::orders::Order;
use crate::core::required_image::ordinary;
use crate::core::rollback::{RollbackError, Rollbacks};
use crate::core::selectors::select_hosts;
use crate::storage::with_order;

impl Fleet {
    /// Brings those machines of which `from` is required back to their former images until other
    /// images are required of them, after a restart too. On an error nothing is changed.
    pub async fn roll_back(
        self: &Arc<Self>,
        request: RollBackRequest,
    ) -> Result<RollBackReply, OrderError> {
        let RollBackRequest { hosts, from, why, who } = request;
        let (about, required) = (named(&hosts), from.clone());
        let find = move |fleet: &Self| fleet.find_former(&hosts, &required);
        let (found, left_out) = self.on_thread(find).await?;
        self.check_stored(&found).await?;
        let ways: BTreeSet<String> =
            found.values().map(|image| format!("from {from} to {image}")).collect();
        let what = named(&Vec::from_iter(ways));
        let order = Order::new("rollback", &who).about(&about).what(what).why(&why).checked()?;
        let since = self.shared.clock.now().wall;
        let rolled_back = |(hostname, image)| {
            let (from, who, why) = (from.clone(), who.clone(), why.clone());
            let rollback = Rollback { from, image, who, why, since };
            RolledBackMachine { hostname, rollback }
        };
        let rolled_back: Vec<_> = found.into_iter().map(rolled_back).collect();
        let added = rolled_back.clone();
        let save = move |fleet: &Self| {
            // The machine database must not change between the check and the order.
            let _decision = locked(&fleet.mdb_decisions);
            fleet.check_unchanged(&added)?;
            let change = |rollbacks: &mut Rollbacks| {
                rollbacks.add(added);
                Ok(())
            };
            fleet.state().rollbacks.modify_through(change, with_order(&order))
        };
        self.on_thread(save).await?;
        let count = machines(rolled_back.len());
        tracing::warn!(%who, %why, hosts = about, "{count} are rolled back");
        self.assign_again(&rolled_back);
        Ok(RollBackReply { machines: rolled_back, left_out })
    }

    /// Ends rollbacks. On an error the machines stay rolled back.
    pub async fn end_rollback(
        self: &Arc<Self>,
        request: EndRollbackRequest,
    ) -> Result<EndRollbackReply, OrderError> {
        let EndRollbackRequest { hosts, why, who } = request;
        let about = named(&hosts);
        let order = Order::new("end-rollback", &who).about(&about).why(&why).checked()?;
        let save = move |fleet: &Self| {
            let change = |rollbacks: &mut Rollbacks| {
                let hostnames = select_hosts(&hosts, &fleet.locked().watched)?;
                let ended = rollbacks.end(hostnames);
                if ended.is_empty() {
                    let source = RollbackError::NotRolledBack { hosts };
                    return Err(OrderError::Rollback { source });
                }
                Ok(ended)
            };
            fleet.state().rollbacks.modify_through(change, with_order(&order))
        };
        let ended: Vec<RolledBackMachine> = self.on_thread(save).await?;
        let count = machines(ended.len());
        tracing::warn!(%who, %why, hosts = about, "the rollbacks of {count} are ended");
        self.assign_again(&ended);
        Ok(EndRollbackReply { machines: ended })
    }

    /// Lists the machines that operators have paused or rolled back.
    pub fn lasting_orders(&self) -> ListLastingOrdersReply {
        let (now, default) = (self.shared.clock.now().wall, self.shared.default_image());
        let (pauses, rollbacks) = (self.state().pauses.get(), self.state().rollbacks.get());
        let paused = |(hostname, watched): (&String, &DrivenMachine)| {
            let pause = pauses.get(hostname).filter(|pause| pause.holds(now))?;
            let status = watched.handle.with_sub(|sub| sub.status());
            let (hostname, pause) = (hostname.clone(), UpdatePause::clone(pause));
            Some(PausedMachine { hostname, pause, status })
        };
        let inner = self.locked();
        let records = inner.watched.values().map(|watched| &*watched.machine);
        let rolled_back = rollbacks.in_force(records, default.as_deref());
        ListLastingOrdersReply {
            paused: inner.watched.iter().filter_map(paused).collect(),
            rolled_back,
        }
    }

    /// Returns the former image of each machine that `hosts` mean and of which `from` is required;
    /// and the other machines. Blocks on the disk.
    fn find_former(
        &self,
        hosts: &[String],
        from: &ImageName,
    ) -> Result<(BTreeMap<String, ImageName>, Vec<String>), OrderError> {
        let default = self.shared.default_image();
        let (mut asked, mut found, mut left_out) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        {
            let inner = self.locked();
            for hostname in select_hosts(hosts, &inner.watched)? {
                let watched = inner.watched(&hostname)?;
                if ordinary(&watched.machine, default.as_deref()).as_ref() != Some(from) {
                    left_out.push(hostname);
                    continue;
                }
                let has = watched.handle.with_sub(|sub| sub.verified_image());
                if let Some(has) = has.filter(|has| has != from) {
                    found.insert(hostname, has);
                } else {
                    asked.insert(hostname, from.clone());
                }
            }
        }
        if found.is_empty() && asked.is_empty() {
            let from = from.clone();
            return Err(RollbackError::NotRequired { from, hosts: left_out }.into());
        }
        let former = self.state().former_images(asked.clone());
        found.extend(former.map_err(|source| OrderError::Read { source })?);
        let without: Vec<String> =
            asked.into_keys().filter(|hostname| !found.contains_key(hostname)).collect();
        if !without.is_empty() {
            return Err(RollbackError::Unknown { hosts: without }.into());
        }
        Ok((found, left_out))
    }

    /// Fails if the image server does not have one of the former images.
    async fn check_stored(&self, found: &BTreeMap<String, ImageName>) -> Result<(), OrderError> {
        let images: BTreeSet<&ImageName> = found.values().collect();
        for image in images {
            if let Err(why) = self.shared.images.get_content(image).await {
                let of = found.iter().filter(|(_, other)| *other == image);
                let hosts = of.map(|(host, _)| host.clone()).collect();
                return Err(RollbackError::Gone { image: image.clone(), hosts, why }.into());
            }
        }
        Ok(())
    }

    /// Fails if another image is required of one of the machines since its former one was looked
    /// for.
    fn check_unchanged(&self, rolled_back: &[RolledBackMachine]) -> Result<(), OrderError> {
        let default = self.shared.default_image();
        let inner = self.locked();
        let is_other = |one: &&RolledBackMachine| {
            let record = inner.watched.get(&one.hostname).map(|watched| &watched.machine);
            record.and_then(|record| ordinary(record, default.as_deref()))
                != Some(one.rollback.from.clone())
        };
        let changed: Vec<&RolledBackMachine> = rolled_back.iter().filter(is_other).collect();
        if changed.is_empty() {
            return Ok(());
        }
        let hosts = changed.into_iter().map(|one| one.hostname.clone()).collect();
        Err(RollbackError::Changed { hosts }.into())
    }

    /// Has the drivers of these machines look for their images again. The former images stay until
    /// no driver watches them.
    fn assign_again(&self, rolled_back: &[RolledBackMachine]) {
        let inner = self.locked();
        let after = self.wanted_images(&inner);
        let before = rolled_back.iter().map(|one| one.rollback.image.clone());
        self.shared.images.want(&after.iter().cloned().chain(before).collect());
        for one in rolled_back {
            if let Some(watched) = inner.watched.get(&one.hostname) {
                watched.handle.assign(Arc::clone(&watched.machine));
            }
        }
        self.shared.images.want(&after);
    }

    /// Returns the images at which operators keep machines.
    pub(super) fn rollback_images<'a>(
        &self,
        records: impl Iterator<Item = &'a Arc<Machine>>,
    ) -> Vec<ImageName> {
        let (rollbacks, default) = (self.state().rollbacks.get(), self.shared.default_image());
        let image =
            |record: &Arc<Machine>| Some(rollbacks.of(record, default.as_deref())?.image.clone());
        records.filter_map(image).collect()
    }

    /// Removes the rollbacks that are over because other images are required. Blocks on the disk.
    pub(super) fn forget_rollbacks(&self) {
        let default = self.shared.default_image();
        let forget = |rollbacks: &mut Rollbacks| {
            let inner = self.locked();
            // Nothing is known of machines before the first machine database.
            if !inner.admission.is_in_force() {
                return Vec::new();
            }
            let find = |host: &str| inner.watched.get(host).map(|watched| &*watched.machine);
            rollbacks.remove_ended(find, default.as_deref())
        };
        // Although the disk is full: the rollback must not come back when its image does.
        let ended = self.state().rollbacks.modify_behind(forget);
        if !ended.is_empty() {
            let (hosts, why) = (named(&ended), "other images are required");
            tracing::warn!(hosts, "{} are no longer rolled back: {why}", machines(ended.len()));
            self.shared.audit.record_decision("end-rollback", &format!("hosts={hosts}"), why);
        }
        // The next change of the machine database, or of a rollback, tries it again.
        if let Err(error) = self.state().rollbacks.save() {
            let error = error_chain(&error);
            tracing::error!("rollbacks that are over return at a restart, until saved: {error}");
        }
    }
}
