//! The keys that an image names to sign the content of its computed files.

use serde::{Deserialize, Serialize};

use super::keys::{read_key, split_list};
use super::openssh::PublicKey;
use crate::JsonSchema;
use crate::escape::unescape;
use crate::image::ComputedRule;
use crate::path::TreePath;

/// The most keys that one image names.
pub const SIGNERS_MAX: usize = 16;

/// The most computed files of an image whose content must be signed.
pub const SIGNED_FILES_MAX: usize = 1_000;

/// Why keys cannot sign the content of computed files.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignersError {
    /// A line of the text is not a key.
    #[error("line {number}: {why}")]
    Line {
        /// The number of the line, from 1.
        number: usize,
        /// What is wrong with it.
        why: String,
    },
    #[error("it names no key")]
    None,
    #[error("it names {count} keys: an image has at most {SIGNERS_MAX}")]
    TooMany { count: usize },
    #[error("`{key}`: {why}")]
    Key { key: String, why: String },
    #[error("`{key}` is named twice")]
    Twice { key: String },
    #[error("the image has no computed files")]
    NoFiles,
    #[error(
        "the image has {count} computed files: at most {SIGNED_FILES_MAX} can have signed content"
    )]
    TooManyFiles { count: usize },
    #[error("{path}, which a key may sign, is not a computed file")]
    NotComputed { path: TreePath },
    #[error("no key may sign {path}")]
    Unsigned { path: TreePath },
}

/// A key that may sign the content of computed files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// [`SignersError`] names the line.
    pub fn read_list(text: &str) -> Result<Vec<Self>, SignersError> {
        let mut signers: Vec<Self> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |why: String| SignersError::Line { number: index + 1, why };
            let signer = Self::read_line(line).map_err(bad)?;
            if signers.iter().any(|other| other.key == signer.key) {
                return Err(bad("the key is named twice".to_owned()));
            }
            signers.push(signer);
        }
        match signers.len() {
            0 => Err(SignersError::None),
            count if count > SIGNERS_MAX => Err(SignersError::TooMany { count }),
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

/// Refuses signers that are no keys, that sign nothing, or that do not sign all computed files.
///
/// # Errors
///
/// [`SignersError`] names the key or the file.
pub(crate) fn verify(
    signers: &[ContentSigner],
    computed: &[ComputedRule],
) -> Result<(), SignersError> {
    if signers.is_empty() {
        return Ok(());
    }
    if computed.is_empty() {
        return Err(SignersError::NoFiles);
    }
    if signers.len() > SIGNERS_MAX {
        return Err(SignersError::TooMany { count: signers.len() });
    }
    if computed.len() > SIGNED_FILES_MAX {
        return Err(SignersError::TooManyFiles { count: computed.len() });
    }
    for (index, signer) in signers.iter().enumerate() {
        let key = || signer.key.clone();
        signer.public_key().map_err(|why| SignersError::Key { key: key(), why })?;
        if signers[..index].iter().any(|other| other.key == signer.key) {
            return Err(SignersError::Twice { key: key() });
        }
        let is_absent = |path: &&TreePath| computed.iter().all(|rule| rule.path != **path);
        if let Some(path) = signer.paths.iter().find(is_absent) {
            return Err(SignersError::NotComputed { path: path.clone() });
        }
    }
    let is_unsigned =
        |rule: &&ComputedRule| !signers.iter().any(|signer| signer.may_sign(&rule.path));
    match computed.iter().find(is_unsigned) {
        Some(rule) => Err(SignersError::Unsigned { path: rule.path.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIByiw1+aBsmSKnIN6HU2aMNBHg7vUqfdKq0rPsn81BJj";

    fn path(text: &str) -> TreePath {
        TreePath::new(text).unwrap()
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
            assert_eq!(ContentSigner::read_list(&text).unwrap_err().to_string(), error);
        }
    }
}
