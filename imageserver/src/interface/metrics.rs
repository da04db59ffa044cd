//! The metrics of the image server, besides those that every server has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::image_server::replication::{
    GetReplicationReply, LinkState, MasterState, ReplicationTrouble,
};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use system::clock::wall;
use system::trusted_clock::ClockTrust;

use crate::interface::BackgroundTasks;
use crate::replication::Replication;
use crate::scrub::Scrub;
use crate::store::{Counters, Store};

/// An image that expires within this time is shown as expiring, in seconds.
pub const EXPIRES_SOON: i64 = 7 * 24 * 3_600;

/// Registers `counters`, and gauges of the store and of the background tasks.
pub fn register(
    registry: &mut Registry,
    counters: &Counters,
    store: &Arc<Store>,
    background: &BackgroundTasks,
) {
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
    let (store, background) = (Arc::clone(store), background.clone());
    registry.register_collector(Box::new(ScrubMetrics(Arc::clone(&background.scrub))));
    registry.register_collector(Box::new(ReplicationMetrics(Arc::clone(&background.replication))));
    registry.register_collector(Box::new(StoreMetrics { store, background }));
}
/// Reports the state of the store.
struct StoreMetrics {
    store: Arc<Store>,
    background: BackgroundTasks,
}

impl std::fmt::Debug for StoreMetrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("StoreMetrics").field(&self.store.data()).finish()
    }
}

impl Collector for StoreMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let objects = &self.store.objects;
        let held = objects.object_counts();
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
            (
                "store_failing",
                "1 if the store cannot be written, and is only read",
                self.store.leasing.write_error().is_some().into(),
            ),
            ("objects", "Objects, those of former runs once they are counted", held.objects),
            ("objects_bytes", "Length of their files", held.bytes),
        ];
        if let Ok(Some(space)) = objects.space() {
            gauges.push(("store_free_bytes", "Space that is left for objects", space.free));
        }
        gauges.extend(self.collection_gauges());
        gauges.extend(self.expiry_gauges());
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(whole(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let removed = self.background.collector.removed();
        let counters = [
            ("objects_corrupt", "Corrupt objects that were found and put aside", objects.corrupt()),
            (
                "objects_collected",
                "Objects that were removed, as nothing needed them",
                removed.objects,
            ),
            ("objects_collected_bytes", "Space that they took", removed.bytes),
            ("images_expired", "Images that expired", self.background.expiry.expired()),
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

impl StoreMetrics {
    /// Returns the gauges of expiry.
    fn expiry_gauges(&self) -> [(&'static str, &'static str, u64); 4] {
        let expiry = &self.background.expiry;
        let jumped = matches!(expiry.trust(), ClockTrust::Jumped(_));
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

    /// Returns the gauges of leases and collections that are known.
    fn collection_gauges(&self) -> Vec<(&'static str, &'static str, u64)> {
        let leases = self.store.leasing.count() as u64;
        let held = self.store.leasing.everything_held_for();
        let mut gauges = vec![
            ("leases", "Objects that are held for callers", leases),
            ("collection_held_seconds", "For how long nothing is collected after a start", held),
        ];
        if let Some(unneeded) = self.background.collector.unneeded() {
            let help = "Objects that no image needed when the images were last walked";
            gauges.push(("objects_unneeded", help, unneeded.objects));
            gauges.push(("objects_unneeded_bytes", "Space that they take", unneeded.bytes));
        }
        if let Some(last) = self.background.collector.last() {
            let ended = u64::try_from(last.ended.seconds).unwrap_or(0);
            gauges.push(("collection_ended", "When the last collection ended, Unix time", ended));
            let failed = u64::from(last.outcome.is_err());
            gauges.push(("collection_failed", "1 if the last collection failed", failed));
        }
        gauges
    }
}

/// Reports the progress and the findings of the scrub.
#[derive(Debug)]
struct ScrubMetrics(Arc<Scrub>);

impl Collector for ScrubMetrics {
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

pub struct ReplicationMetrics(pub Arc<Replication>);

impl std::fmt::Debug for ReplicationMetrics {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ReplicationMetrics").field(self.0.id()).finish()
    }
}

type Gauge = (&'static str, &'static str, u64);

impl Collector for ReplicationMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in gauges(&self.0.report(wall())) {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

fn gauges(state: &GetReplicationReply) -> Vec<Gauge> {
    let connected = state.replicas.iter().filter(|replica| replica.is_connected).count() as u64;
    let mut gauges = vec![
        ("replicas", "Replicas that are known", state.replicas.len() as u64),
        ("replicas_connected", "Replicas that follow just now", connected),
    ];
    let Some(master) = &state.master else { return gauges };
    let MasterState { link, is_level, level_at, images_behind, bytes_left, .. } = master;
    let seconds = level_at.map_or(0, |at| u64::try_from(at.seconds).unwrap_or(0));
    let troubled = |wanted: &[ReplicationTrouble]| {
        master.troubles.iter().filter(|image| wanted.contains(&image.trouble)).count() as u64
    };
    let conflicts = troubled(&[
        ReplicationTrouble::Conflict,
        ReplicationTrouble::EndedHere,
        ReplicationTrouble::EndedOther,
    ]);
    gauges.extend([
        (
            "replication_connected",
            "1 if the master answers",
            u64::from(*link == LinkState::Connected),
        ),
        (
            "replication_loop",
            "1 if the server is its own master",
            u64::from(*link == LinkState::Loop),
        ),
        ("replication_level", "1 if all is here that is followed", u64::from(*is_level)),
        ("replication_level_timestamp_seconds", "When that was last so", seconds),
        ("replication_images_behind", "Images still to be fetched or changed", *images_behind),
        ("replication_bytes_left", "Bytes to be fetched for them, at most", *bytes_left),
        ("replication_conflicts", "Images that are not the master's of that name", conflicts),
        (
            "replication_failing",
            "Images that are tried again",
            troubled(&[ReplicationTrouble::Failing]),
        ),
        (
            "replication_held",
            "Images that have ended on the master and are in use here",
            troubled(&[ReplicationTrouble::Held]),
        ),
        (
            "replication_directories_troubled",
            "1 if the directories are not those of the master",
            master.directories.is_some().into(),
        ),
        ("replication_only_here", "Images that the master has not got", master.only_here_total),
    ]);
    gauges
}
