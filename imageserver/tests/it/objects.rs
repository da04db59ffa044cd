//! Uploading, checking and fetching objects.

use api::fault::FaultCode;
use api::object_server::{AddObjectsReply, CheckObjects, CheckObjectsRequest, IDS_MAX};
use api::object_stream::ObjectHead;
use model::object::Algorithm;
use rpc::client::Client;
use rpc::server::head_bytes;
use rpc::tls::Security;

use crate::fixture::{ALGORITHM, Server, fault, files_in, stored};

/// Content that is like no other.
fn content(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 7) as u8 ^ (index >> 9) as u8 ^ seed).collect()
}

#[tokio::test]
async fn objects_of_all_sizes_come_back_in_order() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    // Around the limits of what is read in one piece, and of a chunk.
    let lengths = [0, 1, 255, 65_536, 262_143, 262_144, 262_145, 524_289, 3_000_000];
    let contents: Vec<Vec<u8>> =
        lengths.iter().enumerate().map(|(seed, length)| content(seed as u8, *length)).collect();
    let slices: Vec<&[u8]> = contents.iter().map(|content| &content[..]).collect();
    let added_bytes = lengths.iter().sum::<usize>() as u64;
    let reply = server.upload(&slices).await;
    assert_eq!(reply, AddObjectsReply { added: 9, added_bytes, known: 0 });
    let reply = server.upload(&slices).await;
    assert_eq!(reply, AddObjectsReply { added: 0, added_bytes: 0, known: 9 });

    let absent = ALGORITHM.digest(b"never uploaded");
    let mut want: Vec<_> =
        contents.iter().map(|content| (ALGORITHM.digest(content), Some(content.clone()))).collect();
    want.insert(4, (absent, None));
    want.reverse();
    let ids: Vec<_> = want.iter().map(|(id, _)| *id).collect();
    assert_eq!(server.fetch(&ids).await, want);
    assert_eq!(server.missing(&ids).await, [absent]);
    assert_eq!(server.fetch(&[]).await, []);
    assert_eq!(files_in(data.path().join("incoming")), 0);
    assert_eq!(server.metric("dominator_objects"), "9");
    assert_eq!(server.metric("dominator_objects_bytes"), added_bytes.to_string());
}

#[tokio::test]
async fn objects_travel_packed_to_who_asks_for_it() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let lengths = [0, 1, 255, 256, 131_072, 131_073, 262_144, 262_145, 3_000_000];
    let mut contents: Vec<Vec<u8>> =
        lengths.into_iter().enumerate().map(|(seed, length)| content(seed as u8, length)).collect();
    // What gains nothing.
    let noise = (0..500_000_u32).map(|index| ALGORITHM.digest(&index.to_le_bytes()).digest()[0]);
    contents.push(noise.collect());
    let slices: Vec<&[u8]> = contents.iter().map(|content| &content[..]).collect();
    server.upload(&slices).await;
    let want: Vec<_> =
        contents.iter().map(|content| (ALGORITHM.digest(content), Some(content.clone()))).collect();
    let ids: Vec<_> = want.iter().map(|(id, _)| *id).collect();
    let all: u64 = contents.iter().map(|content| content.len() as u64).sum();
    let (got, plain_bytes) = server.fetch_by(&server.client, &ids).await;
    assert!(got == want);
    assert!((all..all + 1_000).contains(&plain_bytes), "{plain_bytes} of {all}");
    let client = Client::packing(server.client.peer().clone(), &Security::Insecure, true);
    let (got, packed_bytes) = server.fetch_by(&client, &ids).await;
    assert!(got == want);
    assert!((500_000..all / 2).contains(&packed_bytes), "{packed_bytes} of {all}");
    assert!(client.may_pack(), "the server has said that it takes packed objects");
    assert!(!server.client.may_pack(), "this client was told not to");

    // As a browser or a cache asks.
    let large = &contents[8];
    let path = format!("/objects/{}", ids[8]);
    let answer = server.get(&path, "Accept-Encoding: gzip, zstd\r\n");
    assert_eq!((answer.status, answer.header("content-encoding")), (200, Some("zstd")));
    assert_eq!(answer.header("vary"), Some("accept-encoding"));
    assert_eq!(answer.header("etag"), Some(&*format!("\"{}-zstd\"", ids[8])));
    let body = answer.dechunked();
    assert!(body.len() < large.len() / 2);
    assert!(zstd::decode_all(&body[..]).unwrap() == *large);
    let range = "Accept-Encoding: zstd\r\nRange: bytes=5-9\r\n";
    let part = server.get(&path, range);
    assert_eq!((part.status, part.header("content-encoding")), (206, None));
    assert_eq!(part.body, large[5..10]);
}

#[tokio::test]
async fn a_server_may_be_told_not_to_pack() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &["--pack-level", "0"]);
    let content = vec![7; 10_000];
    server.upload(&[&content]).await;
    let id = ALGORITHM.digest(&content);
    let client = Client::packing(server.client.peer().clone(), &Security::Insecure, true);
    let (got, wire_bytes) = server.fetch_by(&client, &[id]).await;
    assert_eq!(got, [(id, Some(content))]);
    assert!(wire_bytes > 10_000, "{wire_bytes}");
    let answer = server.get(&format!("/objects/{id}"), "Accept-Encoding: zstd\r\n");
    assert_eq!((answer.status, answer.header("content-encoding")), (200, None));
}

#[tokio::test]
async fn sha512_objects_are_kept_apart() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let id = Algorithm::Sha512.digest(b"content");
    let chunks = [
        head_bytes(&ObjectHead::Object { id, size_bytes: 7 }),
        "content".into(),
        head_bytes(&ObjectHead::End),
    ];
    server.upload_chunks(chunks.into()).await.unwrap();
    let blake3 = ALGORITHM.digest(b"content");
    assert_eq!(server.missing(&[id, blake3]).await, [blake3]);
    assert_eq!(server.fetch(&[id]).await, [(id, Some(b"content".to_vec()))]);
}

#[tokio::test]
async fn the_number_of_ids_is_limited() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let ids = vec![ALGORITHM.digest(b""); IDS_MAX + 1];
    let request = CheckObjectsRequest { ids, lease_seconds: 0 };
    let fault = fault(server.client.call::<CheckObjects>(&request).await.unwrap_err());
    assert_eq!(fault.code, FaultCode::TooLarge);
    assert_eq!(fault.message, "65537 ids in one request: at most 65536 are accepted");
}

#[tokio::test]
async fn a_tampered_object_is_never_served_and_can_be_uploaded_again() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let (small, large) = (content(1, 1_000), content(2, 1_000_000));
    let contents = [&small[..], &large[..]];
    let ids = contents.map(|content| ALGORITHM.digest(content));
    server.upload(&contents).await;
    let intact = ids.into_iter().zip(contents.map(|content| Some(content.to_vec())));
    let intact: Vec<_> = intact.collect();
    // The large one is now known to be good.
    assert_eq!(server.fetch(&ids).await, intact);

    for (id, content) in ids.iter().zip(contents) {
        let path = stored(data.path(), id);
        let times = std::fs::metadata(&path).unwrap().modified().unwrap();
        let mut tampered = content.to_vec();
        tampered[500] ^= 1;
        std::fs::write(&path, tampered).unwrap();
        // Whoever tampers may set the time of the last modification back.
        std::fs::File::open(&path).unwrap().set_modified(times).unwrap();
    }
    let page = server.get(&format!("/objects/{}", ids[1]), "");
    assert_eq!(page.status, 404);
    assert_eq!(server.fetch(&ids).await, ids.map(|id| (id, None)));
    assert_eq!(files_in(data.path().join("quarantine")), 2);
    assert_eq!(server.metric("dominator_objects_corrupt_total"), "2");
    assert_eq!(server.missing(&ids).await, ids);

    let reply = server.upload(&contents).await;
    assert_eq!(reply, AddObjectsReply { added: 2, added_bytes: 1_001_000, known: 0 });
    assert_eq!(server.fetch(&ids).await, intact);
}

#[tokio::test]
async fn an_object_with_the_wrong_length_is_replaced_by_an_upload() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let content = content(3, 5_000);
    let id = ALGORITHM.digest(&content);
    server.upload(&[&content]).await;
    let path = stored(data.path(), &id);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &content[..4_000]).unwrap();
    let reply = server.upload(&[&content]).await;
    assert_eq!(reply, AddObjectsReply { added: 1, added_bytes: 5_000, known: 0 });
    assert_eq!(server.fetch(&[id]).await, [(id, Some(content))]);
}

#[tokio::test]
async fn an_empty_file_where_an_object_should_be_is_not_the_object() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let id = ALGORITHM.digest(b"content");
    std::fs::write(stored(data.path(), &id), b"").unwrap();
    let empty = ALGORITHM.digest(b"");
    server.upload(&[b""]).await;
    assert_eq!(server.missing(&[id, empty]).await, [id]);
}

#[tokio::test]
async fn many_upload_and_fetch_the_same_objects_at_once() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let contents: Vec<Vec<u8>> = (0..100).map(|seed| content(seed, 20_000)).collect();
    let slices: Vec<&[u8]> = contents.iter().map(|content| &content[..]).collect();
    let uploads = (0..8).map(|_| server.upload(&slices));
    for reply in futures_util::future::join_all(uploads).await {
        assert_eq!(reply.added + reply.known, 100);
    }
    let want: Vec<_> =
        contents.iter().map(|content| (ALGORITHM.digest(content), Some(content.clone()))).collect();
    let ids: Vec<_> = want.iter().map(|(id, _)| *id).collect();
    for got in futures_util::future::join_all((0..8).map(|_| server.fetch(&ids))).await {
        assert_eq!(got, want);
    }
    assert_eq!(files_in(data.path().join("incoming")), 0);
}
