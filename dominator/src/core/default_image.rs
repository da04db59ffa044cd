//! The image of machines whose record in the machine database names none.
// tidy: core

use api::dominator::orders::DefaultImage;
use model::image::ImageName;
use model::mdb::Machine;

/// Why a default image is not set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DefaultImageError {
    /// It would move more machines than whoever asks for it expects.
    #[error(
        "{image} would be the image of {moved} from now on, which the machine database gives none; \
         if that is meant, say so: --yes"
    )]
    Moves {
        image: ImageName,
        /// How many machines get another image, in words.
        moved: String,
    },
}

/// The image that a machine must have.
#[must_use]
pub fn required(machine: &Machine, default: Option<&DefaultImage>) -> Option<ImageName> {
    machine.required().or_else(|| default.map(|default| default.image.clone()))
}

/// How many of `machines` have no image of their own, and how many of these would be changed if
/// the default was `after` instead of `before`.
#[must_use]
pub fn moved<'a>(
    machines: impl Iterator<Item = &'a Machine>,
    before: Option<&ImageName>,
    after: Option<&ImageName>,
) -> (u32, u32) {
    let is_other = after.is_some() && before != after;
    machines.filter(|machine| machine.required().is_none()).fold((0, 0), |(all, moved), machine| {
        // Those with DisableUpdates are compared with it, and left as they are.
        (all + 1, moved + u32::from(is_other && !machine.disable_updates))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::tree::Time;

    #[test]
    fn only_machines_without_an_image_get_the_default() {
        let text = r#"[{"Hostname": "a"}, {"Hostname": "b", "RequiredImage": "own"},
                       {"Hostname": "c", "DisableUpdates": true}, {"Hostname": "d"}]"#;
        let machines = model::mdb::parse(text).unwrap();
        let name = |text: &str| ImageName::new(text).unwrap();
        let image = name("rescue");
        let default = DefaultImage { image, who: "ann".to_owned(), since: Time::default() };
        let required: Vec<Option<ImageName>> =
            machines.values().map(|machine| required(machine, Some(&default))).collect();
        let rescue = Some(name("rescue"));
        assert_eq!(required, [rescue.clone(), Some(name("own")), rescue.clone(), rescue]);
        assert_eq!(super::required(&machines["a"], None), None);

        let (x, y) = (name("x"), name("y"));
        let table = [
            ((None, Some(&x)), (3, 2)),
            ((Some(&x), Some(&x)), (3, 0)),
            ((Some(&x), Some(&y)), (3, 2)),
            ((Some(&x), None), (3, 0)),
            ((None, None), (3, 0)),
        ];
        for ((before, after), expected) in table {
            assert_eq!(moved(machines.values(), before, after), expected, "{before:?} {after:?}");
        }
    }
}
