//! Reads a file while nobody writes it, and sees that it has changed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;

use crate::disk;
use system::file_stamp::Stamp;

/// How often it is asked whether the file has changed.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A file that changed so shortly ago may be in the middle of a change: it is read a little later.
/// A list of hosts that is cut short is a list of hosts too.
const SETTLING: Duration = Duration::from_millis(100);

/// A file that is not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    #[error("there is no file {}", path.display())]
    Absent {
        /// Where it should be.
        path: PathBuf,
    },
    #[error("cannot read it")]
    Read {
        /// What the kernel said, with the path.
        source: io::Error,
    },
}

/// A file that is read again and again.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    /// Of what was read; `None` if nothing was.
    stamp: Option<Stamp>,
    /// One thread at a time: a file-system that hangs must not take all there are.
    place: Arc<Semaphore>,
}

impl File {
    /// The file at `path`.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, stamp: None, place: Arc::new(Semaphore::new(1)) }
    }

    /// Reads the file. Waits as long as it changes all the time.
    ///
    /// # Errors
    ///
    /// [`FileError`].
    pub async fn read(&mut self) -> Result<Vec<u8>, FileError> {
        self.stamp = None;
        loop {
            let found = self.with(read_settled).await?;
            if let Some((stamp, bytes)) = found {
                self.stamp = Some(stamp);
                return Ok(bytes);
            }
            tokio::time::sleep(SETTLING).await;
        }
    }

    /// Returns when the file is another one than was read.
    pub async fn changed(&self) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let look = |path: &Path| stamp_of(path).map_err(|source| FileError::Read { source });
            if self.with(look).await.ok() != self.stamp {
                return;
            }
        }
    }

    /// Does `work`, which waits for the disk, on a thread.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, FileError> {
        let lost = || FileError::Read { source: io::Error::other("mdbd is stopping") };
        let place = Arc::clone(&self.place).acquire_owned().await.map_err(|_| lost())?;
        let path = self.path.clone();
        let working = tokio::task::spawn_blocking(move || {
            let _place = place;
            work(&path)
        });
        working.await.map_err(|_| lost())?
    }
}

/// Reads the file; `None` if it has just been changed, or is changed meanwhile.
fn read_settled(path: &Path) -> Result<Option<(Stamp, Vec<u8>)>, FileError> {
    let absent = || FileError::Absent { path: path.to_owned() };
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => absent(),
        _ => FileError::Read { source },
    };
    let before = stamp_of(path).map_err(failed)?;
    if !before.is_settled(SETTLING, SystemTime::now()) {
        return Ok(None);
    }
    let bytes = disk::read(path).map_err(failed)?.ok_or_else(absent)?;
    let after = stamp_of(path).map_err(failed)?;
    Ok((after == before).then_some((before, bytes)))
}

fn stamp_of(path: &Path) -> io::Result<Stamp> {
    Ok(Stamp::of(&fs_err::metadata(path)?))
}
