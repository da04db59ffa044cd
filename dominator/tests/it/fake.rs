//! A fake image server and fake subs: the real protocol over real sockets, without disks.

use rpc::tls::Security;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::GetImage;
use api::object_server::GetObjects;
use api::object_stream::ObjectHead;
use api::subd::{
    AddObjects, Cleanup, Commit, EncodedDirectory, Fetch, GetDirectories, GetDirectoriesReply,
    Hurry, Poll, Prepare, ScanNow, SetConfiguration, SubIdentity,
};
use bytes::Bytes;
use dominator::core::sub::{Call, RequestId};
use futures_util::stream;
use model::escape::ByteText;
use model::filter::Filter;
use model::image::{Content, FORMAT, Image, ImageName, Notes, computed_rules};
use model::object::{Algorithm, ObjectId};
use model::tree::text::from_text;
use model::tree::{Child, Directory, Tree};
use model::trigger::Triggers;
use rpc::server::{Router, head_bytes, object_chunks, serve};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::model::{Answer, Model, Request};
use testing::random::Random;

/// Parses the text of a tree.
pub fn tree(text: &str) -> Tree {
    from_text(Algorithm::Blake3, text).unwrap()
}

/// Returns the line of a file with this content in the text of a tree.
pub fn file(path: &str, content: &str) -> String {
    let object = Algorithm::Blake3.digest(content.as_bytes());
    format!("f 644 0:0 1.000000000 {} {object} {path}\n", content.len())
}

/// Returns the encodings of all directories of a tree by digest.
pub fn directories(tree: &Tree) -> BTreeMap<ObjectId, Vec<u8>> {
    let mut found: BTreeMap<ObjectId, Vec<u8>> = BTreeMap::new();
    let mut stack: Vec<Arc<Directory>> = vec![Arc::clone(tree.root())];
    while let Some(directory) = stack.pop() {
        if found.insert(directory.digest(), directory.encode()).is_some() {
            continue;
        }
        stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
            Child::Directory(below) => Some(Arc::clone(below)),
            Child::Leaf(_) => None,
        }));
    }
    found
}

/// Serves `router` on a free port of 127.0.0.1 until the guard is dropped.
pub async fn start(router: Router) -> (SocketAddr, DropGuard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(serve(listener, router, stop.clone()));
    (address, stop.drop_guard())
}

/// An image server in memory.
#[derive(Clone, Default)]
pub struct ImageServer {
    images: Arc<Mutex<BTreeMap<ImageName, Image>>>,
    deleted: Arc<Mutex<BTreeSet<ImageName>>>,
    objects: Arc<Mutex<BTreeMap<ObjectId, Vec<u8>>>>,
    added: Arc<Notify>,
    /// How often an image was asked for.
    pub requests: Arc<AtomicU64>,
}

impl ImageServer {
    /// Adds an image. Without filter lines nothing is kept; `None` makes the image sparse.
    pub fn add(&self, name: &str, tree: &Tree, filter: Option<&[&str]>) {
        self.add_with(name, tree, filter, "[]");
    }

    /// Adds an image with triggers in JSON.
    pub fn add_with(&self, name: &str, tree: &Tree, filter: Option<&[&str]>, triggers: &str) {
        let name = ImageName::new(name).unwrap();
        let content = Content {
            format: FORMAT,
            name: name.clone(),
            root: tree.digest(),
            filter: filter.map(|lines| Filter::new(lines).unwrap()),
            triggers: Triggers::from_json(triggers).unwrap(),
            computed: computed_rules(tree),
            health_check: None,
            signers: Vec::new(),
        };
        self.objects.lock().unwrap().extend(directories(tree));
        self.images.lock().unwrap().insert(name, Image { content, notes: Notes::default() });
        self.added.notify_waiters();
    }

    /// Returns an image.
    pub fn image(&self, name: &str) -> Option<Image> {
        self.images.lock().unwrap().get(&ImageName::new(name).unwrap()).cloned()
    }

    /// Returns the encoding of a directory.
    pub fn object(&self, id: &ObjectId) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(id).cloned()
    }

    /// Deletes an image.
    pub fn delete(&self, name: &str) {
        self.lose(name);
        self.deleted.lock().unwrap().insert(ImageName::new(name).unwrap());
    }

    /// Removes an image, as if it had never been.
    pub fn lose(&self, name: &str) {
        self.images.lock().unwrap().remove(&ImageName::new(name).unwrap()).unwrap();
    }

    /// Marks an image as deprecated.
    pub fn deprecate(&self, name: &str, why: &str) {
        let name = ImageName::new(name).unwrap();
        let mut images = self.images.lock().unwrap();
        let tags = &mut images.get_mut(&name).unwrap().notes.tags;
        tags.insert("deprecated".to_owned(), why.to_owned());
    }

    pub fn router(&self) -> Router {
        let (asked, objects) = (self.clone(), Arc::clone(&self.objects));
        Router::new("imageserver", &Security::Insecure)
            .method::<GetImage, _>(move |(), _, request| {
                let server = asked.clone();
                server.requests.fetch_add(1, Ordering::Relaxed);
                async move {
                    let wait = Duration::from_millis(request.wait_ms.into());
                    let found = tokio::time::timeout(wait, async {
                        loop {
                            let added = server.added.notified();
                            if let Some(image) = server.images.lock().unwrap().get(&request.name) {
                                return image.clone();
                            }
                            added.await;
                        }
                    });
                    found.await.map_err(|_| {
                        let is_deleted = server.deleted.lock().unwrap().contains(&request.name);
                        let code = if is_deleted { FaultCode::Gone } else { FaultCode::NotFound };
                        Fault::new(code, "no such image")
                    })
                }
            })
            .download::<GetObjects, _, _>(move |(), _, request| {
                let objects = Arc::clone(&objects);
                async move {
                    let objects = objects.lock().unwrap();
                    let mut chunks: Vec<std::io::Result<Bytes>> = Vec::new();
                    for id in request.ids {
                        match objects.get(&id) {
                            Some(content) => {
                                chunks.extend(object_chunks(id, content.clone().into()).map(Ok));
                            }
                            None => chunks.push(Ok(head_bytes(&ObjectHead::Absent(id)))),
                        }
                    }
                    chunks.push(Ok(head_bytes(&ObjectHead::End)));
                    Ok(stream::iter(chunks))
                }
            })
    }
}

/// A model of a sub with a real server.
#[derive(Clone)]
pub struct FakeSub {
    pub model: Arc<Mutex<Model>>,
    random: Arc<Mutex<Random>>,
    news: Arc<Notify>,
    /// The names of all calls, in order.
    pub calls: Arc<Mutex<Vec<&'static str>>>,
    /// The ids of all updates that were ordered.
    pub commits: Arc<Mutex<Vec<u64>>>,
    /// If true, Commit is neither executed nor answered.
    pub ignores_commit: Arc<AtomicBool>,
}

impl FakeSub {
    pub fn new(tree: Tree) -> Self {
        static SEED: AtomicU64 = AtomicU64::new(1);
        let mut random = Random::new(SEED.fetch_add(1, Ordering::Relaxed));
        let mut model = Model::new(tree);
        model.start(&mut random);
        model.started.iter_mut().for_each(|(delay, _)| *delay = Duration::ZERO);
        let sub = Self {
            model: Arc::new(Mutex::new(model)),
            random: Arc::new(Mutex::new(random)),
            news: Arc::default(),
            calls: Arc::default(),
            commits: Arc::default(),
            ignores_commit: Arc::default(),
        };
        sub.work();
        sub
    }

    /// Makes a sub with this hostname and machine id.
    pub fn named(hostname: &str, machine_id: &str, tree: Tree) -> Self {
        let sub = Self::new(tree);
        sub.model.lock().unwrap().sub.identity = Arc::new(SubIdentity {
            hostname: hostname.to_owned(),
            machine_id: machine_id.to_owned(),
            boot_id: format!("boot of {machine_id}"),
            subd_version: String::new(),
        });
        sub
    }

    /// Changes the machine's tree; the next scan comes at once.
    pub fn change(&self, tree: Tree) {
        self.with_model(|model, random| {
            model.drift(tree, random);
            model.started.iter_mut().for_each(|(delay, _)| *delay = Duration::ZERO);
        });
        self.work();
    }

    /// Takes both locks, always in the same order.
    fn with_model<T>(&self, act: impl FnOnce(&mut Model, &mut Random) -> T) -> T {
        let mut random = self.random.lock().unwrap();
        act(&mut self.model.lock().unwrap(), &mut random)
    }

    /// Does the started work after short delays.
    fn work(&self) {
        let started = std::mem::take(&mut self.model.lock().unwrap().started);
        for (delay, work) in started {
            let sub = self.clone();
            // A hundredth of the simulated duration is enough here.
            let delay =
                if matches!(work, crate::model::Work::Expire(_)) { delay } else { delay / 100 };
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                sub.with_model(|model, random| model.end(&work, random));
                sub.work();
                sub.news.notify_waiters();
            });
        }
    }

    fn ask(&self, name: &'static str, request: Request) -> Result<Done, Fault> {
        self.calls.lock().unwrap().push(name);
        let answer = self.with_model(|model, random| model.ask(request, random));
        self.work();
        self.news.notify_waiters();
        match answer {
            Answer::Accepted | Answer::Tree(..) | Answer::Scanned(_) => Ok(Done {}),
            Answer::Failed(fault) => Err(fault),
        }
    }

    pub fn router(&self) -> Router {
        let sub = || self.clone();
        let (poll, read, configure) = (sub(), sub(), sub());
        let (fetch, prepare, commit, clean) = (sub(), sub(), sub(), sub());
        let (hurried, scan, add) = (sub(), sub(), sub());
        Router::new("subd", &Security::Insecure)
            .method::<Poll, _>(move |(), _, request| {
                let sub = poll.clone();
                async move {
                    let wait = Duration::from_millis(request.wait_ms.into());
                    let deadline = tokio::time::Instant::now() + wait;
                    loop {
                        let news = sub.news.notified();
                        let late = tokio::time::Instant::now() >= deadline;
                        let answered = {
                            let mut model = sub.model.lock().unwrap();
                            model.poll(0, RequestId(0), &request);
                            let answers = model.answers(late);
                            model.waiting.clear();
                            answers.into_iter().next()
                        };
                        if let Some((_, reply)) = answered {
                            return Ok(reply);
                        }
                        let _either = tokio::time::timeout_at(deadline, news).await;
                    }
                }
            })
            .method::<GetDirectories, _>(move |(), _, request| {
                let sub = read.clone();
                async move {
                    sub.calls.lock().unwrap().push("get-directories");
                    let scanned = sub.model.lock().unwrap().sub.scanned().cloned();
                    let known = scanned.map(|tree| directories(&tree)).unwrap_or_default();
                    let mut reply =
                        GetDirectoriesReply { directories: Vec::new(), absent: Vec::new() };
                    for digest in request.digests {
                        match known.get(&digest) {
                            Some(bytes) => {
                                reply.directories.push(EncodedDirectory(ByteText(bytes.clone())));
                            }
                            None => reply.absent.push(digest),
                        }
                    }
                    Ok(reply)
                }
            })
            .method::<SetConfiguration, _>(move |(), _, request| {
                let sub = configure.clone();
                async move {
                    sub.ask("set-configuration", Request::Call(Call::SetConfiguration(request)))
                }
            })
            .method::<Fetch, _>(move |(), _, request| {
                let sub = fetch.clone();
                async move { sub.ask("fetch", Request::Call(Call::Fetch(request))) }
            })
            .method::<AddObjects, _>(move |(), _, request| {
                let sub = add.clone();
                let ids = request.contents.iter().map(|content| content.id).collect();
                async move { sub.ask("add-objects", Request::Call(Call::AddObjects(ids))) }
            })
            .method::<Prepare, _>(move |(), _, request| {
                let sub = prepare.clone();
                let call = Call::Prepare(Box::new(request), None);
                async move { sub.ask("prepare", Request::Call(call)) }
            })
            .method::<Commit, _>(move |(), _, request| {
                let sub = commit.clone();
                async move {
                    sub.commits.lock().unwrap().push(request.update_id);
                    if sub.ignores_commit.load(Ordering::SeqCst) {
                        sub.calls.lock().unwrap().push("commit");
                        std::future::pending::<()>().await;
                    }
                    sub.ask("commit", Request::Commit(request.update_id))
                }
            })
            .method::<Hurry, _>(move |(), _, ()| {
                let sub = hurried.clone();
                async move {
                    sub.calls.lock().unwrap().push("hurry");
                    Ok(Done {})
                }
            })
            .method::<ScanNow, _>(move |(), _, _request| {
                let sub = scan.clone();
                async move {
                    sub.calls.lock().unwrap().push("scan-now");
                    sub.model.lock().unwrap().end_scan();
                    sub.news.notify_waiters();
                    Ok(Done {})
                }
            })
            .method::<Cleanup, _>(move |(), _, request| {
                let sub = clean.clone();
                async move { sub.ask("cleanup", Request::Call(Call::Cleanup(request))) }
            })
    }
}
