//! Memory does not grow with the size of objects.

use api::object_server::{AddObjects, AddObjectsReply, GetObjectsRequest};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use model::object::Hasher;
use rpc::server::head_bytes;

use crate::fixture::{ALGORITHM, Server};

const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS: usize = 512;
const PEAK_BYTES_MAX: u64 = 64 << 20;

/// The most memory that a process ever had, in bytes.
fn peak_bytes(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn an_object_of_half_a_gibibyte_passes_through_a_small_server() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let chunk = Bytes::from(vec![0; CHUNK_BYTES]);
    let mut hasher = Hasher::new(ALGORITHM);
    (0..CHUNKS).for_each(|_| hasher.update(&chunk));
    let id = hasher.finish();
    let size_bytes = (CHUNKS * CHUNK_BYTES) as u64;

    let content = std::iter::repeat_n(chunk, CHUNKS);
    let head = head_bytes(&ObjectHead::Object { id, size_bytes });
    let chunks = std::iter::once(head).chain(content).chain([head_bytes(&ObjectHead::End)]);
    let body = futures_util::stream::iter(chunks.map(Ok::<_, std::io::Error>));
    let reply = server.client.upload::<AddObjects>(body).await.unwrap();
    assert_eq!(reply, AddObjectsReply { added: 1, added_bytes: size_bytes, known: 0 });

    let mut reader = server.client.get_objects(&GetObjectsRequest { ids: vec![id] }).await.unwrap();
    assert_eq!(reader.head().await.unwrap(), ObjectHead::Object { id, size_bytes });
    let mut hasher = Hasher::new(ALGORITHM);
    while let Some(chunk) = reader.chunk().await.unwrap() {
        hasher.update(&chunk);
    }
    assert_eq!(hasher.finish(), id);
    assert_eq!(reader.head().await.unwrap(), ObjectHead::End);
    let peak = peak_bytes(server.id());
    assert!(peak < PEAK_BYTES_MAX, "{peak} bytes");
    println!("the server had at most {} KiB", peak >> 10);
}

#[tokio::test]
async fn many_small_objects_in_small_pieces_are_taken() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let contents: Vec<[u8; 4]> = (0..20_000u32).map(u32::to_le_bytes).collect();
    let slices: Vec<&[u8]> = contents.iter().map(|content| &content[..]).collect();
    let reply = server.upload(&slices).await;
    assert_eq!(reply, AddObjectsReply { added: 20_000, added_bytes: 80_000, known: 0 });
}
