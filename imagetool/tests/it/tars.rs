//! Makes archives byte by byte, good ones and bad ones.

use std::io::{Seek, Write};

use imagetool::archive::{Archive, ArchiveError};
use imagetool::output::progress::Meter;
use model::object::Algorithm;
use model::tree::{Tree, text};
use tar::{EntryType, Header};

/// A member of an archive that is being made.
#[derive(Clone)]
pub struct Member {
    pub header: Header,
    pub content: Vec<u8>,
}

impl Member {
    /// A member with that name, whatever it is; mode 644, owned by root.
    pub fn new(kind: EntryType, name: &[u8]) -> Self {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_mode(if kind == EntryType::Directory { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        header.set_size(0);
        Self { header, content: Vec::new() }
    }

    pub fn file(name: &[u8], content: &[u8]) -> Self {
        Self::new(EntryType::Regular, name).content(content)
    }

    pub fn directory(name: &[u8]) -> Self {
        Self::new(EntryType::Directory, name)
    }

    pub fn hard_link(name: &[u8], target: &[u8]) -> Self {
        Self::new(EntryType::Link, name).link(target)
    }

    pub fn symlink(name: &[u8], target: &[u8]) -> Self {
        Self::new(EntryType::Symlink, name).link(target)
    }

    /// A pax header for the member that follows.
    pub fn pax(records: &[(&str, &[u8])]) -> Self {
        Self::new(EntryType::XHeader, b"pax").content(&pax_records(records))
    }

    pub fn content(mut self, content: &[u8]) -> Self {
        self.header.set_size(content.len() as u64);
        self.content = content.to_owned();
        self
    }

    pub fn link(mut self, target: &[u8]) -> Self {
        self.header.as_old_mut().linkname[..target.len()].copy_from_slice(target);
        self
    }

    pub fn change(mut self, change: impl FnOnce(&mut Header)) -> Self {
        change(&mut self.header);
        self
    }

    pub fn bytes(mut self) -> Vec<u8> {
        self.header.set_cksum();
        let mut bytes = self.header.as_bytes().to_vec();
        bytes.extend_from_slice(&self.content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }
}

/// The content of a pax header.
pub fn pax_records(records: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (key, value) in records {
        let body = 3 + key.len() + value.len();
        let mut length = body + 1;
        while length != body + length.to_string().len() {
            length = body + length.to_string().len();
        }
        bytes.extend_from_slice(format!("{length} {key}=").as_bytes());
        bytes.extend_from_slice(value);
        bytes.push(b'\n');
    }
    bytes
}

/// An archive of `members`, with its end.
pub fn archive(members: impl IntoIterator<Item = Member>) -> Vec<u8> {
    let mut bytes: Vec<u8> = members.into_iter().flat_map(Member::bytes).collect();
    bytes.resize(bytes.len() + 1_024, 0);
    bytes
}

/// Reads an archive from memory.
pub fn read(bytes: &[u8]) -> Result<Tree, ArchiveError> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    let builder = Archive::of_file(file).read(Algorithm::Blake3, &Meter::hidden())?;
    builder.finish().map_err(|source| ArchiveError::Tree { source })
}

/// The text of the tree in an archive, digests cut to eight digits, or why it is refused.
pub fn shown(bytes: &[u8]) -> String {
    match read(bytes) {
        Ok(tree) => text::to_text(&tree)
            .lines()
            .map(|line| {
                let words = line.split(' ').map(|word| match word.strip_prefix("blake3:") {
                    Some(hex) => &hex[..8],
                    None => word,
                });
                words.collect::<Vec<_>>().join(" ") + "\n"
            })
            .collect(),
        Err(error) => format!("error: {}\n", model::display::error_chain(&error)),
    }
}
