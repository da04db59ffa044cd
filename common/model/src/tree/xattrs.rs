//! Extended attributes of an entry.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock, Mutex};

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::escape::ByteText;
use crate::lock::locked;

/// Names and values, sorted by name.
type Attributes = Vec<(Box<[u8]>, Box<[u8]>)>;

/// Extended attributes by name, such as `user.origin` or `security.capability`.
///
/// Nearly all files have none, or one of a few dozen labels: none takes one word, and equal
/// attributes are shared, in all trees of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Option<BTreeMap<ByteText, ByteText>>")]
#[serde(into = "Option<BTreeMap<ByteText, ByteText>>")]
pub struct Xattrs(Option<Arc<Attributes>>);

impl Xattrs {
    /// No attributes.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Returns true if the entry has no extended attributes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |attributes| attributes.len())
    }

    /// The value of the attribute called `name`.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        let attributes = self.0.as_ref()?;
        let at = attributes.binary_search_by(|(other, _)| (**other).cmp(name)).ok()?;
        Some(&attributes[at].1)
    }

    /// Names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0
            .iter()
            .flat_map(|attributes| attributes.iter())
            .map(|(name, value)| (&**name, &**value))
    }

    /// True if the file has capabilities: they are lost when its owner is set.
    #[must_use]
    pub fn has_capability(&self) -> bool {
        self.get(b"security.capability").is_some()
    }
}

impl FromIterator<(Vec<u8>, Vec<u8>)> for Xattrs {
    /// Of several values of one name the last is taken.
    fn from_iter<I: IntoIterator<Item = (Vec<u8>, Vec<u8>)>>(attributes: I) -> Self {
        let sorted: BTreeMap<Vec<u8>, Vec<u8>> = attributes.into_iter().collect();
        if sorted.is_empty() {
            return Self::none();
        }
        let boxed = sorted.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(Some(locked(&SHARED).share(boxed.collect())))
    }
}

impl From<Option<BTreeMap<ByteText, ByteText>>> for Xattrs {
    fn from(map: Option<BTreeMap<ByteText, ByteText>>) -> Self {
        map.into_iter().flatten().map(|(name, value)| (name.0, value.0)).collect()
    }
}

impl From<Xattrs> for Option<BTreeMap<ByteText, ByteText>> {
    fn from(xattrs: Xattrs) -> Self {
        let owned =
            |(name, value): (&[u8], &[u8])| (ByteText(name.to_owned()), ByteText(value.to_owned()));
        (!xattrs.is_empty()).then(|| xattrs.iter().map(owned).collect())
    }
}

/// How many different attributes are remembered to be shared. Where there are more, as with
/// signatures of each file, sharing them would not save anything.
const SHARED_MAX: usize = 4_096;

/// The largest attributes of an entry that are shared, in bytes.
const SHARED_BYTES_MAX: usize = 512;

/// The attributes that were made last.
#[derive(Default)]
struct Shared(BTreeSet<Arc<Attributes>>);

static SHARED: LazyLock<Mutex<Shared>> = LazyLock::new(Mutex::default);

impl Shared {
    /// Returns attributes that are equal to `attributes`, and shared with those made before.
    fn share(&mut self, attributes: Attributes) -> Arc<Attributes> {
        let attributes = Arc::new(attributes);
        let bytes = attributes.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        if bytes > SHARED_BYTES_MAX {
            return attributes;
        }
        if let Some(known) = self.0.get(&attributes) {
            return Arc::clone(known);
        }
        if self.0.len() >= SHARED_MAX {
            *self = Self::default();
        }
        self.0.insert(Arc::clone(&attributes));
        attributes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(value: &[u8]) -> Attributes {
        vec![(Box::from(&b"user.x"[..]), Box::from(value))]
    }

    #[test]
    fn equal_attributes_are_shared_and_nothing_is_remembered_without_end() {
        let mut shared = Shared::default();
        let mut are_shared = |value: &[u8]| {
            let (first, second) = (shared.share(one(value)), shared.share(one(value)));
            assert_eq!(first, second);
            Arc::ptr_eq(&first, &second)
        };
        assert!(are_shared(b"label"));
        assert!(!are_shared(&[0; SHARED_BYTES_MAX]));
        for number in 0..2 * SHARED_MAX {
            assert!(are_shared(&number.to_le_bytes()));
        }
        assert_eq!(shared.0.len(), 1, "it was emptied twice");
    }

    #[test]
    fn json_and_order_are_those_of_a_map() {
        let pairs = [("b", "2"), ("a", "1"), ("b", "3")];
        let bytes = |(name, value): (&str, &str)| (name.as_bytes().to_vec(), value.into());
        let xattrs: Xattrs = pairs.into_iter().map(bytes).collect();
        let all: Vec<_> = xattrs.iter().collect();
        assert_eq!(all, [(&b"a"[..], &b"1"[..]), (b"b", b"3")]);
        assert_eq!((xattrs.get(b"b"), xattrs.get(b"c")), (Some(&b"3"[..]), None));
        let json = serde_json::to_string(&[xattrs, Xattrs::none()]).unwrap();
        assert_eq!(json, r#"[{"a":"1","b":"3"},null]"#);
        let [some, none] = serde_json::from_str::<[Xattrs; 2]>(&json).unwrap();
        assert_eq!((some.len(), none.len(), none.is_empty()), (2, 0, true));
    }
}
