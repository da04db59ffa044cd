//! The keys that a machine trusts: a text, one key on each line.
//!
//! ```text
//! # who may sign what
//! ssh-ed25519 AAAAC3Nz... release@example.com
//! images="web/,base/debian-12" ssh-ed25519 AAAAC3Nz... web-team@example.com
//! ```
//!
//! A key without `images` may sign every image. With it only those that are named: a name is one
//! image, a name with a slash at its end a directory with all below it.

use super::openssh::{Invalid, KEY_TYPE, PublicKey};
use crate::image::ImageName;

/// The most keys in one text.
pub const KEYS_MAX: usize = 256;

/// The longest text, in bytes.
pub const TEXT_BYTES_MAX: usize = 256 << 10;

/// A trusted key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TrustedKey {
    key: PublicKey,
    comment: String,
    /// The images that it may sign; all if `None`.
    images: Option<Vec<String>>,
}

impl TrustedKey {
    fn may_sign(&self, image: &ImageName) -> bool {
        let covers = |text: &String| {
            *text == image.as_str() || (text.ends_with('/') && image.as_str().starts_with(text))
        };
        self.images.as_ref().is_none_or(|images| images.iter().any(covers))
    }
}

/// The keys that are trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedKeys(Vec<TrustedKey>);

/// Why a text is not a list of trusted keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    /// A line is not a key.
    #[error("line {number}: {why}")]
    Line {
        /// The number of the line, from 1.
        number: usize,
        /// What is wrong with it.
        why: String,
    },
    /// There are too many.
    #[error("at most {KEYS_MAX} keys in {TEXT_BYTES_MAX} bytes can be trusted")]
    TooMany,
    /// There are fewer than must sign.
    #[error("{needed} keys must sign, but only {keys} are trusted")]
    TooFew {
        /// How many must sign.
        needed: u32,
        /// How many there are.
        keys: usize,
    },
}

/// Whether a key is trusted for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStatus {
    /// It is trusted for the image.
    Trusted,
    /// It is trusted, but not for images of that name.
    OtherImages,
    /// It is not trusted.
    Unknown,
}

impl TrustedKeys {
    /// Parses the text; `needed` of its keys must sign an image.
    ///
    /// # Errors
    ///
    /// [`KeysError`] names the line.
    pub fn read(text: &str, needed: u32) -> Result<Self, KeysError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(KeysError::TooMany);
        }
        let mut keys: Vec<TrustedKey> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |why: String| KeysError::Line { number: index + 1, why };
            let key = read_line(line).map_err(bad)?;
            if keys.iter().any(|other| other.key == key.key) {
                return Err(bad("the key is named twice".to_owned()));
            }
            keys.push(key);
        }
        if keys.len() > KEYS_MAX {
            return Err(KeysError::TooMany);
        }
        if keys.len() < usize::try_from(needed.max(1)).unwrap_or(usize::MAX) {
            return Err(KeysError::TooFew { needed: needed.max(1), keys: keys.len() });
        }
        Ok(Self(keys))
    }

    /// How many keys there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if no key is trusted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether `key` is trusted for images of that name.
    pub(super) fn status(&self, key: &PublicKey, image: &ImageName) -> KeyStatus {
        match self.0.iter().find(|trusted| trusted.key == *key) {
            None => KeyStatus::Unknown,
            Some(trusted) if trusted.may_sign(image) => KeyStatus::Trusted,
            Some(_) => KeyStatus::OtherImages,
        }
    }

    /// Returns the fingerprints and comments, for people.
    pub fn names(&self) -> impl Iterator<Item = (String, &str)> {
        self.0.iter().map(|trusted| (trusted.key.fingerprint(), trusted.comment.as_str()))
    }
}

fn read_line(line: &str) -> Result<TrustedKey, String> {
    let (images, rest) = split_list(line, "images=")
        .ok_or_else(|| "after images=\"NAME,DIRECTORY/\" comes a key".to_owned())?;
    let images = images.map(image_list).transpose()?;
    let (key, comment) = read_key(rest)?;
    Ok(TrustedKey { key, comment: comment.to_owned(), images })
}

/// Takes the list apart that `start` begins, if `line` has one: returns the list, without the
/// quotation marks around it, and the rest. `None` if nothing follows the list.
pub(super) fn split_list<'a>(line: &'a str, start: &str) -> Option<(Option<&'a str>, &'a str)> {
    let Some(rest) = line.strip_prefix(start) else { return Some((None, line)) };
    let (list, rest) = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split_once("\" ")?,
        None => rest.split_once(' ')?,
    };
    Some((Some(list), rest.trim_start()))
}

/// Parses a key, and returns it with its comment. The error says what is wrong.
pub(super) fn read_key(text: &str) -> Result<(PublicKey, &str), String> {
    PublicKey::parse_line(text).map_err(|invalid| match invalid {
        Invalid::KeyType(kind) => format!("a key of the kind {kind}: only {KEY_TYPE} counts"),
        Invalid::Format(why) => {
            format!("it is no ed25519 key as `ssh-keygen` writes it to a .pub file: {why}")
        }
    })
}

fn image_list(list: &str) -> Result<Vec<String>, String> {
    let entry = |entry: &str| {
        let name = entry.strip_suffix('/').unwrap_or(entry);
        match ImageName::new(name) {
            Ok(parsed) if parsed.as_str() == name => Ok(entry.to_owned()),
            Ok(_) => Err(format!("`{entry}` begins with a slash: names of images do not")),
            Err(error) => Err(error.to_string()),
        }
    };
    list.split(',').map(entry).collect()
}
