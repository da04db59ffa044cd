//! Decides which images expire.
// tidy: core

use model::display::utc;
use model::tree::Time;

/// The decision about an image with an expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The image has not expired.
    No,
    /// The object is removed.
    Expires,
    /// The image has expired but is in use.
    InUse,
}

/// Decides about an image that expires at `expires_at`.
#[must_use]
pub fn due(expires_at: Option<Time>, now: Time, is_held: bool) -> Due {
    match expires_at {
        Some(at) if at <= now && is_held => Due::InUse,
        Some(at) if at <= now => Due::Expires,
        _ => Due::No,
    }
}

/// The new expiry is earlier than the former one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShorterError {
    #[error(
        "it never expires, and what somebody may rely on is not taken back: delete it when \
         nobody needs it"
    )]
    Never,
    #[error(
        "it expires {}, which is later: an expiry is only put off, so delete the image if it \
         should go earlier",
        utc(*until)
    )]
    Longer { until: Time },
}

/// Returns the new expiry of an image that expires at `before` and should expire at `wanted`.
pub fn extend_expiry(
    before: Option<Time>,
    wanted: Option<Time>,
) -> Result<Option<Time>, ShorterError> {
    match (before, wanted) {
        (_, None) => Ok(None),
        (None, Some(_)) => Err(ShorterError::Never),
        (Some(until), Some(wanted)) if wanted < until => Err(ShorterError::Longer { until }),
        (Some(_), wanted) => Ok(wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    #[test]
    fn an_image_goes_when_its_time_has_come_and_nobody_uses_it() {
        let table = [
            (None, false, Due::No),
            (None, true, Due::No),
            (Some(time(11)), false, Due::No),
            (Some(time(11)), true, Due::No),
            (Some(time(10)), false, Due::Expires),
            (Some(time(10)), true, Due::InUse),
        ];
        for (expires_at, is_held, expected) in table {
            assert_eq!(due(expires_at, time(10), is_held), expected);
        }
    }

    #[test]
    fn an_expiry_is_only_put_off() {
        let table = [
            (None, None, Ok(None)),
            (Some(time(10)), None, Ok(None)),
            (Some(time(10)), Some(time(10)), Ok(Some(time(10)))),
            (Some(time(10)), Some(time(11)), Ok(Some(time(11)))),
            (Some(time(10)), Some(time(9)), Err(ShorterError::Longer { until: time(10) })),
            (None, Some(time(10)), Err(ShorterError::Never)),
        ];
        for (before, wanted, expected) in table {
            assert_eq!(extend_expiry(before, wanted), expected);
        }
    }
}
