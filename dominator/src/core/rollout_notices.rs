//! What operators are told of rollouts that go on.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use model::display::utc;
use rollouts::document::{Direction, Kind, Revision, Rollout, RolloutState, Step, StepState};
use rollouts::state::{RolloutRecord, State};
use rollouts::strategy::Approval;
use serde::Serialize;

use super::vote_links::{Ticket, VoteLinks};

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
    /// The links with which they vote, by voter, if the address of the pages is known.
    links: BTreeMap<String, String>,
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
/// for votes about another plan. What follows by itself from how machines are is left out.
#[must_use]
pub fn notices(links: &VoteLinks, reported: &State, now: &State) -> Option<Notices> {
    let rollouts: Vec<Notice> = now
        .rollouts
        .values()
        .filter(|record| record.rollout.kind.is_gated())
        .filter_map(|record| {
            let former = reported.rollouts.get(&record.number).map(|former| &former.rollout);
            notice(links, now, former, record)
        })
        .collect();
    (!rollouts.is_empty()).then_some(Notices { rollouts })
}

fn notice(
    links: &VoteLinks,
    state: &State,
    former: Option<&Rollout>,
    record: &RolloutRecord,
) -> Option<Notice> {
    let rollout = &record.rollout;
    let document = state.document(Some(record));
    let step = |step: &Step| {
        let waits = step.state == StepState::AwaitingApproval;
        let before = former.and_then(|former| former.steps.iter().find(|one| one.id == step.id));
        let is_new = before.is_none_or(|before| {
            before.state != step.state || (waits && before.digest != step.digest)
        });
        let environment = document.environment(&step.environment).filter(|_| waits);
        let approval = environment.map(|one| document.approval(one)).unwrap_or_default();
        let link = |voter: &String| {
            let since = record.since.get(&step.id).map_or(0, |since| since.seconds);
            let link = links.link(Ticket {
                rollout: rollout.id.clone(),
                step: step.id.clone(),
                digest: step.digest.clone()?,
                voter: voter.clone(),
                expires: u64::try_from(since)
                    .unwrap_or_default()
                    .saturating_add(lifetime_s(&approval)),
                proof: String::new(),
            });
            Some((voter.clone(), link?))
        };
        StepNotice {
            links: approval.voters.iter().filter_map(link).collect(),
            id: step.id.clone(),
            environment: step.environment.clone(),
            direction: step.direction,
            from: step.from,
            revision: step.revision,
            state: step.state,
            cause: step.cause.clone(),
            digest: step.digest.clone(),
            voters: approval.voters,
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

/// Returns how long links are good, in seconds: as long as votes count, and a week if that has no
/// limit.
fn lifetime_s(approval: &Approval) -> u64 {
    match approval.timeout_s {
        0 => Approval::default().timeout_s,
        limit => limit,
    }
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
            let links = VoteLinks::new(Some("https://d.example"), [7; 32]);
            let Some(news) = notices(&links, before, after) else { return "nothing".to_owned() };
            let Notice { id, state, steps, .. } = &news.rollouts[0];
            let StepNotice { state: step, digest, voters, links, is_new, .. } = &steps[0];
            let links = links.len();
            format!("{id} {state:?}: {step:?} {digest:?} {voters:?} {links} {is_new}")
        };
        let lines = [
            told(&before, &state),
            told(&state, &state),
            told(&state, &waits("d1")),
            told(&waits("d1"), &waits("d2")),
            told(&ended(&waits("d2")), &waits("d2")),
        ];
        let expected = [
            "r1 Pending: Waiting None {} 0 true",
            "nothing",
            r#"r1 Running: AwaitingApproval Some("d1") {"ann", "bob"} 2 true"#,
            r#"r1 Running: AwaitingApproval Some("d2") {"ann", "bob"} 2 true"#,
            r#"r1 Running: AwaitingApproval Some("d2") {"ann", "bob"} 2 true"#,
        ];
        assert_eq!(lines, expected);
    }
}
