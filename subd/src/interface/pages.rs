//! The page of a sub, and its metrics.

use std::fmt;
use std::sync::Arc;

use api::subd::{
    Activity, Complaint, Health, LastFetch, LastUpdate, Outcome, Paused, PollReply, Share,
};
use model::tree::Time;
use model::when::moment;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use rpc::page_frame::{Cell, Frame, Mark, pairs, table};
use rpc::server::{Page, Router};

use crate::interface::server::Service;

/// Adds the page and the metrics of `service`.
#[must_use]
pub fn add_pages(router: Router, service: &Arc<Service>, frame: Frame) -> Router {
    let (shown, measured) = (Arc::clone(service), Arc::clone(service));
    router
        .page("/", move |_| {
            let html = page(&shown, &frame);
            async move { Ok(Page::Html(html)) }
        })
        .metrics(|registry| registry.register_collector(Box::new(SubMetrics(measured))))
}

fn page(service: &Service, frame: &Frame) -> String {
    let status = service.report_state.reply(None, service.measured());
    let hostname = &status.identity.hostname;
    let mut body = pairs(facts(&status, service));
    if !status.trigger_failures.is_empty() {
        body.push_str("<h2>Trigger failures</h2>");
        let rows: Vec<Vec<Cell>> = status
            .trigger_failures
            .iter()
            .map(|failure| {
                let text = format!("{} {}", failure.service, failure.verb);
                // What the command printed before may be for fewer eyes; subtool poll shows it.
                let end = failure.output.trim_end().lines().last().unwrap_or_default();
                vec![Cell::Mark { mark: Mark::Bad, text }, Cell::Text(end.to_owned())]
            })
            .collect();
        body.push_str(&table(&["Service", "Output"], &rows));
    }
    if let Some(last) = status.last_fetch.as_ref().filter(|last| !last.complaints.is_empty()) {
        body.push_str("<h2>Sources</h2>");
        let row = |complaint: &Complaint| {
            let (mark, what) =
                if complaint.lies { (Mark::Bad, "lies") } else { (Mark::Quiet, "fails") };
            let text = format!("{} {what}", complaint.source);
            vec![Cell::Mark { mark, text }, Cell::Text(complaint.text.clone())]
        };
        let rows: Vec<Vec<Cell>> = last.complaints.iter().map(row).collect();
        body.push_str(&table(&["Source", "What was wrong in the last fetch"], &rows));
    }
    if let Some(scan) = status.scan.as_ref().filter(|scan| !scan.unreadable.is_empty()) {
        body.push_str("<h2>Unreadable paths</h2>");
        let row = |(path, why): &(model::path::TreePath, String)| {
            vec![Cell::Name(path.to_string()), Cell::Text(why.clone())]
        };
        let rows: Vec<Vec<Cell>> = scan.unreadable.iter().map(row).collect();
        body.push_str(&table(&["Path", "Why"], &rows));
    }
    frame.render(&format!("subd on {hostname}"), &body)
}

fn facts(status: &PollReply, service: &Service) -> Vec<(&'static str, String)> {
    let version = status.version;
    let counters = &status.counters;
    let none = || "none".to_owned();
    let mut facts = vec![
        ("Activity", activity(&status.activity)),
        ("Updates", status.paused.as_ref().map_or_else(|| "allowed".to_owned(), paused)),
        ("Last image", status.last_image.as_ref().map_or_else(none, ToString::to_string)),
        ("Last update", status.last_update.as_ref().map_or_else(none, update)),
        ("Last fetch", status.last_fetch.as_ref().map_or_else(none, fetch)),
        ("Root", service.root.path().display().to_string()),
        ("Instance", format!("{:016x}", version.instance)),
        ("Generation", version.generation.to_string()),
        ("Status version", version.status.to_string()),
        ("Scope", status.scope.0.to_string()),
    ];
    if let Some(trust) = &service.updater.trust {
        facts.push(("Images", trust.in_words()));
    }
    match &status.scan {
        None => facts.push(("Tree", "the first scan is not complete".to_owned())),
        Some(scan) => facts.extend([
            ("Tree", scan.root.to_string()),
            ("Entries", scan.totals.entries.to_string()),
            ("Bytes", scan.totals.bytes.to_string()),
            ("Directories with kept content", scan.kept_directories.len().to_string()),
            ("Files linked from outside", scan.externally_linked.len().to_string()),
            ("Unreadable paths", scan.unreadable.len().to_string()),
        ]),
    }
    facts.extend([
        ("Cached objects", service.report_state.cached_count().to_string()),
        ("Metadata passes", passes(counters.metadata_passes, counters.metadata_pass_ms)),
        ("Content passes", passes(counters.content_passes, counters.content_pass_ms)),
        ("Media passes", media(counters.media_passes, counters.media_pass_ms, service)),
        ("Processor time of the passes", share(status.load.cpu, "us")),
        ("Read from the device by scanning", share(status.load.scan, "bytes")),
        ("Written by fetching", share(status.load.write, "bytes")),
        ("Fetched over the network", share(status.load.network, "bytes")),
        ("Bytes hashed", counters.hashed_bytes.to_string()),
        ("Bytes fetched", counters.fetched_bytes.to_string()),
        ("Free space", format!("{} bytes", status.space.free_bytes)),
        ("Free inodes", status.space.free_inodes.to_string()),
        ("Machine id", status.identity.machine_id.clone()),
        ("Boot id", status.identity.boot_id.clone()),
        ("Version", status.identity.subd_version.clone()),
    ]);
    facts
}

fn passes(count: u64, last_ms: u64) -> String {
    format!("{count}, the last one in {last_ms} ms")
}

fn media(count: u64, last_ms: u64, service: &Service) -> String {
    let text = passes(count, last_ms);
    match service.scanner.media_skipped() {
        0 => text,
        files => format!("{text}, in which {files} files could not be read around the page cache"),
    }
}

fn share(share: Share, unit: &str) -> String {
    let Share { limit, used } = share;
    match limit {
        0 => format!("{used} {unit} a second in the last minute, without a limit"),
        _ => format!("{used} {unit} a second in the last minute, of {limit} at most"),
    }
}

fn activity(activity: &Activity) -> String {
    match activity {
        Activity::Idle => "scanning".to_owned(),
        Activity::Fetching { fetch_id, objects, bytes } => {
            format!("fetch {fetch_id}: {objects} objects, {bytes} bytes so far")
        }
        Activity::Preparing { update_id } => format!("staging update {update_id}"),
        Activity::Prepared { update_id } => format!("update {update_id} waits for its Commit"),
        Activity::Updating { update_id } => format!("carrying out update {update_id}"),
    }
}

fn paused(paused: &Paused) -> String {
    format!("paused until {}: {}", moment(paused.until), paused.reason)
}

fn update(last: &LastUpdate) -> String {
    let outcome = match &last.outcome {
        Outcome::Done => "done".to_owned(),
        Outcome::NotPrepared(why) => format!("not prepared: {why}"),
        Outcome::RolledBack(why) => format!("rolled back: {why}"),
        Outcome::Stuck(why) => format!("stuck: {why}"),
        Outcome::Undone(why) => format!("put back, as the health check failed: {why}"),
    };
    let verified = match last.verified_generation {
        Some(generation) => format!("verified in generation {generation}"),
        None => "not verified".to_owned(),
    };
    let health = match &last.health {
        Some(Health::Passed) => ", healthy",
        Some(Health::Failed(_)) => ", not healthy",
        None => "",
    };
    let boot = if last.awaits_boot { ", waits for its reboot" } else { "" };
    format!(
        "{} to {}: {outcome}{health}{boot}; {} operations, window {} us, {verified}, ended {}",
        last.update_id,
        last.image,
        last.operations,
        last.window_ns / 1_000,
        time(last.ended),
    )
}

fn fetch(last: &LastFetch) -> String {
    let LastFetch { fetch_id, objects, bytes, took_ms, reused, .. } = last;
    let text = format!(
        "{fetch_id}: {objects} objects, {bytes} bytes in {took_ms} ms; {reused} objects were here"
    );
    match &last.error {
        None => text,
        Some(error) => format!("{text}; failed: {error:?}"),
    }
}

fn time(time: Time) -> String {
    format!("{} s since 1970", time.seconds)
}

/// Reads what Prometheus asks for when it asks.
struct SubMetrics(Arc<Service>);

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
            ("subd_cpu_limit", "Processor time of the passes at most, in us a second", load.cpu.limit),
            ("subd_cpu_used", "Processor time of the passes, in us a second", load.cpu.used),
            ("subd_scan_limit", "Reads of scanning at most, in bytes a second", load.scan.limit),
            ("subd_scan_used", "Reads of scanning, in bytes a second", load.scan.used),
            ("subd_write_limit", "Writes of fetching at most, in bytes a second", load.write.limit),
            ("subd_write_used", "Writes of fetching, in bytes a second", load.write.used),
            ("subd_network_limit", "Fetching at most, in bytes a second", load.network.limit),
            ("subd_network_used", "Fetching, in bytes a second", load.network.used),
            ("subd_generation", "Generation of tree and cache", generation),
            ("subd_cached_objects", "Objects in the cache", cached),
            ("subd_trigger_failures", "Triggers that failed since the last good update", failures),
            ("subd_paused", "1 while updates are paused by hand", paused),
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
