//! A running server, and images to give to it.

use rpc::tls::Security;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::image_server::{AddImage, AddImageReply, AddImageRequest, ListImages, ListImagesRequest};
use api::object_server::{
    AddObjects, AddObjectsReply, CheckObjects, CheckObjectsRequest, GetObjectsRequest,
};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use imageserver::store::layout;
use model::filter::Filter;
use model::image::{Content, FORMAT, ImageName, Notes, computed_rules};
use model::object::{Algorithm, ObjectId};
use model::tree::encode::references;
use model::tree::{
    Child as TreeChild, Computed, Directory, File, Leaf, Metadata, Node, Time, Tree, TreeBuilder,
};
use model::trigger::Triggers;
use rpc::client::{CallError, Client, Peer};
use rpc::server::head_bytes;

/// The algorithm of nearly all tests.
pub const ALGORITHM: Algorithm = Algorithm::Blake3;

/// A server process. It is killed when dropped.
pub struct Server {
    process: Child,
    log: Option<std::thread::JoinHandle<()>>,
    lines: Arc<Mutex<Vec<String>>>,
    pub address: SocketAddr,
    pub client: Client,
}

impl Server {
    /// Starts a server on `data` and waits until it listens.
    pub fn start(data: &Path) -> Self {
        Self::start_with(data, &[])
    }

    /// The same, with more flags.
    pub fn start_with(data: &Path, flags: &[&str]) -> Self {
        Self::run(command(data).args(flags))
    }

    /// Runs `command`, which ends up being a server, and waits until that listens.
    pub fn run(command: &mut Command) -> Self {
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.split_once("listening on http://")?.1.parse().ok())
            .expect("the server did not start");
        // Reads on, so that the server never waits for its log to be read.
        let read = Arc::<Mutex<Vec<String>>>::default();
        let said = Arc::clone(&read);
        let log = std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| said.lock().unwrap().push(line));
        });
        let peer = Peer::parse(&format!("{address}"), 0).unwrap();
        Self {
            process,
            log: Some(log),
            lines: read,
            address,
            client: Client::new(peer, &Security::Insecure),
        }
    }

    /// Kills the server as a power switch does.
    pub fn kill(mut self) {
        self.end();
    }

    /// Asks the server to stop, and waits until it did, well.
    pub async fn stop(mut self) {
        let id = nix::unistd::Pid::from_raw(self.id().cast_signed());
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
        let wait = tokio::task::spawn_blocking(move || {
            let status = self.process.wait().unwrap();
            assert!(status.success(), "{status}");
        });
        wait.await.unwrap();
    }

    /// True if a line of its log holds `text`.
    pub fn logged(&self, text: &str) -> bool {
        self.lines.lock().unwrap().iter().any(|line| line.contains(text))
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    fn end(&mut self) {
        // It may have ended by itself.
        let _ended = self.process.kill();
        let _reaped = self.process.wait();
        if let Some(log) = self.log.take() {
            log.join().unwrap();
        }
    }

    /// Uploads `contents`, as the stream they make.
    pub async fn upload(&self, contents: &[&[u8]]) -> AddObjectsReply {
        self.upload_chunks(stream_of(contents)).await.unwrap()
    }

    /// Uploads what is in `chunks`, whatever it is.
    pub async fn upload_chunks(&self, chunks: Vec<Bytes>) -> Result<AddObjectsReply, CallError> {
        let chunks = chunks.into_iter().map(Ok::<_, std::io::Error>);
        self.client.upload::<AddObjects>(futures_util::stream::iter(chunks)).await
    }

    /// Uploads all objects of `tree`: its directories and the contents given.
    pub async fn upload_tree(&self, tree: &Tree, contents: &[&[u8]]) {
        let directories = directories(tree);
        let all: Vec<&[u8]> = contents
            .iter()
            .copied()
            .chain(directories.iter().map(|(_, bytes)| &bytes[..]))
            .collect();
        self.upload(&all).await;
    }

    pub async fn missing(&self, ids: &[ObjectId]) -> Vec<ObjectId> {
        let request = CheckObjectsRequest { ids: ids.to_vec(), lease_seconds: 60 };
        self.client.call::<CheckObjects>(&request).await.unwrap().missing
    }

    pub async fn add(&self, content: Content) -> Result<AddImageReply, Fault> {
        let request = AddImageRequest { content, notes: Notes::default() };
        self.client.call::<AddImage>(&request).await.map_err(fault)
    }

    /// Fetches objects; `None` for those that are absent.
    pub async fn fetch(&self, ids: &[ObjectId]) -> Vec<(ObjectId, Option<Vec<u8>>)> {
        self.fetch_by(&self.client, ids).await.0
    }

    /// Fetches objects by `client`; also says how many bytes came over the wire.
    pub async fn fetch_by(
        &self,
        client: &Client,
        ids: &[ObjectId],
    ) -> (Vec<(ObjectId, Option<Vec<u8>>)>, u64) {
        let request = GetObjectsRequest { ids: ids.to_vec() };
        let mut reader = client.get_objects(&request).await.unwrap();
        let mut got = Vec::new();
        loop {
            match reader.head().await.unwrap() {
                ObjectHead::End => return (got, reader.take_wire_bytes()),
                ObjectHead::Absent(id) => got.push((id, None)),
                ObjectHead::Object { id, .. } => {
                    let mut content = Vec::new();
                    while let Some(chunk) = reader.chunk().await.unwrap() {
                        content.extend_from_slice(&chunk);
                    }
                    got.push((id, Some(content)));
                }
            }
        }
    }

    /// All objects of all images are there, by the server's own word; how many images there are.
    pub async fn expect_whole(&self) -> usize {
        let list = self.client.call::<ListImages>(&ListImagesRequest::default()).await.unwrap();
        for image in &list.images {
            let mut directories = vec![image.root];
            while let Some(id) = directories.pop() {
                let (_, content) = self.fetch(&[id]).await.remove(0);
                let content = content.unwrap_or_else(|| panic!("{}: {id} is missing", image.name));
                let named = references(ALGORITHM, &content).unwrap();
                let files: Vec<ObjectId> = named.files.iter().map(|(id, _)| *id).collect();
                let got = self.fetch(&files).await;
                assert!(got.iter().all(|(_, content)| content.is_some()), "{}", image.name);
                directories.extend(named.directories);
            }
        }
        list.images.len()
    }

    /// Asks for `path` over HTTP/1.1 with `headers`, one line each.
    pub fn get(&self, path: &str, headers: &str) -> Answer {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: answer[end + 4..].to_vec() }
    }

    /// The value of a metric, as text.
    pub fn metric(&self, name: &str) -> String {
        let text = self.get("/metrics", "").text();
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).split_once(' ').unwrap().1.to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// What was answered over HTTP/1.1.
pub struct Answer {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    /// The body of an answer that was sent in chunks (RFC 9112, 7.1).
    pub fn dechunked(&self) -> Vec<u8> {
        assert_eq!(self.header("transfer-encoding"), Some("chunked"));
        let (mut whole, mut rest) = (Vec::new(), &self.body[..]);
        loop {
            let end = rest.windows(2).position(|window| window == b"\r\n").unwrap();
            let length = std::str::from_utf8(&rest[..end]).unwrap();
            let length = usize::from_str_radix(length, 16).unwrap();
            if length == 0 {
                return whole;
            }
            whole.extend_from_slice(&rest[end + 2..end + 2 + length]);
            rest = &rest[end + 4 + length..];
        }
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }
}

/// The server on `data`, on a free port.
pub fn command(data: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_imageserver"));
    command
        .args(["--insecure", "--listen", "127.0.0.1:0", "--data"])
        .arg(data)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// The fault in `error`.
pub fn fault(error: CallError) -> Fault {
    error
        .fault()
        .unwrap_or_else(|| panic!("no fault: {}", model::display::error_chain(&error)))
        .clone()
}

/// A fault as a test expects it.
pub fn expected(code: FaultCode, message: impl Into<String>) -> Fault {
    Fault::new(code, message)
}

/// An object stream of `contents`, whole.
pub fn stream_of(contents: &[&[u8]]) -> Vec<Bytes> {
    let mut chunks: Vec<Bytes> = contents.iter().flat_map(|content| object(content)).collect();
    chunks.push(head_bytes(&ObjectHead::End));
    chunks
}

/// The frame of one object.
pub fn object(content: &[u8]) -> [Bytes; 2] {
    let head =
        ObjectHead::Object { id: ALGORITHM.digest(content), size_bytes: content.len() as u64 };
    [head_bytes(&head), Bytes::copy_from_slice(content)]
}

/// Gives the stored image `from` the name `to`, which new images may not have any more.
pub fn rename_stored(data: &Path, from: &str, to: &str) {
    let path = |image: &str| data.join("images").join(layout::image_path(&name(image)));
    let record = std::fs::read_to_string(path(from)).unwrap();
    let quoted = |image: &str| serde_json::to_string(image).unwrap();
    let body = record.split_once('\n').unwrap().1.replace(&quoted(from), &quoted(to));
    let digest = ALGORITHM.digest(body.as_bytes());
    std::fs::remove_file(path(from)).unwrap();
    std::fs::create_dir_all(path(to).parent().unwrap()).unwrap();
    std::fs::write(path(to), format!("dominator-image 1 {digest}\n{body}")).unwrap();
}

pub fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

/// A tree of files with `(path, content)` in the directories that they need.
pub fn tree_of(files: &[(&str, &[u8])]) -> Tree {
    let mut builder = TreeBuilder::new(ALGORITHM);
    for (path, content) in files {
        let path: model::path::TreePath = path.parse().unwrap();
        for directory in path.ancestors().skip(1).filter(|directory| !directory.is_root()) {
            builder.replace(directory, Node::Directory(Metadata::new(0o755, 0, 0)));
        }
        builder.insert(path, file(content, content.len() as u64)).unwrap();
    }
    builder.finish().unwrap()
}

/// A file of `content` that a tree says has `size_bytes`.
pub fn file(content: &[u8], size_bytes: u64) -> Node {
    Node::Leaf(Leaf::File(File {
        metadata: Metadata::new(0o644, 0, 0),
        mtime: Time { seconds: 1_600_000_000, nanoseconds: 0 },
        size_bytes,
        object: ALGORITHM.digest(content).into(),
    }))
}

/// A tree of the computed file `/etc/issue` and a file with the content `a`.
pub fn tree_with_computed() -> Tree {
    let mut builder = TreeBuilder::new(ALGORITHM);
    for (path, node) in tree_of(&[("/etc/a", b"a")]).nodes() {
        builder.insert(path, node).unwrap();
    }
    let (metadata, source) = (Metadata::new(0o644, 0, 0), "filegen:6972".to_owned());
    let computed = Node::Leaf(Leaf::Computed(Computed { metadata, source }));
    builder.insert("/etc/issue".parse().unwrap(), computed).unwrap();
    builder.finish().unwrap()
}

/// All directories of `tree`, with their encodings.
pub fn directories(tree: &Tree) -> Vec<(ObjectId, Vec<u8>)> {
    fn collect(directory: &Directory, into: &mut Vec<(ObjectId, Vec<u8>)>) {
        into.push((directory.digest(), directory.encode()));
        for entry in directory.entries() {
            if let TreeChild::Directory(below) = &entry.child {
                collect(below, into);
            }
        }
    }
    let mut all = Vec::new();
    collect(tree.root(), &mut all);
    all
}

/// An image of `tree`, with an empty filter and no triggers.
pub fn image_of(image: &str, tree: &Tree) -> Content {
    Content {
        format: FORMAT,
        name: name(image),
        root: tree.digest(),
        filter: Some(Filter::new::<&str>([]).unwrap()),
        triggers: Triggers::default(),
        computed: computed_rules(tree),
        health_check: None,
        signers: Vec::new(),
    }
}

/// Where the server keeps `id` below its data directory; it may be packed.
pub fn stored(data: &Path, id: &ObjectId) -> PathBuf {
    let hex = id.hex();
    let plain = data.join("objects").join(id.algorithm().name()).join(&hex[..2]).join(&hex);
    let packed = plain.with_extension("packed");
    if packed.exists() { packed } else { plain }
}

/// How many files are in a directory.
pub fn files_in(directory: PathBuf) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// Waits until `condition` holds.
pub async fn until(condition: impl AsyncFn() -> bool) {
    testing::eventually_async("the condition holds", condition).await;
}

/// Changes one byte of a file in place, behind the back of the server.
pub fn flip(path: &Path) {
    let mut content = std::fs::read(path).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    std::fs::write(path, content).unwrap();
}
