//! Directories with very many entries, and what of them is sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::subd::{ScanNow, ScanNowRequest};
use model::object::ObjectId;
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use rpc::trees::{TreeReadError, TreeReader};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::fixture::Sub;

/// How many files the directory of the normal run has.
const ENTRIES: usize = 20_000;

/// Passes connections on to `server`; returns the address, and the count of the bytes that came
/// from there.
async fn counting(server: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let counted = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                    counted.fetch_add(length as u64, Ordering::Relaxed);
                    if to_client.write_all(&buffer[..length]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    (address, count)
}

/// `SUBD_ENTRIES=1000000 cargo test -p subd --test it large_directories -- --nocapture` makes the
/// directory larger, and prints what is sent.
#[tokio::test(flavor = "multi_thread")]
async fn three_changed_files_among_very_many_are_a_few_blocks() {
    let entries = match std::env::var("SUBD_ENTRIES") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => ENTRIES,
    };
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let large = place.path().join("large");
    std::fs::create_dir(&large).unwrap();
    let file = |number: usize| large.join(format!("{number:0>20}"));
    for number in 0..entries {
        std::fs::write(file(number), "1").unwrap();
    }
    let sub = Sub::start_on(place.path(), &[]).await;
    let (address, count) = counting(sub.client.peer().to_string().parse().unwrap()).await;
    let client = Client::new(Peer::parse(&address.to_string(), 1).unwrap(), &Security::Insecure);
    let reader = Arc::new(TreeReader::new(2));
    // Longer than the patience of other tests, for a directory that is larger.
    let scanned = async |former: Option<ObjectId>| loop {
        let scan = sub.poll().await.scan;
        match scan.filter(|scan| former != Some(scan.root)) {
            Some(scan) => return scan.root,
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let first = scanned(None).await;
    let before = reader.from_sub(&client, first, None).await.unwrap();
    let whole = count.swap(0, Ordering::Relaxed);
    for number in [0, entries / 2, entries - 1] {
        std::fs::write(file(number), "2").unwrap();
    }
    let request = ScanNowRequest { content: false, media: false };
    sub.client.call::<ScanNow>(&request).await.unwrap();
    // A pass that began before the last write may have its tree replaced while it is read.
    let after = loop {
        let root = scanned(Some(first)).await;
        match reader.from_sub(&client, root, Some(&before)).await {
            Err(TreeReadError::Changed) => {}
            read => break read.unwrap(),
        }
    };
    let blocks = count.load(Ordering::Relaxed);
    assert_ne!(before.digest(), after.digest());
    eprintln!("{entries} entries: {whole} bytes, after three changes {blocks} bytes");
    assert!(blocks < 3 * (128 << 10) + (64 << 10) && blocks * 4 < whole, "{blocks} of {whole}");
    sub.stop().await;
}
