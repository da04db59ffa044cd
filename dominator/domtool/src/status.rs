//! `domtool list-subs`, `show-sub`, `list-stopped` and `status`.

use std::fmt::Write as _;

use api::dominator::explain::{Explain, ExplainRequest, ImageSource};
use api::dominator::orders::{BudgetReport, LimitUse, StoppedImage};
use api::dominator::settings::{GetSubLimits, GetSubLimitsRequest};
use api::dominator::{
    DominatorStatus, GetStatus, ListSubs, ListSubsRequest, MDB_REMARK, ShowSub, ShowSubRequest,
    Status, SubDetail, SubSummary, TagFilter, text,
};
use api::subd::GetLimitsReply;
use clap::Args;
use model::display::{ago, counted, size, utc};
use rpc::client::Client;
use serde::Serialize;
use system::clock::wall;
use tool::{Format, Output};

use super::{ToolError, call, columns, text_of};

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// Only machines with a matching name: `*` matches any text, `?` one character
    #[arg(value_name = "HOST")]
    hosts: Vec<String>,
    /// Only machines with this status; may be repeated
    #[arg(long, value_name = "STATUS", value_parser = parse_status)]
    status: Vec<Status>,
    /// Only machines whose required image is this one or below it; may be repeated
    #[arg(long, value_name = "IMAGE")]
    image: Vec<String>,
    /// Only machines at this location or below it; may be repeated
    #[arg(long, value_name = "LOCATION")]
    location: Vec<String>,
    /// Only machines with this tag; if repeated, machines with all of the tags
    #[arg(long, value_name = "NAME[=VALUE]")]
    tag: Vec<String>,
}

fn parse_status(text: &str) -> Result<Status, String> {
    Status::ALL.into_iter().find(|status| status.name() == text).ok_or_else(|| {
        let names: Vec<&str> = Status::ALL.iter().map(|status| status.name()).collect();
        format!("the statuses are {}", names.join(", "))
    })
}

pub(super) async fn list_subs(
    client: &Client,
    format: Format,
    arguments: &ListArguments,
) -> Result<Output, ToolError> {
    let request = ListSubsRequest {
        statuses: arguments.status.clone(),
        hosts: arguments.hosts.clone(),
        images: arguments.image.clone(),
        locations: arguments.location.clone(),
        tags: arguments.tag.iter().map(|tag| TagFilter::parse(tag)).collect(),
    };
    let reply = call::<ListSubs>(client, &request).await?;
    Ok(format.render(&reply.subs, |subs| table_of_subs(subs)).into())
}

pub(super) async fn show_sub(
    client: &Client,
    format: Format,
    hostname: &str,
) -> Result<Output, ToolError> {
    let request = ShowSubRequest { hostname: hostname.to_owned() };
    let detail = call::<ShowSub>(client, &request).await?;
    // A dominator of an earlier release rolls no machine back.
    let explained = ExplainRequest { hostname: hostname.to_owned() };
    let source = call::<Explain>(client, &explained).await.ok().map(|why| why.must_have.source);
    let request = GetSubLimitsRequest { hostname: hostname.to_owned() };
    // A machine that cannot be asked, and one of an earlier release, have none to show.
    let limits = call::<GetSubLimits>(client, &request).await.ok();
    Ok(format.render(&ShownSub { detail, limits, source }, text_of_sub).into())
}

pub(super) async fn show_status(client: &Client, format: Format) -> Result<Output, ToolError> {
    let status = call::<GetStatus>(client, &()).await?;
    Ok(format.render(&status, text_of_status).into())
}

pub(super) async fn list_stopped(client: &Client, format: Format) -> Result<Output, ToolError> {
    let status = call::<GetStatus>(client, &()).await?;
    Ok(format.render(&status.budgets.stopped, |stopped| table_of_stopped(stopped)).into())
}

fn table_of_stopped(stopped: &[StoppedImage]) -> String {
    let mut table = columns(&["IMAGE", "SINCE", "WHY"]);
    for StoppedImage { image, why, since } in stopped {
        table.add_row([image.to_string(), utc(*since), why.clone()]);
    }
    text_of(&table)
}

fn table_of_subs(subs: &[SubSummary]) -> String {
    let now = wall();
    let mut table =
        columns(&["HOST", "STATUS", "SINCE", "REQUIRED", "LAST UPDATE", "ALARMS", "DETAIL"]);
    for sub in subs {
        table.add_row([
            sub.hostname.clone(),
            sub.status.to_string(),
            ago(now, sub.since),
            sub.required_image.clone(),
            sub.last_image.clone(),
            if sub.alarms == 0 { String::new() } else { sub.alarms.to_string() },
            sub.detail.clone(),
        ]);
    }
    text_of(&table)
}

/// What is known of a machine, and what it says of its limits.
#[derive(Serialize)]
struct ShownSub {
    #[serde(flatten)]
    detail: SubDetail,
    limits: Option<GetLimitsReply>,
    /// Where its image comes from; for the text.
    #[serde(skip)]
    source: Option<ImageSource>,
}

fn text_of_sub(ShownSub { detail, limits, source }: &ShownSub) -> String {
    let summary = &detail.summary;
    let mut text = format!("{}: {}: {}\n\n", summary.hostname, summary.status, summary.detail);
    let mut table = columns(&[]);
    for (name, value) in text::sub_facts(detail, source.as_ref(), wall()) {
        table.add_row([name.to_owned(), value]);
    }
    for (name, value) in limits.iter().flat_map(GetLimitsReply::rows) {
        table.add_row([name.to_owned(), value]);
    }
    text.push_str(&text_of(&table));
    if !detail.plan.is_empty() {
        text.push_str(&format!("\nplan, {} operations:\n", detail.plan_operations));
        for line in &detail.plan {
            text.push_str(&format!("  {line}\n"));
        }
    }
    text.push_str("\nhistory, the newest first:\n");
    for (when, status, detail) in &detail.history {
        text.push_str(&format!("  {} {status}: {detail}\n", utc(*when)));
    }
    text
}

fn text_of_status(status: &DominatorStatus) -> String {
    let mut text = String::new();
    let mut line = |line: String| writeln!(text, "{line}").expect("writing to a String succeeds");
    line(match &status.brake {
        None => "updates: enabled".to_owned(),
        Some(brake) => {
            let since = utc(brake.since);
            format!("updates: DISABLED since {since} by {}: {}", brake.who, brake.reason)
        }
    });
    line(match (&status.mdb_error, status.mdb_read) {
        (None, Some(read)) => format!("machine database: read {}", utc(read)),
        (None, None) => "machine database: not read yet".to_owned(),
        (Some(error), _) => format!("machine database: NOT TAKEN: {error}"),
    });
    if let Some(error) = &status.mdb_unkept {
        line(format!("machine database: NOT KEPT over a restart: {error}"));
    }
    if let Some(held) = &status.mdb_held {
        let since = utc(held.since);
        line(format!(
            "machine database: mdb-held since {since}: {}; to compare: domtool mdb diff",
            held.why
        ));
    }
    for remark in &status.image_remarks {
        line(match remark.starts_with(MDB_REMARK) {
            true => remark.clone(),
            false => format!("image: {remark}"),
        });
    }
    line(match &status.image_server_error {
        None => "image server: ok".to_owned(),
        Some(error) => format!("image server: {error}"),
    });
    if let Some(error) = &status.alarm_error {
        line(format!("alarms: NOT DELIVERED: {error}"));
    }
    if let Some(error) = &status.history_error {
        line(format!("history: NOT WRITTEN; no update is ordered until writing succeeds: {error}"));
    }
    if status.paused > 0 {
        line(format!("paused: {} by operators", counted(status.paused.into(), "machine")));
    }
    if let Some(default) = &status.default_image {
        let since = utc(default.since);
        line(format!("default image: {}, set {since} by {}", default.image, default.who));
    }
    budget_lines(&status.budgets).into_iter().for_each(&mut line);
    line(format!("directories in memory: {}", status.directories));
    for (status, count) in &status.counts {
        line(format!("{count:>7} {status}"));
    }
    text
}

/// Describes budgets in use, waiting machines and stopped images, one per line.
fn budget_lines(report: &BudgetReport) -> Vec<String> {
    let mut lines: Vec<String> = report
        .stopped
        .iter()
        .map(|StoppedImage { image, why, since }| {
            format!("image {image}: updates to it have STOPPED since {}: {why}", utc(*since))
        })
        .collect();
    lines.push(format!(
        "budgets: {} under way, {} waiting",
        counted(report.under_way.into(), "machine"),
        report.waiting
    ));
    for LimitUse { limit, places, for_repairs, repairs, rollouts, waiting } in &report.limits {
        let share = match for_repairs {
            0 => String::new(),
            reserved => format!(", {reserved} of them for repairs alone"),
        };
        lines.push(format!(
            "budget {limit}: {} and {} of {}{share}; {waiting} waiting",
            counted((*rollouts).into(), "rollout"),
            counted((*repairs).into(), "repair"),
            counted((*places).into(), "place"),
        ));
    }
    if report.fetches_waiting > 0 {
        lines.push(format!(
            "network: {} to fetch {} for their turn",
            match report.fetches_waiting {
                1 => "1 machine waits".to_owned(),
                many => format!("{many} machines wait"),
            },
            size(report.bytes_waiting)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use model::image::ImageName;
    use model::tree::Time;

    use super::*;

    #[test]
    fn each_limit_has_a_line() {
        let limit = |limit: &str, places, for_repairs| LimitUse {
            limit: limit.to_owned(),
            places,
            for_repairs,
            repairs: 1,
            rollouts: 0,
            waiting: 5,
        };
        let report = BudgetReport {
            under_way: 1,
            waiting: 5,
            fetches_waiting: 2,
            bytes_waiting: 3_000,
            limits: vec![limit("--max-updating 8", 8, 2), limit("--max-high-impact 10%", 1, 0)],
            stopped: vec![StoppedImage {
                image: ImageName::new("web/7").unwrap(),
                why: "3 of 3 failed".into(),
                since: Time::default(),
            }],
        };
        let expected = [
            "image web/7: updates to it have STOPPED since 1970-01-01T00:00:00Z: 3 of 3 failed",
            "budgets: 1 machine under way, 5 waiting",
            "budget --max-updating 8: 0 rollouts and 1 repair of 8 places, 2 of them for repairs \
             alone; 5 waiting",
            "budget --max-high-impact 10%: 0 rollouts and 1 repair of 1 place; 5 waiting",
            "network: 2 machines wait to fetch 3.0 kB for their turn",
        ];
        assert_eq!(budget_lines(&report), expected);
    }
}
