//! Which images go, and until when one may be made to stay.
// tidy: core

use model::tree::Time;
use model::when::moment;

/// What is to become of an image whose time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Its time has not come.
    No,
    /// It goes.
    Goes,
    /// It stays, because it is in use; operators should know.
    Stays,
}

/// Decides over an image that goes at `expires_at`.
#[must_use]
pub fn due(expires_at: Option<Time>, now: Time, is_held: bool) -> Due {
    match expires_at {
        Some(at) if at <= now && is_held => Due::Stays,
        Some(at) if at <= now => Due::Goes,
        _ => Due::No,
    }
}

/// An image would go earlier than it was said to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShorterError {
    /// It was said to stay for ever.
    #[error(
        "it never expires, and what somebody may rely on is not taken back: delete it when \
         nobody needs it"
    )]
    Never,
    /// It was said to stay for longer.
    #[error(
        "it expires {}, which is later: an expiry is only put off, so delete the image if it \
         should go earlier",
        moment(*until)
    )]
    Longer {
        /// Until when.
        until: Time,
    },
}

/// When an image goes that was to go at `before` and should go at `wanted`.
///
/// # Errors
///
/// [`ShorterError`] if that is earlier.
pub fn put_off(before: Option<Time>, wanted: Option<Time>) -> Result<Option<Time>, ShorterError> {
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

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    #[test]
    fn an_image_goes_when_its_time_has_come_and_nobody_uses_it() {
        let table = [
            (None, false, Due::No),
            (None, true, Due::No),
            (Some(at(11)), false, Due::No),
            (Some(at(11)), true, Due::No),
            (Some(at(10)), false, Due::Goes),
            (Some(at(10)), true, Due::Stays),
        ];
        for (expires_at, is_held, expected) in table {
            assert_eq!(due(expires_at, at(10), is_held), expected);
        }
    }

    #[test]
    fn an_expiry_is_only_put_off() {
        let table = [
            (None, None, Ok(None)),
            (Some(at(10)), None, Ok(None)),
            (Some(at(10)), Some(at(10)), Ok(Some(at(10)))),
            (Some(at(10)), Some(at(11)), Ok(Some(at(11)))),
            (Some(at(10)), Some(at(9)), Err(ShorterError::Longer { until: at(10) })),
            (None, Some(at(10)), Err(ShorterError::Never)),
        ];
        for (before, wanted, expected) in table {
            assert_eq!(put_off(before, wanted), expected);
        }
    }
}
