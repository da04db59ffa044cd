//! The header `Range`: which part of a resource is requested.
// tidy: core

use core::ops::Range;

/// One range of bytes, as requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteRange {
    /// From the first byte to the last, both included; to the end if there is no last.
    From {
        /// The first byte.
        first: u64,
        /// The last byte.
        last: Option<u64>,
    },
    /// The last so many bytes.
    Last(u64),
}

impl ByteRange {
    /// Parses the value of the header. Other units, several ranges and invalid ranges give `None`:
    /// the whole is answered then, as HTTP requires.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        let (first, last) = value.trim().strip_prefix("bytes=")?.trim().split_once('-')?;
        let number = |text: &str| -> Option<u64> {
            text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
        };
        match (first, last) {
            ("", last) => Some(Self::Last(number(last)?)),
            (first, "") => Some(Self::From { first: number(first)?, last: None }),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                (first <= last).then_some(Self::From { first, last: Some(last) })
            }
        }
    }

    /// Returns the requested part of `total_bytes`; `None` if there is no such part.
    #[must_use]
    pub fn of(self, total_bytes: u64) -> Option<Range<u64>> {
        let range = match self {
            Self::From { first, last } => {
                let end = last.map_or(total_bytes, |last| last.saturating_add(1));
                first..end.min(total_bytes)
            }
            Self::Last(count) => total_bytes.saturating_sub(count)..total_bytes,
        };
        (range.start < range.end).then_some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_cut_to_the_whole() {
        #[rustfmt::skip]
        let table = [
            // header                     of ten bytes
            ("bytes=0-3",                 Some(Some(0..4))),
            ("bytes=4-",                  Some(Some(4..10))),
            ("bytes=-3",                  Some(Some(7..10))),
            ("bytes=-30",                 Some(Some(0..10))),
            ("bytes=8-99",                Some(Some(8..10))),
            ("bytes=0-18446744073709551615", Some(Some(0..10))),
            ("bytes=10-",                 Some(None)),
            ("bytes=-0",                  Some(None)),
            ("bytes=3-2",                 None),
            ("bytes=0-1,3-4",             None),
            ("bytes=+1-2",                None),
            ("bytes=99999999999999999999-", None),
            ("bytes=-",                   None),
            ("items=0-3",                 None),
            ("",                          None),
        ];
        for (header, expected) in table {
            let got = ByteRange::parse(header).map(|range| range.of(10));
            assert_eq!(got, expected, "{header}");
        }
    }
}
