//! The content of computed files that a filegen-server signs, and a dominator that wants others.

use api::fault::FaultCode;
use api::file_generator::{
    FileContent, Generate, GenerateRequest, SignContents, SignContentsRequest, WantedFiles,
};
use api::subd::{AddObjects, AddObjectsRequest, OfferContents, OfferContentsRequest};
use model::escape::ByteText;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::{File, Metadata, Time};
use testing::eventually;

use super::thief::Thief;
use super::*;

const PATH: &str = "/etc/motd";

/// A site whose image names a signer of its computed file.
struct Contents {
    site: Site,
    source: String,
}

impl Contents {
    fn start() -> Self {
        let site = Site::start();
        let key = site.path("content-key");
        let output = site.fleet.domtool(&["cert", "signing-key", &key]).unwrap();
        assert!(output.status.success(), "{output:?}");
        let source = site.fleet.addresses().filegen.to_string();
        let config = format!(
            "signing-key = '{key}'\n[[generator]]\npath = '{PATH}'\nkind = 'template'\n\
             file = 'motd.j2'\n"
        );
        fs::write(site.at("filegen.toml"), config).unwrap();
        let contents = Self { site, source };
        contents.write_template("first");
        contents
    }

    fn write_template(&self, word: &str) {
        fs::write(self.site.at("motd.j2"), format!("{word} of {{{{ Hostname }}}}\n")).unwrap();
    }

    fn hostname(&self) -> String {
        self.site.fleet.subs[0].record().hostname
    }

    fn content(&self, word: &str) -> String {
        format!("{word} of {}\n", self.hostname())
    }

    fn wait_for(&self, word: &str) {
        let want = self.content(word);
        eventually("the machine has its content", || match self.site.file("etc/motd") {
            content if content == want => Ok(()),
            content => Err((content, self.site.fleet.detail("sub-1").map(|sub| sub.summary))),
        });
    }

    /// Has filegen-server sign content as that of a machine.
    fn sign(&self, hostname: &str, content: &str) -> Result<Signature, FaultCode> {
        let client = client_of(self.site.fleet.addresses().filegen, self.site.fleet.security());
        let files = vec![FileContent { path: PATH.parse().unwrap(), id: id(content) }];
        let request = SignContentsRequest { hostname: hostname.to_owned(), files };
        let reply = self.site.fleet.call::<SignContents>(&client, &request);
        match reply {
            Ok(mut reply) => Ok(reply.signatures.remove(0)),
            // The server may not run yet.
            Err(error) => {
                let error = error.downcast::<rpc::client::CallError>().unwrap();
                Err(error.code().unwrap_or(FaultCode::Unavailable))
            }
        }
    }

    /// Has filegen-server make the file of a machine.
    fn make_for(&self, hostname: &str, is_for_use: bool) {
        let client = client_of(self.site.fleet.addresses().filegen, self.site.fleet.security());
        let wanted = WantedFiles {
            machine: Machine { hostname: hostname.to_owned(), ..Machine::default() },
            algorithm: Algorithm::Blake3,
            paths: vec![PATH.parse().unwrap()],
            key: None,
            outputs: String::new(),
        };
        let request = GenerateRequest { machines: vec![wanted], is_for_use };
        self.site.fleet.call::<Generate>(&client, &request).unwrap();
    }
}

fn id(content: &str) -> ObjectId {
    Algorithm::Blake3.digest(content.as_bytes())
}

/// Gives the content to the machine, and returns the file that has it.
fn brought(thief: &Thief, content: &str) -> File {
    let bytes = ByteText(content.as_bytes().to_vec());
    let contents = vec![api::file_generator::ComputedContent { id: id(content), bytes }];
    thief.call::<AddObjects>(&AddObjectsRequest { contents }).unwrap();
    File {
        metadata: Metadata::new(0o644, 0, 0),
        mtime: Time::default(),
        size_bytes: content.len() as u64,
        object: id(content).into(),
    }
}

fn next_second() {
    let second = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let now = second();
    eventually("the next second begins", || second() != now);
}

#[test]
fn a_stolen_dominator_does_not_choose_the_content_of_computed_files() {
    let mut contents = Contents::start();
    let site = &mut contents.site;
    fs::write(site.at("computed"), format!("{PATH} {}\n", contents.source)).unwrap();
    fs::create_dir_all(site.at("tree/etc")).unwrap();
    fs::write(site.at("tree/etc/motd"), "a placeholder").unwrap();
    let public = site.path("content-key.pub");
    let computed = site.path("computed");
    let more = ["--computed", &computed, "--computed-signer", &public];
    site.add_with("web/1", "1", true, &more);
    site.sign_elsewhere("web/1");
    let shown = site.imagetool(&["show", "web/1"]);
    assert!(shown.contains("\nSigners:   SHA256:"), "{shown}");
    let mut server = site.fleet.start_filegen(&site.at("filegen.toml")).unwrap();
    site.converge("web/1");
    contents.wait_for("first");

    // Another content revision, and back: what the machine had is signed anew.
    next_second();
    contents.write_template("second");
    contents.wait_for("second");
    contents.site.fleet.wait_synced("web/1", CONVERGE_MAX, |_| {}).unwrap();
    next_second();
    let change = format!("{}/2", contents.source);
    let words = ["computed", "rollback", &change, "--why", "the wrong words"];
    let output = contents.site.fleet.domtool(&words).unwrap();
    assert!(output.status.success(), "{output:?}");
    contents.wait_for("first");

    // What was accepted is repaired while filegen-server is away.
    server.kill().unwrap();
    fs::write(contents.site.root().join("etc/motd"), "by hand").unwrap();
    contents.wait_for("first");
    contents.site.fleet.wait_synced("web/1", CONVERGE_MAX, |_| {}).unwrap();
    server.start_again().unwrap();
    contents.site.fleet.wait_ready().unwrap();

    // Whoever has stolen the dominator gets nothing signed that was not made for the machine.
    contents.site.fleet.dominator.stop().unwrap();
    let hostname = contents.hostname();
    let [first, second] = ["first", "second"].map(|word| contents.content(word));
    eventually("filegen-server answers", || contents.sign(&hostname, &first).is_ok());
    assert_eq!(contents.sign(&hostname, "evil"), Err(FaultCode::NotFound));
    contents.make_for("other", false);
    let others = "second of other\n";
    assert_eq!(contents.sign("other", others), Err(FaultCode::NotFound), "it was only shown");
    let mut thief = Thief::of(&contents.site);
    let image = thief.required("web/1");
    thief.offer(&image).unwrap();
    let order_of = |thief: &mut Thief, content: &str| {
        let file = brought(thief, content);
        thief.order_with(&image, &file)
    };
    let order = order_of(&mut thief, "evil");
    let offer = |thief: &Thief, signature: &Signature| {
        let request = OfferContentsRequest { signatures: vec![signature.clone()] };
        thief.call::<OfferContents>(&request).unwrap();
    };
    let none = "the content of /etc/motd is not signed as /etc/motd needs it: no signature of this";
    thief.expect_refused(&order, none);
    let earlier = contents.sign(&hostname, &first).unwrap();
    let mut forged = earlier.clone();
    forged.statement = forged.statement.replace(&id(&first).to_string(), &id("evil").to_string());
    offer(&thief, &forged);
    thief.expect_refused(&order, "did not sign this statement");
    // The file of another machine.
    contents.make_for("other", true);
    offer(&thief, &contents.sign("other", others).unwrap());
    let order = order_of(&mut thief, others);
    thief.expect_refused(&order, "it was signed for other, and this machine is ");
    // Content that was signed before what the machine has.
    next_second();
    offer(&thief, &contents.sign(&hostname, &second).unwrap());
    let order = order_of(&mut thief, &second);
    thief.carry_out(&order);
    assert_eq!(contents.site.file("etc/motd"), second);
    offer(&thief, &earlier);
    let order = order_of(&mut thief, &first);
    thief.expect_refused(&order, "and the machine has content that was signed at ");
    // An operator permits that.
    let address = contents.site.fleet.subs[0].address;
    let words = ["forget-issued", PATH, "--why", "a clock was wrong"];
    let output = contents.site.fleet.subtool(address, &words).unwrap();
    assert!(output.status.success(), "{output:?}");
    let order = order_of(&mut thief, &first);
    thief.carry_out(&order);
    assert_eq!(contents.site.file("etc/motd"), first);
    drop(thief);
    contents.site.fleet.stop().unwrap();
}
