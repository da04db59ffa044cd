//! `domtool departing`: machines that have left the machine database.

use api::dominator::departing::{
    DepartingMachine, DepartingOrder, ListDeparting, OrderDeparting, OrderDepartingRequest,
};
use clap::{Args, Subcommand};
use model::display::utc;
use rpc::client::Client;
use tool::{Format, Output};

use super::orders::{RequiredWhy, count_and_names};
use super::{ToolError, call, columns, silent, text_of, who};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// List the machines that have left, and what becomes of their tasks
    List,
    /// Stop the tasks of machines now
    ///
    /// They start again when the machine is in a machine database again.
    #[command(after_help = "Example: domtool departing stop 'web*' --why 'they are given back'")]
    Stop(OrderArguments),
    /// Leave the tasks of machines as they are
    #[command(after_help = "Example: domtool departing leave web1 --why 'the source is wrong'")]
    Leave(OrderArguments),
    /// Leave the tasks of machines as they are, and list the machines and their resources no more
    #[command(after_help = "Example: domtool departing forget web1 --why 'all of it is deleted'")]
    Forget(OrderArguments),
}

#[derive(Debug, Args)]
pub(super) struct OrderArguments {
    /// Names or patterns of machines that have left
    #[arg(value_name = "HOST", required = true)]
    hosts: Vec<String>,
    #[command(flatten)]
    why: RequiredWhy,
}

pub(super) async fn run(
    client: &Client,
    format: Format,
    command: &Command,
) -> Result<Output, ToolError> {
    let (order, arguments) = match command {
        Command::List => {
            let machines = call::<ListDeparting>(client, &()).await?.machines;
            return Ok(format.render(&machines, |machines| listed(machines)).into());
        }
        Command::Stop(arguments) => (DepartingOrder::Stop, arguments),
        Command::Leave(arguments) => (DepartingOrder::Leave, arguments),
        Command::Forget(arguments) => (DepartingOrder::Forget, arguments),
    };
    let (hosts, why) = (arguments.hosts.clone(), arguments.why.why.clone());
    let request = OrderDepartingRequest { hosts, order, why, who: who() };
    let done = call::<OrderDeparting>(client, &request).await?;
    let hosts = count_and_names(&request.hosts);
    match order {
        DepartingOrder::Stop => eprintln!("The tasks are being stopped: {hosts}."),
        DepartingOrder::Leave => eprintln!("The tasks are left as they are: {hosts}."),
        DepartingOrder::Forget => eprintln!("Listed no more: {hosts}."),
    }
    Ok(silent(format, &done))
}

fn listed(machines: &[DepartingMachine]) -> String {
    let mut table = columns(&["HOST", "LEFT", "STATE", "STOPS", "TASKS", "RESOURCES", "BY", "WHY"]);
    for machine in machines {
        table.add_row([
            machine.hostname.clone(),
            utc(machine.since),
            machine.state.name().to_owned(),
            machine.due.map(utc).unwrap_or_default(),
            machine.tasks.map_or_else(|| "?".to_owned(), |tasks| tasks.to_string()),
            machine.resources.to_string(),
            machine.who.clone(),
            machine.why.clone(),
        ]);
    }
    text_of(&table)
}
