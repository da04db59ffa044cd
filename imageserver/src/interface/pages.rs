//! The pages: `/` with the status and all images, `/image?name=NAME`, `/directories`.

mod status;

use std::sync::Arc;

use api::fault::{Fault, FaultCode};
use api::image_server::directories::DirectorySummary;
use askama::Template;
use model::display::{error_chain, size, utc};
use model::image::{Content, Image, ImageName, Notes, Package};
use model::object::ObjectId;
use model::signing::Signature;
use model::tree::{Time, Totals};
use model::trigger::Trigger;
use rpc::page_frame::{Frame, path_escape};
use rpc::server::{Page, PageRequest, Router};

use crate::interface::BackgroundTasks;
use crate::interface::methods::images::get_readable;
use crate::store::Store;
use crate::store::error::StoreError;
use crate::store::record::Record;

/// The most directories on one page.
const PAGE_DIRECTORIES_MAX: usize = 1_000;

/// The most packages of an image that the page lists.
const PACKAGES_SHOWN_MAX: usize = 10_000;

/// The state that all pages share.
#[derive(Clone)]
pub struct PageState {
    store: Arc<Store>,
    background: BackgroundTasks,
    frame: Frame,
}

/// Adds the pages to `router`.
pub fn routes(
    router: Router,
    store: &Arc<Store>,
    background: &BackgroundTasks,
    frame: &Frame,
) -> Router<PageState> {
    let state = PageState {
        store: Arc::clone(store),
        background: background.clone(),
        frame: frame.clone(),
    };
    router
        .with_state(state)
        .page("/", |state, request| on_thread(move || status::page(&state, &request)))
        .page("/healthz", async |state, _| match state.store.trouble() {
            None => Ok(Page::Text("ok\n".to_owned())),
            Some(why) => Err(Fault::new(FaultCode::Unavailable, why)),
        })
        .page("/directories", |state, request| {
            on_thread(move || directories_page(&state, &request))
        })
        .page("/image", |state, request| on_thread(move || image_page(&state, &request)))
}

async fn on_thread(
    make: impl FnOnce() -> Result<Page, Fault> + Send + 'static,
) -> Result<Page, Fault> {
    let made = tokio::task::spawn_blocking(make).await;
    made.map_err(|error| Fault::new(FaultCode::Internal, error.to_string()))?
}

impl PageState {
    fn html(&self, title: &str, template: &impl Template) -> Page {
        let body = template.render().expect("writing to a String cannot fail");
        Page::Html(self.frame.render(title, &body))
    }
}

/// Reads the name of an image or a directory from the query.
fn name_parameter(request: &PageRequest, parameter: &str) -> Result<Option<ImageName>, Fault> {
    let Some(text) = request.query.get(parameter) else { return Ok(None) };
    let bad = |error| Fault::new(FaultCode::BadRequest, error_chain(&error));
    ImageName::new(text).map(Some).map_err(bad)
}

#[derive(Template)]
#[template(path = "image.html")]
struct ImagePage<'record> {
    content: &'record Content,
    notes: &'record Notes,
    totals: &'record Totals,
    digest: ObjectId,
    size: String,
    created_on: String,
    expires: String,
    owner_groups: String,
    owner_users: String,
    source_image: String,
    build_log: String,
    triggers: Vec<TriggerRow>,
    signatures: Vec<Result<SignatureRow, String>>,
    packages: Vec<PackageRow>,
}

struct TriggerRow {
    service: String,
    action: &'static str,
    impact: &'static str,
    paths: String,
}

struct SignatureRow {
    key: String,
    signed: String,
    expires: String,
}

struct PackageRow {
    name: String,
    version: String,
    size: String,
}

fn image_page(state: &PageState, request: &PageRequest) -> Result<Page, Fault> {
    let missing = || {
        let text = "which image? The address is /image?name=NAME";
        Fault::new(FaultCode::BadRequest, text)
    };
    let name = name_parameter(request, "name")?.ok_or_else(missing)?;
    let reader = state.store.reader(&request.caller.identity);
    let record = get_readable(&state.store, &reader, &name).map_err(|error| {
        let code = match error {
            StoreError::NotFound { .. } => FaultCode::NotFound,
            StoreError::Gone { .. } => FaultCode::Gone,
            _ => FaultCode::Internal,
        };
        Fault::new(code, error_chain(&error))
    })?;
    Ok(state.html(&format!("Image {name}"), &ImagePage::new(&record)))
}

impl<'record> ImagePage<'record> {
    fn new(record: &'record Record) -> Self {
        let Record { image: Image { content, notes }, totals } = record;
        let none = || "none".to_owned();
        let list = |texts: &[String]| if texts.is_empty() { none() } else { texts.join(", ") };
        let package = |package: &Package| PackageRow {
            name: package.name.clone(),
            version: package.version.clone(),
            size: size(package.size_bytes),
        };
        Self {
            content,
            notes,
            totals,
            digest: content.digest(),
            size: size(totals.bytes),
            created_on: utc(notes.created_on),
            expires: notes.expires_at.map_or_else(|| "never".to_owned(), utc),
            owner_groups: list(&notes.owner_groups),
            owner_users: list(&notes.owner_users),
            source_image: notes.source_image.as_ref().map_or_else(none, ToString::to_string),
            build_log: notes.build_log.map_or_else(none, |id| id.to_string()),
            triggers: content.triggers.0.iter().map(trigger_row).collect(),
            signatures: notes.signatures.iter().map(signature_row).collect(),
            packages: notes.packages.iter().take(PACKAGES_SHOWN_MAX).map(package).collect(),
        }
    }
}

fn trigger_row(trigger: &Trigger) -> TriggerRow {
    let action = match (trigger.reboots(), trigger.do_reload) {
        (true, _) => "reboot",
        (false, true) => "reload",
        (false, false) => "restart",
    };
    TriggerRow {
        service: trigger.service.clone(),
        action,
        impact: if trigger.high_impact { "high" } else { "" },
        paths: trigger.match_lines.lines().join(" "),
    }
}

/// Does not say whether the key is trusted: each machine decides that.
fn signature_row(signature: &Signature) -> Result<SignatureRow, String> {
    let at = |seconds: u64| {
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        utc(Time { seconds, nanoseconds: 0 })
    };
    let checked = signature.check().map_err(|error| error.to_string())?;
    Ok(SignatureRow {
        key: checked.fingerprint(),
        signed: at(checked.statement.signed),
        expires: checked.statement.expires.map_or_else(|| "never".to_owned(), at),
    })
}

#[derive(Template)]
#[template(path = "directories.html")]
struct DirectoriesPage {
    /// How many directories were made.
    made: String,
    /// The directory whose content is shown, escaped.
    below: Option<String>,
    directories: Vec<DirectoryRow>,
    /// The last directory of this page if there are more, escaped.
    next_after: Option<String>,
}

struct DirectoryRow {
    name: String,
    escaped_name: String,
    owners: String,
    made: String,
    images: u64,
    images_below: u64,
    size_below: String,
}

fn directories_page(state: &PageState, request: &PageRequest) -> Result<Page, Fault> {
    let below = name_parameter(request, "below")?;
    let after = name_parameter(request, "after")?;
    let directories = state.store.directories.now();
    let reader = state.store.reader(&request.caller.identity);
    let sums = state.store.images.sums(&reader);
    let may = |directory: &ImageName| reader.may_read_directory(directory);
    let part = (below.as_ref(), after.as_ref());
    let (listed, more) = directories.list(may, &sums, part, PAGE_DIRECTORIES_MAX);
    let escaped = |name: &ImageName| path_escape(name.as_str());
    let page = DirectoriesPage {
        made: match directories.count() {
            1 => "1 directory was made".to_owned(),
            count => format!("{count} directories were made"),
        },
        below: below.as_ref().map(escaped),
        next_after: listed.last().filter(|_| more).map(|last| escaped(&last.name)),
        directories: listed.iter().map(directory_row).collect(),
    };
    Ok(state.html("Directories", &page))
}

fn directory_row(directory: &DirectorySummary) -> DirectoryRow {
    let DirectorySummary { name, made_on, owners, images, images_below, bytes_below } = directory;
    DirectoryRow {
        name: name.to_string(),
        escaped_name: path_escape(name.as_str()),
        owners: if owners.is_empty() { String::new() } else { owners.in_words() },
        made: made_on.map_or_else(|| "by its images".to_owned(), utc),
        images: *images,
        images_below: *images_below,
        size_below: size(*bytes_below),
    }
}
