//! A subd in this process on a temporary root, and an object server that gives it objects.

use rpc::tls::Security;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::Fault;
use api::object_server::GetObjects;
use api::object_stream::ObjectHead;
use api::subd::{
    Commit, CommitRequest, ExpectedState, Fetch, FetchObject, FetchRequest, GetDirectories,
    GetDirectoriesRequest, GetRefusedChanges, LastFetch, LastUpdate, Poll, PollReply, PollRequest,
    Prepare, PrepareRequest, SetConfigurationRequest,
};
use bytes::Bytes;
use clap::Parser;
use model::escape::ByteText;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::plan::{Plan, ScannedTree, plan};
use model::scope::ScanSettings;
use model::tree::assembly::Assembly;
use model::tree::{File, Leaf, Metadata, Node, Symlink, Time, Tree, TreeBuilder};
use model::trigger::Triggers;
use rpc::client::{CallError, Client, Peer};
use rpc::server::{Router, head_bytes, serve};
use subd::daemon::Daemon;
use subd::daemon::command_line::Options;
use testing::eventually_async;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What objects hold, by id.
pub type Store = Arc<Mutex<BTreeMap<ObjectId, Bytes>>>;

/// An object server.
pub struct Source {
    pub address: String,
    pub objects: Store,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Source {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.3:0").await
    }

    pub async fn start_at(address: &str) -> Self {
        let objects = Store::default();
        let store = Arc::clone(&objects);
        let router = Router::new("test", &Security::Insecure).download::<GetObjects, _, _>(
            move |(), _, request| {
                let store = store.lock().unwrap();
                let mut chunks = Vec::new();
                for id in request.ids {
                    match store.get(&id) {
                        Some(content) => {
                            let size_bytes = content.len() as u64;
                            chunks.push(head_bytes(&ObjectHead::Object { id, size_bytes }));
                            chunks.push(content.clone());
                        }
                        None => chunks.push(head_bytes(&ObjectHead::Absent(id))),
                    }
                }
                chunks.push(head_bytes(&ObjectHead::End));
                let stream = futures_util::stream::iter(chunks.into_iter().map(Ok));
                async move { Ok::<_, Fault>(stream) }
            },
        );
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, router, stop.clone()));
        Self { address, objects, stop, task }
    }

    pub fn add(&self, content: &[u8]) -> ObjectId {
        let id = Algorithm::Blake3.digest(content);
        self.objects.lock().unwrap().insert(id, Bytes::copy_from_slice(content));
        id
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A subd.
pub struct Sub {
    pub root: PathBuf,
    pub client: Client,
    place: Option<tempfile::TempDir>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    /// True to call only what the first dominators called.
    is_called_formerly: bool,
}

impl Sub {
    /// Starts on an empty root.
    pub async fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().to_owned();
        Self::start_on(&root, &[]).await.owning(place)
    }

    /// Starts on `root`, which stays.
    pub async fn start_on(root: &Path, flags: &[&str]) -> Self {
        Self::start_with(root, flags, &Security::Insecure, &Security::Insecure).await
    }

    /// Starts on `root` with `security`, for a caller with `of_caller`.
    pub async fn start_with(
        root: &Path,
        flags: &[&str],
        security: &Security,
        of_caller: &Security,
    ) -> Self {
        let mut arguments =
            vec!["subd", "--insecure", "--listen", "127.0.0.4:0", "--hostname", "test"];
        arguments.extend(["--root", root.to_str().unwrap()]);
        // The disk of whoever runs the tests is not measured again and again.
        if !flags.contains(&"--device-speed") {
            arguments.extend(["--device-speed", "1000000000"]);
        }
        arguments.extend(flags);
        let options = Options::try_parse_from(arguments).unwrap();
        let stop = CancellationToken::new();
        let daemon = Daemon::start(options, security, stop.clone()).await.unwrap();
        let peer = Peer::parse(&daemon.address().unwrap().to_string(), 1).unwrap();
        let task = tokio::spawn(daemon.run());
        Self {
            root: root.to_owned(),
            client: Client::new(peer, of_caller),
            place: None,
            stop,
            task,
            is_called_formerly: false,
        }
    }

    /// A subd that somebody else has started and stops.
    pub fn elsewhere(root: &Path, client: Client) -> Self {
        let task = tokio::spawn(async {});
        let (root, stop) = (root.to_owned(), CancellationToken::new());
        Self { root, client, place: None, stop, task, is_called_formerly: false }
    }

    /// Calls only what the first dominators called: Poll, GetDirectories, Fetch, Prepare, Commit.
    pub fn called_formerly(self) -> Self {
        Self { is_called_formerly: true, ..self }
    }

    /// Removes `place` in the end.
    pub fn owning(self, place: tempfile::TempDir) -> Self {
        Self { place: Some(place), ..self }
    }

    pub async fn stop(self) -> Option<tempfile::TempDir> {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap();
        self.place
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub async fn poll(&self) -> PollReply {
        self.client.call::<Poll>(&PollRequest::default()).await.unwrap()
    }

    /// Polls until `enough`; every reply is complete.
    pub async fn poll_until(&self, enough: impl Fn(&PollReply) -> bool) -> PollReply {
        let waiting = async {
            loop {
                let reply = self.poll().await;
                if enough(&reply) {
                    return reply;
                }
                let request = PollRequest { have: Some(reply.version), wait_ms: 5_000 };
                self.client.call::<Poll>(&request).await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.expect("it takes too long")
    }

    /// The scanned tree, and the poll that told of it.
    pub async fn tree(&self) -> (PollReply, Tree) {
        let reply = self.poll_until(|reply| reply.scan.is_some()).await;
        let tree = self.tree_of(reply.scan.as_ref().unwrap().root).await;
        (reply, tree)
    }

    /// The tree called `root`.
    pub async fn tree_of(&self, root: ObjectId) -> Tree {
        let mut assembly = Assembly::new(root, |_| None);
        loop {
            let digests = assembly.wanted();
            if digests.is_empty() {
                return assembly.finish().unwrap();
            }
            let request = GetDirectoriesRequest { digests };
            let directories = self.client.call::<GetDirectories>(&request).await.unwrap();
            assert_eq!(directories.absent, []);
            for directory in directories.directories {
                assembly.insert(directory.0.0, |_| None).unwrap();
            }
        }
    }

    /// Waits until the scan has seen what is on the disk now.
    pub async fn rescanned(&self) -> Tree {
        let passes = self.poll().await.counters.metadata_passes;
        // A change of counters does not end the wait of a poll.
        eventually_async("two scans have ended", async || {
            self.poll().await.counters.metadata_passes >= passes + 2
        })
        .await;
        self.tree().await.1
    }

    /// The plan from the scanned tree to `want`, and the poll that it is based on.
    pub async fn plan(&self, want: &Tree) -> (PollReply, Plan) {
        let (reply, tree) = self.tree().await;
        let scan = reply.scan.as_ref().unwrap();
        let kept: BTreeSet<TreePath> = scan.kept_directories.iter().cloned().collect();
        let linked: BTreeSet<TreePath> = scan.externally_linked.iter().cloned().collect();
        let occupied = scan.occupied.iter().cloned().collect();
        let refused = match self.is_called_formerly {
            true => Vec::new(),
            false => self.client.call::<GetRefusedChanges>(&()).await.unwrap().changes,
        };
        let have = ScannedTree {
            tree: &tree,
            kept_directories: &kept,
            externally_linked: &linked,
            occupied: &occupied,
            refused: &refused.into_iter().collect(),
            times: scan.times,
        };
        let plan = plan(&have, want);
        (reply, plan)
    }

    pub async fn fetch(&self, id: u64, sources: &[&Source], objects: &[FetchObject]) -> LastFetch {
        let sources = sources.iter().map(|source| source.address.clone()).collect();
        let request = FetchRequest { fetch_id: id, sources, objects: objects.into(), ahead: false };
        self.client.call::<Fetch>(&request).await.unwrap();
        let ended = |last: &LastFetch| last.fetch_id == id;
        let reply = self.poll_until(|reply| reply.last_fetch.as_ref().is_some_and(ended)).await;
        reply.last_fetch.unwrap()
    }

    pub async fn fetch_for(&self, id: u64, source: &Source, plan: &Plan) {
        let objects: Vec<FetchObject> = plan
            .objects()
            .into_iter()
            .map(|(id, need)| FetchObject { id, size_bytes: need.size_bytes })
            .collect();
        let last = self.fetch(id, &[source], &objects).await;
        assert_eq!(last.error, None);
    }

    pub async fn prepare(&self, request: &PrepareRequest) -> Result<PollReply, CallError> {
        self.client.call::<Prepare>(request).await?;
        let id = request.update_id;
        let over = |reply: &PollReply| {
            let ended = reply.last_update.as_ref().is_some_and(|last| last.update_id == id);
            ended || reply.activity == api::subd::Activity::Prepared { update_id: id }
        };
        Ok(self.poll_until(over).await)
    }

    /// Commits, and waits until it is over and verified.
    pub async fn commit(&self, id: u64) -> LastUpdate {
        self.client.call::<Commit>(&CommitRequest { update_id: id }).await.unwrap();
        let idle = |reply: &PollReply| reply.activity == api::subd::Activity::Idle;
        let ended = |last: &LastUpdate| last.update_id == id;
        let over = |reply: &PollReply| idle(reply) && reply.last_update.as_ref().is_some_and(ended);
        self.poll_until(over).await.last_update.unwrap()
    }

    /// Fetches, prepares and commits what makes the tree equal to `want`.
    pub async fn converge(&self, id: u64, source: &Source, want: &Tree) -> LastUpdate {
        self.converge_with(id, source, want, "[]").await
    }

    pub async fn converge_with(
        &self,
        id: u64,
        source: &Source,
        want: &Tree,
        triggers: &str,
    ) -> LastUpdate {
        let (_, needs) = self.plan(want).await;
        self.fetch_for(id, source, &needs).await;
        let (reply, plan) = self.plan(want).await;
        let mut request = request(id, &reply, want, plan.without_blocked());
        request.triggers = Triggers::from_json(triggers).unwrap();
        let reply = self.prepare(&request).await.unwrap();
        let staged = api::subd::Activity::Prepared { update_id: id };
        assert_eq!(reply.activity, staged, "{:?}", reply.last_update);
        self.commit(id).await
    }
}

pub fn request(id: u64, reply: &PollReply, want: &Tree, plan: Plan) -> PrepareRequest {
    let expects = ExpectedState {
        instance: reply.version.instance,
        root: reply.scan.as_ref().unwrap().root,
        scope: reply.scope,
    };
    PrepareRequest {
        update_id: id,
        expects,
        image: ImageName::new(&format!("test/{id}")).unwrap(),
        image_digest: want.digest(),
        plan: plan.into(),
        triggers: Triggers::default(),
        health_check: None,
        force_disruption: false,
        expires_seconds: 60,
    }
}

/// Makes a file immutable, or not; false where the file-system knows no such thing.
pub fn set_immutable(path: &Path, immutable: bool) -> bool {
    let flag = if immutable { "+i" } else { "-i" };
    Command::new("chattr").arg(flag).arg(path).output().is_ok_and(|output| output.status.success())
}

/// The order to scan by `settings`.
pub fn scan_by(settings: ScanSettings) -> SetConfigurationRequest {
    SetConfigurationRequest { scan: Some(settings), limits: None }
}

pub fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

/// A tree to be changed.
pub struct Edit<'a> {
    builder: TreeBuilder,
    source: &'a Source,
}

impl<'a> Edit<'a> {
    pub fn of(tree: &Tree, source: &'a Source) -> Self {
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        for (path, node) in tree.nodes() {
            builder.insert(path, node).unwrap();
        }
        Self { builder, source }
    }

    pub fn put(mut self, text: &str, node: Node) -> Self {
        self.builder.replace(path(text), node);
        self
    }

    pub fn put_at(mut self, path: TreePath, node: Node) -> Self {
        self.builder.replace(path, node);
        self
    }

    pub fn directory(self, text: &str, mode: u32) -> Self {
        self.put(text, Node::Directory(Metadata::new(mode, 0, 0)))
    }

    pub fn file(self, text: &str, content: &str) -> Self {
        let node = file(self.source, content, Metadata::new(0o644, 0, 0));
        self.put(text, node)
    }

    /// Gives a file another content, and nothing else.
    pub fn content(self, text: &str, content: &str) -> Self {
        let metadata = self.builder.get(&path(text)).and_then(Node::metadata).unwrap().clone();
        let node = file(self.source, content, metadata);
        self.put(text, node)
    }

    pub fn symlink(self, text: &str, target: &str) -> Self {
        let metadata = Metadata::new(0o777, 0, 0);
        let target = ByteText(target.as_bytes().to_vec());
        self.put(text, Node::Leaf(Leaf::Symlink(Symlink { metadata, target })))
    }

    pub fn link(self, text: &str, target: &str) -> Self {
        self.put(text, Node::Leaf(Leaf::HardLink(path(target))))
    }

    pub fn remove(mut self, text: &str) -> Self {
        let gone = path(text);
        let below: Vec<TreePath> = self
            .builder
            .iter()
            .map(|(path, _)| path.clone())
            .filter(|path| path.starts_with(&gone))
            .collect();
        assert!(!below.is_empty(), "{text}");
        for path in below {
            self.builder.remove(&path);
        }
        self
    }

    pub fn metadata(mut self, text: &str, change: impl FnOnce(&mut Metadata)) -> Self {
        let mut node = self.builder.remove(&path(text)).unwrap();
        change(node.metadata_mut().unwrap());
        self.put(text, node)
    }

    pub fn done(self) -> Tree {
        self.builder.finish().unwrap()
    }
}

/// A file whose object `source` has.
pub fn file(source: &Source, content: &str, metadata: Metadata) -> Node {
    let mtime = Time { seconds: 1_600_000_000, nanoseconds: 123_456_789 };
    let object = source.add(content.as_bytes()).into();
    Node::Leaf(Leaf::File(File { metadata, mtime, size_bytes: content.len() as u64, object }))
}
