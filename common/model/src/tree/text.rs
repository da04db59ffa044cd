//! The text form of a tree: one line per entry, made to be read, compared and edited.
//!
//! ```text
//! d 755 0:0 /etc
//! f 644 0:0 1700000000.000000000 12 blake3:ab.. /etc/passwd user.origin=image
//! g 644 0:0 files.example:6972 /etc/resolv.conf
//! l 0:0 /bin -> usr/bin
//! h /usr/bin/again -> /usr/bin/first
//! b 660 0:6 1700000000.000000000 8,1 /dev/sda
//! c 666 0:0 1700000000.000000000 1,3 /dev/null
//! p 600 0:0 1700000000.000000000 /run/pipe
//! ```
//!
//! The columns are: kind, mode in octal, owner, what the kind has, path; then a symlink's or hard
//! link's target, and the extended attributes. Names and values are escaped as in
//! [`crate::escape`], white space too, so that columns are split at single spaces. Lines that are
//! empty or start with `#` are ignored. Sorted by path, a tree has exactly one text.

use std::fmt::Write as _;

use super::node::{
    Computed, Device, File, Leaf, Metadata, Node, SYMLINK_MODE, Special, Symlink, Time,
};
use super::{Tree, TreeBuilder, TreeError, Xattrs};
use crate::escape::{ByteText, escape_word, unescape};
use crate::object::{Algorithm, ObjectId};
use crate::path::TreePath;

/// A text that is no tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A line cannot be read.
    #[error("line {line}: bad {what}: `{text}`")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// What could not be read.
        what: &'static str,
        /// The line.
        text: String,
    },
    /// The lines do not describe a valid tree.
    #[error("the lines do not describe a valid tree")]
    Tree {
        #[source]
        source: TreeError,
    },
}

/// Writes `tree` as text, sorted by path, each line ended by a newline.
#[must_use]
pub fn to_text(tree: &Tree) -> String {
    tree.nodes().fold(String::new(), |mut text, (path, node)| {
        text.push_str(&line_of(&path, &node));
        text.push('\n');
        text
    })
}

/// Writes one entry as a line, without a newline.
#[must_use]
pub fn line_of(path: &TreePath, node: &Node) -> String {
    let name = escape_word(path.as_bytes());
    let mut line = match node {
        Node::Directory(metadata) => format!("d {} {name}", owned(metadata)),
        Node::Leaf(Leaf::File(file)) => format!(
            "f {} {} {} {} {name}",
            owned(&file.metadata),
            time(file.mtime),
            file.size_bytes,
            file.object.id()
        ),
        Node::Leaf(Leaf::Computed(computed)) => format!(
            "g {} {} {name}",
            owned(&computed.metadata),
            escape_word(computed.source.as_bytes())
        ),
        Node::Leaf(Leaf::Symlink(symlink)) => format!(
            "l {}:{} {name} -> {}",
            symlink.metadata.uid,
            symlink.metadata.gid,
            escape_word(&symlink.target.0)
        ),
        Node::Leaf(Leaf::HardLink(target)) => {
            format!("h {name} -> {}", escape_word(target.as_bytes()))
        }
        Node::Leaf(Leaf::Special(special)) => {
            let (kind, numbers) = match special.device {
                Device::Block { major, minor } => ("b", format!(" {major},{minor}")),
                Device::Character { major, minor } => ("c", format!(" {major},{minor}")),
                Device::Fifo => ("p", String::new()),
            };
            let metadata = owned(&special.metadata);
            format!("{kind} {metadata} {}{numbers} {name}", time(special.mtime))
        }
    };
    if let Some(metadata) = node.metadata() {
        for (key, value) in metadata.xattrs.iter() {
            let key = escape_word(key).replace('=', "\\x3d");
            write!(line, " {key}={}", escape_word(value)).expect("writing to a String cannot fail");
        }
    }
    line
}

fn owned(metadata: &Metadata) -> String {
    format!("{:o} {}:{}", metadata.mode, metadata.uid, metadata.gid)
}

fn time(time: Time) -> String {
    format!("{}.{:09}", time.seconds, time.nanoseconds)
}

/// Reads a tree back from its text.
///
/// # Errors
///
/// [`TextError`] names the line.
pub fn from_text(algorithm: Algorithm, text: &str) -> Result<Tree, TextError> {
    let mut builder = TreeBuilder::new(algorithm);
    for (index, line) in text.lines().enumerate() {
        let content = line.trim_start();
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        let (path, node) = node_of(content).map_err(|what| TextError::Line {
            line: index + 1,
            what,
            text: line.to_owned(),
        })?;
        builder.insert(path, node).map_err(|source| TextError::Tree { source })?;
    }
    builder.finish().map_err(|source| TextError::Tree { source })
}

fn node_of(line: &str) -> Result<(TreePath, Node), &'static str> {
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let mut word = |what: &'static str| words.next().ok_or(what);
    let kind = word("kind")?;
    let mode = match kind {
        "l" | "h" => SYMLINK_MODE,
        _ => u32::from_str_radix(word("mode")?, 8).map_err(|_| "mode")?,
    };
    let mut metadata = Metadata::new(mode, 0, 0);
    if kind != "h" {
        let (uid, gid) = pair(word("owner")?, ':').ok_or("owner")?;
        (metadata.uid, metadata.gid) = (uid, gid);
    }
    let mtime = match kind {
        "f" | "b" | "c" | "p" => time_of(word("time")?).ok_or("time")?,
        _ => Time::default(),
    };
    let draft = match kind {
        "d" => Node::Directory(metadata),
        "f" => Node::Leaf(Leaf::File(File {
            metadata,
            mtime,
            size_bytes: word("size")?.parse().map_err(|_| "size")?,
            object: word("object id")?.parse::<ObjectId>().map_err(|_| "object id")?.into(),
        })),
        "g" => {
            let source = unescape(word("source")?).map_err(|_| "source")?;
            let source = String::from_utf8(source).map_err(|_| "source")?;
            Node::Leaf(Leaf::Computed(Computed { metadata, source }))
        }
        "l" => Node::Leaf(Leaf::Symlink(Symlink { metadata, target: ByteText(Vec::new()) })),
        "h" => Node::Leaf(Leaf::HardLink(TreePath::root())),
        "b" | "c" => {
            let (major, minor) = pair(word("device numbers")?, ',').ok_or("device numbers")?;
            let device = if kind == "b" {
                Device::Block { major, minor }
            } else {
                Device::Character { major, minor }
            };
            Node::Leaf(Leaf::Special(Special { metadata, mtime, device }))
        }
        "p" => Node::Leaf(Leaf::Special(Special { metadata, mtime, device: Device::Fifo })),
        _ => return Err("kind"),
    };
    let path = path_of(word("path")?).ok_or("path")?;
    let mut node = draft;
    if let Node::Leaf(Leaf::Symlink(_) | Leaf::HardLink(_)) = node {
        if word("arrow")? != "->" {
            return Err("arrow");
        }
        let target = word("target")?;
        match &mut node {
            Node::Leaf(Leaf::Symlink(symlink)) => {
                symlink.target = ByteText(unescape(target).map_err(|_| "target")?);
            }
            Node::Leaf(Leaf::HardLink(to)) => *to = path_of(target).ok_or("target")?,
            _ => {}
        }
    }
    let xattrs = xattrs_of(words)?;
    match node.metadata_mut() {
        Some(metadata) => metadata.xattrs = xattrs,
        None if xattrs.is_empty() => {}
        None => return Err("extended attribute of a hard link"),
    }
    Ok((path, node))
}

/// Reads words of the form `KEY=VALUE`.
fn xattrs_of<'line>(words: impl Iterator<Item = &'line str>) -> Result<Xattrs, &'static str> {
    let pair_of = |word: &str| {
        let (key, value) = word.split_once('=')?;
        Some((unescape(key).ok()?, unescape(value).ok()?))
    };
    words.map(|word| pair_of(word).ok_or("extended attribute")).collect()
}

fn path_of(word: &str) -> Option<TreePath> {
    TreePath::new(unescape(word).ok()?).ok()
}

fn pair(word: &str, separator: char) -> Option<(u32, u32)> {
    let (left, right) = word.split_once(separator)?;
    Some((left.parse().ok()?, right.parse().ok()?))
}

fn time_of(word: &str) -> Option<Time> {
    let (seconds, nanoseconds) = word.split_once('.')?;
    let fits = nanoseconds.len() == 9 && nanoseconds.bytes().all(|byte| byte.is_ascii_digit());
    fits.then_some(())?;
    Some(Time { seconds: seconds.parse().ok()?, nanoseconds: nanoseconds.parse().ok()? })
}
