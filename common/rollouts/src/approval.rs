//! Who has approved or rejected a step.

use std::collections::BTreeSet;

use crate::document::{Choice, Document, Rollout, Step, StepState, Vote, VoteEvent};
use crate::steps::Said;
use crate::strategy::{Approval, RollbackApproval};

/// The votes of a step that count: those of voters, for its present plan, one of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Votes {
    pub approvers: BTreeSet<String>,
    pub rejecters: BTreeSet<String>,
}

/// What votes lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Approved(String),
    Rejected(String),
    /// Says what is missing.
    Open(String),
}

/// Returns the votes of `step` that count.
#[must_use]
pub fn votes(approval: &Approval, step: &Step) -> Votes {
    let mut votes = Votes::default();
    let counts = |vote: &&Vote| {
        approval.voters.contains(&vote.voter) && Some(&vote.digest) == step.digest.as_ref()
    };
    // The last vote of a voter is the one that counts.
    for vote in step.votes.iter().filter(counts) {
        let (to, from) = match vote.vote {
            Choice::Approve => (&mut votes.approvers, &mut votes.rejecters),
            Choice::Reject => (&mut votes.rejecters, &mut votes.approvers),
        };
        from.remove(&vote.voter);
        to.insert(vote.voter.clone());
    }
    votes
}

/// Returns what the votes of `step` lead to. `author` wrote the revision.
#[must_use]
pub fn verdict(
    approval: &Approval,
    author: Option<&str>,
    rollout: &Rollout,
    step: &Step,
) -> Verdict {
    let is_free_back = rollout.goes_back(step) && approval.rollback == RollbackApproval::Auto;
    if approval.min_approvals == 0 || is_free_back || !rollout.kind.is_gated() {
        return Verdict::Approved("needs no votes".to_owned());
    }
    let Votes { approvers, rejecters } = votes(approval, step);
    if approval.min_rejections > 0 && rejecters.len() >= approval.min_rejections {
        return Verdict::Rejected(format!("rejected by {}", names(&rejecters)));
    }
    let is_by_author_alone = approvers.iter().all(|voter| Some(voter.as_str()) == author);
    if approvers.len() < approval.min_approvals {
        let missing = approval.min_approvals - approvers.len();
        return Verdict::Open(format!("waits for {missing} more of {}", names(&approval.voters)));
    }
    if is_by_author_alone && !approval.author_alone {
        return Verdict::Open("waits for somebody who did not write the revision".to_owned());
    }
    if rollout.urgent && approvers.iter().all(|voter| *voter == rollout.by) {
        let by = &rollout.by;
        return Verdict::Open(format!("is urgent: waits for somebody else than {by}"));
    }
    Verdict::Approved(format!("approved by {}", names(&approvers)))
}

/// Takes a vote, or says why not.
pub(crate) fn take(document: &Document, rollout: &mut Rollout, event: &VoteEvent) -> Said {
    let VoteEvent { step: id, voter, vote, digest, link_valid } = event;
    if !link_valid {
        return Said::new(403, "the signature or the link of the vote is not valid");
    }
    let Some(step) = rollout.steps.iter_mut().find(|step| step.id == *id) else {
        return Said::new(404, format!("there is no step `{id}`"));
    };
    let environment = document.environment(&step.environment);
    let approval = environment.map(|one| document.approval(one)).unwrap_or_default();
    if !approval.voters.contains(voter) {
        return Said::new(403, format!("{voter} is no voter of {}", step.environment));
    }
    match step.state {
        StepState::AwaitingApproval => {}
        StepState::Waiting | StepState::Planning => {
            return Said::new(409, format!("{id} has no plan yet"));
        }
        _ => return Said::new(410, format!("{id} is decided")),
    }
    if step.digest.as_ref() != Some(digest) {
        return Said::new(409, format!("the plan of {id} is another than the one voted about"));
    }
    step.votes.retain(|former| former.voter != *voter);
    step.votes.push(Vote { voter: voter.clone(), vote: *vote, digest: digest.clone() });
    Said::new(200, format!("the vote of {voter} counts"))
}

fn names(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}
