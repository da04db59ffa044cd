//! `ImageServer`: copies, tags, and the latest image of a directory.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::fault::Fault;
use api::image_server::AddImageReply;
use api::image_server::notes::{
    ChangeTags, ChangeTagsReply, ChangeTagsRequest, CopyImage, CopyImageRequest,
    FindLatestImageReply, FindLatestImageRequest,
};
use api::image_server::signatures::{
    ChangeSignatures, ChangeSignaturesReply, ChangeSignaturesRequest,
};
use model::image::{Content, DEPRECATED, Image, Notes, tags};
use model::signing::signature;
use model::when::written::later;
use rpc::server::Caller;

use super::Service;
use super::access::{expect_may_add, expect_may_change};
use super::images::make_visible;
use crate::clock::wall;
use crate::store::error::{fault_of_store, joined};
use crate::store::{Store, error::StoreError};

impl Service {
    pub(super) async fn copy_here(
        self,
        caller: Caller,
        request: CopyImageRequest,
    ) -> Result<AddImageReply, Fault> {
        let places = Arc::clone(&self.admissions);
        let place = places.acquire_owned().await.expect("the semaphore is never closed");
        let store = Arc::clone(&self.store);
        let work = self.tasks.spawn_blocking(move || {
            let reply = copy_image(&store, &caller, request);
            drop(place);
            reply
        });
        let reply = joined(work.await)??;
        self.counters.images_added.inc();
        Ok(reply)
    }

    pub(super) async fn change_tags_here(
        self,
        caller: Caller,
        request: ChangeTagsRequest,
    ) -> Result<ChangeTagsReply, Fault> {
        let ChangeTagsRequest { name, set, remove } = request;
        let (changed, by) = (name.clone(), caller.clone());
        let may = move |store: &Store| Ok(expect_may_change::<ChangeTags>(store, &by, &changed));
        self.blocking(may).await??;
        let changed = name.clone();
        let notes = self.blocking(move |store| {
            store.images.change(&changed, |notes| {
                let name = changed.clone();
                notes.tags = tags::changed(&notes.tags, set, &remove)
                    .map_err(|source| StoreError::Tags { name, source })?;
                Ok::<(), StoreError>(())
            })
        });
        let tags = notes.await?.tags;
        tracing::info!(image = %name, ?tags, by = %caller, "changed the tags");
        Ok(ChangeTagsReply { tags })
    }

    pub(super) async fn change_signatures_here(
        self,
        caller: Caller,
        request: ChangeSignaturesRequest,
    ) -> Result<ChangeSignaturesReply, Fault> {
        let ChangeSignaturesRequest { name, add, remove } = request;
        let (changed, by) = (name.clone(), caller.clone());
        let may =
            move |store: &Store| Ok(expect_may_change::<ChangeSignatures>(store, &by, &changed));
        self.blocking(may).await??;
        let (added, changed) = (add.len(), name.clone());
        let notes = self.blocking(move |store| {
            // The content of an image never changes, so this digest is that of the notes' image.
            let digest = store.images.get(&changed)?.image.content.digest();
            store.images.change(&changed, |notes| {
                let signatures =
                    signature::changed(&notes.signatures, &add, &remove, (&changed, &digest));
                let name = changed.clone();
                notes.signatures =
                    signatures.map_err(|source| StoreError::Signatures { name, source })?;
                Ok::<(), StoreError>(())
            })
        });
        let signatures = notes.await?.signatures;
        let count = signatures.len();
        tracing::info!(image = %name, added, count, by = %caller.address, "changed the signatures");
        Ok(ChangeSignaturesReply { signatures })
    }

    pub(super) async fn find_latest_image(
        self,
        request: FindLatestImageRequest,
    ) -> Result<FindLatestImageReply, Fault> {
        let FindLatestImageRequest { directory, tags } = request;
        Ok(FindLatestImageReply { name: self.store.images.latest(&directory, &tags) })
    }
}

fn copy_image(
    store: &Store,
    caller: &Caller,
    request: CopyImageRequest,
) -> Result<AddImageReply, Fault> {
    let CopyImageRequest { from, to, expires_in_seconds } = request;
    expect_may_add::<CopyImage>(store, caller, &to)?;
    // From before the source is read: it may be deleted while it is copied.
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    let record = store.images.get(&from).map_err(|error| fault_of_store(&error))?;
    let Image { content, mut notes } = record.image;
    notes.tags.remove(DEPRECATED);
    let after = |seconds: u32| later(wall(), Duration::from_secs(seconds.into()));
    let notes = Notes {
        expires_at: expires_in_seconds.map(after),
        // Who may change the one need not be who may change the other.
        owner_groups: Vec::new(),
        owner_users: Vec::new(),
        // They are about an image of the other name.
        signatures: Vec::new(),
        source_image: Some(from),
        ..notes
    };
    make_visible(store, caller, Content { name: to, ..content }, notes)
}
