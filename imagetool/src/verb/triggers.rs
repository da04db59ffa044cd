//! `imagetool merge-triggers` and `match-triggers`: work on trigger files, without a server.

use std::io::BufRead as _;
use std::path::PathBuf;

use api::planning::preview::service_lines;
use model::path::TreePath;
use model::trigger::services::{SUBD_SERVICE, ServiceCalls, service_calls};
use serde::Serialize;
use tool::Format;

use super::{VerbResult, parse_path, path_argument, print, print_json};
use crate::input_files::triggers::{Match, matches, merge, to_text};
use crate::input_files::{parse_triggers, read_text};
use crate::output::failure::{Failure, Outcome};

/// Merges trigger files: the result has the effects of each of them.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  imagetool merge-triggers triggers/debian.json triggers/web.json > triggers.json

Triggers that agree in all but MatchLines become one, with the lines of all. Those that differ in
anything else stay apart: a reload for one path is no restart for another. Services and lines are
sorted, and comments are left out: equal sets of triggers give equal files. The server is not
asked.")]
pub struct MergeTriggersArgs {
    /// Trigger files.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// Merges triggers. The output is JSON in each format.
pub fn merge_triggers(args: &MergeTriggersArgs) -> VerbResult {
    let read = |path: &PathBuf| parse_triggers(path, &read_text(path, "triggers")?);
    let lists = args.files.iter().map(read).collect::<Result<Vec<_>, Failure>>()?;
    let merged = merge(&lists).map_err(|error| Failure::new(&error))?;
    print(&to_text(&merged))?;
    Ok(Outcome::Done)
}

/// Shows which triggers a change of paths fires, and the calls of services.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool match-triggers triggers.json /etc/ssh/sshd_config
  imagetool diff web/7 web/8 --format json |
    jq -r '.entries[][].path' | imagetool match-triggers triggers.json

Without PATH, paths are read from the standard input, one a line. Triggers of the old image and of
the new one are taken together in an update; with --old they are those of the old image, otherwise
both images are taken to have TRIGGERFILE. The server is not asked.")]
pub struct MatchTriggersArgs {
    /// Trigger file of the new image.
    #[arg(value_name = "TRIGGERFILE")]
    pub trigger_file: PathBuf,
    /// Paths that change.
    #[arg(value_name = "PATH", value_parser = path_argument())]
    pub paths: Vec<TreePath>,
    /// Trigger file of the old image.
    #[arg(long, value_name = "TRIGGERFILE")]
    pub old: Option<PathBuf>,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct TriggerReport {
    paths: Vec<PathReport>,
    services: ServiceCalls,
}

#[derive(Debug, Serialize)]
struct PathReport {
    path: TreePath,
    triggers: Vec<Match>,
}

pub fn match_triggers(format: Format, args: MatchTriggersArgs) -> VerbResult {
    let read = |path: &PathBuf| parse_triggers(path, &read_text(path, "triggers")?);
    let triggers = read(&args.trigger_file)?;
    let old = args.old.as_ref().map_or_else(|| Ok(triggers.clone()), read)?;
    let paths = if args.paths.is_empty() { paths_of_input()? } else { args.paths };
    let mut report = Vec::new();
    for path in &paths {
        let triggers = matches(&triggers, path).map_err(|error| Failure::new(&error))?;
        report.push(PathReport { path: path.clone(), triggers });
    }
    let services = service_calls(&old, &triggers, paths.iter(), SUBD_SERVICE);
    match format {
        Format::Json => print_json(&TriggerReport { paths: report, services })?,
        Format::Table => {
            let mut lines: Vec<String> = report.iter().flat_map(lines_of_path).collect();
            let calls = service_lines(&services);
            if calls.is_empty() {
                lines.push("nothing is done to services".to_owned());
            }
            lines.extend(calls);
            print(&lines.into_iter().map(|line| line + "\n").collect::<String>())?;
        }
    }
    Ok(Outcome::Done)
}

fn lines_of_path(report: &PathReport) -> Vec<String> {
    let PathReport { path, triggers } = report;
    if triggers.is_empty() {
        return vec![format!("{path}: no trigger")];
    }
    let line = |Match { number, service, action, lines }: &Match| {
        format!("{path}: trigger {number}, {service} ({action}), by {}", lines.join(" "))
    };
    triggers.iter().map(line).collect()
}

fn paths_of_input() -> Result<Vec<TreePath>, Failure> {
    let failed = |text: String| Failure::from_text(format!("the standard input: {text}"));
    let mut paths = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| failed(error.to_string()))?;
        if !line.is_empty() {
            paths.push(parse_path(line.as_ref()).map_err(failed)?);
        }
    }
    Ok(paths)
}
