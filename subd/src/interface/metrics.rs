//! The metrics of a sub.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::interface::Service;

/// Reads the values when Prometheus asks for them.
pub(super) struct SubMetrics(pub(super) Arc<Service>);

impl fmt::Debug for SubMetrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SubMetrics")
    }
}

impl Collector for SubMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let service = &self.0;
        let measured = service.measured();
        let counters = measured.counters;
        let (generation, failures, paused) = service.report_state.read(|state| {
            let paused = u64::from(state.persisted.paused.is_some());
            (state.version.generation, state.persisted.trigger_failures.len(), paused)
        });
        #[rustfmt::skip]
        let totals = [
            ("subd_metadata_passes", "Metadata passes completed", counters.metadata_passes),
            ("subd_content_passes", "Content passes completed", counters.content_passes),
            ("subd_media_passes", "Media passes completed", counters.media_passes),
            ("subd_hashed_bytes", "Bytes hashed", counters.hashed_bytes),
            ("subd_fetched_bytes", "Bytes fetched", counters.fetched_bytes),
        ];
        for (name, help, value) in totals {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let load = measured.load;
        let inodes = measured.space.free_inodes;
        let failures = u64::try_from(failures).unwrap_or(u64::MAX);
        let cached = u64::try_from(service.report_state.cached_count()).unwrap_or(u64::MAX);
        #[rustfmt::skip]
        let present = [
            ("subd_cpu_limit", "Processor time of the passes at most, in microseconds per second", load.cpu.limit),
            ("subd_cpu_used", "Processor time of the passes, in microseconds per second", load.cpu.used),
            ("subd_scan_limit", "Reads of scanning at most, in bytes a second", load.scan.limit),
            ("subd_scan_used", "Reads of scanning, in bytes a second", load.scan.used),
            ("subd_write_limit", "Writes of fetching at most, in bytes a second", load.write.limit),
            ("subd_write_used", "Writes of fetching, in bytes a second", load.write.used),
            ("subd_network_limit", "Fetching at most, in bytes a second", load.network.limit),
            ("subd_network_used", "Fetching, in bytes a second", load.network.used),
            ("subd_generation", "Generation of tree and cache", generation),
            ("subd_cached_objects", "Objects in the cache", cached),
            ("subd_trigger_failures", "Triggers that failed since the last good update", failures),
            ("subd_paused", "1 while an operator has paused updates", paused),
            ("subd_free_bytes", "Free space of the root", measured.space.free_bytes),
            ("subd_free_inodes", "Free inodes of the root", inodes),
        ];
        for (name, help, value) in present {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}
