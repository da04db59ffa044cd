//! Signatures of the content of computed files: a filegen-server signs which content the files of
//! one machine have.
//!
//! ```text
//! dominator-contents-v1
//! machine web1
//! issued 1795337000
//! expires 1795340600
//! file blake3:<hex> /etc/shadow
//! ```
//!
//! One line for each file, sorted by path; each line has a newline at its end. Like a
//! [`Statement`](super::Statement), it has exactly one text. The signed image names the keys that
//! count ([`ContentSigner`](super::ContentSigner)). `docs/IMAGE-FORMAT.md` has the bytes.

use std::fmt;

use super::openssh::PublicKey;
use super::signature::{Signature, SignatureError, SignatureLimits};
use super::statement::{Lines, StatementError, seconds};
use crate::escape::{escape, unescape};
use crate::object::ObjectId;
use crate::path::TreePath;

/// The first line, and the namespace of the signature.
pub const CONTENTS_NAMESPACE: &str = "dominator-contents-v1";

/// The most files in one statement.
pub const FILES_MAX: usize = 250;

/// The longest statement, in bytes.
pub const STATEMENT_BYTES_MAX: usize = 1 << 20;

/// What is signed: the content of files of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentsStatement {
    /// The host name of the machine in the machine database.
    pub machine: String,
    /// When it was signed, in seconds after 1970-01-01 UTC.
    pub issued: u64,
    /// When it no longer permits that a file gets the content.
    pub expires: u64,
    /// Sorted by path.
    pub files: Vec<(TreePath, ObjectId)>,
}

impl fmt::Display for ContentsStatement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { machine, issued, expires, files } = self;
        let machine = escape(machine.as_bytes());
        writeln!(formatter, "{CONTENTS_NAMESPACE}\nmachine {machine}")?;
        writeln!(formatter, "issued {issued}\nexpires {expires}")?;
        files.iter().try_for_each(|(path, id)| writeln!(formatter, "file {id} {path}"))
    }
}

impl std::str::FromStr for ContentsStatement {
    type Err = StatementError;

    fn from_str(text: &str) -> Result<Self, StatementError> {
        let mut lines = Lines::new(text, STATEMENT_BYTES_MAX)?;
        lines.read(CONTENTS_NAMESPACE, CONTENTS_NAMESPACE, |_| Some(()))?;
        let mut statement = Self {
            machine: lines.read("machine ", "machine NAME", |name| {
                String::from_utf8(unescape(name).ok()?).ok()
            })?,
            issued: lines.read("issued ", "issued SECONDS", seconds)?,
            expires: lines.read("expires ", "expires SECONDS", seconds)?,
            files: Vec::new(),
        };
        while !lines.is_at_end() {
            if statement.files.len() == FILES_MAX {
                lines.read("", "the end after 250 files", |_| None::<()>)?;
            }
            statement.files.push(lines.read("file ", "file ID PATH", |file| {
                let (id, path) = file.split_once(' ')?;
                Some((TreePath::new(unescape(path).ok()?).ok()?, id.parse().ok()?))
            })?);
        }
        if statement.expires <= statement.issued {
            return Err(StatementError::Expired);
        }
        let is_sorted = statement.files.is_sorted_by(|(one, _), (other, _)| one < other);
        if !is_sorted || statement.to_string() != text {
            return Err(StatementError::Spelling);
        }
        Ok(statement)
    }
}

impl Signature {
    /// Parses a signature of contents, and verifies that its key has signed them.
    ///
    /// # Errors
    ///
    /// [`SignatureError`] says what is wrong.
    pub fn check_contents(&self) -> Result<(ContentsStatement, PublicKey), SignatureError> {
        // What nobody has signed is not parsed.
        let key = self.key(CONTENTS_NAMESPACE)?;
        let statement = self.statement.parse();
        Ok((statement.map_err(|source| SignatureError::Statement { source })?, key))
    }
}

/// The signatures of contents that are given to a machine for one update.
pub const CONTENTS_SIGNATURES: SignatureLimits =
    SignatureLimits { count: 64, statement_bytes: STATEMENT_BYTES_MAX };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Algorithm;

    fn path(text: &str) -> TreePath {
        TreePath::new(text).unwrap()
    }

    #[test]
    fn there_is_one_text_for_each_statement() {
        let id = Algorithm::Blake3.digest(b"one");
        let statement = ContentsStatement {
            machine: "web1".to_owned(),
            issued: 1_795_337_000,
            expires: 1_795_340_600,
            files: vec![(path("/a\nb"), id), (path("/c d"), id)],
        };
        let text = format!(
            "dominator-contents-v1\nmachine web1\nissued 1795337000\nexpires 1795340600\n\
             file {id} /a\\nb\nfile {id} /c d\n"
        );
        assert_eq!(statement.to_string(), text);
        assert_eq!(text.parse(), Ok(statement));
        let line = |number, expected| Err(StatementError::Line { number, expected });
        let table = [
            (text.replace("-v1", "-v2"), line(1, CONTENTS_NAMESPACE)),
            (text.replace("machine web1\n", ""), line(2, "machine NAME")),
            (text.replace("issued 1", "issued x"), line(3, "issued SECONDS")),
            (text.replace("issued 1", "issued 01"), Err(StatementError::Spelling)),
            (text.replace("expires 17953406", "expires 17953370"), Err(StatementError::Expired)),
            (text.replace("expires 1", "expires "), Err(StatementError::Expired)),
            (text.replace("/c d", "c d"), line(6, "file ID PATH")),
            (text.replace("/c d", "/a"), Err(StatementError::Spelling)),
            (text.replace("/c d", "/a\\nb"), Err(StatementError::Spelling)),
            (text.replace("/c d", "/c\\x20d"), Err(StatementError::Spelling)),
            (text.trim_end().to_owned(), Err(StatementError::Spelling)),
            (text.replace('\n', "\r\n"), Err(StatementError::Spelling)),
        ];
        for (text, error) in table {
            assert_eq!(text.parse::<ContentsStatement>(), error, "{text}");
        }
        let (head, _) = text.split_once("file ").unwrap();
        let many = (100..=350).map(|number| format!("file {id} /{number}\n"));
        let many = head.to_owned() + &many.collect::<String>();
        let error = line(FILES_MAX + 5, "the end after 250 files");
        assert_eq!(many.parse::<ContentsStatement>(), error);
    }
}
