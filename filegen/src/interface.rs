//! What filegen-server serves: the methods of `FileGenerator`, metrics and a page.

use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::file_generator::{
    GENERATORS_WAIT_MS_MAX, Generate, GetContents, GetGenerators, GetGeneratorsReply,
    GetGeneratorsRequest, GetSecrets, Load, LoadReply, OrderRevision, OrderRevisionReply,
    OrderRevisionRequest, RenewCertificates, RenewCertificatesReply, RenewCertificatesRequest,
    SignContents,
};
use api::method::Method as _;
use askama::Template;
use model::display::{ago, error_chain, rough_duration, size, utc};
use model::tree::Time;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use rpc::page_frame::Frame;
use rpc::server::{Page, Router};
use system::clock::wall;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::generators::LoadedGenerator;
use super::service::{Service, Statistics};
use super::watching::LoadOrder;

/// Why machines are refused: each could read the files of the others.
const NOT_FOR_MACHINES: &str =
    "a machine gets its computed files from its dominator, not from here";

/// Adds the methods to `router`. Waiting calls are answered when `stop` is cancelled.
/// `orders` has the files taken at once.
pub fn methods(
    router: Router<Arc<Service>>,
    orders: mpsc::Sender<LoadOrder>,
    stop: &CancellationToken,
) -> Router<Arc<Service>> {
    let stop = stop.clone();
    router
        .method::<Generate, _>(async |service: Arc<Service>, caller, mut request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            // Who gets a certificate for a key of its own can pretend to be the machine, as who
            // gets the key of the machine can.
            if !caller.identity.may_call(GetSecrets::NAME) {
                request.machines.iter_mut().for_each(|machine| machine.key = None);
            }
            request.is_for_use &= caller.identity.may_call(SignContents::NAME);
            service.generate(request).await
        })
        .method::<GetContents, _>(async |service: Arc<Service>, caller, request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            service.contents(&request.ids)
        })
        .method::<GetSecrets, _>(async |service: Arc<Service>, caller, request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            service.secrets(&request.ids, &request.hostnames)
        })
        .method::<RenewCertificates, _>(async |service: Arc<Service>, caller, request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            let RenewCertificatesRequest { hostnames, why: _ } = request;
            let renewed = move || service.renew(hostnames.as_deref());
            let internal =
                |error: &dyn std::error::Error| Fault::new(FaultCode::Internal, error_chain(error));
            let renewed = tokio::task::spawn_blocking(renewed).await;
            let renewed = renewed.map_err(|error| internal(&error))?;
            let hostnames = renewed.map_err(|error| internal(&error))?.into_iter().collect();
            Ok(RenewCertificatesReply { hostnames })
        })
        .method::<OrderRevision, _>(async |service: Arc<Service>, caller, request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            let OrderRevisionRequest { revision, stopped, why: _ } = request;
            let order = move || service.order_revision(revision, stopped.as_deref());
            let ordered = tokio::task::spawn_blocking(order).await;
            let ordered =
                ordered.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
            Ok(OrderRevisionReply { number: ordered? })
        })
        .method::<SignContents, _>(async |service: Arc<Service>, caller, request| {
            caller.refuse_machines(NOT_FOR_MACHINES)?;
            service.sign(request).await
        })
        .method::<Load, _>(move |service: Arc<Service>, caller, _request| {
            let orders = orders.clone();
            async move {
                caller.refuse_machines(NOT_FOR_MACHINES)?;
                let (order, taken) = oneshot::channel();
                let stopping = || Fault::new(FaultCode::Unavailable, "filegen-server is stopping");
                orders.send(order).await.map_err(|_| stopping())?;
                taken.await.map_err(|_| stopping())?;
                let published = service.published().borrow().clone();
                let (revision, error) = (published.kept.revision, published.error.clone());
                Ok(LoadReply { revision, error })
            }
        })
        .method::<GetGenerators, _>(move |service, caller, request| {
            let stop = stop.clone();
            async move {
                caller.refuse_machines(NOT_FOR_MACHINES)?;
                Ok(generators(&service, &stop, request).await)
            }
        })
}

async fn generators(
    service: &Service,
    stop: &CancellationToken,
    request: GetGeneratorsRequest,
) -> GetGeneratorsReply {
    let wait = Duration::from_millis(request.wait_ms.min(GENERATORS_WAIT_MS_MAX).into());
    let deadline = Instant::now() + wait;
    let mut receiver = service.published();
    let published = loop {
        let published = receiver.borrow_and_update().clone();
        if Some(published.version) != request.have {
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
    let is_new = Some(published.version) != request.have;
    GetGeneratorsReply { version: published.version, generators: is_new.then(|| published.told()) }
}

/// Registers the metrics.
pub fn register_metrics(registry: &mut Registry, service: &Arc<Service>) {
    registry.register_collector(Box::new(Numbers(Arc::clone(service))));
}

/// Metrics that are computed when they are read.
#[derive(Debug)]
struct Numbers(Arc<Service>);

impl Collector for Numbers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let service = &self.0;
        let published = service.published().borrow().clone();
        let next_ends = service.next_ends();
        let next_end = next_ends.values().min().copied().unwrap_or_default();
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let gauges: [(&str, &str, i64); 4] = [
            ("filegen_generators", "Generators in force", number(published.set.by_path.len())),
            (
                "filegen_configuration_failing",
                "1 while the newest configuration is not in force because of an error",
                i64::from(!published.error.is_empty()),
            ),
            (
                "filegen_content_bytes",
                "Content that is kept for callers",
                number(service.content_bytes()),
            ),
            (
                "filegen_next_end_timestamp_seconds",
                "When the next content ends and is made again; 0 if none does",
                i64::try_from(next_end).unwrap_or(i64::MAX),
            ),
        ];
        for (name, help, value) in gauges {
            let encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value).encode(encoder)?;
        }
        let statistics = service.statistics();
        type Value = fn(&Statistics) -> u64;
        let counters: [(&str, &str, Value); 2] = [
            ("filegen_files_made", "Files that were made", |counted| counted.made),
            ("filegen_failures", "Files that could not be made", |counted| counted.failures),
        ];
        for (name, help, value) in counters {
            let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for path in published.set.by_path.keys() {
                let count = statistics.get(path).map_or(0, value);
                let labels = [("path", path.to_string())];
                ConstCounter::new(count).encode(encoder.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// Adds the page to `router`.
pub fn pages(router: Router<Arc<Service>>, frame: Frame) -> Router<Arc<Service>> {
    router.frame(frame.clone()).page("/", move |service, _| {
        let html = frame.render("Computed files", &body(&service, wall()));
        async move { Ok(Page::Html(html)) }
    })
}

#[derive(Template)]
#[template(path = "status.html")]
struct StatusPage {
    error: String,
    file: String,
    revision: u64,
    /// The stopped revisions, and why.
    stopped: Vec<String>,
    kept: String,
    /// The public key that signs contents; empty if none does.
    signer: String,
    rows: Vec<Row>,
}

struct Row {
    path: String,
    kind: &'static str,
    from: String,
    secret: &'static str,
    /// Empty for secrets, because a short one can be guessed from it.
    version: String,
    made: u64,
    failures: u64,
    next_end: String,
    last_failure: String,
}

fn body(service: &Service, now: Time) -> String {
    let published = service.published().borrow().clone();
    let (statistics, next_ends) = (service.statistics(), service.next_ends());
    let row = |generator: &Arc<LoadedGenerator>| {
        let definition = &generator.definition;
        let counted = statistics.get(&definition.path).cloned().unwrap_or_default();
        let end = next_ends.get(&generator.version).copied();
        let seconds = u64::try_from(now.seconds).unwrap_or_default();
        Row {
            path: definition.path.to_string(),
            kind: definition.kind.name(),
            from: definition.kind.to_string(),
            secret: if definition.is_secret { "yes" } else { "" },
            version: match definition.is_secret {
                true => String::new(),
                false => generator.version.hex()[..12].to_owned(),
            },
            made: counted.made,
            failures: counted.failures,
            next_end: end.map_or_else(String::new, |end| {
                format!("in {}", rough_duration(end.saturating_sub(seconds)))
            }),
            last_failure: counted.last_failure.map_or_else(String::new, |(time, why)| {
                format!("{why} ({}, {})", ago(now, time), utc(time))
            }),
        }
    };
    let stopped = published.kept.orders.values().rev().filter_map(|order| {
        let why = order.stopped.as_ref()?;
        Some(format!("revision {} has stopped: {why}", order.revision))
    });
    let page = StatusPage {
        error: published.error.clone(),
        file: published.set.file.display().to_string(),
        revision: published.kept.revision,
        stopped: stopped.collect(),
        kept: size(service.content_bytes() as u64),
        signer: published.signer.as_deref().unwrap_or_default().to_owned(),
        rows: published.set.by_path.values().map(row).collect(),
    };
    page.render().expect("writing to a String cannot fail")
}
