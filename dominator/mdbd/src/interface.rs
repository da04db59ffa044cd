//! What mdbd serves: the machine database for dominators, metrics and a page.

use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::mdb::{GetMdb, GetMdbReply, GetMdbRequest, MDB_WAIT_MS_MAX};
use askama::Template;
use model::display::{ago, utc};
use model::tree::Time;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use rpc::page_frame::Frame;
use rpc::server::{Page, Router};
use system::clock::wall;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::core::merged_sources::SourceReport;
use crate::mdb_writer::{Shared, Status};

/// Adds the methods of `MdbServer` to `router`. Waiting calls are answered when `stop` is
/// cancelled.
pub fn methods(router: Router<Arc<Shared>>, stop: &CancellationToken) -> Router<Arc<Shared>> {
    let stop = stop.clone();
    router.method::<GetMdb, _>(move |shared, _, request| {
        let stop = stop.clone();
        async move { get(&shared, &stop, request).await }
    })
}

async fn get(
    shared: &Shared,
    stop: &CancellationToken,
    request: GetMdbRequest,
) -> Result<GetMdbReply, Fault> {
    let wait = Duration::from_millis(request.wait_ms.min(MDB_WAIT_MS_MAX).into());
    let deadline = Instant::now() + wait;
    let mut receiver = shared.published();
    let published = loop {
        let published = receiver.borrow_and_update().clone();
        if published.as_ref().is_some_and(|mdb| Some(mdb.version) != request.have) {
            break published;
        }
        tokio::select! {
            changed = timeout_at(deadline, receiver.changed()) => {
                if !matches!(changed, Ok(Ok(()))) {
                    break published;
                }
            }
            () = stop.cancelled() => break published,
        }
    };
    match published {
        Some(mdb) => {
            let is_new = request.have != Some(mdb.version);
            let machines = is_new.then(|| mdb.machines.values().cloned().collect());
            Ok(GetMdbReply { version: mdb.version, machines })
        }
        None => Err(Fault::new(FaultCode::Unavailable, not_ready(&shared.status().missing))),
    }
}

/// Explains why there is no machine database yet.
fn not_ready(missing: &[String]) -> String {
    match missing {
        [] => "the machine database is not written yet".to_owned(),
        missing => {
            let names = missing.join(", ");
            format!("the file waits for sources that have given nothing yet: {names}")
        }
    }
}

/// Registers the metrics.
pub fn register_metrics(registry: &mut Registry, shared: &Arc<Shared>) {
    registry.register(
        "mdbd_writes",
        "How often the machine database was written",
        shared.writes.clone(),
    );
    registry.register_collector(Box::new(Gauges(Arc::clone(shared))));
}

/// Gauges that are computed when they are read.
#[derive(Debug)]
struct Gauges(Arc<Shared>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let status = self.0.status();
        let machines = self.0.published().borrow().as_ref().map_or(0, |mdb| mdb.machines.len());
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let gauges: [(&str, &str, i64); 5] = [
            ("mdbd_machines", "Machines in the machine database", number(machines)),
            (
                "mdbd_sources_missing",
                "Sources that have given nothing yet, which the file waits for",
                number(status.missing.len()),
            ),
            (
                "mdbd_held",
                "1 while the file is not written because it would lose all machines",
                i64::from(status.is_held),
            ),
            (
                "mdbd_file_failing",
                "1 while the file cannot be read or written",
                i64::from(status.file_error.is_some()),
            ),
            (
                "mdbd_written_timestamp_seconds",
                "When the file was last written",
                status.written.map_or(0, |time| time.seconds),
            ),
        ];
        for (name, help, value) in gauges {
            let encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(encoder)?;
        }
        type Value = fn(&SourceReport) -> i64;
        let source_gauges: [(&str, &str, Value); 3] = [
            ("mdbd_source_machines", "Machines that a source has in force", |source| {
                source.machines.and_then(|count| i64::try_from(count).ok()).unwrap_or_default()
            }),
            ("mdbd_source_failing", "1 while a source gives nothing that is in order", |source| {
                i64::from(source.trouble.is_some())
            }),
            (
                "mdbd_source_success_timestamp_seconds",
                "When a source last gave what is in order; 0 if not since the start",
                |source| source.succeeded.map_or(0, |time| time.seconds),
            ),
        ];
        for (name, help, value) in source_gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for source in &status.sources {
                let labels = [("source", source.name.as_str())];
                ConstGauge::new(value(source)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

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
            format!("{} (since {})", trouble.why, utc(trouble.since))
        }),
    };
    let published = shared.published().borrow().clone();
    let page = StatusPage {
        warnings: warnings(status),
        file: shared.file.display().to_string(),
        machines: published.as_ref().map_or(0, |published| published.machines.len()),
        written: status.written.map_or_else(
            || "never".to_owned(),
            |time| format!("{} ({})", ago(now, time), utc(time)),
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
    if let Some(error) = &status.save_error {
        warnings.push(format!(
            "The data of a source are in force, but cannot be kept over a restart: {error}"
        ));
    }
    let misspelt = |source: &SourceReport| {
        source.misspelt_keys.as_ref().map(|keys| format!("Source {}: {keys}", source.name))
    };
    warnings.extend(status.sources.iter().filter_map(misspelt));
    warnings
}
