//! Texts for people: sizes, counts, times, errors and text from other machines.

use std::error::Error;
use std::fmt::Write as _;

use crate::tree::Time;

/// Formats a size: `87 bytes`, `8.8 MB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    let (mut tenths, mut unit) = (bytes / 100, 0);
    while tenths >= 10_000 {
        tenths /= 1_000;
        unit += 1;
    }
    match bytes {
        1 => "1 byte".to_owned(),
        0..1_000 => format!("{bytes} bytes"),
        _ => format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit]),
    }
}

/// Formats `number` with a comma between groups of three digits.
#[must_use]
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count: `1 object`, `2 objects`.
#[must_use]
pub fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Returns a space for characters that could manipulate a terminal: control characters, and those
/// that change the direction of a text, so that it reads as another one.
fn safe_char(character: char) -> char {
    let turns = matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}')
        || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if turns || character.is_control() { ' ' } else { character }
}

/// Replaces characters of `text` that could manipulate a terminal, except line feeds.
#[must_use]
pub fn safe_lines(text: &str) -> String {
    text.chars().map(|one| if one == '\n' { one } else { safe_char(one) }).collect()
}

/// Replaces characters of `text` that could manipulate a terminal, line feeds too, and cuts it
/// after `bytes_max` bytes, so that no machine makes a list of all machines too long.
#[must_use]
pub fn safe_text(text: &str, bytes_max: usize) -> String {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut plain: String = text[..end].chars().map(safe_char).collect();
    if end < text.len() {
        plain.push_str(" ...");
    }
    plain
}

/// Formats how long `then` was before `now`: `12 s ago`.
#[must_use]
pub fn ago(now: Time, then: Time) -> String {
    let seconds = now.seconds.saturating_sub(then.seconds).max(0);
    format!("{} ago", rough_duration(seconds.unsigned_abs()))
}

/// Formats a duration in one unit: `12 s`, `3 days`.
#[must_use]
pub fn rough_duration(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Formats a time in UTC, to the second.
#[must_use]
pub fn utc(time: Time) -> String {
    jiff::Timestamp::from_second(time.seconds)
        .map_or_else(|_| format!("{} s after 1970", time.seconds), |stamp| stamp.to_string())
}

/// Formats an error with its sources, outermost first, joined by colons on one line.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        write!(text, ": {cause}").expect("writing to a String cannot fail");
        source = cause.source();
    }
    text
}

/// Returns the line, from 1, of the byte at `offset` of a text.
#[must_use]
pub fn line_at(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let table = [
            (0, "0 bytes"),
            (1, "1 byte"),
            (999, "999 bytes"),
            (1_000, "1.0 kB"),
            (999_999, "999.9 kB"),
            (8_841_958, "8.8 MB"),
            (96_000_000_000, "96.0 GB"),
            (u64::MAX, "18.4 EB"),
        ];
        for (bytes, text) in table {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(counted(1, "object"), "1 object");
        assert_eq!(counted(2, "object"), "2 objects");
    }

    #[test]
    fn digits_are_grouped_by_three() {
        let counts = [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")];
        for (number, text) in counts {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn foreign_texts_are_cut_and_harmless() {
        assert_eq!(safe_text("good", 4), "good");
        assert_eq!(safe_text("\u{1b}[2J\nbad", 99), " [2J bad");
        assert_eq!(safe_text("Zürich", 2), "Z ...");
        assert_eq!(safe_text("gnp.\u{202e}exe", 99), "gnp. exe");
        assert_eq!(safe_lines("a\u{1b}[2J\nb\tc\u{2066}d\n"), "a [2J\nb c d\n");
    }

    #[test]
    fn distances_are_rough_and_moments_exact() {
        let at = |seconds| Time { seconds, nanoseconds: 999_999_999 };
        let table = [
            (0, "0 s ago"),
            (119, "119 s ago"),
            (120, "2 min ago"),
            (7_200, "2 h ago"),
            (200_000, "2 days ago"),
            (-5, "0 s ago"),
        ];
        for (distance, text) in table {
            assert_eq!(ago(at(1_000_000), at(1_000_000 - distance)), text);
        }
        assert_eq!(utc(at(1_700_000_000)), "2023-11-14T22:13:20Z");
    }
}
