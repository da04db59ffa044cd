//! A directory with daemons that have certificates of a fixture, and with the tools.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use localfleet::fleet::daemon_process::Daemon;
use serde_json::Value;
use testing::eventually;

use crate::contracts::site::Ended;
use crate::converges::programs;

/// The addresses that the certificates of the fixtures are for.
pub const HOSTS: [&str; 6] =
    ["127.77.0.1", "127.77.0.2", "127.77.0.3", "127.77.0.4", "127.77.0.5", "127.77.0.6"];

/// Where mdbd gets its machines from. Nothing answers there when a fixture is opened. What mdbd
/// keeps is of this address, so that it is the same in all releases.
pub const INVENTORY: &str = "127.77.0.9:17973";

/// Appends `SERVICE VERB` to a file, and kills subd if it is to be killed at this verb.
const DRIVER: &str = "#!/bin/sh\n\
    echo \"$2 $3\" >> \"$1/services\"\n\
    [ ! -e \"$1/kill-at-$3\" ] || kill -9 \"$(cat \"$1/subd.pid\")\"\n";

/// See the module's text.
pub struct Place {
    directory: tempfile::TempDir,
    /// Where the daemons listen.
    pub imageserver: SocketAddr,
    pub replica: SocketAddr,
    pub dominator: SocketAddr,
    pub subd: SocketAddr,
    pub mdbd: SocketAddr,
}

impl Place {
    /// An empty one, whose daemons listen on `host`.
    pub fn new(host: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        programs(directory.path());
        // Bound and let go: nobody else on this address takes the same port meanwhile.
        let held: Vec<TcpListener> =
            (0..5).map(|_| TcpListener::bind((host, 0)).unwrap()).collect();
        let address = |index: usize| held[index].local_addr().unwrap();
        let [imageserver, replica, dominator, subd, mdbd] = [0, 1, 2, 3, 4].map(address);
        let place = Self { directory, imageserver, replica, dominator, subd, mdbd };
        let driver = place.at("driver");
        fs::write(&driver, DRIVER).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&driver, mode).unwrap();
        place
    }

    /// One with the archives of a release.
    pub fn of(host: &str, release: &str, archives: &[&str]) -> Self {
        let place = Self::new(host);
        for archive in archives {
            place.unpack(release, archive);
        }
        place
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn path(&self, name: &str) -> String {
        self.at(name).display().to_string()
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn unpack(&self, release: &str, archive: &str) {
        let mut command = Command::new("tar");
        command.args(["--xattrs", "--xattrs-include=*", "--same-owner", "-xpzf"]);
        command.arg(folder(release).join(archive).with_extension("tar.gz"));
        let output = command.arg("-C").arg(self.directory.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Writes an archive of a release.
    pub fn pack(&self, release: &str, archive: &str, names: &[&str]) {
        let mut command = Command::new("tar");
        command.args(["--format=posix", "--pax-option=delete=atime,delete=ctime", "--sparse"]);
        command.args(["--xattrs", "--xattrs-include=*", "--numeric-owner", "--sort=name", "-czf"]);
        command.arg(folder(release).join(archive).with_extension("tar.gz"));
        command.env("GZIP", "-9").arg("-C").arg(self.directory.path()).args(names);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Starts a program with these words, and with the certificate of `holder` if there is one.
    pub fn start(&self, program: &str, holder: &str, words: &[&str]) -> Daemon {
        let tls = self.path(&format!("tls/{holder}"));
        let words = ["--tls", &tls].iter().chain(words).map(|word| (*word).into()).collect();
        let log = self.at(&format!("{holder}.log"));
        Daemon::start(holder, &self.at("bin").join(program), words, log).unwrap()
    }

    pub fn start_imageserver(&self) -> Daemon {
        let (listen, data) = (self.imageserver.to_string(), self.path("imageserver"));
        let words = ["--listen", &listen, "--data", &data, "--store-packed", "3"];
        let daemon = self.start("imageserver", "imageserver", &words);
        self.wait_done("imagetool list");
        daemon
    }

    pub fn start_replica(&self) -> Daemon {
        let (listen, data) = (self.replica.to_string(), self.path("replica"));
        let master = self.imageserver.to_string();
        let words = ["--listen", &listen, "--data", &data];
        let words = [&words[..], &["--replicate-from", &master, "--replicate-archive"]].concat();
        let daemon = self.start("imageserver", "replica", &words);
        self.wait_done(&format!("imagetool list --imageserver {}", self.replica));
        daemon
    }

    pub fn start_dominator(&self) -> Daemon {
        let (listen, images) = (self.dominator.to_string(), self.imageserver.to_string());
        let (mdb, state) = (self.path("mdb.json"), self.path("dominator"));
        let words = ["--listen", &listen, "--imageserver", &images, "--mdb", &mdb];
        let words = [&words[..], &["--state", &state, "--image-failure-min", "1"]].concat();
        let daemon = self.start("dominator", "dominator", &words);
        self.wait_done("domtool status");
        daemon
    }

    /// Starts subd, which takes only signed images.
    pub fn start_subd(&self) -> Daemon {
        let (listen, root) = (self.subd.to_string(), self.path("root"));
        let driver = format!("{} {}", self.path("driver"), self.path(""));
        let trusted = self.path("trusted");
        let words = ["--listen", &listen, "--root", &root, "--hostname", "sub-1"];
        let more = ["--service-command", &driver, "--health-command", "env"];
        let more = [&more[..], &["--device-speed", "1000000000"]].concat();
        let signed = ["--trusted-keys", &trusted, "--signatures-needed", "1"];
        let daemon = self.start("subd", "subd", &[&words[..], &more, &signed].concat());
        self.write("subd.pid", &daemon.id().unwrap().to_string());
        self.wait_done("subtool poll");
        daemon
    }

    pub fn start_mdbd(&self) -> Daemon {
        let (config, mdb) = (self.path("mdbd.toml"), self.path("made.json"));
        let (state, listen) = (self.path("mdbd"), self.mdbd.to_string());
        let words = ["--config", &config, "--mdb", &mdb, "--state", &state, "--listen", &listen];
        self.start("mdbd", "mdbd", &words)
    }

    /// Writes the configuration of mdbd.
    pub fn write_inventory(&self) {
        let source = format!("name = 'inventory'\nurl = 'http://{INVENTORY}/machines.json'\n");
        self.write("mdbd.toml", &format!("[[source]]\n{source}"));
    }

    /// Runs a tool in the directory, as Ann; `line` are its words, which have no spaces.
    pub fn run(&self, line: &str) -> Ended {
        self.run_as("ann", line)
    }

    /// Runs a tool, as the holder of some certificate.
    pub fn run_as(&self, holder: &str, line: &str) -> Ended {
        let mut words = line.split_whitespace();
        let tool = words.next().unwrap();
        let tls = format!("tls/{holder}");
        let (images, dominator) = (self.imageserver.to_string(), self.dominator.to_string());
        let subd = self.subd.to_string();
        let mut flags = vec!["--tls", &tls];
        match tool {
            "imagetool" => flags.extend(["--imageserver", &images]),
            "domtool" => flags.extend(["--dominator", &dominator]),
            "subtool" => flags.extend(["--imageserver", &images, "--subd", &subd]),
            _ => flags.clear(),
        }
        let output = Command::new(self.at("bin").join(tool))
            .args(flags)
            .args(words)
            .current_dir(self.directory.path())
            .env("HOME", self.directory.path())
            .env_remove("DOMINATOR_ADDR")
            .env_remove("DOMINATOR_IMAGESERVER")
            .env_remove("DOMINATOR_SUBD")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap();
        Ended { code, out: text(output.stdout), said: text(output.stderr) }
    }

    /// Runs a tool that must succeed.
    #[track_caller]
    pub fn done(&self, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, 0, "{line}: {}", ended.said);
        ended.out
    }

    /// The data that a tool prints.
    #[track_caller]
    pub fn data(&self, line: &str) -> Value {
        let ended = self.run(&format!("{line} --format json"));
        ended.json().unwrap_or_else(|| panic!("{line}: {}{}", ended.out, ended.said))
    }

    /// Waits until what a tool prints is as `is_so` says.
    #[track_caller]
    pub fn wait(&self, line: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        eventually(line, || {
            let ended = self.run(&format!("{line} --format json"));
            let value = ended.json().filter(|value| is_so(value));
            value.ok_or((ended.out, ended.said))
        })
    }

    /// Waits until a tool succeeds.
    #[track_caller]
    pub fn wait_done(&self, line: &str) {
        eventually(line, || {
            let ended = self.run(line);
            if ended.code == 0 { Ok(()) } else { Err(ended.said) }
        });
    }

    /// Waits until the dominator says of the machine that it has this status.
    #[track_caller]
    pub fn wait_status(&self, status: &str, image: &str) {
        let is_so =
            |list: &Value| list[0]["status"] == status && list[0]["required_image"] == image;
        self.wait("domtool list-subs sub-1", is_so);
    }
}

/// The folder of a release.
pub fn folder(release: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/state").join(release)
}
