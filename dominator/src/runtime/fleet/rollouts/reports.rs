//! What others are told of environments and rollouts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::explain::EnvironmentImage;
use api::dominator::rollouts::{
    EnvironmentInfo, ListEnvironmentsReply, ListEnvironmentsRequest, ListRolloutsReply,
    ListRolloutsRequest, PlanRolloutReply, PlanRolloutRequest, RevisionInfo, RolloutInfo,
};
use model::image::ImageName;
use model::lock::locked;
use model::mdb::Machine;
use rollouts::dependencies::Dependencies;
use rollouts::document::{Revision, RolloutState, StepState};
use rollouts::gate::Gate;
use rollouts::lock::lock;
use rollouts::plan::{StepPlan, plan};
use rollouts::selector_index::SelectorIndex;
use rollouts::state::{EnvironmentState, RolloutRecord, State};
use rollouts::steps::Said;

use super::{digest_of, seen_of};
use crate::core::vote_links::Ticket;
use crate::runtime::fleet::{Fleet, OrderError};

/// How many hosts with a conflict are named.
const CONFLICTS_MAX: usize = 20;

/// How many there are, for metrics.
#[derive(Debug, Default)]
pub struct RolloutCounts {
    /// Those that have not ended.
    pub rollouts: BTreeMap<RolloutState, usize>,
    pub waiting_for_votes: usize,
    /// By environment and revision.
    pub machines: BTreeMap<(String, Revision), usize>,
}

impl Fleet {
    /// Returns what rollouts would do.
    pub fn plan_rollout(
        &self,
        request: PlanRolloutRequest,
    ) -> Result<PlanRolloutReply, OrderError> {
        let mut state = State::clone(&self.state().rollouts.get());
        let mdb = match request.machines {
            Some(machines) => {
                let shared = |one: Machine| (one.hostname.clone(), Arc::new(one));
                machines.into_iter().map(shared).collect()
            }
            None => self.locked().admission.current().machines().clone(),
        };
        state.take_mdb(&mdb, self.shared.clock.now().wall);
        let mut named: BTreeMap<String, Revision> = BTreeMap::new();
        for text in &request.environments {
            let (name, number) = text.split_once('@').unwrap_or((text, ""));
            let missing = || Said::new(404, format!("there is no environment `{name}`"));
            let environment = state.environments.get(name).ok_or_else(missing)?;
            let number = match number {
                "" => environment.newest(),
                text => {
                    text.parse().map_err(|_| Said::new(400, format!("`{text}` is no revision")))?
                }
            };
            if !environment.revisions.contains_key(&number) {
                return Err(Said::new(404, format!("{name} has no revision {number}")).into());
            }
            named.insert(name.to_owned(), number);
        }
        if request.environments.is_empty() {
            let open = state.environments.iter().filter(|(_, one)| one.newest() != one.committed);
            named = open.map(|(name, one)| (name.clone(), one.newest())).collect();
        }
        let digest = |image: &str| digest_of(&self.shared, image);
        let plans = named.iter().map(|(name, number)| plan(&state, &mdb, name, *number, digest));
        Ok(PlanRolloutReply { plans: plans.collect() })
    }

    /// Counts rollouts, and the machines of environments.
    pub fn rollout_counts(&self) -> RolloutCounts {
        let state = self.state().rollouts.get();
        let mut counts = RolloutCounts::default();
        for record in state.unfinished_gated() {
            *counts.rollouts.entry(record.rollout.state).or_default() += 1;
            let waiting = record.rollout.steps.iter();
            let waiting = waiting.filter(|step| step.state == StepState::AwaitingApproval);
            counts.waiting_for_votes += waiting.count();
        }
        if !state.environments.is_empty() {
            let gate = Gate::new(&state);
            let mdb = self.locked().admission.current().machines().clone();
            for gated in mdb.values().filter_map(|machine| gate.gated(machine)) {
                for one in gated.applied() {
                    let key = (one.environment.clone(), one.revision);
                    *counts.machines.entry(key).or_default() += 1;
                }
            }
        }
        counts
    }

    /// Lists environments.
    pub fn environments(&self, request: &ListEnvironmentsRequest) -> ListEnvironmentsReply {
        let state = self.state().rollouts.get();
        let inner = self.locked();
        let mdb = inner.admission.current().machines();
        let is_wanted = |(name, one): &(&String, &Arc<EnvironmentState>)| {
            let group = one.definition().and_then(|definition| definition.group.as_deref());
            (request.names.is_empty() || request.names.contains(name))
                && (request.group.is_empty() || group == Some(request.group.as_str()))
        };
        let mut environments = BTreeMap::new();
        for (name, one) in state.environments.iter().filter(is_wanted) {
            let mut info = info(&state, name, one, request.all_revisions);
            info.closed = state.opening(name, self.shared.clock.now().wall).err();
            environments.insert(name, info);
        }
        let gate = Gate::new(&state);
        let newest = state.environments.iter().filter_map(|(name, one)| {
            environments.contains_key(name).then_some((&one.definition()?.select, name))
        });
        let newest = SelectorIndex::new(newest.collect::<Vec<_>>());
        for machine in mdb.values() {
            for name in newest.selecting(machine) {
                environments.entry(name).and_modify(|info| info.selected += 1);
            }
            let Some(gated) = gate.gated(machine) else { continue };
            let mut conflict = |name: &String| {
                let info = environments.get_mut(name);
                if let Some(info) = info.filter(|info| info.conflicts.len() < CONFLICTS_MAX) {
                    info.conflicts.push(machine.hostname.clone());
                }
            };
            gated.conflicts.iter().for_each(&mut conflict);
            let seen = inner.watched.get(&machine.hostname);
            let seen = seen.map(|watched| seen_of(watched, &self.shared.images));
            let is_left_out = |images: &str| {
                let left_out = |image: ImageName| {
                    seen.as_ref().is_some_and(|seen| seen.left_out.contains(image.as_str()))
                };
                ImageName::new(images).is_ok_and(|images| images.parts().any(left_out))
            };
            let is_healthy =
                seen.as_ref().is_some_and(|seen| seen.reachable && seen.state.is_healthy());
            let left_out = gated.applied().filter(|one| is_left_out(&one.image));
            left_out.for_each(|one| conflict(&one.environment));
            for one in gated.applied() {
                let Some(info) = environments.get_mut(&one.environment) else { continue };
                info.machines += 1;
                info.healthy += u32::from(is_healthy && !is_left_out(&one.image));
            }
        }
        ListEnvironmentsReply {
            groups: state.groups.values().map(|group| (**group).clone()).collect(),
            environments: environments.into_values().collect(),
        }
    }

    /// Lists rollouts.
    pub fn rollouts(&self, request: &ListRolloutsRequest) -> ListRolloutsReply {
        let state = self.state().rollouts.get();
        let mdb = self.locked().admission.current().machines().clone();
        let progress = locked(&self.rollout_progress);
        let is_wanted = |record: &&Arc<RolloutRecord>| {
            (request.ids.is_empty() || request.ids.contains(&record.rollout.id))
                && (request.environment.is_empty()
                    || record.rollout.environments().contains(&request.environment))
                && !(request.unfinished && record.is_ended())
        };
        let rollouts = state.rollouts.values().rev().filter(is_wanted).map(|record| {
            let waiting = record.rollout.steps.iter();
            let waiting = waiting.filter(|step| step.state == StepState::AwaitingApproval);
            let plans = waiting.map(|step| {
                let revision = step.revision.unwrap_or_default();
                plan(&state, &mdb, &step.environment, revision, |image| {
                    digest_of(&self.shared, image)
                })
            });
            let document = state.document(Some(record));
            let locks = match record.is_ended() {
                true => BTreeSet::new(),
                false => lock(&document, &Dependencies::of(&document), &record.rollout).scope,
            };
            RolloutInfo {
                rollout: record.rollout.clone(),
                why: record.why.clone(),
                created: record.created,
                ended: record.ended,
                since: record.since.clone().into_iter().collect(),
                batches: progress.batches.get(&record.number).cloned().unwrap_or_default(),
                plans: plans.collect::<Vec<StepPlan>>(),
                locks: locks.into_iter().collect(),
            }
        });
        let paused = progress.error.clone().or_else(|| self.rollouts_paused());
        ListRolloutsReply { rollouts: rollouts.collect(), paused }
    }

    /// Checks a link to vote.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 403 or 410.
    pub fn check_vote_link(&self, ticket: &Ticket) -> Result<(), Said> {
        let state = self.state().rollouts.get();
        let steps = state.find(&ticket.rollout).ok().map(|record| &record.rollout.steps);
        let step = steps.into_iter().flatten().find(|step| step.id == ticket.step);
        let now = u64::try_from(self.shared.clock.now().wall.seconds).unwrap_or_default();
        self.shared.vote_links.check(ticket, step, now)
    }

    /// Returns the name of an image together with the bundles that a machine has by environments,
    /// unless it names bundles itself.
    pub(in crate::runtime::fleet) fn with_bundles(
        &self,
        hostname: &str,
        image: ImageName,
    ) -> String {
        let record = self.locked().admission.current().machines().get(hostname).cloned();
        let state = self.state().rollouts.get();
        let gated = record.and_then(|record| Gate::new(&state).gated(&record));
        match gated.filter(|_| !image.is_composed()) {
            Some(gated) => gated.composed_with(image.as_str()),
            None => image.into(),
        }
    }

    /// Returns what environments say about a machine, if one applies.
    pub(in crate::runtime::fleet) fn environment_of(
        &self,
        hostname: &str,
    ) -> Option<EnvironmentImage> {
        let record = self.locked().admission.current().machines().get(hostname).cloned()?;
        let gated = Gate::new(&self.state().rollouts.get()).gated(&record)?;
        let applied = gated.of_image().map(|one| format!("{}@{}", one.environment, one.revision));
        gated.of_image().next()?;
        Some(EnvironmentImage {
            environments: applied.collect(),
            record: record.required_image.clone(),
            conflicts: gated.conflicts,
        })
    }
}

/// Returns what is known of an environment without a look at machines.
fn info(state: &State, name: &str, one: &EnvironmentState, all: bool) -> EnvironmentInfo {
    let is_wanted = |number: &Revision| all || *number == one.newest() || *number == one.committed;
    let revisions = one.revisions.iter().filter(|(number, _)| is_wanted(number));
    let revisions = revisions.map(|(&number, stored)| {
        let mut images: BTreeMap<&String, u32> = BTreeMap::new();
        stored.images.values().for_each(|image| *images.entry(image).or_default() += 1);
        RevisionInfo {
            number,
            definition: stored.definition.clone(),
            author: stored.author.clone(),
            why: stored.why.clone(),
            at: stored.at,
            images: images.into_iter().map(|(image, count)| (image.clone(), count)).collect(),
            kept: stored.kept.iter().map(|kept| kept.image.to_string()).collect(),
            content: stored.content.map_or(0, |content| content.number),
        }
    });
    let mut gated = state.unfinished_gated();
    let rollout = gated.find(|record| record.rollout.environments().contains(name));
    EnvironmentInfo {
        name: name.to_owned(),
        newest: one.newest(),
        committed: one.committed,
        active: one.active,
        selected: 0,
        machines: 0,
        healthy: 0,
        moved: u32::try_from(one.moved.len()).unwrap_or(u32::MAX),
        conflicts: Vec::new(),
        rollout: rollout.map(|record| record.rollout.id.clone()).unwrap_or_default(),
        closed: None,
        revisions: revisions.collect(),
    }
}
