//! Trees that are read from subs: large directories in blocks, subs of earlier releases, liars.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use api::fault::{Fault, FaultCode};
use api::subd::{
    DirectoryBlock, EncodedDirectory, GetDirectories, GetDirectoriesReply, GetDirectoriesRequest,
    GetDirectoryBlocks, GetDirectoryBlocksReply, GetDirectoryBlocksRequest,
};
use model::escape::ByteText;
use model::object::{Algorithm, ObjectId};
use model::tree::node::SYMLINK_MODE;
use model::tree::{Child, Directory, Leaf, Metadata, Node, Symlink, Tree, TreeBuilder};
use rpc::server::Router;
use rpc::tls::Security;
use rpc::trees::TreeReader;

use crate::wire::Server;

/// A tree with so many symlinks in one directory, of which those with some numbers have changed.
fn tree(count: u32, changed: &[u32]) -> Tree {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    let mut insert = |path: &str, node| builder.insert(path.parse().unwrap(), node).unwrap();
    let directory = Node::Directory(Metadata::new(0o755, 0, 0));
    insert("/small", directory.clone());
    insert("/large", directory);
    for number in 0..count {
        let target = if changed.contains(&number) { b"x" } else { b"y" };
        let symlink = Symlink {
            metadata: Metadata::new(SYMLINK_MODE, 0, 0),
            target: ByteText(target.repeat(1_000)),
        };
        insert(&format!("/large/{number:0>100}"), Node::Leaf(Leaf::Symlink(symlink)));
    }
    builder.finish().unwrap()
}

/// Changes what an honest sub answers.
type Answer = fn(GetDirectoryBlocksReply) -> Result<GetDirectoryBlocksReply, Fault>;

/// The directories of a sub, and how many bytes of blocks it has sent with each call.
struct FakeSub {
    directories: BTreeMap<ObjectId, Arc<Directory>>,
    /// A directory with more entries does not fit into a reply.
    entries_max: usize,
    sent: Mutex<Vec<usize>>,
    answer: Answer,
}

impl FakeSub {
    fn new(tree: &Tree, entries_max: usize, answer: Answer) -> Arc<Self> {
        let below = tree.root().entries().iter().filter_map(|entry| match &entry.child {
            Child::Directory(below) => Some(below),
            Child::Leaf(_) => None,
        });
        let all = below.chain([tree.root()]);
        let directories = all.map(|one| (one.digest(), Arc::clone(one))).collect();
        Arc::new(Self { directories, entries_max, sent: Mutex::default(), answer })
    }

    fn whole(&self, request: &GetDirectoriesRequest) -> Result<GetDirectoriesReply, Fault> {
        // One at a time.
        let directory = &self.directories[&request.digests[0]];
        if directory.entries().len() > self.entries_max {
            return Err(Fault::new(FaultCode::TooLarge, "too large for one reply"));
        }
        let directories = vec![EncodedDirectory(ByteText(directory.encode()))];
        Ok(GetDirectoriesReply { directories, absent: Vec::new() })
    }

    fn blocks(
        &self,
        request: &GetDirectoryBlocksRequest,
    ) -> Result<GetDirectoryBlocksReply, Fault> {
        let directory = &self.directories[&request.directory];
        let reply = GetDirectoryBlocksReply::of(directory, request);
        let new = reply.blocks.iter().map(|block| match block {
            DirectoryBlock::Known(_) => 0,
            DirectoryBlock::New(bytes) => bytes.0.len(),
        });
        self.sent.lock().unwrap().push(new.sum());
        (self.answer)(reply)
    }

    fn first_release(self: &Arc<Self>) -> Router<Arc<Self>> {
        Router::new("subd", &Security::Insecure)
            .with_state(Arc::clone(self))
            .method::<GetDirectories, _>(async |sub: Arc<Self>, _, request| sub.whole(&request))
    }

    fn router(self: &Arc<Self>) -> Router<Arc<Self>> {
        self.first_release().method::<GetDirectoryBlocks, _>(async |sub: Arc<Self>, _, request| {
            sub.blocks(&request)
        })
    }

    fn take_sent(&self) -> Vec<usize> {
        std::mem::take(&mut *self.sent.lock().unwrap())
    }
}

/// Reads a tree; the text of the error if it cannot be read.
async fn read(router: Router<Arc<FakeSub>>, root: ObjectId, former: &Tree) -> Result<Tree, String> {
    let server = Server::start(router).await;
    let reader = Arc::new(TreeReader::new(1));
    let read = reader.from_sub(&server.client(), root, Some(former)).await;
    server.stop().await;
    read.map_err(|error| error.text())
}

#[tokio::test]
async fn a_directory_of_any_size_is_read_and_then_only_its_changed_blocks() {
    let (old, new) = (tree(6_000, &[]), tree(6_000, &[7, 3_000, 5_999]));
    let empty = Tree::empty(Algorithm::Blake3);
    let sub = FakeSub::new(&old, 4_000, Ok);
    assert_eq!(read(sub.router(), old.digest(), &empty).await, Ok(old.clone()));
    let sent = sub.take_sent();
    let large = |tree: &Tree| tree.root().get(b"large").unwrap().clone();
    let Child::Directory(large) = large(&old) else { panic!("it is a directory") };
    assert_eq!(sent.iter().sum::<usize>(), large.encode().len());
    assert_eq!(sent.len(), 2, "{sent:?}");
    let sub = FakeSub::new(&new, 4_000, Ok);
    assert_eq!(read(sub.router(), new.digest(), &old).await, Ok(new.clone()));
    let sent = sub.take_sent();
    assert!(sent.len() == 1 && sent[0] < 4 * (128 << 10), "{sent:?}");
    // Of another algorithm nothing is the same.
    let (new, other) = (tree(3_000, &[]), Tree::empty(Algorithm::Sha512));
    let sub = FakeSub::new(&new, usize::MAX, Ok);
    assert_eq!(read(sub.router(), new.digest(), &other).await, Ok(new.clone()));
    assert!(sub.take_sent().is_empty());
}

#[tokio::test]
async fn a_sub_or_a_certificate_of_an_earlier_release_gives_whole_directories() {
    let (old, new) = (tree(3_000, &[]), tree(3_000, &[7]));
    let sub = FakeSub::new(&new, usize::MAX, Ok);
    assert_eq!(read(sub.first_release(), new.digest(), &old).await, Ok(new.clone()));
    let sub = FakeSub::new(&new, usize::MAX, |_| Err(Fault::new(FaultCode::Denied, "no power")));
    assert_eq!(read(sub.router(), new.digest(), &old).await, Ok(new.clone()));
    assert_eq!(sub.take_sent().len(), 1);
}

#[tokio::test]
async fn blocks_that_are_not_those_of_the_directory_are_refused() {
    let (old, new) = (tree(3_000, &[]), tree(3_000, &[7]));
    let table: [(Answer, &str); 6] = [
        (
            |_| Err(Fault::new(FaultCode::NotFound, "gone")),
            "the tree has changed while it was read",
        ),
        (
            |reply| {
                let blocks = vec![DirectoryBlock::Known(14_000)];
                Ok(GetDirectoryBlocksReply { blocks, ..reply })
            },
            "block 14000 was not offered, or is out of order",
        ),
        (
            |mut reply| {
                reply.blocks.insert(0, DirectoryBlock::Known(0));
                Ok(reply)
            },
            "block 0 was not offered, or is out of order",
        ),
        (
            |reply| Ok(GetDirectoryBlocksReply { next: Some(1), ..reply }),
            "the reply has none of the requested directories",
        ),
        (
            |mut reply| {
                reply.blocks.pop();
                Ok(reply)
            },
            "was asked for",
        ),
        (
            |mut reply| {
                reply.blocks.push(DirectoryBlock::New(ByteText(b"more".to_vec())));
                Ok(reply)
            },
            "was asked for",
        ),
    ];
    for (answer, expected) in table {
        let sub = FakeSub::new(&new, usize::MAX, answer);
        let error = read(sub.router(), new.digest(), &old).await.unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}
