//! What `domtool` tells of budgets and stopped images, and how it lets an image go on.

use api::dominator::budgets::{
    BudgetReport, LimitUse, ResumeImage, ResumeImageRequest, StoppedImage,
};
use api::dominator::{DominatorStatus, GetStatus};
use clap::Args;
use model::image::ImageName;
use model::words::{counted, size};
use rpc::client::Client;
use tool::{Format, Output, json};

use super::why::NeededWhy;
use super::{ToolError, call, columns, done_as, who};
use model::when::moment;

#[derive(Debug, Args)]
pub(super) struct Resume {
    /// The image that stopped
    image: ImageName,
    #[command(flatten)]
    why: NeededWhy,
}

pub(super) async fn list_stopped(client: &Client, format: Format) -> Result<Output, ToolError> {
    let status: DominatorStatus = call::<GetStatus>(client, &()).await?;
    let stopped = status.budgets.stopped;
    Ok(match format {
        Format::Table => table(&stopped).into(),
        Format::Json => json(&stopped).into(),
    })
}

pub(super) async fn resume(
    client: &Client,
    format: Format,
    order: &Resume,
) -> Result<Output, ToolError> {
    let Resume { image, why } = order;
    let (image, why) = (image.clone(), why.why.clone());
    let request = ResumeImageRequest { image: image.clone(), why, who: who() };
    let done = call::<ResumeImage>(client, &request).await?;
    eprintln!(
        "Updates to {image} go on, and are counted anew. Machines whose health check failed keep \
         their former image until: domtool retry HOST"
    );
    Ok(done_as(format, &done).into())
}

fn table(stopped: &[StoppedImage]) -> String {
    let mut table = columns(&["IMAGE", "SINCE", "WHY"]);
    for StoppedImage { image, why, since } in stopped {
        table.add_row([image.to_string(), moment(*since), why.clone()]);
    }
    format!("{}\n", table.trim_fmt())
}

/// What is under way, what waits and what has stopped, a line for each.
pub fn lines(report: &BudgetReport) -> Vec<String> {
    let mut lines: Vec<String> = report
        .stopped
        .iter()
        .map(|StoppedImage { image, why, since }| {
            format!("image {image}: updates to it have STOPPED since {}: {why}", moment(*since))
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
            kept => format!(", {kept} of them for repairs alone"),
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
    use super::*;
    use model::tree::Time;

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
        assert_eq!(lines(&report), expected);
    }
}
