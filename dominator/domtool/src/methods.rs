//! `domtool methods`: lists all methods, and who may call them.

use std::process::ExitCode;

use api::access::Access;
use api::method::{Effect, MethodInfo};
use certs::sets::{Set, allowed, parse_pattern};
use clap::{Args, ValueEnum as _};
use serde::Serialize;
use tool::{Format, Output};

use crate::{columns, text_of};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Only methods that match: Service.Method, with * for any letters; default: all
    #[arg(value_name = "PATTERN", value_parser = parse_pattern)]
    patterns: Vec<String>,
}

/// A method in the output.
#[derive(Debug, Serialize)]
struct Row {
    method: &'static str,
    service: &'static str,
    access: Access,
    effect: Effect,
    reserved: bool,
    sets: Vec<&'static str>,
}

impl Row {
    fn new(method: MethodInfo) -> Self {
        let MethodInfo { name, access, effect, reserved } = method;
        let (service, _) = name.split_once('.').unwrap_or((name, ""));
        let may =
            |set: &Set| access == Access::Authenticated || allowed(set.powers()).contains(&name);
        let sets = Set::value_variants().iter().copied().filter(may).map(Set::name).collect();
        Self { method: name, service, access, effect, reserved, sets }
    }

    fn sets_text(&self) -> String {
        match self.sets.len() {
            0 => "none".to_owned(),
            count if count == Set::value_variants().len() => "all".to_owned(),
            _ => self.sets.join(", "),
        }
    }
}

pub(super) fn run(format: Format, arguments: &Arguments) -> ExitCode {
    let named = allowed(arguments.patterns.iter().cloned());
    let is_shown = |method: &MethodInfo| named.is_empty() || named.contains(&method.name);
    let rows: Vec<Row> = api::methods().into_iter().filter(is_shown).map(Row::new).collect();
    Output::from(format.render(&rows, |rows| table(rows))).print()
}

fn table(rows: &[Row]) -> String {
    let mut table = columns(&["METHOD", "WHO MAY CALL IT", "SETS"]);
    for row in rows {
        let who = row.access.describe();
        let who = if row.reserved { format!("{who}, in a later release") } else { who.to_owned() };
        table.add_row([row.method.to_owned(), who, row.sets_text()]);
    }
    text_of(&table)
}
