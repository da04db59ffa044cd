//! Converts a member of an archive to an entry of a tree, or refuses it.
//!
//! Archives are not trusted. A name that would leave the tree is refused, never corrected.
// tidy: core

use model::escape::ByteText;
use model::path::TreePath;
use model::scope::Attributes;
use model::tree::node::{MODE_BITS, SYMLINK_MODE};
use model::tree::{Device, Leaf, Metadata, Node, Special, Symlink, Time, Xattrs};
use tar::EntryType;

use super::EntryError;
use super::acl::{self, Account, Acl};
use super::pax::PaxError;
use super::reader::{Member, field_number, signed_field_number};

/// The highest major number of a device that Linux has: twelve bits.
const MAJOR_MAX: u32 = 0xfff;

/// The highest minor number of a device that Linux has: twenty bits.
const MINOR_MAX: u32 = 0xf_ffff;

/// An entry of a tree, from the headers of a member.
#[derive(Debug)]
pub enum Entry {
    /// Complete.
    Node(Node),
    /// A regular file whose content follows.
    File {
        /// Mode, owner, extended attributes.
        metadata: Metadata,
        /// Time of the last modification.
        mtime: Time,
    },
}

/// Name and value of an extended attribute.
type Attribute = (Vec<u8>, Vec<u8>);

/// Finds the number of an account by its name.
pub type FindAccount<'call> = &'call dyn Fn(Account, &str) -> Option<u32>;

/// Returns the path and the entry of `member`.
pub fn entry_of(
    member: &Member,
    find_account: FindAccount<'_>,
) -> Result<(TreePath, Entry), EntryError> {
    let path = path_of(&member.name)?;
    // In old archives, only a slash at the end of the name marks a directory.
    let kind = match member.kind {
        EntryType::Regular if member.name.ends_with(b"/") => EntryType::Directory,
        EntryType::Continuous | EntryType::GNUSparse => EntryType::Regular,
        kind => kind,
    };
    if kind != EntryType::Regular && member.size_bytes > 0 {
        return Err(EntryError::UnexpectedContent { size: member.size_bytes });
    }
    if path.is_root() && kind != EntryType::Directory {
        return Err(EntryError::Root);
    }
    if kind == EntryType::Link {
        let target = path_of(&member.link).map_err(|source| EntryError::LinkTarget {
            target: model::escape::escape(&member.link),
            source: Box::new(source),
        })?;
        return Ok((path, Entry::Node(Node::Leaf(Leaf::HardLink(target)))));
    }
    let metadata = metadata_of(member, kind, find_account)?;
    let node = match kind {
        EntryType::Regular => {
            return Ok((path, Entry::File { metadata, mtime: mtime_of(member)? }));
        }
        EntryType::Directory => Node::Directory(metadata),
        EntryType::Symlink => {
            let length = member.link.len();
            if length == 0 || length > model::tree::encode::TARGET_BYTES_MAX {
                return Err(EntryError::SymlinkTarget { length });
            }
            let target = ByteText(member.link.clone());
            Node::Leaf(Leaf::Symlink(Symlink { metadata, target }))
        }
        EntryType::Block | EntryType::Char | EntryType::Fifo => {
            let device = device_of(member, kind)?;
            Node::Leaf(Leaf::Special(Special { metadata, mtime: mtime_of(member)?, device }))
        }
        other => return Err(EntryError::Type { code: char::from(other.as_byte()) }),
    };
    Ok((path, Entry::Node(node)))
}

/// Parses a name in an archive as a path: relative; leading `./` and trailing slashes are ignored.
///
/// # Errors
///
/// [`EntryError`] for absolute names, `..`, and what [`TreePath::new`] refuses.
pub fn path_of(name: &[u8]) -> Result<TreePath, EntryError> {
    if name.is_empty() {
        return Err(EntryError::NoName);
    }
    if name.starts_with(b"/") {
        return Err(EntryError::Absolute);
    }
    let mut path = Vec::with_capacity(name.len() + 1);
    for component in name.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(EntryError::Outside),
            _ => {
                path.push(b'/');
                path.extend_from_slice(component);
            }
        }
    }
    if path.is_empty() {
        return Ok(TreePath::root());
    }
    TreePath::new(path).map_err(|source| EntryError::Path { source })
}

fn mtime_of(member: &Member) -> Result<Time, EntryError> {
    let recorded = member.records.time("mtime").map_err(|source| EntryError::Pax { source })?;
    if let Some(time) = recorded {
        return Ok(time);
    }
    let seconds = signed_field_number(&member.header.as_old().mtime);
    let seconds = seconds.ok_or(EntryError::Number { field: "mtime" })?;
    Ok(Time { seconds, nanoseconds: 0 })
}

fn device_of(member: &Member, kind: EntryType) -> Result<Device, EntryError> {
    if kind == EntryType::Fifo {
        return Ok(Device::Fifo);
    }
    let bad = || EntryError::Number { field: "device" };
    let header = &member.header;
    let (major, minor) = match (header.as_ustar(), header.as_gnu()) {
        (Some(ustar), _) => (&ustar.dev_major, &ustar.dev_minor),
        (None, Some(gnu)) => (&gnu.dev_major, &gnu.dev_minor),
        (None, None) => return Err(bad()),
    };
    // Libarchive puts large numbers into records.
    let number = |key: &'static str, field: &[u8], max: u32| {
        let recorded = member.records.number(key).map_err(|source| EntryError::Pax { source })?;
        let number = recorded.or_else(|| field_number(field));
        let number = number.and_then(|number| u32::try_from(number).ok());
        number.filter(|number| *number <= max).ok_or_else(bad)
    };
    let major = number("SCHILY.devmajor", major, MAJOR_MAX)?;
    let minor = number("SCHILY.devminor", minor, MINOR_MAX)?;
    Ok(if kind == EntryType::Block {
        Device::Block { major, minor }
    } else {
        Device::Character { major, minor }
    })
}

fn metadata_of(
    member: &Member,
    kind: EntryType,
    find_account: FindAccount<'_>,
) -> Result<Metadata, EntryError> {
    let header = member.header.as_old();
    let id = |field: &'static str, bytes: &[u8]| -> Result<u32, EntryError> {
        let recorded = member.records.number(field).map_err(|source| EntryError::Pax { source })?;
        recorded
            .or_else(|| field_number(bytes))
            .and_then(|number| u32::try_from(number).ok())
            // For the kernel, the highest number means "leave unchanged".
            .filter(|id| *id != u32::MAX)
            .ok_or(EntryError::Number { field })
    };
    let mode = field_number(&header.mode).ok_or(EntryError::Number { field: "mode" })?;
    let mut mode = u32::try_from(mode & u64::from(MODE_BITS)).expect("masked to twelve bits");
    let (uid, gid) = (id("uid", &header.uid)?, id("gid", &header.gid)?);
    let mut xattrs = xattrs_of(member, kind, find_account)?;
    if kind == EntryType::Symlink {
        mode = SYMLINK_MODE;
    } else {
        mode = mode_of_acl(mode, &mut xattrs)?;
    }
    Ok(Metadata { mode, uid, gid, xattrs: xattrs.into_iter().collect::<Xattrs>() })
}

/// Removes an access list that is equivalent to a mode. Returns the mode that matches the list.
fn mode_of_acl(mode: u32, xattrs: &mut Vec<Attribute>) -> Result<u32, EntryError> {
    let Some(index) = xattrs.iter().rposition(|(name, _)| name == acl::ACCESS) else {
        return Ok(mode);
    };
    let bad = |source| EntryError::Acl { source };
    let access = Acl::from_attribute(&xattrs[index].1).map_err(bad)?;
    if access.is_minimal() {
        xattrs.retain(|(name, _)| name != acl::ACCESS);
    }
    Ok(mode & !0o777 | access.mode_bits())
}

/// Returns the managed extended attributes among the pax records.
fn xattrs_of(
    member: &Member,
    kind: EntryType,
    find_account: FindAccount<'_>,
) -> Result<Vec<Attribute>, EntryError> {
    let mut xattrs: Vec<Attribute> = Vec::new();
    for (key, value) in member.records.iter() {
        let list = |name: &[u8]| -> Result<Attribute, EntryError> {
            let list =
                Acl::from_text(value, find_account).map_err(|source| EntryError::Acl { source })?;
            Ok((name.to_owned(), list.to_attribute()))
        };
        let attribute = if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            (decode_name(name), value.to_owned())
        } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
            let bad =
                || PaxError::Value { key: "LIBARCHIVE.xattr", value: model::escape::escape(value) };
            let value = decode_base64(value).ok_or_else(bad);
            (decode_percent(name), value.map_err(|source| EntryError::Pax { source })?)
        } else if key == b"SCHILY.acl.access" && !value.is_empty() {
            list(acl::ACCESS)?
        } else if key == b"SCHILY.acl.default" && !value.is_empty() && kind == EntryType::Directory
        {
            list(acl::DEFAULT)?
        } else if key == b"RHT.security.selinux" && !value.is_empty() {
            // The kernel stores labels with a final zero byte, archives without.
            (b"security.selinux".to_vec(), {
                let label = value.strip_suffix(&[0]).unwrap_or(value);
                [label, &[0]].concat()
            })
        } else {
            continue;
        };
        if Attributes::Labels.manage(&attribute.0) {
            xattrs.retain(|(name, _)| *name != attribute.0);
            xattrs.push(attribute);
        }
    }
    Ok(xattrs)
}

/// GNU tar writes `=` and `%` in the names of attributes as `%3D` and `%25`.
fn decode_name(name: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, behind)) = rest.split_first() {
        let (byte, after) = match rest {
            [b'%', b'3', b'D', after @ ..] => (b'=', after),
            [b'%', b'2', b'5', after @ ..] => (b'%', after),
            _ => (first, behind),
        };
        decoded.push(byte);
        rest = after;
    }
    decoded
}

/// Libarchive writes special bytes in the names of attributes as `%HH`.
fn decode_percent(name: &[u8]) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, behind)) = rest.split_first() {
        let escaped = match rest {
            [b'%', high, low, after @ ..] => {
                digit(*high).zip(digit(*low)).map(|(high, low)| (high * 16 + low, after))
            }
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((first, behind));
        decoded.push(byte);
        rest = after;
    }
    decoded
}

/// Decodes base64, as Libarchive writes the values of attributes, with or without final `=`.
/// Returns `None` if `text` is invalid.
fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|&byte| byte != b'=').map_or(0, |last| last + 1);
    let mut decoded = Vec::with_capacity(end / 4 * 3 + 2);
    for group in text[..end].chunks(4) {
        let mut bits = 0_u32;
        for index in 0..4 {
            let value = match group.get(index) {
                None => 0,
                Some(byte @ b'A'..=b'Z') => byte - b'A',
                Some(byte @ b'a'..=b'z') => byte - b'a' + 26,
                Some(byte @ b'0'..=b'9') => byte - b'0' + 52,
                Some(b'+') => 62,
                Some(b'/') => 63,
                Some(_) => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        let bytes = bits.to_be_bytes();
        // Four digits are three bytes; a single digit is invalid.
        let length = group.len().checked_sub(1).filter(|length| *length > 0)?;
        decoded.extend_from_slice(&bytes[1..=length]);
    }
    Some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_the_tree() {
        type Want = Result<&'static [u8], &'static str>;
        let table: [(&[u8], Want); 11] = [
            (b"etc/passwd", Ok(b"/etc/passwd")),
            (b"./etc/", Ok(b"/etc")),
            (b"./", Ok(b"/")),
            (b".", Ok(b"/")),
            (b"a//b/./c", Ok(b"/a/b/c")),
            (b"odd\xff\\name", Ok(b"/odd\xff\\name")),
            (b"", Err("it has no name")),
            (b"/etc/passwd", Err("its name is absolute")),
            (b"../x", Err("its name contains `..`")),
            (b"a/../../x", Err("its name contains `..`")),
            (b"a/..", Err("its name contains `..`")),
        ];
        for (name, want) in table {
            let got = path_of(name).map_err(|error| error.to_string());
            let want = want.map(|path| TreePath::new(path).unwrap()).map_err(str::to_owned);
            assert_eq!(got, want, "{name:?}");
        }
        assert!(path_of(&[b'n'; 256]).is_err());
        assert!(path_of("d/".repeat(1_025).as_bytes()).is_err());
    }

    #[test]
    fn attribute_names_are_decoded() {
        assert_eq!(decode_name(b"user.a%3Db%25c%20"), b"user.a=b%c%20");
        assert_eq!(decode_percent(b"user.a%3Db%c3%BC%4%"), "user.a=b\u{fc}%4%".as_bytes());
    }

    #[test]
    fn base64_is_decoded_with_or_without_its_end() {
        let table: [(&str, Option<&[u8]>); 10] = [
            ("", Some(b"")),
            ("dg==", Some(b"v")),
            ("dg", Some(b"v")),
            ("dgAK", Some(b"v\0\n")),
            ("dgAKdgA=", Some(b"v\0\nv\0")),
            ("+/+/", Some(&[0xfb, 0xff, 0xbf])),
            ("d", None),
            ("dgAKd", None),
            ("dg=K", None),
            ("d g=", None),
        ];
        for (text, want) in table {
            assert_eq!(decode_base64(text.as_bytes()).as_deref(), want, "{text}");
        }
    }
}
