//! The methods of the image server.
//!
//! File work runs on separate threads, never on those that serve the network. A change that has
//! begun is completed even if its caller disconnects.

mod directories;
pub mod download;
mod estimate;
mod expiry;
pub(in crate::interface) mod images;
mod notes;
mod private;
mod replication;
mod writes;

use std::sync::Arc;

use api::access::{DeniedError, OwnedItem, Owners, authorize};
use api::fault::{Fault, FaultCode};
use api::image_server::collection::{Collect, CollectReply, CollectRequest, EstimateImage};
use api::image_server::directories::{
    ChangeOwner, ListDirectories, MakeDirectory, RemoveDirectory,
};
use api::image_server::expiry::{AcceptClock, ChangeExpiry, HoldImages};
use api::image_server::notes::{ChangeSignatures, ChangeTags, CopyImage, FindLatestImage};
use api::image_server::private::{ChangeReaders, GetPrivateDirectories};
use api::image_server::replication::directories::GetMadeDirectories;
use api::image_server::replication::{DropCopy, Forward, GetImageUpdates, GetReplication};
use api::image_server::{AddImage, DeleteImage, GetImage, ListImages};
use api::method::Method;
use api::object_server::{
    AddObjects, CheckObjects, CheckObjectsReply, CheckObjectsRequest, GetObjects,
    GetObjectsRequest, IDS_MAX,
};
use daemon::memory::FreedMemory;
use download::Packers;
use model::display::error_chain;
use model::image::{ImageName, Notes};
use model::object::ObjectId;
use rpc::server::{Caller, CallerPermit, CallerPermits, ObjectReader, Router};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::collection::Collector;
use crate::expiry::Expiry;
use crate::interface::BackgroundTasks;
use crate::replication::Replication;
use crate::store::error::{CollectError, StoreError, fault_of_store, joined};
use crate::store::private_images::Reader;
use crate::store::upload::{AbsentObjects, store_objects_of};
use crate::store::{Counters, Store};

/// The most uploads at one time: each has a thread.
const UPLOADS_MAX: usize = 64;

/// The most downloads at one time, of all and of one caller: each holds up to two chunks in
/// memory, and up to a megabyte while it takes them at once.
const DOWNLOADS_MAX: usize = 1_500;
const DOWNLOADS_OF_ONE_MAX: usize = 1_000;

/// The most trees that are checked at one time: each is in memory as a whole.
const ADMISSIONS_MAX: usize = 2;

/// The most estimates at one time: each reads the directories of all images.
const ESTIMATES_MAX: usize = 1;

/// What a download holds until it ends.
type DownloadPermit = (CallerPermit, FreedMemory);

/// The state that all methods share. A clone shares everything.
#[derive(Clone)]
pub struct Service {
    store: Arc<Store>,
    collector: Arc<Collector>,
    expiry: Arc<Expiry>,
    replication: Arc<Replication>,
    counters: Arc<Counters>,
    packers: Packers,
    tasks: TaskTracker,
    stop: CancellationToken,
    uploads: Arc<Semaphore>,
    downloads: Arc<CallerPermits>,
    admissions: Arc<Semaphore>,
    estimates: Arc<Semaphore>,
}

impl Service {
    /// Serves calls from `store`. Work that outlives a call is tracked by `tasks`; calls that
    /// wait give up when `stop` is cancelled.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        background: BackgroundTasks,
        counters: Arc<Counters>,
        packers: Packers,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            store,
            collector: background.collector,
            expiry: background.expiry,
            replication: background.replication,
            counters,
            packers,
            tasks,
            stop,
            uploads: Arc::new(Semaphore::new(UPLOADS_MAX)),
            downloads: CallerPermits::new(DOWNLOADS_MAX, DOWNLOADS_OF_ONE_MAX),
            admissions: Arc::new(Semaphore::new(ADMISSIONS_MAX)),
            estimates: Arc::new(Semaphore::new(ESTIMATES_MAX)),
        }
    }

    /// Adds all methods, and `GET /objects/<id>`, to `router`.
    pub fn routes<S: Clone + Send + Sync + 'static>(&self, router: Router<S>) -> Router<Self> {
        router
            .with_state(self.clone())
            .method_of_owners::<AddImage, _>(|service, caller, request| {
                service.change::<AddImage, _>(caller, request, Self::add_image)
            })
            .method::<GetImage, _>(Self::get_image)
            .method::<ListImages, _>(Self::list_images)
            .method_of_owners::<DeleteImage, _>(|service, caller, request| {
                service.change::<DeleteImage, _>(caller, request, Self::delete_image)
            })
            .method::<Collect, _>(Self::collect)
            .method_of_owners::<ChangeExpiry, _>(|service, caller, request| {
                service.change::<ChangeExpiry, _>(caller, request, Self::change_expiry)
            })
            .method::<AcceptClock, _>(|service, caller, _| service.accept_clock(caller))
            .method::<HoldImages, _>(Self::hold_images)
            .method_of_owners::<CopyImage, _>(|service, caller, request| {
                service.change::<CopyImage, _>(caller, request, Self::copy_image)
            })
            .method_of_owners::<ChangeTags, _>(|service, caller, request| {
                service.change::<ChangeTags, _>(caller, request, Self::change_tags)
            })
            .method_of_owners::<ChangeSignatures, _>(|service, caller, request| {
                service.change::<ChangeSignatures, _>(caller, request, Self::change_signatures)
            })
            .method::<FindLatestImage, _>(Self::find_latest_image)
            .method::<GetMadeDirectories, _>(|service, _, request| {
                service.get_made_directories(request)
            })
            .method::<GetImageUpdates, _>(Self::get_image_updates)
            .method::<Forward, _>(Self::forward)
            .method::<GetReplication, _>(|service, caller, _| service.get_replication(caller))
            .method::<DropCopy, _>(Self::drop_copy)
            .method_of_owners::<MakeDirectory, _>(|service, caller, request| {
                service.change::<MakeDirectory, _>(caller, request, Self::make_directory)
            })
            .method_of_owners::<RemoveDirectory, _>(|service, caller, request| {
                service.change::<RemoveDirectory, _>(caller, request, Self::remove_directory)
            })
            .method_of_owners::<ChangeOwner, _>(|service, caller, request| {
                service.change::<ChangeOwner, _>(caller, request, Self::change_owner)
            })
            .method::<ListDirectories, _>(Self::list_directories)
            .method_of_owners::<GetPrivateDirectories, _>(Self::get_private_directories)
            .method_of_owners::<ChangeReaders, _>(Self::change_readers)
            .method::<EstimateImage, _>(Self::estimate_image)
            .upload::<AddObjects, _>(Self::add_objects)
            .method::<CheckObjects, _>(Self::check_objects)
            .download::<GetObjects, _, _>(Self::get_objects)
            .page("/objects/", Self::object_page)
    }

    /// Continues even if the caller disconnects.
    async fn collect(self, caller: Caller, request: CollectRequest) -> Result<CollectReply, Fault> {
        tracing::info!(by = %caller, dry_run = request.dry_run, "collecting objects");
        let (collector, stop) = (Arc::clone(&self.collector), self.stop.clone());
        let work = move || collector.collect(request, || stop.is_cancelled());
        let done = joined(self.tasks.spawn_blocking(work).await)?;
        done.map_err(|error| fault_of_collection(&error))
    }

    async fn add_objects(
        self,
        caller: Caller,
        reader: ObjectReader,
    ) -> Result<api::object_server::AddObjectsReply, Fault> {
        let _held = (permit(&self.uploads, "uploads")?, FreedMemory::keep());
        let (sender, absent) = (self.reader(&caller), AbsentObjects::Refused);
        let (store, counters) = (self.store, self.counters);
        let done = store_objects_of(sender, store, counters, &self.tasks, reader, absent).await;
        self.collector.note_upload();
        done
    }

    async fn check_objects(
        self,
        caller: Caller,
        request: CheckObjectsRequest,
    ) -> Result<CheckObjectsReply, Fault> {
        let ids = limited(request.ids)?;
        // Only callers that may upload get leases; others could block collections.
        let may_upload =
            authorize(AddObjects::NAME, AddObjects::ACCESS, &caller.identity, "", &[]).is_ok();
        let lease_seconds = if may_upload { request.lease_seconds } else { 0 };
        let reader = self.reader(&caller);
        let missing = self.blocking(move |store| {
            // Leased before the lookup, so that objects that are found stay.
            store.leasing.give(&ids, lease_seconds)?;
            reader.missing(&*store.objects, &ids)
        });
        let missing = missing.await?;
        Ok(CheckObjectsReply { missing })
    }

    async fn get_objects(
        self,
        caller: Caller,
        request: GetObjectsRequest,
    ) -> Result<impl futures_util::Stream<Item = std::io::Result<bytes::Bytes>> + Send, Fault> {
        let ids = limited(request.ids)?;
        let permit = self.download_permit(&caller)?;
        let ids = self.readable(&caller, ids).await?;
        let packers = caller.unpacks.then_some(self.packers);
        Ok(download::objects(self.store, self.counters, packers, permit, ids))
    }

    /// Returns what `caller` may read.
    fn reader(&self, caller: &Caller) -> Reader {
        self.store.reader(&caller.identity)
    }

    /// Returns `ids` if the caller may read all of them.
    async fn readable(&self, caller: &Caller, ids: Vec<ObjectId>) -> Result<Vec<ObjectId>, Fault> {
        let reader = self.reader(caller);
        if matches!(reader, Reader::Everything) {
            return Ok(ids);
        }
        let checked = self.blocking(move |_| Ok(reader.expect_readable(&ids).map(|()| ids)));
        checked.await?.map_err(|error| {
            tracing::info!(by = %caller, "refused: {error}");
            Fault::new(FaultCode::Denied, error_chain(&error))
        })
    }

    fn download_permit(&self, caller: &Caller) -> Result<DownloadPermit, Fault> {
        let permit = self.downloads.take(caller, 1).ok_or_else(|| too_many("downloads"))?;
        Ok((permit, FreedMemory::keep()))
    }

    /// Runs work that holds the whole tree of an image in memory. It is finished even if the caller
    /// disconnects.
    async fn with_tree<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let permit = Arc::clone(&self.admissions).acquire_owned().await;
        let permit = permit.expect("the semaphore is never closed");
        let store = Arc::clone(&self.store);
        let work = self.tasks.spawn_blocking(move || {
            let _permit = permit;
            work(&store)
        });
        joined(work.await)?
    }

    /// Changes the notes of the image `name` if the caller may do so.
    async fn change_notes<M: Method>(
        &self,
        caller: &Caller,
        name: &ImageName,
        change: impl FnOnce(&mut Notes) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<Notes, Fault> {
        self.expect_may_change::<M>(caller, name).await?;
        let name = name.clone();
        self.blocking(move |store| store.images.change(&name, change)).await
    }

    /// Refuses a call that changes or deletes the image `name`.
    async fn expect_may_change<M: Method>(
        &self,
        caller: &Caller,
        name: &ImageName,
    ) -> Result<(), Fault> {
        let (caller, name) = (caller.clone(), name.clone());
        self.blocking(move |store| Ok(expect_may_change::<M>(store, &caller, &name))).await?
    }

    /// Runs work on the store on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Fault> {
        let store = Arc::clone(&self.store);
        let done = self.tasks.spawn_blocking(move || work(&store)).await;
        joined(done)?.map_err(|error| fault_of_store(&error))
    }
}

fn permit(semaphore: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, Fault> {
    Arc::clone(semaphore).try_acquire_owned().map_err(|_| too_many(what))
}

fn too_many(what: &str) -> Fault {
    Fault::new(FaultCode::Unavailable, format!("too many {what} at one time: try again later"))
}

fn limited<T>(ids: Vec<T>) -> Result<Vec<T>, Fault> {
    if ids.len() <= IDS_MAX {
        return Ok(ids);
    }
    let text = format!("{} ids in one request: at most {IDS_MAX} are accepted", ids.len());
    Err(Fault::new(FaultCode::TooLarge, text))
}

/// Refuses a call that adds the image `name`.
fn expect_may_add<M: Method>(
    store: &Store,
    caller: &Caller,
    name: &ImageName,
) -> Result<(), Fault> {
    let owned = store.directories.now().owned_above(name);
    expect_may::<M>(caller, &format!("image {name}"), &owned)
}

/// Refuses a call that changes or deletes the image `name`.
fn expect_may_change<M: Method>(
    store: &Store,
    caller: &Caller,
    name: &ImageName,
) -> Result<(), Fault> {
    // A caller with the power may delete an image with a damaged record too.
    let what = format!("image {name}");
    let above = store.directories.now().owned_above(name);
    let mut owned = Vec::new();
    if let Ok(record) = store.images.get(name) {
        let notes = record.image.notes;
        let owners = Owners::new(notes.owner_groups, notes.owner_users);
        owned.push(OwnedItem { what: what.clone(), owners });
    }
    owned.extend_from_slice(&above);
    let may = expect_may::<M>(caller, &what, &owned);
    if may.is_err() && !store.reader(&caller.identity).may_read_image(name) {
        // A refusal does not show whether the image is there.
        return expect_may::<M>(caller, &what, &above);
    }
    may
}

fn expect_may<M: Method>(caller: &Caller, about: &str, owned: &[OwnedItem]) -> Result<(), Fault> {
    authorize(M::NAME, M::ACCESS, &caller.identity, about, owned).map_err(|error| denied(&error))
}

/// Returns the fault for a caller without the permission.
fn denied(error: &DeniedError) -> Fault {
    let text = error_chain(error);
    tracing::debug!("refused: {text}");
    Fault::new(FaultCode::Denied, text)
}

fn fault_of_collection(error: &CollectError) -> Fault {
    let code = match error {
        CollectError::Store { source } => return fault_of_store(source),
        CollectError::Busy | CollectError::Elsewhere { .. } => FaultCode::Busy,
        CollectError::Held { .. } => FaultCode::Held,
        CollectError::Stopped => FaultCode::Unavailable,
        CollectError::Damaged { .. } | CollectError::Walk { .. } => FaultCode::Internal,
    };
    Fault::new(code, error_chain(error))
}

#[cfg(test)]
mod tests;
