//! Requests and replies about what becomes of images and objects.

use std::collections::BTreeMap;

use api::Done;
use api::image_server::AddImageReply;
use api::image_server::collection::{
    CollectReply, CollectRequest, EstimateImageReply, EstimateImageRequest, ObjectTotals,
};
use api::image_server::directories::{
    ChangeOwnerRequest, DirectorySummary, ListDirectoriesReply, ListDirectoriesRequest,
    MakeDirectoryReply, MakeDirectoryRequest, RemoveDirectoryRequest,
};
use api::image_server::expiry::{
    AcceptClockReply, ChangeExpiryReply, ChangeExpiryRequest, HoldImagesRequest,
};
use api::image_server::notes::{
    ChangeSignaturesReply, ChangeSignaturesRequest, ChangeTagsReply, ChangeTagsRequest,
    CopyImageRequest, FindLatestImageReply, FindLatestImageRequest,
};

use api::access::Owners;
use api::subd::OfferImageRequest;
use model::signing::Signature;

use super::{blake3, content, name, time};

pub fn signature() -> Signature {
    let (statement, signature) = ("statement\n".to_owned(), "signature\n".to_owned());
    Signature { statement, signature }
}

pub fn change_signatures() -> (ChangeSignaturesRequest, ChangeSignaturesReply) {
    let remove = vec!["SHA256:x".to_owned()];
    let request = ChangeSignaturesRequest { name: name("base/1"), add: vec![signature()], remove };
    (request, ChangeSignaturesReply { signatures: vec![signature()] })
}

pub fn offer_image() -> OfferImageRequest {
    let sources = vec!["imageserver:6971".to_owned()];
    OfferImageRequest { content: content(), signatures: vec![signature()], sources }
}

pub fn tags() -> BTreeMap<String, String> {
    BTreeMap::from([("os".to_owned(), "debian".to_owned())])
}

pub fn copy_image() -> (CopyImageRequest, AddImageReply) {
    let (from, to) = (name("test/1"), name("base/1"));
    let request = CopyImageRequest { from, to, expires_in_seconds: Some(60) };
    (request, AddImageReply { digest: blake3(0xcc) })
}

pub fn change_tags() -> (ChangeTagsRequest, ChangeTagsReply) {
    let remove = ["deprecated".to_owned()].into();
    let request = ChangeTagsRequest { name: name("base/1"), set: tags(), remove };
    (request, ChangeTagsReply { tags: tags() })
}

pub fn find_latest_image() -> (FindLatestImageRequest, FindLatestImageReply) {
    let request = FindLatestImageRequest { directory: name("base"), tags: tags() };
    (request, FindLatestImageReply { name: Some(name("base/1")) })
}

pub fn change_expiry() -> (ChangeExpiryRequest, ChangeExpiryReply) {
    let request = ChangeExpiryRequest { name: name("base/1"), expires_in_seconds: Some(60) };
    (request, ChangeExpiryReply { expires_at: Some(time()) })
}

pub fn accept_clock() -> (Done, AcceptClockReply) {
    (Done {}, AcceptClockReply { now: time(), jumped_seconds: -5 })
}

pub fn hold_images() -> (HoldImagesRequest, Done) {
    let names = vec![name("base/1"), name("base/2")];
    let holder = "dominator dom1:6970".to_owned();
    (HoldImagesRequest { holder, names, seconds: 900 }, Done {})
}

pub fn collect() -> (CollectRequest, CollectReply) {
    let of = |objects, bytes| ObjectTotals { objects, bytes };
    let reply = CollectReply {
        images: 1,
        unneeded: of(4, 1 << 60),
        leased: of(2, 3),
        removed: of(2, 5),
        held_seconds: 6,
    };
    (CollectRequest { dry_run: true, bytes: 7 }, reply)
}

fn owners() -> Owners {
    Owners::new(["infra", "web"], ["alice"])
}

pub fn make_directory() -> (MakeDirectoryRequest, MakeDirectoryReply) {
    let request =
        MakeDirectoryRequest { name: name("base/x"), parents: true, owners: Some(owners()) };
    let made = vec![name("base"), name("base/x")];
    (request, MakeDirectoryReply { made, owners: owners() })
}

pub fn remove_directory() -> (RemoveDirectoryRequest, Done) {
    (RemoveDirectoryRequest { name: name("base/x") }, Done {})
}

pub fn change_owner() -> (ChangeOwnerRequest, Done) {
    (ChangeOwnerRequest { name: name("base/x"), owners: owners() }, Done {})
}

pub fn list_directories() -> (ListDirectoriesRequest, ListDirectoriesReply) {
    let request = ListDirectoriesRequest { below: Some(name("base")), after: Some(name("base/x")) };
    let directory = DirectorySummary {
        name: name("base/y"),
        made_on: Some(time()),
        owners: owners(),
        images: 2,
        images_below: 3,
        bytes_below: 1 << 60,
    };
    (request, ListDirectoriesReply { directories: vec![directory], more: true })
}

pub fn estimate_image() -> (EstimateImageRequest, EstimateImageReply) {
    let of = |objects, bytes| ObjectTotals { objects, bytes };
    let reply = EstimateImageReply { own: of(2, 1 << 60), shared: of(3, 4) };
    (EstimateImageRequest { name: name("base/1") }, reply)
}
