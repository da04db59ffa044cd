//! The pages of environments and rollouts.

use ::rollouts::advance::StepPlan;
use ::rollouts::definition::Source;
use ::rollouts::document::{Step, name_of};
use api::dominator::rollouts::{
    EnvironmentInfo, ListEnvironmentsRequest, ListRolloutsReply, ListRolloutsRequest, RolloutInfo,
};
use api::fault::{Fault, FaultCode};
use model::display::{counted, utc};
use rpc::page_frame::{Cell, html_escape, path_escape, table};
use rpc::server::{Page, Query};

use super::Pages;

fn link(path: &str, id: &str) -> Cell {
    Cell::Link { path: format!("{path}{}", path_escape(id)), text: id.to_owned() }
}

fn paragraph(text: &str) -> String {
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
        if !environment.conflicts.is_empty() {
            let hosts = environment.conflicts.join(", ");
            let text = format!("{}: an older environment applies to {hosts}", environment.name);
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
    });
    let group = definition.and_then(|definition| definition.group.clone());
    let rollout = match environment.rollout.as_str() {
        "" => Cell::Text(String::new()),
        id => link("/rollout?id=", id),
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
    let mut names: Vec<&str> = rollout.steps.iter().map(|step| step.environment.as_str()).collect();
    names.dedup();
    vec![
        link("/rollout?id=", &rollout.id),
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
pub(super) fn rollout(pages: &Pages, query: &Query) -> Result<Page, Fault> {
    let Some(id) = query.get("id") else {
        return Err(Fault::new(FaultCode::BadRequest, "which rollout? /rollout?id=r1"));
    };
    let request = ListRolloutsRequest { ids: vec![id.to_owned()], ..Default::default() };
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
    for plan in &info.plans {
        body.push_str(&plan_text(&rollout.id, plan));
    }
    Ok(Page::Html(pages.frame.render(&rollout.id, &body)))
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

/// Says what a step would do that waits for votes, and how to vote.
fn plan_text(id: &str, plan: &StepPlan) -> String {
    let mut text = format!("<h2>Plan of {}</h2>\n", html_escape(&plan.environment));
    let row = |class: &::rollouts::advance::Class| {
        let machines = counted(class.machines.into(), "machine");
        let texts = [machines, class.from.clone(), class.to.clone(), class.hosts.join(", ")];
        texts.into_iter().map(Cell::Text).collect::<Vec<Cell>>()
    };
    let rows: Vec<Vec<Cell>> = plan.classes.iter().map(row).collect();
    text.push_str(&table(&["machines", "from", "to", "such as"], &rows));
    let (step, digest) = (&plan.environment, &plan.digest);
    text.push_str(&paragraph(&format!("domtool approve {id}/{step} --digest {digest}")));
    text
}
