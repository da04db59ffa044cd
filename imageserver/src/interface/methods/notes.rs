//! `ImageServer`: copies, tags, and the latest image of a directory.

use std::sync::PoisonError;
use std::time::Duration;

use api::fault::Fault;
use api::image_server::AddImageReply;
use api::image_server::notes::{
    ChangeSignatures, ChangeSignaturesReply, ChangeSignaturesRequest, ChangeTags, ChangeTagsReply,
    ChangeTagsRequest, CopyImage, CopyImageRequest, FindLatestImageReply, FindLatestImageRequest,
};
use model::image::{Content, DEPRECATED, Image, Notes, tags};
use model::signing::signature;
use model::time_parse::later;
use rpc::server::Caller;
use system::clock::wall;

use super::images::{bad_request, get_readable, make_visible};
use super::{Service, expect_may_add};
use crate::store::Store;
use crate::store::error::{StoreError, fault_of_store};
use crate::store::private_images::Reader;

impl Service {
    pub(super) async fn copy_image(
        self,
        caller: Caller,
        request: CopyImageRequest,
    ) -> Result<AddImageReply, Fault> {
        let reader = self.reader(&caller);
        self.copy_image_for(reader, caller, request).await
    }

    /// Copies an image that `reader` may read.
    pub(super) async fn copy_image_for(
        self,
        reader: Reader,
        caller: Caller,
        request: CopyImageRequest,
    ) -> Result<AddImageReply, Fault> {
        let copy = move |store: &Store| copy_and_add(store, &reader, &caller, request);
        let reply = self.with_tree(copy).await?;
        self.counters.images_added.inc();
        Ok(reply)
    }

    pub(super) async fn change_tags(
        self,
        caller: Caller,
        request: ChangeTagsRequest,
    ) -> Result<ChangeTagsReply, Fault> {
        let ChangeTagsRequest { name, set, remove } = request;
        let changed = name.clone();
        let notes = self.change_notes::<ChangeTags>(&caller, &name, move |notes| {
            notes.tags = tags::apply_changes(&notes.tags, set, &remove)
                .map_err(|source| StoreError::Tags { name: changed, source })?;
            Ok(())
        });
        let tags = notes.await?.tags;
        let shown: Vec<String> =
            tags.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let shown = shown.join(" ");
        tracing::info!(image = %name, tags = shown, by = %caller, "changed the tags");
        Ok(ChangeTagsReply { tags })
    }

    pub(super) async fn change_signatures(
        self,
        caller: Caller,
        request: ChangeSignaturesRequest,
    ) -> Result<ChangeSignaturesReply, Fault> {
        let ChangeSignaturesRequest { name, add, remove } = request;
        self.expect_may_change::<ChangeSignatures>(&caller, &name).await?;
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
        caller: Caller,
        request: FindLatestImageRequest,
    ) -> Result<FindLatestImageReply, Fault> {
        let FindLatestImageRequest { directory, tags } = request;
        if !self.reader(&caller).may_read_directory(&directory) {
            return Ok(FindLatestImageReply { name: None });
        }
        Ok(FindLatestImageReply { name: self.store.images.latest(&directory, &tags) })
    }
}

fn copy_and_add(
    store: &Store,
    reader: &Reader,
    caller: &Caller,
    request: CopyImageRequest,
) -> Result<AddImageReply, Fault> {
    let CopyImageRequest { from, to, expires_in_seconds } = request;
    expect_may_add::<CopyImage>(store, caller, &to)?;
    to.check_new().map_err(|error| bad_request(&error))?;
    // Held before the source is read: it may be deleted while it is copied.
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    let record = get_readable(store, reader, &from).map_err(|error| fault_of_store(&error))?;
    let Image { content, mut notes } = record.image;
    notes.tags.remove(DEPRECATED);
    let after = |seconds: u32| later(wall(), Duration::from_secs(seconds.into()));
    let notes = Notes {
        expires_at: expires_in_seconds.map(after),
        // The copy may have other owners than its source.
        owner_groups: Vec::new(),
        owner_users: Vec::new(),
        // Signatures name the image that they sign.
        signatures: Vec::new(),
        source_image: Some(from),
        ..notes
    };
    make_visible(store, reader, caller, Content { name: to, ..content }, notes)
}
