//! Paths and names inside a managed tree.
//!
//! A path is bytes, absolute, free of `.`, `..` and empty components, and ordered by component:
//! `/a` < `/a/b` < `/a-b`, so that a directory is followed at once by all that it holds.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};

use crate::JsonSchema;
use crate::escape::{deserialize_bytes, escape, serialize_bytes};

/// The longest name of a directory entry, in bytes (Linux `NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;

/// The deepest path, in components. Linux refuses path strings above 4,096 bytes, and nothing
/// that people make by intent comes near this.
pub const DEPTH_MAX: usize = 1_024;

/// Bytes that are not a path of a tree, or not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The path does not start with `/`.
    #[error("path `{path}` is not absolute")]
    NotAbsolute {
        /// The path, escaped.
        path: String,
    },
    /// A component is empty, `.`, `..`, too long, or holds `/` or a zero byte.
    #[error("path `{path}` has the bad component `{component}`: {why}")]
    BadComponent {
        /// The path, escaped.
        path: String,
        /// The component, escaped.
        component: String,
        why: &'static str,
    },
    /// The path has more components than [`DEPTH_MAX`].
    #[error("path is deeper than {DEPTH_MAX} components: `{start}`...")]
    TooDeep {
        /// The first bytes of the path, escaped.
        start: String,
    },
}

/// Returns why `name` cannot be the name of a directory entry; `None` if it can.
#[must_use]
pub fn fault_of_name(name: &[u8]) -> Option<&'static str> {
    match name {
        b"" => Some("it is empty"),
        b"." | b".." => Some("`.` and `..` are not names"),
        _ if name.len() > NAME_BYTES_MAX => Some("it is longer than 255 bytes"),
        _ if name.contains(&b'/') => Some("it holds a slash"),
        _ if name.contains(&0) => Some("it holds a zero byte"),
        _ => None,
    }
}

/// An absolute path inside a tree. The root is `/`. Copies are shared: a file with many hard links,
/// and all that an update knows of a path, name it once.
#[derive(Clone, PartialEq, Eq, Hash, JsonSchema)]
#[schemars(with = "String")]
pub struct TreePath(Arc<[u8]>);

impl TreePath {
    /// The root of a tree.
    #[must_use]
    pub fn root() -> Self {
        Self(Arc::from(b"/".as_slice()))
    }

    /// Parses a path. Only the root may end with a slash.
    ///
    /// # Errors
    ///
    /// [`PathError`] says which component is at fault.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, PathError> {
        let bytes = bytes.as_ref();
        if bytes == b"/" {
            return Ok(Self::root());
        }
        let Some(relative) = bytes.strip_prefix(b"/") else {
            return Err(PathError::NotAbsolute { path: escape(bytes) });
        };
        for (index, component) in relative.split(|&byte| byte == b'/').enumerate() {
            if index == DEPTH_MAX {
                return Err(PathError::TooDeep { start: escape(&bytes[..bytes.len().min(80)]) });
            }
            if let Some(why) = fault_of_name(component) {
                return Err(PathError::BadComponent {
                    path: escape(bytes),
                    component: escape(component),
                    why,
                });
            }
        }
        Ok(Self(Arc::from(bytes)))
    }

    /// The path of the entry called `name` in this directory.
    ///
    /// # Errors
    ///
    /// [`PathError::BadComponent`] if `name` is not a name.
    pub fn join(&self, name: &[u8]) -> Result<Self, PathError> {
        if let Some(why) = fault_of_name(name) {
            return Err(PathError::BadComponent {
                path: format!("{self}/{}", escape(name)),
                component: escape(name),
                why,
            });
        }
        Ok(self.join_name(name))
    }

    /// As [`TreePath::join`], for a name known to be one.
    #[must_use]
    pub(crate) fn join_name(&self, name: &[u8]) -> Self {
        debug_assert_eq!(fault_of_name(name), None);
        let parent = if self.is_root() { &[] } else { &self.0[..] };
        Self(Arc::from([parent, b"/", name].concat()))
    }

    /// The bytes, with the leading slash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes below the root, without a leading slash; empty for the root.
    #[must_use]
    pub fn relative(&self) -> &[u8] {
        &self.0[1..]
    }

    /// True for `/`.
    #[must_use]
    pub fn is_root(&self) -> bool {
        &self.0[..] == b"/"
    }

    /// The directory that holds this path; `None` for the root.
    #[must_use]
    pub fn parent(&self) -> Option<Self> {
        if self.is_root() {
            return None;
        }
        let slash = self.0.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        Some(if slash == 0 { Self::root() } else { Self(Arc::from(&self.0[..slash])) })
    }

    /// The last component; empty for the root.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        let slash = self.0.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
        &self.0[slash + 1..]
    }

    /// The components from the root downwards; none for the root.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.relative().split(|&byte| byte == b'/').filter(|component| !component.is_empty())
    }

    /// True if this path is `ancestor` or lies below it.
    #[must_use]
    pub fn starts_with(&self, ancestor: &Self) -> bool {
        ancestor.is_root()
            || self
                .0
                .strip_prefix(&ancestor.0[..])
                .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    }

    /// This path and those above it, from itself to the root.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> + use<> {
        std::iter::successors(Some(self.clone()), Self::parent)
    }
}

impl Ord for TreePath {
    fn cmp(&self, other: &Self) -> Ordering {
        // No component holds a zero byte, so a slash that sorts as zero sorts below all of them.
        let key = |byte: &u8| if *byte == b'/' { 0 } else { *byte };
        self.relative().iter().map(key).cmp(other.relative().iter().map(key))
    }
}

impl PartialOrd for TreePath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for TreePath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&escape(&self.0))
    }
}

impl fmt::Debug for TreePath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "\"{self}\"")
    }
}

impl std::str::FromStr for TreePath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        Self::new(text.as_bytes())
    }
}

impl Serialize for TreePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_bytes(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for TreePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(deserialize_bytes(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> TreePath {
        text.parse().unwrap()
    }

    #[test]
    fn orders_by_component() {
        let sorted = ["/", "/a", "/a/b", "/a/b/c", "/a-b", "/a.b", "/a0", "/b"].map(path);
        let mut shuffled = sorted.clone();
        shuffled.reverse();
        shuffled.sort();
        assert_eq!(shuffled, sorted);
    }

    #[test]
    fn refuses_what_leaves_the_tree() {
        let table = [
            ("etc", "path `etc` is not absolute"),
            ("", "path `` is not absolute"),
            ("/../x", "path `/../x` has the bad component `..`: `.` and `..` are not names"),
            ("/a/./b", "path `/a/./b` has the bad component `.`: `.` and `..` are not names"),
            ("/a//b", "path `/a//b` has the bad component ``: it is empty"),
            ("/a/", "path `/a/` has the bad component ``: it is empty"),
            ("/a\0", "path `/a\\x00` has the bad component `a\\x00`: it holds a zero byte"),
        ];
        for (text, error) in table {
            assert_eq!(TreePath::new(text).unwrap_err().to_string(), error);
        }
        let long = format!("/{}", "n".repeat(256));
        assert!(TreePath::new(long).unwrap_err().to_string().contains("longer than 255"));
        let deep = "/d".repeat(DEPTH_MAX);
        assert!(TreePath::new(&deep).is_ok());
        assert!(matches!(TreePath::new(deep + "/d"), Err(PathError::TooDeep { .. })));
    }

    #[test]
    fn knows_its_place() {
        assert_eq!(path("/a/b").parent(), Some(path("/a")));
        assert_eq!(path("/a").parent(), Some(TreePath::root()));
        assert_eq!(TreePath::root().parent(), None);
        assert_eq!(path("/a/b").name(), b"b");
        assert_eq!(TreePath::root().name(), b"");
        assert!(path("/a/b").starts_with(&path("/a")));
        assert!(!path("/ab").starts_with(&path("/a")));
        assert!(path("/ab").starts_with(&TreePath::root()));
        assert_eq!(path("/a/b").ancestors().collect::<Vec<_>>(), ["/a/b", "/a", "/"].map(path));
        assert_eq!(TreePath::root().join(b"x").unwrap(), path("/x"));
        assert_eq!(path("/x").join(b"y").unwrap(), path("/x/y"));
        assert!(path("/x").join(b"..").is_err());
    }
}
