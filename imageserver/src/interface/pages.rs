//! The pages: `/` with all images, `/image?name=NAME` with one, `/directories`.

mod directories;
mod replication;

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::image_server::collection::Amount;
use model::image::{Image, ImageName};
use model::report::report;
use model::signing::Signature;
use model::tree::{Time, Totals};
use model::when::{lasting, moment};
use model::words::counted;
use rpc::page_frame::{Cell, Frame, Mark, html_escape, pairs, path_escape, table};
use rpc::server::{Page, PageRequest, Router};

use crate::clock::wall;
use crate::collection::{Collector, LastRun};
use crate::core::clock_trust::Trust;
use crate::expiry::Expiry;
use crate::interface::Life;
use crate::interface::metrics::EXPIRES_SOON;
use crate::scrub::Losses;
use crate::store::record::Record;
use crate::store::{Store, error::StoreError};

/// How many images are on one page.
const PAGE_IMAGES_MAX: usize = 1_000;

/// How many packages of an image are named.
const PACKAGES_SHOWN_MAX: usize = 10_000;

/// How many images that are not whole are named.
const LOST_IMAGES_MAX: usize = 100;

/// Adds the pages to `router`.
#[must_use]
pub fn routes(router: Router, store: &Arc<Store>, life: &Life, frame: &Frame) -> Router {
    let (of_status, of_image) = (Arc::clone(store), Arc::clone(store));
    let (status_frame, image_frame) = (frame.clone(), frame.clone());
    let life = life.clone();
    let (of_directories, directories_frame) = (Arc::clone(store), frame.clone());
    router
        .page("/directories", move |request| {
            let (store, frame) = (Arc::clone(&of_directories), directories_frame.clone());
            on_thread(move || directories::directories(&store, &frame, &request))
        })
        .page("/", move |request| {
            let (store, frame) = (Arc::clone(&of_status), status_frame.clone());
            let life = life.clone();
            on_thread(move || status(&store, &life, &frame, &request))
        })
        .page("/image", move |request| {
            let (store, frame) = (Arc::clone(&of_image), image_frame.clone());
            on_thread(move || image(&store, &frame, &request))
        })
}

async fn on_thread(
    make: impl FnOnce() -> Result<Page, Fault> + Send + 'static,
) -> Result<Page, Fault> {
    let made = tokio::task::spawn_blocking(make).await;
    made.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))?
}

fn name_of(request: &PageRequest, parameter: &str) -> Result<Option<ImageName>, Fault> {
    let Some(text) = request.query.get(parameter) else { return Ok(None) };
    let bad = |error| Fault::new(FaultCode::BadRequest, report(&error));
    ImageName::new(text).map(Some).map_err(bad)
}

fn status(store: &Store, life: &Life, frame: &Frame, request: &PageRequest) -> Result<Page, Fault> {
    let held = store.objects.holdings();
    let still = if held.complete { "" } else { " (still counting those of former runs)" };
    let free = match store.objects.space() {
        Ok(Some(space)) => size(space.free),
        Ok(None) => "no end of it is known".to_owned(),
        Err(error) => report(&error),
    };
    let mut body = lost(&life.scrub.losses());
    body.push_str(&alarms(store, &life.expiry));
    let state = life.replication.report(wall());
    body.push_str(&replication::alarms(&state));
    body.push_str(&pairs([
        ("Images", store.images.count().to_string()),
        ("Objects", format!("{}{still}", held.objects)),
        ("Bytes of objects", format!("{}{still}", size(held.bytes))),
        ("Free space", free),
        ("Corrupt objects put aside since the start", store.objects.corrupt().to_string()),
        ("Leased objects", store.leasing.count().to_string()),
        ("Objects that no image needs", unneeded(&life.collector)),
        ("Last collection", last_collection(store, &life.collector)),
        ("Images that expire within a week", expiring(store).to_string()),
        ("Images in use", store.holding.count().to_string()),
        ("Data directory", store.data().display().to_string()),
    ]));
    let damaged = store.images.damaged();
    if !damaged.is_empty() {
        body.push_str("<h2>Damaged images</h2>\n");
        let rows: Vec<Vec<Cell>> = damaged
            .into_iter()
            .map(|(name, why)| {
                let mark = Cell::Mark { mark: Mark::Bad, text: why };
                vec![Cell::Name(name.to_string()), mark]
            })
            .collect();
        body.push_str(&table(&["Name", "What is wrong"], &rows));
    }
    body.push_str(&replication::section(&state, wall()));
    body.push_str("<h2>Images</h2>\n<p><a href=\"/directories\">Directories</a></p>\n");
    body.push_str(&list(store, name_of(request, "after")?.as_ref()));
    Ok(Page::Html(frame.render("Image server", &body)))
}

/// What operators must know at once.
fn alarms(store: &Store, expiry: &Expiry) -> String {
    let mut texts = Vec::new();
    if let Some(why) = store.directories.damage() {
        texts.push(format!(
            "Who owns which directories is not known ({why}): nobody but those who have the power \
             can change images. Put the file `directories` back from a backup, or move it away, \
             and restart the server."
        ));
    }
    if let Trust::Jumped(seconds) = expiry.trust() {
        texts.push(format!(
            "The clock jumped by {seconds} s. No image expires until it is back, or you say that \
             it is right: imagetool accept-clock"
        ));
    }
    for name in expiry.overdue() {
        texts.push(format!(
            "The time of {name} has come, but it is in use and stays. Put its expiry off, or let \
             machines have another image."
        ));
    }
    let rows: Vec<Vec<Cell>> =
        texts.into_iter().map(|text| vec![Cell::Mark { mark: Mark::Bad, text }]).collect();
    if rows.is_empty() { String::new() } else { table(&["Alarms"], &rows) }
}

fn expiring(store: &Store) -> usize {
    let week = wall().seconds.saturating_add(EXPIRES_SOON);
    store.images.expiring().into_iter().filter(|(_, at)| at.seconds <= week).count()
}

fn unneeded(collector: &Collector) -> String {
    collector.unneeded().map_or_else(
        || "not known: no collection since the start".to_owned(),
        |Amount { objects, bytes }| format!("{objects}, which take {}", size(bytes)),
    )
}

fn last_collection(store: &Store, collector: &Collector) -> String {
    let last = match collector.last() {
        None => "none since the start".to_owned(),
        Some(LastRun { ended, outcome: Err(why), .. }) => format!("{}: failed: {why}", time(ended)),
        Some(LastRun { ended, took, outcome: Ok(reply) }) => format!(
            "{}: removed {} objects, {}, in {} s",
            time(ended),
            reply.removed.objects,
            size(reply.removed.bytes),
            took.as_secs(),
        ),
    };
    match store.leasing.everything_for() {
        0 => last,
        seconds => format!("{last}; nothing is removed for another {}", lasting(seconds)),
    }
}

/// What operators must see first: which images cannot be given whole.
fn lost(losses: &Losses) -> String {
    if losses.images.is_empty() {
        return String::new();
    }
    let objects = counted(losses.objects.len() as u64, "object");
    let images = counted(losses.images.len() as u64, "image");
    let mut html = format!(
        "<h2>Lost objects</h2>\n<p class=\"bad\">{objects} lost or unreadable, which {images} \
         cannot do without. Upload one of them again under another name, or start this server \
         with --repair-from.</p>\n"
    );
    let rows: Vec<Vec<Cell>> = losses
        .images
        .iter()
        .take(LOST_IMAGES_MAX)
        .map(|(name, lacks)| {
            let first = lacks.iter().next().map(|id| {
                let wound = losses.objects.get(id).map_or("missing", |wound| wound.name());
                format!("{id} is {wound}")
            });
            vec![
                Cell::Name(name.to_string()),
                Cell::Mark { mark: Mark::Bad, text: lacks.len().to_string() },
                Cell::Text(first.unwrap_or_default()),
            ]
        })
        .collect();
    html.push_str(&table(&["Image", "Objects", "The first of them"], &rows));
    html
}

fn list(store: &Store, after: Option<&ImageName>) -> String {
    let page = store.images.list(after, PAGE_IMAGES_MAX);
    if page.images.is_empty() {
        return "<p>None yet. Add one with <code>imagetool add</code>.</p>\n".to_owned();
    }
    let rows: Vec<Vec<Cell>> = page
        .images
        .iter()
        .map(|image| {
            let filter = match image.filter_lines {
                None => Cell::Text("sparse".to_owned()),
                Some(lines) => Cell::Number(lines.to_string()),
            };
            let path = format!("/image?name={}", path_escape(image.name.as_str()));
            vec![
                Cell::Link { path, text: image.name.to_string() },
                Cell::Number(image.totals.entries.to_string()),
                Cell::Number(size(image.totals.bytes)),
                filter,
                Cell::Number(image.triggers.to_string()),
                Cell::Text(time(image.created_on)),
                Cell::Text(image.expires_at.map_or_else(|| "never".to_owned(), time)),
            ]
        })
        .collect();
    let head = ["Name", "Entries", "Size", "Filter lines", "Triggers", "Created", "Expires"];
    let mut html = table(&head, &rows);
    if let Some(last) = page.images.last().filter(|_| page.more) {
        let after = path_escape(last.name.as_str());
        html.push_str(&format!("<p><a href=\"/?after={after}\">More images</a></p>\n"));
    }
    html
}

fn image(store: &Store, frame: &Frame, request: &PageRequest) -> Result<Page, Fault> {
    let missing = || {
        let text = "which image? The address is /image?name=NAME";
        Fault::new(FaultCode::BadRequest, text)
    };
    let name = name_of(request, "name")?.ok_or_else(missing)?;
    let record = store.images.get(&name).map_err(|error| {
        let code = match error {
            StoreError::NotFound { .. } => FaultCode::NotFound,
            StoreError::Gone { .. } => FaultCode::Gone,
            _ => FaultCode::Internal,
        };
        Fault::new(code, report(&error))
    })?;
    let mut body = facts(&record);
    body.push_str(&filter(&record.image));
    body.push_str(&triggers(&record.image));
    body.push_str(&notes(&record.image));
    Ok(Page::Html(frame.render(&format!("Image {name}"), &body)))
}

fn facts(record: &Record) -> String {
    let Record { image: Image { content, notes }, totals } = record;
    let Totals { entries, directories, bytes, hard_links, computed, depth } = totals;
    let list = |texts: &[String]| match texts {
        [] => "none".to_owned(),
        texts => texts.join(", "),
    };
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "none".to_owned());
    pairs([
        ("Digest", content.digest().to_string()),
        ("Tree", content.root.to_string()),
        ("Entries", format!("{entries}, of which {directories} directories, {depth} levels deep")),
        ("Bytes of files", size(*bytes)),
        ("Hard links", hard_links.to_string()),
        ("Computed files", computed.to_string()),
        ("Created on", time(notes.created_on)),
        ("Created by", notes.created_by.clone()),
        ("Created for", notes.created_for.clone()),
        ("Expires", notes.expires_at.map_or_else(|| "never".to_owned(), time)),
        ("Owner groups", list(&notes.owner_groups)),
        ("Owner users", list(&notes.owner_users)),
        ("Made from", or_none(notes.source_image.as_ref().map(ToString::to_string))),
        ("Build log", or_none(notes.build_log.map(|id| id.to_string()))),
        ("Packages", notes.packages.len().to_string()),
    ])
}

fn filter(image: &Image) -> String {
    let mut html = "<h2>Filter</h2>\n".to_owned();
    match &image.content.filter {
        None => {
            html.push_str("<p>None: the image is sparse, machines keep all it does not name.</p>");
        }
        Some(filter) if filter.lines().is_empty() => {
            html.push_str("<p>Empty: machines keep nothing that the image does not name.</p>");
        }
        Some(filter) => {
            html.push_str(&format!("<pre>{}</pre>", html_escape(&filter.lines().join("\n"))));
        }
    }
    html
}

fn triggers(image: &Image) -> String {
    let triggers = &image.content.triggers.0;
    if triggers.is_empty() {
        return "<h2>Triggers</h2>\n<p>None.</p>".to_owned();
    }
    let rows: Vec<Vec<Cell>> = triggers
        .iter()
        .map(|trigger| {
            let action = match (trigger.reboots(), trigger.do_reload) {
                (true, _) => "reboot",
                (false, true) => "reload",
                (false, false) => "restart",
            };
            let impact = if trigger.high_impact { "high" } else { "" };
            vec![
                Cell::Name(trigger.service.clone()),
                Cell::Text(action.to_owned()),
                Cell::Text(impact.to_owned()),
                Cell::Text(trigger.match_lines.lines().join(" ")),
            ]
        })
        .collect();
    let head = ["Service", "Action", "Impact", "When these change"];
    format!("<h2>Triggers</h2>\n{}", table(&head, &rows))
}

/// Which key, when, and until when; whether it is trusted is for each machine to say.
fn signature(signature: &Signature) -> Vec<Cell> {
    let at = |seconds: u64| {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        moment(Time { seconds, nanoseconds: 0 })
    };
    match signature.check() {
        Ok(checked) => vec![
            Cell::Name(checked.fingerprint()),
            Cell::Text(at(checked.statement.signed)),
            Cell::Text(checked.statement.expires.map_or_else(|| "never".to_owned(), at)),
        ],
        Err(error) => vec![Cell::Text(error.to_string())],
    }
}

fn notes(image: &Image) -> String {
    let mut html = String::new();
    let notes = &image.notes;
    if !notes.tags.is_empty() {
        html.push_str("<h2>Tags</h2>\n");
        let tags = notes.tags.iter().map(|(name, value)| (name.as_str(), value.clone()));
        html.push_str(&pairs(tags));
    }
    if !notes.signatures.is_empty() {
        html.push_str("<h2>Signatures</h2>\n");
        let rows: Vec<Vec<Cell>> = notes.signatures.iter().map(signature).collect();
        html.push_str(&table(&["Key", "Signed", "Expires"], &rows));
    }
    if !image.content.computed.is_empty() {
        html.push_str("<h2>Computed files</h2>\n");
        let rows: Vec<Vec<Cell>> = image
            .content
            .computed
            .iter()
            .map(|rule| vec![Cell::Name(rule.path.to_string()), Cell::Text(rule.source.clone())])
            .collect();
        html.push_str(&table(&["Path", "Source"], &rows));
    }
    if !notes.packages.is_empty() {
        let rows: Vec<Vec<Cell>> = notes
            .packages
            .iter()
            .take(PACKAGES_SHOWN_MAX)
            .map(|one| {
                vec![
                    Cell::Name(one.name.clone()),
                    Cell::Text(one.version.clone()),
                    Cell::Number(size(one.size_bytes)),
                ]
            })
            .collect();
        html.push_str("<h2>Packages</h2>\n");
        html.push_str(&table(&["Package", "Version", "Installed"], &rows));
    }
    if let Some(text) = &notes.release_notes {
        html.push_str(&format!("<h2>Release notes</h2>\n<pre>{}</pre>", html_escape(text)));
    }
    html
}

fn time(time: Time) -> String {
    let nanoseconds = i32::try_from(time.nanoseconds).unwrap_or(0);
    match jiff::Timestamp::new(time.seconds, nanoseconds) {
        Ok(timestamp) => format!("{timestamp:.0}"),
        Err(_) => format!("{} s after 1970", time.seconds),
    }
}

/// A length for people: `12.3 MiB`.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1_024 {
        return format!("{bytes} B");
    }
    let mut unit = 0;
    let mut scaled = bytes;
    while scaled >= 1 << 20 && unit + 1 < UNITS.len() {
        scaled >>= 10;
        unit += 1;
    }
    let (whole, tenths) = (scaled >> 10, (scaled & 1_023) * 10 / 1_024);
    format!("{whole}.{tenths} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        #[rustfmt::skip]
        let table = [
            (0, "0 B"), (1_023, "1023 B"), (1_024, "1.0 KiB"), (1_536, "1.5 KiB"),
            (1 << 20, "1.0 MiB"), ((1 << 20) - 1, "1023.9 KiB"), (640 << 20, "640.0 MiB"),
            (1 << 60, "1024.0 PiB"), (u64::MAX, "16383.9 PiB"),
        ];
        for (bytes, text) in table {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn times_are_readable() {
        let at = |seconds| time(Time { seconds, nanoseconds: 999 });
        assert_eq!(at(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(at(i64::MAX), "9223372036854775807 s after 1970");
    }
}
