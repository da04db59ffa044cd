//! What operators are told of rollouts that go on.
// tidy: core

use std::collections::BTreeSet;

use model::display::utc;
use rollouts::document::{Direction, Kind, Revision, Rollout, RolloutState, Step, StepState};
use rollouts::state::{RolloutRecord, State};
use serde::Serialize;

/// The rollouts of which something is new.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Notices {
    rollouts: Vec<Notice>,
}

/// A rollout, as it is now.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Notice {
    id: String,
    kind: Kind,
    state: RolloutState,
    cause: String,
    by: String,
    why: String,
    urgent: bool,
    created: String,
    ended: Option<String>,
    steps: Vec<StepNotice>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct StepNotice {
    id: String,
    environment: String,
    direction: Direction,
    from: Option<Revision>,
    revision: Option<Revision>,
    state: StepState,
    cause: String,
    /// What votes are for.
    digest: Option<String>,
    /// Who can vote, while the step waits for that.
    voters: BTreeSet<String>,
    /// True if this is what is new.
    is_new: bool,
}

/// Returns what is remembered, with ended rollouts only.
#[must_use]
pub fn ended(state: &State) -> State {
    let mut ended = state.clone();
    ended.rollouts.retain(|_, record| record.is_ended());
    ended
}

/// Returns what is new since `reported`: rollouts and steps with another state, and steps that wait
/// for votes about another plan.
#[must_use]
pub fn notices(reported: &State, now: &State) -> Option<Notices> {
    let rollouts: Vec<Notice> = now
        .rollouts
        .values()
        .filter_map(|record| {
            let former = reported.rollouts.get(&record.number).map(|former| &former.rollout);
            notice(now, former, record)
        })
        .collect();
    (!rollouts.is_empty()).then_some(Notices { rollouts })
}

fn notice(state: &State, former: Option<&Rollout>, record: &RolloutRecord) -> Option<Notice> {
    let rollout = &record.rollout;
    let document = state.document(Some(record));
    let step = |step: &Step| {
        let waits = step.state == StepState::AwaitingApproval;
        let before = former.and_then(|former| former.steps.iter().find(|one| one.id == step.id));
        let is_new = before.is_none_or(|before| {
            before.state != step.state || (waits && before.digest != step.digest)
        });
        let environment = document.environment(&step.environment).filter(|_| waits);
        StepNotice {
            id: step.id.clone(),
            environment: step.environment.clone(),
            direction: step.direction,
            from: step.from,
            revision: step.revision,
            state: step.state,
            cause: step.cause.clone(),
            digest: step.digest.clone(),
            voters: environment.map(|one| document.approval(one).voters).unwrap_or_default(),
            is_new,
        }
    };
    let steps: Vec<StepNotice> = rollout.steps.iter().map(step).collect();
    let has_state = former.is_some_and(|former| former.state == rollout.state);
    if has_state && !steps.iter().any(|step| step.is_new) {
        return None;
    }
    Some(Notice {
        id: rollout.id.clone(),
        kind: rollout.kind,
        state: rollout.state,
        cause: rollout.cause.clone(),
        by: rollout.by.clone(),
        why: record.why.clone(),
        urgent: rollout.urgent,
        created: utc(record.created),
        ended: record.ended.map(utc),
        steps,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rollouts::state::{Editor, Edits, StartOrder};

    use super::*;

    #[test]
    fn each_state_is_told_once_and_who_can_vote() {
        let mut state = State::default();
        let edit = serde_json::json!({
            "name": "web", "select": {"hosts": ["*"]}, "source": {"image": "web/8"},
            "approval": {"voters": ["ann", "bob"], "min_approvals": 1},
        });
        let by = Editor { who: "ann".to_owned(), why: "so".to_owned(), now: Default::default() };
        let environments = vec![serde_json::from_value(edit).unwrap()];
        state.edit(Edits { environments, ..Edits::default() }, &by, &Default::default()).unwrap();
        let start = StartOrder { environments: vec!["web@1".to_owned()], ..StartOrder::default() };
        let before = state.clone();
        state.start(&start, &by).unwrap();
        let waits = |digest: &str| {
            let mut state = state.clone();
            let record = Arc::make_mut(state.rollouts.get_mut(&1).unwrap());
            record.rollout.state = RolloutState::Running;
            record.rollout.steps[0].state = StepState::AwaitingApproval;
            record.rollout.steps[0].digest = Some(digest.to_owned());
            state
        };
        let told = |before: &State, after: &State| {
            let Some(news) = notices(before, after) else { return "nothing".to_owned() };
            let Notice { id, state, steps, .. } = &news.rollouts[0];
            let StepNotice { state: step, digest, voters, is_new, .. } = &steps[0];
            format!("{id} {state:?}: {step:?} {digest:?} {voters:?} {is_new}")
        };
        let lines = [
            told(&before, &state),
            told(&state, &state),
            told(&state, &waits("d1")),
            told(&waits("d1"), &waits("d2")),
            told(&ended(&waits("d2")), &waits("d2")),
        ];
        let expected = [
            "r1 Pending: Waiting None {} true",
            "nothing",
            r#"r1 Running: AwaitingApproval Some("d1") {"ann", "bob"} true"#,
            r#"r1 Running: AwaitingApproval Some("d2") {"ann", "bob"} true"#,
            r#"r1 Running: AwaitingApproval Some("d2") {"ann", "bob"} true"#,
        ];
        assert_eq!(lines, expected);
    }
}
