//! Reads a file that nobody is writing, and watches it for changes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use system::file_stamp::FileStamp;
use tokio::sync::Semaphore;

use crate::storage;

/// Interval of checks for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A file that changed within this time may be incomplete and is read later: a truncated list of
/// hosts would be valid.
const SETTLING: Duration = Duration::from_millis(100);

/// A file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    #[error("there is no file {}", path.display())]
    Absent { path: PathBuf },
    #[error("cannot read it")]
    Read { source: io::Error },
}

/// A file that is read repeatedly.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    /// Stamp of the file that was read.
    stamp: Option<FileStamp>,
    /// Limits the source to one thread: a file-system that hangs must not block all threads.
    permit: Arc<Semaphore>,
}

impl File {
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, stamp: None, permit: Arc::new(Semaphore::new(1)) }
    }

    /// Reads the file once it is no longer changing.
    ///
    /// # Errors
    ///
    /// [`FileError`] if it cannot be read.
    pub async fn read(&mut self) -> Result<Vec<u8>, FileError> {
        self.stamp = None;
        loop {
            let found = self.run_blocking(read_settled).await?;
            if let Some((stamp, bytes)) = found {
                self.stamp = Some(stamp);
                return Ok(bytes);
            }
            tokio::time::sleep(SETTLING).await;
        }
    }

    /// Waits until the file differs from the one that was read.
    pub async fn changed(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let stamp = |path: &Path| stamp_of(path).map_err(|source| FileError::Read { source });
            if self.run_blocking(stamp).await.ok() != self.stamp {
                return;
            }
        }
    }

    /// Runs `work` on a thread that may block.
    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, FileError> {
        let lost = || FileError::Read { source: io::Error::other("mdbd is stopping") };
        let permit = Arc::clone(&self.permit).acquire_owned().await.map_err(|_| lost())?;
        let path = self.path.clone();
        let working = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&path)
        });
        working.await.map_err(|_| lost())?
    }
}

/// Reads the file; `None` if it was changed just before or meanwhile.
fn read_settled(path: &Path) -> Result<Option<(FileStamp, Vec<u8>)>, FileError> {
    let absent = || FileError::Absent { path: path.to_owned() };
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => absent(),
        _ => FileError::Read { source },
    };
    let before = stamp_of(path).map_err(failed)?;
    if !before.is_settled(SETTLING, SystemTime::now()) {
        return Ok(None);
    }
    let bytes = storage::read(path).map_err(failed)?.ok_or_else(absent)?;
    let after = stamp_of(path).map_err(failed)?;
    Ok((after == before).then_some((before, bytes)))
}

fn stamp_of(path: &Path) -> io::Result<FileStamp> {
    Ok(FileStamp::of(&fs_err::metadata(path)?))
}
