//! The page of the resources of machines.

use api::dominator::ListSubsRequest;
use api::dominator::resources::MachineResources;
use api::fault::{Fault, FaultCode};
use model::display::safe_text;
use rpc::page_frame::{Cell, html_escape, path_escape, table};
use rpc::server::{Page, Query};

use super::{Pages, ROWS_MAX};
use crate::interface::api::selection;

/// The longest text of a resource, in bytes.
const TEXT_BYTES_MAX: usize = 400;

pub(super) async fn page(pages: &Pages, query: &Query) -> Result<Page, Fault> {
    let hosts = query.all("host");
    if hosts.is_empty() {
        // A visit must not have the whole fleet asked.
        return Err(Fault::new(FaultCode::BadRequest, "which machines? /resources?host=NAME"));
    }
    let request = ListSubsRequest { hosts, ..ListSubsRequest::default() };
    let machines = pages.fleet.resources(&selection(request)?).await.machines;
    let mut body = String::new();
    for MachineResources { hostname, unknown, .. } in &machines {
        if let Some(why) = unknown {
            let line = format!("{hostname}: its resources are not known: {why}");
            body.push_str(&format!("<p>{}</p>\n", html_escape(&line)));
        }
    }
    let rows: Vec<Vec<Cell>> = machines.iter().flat_map(rows).take(ROWS_MAX).collect();
    body.push_str(&match rows.is_empty() {
        true => "<p>There are no resources.</p>\n".to_owned(),
        false => table(&["machine", "resource", "kind", "state", "provisioner", "text"], &rows),
    });
    Ok(Page::Html(pages.frame.render("Resources", &body)))
}

/// Returns a row for each resource.
fn rows(machine: &MachineResources) -> impl Iterator<Item = Vec<Cell>> {
    let resources = machine.report.iter().flat_map(|report| &report.resources);
    resources.map(|resource| {
        let path = format!("/sub?host={}", path_escape(&machine.hostname));
        vec![
            Cell::Link { path, text: machine.hostname.clone() },
            Cell::Text(resource.id.clone()),
            Cell::Text(resource.kind.clone()),
            Cell::Text(resource.shown_state().to_owned()),
            Cell::Text(resource.provisioner.clone()),
            Cell::Text(safe_text(&resource.text, TEXT_BYTES_MAX)),
        ]
    })
}
