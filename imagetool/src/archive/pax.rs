//! The records of a pax header: `LENGTH KEY=VALUE\n`, one after the other.
//!
//! They are parsed by their lengths, as POSIX says. The parser of the tar library splits at
//! newlines instead, so a value that contains one (a capability, an ACL, a file name) would be
//! lost, and a crafted one could inject a record.
// tidy: core

use model::tree::Time;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PaxError {
    #[error("invalid pax record at byte {offset} of its header")]
    Record { offset: usize },
    #[error("the pax record `{key}` has the invalid value `{value}`")]
    Value { key: &'static str, value: String },
}

/// The records of one header, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records(Vec<Record>);

/// Key and value.
type Record = (Vec<u8>, Vec<u8>);

impl Records {
    /// Splits `bytes`, the content of a pax header, into records.
    ///
    /// # Errors
    ///
    /// [`PaxError::Record`] where the bytes stop making sense.
    pub fn parse(bytes: &[u8]) -> Result<Self, PaxError> {
        let mut records = Vec::new();
        let mut offset = 0;
        while offset < bytes.len() {
            let rest = &bytes[offset..];
            // Some archivers fill the header with zeros.
            if rest.iter().all(|&byte| byte == 0) {
                break;
            }
            let (record, length) = split_record(rest).ok_or(PaxError::Record { offset })?;
            records.push(record);
            offset += length;
        }
        Ok(Self(records))
    }

    /// Appends the records of `later`, which take precedence.
    pub fn extend(&mut self, later: Self) {
        self.0.extend(later.0);
    }

    /// Keys and values, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0.iter().map(|(key, value)| (&key[..], &value[..]))
    }

    /// Returns the last value of `key`, which takes precedence. An empty value removes the record.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        let (_, value) = self.0.iter().rev().find(|(name, _)| name == key.as_bytes())?;
        (!value.is_empty()).then_some(value)
    }

    /// Returns the last value of `key` as a number.
    ///
    /// # Errors
    ///
    /// [`PaxError::Value`] if it is no number of 64 bits.
    pub fn number(&self, key: &'static str) -> Result<Option<u64>, PaxError> {
        self.get(key).map(|value| number(key, value)).transpose()
    }

    /// Returns the last value of `key` as a time.
    ///
    /// # Errors
    ///
    /// [`PaxError::Value`] if it is no decimal number, or too large.
    pub fn time(&self, key: &'static str) -> Result<Option<Time>, PaxError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match time(value) {
            Some(time) => Ok(Some(time)),
            None => Err(bad_value(key, value)),
        }
    }
}

fn split_record(bytes: &[u8]) -> Option<(Record, usize)> {
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(digits(&bytes[..space])?).ok()?;
    let record = bytes.get(space + 1..length)?;
    let (last, body) = record.split_last()?;
    if *last != b'\n' {
        return None;
    }
    let equals = body.iter().position(|&byte| byte == b'=')?;
    Some(((body[..equals].to_owned(), body[equals + 1..].to_owned()), length))
}

/// Reads `value`, that of the record `key`, as a decimal number.
///
/// # Errors
///
/// [`PaxError::Value`] if it is no number of 64 bits.
pub fn number(key: &'static str, value: &[u8]) -> Result<u64, PaxError> {
    digits(value).ok_or_else(|| bad_value(key, value))
}

fn bad_value(key: &'static str, value: &[u8]) -> PaxError {
    PaxError::Value { key, value: model::escape::escape(value) }
}

fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Parses `seconds[.fraction]`. Digits beyond nanoseconds are rounded down.
fn time(text: &[u8]) -> Option<Time> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut halves = text.splitn(2, |&byte| byte == b'.');
    let seconds = i64::try_from(digits(halves.next()?)?).ok()?;
    let fraction = halves.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let mut nanoseconds = 0;
    for place in 0..9 {
        let digit = fraction.get(place).map_or(0, |byte| u32::from(byte - b'0'));
        nanoseconds = nanoseconds * 10 + digit;
    }
    if !negative {
        return Some(Time { seconds, nanoseconds });
    }
    let cut = fraction.iter().skip(9).any(|&byte| byte != b'0');
    let nanoseconds = nanoseconds + u32::from(cut);
    if nanoseconds == 0 {
        return Some(Time { seconds: -seconds, nanoseconds: 0 });
    }
    Some(Time { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_may_hold_newlines_and_zeros() {
        let bytes = b"12 path=a\nb\n26 SCHILY.xattr.user.a=\0\n\n";
        let records = Records::parse(bytes).unwrap();
        let pairs: Vec<_> = records.iter().collect();
        let want: [(&[u8], &[u8]); 2] = [(b"path", b"a\nb"), (b"SCHILY.xattr.user.a", b"\0\n")];
        assert_eq!(pairs, want);
    }

    #[test]
    fn the_last_record_counts_and_an_empty_one_takes_back() {
        let mut records = Records::parse(b"9 uid=12\n9 uid=13\n").unwrap();
        assert_eq!(records.number("uid"), Ok(Some(13)));
        records.extend(Records::parse(b"7 uid=\n").unwrap());
        assert_eq!(records.number("uid"), Ok(None));
    }

    #[test]
    fn refuses_what_is_no_record() {
        let table: [&[u8]; 9] = [
            b"x",
            b"8 path=a\n",
            b"10 path=ab",
            b"9 path=ab\n",
            b"0 a=b\n",
            b"99999999999999999999999 a=b\n",
            b"18446744073709551615 a=b\n",
            b"5 ab\n",
            b"-6 a=b\n",
        ];
        for bytes in table {
            assert_eq!(Records::parse(bytes), Err(PaxError::Record { offset: 0 }), "{bytes:?}");
        }
    }

    #[test]
    fn times_may_be_negative_and_have_fractions() {
        let at = |seconds, nanoseconds| Some(Time { seconds, nanoseconds });
        let table: [(&str, Option<Time>); 10] = [
            ("0", at(0, 0)),
            ("1700000000.5", at(1_700_000_000, 500_000_000)),
            ("1.123456789123", at(1, 123_456_789)),
            ("-1", at(-1, 0)),
            ("-1.25", at(-2, 750_000_000)),
            ("-0.0000000001", at(-1, 999_999_999)),
            ("1.", at(1, 0)),
            ("x", None),
            ("1.x", None),
            ("99999999999999999999", None),
        ];
        for (text, want) in table {
            assert_eq!(time(text.as_bytes()), want, "{text}");
        }
    }
}
