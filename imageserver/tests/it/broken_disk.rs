//! Disks that cannot be read, or that the kernel has made read-only.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use api::fault::FaultCode;
use api::image_server::{DeleteImage, DeleteImageRequest};
use rpc::client::CallError;

use crate::fixture::{
    ALGORITHM, Server, command, directories, fault, files_in, image_of, name, stored, stream_of,
    tree_of, until,
};

/// The server on `data`, whose reads of `paths` fail with EIO.
fn unreadable(data: &Path, paths: &[PathBuf], flags: &[&str]) -> Server {
    let server = command(data);
    let mut strace = Command::new("strace");
    // The server is the child, and strace that of the server.
    strace.args(["-D", "-f", "-q", "-o", "/dev/null"]);
    for path in paths {
        strace.arg("-P").arg(path);
    }
    strace.args(["-e", "trace=read,pread64", "-e", "inject=read,pread64:error=EIO", "--"]);
    strace.arg(server.get_program()).args(server.get_args()).args(flags);
    strace.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    Server::run(&mut strace)
}

fn large() -> Vec<u8> {
    (0..400_000_u32).map(|index| (index % 247) as u8).collect()
}

#[tokio::test]
async fn what_the_disk_does_not_give_back_is_not_served_and_can_be_uploaded_again() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let large = large();
    let tree = tree_of(&[("/etc/small", b"small"), ("/usr/large", &large), ("/ok", b"ok")]);
    server.upload_tree(&tree, &[b"small", &large, b"ok"]).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    server.stop().await;

    let ids = [ALGORITHM.digest(b"small"), ALGORITHM.digest(&large), directories(&tree)[1].0];
    let paths = ids.map(|id| stored(data.path(), &id));
    let never = ["--scrub-every", "0s"];
    let server = unreadable(data.path(), &paths, &never);
    // None of the three ways gives what could not be read: batches, pages, the tree of an image.
    assert_eq!(server.fetch(&ids).await, ids.map(|id| (id, None)));
    for id in &ids {
        let answer = server.get(&format!("/objects/{id}"), "");
        assert_eq!(answer.status, 500);
        assert!(answer.text().contains("Input/output error"), "{}", answer.text());
    }
    let refused = server.add(image_of("web/2", &tree)).await.unwrap_err();
    let text = format!(
        "directory {} of the tree is not on this server (0 more are missing): \
                        upload it, then add the image again",
        ids[2]
    );
    assert_eq!((refused.code, refused.message), (FaultCode::NotFound, text));
    // All else goes on.
    let ok = ALGORITHM.digest(b"ok");
    assert_eq!(server.fetch(&[ok]).await, [(ok, Some(b"ok".to_vec()))]);
    // What is below a directory that is lost is not known to be needed.
    until(async || server.metric("dominator_objects_lost") == "2").await;
    assert_eq!(server.metric("dominator_images_incomplete"), "1");
    // Nothing was moved: the disk may be well again.
    assert_eq!(files_in(data.path().join("quarantine")), 0);
    let mut missing = server.missing(&ids).await;
    missing.sort();
    let mut want = ids;
    want.sort();
    assert_eq!(missing, want);
    // The new files are elsewhere on the disk; strace goes by their names.
    let encoding = &directories(&tree)[1].1;
    assert_eq!(server.upload(&[b"small", &large, encoding]).await.added, 3);
    server.stop().await;
    let server = Server::start(data.path());
    let want = [Some(b"small".to_vec()), Some(large), Some(encoding.clone())];
    assert_eq!(server.fetch(&ids).await, ids.into_iter().zip(want).collect::<Vec<_>>());
    assert_eq!(server.metric("dominator_objects_lost"), "0");
    server.add(image_of("web/2", &tree)).await.unwrap();
    server.stop().await;
}

/// The server on `data` as root without the right to read the files of others.
fn without_rights(data: &Path) -> Server {
    let server = command(data);
    let mut setpriv = Command::new("setpriv");
    let rights = "-dac_override,-dac_read_search";
    setpriv.arg(format!("--bounding-set={rights}")).arg(format!("--inh-caps={rights}"));
    setpriv.arg(server.get_program()).args(server.get_args()).args(["--scrub-every", "0s"]);
    setpriv.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Server::run(&mut setpriv)
}

#[tokio::test]
async fn what_may_not_be_read_or_is_no_file_is_lost_and_can_be_uploaded_again() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let contents = [&b"other's"[..], b"directory", b"link"];
    let tree = tree_of(&[("/a", contents[0]), ("/b", contents[1]), ("/c", contents[2])]);
    server.upload_tree(&tree, &contents).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    server.stop().await;
    let ids = contents.map(|content| ALGORITHM.digest(content));
    let [other, directory, link] = ids.map(|id| stored(data.path(), &id));
    std::os::unix::fs::chown(other, Some(65_534), Some(65_534)).unwrap();
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir_all(directory.join("below")).unwrap();
    let elsewhere = data.path().join("incoming/elsewhere");
    std::fs::rename(&link, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();

    let server = without_rights(data.path());
    assert_eq!(server.missing(&ids).await, ids);
    assert_eq!(server.fetch(&ids).await, ids.map(|id| (id, None)));
    until(async || server.metric("dominator_objects_lost") == "3").await;
    assert_eq!(server.metric("dominator_images_incomplete"), "1");
    let refused = server.add(image_of("web/2", &tree)).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::NotFound, "{}", refused.message);
    assert_eq!(server.upload(&contents).await.added, 3);
    let whole = ids.into_iter().zip(contents.map(|content| Some(content.to_vec())));
    assert_eq!(server.fetch(&ids).await, whole.collect::<Vec<_>>());
    server.add(image_of("web/2", &tree)).await.unwrap();
    until(async || server.metric("dominator_objects_lost") == "0").await;
    // Nothing is deleted that somebody has put there.
    let quarantine = std::fs::read_dir(data.path().join("quarantine")).unwrap();
    let quarantined: Vec<PathBuf> = quarantine.map(|entry| entry.unwrap().path()).collect();
    assert!(matches!(&quarantined[..], [one] if one.join("below").is_dir()), "{quarantined:?}");
    server.stop().await;
}

#[tokio::test]
async fn what_can_be_read_again_is_lost_no_more() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/etc/small", b"small")]);
    server.upload_tree(&tree, &[b"small"]).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    server.stop().await;
    let small = ALGORITHM.digest(b"small");
    let always = ["--scrub-every", "1s"];
    let server = unreadable(data.path(), &[stored(data.path(), &small)], &always);
    // Nobody asks for it.
    until(async || server.metric("dominator_objects_lost") == "1").await;
    let page = server.get("/", "").text();
    assert!(page.contains(&format!("{small} is unreadable")), "{page}");
    server.stop().await;
    let server = Server::start_with(data.path(), &always);
    until(async || server.metric("dominator_scrub_directories") == "512").await;
    assert_eq!(server.metric("dominator_objects_lost"), "0");
}

/// An ext4 on a loop device that becomes read-only when it is damaged.
struct Disk {
    place: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        let disk = Self { place: tempfile::tempdir().unwrap() };
        let image = disk.place.path().join("image");
        std::fs::File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-J", "size=4"]).arg(&image));
        std::fs::create_dir(disk.top()).unwrap();
        disk.mount();
        disk
    }

    fn top(&self) -> PathBuf {
        self.place.path().join("top")
    }

    fn mount(&self) {
        let image = self.place.path().join("image");
        run(Command::new("mount")
            .args(["-o", "loop,errors=remount-ro"])
            .arg(image)
            .arg(self.top()));
    }

    /// Mounts it again, read-only or not.
    fn remount(&self, how: &str) {
        run(Command::new("mount").arg("-o").arg(format!("remount,{how}")).arg(self.top()));
    }

    fn unmount(&self) {
        run(Command::new("umount").arg(self.top()));
    }

    /// Lets the kernel believe that it has found damage.
    fn damage(&self) {
        let top = self.top();
        let device = run(Command::new("findmnt").args(["-n", "-o", "SOURCE"]).arg(top));
        let device = device.trim().strip_prefix("/dev/").unwrap();
        std::fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "a test").unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.unmount();
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{}: {error}: install it", command.get_program().display());
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}; this needs root and loop devices");
    String::from_utf8(output.stdout).unwrap()
}

async fn delete(server: &Server, image: &str) -> Result<(), CallError> {
    let request = DeleteImageRequest { name: name(image), force: false };
    server.client.call::<DeleteImage>(&request).await.map(drop)
}

#[tokio::test]
async fn a_disk_that_becomes_read_only_goes_on_being_served() {
    let disk = Disk::new();
    let data = disk.top().join("data");
    // What cannot be recorded is not begun: the log is on a disk that is whole.
    let elsewhere = tempfile::tempdir().unwrap();
    let log = elsewhere.path().join("audit.log").display().to_string();
    let server = Server::start_with(&data, &["--audit-log", &log]);
    let large = large();
    let tree = tree_of(&[("/etc/small", b"small"), ("/usr/large", &large)]);
    server.upload_tree(&tree, &[b"small", &large]).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    disk.damage();

    let new = fault(server.upload_chunks(stream_of(&[b"new"])).await.unwrap_err());
    let id = ALGORITHM.digest(b"new");
    assert_eq!(new.code, FaultCode::Internal);
    assert!(new.message.starts_with(&format!("cannot store object {id}: ")), "{}", new.message);
    assert!(new.message.contains("Read-only file system"), "{}", new.message);
    let added = server.add(image_of("web/2", &tree)).await.unwrap_err();
    assert_eq!(added.code, FaultCode::Internal);
    assert!(added.message.contains("Read-only file system"), "{}", added.message);
    let deleted = fault(delete(&server, "web/1").await.unwrap_err());
    assert!(deleted.message.contains("Read-only file system"), "{}", deleted.message);

    let ids = [ALGORITHM.digest(b"small"), ALGORITHM.digest(&large)];
    let want = [(ids[0], Some(b"small".to_vec())), (ids[1], Some(large.clone()))];
    assert_eq!(server.fetch(&ids).await, want);
    assert_eq!(server.get("/", "").status, 200);
    assert_eq!(server.metric("dominator_images"), "1");
    server.stop().await;

    // After a restart too.
    let server = Server::start_with(&data, &["--audit-log", &log]);
    assert_eq!(server.fetch(&ids).await, want);
    assert_eq!(server.expect_whole().await, 1);
    until(async || server.metric("dominator_store_failing") == "1").await;
    server.stop().await;

    // It can be looked at as it is; and after a repair all goes on.
    let mut check = Command::new(env!("CARGO_BIN_EXE_imageserver"));
    check.args(["--config", "/dev/null", "check", "--data"]).arg(&data);
    run(&mut check);
    disk.unmount();
    disk.mount();
    let server = Server::start(&data);
    assert_eq!(server.fetch(&ids).await, want);
    server.upload(&[b"new"]).await;
    server.add(image_of("web/2", &tree)).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_store_on_a_read_only_disk_is_served_and_says_so() {
    let disk = Disk::new();
    let data = disk.top().join("data");
    let server = Server::start(&data);
    let tree = tree_of(&[("/etc/small", b"small")]);
    server.upload_tree(&tree, &[b"small"]).await;
    for image in ["web/1", "web/2"] {
        server.add(image_of(image, &tree)).await.unwrap();
    }
    let record = data.join("images/web.d/2.image");
    let bytes = std::fs::read(&record).unwrap();
    delete(&server, "web/2").await.unwrap();
    // The remains of a server that was killed: while it wrote, while it deleted, and unsynced.
    server.kill();
    std::fs::write(&record, bytes).unwrap();
    for left in ["incoming/object-0", "unsynced"] {
        std::fs::write(data.join(left), "").unwrap();
    }
    disk.remount("ro");

    let server = Server::start(&data);
    assert_eq!(server.expect_whole().await, 1);
    let small = ALGORITHM.digest(b"small");
    assert_eq!(server.fetch(&[small]).await, [(small, Some(b"small".to_vec()))]);
    assert_eq!(server.get(&format!("/objects/{small}"), "").body, b"small");
    let new = fault(server.upload_chunks(stream_of(&[b"new"])).await.unwrap_err());
    let added = server.add(image_of("web/3", &tree)).await.unwrap_err();
    let deleted = fault(delete(&server, "web/1").await.unwrap_err());
    let unrecorded = "was not carried out, because it cannot be recorded: ";
    for (fault, code, text) in [
        (new, FaultCode::Unavailable, format!("ObjectServer.AddObjects {unrecorded}")),
        (added, FaultCode::Unavailable, format!("ImageServer.AddImage {unrecorded}")),
        // A deletion is tried, because it may free space.
        (deleted, FaultCode::Internal, "cannot delete image web/1: ".to_owned()),
    ] {
        assert_eq!(fault.code, code, "{}", fault.message);
        assert!(fault.message.starts_with(&text), "{}", fault.message);
        assert!(fault.message.contains("Read-only file system"), "{}", fault.message);
    }
    assert_eq!(server.metric("dominator_store_failing"), "1");
    let alarm = "images and objects are served, and nothing can be added, deleted or collected";
    for path in ["/", "/healthz"] {
        let answer = server.get(path, "");
        assert_eq!(answer.status, if path == "/" { 200 } else { 503 });
        let text = answer.text();
        assert!(text.contains(alarm) && text.contains("Read-only file system"), "{text}");
    }

    // Without a restart, once the disk is well.
    disk.remount("rw");
    until(async || server.metric("dominator_store_failing") == "0").await;
    until(async || server.logged("the store can be written again")).await;
    assert_eq!(server.get("/healthz", "").text(), "ok\n");
    assert!(!server.get("/", "").text().contains(alarm));
    server.upload(&[b"new"]).await;
    server.add(image_of("web/3", &tree)).await.unwrap();
    delete(&server, "web/1").await.unwrap();
    assert_eq!(server.expect_whole().await, 1);
    server.stop().await;
    let server = Server::start(&data);
    assert_eq!(server.expect_whole().await, 1);
    assert!(!record.exists());
    server.stop().await;
}
