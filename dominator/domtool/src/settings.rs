//! `domtool set-config` and `get-config`: resource limits of subs.

use std::collections::BTreeMap;

use api::dominator::TagFilter;
use api::dominator::settings::{
    GetSubConfiguration, GetSubConfigurationReply, GetSubConfigurationRequest, Level,
    LevelSettings, Limit, MachineConfiguration, SetSubConfiguration, SetSubConfigurationRequest,
};
use clap::Args;
use model::display::{counted, utc};
use rpc::client::Client;
use tool::{Format, Output};

use super::{ToolError, call, columns, silent, text_of, who};

#[derive(Debug, Args)]
pub(super) struct SetArguments {
    #[command(flatten)]
    level: LevelArgs,
    /// A limit and its value, 1 to 100 per cent; an empty value removes it
    #[arg(value_name = "LIMIT=PERCENT", required_unless_present = "unset")]
    #[arg(value_parser = Limit::parse_change)]
    values: Vec<(Limit, Option<u8>)>,
    /// Remove the value of this limit; may be repeated
    #[arg(long, value_name = "LIMIT", value_parser = Limit::parse)]
    unset: Vec<Limit>,
    /// Reason, shown to everyone who looks at the limits
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: String,
}

/// The machines that the values are for.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
struct LevelArgs {
    /// For all machines
    #[arg(long)]
    fleet: bool,
    /// For machines with this tag
    #[arg(long, value_name = "NAME[=VALUE]")]
    tag: Option<String>,
    /// For one machine
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
}

impl LevelArgs {
    fn level(&self) -> Level {
        match (&self.tag, &self.host) {
            (Some(tag), _) => Level::Tag(TagFilter::parse(tag)),
            (None, Some(host)) => Level::Host(host.clone()),
            (None, None) => Level::Fleet,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct GetArguments {
    /// Machine to show: the limits to send, the limits received, and those in force there
    #[arg(value_name = "HOST")]
    hostname: Option<String>,
}

pub(super) async fn set(
    client: &Client,
    format: Format,
    arguments: &SetArguments,
) -> Result<Output, ToolError> {
    let mut values: BTreeMap<Limit, Option<u8>> = arguments.values.iter().copied().collect();
    values.extend(arguments.unset.iter().map(|limit| (*limit, None)));
    let level = arguments.level.level();
    let (why, who) = (arguments.why.clone(), who());
    let request = SetSubConfigurationRequest { level, values, why, who };
    let reply = call::<SetSubConfiguration>(client, &request).await?;
    eprintln!(
        "Saved for {}: {} now. What a machine's own configuration sets is a ceiling: domtool \
         get-config HOST.",
        request.level,
        counted(reply.machines.into(), "machine")
    );
    Ok(silent(format, &reply))
}

pub(super) async fn get(
    client: &Client,
    format: Format,
    arguments: &GetArguments,
) -> Result<Output, ToolError> {
    let request = GetSubConfigurationRequest { hostname: arguments.hostname.clone() };
    let reply = call::<GetSubConfiguration>(client, &request).await?;
    Ok(format.render(&reply, limits_text).into())
}

fn limits_text(reply: &GetSubConfigurationReply) -> String {
    match &reply.machine {
        Some(machine) => machine_text(machine) + "\n" + &level_table(&reply.levels),
        None => level_table(&reply.levels),
    }
}

fn level_table(levels: &[LevelSettings]) -> String {
    let mut table = columns(&["FOR", "LIMIT", "PERCENT", "SINCE", "WHO", "WHY"]);
    for LevelSettings { level, values } in levels {
        for (limit, setting) in values {
            table.add_row([
                level.to_string(),
                limit.name().to_owned(),
                setting.percent.to_string(),
                utc(setting.since),
                setting.who.clone(),
                setting.why.clone(),
            ]);
        }
    }
    text_of(&table)
}

fn machine_text(machine: &MachineConfiguration) -> String {
    let mut table = columns(&["LIMIT", "WANTED", "FROM", "RECEIVED", "CEILING", "IN FORCE", ""]);
    for limit in Limit::ALL {
        let shown = |percent: Option<u8>| percent.map_or("-".to_owned(), |value| value.to_string());
        let wanted = limit.of(&machine.wanted);
        let reported = machine.reported.as_ref();
        let reported_limit = |limits: Option<api::subd::Limits>| match limits {
            None => "unknown".to_owned(),
            Some(limits) => shown(limit.of(&limits)),
        };
        table.add_row([
            limit.name().to_owned(),
            shown(wanted),
            machine.from.get(&limit).map_or_else(String::new, ToString::to_string),
            reported_limit(reported.map(|report| report.told)),
            reported_limit(reported.map(|report| report.ceilings)),
            reported_limit(reported.map(|report| report.in_force())),
            remark(machine, limit).to_owned(),
        ]);
    }
    let mut text = text_of(&table);
    if let Some(why) = &machine.trouble {
        text.push_str(&format!("Sending the limits to the sub failed and is retried: {why}\n"));
    }
    text
}

/// Explains why a limit is not in force as wanted.
fn remark(machine: &MachineConfiguration, limit: Limit) -> &'static str {
    let Some(reported) = &machine.reported else { return "" };
    let received = limit.of(&reported.told);
    if received != limit.of(&machine.wanted) {
        return "not sent yet";
    }
    match (received, limit.of(&reported.ceilings)) {
        (Some(received), Some(ceiling)) if received > ceiling => "cut by the machine's own ceiling",
        _ => "",
    }
}
