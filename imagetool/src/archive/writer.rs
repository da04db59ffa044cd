//! Writes the entries of a tree as members of a tar archive, always with the same bytes.
//!
//! The format is pax. Records in front of a header hold only what the header cannot: long names,
//! large numbers, fractions of a second, extended attributes. Access lists are written twice: as
//! the attribute that GNU tar and imagetool read, and as the text that other tools read. Times of
//! directories and symlinks, which images do not have, are zero.
// tidy: core

use model::path::TreePath;
use model::tree::{Device, File, Leaf, Metadata, Node, Time};
use tar::{EntryType, Header};

use super::acl::{self, Acl, AclError};
use super::reader::{BLOCK_BYTES, PAX_BYTES_MAX};

/// The end of an archive: two blocks of zeros.
pub const END: [u8; 1_024] = [0; 1_024];

/// The largest number in an octal field of 12 bytes.
const LARGE_MAX: u64 = 0o77_777_777_777;

/// The largest number in an octal field of 8 bytes.
const SMALL_MAX: u64 = 0o7_777_777;

/// An entry that cannot be a member of an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    #[error("{path} has {size_bytes} bytes of attributes, too many for an archive")]
    TooLarge { path: TreePath, size_bytes: usize },
    #[error("{path} has a bad access list")]
    Acl { path: TreePath, source: AclError },
    #[error("{path} is a computed file, which has no content")]
    Computed { path: TreePath },
}

/// Returns the headers of the member for `node` at `path`. The content of a regular file must
/// follow, and then [`padding`]. `carrier` is the file that a hard link names.
pub fn headers(
    path: &TreePath,
    node: &Node,
    carrier: Option<&File>,
) -> Result<Vec<u8>, WriteError> {
    let plain = Metadata::new(0o644, 0, 0);
    let mut header = Header::new_ustar();
    let mut records = Records::default();
    let (metadata, mtime) = match node {
        Node::Directory(metadata) => {
            header.set_entry_type(EntryType::Directory);
            (metadata, Time::default())
        }
        Node::Leaf(Leaf::File(file)) => {
            header.set_entry_type(EntryType::Regular);
            if file.size_bytes > LARGE_MAX {
                records.add(b"size", file.size_bytes.to_string().as_bytes());
            } else {
                header.set_size(file.size_bytes);
            }
            (&file.metadata, file.mtime)
        }
        Node::Leaf(Leaf::HardLink(_)) => {
            header.set_entry_type(EntryType::Link);
            carrier.map_or((&plain, Time::default()), |file| (&file.metadata, file.mtime))
        }
        Node::Leaf(Leaf::Symlink(symlink)) => {
            header.set_entry_type(EntryType::Symlink);
            (&symlink.metadata, Time::default())
        }
        Node::Leaf(Leaf::Special(special)) => {
            set_device(&mut header, special.device);
            (&special.metadata, special.mtime)
        }
        Node::Leaf(Leaf::Computed(_)) => return Err(WriteError::Computed { path: path.clone() }),
    };
    put_names(&mut header, &mut records, path, node);
    header.set_mode(metadata.mode);
    header.set_uid(records.unless_small(b"uid", metadata.uid));
    header.set_gid(records.unless_small(b"gid", metadata.gid));
    let seconds = u64::try_from(mtime.seconds).ok().filter(|seconds| *seconds <= LARGE_MAX);
    header.set_mtime(seconds.unwrap_or(0));
    if seconds.is_none() || mtime.nanoseconds > 0 {
        records.add(b"mtime", text_of(mtime).as_bytes());
    }
    if !matches!(node, Node::Leaf(Leaf::HardLink(_))) {
        records
            .add_attributes(metadata)
            .map_err(|source| WriteError::Acl { path: path.clone(), source })?;
    }
    header.set_cksum();
    let mut bytes = records.member();
    if bytes.len() as u64 > PAX_BYTES_MAX {
        return Err(WriteError::TooLarge { path: path.clone(), size_bytes: bytes.len() });
    }
    bytes.extend_from_slice(header.as_bytes());
    Ok(bytes)
}

/// Sets the name and the link target, in records if the header is too short for them.
fn put_names(header: &mut Header, records: &mut Records, path: &TreePath, node: &Node) {
    let mut names = Vec::new();
    let name = name_of(path, node.is_directory());
    if !put(&name, &mut header.as_old_mut().name) {
        names.push((&b"path"[..], &name));
    }
    let link = match node {
        Node::Leaf(Leaf::HardLink(target)) => name_of(target, false),
        Node::Leaf(Leaf::Symlink(symlink)) => symlink.target.0.clone(),
        _ => Vec::new(),
    };
    if !put(&link, &mut header.as_old_mut().linkname) {
        names.push((&b"linkpath"[..], &link));
    }
    records.add_names(&names);
}

/// Returns the zeros that fill the last block of a content of that size.
pub fn padding(size_bytes: u64) -> &'static [u8] {
    let missing = size_bytes.wrapping_neg() % BLOCK_BYTES;
    &END[..usize::try_from(missing).expect("less than a block")]
}

fn name_of(path: &TreePath, is_directory: bool) -> Vec<u8> {
    let end: &[u8] = if is_directory && !path.is_root() { b"/" } else { b"" };
    [b"./", path.relative(), end].concat()
}

/// Copies `name` into `field` as far as it fits, and returns true if all of it fits.
fn put(name: &[u8], field: &mut [u8]) -> bool {
    let length = name.len().min(field.len());
    field[..length].copy_from_slice(&name[..length]);
    length == name.len()
}

fn set_device(header: &mut Header, device: Device) {
    let (kind, major, minor) = match device {
        Device::Fifo => (EntryType::Fifo, 0, 0),
        Device::Block { major, minor } => (EntryType::Block, major, minor),
        Device::Character { major, minor } => (EntryType::Char, major, minor),
    };
    header.set_entry_type(kind);
    let fields = header.as_ustar_mut().expect("it was made as one");
    // Linux has at most twenty bits of a device number; seven octal digits are one more.
    octal(major, &mut fields.dev_major);
    octal(minor, &mut fields.dev_minor);
}

fn octal(number: u32, field: &mut [u8; 8]) {
    let digits = format!("{:07o}\0", u64::from(number).min(SMALL_MAX));
    field.copy_from_slice(digits.as_bytes());
}

/// Formats `time` as a decimal number of seconds, without trailing zeros.
fn text_of(time: Time) -> String {
    let Time { seconds, nanoseconds } = time;
    // Seconds are counted upwards from the second before, the text from zero.
    let (sign, whole, part) = match (seconds < 0, nanoseconds) {
        (true, 1..) => ("-", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds),
        (true, 0) => ("-", seconds.unsigned_abs(), 0),
        (false, _) => ("", seconds.unsigned_abs(), nanoseconds),
    };
    let text = format!("{sign}{whole}.{part:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Pax records in the order in which they are written.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        let body = key.len() + value.len() + b" =\n".len();
        // The length counts its own digits.
        let mut length = body + 1;
        while length != body + length.to_string().len() {
            length = body + length.to_string().len();
        }
        self.0.extend_from_slice(length.to_string().as_bytes());
        for bytes in [b" ", key, b"=", value, b"\n"] {
            self.0.extend_from_slice(bytes);
        }
    }

    /// Names are UTF-8 in records, unless one of them cannot be.
    fn add_names(&mut self, names: &[(&[u8], &Vec<u8>)]) {
        if names.iter().any(|(_, name)| std::str::from_utf8(name).is_err()) {
            self.add(b"hdrcharset", b"BINARY");
        }
        for (key, name) in names {
            self.add(key, name);
        }
    }

    /// Returns `number` for the field of a header, or zero if it only fits into a record.
    fn unless_small(&mut self, key: &[u8], number: u32) -> u64 {
        let number = u64::from(number);
        if number <= SMALL_MAX {
            return number;
        }
        self.add(key, number.to_string().as_bytes());
        0
    }

    fn add_attributes(&mut self, metadata: &Metadata) -> Result<(), AclError> {
        let lists: [(&[u8], &[u8]); 2] =
            [(b"SCHILY.acl.access", acl::ACCESS), (b"SCHILY.acl.default", acl::DEFAULT)];
        for (key, attribute) in lists {
            if let Some(value) = metadata.xattrs.get(attribute) {
                self.add(key, Acl::from_attribute(value)?.to_text().as_bytes());
            }
        }
        for (name, value) in metadata.xattrs.iter() {
            self.add(&[b"SCHILY.xattr.", &encode_name(name)[..]].concat(), value);
        }
        Ok(())
    }

    /// Returns the member with the records; nothing without records.
    fn member(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.0.is_empty() {
            return bytes;
        }
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::XHeader);
        put(b"././@PaxHeader", &mut header.as_old_mut().name);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(self.0.len() as u64);
        header.set_cksum();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&self.0);
        bytes.extend_from_slice(padding(self.0.len() as u64));
        bytes
    }
}

/// Escapes the name of an attribute as GNU tar does: the name of a record ends at its first `=`.
fn encode_name(name: &[u8]) -> Vec<u8> {
    let encode = |byte: &u8| match byte {
        b'=' => b"%3D".to_vec(),
        b'%' => b"%25".to_vec(),
        byte => vec![*byte],
    };
    name.iter().flat_map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_they_are_read() {
        #[rustfmt::skip]
        let table = [
            (0, 0, "0"), (10, 0, "10"), (1_700_000_000, 500_000_000, "1700000000.5"),
            (1, 1, "1.000000001"), (-1, 0, "-1"), (-2, 750_000_000, "-1.25"),
            (-1, 999_999_999, "-0.000000001"), (i64::MAX, 0, "9223372036854775807"),
            (i64::MIN + 1, 1, "-9223372036854775806.999999999"),
        ];
        for (seconds, nanoseconds, want) in table {
            assert_eq!(text_of(Time { seconds, nanoseconds }), want);
        }
    }

    #[test]
    fn contents_are_filled_to_a_block() {
        for (size, want) in [(0, 0), (1, 511), (511, 1), (512, 0), (u64::MAX, 1)] {
            assert_eq!(padding(size).len(), want, "{size}");
        }
    }
}
