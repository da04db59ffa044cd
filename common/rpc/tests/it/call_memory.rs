//! Replies and requests of many servers that take more memory than there is room for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api::Done;
use api::subd::{Fetch, FetchObject, FetchRequest, GetConfiguration, GetRefusedChanges};
use api::subd::{GetRefusedChangesReply, Poll, PollRequest};
use model::object::ObjectId;
use model::plan::{RefusedChange, RefusedKind};
use rpc::client::{CallMemory, Client, Peer};
use rpc::server::Router;
use rpc::tls::Security;
use tokio::net::{TcpListener, TcpStream};

use crate::wire::Server;

const MIB: usize = 1 << 20;

/// How many servers do not end their replies.
const SLOW: usize = 8;

/// How much of such a reply is sent, in bytes.
const SENT_MAX: usize = 8 * MIB;

/// A server that sends [`SENT_MAX`] bytes of a reply, as fast as its caller takes them, and never
/// the rest. Counts in `sent` what callers take.
async fn slow(sent: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let sent = Arc::clone(&sent);
            tokio::spawn(async move {
                let head = hyper::Response::builder().header("dominator-protocol", 1);
                let mut body = respond.send_response(head.body(()).unwrap(), false).unwrap();
                let mut left = SENT_MAX;
                while left > 0 {
                    body.reserve_capacity(left.min(64 << 10));
                    let capacity = std::future::poll_fn(|context| body.poll_capacity(context));
                    let Some(Ok(count)) = capacity.await else { return };
                    let count = count.min(left);
                    body.send_data(vec![0; count].into(), false).unwrap();
                    sent.fetch_add(count, Ordering::SeqCst);
                    left -= count;
                }
                std::future::poll_fn(|context| body.poll_reset(context)).await.ok();
            });
        }
    });
    address
}

fn client(address: SocketAddr, memory: &CallMemory) -> Client {
    let peer = Peer::parse(&address.to_string(), 0).unwrap();
    Client::sharing(peer, &Security::Insecure, memory)
}

/// A reply of one MiB, and requests of any length.
fn router() -> Router {
    Router::new("subd", &Security::Insecure)
        .method::<GetRefusedChanges, _>(|(), _, ()| async {
            let (path, kind) = ("/x".parse().unwrap(), RefusedKind::Any);
            let why = "x".repeat(MIB);
            Ok(GetRefusedChangesReply { changes: vec![RefusedChange { path, kind, why }] })
        })
        .method::<Fetch, _>(|(), _, _| async { Ok(Done {}) })
        .method::<GetConfiguration, _>(|(), _, ()| async { Ok(Default::default()) })
        .method::<Poll, _>(|(), _, _| std::future::pending())
}

/// Another address of `server`, and how many connections were made to it.
async fn counted(server: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
            let mut far = TcpStream::connect(server).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut near, &mut far).await });
        }
    });
    (address, count)
}

/// Lets the time pass after which a connection that has grown is replaced.
async fn pass_time() {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(16)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_connection_that_a_large_message_has_grown_is_replaced_when_no_call_uses_it() {
    let server = Server::start(router()).await;
    let (address, connections) = counted(server.address).await;
    let client = client(address, &CallMemory::new(4 * MIB));
    let small = async || {
        client.call::<GetConfiguration>(&()).await.unwrap();
        connections.load(Ordering::SeqCst)
    };
    assert_eq!((small().await, small().await), (1, 1));
    client.call::<GetRefusedChanges>(&()).await.unwrap();
    assert_eq!(small().await, 1, "another large message may follow");
    pass_time().await;
    assert_eq!((small().await, small().await), (2, 2));
    let request = PollRequest::default();
    let mut poll = Box::pin(client.call::<Poll>(&request));
    assert!(futures_util::poll!(&mut poll).is_pending());
    client.call::<GetRefusedChanges>(&()).await.unwrap();
    pass_time().await;
    assert_eq!(small().await, 2, "the poll uses it");
    drop(poll);
    assert_eq!((small().await, small().await), (3, 3));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_do_not_end_keep_little_and_delay_only_large_ones() {
    // Room for replies of one MiB, which are counted twice.
    let memory = CallMemory::new(4 * MIB);
    let sent = Arc::new(AtomicUsize::new(0));
    let mut slow_calls = Vec::new();
    for _ in 0..SLOW {
        let client = client(slow(Arc::clone(&sent)).await, &memory);
        slow_calls
            .push(tokio::spawn(async move { client.call::<Poll>(&PollRequest::default()).await }));
    }
    let honest = Server::start(router()).await;
    let honest_client = client(honest.address, &memory);
    // The one that is on top has got everything, and the others what there is room for.
    until(|| sent.load(Ordering::SeqCst) >= SENT_MAX + MIB).await;
    // Neither small messages nor large requests wait for them.
    honest_client.call::<GetConfiguration>(&()).await.unwrap();
    let object = |number: u16| {
        let mut digest = [0; 32];
        digest[..2].copy_from_slice(&number.to_be_bytes());
        FetchObject { id: ObjectId::Blake3(digest), size_bytes: 1 }
    };
    let objects = (0..20_000).map(object).collect();
    let request = FetchRequest { fetch_id: 1, sources: Vec::new(), objects, ahead: false };
    honest_client.call::<Fetch>(&request).await.unwrap();
    let sent = sent.load(Ordering::SeqCst);
    assert!(slow_calls.iter().all(|call| !call.is_finished()));
    // Without room, each may have what needs no room, and as much again on its way.
    let free = 256 << 10;
    assert!(sent <= SENT_MAX + MIB + SLOW * free, "{sent} bytes");
    slow_calls.iter().for_each(tokio::task::JoinHandle::abort);
    let reply = honest_client.call::<GetRefusedChanges>(&()).await.unwrap();
    assert_eq!(reply.changes[0].why.len(), MIB);
    honest.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_replies_of_many_arrive_one_after_the_other() {
    let memory = CallMemory::new(MIB);
    let server = Server::start(router()).await;
    let calls = (0..32).map(|_| {
        let client = client(server.address, &memory);
        tokio::spawn(async move { client.call::<GetRefusedChanges>(&()).await })
    });
    for call in futures_util::future::join_all(calls).await {
        assert_eq!(call.unwrap().unwrap().changes[0].why.len(), MIB);
    }
    server.stop().await;
}

/// Waits until `condition` holds.
async fn until(condition: impl Fn() -> bool) {
    let patient = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), patient).await.expect("it never holds");
}
