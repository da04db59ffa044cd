//! Changes of images and directories: made here, or forwarded to the master by a replica.
//!
//! Only the master decides, so a name is never used twice. A replica first uploads the objects of a
//! new image that the master lacks, then forwards the call, and then makes the same change locally.
//! The same change may also arrive through replication at the same time, with the same result.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::access::{Identity, IdentityKind, Powers};
use api::fault::{Fault, FaultCode};
use api::image_server::replication::{
    Forward, ForwardOrigin, ForwardReply, ForwardRequest, ForwardedMethod, ForwardedWrite,
    LinkState, SERVERS_MAX, ServerId, WriteReply,
};
use api::image_server::{
    AddImage, AddImageRequest, DeleteImage, DeleteImageRequest, GetImageRequest,
};
use api::object_server::{AddObjects, CheckObjects, CheckObjectsRequest, IDS_MAX};
use daemon::memory::FreedMemory;
use model::display::error_chain;
use model::image::{Content, ImageName};
use model::object::ObjectId;
use rpc::client::CallError;
use rpc::server::Caller;

use super::expiry::expect_unused;
use super::images::fault_of_admission;
use super::{Service, download, expect_may_add};
use crate::core::missing_objects::{MissingObjects, ObjectLookup};
use crate::replication::follower::Follower;
use crate::store::Store;
use crate::store::contract::Objects;
use crate::store::error::{StoreError, fault_of_store, joined};
use crate::store::image_trees::{check_tree_for, read_directory};
use crate::store::private_images::Reader;

/// How long the master may take for a change: it walks the whole tree of an image.
const FORWARD_LIMIT: Duration = Duration::from_secs(600);

/// How long the master holds the objects of a forwarded image, in seconds.
const LEASE_SECONDS: u32 = 24 * 3_600;

/// How often objects are sent that the master lacks, or has lost again meanwhile.
const ROUNDS_MAX: u32 = 3;

/// How long a caller waits until a change of the master is visible here.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// The origin of a change.
#[derive(Clone)]
struct Origin {
    caller: Caller,
    /// What the objects of a new image are judged by: what the caller may use, or the replica that
    /// has sent the change on, which has judged its caller.
    reader: Reader,
    /// The stores of the replicas that forwarded the change.
    path: Vec<ServerId>,
}

impl Service {
    /// Makes a change by `here`, or forwards it to the master if this server is a replica.
    pub(super) async fn change<M, F>(
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
        let origin = Origin { reader: self.reader(&caller), caller, path: Vec::new() };
        let reply = self.write(origin, M::write(request)).await?;
        let other = || Fault::new(FaultCode::Internal, "the master answered another call");
        M::reply(reply.written).ok_or_else(other)
    }

    /// Handles a change that a replica has forwarded.
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
        let reader = self.reader(&caller);
        if let ForwardedWrite::Add(_) | ForwardedWrite::Copy(_) = &write
            && !reader.may_follow(write.name())
        {
            // It would have the image without knowing that it is private.
            let text = format!(
                "image {} would be private, and the replica that sent this on may not have private \
                 images: ask its master",
                write.name()
            );
            return Err(Fault::new(FaultCode::Denied, text));
        }
        // Only the power that this change needs.
        let powers = match origin.has_power {
            true => Powers::new([write.method()]),
            false => Powers::default(),
        };
        // The replica has left out the groups of a caller that cannot be an owner.
        let identity = Identity {
            user: origin.user,
            kind: IdentityKind::User,
            groups: origin.groups,
            powers,
            zone: None,
        };
        let identity = Arc::new(identity);
        let caller = Caller { address, identity, ..caller };
        let origin = Origin { caller, reader, path };
        self.write(origin, write).await
    }

    /// Makes a change here or on the master. It is finished even if the caller disconnects.
    async fn write(self, origin: Origin, write: ForwardedWrite) -> Result<ForwardReply, Fault> {
        let tasks = self.tasks.clone();
        let work = tasks.spawn(async move {
            match self.replication.follower().cloned() {
                None => self.write_locally(origin, write).await,
                Some(follower) => {
                    let stop = self.stop.clone();
                    tokio::select! {
                        reply = self.write_on_master(&follower, origin, write) => reply,
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

    async fn write_locally(
        self,
        origin: Origin,
        write: ForwardedWrite,
    ) -> Result<ForwardReply, Fault> {
        let Origin { caller, reader, .. } = origin;
        let store = Arc::clone(&self.store);
        let get = |service: Self, name: ImageName| async move {
            service
                .get_image_for(None, GetImageRequest { name, wait_ms: 0 })
                .await
                .map(Box::new)
                .map(WriteReply::Image)
        };
        let written = match write {
            ForwardedWrite::Add(request) => {
                let name = request.content.name.clone();
                self.clone().add_image_for(reader, caller, *request).await?;
                get(self, name).await?
            }
            ForwardedWrite::Copy(request) => {
                let name = request.to.clone();
                self.clone().copy_image_for(reader, caller, request).await?;
                get(self, name).await?
            }
            ForwardedWrite::Delete(request) => {
                self.delete_image(caller, request).await?;
                WriteReply::Deleted
            }
            ForwardedWrite::Tags(request) => {
                WriteReply::Tags(self.change_tags(caller, request).await?)
            }
            ForwardedWrite::Expiry(request) => {
                WriteReply::Expiry(self.change_expiry(caller, request).await?)
            }
            ForwardedWrite::MakeDirectory(request) => {
                WriteReply::Made(self.make_directory(caller, request).await?)
            }
            ForwardedWrite::RemoveDirectory(request) => {
                self.remove_directory(caller, request).await?;
                WriteReply::Directories
            }
            ForwardedWrite::ChangeOwner(request) => {
                self.change_owner(caller, request).await?;
                WriteReply::Directories
            }
            ForwardedWrite::Signatures(request) => {
                WriteReply::Signatures(self.change_signatures(caller, request).await?)
            }
        };
        Ok(forward_reply(&store, written))
    }

    async fn write_on_master(
        self,
        follower: &Arc<Follower>,
        origin: Origin,
        write: ForwardedWrite,
    ) -> Result<ForwardReply, Fault> {
        if follower.link() == LinkState::Loop {
            let text = "nothing can be changed: this server follows itself, over others or not; \
                        `imagetool replication` says more";
            return Err(Fault::new(FaultCode::Unavailable, text));
        }
        let is_forced = matches!(&write, ForwardedWrite::Delete(request) if request.force);
        let (name, done) = (write.name().clone(), write.done());
        let is_of_image = !is_of_directories(&write);
        self.judge_before_forwarding(&origin, &write).await?;
        match &write {
            ForwardedWrite::Add(request) => {
                self.send_image_objects(follower, &origin.reader, request).await?;
            }
            ForwardedWrite::Delete(request) if !request.force => expect_unused(&self.store, &name)?,
            _ => {}
        }
        if is_forced {
            follower.force(&name);
        }
        let may_read = origin.reader.may_read_image(&name);
        let mut path = origin.path;
        path.push(self.replication.id().clone());
        let caller = origin.caller.address;
        let origin = forward_origin(&origin.caller, write.method());
        let request = ForwardRequest { path, origin, write };
        let reply = follower.fetch_client().call_within::<Forward>(&request, FORWARD_LIMIT).await;
        let reply = reply.map_err(|error| {
            follower.unforce(&name);
            let mut fault = fault_of_master(follower, &error);
            if is_of_image
                && may_read
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
        if let WriteReply::Image(image) = &reply.written
            && image.content.name == name
            && follower.rules().follow(&name)
            && let Err(why) = follower.receive(image.as_ref().clone()).await
        {
            // The master lists the image, so fetching it is tried again.
            tracing::warn!(image = %name, "the image is on the master, but not here yet: {why}");
        }
        if is_of_image {
            follower.settled(&name, reply.cursor, SETTLE_LIMIT).await;
        } else {
            follower.directories_settled(reply.directories, SETTLE_LIMIT).await;
        }
        Ok(forward_reply(&self.store, reply.written))
    }

    /// Judges a change that this server starts in its own name before the master judges it. A
    /// replica knows the owners of directories, and those of images that are here.
    async fn judge_before_forwarding(
        &self,
        Origin { caller, reader, .. }: &Origin,
        write: &ForwardedWrite,
    ) -> Result<(), Fault> {
        match write {
            ForwardedWrite::Copy(request) if !reader.may_read_image(&request.from) => {
                Err(fault_of_store(&StoreError::NotFound { name: request.from.clone() }))
            }
            ForwardedWrite::Add(request) => {
                expect_may_add::<AddImage>(&self.store, caller, &request.content.name)
            }
            ForwardedWrite::Delete(DeleteImageRequest { name, .. })
                if self.store.images.digest(name).is_some() =>
            {
                self.expect_may_change::<DeleteImage>(caller, name).await
            }
            _ => Ok(()),
        }
    }

    /// Checks a new image, and sends the master its missing objects.
    async fn send_image_objects(
        &self,
        follower: &Arc<Follower>,
        reader: &Reader,
        request: &AddImageRequest,
    ) -> Result<(), Fault> {
        let (content, log) = (request.content.clone(), request.notes.build_log);
        let reader = reader.clone();
        let find = move |store: &Store| objects_of_image(store, &reader, &content, log);
        let needed = self.with_tree(find).await?;
        self.send_objects(follower, needed).await
    }

    /// Sends the objects of `ids` that the master lacks.
    async fn send_objects(
        &self,
        follower: &Arc<Follower>,
        ids: Vec<ObjectId>,
    ) -> Result<(), Fault> {
        let client = follower.fetch_client();
        for _ in 0..ROUNDS_MAX {
            let mut missing = Vec::new();
            for ids in ids.chunks(IDS_MAX) {
                let request =
                    CheckObjectsRequest { ids: ids.to_vec(), lease_seconds: LEASE_SECONDS };
                let reply = client.call::<CheckObjects>(&request).await;
                missing.extend(reply.map_err(|error| fault_of_master(follower, &error))?.missing);
            }
            if missing.is_empty() {
                return Ok(());
            }
            let permit = (self.downloads.own().await, FreedMemory::keep());
            let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
            let packers = client.may_pack().then(|| self.packers.clone());
            let body = download::objects(store, counters, packers, permit, missing);
            let sent = client.upload::<AddObjects>(body).await;
            sent.map_err(|error| fault_of_master(follower, &error))?;
        }
        let text = format!("the master {} does not keep what it is sent", follower.master());
        Err(Fault::new(FaultCode::Unavailable, text))
    }
}

/// Describes the caller of a change to the master, which knows no kinds of callers: a machine or
/// service must not be taken for a user.
fn forward_origin(caller: &Caller, method: &str) -> ForwardOrigin {
    let identity = &caller.identity;
    let groups = identity.groups.iter().filter(|_| identity.kind.may_own());
    ForwardOrigin {
        address: caller.address.to_string(),
        user: identity.in_words(),
        groups: groups.cloned().collect(),
        has_power: identity.powers.has(method),
    }
}

/// Returns true if a change is one of directories, which replicas fetch as a whole.
fn is_of_directories(write: &ForwardedWrite) -> bool {
    matches!(
        write,
        ForwardedWrite::MakeDirectory(_)
            | ForwardedWrite::RemoveDirectory(_)
            | ForwardedWrite::ChangeOwner(_)
    )
}

/// Returns the reply to a replica that has forwarded a change.
fn forward_reply(store: &Store, written: WriteReply) -> ForwardReply {
    let directories = store.directories.now().version();
    ForwardReply { written, cursor: store.images.cursor(), directories }
}

/// Returns all objects that an image needs. Fails if one is missing here.
fn objects_of_image(
    store: &Store,
    reader: &Reader,
    content: &Content,
    log: Option<ObjectId>,
) -> Result<Vec<ObjectId>, Fault> {
    let name = &content.name;
    let store_fault = |error: StoreError| fault_of_store(&error);
    // An image that is here but not on the master may be added there.
    if store.images.digest(name) != Some(content.digest()) {
        store.images.expect_new(name).map_err(store_fault)?;
    }
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    check_tree_for(reader, &*store.objects, content).map_err(|error| fault_of_admission(&error))?;
    if let Some(id) = log
        && !reader.missing(&*store.objects, &[id]).map_err(store_fault)?.is_empty()
    {
        let text = format!("object {id}, the build log, is not on this server: upload it first");
        return Err(Fault::new(FaultCode::NotFound, text));
    }
    let mut all = TreeObjects { objects: &*store.objects, ids: log.into_iter().collect() };
    let missing = MissingObjects::default().of_tree(content.root, &mut all).map_err(store_fault)?;
    match missing.first() {
        None => Ok(all.ids.into_iter().collect()),
        Some(id) => Err(Fault::new(FaultCode::NotFound, format!("object {id} was lost meanwhile"))),
    }
}

/// Collects the ids of all objects of a tree.
struct TreeObjects<'store> {
    objects: &'store dyn Objects,
    ids: BTreeSet<ObjectId>,
}

impl ObjectLookup for TreeObjects<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        self.ids.insert(*id);
        // The reason was reported when the tree was checked.
        Ok(read_directory(self.objects, *id).ok())
    }

    fn has(&mut self, id: &ObjectId, _: u64) -> Result<bool, StoreError> {
        self.ids.insert(*id);
        Ok(true)
    }
}

/// Returns the fault for a change that the master did not make.
fn fault_of_master(follower: &Follower, error: &CallError) -> Fault {
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
                error_chain(error)
            );
            Fault::new(FaultCode::Unavailable, text)
        }
        _ => {
            let text = format!(
                "this server is a replica of {master}, which decides on changes and did not \
                 answer: it may have been done or not, so look before you try again: {}",
                error_chain(error)
            );
            Fault::new(FaultCode::Unavailable, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use api::method::Method as _;

    use super::*;

    #[test]
    fn the_master_takes_no_machine_for_a_user() {
        let of = |kind| {
            let address = SocketAddr::from(([192, 0, 2, 1], 7));
            let identity = Identity {
                user: Some("alice".to_owned()),
                kind,
                groups: BTreeSet::from(["web".to_owned()]),
                powers: Powers::new(["*.DeleteImage"]),
                zone: None,
            };
            let identity = Arc::new(identity);
            let caller = Caller { address, local: address, unpacks: false, identity, proof: None };
            forward_origin(&caller, DeleteImage::NAME)
        };
        let want = |user: &str, groups: &[&str]| ForwardOrigin {
            address: "192.0.2.1:7".to_owned(),
            user: Some(user.to_owned()),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
            has_power: true,
        };
        let table = [
            (IdentityKind::User, want("alice", &["web"])),
            (IdentityKind::Unstated, want("alice", &["web"])),
            (IdentityKind::Machine, want("machine alice", &[])),
            (IdentityKind::Service, want("service alice", &[])),
            (IdentityKind::Unknown, want("alice (of an unknown kind)", &[])),
        ];
        for (kind, want) in table {
            assert_eq!(of(kind), want, "{kind:?}");
        }
    }
}
