//! The verbs of the command line.

pub mod add;
pub mod add_from_sub;
pub mod add_overlay;
pub mod change;
pub mod computed;
pub mod diff;
pub mod directories;
pub mod estimate;
pub mod files;
pub mod filters;
pub mod find;
pub mod get;
pub mod list;
mod output_needs;
pub mod readers;
pub mod server;
mod service_warnings;
pub mod show;
pub mod signatures;
pub mod tar;
pub mod triggers;
pub mod verify;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use api::image_server::{GetImage, GetImageRequest};
use clap::builder::{OsStringValueParser, TypedValueParser};
use model::image::{Image, ImageName};
use model::path::TreePath;
use rpc::client::{CallError, Client};
use rpc::tls::Security;
use serde::Serialize;
use tool::Format;

use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Meter;

/// What all verbs share.
pub struct Context {
    /// Client of the image server.
    pub client: Client,
    pub security: Security,
    pub format: Format,
    pub meter: Meter,
}

/// The result of a verb.
pub type VerbResult = Result<Outcome, Failure>;

impl Context {
    /// Fetches the image `name`; errors have hints.
    async fn image(&self, name: &ImageName) -> Result<Image, Failure> {
        let image = get_image(&self.client, name).await;
        image.map_err(|error| Failure::from_image_call(&error, name))
    }

    /// Prints `value` if the format is JSON.
    fn print_if_json(&self, value: &impl Serialize) -> Result<(), Failure> {
        if self.format == Format::Json { print(&tool::json(value)) } else { Ok(()) }
    }
}

async fn get_image(client: &Client, name: &ImageName) -> Result<Image, CallError> {
    let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
    client.call::<GetImage>(&request).await
}

/// Parses a path of an image from the command line: raw bytes, or escaped as imagetool prints them.
fn path_argument() -> impl TypedValueParser<Value = TreePath> {
    OsStringValueParser::new().try_map(|text| parse_path(&text))
}

fn parse_path(text: &OsStr) -> Result<TreePath, String> {
    let bytes = text.as_bytes();
    let bytes = match text.to_str().filter(|text| text.contains('\\')) {
        None => bytes.to_owned(),
        Some(text) => model::escape::unescape(text).map_err(|error| error.to_string())?,
    };
    // A completed directory name ends with a slash.
    let trimmed = bytes.strip_suffix(b"/").filter(|rest| !rest.is_empty()).unwrap_or(&bytes);
    TreePath::new(trimmed).map_err(|error| error.to_string())
}

/// Prints to the standard output. A closed pipe is not an error.
fn print(text: &str) -> Result<(), Failure> {
    print_bytes(text.as_bytes())
}

/// Like [`print`], for bytes.
fn print_bytes(bytes: &[u8]) -> Result<(), Failure> {
    use std::io::Write as _;
    let mut output = std::io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::from_text(format!("cannot write to the standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    print(&tool::json(value))
}
