//! POSIX access control lists: from the text that tar archives hold to the bytes of the extended
//! attribute, and the mode bits that go with them.
//!
//! The kernel keeps the mode of a file and its access list consistent: the group bits of the mode
//! are the mask of the list. If they differ in an archive, the list takes precedence, as when tar
//! extracts.
// tidy: core

/// The extended attribute that holds the access list.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// The extended attribute that holds the default list of a directory.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;

const USER_OBJECT: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJECT: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// A text or an attribute that is no access control list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AclError {
    #[error("invalid access control entry `{entry}`")]
    Entry { entry: String },
    #[error("the access control entry `{entry}` names an account unknown here")]
    Account { entry: String },
    #[error("the access control list is incomplete or repeats an entry")]
    Incomplete,
    #[error("the access control list is not in the kernel's format")]
    Form,
}

/// What kind of account a name in a list stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Account {
    User,
    Group,
}

/// A list: entries in the order in which the kernel keeps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct AclEntry {
    tag: u16,
    id: u32,
    permissions: u16,
}

impl Acl {
    /// Reads the text that tar archives hold, such as `user::rw-,user:7:r--,mask::r--,...`;
    /// `find_account` finds the id of an account that is given by name.
    pub fn from_text(
        text: &[u8],
        find_account: impl Fn(Account, &str) -> Option<u32>,
    ) -> Result<Self, AclError> {
        let mut entries = Vec::new();
        for line in text.split(|&byte| byte == b',' || byte == b'\n') {
            let line = line.split(|&byte| byte == b'#').next().unwrap_or_default().trim_ascii();
            if !line.is_empty() {
                entries.push(entry_of(line, &find_account)?);
            }
        }
        Self::checked(entries)
    }

    /// Reads the value of the extended attribute.
    ///
    /// # Errors
    ///
    /// [`AclError`] if it is not in the form that the kernel gives.
    pub fn from_attribute(value: &[u8]) -> Result<Self, AclError> {
        let (version, rest) = value.split_first_chunk::<4>().ok_or(AclError::Form)?;
        let (chunks, []) = rest.as_chunks::<8>() else { return Err(AclError::Form) };
        if u32::from_le_bytes(*version) != VERSION {
            return Err(AclError::Form);
        }
        let entries = chunks.iter().map(|&[t0, t1, p0, p1, i0, i1, i2, i3]| AclEntry {
            tag: u16::from_le_bytes([t0, t1]),
            permissions: u16::from_le_bytes([p0, p1]),
            id: u32::from_le_bytes([i0, i1, i2, i3]),
        });
        Self::checked(entries.collect())
    }

    fn checked(mut entries: Vec<AclEntry>) -> Result<Self, AclError> {
        for entry in &mut entries {
            match entry.tag {
                USER | GROUP if entry.id == NO_ID => return Err(AclError::Form),
                USER | GROUP => {}
                USER_OBJECT | GROUP_OBJECT | MASK | OTHER => entry.id = NO_ID,
                _ => return Err(AclError::Form),
            }
            if entry.permissions > 7 {
                return Err(AclError::Form);
            }
        }
        entries.sort_unstable();
        let repeated =
            entries.windows(2).any(|two| (two[0].tag, two[0].id) == (two[1].tag, two[1].id));
        let acl = Self(entries);
        let has = |tag| acl.permissions(tag).is_some();
        let named = has(USER) || has(GROUP);
        let complete = has(USER_OBJECT) && has(GROUP_OBJECT) && has(OTHER) && (!named || has(MASK));
        if repeated || !complete { Err(AclError::Incomplete) } else { Ok(acl) }
    }

    fn permissions(&self, tag: u16) -> Option<u16> {
        self.0.iter().find(|entry| entry.tag == tag).map(|entry| entry.permissions)
    }

    /// Returns true if the list is equivalent to the nine bits of a mode. It is not stored then.
    pub fn is_minimal(&self) -> bool {
        self.0.len() == 3
    }

    /// Returns the value of the extended attribute.
    pub fn to_attribute(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            value.extend_from_slice(&entry.tag.to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    /// Returns the text that tar archives hold, accounts by their numbers.
    pub fn to_text(&self) -> String {
        let entries = self.0.iter().map(|entry| {
            let name = match entry.tag {
                USER_OBJECT | USER => "user",
                GROUP_OBJECT | GROUP => "group",
                MASK => "mask",
                _ => "other",
            };
            let id = match entry.tag {
                USER | GROUP => entry.id.to_string(),
                _ => String::new(),
            };
            let letter = |bit, letter| if entry.permissions & bit == 0 { '-' } else { letter };
            format!("{name}:{id}:{}{}{}", letter(4, 'r'), letter(2, 'w'), letter(1, 'x'))
        });
        entries.collect::<Vec<_>>().join(",")
    }

    /// Returns the nine permission bits that a file with this access list has.
    pub fn mode_bits(&self) -> u32 {
        let group = self.permissions(MASK).or(self.permissions(GROUP_OBJECT));
        let of = |permissions: Option<u16>| u32::from(permissions.unwrap_or(0));
        of(self.permissions(USER_OBJECT)) << 6 | of(group) << 3 | of(self.permissions(OTHER))
    }
}

fn entry_of(
    line: &[u8],
    find_account: &impl Fn(Account, &str) -> Option<u32>,
) -> Result<AclEntry, AclError> {
    let bad = || AclError::Entry { entry: model::escape::escape(line) };
    let text = std::str::from_utf8(line).map_err(|_| bad())?;
    // star adds the number behind the permissions: `user:joe:rwx:1000`.
    let fields: Vec<&str> = text.split(':').map(str::trim).collect();
    let (kind, name, letters, number) = match fields[..] {
        [kind @ ("other" | "o" | "mask" | "m"), letters] => (kind, "", letters, None),
        [kind, name, letters] => (kind, name, letters, None),
        [kind, name, letters, number] => (kind, name, letters, Some(number)),
        _ => return Err(bad()),
    };
    let mut permissions = 0;
    for letter in letters.chars() {
        permissions |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return Err(bad()),
        };
    }
    let id_of = |account| -> Result<u32, AclError> {
        match number.unwrap_or(name).parse() {
            Ok(id) => Ok(id),
            Err(_) => find_account(account, name)
                .ok_or_else(|| AclError::Account { entry: model::escape::escape(line) }),
        }
    };
    let (tag, id) = match (kind, name) {
        ("user" | "u", "") => (USER_OBJECT, NO_ID),
        ("user" | "u", _) => (USER, id_of(Account::User)?),
        ("group" | "g", "") => (GROUP_OBJECT, NO_ID),
        ("group" | "g", _) => (GROUP, id_of(Account::Group)?),
        ("mask" | "m", "") => (MASK, NO_ID),
        ("other" | "o", "") => (OTHER, NO_ID),
        _ => return Err(bad()),
    };
    Ok(AclEntry { tag, id, permissions })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Acl, AclError> {
        Acl::from_text(text.as_bytes(), |account, name| {
            (account == Account::User && name == "joe").then_some(1_000)
        })
    }

    #[test]
    fn text_becomes_the_kernels_bytes() {
        let acl = parse("user::rwx\ngroup::r-x\nother::---\nuser:joe:rw-\nmask::rwx").unwrap();
        #[rustfmt::skip]
        let want = [
            2, 0, 0, 0,
            1, 0, 7, 0, 255, 255, 255, 255,
            2, 0, 6, 0, 232, 3, 0, 0,
            4, 0, 5, 0, 255, 255, 255, 255,
            16, 0, 7, 0, 255, 255, 255, 255,
            32, 0, 0, 0, 255, 255, 255, 255,
        ];
        assert_eq!(acl.to_attribute(), want);
        assert_eq!(Acl::from_attribute(&want).unwrap(), acl);
        assert_eq!(acl.mode_bits(), 0o770);
        assert!(!acl.is_minimal());
        let text = "user::rwx,user:1000:rw-,group::r-x,mask::rwx,other::---";
        assert_eq!(acl.to_text(), text);
        assert_eq!(parse(text).unwrap(), acl);
        assert_eq!(parse("u::rwx,g::r-x,o::---,u:nobody-here:rw-:1000,m::rwx").unwrap(), acl);
    }

    #[test]
    fn a_list_without_named_entries_is_the_mode() {
        let acl = parse("user::rw-,group::r--,other::r--").unwrap();
        assert!(acl.is_minimal());
        assert_eq!(acl.mode_bits(), 0o644);
    }

    #[test]
    fn refuses_what_is_no_list() {
        let table = [
            ("", "the access control list is incomplete or repeats an entry"),
            ("user::rwx", "the access control list is incomplete or repeats an entry"),
            (
                "user::rwx,group::r--,other::r--,user:7:r--",
                "the access control list is incomplete or repeats an entry",
            ),
            (
                "user::rwx,user::rwx,group::r--,other::r--",
                "the access control list is incomplete or repeats an entry",
            ),
            ("user::rwq,group::r--,other::r--", "invalid access control entry `user::rwq`"),
            ("hello", "invalid access control entry `hello`"),
            (
                "user:jane:rwx,group::r--,other::r--",
                "the access control entry `user:jane:rwx` names an account unknown here",
            ),
        ];
        for (text, error) in table {
            assert_eq!(parse(text).unwrap_err().to_string(), error, "{text}");
        }
        for value in [&b""[..], b"\x02\0\0\0", b"\x01\0\0\0", b"\x02\0\0\0\x01", &[0xff; 44]] {
            assert!(Acl::from_attribute(value).is_err(), "{value:?}");
        }
    }
}
