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
pub mod keys;
pub mod rules;
pub mod settings;

mod holds;
mod leases;
mod objects;
mod push;
mod records;
mod refusal;
mod register;
mod remote;
mod turn;

#[cfg(test)]
mod interleavings;

pub use refusal::BucketError;

use std::path::Path;
use std::sync::Arc;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use tokio::runtime::Handle;

use super::directories::KeptDirectories;
use super::images::Images;
use super::objects::LocalObjects;
use super::{Store, StoreError, empty, failed, layout, lock, make_directory};
use collecting::BucketCollecting;
use holds::BucketHolding;
use leases::BucketLeasing;
use objects::BucketObjects;
use records::BucketRecords;
use register::BucketRegister;
use remote::Remote;
use settings::Settings;

/// What the key `format` holds.
const FORMAT: &[u8] = b"dominator-bucket 1\n";

/// Opens the store in a bucket. `data` is for what is this server's alone; the bucket is talked to
/// on `runtime`, by threads that may block.
///
/// # Errors
///
/// [`StoreError::Locked`] if another server has the directory, [`StoreError::OfTheOtherKind`] if it
/// is a store itself, [`StoreError::Bucket`] if the bucket cannot be used.
pub(super) fn open(data: &Path, settings: &Settings, runtime: Handle) -> Result<Store, StoreError> {
    make_directory(data)?;
    let lock = lock(data)?;
    if data.join(layout::IMAGES).exists() {
        return Err(StoreError::OfTheOtherKind {
            path: data.to_owned(),
            what: "holds the images of a server without a bucket",
        });
    }
    let server = own_id(data)?;
    let incoming = data.join(layout::INCOMING);
    make_directory(&incoming)?;
    empty(&incoming)?;
    let remote = Arc::new(Remote::new(settings, server, runtime)?);
    expect_conditional_writes(&remote)?;
    expect_format(&remote)?;
    remote.tell_time()?;
    let cache = LocalObjects::open(data)?;
    let leasing = Arc::new(BucketLeasing::new(Arc::clone(&remote)));
    let objects = Arc::new(BucketObjects::new(
        Arc::clone(&remote),
        cache,
        Arc::clone(&leasing),
        settings.cache_bytes_max,
    ));
    let collecting = BucketCollecting::new(
        Arc::clone(&remote),
        Arc::clone(&objects),
        i64::try_from(settings.unneeded_for.as_secs()).unwrap_or(i64::MAX),
    );
    Ok(Store {
        objects,
        images: Images::open(Box::new(BucketRecords::new(Arc::clone(&remote))))?,
        directories: KeptDirectories::open(Box::new(BucketRegister::new(Arc::clone(&remote)))),
        holding: Box::new(BucketHolding::new(remote)),
        leasing,
        collecting: Box::new(collecting),
        adding: std::sync::RwLock::new(()),
        data: data.to_owned(),
        _lock: lock,
    })
}

/// The name of this server in the bucket: drawn once, and kept beside the cache.
fn own_id(data: &Path) -> Result<String, StoreError> {
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
    super::sync_directory(data)?;
    Ok(id)
}

/// Refuses a bucket that takes writes which it must refuse.
fn expect_conditional_writes(remote: &Remote) -> Result<(), StoreError> {
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

fn expect_format(remote: &Remote) -> Result<(), StoreError> {
    let key = remote.key(keys::FORMAT);
    if remote.create(&key, FORMAT.to_vec())?.is_some() {
        return Ok(());
    }
    match remote.get(&key, 1_000)? {
        Some(entry) if entry.bytes == FORMAT => Ok(()),
        _ => Err(remote.unfit("what is in it was written by another program, or a later release")),
    }
}
