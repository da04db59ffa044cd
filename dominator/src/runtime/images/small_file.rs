//! Reads small files of images. The tree of an image that is not loaded is not read for that: it
//! takes some ten megabytes, and a few directories are enough.

use std::time::Duration;

use api::object_server::GetObjectsRequest;
use api::object_stream::ObjectHead;
use model::display::error_chain;
use model::image::ImageName;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::encode::{DIRECTORY_BYTES_MAX, Item, list};
use model::tree::{Child, Leaf};

use super::Images;

/// The longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How long it may take to read one.
const READ_LIMIT: Duration = Duration::from_secs(30);

impl Images {
    /// Returns the text of the regular file `path` of the image `name`; an empty one if nothing is
    /// there. The error says why it cannot be read: symlinks are not followed.
    pub async fn small_file(&self, name: &ImageName, path: &TreePath) -> Result<String, String> {
        let read = tokio::time::timeout(READ_LIMIT, self.read_file(name, path)).await;
        let text = read.unwrap_or_else(|_| Err("it takes too long".to_owned()));
        text.map_err(|why| format!("{path} of {name}: {why}"))
    }

    async fn read_file(&self, name: &ImageName, path: &TreePath) -> Result<String, String> {
        let mut leaf = self.leaf(name, path).await?;
        if let Some(Leaf::HardLink(first)) = &leaf {
            leaf = self.leaf(name, first).await?;
        }
        let file = match leaf {
            Some(Leaf::File(file)) => file,
            Some(Leaf::Computed(_)) => return Err("it is a computed file".to_owned()),
            Some(Leaf::Symlink(_)) => return Err("it is a symlink, or below one".to_owned()),
            Some(Leaf::HardLink(_) | Leaf::Special(_)) => {
                return Err("it is no regular file".to_owned());
            }
            None => return Ok(String::new()),
        };
        let content = self.object(file.object.id(), FILE_BYTES_MAX).await?;
        Ok(String::from_utf8_lossy(&content).into_owned())
    }

    /// Finds what is at `path` of the image `name` and is no directory, or the symlink that it is
    /// below.
    async fn leaf(&self, name: &ImageName, path: &TreePath) -> Result<Option<Leaf>, String> {
        if let Some(image) = self.loaded(name) {
            return Ok(match image.tree.get(path) {
                Some(Child::Leaf(leaf)) => Some(leaf),
                Some(Child::Directory(_)) => None,
                None => path.ancestors().find_map(|above| match image.tree.get(&above) {
                    Some(Child::Leaf(Leaf::Symlink(link))) => Some(Leaf::Symlink(link)),
                    _ => None,
                }),
            });
        }
        if name.is_composed() {
            for part in name.parts() {
                if let Some(leaf) = Box::pin(self.leaf(&part, path)).await? {
                    return Ok(Some(leaf));
                }
            }
            return Ok(None);
        }
        let mut at = self.get_content(name).await?.root;
        let mut components = path.components().peekable();
        while let Some(component) = components.next() {
            let bytes = self.object(at, DIRECTORY_BYTES_MAX as u64).await?;
            let listing = list(at.algorithm(), &bytes).map_err(|error| error_chain(&error))?;
            match listing.get(component) {
                Some(Item::Directory(below)) => at = *below,
                Some(Item::Leaf(leaf))
                    if components.peek().is_none() || matches!(leaf, Leaf::Symlink(_)) =>
                {
                    return Ok(Some(leaf.clone()));
                }
                Some(Item::Leaf(_)) | None => break,
            }
        }
        Ok(None)
    }

    pub(super) async fn object(&self, id: ObjectId, bytes_max: u64) -> Result<Vec<u8>, String> {
        let request = GetObjectsRequest { ids: vec![id] };
        let reader = self.client.get_objects(&request).await;
        let mut reader = reader.map_err(|error| error_chain(&error))?;
        match reader.head().await.map_err(|error| error_chain(&error))? {
            ObjectHead::Object { size_bytes, .. } if size_bytes <= bytes_max => {}
            ObjectHead::Object { .. } => return Err("it is too long to be read".to_owned()),
            ObjectHead::Absent(_) | ObjectHead::End => {
                return Err("the image server does not give it".to_owned());
            }
        }
        let mut content = Vec::new();
        while let Some(chunk) = reader.chunk().await.map_err(|error| error_chain(&error))? {
            content.extend_from_slice(&chunk);
        }
        match id.algorithm().digest(&content) == id {
            true => Ok(content),
            false => Err("the image server gives something else".to_owned()),
        }
    }
}
