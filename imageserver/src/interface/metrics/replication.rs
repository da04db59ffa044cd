//! How a server stands with its master and its replicas, asked for when metrics are.

use std::sync::Arc;

use api::image_server::replication::{GetReplicationReply, Link, MasterState, Trouble};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;

use crate::clock::wall;
use crate::replication::Replication;

/// See the module's text.
pub struct Stand(pub Arc<Replication>);

impl std::fmt::Debug for Stand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Stand").field(self.0.id()).finish()
    }
}

type Gauge = (&'static str, &'static str, u64);

impl Collector for Stand {
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
    let troubled = |wanted: &[Trouble]| {
        master.troubles.iter().filter(|image| wanted.contains(&image.trouble)).count() as u64
    };
    let conflicts = troubled(&[Trouble::Conflict, Trouble::EndedHere, Trouble::EndedOther]);
    gauges.extend([
        ("replication_connected", "1 if the master answers", u64::from(*link == Link::Connected)),
        ("replication_loop", "1 if the server is its own master", u64::from(*link == Link::Loop)),
        ("replication_level", "1 if all is here that is followed", u64::from(*is_level)),
        ("replication_level_timestamp_seconds", "When that was last so", seconds),
        ("replication_images_behind", "Images still to be fetched or changed", *images_behind),
        ("replication_bytes_left", "Bytes to be fetched for them, at most", *bytes_left),
        ("replication_conflicts", "Images that are not the master's of that name", conflicts),
        ("replication_failing", "Images that are tried again", troubled(&[Trouble::Failing])),
        (
            "replication_held",
            "Images that have ended on the master and are in use here",
            troubled(&[Trouble::Held]),
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
