//! What a replica does about one name, by what its master says of it and by what is here.
//!
//! What a replica must never do follows from the table: an image is ended only if the master says
//! that this very image has ended, by its digest; and none ever takes the place of another.
// tidy: core

use api::image_server::replication::{Change, Trouble};
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Time;

use super::patterns::Patterns;

/// What is followed.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// By name.
    pub patterns: Patterns,
    /// Whether images stay that have ended on the master.
    pub is_archive: bool,
}

/// What there is of a name on this server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Here {
    /// Nothing, and there never was.
    Nothing,
    /// An image.
    Image {
        /// The digest of its content.
        digest: ObjectId,
        /// The digest of its notes, without its expiry.
        notes: ObjectId,
        /// When it expires.
        expires_at: Option<Time>,
        /// Whether it is in use.
        is_held: bool,
    },
    /// There was an image.
    Ended,
    /// A record that cannot be used.
    Damaged,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing: it is as the master has it, or is not followed.
    Nothing,
    /// Fetch the image.
    Fetch,
    /// Take its notes from the master.
    Renote,
    /// End the image that is here.
    End,
    /// Let nothing have the name any more.
    Mark,
    /// Leave it as it is, and tell operators.
    Keep(Trouble),
}

impl Rules {
    /// When an image expires here that expires at `expires_at` on the master: what is archived
    /// stays even when it is no replica any more.
    #[must_use]
    pub fn expiry(&self, expires_at: Option<Time>) -> Option<Time> {
        expires_at.filter(|_| !self.is_archive)
    }

    /// Decides about one name.
    #[must_use]
    pub fn decide(&self, change: &Change, here: &Here) -> Decision {
        if !self.follow(change.name()) {
            return Decision::Nothing;
        }
        match (change, here) {
            (_, Here::Damaged) => Decision::Keep(Trouble::Damaged),
            (Change::Image { .. }, Here::Nothing) => Decision::Fetch,
            (Change::Image { .. }, Here::Ended) => Decision::Keep(Trouble::EndedHere),
            (
                Change::Image { digest: theirs, notes: new, expires_at: when, .. },
                Here::Image { digest, notes, expires_at, .. },
            ) => {
                if theirs != digest {
                    Decision::Keep(Trouble::Conflict)
                } else if new != notes || self.expiry(*when) != *expires_at {
                    Decision::Renote
                } else {
                    Decision::Nothing
                }
            }
            (Change::Ended { .. }, Here::Nothing) => Decision::Mark,
            (Change::Ended { .. }, Here::Ended) => Decision::Nothing,
            (Change::Ended { digest: theirs, .. }, Here::Image { digest, is_held, .. }) => {
                if *theirs != Some(*digest) {
                    Decision::Keep(Trouble::EndedOther)
                } else if self.is_archive {
                    Decision::Nothing
                } else if *is_held {
                    Decision::Keep(Trouble::Held)
                } else {
                    Decision::End
                }
            }
        }
    }

    /// True if the image of that name is followed.
    #[must_use]
    pub fn follow(&self, name: &ImageName) -> bool {
        self.patterns.name(name)
    }
}

#[cfg(test)]
mod tests {
    use api::image_server::replication::Ended;
    use model::object::Algorithm;

    use super::*;

    fn id(text: &str) -> ObjectId {
        Algorithm::Blake3.digest(text.as_bytes())
    }

    fn image(digest: &str, notes: &str, expires: i64) -> Change {
        Change::Image {
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

    fn ended(digest: Option<&str>) -> Change {
        let name = ImageName::new("base/1").unwrap();
        Change::Ended { name, how: Ended::Deleted, digest: digest.map(id) }
    }

    fn here(digest: &str, notes: &str, expires: i64, is_held: bool) -> Here {
        Here::Image { digest: id(digest), notes: id(notes), expires_at: at(expires), is_held }
    }

    #[test]
    fn each_case_has_its_decision_as_a_replica_and_as_an_archive() {
        use Decision::{End, Fetch, Keep, Mark, Nothing, Renote};
        let keep = Keep;
        #[rustfmt::skip]
        let table = [
            // the master            here                         replica                    archive
            (image("1", "n", 0),     Here::Nothing,               Fetch,                     Fetch),
            (image("1", "n", 0),     here("1", "n", 0, false),    Nothing,                   Nothing),
            (image("1", "n", 0),     here("1", "n", 0, true),     Nothing,                   Nothing),
            (image("1", "m", 0),     here("1", "n", 0, false),    Renote,                    Renote),
            (image("1", "n", 5),     here("1", "n", 4, false),    Renote,                    Renote),
            (image("1", "n", 5),     here("1", "n", 0, false),    Renote,                    Nothing),
            (image("1", "n", 5),     here("1", "n", 5, false),    Nothing,                   Renote),
            (image("2", "n", 0),     here("1", "n", 0, false),    keep(Trouble::Conflict),   keep(Trouble::Conflict)),
            (image("1", "n", 0),     Here::Ended,                 keep(Trouble::EndedHere),  keep(Trouble::EndedHere)),
            (image("1", "n", 0),     Here::Damaged,               keep(Trouble::Damaged),    keep(Trouble::Damaged)),
            (ended(Some("1")),       Here::Nothing,               Mark,                      Mark),
            (ended(None),            Here::Nothing,               Mark,                      Mark),
            (ended(Some("1")),       Here::Ended,                 Nothing,                   Nothing),
            (ended(Some("1")),       here("1", "n", 0, false),    End,                       Nothing),
            (ended(Some("1")),       here("1", "n", 0, true),     keep(Trouble::Held),       Nothing),
            (ended(Some("2")),       here("1", "n", 0, false),    keep(Trouble::EndedOther), keep(Trouble::EndedOther)),
            (ended(None),            here("1", "n", 0, false),    keep(Trouble::EndedOther), keep(Trouble::EndedOther)),
            (ended(Some("1")),       Here::Damaged,               keep(Trouble::Damaged),    keep(Trouble::Damaged)),
        ];
        let replica = Rules::default();
        let archive = Rules { is_archive: true, ..Rules::default() };
        let exclude = Patterns::new(&[], &["base/*".to_owned()]).unwrap();
        let other = Rules { patterns: exclude, is_archive: false };
        for (change, here, as_replica, as_archive) in table {
            assert_eq!(replica.decide(&change, &here), as_replica, "{change:?} {here:?}");
            assert_eq!(archive.decide(&change, &here), as_archive, "{change:?} {here:?}");
            assert_eq!(other.decide(&change, &here), Nothing, "{change:?} {here:?}");
        }
    }
}
