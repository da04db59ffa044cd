//! `ImageServer`: private directories, and the machines that may read the images below them.

use std::collections::BTreeSet;
use std::ops::Bound;

use api::access::{Access, OwnedItem, authorize};
use api::fault::{Fault, FaultCode};
use api::image_server::private::{
    ChangeReaders, ChangeReadersReply, ChangeReadersRequest, GetPrivateDirectories,
    GetPrivateDirectoriesReply, GetPrivateDirectoriesRequest, PAGE_PRIVATE_MAX, PrivateDirectory,
};
use api::method::Method as _;
use model::image::ImageName;
use rpc::server::Caller;
use system::clock::wall;

use super::directories::chain;
use super::{Service, expect_may};
use crate::core::directories::{Directories, is_below};
use crate::core::private_images::PrivateDirectories;

impl Service {
    pub(super) async fn get_private_directories(
        self,
        caller: Caller,
        request: GetPrivateDirectoriesRequest,
    ) -> Result<GetPrivateDirectoriesReply, Fault> {
        let directories = self.store.directories.now();
        let owned = request.below.as_ref().map(|name| all_owned(&directories, name));
        let about = request.below.as_ref().map(|name| format!("directory {name}"));
        expect_may::<GetPrivateDirectories>(
            &caller,
            &about.unwrap_or_default(),
            &owned.unwrap_or_default(),
        )?;
        let private = self.private_directories();
        Ok(page(&directories, &private, &request))
    }

    pub(super) async fn change_readers(
        self,
        caller: Caller,
        request: ChangeReadersRequest,
    ) -> Result<ChangeReadersReply, Fault> {
        let ChangeReadersRequest { name, add, remove } = request;
        if let Some(follower) = self.replication.follower() {
            let text = format!(
                "this server is a replica, and has the machines of directories from its master: \
                 change them at {}",
                follower.master()
            );
            return Err(Fault::new(FaultCode::BadRequest, text));
        }
        let (changed, by) = (name.clone(), caller.to_string());
        let words = |patterns: &BTreeSet<String>| {
            patterns.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
        };
        let (added, removed) = (words(&add), words(&remove));
        let machines = self.change_directories(move |store, directories| {
            let owned = all_owned(directories, &name);
            let (method, access) = (ChangeReaders::NAME, Access::PowerOrOwner);
            authorize(method, access, &caller.identity, &format!("directory {name}"), &owned)?;
            let has_images = |one: &ImageName| store.images.count_below(one) > 0;
            Ok(directories.change_readers(&name, (add, &remove), wall(), has_images)?)
        });
        let machines = machines.await?;
        tracing::info!(directory = %changed, added, removed, %by, "changed who may read images");
        let is_private = self.private_directories().have(&changed);
        Ok(ChangeReadersReply { machines, is_private })
    }

    fn private_directories(&self) -> PrivateDirectories {
        let private = self.store.private.as_ref();
        private.map(|private| private.directories().clone()).unwrap_or_default()
    }
}

/// Returns the owners of `name` and of the directories above it.
fn all_owned(directories: &Directories, name: &ImageName) -> Vec<OwnedItem> {
    let (above, own) = chain(directories, name);
    [own].into_iter().chain(above).collect()
}

fn page(
    directories: &Directories,
    private: &PrivateDirectories,
    request: &GetPrivateDirectoriesRequest,
) -> GetPrivateDirectoriesReply {
    let mut readers = directories.readers();
    let mut names: BTreeSet<ImageName> = private.names().cloned().collect();
    names.extend(readers.keys().cloned());
    let start = request.after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
    let is_wanted = |name: &&ImageName| {
        request.below.as_ref().is_none_or(|below| *name == below || is_below(name, below))
    };
    let mut rest = names.range::<ImageName, _>((start, Bound::Unbounded)).filter(is_wanted);
    let described = |name: &ImageName| PrivateDirectory {
        name: name.clone(),
        is_private: private.have(name),
        machines: readers.remove(name).unwrap_or_default(),
    };
    let directories_of_page = rest.by_ref().take(PAGE_PRIVATE_MAX).map(described).collect();
    GetPrivateDirectoriesReply {
        version: directories.version(),
        directories: directories_of_page,
        more: rest.next().is_some(),
    }
}
