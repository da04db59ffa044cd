//! Signs the content of files of machines, and remembers what was made for which machine: nothing
//! else is signed, whoever asks.
//!
//! # Invariants
//!
//! * Content is signed only for the machine and the path that it was made for, and only if it is
//!   among the last four that were.

use std::collections::BTreeMap;
use std::fs::{OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use api::fault::{Fault, FaultCode};
use api::file_generator::{FileContent, SignContentsRequest};
use certs::signing_key::{KeyError, SigningKey};
use model::display::error_chain;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::signing::contents::{FILES_MAX, SIGNED_FILES_MAX};
use model::signing::{ContentsStatement, Signature};
use redb::{Database, ReadableDatabase as _, ReadableTableMetadata as _, TableDefinition};

/// The name of the database in the state directory. Only its owner can read it, because a short
/// secret can be guessed from its digest.
const FILE: &str = "signed.redb";

/// By host name and path: the digests of the content that was made last, the newest one first, each
/// with the code of its algorithm.
const MADE: TableDefinition<'static, (&'static str, &'static [u8]), &'static [u8]> =
    TableDefinition::new("made");

/// How many contents of each file are remembered, so that a machine can go back to them.
const CONTENTS_MAX: usize = 4;

/// The most files that are remembered, of all machines.
const ROWS_MAX: u64 = 500_000;

/// The longest host name of a machine in a machine database, in bytes.
const HOSTNAME_BYTES_MAX: usize = 253;

/// How long a signature counts, in seconds. It is made when a machine is about to get the content.
const VALID_SECONDS: u64 = 3_600;

/// The memory that the database may use, in bytes.
const CACHE_BYTES: usize = 16 << 20;

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
    #[error(
        "{}, which says what was made for which machine, cannot be used: if it is damaged, remove \
         it, and machines go back to no former content before they got new one", path.display()
    )]
    Database {
        path: PathBuf,
        #[source]
        source: Box<redb::Error>,
    },
}

/// Content that was made for a file of a machine.
pub type MadeContents<'a> = BTreeMap<(&'a str, &'a TreePath), ObjectId>;

/// Signs contents with one key.
#[derive(Debug)]
pub struct Signer {
    key: SigningKey,
    public_line: String,
    /// `None` after an error: then it is opened again, because redb does nothing more.
    database: Mutex<Option<Database>>,
    path: PathBuf,
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
        let path = directory.join(FILE);
        let signer = Self { key, public_line, database: Mutex::default(), path };
        signer.with(|_| Ok(()))?;
        Ok(signer)
    }

    /// Returns the line for the file of `imagetool add --computed-signer`.
    #[must_use]
    pub fn public_line(&self) -> &str {
        &self.public_line
    }

    /// Does `work` with the database.
    fn with<T>(
        &self,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, SignerError> {
        let mut slot = locked(&self.database);
        let done = (|| {
            let database = match slot.take() {
                Some(database) => database,
                None => open_database(&self.path)?,
            };
            // redb panics on some damaged pages.
            let done = catch_unwind(AssertUnwindSafe(|| work(&database)))
                .unwrap_or_else(|_| Err(redb::Error::Corrupted("a page is damaged".to_owned())))?;
            *slot = Some(database);
            Ok(done)
        })();
        let path = || self.path.clone();
        done.map_err(|source: redb::Error| SignerError::Database {
            path: path(),
            source: Box::new(source),
        })
    }

    /// Remembers content that was made. Blocks.
    ///
    /// # Errors
    ///
    /// If it cannot be kept: then it is not signed.
    pub fn remember(&self, made: &MadeContents<'_>) -> Result<(), SignerError> {
        let is_full = self.with(|database| remember(database, made))?;
        if is_full {
            tracing::error!(
                "content of more than {ROWS_MAX} files was made: that of further files is not \
                 signed. Remove {} while filegen-server does not run",
                self.path.display()
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
        let unknown = self.with(|database| unknown(database, &hostname, &files));
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

/// Remembers content that was made. Returns true if there are too many rows for that of some files.
fn remember(database: &Database, made: &MadeContents<'_>) -> Result<bool, redb::Error> {
    let known = database.begin_read()?.open_table(MADE)?;
    let mut is_full = false;
    let mut changed = Vec::new();
    let named = made.iter().filter(|((hostname, _), _)| hostname.len() <= HOSTNAME_BYTES_MAX);
    for ((hostname, path), id) in named {
        let row = known.get((*hostname, path.as_bytes()))?;
        if row.is_none() && known.len()? + changed.len() as u64 >= ROWS_MAX {
            is_full = true;
            continue;
        }
        let row = row.map(|row| row.value().to_vec()).unwrap_or_default();
        let mut ids = ids_of(&row);
        if ids.first() != Some(id) {
            ids.retain(|known| known != id);
            ids.insert(0, *id);
            ids.truncate(CONTENTS_MAX);
            changed.push(((*hostname, path.as_bytes()), row_of(&ids)));
        }
    }
    if !changed.is_empty() {
        let write = database.begin_write()?;
        {
            let mut table = write.open_table(MADE)?;
            for (key, row) in &changed {
                table.insert(key, row.as_slice())?;
            }
        }
        write.commit()?;
    }
    Ok(is_full)
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

fn open_database(path: &Path) -> Result<Database, redb::Error> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    let create = || Database::builder().set_cache_size(CACHE_BYTES).create_file(file);
    // redb panics on some damaged pages.
    let database = catch_unwind(AssertUnwindSafe(create))
        .map_err(|_| redb::Error::Corrupted("a page is damaged".to_owned()))??;
    let write = database.begin_write()?;
    write.open_table(MADE)?;
    write.commit()?;
    Ok(database)
}

fn row_of(ids: &[ObjectId]) -> Vec<u8> {
    let bytes = |id: &ObjectId| [&[id.algorithm().code()], id.digest()].concat();
    ids.iter().flat_map(bytes).collect()
}

fn ids_of(mut row: &[u8]) -> Vec<ObjectId> {
    let mut ids = Vec::new();
    while let Some((&code, rest)) = row.split_first() {
        let Some(algorithm) = Algorithm::from_code(code) else { break };
        let Some((digest, rest)) = rest.split_at_checked(algorithm.digest_bytes()) else { break };
        ids.extend(ObjectId::from_digest(algorithm, digest));
        row = rest;
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = include_str!("../../common/certs/tests/keys/alice");

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
        for number in [1, 2, 1, 9, 3, 4] {
            signer.remember(&BTreeMap::from([(("web1", &path), id(number))])).unwrap();
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
        // After an error, and after a panic, the database is opened again.
        let failed = signer.with(|_| Err::<(), _>(redb::Error::PreviousIo));
        assert!(failed.is_err() && sign("web1", 4).is_ok());
        assert!(signer.with(|_| -> Result<(), redb::Error> { panic!("a page") }).is_err());
        assert!(sign("web1", 4).is_ok());
        // What no machine can be called is not remembered.
        let long = "x".repeat(254);
        signer.remember(&BTreeMap::from([((&*long, &path), id(4))])).unwrap();
        assert!(sign(&long, 4).is_err());
        let mode = std::fs::metadata(place.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
