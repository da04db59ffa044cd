//! Warns of what an image would take from services; see [`crate::service_needs`].
//!
//! The warnings are for people: an image is made also if they cannot be.

use std::io::Read as _;
use std::path::Path;

use api::image_server::notes::{FindLatestImage, FindLatestImageRequest};
use model::accounts::Accounts;
use model::filter::Filter;
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::Tree;

use super::add::print_warnings;
use super::{Context, get_image};
use crate::directory_cache::DirectoryCache;
use crate::image_checks::Warnings;
use crate::service_needs::{
    DroppedDirectory, Found, LostData, Needs, NeedsFile, Survey, dropped_warnings, lost_data,
    owner, partial_warning, renumbered_warning,
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
    let after = Side { root: tree.digest(), filter, files: FilesAt::Server };
    let subject = Subject { after, before: None, dropped, former };
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

/// A tree that is looked at.
pub(super) struct Side<'call> {
    pub root: ObjectId,
    pub filter: Option<&'call Filter>,
    pub files: FilesAt<'call>,
}

/// What is looked at.
pub(super) struct Subject<'call> {
    pub after: Side<'call>,
    /// What it would take already is not told again.
    pub before: Option<Side<'call>>,
    pub dropped: &'call [DroppedDirectory],
    pub former: Option<&'call ImageName>,
}

impl Subject<'_> {
    /// Prints what the image would take from services. Sparse images take nothing.
    pub async fn warn(&self, context: &Context, cache: &mut DirectoryCache) {
        let Some(filter) = self.after.filter else { return };
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
        let (survey, needs, lost) = self.after.look(context, cache, filter).await?;
        let known = match &self.before {
            Some(before @ Side { filter: Some(filter), .. }) => {
                before.look(context, cache, filter).await?.2
            }
            _ => LostData::default(),
        };
        let mut found = lost.warnings(&known);
        found.extend(partial_warning(&survey, &needs));
        found.extend(dropped_warnings(self.dropped, &needs, |path| {
            owner(cache, self.after.root, path)
        }));
        if let Some(former) = self.former
            && let Some(accounts) = accounts_of(context, cache, former).await?
        {
            found.extend(renumbered_warning(&needs.accounts, &accounts, former, filter));
        }
        Ok(found)
    }
}

impl Side<'_> {
    /// Finds what the tree has of services, what they need, and what `filter` would take from them.
    async fn look(
        &self,
        context: &Context,
        cache: &mut DirectoryCache,
        filter: &Filter,
    ) -> Result<(Survey, Needs, LostData), DownloadError> {
        let survey = |cache: &mut DirectoryCache| Survey::of(cache, self.root);
        let (client, meter) = (&context.client, &context.meter);
        let survey = directories::fetch_for(client, cache, meter, survey).await?;
        let needs = self.read(context, &survey).await?;
        let query = |cache: &mut DirectoryCache| {
            lost_data(&survey, &needs, filter, |path| Found::at(cache, self.root, path))
        };
        let lost = directories::fetch_for(client, cache, meter, query).await?;
        Ok((survey, needs, lost))
    }

    /// Reads the files of `survey`.
    async fn read(&self, context: &Context, survey: &Survey) -> Result<Needs, DownloadError> {
        match self.files {
            FilesAt::Server => read_from_server(context, survey).await,
            FilesAt::Archive => Ok(Needs::default()),
            FilesAt::Directory(directory) => {
                let read = |file| Some((file, read_below(directory, file)?));
                let files: Vec<_> = survey.files.iter().filter_map(read).collect();
                Ok(Needs::read(files.iter().map(|(file, content)| (*file, content.as_slice()))))
            }
        }
    }
}

/// Reads a file below `directory`, and not more than it had when it was hashed.
fn read_below(directory: &Path, file: &NeedsFile) -> Option<Vec<u8>> {
    let path = directory.join(file.path.to_string().trim_start_matches('/'));
    let mut content = Vec::new();
    let open = std::fs::File::open(path).ok()?;
    open.take(file.size_bytes).read_to_end(&mut content).ok()?;
    Some(content)
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

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;
    use crate::service_needs::Meaning;

    #[test]
    fn of_a_file_that_has_grown_only_the_size_that_was_counted_is_read() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("etc")).unwrap();
        std::fs::write(place.path().join("etc/passwd"), "root and more").unwrap();
        let (path, object) = ("/etc/passwd".parse().unwrap(), Algorithm::Blake3.digest(b"root"));
        let file = NeedsFile { path, meaning: Meaning::Users, object, size_bytes: 4 };
        assert_eq!(read_below(place.path(), &file), Some(b"root".to_vec()));
    }
}
