//! The life of images: a real imagetool at a real image server, without machines.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use certs::sets::Set;
use localfleet::fleet::certificates::{Certificates, OPERATOR};
use localfleet::fleet::client_of;
use localfleet::fleet::daemon_process::Daemon;
use localfleet::programs;
use rpc::client::Client;
use tempfile::TempDir;
use testing::eventually_async;

/// An image server, and a directory to work in.
pub struct Place {
    directory: TempDir,
    pub server: Daemon,
    pub address: String,
    pub certificates: Certificates,
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let bin = directory.path().join("bin");
        programs::install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &bin).unwrap();
        let data = directory.path().join("data").display().to_string();
        // Bound and let go: nobody else on this address takes the same port meanwhile.
        let listener = std::net::TcpListener::bind("127.19.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let certificates = Certificates::make(&directory.path().join("tls")).unwrap();
        certificates.for_daemon("imageserver", Set::Imageserver, &["127.19.0.1"]).unwrap();
        let mut words = certificates.flags("imageserver");
        words.extend(["--listen", &address.to_string(), "--data", &data].map(str::to_owned));
        let words = words.into_iter().map(Into::into).collect();
        let log = directory.path().join("log");
        let server = Daemon::start("imageserver", &bin.join("imageserver"), words, log).unwrap();
        let address = address.to_string();
        let place = Self { directory, server, address, certificates };
        place.wait(&place.client());
        place
    }

    fn client(&self) -> Client {
        let security = self.certificates.security(OPERATOR).unwrap();
        client_of(self.address.parse().unwrap(), &security)
    }

    pub fn wait(&self, client: &Client) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let request = api::image_server::ListImagesRequest::default();
        let answers = async || client.call::<api::image_server::ListImages>(&request).await.ok();
        runtime.block_on(eventually_async("the image server answers", answers));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs imagetool, and gives its output and exit code as one text.
    pub fn run(&self, words: &[&str]) -> String {
        self.run_at(&self.address, &self.certificates.flags(OPERATOR), words)
    }

    /// As [`Place::run`], with the image server at `address`, and `flags` for the certificate.
    pub fn run_at(&self, address: &str, flags: &[String], words: &[&str]) -> String {
        let output = Command::new(self.path("bin/imagetool"))
            .args(flags)
            .args(["--imageserver", address])
            .args(words)
            .current_dir(self.directory.path())
            .env_remove("DOMINATOR_IMAGESERVER")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let code = output.status.code().unwrap();
        let said = format!("{}{}exit {code}\n", text(&output.stdout), text(&output.stderr));
        said.replace(address, "ADDRESS")
    }

    /// What it prints, if it ends well.
    pub fn data(&self, words: &[&str]) -> String {
        let said = self.run(words);
        said.strip_suffix("exit 0\n").unwrap_or_else(|| panic!("{words:?}: {said}")).to_owned()
    }

    fn json(&self, words: &[&str]) -> serde_json::Value {
        let words = [words, &["--format", "json"]].concat();
        let said = self.run(&words);
        let end = said.rfind(['}', ']']).unwrap_or_else(|| panic!("{words:?}: {said}"));
        serde_json::from_str(&said[said.find(['{', '[']).unwrap()..=end]).unwrap()
    }

    /// Adds an image of one file.
    pub fn add(&self, name: &str, content: &str, words: &[&str]) {
        let tree = self.path("tree");
        std::fs::create_dir_all(&tree).unwrap();
        std::fs::write(tree.join("file"), content).unwrap();
        let words = [&["add", name, "tree", "-", "-"], words].concat();
        self.data(&words);
    }
}

#[test]
fn directories_are_made_shown_given_away_and_removed() {
    let mut place = Place::new();
    assert_eq!(place.run(&["tree"]), "There are no directories.\nexit 0\n");
    assert_eq!(
        place.run(&["mkdir", "web/prod"]),
        "error: ImageServer.MakeDirectory at ADDRESS: there is no directory web to make web/prod \
         in: make that first, or ask for both\nhint: -p makes missing parents too\nexit 1\n"
    );
    assert_eq!(
        place.run(&["mkdir", "web", "--owner-group", "web-team"]),
        "Made web.\nOwned by group web-team.\nexit 0\n"
    );
    assert_eq!(
        place.run(&["mkdir", "-p", "web/prod/eu/"]),
        "Made web/prod.\nMade web/prod/eu.\nOwned by group web-team.\nexit 0\n"
    );
    assert_eq!(
        place.run(&["mkdir", "web"]),
        "error: ImageServer.MakeDirectory at ADDRESS: directory web exists already\nhint: \
         `imagetool chown` changes its owners; with -p an existing directory is no error\nexit 1\n"
    );
    assert_eq!(
        place.run(&["mkdir", "-p", "web", "--owner-user", "eve"]),
        "web already exists; its owners were not changed.\nOwned by group web-team.\nexit 0\n"
    );
    assert_eq!(
        place.run(&["chown", "web/prod", "--owner-group", "release", "--owner-user", "alice"]),
        "web/prod is owned by group release; user alice.\nexit 0\n"
    );
    assert_eq!(
        place.run(&["chown", "web/prod"]),
        "error: no owner is given\nhint: give --owner-group or --owner-user, or --nobody\n\
         exit 2\n"
    );
    place.add("web/prod/1", "one", &["--owner-group", "ones"]);
    place.add("web/prod/eu/2", "second", &[]);
    place.add("base/1", "1", &[]);
    assert!(place.data(&["show", "web/prod/1"]).contains("\nOwners:    group ones\n"));
    place.server.kill().unwrap();
    place.server.start_again().unwrap();
    place.wait(&place.client());

    let tree = place.data(&["tree"]);
    // When they were made is another time in each run.
    let lines: Vec<String> = tree
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split("  ").map(str::trim).collect();
            let words = words.into_iter().filter(|word| !word.is_empty());
            let words = words.map(|word| if word.ends_with(" UTC") { "yes" } else { word });
            words.collect::<Vec<_>>().join("|")
        })
        .collect();
    let want = [
        "DIRECTORY|IMAGES|SIZE|MADE|OWNERS",
        "base|1|1 B|no|-",
        "web|2|9 B|yes|group web-team",
        "└── prod|2|9 B|yes|group release; user alice",
        "└── eu|1|6 B|yes|group web-team",
    ];
    assert_eq!(lines, want, "{tree}");
    let json = place.json(&["tree", "web/prod/eu"]);
    let directory = json.as_array().unwrap()[0].as_object().unwrap();
    let keys: Vec<&str> = directory.keys().map(String::as_str).collect();
    assert_eq!(keys, ["bytes_below", "images", "images_below", "made_on", "name", "owners"]);
    assert_eq!(json[0]["owners"]["groups"][0], "web-team");

    assert_eq!(
        place.run(&["rmdir", "web/prod"]),
        "error: ImageServer.RemoveDirectory at ADDRESS: directory web/prod is not empty: it has \
         2 images, and 1 directory below it\nhint: `imagetool tree web/prod` and `imagetool list \
         web/prod` show what is in it\nexit 1\n"
    );
    for image in ["web/prod/1", "web/prod/eu/2"] {
        place.data(&["delete", "--yes", image]);
    }
    for directory in ["web/prod/eu", "web/prod", "web"] {
        assert_eq!(place.run(&["rmdir", directory]), format!("Removed {directory}.\nexit 0\n"));
    }
    assert_eq!(
        place.run(&["tree", "web"]),
        "error: there is no directory web\nhint: `imagetool tree` lists all directories\nexit 1\n"
    );
}

/// A tree of a Debian with so many packages, `changed` of which are of another version.
fn debian(place: &Place, changed: usize) {
    let tree = place.path("debian");
    let status = tree.join("var/lib/dpkg");
    std::fs::create_dir_all(&status).unwrap();
    let packages = (0..2_000).map(|number| {
        let version = if number < changed { 2 } else { 1 };
        format!(
            "Package: package-{number}\nStatus: install ok installed\nInstalled-Size: 10\n\
             Architecture: amd64\nVersion: {version}.0-1\n\n"
        )
    });
    std::fs::write(status.join("status"), packages.collect::<String>()).unwrap();
    std::fs::write(tree.join("large"), vec![7; 1_000_000]).unwrap();
}

#[test]
fn packages_of_a_desktop_and_what_images_take_are_told() {
    let place = Place::new();
    debian(&place, 0);
    place.data(&["add", "desk/1", "debian", "-", "-"]);
    debian(&place, 3);
    let json = place.json(&["estimate", "file:debian", "--against", "desk/1"]);
    // The status, the four directories above it, and the root.
    assert_eq!(json["missing"]["objects"], "5", "{json}");
    assert_eq!(json["against"]["to_fetch"]["objects"], "1", "{json}");
    place.data(&["add", "desk/2", "debian", "-", "-"]);
    let packages = place.json(&["show", "desk/2", "--packages"]);
    assert_eq!(packages.as_array().unwrap().len(), 2_000);
    let said = place.run(&["diff", "desk/1", "desk/2", "--ignore", "tree"]);
    let changed = "package changed: package-0 1.0-1 to 2.0-1\n";
    assert!(said.starts_with(changed) && said.lines().count() == 5, "{said}");
    assert!(said.ends_with("exit 3\n"), "{said}");
    let found = place.json(&["list", "--package", "package-1=2.*"]);
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!(found[0]["name"], "desk/2");

    let length = std::fs::metadata(place.path("debian/var/lib/dpkg/status")).unwrap().len();
    let json = place.json(&["estimate", "desk/2", "--against", "desk/1"]);
    assert_eq!(json["machine"]["inodes"], "6");
    let on_disk = 4 * 4_096 + length.div_ceil(4_096) * 4_096 + 1_003_520;
    assert_eq!(json["machine"]["bytes"], on_disk.to_string());
    assert_eq!(json["server"]["own"]["objects"], "5");
    let shared = serde_json::json!({"objects": "1", "bytes": "1000000"});
    assert_eq!(json["server"]["shared"], shared);
    let fetched = serde_json::json!({"objects": "1", "bytes": length.to_string()});
    assert_eq!(json["against"], serde_json::json!({"name": "desk/1", "to_fetch": fetched}));
    let said = place.data(&["estimate", "desk/2"]);
    let labels: Vec<&str> = said.lines().map(|line| line[..15].trim()).collect();
    assert_eq!(labels, ["On a machine:", "On the server:", ""], "{said}");
    assert!(place.run(&["estimate", "none"]).ends_with("exit 1\n"));
}

#[test]
fn an_image_with_computed_files_is_copied_like_any_other() {
    let place = Place::new();
    std::fs::write(place.path("computed"), "/file files.example\n").unwrap();
    place.add("test/1", "placeholder", &["--computed", "computed"]);
    assert_eq!(place.run(&["copy", "test/1", "base/1"]), "Copied test/1 to base/1.\nexit 0\n");
    place.data(&["delete", "--yes", "test/1"]);
    let shown = "PATH   SOURCE\n/file  files.example:6972\n";
    assert_eq!(place.data(&["show-computed-files", "base/1"]), shown);
    let said = place.data(&["show", "base/1"]);
    assert!(said.ends_with("Computed:  /file by files.example:6972\n"), "{said}");
    let list = place.data(&["list"]);
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let [head, row] = list.lines().map(cells).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!((head.last().unwrap().as_str(), row.last().unwrap().as_str()), ("COMPUTED", "1"));
    // The content of the placeholder is not there.
    assert_eq!(
        place.data(&["verify", "base/1"]),
        "base/1: 1 object, 0 B: all are there and unchanged.\n"
    );
}
