//! `domtool backup`: copies the dominator's database to a file.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::dominator::events::{Backup, BackupRequest};
use model::display::size;
use model::object::{Algorithm, Hasher, ObjectId};
use rpc::client::Client;
use tool::Output;

use super::{ToolError, who};

/// Time limit for the copy on the dominator's side, which may be gigabytes on a slow disk, and for
/// each piece of it.
const LIMIT: Duration = Duration::from_secs(600);

/// Writes a copy of the dominator's database to `path`, which must not exist.
pub(super) async fn run(client: &Client, path: &Path) -> Result<Output, ToolError> {
    let failed = |source| ToolError::Backup { path: path.to_owned(), source };
    if path.try_exists().map_err(failed)? {
        return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
    }
    let mut partial = path.to_owned().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let result = copy(client, path, &partial).await;
    if result.is_err() {
        // It may not exist.
        let _ = std::fs::remove_file(&partial);
    }
    let (size_bytes, digest) = result?;
    eprintln!("Wrote {} to {}, digest {digest}.", size(size_bytes), path.display());
    eprintln!("A dominator that is started on it starts with updates disabled.");
    Ok(String::new().into())
}

async fn copy(client: &Client, path: &Path, partial: &Path) -> Result<(u64, ObjectId), ToolError> {
    let failed = |source| ToolError::Backup { path: path.to_owned(), source };
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = file.open(partial).map_err(failed)?;
    let mut request = BackupRequest { id: 0, offset: 0, who: who() };
    let mut hasher = Hasher::new(Algorithm::Blake3);
    loop {
        let reply = client.call_within::<Backup>(&request, LIMIT).await?;
        request.id = reply.id;
        if reply.bytes.0.is_empty() {
            if request.offset != reply.size_bytes || hasher.finish() != reply.digest {
                return Err(ToolError::DamagedBackup);
            }
            file.sync_all().map_err(failed)?;
            std::fs::rename(partial, path).map_err(failed)?;
            return Ok((reply.size_bytes, reply.digest));
        }
        file.write_all(&reply.bytes.0).map_err(failed)?;
        hasher.update(&reply.bytes.0);
        request.offset += reply.bytes.0.len() as u64;
    }
}
