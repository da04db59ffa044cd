//! Peers that send nonsense: each gets a clear fault, and nothing is allocated for its claims.

use rpc::tls::Security;
use std::net::SocketAddr;
use std::time::Duration;

use api::codec::{CodecError, Encoding, decode, encode};
use api::image_server::AddImageRequest;
use api::object_stream::ObjectHead;
use api::subd::{Commit, CommitRequest, FetchRequest, PollReply, PrepareRequest};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use model::object::Algorithm;
use proptest::prelude::*;
use rpc::client::{CallError, Client, Peer};
use rpc::server::{ObjectReader, head_bytes};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::wire::{Server, raw, raw_json, router};

/// Decodes `bytes` as whatever has an encoding of many parts; gives whether that was refused.
fn decode_all(encoding: Encoding, bytes: &[u8]) -> [bool; 4] {
    let limit = 1 << 20;
    [
        decode::<PollReply>(encoding, "reply", bytes, limit).is_err(),
        decode::<PrepareRequest>(encoding, "request", bytes, limit).is_err(),
        decode::<FetchRequest>(encoding, "request", bytes, limit).is_err(),
        decode::<AddImageRequest>(encoding, "request", bytes, limit).is_err(),
    ]
}

proptest! {
    #[test]
    fn garbage_is_decoded_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        decode_all(Encoding::Bincode, &bytes);
        decode_all(Encoding::Json, &bytes);
    }

    #[test]
    fn damaged_values_are_decoded_without_panic(at in any::<usize>(), byte in any::<u8>()) {
        let (_, reply) = crate::samples::poll();
        let (request, _) = crate::samples::prepare();
        for encoding in [Encoding::Bincode, Encoding::Json] {
            let samples = [
                encode(encoding, "reply", &reply).unwrap(),
                encode(encoding, "request", &request).unwrap(),
            ];
            for mut bytes in samples {
                let at = at % bytes.len();
                bytes[at] = byte;
                decode_all(encoding, &bytes);
                bytes.truncate(at);
                let cut = decode_all(encoding, &bytes);
                prop_assert!(cut[0] && cut[1], "{:?}", cut);
            }
        }
    }
}

#[test]
fn no_value_is_longer_than_its_limit() {
    let (request, _) = crate::samples::prepare();
    let bytes = encode(Encoding::Bincode, "request", &request).unwrap();
    let (length, limit) = (bytes.len(), bytes.len() - 1);
    let error = decode::<PrepareRequest>(Encoding::Bincode, "request", &bytes, limit);
    match error.unwrap_err() {
        CodecError::TooLarge { length: got, .. } => assert_eq!(got, length),
        error => panic!("{error}"),
    }
}

/// Sends a call of bincode with these headers and bytes.
async fn raw_call(address: SocketAddr, headers: &str, body: &[u8]) -> String {
    let mut request =
        format!("POST /rpc/Subd.Commit HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n")
            .into_bytes();
    request.extend_from_slice(body);
    raw(address, &request).await
}

/// The most memory that this process ever had, in bytes.
fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn lengths_beyond_measure_are_refused_before_memory_is_taken() {
    let server = Server::start(router()).await;
    let huge = 1_u64 << 60;
    let before = peak_memory_bytes();

    let header = format!("dominator-protocol: 1\r\ncontent-length: {huge}\r\n");
    let reply = raw_call(server.address, &header, b"").await;
    assert!(reply.starts_with("HTTP/1.1 413 "), "{reply}");
    assert!(reply.contains("Subd.Commit: a body of more than 1048576 bytes"), "{reply}");

    // A chunk of that length, of which nothing comes.
    let header = "dominator-protocol: 1\r\ntransfer-encoding: chunked\r\n";
    let many = format!("{:x}\r\n{}", huge, "x".repeat(2 << 20));
    let reply = raw_call(server.address, header, many.as_bytes()).await;
    assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 413 "), "{reply}");

    // A length inside the value: a list of 2^60 ids.
    let body = huge.to_le_bytes();
    let request = format!(
        "POST /rpc/ObjectServer.GetObjects HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         dominator-protocol: 1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let reply = raw(server.address, &[request.as_bytes(), &body].concat()).await;
    assert!(reply.starts_with("HTTP/1.1 400 "), "{reply}");
    assert!(reply.contains("ObjectServer.GetObjects: bad request"), "{reply}");

    let grown = peak_memory_bytes() - before;
    assert!(grown < 128 << 20, "grown by {grown} bytes");
    server.client().call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn nonsense_is_refused_with_a_reason() {
    let server = Server::start(router()).await;
    let address = server.address;
    #[rustfmt::skip]
    let table = [
        // headers                                     body        status  text
        ("content-length: 8\r\n",                      &[0; 8][..], "400", "the header dominator-protocol is missing: this server speaks version 1"),
        ("dominator-protocol: 2\r\ncontent-length: 8\r\n", &[0; 8], "400", "protocol version 2 is not served: this server speaks version 1"),
        ("dominator-protocol: 0\r\ncontent-length: 8\r\n", &[0; 8], "400", "protocol version 0 is not served"),
        ("dominator-protocol: x\r\ncontent-length: 8\r\n", &[0; 8], "400", "protocol version x is not served"),
        ("dominator-protocol: 1\r\ncontent-length: 7\r\n", &[0; 7], "400", "Subd.Commit: bad request"),
        ("dominator-protocol: 1\r\ncontent-length: 9\r\n", &[0; 9], "400", "Subd.Commit: bad request: 1 bytes follow its end"),
        ("content-type: text/plain\r\ncontent-length: 2\r\n", b"{}", "400", "the content-type must be application/json"),
        ("content-type: application/json\r\ndominator-protocol: 9\r\ncontent-length: 2\r\n", b"{}", "400", "protocol version 9 is not served"),
    ];
    for (headers, body, status, text) in table {
        let reply = raw_call(address, headers, body).await;
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{headers}: {reply}");
        assert!(reply.contains(text), "{headers}: {reply}");
    }
    let deep = "[".repeat(100_000);
    for body in ["", "{", "[]", "\"x", "{\"update_id\":-1}", "{\"update_id\":1e99}", &deep] {
        let reply = raw_json(address, "Subd.Commit", "", body).await;
        assert!(reply.starts_with("HTTP/1.1 400 "), "{reply}");
        let fault = "{\"code\":\"bad-request\",\"message\":\"Subd.Commit: bad request: ";
        assert!(reply.contains(fault), "{reply}");
    }
    for request in ["\0\0\0\0", "GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n"] {
        let reply = raw(address, request.as_bytes()).await;
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 400 "), "{reply}");
    }
    server.client().call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap();
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn peers_that_stop_half_way_are_let_go() {
    let server = Server::start(router()).await;
    let halves: [&[u8]; 5] = [
        b"",
        b"PRI * HT",
        b"POST /rpc/Subd.Commit HT",
        b"POST /rpc/Subd.Commit HTTP/1.1\r\nhost: x\r\ndominator-",
        b"POST /rpc/Subd.Commit HTTP/1.1\r\nhost: x\r\ndominator-protocol: 1\r\n\
          connection: close\r\ncontent-length: 8\r\n\r\n1234",
    ];
    for half in halves {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(half).await.unwrap();
        let begun = tokio::time::Instant::now();
        let mut reply = Vec::new();
        let _reset = stream.read_to_end(&mut reply).await;
        assert!(begun.elapsed() <= Duration::from_secs(61), "{:?}", begun.elapsed());
        let reply = String::from_utf8_lossy(&reply);
        if half.ends_with(b"1234") {
            assert!(reply.contains("Subd.Commit: nothing of the body came for 30 s"), "{reply}");
        }
    }
    server.stop().await;
}

/// Reads an object of which `length` bytes come each `seconds`, and then waits for `writing`
/// seconds as if what came were written.
async fn read_object(length: usize, seconds: u64, writing: u64) -> (String, u64) {
    let id = Algorithm::Blake3.digest(b"");
    let head = head_bytes(&ObjectHead::Object { id, size_bytes: 1_000_000 });
    let pieces = stream::iter([Ok(head)]).chain(stream::repeat(()).then(move |()| async move {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        Ok(Bytes::from(vec![7; length]))
    }));
    let mut reader = ObjectReader::of_stream(pieces);
    let begun = tokio::time::Instant::now();
    reader.head().await.unwrap();
    let told = loop {
        match reader.chunk().await {
            Ok(Some(_)) => tokio::time::sleep(Duration::from_secs(writing)).await,
            Ok(None) => break "read".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    (told, begun.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_objects_that_trickles_ends() {
    let slow = "the object stream is too slow: 65536 bytes have to come within 60 s";
    let stalled = "the object stream stalled: nothing came for 60 s";
    let table = [
        ((1, 29, 0), (slow, 87)),
        ((1_000, 1, 0), (slow, 60)),
        ((2_000, 1, 0), ("read", 500)),
        ((1, 61, 0), (stalled, 60)),
        // That the reader is slow is not held against the sender.
        ((100_000, 1, 600), ("read", 6_010)),
    ];
    for ((length, seconds, writing), (want, took)) in table {
        let got = read_object(length, seconds, writing).await;
        assert_eq!(got, (want.to_owned(), took), "{length} {seconds} {writing}");
    }
}

/// Answers every connection with `bytes`, whatever is asked.
async fn odd_server(bytes: &'static [u8]) -> (Client, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = Peer::parse(&listener.local_addr().unwrap().to_string(), 0).unwrap();
    let task = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _gone = stream.write_all(bytes).await;
            let mut rest = Vec::new();
            let _gone = (&mut stream).take(1 << 16).read_to_end(&mut rest).await;
        }
    });
    (Client::new(peer, &Security::Insecure), task)
}

#[tokio::test]
async fn servers_that_are_none_fail_the_call() {
    for bytes in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let (client, task) = odd_server(bytes).await;
        let error = client.call::<Commit>(&CommitRequest { update_id: 2 }).await.unwrap_err();
        assert!(
            matches!(error, CallError::Lost { .. } | CallError::Connect { .. }),
            "{}",
            model::display::error_chain(&error)
        );
        task.abort();
    }
}
