//! Uploads that are wrong in every way.

use api::fault::FaultCode;
use api::object_server::AddObjects;
use api::object_stream::{ContentForm, ObjectHead};
use bytes::Bytes;
use rpc::server::head_bytes;

use crate::fixture::{ALGORITHM, Server, fault, files_in, object};

/// Uploads `chunks` behind a good object, which is kept, and gives the refusal of the rest.
async fn refused(chunks: Vec<Bytes>) -> (FaultCode, String) {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let good = object(b"good").into_iter().chain(chunks).collect();
    let fault = fault(server.upload_chunks(good).await.unwrap_err());
    let ids = [ALGORITHM.digest(b"good"), ALGORITHM.digest(b"bad")];
    assert_eq!(server.missing(&ids).await, ids[1..], "only what was complete is kept");
    assert_eq!(files_in(data.path().join("incoming")), 0);
    // The server is as well as before.
    assert_eq!(server.upload(&[b"bad"]).await.added, 1);
    (fault.code, fault.message)
}

fn head(size_bytes: u64) -> Bytes {
    head_bytes(&ObjectHead::Object { id: ALGORITHM.digest(b"bad"), size_bytes })
}

/// The head of a packed object, and a chunk that is said to stand for `content_bytes`.
fn packed(size_bytes: u64, content_bytes: u32, packed: &[u8]) -> Bytes {
    let mut bytes = Vec::new();
    let head = ObjectHead::Object { id: ALGORITHM.digest(b"bad"), size_bytes };
    head.encode_as(ContentForm::Packed, &mut bytes);
    bytes.extend(content_bytes.to_le_bytes());
    bytes.extend((packed.len() as u32).to_le_bytes());
    bytes.extend(packed);
    bytes.into()
}

#[tokio::test]
async fn packed_content_that_is_another_is_refused() {
    let (code, message) = refused(vec![packed(5, 5, b"other"), end()]).await;
    let (want, got) = (ALGORITHM.digest(b"bad"), ALGORITHM.digest(b"other"));
    assert_eq!(code, FaultCode::BadRequest);
    assert_eq!(message, format!("the content sent as {want} hashes to {got}"));
}

#[tokio::test]
async fn packed_content_that_does_not_unpack_is_refused() {
    let garbled = "the object stream is garbled: a packed chunk";
    let bomb = zstd::bulk::compress(&vec![0; 100_000_000], 3).unwrap();
    let short = zstd::bulk::compress(&[0; 20_000], 3).unwrap();
    let lie = |bytes: &[u8], content| {
        format!(
            "{garbled} has invalid lengths: {} bytes for {content} bytes of content, where 30000 \
             are missing",
            bytes.len()
        )
    };
    let frame = |why| format!("{garbled} of 30000 bytes cannot be unpacked: {why}");
    let table = [
        (packed(30_000, 30_000, b"no frame at all"), frame("Unknown frame descriptor")),
        (
            packed(30_000, 30_000, &bomb),
            frame("Destination buffer is too small: 100000000 bytes needed, 30000 given"),
        ),
        (packed(30_000, 30_000, &short), frame("it has 20000 bytes")),
        (packed(30_000, 0, b""), lie(b"", 0)),
        (packed(30_000, 2, b"xxx"), lie(b"xxx", 2)),
        (packed(30_000, 30_001, b"xx"), lie(b"xx", 30_001)),
    ];
    for (chunk, expected) in table {
        let (code, message) = refused(vec![chunk, end()]).await;
        assert_eq!((code, message), (FaultCode::BadRequest, expected));
    }
    let cut = packed(30_000, 30_000, b"half of it");
    let (code, message) = refused(vec![cut.slice(..cut.len() - 3)]).await;
    let expected = "the object stream was cut: the content of an object is incomplete";
    assert_eq!((code, &*message), (FaultCode::BadRequest, expected));
}

fn end() -> Bytes {
    head_bytes(&ObjectHead::End)
}

#[tokio::test]
async fn content_that_hashes_to_another_id_is_refused() {
    let (code, message) = refused(vec![head(5), "other".into(), end()]).await;
    let (want, got) = (ALGORITHM.digest(b"bad"), ALGORITHM.digest(b"other"));
    assert_eq!(code, FaultCode::BadRequest);
    assert_eq!(message, format!("the content sent as {want} hashes to {got}"));
}

#[tokio::test]
async fn a_length_that_is_too_short_is_refused() {
    let (code, message) = refused(vec![head(2), "bad".into(), end()]).await;
    assert_eq!(code, FaultCode::BadRequest);
    let (want, got) = (ALGORITHM.digest(b"bad"), ALGORITHM.digest(b"ba"));
    assert_eq!(message, format!("the content sent as {want} hashes to {got}"));
}

#[tokio::test]
async fn a_length_that_is_too_long_is_refused() {
    let (code, message) = refused(vec![head(30), "bad".into(), end()]).await;
    assert_eq!(code, FaultCode::BadRequest);
    let cut = "the object stream was cut: the content of an object is incomplete";
    assert_eq!(message, cut);
}

#[tokio::test]
async fn a_length_that_no_disk_has_is_refused_before_anything_is_taken() {
    let (code, message) = refused(vec![head(1 << 60), Bytes::from(vec![0; 1 << 20])]).await;
    assert_eq!(code, FaultCode::NoSpace);
    let id = ALGORITHM.digest(b"bad");
    let start = format!("no space left to store object {id}: it has {} bytes, ", 1u64 << 60);
    assert!(message.starts_with(&start), "{message}");
}

#[tokio::test]
async fn a_caller_that_sends_nothing_more_is_refused_too() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let begun = futures_util::stream::iter([Ok(head(1 << 60))]);
    let silent = futures_util::StreamExt::chain(begun, futures_util::stream::pending());
    let upload = server.client.upload::<AddObjects>(silent);
    // Without being told, it would be left waiting until the server takes it for dead.
    let limit = std::time::Duration::from_secs(20);
    let reply = tokio::time::timeout(limit, upload).await.expect("it is told before that");
    assert_eq!(fault(reply.unwrap_err()).code, FaultCode::NoSpace);
}

#[tokio::test]
async fn a_stream_without_an_end_is_refused() {
    let (code, message) = refused(vec![]).await;
    assert_eq!(code, FaultCode::BadRequest);
    assert_eq!(message, "the object stream was cut: its end mark is missing");
}

#[tokio::test]
async fn a_stream_that_goes_on_after_its_end_is_refused() {
    let (code, message) = refused(vec![end(), head(3), "bad".into()]).await;
    assert_eq!(code, FaultCode::BadRequest);
    assert_eq!(message, "the object stream goes on after its end mark");
}

#[tokio::test]
async fn an_absent_object_is_refused_in_an_upload() {
    let id = ALGORITHM.digest(b"bad");
    let (code, message) = refused(vec![head_bytes(&ObjectHead::Absent(id)), end()]).await;
    assert_eq!(code, FaultCode::BadRequest);
    let text = "is said to be absent in a stream that should bring it";
    assert_eq!(message, format!("object {id} {text}"));
}

#[tokio::test]
async fn garbage_is_refused() {
    let garbage: Vec<u8> = (0..100_000u32).map(|index| (index * 7 + 200) as u8).collect();
    let (code, message) = refused(vec![garbage.into()]).await;
    assert_eq!(code, FaultCode::BadRequest);
    assert_eq!(
        message,
        "the object stream is garbled: bad object stream: frame kind 200 is unknown"
    );
}
