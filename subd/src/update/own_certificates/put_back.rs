//! Decides when the former TLS files of subd are put back: if no dominator has reached it with
//! those that an update brought.
//!
//! Files can pass every check of subd, and a dominator refuse them all the same. So the former ones
//! are kept before others become live, until a dominator has connected to the others.
// tidy: core

use core::fmt;
use core::time::Duration;
use std::collections::BTreeMap;

use api::subd::UpdatePhase;
use model::backoff::doubled;
use model::escape::ByteText;
use model::path::TreePath;
use model::time_parse::later;
use model::tree::Time;
use rpc::tls::FilesDigest;
use serde::{Deserialize, Serialize};

/// The most sets of files that are ordered one after the other and not reached.
const ORDERED_MAX: usize = 16;

/// How long files are refused first, and at most.
const REFUSED_FIRST: Duration = Duration::from_secs(3_600);
const REFUSED_LONGEST: Duration = Duration::from_secs(24 * 3_600);

/// The content of `tls-files.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// The files to put back, while others are ordered that no dominator has reached yet.
    pub former: Option<FormerFiles>,
    /// The last files for which others were put back.
    pub refused: Option<RefusedFiles>,
}

/// The last TLS files with which a dominator has reached subd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerFiles {
    /// Their directory in the root.
    pub directory: TreePath,
    pub digest: FilesDigest,
    /// By name; `None` if there was no such file.
    pub files: BTreeMap<String, Option<FormerFile>>,
    /// The update that ordered other files last.
    pub update_id: u64,
    /// Those that were ordered since.
    pub ordered: Vec<FilesDigest>,
    /// Present as soon as it is decided that they are put back.
    pub putting_back: Option<RefusedFiles>,
}

/// One file.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerFile {
    pub content: ByteText,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

impl fmt::Debug for FormerFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It may be a key.
        write!(formatter, "FormerFile({} bytes)", self.content.0.len())
    }
}

/// Files for which others were put back. They are tried again after a while, because it may have
/// been the dominator that was away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedFiles {
    pub files: FilesDigest,
    pub why: String,
    /// How often in a row others were put back for them.
    pub times: u32,
    /// Until when they are refused, by the machine's clock.
    pub until: Time,
}

impl RefusedFiles {
    /// Returns these files, refused from `now` on; `before` has what was refused last.
    pub fn new(files: FilesDigest, why: String, before: Option<&Self>, now: Time) -> Self {
        let before = before.filter(|before| before.files == files);
        let times = before.map_or(0, |before| before.times).saturating_add(1);
        let until = later(now, doubled(REFUSED_FIRST, REFUSED_LONGEST, times));
        Self { files, why, times, until }
    }

    /// True if the files are refused at `now`. No clock makes that last for longer than a day.
    pub fn is_in_force(&self, files: FilesDigest, now: Time) -> bool {
        self.files == files && now < self.until && self.until <= later(now, REFUSED_LONGEST)
    }
}

/// What is the case now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The files on the disk; `None` if they cannot be used.
    pub present: Option<FilesDigest>,
    pub update: UpdatePhase,
    /// True if the journal of an update cannot be closed.
    pub is_stuck: bool,
    /// The files with which a dominator has reached subd since it was started.
    pub reached: Option<FilesDigest>,
    /// For how long the files on the disk were seen there, with no update under way, since subd was
    /// started.
    pub waited: Duration,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, until something changes.
    Nothing,
    /// Nothing, until something changes or so much time is over.
    Wait(Duration),
    /// The former files are not needed any more.
    Forget,
    /// The former files take the place of these.
    PutBack(FilesDigest),
}

/// Decides what is to be done with former files. Others must be reached within `limit`.
pub fn next(former: &FormerFiles, seen: &Seen, limit: Duration) -> Next {
    if let Some(refused) = &former.putting_back {
        return Next::PutBack(refused.files);
    }
    let is_staged = matches!(seen.update, UpdatePhase::Prepared(_));
    let is_changing = matches!(seen.update, UpdatePhase::Preparing(_) | UpdatePhase::Updating(_));
    let Some(present) = seen.present.filter(|_| !is_changing && !seen.is_stuck) else {
        return Next::Nothing;
    };
    // A staged update may need them.
    let forget = if is_staged { Next::Nothing } else { Next::Forget };
    if present == former.digest {
        return forget;
    }
    // Somebody else than an update may have changed them.
    if !former.ordered.contains(&present) {
        return Next::Nothing;
    }
    if seen.reached == Some(present) {
        return forget;
    }
    match limit.saturating_sub(seen.waited) {
        Duration::ZERO => Next::PutBack(present),
        left => Next::Wait(left),
    }
}

impl Record {
    /// Forgets former files that are not needed any more, and that others were refused which a
    /// dominator has reached now.
    pub fn forget(&mut self, seen: &Seen) {
        self.former = None;
        self.refused.take_if(|refused| seen.reached == Some(refused.files));
    }
}

impl FormerFiles {
    /// Notes that the update `update_id` orders the files `ordered`.
    pub fn order(&mut self, update_id: u64, ordered: FilesDigest) {
        self.update_id = update_id;
        self.ordered.retain(|known| *known != ordered);
        self.ordered.push(ordered);
        let excess = self.ordered.len().saturating_sub(ORDERED_MAX);
        self.ordered.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use UpdatePhase::{Idle, Prepared, Preparing, Updating};
    use model::object::Algorithm;

    const LIMIT: Duration = Duration::from_secs(600);

    fn digest(name: &str) -> FilesDigest {
        let id = Algorithm::Blake3.digest(name.as_bytes());
        serde_json::from_value(serde_json::to_value(id).unwrap()).unwrap()
    }

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn former(ordered: &[&str]) -> FormerFiles {
        FormerFiles {
            directory: TreePath::new("/etc/tls").unwrap(),
            digest: digest("former"),
            files: BTreeMap::new(),
            update_id: 7,
            ordered: ordered.iter().map(|name| digest(name)).collect(),
            putting_back: None,
        }
    }

    #[test]
    fn former_files_are_put_back_if_no_dominator_comes_in_time() {
        let wait = |seconds| Next::Wait(Duration::from_secs(seconds));
        let back = Next::PutBack(digest("new"));
        #[rustfmt::skip]
        let table = [
            // present, update, stuck, reached, seconds waited
            ("former", Preparing(7), false, None, 0, Next::Nothing),
            ("former", Prepared(7), false, Some("former"), 900, Next::Nothing),
            ("former", Idle, false, None, 0, Next::Forget),
            ("former", Idle, true, None, 0, Next::Nothing),
            ("new", Updating(7), false, Some("new"), 900, Next::Nothing),
            ("new", Idle, false, None, 0, wait(600)),
            ("new", Idle, false, Some("former"), 599, wait(1)),
            ("new", Idle, false, None, 600, back),
            ("new", Idle, true, None, 600, Next::Nothing),
            ("new", Idle, false, Some("new"), 0, Next::Forget),
            ("new", Idle, false, Some("new"), 900, Next::Forget),
            // Another update is staged meanwhile.
            ("new", Preparing(8), false, None, 900, Next::Nothing),
            ("new", Prepared(8), false, None, 10, wait(590)),
            ("new", Prepared(8), false, Some("new"), 10, Next::Nothing),
            ("new", Prepared(8), false, None, 600, back),
            ("newer", Idle, false, Some("new"), 0, wait(600)),
            // They were changed by hand.
            ("by hand", Idle, false, None, 900, Next::Nothing),
            ("broken", Idle, false, None, 900, Next::Nothing),
        ];
        for (present, update, is_stuck, reached, seconds, want) in table {
            let seen = Seen {
                present: (present != "broken").then(|| digest(present)),
                update,
                is_stuck,
                reached: reached.map(digest),
                waited: Duration::from_secs(seconds),
            };
            let got = next(&former(&["new", "newer"]), &seen, LIMIT);
            assert_eq!(got, want, "{present} {update:?} {is_stuck} {reached:?} {seconds}");
            // What was begun is done, whatever is there meanwhile.
            let refused = RefusedFiles::new(digest("new"), String::new(), None, at(0));
            let begun = FormerFiles { putting_back: Some(refused), ..former(&["new"]) };
            assert_eq!(next(&begun, &seen, LIMIT), back);
        }
    }

    #[test]
    fn ordered_files_are_known_once_and_not_for_ever() {
        let mut former = former(&["a", "b"]);
        former.order(8, digest("a"));
        assert_eq!((former.update_id, &former.ordered), (8, &vec![digest("b"), digest("a")]));
        for number in 0..ORDERED_MAX {
            former.order(9, digest(&number.to_string()));
        }
        assert_eq!(former.ordered.len(), ORDERED_MAX);
        assert_eq!(former.ordered[0], digest("0"));
    }

    #[test]
    fn files_are_refused_for_longer_each_time_and_others_are_not() {
        let refuse = |files, before, now| {
            RefusedFiles::new(digest(files), "they do not fit".to_owned(), before, at(now))
        };
        let first = refuse("a", None, 0);
        let in_force =
            |refused: &RefusedFiles, files, now| refused.is_in_force(digest(files), at(now));
        assert!(in_force(&first, "a", 3_599) && !in_force(&first, "a", 3_600));
        assert!(!in_force(&first, "b", 0) && !in_force(&first, "a", -100_000));
        let second = refuse("a", Some(&first), 4_000);
        assert_eq!((second.times, second.until), (2, at(11_200)));
        let last = RefusedFiles { times: 99, ..second };
        assert_eq!(refuse("a", Some(&last), 0).until, at(86_400));
        assert_eq!(refuse("b", Some(&last), 0).until, at(3_600));
    }

    #[test]
    fn no_key_is_in_a_debug_text() {
        let content = ByteText(b"secret".to_vec());
        let file = FormerFile { content, mode: 0o600, uid: 0, gid: 0 };
        assert_eq!(format!("{file:?}"), "FormerFile(6 bytes)");
    }
}
