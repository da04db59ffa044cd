//! A small fleet with all daemons, and the tools as an operator's script runs them.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use certs::sets::Set;
use localfleet::fleet::certificates::OPERATOR;
use localfleet::fleet::daemon_process::Daemon;
use localfleet::fleet::{Addresses, Fleet, Options, client_of};
use serde_json::{Value, json};
use testing::eventually;

use crate::converges::programs;
use crate::trees;

/// How long a daemon may take to start.
const START_MAX: Duration = Duration::from_secs(60);

/// A fleet of two machines, an mdbd, a filegen-server, a replica of the image server, and a
/// directory to work in.
pub struct Site {
    pub directory: tempfile::TempDir,
    pub fleet: Fleet,
    pub mdbd: SocketAddr,
    pub replica: SocketAddr,
    _daemons: [Daemon; 3],
}

/// What the filegen-server makes.
const GENERATORS: &str = r#"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"

[[generator]]
path = "/etc/mdb.json"
kind = "mdb"
secret = true
"#;

/// How a tool ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub said: String,
}

impl Ended {
    /// What it printed; nothing if that is no JSON.
    pub fn json(&self) -> Option<Value> {
        serde_json::from_str(&self.out).ok()
    }
}

impl Site {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let programs = programs(directory.path());
        fs::write(at("filter"), "/var/log/.*\n/srv/data$\n/etc/machine-id\n").unwrap();
        let triggers = r#"[{"MatchLines": ["/etc/.*"], "Service": "settings"}]"#;
        fs::write(at("triggers"), triggers).unwrap();
        fs::create_dir(at("alarms")).unwrap();
        let fleet = Fleet::start(Options {
            programs: programs.clone(),
            directory: directory.path().to_owned(),
            subs: 2,
            subd_flags: Vec::new(),
            dominator_flags: vec![
                ("--alarm-command", format!("tee -a {}", at("alarms/told").display())),
                ("--image-failure-min", "1".to_owned()),
            ],
            insecure: false,
            addresses: Addresses::private().unwrap(),
            stop: Arc::new(AtomicBool::new(false)),
        })
        .unwrap();
        let host = fleet.addresses().imageserver.ip();
        let free = || std::net::TcpListener::bind((host, 0)).unwrap().local_addr().unwrap();
        let (mdbd, replica) = (free(), free());
        let start = |name: &str, program: &str, set: Set, flags: &[(&str, String)]| {
            fleet.certificates().for_daemon(name, set, &[&host.to_string()]).unwrap();
            let mut words = fleet.certificates().flags(name);
            words
                .extend(flags.iter().flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()]));
            let words = words.into_iter().map(Into::into).collect();
            let log = at(&format!("log/{name}.log"));
            Daemon::start(name, &programs.join(program), words, log).unwrap()
        };
        let path = |name: &str| at(name).display().to_string();
        let config = format!("[[source]]\nname = 'fleet'\nfile = '{}'\n", path("mdb.json"));
        fs::write(at("mdbd.toml"), config).unwrap();
        let flags = [
            ("--config", path("mdbd.toml")),
            ("--mdb", path("made.json")),
            ("--state", path("mdbd")),
            ("--listen", mdbd.to_string()),
        ];
        let mut of_mdbd = start("mdbd", "mdbd", Set::Mdbd, &flags);
        let master = fleet.addresses().imageserver.to_string();
        let flags = [
            ("--listen", replica.to_string()),
            ("--data", path("replica")),
            ("--replicate-from", master),
        ];
        let mut of_replica = start("replica", "imageserver", Set::Imageserver, &flags);
        fleet.wait_for(mdbd, &mut of_mdbd, START_MAX).unwrap();
        fleet.wait_for(replica, &mut of_replica, START_MAX).unwrap();
        fs::create_dir(at("generators")).unwrap();
        fs::write(at("generators/config.toml"), GENERATORS).unwrap();
        fs::write(at("generators/resolv.conf.j2"), "search {{ Location }}.example\n").unwrap();
        let of_filegen = fleet.start_filegen(&at("generators/config.toml")).unwrap();
        Self { directory, fleet, mdbd, replica, _daemons: [of_mdbd, of_replica, of_filegen] }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs a tool in the directory of the site; `line` are its words, which have no spaces.
    pub fn run(&self, line: &str) -> Ended {
        let mut words = line.split_whitespace();
        let tool = words.next().unwrap();
        let addresses = self.fleet.addresses();
        let server = |flag: &str, address: SocketAddr| [flag.to_owned(), address.to_string()];
        let mut flags = Vec::new();
        if tool != "fs2objectcache" {
            flags.extend(self.fleet.certificates().flags(OPERATOR));
        }
        match tool {
            "imagetool" => flags.extend(server("--imageserver", addresses.imageserver)),
            "domtool" => flags.extend(server("--dominator", addresses.dominator)),
            "filegen-client" => {
                flags.extend(server("--dominator", addresses.dominator));
                flags.extend(server("--imageserver", addresses.imageserver));
                flags.extend(server("--filegen-server", addresses.filegen));
            }
            "subtool" => {
                flags.extend(server("--imageserver", addresses.imageserver));
                flags.extend(server("--subd", self.fleet.subs[0].address));
            }
            _ => {}
        }
        self.run_words(tool, flags.iter().map(String::as_str).chain(words))
    }

    /// Runs a program with nothing but these words.
    pub fn run_words<'word>(
        &self,
        program: &str,
        words: impl IntoIterator<Item = &'word str>,
    ) -> Ended {
        let output = Command::new(self.at("bin").join(program))
            .args(words)
            .current_dir(self.directory.path())
            .env("HOME", self.directory.path())
            .env_remove("DOMINATOR_ADDR")
            .env_remove("DOMINATOR_FILEGEN_SERVER")
            .env_remove("DOMINATOR_IMAGESERVER")
            .env_remove("DOMINATOR_SUBD")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap();
        Ended { code, out: text(output.stdout), said: text(output.stderr) }
    }

    /// Runs a tool that must succeed, and gives its data.
    #[track_caller]
    pub fn data(&self, line: &str) -> Value {
        let ended = self.run(&format!("{line} --format json"));
        ended.json().unwrap_or_else(|| panic!("{line}: {}{}", ended.out, ended.said))
    }

    /// Waits until what a tool prints is as `is_so` says.
    #[track_caller]
    pub fn wait(&self, line: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        eventually(line, || {
            let value = self.data(line);
            if is_so(&value) { Ok(value) } else { Err(value) }
        })
    }

    /// Waits until a machine has this status.
    #[track_caller]
    pub fn wait_status(&self, host: &str, status: &str) {
        self.wait(&format!("domtool list-subs {host}"), |list| list[0]["status"] == status);
    }

    /// Waits until a machine is scanned, has got what it was told to get, and does nothing.
    #[track_caller]
    pub fn wait_idle(&self, host: &str) {
        self.wait(&format!("domtool show-sub {host}"), |detail| {
            let poll = &detail["poll"];
            let is_scanned = !poll["root"].is_null();
            detail["missing_objects"] == 0 && poll["activity"] == "idle" && is_scanned
        });
    }

    /// Makes a tree in the directory of the site.
    pub fn tree(&self, name: &str, version: u32) {
        trees::make(&self.at(name), version);
    }

    /// Puts a machine database in force: of each machine its name, its address and its image.
    pub fn require(&self, machines: &[(&str, SocketAddr, &str)]) {
        let records: Vec<Value> = machines
            .iter()
            .map(|(hostname, address, image)| {
                json!({
                    "Hostname": hostname,
                    "IpAddress": address.ip(),
                    "RequiredImage": image,
                    "Location": "here",
                    "Tags": {"tier": "front"},
                })
            })
            .collect();
        self.write_mdb("mdb.json", &Value::from(records));
    }

    pub fn write_mdb(&self, name: &str, records: &Value) {
        fs::write(self.at("new.json"), records.to_string()).unwrap();
        fs::rename(self.at("new.json"), self.at(name)).unwrap();
    }

    /// The metrics of a daemon.
    pub fn metrics(&self, address: SocketAddr) -> String {
        let client = client_of(address, self.fleet.security());
        let (status, page) = self.fleet.get(&client, "/metrics").unwrap();
        assert_eq!(status, 200);
        String::from_utf8(page).unwrap()
    }

    pub fn make_key(&self, name: &str) {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]);
        let status = command.arg(self.at(name)).status();
        assert!(status.expect("the package openssh-client is installed").success());
    }

    pub fn write(&self, name: &str, text: &str) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        fs::write(path, text).unwrap();
    }
}
