//! Decides what a replica does about one name, from the state on the master and the local state.
//!
//! A replica ends an image only if the master says that the image with this digest has ended. It
//! never replaces an image by another one of the same name.
//!
//! NamePatterns select the names that a replica follows. They are those of `imagetool list --glob`:
//! `*` matches anything but a slash, `**` matches slashes too, `?` matches one character, `[ab]`
//! one of these, `{a,b}` either.
// tidy: core

use api::image_server::replication::{ImageChange, ReplicationTrouble};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Time;

/// The images that a replica follows.
#[derive(Clone, Debug, Default)]
pub struct ReplicationRules {
    /// The names that are followed.
    pub patterns: NamePatterns,
    /// True if images stay that have ended on the master.
    pub is_archive: bool,
}

/// The local state of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalImage {
    /// The name was never used.
    Nothing,
    /// An image.
    Image {
        /// The digest of its content.
        digest: ObjectId,
        /// The digest of its notes, without its expiry.
        notes: ObjectId,
        expires_at: Option<Time>,
        is_held: bool,
    },
    /// The image has ended.
    Ended,
    /// A damaged record.
    Damaged,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageDecision {
    /// Nothing: the image is as on the master, or is not followed.
    Nothing,
    /// Fetch the image.
    Fetch,
    /// Replace its notes by those of the master.
    UpdateNotes,
    /// End the local image.
    End,
    /// Add a tombstone: the name was never used here.
    AddTombstone,
    /// Leave the image as it is, and report why.
    Blocked(ReplicationTrouble),
}

/// Explains why the image `name` is not as it is on `master`; `holders` use it here.
#[must_use]
pub fn explain(
    trouble: ReplicationTrouble,
    name: &ImageName,
    master: &str,
    holders: &[String],
) -> String {
    match trouble {
        ReplicationTrouble::Conflict => format!(
            "{name} is another image here than on the master {master}: neither is changed. Add \
             yours on the master under another name if it is needed, then `imagetool delete \
             --local {name}` here, and that of the master comes"
        ),
        ReplicationTrouble::EndedHere => format!(
            "the master {master} has an image {name}, but one of that name has ended here before: \
             it is not taken. Add it on the master under another name if it is needed"
        ),
        ReplicationTrouble::EndedOther => format!(
            "the master {master} has ended an image {name}, but not this one, or it does not say \
             which: it stays here. `imagetool delete --local {name}` removes it"
        ),
        ReplicationTrouble::Held => format!(
            "the master {master} has ended {name}, but it is in use here, by {}: it stays until it \
             is not. Let the machines have another image",
            holders.join(", ")
        ),
        ReplicationTrouble::Damaged => format!(
            "the record of {name} is damaged here: `imagetool delete --local {name}` removes it, \
             and it comes again from the master {master}"
        ),
        ReplicationTrouble::Failing => format!("{name} cannot be had from the master {master}"),
    }
}

impl ReplicationRules {
    /// Returns the local expiry of an image that expires at `expires_at` on the master. An archive
    /// keeps images even when it is no replica any more.
    #[must_use]
    pub fn expiry(&self, expires_at: Option<Time>) -> Option<Time> {
        expires_at.filter(|_| !self.is_archive)
    }

    /// Decides about one name.
    #[must_use]
    pub fn decide(&self, change: &ImageChange, here: &LocalImage) -> ImageDecision {
        if !self.follow(change.name()) {
            return ImageDecision::Nothing;
        }
        match (change, here) {
            (_, LocalImage::Damaged) => ImageDecision::Blocked(ReplicationTrouble::Damaged),
            (ImageChange::Image { .. }, LocalImage::Nothing) => ImageDecision::Fetch,
            (ImageChange::Image { .. }, LocalImage::Ended) => {
                ImageDecision::Blocked(ReplicationTrouble::EndedHere)
            }
            (
                ImageChange::Image { digest: theirs, notes: new, expires_at: when, .. },
                LocalImage::Image { digest, notes, expires_at, .. },
            ) => {
                if theirs != digest {
                    ImageDecision::Blocked(ReplicationTrouble::Conflict)
                } else if new != notes || self.expiry(*when) != *expires_at {
                    ImageDecision::UpdateNotes
                } else {
                    ImageDecision::Nothing
                }
            }
            (ImageChange::Ended { .. }, LocalImage::Nothing) => ImageDecision::AddTombstone,
            (ImageChange::Ended { .. }, LocalImage::Ended) => ImageDecision::Nothing,
            (
                ImageChange::Ended { digest: theirs, .. },
                LocalImage::Image { digest, is_held, .. },
            ) => {
                if *theirs != Some(*digest) {
                    ImageDecision::Blocked(ReplicationTrouble::EndedOther)
                } else if self.is_archive {
                    ImageDecision::Nothing
                } else if *is_held {
                    ImageDecision::Blocked(ReplicationTrouble::Held)
                } else {
                    ImageDecision::End
                }
            }
        }
    }

    /// Returns true if the image of that name is followed.
    #[must_use]
    pub fn follow(&self, name: &ImageName) -> bool {
        self.patterns.name(name)
    }
}

/// A pattern is invalid.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` is no pattern of image names")]
pub struct PatternError {
    pattern: String,
    #[source]
    source: globset::Error,
}

/// The patterns of the names that are followed.
#[derive(Clone, Debug, Default)]
pub struct NamePatterns {
    include: Option<GlobSet>,
    exclude: GlobSet,
}

impl NamePatterns {
    /// Selects names that match one of `include`, or any if it is empty, and none of `exclude`.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, PatternError> {
        let include = if include.is_empty() { None } else { Some(set(include)?) };
        Ok(Self { include, exclude: set(exclude)? })
    }

    /// Returns true if the image of that name is followed.
    #[must_use]
    pub fn name(&self, name: &ImageName) -> bool {
        let name = name.as_str();
        self.include.as_ref().is_none_or(|include| include.is_match(name))
            && !self.exclude.is_match(name)
    }
}

fn set(patterns: &[String]) -> Result<GlobSet, PatternError> {
    let mut globs = GlobSetBuilder::new();
    for pattern in patterns {
        // Names have no leading slash.
        let pattern_of = pattern.strip_prefix('/').unwrap_or(pattern);
        let glob = GlobBuilder::new(pattern_of).literal_separator(true).build();
        globs.add(glob.map_err(|source| PatternError { pattern: pattern.clone(), source })?);
    }
    let all = || patterns.join(", ");
    globs.build().map_err(|source| PatternError { pattern: all(), source })
}

#[cfg(test)]
mod tests {
    use api::image_server::replication::ImageEnd;
    use model::object::Algorithm;

    use super::*;

    fn id(text: &str) -> ObjectId {
        Algorithm::Blake3.digest(text.as_bytes())
    }

    fn image(digest: &str, notes: &str, expires: i64) -> ImageChange {
        ImageChange::Image {
            name: ImageName::new("base/1").unwrap(),
            digest: id(digest),
            notes: id(notes),
            expires_at: at(expires),
            bytes: 1,
        }
    }

    fn at(seconds: i64) -> Option<Time> {
        (seconds > 0).then_some(Time { seconds, nanoseconds: 0 })
    }

    fn ended(digest: Option<&str>) -> ImageChange {
        let name = ImageName::new("base/1").unwrap();
        ImageChange::Ended { name, how: ImageEnd::Deleted, digest: digest.map(id) }
    }

    fn here(digest: &str, notes: &str, expires: i64, is_held: bool) -> LocalImage {
        LocalImage::Image { digest: id(digest), notes: id(notes), expires_at: at(expires), is_held }
    }

    #[test]
    fn each_case_has_its_decision_as_a_replica_and_as_an_archive() {
        use ImageDecision::{AddTombstone, Blocked, End, Fetch, Nothing, UpdateNotes};
        let blocked = Blocked;
        #[rustfmt::skip]
        let table = [
            // the master            here                         replica                    archive
            (image("1", "n", 0),     LocalImage::Nothing,               Fetch,                     Fetch),
            (image("1", "n", 0),     here("1", "n", 0, false),    Nothing,                   Nothing),
            (image("1", "n", 0),     here("1", "n", 0, true),     Nothing,                   Nothing),
            (image("1", "m", 0),     here("1", "n", 0, false),    UpdateNotes,                    UpdateNotes),
            (image("1", "n", 5),     here("1", "n", 4, false),    UpdateNotes,                    UpdateNotes),
            (image("1", "n", 5),     here("1", "n", 0, false),    UpdateNotes,                    Nothing),
            (image("1", "n", 5),     here("1", "n", 5, false),    Nothing,                   UpdateNotes),
            (image("2", "n", 0),     here("1", "n", 0, false),    blocked(ReplicationTrouble::Conflict),   blocked(ReplicationTrouble::Conflict)),
            (image("1", "n", 0),     LocalImage::Ended,                 blocked(ReplicationTrouble::EndedHere),  blocked(ReplicationTrouble::EndedHere)),
            (image("1", "n", 0),     LocalImage::Damaged,               blocked(ReplicationTrouble::Damaged),    blocked(ReplicationTrouble::Damaged)),
            (ended(Some("1")),       LocalImage::Nothing,               AddTombstone,                      AddTombstone),
            (ended(None),            LocalImage::Nothing,               AddTombstone,                      AddTombstone),
            (ended(Some("1")),       LocalImage::Ended,                 Nothing,                   Nothing),
            (ended(Some("1")),       here("1", "n", 0, false),    End,                       Nothing),
            (ended(Some("1")),       here("1", "n", 0, true),     blocked(ReplicationTrouble::Held),       Nothing),
            (ended(Some("2")),       here("1", "n", 0, false),    blocked(ReplicationTrouble::EndedOther), blocked(ReplicationTrouble::EndedOther)),
            (ended(None),            here("1", "n", 0, false),    blocked(ReplicationTrouble::EndedOther), blocked(ReplicationTrouble::EndedOther)),
            (ended(Some("1")),       LocalImage::Damaged,               blocked(ReplicationTrouble::Damaged),    blocked(ReplicationTrouble::Damaged)),
        ];
        let replica = ReplicationRules::default();
        let archive = ReplicationRules { is_archive: true, ..ReplicationRules::default() };
        let exclude = NamePatterns::new(&[], &["base/*".to_owned()]).unwrap();
        let other = ReplicationRules { patterns: exclude, is_archive: false };
        for (change, here, as_replica, as_archive) in table {
            assert_eq!(replica.decide(&change, &here), as_replica, "{change:?} {here:?}");
            assert_eq!(archive.decide(&change, &here), as_archive, "{change:?} {here:?}");
            assert_eq!(other.decide(&change, &here), Nothing, "{change:?} {here:?}");
        }
    }

    #[test]
    fn names_are_followed_that_are_included_and_not_excluded() {
        #[rustfmt::skip]
        let table: [(&[&str], &[&str], &str, bool); 13] = [
            (&[],                 &[],               "base/1",      true),
            (&["base/*"],         &[],               "base/1",      true),
            (&["base/*"],         &[],               "base/a/1",    false),
            (&["base/**"],        &[],               "base/a/1",    true),
            (&["**"],             &[],               "base/a/1",    true),
            (&["/base/*"],        &[],               "base/1",      true),
            (&["base/*"],         &[],               "web/base/1",  false),
            (&["base/*", "web/*"], &[],              "web/1",       true),
            (&[],                 &["test/*"],       "test/1",      false),
            (&[],                 &["test/*"],       "base/1",      true),
            (&["base/*"],         &["**/*-debug"],   "base/1-debug", false),
            (&["base/*"],         &["**/*-debug"],   "base/1",      true),
            (&["{base,web}/[0-9]"], &[],             "web/7",       true),
        ];
        for (include, exclude, name, expected) in table {
            let texts = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
            let (include, exclude): (Vec<String>, Vec<String>) = (texts(include), texts(exclude));
            let patterns = NamePatterns::new(&include, &exclude).unwrap();
            let name = ImageName::new(name).unwrap();
            assert_eq!(patterns.name(&name), expected, "{name} {include:?} {exclude:?}");
        }
        let error = NamePatterns::new(&["base/[".to_owned()], &[]).unwrap_err();
        assert_eq!(error.to_string(), "`base/[` is no pattern of image names");
    }
}
