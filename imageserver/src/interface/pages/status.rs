//! The status page: alarms, the state of the store and of replication, and all images.

use api::fault::Fault;
use api::image_server::ImageSummary;
use api::image_server::collection::ObjectTotals;
use api::image_server::replication::{
    GetReplicationReply, LinkState, MasterState, ReplicaState, ReplicationTrouble, TroubledImage,
};
use askama::Template;
use model::display::{ago, counted, error_chain, rough_duration, size, utc};
use model::tree::Time;
use rpc::page_frame::path_escape;
use rpc::server::{Page, PageRequest};
use system::clock::wall;
use system::trusted_clock::ClockTrust;

use super::{PageState, name_parameter};
use crate::collection::{Collector, LastRun};
use crate::expiry::Expiry;
use crate::interface::metrics::EXPIRES_SOON;
use crate::scrub::Losses;
use crate::store::Store;
use crate::store::private_images::Reader;

/// The most images on one page.
const PAGE_IMAGES_MAX: usize = 1_000;

/// The most incomplete images that are named.
const LOST_IMAGES_MAX: usize = 100;

/// The most images in trouble that are named.
const TROUBLES_MAX: usize = 100;

#[derive(Template)]
#[template(path = "status.html")]
struct StatusPage {
    losses: Option<LossesSection>,
    alarms: Vec<String>,
    replication_alarms: Vec<String>,
    troubles: Vec<TroubleRow>,
    image_count: usize,
    objects: u64,
    object_bytes: String,
    still_counting: &'static str,
    free_space: String,
    corrupt: u64,
    leased: usize,
    unneeded: String,
    last_collection: String,
    expiring: usize,
    held: usize,
    data_directory: String,
    /// Names, and what is wrong with their records.
    damaged: Vec<(String, String)>,
    master: Option<MasterSection>,
    replicas: Vec<ReplicaRow>,
    images: Vec<ImageRow>,
    /// The last image of this page if there are more, escaped.
    next_after: Option<String>,
}

/// The images that cannot be served whole.
struct LossesSection {
    objects: String,
    images: String,
    rows: Vec<LossRow>,
}

struct LossRow {
    image: String,
    objects: usize,
    first: String,
}

struct TroubleRow {
    image: String,
    class: &'static str,
    trouble: &'static str,
    text: String,
}

struct MasterSection {
    address: String,
    state: String,
    level: String,
    behind: String,
    follows: String,
    only_here: u64,
    not_followed: u64,
    last_error: String,
}

struct ReplicaRow {
    address: String,
    store: String,
    seen: String,
    class: &'static str,
    state: String,
}

struct ImageRow {
    name: String,
    escaped_name: String,
    entries: u64,
    size: String,
    filter_lines: Option<u32>,
    triggers: u32,
    computed: u64,
    created: String,
    expires: String,
}

pub(super) fn page(state: &PageState, request: &PageRequest) -> Result<Page, Fault> {
    let PageState { store, background, .. } = state;
    let now = wall();
    let counts = store.objects.object_counts();
    let reader = store.reader(&request.caller.identity);
    let replication = background.replication.report_for(&reader, now);
    let after = name_parameter(request, "after")?;
    let listed = store.images.list_for(&reader, after.as_ref(), PAGE_IMAGES_MAX);
    let next = listed.images.last().filter(|_| listed.more);
    let master = replication.master.as_ref();
    let page = StatusPage {
        losses: losses_section(&reader, &background.scrub.losses()),
        alarms: alarms(&reader, store, &background.expiry),
        replication_alarms: master.map(replication_alarms).unwrap_or_default(),
        troubles: trouble_rows(&replication),
        image_count: store.images.count(),
        objects: counts.objects,
        object_bytes: size(counts.bytes),
        still_counting: match counts.complete {
            true => "",
            false => " (still counting objects of former runs)",
        },
        free_space: match store.objects.space() {
            Ok(Some(space)) => size(space.free),
            Ok(None) => "unlimited".to_owned(),
            Err(error) => error_chain(&error),
        },
        corrupt: store.objects.corrupt(),
        leased: store.leasing.count(),
        unneeded: unneeded(&background.collector),
        last_collection: last_collection(store, &background.collector),
        expiring: expiring(store, now),
        held: store.holding.count(),
        data_directory: store.data().display().to_string(),
        damaged: store
            .images
            .damaged()
            .into_iter()
            .filter(|(name, _)| reader.may_read_image(name) && reader.may_read_directory(name))
            .map(|(name, why)| (name.to_string(), why))
            .collect(),
        master: master.map(|master| master_section(master, now)),
        replicas: replication.replicas.iter().map(|replica| replica_row(replica, now)).collect(),
        images: listed.images.iter().map(image_row).collect(),
        next_after: next.map(|last| path_escape(last.name.as_str())),
    };
    Ok(state.html("Image server", &page))
}

fn alarms(reader: &Reader, store: &Store, expiry: &Expiry) -> Vec<String> {
    let mut alarms: Vec<String> = store.trouble().into_iter().collect();
    if let Some(why) = store.directories.damage() {
        alarms.push(format!(
            "The owners of directories are unknown ({why}): only callers with the power can change \
             images. Restore the file `directories` from a backup, or move it away, and restart \
             the server."
        ));
    }
    if let ClockTrust::Jumped(seconds) = expiry.trust() {
        alarms.push(format!(
            "The clock jumped by {seconds} s. No image expires until it is back, or you say that \
             it is right: imagetool accept-clock"
        ));
    }
    if store.private.as_ref().is_some_and(|private| private.is_incomplete()) {
        alarms.push(
            "The trees of some images cannot be read, so their objects are given only to callers \
             with the power ImageServer.GetPrivateDirectories. The log names the images."
                .to_owned(),
        );
    }
    for name in expiry.overdue().into_iter().filter(|name| reader.may_read_image(name)) {
        alarms.push(format!(
            "{name} has expired, but it is in use and stays. Extend its expiry, or assign another \
             image to its machines."
        ));
    }
    alarms
}

fn expiring(store: &Store, now: Time) -> usize {
    let week = now.seconds.saturating_add(EXPIRES_SOON);
    store.images.expiring().into_iter().filter(|(_, at)| at.seconds <= week).count()
}

fn unneeded(collector: &Collector) -> String {
    collector.unneeded().map_or_else(
        || "unknown: no collection since the start".to_owned(),
        |ObjectTotals { objects, bytes }| format!("{objects}, which take {}", size(bytes)),
    )
}

fn last_collection(store: &Store, collector: &Collector) -> String {
    let last = match collector.last() {
        None => "none since the start".to_owned(),
        Some(LastRun { ended, outcome: Err(why), .. }) => format!("{}: failed: {why}", utc(ended)),
        Some(LastRun { ended, took, outcome: Ok(reply) }) => format!(
            "{}: removed {} objects, {}, in {} s",
            utc(ended),
            reply.removed.objects,
            size(reply.removed.bytes),
            took.as_secs(),
        ),
    };
    match store.leasing.everything_held_for() {
        0 => last,
        seconds => format!("{last}; nothing is removed for another {}", rough_duration(seconds)),
    }
}

fn losses_section(reader: &Reader, losses: &Losses) -> Option<LossesSection> {
    if losses.images.is_empty() {
        return None;
    }
    let shown = losses.images.iter().filter(|(name, _)| reader.may_read_image(name));
    let rows = shown.take(LOST_IMAGES_MAX).map(|(name, missing)| {
        let first = missing.first().map(|id| {
            let damage = losses.objects.get(id).map_or("missing", |damage| damage.name());
            format!("{id} is {damage}")
        });
        LossRow {
            image: name.to_string(),
            objects: missing.len(),
            first: first.unwrap_or_default(),
        }
    });
    Some(LossesSection {
        objects: counted(losses.objects.len() as u64, "object"),
        images: counted(losses.images.len() as u64, "image"),
        rows: rows.collect(),
    })
}

fn replication_alarms(master: &MasterState) -> Vec<String> {
    let mut alarms = Vec::new();
    if matches!(master.link, LinkState::Broken | LinkState::Loop) {
        let why = master.last_error.as_ref().map_or("", |(_, why)| why);
        alarms.push(format!("The master {} is not followed: {why}", master.address));
    }
    alarms.extend(master.directories.as_ref().map(|troubled| troubled.text.clone()));
    alarms
}

fn trouble_rows(replication: &GetReplicationReply) -> Vec<TroubleRow> {
    let row = |image: &TroubledImage| TroubleRow {
        image: image.name.to_string(),
        class: if image.trouble == ReplicationTrouble::Failing { "busy" } else { "bad" },
        trouble: image.trouble.name(),
        text: image.text.clone(),
    };
    let troubles = replication.master.iter().flat_map(|master| &master.troubles);
    troubles.take(TROUBLES_MAX).map(row).collect()
}

fn master_section(master: &MasterState, now: Time) -> MasterSection {
    let mut follows = match master.include.as_slice() {
        [] => "all images".to_owned(),
        include => include.join(", "),
    };
    if !master.exclude.is_empty() {
        follows = format!("{follows} except {}", master.exclude.join(", "));
    }
    if master.is_archive {
        follows.push_str("; keeps what has ended there");
    }
    MasterSection {
        address: master.address.clone(),
        state: format!("{}, {}", master.link.name(), ago(now, master.since)),
        level: match (master.is_level, master.level_at) {
            (true, _) => "yes".to_owned(),
            (false, None) => "not yet".to_owned(),
            (false, Some(at)) => format!("no; it was {}", ago(now, at)),
        },
        behind: match master.images_behind {
            0 => "nothing".to_owned(),
            images => {
                let left = size(master.bytes_left);
                format!("{}, at most {left} to fetch", counted(images, "image"))
            }
        },
        follows,
        only_here: master.only_here_total,
        not_followed: master.not_followed,
        last_error: master
            .last_error
            .as_ref()
            .map_or_else(|| "none".to_owned(), |(at, why)| format!("{}: {why}", ago(now, *at))),
    }
}

fn replica_row(replica: &ReplicaState, now: Time) -> ReplicaRow {
    let (class, state) = match (replica.is_connected, replica.is_level) {
        (false, _) => ("bad", "does not ask any more".to_owned()),
        (true, true) => ("good", "level".to_owned()),
        (true, false) => ("busy", format!("{} behind", counted(replica.images_behind, "image"))),
    };
    ReplicaRow {
        address: replica.address.clone(),
        store: replica.server.to_string(),
        seen: ago(now, replica.seen),
        class,
        state,
    }
}

fn image_row(image: &ImageSummary) -> ImageRow {
    ImageRow {
        name: image.name.to_string(),
        escaped_name: path_escape(image.name.as_str()),
        entries: image.totals.entries,
        size: size(image.totals.bytes),
        filter_lines: image.filter_lines,
        triggers: image.triggers,
        computed: image.totals.computed,
        created: utc(image.created_on),
        expires: image.expires_at.map_or_else(|| "never".to_owned(), utc),
    }
}
