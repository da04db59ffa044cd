//! A full disk.

use std::path::Path;
use std::process::Command;

use api::fault::FaultCode;
use api::image_server::collection::{Collect, CollectRequest};

use crate::fixture::{ALGORITHM, Server, fault, files_in, image_of, stream_of, tree_of};

/// A small file-system, unmounted when dropped.
pub struct Mount<'path>(&'path Path);

impl<'path> Mount<'path> {
    /// Mounts one, if this process may.
    pub fn new(path: &'path Path) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=4m,nr_inodes=2k", "tmpfs"]).arg(path);
        mount.status().is_ok_and(|status| status.success()).then_some(Self(path))
    }
}

impl Mount<'_> {
    pub fn path(&self) -> &Path {
        self.0
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let status = Command::new("umount").arg("-l").arg(self.0).status();
        assert!(status.is_ok_and(|status| status.success()));
    }
}

#[tokio::test]
async fn a_full_disk_is_named_and_reading_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::new(directory.path()) else {
        eprintln!("skipped: this needs the right to mount");
        return;
    };
    let data = mount.0.join("data");
    let server = Server::start(&data);
    let tree = tree_of(&[("/etc/motd", b"hello")]);
    server.upload_tree(&tree, &[b"hello"]).await;
    server.add(image_of("base", &tree)).await.unwrap();

    // One that cannot fit, which is known before it is sent, and many that fill the disk.
    let huge = vec![1; 5 << 20];
    let error = server.upload_chunks(stream_of(&[&huge])).await.unwrap_err();
    let id = ALGORITHM.digest(&huge);
    assert_eq!(fault(error).code, FaultCode::NoSpace);
    let many: Vec<Vec<u8>> = (0..20).map(|seed| vec![seed; 400_000]).collect();
    let slices: Vec<&[u8]> = many.iter().map(|content| &content[..]).collect();
    let fault = fault(server.upload_chunks(stream_of(&slices)).await.unwrap_err());
    let ids: Vec<_> = many.iter().map(|content| ALGORITHM.digest(content)).collect();
    let missing = server.missing(&ids).await;
    assert!((1..20).contains(&missing.len()), "{}", missing.len());
    assert_eq!(fault.code, FaultCode::NoSpace);
    let text = format!("no space left to store object {}: ", missing[0]);
    assert!(fault.message.starts_with(&text), "{}", fault.message);
    assert_eq!(files_in(data.join("incoming")), 0);

    assert_eq!(server.missing(&[id]).await, [id]);
    let hello = ALGORITHM.digest(b"hello");
    assert_eq!(server.fetch(&[hello]).await, [(hello, Some(b"hello".to_vec()))]);
    assert_eq!(server.fetch(&[ids[0]]).await, [(ids[0], Some(many[0].clone()))]);
    assert_eq!(server.get("/", "").status, 200);

    // Not even the record of an image fits, until there is space again: nobody restarts the server.
    std::fs::write(mount.0.join("rest"), vec![0; 4 << 20]).unwrap_err();
    let error = server.add(image_of("more", &tree)).await.unwrap_err();
    assert_eq!(error.code, FaultCode::NoSpace);
    assert!(error.message.starts_with("no space left to store image more: "), "{}", error.message);
    // A server that starts on such a disk gives what it has, and takes what makes room.
    server.stop().await;
    let server = Server::start(&data);
    assert_eq!(server.fetch(&[hello]).await, [(hello, Some(b"hello".to_vec()))]);
    let error = server.add(image_of("more", &tree)).await.unwrap_err();
    assert_eq!(error.code, FaultCode::NoSpace, "{}", error.message);
    let collect = CollectRequest { dry_run: true, ..CollectRequest::default() };
    server.client.call::<Collect>(&collect).await.unwrap();
    let listed = server.metric("dominator_images");
    std::fs::remove_file(mount.0.join("rest")).unwrap();
    let mut grow = Command::new("mount");
    grow.args(["-o", "remount,size=32m"]).arg(mount.0);
    assert!(grow.status().unwrap().success());
    assert_eq!((server.add(image_of("more", &tree)).await.is_ok(), listed), (true, "1".to_owned()));
    assert_eq!(server.upload(&slices).await.known, 20 - missing.len() as u64);
    assert_eq!(server.fetch(&ids).await.len(), 20);
    server.stop().await;
}
