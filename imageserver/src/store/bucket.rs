//! A store in an S3-compatible bucket, which several servers may share.
//!
//! ```text
//! PREFIX/format                             the format of the bucket
//! PREFIX/objects/<algorithm>/<2 hex>/<hex>  objects; an unexpected empty one does not count
//! PREFIX/images/<escaped name>              a record, or a tombstone in its place
//! PREFIX/directories                        the directories that were made, and their owners
//! PREFIX/changed                            rewritten after each change of an image
//! PREFIX/leases/<server>/<number>           objects that a server has leased to clients
//! PREFIX/holds/<digest of holder>           images that a dominator holds
//! PREFIX/servers/<server>                   rewritten to read the bucket's clock
//! PREFIX/collector/turn                     the lease of the collector
//! PREFIX/collector/condemned                the list of pending deletes
//! PREFIX/collector/unneeded                 objects that no image needs, and since when
//! PREFIX/quarantine/...                     corrupt objects
//! ```
//!
//! Each decision is a conditional write of one key: `If-None-Match: *` creates it, `If-Match`
//! changes it. A bucket that does not honour these is refused at start. A name of an image is one
//! key for ever: a record, and later a tombstone. So of several servers that use a name one
//! succeeds, and nobody uses it again. Lists of images are in memory.
//!
//! Objects pass through a cache in a directory of the server's own disk: they are hashed there
//! before they are uploaded or served. The cache holds the last used objects up to a limit, and can
//! be deleted.
//!
//! [`collecting`] says why no object is lost.

pub mod collecting;
pub mod gc_lease;
pub mod image_holds;
pub mod keys;
pub mod receiving;
pub mod removal_rules;
pub mod settings;

pub(super) mod leases;
pub(super) mod objects;
pub(super) mod records;
pub(super) mod remote;

use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use remote::Remote;

use super::layout;
use crate::store::error::{StoreError, failed};
use crate::store::files::{if_found, sync_directory};

/// The content of the key `format`.
const FORMAT: &[u8] = b"dominator-bucket 1\n";

/// The name of this server in the bucket: drawn once, and kept beside the cache.
pub(super) fn own_id(data: &Path) -> Result<String, StoreError> {
    let why = || failed("read which server this is");
    let path = data.join(layout::SERVER);
    let saved = if_found(fs_err::read_to_string(&path)).map_err(why())?;
    if let Some(text) = saved.filter(|text| keys::is_server(text.trim())) {
        return Ok(text.trim().to_owned());
    }
    let id = remote::nonce();
    let mut options = fs_err::OpenOptions::new();
    let mut file =
        options.create(true).truncate(true).write(true).mode(0o600).open(&path).map_err(why())?;
    std::io::Write::write_all(&mut file, format!("{id}\n").as_bytes()).map_err(why())?;
    file.sync_all().map_err(why())?;
    sync_directory(data)?;
    Ok(id)
}

/// Refuses a bucket that does not honour conditional writes.
pub(super) fn expect_conditional_writes(remote: &Remote) -> Result<(), StoreError> {
    let key = remote.key(&keys::probe(remote.server()));
    remote.delete(std::slice::from_ref(&key))?;
    let first = remote.create(&key, b"1".to_vec())?;
    let again = remote.create(&key, b"2".to_vec())?;
    let (Some(etag), None) = (first, again) else {
        return Err(remote.unfit("it does not honour `If-None-Match: *` when a key is written"));
    };
    let changed = remote.update(&key, b"3".to_vec(), &etag)?;
    let stale = remote.update(&key, b"4".to_vec(), &etag)?;
    if changed.is_none() || stale.is_some() {
        return Err(remote.unfit("it does not honour `If-Match` when a key is written"));
    }
    remote.delete(&[key])
}

pub(super) fn expect_format(remote: &Remote) -> Result<(), StoreError> {
    let key = remote.key(keys::FORMAT);
    if remote.create(&key, FORMAT.to_vec())?.is_some() {
        return Ok(());
    }
    match remote.get(&key, 1_000)? {
        Some(entry) if entry.bytes == FORMAT => Ok(()),
        _ => Err(remote.unfit("what is in it was written by another program, or a later release")),
    }
}
