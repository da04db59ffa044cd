//! Byte strings as text: `\\`, `\n` and `\xHH` escapes.
//!
//! Linux names are bytes, not text. Wherever a person or JSON meets one (tree text, JSON calls,
//! error messages, pages) it is written in this form, which is plain text for plain names and
//! loses nothing for the others. Valid UTF-8 stays as it is; backslashes, newlines, other control
//! characters and invalid bytes are escaped.

use std::fmt::Write as _;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::JsonSchema;

/// A text that is not a valid escaped byte string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EscapeError {
    /// A backslash is followed by something else than `\`, `n` or `xHH`.
    #[error("bad escape at byte {offset} of `{text}`: expected \\\\, \\n or \\xHH")]
    BadEscape {
        /// Where the backslash stands, in bytes.
        offset: usize,
        /// The whole text.
        text: String,
    },
}

/// Writes `bytes` as text.
#[must_use]
pub fn escape(bytes: &[u8]) -> String {
    escape_with(bytes, |_| false)
}

/// Writes `bytes` as text without white space, so that it can be a column of a line.
#[must_use]
pub fn escape_word(bytes: &[u8]) -> String {
    escape_with(bytes, char::is_whitespace)
}

fn escape_with(bytes: &[u8], also: impl Fn(char) -> bool) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                _ if character.is_control() || also(character) => {
                    let mut buffer = [0; 4];
                    for byte in character.encode_utf8(&mut buffer).bytes() {
                        push_hex(&mut text, byte);
                    }
                }
                _ => text.push(character),
            }
        }
        for &byte in chunk.invalid() {
            push_hex(&mut text, byte);
        }
    }
    text
}

fn push_hex(text: &mut String, byte: u8) {
    write!(text, "\\x{byte:02x}").expect("writing to a String cannot fail");
}

/// Reads back what [`escape`] or [`escape_word`] wrote.
///
/// # Errors
///
/// [`EscapeError::BadEscape`] where a backslash starts no known escape.
pub fn unescape(text: &str) -> Result<Vec<u8>, EscapeError> {
    let source = text.as_bytes();
    let mut bytes = Vec::with_capacity(source.len());
    let mut at = 0;
    while at < source.len() {
        if source[at] != b'\\' {
            bytes.push(source[at]);
            at += 1;
            continue;
        }
        let bad = || EscapeError::BadEscape { offset: at, text: text.to_owned() };
        match source.get(at + 1) {
            Some(b'\\') => {
                bytes.push(b'\\');
                at += 2;
            }
            Some(b'n') => {
                bytes.push(b'\n');
                at += 2;
            }
            Some(b'x') => {
                let digit = |index: usize| {
                    source.get(index).and_then(|&byte| char::from(byte).to_digit(16))
                };
                let high = digit(at + 2).ok_or_else(bad)?;
                let low = digit(at + 3).ok_or_else(bad)?;
                bytes.push(u8::try_from(high * 16 + low).expect("two hex digits fit a byte"));
                at += 4;
            }
            _ => return Err(bad()),
        }
    }
    Ok(bytes)
}

/// A byte string that is bytes in binary encodings and escaped text in JSON.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(with = "String")]
pub struct ByteText(pub Vec<u8>);

impl std::fmt::Debug for ByteText {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "\"{}\"", escape(&self.0))
    }
}

impl std::fmt::Display for ByteText {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&escape(&self.0))
    }
}

impl Serialize for ByteText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize_bytes(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for ByteText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_bytes(deserializer).map(Self)
    }
}

/// Serializes `bytes` as [`ByteText`] does.
pub fn serialize_bytes<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        serializer.serialize_str(&escape(bytes))
    } else {
        serializer.serialize_bytes(bytes)
    }
}

/// Deserializes what [`serialize_bytes`] wrote.
///
/// # Errors
///
/// What the deserializer says, or a bad escape.
pub fn deserialize_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    struct Bytes;
    impl Visitor<'_> for Bytes {
        type Value = Vec<u8>;
        fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("a byte string")
        }
        fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<u8>, E> {
            unescape(text).map_err(E::custom)
        }
        fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_owned())
        }
        fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
            Ok(bytes)
        }
    }
    if deserializer.is_human_readable() {
        deserializer.deserialize_str(Bytes)
    } else {
        deserializer.deserialize_byte_buf(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_what_is_not_plain_text() {
        let table: [(&[u8], &str, &str); 6] = [
            (b"/etc/passwd", "/etc/passwd", "/etc/passwd"),
            (b"a b", "a b", "a\\x20b"),
            (b"back\\slash", "back\\\\slash", "back\\\\slash"),
            (b"line\nend", "line\\nend", "line\\nend"),
            (b"\xff\xfe", "\\xff\\xfe", "\\xff\\xfe"),
            ("gr\u{fc}n\u{7}".as_bytes(), "gr\u{fc}n\\x07", "gr\u{fc}n\\x07"),
        ];
        for (bytes, text, word) in table {
            assert_eq!(escape(bytes), text);
            assert_eq!(escape_word(bytes), word);
            assert_eq!(unescape(text).unwrap(), bytes);
            assert_eq!(unescape(word).unwrap(), bytes);
        }
    }

    #[test]
    fn refuses_unknown_escapes() {
        for text in ["\\", "\\q", "\\x", "\\x4", "\\xzz"] {
            assert_eq!(
                unescape(text),
                Err(EscapeError::BadEscape { offset: 0, text: text.to_owned() })
            );
        }
    }
}
