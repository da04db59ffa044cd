//! What the image server counts, beside what every server does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::scrub::Scrub;
use crate::store::Store;

/// Counters since the start.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Objects that were stored.
    pub objects_added: Counter,
    /// Their length together, in bytes.
    pub objects_added_bytes: Counter,
    /// Objects that were sent.
    pub objects_sent: Counter,
    /// Their length together, in bytes.
    pub objects_sent_bytes: Counter,
    /// Objects that were asked for and not there.
    pub objects_absent: Counter,
    /// Objects that were lost and came from another server.
    pub objects_repaired: Counter,
    /// Images that were added.
    pub images_added: Counter,
    /// Images that were deleted.
    pub images_deleted: Counter,
}

impl Metrics {
    /// Adds the counters to `registry`, and what `store` holds.
    pub fn register(&self, registry: &mut Registry, store: Arc<Store>, scrub: Arc<Scrub>) {
        let counters = [
            ("objects_added", "Objects that were stored", &self.objects_added),
            ("objects_added_bytes", "Length of stored objects", &self.objects_added_bytes),
            ("objects_sent", "Objects that were sent", &self.objects_sent),
            ("objects_sent_bytes", "Length of sent objects", &self.objects_sent_bytes),
            ("objects_absent", "Objects asked for and not there", &self.objects_absent),
            ("objects_repaired", "Lost objects that another server gave", &self.objects_repaired),
            ("images_added", "Images that were added", &self.images_added),
            ("images_deleted", "Images that were deleted", &self.images_deleted),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        registry.register_collector(Box::new(Holdings(store)));
        registry.register_collector(Box::new(Watch(scrub)));
    }
}

/// What the store holds, asked for when metrics are.
struct Holdings(Arc<Store>);

impl std::fmt::Debug for Holdings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Holdings").field(&self.0.data()).finish()
    }
}

impl Collector for Holdings {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let objects = &self.0.objects;
        let held = objects.holdings();
        let mut gauges = vec![
            ("images", "Images", self.0.images.count() as u64),
            ("images_damaged", "Images with damaged records", self.0.images.damaged().len() as u64),
            ("objects", "Objects, those of former runs once they are counted", held.objects),
            ("objects_bytes", "Length of these objects", held.bytes),
        ];
        if let Ok(free_bytes) = objects.free_bytes() {
            gauges.push(("store_free_bytes", "Space that is left for objects", free_bytes));
        }
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(whole(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let corrupt = ConstCounter::new(objects.corrupt());
        let help = "Corrupt objects that were found and put aside";
        corrupt.encode(encoder.encode_descriptor(
            "objects_corrupt",
            help,
            None,
            corrupt.metric_type(),
        )?)
    }
}

/// How far reading all objects is, and what it has found, asked for when metrics are.
#[derive(Debug)]
struct Watch(Arc<Scrub>);

impl Collector for Watch {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let losses = self.0.losses();
        let gauges = [
            ("images_incomplete", "Images that are not whole", losses.images.len() as u64),
            ("objects_lost", "Objects that images need and are lost", losses.objects.len() as u64),
            ("scrub_directories", "Of 512, read in this pass", load(&self.0.directories)),
            ("scrub_completed_timestamp_seconds", "Last complete pass", load(&self.0.completed)),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(whole(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let bytes = ConstCounter::new(load(&self.0.bytes));
        let kind = bytes.metric_type();
        bytes.encode(encoder.encode_descriptor("scrub_bytes", "Read again", None, kind)?)
    }
}
