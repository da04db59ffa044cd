//! The file that holds an image: a line with a digest, and JSON that people can read.
//!
//! ```text
//! dominator-image 1 blake3:<hex of the JSON>
//! {"image":{...},"totals":{...}}
//! ```
//!
//! A file that was truncated or changed is recognised as damaged.
// tidy: core

use api::codec::{self, CodecError, Encoding};
use api::image_server::ImageSummary;
use model::image::Image;
use model::object::Algorithm;
use model::tree::Totals;
use serde::{Deserialize, Serialize};

/// Prepends a line with `magic` and the digest of `body`.
#[must_use]
pub fn guard(magic: &str, mut body: Vec<u8>) -> Vec<u8> {
    let mut bytes = format!("{magic}{}\n", Algorithm::Blake3.digest(&body)).into_bytes();
    bytes.append(&mut body);
    bytes
}

/// Checks and removes the line that [`guard`] has prepended.
pub fn unguard<'bytes>(magic: &str, bytes: &'bytes [u8]) -> Result<&'bytes [u8], RecordError> {
    let rest = bytes.strip_prefix(magic.as_bytes()).ok_or(RecordError::Magic)?;
    let end = rest.iter().position(|&byte| byte == b'\n').ok_or(RecordError::Damaged)?;
    let (digest, body) = (&rest[..end], &rest[end + 1..]);
    if Algorithm::Blake3.digest(body).to_string().as_bytes() != digest {
        return Err(RecordError::Damaged);
    }
    Ok(body)
}

const MAGIC: &str = "dominator-image 1 ";

/// The longest record, in bytes: JSON of the largest request takes at most six bytes for each.
pub const RECORD_BYTES_MAX: usize = 128 << 20;

/// An image as it is kept: with the sums over its tree, so that none needs the tree to be listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub image: Image,
    /// Sums over its tree.
    pub totals: Totals,
}

/// Why bytes are not an intact record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("it does not begin as such a file does")]
    Magic,
    #[error("it was changed or cut short after it was written")]
    Damaged,
    #[error("it is intact, but this release does not understand it")]
    Unknown {
        #[source]
        source: CodecError,
    },
}

impl Record {
    /// The bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        let mut body = codec::encode(Encoding::Json, "image record", self)?;
        body.push(b'\n');
        Ok(guard(MAGIC, body))
    }

    /// Reads the bytes of the file.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let body = unguard(MAGIC, bytes)?;
        codec::decode(Encoding::Json, "image record", body, RECORD_BYTES_MAX)
            .map_err(|source| RecordError::Unknown { source })
    }

    /// Returns the summary for lists.
    #[must_use]
    pub fn summary(&self) -> ImageSummary {
        let Image { content, notes } = &self.image;
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        ImageSummary {
            name: content.name.clone(),
            digest: content.digest(),
            root: content.root,
            totals: self.totals,
            filter_lines: content.filter.as_ref().map(|filter| count(filter.lines().len())),
            triggers: count(content.triggers.0.len()),
            created_on: notes.created_on,
            expires_at: notes.expires_at,
            tags: notes.tags.clone(),
            signatures: count(notes.signatures.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::filter::Filter;
    use model::image::{Content, FORMAT, ImageName, Notes};
    use model::tree::{Time, Tree};
    use model::trigger::Triggers;

    use super::*;

    fn record() -> Record {
        let tree = Tree::empty(Algorithm::Blake3);
        let content = Content {
            format: FORMAT,
            name: ImageName::new("base/debian").unwrap(),
            root: tree.digest(),
            filter: Some(Filter::new(["/var/log/.*"]).unwrap()),
            triggers: Triggers::default(),
            computed: Vec::new(),
            health_check: None,
            signers: Vec::new(),
        };
        let created_on = Time { seconds: 1_700_000_000, nanoseconds: 5 };
        let notes = Notes { created_on, ..Notes::default() };
        Record { image: Image { content, notes }, totals: tree.root().totals() }
    }

    #[test]
    fn a_record_comes_back() {
        let bytes = record().encode().unwrap();
        assert_eq!(Record::decode(&bytes).unwrap(), record());
    }

    #[test]
    fn every_damage_is_found() {
        let bytes = record().encode().unwrap();
        for index in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 1;
            assert!(Record::decode(&damaged).is_err(), "byte {index} changed");
            assert!(Record::decode(&bytes[..index]).is_err(), "cut at byte {index}");
        }
    }

    #[test]
    fn the_summary_says_what_lists_show() {
        let summary = record().summary();
        assert_eq!(summary.filter_lines, Some(1));
        assert_eq!(summary.digest, record().image.content.digest());
        assert_eq!(summary.totals, Totals::default());
    }
}
