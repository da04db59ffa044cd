//! The statement: the text that is signed.
//!
//! ```text
//! dominator-image-v1
//! image web/8
//! digest blake3:<hex>
//! signed 1795337000
//! expires never
//! ```
//!
//! Five lines, each with a newline at its end. Each statement has exactly one text: any other
//! spelling is refused, so that the displayed text is the signed one.

use std::fmt;

use crate::image::ImageName;
use crate::object::ObjectId;

/// The first line, and the namespace of the signature: no signature that was made for anything
/// else counts for an image.
pub const NAMESPACE: &str = "dominator-image-v1";

/// The longest statement, in bytes.
pub const STATEMENT_BYTES_MAX: usize = 2_048;

/// The latest time in a statement: the end of the year 9999.
const SECONDS_MAX: u64 = 253_402_300_799;

/// What is signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The name of the image.
    pub image: ImageName,
    /// The digest of its signed part.
    pub digest: ObjectId,
    /// When it was signed, in seconds after 1970-01-01 UTC. Of two images the one that was signed
    /// later is the newer one.
    pub signed: u64,
    /// When the statement expires: then it no longer permits updates to the image; `None` for
    /// never.
    pub expires: Option<u64>,
}

/// Why a text is not a statement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StatementError {
    /// It is too long.
    #[error("a statement has at most {limit} bytes, this has {length}")]
    TooLong {
        /// Its length, in bytes.
        length: usize,
        limit: usize,
    },
    /// A line is invalid.
    #[error("line {number} of the statement is not `{expected}`")]
    Line {
        /// The number of the line, from 1.
        number: usize,
        expected: &'static str,
    },
    /// It is a statement in another spelling.
    #[error("the statement is not spelled as this release does it")]
    Spelling,
    /// It expires before it was signed.
    #[error("the statement expires before it was signed")]
    Expired,
}

impl fmt::Display for Statement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, digest, signed, expires } = self;
        write!(formatter, "{NAMESPACE}\nimage {image}\ndigest {digest}\nsigned {signed}\n")?;
        match expires {
            Some(expires) => writeln!(formatter, "expires {expires}"),
            None => writeln!(formatter, "expires never"),
        }
    }
}

impl std::str::FromStr for Statement {
    type Err = StatementError;

    fn from_str(text: &str) -> Result<Self, StatementError> {
        let mut lines = Lines::new(text, STATEMENT_BYTES_MAX)?;
        lines.read(NAMESPACE, NAMESPACE, |_| Some(()))?;
        let statement = Self {
            image: lines.read("image ", "image NAME", |name| name.parse().ok())?,
            digest: lines.read("digest ", "digest ID", |id| id.parse().ok())?,
            signed: lines.read("signed ", "signed SECONDS", seconds)?,
            expires: lines.read("expires ", "expires SECONDS or never", |text| match text {
                "never" => Some(None),
                text => seconds(text).map(Some),
            })?,
        };
        if statement.expires.is_some_and(|expires| expires <= statement.signed) {
            return Err(StatementError::Expired);
        }
        // Signs, leading zeros, other line ends, more lines.
        if statement.to_string() != text {
            return Err(StatementError::Spelling);
        }
        Ok(statement)
    }
}

/// The lines of a statement that were not read yet.
pub(super) struct Lines<'a> {
    lines: std::str::Lines<'a>,
    /// The number of the line that was read last, from 1.
    number: usize,
}

impl<'a> Lines<'a> {
    /// Starts to read `text`, which may have `limit` bytes.
    pub(super) fn new(text: &'a str, limit: usize) -> Result<Self, StatementError> {
        if text.len() > limit {
            return Err(StatementError::TooLong { length: text.len(), limit });
        }
        Ok(Self { lines: text.lines(), number: 0 })
    }

    /// Returns what `parse` makes of what follows `start` in the next line. Errors show the line as
    /// `expected`.
    pub(super) fn read<T>(
        &mut self,
        start: &str,
        expected: &'static str,
        parse: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, StatementError> {
        self.number += 1;
        let value = self.lines.next().and_then(|line| parse(line.strip_prefix(start)?));
        value.ok_or(StatementError::Line { number: self.number, expected })
    }

    /// True if all lines were read.
    pub(super) fn is_at_end(&self) -> bool {
        self.lines.clone().next().is_none()
    }
}

/// Parses a time.
pub(super) fn seconds(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&seconds| seconds <= SECONDS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Algorithm;

    fn statement(expires: Option<u64>) -> Statement {
        Statement {
            image: ImageName::new("web/8").unwrap(),
            digest: Algorithm::Blake3.digest(b"web"),
            signed: 1_795_337_000,
            expires,
        }
    }

    #[test]
    fn there_is_one_text_for_each_statement() {
        let digest = Algorithm::Blake3.digest(b"web");
        let text = format!(
            "dominator-image-v1\nimage web/8\ndigest {digest}\nsigned 1795337000\nexpires never\n"
        );
        assert_eq!(statement(None).to_string(), text);
        for expires in [None, Some(1_795_337_001)] {
            let statement = statement(expires);
            assert_eq!(statement.to_string().parse(), Ok(statement));
        }
        let line = |number, expected| Err(StatementError::Line { number, expected });
        let table = [
            (text.replace("v1", "v2"), line(1, "dominator-image-v1")),
            (text.replace("v1\n", "v1 \n"), Err(StatementError::Spelling)),
            (text.replace("web/8", "/web/8"), Err(StatementError::Spelling)),
            (text.replace("web/8", "a/../b"), line(2, "image NAME")),
            (text.replace("blake3", "md5"), line(3, "digest ID")),
            (text.replace("signed 1", "signed +1"), Err(StatementError::Spelling)),
            (text.replace("signed 1", "signed 01"), Err(StatementError::Spelling)),
            (text.replace("signed 1", "signed -1"), line(4, "signed SECONDS")),
            (text.replace("signed 1", "signed 999999999"), line(4, "signed SECONDS")),
            (text.replace("never", "ever"), line(5, "expires SECONDS or never")),
            (text.replace("never", "1795337000"), Err(StatementError::Expired)),
            (text.replace('\n', "\r\n"), Err(StatementError::Spelling)),
            (text.clone() + "x\n", Err(StatementError::Spelling)),
            (text.trim_end().to_owned(), Err(StatementError::Spelling)),
            (String::new(), line(1, "dominator-image-v1")),
            ("x".repeat(2_049), Err(StatementError::TooLong { length: 2_049, limit: 2_048 })),
        ];
        for (text, error) in table {
            assert_eq!(text.parse::<Statement>(), error, "{text}");
        }
    }
}
