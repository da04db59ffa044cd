//! Decides whether the scanner stands still.
//!
//! Whoever watches looks again and again at what the scanner says it is at. A pass is stalled if
//! nothing has moved for two of its periods, because a disk or a network file-system hangs, say; or
//! if it moves and still has not ended for two of its periods, so that what it would notice is
//! noticed late. Of the first pass nobody knows how long it takes: it has to move, no more.
// tidy: core

use std::fmt;
use std::time::Duration;

use model::path::TreePath;

/// A kind of pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Looks at every entry.
    Metadata,
    /// Hashes every file, through the page cache.
    Content,
    /// Hashes every file, around the page cache.
    Media,
}

impl fmt::Display for Pass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Metadata => "metadata pass",
            Self::Content => "content pass",
            Self::Media => "media pass",
        })
    }
}

/// What the scanner is at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentWork {
    /// Which pass.
    pub pass: Pass,
    /// The path that it is at.
    pub path: TreePath,
    /// When it began, since the scanner was started.
    pub began: Duration,
    /// How long it may go on or stand still.
    pub limit: Duration,
    /// True if it may go on for as long as it moves.
    pub may_be_long: bool,
}

/// What the watcher remembers from one look to the next.
#[derive(Clone, Debug, Default)]
pub struct StallDetector {
    moves: u64,
    since: Duration,
    raised: Option<String>,
}

impl StallDetector {
    /// Looks at the scanner at the time `now` after its start, when it had moved so many times and
    /// was at `work`, or at nothing. Says what it is at if it stands still; the text stays the
    /// same until it does not.
    pub fn look(
        &mut self,
        now: Duration,
        moves: u64,
        work: Option<&CurrentWork>,
    ) -> Option<String> {
        if moves != self.moves || work.is_none() {
            self.moves = moves;
            self.since = now;
        }
        let stands = now.saturating_sub(self.since);
        let stalled = work.filter(|work| {
            let lasts = now.saturating_sub(work.began);
            stands > work.limit || (!work.may_be_long && lasts > work.limit)
        });
        match stalled {
            None => self.raised = None,
            Some(CurrentWork { pass, path, .. }) if self.raised.is_none() => {
                self.raised = Some(format!("the {pass} is at {path}"));
            }
            Some(_) => {}
        }
        self.raised.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(path: &str, began: u64, may_be_long: bool) -> CurrentWork {
        CurrentWork {
            pass: Pass::Metadata,
            path: path.parse().unwrap(),
            began: Duration::from_secs(began),
            limit: Duration::from_secs(10),
            may_be_long,
        }
    }

    #[test]
    fn what_stands_still_is_named_until_it_moves() {
        let mut watch = StallDetector::default();
        let mut look = |now, moves, work: Option<&CurrentWork>| {
            watch.look(Duration::from_secs(now), moves, work)
        };
        let (first, next) = (work("/a", 5, true), work("/b", 5, true));
        let stalled = Some("the metadata pass is at /a".to_owned());
        assert_eq!(look(0, 0, None), None);
        assert_eq!(look(100, 0, None), None, "it rests");
        assert_eq!(look(101, 7, Some(&first)), None);
        assert_eq!(look(111, 7, Some(&first)), None);
        assert_eq!(look(112, 7, Some(&first)), stalled);
        assert_eq!(look(120, 7, Some(&first)), stalled);
        assert_eq!(look(121, 8, Some(&next)), None);
        assert_eq!(look(130, 9, Some(&next)), None, "the first one may be long");
    }

    #[test]
    fn what_does_not_come_to_its_end_is_named_as_it_was_first() {
        let mut watch = StallDetector::default();
        let mut look = |now, moves, work: Option<&CurrentWork>| {
            watch.look(Duration::from_secs(now), moves, work)
        };
        assert_eq!(look(15, 3, Some(&work("/a", 5, false))), None);
        let stalled = Some("the metadata pass is at /b".to_owned());
        assert_eq!(look(16, 4, Some(&work("/b", 5, false))), stalled);
        assert_eq!(look(17, 5, Some(&work("/c", 5, false))), stalled);
        assert_eq!(look(18, 6, None), None);
        assert_eq!(look(19, 7, Some(&work("/d", 18, false))), None);
    }
}
