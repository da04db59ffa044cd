//! The metrics of an audit log.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::AuditLog;

/// Reports the state of a log each time the metrics are read; nothing without a log.
#[derive(Debug)]
pub struct AuditCollector(pub AuditLog);

impl Collector for AuditCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(status) = self.0.status() else { return Ok(()) };
        let (sequence, prefix) =
            status.head.map_or((0, 0), |head| (head.sequence, head.hash.prefix()));
        let gauge = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        let failing = u64::from(status.error.is_some());
        let (sequence, prefix, failing) = (gauge(sequence), gauge(prefix), gauge(failing));
        let missed = ConstCounter::new(status.missed);
        let metrics: [(&str, &str, &dyn EncodeMetric); 4] = [
            ("audit_sequence", "The number of the newest record", &sequence),
            ("audit_head_prefix", "The first 12 hex digits of its hash, as a number", &prefix),
            ("audit_failing", "1 if the last record could not be written", &failing),
            ("audit_missed", "Records that could not be written since the start", &missed),
        ];
        for (name, help, metric) in metrics {
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        Ok(())
    }
}
