//! The metrics of a server, in the text format of OpenMetrics.

use std::time::Instant;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::connection_counts::Refusal;
use crate::tls::Security;
use api::fault::FaultCode;

/// The content type of the metrics.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the content type of the metrics for a caller that accepts these types. A browser would
/// save the proper one as a file.
pub(super) fn content_type(accepted: Option<&str>) -> &'static str {
    let is_browser = accepted.is_some_and(|accepted| accepted.contains("text/html"));
    if is_browser { "text/plain; charset=utf-8" } else { CONTENT_TYPE }
}

/// Upper bounds of the histogram of durations, in seconds. Long polls take a minute.
const SECONDS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 90.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabels {
    method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    why: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabels {
    method: &'static str,
    code: &'static str,
}

/// The metrics of one server.
pub(super) struct Metrics {
    registry: Registry,
    calls: Family<MethodLabels, Counter>,
    faults: Family<FaultLabels, Counter>,
    seconds: Family<MethodLabels, Histogram, fn() -> Histogram>,
    /// Calls that run now.
    running: Gauge,
    /// Connections that are open.
    pub(super) connections: Gauge,
    /// Connections that were accepted.
    pub(super) accepted: Counter,
    refused: Family<RefusalLabels, Counter>,
    /// Connections that were closed because of inactivity.
    pub(super) cut: Counter,
}

impl Metrics {
    pub(super) fn new(daemon: &'static str, security: &Security) -> Self {
        let mut registry = Registry::with_prefix("dominator");
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let metrics = Self {
            calls: Family::default(),
            faults: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            running: Gauge::default(),
            connections: Gauge::default(),
            accepted: Counter::default(),
            refused: Family::default(),
            cut: Counter::default(),
            registry: Registry::default(),
        };
        let build = Info::new(vec![("daemon", daemon), ("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The program that answers", build);
        registry.register("rpc_calls", "Calls, by method", metrics.calls.clone());
        registry.register(
            "rpc_faults",
            "Calls that were refused or failed",
            metrics.faults.clone(),
        );
        registry.register(
            "rpc_seconds",
            "How long calls took, with all of their streams",
            metrics.seconds.clone(),
        );
        registry.register("rpc_running", "Calls that run now", metrics.running.clone());
        registry.register("connections", "Connections that are open", metrics.connections.clone());
        registry.register(
            "connections_accepted",
            "Connections since the start",
            metrics.accepted.clone(),
        );
        for refusal in Refusal::ALL {
            // Monitoring sees a counter grow only if it existed before.
            drop(metrics.refused.get_or_create(&RefusalLabels { why: refusal.label_and_text().0 }));
        }
        registry.register(
            "connections_refused",
            "Connections that were not let in, by the reason",
            metrics.refused.clone(),
        );
        registry.register(
            "connections_cut",
            "Connections that were ended because their callers asked for nothing or read nothing",
            metrics.cut.clone(),
        );
        registry.register_collector(Box::new(CertificateEnd(security.clone())));
        Self { registry, ..metrics }
    }

    pub(super) fn registry(&mut self) -> &mut Registry {
        &mut self.registry
    }

    /// Counts a refused connection.
    pub(super) fn refused(&self, refusal: Refusal) {
        self.refused.get_or_create(&RefusalLabels { why: refusal.label_and_text().0 }).inc();
    }

    /// Counts a call from now until the result is dropped. `method` must be a known method, not a
    /// text from the caller.
    pub(super) fn started(&self, method: &'static str) -> RunningCall {
        RunningCall {
            begun: Instant::now(),
            calls: self.calls.get_or_create(&MethodLabels { method }).clone(),
            seconds: self.seconds.get_or_create(&MethodLabels { method }).clone(),
            _running: Running::of(&self.running),
        }
    }

    /// Counts the failure of a call.
    pub(super) fn failed(&self, method: &'static str, code: FaultCode) {
        self.faults.get_or_create(&FaultLabels { method, code: code.name() }).inc();
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a String cannot fail");
        text
    }
}

/// The expiry of the program's certificate, read for each request of the metrics.
#[derive(Debug)]
struct CertificateEnd(Security);

impl Collector for CertificateEnd {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        // Zero means that there is no certificate.
        let gauge = ConstGauge::new(self.0.expires_at().unwrap_or_default());
        let help = "When the certificate of this program ends, in Unix seconds; 0 for none";
        let of_gauge = encoder.encode_descriptor(
            "certificate_end_timestamp_seconds",
            help,
            None,
            MetricType::Gauge,
        )?;
        gauge.encode(of_gauge)
    }
}

/// A call that is not answered yet, with all of its reply. It is counted, with the time that it
/// took, when this is dropped.
pub(super) struct RunningCall {
    begun: Instant,
    calls: Counter,
    seconds: Histogram,
    _running: Running,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        self.calls.inc();
        self.seconds.observe(self.begun.elapsed().as_secs_f64());
    }
}

/// Counts a call or a connection until it is dropped.
pub(super) struct Running(Gauge);

impl Running {
    pub(super) fn of(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.dec();
    }
}
