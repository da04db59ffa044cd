//! A store that packs what comes: what is on the disk, what is served, and what is found of damage.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use api::image_server::collection::CollectRequest;
use api::object_stream::{ContentForm, ObjectHead};
use imageserver::collection::Collector;
use imageserver::core::collection::disk_pressure::Bounds;
use imageserver::store::medium_reader::MediumReader;
use imageserver::store::medium_reader::OnMedium;
use imageserver::store::{Store, layout};
use model::object::ObjectId;
use rpc::client::{Client, Peer};
use rpc::packing::{self, CHUNK_BYTES_MAX, Packer};
use rpc::tls::Security;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::fixture::{
    ALGORITHM, Server, directories, files_in, flip, image_of, stored, tree_of, until,
};

const PACKED: [&str; 2] = ["--store-packed", "3"];

/// What gains by packing: three chunks.
fn text(length: usize) -> Vec<u8> {
    b"all work and no play makes jack a dull boy\n".iter().copied().cycle().take(length).collect()
}

/// What gains nothing.
fn noise(length: usize) -> Vec<u8> {
    let block = |index: usize| ALGORITHM.digest(&index.to_le_bytes()).digest().to_vec();
    (0..length.div_ceil(32)).flat_map(block).take(length).collect()
}

fn is_packed(data: &Path, id: &ObjectId) -> bool {
    let path = stored(data, id);
    assert!(path.exists(), "{}", path.display());
    path.extension().is_some()
}

fn check(data: &Path) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_imageserver"));
    let output = command.arg("check").arg("--data").arg(data).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test]
async fn what_gains_is_packed_and_both_forms_are_served_alike() {
    let data = tempfile::tempdir().unwrap();
    let contents =
        [text(300_000), text(20_000), text(4_096), noise(300_000), noise(20_000), text(70_000)];
    let ids = contents.each_ref().map(|content| ALGORITHM.digest(content));
    let plain = Server::start(data.path());
    plain.upload(&[&contents[5]]).await;
    plain.stop().await;

    let server = Server::start_with(data.path(), &PACKED);
    let all = contents.each_ref().map(Vec::as_slice);
    let reply = server.upload(&all).await;
    assert_eq!((reply.added, reply.known), (5, 1));
    let packed = ids.map(|id| is_packed(data.path(), &id));
    // What was there stays as it was.
    assert_eq!(packed, [true, true, false, false, false, false]);
    assert!(std::fs::metadata(stored(data.path(), &ids[0])).unwrap().len() < 10_000);
    // It is known in either form.
    assert_eq!(server.upload(&all).await.known, 6);
    assert_eq!(server.missing(&ids).await, []);

    server.stop().await;

    // By a server that packs, one that does not any more, and one that never packs.
    for flags in [&PACKED[..], &[], &["--pack-level", "0"]] {
        let server = Server::start_with(data.path(), flags);
        let packing = Client::packing(server.client.peer().clone(), &Security::Insecure, true);
        let expected = ids.iter().zip(&contents);
        let expected: Vec<_> = expected.map(|(id, content)| (*id, Some(content.clone()))).collect();
        for client in [&packing, &server.client] {
            let (got, wire_bytes) = server.fetch_by(client, &ids).await;
            assert!(got == expected, "{flags:?}");
            // What is packed in the store travels so, whatever else is.
            assert_eq!(wire_bytes < 420_000, client.may_pack(), "{flags:?}: {wire_bytes}");
        }
        for (id, content) in ids.iter().zip(&contents) {
            let path = format!("/objects/{id}");
            assert!(server.get(&path, "").body == *content, "{id}");
            let framed = server.get(&path, "accept-encoding: zstd\r\n");
            let body = match framed.header("content-encoding") {
                Some(_) => zstd::decode_all(&framed.dechunked()[..]).unwrap(),
                None => framed.body,
            };
            assert!(body == *content, "{id} by zstd");
            let (from, to) = (content.len() * 3 / 4, content.len() - 9);
            let part = server.get(&path, &format!("range: bytes={from}-{}\r\n", to - 1));
            assert!(part.body == content[from..to], "{id} from {from}");
        }
        server.stop().await;
    }
    let (is_whole, text) = check(data.path());
    assert!(is_whole, "{text}");
}

/// A line to `server`, of so many bytes in a second towards the caller. Returns its address.
async fn slow_line(server: SocketAddr, bytes_per_second: u32) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (near, _) = listener.accept().await.unwrap();
        let far = TcpStream::connect(server).await.unwrap();
        let ((mut near_read, mut near_write), (mut far_read, mut far_write)) =
            (near.into_split(), far.into_split());
        tokio::spawn(async move { tokio::io::copy(&mut near_read, &mut far_write).await });
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = far_read.read(&mut buffer).await {
            if near_write.write_all(&buffer[..length]).await.is_err() {
                return;
            }
            let time = Duration::from_secs(u64::try_from(length).unwrap());
            tokio::time::sleep(time / bytes_per_second).await;
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_packed_for_a_client_behind_a_slow_line() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    // Of each 1,600 bytes 1,000 are noise, so some 20 MB travel of 32.
    let mix = |number: usize| {
        let noise = noise(160_000 + number).split_off(number);
        noise.chunks(1_000).flat_map(|part| [part, &[b'a'; 600]].concat()).collect()
    };
    let contents: Vec<Vec<u8>> = (0..125).map(mix).collect();
    server.upload(&contents.iter().map(Vec::as_slice).collect::<Vec<_>>()).await;
    let ids: Vec<ObjectId> = contents.iter().map(|content| ALGORITHM.digest(content)).collect();
    let expected: Vec<_> = ids.iter().copied().zip(contents.iter().cloned().map(Some)).collect();
    let mut packer = Packer::new(1).unwrap();
    let mut all_packed = Vec::new();
    for (id, content) in ids.iter().zip(&contents) {
        let head = ObjectHead::Object { id: *id, size_bytes: content.len() as u64 };
        head.encode_as(ContentForm::Packed, &mut all_packed);
        for chunk in content.chunks(CHUNK_BYTES_MAX) {
            packing::append(&mut all_packed, chunk, packer.pack(chunk));
        }
    }
    ObjectHead::End.encode(&mut all_packed);
    let line = slow_line(server.address, 10_000_000).await;
    let peer = Peer::parse(&line.to_string(), 0).unwrap();
    let client = Client::packing(peer, &Security::Insecure, true);
    let (got, wire_bytes) = server.fetch_by(&client, &ids).await;
    assert!(got == expected);
    assert_eq!(wire_bytes, all_packed.len() as u64);
    drop(client);
    server.stop().await;
}

#[tokio::test]
async fn images_of_packed_objects_are_taken_and_their_damage_is_found() {
    let data = tempfile::tempdir().unwrap();
    let flags = [&PACKED[..], &["--scrub-every", "1s", "--scrub-rate", "1000"]].concat();
    let server = Server::start_with(data.path(), &flags);
    let (large, names) = (text(300_000), (0..400).map(|number| format!("/usr/file-{number:05}")));
    let names: Vec<String> = names.collect();
    let mut files: Vec<(&str, &[u8])> =
        names.iter().map(|name| (name.as_str(), &b"small"[..])).collect();
    files.push(("/usr/large", &large));
    let tree = tree_of(&files);
    server.upload_tree(&tree, &[b"small", &large]).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    assert_eq!(server.expect_whole().await, 1);
    let (directory, encoding) =
        directories(&tree).into_iter().max_by_key(|(_, encoding)| encoding.len()).unwrap();
    let ids = [ALGORITHM.digest(&large), directory];
    for id in &ids {
        assert!(is_packed(data.path(), id));
        flip(&stored(data.path(), id));
    }
    until(async || files_in(data.path().join("quarantine")) == 2).await;
    assert_eq!(server.missing(&ids).await, ids);
    let asides: Vec<String> = std::fs::read_dir(data.path().join("quarantine"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(asides.iter().all(|name| name.ends_with(".packed")), "{asides:?}");
    server.stop().await;

    // That they are lost is known after a restart too.
    let server = Server::start_with(data.path(), &flags);
    until(async || server.metric("dominator_objects_lost") != "0").await;
    assert_eq!(server.upload(&[&large, &encoding]).await.added, 2);
    assert_eq!(server.expect_whole().await, 1);
    until(async || server.metric("dominator_objects_lost") == "0").await;
    server.stop().await;
    let (is_whole, text) = check(data.path());
    assert!(is_whole, "{text}");
    for cut in [false, true] {
        let path = stored(data.path(), &ids[0]);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        match cut {
            true => file.set_len(99).unwrap(),
            false => flip(&path),
        }
        let (is_whole, text) = check(data.path());
        assert!(!is_whole && text.contains(&ids[0].to_string()), "{text}");
    }
}

#[test]
fn an_object_that_is_there_twice_counts_once_and_goes_whole() {
    let data = tempfile::tempdir().unwrap();
    let content = text(100_000);
    let id = ALGORITHM.digest(&content);
    let path = |form| data.path().join(layout::OBJECTS).join(layout::stored_path(&id, form));
    let put = |store: &Store| {
        let mut receiving = store.objects.receive(id, content.len() as u64).unwrap();
        receiving.write(&content).unwrap();
        receiving.finish().unwrap().wait().unwrap();
    };
    let twice = || {
        let store = Store::open_packing(data.path(), 3).unwrap();
        put(&store);
        store.objects.sync().unwrap();
        drop(store);
        std::fs::write(path(ContentForm::Plain), &content).unwrap();
        assert!(path(ContentForm::Packed).exists());
    };
    twice();
    let store = Store::open(data.path()).unwrap();
    store.objects.count(&|| false);
    assert_eq!(store.objects.object_counts().objects, 1);
    let place = layout::object_path(&id).parent().unwrap().to_owned();
    assert_eq!(store.objects.list(&place).unwrap(), [id]);
    // Reading all leaves one of them.
    let mut reader = MediumReader::default();
    let whole = OnMedium::Whole(100_000);
    assert_eq!(store.objects.read_medium(&id, &mut reader, &mut |_| true).unwrap(), whole);
    assert_eq!(
        (path(ContentForm::Plain).exists(), path(ContentForm::Packed).exists()),
        (true, false)
    );
    // What comes while it is there leaves what is there, in whatever form it comes.
    drop(store);
    let store = Store::open_packing(data.path(), 3).unwrap();
    put(&store);
    assert_eq!(
        (path(ContentForm::Plain).exists(), path(ContentForm::Packed).exists()),
        (true, false)
    );
    drop(store);
    std::fs::remove_file(path(ContentForm::Plain)).unwrap();

    // If one of them is damaged, there is the other.
    twice();
    flip(&path(ContentForm::Plain));
    let store = Arc::new(Store::open(data.path()).unwrap());
    let got = store.objects.open_verified(&id).unwrap().unwrap().into_bytes().unwrap();
    assert!(got == content);
    assert_eq!((store.objects.corrupt(), store.objects.damaged_objects().damage(&id)), (1, None));
    assert_eq!(
        (path(ContentForm::Plain).exists(), path(ContentForm::Packed).exists()),
        (false, true)
    );

    // A collection takes both.
    std::fs::write(path(ContentForm::Plain), &content).unwrap();
    let never = Bounds { above_percent: 100, down_to_percent: 100 };
    let all = CollectRequest { dry_run: false, bytes: 0 };
    let reply = Collector::new(Arc::clone(&store), never).collect(all, || false).unwrap();
    assert_eq!(reply.removed.objects, 1);
    assert_eq!(
        (path(ContentForm::Plain).exists(), path(ContentForm::Packed).exists()),
        (false, false)
    );
    assert_eq!(store.objects.size_bytes(&id).unwrap(), None);

    // One whose head is damaged is not there, and what comes takes its place in whatever form.
    drop(store);
    put(&Store::open_packing(data.path(), 3).unwrap());
    let mut bytes = std::fs::read(path(ContentForm::Packed)).unwrap();
    bytes[5] ^= 1;
    std::fs::remove_file(path(ContentForm::Packed)).unwrap();
    std::fs::write(path(ContentForm::Packed), bytes).unwrap();
    let store = Store::open(data.path()).unwrap();
    assert_eq!(store.objects.size_bytes(&id).unwrap(), None);
    put(&store);
    assert_eq!(store.objects.size_bytes(&id).unwrap(), Some(100_000));
    assert_eq!(
        (path(ContentForm::Plain).exists(), path(ContentForm::Packed).exists()),
        (true, false)
    );
    assert_eq!(files_in(data.path().join("incoming")), 0);
}
