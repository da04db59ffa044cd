//! What operators ask about what happened, and the copies of it that they take away.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::events::{
    BackupReply, BackupRequest, ListEventsReply, ListEventsRequest, PIECE_BYTES_MAX,
};
use model::escape::ByteText;
use tokio::time::Instant;

use super::{Fleet, OrderError};
use crate::core::event_filter::EventFilter;
use crate::core::order::Order;
use crate::storage::Copy;
use system::random::random;

/// After how long a copy goes that nobody reads any more.
const COPY_KEPT: Duration = Duration::from_secs(300);

/// A copy of the database that somebody reads.
#[derive(Debug)]
pub(super) struct KeptCopy {
    id: u64,
    copy: Arc<Copy>,
    used: Instant,
}

impl Fleet {
    /// The events that are asked for.
    ///
    /// # Errors
    ///
    /// [`OrderError::Filter`], or that they cannot be read.
    pub async fn events(&self, request: ListEventsRequest) -> Result<ListEventsReply, OrderError> {
        let filter = EventFilter::new(&request).map_err(|source| OrderError::Filter { source })?;
        self.read(move |state| state.events(filter, &request)).await
    }

    /// A piece of a copy of the database.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn backup(
        self: &Arc<Self>,
        request: BackupRequest,
    ) -> Result<BackupReply, OrderError> {
        let (id, copy) = if request.id == 0 {
            self.make_copy(&request.who).await?
        } else {
            let mut kept = self.copy.lock().await;
            let kept = kept.as_mut().filter(|kept| kept.id == request.id);
            let kept = kept.ok_or(OrderError::NoCopy)?;
            kept.used = Instant::now();
            (kept.id, Arc::clone(&kept.copy))
        };
        let (size_bytes, digest) = (copy.size_bytes, copy.digest);
        let read = move || copy.read(request.offset, PIECE_BYTES_MAX as usize);
        let bytes = tokio::task::spawn_blocking(read).await.map_err(|_| OrderError::Stopping)?;
        let bytes = bytes.map_err(|source| OrderError::ReadCopy { source })?;
        if bytes.is_empty() {
            self.copy.lock().await.take_if(|kept| kept.id == id);
        }
        Ok(BackupReply { id, size_bytes, digest, bytes: ByteText(bytes) })
    }

    async fn make_copy(self: &Arc<Self>, who: &str) -> Result<(u64, Arc<Copy>), OrderError> {
        self.audit(Order::of("backup", who)).await?;
        // One at a time: each takes as much of the disk as the database.
        let mut kept = self.copy.lock().await;
        *kept = None;
        let copy = Arc::new(self.read(|state| state.copy()).await?);
        tracing::warn!(who, bytes = copy.size_bytes, digest = %copy.digest, "a backup is taken");
        let id = random() | 1;
        *kept = Some(KeptCopy { id, copy: Arc::clone(&copy), used: Instant::now() });
        let (fleet, stop) = (Arc::clone(self), self.stop.clone());
        self.tracker.spawn(async move {
            stop.run_until_cancelled(fleet.forget_copy(id)).await;
        });
        Ok((id, copy))
    }

    /// Forgets a copy when nobody reads it any more.
    async fn forget_copy(&self, id: u64) {
        loop {
            tokio::time::sleep(COPY_KEPT).await;
            let mut kept = self.copy.lock().await;
            match &*kept {
                Some(copy) if copy.id == id && copy.used.elapsed() < COPY_KEPT => {}
                Some(copy) if copy.id == id => *kept = None,
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::mdb_diff::EditLimits;
    use crate::core::settings::Settings;
    use crate::runtime::driver::tests::shared;
    use crate::storage::{FILE, State};
    use model::report::report;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    #[tokio::test]
    async fn what_cannot_be_read_is_no_order_that_was_not_carried_out() {
        let (directory, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
        let state = Arc::new(State::open(directory.path()).unwrap());
        let shared = Arc::new(shared(&state, &stop));
        let limits = EditLimits { drop_percent: 50, reimage_percent: None };
        let settings = Settings::default();
        let tracker = TaskTracker::new();
        let broken = Arc::clone(&state);
        let fleet = Fleet::new(shared, state, limits, None, settings, tracker, stop);
        assert!(fleet.events(ListEventsRequest::default()).await.unwrap().events.is_empty());
        // A database that has failed is opened again.
        fs_err::remove_file(directory.path().join(FILE)).unwrap();
        fs_err::create_dir(directory.path().join(FILE)).unwrap();
        let failed = broken.transact(None, |_| Err::<(), _>(redb::Error::DatabaseAlreadyOpen));
        assert!(failed.is_err());
        let unread = fleet.events(ListEventsRequest::default()).await.unwrap_err();
        let unread = report(&unread);
        assert!(unread.starts_with("what is on record cannot be read: cannot open"), "{unread}");
        let unkept = report(&fleet.audit(Order::of("retry", "ann")).await.unwrap_err());
        assert!(unkept.starts_with("the order was not carried out, because"), "{unkept}");
    }
}
