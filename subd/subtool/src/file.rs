//! `get-file`: copies a regular file of the machine.

use std::io::Write;
use std::path::{Path, PathBuf};

use api::subd::{GetFiles, GetFilesRequest, PIECE_BYTES_MAX, Piece, PieceContent};
use model::display::size;
use model::path::TreePath;
use model::tree::Time;

use super::error::ToolError;
use super::machine::Machine;
use super::progress::Progress;

/// How many pieces are requested at once.
const PIECES: u64 = 8;

/// How often a changing file is read.
const READS_MAX: usize = 5;

/// Copies `from` to the file `to`, which appears when it is complete, or to stdout.
///
/// # Errors
///
/// [`ToolError`]; then there is no new `to`.
pub async fn get(
    machine: &Machine,
    from: &TreePath,
    to: Option<&Path>,
    progress: &mut Progress,
) -> Result<(), ToolError> {
    let Some(to) = to else {
        let mut stdout = std::io::stdout().lock();
        // Output cannot be undone, so there is one try.
        return match copy(machine, from, &mut stdout, Path::new("-"), progress).await? {
            true => Ok(()),
            false => Err(ToolError::Changing { path: from.clone() }),
        };
    };
    let temporary = beside(to);
    let failed = |source| ToolError::Write { path: temporary.clone(), source };
    let result = async {
        for _ in 0..READS_MAX {
            let mut file = std::fs::File::create(&temporary).map_err(failed)?;
            if copy(machine, from, &mut file, &temporary, progress).await? {
                file.sync_all().map_err(failed)?;
                let placed = std::fs::rename(&temporary, to);
                return placed.map_err(|source| ToolError::Write { path: to.to_owned(), source });
            }
        }
        Err(ToolError::Changing { path: from.clone() })
    };
    let result = result.await;
    if result.is_err() {
        // A failure to remove it is not reported beside the error itself.
        let _left = std::fs::remove_file(&temporary);
    }
    result
}

/// Copies the file once. False if it was changed in the meantime.
async fn copy(
    machine: &Machine,
    from: &TreePath,
    to: &mut impl Write,
    to_path: &Path,
    progress: &mut Progress,
) -> Result<bool, ToolError> {
    let mut known: Option<(u64, Time)> = None;
    let mut offset = 0;
    loop {
        let at = |index: u64| Piece {
            path: from.clone(),
            offset: offset + index * u64::from(PIECE_BYTES_MAX),
            length: PIECE_BYTES_MAX,
        };
        let request = GetFilesRequest { pieces: (0..PIECES).map(at).collect() };
        let reply = machine.call::<GetFiles>(&request).await?;
        if reply.pieces.is_empty() {
            return Err(ToolError::Refused(format!("the machine returned nothing of {from}")));
        }
        for piece in reply.pieces {
            let PieceContent { size_bytes, mtime, bytes } = piece.map_err(ToolError::Refused)?;
            if *known.get_or_insert((size_bytes, mtime)) != (size_bytes, mtime) {
                return Ok(false);
            }
            let failed = |source| ToolError::Write { path: to_path.to_owned(), source };
            to.write_all(&bytes.0).map_err(failed)?;
            offset += bytes.0.len() as u64;
            progress.show(&format!("{} of {}", size(offset), size(size_bytes)));
            if offset >= size_bytes {
                return Ok(offset == size_bytes);
            }
            if bytes.0.len() < PIECE_BYTES_MAX as usize {
                return Ok(false);
            }
        }
    }
}

/// Returns the path of a temporary file in the directory of `path`.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}
