//! Changes of images: made here, or sent on to the master if this server is a replica.
//!
//! The master decides, so that a name is never given twice. A replica first sends it what it lacks
//! of a new image, then the change itself, and then makes here what the master has made. What
//! comes from the master as news at the same time is the same, and is as good.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::Done;
use api::access::{Identity, Powers};
use api::fault::{Fault, FaultCode};
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, MakeDirectory, MakeDirectoryReply, MakeDirectoryRequest,
    RemoveDirectory, RemoveDirectoryRequest,
};
use api::image_server::expiry::{ChangeExpiry, ChangeExpiryReply, ChangeExpiryRequest};
use api::image_server::notes::{
    ChangeTags, ChangeTagsReply, ChangeTagsRequest, CopyImage, CopyImageRequest,
};
use api::image_server::replication::{
    self, Forward, ForwardReply, ForwardRequest, ForwardedMethod, Link, SERVERS_MAX, ServerId,
    Write, Written,
};
use api::image_server::signatures::{
    ChangeSignatures, ChangeSignaturesReply, ChangeSignaturesRequest,
};
use api::image_server::{
    AddImage, AddImageReply, AddImageRequest, DeleteImage, DeleteImageRequest, GetImageRequest,
};
use api::object_server::{AddObjects, CheckObjects, CheckObjectsRequest, IDS_MAX};
use model::image::{Content, ImageName};
use model::object::ObjectId;
use model::report::report;
use rpc::client::CallError;
use rpc::server::Caller;

use super::access::{expect_may_add, expect_may_change};
use super::expiry::expect_unused;
use super::images::fault_of_admission;
use super::{Service, download};
use crate::core::missing_objects::{Holds, Survey};
use crate::replication::follower::Follower;
use crate::store::admission::{admit, read_directory};
use crate::store::contract::Objects;
use crate::store::error::{fault_of_store, joined};
use crate::store::{Store, error::StoreError};

/// How long the master may take for a change: it walks the whole tree of an image.
const FORWARD_LIMIT: Duration = Duration::from_secs(600);

/// How long the master keeps objects for an image that is on its way, in seconds.
const LEASE_SECONDS: u32 = 24 * 3_600;

/// How often objects are sent that the master lacks, or has lost again meanwhile.
const ROUNDS_MAX: u32 = 3;

/// How long a caller waits until what the master has changed is seen here too.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// Who wants a change.
#[derive(Clone, Debug)]
struct Origin {
    caller: Caller,
    /// The stores of the replicas that it came through.
    path: Vec<ServerId>,
}

impl Service {
    pub(super) async fn add_image(
        self,
        caller: Caller,
        request: AddImageRequest,
    ) -> Result<AddImageReply, Fault> {
        self.change::<AddImage, _>(caller, request, Self::add_here).await
    }

    pub(super) async fn copy_image(
        self,
        caller: Caller,
        request: CopyImageRequest,
    ) -> Result<AddImageReply, Fault> {
        self.change::<CopyImage, _>(caller, request, Self::copy_here).await
    }

    pub(super) async fn delete_image(
        self,
        caller: Caller,
        request: DeleteImageRequest,
    ) -> Result<Done, Fault> {
        self.change::<DeleteImage, _>(caller, request, Self::delete_here).await
    }

    pub(super) async fn change_tags(
        self,
        caller: Caller,
        request: ChangeTagsRequest,
    ) -> Result<ChangeTagsReply, Fault> {
        self.change::<ChangeTags, _>(caller, request, Self::change_tags_here).await
    }

    pub(super) async fn change_expiry(
        self,
        caller: Caller,
        request: ChangeExpiryRequest,
    ) -> Result<ChangeExpiryReply, Fault> {
        self.change::<ChangeExpiry, _>(caller, request, Self::change_expiry_here).await
    }

    pub(super) async fn make_directory(
        self,
        caller: Caller,
        request: MakeDirectoryRequest,
    ) -> Result<MakeDirectoryReply, Fault> {
        self.change::<MakeDirectory, _>(caller, request, Self::make_directory_here).await
    }

    pub(super) async fn remove_directory(
        self,
        caller: Caller,
        request: RemoveDirectoryRequest,
    ) -> Result<Done, Fault> {
        self.change::<RemoveDirectory, _>(caller, request, Self::remove_directory_here).await
    }

    pub(super) async fn change_owner(
        self,
        caller: Caller,
        request: ChangeOwnerRequest,
    ) -> Result<Done, Fault> {
        self.change::<ChangeOwner, _>(caller, request, Self::change_owner_here).await
    }

    pub(super) async fn change_signatures(
        self,
        caller: Caller,
        request: ChangeSignaturesRequest,
    ) -> Result<ChangeSignaturesReply, Fault> {
        self.change::<ChangeSignatures, _>(caller, request, Self::change_signatures_here).await
    }

    /// Makes a change by `here`, or forwards it to the master if this server is a replica.
    async fn change<M, F>(
        self,
        caller: Caller,
        request: M::Request,
        here: impl FnOnce(Self, Caller, M::Request) -> F,
    ) -> Result<M::Reply, Fault>
    where
        M: ForwardedMethod,
        F: Future<Output = Result<M::Reply, Fault>>,
    {
        if self.replication.follower().is_none() {
            return here(self, caller, request).await;
        }
        let origin = Origin { caller, path: Vec::new() };
        let reply = self.write(origin, M::write(request)).await?;
        let other = || Fault::new(FaultCode::Internal, "the master answered another call");
        M::reply(reply.written).ok_or_else(other)
    }

    /// Takes a change from a replica.
    pub(super) async fn forward(
        self,
        caller: Caller,
        request: ForwardRequest,
    ) -> Result<ForwardReply, Fault> {
        let ForwardRequest { path, origin, write } = request;
        let bad = |text: String| Err(Fault::new(FaultCode::BadRequest, text));
        let Ok(address) = origin.address.parse::<SocketAddr>() else {
            return bad("the caller of a change that is sent on is an address and port".to_owned());
        };
        if path.len() > SERVERS_MAX {
            return bad(format!("a change passes through {SERVERS_MAX} servers at most"));
        }
        if path.contains(self.replication.id()) {
            return bad(format!(
                "the change came back to a server that has sent it on (store {}): these servers \
                 follow each other in a circle. Start one of them without --replicate-from",
                self.replication.id()
            ));
        }
        // No more than this change needs.
        let powers = match origin.has_power {
            true => Powers::new([write.method()]),
            false => Powers::default(),
        };
        let identity = Identity { user: origin.user, groups: origin.groups, powers, zone: None };
        let identity = Arc::new(identity);
        let origin = Origin { caller: Caller { address, identity, ..caller }, path };
        self.write(origin, write).await
    }

    /// Carries a change out, here or on the master. It is finished even if the caller goes away.
    async fn write(self, origin: Origin, write: Write) -> Result<ForwardReply, Fault> {
        let tasks = self.tasks.clone();
        let work = tasks.spawn(async move {
            match self.replication.follower().cloned() {
                None => self.write_here(origin.caller, write).await,
                Some(follower) => {
                    let stop = self.stop.clone();
                    tokio::select! {
                        reply = self.write_above(&follower, origin, write) => reply,
                        () = stop.cancelled() => {
                            let text = "the image server stops: it may have been done on its \
                                        master or not, so look before you try again";
                            Err(Fault::new(FaultCode::Unavailable, text))
                        }
                    }
                }
            }
        });
        joined(work.await)?
    }

    async fn write_here(self, caller: Caller, write: Write) -> Result<ForwardReply, Fault> {
        let store = Arc::clone(&self.store);
        let get = |service: Self, name: ImageName| async move {
            service
                .get_image(GetImageRequest { name, wait_ms: 0 })
                .await
                .map(Box::new)
                .map(Written::Image)
        };
        let written = match write {
            Write::Add(request) => {
                let name = request.content.name.clone();
                self.clone().add_here(caller, *request).await?;
                get(self, name).await?
            }
            Write::Copy(request) => {
                let name = request.to.clone();
                self.clone().copy_here(caller, request).await?;
                get(self, name).await?
            }
            Write::Delete(request) => {
                self.delete_here(caller, request).await?;
                Written::Deleted
            }
            Write::Tags(request) => Written::Tags(self.change_tags_here(caller, request).await?),
            Write::Expiry(request) => {
                Written::Expiry(self.change_expiry_here(caller, request).await?)
            }
            Write::MakeDirectory(request) => {
                Written::Made(self.make_directory_here(caller, request).await?)
            }
            Write::RemoveDirectory(request) => {
                self.remove_directory_here(caller, request).await?;
                Written::Directories
            }
            Write::ChangeOwner(request) => {
                self.change_owner_here(caller, request).await?;
                Written::Directories
            }
            Write::Signatures(request) => {
                Written::Signatures(self.change_signatures_here(caller, request).await?)
            }
        };
        Ok(forwarded(&store, written))
    }

    async fn write_above(
        self,
        follower: &Arc<Follower>,
        origin: Origin,
        write: Write,
    ) -> Result<ForwardReply, Fault> {
        if follower.link() == Link::Loop {
            let text = "nothing can be changed: this server follows itself, over others or not; \
                        `imagetool replication` says more";
            return Err(Fault::new(FaultCode::Unavailable, text));
        }
        let is_forced = matches!(&write, Write::Delete(request) if request.force);
        let (name, done) = (write.name().clone(), write.done());
        let is_of_image = !is_of_directories(&write);
        self.judge_above(&origin.caller, &write).await?;
        match &write {
            Write::Add(request) => self.prepare_above(follower, request).await?,
            Write::Delete(request) if !request.force => expect_unused(&self.store, &name)?,
            _ => {}
        }
        if is_forced {
            follower.force(&name);
        }
        let mut path = origin.path;
        path.push(self.replication.id().clone());
        let Caller { address: caller, identity, .. } = origin.caller;
        let origin = replication::Origin {
            address: caller.to_string(),
            user: identity.user.clone(),
            groups: identity.groups.clone(),
            has_power: identity.powers.has(write.method()),
        };
        let request = ForwardRequest { path, origin, write };
        let reply = follower.fetch_client().call_within::<Forward>(&request, FORWARD_LIMIT).await;
        let reply = reply.map_err(|error| {
            follower.unforce(&name);
            let mut fault = refused(follower, &error);
            if is_of_image
                && fault.code == FaultCode::NotFound
                && self.store.images.digest(&name).is_some()
            {
                fault.message.push_str(
                    "; this replica has one of its own, which `imagetool delete --local` removes",
                );
            }
            fault
        })?;
        let master = follower.master();
        tracing::info!(%name, by = %caller, %master, "{done} on the master");
        if let Written::Image(image) = &reply.written
            && image.content.name == name
            && follower.rules().follow(&name)
            && let Err(why) = follower.receive(image.as_ref().clone()).await
        {
            // It is on the master, which tells of it, so that it is tried again.
            tracing::warn!(image = %name, "it is on the master, and not here yet: {why}");
        }
        if is_of_image {
            follower.settled(&name, reply.cursor, SETTLE_LIMIT).await;
        } else {
            follower.directories_settled(reply.directories, SETTLE_LIMIT).await;
        }
        Ok(forwarded(&self.store, reply.written))
    }

    /// Refuses what this server would begin in its own name, or as one who may, before the master
    /// has judged. It has the owners of directories, too; of what is not here it knows nothing.
    async fn judge_above(&self, caller: &Caller, write: &Write) -> Result<(), Fault> {
        match write {
            Write::Add(request) => {
                expect_may_add::<AddImage>(&self.store, caller, &request.content.name)
            }
            Write::Delete(DeleteImageRequest { name, .. })
                if self.store.images.digest(name).is_some() =>
            {
                let (by, deleted) = (caller.clone(), name.clone());
                let judge =
                    move |store: &Store| Ok(expect_may_change::<DeleteImage>(store, &by, &deleted));
                self.blocking(judge).await?
            }
            _ => Ok(()),
        }
    }

    /// Looks through a new image, and sends the master what it lacks of it.
    async fn prepare_above(
        &self,
        follower: &Arc<Follower>,
        request: &AddImageRequest,
    ) -> Result<(), Fault> {
        let place = Arc::clone(&self.admissions).acquire_owned().await;
        let place = place.expect("the semaphore is never closed");
        let store = Arc::clone(&self.store);
        let (content, log) = (request.content.clone(), request.notes.build_log);
        let work = self.tasks.spawn_blocking(move || {
            let needs = needs(&store, &content, log);
            drop(place);
            needs
        });
        let needs = joined(work.await)??;
        self.send(follower, needs).await
    }

    /// Sends those of `ids` that the master lacks.
    async fn send(&self, follower: &Arc<Follower>, ids: Vec<ObjectId>) -> Result<(), Fault> {
        let client = follower.fetch_client();
        for _ in 0..ROUNDS_MAX {
            let mut missing = Vec::new();
            for ids in ids.chunks(IDS_MAX) {
                let request =
                    CheckObjectsRequest { ids: ids.to_vec(), lease_seconds: LEASE_SECONDS };
                let reply = client.call::<CheckObjects>(&request).await;
                missing.extend(reply.map_err(|error| refused(follower, &error))?.missing);
            }
            if missing.is_empty() {
                return Ok(());
            }
            let place = self.downloads.own().await;
            let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
            let packers = client.may_pack().then(|| self.packers.clone());
            let body = download::objects(store, counters, packers, place, missing);
            let sent = client.upload::<AddObjects>(body).await;
            sent.map_err(|error| refused(follower, &error))?;
        }
        let text = format!("the master {} does not keep what it is sent", follower.master());
        Err(Fault::new(FaultCode::Unavailable, text))
    }
}

/// True if a change is one of directories, which come to a replica as a whole.
fn is_of_directories(write: &Write) -> bool {
    matches!(write, Write::MakeDirectory(_) | Write::RemoveDirectory(_) | Write::ChangeOwner(_))
}

/// What a replica is told that sent a change on, as it shows in `store` now.
fn forwarded(store: &Store, written: Written) -> ForwardReply {
    let directories = store.directories.now().version();
    ForwardReply { written, cursor: store.images.cursor(), directories }
}

/// All objects that an image needs, which are all here.
fn needs(store: &Store, content: &Content, log: Option<ObjectId>) -> Result<Vec<ObjectId>, Fault> {
    let name = &content.name;
    let store_fault = |error: StoreError| fault_of_store(&error);
    // One that is here and not on the master may be added there.
    if store.images.digest(name) != Some(content.digest()) {
        store.images.expect_new(name).map_err(store_fault)?;
    }
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    admit(&*store.objects, content).map_err(|error| fault_of_admission(&error))?;
    if let Some(id) = log
        && store.objects.held(&id).map_err(store_fault)?.is_none()
    {
        let text = format!("object {id}, the build log, is not on this server: upload it first");
        return Err(Fault::new(FaultCode::NotFound, text));
    }
    let mut all = All { objects: &*store.objects, ids: log.into_iter().collect() };
    let lacks = Survey::default().lacks(content.root, &mut all).map_err(store_fault)?;
    match lacks.first() {
        None => Ok(all.ids.into_iter().collect()),
        Some(id) => Err(Fault::new(FaultCode::NotFound, format!("object {id} was lost meanwhile"))),
    }
}

/// Notes all that a tree names.
struct All<'store> {
    objects: &'store dyn Objects,
    ids: BTreeSet<ObjectId>,
}

impl Holds for All<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        self.ids.insert(*id);
        // Why it cannot be read was said when the image was looked through.
        Ok(read_directory(self.objects, *id).ok())
    }

    fn has(&mut self, id: &ObjectId, _: u64) -> Result<bool, StoreError> {
        self.ids.insert(*id);
        Ok(true)
    }
}

/// What a caller is told if the master did not do it.
fn refused(follower: &Follower, error: &CallError) -> Fault {
    let master = follower.master();
    match error {
        CallError::Fault { source, .. } => {
            let text = format!("{} (says {master}, the master of this replica)", source.message);
            Fault::new(source.code, text)
        }
        CallError::Connect { .. } => {
            let text = format!(
                "this server is a replica of {master}, which decides on changes and cannot be \
                 reached, so that nothing was changed; images can be read here all the same: {}",
                report(error)
            );
            Fault::new(FaultCode::Unavailable, text)
        }
        _ => {
            let text = format!(
                "this server is a replica of {master}, which decides on changes and did not \
                 answer: it may have been done or not, so look before you try again: {}",
                report(error)
            );
            Fault::new(FaultCode::Unavailable, text)
        }
    }
}
