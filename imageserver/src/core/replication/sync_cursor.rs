//! The position of a replica in the list or in the changes of its master.
// tidy: core

use std::ops::Bound;

use api::image_server::replication::{
    CHANGES_MAX, Cursor, GetImageUpdatesReply, ReplicationPosition, SERVERS_MAX, ServerId,
};
use model::image::ImageName;

/// The position of a replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SyncCursor {
    /// Nothing was received yet.
    #[default]
    Begin,
    /// Reading the list.
    Listing {
        /// The cursor of the first page, from which changes are followed.
        first: Cursor,
        /// The last received name.
        after: ImageName,
    },
    /// All changes up to this cursor were received.
    Following(Cursor),
}

/// Why a reply is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    #[error("the master's reply has more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
    #[error("the master's list is not sorted at {name}")]
    Order { name: ImageName },
    #[error("a page of the master's list is empty, and not the last one")]
    Empty,
    #[error("the master's reply goes back behind what was followed already")]
    Back,
}

/// The server would be its own master.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this server (store {own}) is its own master, over {servers}: start one of them without \
     --replicate-from; if a data directory was copied from the other, delete the file `server-id` \
     in one of the two"
)]
pub struct LoopError {
    pub own: ServerId,
    pub servers: String,
}

/// The names that a page of the list covers: names within the bounds that it does not list are not
/// on the master.
pub type Span = (Bound<ImageName>, Bound<ImageName>);

/// What a reply contained besides its changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenReply {
    /// The covered part of the list; `None` if the reply has changes.
    pub span: Option<Span>,
    /// True for the first page of the list.
    pub is_first: bool,
}

impl SyncCursor {
    /// Returns the next request.
    #[must_use]
    pub fn position(&self) -> ReplicationPosition {
        match self {
            Self::Begin => ReplicationPosition::Start,
            Self::Listing { first, after } => {
                ReplicationPosition::After { instance: first.instance, name: after.clone() }
            }
            Self::Following(cursor) => ReplicationPosition::Since(*cursor),
        }
    }

    /// Returns true if the list was received to its end.
    #[must_use]
    pub fn follows(&self) -> bool {
        matches!(self, Self::Following(_))
    }

    /// Returns true if all changes up to `cursor` were received.
    #[must_use]
    pub fn has_passed(&self, cursor: Cursor) -> bool {
        match self {
            // A restarted master sends its list, which has all changes.
            Self::Following(own) => own.instance != cursor.instance || *own >= cursor,
            _ => false,
        }
    }

    /// Applies a reply. On failure nothing changes.
    ///
    /// # Errors
    ///
    /// [`ReplyError`]; then nothing has changed.
    pub fn take(&mut self, reply: &GetImageUpdatesReply) -> Result<TakenReply, ReplyError> {
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
                    Ok(TakenReply { span: None, is_first: false })
                }
                _ => Err(ReplyError::Back),
            };
        }
        let (first, after) = match self {
            Self::Listing { first, after } if first.instance == cursor.instance => {
                (*first, Some(after.clone()))
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
                (Bound::Included(last.clone()), Self::Listing { first, after: last })
            }
            (false, _) => (Bound::Unbounded, Self::Following(first)),
        };
        *self = next;
        Ok(TakenReply { span: Some((from, to)), is_first })
    }
}

/// Refuses a master that follows this server.
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
    use api::image_server::replication::{ImageChange, ImageEnd};

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
        let ended = |text: &&str| ImageChange::Ended {
            name: name(text),
            how: ImageEnd::Deleted,
            digest: None,
        };
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
        let mut sync_cursor = SyncCursor::default();
        assert_eq!(sync_cursor.position(), ReplicationPosition::Start);
        let first = sync_cursor.take(&reply((7, 10), true, &["a", "b"], true)).unwrap();
        let to_b = (Bound::Unbounded, Bound::Included(name("b")));
        assert_eq!(first, TakenReply { span: Some(to_b), is_first: true });
        assert_eq!(
            sync_cursor.position(),
            ReplicationPosition::After { instance: 7, name: name("b") }
        );
        assert!(!sync_cursor.has_passed(Cursor { instance: 7, sequence: 1 }));

        // Something changed meanwhile: it is told again, from where the list began.
        let last = sync_cursor.take(&reply((7, 12), true, &["c"], false)).unwrap();
        let rest = (Bound::Excluded(name("b")), Bound::Unbounded);
        assert_eq!(last, TakenReply { span: Some(rest), is_first: false });
        assert_eq!(
            sync_cursor.position(),
            ReplicationPosition::Since(Cursor { instance: 7, sequence: 10 })
        );
        sync_cursor.take(&reply((7, 12), false, &["a"], false)).unwrap();
        assert_eq!(sync_cursor, SyncCursor::Following(Cursor { instance: 7, sequence: 12 }));
        assert!(sync_cursor.has_passed(Cursor { instance: 7, sequence: 12 }));
        assert!(!sync_cursor.has_passed(Cursor { instance: 7, sequence: 13 }));

        // The master was started again.
        let again = sync_cursor.take(&reply((8, 0), true, &[], false)).unwrap();
        let all = (Bound::Unbounded, Bound::Unbounded);
        assert_eq!(again, TakenReply { span: Some(all), is_first: true });
        assert_eq!(sync_cursor, SyncCursor::Following(Cursor { instance: 8, sequence: 0 }));
        assert!(sync_cursor.has_passed(Cursor { instance: 7, sequence: 99 }));
    }

    #[test]
    fn a_master_that_is_started_again_in_the_middle_of_its_list_begins_anew() {
        let mut sync_cursor = SyncCursor::default();
        sync_cursor.take(&reply((7, 10), true, &["a", "m"], true)).unwrap();
        let taken = sync_cursor.take(&reply((8, 0), true, &["a"], true)).unwrap();
        assert!(taken.is_first);
        assert_eq!(
            sync_cursor.position(),
            ReplicationPosition::After { instance: 8, name: name("a") }
        );
    }

    #[test]
    fn replies_that_make_no_sense_change_nothing() {
        let order = |text: &str| ReplyError::Order { name: name(text) };
        let in_list = {
            let mut sync_cursor = SyncCursor::default();
            sync_cursor.take(&reply((7, 10), true, &["m"], true)).unwrap();
            sync_cursor
        };
        let following = SyncCursor::Following(Cursor { instance: 7, sequence: 10 });
        let many: Vec<String> = (0..=CHANGES_MAX).map(|number| format!("{number:06}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let changes = ReplyError::TooMany { what: "changes", limit: CHANGES_MAX };
        #[rustfmt::skip]
        let table = [
            (SyncCursor::Begin,     reply((7, 1), true, &["b", "a"], false),  order("a")),
            (SyncCursor::Begin,     reply((7, 1), true, &["a", "a"], false),  order("a")),
            (SyncCursor::Begin,     reply((7, 1), true, &[], true),           ReplyError::Empty),
            (SyncCursor::Begin,     reply((7, 1), false, &["a"], false),      ReplyError::Back),
            (SyncCursor::Begin,     reply((7, 1), true, &many, false),        changes),
            (in_list.clone(),   reply((7, 11), true, &["a"], false),      order("a")),
            (in_list,           reply((7, 11), false, &["z"], false),     ReplyError::Back),
            (following.clone(), reply((7, 9), false, &["a"], false),      ReplyError::Back),
            (following,         reply((8, 11), false, &["a"], false),     ReplyError::Back),
        ];
        for (sync_cursor, reply, error) in table {
            let mut after = sync_cursor.clone();
            assert_eq!(after.take(&reply), Err(error));
            assert_eq!(after, sync_cursor);
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
