//! What an image takes on the server: what only it needs, and what others need too.

use api::fault::Fault;
use api::image_server::collection::{
    Collect, CollectRequest, EstimateImage, EstimateImageReply, EstimateImageRequest, ObjectTotals,
};
use api::image_server::{AddImage, AddImageRequest, DeleteImage, DeleteImageRequest};
use model::image::Notes;
use model::tree::Tree;

use crate::fixture::{
    ALGORITHM, Server, directories, expected, fault, flip, image_of, name, tree_of,
};

async fn estimate(server: &Server, image: &str) -> Result<EstimateImageReply, Fault> {
    let request = EstimateImageRequest { name: name(image) };
    server.client.call::<EstimateImage>(&request).await.map_err(fault)
}

/// The length of the directories of `tree` at these places.
fn encoded(tree: &Tree, places: &[usize]) -> u64 {
    let all = directories(tree);
    places.iter().map(|&place| all[place].1.len() as u64).sum()
}

#[tokio::test]
async fn what_is_freed_by_deleting_an_image_is_told_before() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &["--lease-max", "0s"]);
    // The two have /etc and what is in it in common, and another /usr. One file is there twice.
    let shared = ("/etc/a", &b"shared"[..]);
    let one = tree_of(&[shared, ("/usr/a", b"one"), ("/usr/b", b"one")]);
    let two = tree_of(&[shared, ("/usr/a", b"the second")]);
    server.upload_tree(&one, &[b"shared", b"one", b"log"]).await;
    server.upload_tree(&two, &[b"the second"]).await;
    let notes = Notes { build_log: Some(ALGORITHM.digest(b"log")), ..Notes::default() };
    let request = AddImageRequest { content: image_of("a/1", &one), notes };
    server.client.call::<AddImage>(&request).await.unwrap();
    let alone = estimate(&server, "a/1").await.unwrap();
    let all = ObjectTotals { objects: 6, bytes: 12 + encoded(&one, &[0, 1, 2]) };
    assert_eq!(alone, EstimateImageReply { own: all, shared: ObjectTotals::default() });

    server.add(image_of("a/2", &two)).await.unwrap();
    let own = ObjectTotals { objects: 4, bytes: 6 + encoded(&one, &[0, 2]) };
    let shared = ObjectTotals { objects: 2, bytes: 6 + encoded(&one, &[1]) };
    assert_eq!(estimate(&server, "a/1").await, Ok(EstimateImageReply { own, shared }));
    let own_of_two = ObjectTotals { objects: 3, bytes: 10 + encoded(&two, &[0, 2]) };
    let reply = EstimateImageReply { own: own_of_two, shared };
    assert_eq!(estimate(&server, "a/2").await, Ok(reply));
    // An image of the same tree needs nothing of its own, and neither does the first then.
    server.add(image_of("a/3", &two)).await.unwrap();
    let all = ObjectTotals { objects: 5, bytes: own_of_two.bytes + shared.bytes };
    let reply = EstimateImageReply { own: ObjectTotals::default(), shared: all };
    assert_eq!(estimate(&server, "a/3").await, Ok(reply));

    let request = DeleteImageRequest { name: name("a/1"), force: false };
    server.client.call::<DeleteImage>(&request).await.unwrap();
    let gone = "image a/1 was deleted; a name is never used again, so take another";
    assert_eq!(estimate(&server, "a/1").await, Err(expected(api::fault::FaultCode::Gone, gone)));
    let request = CollectRequest { dry_run: false, bytes: 0 };
    let removed = server.client.call::<Collect>(&request).await.unwrap().removed;
    assert_eq!(removed.objects, own.objects);
}

#[tokio::test]
async fn nothing_is_told_while_it_is_not_known_what_others_need() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/a", b"a")]);
    server.upload_tree(&tree, &[b"a"]).await;
    for image in ["a", "b"] {
        server.add(image_of(image, &tree)).await.unwrap();
    }
    server.stop().await;
    flip(&data.path().join("images/b.image"));
    let server = Server::start(data.path());
    let text = "the needs of image b are unknown: its record is damaged";
    let refused = Err(expected(api::fault::FaultCode::Internal, text));
    assert_eq!(estimate(&server, "a").await, refused);
}
