//! Decides whether enough trusted keys stand behind an image.
//!
//! # Invariants
//!
//! * A key counts once, however many signatures it has made.
//! * The threshold also decides how new an image is: [`Endorsed::signed`] is the latest time at or
//!   after which enough keys have signed. So fewer stolen keys than that cannot make an image look
//!   newer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::keys::{KeyStatus, TrustedKeys};
use super::signature::{SIGNATURES_MAX, Signature};
use crate::display::{error_chain, utc};
use crate::image::ImageName;
use crate::object::ObjectId;
use crate::tree::Time;

/// The largest accepted difference between the clock of a signer and that of a machine, in seconds.
/// A statement from further ahead is refused: it would make all honest ones look old.
pub const CLOCK_SKEW_SECONDS_MAX: u64 = 24 * 3_600;

/// The conditions under which an image is endorsed.
#[derive(Clone, Copy, Debug)]
pub struct Policy<'a> {
    /// The keys whose signatures count.
    pub keys: &'a TrustedKeys,
    /// How many different keys are needed; at least one.
    pub needed: u32,
    /// The machine's clock, in seconds after 1970-01-01 UTC.
    pub now: u64,
    /// A time that is known to have passed, whatever the clock shows.
    pub passed: u64,
    /// Accepts expired statements too, because the machine already has this image.
    pub even_expired: bool,
}

/// An image with enough trusted signatures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endorsed {
    /// How new it is; see the module.
    pub signed: u64,
    /// The fingerprints of the keys that count, sorted.
    pub keys: Vec<String>,
}

/// An image with too few trusted signatures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{image} has {found} of {needed} signatures that count{}", in_words(.remarks))]
pub struct Unendorsed {
    /// Which image.
    pub image: ImageName,
    /// How many different keys must sign.
    pub needed: u32,
    /// How many have signed.
    pub found: u32,
    /// Why other signatures do not count.
    pub remarks: Vec<String>,
}

fn in_words(remarks: &[String]) -> String {
    remarks.iter().enumerate().fold(String::new(), |mut text, (index, remark)| {
        let separator = if index == 0 { ": " } else { "; " };
        write!(text, "{separator}{remark}").expect("writing to a String cannot fail");
        text
    })
}

fn shown(seconds: u64) -> String {
    utc(Time { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanoseconds: 0 })
}

/// Checks whether enough trusted keys have signed the image of that name and digest.
///
/// # Errors
///
/// Says of each signature why it does not count.
pub fn endorse(
    image: &ImageName,
    digest: &ObjectId,
    signatures: &[Signature],
    policy: &Policy<'_>,
) -> Result<Endorsed, Unendorsed> {
    let mut latest: BTreeMap<String, u64> = BTreeMap::new();
    let mut remarks = Vec::new();
    for signature in signatures.iter().take(SIGNATURES_MAX) {
        match judge(image, digest, signature, policy) {
            Ok((key, signed)) => {
                let known = latest.entry(key).or_default();
                *known = signed.max(*known);
            }
            Err(remark) => remarks.push(remark),
        }
    }
    let needed = policy.needed.max(1);
    let mut moments: Vec<u64> = latest.values().copied().collect();
    moments.sort_unstable_by(|left, right| right.cmp(left));
    let place = usize::try_from(needed - 1).unwrap_or(usize::MAX);
    match moments.get(place) {
        Some(&signed) => Ok(Endorsed { signed, keys: latest.into_keys().collect() }),
        None => {
            let found = u32::try_from(moments.len()).unwrap_or(u32::MAX);
            Err(Unendorsed { image: image.clone(), needed, found, remarks })
        }
    }
}

/// Returns the key and the time of a valid signature, or why it does not count.
fn judge(
    image: &ImageName,
    digest: &ObjectId,
    signature: &Signature,
    policy: &Policy<'_>,
) -> Result<(String, u64), String> {
    let checked = signature.check_for(image, digest).map_err(|error| error_chain(&error))?;
    let key = checked.fingerprint();
    match policy.keys.status(checked.key(), image) {
        KeyStatus::Unknown => return Err(format!("{key} is not trusted")),
        KeyStatus::OtherImages => return Err(format!("{key} is trusted for other images only")),
        KeyStatus::Trusted => {}
    }
    let statement = &checked.statement;
    if statement.signed > policy.now.saturating_add(CLOCK_SKEW_SECONDS_MAX) {
        let (signed, now) = (shown(statement.signed), shown(policy.now));
        return Err(format!(
            "{key} seems to have signed at {signed}, and the clock of the machine shows {now}"
        ));
    }
    match statement.expires {
        Some(expires) if !policy.even_expired && expires <= policy.now.max(policy.passed) => {
            Err(format!("what {key} has signed expired at {}", shown(expires)))
        }
        _ => Ok((key, statement.signed)),
    }
}
