//! Drift: resources that are not as they were made. From time to time plugins are asked what they
//! would do about what is there; all that they would do is drift.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use model::display::safe_text;
use model::object::Algorithm;
use serde::{Deserialize, Serialize};

use super::{Condition, Goal, Machine, Standing, goal};
use crate::plan::{Provision, plan_with, questions};
use crate::protocol::{Change, Operation, PlanAnswer, WORDS_BYTES_MAX};
use crate::resource::OnDrift;
use crate::state::State;

/// When resources are checked: once in each period. The periods of machines begin at different
/// times, so that not all of a fleet ask at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    every_s: u64,
    offset_s: u64,
}

/// What checks have found, as it is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Checks {
    /// When all were asked last, or else when there was something to ask about first. In seconds
    /// since 1970.
    at: Option<u64>,
    /// By id.
    drifted: BTreeMap<String, Drift>,
    /// Why it is not known of a resource, by id.
    unknown: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Drift {
    /// The key of what was made.
    key: String,
    /// What the plugin says that it would do.
    text: String,
    /// True if it was made again since.
    is_repaired: bool,
}

/// The next check of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextCheck {
    /// There is nothing to check now.
    None,
    /// [`Machine::begin_checks`] comes first.
    Begin,
    /// In so many seconds.
    In(u64),
}

impl Schedule {
    /// Returns the schedule of a machine; `None` if nothing is to be checked.
    #[must_use]
    pub fn new(every: Duration, hostname: &str) -> Option<Self> {
        let every_s = every.as_secs();
        let digest = Algorithm::Blake3.digest(hostname.as_bytes());
        let hash = u64::from_le_bytes(*digest.digest().first_chunk()?);
        Some(Self { every_s, offset_s: hash.checked_rem(every_s)? })
    }

    /// The length of a period.
    #[must_use]
    pub fn every(&self) -> Duration {
        Duration::from_secs(self.every_s)
    }

    /// Returns in how many seconds the next check is due, after one at `last`.
    #[must_use]
    pub fn due_in(&self, last: u64, now: u64) -> u64 {
        let period = |time: u64| time.saturating_add(self.offset_s) / self.every_s;
        if period(last) != period(now) {
            return 0;
        }
        self.every_s - now.saturating_add(self.offset_s) % self.every_s
    }
}

impl Machine {
    /// Returns when resources are checked next.
    #[must_use]
    pub fn next_check(&self, schedule: &Schedule, now: u64) -> NextCheck {
        match self.checks.at {
            _ if self.questions().is_empty() => NextCheck::None,
            None => NextCheck::Begin,
            Some(last) => NextCheck::In(schedule.due_in(last, now)),
        }
    }

    /// Notes that there is something to check since now.
    pub fn begin_checks(&mut self, now: u64) {
        self.checks.at.get_or_insert(now);
    }

    /// Returns what plugins are asked, to say what they would do: about all that is as the active
    /// image asks for, and nothing while another image is to come.
    #[must_use]
    pub fn questions(&self) -> Vec<Provision> {
        let Some(state) = self.state.as_ref().filter(|_| self.open_target().is_none()) else {
            return Vec::new();
        };
        let rights = self.rights();
        match goal(&self.active, state, plan_with, Some(&rights)) {
            Some(Goal { resources, bindings, mut plan }) if plan.problems.is_empty() => {
                plan.unchanged
                    .retain(|id| self.fleet_record(id).is_none() || rights.makes.contains(id));
                questions(&resources, &bindings, &plan.unchanged, state)
            }
            _ => Vec::new(),
        }
    }

    /// Takes what plugins have answered to `asked`. What has drifted and says `on_drift: repair` is
    /// made again, by [`Machine::next`]. Returns what has drifted, and how.
    pub fn checked(
        &mut self,
        asked: &[Provision],
        answers: Vec<Result<PlanAnswer, String>>,
        now: u64,
    ) -> Vec<(String, String)> {
        let Some(state) = &mut self.state else { return Vec::new() };
        self.checks = Checks { at: Some(now), ..Checks::default() };
        for (call, answer) in asked.iter().zip(answers) {
            let ids = call.ids();
            let changes = match answer.and_then(|answer| changes_of(answer, &ids)) {
                Ok(changes) => changes,
                Err(why) => {
                    let why = safe_text(&why, WORDS_BYTES_MAX);
                    self.checks.unknown.extend(ids.into_iter().map(|id| (id, why.clone())));
                    continue;
                }
            };
            for want in &call.request.desired {
                let id = &want.resource.id;
                let of_it = changes.iter().filter(|change| change.id == *id);
                let (kept, others): (Vec<&Change>, Vec<&Change>) =
                    of_it.partition(|change| change.op == Operation::None);
                if let Some(why) = kept.into_iter().find_map(|change| change.error.clone()) {
                    self.checks.unknown.insert(id.clone(), why);
                }
                if others.is_empty() || made_key(state, id) != Some(want.key.as_str()) {
                    continue;
                }
                let texts: Vec<String> = others.into_iter().map(words).collect();
                let (key, text) = (want.key.clone(), texts.join("; "));
                self.checks.drifted.insert(id.clone(), Drift { key, text, is_repaired: false });
                if want.resource.on_drift == OnDrift::Repair {
                    state.make_again(id);
                }
            }
        }
        let drifted = self.checks.drifted.iter();
        drifted.map(|(id, drift)| (id.clone(), drift.text.clone())).collect()
    }

    /// Takes over what became of drift in a change of the state before which `under_way` were being
    /// made.
    pub(super) fn settle_drift(&mut self, under_way: &BTreeSet<String>) {
        let Some(state) = &self.state else { return };
        self.checks.drifted.retain(|id, drift| made_key(state, id) == Some(drift.key.as_str()));
        self.checks.unknown.retain(|id, _| state.knows(id) && !under_way.contains(id));
        for (id, drift) in &mut self.checks.drifted {
            drift.is_repaired |= under_way.contains(id) && !state.is_under_way(id);
        }
    }

    /// Returns the resources with drift that are being made.
    pub(super) fn drift_under_way(&self) -> BTreeSet<String> {
        let Some(state) = &self.state else { return BTreeSet::new() };
        let checked = self.checks.drifted.keys().chain(self.checks.unknown.keys());
        checked.filter(|id| state.is_under_way(id)).cloned().collect()
    }

    /// Adds to `standing` what is known of its drift.
    pub(super) fn add_drift(&self, standing: &mut Standing) {
        if standing.is_orphan {
            return;
        }
        let is_made = standing.condition == Condition::Made;
        if let Some(drift) = self.checks.drifted.get(&standing.id) {
            standing.drift = Some(drift.text.clone());
            if is_made && drift.is_repaired {
                standing.text = format!("it differed, and was made again: {}", drift.text);
            } else if is_made {
                (standing.condition, standing.text) = (Condition::Drifted, drift.text.clone());
            }
        } else if let Some(why) = self.checks.unknown.get(&standing.id).filter(|_| is_made) {
            standing.text = format!("its plugin cannot say whether it differs: {why}");
        }
    }
}

/// Returns the changes of an answer, if it is one about `ids`.
pub(super) fn changes_of(
    answer: PlanAnswer,
    ids: &BTreeSet<String>,
) -> Result<Vec<Change>, String> {
    match answer.changes.iter().find(|change| !ids.contains(&change.id)) {
        Some(Change { id, .. }) => Err(format!("its answer is about `{}` too", safe_text(id, 80))),
        None => Ok(answer.changes),
    }
}

fn made_key<'a>(state: &'a State, id: &str) -> Option<&'a str> {
    Some(state.resources.get(id)?.made.as_ref()?.key.as_str())
}

/// What a plugin would do, for people.
fn words(change: &Change) -> String {
    let verb = match change.op {
        Operation::Create => "create it",
        Operation::Update => "change it",
        Operation::Delete => "delete it",
        Operation::None => "do nothing",
    };
    let text = if change.text.is_empty() { verb } else { &change.text };
    match &change.error {
        Some(error) => format!("{text}, which would be refused: {error}"),
        None => text.to_owned(),
    }
}
