//! `Subd.GetDirectoryBlocks`: a large directory in pieces, without those that the caller has.

use std::collections::BTreeMap;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::method::{Effect, Method};
use model::escape::ByteText;
use model::object::ObjectId;
use model::tree::Directory;
use model::tree::blocks::Blocks;

/// Returns the encoding of one directory of the scanned tree in blocks ([`model::tree::blocks`]).
/// Of a block that the caller has, such as from the same directory of an earlier tree, only the
/// place in its list is sent. The caller joins the blocks, and verifies the digest of the whole.
pub enum GetDirectoryBlocks {}

/// The most digests in one request.
pub const HAVE_MAX: usize = 14_000;

/// The fewest bytes of new blocks in a reply that is not the last. The sub answers with somewhat
/// more, and at most [`GetDirectoryBlocks::REPLY_BYTES_MAX`].
pub const BLOCKS_BYTES_MIN: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetDirectoryBlocksRequest {
    /// The digest of the directory. The answer is [`crate::fault::FaultCode::NotFound`] if the
    /// scanned tree does not have it: the tree has changed, so poll again.
    pub directory: ObjectId,
    /// The digests of blocks that the caller has: at most [`HAVE_MAX`], of the algorithm of the
    /// directory.
    pub have: Vec<ObjectId>,
    /// Where to start: 0, then what the last reply says.
    pub position: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetDirectoryBlocksReply {
    /// The blocks from there on, in order.
    pub blocks: Vec<DirectoryBlock>,
    /// Where the next call starts; `None` after the last block.
    pub next: Option<u32>,
}

impl GetDirectoryBlocksReply {
    /// Returns the answer of a sub whose directory it is.
    #[must_use]
    pub fn of(directory: &Directory, request: &GetDirectoryBlocksRequest) -> Self {
        let have: BTreeMap<&ObjectId, u32> = request.have.iter().zip(0..).collect();
        let algorithm = directory.digest().algorithm();
        let mut reply = Self { blocks: Vec::new(), next: None };
        let mut new_bytes = 0;
        for block in Blocks::from(directory, request.position) {
            reply.next = block.next;
            match have.get(&algorithm.digest(&block.bytes)) {
                Some(place) => reply.blocks.push(DirectoryBlock::Known(*place)),
                None => {
                    new_bytes += block.bytes.len();
                    reply.blocks.push(DirectoryBlock::New(ByteText(block.bytes)));
                }
            }
            if new_bytes >= BLOCKS_BYTES_MIN {
                break;
            }
        }
        reply
    }
}

/// One block of an encoding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DirectoryBlock {
    /// The block whose digest has this place in the request, from 0.
    Known(u32),
    /// Another one.
    New(ByteText),
}

impl Method for GetDirectoryBlocks {
    const NAME: &'static str = "Subd.GetDirectoryBlocks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 8 << 20;
    type Request = GetDirectoryBlocksRequest;
    type Reply = GetDirectoryBlocksReply;
}
