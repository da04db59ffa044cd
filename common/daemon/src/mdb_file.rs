//! Reads a machine database from a file.

use std::path::{Path, PathBuf};

use model::mdb::{Machines, MdbError, parse, unknown_keys};
use model::unknown_keys::UnknownKey;

/// The largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Why a file is not a machine database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MdbFileError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} has more than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge { path: PathBuf },
    #[error("{} is no regular file", path.display())]
    Kind { path: PathBuf },
    #[error("{}: line {line} is not UTF-8", path.display())]
    Text {
        path: PathBuf,
        /// The first line that is not UTF-8, from 1.
        line: usize,
    },
    /// The content is not a valid machine database.
    #[error("{}", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: MdbError,
    },
}

/// A machine database that was read.
#[derive(Clone, Debug)]
pub struct MdbFile {
    pub machines: Machines,
    /// The keys that nothing reads.
    pub unknown_keys: Vec<UnknownKey>,
}

/// Reads a machine database.
pub fn read(path: &Path) -> Result<MdbFile, MdbFileError> {
    let failed = |source| MdbFileError::Read { path: path.to_owned(), source };
    check_readable(path, &std::fs::metadata(path).map_err(failed)?)?;
    parse_mdb(path, &std::fs::read(path).map_err(failed)?)
}

/// Checks that a file is regular and not too large.
pub fn check_readable(path: &Path, metadata: &std::fs::Metadata) -> Result<(), MdbFileError> {
    // Reading a pipe would wait for ever.
    if !metadata.is_file() {
        return Err(MdbFileError::Kind { path: path.to_owned() });
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(MdbFileError::TooLarge { path: path.to_owned() });
    }
    Ok(())
}

/// Parses `bytes`, the content of the file at `path`.
pub fn parse_mdb(path: &Path, bytes: &[u8]) -> Result<MdbFile, MdbFileError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        MdbFileError::Text { path: path.to_owned(), line }
    })?;
    // Some editors begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let machines =
        parse(text).map_err(|source| MdbFileError::Parse { path: path.to_owned(), source })?;
    Ok(MdbFile { machines, unknown_keys: unknown_keys(text) })
}
