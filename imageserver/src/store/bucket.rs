//! A store in an S3-compatible bucket, which several servers may share.
//!
//! ```text
//! PREFIX/format                             what the rest is
//! PREFIX/objects/<algorithm>/<2 hex>/<hex>  objects; an empty one that should not be is none
//! PREFIX/images/<escaped name>              a record, or in its place the mark that it is gone
//! PREFIX/directories                        which directories were made, and who owns them
//! PREFIX/changed                            written anew after each change of an image
//! PREFIX/leases/<server>/<number>           objects that a server has promised to callers
//! PREFIX/holds/<digest of holder>           images that a dominator uses
//! PREFIX/servers/<server>                   written anew, to learn what the bucket's clock shows
//! PREFIX/collector/turn                     which server collects
//! PREFIX/collector/condemned                what it removes just now
//! PREFIX/collector/unneeded                 what no image needs, and since when
//! PREFIX/quarantine/...                     objects that were found corrupt
//! ```
//!
//! All that is decided is decided by conditional writes of one key: `If-None-Match: *` makes it,
//! `If-Match` changes it. A bucket that does not honour these is refused at start. A name is one
//! key for ever: a record, and after that a mark. So of several that take it one gets it, whatever
//! server they talk to, and nobody gets it a second time. Lists of images are kept in memory.
//!
//! Objects go through a directory of the server's own disk, a store of the other kind: what is
//! uploaded is hashed there before it is sent, what is fetched before it is served. It holds what
//! was used last, up to a limit, and can be thrown away.
//!
//! [`collecting`] says why no object is lost.

pub mod collecting;
pub mod directories;
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

pub use crate::store::bucket_error::BucketError;

use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::layout;
use crate::store::error::{StoreError, failed};
use remote::Remote;

/// What the key `format` holds.
const FORMAT: &[u8] = b"dominator-bucket 1\n";

/// The name of this server in the bucket: drawn once, and kept beside the cache.
pub(super) fn own_id(data: &Path) -> Result<String, StoreError> {
    let why = || failed("read which server this is");
    let path = data.join(layout::SERVER);
    match fs_err::read_to_string(&path) {
        Ok(text) if keys::is_server(text.trim()) => return Ok(text.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(why()(error)),
    }
    let id = remote::random()?;
    let mut options = fs_err::OpenOptions::new();
    let mut file =
        options.create(true).truncate(true).write(true).mode(0o600).open(&path).map_err(why())?;
    std::io::Write::write_all(&mut file, format!("{id}\n").as_bytes()).map_err(why())?;
    file.sync_all().map_err(why())?;
    crate::store::files::sync_directory(data)?;
    Ok(id)
}

/// Refuses a bucket that takes writes which it must refuse.
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
