//! `domtool rollback`, and the lists of the orders that last: `list-rollbacks` and `list-pauses`.

use std::collections::BTreeMap;

use api::dominator::Status;
use api::dominator::rollback::{
    EndRollback, EndRollbackRequest, ListLastingOrders, PausedMachine, RollBack, RollBackReply,
    RollBackRequest, RolledBackMachine,
};
use model::display::utc;
use model::image::ImageName;
use rpc::client::Client;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::orders::count_and_names;
use super::{ToolError, call, columns, text_of, who};

/// Rolls machines back from an image, or ends their rollbacks.
pub(super) async fn rollback(
    client: &Client,
    format: Format,
    hosts: &[String],
    from: Option<&ImageName>,
    why: &str,
) -> Result<Output, ToolError> {
    let (hosts, why) = (hosts.to_owned(), why.to_owned());
    let RollBackReply { machines, left_out } = if let Some(from) = from {
        let request = RollBackRequest { hosts, from: from.clone(), why, who: who() };
        call::<RollBack>(client, &request).await?
    } else {
        let request = EndRollbackRequest { hosts, why, who: who() };
        let machines = call::<EndRollback>(client, &request).await?.machines;
        RollBackReply { machines, left_out: Vec::new() }
    };
    let is_end = from.is_none();
    for ((from, image), hostnames) in by_images(&machines) {
        let names = count_and_names(&hostnames);
        if is_end {
            eprintln!("The rollback of {names} from {from} to {image} is ended.");
        } else {
            eprintln!(
                "Rolled back from {from} to {image}: {names}. The machine database still requires \
                 {from}. To make this permanent, set RequiredImage to {image} there: the rollback \
                 ends when another image than {from} is required. To take it back: domtool \
                 rollback --end HOST"
            );
        }
    }
    let text = format.render(&machines, |machines| rollbacks(machines));
    let Some(from) = from.filter(|_| !left_out.is_empty()) else { return Ok(text.into()) };
    eprintln!("Left out, because {from} is not required: {}.", count_and_names(&left_out));
    Ok(Output { text, code: EXIT_DIFFERENT })
}

/// Returns the machines by the image from which, and the one to which, they were rolled back.
fn by_images(machines: &[RolledBackMachine]) -> BTreeMap<(&ImageName, &ImageName), Vec<String>> {
    let mut by_images: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for one in machines {
        let images = (&one.rollback.from, &one.rollback.image);
        by_images.entry(images).or_default().push(one.hostname.clone());
    }
    by_images
}

pub(super) async fn list_rollbacks(client: &Client, format: Format) -> Result<Output, ToolError> {
    let reply = call::<ListLastingOrders>(client, &()).await?;
    Ok(format.render(&reply.rolled_back, |machines| rollbacks(machines)).into())
}

pub(super) async fn list_pauses(client: &Client, format: Format) -> Result<Output, ToolError> {
    let reply = call::<ListLastingOrders>(client, &()).await?;
    Ok(format.render(&reply.paused, |machines| pauses(machines)).into())
}

fn rollbacks(machines: &[RolledBackMachine]) -> String {
    let mut table = columns(&["HOST", "FROM", "TO", "SINCE", "BY", "WHY"]);
    for RolledBackMachine { hostname, rollback } in machines {
        table.add_row([
            hostname.clone(),
            rollback.from.to_string(),
            rollback.image.to_string(),
            utc(rollback.since),
            rollback.who.clone(),
            rollback.why.clone(),
        ]);
    }
    text_of(&table)
}

fn pauses(machines: &[PausedMachine]) -> String {
    let mut table = columns(&["HOST", "STATUS", "SINCE", "UNTIL", "BY", "WHY"]);
    for PausedMachine { hostname, pause, status } in machines {
        table.add_row([
            hostname.clone(),
            Status::name(*status).to_owned(),
            utc(pause.since),
            utc(pause.until),
            pause.who.clone(),
            pause.reason.clone(),
        ]);
    }
    text_of(&table)
}
