//! The methods of the image server: what a call may do, and what it is answered.
//!
//! File work runs on threads of its own, never on those that serve the network. A change that was
//! begun is finished even if its caller goes away.

mod access;
mod collection;
mod directories;
mod download;
mod estimate;
mod expiry;
mod images;
mod notes;
mod packing;
mod replication;
mod writes;

pub(crate) use directories::sums;
pub use packing::Packers;

use crate::store::error::{fault_of_store, joined};
use std::sync::Arc;

use api::access::judge;
use api::image_server::collection::Collect;
use api::image_server::directories::{
    ChangeOwner, ListDirectories, MakeDirectory, RemoveDirectory,
};
use api::image_server::estimate::EstimateImage;
use api::image_server::expiry::{AcceptClock, ChangeExpiry};
use api::image_server::holds::HoldImages;
use api::image_server::notes::{ChangeTags, CopyImage, FindLatestImage};
use api::image_server::replication::directories::GetMadeDirectories;
use api::image_server::replication::{DropCopy, Forward, GetImageUpdates, GetReplication};
use api::image_server::signatures::ChangeSignatures;
use api::image_server::{AddImage, DeleteImage, GetImage, ListImages};
use api::object_server::{
    AddObjects, CheckObjects, CheckObjectsReply, CheckObjectsRequest, GetObjects,
    GetObjectsRequest, IDS_MAX,
};
use api::{
    fault::{Fault, FaultCode},
    method::Method,
};
use rpc::server::{Caller, ObjectReader, Router, Share, Shares};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::collection::Collector;
use crate::expiry::Expiry;
use crate::interface::Life;
use crate::replication::Replication;
use crate::store::counters::Counters;
use crate::store::{Store, error::StoreError, upload};

/// The most uploads at one time: each has a thread.
const UPLOADS_MAX: usize = 64;

/// The most downloads at one time, of all and of one caller: each holds up to two chunks in memory.
const DOWNLOADS_MAX: usize = 1_500;
const DOWNLOADS_OF_ONE_MAX: usize = 1_000;

/// The most images that are looked through at one time: each needs its whole tree in memory.
const ADMISSIONS_MAX: usize = 2;

/// The most estimates at one time: each reads the directories of all images.
const ESTIMATES_MAX: usize = 1;

/// What answers the calls. A clone shares everything.
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
    downloads: Arc<Shares>,
    admissions: Arc<Semaphore>,
    estimates: Arc<Semaphore>,
}

impl Service {
    /// Answers calls from `store`. Work that outlives a call is tracked by `tasks`; calls that
    /// wait give up when `stop` is cancelled.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        life: Life,
        counters: Arc<Counters>,
        packers: Packers,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            store,
            collector: life.collector,
            expiry: life.expiry,
            replication: life.replication,
            counters,
            packers,
            tasks,
            stop,
            uploads: Arc::new(Semaphore::new(UPLOADS_MAX)),
            downloads: Shares::new(DOWNLOADS_MAX, DOWNLOADS_OF_ONE_MAX),
            admissions: Arc::new(Semaphore::new(ADMISSIONS_MAX)),
            estimates: Arc::new(Semaphore::new(ESTIMATES_MAX)),
        }
    }

    /// Adds all methods, and `GET /objects/<id>`, to `router`.
    #[must_use]
    pub fn routes(&self, router: Router) -> Router {
        let own = || self.clone();
        let (add, get, list, delete) = (own(), own(), own(), own());
        let (upload, check, download, object) = (own(), own(), own(), own());
        let (collect, expiry, clock, hold) = (own(), own(), own(), own());
        let (copy, tag, sign, latest) = (own(), own(), own(), own());
        let (updates, forward, replication, forget) = (own(), own(), own(), own());
        let (make, remove, give, directories) = (own(), own(), own(), own());
        let (estimate, made) = (own(), own());
        router
            .method_of_owners::<AddImage, _, _>(move |caller, request| {
                add.clone().add_image(caller, request)
            })
            .method::<GetImage, _, _>(move |_, request| get.clone().get_image(request))
            .method::<ListImages, _, _>(move |_, request| list.clone().list_images(request))
            .method_of_owners::<DeleteImage, _, _>(move |caller, request| {
                delete.clone().delete_image(caller, request)
            })
            .method::<Collect, _, _>(move |caller, request| {
                collect.clone().collect(caller, request)
            })
            .method_of_owners::<ChangeExpiry, _, _>(move |caller, request| {
                expiry.clone().change_expiry(caller, request)
            })
            .method::<AcceptClock, _, _>(move |caller, _| clock.clone().accept_clock(caller))
            .method::<HoldImages, _, _>(move |caller, request| {
                hold.clone().hold_images(caller, request)
            })
            .method_of_owners::<CopyImage, _, _>(move |caller, request| {
                copy.clone().copy_image(caller, request)
            })
            .method_of_owners::<ChangeTags, _, _>(move |caller, request| {
                tag.clone().change_tags(caller, request)
            })
            .method_of_owners::<ChangeSignatures, _, _>(move |caller, request| {
                sign.clone().change_signatures(caller, request)
            })
            .method::<FindLatestImage, _, _>(move |_, request| {
                latest.clone().find_latest_image(request)
            })
            .method::<GetMadeDirectories, _, _>(move |_, request| {
                made.clone().get_made_directories(request)
            })
            .method::<GetImageUpdates, _, _>(move |caller, request| {
                updates.clone().get_image_updates(caller, request)
            })
            .method::<Forward, _, _>(move |caller, request| {
                forward.clone().forward(caller, request)
            })
            .method::<GetReplication, _, _>(move |_, _| replication.clone().get_replication())
            .method::<DropCopy, _, _>(move |caller, request| {
                forget.clone().drop_copy(caller, request)
            })
            .method_of_owners::<MakeDirectory, _, _>(move |caller, request| {
                make.clone().make_directory(caller, request)
            })
            .method_of_owners::<RemoveDirectory, _, _>(move |caller, request| {
                remove.clone().remove_directory(caller, request)
            })
            .method_of_owners::<ChangeOwner, _, _>(move |caller, request| {
                give.clone().change_owner(caller, request)
            })
            .method::<ListDirectories, _, _>(move |_, request| {
                directories.clone().list_directories(request)
            })
            .method::<EstimateImage, _, _>(move |_, request| {
                estimate.clone().estimate_image(request)
            })
            .upload::<AddObjects, _, _>(move |_, reader| upload.clone().add_objects(reader))
            .method::<CheckObjects, _, _>(move |caller, request| {
                check.clone().check_objects(caller, request)
            })
            .download::<GetObjects, _, _, _>(move |caller, request| {
                download.clone().get_objects(caller, request)
            })
            .pages_below("/objects/", move |request| object.clone().object_page(request))
    }

    async fn add_objects(
        self,
        reader: ObjectReader,
    ) -> Result<api::object_server::AddObjectsReply, Fault> {
        let _place = place(&self.uploads, "uploads")?;
        let done = upload::add_objects(self.store, self.counters, &self.tasks, reader).await;
        self.collector.note_upload();
        done
    }

    async fn check_objects(
        self,
        caller: Caller,
        request: CheckObjectsRequest,
    ) -> Result<CheckObjectsReply, Fault> {
        let ids = limited(request.ids)?;
        // Only who may upload has use for a lease; others could keep collection from its work.
        let may_upload =
            judge(AddObjects::NAME, AddObjects::ACCESS, &caller.identity, "", &[]).is_ok();
        let lease_seconds = if may_upload { request.lease_seconds } else { 0 };
        let missing = self.blocking(move |store| {
            // Before they are looked for, so that what is found to be there stays.
            store.leasing.give(&ids, lease_seconds)?;
            store.objects.missing(&ids)
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
        let place = self.download_place(&caller)?;
        let packers = caller.unpacks.then_some(self.packers);
        Ok(download::objects(self.store, self.counters, packers, place, ids))
    }

    fn download_place(&self, caller: &Caller) -> Result<Share, Fault> {
        self.downloads.take(caller, 1).ok_or_else(|| too_many("downloads"))
    }

    /// Runs work on files where it may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Fault> {
        let store = Arc::clone(&self.store);
        let done = self.tasks.spawn_blocking(move || work(&store)).await;
        joined(done)?.map_err(|error| fault_of_store(&error))
    }
}

fn place(places: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, Fault> {
    Arc::clone(places).try_acquire_owned().map_err(|_| too_many(what))
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
