//! `domtool set-config` and `get-config`: what subs may take of their machines.

use std::collections::BTreeMap;

use api::dominator::TagFilter;
use api::dominator::settings::{
    GetSubConfiguration, GetSubConfigurationReply, GetSubConfigurationRequest, Level,
    LevelSettings, Limit, MachineConfiguration, SetSubConfiguration, SetSubConfigurationRequest,
};
use clap::Args;
use model::words::counted;
use rpc::client::{CallError, Client};
use tool::{Format, Output, json};

use super::{call, columns, who};
use model::when::moment;

#[derive(Debug, Args)]
pub(super) struct Set {
    #[command(flatten)]
    level: LevelArgs,
    /// A limit and its value, 1 to 100 per cent; without a value it is taken back
    #[arg(value_name = "LIMIT=PERCENT", required_unless_present = "unset", value_parser = change)]
    values: Vec<(Limit, Option<u8>)>,
    /// Take the value of this limit back; may be given several times
    #[arg(long, value_name = "LIMIT", value_parser = limit)]
    unset: Vec<Limit>,
    /// Why: it is shown to everyone who looks
    #[arg(long, value_name = "TEXT", alias = "reason")]
    why: String,
}

/// What the values are for.
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

fn limit(text: &str) -> Result<Limit, String> {
    Limit::ALL.into_iter().find(|limit| limit.name() == text).ok_or_else(|| {
        let names = Limit::ALL.map(Limit::name);
        format!("the limits are {}", names.join(", "))
    })
}

fn change(text: &str) -> Result<(Limit, Option<u8>), String> {
    let (name, value) = text.split_once('=').ok_or("expected LIMIT=PERCENT")?;
    let limit = limit(name)?;
    if value.is_empty() {
        return Ok((limit, None));
    }
    let percent = value.parse().ok().filter(|percent| (1..=100).contains(percent));
    let percent = percent.ok_or_else(|| format!("`{value}` is no number from 1 to 100"))?;
    Ok((limit, Some(percent)))
}

#[derive(Debug, Args)]
pub(super) struct Get {
    /// The machine: what its sub is told and why, what it was told, and what is in force there
    #[arg(value_name = "HOST")]
    hostname: Option<String>,
}

pub(super) async fn set(client: &Client, format: Format, set: &Set) -> Result<Output, CallError> {
    let mut values: BTreeMap<Limit, Option<u8>> = set.values.iter().copied().collect();
    values.extend(set.unset.iter().map(|limit| (*limit, None)));
    let level = set.level.level();
    let (why, who) = (set.why.clone(), who());
    let request = SetSubConfigurationRequest { level, values, why, who };
    let reply = call::<SetSubConfiguration>(client, &request).await?;
    eprintln!(
        "Kept for {}: {} now. A machine's own configuration is a ceiling: domtool get-config HOST.",
        request.level,
        counted(reply.machines.into(), "machine")
    );
    Ok(match format {
        Format::Table => String::new(),
        Format::Json => json(&reply),
    }
    .into())
}

pub(super) async fn get(client: &Client, format: Format, get: &Get) -> Result<Output, CallError> {
    let request = GetSubConfigurationRequest { hostname: get.hostname.clone() };
    let reply = call::<GetSubConfiguration>(client, &request).await?;
    Ok(match format {
        Format::Table => text(&reply),
        Format::Json => json(&reply),
    }
    .into())
}

fn text(reply: &GetSubConfigurationReply) -> String {
    match &reply.machine {
        Some(machine) => of_machine(machine) + "\n" + &of_levels(&reply.levels),
        None => of_levels(&reply.levels),
    }
}

fn of_levels(levels: &[LevelSettings]) -> String {
    let mut table = columns(&["FOR", "LIMIT", "PERCENT", "SINCE", "WHO", "WHY"]);
    for LevelSettings { level, values } in levels {
        for (limit, setting) in values {
            table.add_row([
                level.to_string(),
                limit.name().to_owned(),
                setting.percent.to_string(),
                moment(setting.since),
                setting.who.clone(),
                setting.why.clone(),
            ]);
        }
    }
    format!("{}\n", table.trim_fmt())
}

fn of_machine(machine: &MachineConfiguration) -> String {
    let mut table = columns(&["LIMIT", "WANTED", "FROM", "TOLD", "CEILING", "IN FORCE", ""]);
    for limit in Limit::ALL {
        let shown = |percent: Option<u8>| percent.map_or("-".to_owned(), |value| value.to_string());
        let wanted = limit.of(&machine.wanted);
        let reported = machine.reported.as_ref();
        let of = |limits: Option<api::subd::Limits>| match limits {
            None => "not known".to_owned(),
            Some(limits) => shown(limit.of(&limits)),
        };
        table.add_row([
            limit.name().to_owned(),
            shown(wanted),
            machine.from.get(&limit).map_or_else(String::new, ToString::to_string),
            of(reported.map(|report| report.told)),
            of(reported.map(|report| report.ceilings)),
            of(reported.map(|report| report.in_force())),
            remark(machine, limit).to_owned(),
        ]);
    }
    let mut text = format!("{}\n", table.trim_fmt());
    if let Some(why) = &machine.trouble {
        text.push_str(&format!("The sub could not be told, and is told again: {why}\n"));
    }
    text
}

/// What is to be said of a limit of a machine.
fn remark(machine: &MachineConfiguration, limit: Limit) -> &'static str {
    let Some(reported) = &machine.reported else { return "" };
    let told = limit.of(&reported.told);
    if told != limit.of(&machine.wanted) {
        return "is to be told";
    }
    match (told, limit.of(&reported.ceilings)) {
        (Some(told), Some(ceiling)) if told > ceiling => "cut by the machine's own ceiling",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_operators_write_them() {
        let table = [
            ("network-percent=5", Ok((Limit::NetworkPercent, Some(5)))),
            ("cpu-percent=", Ok((Limit::CpuPercent, None))),
            ("cpu-percent=0", Err("`0` is no number from 1 to 100")),
            ("cpu-percent=300", Err("`300` is no number from 1 to 100")),
            ("cpu-percent", Err("expected LIMIT=PERCENT")),
            (
                "cpu=1",
                Err("the limits are cpu-percent, scan-percent, write-percent, network-percent"),
            ),
        ];
        for (text, expected) in table {
            assert_eq!(change(text), expected.map_err(str::to_owned), "{text}");
        }
    }
}
