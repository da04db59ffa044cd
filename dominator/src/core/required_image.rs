//! The image that each machine must have: by its record, by default or by a rollback; and warnings
//! about images.
// tidy: core

use api::dominator::orders::DefaultImage;
use api::dominator::rollback::Rollback;
use model::display::{counted, utc};
use model::image::{DEPRECATED, ImageName, Notes};
use model::mdb::Machine;
use model::tree::Time;

/// A warning is shown from this time before an image expires, in seconds.
const EXPIRES_SOON: i64 = 7 * 24 * 3_600;

/// A default image is not set: more machines would change their image than the operator expects.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{image} would be the image of {moved} from now on, to which the machine database gives none; \
     if that is intended: --yes"
)]
pub struct DefaultImageError {
    pub image: ImageName,
    /// The number of machines that get another image, as text.
    pub moved: String,
}

/// Returns the image that a machine must have unless it is rolled back.
#[must_use]
pub fn ordinary(machine: &Machine, default: Option<&DefaultImage>) -> Option<ImageName> {
    machine.required().or_else(|| default.map(|default| default.image.clone()))
}

/// Returns the image that a machine must have. A rollback is of no effect if it is from another
/// image than the ordinary one.
#[must_use]
pub fn required(
    machine: &Machine,
    default: Option<&DefaultImage>,
    rollback: Option<&Rollback>,
) -> Option<ImageName> {
    let ordinary = ordinary(machine, default)?;
    Some(rollback.and_then(|rollback| rolled_back(&ordinary, rollback)).unwrap_or(ordinary))
}

/// Returns the image of a machine that is rolled back, whose image would be `ordinary`; `None` if
/// the rollback is of no effect. It takes back the parts of the image that it is from, and leaves
/// others as they are: bundles may come and go.
#[must_use]
pub fn rolled_back(ordinary: &ImageName, rollback: &Rollback) -> Option<ImageName> {
    let Rollback { from, image, .. } = rollback;
    if ordinary == from {
        return Some(image.clone());
    }
    let parts = |name: &ImageName| name.parts().collect::<Vec<_>>();
    let (from, image, mut now) = (parts(from), parts(image), parts(ordinary));
    let removed: Vec<&ImageName> = from.iter().filter(|part| !image.contains(part)).collect();
    let added = image.iter().filter(|part| !from.contains(part)).cloned();
    let first = now.iter().position(|part| Some(&part) == removed.first())?;
    if !removed.iter().all(|part| now.contains(part)) {
        return None;
    }
    now.splice(first..=first, added);
    now.retain(|part| !removed.contains(&part));
    ImageName::composed(&now).ok()
}

/// Counts those of `machines` whose record names no image, and those of them that would be updated
/// if the default changed from `before` to `after`.
#[must_use]
pub fn count_moved<'a>(
    machines: impl Iterator<Item = &'a Machine>,
    before: Option<&ImageName>,
    after: Option<&ImageName>,
) -> (u32, u32) {
    let is_other = after.is_some() && before != after;
    machines.filter(|machine| machine.required().is_none()).fold((0, 0), |(all, moved), machine| {
        // Machines with DisableUpdates are compared with the image, but not updated.
        (all + 1, moved + u32::from(is_other && !machine.disable_updates))
    })
}

/// Says that an image with these notes is deprecated, if so.
#[must_use]
pub fn deprecation(notes: &Notes) -> Option<String> {
    match notes.tags.get(DEPRECATED)?.as_str() {
        "" | "true" => Some("is deprecated".to_owned()),
        why => Some(format!("is deprecated: {why}")),
    }
}

/// Returns a warning about an image with these notes, if it is deprecated or expires.
#[must_use]
pub fn image_warning(notes: &Notes, now: Time) -> Option<String> {
    let mut parts = Vec::from_iter(deprecation(notes));
    if let Some(at) = notes.expires_at {
        let left = at.seconds.saturating_sub(now.seconds);
        if left <= 0 {
            parts.push(format!("expired {}", utc(at)));
        } else if left <= EXPIRES_SOON {
            parts.push(format!("expires {}", utc(at)));
        }
    }
    (!parts.is_empty()).then(|| parts.join(" and "))
}

/// Returns a warning as a sentence. `machines` is how many must have the image or get it next.
#[must_use]
pub fn warning_text(image: &ImageName, machines: usize, warning: &str) -> String {
    format!("{image}, for {}: {warning}", counted(machines as u64, "machine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_machines_without_an_image_get_the_default() {
        let text = r#"[{"Hostname": "a"}, {"Hostname": "b", "RequiredImage": "own"},
                       {"Hostname": "c", "DisableUpdates": true}, {"Hostname": "d"}]"#;
        let machines = model::mdb::parse(text).unwrap();
        let name = |text: &str| ImageName::new(text).unwrap();
        let image = name("rescue");
        let default = DefaultImage { image, who: "ann".to_owned(), since: Time::default() };
        let required: Vec<Option<ImageName>> =
            machines.values().map(|machine| ordinary(machine, Some(&default))).collect();
        let rescue = Some(name("rescue"));
        assert_eq!(required, [rescue.clone(), Some(name("own")), rescue.clone(), rescue]);
        assert_eq!(ordinary(&machines["a"], None), None);

        let (x, y) = (name("x"), name("y"));
        let table = [
            ((None, Some(&x)), (3, 2)),
            ((Some(&x), Some(&x)), (3, 0)),
            ((Some(&x), Some(&y)), (3, 2)),
            ((Some(&x), None), (3, 0)),
            ((None, None), (3, 0)),
        ];
        for ((before, after), expected) in table {
            assert_eq!(
                count_moved(machines.values(), before, after),
                expected,
                "{before:?} {after:?}"
            );
        }
    }

    #[test]
    fn a_rollback_takes_back_what_was_changed_whatever_bundles_come_and_go() {
        let name = |text: &str| ImageName::new(text).unwrap();
        // From an image to its former one, and what is ordinary then.
        let table = [
            ("web/2", "web/1", "web/2", Some("web/1")),
            ("web/2", "web/1", "web/3", None),
            ("web/2", "web/1", "web/2 + job/1", Some("web/1 + job/1")),
            ("web/2 + job/1", "web/1 + job/1", "web/2 + job/2", Some("web/1 + job/2")),
            ("web/2 + job/1", "web/1 + job/1", "web/2", Some("web/1")),
            ("web/2 + job/2", "web/2 + job/1", "web/3 + job/2 + x", Some("web/3 + job/1 + x")),
            ("web/2 + job/2", "web/2 + job/1", "web/2 + job/3", None),
            ("web/2 + job/2", "web/1 + job/1", "web/2 + job/2", Some("web/1 + job/1")),
            ("web/2 + job/2", "web/1 + job/1", "web/2 + job/3", None),
            ("web/2 + job/1", "web/2", "web/3 + job/1", Some("web/3")),
            ("web/2", "web/2 + job/1", "web/2", Some("web/2 + job/1")),
            ("web/2", "web/2 + job/1", "web/3", None),
        ];
        for (from, image, ordinary, expected) in table {
            let (who, why, since) = ("ann".to_owned(), "so".to_owned(), Time::default());
            let rollback = Rollback { from: name(from), image: name(image), who, why, since };
            let got = rolled_back(&name(ordinary), &rollback);
            assert_eq!(got, expected.map(name), "{from} to {image}: {ordinary}");
        }
    }

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    #[test]
    fn images_that_go_away_or_should_not_be_used_are_remarked_upon() {
        let (day, now) = (24 * 3_600, at(1_000_000));
        let tag = |value: &str| [(DEPRECATED.to_owned(), value.to_owned())].into();
        let notes = Notes::default;
        let table = [
            (notes(), None),
            (Notes { tags: tag(""), ..notes() }, Some("is deprecated")),
            (Notes { tags: tag("use web/8"), ..notes() }, Some("is deprecated: use web/8")),
            (Notes { expires_at: Some(at(1_000_000 + 8 * day)), ..notes() }, None),
            (
                Notes { expires_at: Some(at(1_000_000 + day)), ..notes() },
                Some("expires 1970-01-13T13:46:40Z"),
            ),
            (
                Notes { expires_at: Some(at(999_999)), tags: tag("true"), ..notes() },
                Some("is deprecated and expired 1970-01-12T13:46:39Z"),
            ),
        ];
        for (notes, expected) in table {
            assert_eq!(image_warning(&notes, now).as_deref(), expected);
        }
        let image = ImageName::new("web/7").unwrap();
        let said = warning_text(&image, 2, "is deprecated");
        assert_eq!(said, "web/7, for 2 machines: is deprecated");
    }
}
