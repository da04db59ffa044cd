//! Records which images are in use, as reported by dominators.
//!
//! A hold lasts for as long as its holder asked. The server saves the holders and their images, but
//! not the times: after a start each saved hold lasts for [`AFTER_START_SECONDS`], in which every
//! running dominator renews its own. Times are seconds since the server started.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use model::image::ImageName;
use serde::{Deserialize, Serialize};

/// How long saved holds last after a start.
pub const AFTER_START_SECONDS: u64 = 600;

/// The most holders.
pub const HOLDERS_MAX: usize = 1_000;

/// The saved hold of a holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedHold {
    pub holder: String,
    pub names: BTreeSet<ImageName>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Hold {
    names: BTreeSet<ImageName>,
    until: u64,
    /// True until the holder renews it after a start.
    is_old: bool,
}

/// There are too many holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are {HOLDERS_MAX} dominators already that hold images")]
pub struct TooManyError;

/// A holder of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The holder, for messages.
    pub name: String,
    /// The remaining seconds.
    pub seconds: u64,
    /// True if the holder has not renewed its hold since the server was started.
    pub is_old: bool,
}

/// The holds of all holders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    holds: BTreeMap<String, Hold>,
}

impl Holds {
    /// The holds that a former server knew.
    #[must_use]
    pub fn new(saved: Vec<SavedHold>) -> Self {
        let hold = |names| Hold { names, until: AFTER_START_SECONDS, is_old: true };
        Self { holds: saved.into_iter().map(|saved| (saved.holder, hold(saved.names))).collect() }
    }

    /// Records that `holder` holds `names`, and no others, for `seconds`. Returns true if the holds
    /// must be saved.
    pub fn note(
        &mut self,
        now: u64,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u64,
    ) -> Result<bool, TooManyError> {
        let before = self.holds.len();
        self.holds.retain(|name, hold| name == holder || now < hold.until);
        let mut has_changed = self.holds.len() != before;
        let until = now.saturating_add(seconds);
        let former = self.holds.get(holder);
        if former.is_none() && self.holds.len() >= HOLDERS_MAX {
            return Err(TooManyError);
        }
        has_changed |= former.is_none_or(|hold| hold.names != names);
        self.holds.insert(holder.to_owned(), Hold { names, until, is_old: false });
        Ok(has_changed)
    }

    /// Returns the holders of `name`.
    #[must_use]
    pub fn holders(&self, now: u64, name: &ImageName) -> Vec<Holder> {
        let holds = self.holds.iter().filter(|(_, hold)| now < hold.until);
        holds
            .filter(|(_, hold)| hold.names.contains(name))
            .map(|(holder, hold)| Holder {
                name: holder.clone(),
                seconds: hold.until - now,
                is_old: hold.is_old,
            })
            .collect()
    }

    /// Returns all images that are held.
    #[must_use]
    pub fn held(&self, now: u64) -> BTreeSet<&ImageName> {
        let holds = self.holds.values().filter(|hold| now < hold.until);
        holds.flat_map(|hold| &hold.names).collect()
    }

    /// Returns the holds to save.
    #[must_use]
    pub fn saved(&self) -> Vec<SavedHold> {
        let saved = |(holder, hold): (&String, &Hold)| SavedHold {
            holder: holder.clone(),
            names: hold.names.clone(),
        };
        self.holds.iter().map(saved).collect()
    }
}

/// Explains why an image that `holders` hold is not deleted.
#[must_use]
pub fn refusal(name: &ImageName, holders: &[Holder]) -> String {
    let names = |is_old: bool| {
        let names = holders.iter().filter(|holder| holder.is_old == is_old);
        names.map(|holder| holder.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    match names(false) {
        new if new.is_empty() => {
            let seconds = holders.iter().map(|holder| holder.seconds).max().unwrap_or(0);
            format!(
                "image {name} was in use before the image server was restarted, by {}: whether it \
                 still is will be known in {seconds} s",
                names(true)
            )
        }
        new => {
            format!("image {name} is in use: machines must have it or will get it next, says {new}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn names(texts: &[&str]) -> BTreeSet<ImageName> {
        texts.iter().map(|text| name(text)).collect()
    }

    #[test]
    fn the_last_word_of_each_holder_counts_for_as_long_as_it_said() {
        let mut holds = Holds::default();
        assert_eq!(holds.note(0, "a", names(&["web/1", "web/2"]), 100), Ok(true));
        assert_eq!(holds.note(10, "b", names(&["web/2"]), 50), Ok(true));
        assert_eq!(holds.note(20, "a", names(&["web/1", "web/2"]), 100), Ok(false));
        let who = |holds: &Holds, now, image: &str| -> Vec<String> {
            let holders = holds.holders(now, &name(image));
            holders
                .into_iter()
                .map(|holder| format!("{} {}", holder.name, holder.seconds))
                .collect()
        };
        assert_eq!(who(&holds, 20, "web/2"), ["a 100", "b 40"]);
        assert_eq!(who(&holds, 60, "web/2"), ["a 60"]);
        assert_eq!(holds.note(60, "a", names(&["web/3"]), 100), Ok(true));
        assert_eq!(who(&holds, 60, "web/2"), [""; 0]);
        assert_eq!(holds.held(60), [&name("web/3")].into());
        assert_eq!(holds.saved(), [SavedHold { holder: "a".to_owned(), names: names(&["web/3"]) }]);
    }

    #[test]
    fn holds_of_a_former_server_last_for_a_while() {
        let saved = vec![SavedHold { holder: "a".to_owned(), names: names(&["web/1"]) }];
        let mut holds = Holds::new(saved.clone());
        assert_eq!(holds.saved(), saved);
        let holders = holds.holders(30, &name("web/1"));
        assert_eq!(
            refusal(&name("web/1"), &holders),
            "image web/1 was in use before the image server was restarted, by a: whether it still \
             is will be known in 570 s"
        );
        assert_eq!(holds.holders(600, &name("web/1")), []);
        assert_eq!(holds.note(30, "a", names(&["web/1"]), 900), Ok(false));
        let holders = holds.holders(30, &name("web/1"));
        assert_eq!(
            refusal(&name("web/1"), &holders),
            "image web/1 is in use: machines must have it or will get it next, says a"
        );
    }

    #[test]
    fn there_may_not_be_more_holders_than_memory_has_places() {
        let mut holds = Holds::default();
        for number in 0..HOLDERS_MAX {
            assert_eq!(holds.note(0, &number.to_string(), names(&[]), 10), Ok(true));
        }
        assert_eq!(holds.note(0, "one more", names(&[]), 10), Err(TooManyError));
        assert_eq!(holds.note(0, "1", names(&["a"]), 10), Ok(true));
        assert_eq!(holds.note(10, "one more", names(&[]), 10), Ok(true));
    }
}
