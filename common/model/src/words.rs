//! Numbers and foreign texts as operators read them.

/// `bytes` for people: `87 bytes`, `8.8 MB`.
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

/// So many of them: `1 object`, `2 objects`.
#[must_use]
pub fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// `text` without control characters, which could play tricks with a terminal, and cut after
/// `bytes_max` bytes, so that no machine makes a list of all machines too long.
#[must_use]
pub fn plain(text: &str, bytes_max: usize) -> String {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let harmless = |character: char| if character.is_control() { ' ' } else { character };
    let mut plain: String = text[..end].chars().map(harmless).collect();
    if end < text.len() {
        plain.push_str(" ...");
    }
    plain
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
    fn foreign_texts_are_cut_and_harmless() {
        assert_eq!(plain("good", 4), "good");
        assert_eq!(plain("\u{1b}[2J\nbad", 99), " [2J bad");
        assert_eq!(plain("Zürich", 2), "Z ...");
    }
}
