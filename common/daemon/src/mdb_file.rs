//! Reads a machine database from a file.

use std::path::{Path, PathBuf};

use model::mdb::{Machines, MdbError, parse};

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A file that has no machine database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// It is too large.
    #[error("{} has more than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is something else than a file.
    #[error("{} is no regular file", path.display())]
    Kind {
        /// What it is called.
        path: PathBuf,
    },
    /// It is no text.
    #[error("{}: line {line} is not UTF-8", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The first line that is no text, from 1.
        line: usize,
    },
    /// It says something else.
    #[error("{}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: MdbError,
    },
}

/// Reads a machine database.
///
/// # Errors
///
/// [`FileError`].
pub fn read(path: &Path) -> Result<Machines, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    readable(path, &std::fs::metadata(path).map_err(failed)?)?;
    machines(path, &std::fs::read(path).map_err(failed)?)
}

/// Checks that a file with this metadata can be read: that it is regular and not too large.
///
/// # Errors
///
/// [`FileError::Kind`] and [`FileError::TooLarge`].
pub fn readable(path: &Path, metadata: &std::fs::Metadata) -> Result<(), FileError> {
    // Reading a pipe would wait for ever.
    if !metadata.is_file() {
        return Err(FileError::Kind { path: path.to_owned() });
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path: path.to_owned() });
    }
    Ok(())
}

/// Parses `bytes`, the content of the file at `path`.
///
/// # Errors
///
/// [`FileError::Text`] and [`FileError::Parse`].
pub fn machines(path: &Path, bytes: &[u8]) -> Result<Machines, FileError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        FileError::Text { path: path.to_owned(), line }
    })?;
    // Some editors begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    parse(text).map_err(|source| FileError::Parse { path: path.to_owned(), source })
}
