//! Directories of images: made, owned, listed, removed, and demanded.

use api::access::Owners;
use api::fault::{Fault, FaultCode};
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, ListDirectories, ListDirectoriesRequest, MakeDirectory,
    MakeDirectoryRequest, RemoveDirectory, RemoveDirectoryRequest,
};
use api::image_server::notes::{CopyImage, CopyImageRequest};
use api::image_server::{DeleteImage, DeleteImageRequest};

use crate::fixture::{Server, expected, fault, flip, image_of, name, tree_of};

fn groups(groups: &[&str]) -> Owners {
    Owners::new(groups.iter().copied(), [])
}

async fn mkdir(
    server: &Server,
    text: &str,
    parents: bool,
    owners: Option<Owners>,
) -> Result<Vec<String>, Fault> {
    let request = MakeDirectoryRequest { name: name(text), parents, owners };
    let reply = server.client.call::<MakeDirectory>(&request).await.map_err(fault)?;
    Ok(reply.made.iter().map(ToString::to_string).collect())
}

async fn rmdir(server: &Server, text: &str) -> Result<(), Fault> {
    let request = RemoveDirectoryRequest { name: name(text) };
    server.client.call::<RemoveDirectory>(&request).await.map(drop).map_err(fault)
}

async fn chown(server: &Server, text: &str, owners: Owners) -> Result<(), Fault> {
    let request = ChangeOwnerRequest { name: name(text), owners };
    server.client.call::<ChangeOwner>(&request).await.map(drop).map_err(fault)
}

/// Each directory: its name, whether it was made, its owners, its images and those below, and
/// their length.
async fn tree(server: &Server) -> Vec<String> {
    let request = ListDirectoriesRequest::default();
    let reply = server.client.call::<ListDirectories>(&request).await.unwrap();
    assert!(!reply.more);
    let line = |one: api::image_server::directories::DirectorySummary| {
        let how = if one.made_on.is_some() { "made" } else { "there" };
        let (images, below, bytes) = (one.images, one.images_below, one.bytes_below);
        format!("{} {how} {images} {below} {bytes} {}", one.name, one.owners.in_words())
    };
    reply.directories.into_iter().map(line).collect()
}

async fn add(server: &Server, image: &str) -> Result<(), Fault> {
    let tree = tree_of(&[("/etc/a", b"abc")]);
    server.upload_tree(&tree, &[b"abc"]).await;
    server.add(image_of(image, &tree)).await.map(drop)
}

async fn delete(server: &Server, image: &str) {
    let request = DeleteImageRequest { name: name(image), force: false };
    server.client.call::<DeleteImage>(&request).await.unwrap();
}

#[tokio::test]
async fn directories_are_made_given_away_and_removed_for_good() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    assert_eq!(tree(&server).await, Vec::<String>::new());
    add(&server, "web/prod/1").await.unwrap();
    add(&server, "top").await.unwrap();
    assert_eq!(tree(&server).await, ["web there 0 1 3 nobody", "web/prod there 1 1 3 nobody"]);
    assert_eq!(mkdir(&server, "web", false, Some(groups(&["web"]))).await.unwrap(), ["web"]);
    let made = mkdir(&server, "web/test/a", true, Some(groups(&["qa"]))).await.unwrap();
    assert_eq!(made, ["web/test", "web/test/a"]);
    let exists = "directory web exists already";
    assert_eq!(mkdir(&server, "web", false, None).await, Err(expected(FaultCode::Exists, exists)));
    let no_parent = "there is no directory x to make x/y in: make that first, or ask for both";
    assert_eq!(
        mkdir(&server, "x/y", false, None).await,
        Err(expected(FaultCode::NotFound, no_parent))
    );
    chown(&server, "web/prod", Owners::new(["prod"], ["alice"])).await.unwrap();
    assert_eq!(chown(&server, "x", groups(&["x"])).await.unwrap_err().code, FaultCode::NotFound);
    let refused = chown(&server, "web", groups(&["a,b"])).await;
    let text = "directory web cannot have these owners: `a,b` is no name of an owner: it holds a \
                comma";
    assert_eq!(refused, Err(expected(FaultCode::BadRequest, text)));
    let all = [
        "web made 0 1 3 group web",
        "web/prod made 1 1 3 group prod; user alice",
        "web/test made 0 0 0 group web",
        "web/test/a made 0 0 0 group qa",
    ];
    assert_eq!(tree(&server).await, all);
    server.kill();

    let server = Server::start(data.path());
    assert_eq!(tree(&server).await, all);
    let page = server.get("/directories", "").text();
    for part in ["group prod; user alice", "/directories?below=web/test/a", "4 directories were"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    let page = server.get("/directories?below=web/test", "").text();
    assert!(page.contains("web/test/a") && !page.contains("web/prod"), "{page}");
    assert!(server.get("/", "").text().contains("href=\"/directories\""));

    let held = "directory web/prod is not empty: it has 1 image in it or below";
    assert_eq!(rmdir(&server, "web/prod").await, Err(expected(FaultCode::Held, held)));
    let held = "directory web/test is not empty: it has 1 directory below it";
    assert_eq!(rmdir(&server, "web/test").await, Err(expected(FaultCode::Held, held)));
    delete(&server, "web/prod/1").await;
    for directory in ["web/prod", "web/test/a", "web/test", "web"] {
        rmdir(&server, directory).await.unwrap();
    }
    let none = "there is no directory web";
    assert_eq!(rmdir(&server, "web").await, Err(expected(FaultCode::NotFound, none)));
    server.kill();

    let server = Server::start(data.path());
    assert_eq!(tree(&server).await, Vec::<String>::new());
    // The name of the image stays used, also when its directory comes again.
    mkdir(&server, "web/prod", true, None).await.unwrap();
    assert_eq!(add(&server, "web/prod/1").await.unwrap_err().code, FaultCode::Gone);
    add(&server, "web/prod/2").await.unwrap();
}

#[tokio::test]
async fn a_server_can_demand_that_directories_were_made() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &["--require-directories"]);
    let refused = "there is no directory a/b, and this server takes images only into directories \
                   that were made: `imagetool mkdir -p a/b`";
    let refused = || Err(expected(FaultCode::BadRequest, refused));
    assert_eq!(add(&server, "a/b/1").await, refused());
    add(&server, "top").await.unwrap();
    let copy = CopyImageRequest { from: name("top"), to: name("a/b/1"), expires_in_seconds: None };
    let copied = server.client.call::<CopyImage>(&copy).await.map(drop).map_err(fault);
    assert_eq!(copied, refused());
    assert_eq!(tree(&server).await, Vec::<String>::new());
    mkdir(&server, "a/b", true, None).await.unwrap();
    add(&server, "a/b/1").await.unwrap();
    assert_eq!(add(&server, "a/c/1").await.unwrap_err().code, FaultCode::BadRequest);
}

#[tokio::test]
async fn without_the_file_of_directories_images_are_served_and_nobody_owns_any() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    mkdir(&server, "web", false, Some(groups(&["web"]))).await.unwrap();
    add(&server, "web/1").await.unwrap();
    server.stop().await;
    let file = data.path().join("directories");
    let before = std::fs::read(&file).unwrap();
    flip(&file);
    let damaged = std::fs::read(&file).unwrap();

    let output = std::process::Command::new(env!("CARGO_BIN_EXE_imageserver"))
        .args(["--config", "/dev/null", "check", "--data"])
        .arg(data.path())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = "directories the file cannot be used: it was changed or cut short after it was \
                written; nobody owns any directory until it is put back\n";
    assert_eq!((output.status.code(), text.contains(line)), (Some(3), true), "{text}");

    let server = Server::start(data.path());
    assert_eq!(tree(&server).await, ["web there 1 1 3 nobody"]);
    add(&server, "web/2").await.unwrap();
    assert_eq!(server.metric("dominator_directories_damaged"), "1");
    assert!(server.get("/", "").text().contains("The owners of directories are unknown"));
    let text = format!(
        "no directory is changed, because the file `{}` cannot be used (it was changed or cut \
         short after it was written): put it back from a backup, or move it away to begin \
         without any, and restart the server",
        file.display()
    );
    let refused = mkdir(&server, "x", false, None).await;
    assert_eq!(refused, Err(expected(FaultCode::Unavailable, text)));
    server.kill();
    assert_eq!(std::fs::read(&file).unwrap(), damaged);

    std::fs::write(&file, before).unwrap();
    let server = Server::start(data.path());
    assert_eq!(tree(&server).await, ["web made 2 2 6 group web"]);
    assert_eq!(server.metric("dominator_directories_damaged"), "0");
}
