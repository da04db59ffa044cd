//! Filegen-servers that lie, and a full disk where their content is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::dominator::{Status, SubSummary};
use api::file_generator::{
    CONTENT_BYTES_MAX, ComputedContent, Generate, GenerateReply, GeneratedContent, GeneratedFile,
    Generator, Generators, GetContents, GetContentsReply, GetGenerators, GetGeneratorsReply,
};
use model::escape::ByteText;
use model::object::{Algorithm, ObjectId};
use rpc::server::Router;
use rpc::tls::Security;
use testing::eventually_async;
use tokio_util::sync::DropGuard;

use crate::fake::{FakeSub, start, tree};
use crate::stage::Stage;

/// The true content.
const TRUTH: &[u8] = b"the truth";

/// What a liar answers to both questions.
type Lie = fn(&mut GenerateReply, &mut Vec<ComputedContent>);

fn made(reply: &mut GenerateReply) -> &mut GeneratedContent {
    match &mut reply.machines[0][0] {
        GeneratedFile::Made(content) => content,
        GeneratedFile::Failed(why) => panic!("{why}"),
    }
}

/// Gives other content than the truth, under its own digest.
fn instead(bytes: Vec<u8>, reply: &mut GenerateReply, contents: &mut Vec<ComputedContent>) {
    let id = Algorithm::Blake3.digest(&bytes);
    made(reply).id = id;
    *contents = vec![ComputedContent { id, bytes: ByteText(bytes) }];
}

const LIES: [(&str, Lie, &str); 8] = [
    (
        "for-nobody",
        |reply, _| reply.machines.clear(),
        "the filegen-server has answered for other machines or files than were asked for",
    ),
    (
        "for-more-files",
        |reply, _| {
            let first = reply.machines[0][0].clone();
            reply.machines[0].push(first);
        },
        "the filegen-server has answered for other machines or files than were asked for",
    ),
    (
        "other-bytes",
        |_, contents| contents[0].bytes = ByteText(b"a lie".to_vec()),
        "the filegen-server has sent content that was not asked for, or is too long: blake3:",
    ),
    (
        "surplus",
        |_, contents| {
            let id = Algorithm::Blake3.digest(b"of another server");
            contents.push(ComputedContent { id, bytes: ByteText(b"a lie".to_vec()) });
        },
        "the filegen-server has sent content that was not asked for, or is too long: blake3:",
    ),
    ("nothing", |_, contents| contents.clear(), "the filegen-server does not have the content "),
    (
        "too-long",
        |reply, contents| instead(vec![b'x'; CONTENT_BYTES_MAX + 1], reply, contents),
        "the filegen-server has sent content that was not asked for, or is too long: blake3:",
    ),
    (
        "other-digest",
        |reply, contents| {
            let id = Algorithm::Sha512.digest(TRUTH);
            made(reply).id = id;
            contents[0].id = id;
        },
        "the filegen-server has answered with another digest algorithm",
    ),
    (
        "long-reason",
        |reply, _| {
            let why = format!("\u{1b}[2J{}", "no ".repeat(100_000));
            reply.machines[0][0] = GeneratedFile::Failed(why);
        },
        " [2Jno no no",
    ),
];

/// A filegen-server that lies until `is_honest`.
fn server(lie: Lie, is_honest: &Arc<AtomicBool>, truth: &'static [u8]) -> Router {
    let id = Algorithm::Blake3.digest(truth);
    let version = Algorithm::Blake3.digest(b"version");
    let answers = move |is_honest: &AtomicBool| {
        let made = GeneratedContent {
            id,
            size_bytes: 9,
            valid_until_seconds: 0,
            generator: version,
            is_secret: false,
        };
        let mut reply = GenerateReply { machines: vec![vec![GeneratedFile::Made(made)]] };
        let mut contents = vec![ComputedContent { id, bytes: ByteText(truth.to_vec()) }];
        if !is_honest.load(Ordering::SeqCst) {
            lie(&mut reply, &mut contents);
        }
        (reply, contents)
    };
    let [one, other] = [Arc::clone(is_honest), Arc::clone(is_honest)];
    Router::new("filegen-server", &Security::Insecure)
        .method::<Generate, _>(move |(), _, _| {
            let (reply, _) = answers(&one);
            async { Ok(reply) }
        })
        .method::<GetContents, _>(move |(), _, request| {
            let (_, contents) = answers(&other);
            let absent: Vec<ObjectId> =
                request.ids.into_iter().filter(|_| contents.is_empty()).collect();
            async { Ok(GetContentsReply { contents, absent }) }
        })
        .method::<GetGenerators, _>(move |(), _, _| async move {
            let path = "/computed".parse().unwrap();
            let kind = "file".to_owned();
            let generators = vec![Generator {
                path,
                kind,
                version,
                is_secret: false,
                revision: 1,
                resources: vec![],
            }];
            let generators = Generators { generators, ..Generators::default() };
            Ok(GetGeneratorsReply { version, generators: Some(generators) })
        })
}

/// A machine whose image `name` has one computed file from a server. Returns its record.
async fn machine(
    stage: &mut Stage,
    name: &str,
    router: Router,
    guards: &mut Vec<DropGuard>,
) -> (String, FakeSub) {
    let (address, guard) = start(router).await;
    guards.push(guard);
    let sub = FakeSub::new(tree(""));
    let record = stage.sub(name, &sub).await;
    stage.images.add(name, &tree(&format!("g 644 0:0 {address} /computed\n")), Some(&[]));
    (format!("{{{record}, \"RequiredImage\": \"{name}\"}}"), sub)
}

/// Waits until the machine waits for this reason.
async fn waits(stage: &Stage, hostname: &str, why: &str) -> SubSummary {
    eventually_async(&format!("{hostname} waits: {why}"), async || {
        let subs = stage.list().await;
        let sub = subs.into_iter().find(|sub| sub.hostname == hostname).ok_or(None)?;
        let is_so = sub.status == Status::WaitingForComputedFiles && sub.detail.contains(why);
        if is_so { Ok(sub) } else { Err(Some(sub)) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_done_for_the_lies_of_a_filegen_server() {
    let mut stage = Stage::new("[]").await;
    let (mut machines, mut subs, mut guards) = (Vec::new(), Vec::new(), Vec::new());
    let is_honest = Arc::new(AtomicBool::new(false));
    for (name, lie, _) in LIES {
        let router = server(lie, &is_honest, TRUTH);
        let (record, sub) = machine(&mut stage, name, router, &mut guards).await;
        machines.push(record);
        subs.push(sub);
    }
    stage.write_mdb(&format!("[{}]", machines.join(",")));
    for ((name, _, why), sub) in LIES.iter().zip(&subs) {
        let shown = waits(&stage, name, why).await;
        assert!(shown.detail.len() < 2_000, "{name}: {} bytes", shown.detail.len());
        assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""), "{name}");
    }
    // A server that has become honest is believed.
    is_honest.store(true, Ordering::SeqCst);
    for (name, ..) in LIES {
        stage.wait(name, Status::Synced, name).await;
    }
    assert!(stage.terminate().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_keeps_machines_waiting_until_there_is_room() {
    static LARGE: [u8; CONTENT_BYTES_MAX] = [b'x'; CONTENT_BYTES_MAX];
    let mut stage = Stage::new("[]").await;
    stage.kill();
    stage.start_for_limits().await;
    stage.limit_files("2097152");
    let mut guards = Vec::new();
    let router = server(|_, _| {}, &Arc::new(AtomicBool::new(true)), &LARGE);
    let (record, sub) = machine(&mut stage, "large", router, &mut guards).await;
    stage.write_mdb(&format!("[{record}]"));
    waits(&stage, "large", "the content cannot be stored").await;
    assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""));
    stage.limit_files("unlimited");
    stage.wait("large", Status::Synced, "large").await;
    assert!(stage.terminate().success());
}
