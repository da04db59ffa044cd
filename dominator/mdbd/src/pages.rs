//! The pages of mdbd.

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use askama::Template;
use model::tree::Time;
use model::when::{ago, moment};
use rpc::page_frame::Frame;
use rpc::server::{Page, Router};

use super::api::not_ready;
use crate::core::merged_sources::SourceReport;
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

#[derive(Template)]
#[template(path = "status.html")]
struct StatusPage {
    warnings: Vec<String>,
    file: String,
    machines: usize,
    written: String,
    version: String,
    sources: Vec<SourceRow>,
}

struct SourceRow {
    name: String,
    origin: String,
    machines: String,
    succeeded: String,
    changed: String,
    error: String,
}

fn body(shared: &Shared, status: &Status, now: Time) -> String {
    let since = |time: Option<Time>, never: &str| {
        time.map_or_else(|| never.to_owned(), |time| ago(now, time))
    };
    let source = |(source, origin): (&SourceReport, &String)| SourceRow {
        name: source.name.clone(),
        origin: origin.clone(),
        machines: source.machines.map_or_else(|| "none yet".to_owned(), |count| count.to_string()),
        succeeded: since(source.succeeded, "not since the start"),
        changed: since(source.changed, "never"),
        error: source.trouble.as_ref().map_or_else(String::new, |trouble| {
            format!("{} (since {})", trouble.why, moment(trouble.since))
        }),
    };
    let published = shared.published().borrow().clone();
    let page = StatusPage {
        warnings: warnings(status),
        file: shared.file.display().to_string(),
        machines: published.as_ref().map_or(0, |published| published.machines.len()),
        written: status.written.map_or_else(
            || "never".to_owned(),
            |time| format!("{} ({})", ago(now, time), moment(time)),
        ),
        version: published
            .map_or_else(|| "none".to_owned(), |published| published.version.to_string()),
        sources: status.sources.iter().zip(&shared.origins).map(source).collect(),
    };
    page.render().expect("writing to a String cannot fail")
}

fn warnings(status: &Status) -> Vec<String> {
    let mut warnings = Vec::new();
    if !status.missing.is_empty() {
        warnings.push(not_ready(&status.missing));
    }
    if status.is_held {
        let text = "Held back: the sources give no machine at all, and the file has some. It \
                    stays as it was. If this is intended, remove the file.";
        warnings.push(text.to_owned());
    }
    if let Some(error) = &status.file_error {
        warnings.push(format!("The file stays as it was: {error}"));
    }
    if let Some(error) = &status.keep_error {
        warnings.push(format!(
            "The data of a source are in force, but cannot be kept over a restart: {error}"
        ));
    }
    warnings
}
