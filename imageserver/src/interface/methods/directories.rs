//! `ImageServer`: directories and their owners.

use api::Done;
use api::access::{Owned, Owners, judge, judge_owners};
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, ListDirectoriesReply, ListDirectoriesRequest, MakeDirectory,
    MakeDirectoryReply, MakeDirectoryRequest, RemoveDirectory, RemoveDirectoryRequest,
};
use api::image_server::replication::directories::PAGE_DIRECTORIES_MAX;
use api::{
    fault::{Fault, FaultCode},
    method::Method,
};
use model::image::ImageName;
use model::report::report;
use rpc::server::Caller;

use super::Service;
use super::access::denied;
use crate::clock::wall;
use crate::core::directories::{Directories, DirectoryError, Sums};
use crate::store::Store;
use crate::store::directories::KeepError;
use crate::store::error::{fault_of_store, joined};

impl Service {
    pub(super) async fn make_directory_here(
        self,
        caller: Caller,
        request: MakeDirectoryRequest,
    ) -> Result<MakeDirectoryReply, Fault> {
        let MakeDirectoryRequest { name, parents, owners } = request;
        let by = caller.to_string();
        let made = self.change_directories(move |store, directories| {
            // Before anything is told of what there is. What is not made yet has no owners: those
            // of what the outermost new one is in may make all of them.
            let (method, access) = (MakeDirectory::NAME, MakeDirectory::ACCESS);
            let about = format!("directory {name}");
            let mut owned = directories.owned_above(&name);
            owned.extend(directories.owned(&name));
            judge(method, access, &caller.identity, &about, &owned)?;
            let has_images = |one: &ImageName| store.images.count_below(one) > 0;
            let names = directories.to_make(&name, parents, has_images)?;
            Ok(directories.make(&name, names, owners, wall())?)
        });
        let made = made.await?;
        for directory in &made.made {
            tracing::info!(%directory, owners = made.owners.in_words(), %by, "made a directory");
        }
        Ok(made)
    }

    pub(super) async fn remove_directory_here(
        self,
        caller: Caller,
        request: RemoveDirectoryRequest,
    ) -> Result<Done, Fault> {
        let RemoveDirectoryRequest { name } = request;
        let (removed, by) = (name.clone(), caller.to_string());
        let done = self.change_directories(move |store, directories| {
            let (above, own) = chain(directories, &name);
            let owned: Vec<Owned> = [own].into_iter().chain(above).collect();
            let (method, access) = (RemoveDirectory::NAME, RemoveDirectory::ACCESS);
            judge(method, access, &caller.identity, &owned[0].what, &owned)?;
            Ok(directories.remove(&name, store.images.count_below(&name))?)
        });
        done.await?;
        tracing::info!(directory = %removed, %by, "removed a directory");
        Ok(Done {})
    }

    pub(super) async fn change_owner_here(
        self,
        caller: Caller,
        request: ChangeOwnerRequest,
    ) -> Result<Done, Fault> {
        let ChangeOwnerRequest { name, owners } = request;
        let (changed, words, by) = (name.clone(), owners.in_words(), caller.to_string());
        let done = self.change_directories(move |store, directories| {
            let (above, own) = chain(directories, &name);
            judge_owners(ChangeOwner::NAME, &caller.identity, &above, &own, &owners)?;
            let has_images = |one: &ImageName| store.images.count_below(one) > 0;
            Ok(directories.give(&name, owners, wall(), has_images)?)
        });
        done.await?;
        tracing::info!(directory = %changed, owners = words, %by, "changed the owners");
        Ok(Done {})
    }

    pub(super) async fn list_directories(
        self,
        request: ListDirectoriesRequest,
    ) -> Result<ListDirectoriesReply, Fault> {
        self.blocking(move |store| {
            let (below, after) = (request.below.as_ref(), request.after.as_ref());
            let (directories, more) =
                store.directories.now().list(&sums(store), below, after, PAGE_DIRECTORIES_MAX);
            Ok(ListDirectoriesReply { directories, more })
        })
        .await
    }

    /// Changes the directories where it may block, also if the caller goes away.
    async fn change_directories<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Store, &mut Directories) -> Result<T, KeepError> + Send + 'static,
    ) -> Result<T, Fault> {
        let store = std::sync::Arc::clone(&self.store);
        let changing = move || store.directories.change(|directories| change(&store, directories));
        let done = self.tasks.spawn_blocking(changing).await;
        joined(done)?.map_err(|error| fault_of_keeping(&error))
    }
}

/// What `name` is in, and `name` itself, be it made or not.
fn chain(directories: &Directories, name: &ImageName) -> (Vec<Owned>, Owned) {
    let none = || Owned { what: format!("directory {name}"), owners: Owners::default() };
    (directories.owned_above(name), directories.owned(name).unwrap_or_else(none))
}

/// What all images add up to.
pub(crate) fn sums(store: &Store) -> Sums {
    let mut sums = Sums::default();
    store.images.visit(None, |image| sums.count(&image.name, image.totals.bytes));
    sums
}

/// What a caller is told whose image is refused for its directory.
pub(super) fn fault_of_directory(error: &DirectoryError) -> Fault {
    let code = match error {
        DirectoryError::Exists { .. } => FaultCode::Exists,
        DirectoryError::NotFound { .. } | DirectoryError::NoParent { .. } => FaultCode::NotFound,
        DirectoryError::NotEmpty { .. } => FaultCode::Held,
        DirectoryError::Owners { .. } | DirectoryError::Demanded { .. } => FaultCode::BadRequest,
        DirectoryError::TooMany => FaultCode::TooLarge,
    };
    Fault::new(code, report(error))
}

fn fault_of_keeping(error: &KeepError) -> Fault {
    match error {
        KeepError::Directory(error) => fault_of_directory(error),
        KeepError::Denied(error) => denied(error),
        KeepError::Store(error) => fault_of_store(error),
        KeepError::TooLong => Fault::new(FaultCode::TooLarge, report(error)),
        KeepError::Damaged { .. } | KeepError::Encode { .. } => {
            let text = report(error);
            tracing::error!("{text}");
            Fault::new(FaultCode::Unavailable, text)
        }
    }
}
