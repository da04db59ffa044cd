//! A value in memory with a copy on a medium.
//!
//! Changes are write-through by default: the new value is written first, and memory changes only
//! when that succeeded. So whatever was acknowledged survives a restart, and after a failed write
//! both memory and medium have the old value.
//!
//! [`Durable::set_behind`] is write-behind: memory changes first, and [`Durable::save`] writes it
//! later. It is for values whose last seconds may be lost, or which must be in force although the
//! medium is full; each such use names its reason.
//!
//! The calls block while the medium is written, except `get`, `set_behind` and `is_saved`: an async
//! caller runs them on a blocking thread.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use model::lock::locked;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Stores the bytes of one value.
pub trait Medium {
    /// Names the place, for errors: a path.
    fn place(&self) -> String;

    /// Returns the bytes; `None` if nothing was ever written.
    fn read(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the bytes durably. On an error the place has either the old or the new bytes.
    fn replace(&self, bytes: &[u8]) -> io::Result<()>;
}

/// How a value becomes bytes.
pub trait Codec<T> {
    fn encode(&self, value: &T) -> io::Result<Vec<u8>>;
    fn decode(&self, bytes: &[u8]) -> io::Result<T>;
}

/// JSON on one line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Json;

impl<T: Serialize + DeserializeOwned> Codec<T> for Json {
    fn encode(&self, value: &T) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(value)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    fn decode(&self, bytes: &[u8]) -> io::Result<T> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

/// JSON over several lines, indented, without a line end after the last.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrettyJson;

impl<T: Serialize + DeserializeOwned> Codec<T> for PrettyJson {
    fn encode(&self, value: &T) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec_pretty(value)?)
    }

    fn decode(&self, bytes: &[u8]) -> io::Result<T> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DurableError {
    #[error("cannot read {place}")]
    Read {
        place: String,
        #[source]
        source: io::Error,
    },
    /// The bytes are there, and are not those of a value.
    #[error("{place} is damaged")]
    Damaged {
        place: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {place}")]
    Write {
        place: String,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug)]
struct Latest<T> {
    value: Arc<T>,
    /// False if the medium may have another value.
    is_saved: bool,
}

/// A value in memory with a copy on the medium `M`.
#[derive(Debug)]
pub struct Durable<T, M, C = Json> {
    medium: M,
    codec: C,
    latest: Mutex<Latest<T>>,
    /// Held while the medium is written. Taken before `latest`.
    writing: Mutex<()>,
}

impl<T, M> Durable<T, M>
where
    T: Clone + PartialEq + Serialize + DeserializeOwned,
    M: Medium,
{
    /// Reads the value, as JSON. Returns `None` if it was never written.
    pub fn load(medium: M) -> Result<Option<Self>, DurableError> {
        Ok(read(&medium, &Json)?.map(|value| Self::new(medium, Json, value)))
    }
}

impl<T: Clone + PartialEq, M: Medium, C: Codec<T>> Durable<T, M, C> {
    /// Takes `value` for what the medium has.
    pub fn new(medium: M, codec: C, value: T) -> Self {
        let latest = Latest { value: Arc::new(value), is_saved: true };
        Self { medium, codec, latest: Mutex::new(latest), writing: Mutex::default() }
    }

    /// Reads the value; the default one if it was never written. Writes nothing.
    pub fn load_or_default_as(medium: M, codec: C) -> Result<Self, DurableError>
    where
        T: Default,
    {
        let value = read(&medium, &codec)?.unwrap_or_default();
        Ok(Self::new(medium, codec, value))
    }

    /// Returns the value. Never waits for the medium.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&locked(&self.latest).value)
    }

    /// Writes `value`, and then puts it into memory.
    pub fn set(&self, value: T) -> Result<(), DurableError> {
        self.modify(|old| *old = value)
    }

    /// Writes the value that `change` makes of the latest, and then puts it into memory. Changes
    /// are made one after the other. Nothing is written if nothing changes.
    pub fn modify<R>(&self, change: impl FnOnce(&mut T) -> R) -> Result<R, DurableError> {
        let _writing = locked(&self.writing);
        let old = self.get();
        let mut new = T::clone(&old);
        let result = change(&mut new);
        if new != *old || !self.is_saved() {
            let write = |medium: &M, bytes: &[u8]| {
                let failed = |source| DurableError::Write { place: medium.place(), source };
                medium.replace(bytes).map_err(failed)
            };
            self.replace(&old, Arc::new(new), write)?;
        }
        Ok(result)
    }

    /// As [`Durable::modify`], for a change that may be refused and for a writer that writes
    /// something else in the same transaction: `write` is called even if the value stays the same,
    /// but not after a refusal.
    pub fn modify_through<R, E: From<DurableError>>(
        &self,
        change: impl FnOnce(&mut T) -> Result<R, E>,
        write: impl FnOnce(&M, &[u8]) -> Result<(), E>,
    ) -> Result<R, E> {
        let _writing = locked(&self.writing);
        let old = self.get();
        let mut new = T::clone(&old);
        let result = change(&mut new)?;
        self.replace(&old, Arc::new(new), write)?;
        Ok(result)
    }

    /// Writes `value`, and then puts it into memory; `write` as in [`Durable::modify_through`].
    pub fn set_through<E: From<DurableError>>(
        &self,
        value: T,
        write: impl FnOnce(&M, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let _writing = locked(&self.writing);
        self.replace(&self.get(), Arc::new(value), write)
    }

    /// Puts `value` into memory at once; [`Durable::save`] is to write it. Returns false if there
    /// is nothing to save.
    pub fn set_behind(&self, value: T) -> bool {
        let mut latest = locked(&self.latest);
        latest.is_saved &= *latest.value == value;
        latest.value = Arc::new(value);
        !latest.is_saved
    }

    /// Changes memory at once; [`Durable::save`], or the next change, is to write it. Unlike
    /// [`Durable::set_behind`] it waits for a write under way, and so loses no change.
    pub fn modify_behind<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let _writing = locked(&self.writing);
        let mut new = T::clone(&self.get());
        let result = change(&mut new);
        self.set_behind(new);
        result
    }

    /// Notes that the medium may have another value: the next change writes, even if it changes
    /// nothing.
    pub fn doubt(&self) {
        locked(&self.latest).is_saved = false;
    }

    /// Writes the latest value, if the medium may have another.
    pub fn save(&self) -> Result<(), DurableError> {
        self.modify(|_| {})
    }

    /// Writes the latest value in any case; `write` as in [`Durable::modify_through`].
    pub fn save_through<E: From<DurableError>>(
        &self,
        write: impl FnOnce(&M, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.modify_through(|_| Ok(()), write)
    }

    /// True if the medium has the latest value.
    pub fn is_saved(&self) -> bool {
        locked(&self.latest).is_saved
    }

    /// Writes `new` and puts it in the place of `old`. A value that was set behind meanwhile is
    /// newer: it stays, and is still to be saved.
    fn replace<E: From<DurableError>>(
        &self,
        old: &Arc<T>,
        new: Arc<T>,
        write: impl FnOnce(&M, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = |source| DurableError::Write { place: self.medium.place(), source };
        let bytes = self.codec.encode(&new).map_err(failed)?;
        // A write that fails may have changed the medium all the same.
        locked(&self.latest).is_saved = false;
        write(&self.medium, &bytes)?;
        let mut latest = locked(&self.latest);
        if Arc::ptr_eq(&latest.value, old) {
            *latest = Latest { value: new, is_saved: true };
        }
        Ok(())
    }
}

fn read<T>(medium: &impl Medium, codec: &impl Codec<T>) -> Result<Option<T>, DurableError> {
    let failed = |source| DurableError::Read { place: medium.place(), source };
    let Some(bytes) = medium.read().map_err(failed)? else { return Ok(None) };
    let damaged = |source| DurableError::Damaged { place: medium.place(), source };
    codec.decode(&bytes).map(Some).map_err(damaged)
}

/// A file, replaced by way of a temporary file beside it.
#[derive(Clone, Debug)]
pub struct FileMedium {
    path: PathBuf,
    /// The largest file that is read, in bytes.
    bytes_max: u64,
}

impl FileMedium {
    pub fn new(path: impl Into<PathBuf>, bytes_max: u64) -> Self {
        Self { path: path.into(), bytes_max }
    }
}

impl Medium for FileMedium {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(self.bytes_max + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > self.bytes_max {
            let text = format!("it is longer than {} bytes", self.bytes_max);
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
        }
        Ok(Some(bytes))
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        replace_file(&self.path, bytes)
    }
}

/// Replaces the content of the file `path` durably: temporary file, fsync, rename, fsync of the
/// directory. The file belongs to its owner alone (mode 600).
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temporary = path.with_file_name(name);
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| std::fs::rename(&temporary, path));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    renamed?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

    use std::cell::Cell;

    use super::*;

    /// A file whose writes can be made to fail, before or after the file is replaced.
    struct Failing {
        file: FileMedium,
        fails: Cell<Option<&'static str>>,
        writes: Cell<u32>,
    }

    impl Medium for Failing {
        fn place(&self) -> String {
            self.file.place()
        }

        fn read(&self) -> io::Result<Option<Vec<u8>>> {
            self.file.read()
        }

        fn replace(&self, bytes: &[u8]) -> io::Result<()> {
            self.writes.set(self.writes.get() + 1);
            if self.fails.get() == Some("before") {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.file.replace(bytes)?;
            match self.fails.get() {
                Some(_) => Err(io::ErrorKind::Other.into()),
                None => Ok(()),
            }
        }
    }

    #[test]
    fn memory_changes_after_the_medium_does() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("value");
        let file = FileMedium::new(&path, 100);
        let text = || std::fs::read_to_string(&path).unwrap();
        let medium = Failing { file, fails: Cell::new(None), writes: Cell::new(0) };
        let value: Durable<Vec<u32>, _> = Durable::load_or_default_as(medium, Json).unwrap();
        assert!(value.get().is_empty() && !path.exists());
        assert_eq!(
            value
                .modify(|list| {
                    list.push(1);
                    list.len()
                })
                .unwrap(),
            1
        );
        assert_eq!((text().as_str(), value.get().as_slice()), ("[1]\n", &[1][..]));
        value.set(vec![1]).unwrap();
        assert_eq!(value.medium.writes.get(), 1, "nothing changed");

        value.medium.fails.set(Some("before"));
        let error = value.set(vec![2]).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {}", path.display()));
        assert_eq!((text().as_str(), value.get().as_slice()), ("[1]\n", &[1][..]));
        // A retry is not answered from memory.
        value.set(vec![2]).unwrap_err();

        value.medium.fails.set(Some("after"));
        value.set(vec![3]).unwrap_err();
        assert_eq!((text().as_str(), value.get().as_slice()), ("[3]\n", &[1][..]));
        // What memory has may not be what the file has: it is written again.
        value.medium.fails.set(None);
        value.set(vec![1]).unwrap();
        assert_eq!((text().as_str(), value.get().as_slice()), ("[1]\n", &[1][..]));
        let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn a_value_that_is_set_behind_is_saved_later_and_is_not_lost_by_a_write_under_way() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("value");
        let text = || std::fs::read_to_string(&path).unwrap();
        let value: Durable<u32, _> =
            Durable::load_or_default_as(FileMedium::new(&path, 100), Json).unwrap();
        assert!(!value.set_behind(0) && value.is_saved(), "nothing changed");
        assert!(value.set_behind(1));
        assert_eq!((*value.get(), value.is_saved(), path.exists()), (1, false, false));
        value.save().unwrap();
        assert_eq!((text().as_str(), value.is_saved()), ("1\n", true));

        let failed = || Err::<(), _>(TestError::Io(io::ErrorKind::Other.into()));
        let refused = value.modify_through(|_| failed(), |_, _| Ok(()));
        assert!(matches!(refused, Err(TestError::Io(_))));
        let write = |medium: &FileMedium, bytes: &[u8]| {
            assert!(value.set_behind(3));
            medium.replace(bytes).map_err(TestError::Io)
        };
        value.set_through(2, write).unwrap();
        assert_eq!((*value.get(), text().as_str(), value.is_saved()), (3, "2\n", false));
        value.save_through(|medium, bytes| medium.replace(bytes).map_err(TestError::Io)).unwrap();
        assert_eq!((text().as_str(), value.is_saved()), ("3\n", true));
        // It is written even if nothing changes: something else may be written with it.
        value.save_through(|_, _| failed()).unwrap_err();
        assert!(!value.is_saved());
    }

    #[derive(Debug)]
    enum TestError {
        Io(#[expect(dead_code, reason = "it is shown")] io::Error),
        Durable(#[expect(dead_code, reason = "it is shown")] DurableError),
    }

    impl From<DurableError> for TestError {
        fn from(error: DurableError) -> Self {
            Self::Durable(error)
        }
    }

    #[test]
    fn absent_is_told_from_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("value");
        let medium = || FileMedium::new(&path, 10);
        assert!(Durable::<u32, _>::load(medium()).unwrap().is_none());
        assert_eq!(*Durable::<u32, _>::load_or_default_as(medium(), Json).unwrap().get(), 0);
        std::fs::write(&path, "7\n").unwrap();
        assert_eq!(*Durable::<u32, _>::load(medium()).unwrap().unwrap().get(), 7);
        for damaged in ["", "x", "7 7", "[7]"] {
            std::fs::write(&path, damaged).unwrap();
            let error = Durable::<u32, _>::load_or_default_as(medium(), Json).unwrap_err();
            assert!(matches!(&error, DurableError::Damaged { .. }), "{error}");
            assert_eq!(error.to_string(), format!("{} is damaged", path.display()));
        }
        std::fs::write(&path, "12345678901").unwrap();
        let error = Durable::<u32, _>::load(medium()).unwrap_err();
        assert!(matches!(error, DurableError::Read { .. }), "{error}");
    }

    #[test]
    fn what_cannot_be_written_is_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("value");
        let value =
            Durable::<u32, _>::load_or_default_as(FileMedium::new(&path, 10), Json).unwrap();
        value.set(1).unwrap();
        // Tests run as root, so that permissions stop nothing.
        let temporary = directory.path().join("value.new");
        std::fs::create_dir(&temporary).unwrap();
        value.set(2).unwrap_err();
        assert_eq!((*value.get(), std::fs::read_to_string(&path).unwrap().as_str()), (1, "1\n"));
    }
}
