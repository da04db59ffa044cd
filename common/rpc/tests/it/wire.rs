//! Calls, streams and pages between a real client and a real server.

use rpc::tls::Security;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::image_server::{DeleteImage, DeleteImageRequest};
use api::object_server::{AddObjects, AddObjectsReply, GetObjects, GetObjectsRequest};
use api::object_stream::ObjectHead;
use api::subd::{Commit, CommitRequest, GetConfiguration};
use api::{Done, dominator::GetStatus};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use model::object::{Algorithm, ObjectId};
use rpc::client::{CallError, Client, Peer, Remedy};
use rpc::server::{
    Content, Page, Router, SHUTDOWN_GRACE, StreamError, head_bytes, object_chunks, serve,
};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A server on a free port.
pub struct Server {
    pub address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start<S: Send + Sync + 'static>(router: Router<S>) -> Self {
        Self::start_at(router, "127.0.0.1:0".parse().unwrap()).await
    }

    pub async fn start_at<S: Send + Sync + 'static>(
        router: Router<S>,
        address: SocketAddr,
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let task = tokio::spawn(serve(listener, router, stop.clone()));
        Self { address, stop, task }
    }

    pub fn client(&self) -> Client {
        Client::new(Peer::parse(&self.address.to_string(), 0).unwrap(), &Security::Insecure)
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A router that answers a few methods.
pub fn router() -> Router {
    Router::new("testd", &Security::Insecure)
        .method::<Commit, _>(|(), _, request| async move {
            match request.update_id {
                0 => Err(Fault::new(FaultCode::NotFound, "update 0 is not staged")),
                1 => panic!("planted"),
                _ => Ok(Done {}),
            }
        })
        .method::<GetConfiguration, _>(|(), _, ()| async { Ok(Default::default()) })
        .method::<DeleteImage, _>(|(), _, _| std::future::pending())
        .upload::<AddObjects, _>(|(), _, mut reader| async move {
            let refuse =
                |error: StreamError| Fault::new(FaultCode::BadRequest, format!("{error:?}"));
            let mut reply = AddObjectsReply::default();
            loop {
                let ObjectHead::Object { id, size_bytes } = reader.head().await.map_err(refuse)?
                else {
                    return Ok(reply);
                };
                let mut hasher = model::object::Hasher::new(id.algorithm());
                while let Some(chunk) = reader.chunk().await.map_err(refuse)? {
                    hasher.update(&chunk);
                }
                assert_eq!(hasher.finish(), id);
                reply.added += 1;
                reply.added_bytes += size_bytes;
            }
        })
        .download::<GetObjects, _, _>(|(), _, request: GetObjectsRequest| async move {
            if request.ids.is_empty() {
                return Err(Fault::new(FaultCode::BadRequest, "no ids"));
            }
            let contents: BTreeMap<ObjectId, Bytes> = contents()
                .into_iter()
                .map(|content| (Algorithm::Blake3.digest(&content), content))
                .collect();
            let mut chunks: Vec<io::Result<Bytes>> = Vec::new();
            for id in request.ids {
                match contents.get(&id) {
                    Some(content) => {
                        chunks.extend(object_chunks(id, content.clone()).map(Ok));
                    }
                    None => chunks.push(Ok(head_bytes(&ObjectHead::Absent(id)))),
                }
            }
            chunks.push(Ok(head_bytes(&ObjectHead::End)));
            Ok(stream::iter(chunks))
        })
        .page("/", |(), request| async move {
            let asked = request.query.get("a");
            Ok(Page::Html(format!("{asked:?} from {}", request.caller.address.ip())))
        })
        .page("/objects/", |(), request| async move {
            if request.below != "digits" {
                return Err(Fault::new(FaultCode::NotFound, "no <object>"));
            }
            let digits = b"0123456789";
            let part = match request.range {
                None => None,
                Some(range) => match range.of(10) {
                    None => return Ok(Page::RangeNotSatisfiable { total_bytes: 10 }),
                    part => part,
                },
            };
            let shown = part.clone().unwrap_or(0..10);
            let shown = shown.start as usize..shown.end as usize;
            let bytes = Bytes::from_static(&digits[shown]);
            Ok(Page::Stream(Content {
                content_type: "application/octet-stream",
                total_bytes: 10,
                part,
                etag: Some("digits".to_owned()),
                immutable: true,
                is_packed: false,
                body: stream::iter([Ok(bytes)]).boxed(),
            }))
        })
}

fn contents() -> Vec<Bytes> {
    let large: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
    vec![Bytes::new(), Bytes::from_static(b"small"), large.into()]
}

/// Speaks HTTP/1.1 by hand: sends `request`, gives all that comes until the server closes.
pub async fn raw(address: SocketAddr, request: &[u8]) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut reply = Vec::new();
    let read = stream.read_to_end(&mut reply);
    let result = tokio::time::timeout(Duration::from_secs(8), read).await;
    // A server that refuses a body closes before it has come; that may reset the connection.
    let _reset = result.expect("the server closes");
    String::from_utf8_lossy(&reply).into_owned()
}

/// The same with the headers that every call of JSON has.
pub async fn raw_json(address: SocketAddr, method: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    let request = format!(
        "POST /rpc/{method} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    );
    raw(address, request.as_bytes()).await
}

#[tokio::test]
async fn a_call_gives_the_reply_or_the_fault() {
    let server = Server::start(router()).await;
    let client = server.client();
    client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    client.call::<GetConfiguration>(&()).await.unwrap();

    let error = client.call::<Commit>(&CommitRequest { update_id: 0 }).await.unwrap_err();
    let expected = Fault::new(FaultCode::NotFound, "update 0 is not staged");
    assert_eq!(error.fault(), Some(&expected));
    let text = format!("Subd.Commit at {}: update 0 is not staged", server.address);
    assert_eq!(model::display::error_chain(&error), text);
    server.stop().await;
}

#[tokio::test]
async fn a_handler_that_panics_fails_its_call_only() {
    let server = Server::start(router()).await;
    let client = server.client();
    let error = client.call::<Commit>(&CommitRequest { update_id: 1 }).await.unwrap_err();
    assert_eq!(error.code(), Some(FaultCode::Internal));
    client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn methods_that_are_not_served_say_why() {
    let server = Server::start(router()).await;
    let error = server.client().call::<GetStatus>(&()).await.unwrap_err();
    let text = "Dominator.GetStatus is not a method of this daemon (testd)";
    assert_eq!(error.fault(), Some(&Fault::new(FaultCode::NoMethod, text)));
    for (method, text) in [
        ("MdbServer.GetMdbUpdates", "MdbServer.GetMdbUpdates comes with a later release"),
        ("Subd.Gone", "there is no method `Subd.Gone`; see docs/PROTOCOL.md"),
    ] {
        let reply = raw_json(server.address, method, "", "null").await;
        assert!(reply.starts_with("HTTP/1.1 404 "), "{reply}");
        let fault = format!("{{\"code\":\"no-method\",\"message\":\"{text}\"}}");
        assert!(reply.ends_with(&fault), "{reply}");
    }
    server.stop().await;
}

#[tokio::test]
async fn many_long_calls_share_one_connection_and_do_not_delay_others() {
    let polls = Router::new("testd", &Security::Insecure).method::<Commit, _>(
        |(), _, request| async move {
            if request.update_id != 0 {
                std::future::pending::<()>().await;
            }
            Ok(Done {})
        },
    );
    let server = Server::start(polls).await;
    let client = server.client();
    let mut waiting = tokio::task::JoinSet::new();
    for update_id in 1..=300 {
        let client = client.clone();
        waiting.spawn(async move {
            let limit = Duration::from_secs(600);
            client.call_within::<Commit>(&CommitRequest { update_id }, limit).await
        });
    }
    let running = "dominator_rpc_running 300";
    loop {
        let (_, text) = client.get("/metrics").await.unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        if text.contains(running) {
            assert!(text.contains("dominator_connections 1\n"), "{text}");
            break;
        }
    }
    client.call::<Commit>(&CommitRequest { update_id: 0 }).await.unwrap();
    // Callers that go away end their calls at the server.
    waiting.shutdown().await;
    loop {
        let (_, text) = client.get("/metrics").await.unwrap();
        if String::from_utf8(text.to_vec()).unwrap().contains("dominator_rpc_running 0\n") {
            break;
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_call_ends_at_its_limit() {
    let server = Server::start(router()).await;
    let request = DeleteImageRequest { name: "a/b".parse().unwrap(), force: false };
    let limit = Duration::from_millis(50);
    let error = server.client().call_within::<DeleteImage>(&request, limit).await.unwrap_err();
    assert!(matches!(error, CallError::TimedOut { limit: got, .. } if got == limit), "{error:?}");
    assert_eq!(error.remedy(), Remedy::Wait);
    server.stop().await;
}

#[tokio::test]
async fn a_client_connects_again_after_the_server_was_away() {
    let server = Server::start(router()).await;
    let (address, client) = (server.address, server.client());
    let request = CommitRequest { update_id: 2 };
    client.call::<Commit>(&request).await.unwrap();
    server.stop().await;
    let error = client.call::<Commit>(&request).await.unwrap_err();
    assert!(matches!(error, CallError::Connect { .. } | CallError::Lost { .. }), "{error:?}");
    let server = Server::start_at(router(), address).await;
    client.call::<Commit>(&request).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_stops_lets_calls_finish() {
    let (began, mut begun) = tokio::sync::mpsc::channel::<()>(1);
    let go = CancellationToken::new();
    let wait = go.clone();
    let slow = Router::new("testd", &Security::Insecure).method::<Commit, _>(move |(), _, _| {
        let (began, wait) = (began.clone(), wait.clone());
        async move {
            began.send(()).await.unwrap();
            wait.cancelled().await;
            Ok(Done {})
        }
    });
    let server = Server::start(slow).await;
    let client = server.client();
    let request = CommitRequest { update_id: 2 };
    let call = tokio::spawn(async move { client.call::<Commit>(&request).await });
    begun.recv().await.unwrap();
    server.stop.cancel();
    go.cancel();
    call.await.unwrap().unwrap();
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stops_does_not_wait_for_ever() {
    let (began, mut begun) = tokio::sync::mpsc::channel::<()>(1);
    let stuck = Router::new("testd", &Security::Insecure).method::<Commit, _>(move |(), _, _| {
        let began = began.clone();
        async move {
            began.send(()).await.unwrap();
            std::future::pending().await
        }
    });
    let server = Server::start(stuck).await;
    let client = server.client();
    let limit = Duration::from_secs(3_600);
    let request = CommitRequest { update_id: 2 };
    let call = tokio::spawn(async move { client.call_within::<Commit>(&request, limit).await });
    begun.recv().await.unwrap();
    let asked = tokio::time::Instant::now();
    server.stop().await;
    assert!(asked.elapsed() < SHUTDOWN_GRACE + Duration::from_secs(1), "{:?}", asked.elapsed());
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Lost { .. }), "{error:?}");
}

#[tokio::test]
async fn objects_travel_both_ways() {
    let server = Server::start(router()).await;
    let client = server.client();
    let mut upload: Vec<io::Result<Bytes>> = Vec::new();
    for content in contents() {
        let id = Algorithm::Sha512.digest(&content);
        upload.extend(object_chunks(id, content).map(Ok));
    }
    upload.push(Ok(head_bytes(&ObjectHead::End)));
    let reply = client.upload::<AddObjects>(stream::iter(upload)).await.unwrap();
    assert_eq!(reply, AddObjectsReply { added: 3, added_bytes: 3_000_005, known: 0 });

    let absent = Algorithm::Blake3.digest(b"absent");
    let mut ids: Vec<ObjectId> =
        contents().iter().map(|content| Algorithm::Blake3.digest(content)).collect();
    ids.insert(1, absent);
    let request = GetObjectsRequest { ids: ids.clone() };
    let mut reader = client.get_objects(&request).await.unwrap();
    // The reader outlives the client that made it.
    drop(client);
    let mut got = Vec::new();
    loop {
        match reader.head().await.unwrap() {
            ObjectHead::Object { id, size_bytes } => {
                let mut content = Vec::new();
                while let Some(chunk) = reader.chunk().await.unwrap() {
                    content.extend_from_slice(&chunk);
                }
                assert_eq!(content.len() as u64, size_bytes);
                assert_eq!(Algorithm::Blake3.digest(&content), id);
                got.push(id);
            }
            ObjectHead::Absent(id) => {
                assert_eq!(id, absent);
                got.push(id);
            }
            ObjectHead::End => break,
        }
    }
    assert_eq!(got, ids);
    assert_eq!(reader.head().await.unwrap(), ObjectHead::End);
    server.stop().await;
}

/// A server that answers each request for objects with `heads`, and no content.
async fn answering(heads: Vec<ObjectHead>) -> Server {
    let chunks: Vec<Bytes> = heads.iter().map(head_bytes).collect();
    let answer = move |(), _, _: GetObjectsRequest| {
        let chunks = chunks.clone().into_iter().map(Ok::<_, io::Error>);
        async move { Ok(stream::iter(chunks)) }
    };
    let router = Router::new("test", &Security::Insecure);
    Server::start(router.download::<GetObjects, _, _>(answer)).await
}

#[tokio::test]
async fn only_what_was_requested_is_read_and_only_as_often() {
    let [one, two, other] = [b"1", b"2", b"3"].map(|content| Algorithm::Blake3.digest(content));
    let absent = ObjectHead::Absent;
    let empty = |id| ObjectHead::Object { id, size_bytes: 0 };
    // What is requested, how it is answered, how many frames are read, and which one is refused.
    let table = [
        (vec![one, two], vec![absent(two), empty(one)], 2, None),
        (vec![one, one], vec![empty(one), empty(one)], 2, None),
        (vec![one, two], vec![absent(one), absent(one)], 1, Some(one)),
        (vec![one, two], vec![empty(one), empty(one)], 1, Some(one)),
        (vec![one, two], vec![empty(one), absent(one)], 1, Some(one)),
        (vec![one, two], vec![absent(other)], 0, Some(other)),
        (vec![one, two], vec![absent(one), empty(other)], 1, Some(other)),
    ];
    for (ids, mut heads, want_read, want_refused) in table {
        heads.push(ObjectHead::End);
        let server = answering(heads.clone()).await;
        let request = GetObjectsRequest { ids };
        let mut reader = server.client().get_objects(&request).await.unwrap();
        let mut read = 0;
        let refused = loop {
            match reader.head().await {
                Ok(ObjectHead::End) => break None,
                Ok(_) => read += 1,
                Err(StreamError::Unrequested { id }) => break Some(id),
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!((read, refused), (want_read, want_refused), "{heads:?}");
        server.stop().await;
    }
}

#[tokio::test]
async fn the_rest_of_an_object_may_be_skipped() {
    let server = Server::start(router()).await;
    let ids = contents().into_iter().map(|content| Algorithm::Blake3.digest(&content)).rev();
    let request = GetObjectsRequest { ids: ids.collect() };
    let mut reader = server.client().get_objects(&request).await.unwrap();
    let mut sizes = Vec::new();
    while let ObjectHead::Object { size_bytes, .. } = reader.head().await.unwrap() {
        sizes.push(size_bytes);
        reader.chunk().await.unwrap();
    }
    assert_eq!(sizes, [3_000_000, 5, 0]);
    let empty = GetObjectsRequest { ids: Vec::new() };
    let error = server.client().get_objects(&empty).await.unwrap_err();
    assert_eq!(error.fault(), Some(&Fault::new(FaultCode::BadRequest, "no ids")));
    server.stop().await;
}

#[tokio::test]
async fn streams_that_were_cut_are_known_to_be() {
    let server = Server::start(router()).await;
    let content = Bytes::from_static(b"content");
    let [head, content] = object_chunks(Algorithm::Blake3.digest(&content), content);
    let half = content.slice(..3);
    let mut more = head_bytes(&ObjectHead::End).to_vec();
    more.push(3);
    #[rustfmt::skip]
    let table = [
        (vec![],                                         "Cut { expected: \"its end mark is missing\" }"),
        (vec![head.clone(), content.clone()],            "Cut { expected: \"its end mark is missing\" }"),
        (vec![head.slice(..9)],                          "Cut { expected: \"its end mark is missing\" }"),
        (vec![head.clone(), half],                       "Cut { expected: \"the content of an object is incomplete\" }"),
        (vec![head, content, Bytes::from_static(b"x")],  "Head { source: HeadError { what: \"frame kind\", value: 120 } }"),
        (vec![more.into()],                              "Trailing"),
    ];
    for (chunks, expected) in table {
        let body = stream::iter(chunks.into_iter().map(Ok));
        let error = server.client().upload::<AddObjects>(body).await.unwrap_err();
        assert_eq!(error.fault(), Some(&Fault::new(FaultCode::BadRequest, expected)));
    }
    server.stop().await;
}

#[tokio::test]
async fn a_source_that_cannot_be_read_fails_the_upload() {
    let server = Server::start(router()).await;
    let body = stream::iter([Err(io::Error::other("bad sector"))]);
    let error = server.client().upload::<AddObjects>(body).await.unwrap_err();
    let text = format!(
        "ObjectServer.AddObjects to {}: cannot read what is to be sent: bad sector",
        server.address
    );
    assert_eq!(model::display::error_chain(&error), text);
    assert_eq!(error.remedy(), Remedy::Report);
    server.stop().await;
}

#[tokio::test]
async fn pages_are_served_with_ranges_and_harmless_headers() {
    let server = Server::start(router()).await;
    let get = async |verb: &str, path: &str, headers: &str| {
        let request =
            format!("{verb} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
        raw(server.address, request.as_bytes()).await.to_lowercase()
    };
    let start = get("GET", "/?a=%3cb%3e", "").await;
    assert!(start.contains("content-security-policy: default-src 'none'"), "{start}");
    assert!(start.contains("x-content-type-options: nosniff"), "{start}");
    assert!(start.ends_with("some(\"<b>\") from 127.0.0.1"), "{start}");
    let health = get("GET", "/healthz", "").await;
    assert!(health.starts_with("http/1.1 200 ok") && health.ends_with("\r\nok\n"), "{health}");
    let head = get("HEAD", "/healthz", "").await;
    assert!(head.contains("content-length: 3\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    let none = get("GET", "/none", "").await;
    assert!(none.starts_with("http/1.1 404") && none.contains("<a href=\"/\">"), "{none}");
    let verb = get("DELETE", "/", "").await;
    assert!(verb.starts_with("http/1.1 405") && verb.contains("allow: get, head\r\n"), "{verb}");
    let rpc = get("GET", "/rpc/Subd.Poll", "").await;
    assert!(rpc.starts_with("http/1.1 405") && rpc.contains("allow: post\r\n"), "{rpc}");
    let fault = get("GET", "/objects/x", "").await;
    assert!(fault.starts_with("http/1.1 404") && fault.contains("no &#60;object&#62;"), "{fault}");

    #[rustfmt::skip]
    let table = [
        ("",                                 "200", "content-length: 10\r\n",         "0123456789"),
        ("range: bytes=2-4\r\n",             "206", "content-range: bytes 2-4/10\r\n", "\n234"),
        ("range: bytes=-2\r\n",              "206", "content-range: bytes 8-9/10\r\n", "\n89"),
        ("range: bytes=20-\r\n",             "416", "content-range: bytes */10\r\n",   "\n\r\n"),
        ("range: lines=2-4\r\n",             "200", "etag: \"digits\"\r\n",            "0123456789"),
        ("if-none-match: \"a\", \"digits\"\r\n", "304", "immutable\r\n",               "\n\r\n"),
    ];
    for (headers, status, header, end) in table {
        let reply = get("GET", "/objects/digits", headers).await;
        assert!(reply.starts_with(&format!("http/1.1 {status} ")), "{headers}{reply}");
        assert!(reply.contains(header) && reply.ends_with(end), "{headers}{reply}");
    }
    server.stop().await;
}

#[tokio::test]
async fn json_calls_work_with_nothing_but_a_content_type() {
    let server = Server::start(router()).await;
    let done = raw_json(server.address, "Subd.Commit", "", r#"{"update_id":"7"}"#).await;
    assert!(done.starts_with("HTTP/1.1 200 OK\r\n") && done.ends_with("\r\n{}"), "{done}");
    assert!(done.contains("dominator-protocol: 1\r\n"), "{done}");
    let empty = raw_json(server.address, "Subd.GetConfiguration", "", "").await;
    assert!(empty.starts_with("HTTP/1.1 200 OK\r\n"), "{empty}");
    server.stop().await;
}

#[tokio::test]
async fn calls_and_faults_are_counted() {
    let server = Server::start(router()).await;
    let client = server.client();
    client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    client.call::<Commit>(&CommitRequest { update_id: 0 }).await.unwrap_err();
    let (status, text) = client.get("/metrics").await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    assert_eq!(status, 200);
    for line in [
        "dominator_build_info{daemon=\"testd\",version=\"0.1.0\"} 1\n",
        "dominator_rpc_calls_total{method=\"Subd.Commit\"} 2\n",
        "dominator_rpc_faults_total{method=\"Subd.Commit\",code=\"not-found\"} 1\n",
        "dominator_rpc_seconds_count{method=\"Subd.Commit\"} 2\n",
        "dominator_connections 1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
    assert!(text.ends_with("# EOF\n"), "{text}");
    server.stop().await;
}

#[tokio::test]
async fn a_stream_is_a_running_call_until_its_end() {
    let go_on = Arc::new(Semaphore::new(0));
    let released = Arc::clone(&go_on);
    let answer = move |(), _, request: GetObjectsRequest| {
        let released = Arc::clone(&released);
        let absent = head_bytes(&ObjectHead::Absent(request.ids[0]));
        let end = stream::once(async move {
            let _permit = released.acquire().await;
            Ok(head_bytes(&ObjectHead::End))
        });
        async move { Ok(stream::iter([Ok::<_, io::Error>(absent)]).chain(end)) }
    };
    let router = Router::new("test", &Security::Insecure);
    let server = Server::start(router.download::<GetObjects, _, _>(answer)).await;
    let client = server.client();
    let counted = async || {
        let (_, text) = client.get("/metrics").await.unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map_or(0, |value| value.trim().parse().unwrap())
        };
        let count = "dominator_rpc_seconds_count{method=\"ObjectServer.GetObjects\"}";
        (value("dominator_rpc_running"), value(count))
    };
    let ids = vec![Algorithm::Blake3.digest(b"1")];
    let mut reader = client.get_objects(&GetObjectsRequest { ids }).await.unwrap();
    reader.head().await.unwrap();
    assert_eq!(counted().await, (1, 0));
    go_on.add_permits(1);
    assert_eq!(reader.head().await.unwrap(), ObjectHead::End);
    drop(reader);
    while counted().await != (0, 1) {
        tokio::task::yield_now().await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_handler_knows_the_address_that_was_dialled() {
    let router = Router::new("testd", &Security::Insecure)
        .page("/", |(), request| async move { Ok(Page::Text(request.caller.local.to_string())) });
    let server = Server::start_at(router, "0.0.0.0:0".parse().unwrap()).await;
    for host in ["127.0.0.1", "127.9.8.7"] {
        let dialled = format!("{host}:{}", server.address.port());
        let client = Client::new(Peer::parse(&dialled, 0).unwrap(), &Security::Insecure);
        let (_, text) = client.get("/").await.unwrap();
        assert_eq!(String::from_utf8(text.to_vec()).unwrap(), dialled);
    }
    server.stop().await;
}

#[tokio::test]
async fn one_connection_can_be_cut_and_others_go_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = Peer::parse(&listener.local_addr().unwrap().to_string(), 0).unwrap();
    let stop = CancellationToken::new();
    let server = rpc::server::Server::new(router(), stop.clone());
    let places = Arc::new(Semaphore::new(2));
    let mut clients = Vec::new();
    for _ in 0..2 {
        let client = Client::new(peer.clone(), &Security::Insecure);
        let caller = client.clone();
        let request = DeleteImageRequest { name: "a/b".parse().unwrap(), force: false };
        let call = tokio::spawn(async move { caller.call::<DeleteImage>(&request).await });
        let (stream, address) = listener.accept().await.unwrap();
        let place = Arc::clone(&places).acquire_owned().await.unwrap();
        let cut = server.cut();
        server.answer(stream, address, place, cut.clone());
        client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
        clients.push((client, call, cut));
    }
    let (second, second_call, _) = clients.pop().unwrap();
    let (_, first_call, cut) = clients.pop().unwrap();
    cut.cancel();
    let error = first_call.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Lost { .. }), "{error:?}");
    second.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    assert!(!second_call.is_finished());
    let _freed = places.acquire().await.unwrap();
    second_call.abort();
    stop.cancel();
    server.finish().await;
}
