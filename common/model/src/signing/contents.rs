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
//! count ([`ContentSigner`]). `docs/IMAGE-FORMAT.md` has the bytes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::keys::{read_key, split_list};
use super::openssh::PublicKey;
use super::signature::{SIGNATURE_BYTES_MAX, Signature, SignatureError};
use super::statement::{SECONDS_MAX, StatementError};
use crate::escape::{escape, unescape};
use crate::object::ObjectId;
use crate::path::TreePath;

/// The first line, and the namespace of the signature.
pub const CONTENTS_NAMESPACE: &str = "dominator-contents-v1";

/// The most files in one statement.
pub const FILES_MAX: usize = 250;

/// The longest statement, in bytes.
pub const STATEMENT_BYTES_MAX: usize = 1 << 20;

/// The most signatures that are given to a machine for one update.
pub const SIGNATURES_MAX: usize = 64;

/// The most keys that one image names.
pub const SIGNERS_MAX: usize = 16;

/// The most computed files of an image whose content must be signed.
pub const SIGNED_FILES_MAX: usize = 1_000;

/// A key that may sign the content of computed files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentSigner {
    /// An ed25519 public key as OpenSSH writes it: `ssh-ed25519`, a blank, and the key in base64.
    pub key: String,
    /// The files whose content it may sign; all if this is empty.
    pub paths: Vec<TreePath>,
}

impl ContentSigner {
    /// Parses a text with a key on each line; `paths="/a,/b"` before a key limits it to these.
    ///
    /// # Errors
    ///
    /// Says which line is wrong, and why.
    pub fn read_list(text: &str) -> Result<Vec<Self>, String> {
        let mut signers: Vec<Self> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |why: String| format!("line {}: {why}", index + 1);
            let signer = Self::read_line(line).map_err(bad)?;
            if signers.iter().any(|other| other.key == signer.key) {
                return Err(bad("the key is named twice".to_owned()));
            }
            signers.push(signer);
        }
        match signers.len() {
            0 => Err("it names no key".to_owned()),
            count if count > SIGNERS_MAX => {
                Err(format!("it names {count} keys: an image has at most {SIGNERS_MAX}"))
            }
            _ => Ok(signers),
        }
    }

    fn read_line(line: &str) -> Result<Self, String> {
        let (list, rest) = split_list(line, "paths=")
            .ok_or_else(|| "after paths=\"/ONE,/OTHER\" comes a key".to_owned())?;
        let (key, _) = read_key(rest)?;
        let path = |text: &str| {
            let bytes = unescape(text).map_err(|error| error.to_string())?;
            TreePath::new(bytes).map_err(|error| error.to_string())
        };
        let mut paths: Vec<TreePath> =
            list.map(|list| list.split(',').map(path).collect()).transpose()?.unwrap_or_default();
        paths.sort();
        Ok(Self { key: key.to_line(), paths })
    }

    /// True if it may sign the content of the file at `path`.
    #[must_use]
    pub fn may_sign(&self, path: &TreePath) -> bool {
        self.paths.is_empty() || self.paths.contains(path)
    }

    /// Returns the key.
    ///
    /// # Errors
    ///
    /// If the text is not a key in its only spelling.
    pub fn public_key(&self) -> Result<PublicKey, String> {
        let (key, _) = read_key(&self.key)?;
        match key.to_line() == self.key {
            true => Ok(key),
            false => Err("something follows the key".to_owned()),
        }
    }
}

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
        if text.len() > STATEMENT_BYTES_MAX {
            let (length, limit) = (text.len(), STATEMENT_BYTES_MAX);
            return Err(StatementError::TooLong { length, limit });
        }
        let mut lines = text.lines();
        let mut line = |number, start, expected| {
            let line = lines.next().and_then(|line| line.strip_prefix(start));
            line.ok_or(StatementError::Line { number, expected })
        };
        let bad = |number, expected| StatementError::Line { number, expected };
        let seconds = |text: &str| text.parse().ok().filter(|&seconds| seconds <= SECONDS_MAX);
        line(1, CONTENTS_NAMESPACE, CONTENTS_NAMESPACE)?;
        let machine = line(2, "machine ", "machine NAME")?;
        let machine = unescape(machine).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let issued = line(3, "issued ", "issued SECONDS")?;
        let expires = line(4, "expires ", "expires SECONDS")?;
        let mut files = Vec::new();
        for (index, line) in lines.enumerate() {
            let file = || {
                let (id, path) = line.strip_prefix("file ")?.split_once(' ')?;
                Some((TreePath::new(unescape(path).ok()?).ok()?, id.parse().ok()?))
            };
            if index == FILES_MAX {
                return Err(bad(index + 5, "the end after 250 files"));
            }
            files.push(file().ok_or(bad(index + 5, "file ID PATH"))?);
        }
        let statement = Self {
            machine: machine.ok_or(bad(2, "machine NAME"))?,
            issued: seconds(issued).ok_or(bad(3, "issued SECONDS"))?,
            expires: seconds(expires).ok_or(bad(4, "expires SECONDS"))?,
            files,
        };
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

/// Returns true if signatures of contents are few and short enough to be parsed.
#[must_use]
pub fn are_contents_bounded(signatures: &[Signature]) -> bool {
    signatures.len() <= SIGNATURES_MAX
        && signatures.iter().all(|signature| {
            signature.statement.len() <= STATEMENT_BYTES_MAX
                && signature.signature.len() <= SIGNATURE_BYTES_MAX
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Algorithm;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIByiw1+aBsmSKnIN6HU2aMNBHg7vUqfdKq0rPsn81BJj";

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

    #[test]
    fn signers_are_read_from_lines() {
        let other = KEY.replace("Jj", "Jk");
        let text = format!("# keys\n\n{KEY} filegen\npaths=\"/b,/a\\x2cc\" {other}\n");
        let signers = ContentSigner::read_list(&text).unwrap();
        let all = ContentSigner { key: KEY.to_owned(), paths: Vec::new() };
        let some = ContentSigner { key: other, paths: vec![path("/a,c"), path("/b")] };
        assert!(all.may_sign(&path("/x")) && some.may_sign(&path("/b")));
        assert!(!some.may_sign(&path("/x")));
        assert_eq!(signers, [all.clone(), some]);
        assert!(all.public_key().is_ok());
        assert!(ContentSigner { key: format!("{KEY} x"), ..all }.public_key().is_err());
        let table = [
            (String::new(), "it names no key"),
            (format!("{KEY}\n{KEY} again"), "line 2: the key is named twice"),
            (format!("paths=\"/a {KEY}"), "line 1: after paths=\"/ONE,/OTHER\" comes a key"),
            (format!("paths=a {KEY}"), "line 1: path `a` is not absolute"),
            (
                "ssh-rsa AAAA".to_owned(),
                "line 1: a key of the kind ssh-rsa: only ssh-ed25519 counts",
            ),
        ];
        for (text, error) in table {
            assert_eq!(ContentSigner::read_list(&text), Err(error.to_owned()));
        }
    }
}
