//! `ImageServer`: directories and their owners.

use api::Done;
use api::access::{OwnedItem, Owners, authorize, authorize_owners};
use api::fault::{Fault, FaultCode};
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, ListDirectoriesReply, ListDirectoriesRequest, MakeDirectory,
    MakeDirectoryReply, MakeDirectoryRequest, RemoveDirectory, RemoveDirectoryRequest,
};
use api::image_server::replication::directories::PAGE_DIRECTORIES_MAX;
use api::method::Method;
use model::display::error_chain;
use model::image::ImageName;
use rpc::server::Caller;
use system::clock::wall;

use super::{Service, denied};
use crate::core::directories::readers::ReadersError;
use crate::core::directories::{Directories, DirectoryError};
use crate::store::Store;
use crate::store::directories::DirectoriesChangeError;
use crate::store::error::{fault_of_store, joined};

impl Service {
    pub(super) async fn make_directory(
        self,
        caller: Caller,
        request: MakeDirectoryRequest,
    ) -> Result<MakeDirectoryReply, Fault> {
        let MakeDirectoryRequest { name, parents, owners } = request;
        let by = caller.to_string();
        let made = self.change_directories(move |store, directories| {
            // Judged first, so that the reply does not show which directories exist. A new
            // directory has no owners: the owners of the directory above the outermost new one may
            // make all of them.
            let (method, access) = (MakeDirectory::NAME, MakeDirectory::ACCESS);
            let about = format!("directory {name}");
            let mut owned = directories.owned_above(&name);
            owned.extend(directories.owned(&name));
            authorize(method, access, &caller.identity, &about, &owned)?;
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

    pub(super) async fn remove_directory(
        self,
        caller: Caller,
        request: RemoveDirectoryRequest,
    ) -> Result<Done, Fault> {
        let RemoveDirectoryRequest { name } = request;
        let (removed, by) = (name.clone(), caller.to_string());
        let done = self.change_directories(move |store, directories| {
            let (above, own) = chain(directories, &name);
            let owned: Vec<OwnedItem> = [own].into_iter().chain(above).collect();
            let (method, access) = (RemoveDirectory::NAME, RemoveDirectory::ACCESS);
            authorize(method, access, &caller.identity, &owned[0].what, &owned)?;
            Ok(directories.remove(&name, store.images.count_below(&name))?)
        });
        done.await?;
        tracing::info!(directory = %removed, %by, "removed a directory");
        Ok(Done {})
    }

    pub(super) async fn change_owner(
        self,
        caller: Caller,
        request: ChangeOwnerRequest,
    ) -> Result<Done, Fault> {
        let ChangeOwnerRequest { name, owners } = request;
        let (changed, words, by) = (name.clone(), owners.in_words(), caller.to_string());
        let done = self.change_directories(move |store, directories| {
            let (above, own) = chain(directories, &name);
            authorize_owners(ChangeOwner::NAME, &caller.identity, &above, &own, &owners)?;
            let has_images = |one: &ImageName| store.images.count_below(one) > 0;
            Ok(directories.give(&name, owners, wall(), has_images)?)
        });
        done.await?;
        tracing::info!(directory = %changed, owners = words, %by, "changed the owners");
        Ok(Done {})
    }

    pub(super) async fn list_directories(
        self,
        caller: Caller,
        request: ListDirectoriesRequest,
    ) -> Result<ListDirectoriesReply, Fault> {
        let reader = self.reader(&caller);
        self.blocking(move |store| {
            let (directories, more) = store.directories.now().list(
                |directory| reader.may_read_directory(directory),
                &store.images.sums(&reader),
                (request.below.as_ref(), request.after.as_ref()),
                PAGE_DIRECTORIES_MAX,
            );
            Ok(ListDirectoriesReply { directories, more })
        })
        .await
    }

    /// Changes the directories on a thread that may block, also if the caller disconnects.
    pub(super) async fn change_directories<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Store, &mut Directories) -> Result<T, DirectoriesChangeError>
        + Send
        + 'static,
    ) -> Result<T, Fault> {
        let store = std::sync::Arc::clone(&self.store);
        let changing = move || store.directories.change(|directories| change(&store, directories));
        let done = self.tasks.spawn_blocking(changing).await;
        joined(done)?.map_err(|error| fault_of_directories(&error))
    }
}

/// Returns the owners of the directories above `name`, and of `name` itself.
pub(super) fn chain(directories: &Directories, name: &ImageName) -> (Vec<OwnedItem>, OwnedItem) {
    let none = || OwnedItem { what: format!("directory {name}"), owners: Owners::default() };
    (directories.owned_above(name), directories.owned(name).unwrap_or_else(none))
}

/// Returns the fault for a directory that refuses a change.
pub(super) fn fault_of_directory(error: &DirectoryError) -> Fault {
    let code = match error {
        DirectoryError::Exists { .. } => FaultCode::Exists,
        DirectoryError::NotFound { .. } | DirectoryError::NoParent { .. } => FaultCode::NotFound,
        DirectoryError::NotEmpty { .. } => FaultCode::Held,
        DirectoryError::Owners { .. }
        | DirectoryError::Name(_)
        | DirectoryError::NotMade { .. }
        | DirectoryError::Readers(ReadersError::Pattern { .. }) => FaultCode::BadRequest,
        DirectoryError::Readers(ReadersError::Absent { .. }) => FaultCode::NotFound,
        DirectoryError::Readers(ReadersError::TooLong { .. }) => FaultCode::TooLarge,
        DirectoryError::TooMany => FaultCode::TooLarge,
    };
    Fault::new(code, error_chain(error))
}

fn fault_of_directories(error: &DirectoriesChangeError) -> Fault {
    match error {
        DirectoriesChangeError::Directory(error) => fault_of_directory(error),
        DirectoriesChangeError::Denied(error) => denied(error),
        DirectoriesChangeError::Store(error) => fault_of_store(error),
        DirectoriesChangeError::TooLong => Fault::new(FaultCode::TooLarge, error_chain(error)),
        DirectoriesChangeError::Damaged { .. } | DirectoriesChangeError::Encode { .. } => {
            let text = error_chain(error);
            tracing::error!("{text}");
            Fault::new(FaultCode::Unavailable, text)
        }
    }
}
