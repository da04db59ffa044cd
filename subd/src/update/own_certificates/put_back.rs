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
use model::escape::ByteText;
use model::path::TreePath;
use rpc::tls::FilesDigest;
use serde::{Deserialize, Serialize};

/// The most sets of files that are ordered one after the other and not reached.
const ORDERED_MAX: usize = 16;

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

/// Files that are not tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedFiles {
    pub files: FilesDigest,
    pub why: String,
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
            let refused = RefusedFiles { files: digest("new"), why: String::new() };
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
    fn no_key_is_in_a_debug_text() {
        let content = ByteText(b"secret".to_vec());
        let file = FormerFile { content, mode: 0o600, uid: 0, gid: 0 };
        assert_eq!(format!("{file:?}"), "FormerFile(6 bytes)");
    }
}
