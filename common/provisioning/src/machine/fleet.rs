//! Resources of the fleet: one machine makes each of them for all, with a permit of the dominator;
//! the others take its outputs.
//!
//! # Invariants
//!
//! * A machine calls a plugin for such a resource only while it has the permit, and for nothing
//!   that lasts longer.
//! * A machine that gets the permit makes what its own image asks for. The dominator gives it only
//!   to one that asks for what is there, or when no machine does.
//! * Nothing is removed before the dominator has said that no image of the fleet has it.
//! * Of another machine a digest of inputs and outputs are taken, no specification: what plugins
//!   are asked is of an image of this machine.

use std::collections::{BTreeMap, BTreeSet};

use model::boot_time::BootTime;
use model::permit::{Permit, PermitError};
use serde::{Deserialize, Serialize};

use super::{Condition, Machine};
use crate::plan::{Call, FleetRights};
use crate::protocol::Outputs;
use crate::resource::{OnRemoval, Per, Resource, check_depth};
use crate::state::{Record, State};

/// How long a permit must last so that a call is begun, in seconds.
const CALL_S_MIN: u32 = 10;

/// What a machine keeps of a resource of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetResource {
    permit: Permit,
    /// The number of the permit with which it was made, or taken care of, last.
    number: u64,
    /// Who made it, if another machine did.
    maker: Option<String>,
    /// What the maker made.
    shared: Option<Shared>,
    /// True if no image of the fleet has it any more.
    is_unwanted: bool,
    /// True if the permit lasts long enough to begin a call.
    #[serde(skip)]
    has_time: bool,
}

/// What is there of a resource of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    /// The digest of its inputs, as [`Resource::key`]; `None` while nobody knows how far its change
    /// has come.
    pub key: Option<String>,
    /// Without those that are secret.
    pub outputs: Outputs,
}

/// What a dominator says of a resource of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetNews {
    pub id: String,
    /// The number of the permit of `maker`.
    pub number: u64,
    /// The machine that made or removed it last.
    pub maker: String,
    /// What it made; `None` if it is gone.
    pub shared: Option<Shared>,
    /// True if no image of the fleet has it any more.
    pub is_unwanted: bool,
}

/// What a machine says of a resource of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetStanding {
    pub id: String,
    pub permit: Permit,
    /// True if the machine would do something with the permit.
    pub is_wanted: bool,
    /// True if a plugin may work on it.
    pub is_live: bool,
    /// The digest of the inputs that an image of the machine asks for, as [`Resource::key`].
    pub asked_key: Option<String>,
    /// True if another resource of this machine needs it.
    pub is_needed: bool,
    /// As in [`FleetNews`], as far as the machine knows.
    pub number: u64,
    /// `None` if this machine is the maker.
    pub maker: Option<String>,
    pub shared: Option<Shared>,
    pub is_unwanted: bool,
}

/// The resources of the fleet that images of a machine ask for, by id.
type Asked = BTreeMap<String, Resource>;

impl Shared {
    /// True if this is what `state` has of the resource `id`.
    fn is_in(&self, state: &State, id: &str) -> bool {
        self.key.as_ref().is_some_and(|key| state.is_made_of(id, key))
    }
}

impl FleetResource {
    fn has_permit(&self) -> bool {
        self.permit.until.is_some()
    }

    /// True if this machine may be asked what would be done about it.
    pub(super) fn may_be_planned(&self) -> bool {
        self.has_time || self.shared.is_none()
    }

    /// True if this machine was the last one to take care of it.
    fn is_maker(&self) -> bool {
        self.number > 0 && self.maker.is_none()
    }
}

impl Machine {
    /// True if the machine may have permits.
    #[must_use]
    pub fn has_permits(&self) -> bool {
        self.fleet.values().any(FleetResource::has_permit)
    }

    /// Returns how the resources of the fleet are that concern this machine, by id.
    #[must_use]
    pub fn fleet(&self) -> Vec<FleetStanding> {
        let asked = self.asked_of_fleet();
        let ids: BTreeSet<&String> = self.fleet.keys().chain(asked.keys()).collect();
        ids.into_iter().filter_map(|id| self.fleet_standing(id, &asked)).collect()
    }

    fn fleet_standing(&self, id: &str, asked: &Asked) -> Option<FleetStanding> {
        let none = FleetResource::default();
        let known = self.fleet.get(id).unwrap_or(&none);
        let (asked_for, own) = (asked.get(id), self.fleet_record(id));
        let is_needed = self.state.as_ref().is_some_and(|state| state.needs(id));
        let is_there = own.is_some() || known.shared.is_some();
        if asked_for.is_none() && !is_there && !known.is_maker() && !is_needed {
            return None;
        }
        let made = own.and_then(|record| record.made.as_ref());
        let is_sure = own.is_some_and(|record| record.attempt.is_none());
        let own_made = made.filter(|_| known.maker.is_none()).map(|made| Shared {
            key: is_sure.then(|| made.key.clone()),
            outputs: made.resource.plain_outputs(&made.outputs),
        });
        Some(FleetStanding {
            id: id.to_owned(),
            permit: known.permit.clone(),
            is_wanted: self.wants_permit(id, asked),
            is_live: known.has_permit() && self.is_live(id),
            asked_key: asked_for.map(|resource| resource.key("")),
            is_needed,
            number: known.number,
            maker: known.maker.clone(),
            shared: known.shared.clone().or(own_made),
            is_unwanted: known.is_unwanted,
        })
    }

    /// Takes the permit for a resource, as [`Permit::take`].
    ///
    /// # Errors
    ///
    /// [`PermitError`]
    pub fn take_permit(
        &mut self,
        id: &str,
        number: u64,
        until: &BootTime,
        now: &BootTime,
    ) -> Result<(), PermitError> {
        if self.fleet_standing(id, &self.asked_of_fleet()).is_none() {
            return Err(PermitError::NotExclusive);
        }
        let known = self.fleet.entry(id.to_owned()).or_default();
        known.permit.take(number, until, now)?;
        known.has_time = known.permit.stop_at_ms(CALL_S_MIN, now).is_some();
        known.number = number;
        if known.maker.take().is_some()
            && let Some(state) = &mut self.state
        {
            // The other machine may have changed it since it was heard last.
            state.make_again(id);
        }
        Ok(())
    }

    /// Gives up the permits that have ended or that are not needed. To be called before
    /// [`Machine::next`], and when a permit was taken. Returns true if something has changed.
    pub fn look_at_permits(&mut self, now: &BootTime) -> bool {
        let (before, asked) = (self.fleet.clone(), self.asked_of_fleet());
        for id in before.keys() {
            let is_needed = self.is_live(id) || self.wants_permit(id, &asked);
            let Some(known) = self.fleet.get_mut(id) else { continue };
            let had_permit = known.has_permit();
            known.permit.give_up(is_needed, now);
            known.has_time = known.permit.stop_at_ms(CALL_S_MIN, now).is_some();
            if had_permit
                && !known.has_permit()
                && let Some(state) = &mut self.state
            {
                state.cut_off(id);
            }
        }
        self.fleet != before
    }

    /// Returns when a call must have ended because of permits, in milliseconds since the boot;
    /// `None` if it is about no resource of the fleet. The call is under way already.
    ///
    /// # Errors
    ///
    /// There is no permit for it.
    pub fn call_ends_at_ms(&self, call: &Call, now: &BootTime) -> Result<Option<u64>, String> {
        let mut ends_at: Option<u64> = None;
        let is_of_fleet = |id: &&String| self.fleet_record(id).is_some();
        for id in call.ids().iter().filter(is_of_fleet) {
            let known = self.fleet.get(id);
            let end = known.and_then(|known| known.permit.stop_at_ms(0, now));
            let end = end.ok_or_else(|| format!("the permit for `{id}` has ended"))?;
            ends_at = Some(ends_at.map_or(end, |other| other.min(end)));
        }
        Ok(ends_at)
    }

    /// Takes what a dominator says of a resource. What another machine made is not taken while this
    /// one has the permit, nor if it is older than what is known.
    ///
    /// # Errors
    ///
    /// Its outputs cannot be kept.
    pub fn take_news(&mut self, news: FleetNews) -> Result<(), String> {
        let FleetNews { id, number, maker, shared, is_unwanted } = news;
        let outputs = shared.iter().flat_map(|shared| shared.outputs.values());
        let mut depths = outputs.map(check_depth);
        if let Some(problem) = depths.find_map(Result::err) {
            return Err(format!("an output of `{id}` {problem}"));
        }
        if self.fleet_standing(&id, &self.asked_of_fleet()).is_none() {
            return Ok(());
        }
        let known = self.fleet.entry(id).or_default();
        known.is_unwanted = is_unwanted;
        let is_newer = match known.maker {
            Some(_) => number >= known.number,
            None => number > known.number,
        };
        if is_newer && !known.has_permit() {
            (known.number, known.maker, known.shared) = (number, Some(maker), shared);
        }
        self.settle_fleet();
        Ok(())
    }

    /// Takes over what other machines have made, as far as images of this one ask for it.
    pub(super) fn settle_fleet(&mut self) {
        if self.fleet.is_empty() {
            return;
        }
        let Ok((resources, bindings)) = self.definition().read() else { return };
        let asked = self.asked_of_fleet();
        let Some(state) = &mut self.state else { return };
        for (id, known) in &mut self.fleet {
            if known.maker.is_none() {
                continue;
            }
            if !asked.contains_key(id) {
                known.shared = None;
            }
            let made = known.shared.as_ref().and_then(|shared| {
                let resource = resources.get(id)?;
                let binding = bindings.of_kind(&resource.kind)?;
                let is_it = shared.key.as_ref() == Some(&resource.key(""));
                is_it.then_some((resource, shared, binding))
            });
            match made {
                Some((resource, shared, binding)) => {
                    state.adopt(resource, &shared.outputs, binding);
                }
                // It is there as a former image of this machine asks: who changes it needs that.
                None if known.shared.as_ref().is_some_and(|shared| shared.is_in(state, id)) => {}
                None => state.drop_of_fleet(id),
            }
        }
    }

    /// Notes for what this machine has called plugins.
    pub(super) fn note_made(&mut self) {
        let Some(state) = &self.state else { return };
        for (id, known) in &mut self.fleet {
            if known.has_permit() && state.is_live(id) {
                known.shared = None;
            }
        }
    }

    /// Returns what may be done about resources of the fleet.
    pub(super) fn rights(&self) -> FleetRights {
        let makes = self.fleet.iter().filter(|(_, known)| known.has_time);
        let is_destroyed = |id| {
            let one = self.fleet_record(id).and_then(Record::resource);
            one.is_some_and(|one| one.on_removal == OnRemoval::Destroy)
        };
        let removes = self
            .fleet
            .iter()
            .filter(|(id, known)| known.is_unwanted && (known.has_time || !is_destroyed(id)));
        FleetRights {
            makes: makes.map(|(id, _)| id.clone()).collect(),
            removes: removes.map(|(id, _)| id.clone()).collect(),
        }
    }

    /// Returns the outputs of a resource of the fleet, as another machine has made it.
    pub(super) fn shared_outputs(&self, resource: &Resource) -> Option<&Outputs> {
        let of_fleet = Some(resource).filter(|resource| resource.per == Per::Fleet)?;
        Some(&self.fleet.get(&of_fleet.id)?.shared.as_ref()?.outputs)
    }

    /// True if what this machine records of a resource of the fleet is what is there.
    pub(super) fn is_own(&self, id: &str) -> bool {
        let shared = self.fleet.get(id).and_then(|known| known.shared.as_ref());
        shared.zip(self.state.as_ref()).is_some_and(|(shared, state)| shared.is_in(state, id))
    }

    /// Says why a resource is not made that waits for another machine.
    pub(super) fn why_awaited(&self, id: &str, per: Per) -> (Condition, String) {
        let known = self.fleet.get(id);
        let (condition, text) = match (per, known.map(|known| (&known.shared, &known.maker))) {
            (Per::Machine, _) => (Condition::Waiting, "it waits for what it needs"),
            (Per::Fleet, Some((Some(Shared { key: None, .. }), _))) => {
                (Condition::Waiting, "one machine changes it for the fleet")
            }
            (Per::Fleet, Some((Some(_), Some(maker)))) => {
                let text = format!("{maker} has made it for the fleet, as another image asks");
                return (Condition::Conflict, text);
            }
            (Per::Fleet, _) => (Condition::Waiting, "one machine makes it for the fleet"),
        };
        (condition, text.to_owned())
    }

    /// What this machine records of a resource of the fleet.
    pub(super) fn fleet_record(&self, id: &str) -> Option<&Record> {
        let record = self.state.as_ref()?.resources.get(id)?;
        record.resource().is_some_and(|one| one.per == Per::Fleet).then_some(record)
    }

    /// True if a plugin may work on the resource, unless its permit has ended.
    fn is_live(&self, id: &str) -> bool {
        self.state.as_ref().is_some_and(|state| state.is_live(id))
    }

    /// True if the machine would make or remove the resource, if it had the permit.
    fn wants_permit(&self, id: &str, asked: &Asked) -> bool {
        let is_unwanted = || self.fleet.get(id).is_some_and(|known| known.is_unwanted);
        let is_destroyed = |one: &Resource| one.on_removal == OnRemoval::Destroy;
        let recorded = || self.fleet_record(id).and_then(Record::resource);
        asked.contains_key(id) || is_unwanted() && recorded().is_some_and(is_destroyed)
    }

    /// Returns what the image to come and the active one ask for, the first of them first.
    fn asked_of_fleet(&self) -> Asked {
        let mut asked = Asked::new();
        let target = self.open_target().map(|target| &target.definition);
        for definition in [&self.active].into_iter().chain(target) {
            let Ok((resources, _)) = definition.read() else { continue };
            let of_fleet = resources.iter().filter(|resource| resource.per == Per::Fleet);
            asked.extend(of_fleet.map(|resource| (resource.id.clone(), resource.clone())));
        }
        asked
    }
}
