//! The verbs of the command line, one file each.

pub mod accept_clock;
pub mod add;
pub mod add_from_sub;
pub mod add_overlay;
pub mod change_expiry;
pub mod check;
pub mod chown;
pub mod copy;
pub mod delete;
pub mod diff;
pub mod estimate;
pub mod find_latest;
pub mod gc;
pub mod get;
pub mod get_file;
pub mod list;
pub mod match_triggers;
pub mod merge_filters;
pub mod merge_triggers;
pub mod mkdir;
pub mod replication;
pub mod rmdir;
pub mod scan_filter;
pub mod show;
pub mod show_file;
pub mod sign;
pub mod tag;
pub mod tar;
pub mod tree;
pub mod verify;
pub mod verify_signatures;

use rpc::tls::Security;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use api::image_server::{GetImage, GetImageRequest};
use clap::builder::{OsStringValueParser, TypedValueParser};
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::encode::Listing;
use rpc::client::{CallError, Client};
use serde::Serialize;
use tool::Format;

use crate::failure::{Failure, Outcome};
use crate::listings::{Listings, Sight, fetch};
use crate::progress::Meter;

/// What all verbs need.
pub struct Context {
    /// The image server.
    pub client: Client,
    /// How connections are protected.
    pub security: Security,
    /// How data is printed.
    pub format: Format,
    /// Shows progress.
    pub meter: Meter,
}

/// What a verb ends with.
pub type Ended = Result<Outcome, Failure>;

async fn get_image(client: &Client, name: &ImageName) -> Result<Image, CallError> {
    let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
    client.call::<GetImage>(&request).await
}

/// A path that was looked for in an image.
struct Found {
    name: ImageName,
    path: TreePath,
    root: ObjectId,
    listings: Listings,
    /// What is there.
    sight: Sight,
}

/// Looks for `path` in the image `name`; fetches only the directories above it.
async fn find(context: &Context, name: &ImageName, path: &TreePath) -> Result<Found, Failure> {
    let image = get_image(&context.client, name).await;
    let root = image.map_err(|error| Failure::of_image_call(&error, name))?.content.root;
    let (name, path, listings) = (name.clone(), path.clone(), Listings::default());
    let mut found = Found { name, path: path.clone(), root, listings, sight: Sight::Unknown };
    found.sight = found.look_at(context, &path).await?;
    Ok(found)
}

impl Found {
    /// What another path of the same image is.
    async fn look_at(&mut self, context: &Context, path: &TreePath) -> Result<Sight, Failure> {
        let root = self.root;
        let look = |listings: &mut Listings| listings.find(root, path);
        let (client, meter) = (&context.client, &context.meter);
        let sight = fetch::look(client, &mut self.listings, meter, look).await;
        sight.map_err(|error| Failure::of_download(&error))
    }

    /// The directory with that digest.
    async fn listing(&mut self, context: &Context, id: ObjectId) -> Result<Arc<Listing>, Failure> {
        let look = |listings: &mut Listings| listings.get(id);
        let (client, meter) = (&context.client, &context.meter);
        let listing = fetch::look(client, &mut self.listings, meter, look).await;
        let listing = listing.map_err(|error| Failure::of_download(&error))?;
        listing.ok_or_else(|| self.not_there())
    }

    /// The failure that says so.
    fn not_there(&self) -> Failure {
        let Self { name, path, .. } = self;
        Failure::of_text(format!("{name} has no {path}"))
            .hint(format!("`imagetool show {name} --tree` shows all that it has"))
    }
}

/// Reads a path of an image from the command line: its bytes, or as imagetool prints them.
fn path_argument() -> impl TypedValueParser<Value = TreePath> {
    OsStringValueParser::new().try_map(|text| path_of(&text))
}

fn path_of(text: &OsStr) -> Result<TreePath, String> {
    let bytes = text.as_bytes();
    let bytes = match text.to_str().filter(|text| text.contains('\\')) {
        None => bytes.to_owned(),
        Some(text) => model::escape::unescape(text).map_err(|error| error.to_string())?,
    };
    // A completed directory name ends with a slash.
    let trimmed = bytes.strip_suffix(b"/").filter(|rest| !rest.is_empty()).unwrap_or(&bytes);
    TreePath::new(trimmed).map_err(|error| error.to_string())
}

/// Prints to the standard output. A reader that has gone away is no failure.
fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// As [`print`], for what need not be text.
fn print_bytes(bytes: &[u8]) -> Result<(), Failure> {
    use std::io::Write as _;
    let mut output = std::io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::of_text(format!("cannot write to the standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::of_text(format!("cannot print as JSON: {error}")))?;
    print(&(text + "\n"))
}
