//! What the image server counts, beside what every server does.

pub mod replication;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::clock::wall;
use crate::core::clock_trust::Trust;
use crate::interface::Life;
use crate::interface::metrics::replication::Stand;
use crate::scrub::Scrub;
use crate::store::Store;
use crate::store::counters::Counters;

/// Within how many seconds an image expires soon.
pub const EXPIRES_SOON: i64 = 7 * 24 * 3_600;

/// Adds `counters` to `registry`, and gauges of what `store` holds.
pub fn register(registry: &mut Registry, counters: &Counters, store: &Arc<Store>, life: &Life) {
    let named = [
        ("objects_added", "Objects that were stored", &counters.objects_added),
        ("objects_added_bytes", "Length of stored objects", &counters.objects_added_bytes),
        ("objects_sent", "Objects that were sent", &counters.objects_sent),
        ("objects_sent_bytes", "Length of sent objects", &counters.objects_sent_bytes),
        ("objects_absent", "Objects asked for and not there", &counters.objects_absent),
        ("objects_repaired", "Lost objects that another server gave", &counters.objects_repaired),
        ("images_replicated", "Images that came from the master", &counters.images_replicated),
        (
            "images_replicated_ends",
            "Images that ended here because they had on the master",
            &counters.images_replicated_ends,
        ),
        ("images_added", "Images that were added", &counters.images_added),
        ("images_deleted", "Images that were deleted", &counters.images_deleted),
    ];
    for (name, help, counter) in named {
        registry.register(name, help, counter.clone());
    }
    let (store, life) = (Arc::clone(store), life.clone());
    registry.register_collector(Box::new(Watch(Arc::clone(&life.scrub))));
    registry.register_collector(Box::new(Stand(Arc::clone(&life.replication))));
    registry.register_collector(Box::new(Holdings { store, life }));
}
/// What the store holds, asked for when metrics are.
struct Holdings {
    store: Arc<Store>,
    life: Life,
}

impl std::fmt::Debug for Holdings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Holdings").field(&self.store.data()).finish()
    }
}

impl Collector for Holdings {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let objects = &self.store.objects;
        let held = objects.holdings();
        let mut gauges = vec![
            ("images", "Images", self.store.images.count() as u64),
            (
                "images_damaged",
                "Images with damaged records",
                self.store.images.damaged().len() as u64,
            ),
            (
                "directories_damaged",
                "1 if nobody knows who owns which directories",
                self.store.directories.damage().is_some().into(),
            ),
            ("objects", "Objects, those of former runs once they are counted", held.objects),
            ("objects_bytes", "Length of their files", held.bytes),
        ];
        if let Ok(Some(space)) = objects.space() {
            gauges.push(("store_free_bytes", "Space that is left for objects", space.free));
        }
        gauges.extend(self.of_collections());
        gauges.extend(self.of_expiry());
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(whole(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let removed = self.life.collector.removed();
        let counters = [
            ("objects_corrupt", "Corrupt objects that were found and put aside", objects.corrupt()),
            (
                "objects_collected",
                "Objects that were removed, as nothing needed them",
                removed.objects,
            ),
            ("objects_collected_bytes", "Space that they took", removed.bytes),
            ("images_expired", "Images that expired", self.life.expiry.expired()),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }
        Ok(())
    }
}

impl Holdings {
    /// What there is to know of images that go by themselves.
    fn of_expiry(&self) -> [(&'static str, &'static str, u64); 4] {
        let expiry = &self.life.expiry;
        let jumped = matches!(expiry.trust(), Trust::Jumped(_));
        let week = wall().seconds.saturating_add(EXPIRES_SOON);
        let expiring = self.store.images.expiring().into_iter();
        let soon = expiring.filter(|(_, at)| at.seconds <= week).count() as u64;
        let overdue = expiry.overdue().len() as u64;
        let held = self.store.holding.count() as u64;
        [
            ("clock_jumped", "1 if no image expires, because the clock jumped", jumped.into()),
            ("images_expiring", "Images that expire within a week", soon),
            ("images_overdue", "Images whose time has come, but which are in use", overdue),
            ("images_held", "Images that are in use", held),
        ]
    }

    /// What there is to know of leases and collections; nothing of what is not known yet.
    fn of_collections(&self) -> Vec<(&'static str, &'static str, u64)> {
        let leases = self.store.leasing.count() as u64;
        let held = self.store.leasing.everything_for();
        let mut gauges = vec![
            ("leases", "Objects that are held for callers", leases),
            ("collection_held_seconds", "For how long nothing is collected after a start", held),
        ];
        if let Some(unneeded) = self.life.collector.unneeded() {
            let help = "Objects that no image needed when the images were last walked";
            gauges.push(("objects_unneeded", help, unneeded.objects));
            gauges.push(("objects_unneeded_bytes", "Space that they take", unneeded.bytes));
        }
        if let Some(last) = self.life.collector.last() {
            let ended = u64::try_from(last.ended.seconds).unwrap_or(0);
            gauges.push(("collection_ended", "When the last collection ended, Unix time", ended));
            let failed = u64::from(last.outcome.is_err());
            gauges.push(("collection_failed", "1 if the last collection failed", failed));
        }
        gauges
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
