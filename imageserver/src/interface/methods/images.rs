//! `ImageServer`: adding, getting, listing and deleting images.

use std::error::Error;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::Done;
use api::access::Owners;
use api::codec::{self, Encoding};
use api::fault::{Fault, FaultCode};
use api::image_server::{
    AddImage, AddImageReply, AddImageRequest, DeleteImage, DeleteImageRequest, GetImage,
    GetImageRequest, ListImagesReply, ListImagesRequest,
};
use api::method::Method as _;
use model::display::error_chain;
use model::image::{Content, Image, ImageName, Notes, tags};
use model::signing::signature;
use rpc::server::Caller;
use system::clock::wall;
use tokio::time::Instant;

use super::directories::fault_of_directory;
use super::expiry::expect_unused;
use super::{Service, expect_may_add};
use crate::store::directories::DirectoriesLock;
use crate::store::error::{AdmissionError, StoreError, fault_of_store, joined};
use crate::store::image_trees::check_new_tree_for;
use crate::store::private_images::Reader;
use crate::store::record::Record;
use crate::store::{Store, images};

/// The most images on a page of a list.
const PAGE_IMAGES_MAX: usize = 1_000;

/// The longest that a call waits for an image.
const WAIT_MAX: Duration = Duration::from_secs(60);

impl Service {
    pub(super) async fn add_image(
        self,
        caller: Caller,
        request: AddImageRequest,
    ) -> Result<AddImageReply, Fault> {
        let reader = self.reader(&caller);
        self.add_image_for(reader, caller, request).await
    }

    /// Adds an image with objects that `reader` may use.
    pub(super) async fn add_image_for(
        self,
        reader: Reader,
        caller: Caller,
        request: AddImageRequest,
    ) -> Result<AddImageReply, Fault> {
        let add = move |store: &Store| check_and_add(store, &reader, &caller, request);
        let reply = self.with_tree(add).await?;
        self.counters.images_added.inc();
        Ok(reply)
    }

    pub(super) async fn get_image(
        self,
        caller: Caller,
        request: GetImageRequest,
    ) -> Result<Image, Fault> {
        self.get_image_for(Some(caller), request).await
    }

    /// Returns an image that `caller` may read, or this server itself.
    pub(super) async fn get_image_for(
        self,
        caller: Option<Caller>,
        request: GetImageRequest,
    ) -> Result<Image, Fault> {
        let wait = Duration::from_millis(request.wait_ms.into()).min(WAIT_MAX);
        let deadline = Instant::now() + wait;
        loop {
            let mut added = pin!(self.store.images.added());
            // From here on no added image is missed.
            added.as_mut().enable();
            let name = request.name.clone();
            let caller = caller.clone();
            let got = self.blocking(move |store| match caller {
                Some(caller) => get_readable(store, &store.reader(&caller.identity), &name),
                None => store.images.get(&name),
            });
            let got = got.await;
            match got {
                Ok(record) => return Ok(record.image),
                Err(fault) if fault.code == FaultCode::NotFound && Instant::now() < deadline => {}
                Err(fault) => return Err(fault),
            }
            tokio::select! {
                () = added => {}
                () = tokio::time::sleep_until(deadline) => {}
                () = self.stop.cancelled() => {
                    let text = "the image server stops: ask again";
                    return Err(Fault::new(FaultCode::Unavailable, text));
                }
            }
        }
    }

    pub(super) async fn list_images(
        self,
        caller: Caller,
        request: ListImagesRequest,
    ) -> Result<ListImagesReply, Fault> {
        let (reader, after) = (self.reader(&caller), request.after.as_ref());
        let images::ImageList { images, more } =
            self.store.images.list_for(&reader, after, PAGE_IMAGES_MAX);
        Ok(ListImagesReply { images, more })
    }

    pub(super) async fn delete_image(
        self,
        caller: Caller,
        request: DeleteImageRequest,
    ) -> Result<Done, Fault> {
        let DeleteImageRequest { name, force } = request;
        self.expect_may_change::<DeleteImage>(&caller, &name).await?;
        if !force {
            let (store, asked) = (Arc::clone(&self.store), name.clone());
            let work = self.tasks.spawn_blocking(move || expect_unused(&store, &asked));
            joined(work.await)??;
        }
        let deleted = name.clone();
        let mark = format!(
            "deleted by {} at {} seconds after 1970-01-01 UTC; the name is never used again\n",
            caller.name(),
            wall().seconds
        );
        self.blocking(move |store| store.images.delete(&deleted, &mark)).await?;
        tracing::info!(image = %name, force, by = %caller, "deleted an image");
        self.counters.images_deleted.inc();
        Ok(Done {})
    }
}

/// Reads an image. One that `reader` may not read looks as if it had never been there.
pub(in crate::interface) fn get_readable(
    store: &Store,
    reader: &Reader,
    name: &ImageName,
) -> Result<Record, StoreError> {
    if reader.may_read_image(name) {
        store.images.get(name)
    } else {
        Err(StoreError::NotFound { name: name.clone() })
    }
}

fn check_and_add(
    store: &Store,
    reader: &Reader,
    caller: &Caller,
    request: AddImageRequest,
) -> Result<AddImageReply, Fault> {
    expect_may_add::<AddImage>(store, caller, &request.content.name)?;
    request.content.check_new().map_err(|error| bad_request(&error))?;
    // From here on until the image is visible no object is removed.
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    make_visible(store, reader, caller, request.content, request.notes)
}

/// Adds an image if all its objects are there, and `reader` may use them. The caller prevents
/// removals meanwhile.
pub(super) fn make_visible(
    store: &Store,
    reader: &Reader,
    caller: &Caller,
    content: Content,
    mut notes: Notes,
) -> Result<AddImageReply, Fault> {
    let store_fault = |error| fault_of_store(&error);
    store.images.expect_new(&content.name).map_err(store_fault)?;
    tags::verify(&notes.tags).map_err(|error| bad_request(&error))?;
    let owners = Owners::new(notes.owner_groups.clone(), notes.owner_users.clone());
    owners.verify().map_err(|error| bad_request(&error))?;
    // Checked before the work, and again while nobody can remove the directory.
    expect_directory(&store.directories.lock(), &content.name)?;
    let about = (&content.name, &content.digest());
    notes.signatures = signature::changed(&[], &notes.signatures, &[], about)
        .map_err(|error| bad_request(&error))?;
    let created_on = wall();
    if notes.expires_at.is_some_and(|expires_at| expires_at <= created_on) {
        let text = format!("image {} would have expired before it was added", content.name);
        return Err(Fault::new(FaultCode::BadRequest, text));
    }
    let pin = notes.build_log.map(|id| store.objects.pin(&[id]));
    let _pin = pin.transpose().map_err(store_fault)?;
    if let Some(id) = notes.build_log
        && !reader.missing(&*store.objects, &[id]).map_err(store_fault)?.is_empty()
    {
        let text = format!("object {id}, the build log, is not on this server: upload it first");
        return Err(Fault::new(FaultCode::NotFound, text));
    }
    let checked = check_new_tree_for(reader, &*store.objects, &content)
        .map_err(|error| fault_of_admission(&error))?;
    notes.created_by = caller.name();
    notes.created_on = created_on;
    let image = Image { content, notes };
    expect_gettable(&image)?;
    let digest = image.content.digest();
    // All objects must be on the medium before an image that needs them is visible.
    store.objects.sync().map_err(store_fault)?;
    let record = Record { image, totals: checked.totals };
    checked.expect_in_time().map_err(store_fault)?;
    let lock = store.directories.lock();
    expect_directory(&lock, &record.image.content.name)?;
    store.add_image(&record).map_err(store_fault)?;
    drop(lock);
    let name = &record.image.content.name;
    tracing::info!(image = %name, %digest, by = %caller, "added an image");
    Ok(AddImageReply { digest })
}

pub(super) fn bad_request(error: &dyn Error) -> Fault {
    Fault::new(FaultCode::BadRequest, error_chain(error))
}

/// Refuses an image in a directory that was never made, if directories must be made.
fn expect_directory(lock: &DirectoriesLock<'_>, name: &ImageName) -> Result<(), Fault> {
    lock.expect_made(name).map_err(|error| fault_of_directory(&error))
}

/// Refuses an image that would be too large for the reply that gives it.
fn expect_gettable(image: &Image) -> Result<(), Fault> {
    let length = codec::encode(Encoding::Bincode, "image", image)
        .map_err(|error| bad_request(&error))?
        .len();
    let limit = GetImage::REPLY_BYTES_MAX;
    if length <= limit {
        return Ok(());
    }
    let name = &image.content.name;
    let text = format!("image {name} without its tree has {length} bytes: {limit} are accepted");
    Err(Fault::new(FaultCode::TooLarge, text))
}

pub(super) fn fault_of_admission(error: &AdmissionError) -> Fault {
    let refuse = |code| Fault::new(code, error_chain(error));
    match error {
        AdmissionError::MissingDirectory { .. } | AdmissionError::MissingObject { .. } => {
            let text = format!("{}: upload it, then add the image again", error_chain(error));
            Fault::new(FaultCode::NotFound, text)
        }
        AdmissionError::TooLarge { .. } => refuse(FaultCode::TooLarge),
        AdmissionError::WrongSize { .. }
        | AdmissionError::NoDirectory { .. }
        | AdmissionError::Tree { .. }
        | AdmissionError::Image { .. }
        | AdmissionError::Task { .. }
        | AdmissionError::Resources { .. } => refuse(FaultCode::BadRequest),
        AdmissionError::Store { source } => fault_of_store(source),
    }
}
