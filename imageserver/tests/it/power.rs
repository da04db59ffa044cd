//! A server whose file-system is cut off, so that what was not synced is really gone.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use api::image_server::{ListImages, ListImagesRequest};
use model::object::ObjectId;
use model::tree::Tree;

use crate::fixture::{ALGORITHM, Server, directories, image_of, stream_of, tree_of, until};

/// `EXT4_IOC_SHUTDOWN`, without a last write of the journal. A program of its own, because Rust has
/// no safe way.
const SHUTDOWN: &str = "
import fcntl, os, struct, sys
top = os.open(sys.argv[1], os.O_RDONLY)
fcntl.ioctl(top, 0x8004587d, struct.pack('I', 2))
";

/// How long the kernel may take to let go of a file-system.
const PATIENCE: Duration = Duration::from_secs(20);

/// An ext4 on a loop device.
struct Disk {
    place: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let disk = Self { place };
        std::fs::File::create_new(disk.image()).unwrap().set_len(64 << 20).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-J", "size=4"]).arg(disk.image()));
        std::fs::create_dir(disk.top()).unwrap();
        disk.mount();
        disk
    }

    fn image(&self) -> PathBuf {
        self.place.path().join("image")
    }

    fn top(&self) -> PathBuf {
        self.place.path().join("top")
    }

    fn data(&self) -> PathBuf {
        self.top().join("data")
    }

    fn mount(&self) {
        // The kernel itself must not write anything in the background.
        let options = "loop,commit=300,noauto_da_alloc";
        run(Command::new("mount").args(["-o", options]).arg(self.image()).arg(self.top()));
    }

    fn unmount(&self) {
        let start = Instant::now();
        let mut command = Command::new("umount");
        command.arg(self.top()).stderr(Stdio::null());
        while !command.status().unwrap().success() {
            assert!(start.elapsed() < PATIENCE, "{} is busy", self.top().display());
            std::thread::yield_now();
        }
    }

    /// Cuts the power of `server` and of its disk, and gives it back.
    fn cut(&self, server: Server) {
        run(Command::new("python3").args(["-c", SHUTDOWN]).arg(self.top()));
        server.kill();
        self.unmount();
        self.mount();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.unmount();
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{}: {error}: install it", command.get_program().display());
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}; this needs root and loop devices");
}

fn image(number: usize) -> (Tree, Vec<Vec<u8>>) {
    let contents: Vec<Vec<u8>> =
        (0..40).map(|file| format!("{file} of {number}").repeat(1 + file * 200).into()).collect();
    let paths: Vec<String> = (0..40).map(|file| format!("/usr/{}/{file}", file % 4)).collect();
    let files: Vec<(&str, &[u8])> =
        paths.iter().zip(&contents).map(|(path, content)| (&**path, &content[..])).collect();
    (tree_of(&files), contents)
}

fn slices(contents: &[Vec<u8>]) -> Vec<&[u8]> {
    contents.iter().map(|content| &content[..]).collect()
}

async fn list(server: &Server) -> Vec<String> {
    let reply = server.client.call::<ListImages>(&ListImagesRequest::default()).await.unwrap();
    reply.images.into_iter().map(|image| image.name.to_string()).collect()
}

/// Fetches all of an image.
async fn expect_whole(server: &Server, tree: &Tree, contents: &[Vec<u8>]) {
    let mut want: Vec<(ObjectId, Option<Vec<u8>>)> =
        directories(tree).into_iter().map(|(id, encoding)| (id, Some(encoding))).collect();
    let files = contents.iter().map(|content| (ALGORITHM.digest(content), Some(content.clone())));
    want.extend(files);
    let ids: Vec<ObjectId> = want.iter().map(|(id, _)| *id).collect();
    assert_eq!(server.fetch(&ids).await, want);
}

#[tokio::test]
async fn what_was_answered_is_there_after_a_power_cut() {
    let disk = Disk::new();
    let mut names = Vec::new();
    for number in 0..4 {
        let server = Server::start(&disk.data());
        let (tree, contents) = image(number);
        server.upload_tree(&tree, &slices(&contents)).await;
        let name = format!("web/{number}");
        server.add(image_of(&name, &tree)).await.unwrap();
        names.push(name);
        disk.cut(server);

        let server = Server::start(&disk.data());
        assert_eq!(list(&server).await, names);
        expect_whole(&server, &tree, &contents).await;
        server.stop().await;
    }
    check(&disk.data());
}

#[tokio::test]
async fn a_power_cut_in_an_upload_leaves_what_was_there_and_the_upload_can_be_made_again() {
    let disk = Disk::new();
    let server = Server::start(&disk.data());
    let (first, first_contents) = image(0);
    server.upload_tree(&first, &slices(&first_contents)).await;
    server.add(image_of("web/0", &first)).await.unwrap();
    server.stop().await;
    for number in 1..5 {
        let server = Server::start(&disk.data());
        let (tree, contents) = image(number);
        // So much of it has come when the power fails, and the rest is on its way.
        let come = number * 7;
        let (client, sent) = (server.client.clone(), stream_of(&slices(&contents)));
        let upload = tokio::spawn(async move {
            let chunks = sent.into_iter().map(Ok::<_, std::io::Error>);
            let body = futures_util::stream::iter(chunks);
            client.upload::<api::object_server::AddObjects>(body).await
        });
        let ids: Vec<ObjectId> =
            contents[..come].iter().map(|content| ALGORITHM.digest(content)).collect();
        until(async || server.missing(&ids).await.is_empty()).await;
        disk.cut(server);
        // It may have been done just before.
        let _done = upload.await.unwrap();

        let server = Server::start(&disk.data());
        expect_whole(&server, &first, &first_contents).await;
        assert!(!list(&server).await.contains(&format!("web/{number}")));
        let mut all = contents.clone();
        all.extend(directories(&tree).into_iter().map(|(_, encoding)| encoding));
        let ids: Vec<ObjectId> = all.iter().map(|content| ALGORITHM.digest(content)).collect();
        let missing = server.missing(&ids).await;
        let rest = all.iter().filter(|content| missing.contains(&ALGORITHM.digest(content)));
        let rest: Vec<&[u8]> = rest.map(|content| &content[..]).collect();
        server.upload(&rest).await;
        server.add(image_of(&format!("web/{number}"), &tree)).await.unwrap();
        expect_whole(&server, &tree, &contents).await;
        server.stop().await;
    }
    check(&disk.data());
}

/// All of the store is there and whole.
fn check(data: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_imageserver"));
    let output = command.args(["--config", "/dev/null", "check", "--data"]).arg(data).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
}
