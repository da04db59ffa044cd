//! `imageserver check`, as a process, on stores that are whole and on damaged ones.

use std::path::Path;
use std::process::{Command, Output};

use model::object::ObjectId;

use crate::fixture::{ALGORITHM, Server, directories, files_in, flip, image_of, stored, tree_of};

const SMALL: &[u8] = b"small";

fn large() -> Vec<u8> {
    (0..3_000_001_u32).map(|index| (index % 253) as u8).collect()
}

fn check(data: &Path, flags: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_imageserver"));
    let Output { status, stdout, stderr } = command
        .args(["--config", "/dev/null", "check", "--data"])
        .arg(data)
        .args(flags)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// The lines of a check without those that tell how long it took.
fn lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with("objects ")).collect()
}

/// A store with the images `a` and `b/c`, which share a file.
async fn store(data: &Path) -> Server {
    let server = Server::start(data);
    let large = large();
    let a = tree_of(&[("/etc/small", SMALL), ("/usr/large", &large)]);
    let b = tree_of(&[("/etc/small", SMALL), ("/opt/own", b"own")]);
    server.upload_tree(&a, &[SMALL, &large]).await;
    server.upload_tree(&b, &[b"own"]).await;
    server.add(image_of("a", &a)).await.unwrap();
    server.add(image_of("b/c", &b)).await.unwrap();
    server
}

#[tokio::test]
async fn a_store_that_is_whole_is_said_to_be_so() {
    let data = tempfile::tempdir().unwrap();
    let server = store(data.path()).await;
    let (code, out, error) = check(data.path(), &[]);
    let running = "stop it first; while it runs it checks itself";
    let path = data.path().display();
    assert_eq!((code, &*out), (Some(1), ""));
    assert_eq!(error, format!("error: an imageserver is running on `{path}`: {running}\n"));
    server.stop().await;

    let (code, out, error) = check(data.path(), &[]);
    let want = ["images      2; 0 names deleted", "result      all is there and whole"];
    assert_eq!((code, lines(&out), &*error), (Some(0), want.to_vec(), ""));
    assert!(out.starts_with("objects     8, 3.0 MB read in "), "{out}");
    let (code, out, _) = check(data.path(), &["--format", "json", "--threads", "1"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["sound"], &json["objects"]), (Some(0), &true.into(), &8.into()));
}

#[tokio::test]
async fn what_is_not_a_store_is_not_checked() {
    let data = tempfile::tempdir().unwrap();
    let (code, out, error) = check(data.path(), &[]);
    let path = data.path().display();
    let text = format!(
        "error: `{path}` is no data directory of an imageserver: it has no directory `objects`\n"
    );
    assert_eq!((code, out, error), (Some(1), String::new(), text));
    assert_eq!(files_in(data.path().to_owned()), 0);
}

#[tokio::test]
async fn every_damage_is_found_put_aside_and_repaired_by_an_upload() {
    let data = tempfile::tempdir().unwrap();
    let server = store(data.path()).await;
    let tree = tree_of(&[("/once", b"once")]);
    server.upload_tree(&tree, &[b"once"]).await;
    server.add(image_of("once", &tree)).await.unwrap();
    server.add(image_of("gone", &tree)).await.unwrap();
    server.stop().await;
    let large = large();
    let [big, small, own, once] =
        [&large[..], SMALL, b"own", b"once"].map(|content| ALGORITHM.digest(content));
    flip(&stored(data.path(), &big));
    std::fs::remove_file(stored(data.path(), &own)).unwrap();
    flip(&data.path().join("images/once.image"));
    std::fs::write(data.path().join("images/gone.deleted"), "deleted\n").unwrap();
    std::fs::write(data.path().join("notes.txt"), "mine").unwrap();
    std::fs::write(stored(data.path(), &small).with_file_name("x"), "mine").unwrap();
    std::fs::write(data.path().join("incoming/object-0"), "half").unwrap();
    std::fs::write(stored(data.path(), &ALGORITHM.digest(b"just made")), "").unwrap();

    let path = data.path().display();
    let x = stored(data.path(), &small).with_file_name("x");
    let mut unknown = [format!("{path}/notes.txt"), x.display().to_string()];
    unknown.sort();
    let found = |corrupt: String| {
        [
            "images      4; 1 name deleted".to_owned(),
            "left over   1 unfinished upload, removed by the next start of the server".to_owned(),
            "left over   1 empty file of a crash, replaced by the next upload".to_owned(),
            corrupt,
            format!("missing     {big} of image a"),
            format!("missing     {own} of image b/c"),
            "record      of image once: it was changed or cut short after it was written"
                .to_owned(),
            "deleted     image gone has still a record; the next start of the server removes it"
                .to_owned(),
            format!("unknown     {} is not a file of the server", unknown[0]),
            format!("unknown     {} is not a file of the server", unknown[1]),
            "result      3 images not whole".to_owned(),
        ]
    };
    let (code, out, _) = check(data.path(), &[]);
    let corrupt = format!("corrupt     {big} (3.0 MB); --repair puts it aside");
    assert_eq!((code, lines(&out)), (Some(3), found(corrupt).iter().map(|line| &**line).collect()));
    assert_eq!(files_in(data.path().join("quarantine")), 0, "nothing was changed");

    use std::os::unix::fs::MetadataExt as _;
    let inode = std::fs::metadata(stored(data.path(), &big)).unwrap().ino();
    let (code, out, _) = check(data.path(), &["--repair"]);
    let corrupt =
        format!("corrupt     {big} (3.0 MB); now {path}/quarantine/blake3-{}-{inode}", big.hex());
    assert_eq!((code, lines(&out)), (Some(3), found(corrupt).iter().map(|line| &**line).collect()));

    let (code, out, _) = check(data.path(), &["--format", "json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(3));
    assert_eq!(json["corrupt"], serde_json::json!([]));
    let lacks = |image: &str, id: &ObjectId| {
        let objects = [id.to_string()];
        serde_json::json!({ "image": image, "objects": objects })
    };
    assert_eq!(json["incomplete"], serde_json::json!([lacks("a", &big), lacks("b/c", &own)]));
    assert_eq!(json["revived_names"], serde_json::json!(["gone"]));

    // An upload brings back what is lost; the rest is for the operator.
    let server = Server::start(data.path());
    server.upload(&[&large, b"own"]).await;
    assert_eq!(server.fetch(&[once]).await, [(once, Some(b"once".to_vec()))]);
    server.stop().await;
    std::fs::remove_file(data.path().join("images/once.image")).unwrap();
    std::fs::remove_file(data.path().join("notes.txt")).unwrap();
    std::fs::remove_file(x).unwrap();
    let (code, out, _) = check(data.path(), &[]);
    let want = [
        "images      2; 1 name deleted",
        "left over   1 empty file of a crash, replaced by the next upload",
        "result      all is there and whole",
    ];
    assert_eq!((code, lines(&out)), (Some(0), want.to_vec()));
}

#[tokio::test]
async fn an_image_whose_directory_is_lost_is_named() {
    let data = tempfile::tempdir().unwrap();
    let server = store(data.path()).await;
    server.stop().await;
    let large = large();
    let tree = tree_of(&[("/etc/small", SMALL), ("/usr/large", &large)]);
    let (root, _) = directories(&tree).remove(0);
    flip(&stored(data.path(), &root));
    let (code, out, _) = check(data.path(), &["--repair"]);
    assert_eq!(code, Some(3));
    let missing = format!("missing     {root} of image a");
    assert!(lines(&out).contains(&&*missing), "{out}");
    assert!(out.ends_with("result      1 image not whole\n"), "{out}");
}
