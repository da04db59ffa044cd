//! Stores the content of computed files, and of which files of which machines it is.
//!
//! It is a database of its own, which only root may read, because content may be secret and backups
//! leave it out. If it is lost or damaged, everything is asked for again, and no change of content
//! is known any more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use api::codec::{Encoding, decode, encode};
use api::file_generator::ComputedContent;
use model::escape::ByteText;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use redb::{
    Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, WriteTransaction,
};

use super::StorageError;
use super::database::OpenDatabase;
use crate::core::computed::{StoredChange, StoredFiles};

/// The name of the database in the state directory.
const FILE: &str = "computed.redb";

/// The files of each machine, by host name.
const MACHINES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("files");

/// The same as an earlier release stored it.
const FORMER_MACHINES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("machines");

/// The changes of content, by their texts.
const CHANGES: TableDefinition<'static, &'static str, &'static [u8]> =
    TableDefinition::new("changes");

/// By algorithm and digest: when the content was first seen, and the content.
const CONTENTS: TableDefinition<'static, &'static [u8], (i64, &'static [u8])> =
    TableDefinition::new("contents");

/// The longest row of a machine, in bytes.
const ROW_BYTES_MAX: usize = 64 << 20;

fn key_of(id: &ObjectId) -> Vec<u8> {
    [&[id.algorithm().code()], id.digest()].concat()
}

fn id_of(key: &[u8]) -> Option<ObjectId> {
    let (&code, digest) = key.split_first()?;
    ObjectId::from_digest(Algorithm::from_code(code)?, digest)
}

/// What is known of stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredContent {
    /// When it was first seen.
    pub since: Time,
    pub size_bytes: u32,
}

/// The open database.
#[derive(Debug)]
pub struct ComputedStore(OpenDatabase);

impl ComputedStore {
    /// Opens the database in `directory`, or makes it. A damaged one is made anew.
    pub fn open(directory: &Path) -> Result<Self, StorageError> {
        let lost = "all computed files are asked for again";
        Ok(Self(OpenDatabase::open_or_renew(&directory.join(FILE), prepare, lost)?))
    }

    /// Returns what was saved of each machine. Rows that cannot be read are left out: what they
    /// say is asked for again.
    pub fn machines(&self) -> Result<BTreeMap<String, StoredFiles>, StorageError> {
        self.0.with("read", |database| {
            let table = database.begin_read()?.open_table(MACHINES)?;
            let mut machines = BTreeMap::new();
            for row in table.iter()? {
                let (hostname, files) = row?;
                let files = decode(Encoding::Bincode, "row", files.value(), ROW_BYTES_MAX);
                if let Ok(files) = files {
                    machines.insert(hostname.value().to_owned(), files);
                }
            }
            Ok(machines)
        })
    }

    /// Returns the saved changes of content. Rows that cannot be read are left out.
    pub fn changes(&self) -> Result<Vec<StoredChange>, StorageError> {
        self.0.with("read", |database| {
            let table = database.begin_read()?.open_table(CHANGES)?;
            let mut changes = Vec::new();
            for row in table.iter()? {
                let change = decode(Encoding::Bincode, "row", row?.1.value(), ROW_BYTES_MAX);
                changes.extend(change.ok());
            }
            Ok(changes)
        })
    }

    /// Describes those of these contents that are stored.
    pub fn find(
        &self,
        ids: &BTreeSet<ObjectId>,
    ) -> Result<BTreeMap<ObjectId, StoredContent>, StorageError> {
        self.0.with("read", |database| {
            let table = database.begin_read()?.open_table(CONTENTS)?;
            let mut known = BTreeMap::new();
            for id in ids {
                if let Some(row) = table.get(&*key_of(id))? {
                    let (seconds, content) = row.value();
                    let since = Time { seconds, nanoseconds: 0 };
                    let size_bytes = u32::try_from(content.len()).unwrap_or(u32::MAX);
                    known.insert(*id, StoredContent { since, size_bytes });
                }
            }
            Ok(known)
        })
    }

    /// Stores content that was first seen at `since`; it is on the disk when this returns.
    pub fn add(&self, contents: &[ComputedContent], since: Time) -> Result<(), StorageError> {
        self.0.transact(None, |write| {
            let mut table = write.open_table(CONTENTS)?;
            for content in contents {
                table.insert(&*key_of(&content.id), (since.seconds, &*content.bytes.0))?;
            }
            Ok(())
        })
    }

    /// Saves what is known of these machines, and all changes of content if these are others.
    pub fn save(
        &self,
        machines: &[(String, StoredFiles)],
        changes: Option<&[StoredChange]>,
    ) -> Result<(), StorageError> {
        self.0.transact(None, |write| {
            if let Some(changes) = changes {
                let mut table = write.open_table(CHANGES)?;
                table.retain(|_, _| false)?;
                for change in changes {
                    let row = encode(Encoding::Bincode, "row", change);
                    let row = row.expect("it is a plain structure");
                    table.insert(&*change.id.to_string(), &*row)?;
                }
            }
            let mut table = write.open_table(MACHINES)?;
            for (hostname, files) in machines {
                let row = encode(Encoding::Bincode, "row", files);
                table.insert(&**hostname, &*row.expect("it is a plain structure"))?;
            }
            Ok(())
        })
    }

    /// Returns those of these contents that are stored.
    pub fn contents(&self, ids: &[ObjectId]) -> Result<Vec<ComputedContent>, StorageError> {
        self.0.with("read", |database| {
            let table = database.begin_read()?.open_table(CONTENTS)?;
            let mut contents = Vec::new();
            for id in ids {
                if let Some(row) = table.get(&*key_of(id))? {
                    let bytes = ByteText(row.value().1.to_vec());
                    contents.push(ComputedContent { id: *id, bytes });
                }
            }
            Ok(contents)
        })
    }

    /// Removes these contents.
    pub fn remove(&self, ids: &[ObjectId]) -> Result<(), StorageError> {
        self.0.transact(None, |write| {
            let mut table = write.open_table(CONTENTS)?;
            for id in ids {
                table.remove(&*key_of(id))?;
            }
            Ok(())
        })
    }

    /// Removes all machines and contents but these. Does not write if there are no others.
    pub fn retain(
        &self,
        machines: &BTreeSet<String>,
        contents: &BTreeSet<ObjectId>,
    ) -> Result<(), StorageError> {
        let is_needed = |key: &[u8]| id_of(key).is_some_and(|id| contents.contains(&id));
        let has_others = self.0.with("read", |database| {
            let read = database.begin_read()?;
            let (hosts, all) = (read.open_table(MACHINES)?, read.open_table(CONTENTS)?);
            let mut hosts = hosts.iter()?.filter_map(Result::ok);
            let mut all = all.iter()?.filter_map(Result::ok);
            Ok(hosts.any(|(host, _)| !machines.contains(host.value()))
                || all.any(|(key, _)| !is_needed(key.value())))
        })?;
        if !has_others {
            return Ok(());
        }
        self.0.transact(None, |write: &WriteTransaction| {
            write.open_table(MACHINES)?.retain(|host, _| machines.contains(host))?;
            write.open_table(CONTENTS)?.retain(|key, _| is_needed(key))?;
            Ok(())
        })
    }
}

/// Makes the tables, if they are not there.
fn prepare(database: &Database) -> Result<(), redb::Error> {
    let read = database.begin_read()?;
    let is_made = read.open_table(MACHINES).is_ok()
        && read.open_table(CONTENTS).is_ok()
        && read.open_table(CHANGES).is_ok();
    if !is_made {
        let write = database.begin_write()?;
        write.delete_table(FORMER_MACHINES)?;
        write.open_table(MACHINES)?;
        write.open_table(CONTENTS)?;
        write.open_table(CHANGES)?;
        write.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use api::dominator::content::ContentStage;

    fn content(text: &str) -> ComputedContent {
        let id = Algorithm::Blake3.digest(text.as_bytes());
        ComputedContent { id, bytes: ByteText(text.as_bytes().to_vec()) }
    }

    #[test]
    fn content_is_kept_with_its_time_as_long_as_it_is_needed() {
        let directory = tempfile::tempdir().unwrap();
        let store = ComputedStore::open(directory.path()).unwrap();
        let [one, two] = ["one", "two"].map(content);
        let since = Time { seconds: 7, nanoseconds: 0 };
        store.add(&[one.clone(), two.clone()], since).unwrap();
        let change = StoredChange {
            id: "files:6972/7".parse().unwrap(),
            stage: ContentStage::Stopped("it is bad".to_owned()),
            since,
            verified: 5,
            failed: 3,
            order: 1,
            must_tell: true,
            numbering: 9,
        };
        let files = |host: &str| (host.to_owned(), StoredFiles::default());
        let changes = [change];
        store.save(&[files("web"), files("gone")], Some(&changes)).unwrap();
        store.save(&[], None).unwrap();
        let mode = std::fs::metadata(directory.path().join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(store);
        let store = ComputedStore::open(directory.path()).unwrap();
        store.retain(&["web".to_owned()].into(), &[two.id].into()).unwrap();
        assert_eq!(store.machines().unwrap(), [files("web")].into());
        assert_eq!(store.changes().unwrap(), changes);
        store.save(&[], Some(&[])).unwrap();
        assert_eq!(store.changes().unwrap(), []);
        let found = store.find(&[one.id, two.id].into()).unwrap();
        assert_eq!(found, [(two.id, StoredContent { since, size_bytes: 3 })].into());
        assert_eq!(store.contents(&[one.id, two.id]).unwrap(), std::slice::from_ref(&two));
        store.remove(&[two.id]).unwrap();
        assert_eq!(store.contents(&[two.id]).unwrap(), []);
    }

    #[test]
    fn a_damaged_database_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(FILE), vec![b'x'; 100_000]).unwrap();
        let store = ComputedStore::open(directory.path()).unwrap();
        assert_eq!(store.machines().unwrap(), BTreeMap::new());
    }
}
