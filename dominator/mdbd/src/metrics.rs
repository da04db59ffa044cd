//! What mdbd counts.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::core::merged_sources::SourceReport;
use crate::mdb_writer::Shared;

/// Makes what `shared` tells known to `registry`.
pub fn register(registry: &mut Registry, shared: &Arc<Shared>) {
    registry.register(
        "mdbd_writes",
        "How often the machine database was written",
        shared.writes.clone(),
    );
    registry.register_collector(Box::new(Gauges(Arc::clone(shared))));
}

/// What is looked up when someone asks.
#[derive(Debug)]
struct Gauges(Arc<Shared>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let status = self.0.status();
        let machines = self.0.published().borrow().as_ref().map_or(0, |force| force.machines.len());
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
        let of_sources: [(&str, &str, Value); 3] = [
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
        for (name, help, value) in of_sources {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for source in &status.sources {
                let labels = [("source", source.name.as_str())];
                ConstGauge::new(value(source)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
