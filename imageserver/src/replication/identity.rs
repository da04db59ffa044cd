//! Which store this is, and whether it is an archive: small files that last as long as the store.

use std::path::Path;

use api::image_server::replication::ServerId;
use model::report::report;

use crate::clock::random;
use crate::store::{error::StoreError, files, layout};

/// A store that was an archive is to be a mere replica.
#[derive(Debug, thiserror::Error)]
#[error(
    "the data directory `{data}` is that of an archive, which keeps images that have ended on the \
     master: without --replicate-archive they would be deleted. Give that flag, or delete the file \
     `{data}/{}` if they may go",
    layout::ARCHIVE
)]
pub struct ArchiveError {
    data: String,
}

/// The id of the store in `data`, made if it has none.
///
/// # Errors
///
/// What the file-system says.
pub fn server_id(data: &Path) -> Result<ServerId, StoreError> {
    match files::read::<ServerId>(data, layout::SERVER_ID) {
        Ok(Some(id)) => return Ok(id),
        Ok(None) => {}
        Err(error) => tracing::warn!("the store gets another id: {}", report(&error)),
    }
    let id = ServerId::from(u128::from(random()) << 64 | u128::from(random()));
    files::write(data, layout::SERVER_ID, &id)?;
    Ok(id)
}

/// Makes sure that an archive stays one.
///
/// # Errors
///
/// [`ArchiveError`], and what the file-system says.
pub fn keep_archive(data: &Path, is_archive: bool) -> Result<Result<(), ArchiveError>, StoreError> {
    if is_archive {
        return files::write(data, layout::ARCHIVE, &true).map(Ok);
    }
    if data.join(layout::ARCHIVE).exists() {
        return Ok(Err(ArchiveError { data: data.display().to_string() }));
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;

    #[test]
    fn a_store_keeps_its_id_and_an_archive_stays_one() {
        let data = tempfile::tempdir().unwrap();
        let _store = Store::open(data.path()).unwrap();
        let id = server_id(data.path()).unwrap();
        assert_eq!(server_id(data.path()).unwrap(), id);
        std::fs::write(data.path().join(layout::SERVER_ID), "x").unwrap();
        let other = server_id(data.path()).unwrap();
        assert_ne!(other, id);
        assert_eq!(server_id(data.path()).unwrap(), other);

        keep_archive(data.path(), false).unwrap().unwrap();
        keep_archive(data.path(), true).unwrap().unwrap();
        keep_archive(data.path(), true).unwrap().unwrap();
        assert!(keep_archive(data.path(), false).unwrap().is_err());
    }
}
