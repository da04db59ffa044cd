//! Warns of what an image would take from services; see [`crate::service_needs`].
//!
//! The warnings are for people: an image is made also if they cannot be.

use std::path::Path;

use api::image_server::notes::{FindLatestImage, FindLatestImageRequest};
use model::filter::Filter;
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Tree;

use super::add::print_warnings;
use super::{Context, get_image};
use crate::directory_cache::DirectoryCache;
use crate::image_checks::Warnings;
use crate::service_needs::accounts::Accounts;
use crate::service_needs::{
    DroppedDirectory, Found, Needs, Survey, data_warnings, dropped_warnings, renumbered_warning,
};
use crate::transfer::directories;
use crate::transfer::download::DownloadError;
use crate::transfer::small_files::contents;

/// Returns the newest image in the directory of the new image `name`, if there is one.
pub(super) async fn latest_beside(context: &Context, name: &ImageName) -> Option<ImageName> {
    let (directory, _) = name.as_str().rsplit_once('/')?;
    let directory = ImageName::new(directory).ok()?;
    let request = FindLatestImageRequest { directory, tags: Default::default() };
    context.client.call::<FindLatestImage>(&request).await.ok()?.name
}

/// Warns about a new image, whose objects are on the server. `former` is the image before it.
pub(super) async fn warn(
    context: &Context,
    tree: &Tree,
    filter: Option<&Filter>,
    dropped: &[DroppedDirectory],
    former: Option<&ImageName>,
) {
    let mut cache = DirectoryCache::default();
    cache.insert_tree(tree);
    let subject = Subject { root: tree.digest(), filter, files: FilesAt::Server, dropped, former };
    subject.warn(context, &mut cache).await;
}

/// Where the contents of files are.
pub(super) enum FilesAt<'call> {
    Server,
    /// Below a local directory.
    Directory(&'call Path),
    /// In an archive, which is not read again.
    Archive,
}

/// What is looked at.
pub(super) struct Subject<'call> {
    pub root: ObjectId,
    pub filter: Option<&'call Filter>,
    pub files: FilesAt<'call>,
    pub dropped: &'call [DroppedDirectory],
    pub former: Option<&'call ImageName>,
}

impl Subject<'_> {
    /// Prints what the image would take from services. Sparse images take nothing.
    pub async fn warn(&self, context: &Context, cache: &mut DirectoryCache) {
        let Some(filter) = self.filter else { return };
        match self.warnings(context, cache, filter).await {
            Ok(found) => print_warnings(&found),
            Err(error) => {
                let error = model::display::error_chain(&error);
                eprintln!("warning: what services need was not looked at: {error}");
            }
        }
    }

    async fn warnings(
        &self,
        context: &Context,
        cache: &mut DirectoryCache,
        filter: &Filter,
    ) -> Result<Warnings, DownloadError> {
        let survey = |cache: &mut DirectoryCache| Survey::of(cache, self.root);
        let (client, meter) = (&context.client, &context.meter);
        let survey = directories::fetch_for(client, cache, meter, survey).await?;
        let needs = self.read(context, &survey).await?;
        let query = |cache: &mut DirectoryCache| {
            data_warnings(&survey, &needs, filter, |path| Found::at(cache, self.root, path))
        };
        let mut found = directories::fetch_for(client, cache, meter, query).await?;
        found.extend(dropped_warnings(self.dropped, &needs));
        if let Some(former) = self.former
            && let Some(accounts) = accounts_of(context, cache, former).await?
        {
            found.extend(renumbered_warning(&needs.accounts, &accounts, former, filter));
        }
        Ok(found)
    }

    /// Reads the files of `survey`.
    async fn read(&self, context: &Context, survey: &Survey) -> Result<Needs, DownloadError> {
        match self.files {
            FilesAt::Server => read_from_server(context, survey).await,
            FilesAt::Archive => Ok(Needs::default()),
            FilesAt::Directory(directory) => {
                let files = survey.files.iter().filter_map(|file| {
                    let path = directory.join(file.path.to_string().trim_start_matches('/'));
                    Some((file, std::fs::read(path).ok()?))
                });
                let files: Vec<_> = files.collect();
                Ok(Needs::read(files.iter().map(|(file, content)| (*file, content.as_slice()))))
            }
        }
    }
}

async fn read_from_server(context: &Context, survey: &Survey) -> Result<Needs, DownloadError> {
    let files: Vec<_> = survey.files.iter().map(|file| (file.object, file.size_bytes)).collect();
    let contents = contents(&context.client, "Reading units", &files, &context.meter).await?;
    Ok(Needs::read(survey.files.iter().zip(contents.iter().map(Vec::as_slice))))
}

/// Reads the users and groups of an image; `None` if it is not there any more.
async fn accounts_of(
    context: &Context,
    cache: &mut DirectoryCache,
    name: &ImageName,
) -> Result<Option<Accounts>, DownloadError> {
    let Ok(image) = get_image(&context.client, name).await else { return Ok(None) };
    let root = image.content.root;
    let query = |cache: &mut DirectoryCache| Survey::of_accounts(cache, root);
    let survey = directories::fetch_for(&context.client, cache, &context.meter, query).await?;
    Ok(Some(read_from_server(context, &survey).await?.accounts))
}
