//! What an image that is not there yet would change, as far as plugins can tell.

use std::collections::BTreeMap;

use model::JsonSchema;
use model::display::{error_chain, safe_text};
use serde::{Deserialize, Serialize};

use super::Machine;
use super::drift::changes_of;
use crate::binding::Bindings;
use crate::image::Definition;
use crate::plan::{FleetRights, Orphan, Problem, Provision, plan_with};
use crate::protocol::{Change, Operation, PlanAnswer, WORDS_BYTES_MAX};
use crate::state::State;

/// What would become of a resource.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedEffect {
    Create,
    Change,
    Delete,
    /// Nothing asks for it any more, and it stays.
    Orphan,
    /// Its plugin would refuse the change.
    Refused,
    Unknown,
}

impl PlannedEffect {
    /// The word for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Change => "change",
            Self::Delete => "delete",
            Self::Orphan => "leave as an orphan",
            Self::Refused => "REFUSED",
            Self::Unknown => "NOT KNOWN",
        }
    }
}

/// What would be done about a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct PlannedResource {
    pub id: String,
    pub kind: String,
    pub effect: PlannedEffect,
    /// What its plugin says of it, or why that is not known.
    pub text: String,
}

/// What plugins are to be asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Preview {
    pub calls: Vec<Provision>,
    /// The provisioners that the image names.
    pub bindings: Bindings,
    orphans: Vec<Orphan>,
}

impl Machine {
    /// Returns what plugins are to be asked about an image with `definition`. `machine` is the name
    /// of which keys are made.
    ///
    /// # Errors
    ///
    /// Says why nothing of it could be provisioned.
    pub fn preview(&self, definition: &Definition, machine: &str) -> Result<Preview, String> {
        let none = State::new(machine);
        let state = self.state.as_ref().unwrap_or(&none);
        let (resources, bindings) = definition.read().map_err(|error| error_chain(&error))?;
        // What nobody has made yet, any machine may make.
        let mut rights: FleetRights = self.rights();
        let ids = resources.iter().map(|one| &one.id);
        let ids = ids.filter(|id| self.fleet.get(*id).is_none_or(|known| known.may_be_planned()));
        rights.makes.extend(ids.cloned());
        let plan = plan_with(&resources, &bindings, state, Some(&rights));
        if let Some(Problem { at, error }) = plan.problems.first() {
            return Err(format!("{at}: {error}"));
        }
        let calls = plan.calls.iter().map(|call| plan.complete(call, state)).collect();
        Ok(Preview { calls, bindings, orphans: plan.orphans })
    }
}

impl Preview {
    /// Returns what would be done, by id, when plugins have answered to the calls in their order.
    #[must_use]
    pub fn planned(self, answers: Vec<Result<PlanAnswer, String>>) -> Vec<PlannedResource> {
        let orphan = |Orphan { id, kind, reason, .. }| PlannedResource {
            id,
            kind,
            effect: PlannedEffect::Orphan,
            text: reason,
        };
        let mut planned: Vec<PlannedResource> = self.orphans.into_iter().map(orphan).collect();
        for (call, answer) in self.calls.iter().zip(answers) {
            planned.extend(of_call(call, answer));
        }
        planned.sort_unstable();
        planned
    }
}

fn of_call(call: &Provision, answer: Result<PlanAnswer, String>) -> Vec<PlannedResource> {
    let wanted = call.request.desired.iter().map(|want| &want.resource);
    let former = call.request.previous.iter().map(|old| &old.resource);
    let kinds: BTreeMap<&String, &String> =
        former.chain(wanted).map(|resource| (&resource.id, &resource.kind)).collect();
    let changes = answer.and_then(|answer| changes_of(answer, &call.ids()));
    let of_resource = |(id, kind): (&&String, &&String)| {
        let (effect, text) = match &changes {
            Err(why) => (PlannedEffect::Unknown, safe_text(why, WORDS_BYTES_MAX)),
            Ok(changes) => {
                // Such as its deletion and its creation.
                let own = changes.iter().filter(|change| change.id == **id).filter_map(effect_of);
                let (effects, texts): (Vec<PlannedEffect>, Vec<String>) = own.unzip();
                let texts: Vec<String> =
                    texts.into_iter().filter(|text| !text.is_empty()).collect();
                (effects.into_iter().max()?, texts.join("; "))
            }
        };
        Some(PlannedResource { id: (*id).clone(), kind: (*kind).clone(), effect, text })
    };
    kinds.iter().filter_map(of_resource).collect()
}

/// The effect, and its text; `None` if nothing would be done.
fn effect_of(change: &Change) -> Option<(PlannedEffect, String)> {
    if let Some(error) = &change.error {
        return Some((PlannedEffect::Refused, error.clone()));
    }
    let effect = match change.op {
        Operation::Create => PlannedEffect::Create,
        Operation::Update => PlannedEffect::Change,
        Operation::Delete => PlannedEffect::Delete,
        Operation::None => return None,
    };
    Some((effect, change.text.clone()))
}
