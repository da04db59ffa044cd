//! Machines that take only signed images, with a dominator and an image server that somebody has
//! stolen. Nothing unsigned gets onto a machine, and the honest update passes after.

mod bundles;
mod contents;
mod store;
mod thief;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use api::image_server::notes::{ChangeSignatures, ChangeSignaturesRequest};
use api::image_server::{GetImage, GetImageRequest};
use certs::signing_key::SigningKey;
use localfleet::fleet::{Addresses, Fleet, Options, client_of};
use localfleet::programs::install;
use model::image::{Image, ImageName};
use model::signing::signature::SIGNATURES_MAX;
use model::signing::{Signature, Statement};

use crate::converges::CONVERGE_MAX;

const FILTER: &str = "/var/log/.*\n";
const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/.*"], "Service": "settings"}]"#;

/// One machine that wants two signatures, and who may make them.
struct Site {
    directory: tempfile::TempDir,
    fleet: Fleet,
}

/// Makes a key with `ssh-keygen`.
fn make_key(path: &Path) {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]).arg(path);
    let status = command.status().expect("the package openssh-client is installed");
    assert!(status.success());
}

fn name(text: &str) -> ImageName {
    text.parse().unwrap()
}

impl Site {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for key in ["alice", "bob", "mallory"] {
            make_key(&at(key));
        }
        let public = |key: &str| fs::read_to_string(at(key).with_extension("pub")).unwrap();
        let trusted =
            format!("# two of these\n{}images=\"web/\" {}", public("alice"), public("bob"));
        fs::write(at("trusted"), trusted).unwrap();
        fs::write(at("filter"), FILTER).unwrap();
        fs::write(at("triggers"), TRIGGERS).unwrap();
        let programs = at("bin");
        install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &programs).unwrap();
        let fleet = Fleet::start(Options {
            programs,
            directory: directory.path().to_owned(),
            subs: 1,
            subd_flags: vec![
                ("--trusted-keys", at("trusted").display().to_string()),
                ("--signatures-needed", "2".to_owned()),
            ],
            dominator_flags: Vec::new(),
            insecure: false,
            addresses: Addresses::private().unwrap(),
            stop: Arc::new(AtomicBool::new(false)),
        })
        .unwrap();
        let site = Self { directory, fleet };
        fs::create_dir_all(site.root().join("var/log")).unwrap();
        fs::write(site.root().join("var/log/own"), "kept").unwrap();
        site
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn root(&self) -> PathBuf {
        self.fleet.subs[0].root.clone()
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.root().join(name)).unwrap_or_default()
    }

    /// What services were driven.
    fn services(&self) -> String {
        fs::read_to_string(&self.fleet.subs[0].services).unwrap_or_default()
    }

    fn imagetool(&self, words: &[&str]) -> String {
        let output = self.fleet.imagetool(words).unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn path(&self, name: &str) -> String {
        self.at(name).display().to_string()
    }

    /// Adds an image whose tree says `version`, signed by nobody, or by Alice.
    fn add(&self, image: &str, version: &str, signed: bool) {
        self.add_with(image, version, signed, &[]);
    }

    /// Adds an image with the computed files that the file `computed` lists, signed by Alice.
    fn add_computed(&self, image: &str, version: &str) {
        self.add_with(image, version, true, &["--computed", &self.path("computed")]);
    }

    fn add_with(&self, image: &str, version: &str, signed: bool, more: &[&str]) {
        let tree = self.at("tree");
        fs::create_dir_all(tree.join("etc")).unwrap();
        fs::create_dir_all(tree.join("var/log")).unwrap();
        fs::write(tree.join("etc/version"), version).unwrap();
        fs::write(tree.join("program"), format!("program of {version}")).unwrap();
        let (tree, filter) = (self.path("tree"), self.path("filter"));
        let (triggers, key) = (self.path("triggers"), self.path("alice"));
        let mut words = vec!["add", image, &tree, &filter, &triggers, "--required-paths="];
        if signed {
            words.extend(["--sign", &key]);
        }
        words.extend(more);
        self.imagetool(&words);
    }

    /// Has Bob sign an image, as somebody does whose key is in an agent.
    fn sign_elsewhere(&self, image: &str) {
        let (statement, signature) = (self.at("statement"), self.at("statement.sig"));
        let _former = fs::remove_file(&signature);
        fs::write(&statement, self.imagetool(&["sign", image, "--print"])).unwrap();
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-Y", "sign", "-n", "dominator-image-v1", "-f"]);
        let output = command.arg(self.at("bob")).arg(&statement).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let (statement, signature) = (self.path("statement"), self.path("statement.sig"));
        self.imagetool(&["sign", image, "--statement", &statement, "--signature", &signature]);
    }

    /// `ssh-keygen` finds that `who` has made this signature.
    fn expect_valid(&self, signature: &Signature, who: &str) {
        let public = fs::read_to_string(self.at(who).with_extension("pub")).unwrap();
        fs::write(self.at("allowed"), format!("{who} {public}")).unwrap();
        fs::write(self.at("signature"), &signature.signature).unwrap();
        fs::write(self.at("signed"), &signature.statement).unwrap();
        let mut command = Command::new("ssh-keygen");
        command.args(["-Y", "verify", "-n", "dominator-image-v1", "-I", who, "-f"]);
        command.arg(self.at("allowed")).arg("-s").arg(self.at("signature"));
        let statement = fs::File::open(self.at("signed")).unwrap();
        let output = command.stdin(statement).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Adds an image that both have signed.
    fn add_signed(&self, image: &str, version: &str) {
        self.add(image, version, true);
        self.sign_elsewhere(image);
        Self::next_second();
    }

    /// Of two images that are signed in one second neither is newer.
    fn next_second() {
        let second = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let signed = second();
        testing::eventually("the next second begins", || second() != signed);
    }

    /// Has both sign an image again.
    fn sign_again(&self, image: &str) {
        self.imagetool(&["sign", image, "--key", &self.path("alice")]);
        self.sign_elsewhere(image);
        Self::next_second();
    }

    fn image(&self, image: &str) -> Image {
        let client = client_of(self.fleet.addresses().imageserver, self.fleet.security());
        let request = GetImageRequest { name: name(image), wait_ms: 0 };
        self.fleet.call::<GetImage>(&client, &request).unwrap()
    }

    /// What `who` signs of an image at that moment.
    fn signature(&self, who: &str, image: &Image, signed: u64) -> Signature {
        let key = fs::read_to_string(self.at(who)).unwrap();
        let (image, digest) = (image.content.name.clone(), image.content.digest());
        let statement = Statement { image, digest, signed, expires: None };
        SigningKey::read(&key, None).unwrap().sign(&statement).unwrap()
    }

    /// Adds signatures to an image, on the server.
    fn put(&self, image: &str, add: Vec<Signature>) {
        let client = client_of(self.fleet.addresses().imageserver, self.fleet.security());
        let request = ChangeSignaturesRequest { name: name(image), add, remove: Vec::new() };
        self.fleet.call::<ChangeSignatures>(&client, &request).unwrap();
    }

    fn converge(&mut self, image: &str) {
        self.fleet.require(Some(image)).unwrap();
        self.fleet.wait_synced(image, CONVERGE_MAX, |_| {}).unwrap();
    }

    /// The machine has this version, what it keeps, and nothing else.
    #[track_caller]
    fn expect(&self, version: &str) {
        assert_eq!(self.file("etc/version"), version);
        assert_eq!(self.file("program"), format!("program of {version}"));
        assert_eq!(self.file("var/log/own"), "kept");
        let entries = fs::read_dir(self.root()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, [".subd", "etc", "program", "var"]);
    }
}

#[test]
fn what_the_server_refuses_is_not_said_to_be_signed() {
    let mut site = Site::start();
    site.add("web/1", "1", true);
    // One image has so many signatures and no more.
    let image = site.image("web/1");
    let others: Vec<Signature> = (1..SIGNATURES_MAX)
        .map(|number| {
            let key = format!("key{number}");
            make_key(&site.at(&key));
            site.signature(&key, &image, 1_000)
        })
        .collect();
    site.put("web/1", others);
    let sign = |who: &str| {
        let output = site.fleet.imagetool(&["sign", "web/1", "--key", &site.path(who)]).unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (taken, said) = sign("bob");
    assert!(!taken && said.starts_with("error: ") && !said.contains("Signed"), "{said}");
    let (taken, said) = sign("alice");
    assert!(taken && said.starts_with("Signed web/1 (blake3:"), "{said}");
    site.fleet.stop().unwrap();
}
