//! Where a replica is in what its master tells: in the list, or after it.
// tidy: core

use std::ops::Bound;

use api::image_server::replication::{
    CHANGES_MAX, Cursor, GetImageUpdatesReply, Position, SERVERS_MAX, ServerId,
};
use model::image::ImageName;

/// Where a replica is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Course {
    /// Nothing is known.
    #[default]
    Begin,
    /// In the list.
    Listing {
        /// The cursor of its first page: from there on changes are followed.
        begun: Cursor,
        /// The last name that was told.
        after: ImageName,
    },
    /// All that has changed up to here was told.
    Following(Cursor),
}

/// A reply that breaks the rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// There is too much in it.
    #[error("the master's reply has more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// What is accepted.
        limit: usize,
    },
    /// A page is not sorted, or does not follow the one before.
    #[error("the master's list is not sorted at {name}")]
    Order {
        /// Where.
        name: ImageName,
    },
    /// There should be more, after nothing.
    #[error("a page of the master's list is empty, and not the last one")]
    Empty,
    /// It is no answer to what was asked.
    #[error("the master's reply goes back behind what was followed already")]
    Back,
}

/// This server would be its own master.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this server (store {own}) is its own master, over {servers}: start one of them without \
     --replicate-from; if a data directory was copied from the other, delete the file `server-id` \
     in one of the two"
)]
pub struct LoopError {
    /// Its store.
    pub own: ServerId,
    /// Those between, for people.
    pub servers: String,
}

/// The names that a page of a list speaks of: those between the bounds that it does not name are
/// not on the master.
pub type Span = (Bound<ImageName>, Bound<ImageName>);

/// What a reply brought, beside its changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The part of the list that was told; `None` if these are changes.
    pub span: Option<Span>,
    /// True if the list began with this.
    pub is_first: bool,
}

impl Course {
    /// What to ask for next.
    #[must_use]
    pub fn position(&self) -> Position {
        match self {
            Self::Begin => Position::Start,
            Self::Listing { begun, after } => {
                Position::After { instance: begun.instance, name: after.clone() }
            }
            Self::Following(cursor) => Position::Since(*cursor),
        }
    }

    /// True if the list was told to its end, and changes since.
    #[must_use]
    pub fn follows(&self) -> bool {
        matches!(self, Self::Following(_))
    }

    /// True if all that was changed up to `cursor` was told.
    #[must_use]
    pub fn has_passed(&self, cursor: Cursor) -> bool {
        match self {
            // A master that was started again tells its list, which has all of it.
            Self::Following(own) => own.instance != cursor.instance || *own >= cursor,
            _ => false,
        }
    }

    /// Takes note of a reply.
    ///
    /// # Errors
    ///
    /// [`ReplyError`]; then nothing has changed.
    pub fn take(&mut self, reply: &GetImageUpdatesReply) -> Result<Taken, ReplyError> {
        let GetImageUpdatesReply { upstream, cursor, is_list, changes, more, .. } = reply;
        let too_many = |what, limit| Err(ReplyError::TooMany { what, limit });
        if upstream.len() > SERVERS_MAX {
            return too_many("servers above it", SERVERS_MAX);
        }
        if changes.len() > CHANGES_MAX {
            return too_many("changes", CHANGES_MAX);
        }
        if !is_list {
            return match self {
                Self::Following(own) if own.instance == cursor.instance && *own <= *cursor => {
                    *own = *cursor;
                    Ok(Taken { span: None, is_first: false })
                }
                _ => Err(ReplyError::Back),
            };
        }
        let (begun, after) = match self {
            Self::Listing { begun, after } if begun.instance == cursor.instance => {
                (*begun, Some(after.clone()))
            }
            _ => (*cursor, None),
        };
        let mut former = after.as_ref();
        for change in changes {
            if former.is_some_and(|former| former >= change.name()) {
                return Err(ReplyError::Order { name: change.name().clone() });
            }
            former = Some(change.name());
        }
        let last = changes.last().map(|change| change.name().clone());
        let is_first = after.is_none();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let (to, next) = match (more, last) {
            (true, None) => return Err(ReplyError::Empty),
            (true, Some(last)) => {
                (Bound::Included(last.clone()), Self::Listing { begun, after: last })
            }
            (false, _) => (Bound::Unbounded, Self::Following(begun)),
        };
        *self = next;
        Ok(Taken { span: Some((from, to)), is_first })
    }
}

/// Refuses a master that follows this server.
///
/// # Errors
///
/// [`LoopError`].
pub fn expect_no_loop(own: &ServerId, reply: &GetImageUpdatesReply) -> Result<(), LoopError> {
    let mut between = vec![&reply.server];
    if reply.server == *own {
        return Err(LoopError { own: own.clone(), servers: "itself".to_owned() });
    }
    for server in &reply.upstream {
        if server == own {
            let texts: Vec<String> = between.into_iter().map(|id| format!("store {id}")).collect();
            return Err(LoopError { own: own.clone(), servers: texts.join(", ") });
        }
        between.push(server);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use api::image_server::replication::{Change, Ended};

    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn server(number: u128) -> ServerId {
        ServerId::from(number)
    }

    fn reply(
        cursor: (u64, u64),
        is_list: bool,
        names: &[&str],
        more: bool,
    ) -> GetImageUpdatesReply {
        let ended =
            |text: &&str| Change::Ended { name: name(text), how: Ended::Deleted, digest: None };
        GetImageUpdatesReply {
            server: server(1),
            upstream: vec![],
            cursor: Cursor { instance: cursor.0, sequence: cursor.1 },
            is_list,
            changes: names.iter().map(ended).collect(),
            more,
            directories: None,
        }
    }

    #[test]
    fn a_list_is_taken_page_by_page_and_changes_since_its_beginning_follow() {
        let mut course = Course::default();
        assert_eq!(course.position(), Position::Start);
        let first = course.take(&reply((7, 10), true, &["a", "b"], true)).unwrap();
        let to_b = (Bound::Unbounded, Bound::Included(name("b")));
        assert_eq!(first, Taken { span: Some(to_b), is_first: true });
        assert_eq!(course.position(), Position::After { instance: 7, name: name("b") });
        assert!(!course.has_passed(Cursor { instance: 7, sequence: 1 }));

        // Something changed meanwhile: it is told again, from where the list began.
        let last = course.take(&reply((7, 12), true, &["c"], false)).unwrap();
        let rest = (Bound::Excluded(name("b")), Bound::Unbounded);
        assert_eq!(last, Taken { span: Some(rest), is_first: false });
        assert_eq!(course.position(), Position::Since(Cursor { instance: 7, sequence: 10 }));
        course.take(&reply((7, 12), false, &["a"], false)).unwrap();
        assert_eq!(course, Course::Following(Cursor { instance: 7, sequence: 12 }));
        assert!(course.has_passed(Cursor { instance: 7, sequence: 12 }));
        assert!(!course.has_passed(Cursor { instance: 7, sequence: 13 }));

        // The master was started again.
        let again = course.take(&reply((8, 0), true, &[], false)).unwrap();
        let all = (Bound::Unbounded, Bound::Unbounded);
        assert_eq!(again, Taken { span: Some(all), is_first: true });
        assert_eq!(course, Course::Following(Cursor { instance: 8, sequence: 0 }));
        assert!(course.has_passed(Cursor { instance: 7, sequence: 99 }));
    }

    #[test]
    fn a_master_that_is_started_again_in_the_middle_of_its_list_begins_anew() {
        let mut course = Course::default();
        course.take(&reply((7, 10), true, &["a", "m"], true)).unwrap();
        let taken = course.take(&reply((8, 0), true, &["a"], true)).unwrap();
        assert!(taken.is_first);
        assert_eq!(course.position(), Position::After { instance: 8, name: name("a") });
    }

    #[test]
    fn replies_that_make_no_sense_change_nothing() {
        let order = |text: &str| ReplyError::Order { name: name(text) };
        let in_list = {
            let mut course = Course::default();
            course.take(&reply((7, 10), true, &["m"], true)).unwrap();
            course
        };
        let following = Course::Following(Cursor { instance: 7, sequence: 10 });
        let many: Vec<String> = (0..=CHANGES_MAX).map(|number| format!("{number:06}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let changes = ReplyError::TooMany { what: "changes", limit: CHANGES_MAX };
        #[rustfmt::skip]
        let table = [
            (Course::Begin,     reply((7, 1), true, &["b", "a"], false),  order("a")),
            (Course::Begin,     reply((7, 1), true, &["a", "a"], false),  order("a")),
            (Course::Begin,     reply((7, 1), true, &[], true),           ReplyError::Empty),
            (Course::Begin,     reply((7, 1), false, &["a"], false),      ReplyError::Back),
            (Course::Begin,     reply((7, 1), true, &many, false),        changes),
            (in_list.clone(),   reply((7, 11), true, &["a"], false),      order("a")),
            (in_list,           reply((7, 11), false, &["z"], false),     ReplyError::Back),
            (following.clone(), reply((7, 9), false, &["a"], false),      ReplyError::Back),
            (following,         reply((8, 11), false, &["a"], false),     ReplyError::Back),
        ];
        for (course, reply, error) in table {
            let mut after = course.clone();
            assert_eq!(after.take(&reply), Err(error));
            assert_eq!(after, course);
        }
    }

    #[test]
    fn a_server_that_finds_itself_above_itself_refuses() {
        let upstream = |ids: &[u128]| {
            let upstream = ids.iter().map(|id| server(*id)).collect();
            GetImageUpdatesReply { upstream, ..reply((7, 1), true, &[], false) }
        };
        let text = |own: u128, reply: &GetImageUpdatesReply| {
            expect_no_loop(&server(own), reply).map_err(|error| error.servers)
        };
        let store = |number: u128| format!("store {}", server(number));
        assert_eq!(text(9, &upstream(&[2, 3])), Ok(()));
        assert_eq!(text(1, &upstream(&[])), Err("itself".to_owned()));
        assert_eq!(text(9, &upstream(&[9])), Err(store(1)));
        assert_eq!(text(9, &upstream(&[2, 9, 1])), Err(format!("{}, {}", store(1), store(2))));
    }
}
