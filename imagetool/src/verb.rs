//! The verbs of the command line, one file each.

pub mod accept_clock;
pub mod add;
pub mod add_overlay;
pub mod change_expiry;
pub mod copy;
pub mod delete;
pub mod find_latest;
pub mod gc;
pub mod get;
pub mod list;
pub mod show;
pub mod tag;
pub mod tar;

use common::api::image_server::{GetImage, GetImageRequest};
use common::image::{Image, ImageName};
use common::tool::Format;
use common::wire::client::{CallError, Client};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::progress::Meter;

/// What all verbs need.
pub struct Context {
    /// The image server.
    pub client: Client,
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
