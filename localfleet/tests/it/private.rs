//! Private images: who gets them, and who gets nothing of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use api::dominator::Status;
use api::fault::FaultCode;
use api::image_server::collection::{EstimateImage, EstimateImageRequest};
use api::image_server::directories::{ListDirectories, ListDirectoriesRequest};
use api::image_server::notes::{
    CopyImage, CopyImageRequest, FindLatestImage, FindLatestImageRequest,
};
use api::image_server::private::{
    ChangeReaders, ChangeReadersRequest, GetPrivateDirectories, GetPrivateDirectoriesRequest,
};
use api::image_server::replication::GetReplication;
use api::image_server::{
    AddImage, AddImageRequest, GetImage, GetImageRequest, ListImages, ListImagesRequest,
};
use api::method::Method;
use api::object_server::{AddObjects, CheckObjects, CheckObjectsRequest, GetObjectsRequest};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use certs::authority::Request;
use certs::files::Replace;
use certs::sets::Set;
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use localfleet::fleet::certificates::OPERATOR;
use localfleet::fleet::client_of;
use localfleet::fleet::daemon_process::Daemon;
use model::image::{Content, Image, ImageName, Notes};
use model::object::{Algorithm, ObjectId};
use rpc::client::Client;
use rpc::server::head_bytes;

use crate::access::connector;
use crate::converges::Scenario;
use crate::trees;

fn name(text: &str) -> ImageName {
    ImageName::new(text).unwrap()
}

fn object(content: &str) -> ObjectId {
    Algorithm::Blake3.digest(content.as_bytes())
}

/// A fleet whose images below `db` are private: `db/1` shares files with `base/1`.
struct Place {
    scenario: Scenario,
    trees: [PathBuf; 2],
}

impl Place {
    fn new() -> Self {
        let mut scenario = Scenario::start(2);
        let directory = scenario.directory.path().to_owned();
        let trees = [directory.join("1"), directory.join("2")];
        let mut words = scenario.fleet.certificates().flags("imageserver");
        let listen = scenario.fleet.addresses().imageserver.to_string();
        let data = directory.join("imageserver").display().to_string();
        words.extend(
            ["--listen", &listen, "--data", &data, "--private-images", "db"].map(str::to_owned),
        );
        scenario.fleet.imageserver.stop().unwrap();
        let words = words.into_iter().map(Into::into).collect();
        let (program, log) = (directory.join("bin/imageserver"), directory.join("log/private.log"));
        scenario.fleet.imageserver = Daemon::start("imageserver", &program, words, log).unwrap();
        scenario.fleet.wait_ready().unwrap();
        let place = Self { scenario, trees };
        for (index, image) in ["base/1", "db/1"].into_iter().enumerate() {
            let tree = &place.trees[index];
            trees::make(tree, u32::try_from(index).unwrap() + 1);
            place.scenario.add(image, tree);
        }
        place.imagetool(&["chown", "db", "--owner-group", "dba"]);
        place
    }

    /// What imagetool prints, as the operator of the fleet.
    fn imagetool(&self, words: &[&str]) -> String {
        let output = self.scenario.fleet.imagetool(words).unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Makes a certificate in a directory of its own below `tls`.
    fn certify(&self, user: &str, groups: &[&str], powers: Vec<String>) {
        let authority = self.scenario.fleet.certificates().authority().unwrap();
        let master = self.scenario.fleet.addresses().imageserver;
        let request = Request {
            name: user.to_owned(),
            hosts: vec![master.ip().to_string()],
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
            powers: Some(powers),
            ..Request::default()
        };
        let directory = self.scenario.directory.path().join("tls").join(user);
        let issued = authority.issue(&request).unwrap();
        issued.write(&directory, authority.ca_pem(), Replace::Any).unwrap();
    }

    fn caller(&self, user: &str, groups: &[&str], set: Set) -> Caller {
        self.certify(user, groups, set.powers());
        self.holder(user)
    }

    /// Calls with a certificate that was made before, such as that of a machine of the fleet.
    fn holder(&self, name: &str) -> Caller {
        self.holder_at(self.scenario.fleet.addresses().imageserver, name)
    }

    fn holder_at(&self, address: SocketAddr, name: &str) -> Caller {
        let security = self.scenario.fleet.certificates().security(name).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Caller { client: client_of(address, &security), runtime }
    }

    /// Starts a replica, and waits until it has all that it may have.
    fn replica(&self, name: &str, powers: Vec<String>, flags: &[&str]) -> (Daemon, SocketAddr) {
        self.certify(name, &[], powers);
        let master = self.scenario.fleet.addresses().imageserver;
        let listener = std::net::TcpListener::bind((master.ip(), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let directory = self.scenario.directory.path();
        let data = directory.join(name).display().to_string();
        let (listen, master) = (address.to_string(), master.to_string());
        let mut words = self.scenario.fleet.certificates().flags(name);
        let own = ["--listen", &listen, "--data", &data, "--replicate-from", &master];
        words.extend(own.iter().chain(flags).map(|&word| word.to_owned()));
        let words = words.into_iter().map(Into::into).collect();
        let log = directory.join("log").join(name);
        let daemon = Daemon::start(name, &directory.join("bin/imageserver"), words, log).unwrap();
        let admin = self.holder_at(address, OPERATOR);
        testing::eventually("the replica is level", || {
            let report = admin.runtime.block_on(admin.client.call::<GetReplication>(&api::Done {}));
            report.is_ok_and(|report| report.master.unwrap().is_level).then_some(())
        });
        (daemon, address)
    }
}

/// Somebody who calls an image server.
struct Caller {
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Caller {
    fn call<M: Method>(&self, request: &M::Request) -> Result<M::Reply, FaultCode> {
        let called = self.runtime.block_on(self.client.call::<M>(request));
        called.map_err(|error| error.code().unwrap_or_else(|| panic!("{error}")))
    }

    fn image(&self, image: &str) -> Result<Image, FaultCode> {
        self.call::<GetImage>(&GetImageRequest { name: name(image), wait_ms: 0 })
    }

    fn images(&self) -> Vec<String> {
        let listed = self.call::<ListImages>(&ListImagesRequest::default()).unwrap();
        assert!(!listed.more);
        listed.images.iter().map(|image| image.name.to_string()).collect()
    }

    /// The directories, with the images below each.
    fn directories(&self) -> Vec<(String, u64)> {
        let listed = self.call::<ListDirectories>(&ListDirectoriesRequest::default()).unwrap();
        let one = |one: &api::image_server::directories::DirectorySummary| {
            (one.name.to_string(), one.images_below)
        };
        listed.directories.iter().map(one).collect()
    }

    /// How many of the objects come, or why none does.
    fn objects(&self, ids: &[ObjectId]) -> Result<usize, (FaultCode, String)> {
        self.runtime.block_on(async {
            let request = GetObjectsRequest { ids: ids.to_vec() };
            let got = self.client.get_objects(&request).await;
            let mut reader = got
                .map_err(|error| (error.code().unwrap(), error.fault().unwrap().message.clone()))?;
            let mut count = 0;
            loop {
                match reader.head().await.unwrap() {
                    ObjectHead::End => return Ok(count),
                    ObjectHead::Absent(_) => {}
                    ObjectHead::Object { .. } => {
                        while reader.chunk().await.unwrap().is_some() {}
                        count += 1;
                    }
                }
            }
        })
    }

    /// Sends a content; returns how many objects are said to be new and to be known.
    fn send(&self, content: &[u8]) -> [u64; 2] {
        let (id, size_bytes) = (Algorithm::Blake3.digest(content), content.len() as u64);
        let head = head_bytes(&ObjectHead::Object { id, size_bytes });
        let parts = [head, Bytes::copy_from_slice(content), head_bytes(&ObjectHead::End)];
        let body = futures_util::stream::iter(parts.map(Ok::<_, std::io::Error>));
        let reply = self.runtime.block_on(self.client.upload::<AddObjects>(body)).unwrap();
        [reply.added, reply.known]
    }

    fn missing(&self, ids: &[ObjectId]) -> Vec<ObjectId> {
        let request = CheckObjectsRequest { ids: ids.to_vec(), lease_seconds: 0 };
        self.call::<CheckObjects>(&request).unwrap().missing
    }

    fn page(&self, path: &str) -> (u16, String) {
        let (status, content) = self.runtime.block_on(self.client.get(path)).unwrap();
        (status, String::from_utf8_lossy(&content).into_owned())
    }

    /// What the caller gets of `db/1`: each way to ask for it that succeeds.
    fn gets(&self, private: &Image) -> BTreeSet<&'static str> {
        let only = object("library of version 2");
        let root = private.content.root;
        let latest = FindLatestImageRequest { directory: name("db"), tags: Notes::default().tags };
        let estimate = EstimateImageRequest { name: name("db/1") };
        let ways = [
            ("list", self.images() == ["base/1", "db/1"]),
            ("image", self.image("db/1").as_ref() == Ok(private)),
            ("latest", self.call::<FindLatestImage>(&latest).unwrap().name.is_some()),
            ("estimate", self.call::<EstimateImage>(&estimate).is_ok()),
            ("tree", self.directories() == [("base".to_owned(), 1), ("db".to_owned(), 1)]),
            ("object", self.objects(&[only]) == Ok(1)),
            ("directory", self.objects(&[root]) == Ok(1)),
            ("single", self.page(&format!("/objects/{only}")).0 == 200),
            ("check", self.missing(&[only, root]).is_empty()),
            ("page", self.page("/").1.contains("db/1")),
            ("image page", self.page("/image?name=db/1").0 == 200),
            ("directories page", self.page("/directories").1.contains("below=db")),
        ];
        ways.into_iter().filter(|(_, gets)| *gets).map(|(way, _)| way).collect()
    }
}

const ALL: [&str; 12] = [
    "check",
    "directories page",
    "directory",
    "estimate",
    "image",
    "image page",
    "latest",
    "list",
    "object",
    "page",
    "single",
    "tree",
];

#[test]
fn a_private_image_is_for_its_owners_and_the_machines_that_are_named() {
    let mut place = Place::new();
    assert_eq!(
        place.imagetool(&["readers", "db", "--add", "sub-1", "--format", "json"]).trim(),
        "{\n  \"machines\": [\n    \"sub-1\"\n  ],\n  \"is_private\": true\n}"
    );
    let table = "DIRECTORY  PRIVATE  MACHINES\ndb         yes      sub-1\n";
    assert_eq!(place.imagetool(&["readers"]), table);

    // Machines: one gets it, the other learns why it does not.
    place.scenario.fleet.require(Some("db/1")).unwrap();
    let subs = place.scenario.wait_until("one has the image and one is refused", |subs| {
        let statuses: Vec<Status> = subs.iter().map(|sub| sub.status).collect();
        statuses == [Status::Synced, Status::FetchFailed]
    });
    let detail = &subs[1].detail;
    assert!(detail.contains("is in no image that"), "{detail}");
    assert!(detail.contains("sub-2 may read") && detail.contains("imagetool readers"), "{detail}");

    let operator = place.caller("root", &[], Set::Operator);
    assert_eq!(operator.image("db/1"), Err(FaultCode::NotFound), "operators read by power only");
    let dominator = place.holder("dominator");
    let private = dominator.image("db/1").unwrap();
    let public = dominator.image("base/1").unwrap();
    assert_eq!(dominator.gets(&private), ALL.into());
    assert_eq!(place.caller("carol", &["dba"], Set::Contributor).gets(&private), ALL.into());
    assert_eq!(place.holder("sub-1").gets(&private), ALL.into());
    let eve = place.caller("eve", &["web"], Set::Uploader);
    assert_eq!(eve.gets(&private), BTreeSet::new());
    assert_eq!(place.holder("sub-2").gets(&private), BTreeSet::new());
    assert_eq!(eve.images(), ["base/1"]);
    assert_eq!(eve.directories(), [("base".to_owned(), 1)]);
    assert_eq!(eve.image("base/1").as_ref(), Ok(&public));

    nothing_else_shows_it(&eve, &private);
    an_uploader_can_use_only_what_they_have_sent(&place, &eve, &private);
    a_browser_without_a_certificate_sees_nothing(&place);

    // Named too, and fetched at the next attempt.
    place.imagetool(&["readers", "db", "--add", "sub-*", "--remove", "sub-1"]);
    let _output = place.scenario.fleet.domtool(&["retry", "sub-2"]).unwrap();
    place.scenario.converge("db/1");
    place.scenario.verify(&place.trees[1].clone());
    place.scenario.fleet.stop().unwrap();
}

fn nothing_else_shows_it(eve: &Caller, private: &Image) {
    let (only, none) = (object("library of version 2"), object("never stored"));
    let shared = object("module 7\n");
    // What is private and what is not there look the same.
    let refused = |id: ObjectId, of: &str| {
        let text = format!(
            "object {id} of {of} asked for is in no image that eve may read: if it is one of a \
             private image, its directory must name the machine (`imagetool readers`)"
        );
        Err((FaultCode::Denied, text))
    };
    assert_eq!(eve.objects(&[only]), refused(only, "1 object"));
    assert_eq!(eve.objects(&[none]), refused(none, "1 object"));
    assert_eq!(eve.objects(&[shared, only]), refused(only, "2 objects"));
    assert_eq!(eve.objects(&[shared]), Ok(1));
    let status = |id: ObjectId| eve.page(&format!("/objects/{id}")).0;
    assert_eq!([status(only), status(none), status(shared)], [403, 403, 200]);
    assert_eq!(eve.missing(&[shared, only, none]), [only, none]);
    let copy = CopyImageRequest { from: name("db/1"), to: name("web/1"), expires_in_seconds: None };
    assert_eq!(eve.call::<CopyImage>(&copy), Err(FaultCode::Denied), "no owner of web");
    let below = Some(name("db"));
    let request = GetPrivateDirectoriesRequest { below, after: None };
    assert_eq!(eve.call::<GetPrivateDirectories>(&request), Err(FaultCode::Denied));
    // Whoever knows the digest of the tree cannot publish it.
    let stolen = Content { name: name("web/1"), ..private.content.clone() };
    let request = AddImageRequest { content: stolen, notes: Notes::default() };
    assert_eq!(eve.call::<AddImage>(&request), Err(FaultCode::NotFound));
}

fn an_uploader_can_use_only_what_they_have_sent(place: &Place, eve: &Caller, private: &Image) {
    let content = "library of version 2";
    let id = object(content);
    assert_eq!(eve.send(content.as_bytes()), [1, 0], "it is not said to be known");
    assert_eq!(eve.send(content.as_bytes()), [0, 1]);
    assert_eq!(eve.missing(&[id, private.content.root]), [private.content.root]);
    assert_eq!(eve.objects(&[id]).map_err(|(code, _)| code), Err(FaultCode::Denied));
    let mallory = place.caller("mallory", &[], Set::Uploader);
    assert_eq!(mallory.missing(&[id]), [id], "another one has sent it");
}

#[test]
fn what_a_public_image_shares_is_private_when_that_is_gone() {
    let mut place = Place::new();
    let shared = object("module 7\n");
    let [eve, dba] = [("eve", "web"), ("carol", "dba")]
        .map(|(user, group)| place.caller(user, &[group], Set::Viewer));
    let gets = |caller: &Caller| caller.objects(&[shared]) == Ok(1);
    assert!(gets(&eve) && gets(&dba));
    place.imagetool(&["delete", "base/1", "--yes"]);
    testing::eventually("the object is private", || (!gets(&eve)).then_some(()));
    assert!(gets(&dba));
    // Also after a restart, and until another image has it.
    place.scenario.fleet.imageserver.kill().unwrap();
    place.scenario.fleet.imageserver.start_again().unwrap();
    place.scenario.fleet.wait_ready().unwrap();
    let [eve, dba] = ["eve", "carol"].map(|user| place.holder(user));
    assert!(!gets(&eve) && gets(&dba));
    place.scenario.add("base/2", &place.trees[0].clone());
    assert!(gets(&eve) && gets(&dba));
    place.scenario.fleet.stop().unwrap();
}

/// The status and the content of a page, for somebody without a certificate.
fn page_for_strangers(place: &Place, path: &str) -> (u16, String) {
    let address = place.scenario.fleet.addresses().imageserver;
    let authority = place.scenario.fleet.certificates().authority().unwrap();
    let connector = connector(authority.ca_pem(), None);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let stream = connector.connect(address.ip().into(), stream).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::get(path).header("host", address.to_string());
        let response = sender.send_request(request.body(Empty::<Bytes>::new()).unwrap()).await;
        let response = response.unwrap();
        let status = response.status().as_u16();
        let content = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&content).into_owned())
    })
}

fn a_browser_without_a_certificate_sees_nothing(place: &Place) {
    let (status, page) = page_for_strangers(place, "/");
    assert!(status == 200 && page.contains("base/1") && !page.contains("db/1"), "{page}");
    let (status, page) = page_for_strangers(place, "/directories");
    assert!(status == 200 && page.contains("below=base") && !page.contains("below=db"), "{page}");
    let statuses = ["/image?name=base/1", "/image?name=db/1", "/image?name=db/2"]
        .map(|path| page_for_strangers(place, path).0);
    assert_eq!(statuses, [200, 404, 404]);
}

#[test]
fn a_replica_has_private_images_only_with_the_power() {
    let place = Place::new();
    place.imagetool(&["readers", "db", "--add", "sub-1"]);
    let mut powers = Set::Imageserver.powers();
    let (_plain, plain) = place.replica("images3", powers.clone(), &[]);
    powers.push(GetPrivateDirectories::NAME.to_owned());
    let (_trusted, trusted) = place.replica("images2", powers, &["--private-images", "db"]);
    assert_eq!(place.holder_at(plain, OPERATOR).images(), ["base/1"]);
    assert_eq!(place.holder_at(trusted, OPERATOR).images(), ["base/1", "db/1"]);

    // The machines are those that the master names.
    let only = object("library of version 2");
    let gets = |machine: &str| place.holder_at(trusted, machine).objects(&[only]).is_ok();
    assert_eq!(["sub-1", "sub-2"].map(gets), [true, false]);
    place.imagetool(&["readers", "db", "--add", "sub-2", "--remove", "sub-1"]);
    testing::eventually("the machines are those of the master", || {
        (["sub-1", "sub-2"].map(gets) == [false, true]).then_some(())
    });
    let (add, remove) = (["sub-1".to_owned()].into(), [].into());
    let request = ChangeReadersRequest { name: name("db"), add, remove };
    let changed = place.holder_at(trusted, OPERATOR).call::<ChangeReaders>(&request);
    assert_eq!(changed, Err(FaultCode::BadRequest), "only the master changes them");

    // What is added over a replica is judged there, or by what the replica has sent.
    place.certify("carol", &["dba"], Set::Contributor.powers());
    place.certify("eve", &["web"], Set::Uploader.powers());
    let copy =
        |to: &str| CopyImageRequest { from: name("db/1"), to: name(to), expires_in_seconds: None };
    let carol = place.holder_at(trusted, "carol");
    carol.call::<CopyImage>(&copy("db/2")).unwrap();
    assert_eq!(carol.images(), ["base/1", "db/1", "db/2"]);
    let image = carol.image("db/1").unwrap();
    let add = |image_name: &str| AddImageRequest {
        content: Content { name: name(image_name), ..image.content.clone() },
        notes: Notes::default(),
    };
    let eve = place.holder_at(trusted, "eve");
    assert_eq!(eve.call::<AddImage>(&add("web/1")), Err(FaultCode::NotFound));
    let tree = place.scenario.directory.path().join("fresh");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("file"), "fresh content").unwrap();
    let add_over = |address: SocketAddr, user: &str, image: &str| {
        let output = Command::new(place.scenario.directory.path().join("bin/imagetool"))
            .args(place.scenario.fleet.certificates().flags(user))
            .args(["--imageserver", &address.to_string(), "add", image])
            .arg(&tree)
            .args(["-", "-"])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (address, image) in [(plain, "web/2"), (trusted, "web/3")] {
        let (code, said) = add_over(address, "eve", image);
        assert_eq!(code, Some(0), "{said}");
    }
    let (code, said) = add_over(plain, "carol", "db/3");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("the replica that sent this on may not have private images"), "{said}");
    let eve = place.holder("eve");
    assert_eq!(eve.images(), ["base/1", "web/2", "web/3"]);
    assert_eq!(eve.objects(&[object("fresh content")]), Ok(1));
}
