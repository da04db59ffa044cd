//! `imagetool verify-signatures`: says whether a machine with these keys would take an image.

use std::path::PathBuf;

use model::image::ImageName;
use model::signing::{Policy, TrustedKeys, endorse};
use serde::Serialize;
use tool::Format;

use super::sign::text_of;
use super::{Context, Ended, get_image, print_json};
use crate::failure::{Failure, Outcome};

/// Says whether enough trusted keys have signed an image.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool verify-signatures web/8 --trusted-keys /etc/subd/trusted-keys
  imagetool verify-signatures web/8 --trusted-keys keys --signatures-needed 2

The file has a public key on each line, as `ssh-keygen` writes it to a .pub file; `images=\"web/\"`
before it lets the key sign only these. It is judged as on a machine, but for the image that the
machine had before.

Exit codes: 0 enough have signed, 3 too few have, 1 it could not be found out.")]
pub struct VerifySignaturesArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The keys that are trusted.
    #[arg(long, value_name = "FILE")]
    pub trusted_keys: PathBuf,
    /// How many different ones must have signed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub signatures_needed: u32,
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    enough: bool,
    needed: u32,
    keys: Vec<String>,
    why: Option<String>,
}

/// Verifies the signatures of an image.
///
/// # Errors
///
/// [`Failure`] if there is no such image, or the keys cannot be read.
pub async fn run(context: &Context, args: VerifySignaturesArgs) -> Ended {
    let VerifySignaturesArgs { name, trusted_keys, signatures_needed } = args;
    let needed = signatures_needed.max(1);
    let text = text_of(&trusted_keys, "trusted keys")?;
    let keys = TrustedKeys::read(&text, needed)
        .map_err(|error| Failure::of_text(format!("{}: {error}", trusted_keys.display())))?;
    let image = get_image(&context.client, &name).await;
    let image = image.map_err(|error| Failure::of_image_call(&error, &name))?;
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or_default();
    let policy = Policy { keys: &keys, needed, now, passed: 0, even_expired: false };
    let digest = image.content.digest();
    let result = endorse(&name, &digest, &image.notes.signatures, &policy);
    let (keys, why) = match &result {
        Ok(endorsed) => (endorsed.keys.clone(), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    match &why {
        None => eprintln!("{name} ({digest}) is signed by {}.", keys.join(", ")),
        Some(why) => eprintln!("{why}"),
    }
    if context.format == Format::Json {
        print_json(&Report { name: &name, enough: result.is_ok(), needed, keys, why })?;
    }
    Ok(if result.is_ok() { Outcome::Done } else { Outcome::Different })
}
