//! What a browser shows of mdbd.

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use model::tree::Time;
use model::when::{ago, moment};
use rpc::page_frame::{Cell, Frame, Mark, html_escape, pairs, table};
use rpc::server::{Page, Router};

use super::api::not_ready;
use crate::mdb_writer::{Shared, Status};
use system::clock::wall;

/// Adds the pages to `router`. `/healthz` is 503 while the file waits for a source.
pub fn pages(router: Router<Arc<Shared>>, frame: Frame) -> Router<Arc<Shared>> {
    let router = router.frame(frame.clone());
    let router = router.page("/", move |shared, _| {
        let body = body(&shared, &shared.status(), wall());
        let html = frame.render("Machine database", &body);
        async move { Ok(Page::Html(html)) }
    });
    router.page("/healthz", async |shared, _| match shared.status().missing.as_slice() {
        [] => Ok(Page::Text("ok\n".to_owned())),
        missing => Err(Fault::new(FaultCode::Unavailable, not_ready(missing))),
    })
}

fn warning(text: &str) -> String {
    format!("<p class=\"bad\">{}</p>\n", html_escape(text))
}

fn body(shared: &Shared, status: &Status, now: Time) -> String {
    let mut body = String::new();
    if !status.missing.is_empty() {
        body.push_str(&warning(&not_ready(&status.missing)));
    }
    if status.is_held {
        body.push_str(&warning(
            "Held back: the sources give no machine at all, and the file has some. It stays as it \
             was. If that is meant, remove the file.",
        ));
    }
    if let Some(error) = &status.file_error {
        body.push_str(&warning(&format!("The file stays as it was: {error}")));
    }
    if let Some(error) = &status.keep_error {
        body.push_str(&warning(&format!(
            "What a source gave is in force, and cannot be kept over a restart: {error}"
        )));
    }
    let force = shared.published().borrow().clone();
    let when = |time: Time| format!("{} ({})", ago(now, time), moment(time));
    body.push_str(&pairs([
        ("file", shared.file.display().to_string()),
        ("machines", force.as_ref().map_or(0, |force| force.machines.len()).to_string()),
        ("last written", status.written.map_or_else(|| "never".to_owned(), when)),
        ("version", force.map_or_else(|| "none".to_owned(), |force| force.version.to_string())),
    ]));
    let rows: Vec<Vec<Cell>> = status
        .sources
        .iter()
        .zip(&shared.origins)
        .map(|(source, origin)| {
            let since = |time: Option<Time>, never: &str| {
                Cell::Text(time.map_or_else(|| never.to_owned(), |time| ago(now, time)))
            };
            let machines = source.machines.map(|count| count.to_string());
            vec![
                Cell::Name(source.name.clone()),
                Cell::Text(origin.clone()),
                Cell::Number(machines.unwrap_or_else(|| "none yet".to_owned())),
                since(source.succeeded, "not since the start"),
                since(source.changed, "never"),
                match &source.trouble {
                    None => Cell::Text(String::new()),
                    Some(trouble) => {
                        let text = format!("{} (since {})", trouble.why, moment(trouble.since));
                        Cell::Mark { mark: Mark::Bad, text }
                    }
                },
            ]
        })
        .collect();
    body.push_str("<h2>Sources</h2>\n");
    let head = ["source", "from", "machines", "last success", "last change", "error"];
    body.push_str(&table(&head, &rows));
    body.push_str(
        "<p class=\"quiet\">Of what sources contradict each other in, the later one is right. A \
         source with an error keeps its last data.</p>\n",
    );
    body
}
