//! Signs the content of files of machines, and remembers what was made for which machine: nothing
//! else is signed, whoever asks.
//!
//! # Invariants
//!
//! * Content is signed only for the machine and the path that it was made for, and only if it is
//!   among the last four that were.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use api::codec::{Encoding, decode, encode};
use api::fault::{Fault, FaultCode};
use api::file_generator::{FileContent, GeneratedFile, SignContentsRequest};
use certs::signing_key::{KeyError, SigningKey};
use database::{DatabaseError, DatabaseFile};
use model::display::error_chain;
use model::mdb::HOSTNAME_BYTES_MAX;
use model::object::ObjectId;
use model::path::TreePath;
use model::signing::contents::FILES_MAX;
use model::signing::signers::SIGNED_FILES_MAX;
use model::signing::{ContentsStatement, Signature};
use redb::{Database, ReadableDatabase as _, ReadableTableMetadata as _, TableDefinition};

/// The name of the database in the state directory. Only its owner can read it, because a short
/// secret can be guessed from its digest.
const FILE: &str = "signed.redb";

/// By host name and path: the digests of the content that was made last, the newest one first, as
/// the bincode of a `Vec<ObjectId>`.
const MADE: TableDefinition<'static, (&'static str, &'static [u8]), &'static [u8]> =
    TableDefinition::new("made");

/// How many contents of each file are remembered, so that a machine can go back to them.
const CONTENTS_MAX: usize = 4;

/// The most files that are remembered, of all machines. More are of machines that are gone, or
/// called otherwise.
const ROWS_MAX: u64 = 500_000;

/// The longest row, in bytes.
const ROW_BYTES_MAX: usize = 1_024;

/// How long a signature counts, in seconds. It is made when a machine is about to get the content.
const VALID_SECONDS: u64 = 3_600;

/// Why nothing can be signed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignerError {
    #[error("cannot read the signing key {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the signing key {} cannot be used; `domtool cert signing-key FILE` makes one",
        path.display()
    )]
    Key {
        path: PathBuf,
        #[source]
        source: KeyError,
    },
    #[error("what was made for which machine cannot be remembered")]
    Database(#[from] DatabaseError),
}

/// The files that were asked for: the host name and the paths of each machine.
pub type WantedPaths = Vec<(String, Vec<TreePath>)>;

/// Signs contents with one key.
#[derive(Debug)]
pub struct Signer {
    key: SigningKey,
    public_line: String,
    made: DatabaseFile,
}

impl Signer {
    /// Opens the key, and what is remembered in `directory`.
    ///
    /// # Errors
    ///
    /// [`SignerError`] names the file.
    pub fn open(directory: &Path, key_file: &Path) -> Result<Self, SignerError> {
        let unread = |source| SignerError::Read { path: key_file.to_owned(), source };
        let unusable = |source| SignerError::Key { path: key_file.to_owned(), source };
        let text = std::fs::read_to_string(key_file).map_err(unread)?;
        let key = SigningKey::read(&text, None).map_err(unusable)?;
        let public_line = key.public_line().map_err(unusable)?;
        let lost = "machines go back to no former content before they got new one";
        let made = DatabaseFile::open_or_renew(&directory.join(FILE), prepare, lost)?;
        Ok(Self { key, public_line, made })
    }

    /// Returns the line for the file of `imagetool add --computed-signer`.
    #[must_use]
    pub fn public_line(&self) -> &str {
        &self.public_line
    }

    /// Remembers the content that was made for these paths of machines. Blocks.
    ///
    /// # Errors
    ///
    /// If it cannot be kept: then it is not signed.
    pub fn remember(
        &self,
        wanted: &WantedPaths,
        machines: &[Vec<GeneratedFile>],
    ) -> Result<(), SignerError> {
        let made = made(wanted, machines);
        if self.made.with("write", |database| remember(database, made, ROWS_MAX))? {
            tracing::warn!(
                "content of more than {ROWS_MAX} files was made, perhaps for machines that are \
                 gone: all was forgotten, and machines go back to no former content before they \
                 got new one"
            );
        }
        Ok(())
    }

    /// Signs contents at `now`, in seconds since 1970. Blocks.
    ///
    /// # Errors
    ///
    /// `NotFound` names content that was not made for the machine and path.
    pub fn sign(&self, request: SignContentsRequest, now: u64) -> Result<Vec<Signature>, Fault> {
        let SignContentsRequest { hostname, mut files } = request;
        if files.len() > SIGNED_FILES_MAX {
            let text = format!("at most {SIGNED_FILES_MAX} files are signed at a time");
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        if files.windows(2).any(|pair| pair[0].path == pair[1].path) {
            return Err(Fault::new(FaultCode::BadRequest, "a path is named twice"));
        }
        let internal = |text: String| Fault::new(FaultCode::Internal, text);
        let unknown = self.made.with("read", |database| unknown(database, &hostname, &files));
        let unknown = unknown.map_err(|error| internal(error_chain(&error)))?;
        if let Some(FileContent { path, id }) = unknown {
            let text = format!(
                "the content {id} of {path} was not made for {hostname}, or not lately: nothing \
                 is signed"
            );
            return Err(Fault::new(FaultCode::NotFound, text));
        }
        let sign = |files: &[FileContent]| {
            let statement = ContentsStatement {
                machine: hostname.clone(),
                issued: now,
                expires: now.saturating_add(VALID_SECONDS),
                files: files.iter().map(|file| (file.path.clone(), file.id)).collect(),
            };
            self.key.sign_contents(&statement).map_err(|error| internal(error.to_string()))
        };
        files.chunks(FILES_MAX).map(sign).collect()
    }
}

/// Returns the host name, the path and the digest of each content that was made.
fn made<'a>(
    wanted: &'a WantedPaths,
    machines: &'a [Vec<GeneratedFile>],
) -> impl Iterator<Item = (&'a str, &'a TreePath, ObjectId)> {
    wanted.iter().zip(machines).flat_map(|((hostname, paths), files)| {
        paths.iter().zip(files).filter_map(|(path, file)| match file {
            GeneratedFile::Made(content) => Some((hostname.as_str(), path, content.id)),
            _ => None,
        })
    })
}

/// Remembers content that was made. If that makes more than `rows_max` rows, forgets all others and
/// returns true.
fn remember<'a>(
    database: &Database,
    made: impl Iterator<Item = (&'a str, &'a TreePath, ObjectId)>,
    rows_max: u64,
) -> Result<bool, redb::Error> {
    let known = database.begin_read()?.open_table(MADE)?;
    let (mut changed, mut rows) = (BTreeMap::new(), known.len()?);
    for (hostname, path, id) in made.filter(|(hostname, ..)| hostname.len() <= HOSTNAME_BYTES_MAX) {
        let key = (hostname, path.as_bytes());
        let row = known.get(key)?;
        rows += u64::from(row.is_none());
        let mut ids = row.map(|row| ids_of(row.value())).unwrap_or_default();
        if ids.first() != Some(&id) {
            ids.retain(|known| *known != id);
            ids.insert(0, id);
            ids.truncate(CONTENTS_MAX);
            changed.insert(key, ids);
        }
    }
    let is_full = rows > rows_max;
    if !changed.is_empty() {
        let write = database.begin_write()?;
        if is_full {
            write.delete_table(MADE)?;
        }
        {
            let mut table = write.open_table(MADE)?;
            for (key, ids) in &changed {
                let row = encode(Encoding::Bincode, "digests", ids);
                let row = row.map_err(|error| redb::Error::Io(io::Error::other(error)))?;
                table.insert(key, row.as_slice())?;
            }
        }
        write.commit()?;
    }
    Ok(is_full)
}

/// Returns the digests of a row; none if it cannot be read.
fn ids_of(row: &[u8]) -> Vec<ObjectId> {
    decode(Encoding::Bincode, "digests", row, ROW_BYTES_MAX).unwrap_or_default()
}

/// Returns the first file whose content was not made for the machine.
fn unknown<'a>(
    database: &Database,
    hostname: &str,
    files: &'a [FileContent],
) -> Result<Option<&'a FileContent>, redb::Error> {
    let known = database.begin_read()?.open_table(MADE)?;
    for file in files {
        let row = known.get((hostname, file.path.as_bytes()))?;
        if !row.is_some_and(|row| ids_of(row.value()).contains(&file.id)) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Makes the table, if it is not there.
fn prepare(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    write.open_table(MADE)?;
    Ok(write.commit()?)
}

#[cfg(test)]
mod tests {
    use api::file_generator::GeneratedContent;
    use model::object::Algorithm;

    use super::*;

    const KEY: &str = include_str!("../../common/certs/tests/keys/alice");

    fn content(id: ObjectId) -> GeneratedContent {
        let generator = Algorithm::Blake3.digest(b"");
        GeneratedContent { id, size_bytes: 1, valid_until_seconds: 0, generator, is_secret: true }
    }

    #[test]
    fn only_what_was_made_lately_for_a_machine_is_signed() {
        let place = tempfile::tempdir().unwrap();
        let key_file = place.path().join("key");
        std::fs::write(&key_file, KEY).unwrap();
        let open = || Signer::open(place.path(), &key_file).unwrap();
        let signer = open();
        let path: TreePath = "/etc/a".parse().unwrap();
        let id = |number: u8| match number {
            9 => Algorithm::Sha512.digest(&[number]),
            _ => Algorithm::Blake3.digest(&[number]),
        };
        let remember = |signer: &Signer, hostname: &str, id| {
            let (wanted, made) = (vec![(hostname.to_owned(), vec![path.clone()])], content(id));
            signer.remember(&wanted, &[vec![GeneratedFile::Made(made)]]).unwrap();
        };
        for number in [1, 2, 1, 9, 3, 4] {
            remember(&signer, "web1", id(number));
        }
        drop(signer);
        let signer = open();
        let sign = |hostname: &str, number| {
            let (hostname, path) = (hostname.to_owned(), path.clone());
            let files = vec![FileContent { path, id: id(number) }];
            signer.sign(SignContentsRequest { hostname, files }, 1_000)
        };
        for number in [1, 9, 3, 4] {
            let signature = sign("web1", number).unwrap().remove(0);
            let (statement, _) = signature.check_contents().unwrap();
            let want = ContentsStatement {
                machine: "web1".to_owned(),
                issued: 1_000,
                expires: 4_600,
                files: vec![(path.clone(), id(number))],
            };
            assert_eq!(statement, want);
        }
        for (hostname, number) in [("web1", 2), ("web1", 5), ("web2", 1)] {
            let fault = sign(hostname, number).unwrap_err();
            let text = format!(
                "the content {} of /etc/a was not made for {hostname}, or not lately: nothing is \
                 signed",
                id(number)
            );
            assert_eq!((fault.code, fault.message), (FaultCode::NotFound, text));
        }
        // What no machine can be called is not remembered.
        let long = "x".repeat(254);
        remember(&signer, &long, id(4));
        assert!(sign(&long, 4).is_err());
        // If there are too many rows, all others are forgotten: what is needed is made again.
        let remember_few = |hostname| {
            let made = [(hostname, &path, id(1))].into_iter();
            signer.made.with("write", |database| super::remember(database, made, 2)).unwrap()
        };
        let are_signed = || {
            [("web1", 4), ("web2", 1), ("web3", 1)]
                .map(|(hostname, number)| sign(hostname, number).is_ok())
        };
        assert_eq!((remember_few("web2"), are_signed()), (false, [true, true, false]));
        assert_eq!((remember_few("web3"), are_signed()), (true, [false, false, true]));
        // What is damaged is made anew, and nothing of it is signed.
        drop(signer);
        std::fs::write(place.path().join(FILE), "garbage").unwrap();
        let signer = open();
        let files = vec![FileContent { path: path.clone(), id: id(4) }];
        let request = SignContentsRequest { hostname: "web1".to_owned(), files };
        assert_eq!(signer.sign(request, 1_000).unwrap_err().code, FaultCode::NotFound);
    }
}
