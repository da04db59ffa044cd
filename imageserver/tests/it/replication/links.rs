//! Links that are cut, and servers that are killed at any time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Notify};

use super::*;

/// A link that can be cut: what connects to it gets to a server.
pub(super) struct Proxy {
    pub address: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    is_cut: Arc<AtomicBool>,
    cut: Arc<Notify>,
}

impl Proxy {
    pub async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to, is_cut, cut) = (Arc::new(Mutex::new(server)), Arc::default(), Arc::default());
        let proxy = Self { address, to, is_cut, cut };
        let (to, is_cut, cut) =
            (Arc::clone(&proxy.to), Arc::clone(&proxy.is_cut), Arc::clone(&proxy.cut));
        tokio::spawn(async move {
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                if is_cut.load(Ordering::SeqCst) {
                    continue;
                }
                let (to, cut) = (*to.lock().await, Arc::clone(&cut));
                tokio::spawn(async move {
                    let Ok(mut to) = TcpStream::connect(to).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut from, &mut to) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        proxy
    }

    pub fn text(&self) -> String {
        self.address.to_string()
    }

    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.cut.notify_waiters();
    }

    pub async fn mark_repaired(&self, to: SocketAddr) {
        *self.to.lock().await = to;
        self.is_cut.store(false, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn servers_that_are_killed_and_links_that_are_cut_end_with_the_same_images() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let mut root = Server::start(data[0].path());
    let above = Proxy::to(root.address).await;
    let mut middle = replica(data[1].path(), &above.text(), &[]);
    let below = Proxy::to(middle.address).await;
    let mut last = replica(data[2].path(), &below.text(), &[]);
    let mut expected: Vec<String> = Vec::new();
    for round in 0..8 {
        let image = format!("round/{round}");
        let large: Vec<u8> =
            (0..3_000_000_u32).map(|index| (index % (200 + round)) as u8).collect();
        add_of(&root, &image, &large).await.unwrap();
        expected.push(image);
        if round % 3 == 2 {
            let gone = expected.remove(0);
            delete(&root, &gone, false).await.unwrap();
        }
        // Wherever they are in it just now.
        match round {
            0 | 4 => below.cut(),
            1 => {
                below.mark_repaired(middle.address).await;
                last.kill();
                last = replica(data[2].path(), &below.text(), &[]);
            }
            2 => above.cut(),
            3 => {
                middle.kill();
                middle = replica(data[1].path(), &above.text(), &[]);
                above.mark_repaired(root.address).await;
                below.mark_repaired(middle.address).await;
            }
            5 => {
                below.mark_repaired(middle.address).await;
                root.kill();
                root = Server::start(data[0].path());
                above.mark_repaired(root.address).await;
            }
            _ => {
                middle.kill();
                middle = replica(data[1].path(), &above.text(), &[]);
                below.mark_repaired(middle.address).await;
            }
        }
    }
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    for server in [&middle, &last] {
        until_names(server, &expected).await;
        expect_same(&root, server).await;
        until(async || get(server, "round/0").await == Err(FaultCode::Gone)).await;
        until_level(server).await;
        assert_eq!(troubles(server).await, []);
        assert_eq!(master_of(server).await.only_here_total, 0);
    }
    for server in [root, middle, last] {
        server.stop().await;
    }
    data.iter().for_each(|data| expect_clean(data.path()));
}

#[tokio::test]
async fn a_replica_whose_master_is_away_serves_and_says_so() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    let link = Proxy::to(root.address).await;
    add(&root, "base/1").await.unwrap();
    let replica = replica(data[1].path(), &link.text(), &[]);
    until_level(&replica).await;
    link.cut();
    root.kill();
    until(async || master_of(&replica).await.link.name() == "broken").await;
    let master = master_of(&replica).await;
    assert!(!master.is_level && master.level_at.is_some() && master.last_error.is_some());
    assert_eq!(replica.metric("dominator_replication_connected"), "0");
    until(async || replica.logged("cannot follow the master, trying again")).await;
    assert!(replica.get("/", "").text().contains("is not followed"));
    assert_eq!(names(&replica).await, ["base/1"]);
    // A change is refused, and says why.
    let refused = delete(&replica, "base/1", false).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable);
    let root = Server::start(data[0].path());
    link.mark_repaired(root.address).await;
    until_level(&replica).await;
    delete(&replica, "base/1", false).await.unwrap();
    assert_eq!(names(&root).await, Vec::<String>::new());
    assert_eq!(names(&replica).await, Vec::<String>::new());
}

#[tokio::test]
async fn an_image_that_does_not_fit_is_tried_until_it_does() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    let content = add(&root, "base/1").await.unwrap();
    // An object of it is lost on the master, until it is uploaded again.
    let lost = crate::fixture::ALGORITHM.digest(&own("base/1"));
    std::fs::remove_file(crate::fixture::stored(data[0].path(), &lost)).unwrap();
    let replica = replica(data[1].path(), &address(&root), &[]);
    until(async || {
        troubles(&replica).await == [("base/1".to_owned(), ReplicationTrouble::Failing)]
    })
    .await;
    let text = master_of(&replica).await.troubles.remove(0).text;
    assert_eq!(text, format!("the master has lost object {lost} (0 more are missing there)"));
    assert_eq!(names(&replica).await, Vec::<String>::new());
    assert_eq!(get(&replica, "base/1").await, Err(FaultCode::NotFound));
    // It holds up nothing else.
    add(&root, "base/2").await.unwrap();
    until_names(&replica, &["base/2"]).await;
    root.upload(&[&own("base/1")]).await;
    until_names(&replica, &["base/1", "base/2"]).await;
    assert_eq!(get(&replica, "base/1").await.unwrap().content, content);
    until(async || troubles(&replica).await.is_empty()).await;
}
