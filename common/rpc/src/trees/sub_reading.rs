//! Reads one tree from a sub: directories that are not known, and of a large one only the blocks
//! that the same directory of a former tree does not have.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::fault::FaultCode;
use api::subd::{
    BLOCKS_BYTES_MIN, DIRECTORIES_MAX, DirectoryBlock, GetDirectories, GetDirectoriesRequest,
    GetDirectoryBlocks, GetDirectoryBlocksReply, GetDirectoryBlocksRequest, HAVE_MAX,
};
use model::object::ObjectId;
use model::tree::assembly::Assembly;
use model::tree::blocks::{BlockError, Joining};
use model::tree::encode::{Item, list};
use model::tree::{Child, Directory, Tree, TreeError};

use super::{TREE_BYTES_MAX, TreeReadError, TreeReader};
use crate::client::{CallError, Client};

/// How long one answer of a sub may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A directory with so many entries is read in blocks: some 200 KiB. Each takes a call of its own.
const LARGE_ENTRIES: usize = 2_048;

/// The former directories at the paths of directories that are not read yet, by the digests of
/// these.
type Formers = BTreeMap<ObjectId, Arc<Directory>>;

pub(super) struct SubReading<'read> {
    reader: &'read Arc<TreeReader>,
    client: &'read Client,
    formers: Formers,
    /// False once the sub has refused the call: it is of an earlier release, or the certificate is.
    sends_blocks: bool,
    bytes_read: usize,
    assembly: Assembly,
}

impl<'read> SubReading<'read> {
    pub(super) fn new(
        reader: &'read Arc<TreeReader>,
        client: &'read Client,
        root: ObjectId,
        former: Option<&Tree>,
    ) -> Self {
        let former = former.filter(|former| former.algorithm() == root.algorithm());
        Self {
            reader,
            client,
            formers: former.map(|former| (root, Arc::clone(former.root()))).into_iter().collect(),
            sends_blocks: true,
            bytes_read: 0,
            assembly: Assembly::new(root, |digest| reader.store.get(digest)),
        }
    }

    pub(super) async fn run(mut self) -> Result<Tree, TreeReadError> {
        loop {
            let mut digests = self.assembly.wanted();
            if digests.is_empty() {
                return self.reader.finish(self.assembly).await;
            }
            let batch = match self.next_in_blocks(&digests) {
                Some((digest, former)) => match self.in_blocks(digest, Some(former)).await {
                    Ok(bytes) => vec![bytes],
                    // The other call may do.
                    Err(TreeReadError::Call { source: CallError::Fault { .. } }) => {
                        self.sends_blocks = false;
                        continue;
                    }
                    Err(error) => return Err(error),
                },
                None => {
                    digests.truncate(DIRECTORIES_MAX);
                    self.directories(digests).await?
                }
            };
            self = self.insert(batch).await?;
        }
    }

    /// Returns the next directory that is read in blocks, and the former one.
    fn next_in_blocks(&self, wanted: &[ObjectId]) -> Option<(ObjectId, Arc<Directory>)> {
        wanted.iter().filter(|_| self.sends_blocks).find_map(|digest| {
            let former = self.formers.get(digest)?;
            (former.entries().len() >= LARGE_ENTRIES).then(|| (*digest, Arc::clone(former)))
        })
    }

    async fn directories(&mut self, digests: Vec<ObjectId>) -> Result<Vec<Vec<u8>>, TreeReadError> {
        let first = digests[0];
        let request = GetDirectoriesRequest { digests };
        let called = self.client.call_within::<GetDirectories>(&request, ANSWER_LIMIT).await;
        let reply = match called {
            Ok(reply) => reply,
            Err(error) if error.code() == Some(FaultCode::TooLarge) => {
                return self.in_blocks(first, None).await.map(|bytes| vec![bytes]);
            }
            Err(source) => return Err(TreeReadError::Call { source }),
        };
        if !reply.absent.is_empty() {
            return Err(TreeReadError::Changed);
        }
        if reply.directories.is_empty() {
            return Err(TreeReadError::Nothing);
        }
        let batch: Vec<Vec<u8>> =
            reply.directories.into_iter().map(|encoded| encoded.0.0).collect();
        self.bytes_read += batch.iter().map(Vec::len).sum::<usize>();
        if self.bytes_read > TREE_BYTES_MAX {
            return Err(TreeReadError::TooLarge);
        }
        Ok(batch)
    }

    /// Reads the encoding of one directory in blocks.
    async fn in_blocks(
        &mut self,
        digest: ObjectId,
        former: Option<Arc<Directory>>,
    ) -> Result<Vec<u8>, TreeReadError> {
        let bytes_max = TREE_BYTES_MAX - self.bytes_read;
        let joining = move || Joining::new(former, HAVE_MAX, bytes_max);
        let mut joining = self.reader.compute(joining).await?;
        let mut request = GetDirectoryBlocksRequest {
            directory: digest,
            have: joining.digests().to_vec(),
            position: 0,
        };
        loop {
            let called = self.client.call_within::<GetDirectoryBlocks>(&request, ANSWER_LIMIT);
            let reply = match called.await {
                Ok(reply) => reply,
                Err(error) if error.code() == Some(FaultCode::NotFound) => {
                    return Err(TreeReadError::Changed);
                }
                Err(source) => return Err(TreeReadError::Call { source }),
            };
            let next = reply.next;
            let join = move || join(joining, reply);
            let joined = self.reader.compute(join).await?;
            let (joined, new_bytes) =
                joined.map_err(|source| TreeReadError::Blocks { digest, source })?;
            match next {
                None => {
                    let bytes = joined.finish();
                    self.bytes_read += bytes.len();
                    return Ok(bytes);
                }
                // A sub must not go on for ever.
                Some(_) if new_bytes < BLOCKS_BYTES_MIN => return Err(TreeReadError::Nothing),
                Some(next) => (joining, request.position) = (joined, next),
            }
        }
    }

    async fn insert(mut self, batch: Vec<Vec<u8>>) -> Result<Self, TreeReadError> {
        let reader = Arc::clone(self.reader);
        let (mut assembly, mut formers) = (self.assembly, self.formers);
        let insert = move || -> Result<_, TreeError> {
            for bytes in batch {
                pair_below(&mut formers, &bytes)?;
                assembly.insert(bytes, |digest| reader.store.get(digest))?;
            }
            Ok((assembly, formers))
        };
        let inserted = self.reader.compute(insert).await?;
        (self.assembly, self.formers) =
            inserted.map_err(|source| TreeReadError::Tree { source })?;
        Ok(self)
    }
}

/// Appends the blocks of a reply. Returns also how many bytes were new.
fn join(
    mut joining: Joining,
    reply: GetDirectoryBlocksReply,
) -> Result<(Joining, usize), BlockError> {
    let mut new_bytes = 0;
    for block in reply.blocks {
        match block {
            DirectoryBlock::Known(place) => joining.add_own(place)?,
            DirectoryBlock::New(bytes) => {
                new_bytes += bytes.0.len();
                joining.add(&bytes.0)?;
            }
        }
    }
    Ok((joining, new_bytes))
}

/// Finds the former directories of those that the encoding of a directory names.
fn pair_below(formers: &mut Formers, bytes: &[u8]) -> Result<(), TreeError> {
    let Some(algorithm) = formers.keys().next().map(ObjectId::algorithm) else { return Ok(()) };
    let Some(former) = formers.remove(&algorithm.digest(bytes)) else { return Ok(()) };
    for (name, item) in list(algorithm, bytes)?.entries {
        if let (Item::Directory(digest), Some(Child::Directory(former))) =
            (item, former.get(name.as_bytes()))
            && digest != former.digest()
        {
            formers.insert(digest, Arc::clone(former));
        }
    }
    Ok(())
}
