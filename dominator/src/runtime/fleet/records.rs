//! Reads the history for operators, and makes the backups that they download.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::events::{
    BackupReply, BackupRequest, ListEventsReply, ListEventsRequest, PIECE_BYTES_MAX,
};
use model::escape::ByteText;

use super::{Fleet, OrderError};
use crate::core::event_filter::EventFilter;
use crate::core::orders::Order;
use crate::storage::DatabaseCopy;
use system::random::random;

/// How long a copy stays that nobody reads.
const COPY_KEPT: Duration = Duration::from_secs(300);

/// A copy of the database that a caller reads.
#[derive(Debug)]
pub(super) struct OpenBackup {
    id: u64,
    copy: Arc<DatabaseCopy>,
    /// When it was last read, on the clock of the fleet.
    used: Duration,
}

impl Fleet {
    /// Finds the events that are asked for.
    pub async fn events(
        self: &Arc<Self>,
        request: ListEventsRequest,
    ) -> Result<ListEventsReply, OrderError> {
        let filter = EventFilter::new(&request).map_err(|source| OrderError::Filter { source })?;
        let found = move |fleet: &Self| {
            let found = fleet.state().events(filter, &request);
            found.map_err(|source| OrderError::Read { source })
        };
        self.on_thread(found).await
    }

    /// Returns a piece of a copy of the database; makes the copy for the first piece.
    pub async fn backup(
        self: &Arc<Self>,
        request: BackupRequest,
    ) -> Result<BackupReply, OrderError> {
        let (id, copy) = if request.id == 0 {
            self.make_copy(&request.who).await?
        } else {
            let mut open = self.copy.lock().await;
            let open = open.as_mut().filter(|open| open.id == request.id);
            let open = open.ok_or(OrderError::NoCopy)?;
            open.used = self.shared.clock.elapsed();
            (open.id, Arc::clone(&open.copy))
        };
        let (size_bytes, digest) = (copy.size_bytes, copy.digest);
        let read = move || copy.read(request.offset, PIECE_BYTES_MAX as usize);
        let bytes = tokio::task::spawn_blocking(read).await.map_err(|_| OrderError::Stopping)?;
        let bytes = bytes.map_err(|source| OrderError::ReadCopy { source })?;
        if bytes.is_empty() {
            self.copy.lock().await.take_if(|open| open.id == id);
        }
        Ok(BackupReply { id, size_bytes, digest, bytes: ByteText(bytes) })
    }

    async fn make_copy(
        self: &Arc<Self>,
        who: &str,
    ) -> Result<(u64, Arc<DatabaseCopy>), OrderError> {
        self.audit(Order::new("backup", who)).await?;
        // One at a time: each takes as much of the disk as the database.
        let mut open = self.copy.lock().await;
        *open = None;
        let copy =
            |fleet: &Self| fleet.state().copy().map_err(|source| OrderError::Read { source });
        let copy = Arc::new(self.on_thread(copy).await?);
        tracing::warn!(who, bytes = copy.size_bytes, digest = %copy.digest, "a backup is taken");
        let id = random() | 1;
        *open = Some(OpenBackup { id, copy: Arc::clone(&copy), used: self.shared.clock.elapsed() });
        let (fleet, stop) = (Arc::clone(self), self.stop.clone());
        self.tracker.spawn(async move {
            stop.run_until_cancelled(fleet.forget_copy(id)).await;
        });
        Ok((id, copy))
    }

    /// Drops the copy `id` when nobody has read it for a while.
    async fn forget_copy(&self, id: u64) {
        loop {
            tokio::time::sleep(COPY_KEPT).await;
            let mut open = self.copy.lock().await;
            match &*open {
                Some(copy)
                    if copy.id == id && self.shared.clock.elapsed() < copy.used + COPY_KEPT => {}
                Some(copy) if copy.id == id => *open = None,
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::mdb_diff::EditLimits;
    use crate::runtime::driver::tests::shared;
    use crate::storage::{FILE, Storage};
    use model::display::error_chain;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    #[tokio::test]
    async fn what_cannot_be_read_is_no_order_that_was_not_carried_out() {
        let (directory, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
        let state = Arc::new(Storage::open(directory.path()).unwrap());
        let shared = Arc::new(shared(&state, &stop));
        let limits = EditLimits { drop_percent: 50, reimage_percent: None };
        let tracker = TaskTracker::new();
        let fleet = Arc::new(Fleet::new(shared, limits, tracker, stop));
        assert!(fleet.events(ListEventsRequest::default()).await.unwrap().events.is_empty());
        // A database that has failed is opened again.
        fs_err::remove_file(directory.path().join(FILE)).unwrap();
        fs_err::create_dir(directory.path().join(FILE)).unwrap();
        let failed =
            state.database.transact(None, |_| Err::<(), _>(redb::Error::DatabaseAlreadyOpen));
        assert!(failed.is_err());
        let unread = fleet.events(ListEventsRequest::default()).await.unwrap_err();
        let unread = error_chain(&unread);
        assert!(unread.starts_with("the history cannot be read: cannot open"), "{unread}");
        let unkept = error_chain(&fleet.audit(Order::new("retry", "ann")).await.unwrap_err());
        assert!(unkept.starts_with("the order was not carried out, because"), "{unkept}");
    }
}
