//! The page of a link to vote. Following the link votes for nothing: only its form does.

use api::dominator::rollouts::{ListRolloutsRequest, VoteOnStep, VoteOnStepRequest};
use api::fault::{Fault, FaultCode};
use rpc::server::{Page, PageRequest, Proven, Query};

use super::Pages;
use super::rollouts::{MayVote, VoteForm, choice, paragraph};
use crate::core::vote_links::{Ticket, path_of};
use crate::interface::api::fault_of;

fn ticket(fields: &Query) -> Result<Ticket, Fault> {
    let field = |name: &str| {
        let missing = || Fault::new(FaultCode::BadRequest, format!("the link has no {name}"));
        fields.get(name).map(str::to_owned).ok_or_else(missing)
    };
    let invalid = |_| Fault::new(FaultCode::BadRequest, "the link has no time");
    Ok(Ticket {
        rollout: field("rollout")?,
        step: field("step")?,
        digest: field("digest")?,
        voter: field("voter")?,
        expires: field("expires")?.parse().map_err(invalid)?,
        proof: field("proof")?,
    })
}

/// What the voter of a link sees.
pub(super) fn page(pages: &Pages, page: &PageRequest) -> Result<Page, Fault> {
    let ticket = ticket(&page.query)?;
    match pages.fleet.check_vote_link(&ticket) {
        Ok(()) => {}
        // It was good once, and says what has become of it.
        Err(said) if said.code == 410 => {
            return Ok(Page::Html(pages.frame.render("Vote", &paragraph(&said.message))));
        }
        Err(said) => return Err(fault_of(&said.into())),
    }
    let request = ListRolloutsRequest { ids: vec![ticket.rollout.clone()], ..Default::default() };
    let reply = pages.fleet.rollouts(&request);
    let missing = || Fault::new(FaultCode::NotFound, format!("there is no {}", ticket.rollout));
    let info = reply.rollouts.first().ok_or_else(missing)?;
    let mut body = paragraph(&format!(
        "{}, started by {}: {}. This link is for one vote of {}.",
        ticket.rollout, info.rollout.by, info.why, ticket.voter
    ));
    for (step, plan) in info.steps_with_plans().filter(|(step, _)| step.id == ticket.step) {
        let form = VoteForm {
            rollout: &ticket.rollout,
            step,
            plan,
            may_vote: MayVote::ByLink(&ticket),
            token: &page.form_token,
        };
        body.push_str(&form.text());
    }
    Ok(Page::Html(pages.frame.render("Vote", &body)))
}

/// Reads the form: returns the vote, the page that follows, and the voter.
pub(super) fn read(pages: &Pages, fields: &Query) -> Result<Proven<VoteOnStep>, Fault> {
    let ticket = ticket(fields)?;
    pages.fleet.check_vote_link(&ticket).map_err(|said| fault_of(&said.into()))?;
    let vote = choice(fields)?;
    let next = path_of(&ticket);
    let Ticket { rollout, step, digest, voter, .. } = ticket;
    let why = fields.get("why").unwrap_or_default();
    let why = format!("by a link{}{why}", if why.is_empty() { "" } else { ": " });
    let who = String::new();
    Ok((VoteOnStepRequest { rollout, step, vote, digest, once: true, why, who }, next, voter))
}
