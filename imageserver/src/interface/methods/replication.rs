//! `ImageServer`: requests of replicas, and reports for operators.

use std::future::pending;
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::replication::directories::{
    GetMadeDirectoriesReply, GetMadeDirectoriesRequest, PAGE_DIRECTORIES_MAX,
};
use api::image_server::replication::{
    CHANGES_MAX, DropCopyRequest, GetImageUpdatesReply, GetImageUpdatesRequest,
    GetReplicationReply, ReplicationPosition, ServerId,
};
use model::image::ImageName;
use rpc::server::Caller;
use system::clock::wall;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Service;
use super::expiry::expect_unused;
use crate::store::image_index::ChangePage;
use crate::store::private_images::Reader;

/// The longest that a replica waits for a change.
const WAIT_MAX: Duration = Duration::from_secs(60);

impl Service {
    pub(super) async fn get_image_updates(
        self,
        caller: Caller,
        request: GetImageUpdatesRequest,
    ) -> Result<GetImageUpdatesReply, Fault> {
        let GetImageUpdatesRequest { position, wait_ms, replica, directories: known } = request;
        let address = std::net::SocketAddr::new(caller.address.ip(), replica.port).to_string();
        self.replication.note_replica(wall(), address, &replica);
        let wait = Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        let deadline = Instant::now() + wait;
        let mut sequence = self.store.images.subscribe();
        let mut directories_version = self.store.directories.subscribe();
        let reader = self.reader(&caller);
        let mut upstream = self.replication.follower().map(|follower| follower.upstream());
        let above = |upstream: &mut Option<watch::Receiver<Vec<ServerId>>>| {
            upstream.as_mut().map(|upstream| upstream.borrow_and_update().clone())
        };
        let first = above(&mut upstream);
        loop {
            sequence.mark_unchanged();
            let above = above(&mut upstream);
            let directories = *directories_version.borrow_and_update();
            let (is_list, page) = self.changes_at(&reader, &position);
            let is_news =
                is_list || !page.changes.is_empty() || above != first || directories != known;
            if is_news || Instant::now() >= deadline {
                return Ok(GetImageUpdatesReply {
                    server: self.replication.id().clone(),
                    upstream: above.unwrap_or_default(),
                    cursor: page.cursor,
                    is_list,
                    changes: page.changes,
                    more: page.more,
                    directories,
                });
            }
            let moved = async {
                match &mut upstream {
                    Some(upstream) => drop(upstream.changed().await),
                    None => pending().await,
                }
            };
            tokio::select! {
                _ = sequence.changed() => {}
                _ = directories_version.changed() => {}
                () = moved => {}
                () = tokio::time::sleep_until(deadline) => {}
                () = self.stop.cancelled() => {
                    let text = "the image server stops: ask again";
                    return Err(Fault::new(FaultCode::Unavailable, text));
                }
            }
        }
    }

    /// Returns the changes at a position, and whether they are a page of the list.
    fn changes_at(&self, reader: &Reader, position: &ReplicationPosition) -> (bool, ChangePage) {
        let images = &self.store.images;
        let may = |name: &ImageName| reader.may_follow(name);
        let known = match position {
            ReplicationPosition::Since(cursor) => images.changes_since(may, *cursor, CHANGES_MAX),
            _ => None,
        };
        match (known, position) {
            (Some(page), _) => (false, page),
            (None, ReplicationPosition::After { instance, name })
                if *instance == images.cursor().instance =>
            {
                (true, images.all_changes(may, Some(name), CHANGES_MAX))
            }
            (None, _) => (true, images.all_changes(may, None, CHANGES_MAX)),
        }
    }

    pub(super) async fn get_made_directories(
        self,
        request: GetMadeDirectoriesRequest,
    ) -> Result<GetMadeDirectoriesReply, Fault> {
        let directories = self.store.directories.now();
        let (page, more) = directories.page(request.after.as_ref(), PAGE_DIRECTORIES_MAX);
        let version = directories.version();
        Ok(GetMadeDirectoriesReply { version, directories: page, more })
    }

    pub(super) async fn get_replication(
        self,
        caller: Caller,
    ) -> Result<GetReplicationReply, Fault> {
        let (replication, reader) =
            (std::sync::Arc::clone(&self.replication), self.reader(&caller));
        self.blocking(move |_| Ok(replication.report_for(&reader, wall()))).await
    }

    pub(super) async fn drop_copy(
        self,
        caller: Caller,
        request: DropCopyRequest,
    ) -> Result<Done, Fault> {
        let DropCopyRequest { name, force } = request;
        let refuse = |text: String| Err(Fault::new(FaultCode::BadRequest, text));
        let Some(follower) = self.replication.follower().cloned() else {
            return refuse(format!(
                "this server is no replica, so that {name} would be nowhere: delete it without \
                 --local"
            ));
        };
        if !follower.may_drop(&name) {
            let master = follower.master();
            return refuse(format!(
                "the master {master} has {name} too, and it would come again: delete it on the \
                 master, or leave it out with --replicate-exclude first"
            ));
        }
        if !force {
            expect_unused(&self.store, &name)?;
        }
        let dropped = name.clone();
        self.blocking(move |store| store.images.drop_copy(&dropped)).await?;
        tracing::warn!(image = %name, force, by = %caller, "dropped the copy of an image");
        follower.retry(&name);
        Ok(Done {})
    }
}
