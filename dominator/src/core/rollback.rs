//! Rollbacks: machines that operators keep at their former images although their records require
//! others.
//!
//! A rollback is in force as long as the same image is required as when it was ordered. It has no
//! end of its own; [`Rollbacks::remove_ended`] removes those that are over, so that they do not
//! come into force again when the image is required once more.
// tidy: core

use std::collections::BTreeMap;
use std::sync::Arc;

use api::dominator::orders::DefaultImage;
use api::dominator::rollback::{Rollback, RolledBackMachine};
use model::display::counted;
use model::image::ImageName;
use model::mdb::Machine;
use serde::{Deserialize, Serialize};

use crate::core::required_image::{ordinary, required, rolled_back};

/// How many machines an error names.
const NAMED_MAX: usize = 10;

/// Why a rollback, or its end, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RollbackError {
    #[error(
        "{from} is not required of {}, so there is nothing to go back from: domtool explain HOST \
         shows which image is required, and why",
        named(hosts)
    )]
    NotRequired { from: ImageName, hosts: Vec<String> },
    #[error(
        "the former image of {} is not known, because the history has no update from another \
         image; set RequiredImage in the machine database instead",
        named(hosts)
    )]
    Unknown { hosts: Vec<String> },
    #[error(
        "the image server does not give {image}, the former image of {}: {why}; set RequiredImage \
         in the machine database to an image that is there",
        named(hosts)
    )]
    Gone { image: ImageName, hosts: Vec<String>, why: String },
    #[error("another image is required of {} since the order was given: try again", named(hosts))]
    Changed { hosts: Vec<String> },
    #[error("{} is not rolled back; domtool list-rollbacks shows which are", named(hosts))]
    NotRolledBack { hosts: Vec<String> },
}

/// Names machines, but not endlessly.
fn named(hosts: &[String]) -> String {
    let text = hosts[..hosts.len().min(NAMED_MAX)].join(", ");
    match hosts.len().saturating_sub(NAMED_MAX) {
        0 => text,
        more => format!("{text} and {}", counted(more as u64, "more machine")),
    }
}

/// What an update says of the image that a machine had before the required one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FormerImage {
    Known(ImageName),
    /// An older update may tell.
    Older,
    /// No older update can tell.
    Unknown,
}

/// Returns what an update from `former` to `image` says of the image that the machine had last
/// beside `required`. Updates are asked the newest first. `former` is empty if it is not known.
#[must_use]
pub fn former_image(required: &ImageName, image: &str, former: &str, is_done: bool) -> FormerImage {
    let known = |name: &str| match ImageName::new(name) {
        Ok(name) => FormerImage::Known(name),
        Err(_) => FormerImage::Unknown,
    };
    if is_done && image != required.as_str() {
        known(image)
    } else if former == required.as_str() {
        FormerImage::Older
    } else {
        known(former)
    }
}

/// The rollbacks of all machines, by host name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rollbacks {
    by_host: BTreeMap<String, Arc<Rollback>>,
}

impl Rollbacks {
    /// Returns the rollback of a machine with this record, if it is in force.
    #[must_use]
    pub fn of(&self, record: &Machine, default: Option<&DefaultImage>) -> Option<&Arc<Rollback>> {
        let rollback = self.by_host.get(&record.hostname)?;
        rolled_back(&ordinary(record, default)?, rollback).is_some().then_some(rollback)
    }

    /// Returns the images that a machine with this record must have and will get next.
    pub fn images_of(
        &self,
        record: &Machine,
        default: Option<&DefaultImage>,
    ) -> impl Iterator<Item = ImageName> {
        let rollback = self.of(record, default).map(|rollback| &**rollback);
        required(record, default, rollback).into_iter().chain(record.planned())
    }

    /// Adds rollbacks, replacing earlier ones.
    pub fn add(&mut self, machines: Vec<RolledBackMachine>) {
        let by_host = machines.into_iter().map(|one| (one.hostname, Arc::new(one.rollback)));
        self.by_host.extend(by_host);
    }

    /// Ends the rollbacks of machines. Returns those that were rolled back.
    pub fn end(&mut self, hostnames: Vec<String>) -> Vec<RolledBackMachine> {
        let ended = hostnames.into_iter().filter_map(|hostname| {
            let rollback = Arc::unwrap_or_clone(self.by_host.remove(&hostname)?);
            Some(RolledBackMachine { hostname, rollback })
        });
        ended.collect()
    }

    /// Removes the rollbacks that are over. `find` returns the record of a machine. Returns the
    /// names of their machines.
    pub fn remove_ended<'a>(
        &mut self,
        find: impl Fn(&str) -> Option<&'a Machine>,
        default: Option<&DefaultImage>,
    ) -> Vec<String> {
        let is_over = |hostname: &&String| match find(hostname) {
            Some(record) => self.of(record, default).is_none(),
            None => true,
        };
        let ended: Vec<String> = self.by_host.keys().filter(is_over).cloned().collect();
        for hostname in &ended {
            self.by_host.remove(hostname);
        }
        ended
    }

    /// Returns the rollbacks of machines with these records that are in force, in their order.
    pub fn in_force<'a>(
        &self,
        records: impl Iterator<Item = &'a Machine>,
        default: Option<&DefaultImage>,
    ) -> Vec<RolledBackMachine> {
        let one = |record: &Machine| {
            let rollback = Rollback::clone(self.of(record, default)?);
            Some(RolledBackMachine { hostname: record.hostname.clone(), rollback })
        };
        records.filter_map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use model::tree::Time;

    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn rolled_back(hostname: &str, from: &str, image: &str) -> RolledBackMachine {
        let (who, why) = ("ann".to_owned(), "it crashes".to_owned());
        let (from, image) = (name(from), name(image));
        let rollback = Rollback { from, image, who, why, since: Time::default() };
        RolledBackMachine { hostname: hostname.to_owned(), rollback }
    }

    fn record(hostname: &str, image: &str) -> Machine {
        Machine { hostname: hostname.into(), required_image: image.into(), ..Machine::default() }
    }

    #[test]
    fn the_former_image_is_the_last_one_that_is_not_required() {
        let known = |text: &str| FormerImage::Known(name(text));
        // An update to an image, from a former one, and whether it is done.
        let table = [
            (("web/2", "web/1", true), known("web/1")),
            (("web/2", "web/1", false), known("web/1")),
            // A repair.
            (("web/2", "web/2", true), FormerImage::Older),
            // The machine was installed, or was managed by another dominator.
            (("web/2", "", true), FormerImage::Unknown),
            // Another image is required since.
            (("web/1", "web/0", true), known("web/1")),
            (("web/1", "web/1", true), known("web/1")),
            // It never got the other image.
            (("web/3", "web/2", false), FormerImage::Older),
            (("web/3", "web/1", false), known("web/1")),
        ];
        for ((image, former, is_done), expected) in table {
            let found = former_image(&name("web/2"), image, former, is_done);
            assert_eq!(found, expected, "{image} {former} {is_done}");
        }
    }

    #[test]
    fn a_rollback_is_over_when_another_image_is_required_or_the_machine_is_gone() {
        let default = |image: &str| {
            Some(DefaultImage { image: name(image), who: "ann".into(), since: Time::default() })
        };
        let rollbacks = || {
            let mut rollbacks = Rollbacks::default();
            rollbacks.add(vec![rolled_back("a", "web/2", "web/1")]);
            rollbacks
        };
        let table = [
            (Some(record("a", "web/2")), None, true),
            (Some(record("a", "web/3")), None, false),
            (Some(record("a", "web/1")), None, false),
            (Some(record("a", "")), None, false),
            (Some(record("a", "")), default("web/2"), true),
            (Some(record("a", "web/2")), default("web/3"), true),
            (Some(record("a", "")), default("web/3"), false),
            (None, None, false),
        ];
        for (record, default, is_in_force) in table {
            let mut rollbacks = rollbacks();
            let ended = rollbacks.remove_ended(|_| record.as_ref(), default.as_ref());
            assert_eq!(ended.is_empty(), is_in_force, "{record:?} {default:?}");
            let Some(mut record) = record else { continue };
            record.planned_image = "web/9".into();
            let images: Vec<ImageName> = rollbacks.images_of(&record, default.as_ref()).collect();
            let ordinary = ordinary(&record, default.as_ref());
            let must_have = if is_in_force { Some(name("web/1")) } else { ordinary };
            assert_eq!(images, Vec::from_iter(must_have.into_iter().chain([name("web/9")])));
        }
    }

    #[test]
    fn the_end_names_those_that_were_rolled_back() {
        let mut rollbacks = Rollbacks::default();
        rollbacks.add(vec![rolled_back("a", "web/2", "web/1")]);
        let listed = |image: &str| rollbacks.in_force([record("a", image)].iter(), None);
        assert_eq!(listed("web/2"), [rolled_back("a", "web/2", "web/1")]);
        assert_eq!(listed("web/3"), []);
        let ended = rollbacks.end(vec!["a".to_owned(), "b".to_owned()]);
        assert_eq!(ended, [rolled_back("a", "web/2", "web/1")]);
        assert_eq!(rollbacks, Rollbacks::default());
        let hosts: Vec<String> = (1..13).map(|number| format!("web{number}")).collect();
        assert!(named(&hosts).ends_with("web10 and 2 more machines"), "{}", named(&hosts));
    }
}
