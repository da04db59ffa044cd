//! Reads trees and images over the network, asking only for directories that are not known yet:
//! for the dominator, and for tools that do on one machine what it does on all.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::client::{CallError, Client, StreamError};
use crate::trees::sub_reading::SubReading;
use api::fault::FaultCode;
use api::image_server::{GetImage, GetImageRequest};
use api::object_server::{GetObjectsRequest, IDS_MAX};
use api::object_stream::ObjectHead;
use model::display::error_chain;
use model::image::required::RequiredImage;
use model::image::{ImageError, ImageName};
use model::lock::locked;
use model::object::ObjectId;
use model::tree::assembly::Assembly;
use model::tree::blocks::BlockError;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use model::tree::{Child, Directory, Tree, TreeError};

mod sub_reading;

/// The most bytes of directories of one tree that are read.
const TREE_BYTES_MAX: usize = 1 << 30;

/// How many trees are read from subs at one time. When a whole fleet connects at once the others
/// then share what the first have read.
const READERS: usize = 64;

/// How long a sub may hold one of the [`READERS`] permits; slow ones continue without.
const PERMIT_LIMIT: Duration = Duration::from_secs(5);

/// Why a tree could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeReadError {
    #[error("cannot get directories")]
    Call {
        #[source]
        source: CallError,
    },
    #[error("cannot get directories")]
    Stream {
        #[source]
        source: StreamError,
    },
    #[error("the tree has changed while it was read")]
    Changed,
    #[error("the reply has none of the requested directories")]
    Nothing,
    #[error("the blocks of directory {digest} are not valid")]
    Blocks {
        digest: ObjectId,
        #[source]
        source: BlockError,
    },
    #[error("directory {digest} is not on the image server")]
    Absent { digest: ObjectId },
    #[error("the directories of the tree take more than {TREE_BYTES_MAX} bytes")]
    TooLarge,
    #[error("the directories are not a valid tree")]
    Tree {
        #[source]
        source: TreeError,
    },
    #[error("the program is stopping")]
    Stopping,
}

/// Reads trees, and shares directories between them.
#[derive(Debug)]
pub struct TreeReader {
    /// All known directories.
    pub store: DirectoryStore,
    /// Permits for work that keeps a processor busy.
    pub processors: Arc<Semaphore>,
    read_permits: Semaphore,
}

impl TreeReader {
    /// Returns a reader with an empty store that keeps at most `processors` processors busy.
    #[must_use]
    pub fn new(processors: usize) -> Self {
        Self {
            store: DirectoryStore::default(),
            processors: Arc::new(Semaphore::new(processors)),
            read_permits: Semaphore::new(READERS),
        }
    }

    /// Runs `work`, which takes processor time, on a thread for blocking work.
    ///
    /// # Errors
    ///
    /// [`TreeReadError::Stopping`] if the runtime goes away meanwhile.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, TreeReadError> {
        let permit = Arc::clone(&self.processors).acquire_owned().await;
        let permit = permit.map_err(|_| TreeReadError::Stopping)?;
        let work = move || {
            let result = work();
            drop(permit);
            result
        };
        tokio::task::spawn_blocking(work).await.map_err(|_| TreeReadError::Stopping)
    }

    /// Reads the tree called `root` from a sub. `former` is a tree that it had before, or this one,
    /// if one is known: what is in it is not sent again.
    pub async fn from_sub(
        self: &Arc<Self>,
        client: &Client,
        root: ObjectId,
        former: Option<&Tree>,
    ) -> Result<Tree, TreeReadError> {
        // Most machines have the tree of an image. Hard links lead anywhere in a tree, so one that
        // has some, and is known as a part of another, is checked.
        if let Some(known) = self.store.get(&root).filter(|known| known.totals().hard_links == 0) {
            return Ok(Tree::new(known));
        }
        if let Some(former) = former.filter(|former| former.digest() == root) {
            return Ok(former.clone());
        }
        let known = Assembly::new(root, |digest| self.store.get(digest));
        if known.wanted().is_empty() {
            return self.finish(known).await;
        }
        // Others may have read the same while this one waits for its permit.
        let mut read = Box::pin(async { SubReading::new(self, client, root, former).run().await });
        let permit = self.read_permits.acquire().await.map_err(|_| TreeReadError::Stopping)?;
        if let Ok(result) = tokio::time::timeout(PERMIT_LIMIT, &mut read).await {
            return result;
        }
        drop(permit);
        read.await
    }

    /// Reads the tree called `root` from the image server.
    pub async fn from_image_server(
        self: &Arc<Self>,
        client: &Client,
        root: ObjectId,
    ) -> Result<Tree, TreeReadError> {
        let mut assembly = Assembly::new(root, |digest| self.store.get(digest));
        let mut bytes_read = 0;
        loop {
            let mut ids = assembly.wanted();
            if ids.is_empty() {
                return self.finish(assembly).await;
            }
            ids.truncate(IDS_MAX);
            let batch = objects(client, ids, &mut bytes_read).await?;
            assembly = self.insert(assembly, batch).await?;
        }
    }

    async fn insert(
        self: &Arc<Self>,
        mut assembly: Assembly,
        batch: Vec<Vec<u8>>,
    ) -> Result<Assembly, TreeReadError> {
        let reader = Arc::clone(self);
        self.compute(move || {
            for bytes in batch {
                assembly
                    .insert(bytes, |digest| reader.store.get(digest))
                    .map_err(|source| TreeReadError::Tree { source })?;
            }
            Ok(assembly)
        })
        .await?
    }

    async fn finish(self: &Arc<Self>, assembly: Assembly) -> Result<Tree, TreeReadError> {
        let reader = Arc::clone(self);
        self.compute(move || {
            let tree = assembly.finish().map_err(|source| TreeReadError::Tree { source })?;
            reader.store.share(&tree);
            Ok(tree)
        })
        .await?
    }
}

/// Gets objects that are directories; all of them, or an error.
async fn objects(
    client: &Client,
    ids: Vec<ObjectId>,
    bytes_read: &mut usize,
) -> Result<Vec<Vec<u8>>, TreeReadError> {
    let stream = |source| TreeReadError::Stream { source };
    let request = GetObjectsRequest { ids };
    let mut reader =
        client.get_objects(&request).await.map_err(|source| TreeReadError::Call { source })?;
    let mut batch = Vec::new();
    loop {
        match reader.head().await.map_err(stream)? {
            ObjectHead::End if batch.is_empty() => return Err(TreeReadError::Nothing),
            ObjectHead::End => return Ok(batch),
            ObjectHead::Absent(digest) => return Err(TreeReadError::Absent { digest }),
            ObjectHead::Object { size_bytes, .. } => {
                if size_bytes > DIRECTORY_BYTES_MAX as u64 {
                    return Err(TreeReadError::TooLarge);
                }
                let mut bytes = Vec::new();
                while let Some(chunk) = reader.chunk().await.map_err(stream)? {
                    bytes.extend_from_slice(&chunk);
                }
                *bytes_read += bytes.len();
                if *bytes_read > TREE_BYTES_MAX {
                    return Err(TreeReadError::TooLarge);
                }
                batch.push(bytes);
            }
        }
    }
}

impl TreeReadError {
    /// Returns the error with all its causes, on one line.
    #[must_use]
    pub fn text(&self) -> String {
        error_chain(self)
    }
}

/// The fewest directories at which dead ones are removed.
const PURGE_MIN: usize = 4_096;

/// All directories of all images and machines, each once. The store does not keep directories
/// alive; it lets images and machines share them.
#[derive(Debug, Default)]
pub struct DirectoryStore {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    directories: BTreeMap<ObjectId, Weak<Directory>>,
    purge_at: usize,
}

impl Inner {
    fn forget_dead(&mut self) {
        self.directories.retain(|_, directory| directory.strong_count() > 0);
        self.purge_at = self.directories.len() * 2;
    }
}

impl DirectoryStore {
    /// Returns the directory with that digest, if it is alive.
    #[must_use]
    pub fn get(&self, digest: &ObjectId) -> Option<Arc<Directory>> {
        let inner = locked(&self.inner);
        inner.directories.get(digest)?.upgrade()
    }

    /// Adds all directories of `tree`. Does not descend into known ones.
    pub fn share(&self, tree: &Tree) {
        let mut inner = locked(&self.inner);
        let mut stack = vec![tree.root()];
        while let Some(directory) = stack.pop() {
            let known = inner.directories.get(&directory.digest());
            if known.is_some_and(|known| known.strong_count() > 0) {
                continue;
            }
            inner.directories.insert(directory.digest(), Arc::downgrade(directory));
            stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
                Child::Directory(below) => Some(below),
                Child::Leaf(_) => None,
            }));
        }
        if inner.directories.len() > inner.purge_at.max(PURGE_MIN) {
            inner.forget_dead();
        }
    }

    /// Forgets directories that are not alive.
    pub fn forget_dead(&self) {
        locked(&self.inner).forget_dead();
    }

    /// Returns how many directories are alive.
    #[must_use]
    pub fn alive(&self) -> u64 {
        let inner = locked(&self.inner);
        let alive = inner.directories.values().filter(|known| known.strong_count() > 0);
        alive.count() as u64
    }
}

/// How much longer than it was asked to wait the image server may take to answer.
const SLACK: Duration = Duration::from_secs(15);

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetImageError {
    #[error("the image server has no image {name} yet")]
    NotThere { name: ImageName },
    #[error("the image {name} was deleted: its name is never used again")]
    Gone { name: ImageName },
    #[error("the image server does not give {name}")]
    Call {
        name: ImageName,
        #[source]
        source: CallError,
    },
    #[error("the image server gives {got} for {want}")]
    OtherName { want: ImageName, got: ImageName },
    #[error("the tree of {name} cannot be read")]
    Tree {
        name: ImageName,
        #[source]
        source: TreeReadError,
    },
    /// No machine could equal it, or this release does not support it.
    #[error("{name} cannot be used")]
    Image {
        name: ImageName,
        #[source]
        source: ImageError,
    },
}

impl TreeReader {
    /// Gets the image called `name` with its tree; an image that is not there is waited for by
    /// the server, for `wait`.
    pub async fn image(
        self: &Arc<Self>,
        client: &Client,
        name: &ImageName,
        wait: Duration,
    ) -> Result<Arc<RequiredImage>, GetImageError> {
        let name = name.clone();
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let request = GetImageRequest { name: name.clone(), wait_ms };
        let image = match client.call_within::<GetImage>(&request, wait + SLACK).await {
            Ok(image) => image,
            Err(error) => {
                return Err(match error.code() {
                    Some(FaultCode::NotFound) => GetImageError::NotThere { name },
                    Some(FaultCode::Gone) => GetImageError::Gone { name },
                    _ => GetImageError::Call { name, source: error },
                });
            }
        };
        let (content, signatures) = (image.content, image.notes.signatures);
        if content.name != name {
            return Err(GetImageError::OtherName { want: name, got: content.name });
        }
        let tree = self.from_image_server(client, content.root).await;
        let tree = tree.map_err(|source| GetImageError::Tree { name: name.clone(), source })?;
        let verified = self.compute(move || {
            content.verify(&tree)?;
            Ok(Arc::new(RequiredImage::new(content, tree).with_signatures(signatures)))
        });
        match verified.await {
            Ok(Ok(image)) => Ok(image),
            Ok(Err(source)) => Err(GetImageError::Image { name, source }),
            Err(source) => Err(GetImageError::Tree { name, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;
    use model::tree::text::from_text;

    #[test]
    fn holds_nothing_that_nobody_else_holds() {
        let store = DirectoryStore::default();
        let tree = |text| from_text(Algorithm::Blake3, text).unwrap();
        let one = tree("d 755 0:0 /a\nd 755 0:0 /a/b\nd 755 0:0 /c\n");
        store.share(&one);
        // The root, /a and the two empty directories, which are one.
        assert_eq!(store.alive(), 3);
        let two = tree("d 755 0:0 /a\nd 755 0:0 /a/b\n");
        store.share(&two);
        assert_eq!(store.alive(), 4);
        assert_eq!(store.get(&one.digest()).unwrap().digest(), one.digest());
        let digest = one.digest();
        drop(one);
        assert!(store.get(&digest).is_none());
        drop(two);
        assert_eq!(store.alive(), 0);
    }
}
