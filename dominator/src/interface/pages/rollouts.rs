//! The pages of environments and rollouts, with the form for votes.

use ::rollouts::definition::Source;
use ::rollouts::document::{Choice, Step, name_of};
use ::rollouts::plan::StepPlan;
use api::dominator::rollouts::{
    EnvironmentInfo, ListEnvironmentsRequest, ListRolloutsReply, ListRolloutsRequest, RolloutInfo,
    VoteOnStepRequest,
};
use api::fault::{Fault, FaultCode};
use askama::Template;
use model::display::utc;
use rpc::page_frame::{Cell, html_escape, path_escape, table};
use rpc::server::{Page, PageRequest, Query, TOKEN_FIELD};

use super::Pages;
use crate::core::vote_links::{PAGE, Ticket};

/// How often the page of a rollout that goes on is got again.
const LIVE_SECONDS: u32 = 3;

pub(super) fn link(path: &str, id: &str) -> Cell {
    Cell::Link { path: format!("{path}{}", path_escape(id)), text: id.to_owned() }
}

pub(super) fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", html_escape(text))
}

/// All environments.
pub(super) fn environments(pages: &Pages) -> Page {
    let reply = pages.fleet.environments(&ListEnvironmentsRequest::default());
    let headings = [
        "environment",
        "group",
        "committed",
        "newest",
        "active",
        "machines",
        "healthy",
        "rollout",
        "source",
    ];
    let rows: Vec<Vec<Cell>> = reply.environments.iter().map(environment_row).collect();
    let mut body = match rows.is_empty() {
        true => {
            paragraph("There are no environments: machines have what the machine database says.")
        }
        false => table(&headings, &rows),
    };
    for environment in &reply.environments {
        if let Some(why) = &environment.closed {
            let text = format!("{}: rollouts change no machines now: {why}", environment.name);
            body.push_str(&paragraph(&text));
        }
        if !environment.conflicts.is_empty() {
            let hosts = environment.conflicts.join(", ");
            let text = format!(
                "{}: an environment that came to machines earlier applies to {hosts}",
                environment.name
            );
            body.push_str(&paragraph(&text));
        }
    }
    Page::Html(pages.frame.render("Environments", &body))
}

fn environment_row(environment: &EnvironmentInfo) -> Vec<Cell> {
    let definition = environment.revisions.last().map(|revision| &revision.definition);
    let source = definition.map(|definition| match &definition.source {
        Source::Image(image) => image.to_string(),
        Source::Mdb(_) => "the machine database".to_owned(),
        Source::Bundle(image) => format!("bundle {image}"),
        Source::Content(server) => format!("content of {server}"),
    });
    let group = definition.and_then(|definition| definition.group.clone());
    let rollout = match environment.rollout.as_str() {
        "" => Cell::Text(String::new()),
        id => link("/rollouts/", id),
    };
    vec![
        link("/rollouts?env=", &environment.name),
        Cell::Text(group.unwrap_or_default()),
        Cell::Text(environment.committed.to_string()),
        Cell::Text(environment.newest.to_string()),
        Cell::Text(if environment.active { "yes" } else { "no" }.to_owned()),
        Cell::Text(environment.machines.to_string()),
        Cell::Text(environment.healthy.to_string()),
        rollout,
        Cell::Text(source.unwrap_or_default()),
    ]
}

/// All rollouts, or those of an environment.
pub(super) fn rollouts(pages: &Pages, query: &Query) -> Page {
    let environment = query.get("env").unwrap_or_default().to_owned();
    let request = ListRolloutsRequest { environment, ..ListRolloutsRequest::default() };
    let reply = pages.fleet.rollouts(&request);
    let rows: Vec<Vec<Cell>> = reply.rollouts.iter().map(rollout_row).collect();
    let headings = ["rollout", "kind", "state", "environments", "by", "created", "ended", "why"];
    let mut body = paused(&reply);
    body.push_str(&match rows.is_empty() {
        true => paragraph("There are no rollouts."),
        false => table(&headings, &rows),
    });
    Page::Html(pages.frame.render("Rollouts", &body))
}

fn paused(reply: &ListRolloutsReply) -> String {
    let text = reply.paused.as_ref().map(|why| format!("No rollout goes on: {why}"));
    text.map_or_else(String::new, |text| paragraph(&text))
}

fn rollout_row(info: &RolloutInfo) -> Vec<Cell> {
    let rollout = &info.rollout;
    let names = Vec::from_iter(rollout.environments());
    vec![
        link("/rollouts/", &rollout.id),
        Cell::Text(name_of(&rollout.kind)),
        Cell::Text(name_of(&rollout.state)),
        Cell::Text(names.join(" ")),
        Cell::Text(rollout.by.clone()),
        Cell::Text(utc(info.created)),
        Cell::Text(info.ended.map(utc).unwrap_or_default()),
        Cell::Text(info.why.clone()),
    ]
}

/// One rollout.
pub(super) fn rollout(pages: &Pages, page: &PageRequest) -> Result<Page, Fault> {
    let id = &page.below;
    let request = ListRolloutsRequest { ids: vec![id.clone()], ..Default::default() };
    let reply = pages.fleet.rollouts(&request);
    let missing = || Fault::new(FaultCode::NotFound, format!("there is no rollout {id}"));
    let info = reply.rollouts.first().ok_or_else(missing)?;
    let rollout = &info.rollout;
    let mut body = paused(&reply);
    let (state, cause) = (name_of(&rollout.state), &rollout.cause);
    body.push_str(&paragraph(&format!("{state} {cause}")));
    let by = format!("started by {}, {}: {}", rollout.by, utc(info.created), info.why);
    body.push_str(&paragraph(&by));
    let headings = ["step", "from", "to", "state", "since", "votes", "why"];
    let rows: Vec<Vec<Cell>> = rollout.steps.iter().map(|step| step_row(info, step)).collect();
    body.push_str(&table(&headings, &rows));
    for batch in &info.batches {
        let (done, machines, reason) = (batch.done, batch.machines, &batch.reason);
        let state = name_of(&batch.state);
        let text = format!("{}: {state}: {reason}; {done} of {machines} done", batch.step);
        body.push_str(&paragraph(&text));
    }
    let may_vote = match page.caller.identity.user {
        Some(_) => MayVote::Yes,
        None if pages.fleet.shared().security.is_insecure() => MayVote::AsNamed,
        None => MayVote::No,
    };
    for (step, plan) in info.steps_with_plans() {
        let form = VoteForm { rollout: &rollout.id, step, plan, may_vote, token: &page.form_token };
        body.push_str(&form.text());
    }
    // Who writes in a form is not disturbed.
    let is_live = info.ended.is_none() && info.plans.is_empty();
    Ok(Page::Html(match is_live {
        true => pages.frame.render_live(&rollout.id, &body, LIVE_SECONDS),
        false => pages.frame.render(&rollout.id, &body),
    }))
}

fn step_row(info: &RolloutInfo, step: &Step) -> Vec<Cell> {
    let since = info.since.iter().find(|(id, _)| *id == step.id).map(|(_, at)| utc(*at));
    let vote =
        |vote: &::rollouts::document::Vote| format!("{} {}", vote.voter, name_of(&vote.vote));
    let votes: Vec<String> = step.votes.iter().map(vote).collect();
    let number = |revision: Option<u64>| revision.unwrap_or_default().to_string();
    let texts = [
        step.id.clone(),
        number(step.from),
        number(step.revision),
        name_of(&step.state),
        since.unwrap_or_default(),
        votes.join(", "),
        step.cause.clone(),
    ];
    texts.into_iter().map(Cell::Text).collect()
}

/// Whether the reader of a page may vote by the form.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MayVote<'a> {
    Yes,
    /// Nobody has a certificate: under the name that the form gives.
    AsNamed,
    /// The reader has followed a link that was made for a voter.
    ByLink(&'a Ticket),
    No,
}

/// What a step would do that waits for votes, and the form to vote.
#[derive(Template)]
#[template(path = "vote.html")]
pub(super) struct VoteForm<'a> {
    pub(super) rollout: &'a str,
    pub(super) step: &'a Step,
    pub(super) plan: &'a StepPlan,
    pub(super) may_vote: MayVote<'a>,
    pub(super) token: &'a str,
}

impl VoteForm<'_> {
    pub(super) fn text(&self) -> String {
        self.render().expect("writing to a String cannot fail")
    }
}

/// Reads which button was pressed.
pub(super) fn choice(fields: &Query) -> Result<Choice, Fault> {
    match fields.get("vote") {
        Some("approve") => Ok(Choice::Approve),
        Some("reject") => Ok(Choice::Reject),
        _ => Err(Fault::new(FaultCode::BadRequest, "The form has no vote.")),
    }
}

/// Reads the form: returns the vote, and the page that follows.
pub(super) fn read_vote(fields: &Query) -> Result<(VoteOnStepRequest, String), Fault> {
    let field = |name: &str| fields.get(name).unwrap_or_default().to_owned();
    let vote = choice(fields)?;
    let request = VoteOnStepRequest {
        rollout: field("rollout"),
        step: field("step"),
        vote,
        digest: field("digest"),
        once: false,
        why: field("why"),
        who: field("who"),
    };
    let next = format!("/rollouts/{}", path_escape(&request.rollout));
    Ok((request, next))
}
