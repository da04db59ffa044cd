//! Numbers that may pass 2^53 are strings in JSON, because JavaScript and jq would round them.
//!
//! For `#[serde(with = "crate::wide")]`; other encodings get the plain number.

use std::fmt::Display;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};

/// Serializes a number, as text in JSON.
///
/// # Errors
///
/// What the serializer says.
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
