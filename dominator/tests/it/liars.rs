//! Machines and image servers that lie: they answer as such do, and nothing of it is true.

use rpc::tls::Security;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use api::Done;
use api::dominator::{ListSubs, ListSubsRequest, Status};
use api::fault::{Fault, FaultCode};
use api::image_server::GetImage;
use api::object_server::GetObjects;
use api::object_stream::ObjectHead;
use api::subd::{
    Activity, CacheReport, EncodedDirectory, Fetch, FreeSpace, GetDirectories, GetDirectoriesReply,
    GetRefusedChanges, GetRefusedChangesReply, Poll, PollReply, Prepare, ScanReport,
    SetConfiguration, SubVersion, TriggerFailure,
};
use bytes::Bytes;
use model::escape::ByteText;
use model::image::{ComputedRule, Content, Image};
use model::object::{Algorithm, ObjectId};
use model::plan::{RefusedChange, RefusedKind};
use model::scope::{ScanSettings, Scope};
use model::tree::{Child, Directory, Entry, Leaf, Metadata, Name, Totals, Tree};
use model::trigger::{Trigger, Triggers};
use rpc::server::{Router, head_bytes, object_chunks};
use tokio::io::AsyncWriteExt as _;

use crate::bad_neighbours::listen;
use crate::fake::{FakeSub, ImageServer, directories, file, start, tree};
use crate::stage::{Stage, record, wait_until};

/// How long the liars go on in this test.
const SHOW: Duration = Duration::from_secs(2);

/// What a liar makes of the truth; the number counts its answers.
type Lie = fn(&mut PollReply, u64);

fn random_object(number: u64) -> ObjectId {
    Algorithm::Blake3.digest(&number.to_le_bytes())
}

fn truth(instance: u64, scope: Scope, tree: &Tree) -> PollReply {
    let version = SubVersion { instance, generation: 1, status: 1 };
    PollReply {
        scan: Some(ScanReport::of(scope, tree)),
        cache: Some(CacheReport::Full(Vec::new())),
        last_image: Some("base".parse().unwrap()),
        ..PollReply::idle(version, scope)
    }
}

/// A sub that scans as it is told, gives directories of `tree` whatever it is asked for, and
/// accepts every order without doing anything.
fn liar(tree: &Tree, lie: Lie) -> Router {
    let known = Arc::new(directories(tree));
    let settings = Arc::new(Mutex::new(ScanSettings::default()));
    static INSTANCES: AtomicU64 = AtomicU64::new(1 << 32);
    let instance = INSTANCES.fetch_add(1, Ordering::Relaxed);
    let count = AtomicU64::new(0);
    let (read, tree, told) = (known, tree.clone(), Arc::clone(&settings));
    Router::new("subd", &Security::Insecure)
        .method::<Poll, _>(move |(), _, _| {
            let scope = Scope::of(&told.lock().unwrap(), &[]);
            let mut reply = truth(instance, scope, &tree);
            lie(&mut reply, count.fetch_add(1, Ordering::SeqCst));
            async { Ok(reply) }
        })
        .method::<SetConfiguration, _>(move |(), _, request| {
            *settings.lock().unwrap() = request.scan.unwrap();
            async { Ok(Done {}) }
        })
        .method::<GetDirectories, _>(move |(), _, request| {
            let asked = request.digests.iter().filter_map(|digest| read.get(digest));
            let mut bytes: Vec<&Vec<u8>> = asked.collect();
            if bytes.is_empty() {
                bytes.extend(read.values());
            }
            let encoded = bytes.into_iter().map(|bytes| EncodedDirectory(ByteText(bytes.clone())));
            let reply = GetDirectoriesReply { directories: encoded.collect(), absent: Vec::new() };
            async { Ok(reply) }
        })
        .method::<Fetch, _>(|(), _, _| async { Ok(Done {}) })
        .method::<Prepare, _>(|(), _, _| async { Ok(Done {}) })
}

/// Tells of news with every answer.
fn news(reply: &mut PollReply, number: u64) {
    reply.version.generation = number + 2;
    reply.version.status = number + 2;
}

const LIES: [(&str, Lie); 10] = [
    ("impostor", |reply, _| reply.identity.hostname = "good".to_owned()),
    ("reborn", |reply, number| reply.version.instance = number),
    ("backwards", |reply, number| {
        let back = u64::MAX - number;
        reply.version.generation = back;
        reply.version.status = back;
    }),
    ("other-tree", |reply, number| {
        news(reply, number);
        reply.scan.as_mut().unwrap().root = random_object(7);
    }),
    ("endless", |reply, number| {
        news(reply, number);
        reply.scan.as_mut().unwrap().root = random_object(number);
    }),
    ("huge", |reply, number| {
        news(reply, number);
        let totals = Totals { entries: u64::MAX, bytes: u64::MAX, ..Totals::default() };
        reply.scan.as_mut().unwrap().totals = totals;
        reply.space = FreeSpace { free_bytes: 0, free_inodes: 0 };
    }),
    ("keeper", |reply, number| {
        news(reply, number);
        let path = |number: u64| format!("/nowhere/{number}").parse().unwrap();
        reply.scan.as_mut().unwrap().kept_directories =
            (number..number + 5_000).map(path).collect();
    }),
    ("hoarder", |reply, number| {
        news(reply, number);
        let objects = (number * 10_000..(number + 1) * 10_000).map(random_object).collect();
        reply.cache = Some(match number {
            0 => CacheReport::Full(objects),
            _ => CacheReport::Changes { added: objects, removed: Vec::new() },
        });
    }),
    ("fickle", |reply, number| {
        news(reply, number);
        reply.scanned = number % 2 == 0;
        reply.cache = (number % 3 == 0).then(|| CacheReport::Full(Vec::new()));
        reply.scan = reply.scan.take().filter(|_| number % 5 == 0);
        reply.activity = match number % 4 {
            0 => Activity::Idle,
            1 => Activity::Prepared { update_id: number },
            2 => Activity::Updating { update_id: number },
            _ => Activity::Fetching { fetch_id: number, objects: u64::MAX, bytes: u64::MAX },
        };
    }),
    ("loud", |reply, number| {
        news(reply, number);
        reply.trigger_failures = vec![TriggerFailure {
            service: "\u{1b}[2J<script>".to_owned(),
            verb: "start".to_owned(),
            output: "x".repeat(1 << 20),
        }];
    }),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_good_machine_converges_beside_liars_and_the_list_stays_short() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let mut guards = Vec::new();
    let mut machines = Vec::new();
    for (name, lie) in LIES {
        // The loud one has what its image has, so that its triggers are looked at.
        let has = if name == "loud" { want.clone() } else { tree(&file("/two", "2")) };
        let (address, guard) = start(liar(&has, lie)).await;
        guards.push(guard);
        machines.push(record(name, address.port()));
    }
    let shouting = Router::new("subd", &Security::Insecure).method::<Poll, _>(|(), _, _| async {
        Err(Fault::new(FaultCode::Internal, format!("\u{1b}[31m{}", "y".repeat(60_000))))
    });
    let (address, guard) = start(shouting).await;
    guards.push(guard);
    machines.push(record("shouting", address.port()));
    let slow = listen(|mut stream| async move {
        loop {
            if stream.write_all(&[0]).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    machines.push(record("slow", slow));
    let good = FakeSub::new(tree(""));
    machines.push(stage.sub("good", &good).await);
    let machines: Vec<String> = machines
        .iter()
        .map(|record| format!("{{{record}, \"RequiredImage\": \"base\"}}"))
        .collect();
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    stage.wait("good", Status::Synced, "base").await;

    let shown = Instant::now() + SHOW;
    let mut content = 3;
    while Instant::now() < shown {
        good.change(tree(&file("/one", &content.to_string())));
        content += 1;
        let changed = Instant::now();
        wait_until("the good machine has its tree", async || {
            good.model.lock().unwrap().sub.tree == want
        })
        .await;
        assert!(changed.elapsed() < Duration::from_secs(5), "the liars delay the good one");
        stage.wait("good", Status::Synced, "base").await;
    }
    let loud = stage.wait("loud", Status::TriggerFailed, "base").await;
    assert!(loud.detail.contains(" [2J<script> failed: xxx"), "{}", &loud.detail[..80]);
    stage.wait("shouting", Status::PollFailed, "base").await;
    stage.wait("impostor", Status::WrongMachine, "base").await;
    let subs = stage.client.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap().subs;
    for sub in &subs {
        assert!(sub.detail.len() < 2_000, "{}: {} bytes", sub.hostname, sub.detail.len());
        assert!(!sub.detail.contains(char::is_control), "{}: {:?}", sub.hostname, sub.detail);
        assert!(sub.hostname == "good" || sub.status != Status::Synced, "{sub:?}");
        let (status, page) =
            stage.client.get(&format!("/sub?host={}", sub.hostname)).await.unwrap();
        assert_eq!(status, 200);
        assert!(!String::from_utf8_lossy(&page).contains("<script>"), "{}", sub.hostname);
    }
    assert!(stage.terminate().success());
}

/// How many subs send the longest replies.
const LONG: usize = 24;

/// The length of what they send, in bytes. A reply has at most 64 MiB.
const LONG_BYTES: usize = 60 << 20;

/// The most that they may cost, in MiB: the room for replies, one more at a time on top, what these
/// are decoded to, and what a buffer is copied from when it grows. All at once take 1,500.
const LONG_MIB: u64 = 640;

/// A sub that says the truth, but in too many words.
fn windbag(tree: &Tree, number: usize) -> Router {
    let words = "x".repeat(LONG_BYTES);
    let (spoken, refused) = (words.clone(), words);
    let says = move |reply: &mut PollReply| {
        let (service, verb) = ("x".to_owned(), "start".to_owned());
        let output = spoken.clone();
        reply.trigger_failures = vec![TriggerFailure { service, verb, output }];
    };
    let router = liar(tree, |_, _| {});
    match number % 2 {
        0 => {
            let tree = tree.clone();
            router.method::<Poll, _>(move |(), _, _| {
                let mut reply = truth(1, Scope::of(&ScanSettings::default(), &[]), &tree);
                says(&mut reply);
                async { Ok(reply) }
            })
        }
        _ => router.method::<GetRefusedChanges, _>(move |(), _, ()| {
            let kind = RefusedKind::Any;
            let (path, why) = ("/x".parse().unwrap(), refused.clone());
            async {
                Ok(GetRefusedChangesReply { changes: vec![RefusedChange { path, kind, why }] })
            }
        }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_replies_of_many_share_one_budget() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &tree(&file("/one", "1")), Some(&[]));
    let before = stage.peak_mib();
    let mut guards = Vec::new();
    let mut machines = Vec::new();
    for number in 0..LONG {
        let (address, guard) = start(windbag(&tree(&file("/two", "2")), number)).await;
        guards.push(guard);
        let record = record(&format!("long-{number}"), address.port());
        machines.push(format!("{{{record}, \"RequiredImage\": \"base\"}}"));
    }
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    for number in 0..LONG {
        let shown = stage.wait(&format!("long-{number}"), Status::PollFailed, "base").await;
        let why = ["its report takes 62.9 MB", "it refuses changes of more than"][number % 2];
        // One that waits for its turn for too long is tried again later.
        let is_told = [why, "no reply within"].iter().any(|why| shown.detail.contains(why));
        assert!(is_told, "{}", shown.detail);
    }
    let good = FakeSub::new(tree(""));
    let record = stage.sub("good", &good).await;
    machines.push(format!("{{{record}, \"RequiredImage\": \"base\"}}"));
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    stage.wait("good", Status::Synced, "base").await;
    let grown = stage.peak_mib() - before;
    assert!(grown < LONG_MIB, "it has grown by {grown} MiB");
    assert!(stage.terminate().success());
}

/// Eight million entries in twenty-two directories: each holds the one below twice.
fn bomb() -> Tree {
    let mut below = Tree::empty(Algorithm::Blake3).root().clone();
    for _ in 0..22 {
        let twice = [b"a", b"b"].map(|name| Entry {
            name: Name::new(name).unwrap(),
            child: Child::Directory(Arc::clone(&below)),
        });
        let metadata = Metadata::new(0o755, 0, 0);
        let directory = Directory::new(Algorithm::Blake3, metadata, twice.to_vec()).unwrap();
        below = Arc::new(directory);
    }
    Tree::new(below)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_bomb_does_not_go_off() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base", &tree(&file("/one", "1")), Some(&[]));
    let (address, _guard) = start(liar(&bomb(), |_, _| {})).await;
    let record = record("bomb", address.port());
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    let bomb = stage.wait("bomb", Status::Blocked, "base").await;
    assert!(bomb.detail.contains("8388606 entries and its image 1"), "{}", bomb.detail);
    assert!(stage.terminate().success());
}

/// What an image server makes of an image.
type Distortion = fn(&mut Content);

/// Directories that an image server gives are wrong by the digest that is asked for.
fn wrong_directory(number: u8) -> ObjectId {
    ObjectId::Blake3([number; 32])
}

/// A tree with a hard link to what is not there.
fn dangling() -> Directory {
    let link = Leaf::HardLink("/nowhere".parse().unwrap());
    let entry = Entry { name: Name::new(b"link").unwrap(), child: Child::Leaf(link) };
    Directory::new(Algorithm::Blake3, Metadata::new(0o755, 0, 0), vec![entry]).unwrap()
}

const DISTORTIONS: [(&str, Distortion, &str); 9] = [
    (
        "other-name",
        |content| content.name = "base".parse().unwrap(),
        "the image server gives base for other-name",
    ),
    ("format", |content| content.format = 99, "image format 99 is unknown"),
    ("absent", |content| content.root = wrong_directory(0), "is not on the image server"),
    ("other-bytes", |content| content.root = wrong_directory(1), "was asked for"),
    ("garbage", |content| content.root = Algorithm::Blake3.digest(b"garbage"), "tree-1"),
    (
        "huge",
        |content| content.root = wrong_directory(2),
        "the directories of the tree take more than",
    ),
    ("dangling", |content| content.root = dangling().digest(), "/link is a hard link to /nowhere"),
    (
        "service",
        |content| {
            let match_lines = model::filter::Patterns::new(["/"]).unwrap();
            content.triggers = Triggers(vec![Trigger {
                match_lines,
                service: "--root=/".to_owned(),
                sort_name: String::new(),
                do_reload: false,
                do_reboot: false,
                high_impact: false,
                kind: Default::default(),
            }]);
        },
        "`--root=/` is no name of a service",
    ),
    (
        "computed",
        |content| {
            let source = "files:1".to_owned();
            content.computed = vec![ComputedRule { path: "/one".parse().unwrap(), source }];
        },
        "the computed files that the image lists",
    ),
];

/// An image server on which the images of [`DISTORTIONS`] are as these make them.
fn lying_image_server(images: &ImageServer) -> Router {
    let (read, objects) = (images.clone(), images.clone());
    Router::new("imageserver", &Security::Insecure)
        .method::<GetImage, _>(move |(), _, request| {
            let known = DISTORTIONS.iter().find(|(name, ..)| request.name.as_str() == *name);
            let image: Option<Image> = read.image(request.name.as_str());
            async move {
                let mut image = image.ok_or_else(|| Fault::new(FaultCode::NotFound, "none"))?;
                if let Some((_, distort, _)) = known {
                    distort(&mut image.content);
                }
                Ok(image)
            }
        })
        .download::<GetObjects, _, _>(move |(), _, request| {
            let mut chunks: Vec<std::io::Result<Bytes>> = Vec::new();
            for id in request.ids {
                let content = match id {
                    _ if id == wrong_directory(1) => Some(b"other".to_vec()),
                    _ if id == Algorithm::Blake3.digest(b"garbage") => Some(b"garbage".to_vec()),
                    _ if id == dangling().digest() => Some(dangling().encode()),
                    _ => objects.object(&id),
                };
                match content {
                    _ if id == wrong_directory(2) => {
                        let head = ObjectHead::Object { id, size_bytes: 1 << 60 };
                        chunks.push(Ok(head_bytes(&head)));
                    }
                    Some(content) => chunks.extend(object_chunks(id, content.into()).map(Ok)),
                    None => chunks.push(Ok(head_bytes(&ObjectHead::Absent(id)))),
                }
            }
            chunks.push(Ok(head_bytes(&ObjectHead::End)));
            async { Ok(futures_util::stream::iter(chunks)) }
        })
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_done_to_a_machine_for_the_lies_of_an_image_server() {
    let images = ImageServer::default();
    let router = lying_image_server(&images);
    let mut stage = Stage::served("[]", images, router).await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let mut machines = Vec::new();
    let mut subs = Vec::new();
    for name in DISTORTIONS.map(|(name, ..)| name).into_iter().chain(["good"]) {
        let sub = FakeSub::new(tree(""));
        let record = stage.sub(name, &sub).await;
        let image = if name == "good" { "base" } else { name };
        if name != "good" {
            stage.images.add(name, &want, Some(&[]));
        }
        machines.push(format!("{{{record}, \"RequiredImage\": \"{image}\"}}"));
        subs.push(sub);
    }
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    stage.wait("good", Status::Synced, "base").await;
    for ((name, _, why), sub) in DISTORTIONS.iter().zip(&subs) {
        let shown = stage.wait(name, Status::ImageNotReady, name).await;
        assert!(shown.detail.contains(why), "{name}: {}", shown.detail);
        let calls = sub.calls.lock().unwrap().clone();
        assert!(!calls.iter().any(|call| ["prepare", "commit"].contains(call)), "{calls:?}");
        assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""), "{name}");
    }
    assert!(stage.terminate().success());
}
