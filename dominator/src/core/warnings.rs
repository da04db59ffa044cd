//! What operators should know of an image that machines must have.
// tidy: core

use model::image::{DEPRECATED, ImageName, Notes};
use model::tree::Time;
use model::when::moment;

use model::words::counted;

/// How long before it expires an image is remarked upon, in seconds.
const EXPIRES_SOON: i64 = 7 * 24 * 3_600;

/// Why machines should not depend on an image with these notes; `None` if they may.
#[must_use]
pub fn remark(notes: &Notes, now: Time) -> Option<String> {
    let mut parts = Vec::new();
    match notes.tags.get(DEPRECATED).map(String::as_str) {
        None => {}
        Some("" | "true") => parts.push("is deprecated".to_owned()),
        Some(why) => parts.push(format!("is deprecated: {why}")),
    }
    if let Some(at) = notes.expires_at {
        let left = at.seconds.saturating_sub(now.seconds);
        if left <= 0 {
            parts.push(format!("expired {}", moment(at)));
        } else if left <= EXPIRES_SOON {
            parts.push(format!("expires {}", moment(at)));
        }
    }
    (!parts.is_empty()).then(|| parts.join(" and "))
}

/// A remark upon an image that so many machines must have or will get next, as a sentence.
#[must_use]
pub fn sentence(image: &ImageName, machines: usize, remark: &str) -> String {
    format!("{image}, for {}: {remark}", counted(machines as u64, "machine"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(remark(&notes, now).as_deref(), expected);
        }
        let image = ImageName::new("web/7").unwrap();
        let said = sentence(&image, 2, "is deprecated");
        assert_eq!(said, "web/7, for 2 machines: is deprecated");
    }
}
