//! Tags of images: which are allowed, how they change, and which image is the latest.

use std::collections::{BTreeMap, BTreeSet};

/// The most that the tags of one image may have together, in bytes: a list of a thousand images
/// with them must fit a reply.
pub const TAGS_BYTES_MAX: usize = 4_096;

/// Tags by name.
pub type Tags = BTreeMap<String, String>;

/// Tags that are not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TagsError {
    /// A tag has no name.
    #[error("the name of a tag must not be empty, nor hold `=`: `{name}`")]
    Name {
        /// Its name, escaped.
        name: String,
    },
    /// A tag holds a control character, which could manipulate a terminal.
    #[error("the tag `{name}` holds a control character")]
    Control {
        /// Its name, escaped.
        name: String,
    },
    /// There are too many.
    #[error("the tags of an image have at most {TAGS_BYTES_MAX} bytes, these have {bytes}")]
    TooLong { bytes: usize },
    /// A tag to be removed does not exist.
    #[error("there is no tag `{name}`")]
    NotThere { name: String },
}

/// Refuses tags that are too long, or that cannot be displayed or selected.
pub fn verify(tags: &Tags) -> Result<(), TagsError> {
    let mut bytes = 0;
    for (name, value) in tags {
        let shown = || crate::escape::escape(name.as_bytes());
        if name.is_empty() || name.contains('=') {
            return Err(TagsError::Name { name: shown() });
        }
        if name.chars().chain(value.chars()).any(char::is_control) {
            return Err(TagsError::Control { name: shown() });
        }
        bytes += name.len() + value.len();
    }
    if bytes > TAGS_BYTES_MAX { Err(TagsError::TooLong { bytes }) } else { Ok(()) }
}

/// Returns `tags` with those of `set`, and without those of `remove`.
///
/// # Errors
///
/// Fails if a tag to be removed does not exist, or as [`verify`].
pub fn apply_changes(tags: &Tags, set: Tags, remove: &BTreeSet<String>) -> Result<Tags, TagsError> {
    let mut tags = tags.clone();
    for name in remove {
        if tags.remove(name).is_none() {
            return Err(TagsError::NotThere { name: crate::escape::escape(name.as_bytes()) });
        }
    }
    tags.extend(set);
    verify(&tags)?;
    Ok(tags)
}

/// Returns true if `tags` contain all `wanted` tags with their values.
#[must_use]
pub fn contain_all(tags: &Tags, wanted: &Tags) -> bool {
    wanted.iter().all(|(name, value)| tags.get(name) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(tags: &[(&str, &str)]) -> Tags {
        tags.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn tags_can_be_named_and_shown() {
        let table = [
            (tags(&[]), None),
            (tags(&[("os", "debian 12"), ("deprecated", "")]), None),
            (tags(&[("", "x")]), Some("the name of a tag must not be empty, nor hold `=`: ``")),
            (
                tags(&[("a=b", "")]),
                Some("the name of a tag must not be empty, nor hold `=`: `a=b`"),
            ),
            (tags(&[("a", "\u{1b}[2J")]), Some("the tag `a` holds a control character")),
            (
                tags(&[("a", &"x".repeat(4_096))]),
                Some("the tags of an image have at most 4096 bytes, these have 4097"),
            ),
        ];
        for (tags, error) in table {
            assert_eq!(verify(&tags).err().map(|error| error.to_string()).as_deref(), error);
        }
    }

    #[test]
    fn tags_are_set_and_removed() {
        let before = tags(&[("a", "1"), ("b", "2")]);
        let remove = |name: &str| BTreeSet::from([name.to_owned()]);
        let set = tags(&[("a", "3"), ("c", "4")]);
        let after = apply_changes(&before, set, &remove("b"));
        assert_eq!(after, Ok(tags(&[("a", "3"), ("c", "4")])));
        let missing = TagsError::NotThere { name: "x".to_owned() };
        assert_eq!(apply_changes(&before, tags(&[]), &remove("x")), Err(missing));
        assert!(apply_changes(&before, tags(&[("", "")]), &BTreeSet::new()).is_err());
        assert!(contain_all(&before, &tags(&[("a", "1")])) && contain_all(&before, &tags(&[])));
        assert!(
            !contain_all(&before, &tags(&[("a", "2")]))
                && !contain_all(&before, &tags(&[("c", "1")]))
        );
    }
}
