//! Reads trees over the network, asking only for directories that nobody has given yet: for the
//! dominator, and for tools that do on one machine what it does on all.

pub mod image;
pub mod store;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::client::{CallError, Client, StreamError};
use api::object_server::{GetObjectsRequest, IDS_MAX};
use api::object_stream::Head;
use api::subd::{DIRECTORIES_MAX, GetDirectories, GetDirectoriesRequest};
use model::object::ObjectId;
use model::report::report;
use model::tree::assembly::Assembly;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use model::tree::{Tree, TreeError};
use tokio::sync::Semaphore;

use store::DirectoryStore;

/// The most bytes of directories of one tree that are read.
const TREE_BYTES_MAX: usize = 1 << 30;

/// How long one answer of a sub may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How many trees are read from subs at one time, so that a fleet that comes up all at once
/// shares what the first have read.
const READERS: usize = 64;

/// How long a sub may keep one of the [`READERS`]' places: slow ones read on without.
const PLACE_LIMIT: Duration = Duration::from_secs(5);

/// A tree that could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// A call failed.
    #[error("cannot get directories")]
    Call {
        /// Which, and why.
        #[source]
        source: CallError,
    },
    /// The stream of objects broke.
    #[error("cannot get directories")]
    Stream {
        /// Why.
        #[source]
        source: StreamError,
    },
    /// The tree has changed meanwhile.
    #[error("the tree has changed while it was read")]
    Changed,
    /// The other side gave nothing of what was asked for.
    #[error("directories were asked for, and none came")]
    Nothing,
    /// The image server does not have a directory.
    #[error("directory {digest} is not on the image server")]
    Absent {
        /// Which.
        digest: ObjectId,
    },
    /// The tree is larger than is accepted.
    #[error("the directories of the tree take more than {TREE_BYTES_MAX} bytes")]
    TooLarge,
    /// What came is no tree.
    #[error("what came is no tree")]
    Tree {
        /// Why.
        #[source]
        source: TreeError,
    },
    /// The program is stopping.
    #[error("the program is stopping")]
    Stopping,
}

/// What reading trees needs beside the network.
#[derive(Debug)]
pub struct Reader {
    /// All directories that are known.
    pub store: DirectoryStore,
    /// Places for work that keeps a processor busy.
    pub processors: Arc<Semaphore>,
    places: Semaphore,
}

impl Reader {
    /// A reader with an empty store, that keeps at most `processors` processors busy.
    #[must_use]
    pub fn new(processors: usize) -> Self {
        Self {
            store: DirectoryStore::default(),
            processors: Arc::new(Semaphore::new(processors)),
            places: Semaphore::new(READERS),
        }
    }

    /// Runs `work`, which takes processor time, where it holds up nobody.
    ///
    /// # Errors
    ///
    /// [`ReadError::Stopping`] if the runtime goes away meanwhile.
    pub async fn compute<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ReadError> {
        let place = Arc::clone(&self.processors).acquire_owned().await;
        let place = place.map_err(|_| ReadError::Stopping)?;
        let work = move || {
            let result = work();
            drop(place);
            result
        };
        tokio::task::spawn_blocking(work).await.map_err(|_| ReadError::Stopping)
    }

    /// Reads the tree called `root` from a sub.
    ///
    /// # Errors
    ///
    /// [`ReadError`].
    pub async fn from_sub(
        self: &Arc<Self>,
        client: &Client,
        root: ObjectId,
    ) -> Result<Tree, ReadError> {
        // Most machines have the tree of an image. Hard links lead anywhere in a tree, so one that
        // has some, and was known as a part of another, is looked at.
        if let Some(known) = self.store.get(&root).filter(|known| known.totals().hard_links == 0) {
            return Ok(Tree::new(known));
        }
        let known = Assembly::new(root, |digest| self.store.get(digest));
        if known.wanted().is_empty() {
            return self.finish(known).await;
        }
        let read = async {
            // Others may have read the same while this one waited for its place.
            let mut assembly = Assembly::new(root, |digest| self.store.get(digest));
            let mut bytes_read = 0;
            loop {
                let mut digests = assembly.wanted();
                if digests.is_empty() {
                    return self.finish(assembly).await;
                }
                digests.truncate(DIRECTORIES_MAX);
                let request = GetDirectoriesRequest { digests };
                let reply = client
                    .call_within::<GetDirectories>(&request, ANSWER_LIMIT)
                    .await
                    .map_err(|source| ReadError::Call { source })?;
                if !reply.absent.is_empty() {
                    return Err(ReadError::Changed);
                }
                if reply.directories.is_empty() {
                    return Err(ReadError::Nothing);
                }
                let batch: Vec<Vec<u8>> =
                    reply.directories.into_iter().map(|encoded| encoded.0.0).collect();
                bytes_read += batch.iter().map(Vec::len).sum::<usize>();
                if bytes_read > TREE_BYTES_MAX {
                    return Err(ReadError::TooLarge);
                }
                assembly = self.insert(assembly, batch).await?;
            }
        };
        let mut read = Box::pin(read);
        let place = self.places.acquire().await.map_err(|_| ReadError::Stopping)?;
        if let Ok(result) = tokio::time::timeout(PLACE_LIMIT, &mut read).await {
            return result;
        }
        drop(place);
        read.await
    }

    /// Reads the tree called `root` from the image server.
    ///
    /// # Errors
    ///
    /// [`ReadError`].
    pub async fn from_image_server(
        self: &Arc<Self>,
        client: &Client,
        root: ObjectId,
    ) -> Result<Tree, ReadError> {
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
    ) -> Result<Assembly, ReadError> {
        let reader = Arc::clone(self);
        self.compute(move || {
            for bytes in batch {
                assembly
                    .insert(bytes, |digest| reader.store.get(digest))
                    .map_err(|source| ReadError::Tree { source })?;
            }
            Ok(assembly)
        })
        .await?
    }

    async fn finish(self: &Arc<Self>, assembly: Assembly) -> Result<Tree, ReadError> {
        let reader = Arc::clone(self);
        self.compute(move || {
            let tree = assembly.finish().map_err(|source| ReadError::Tree { source })?;
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
) -> Result<Vec<Vec<u8>>, ReadError> {
    let stream = |source| ReadError::Stream { source };
    let mut awaited: BTreeSet<ObjectId> = ids.iter().copied().collect();
    let request = GetObjectsRequest { ids };
    let mut reader =
        client.get_objects(&request).await.map_err(|source| ReadError::Call { source })?;
    let mut batch = Vec::new();
    loop {
        match reader.head().await.map_err(stream)? {
            Head::End if batch.is_empty() => return Err(ReadError::Nothing),
            Head::End => return Ok(batch),
            Head::Absent(digest) => return Err(ReadError::Absent { digest }),
            Head::Object { id, size_bytes } => {
                if !awaited.remove(&id) {
                    return Err(ReadError::Nothing);
                }
                if size_bytes > DIRECTORY_BYTES_MAX as u64 {
                    return Err(ReadError::TooLarge);
                }
                let mut bytes = Vec::new();
                while let Some(chunk) = reader.chunk().await.map_err(stream)? {
                    bytes.extend_from_slice(&chunk);
                }
                *bytes_read += bytes.len();
                if *bytes_read > TREE_BYTES_MAX {
                    return Err(ReadError::TooLarge);
                }
                batch.push(bytes);
            }
        }
    }
}

impl ReadError {
    /// The error with all its causes, on one line.
    #[must_use]
    pub fn text(&self) -> String {
        report(self)
    }
}
