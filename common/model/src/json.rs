//! Rules of JSON texts: comment lines, and large numbers as strings.

/// Empties the comment lines of `text`, so that line numbers in errors stay right.
#[must_use]
pub fn without_comments(text: &str) -> String {
    let keep = |line: &str| {
        let start = line.trim_start();
        !start.starts_with('#') && !start.starts_with("//")
    };
    let lines: Vec<&str> =
        text.split('\n').map(|line| if keep(line) { line } else { "" }).collect();
    lines.join("\n")
}

/// Writes numbers that may pass 2^53 as strings, because JavaScript and jq would round them.
///
/// For `#[serde(with = "model::json::large_number")]`. Other encodings get the plain number.
pub mod large_number {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error as _};
    use serde::ser::{Serialize, Serializer};

    /// Serializes a number, as text in JSON.
    pub fn serialize<T: Serialize + Display, S: Serializer>(
        number: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(number)
        } else {
            number.serialize(serializer)
        }
    }

    /// Deserializes a number; in JSON from text, or from a plain number.
    ///
    /// # Errors
    ///
    /// What the deserializer says, or a text that is no such number.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: Deserialize<'de> + FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum TextOrNumber<T> {
            Text(String),
            Number(T),
        }
        if deserializer.is_human_readable() {
            match TextOrNumber::deserialize(deserializer)? {
                TextOrNumber::Text(text) => text.parse().map_err(D::Error::custom),
                TextOrNumber::Number(number) => Ok(number),
            }
        } else {
            T::deserialize(deserializer)
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::json::without_comments;

    #[test]
    fn empties_comment_lines_and_keeps_the_line_numbers() {
        assert_eq!(without_comments("# a\n  // b\n[1]\n \"#\""), "\n\n[1]\n \"#\"");
        assert_eq!(without_comments(""), "");
    }
}
