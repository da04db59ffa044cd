//! A filegen-server in a directory of its own.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use api::access::IdentityKind;
use api::file_generator::{
    Generate, GenerateRequest, GeneratedContent, GeneratedFile, Generators, GetContents,
    GetContentsReply, GetContentsRequest, GetGenerators, GetGeneratorsReply, GetGeneratorsRequest,
    GetSecrets, GetSecretsRequest, WantedFiles,
};
use certs::authority::{Authority, AuthorityOptions, Request};
use certs::files::Replace;
use certs::sets::Set;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rpc::client::{CallError, Client, Peer};
use rpc::tls::Security;
use tempfile::TempDir;
use testing::{eventually, eventually_async, exit_and_output};

/// How long a call may take: more than the server waits for programs.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Server {
    pub directory: TempDir,
    pub port: u16,
    pub client: Client,
    authority: Option<Authority>,
    process: Option<Child>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn client_of(port: u16, security: &Security) -> Client {
    Client::new(Peer::parse(&format!("127.0.0.1:{port}"), 0).unwrap(), security)
}

/// A record of a machine database.
pub fn machine(hostname: &str, location: &str) -> Machine {
    let (hostname, location) = (hostname.to_owned(), location.to_owned());
    Machine { hostname, location, ..Machine::default() }
}

impl Server {
    /// A server that is not started yet, and asks for no certificates.
    pub fn new() -> Self {
        let port = free_port();
        let (directory, client) =
            (tempfile::tempdir().unwrap(), client_of(port, &Security::Insecure));
        // Programs of other users are below it.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Self { directory, port, client, authority: None, process: None }
    }

    /// A server that asks for certificates; `client` is a dominator.
    pub fn secured() -> Self {
        let mut server = Self::new();
        server.authority = Some(Authority::create(&AuthorityOptions::default()).unwrap());
        server.issue("server", Set::FilegenServer.kind(), &[]);
        let powers = Set::Dominator.powers();
        let powers: Vec<&str> = powers.iter().map(String::as_str).collect();
        server.client = server.client_with("dominator", Set::Dominator.kind(), &powers);
        server
    }

    /// Issues a certificate into the directory `name`.
    pub fn issue(&self, name: &str, kind: IdentityKind, powers: &[&str]) {
        let authority = self.authority.as_ref().unwrap();
        let request = Request {
            name: name.to_owned(),
            kind,
            hosts: vec!["127.0.0.1".to_owned()],
            powers: Some(powers.iter().map(|power| (*power).to_owned()).collect()),
            ..Request::default()
        };
        let issued = authority.issue(&request).unwrap();
        issued.write(&self.path(name), authority.ca_pem(), Replace::Any).unwrap();
    }

    /// Issues a certificate, and returns a client that has it.
    pub fn client_with(&self, name: &str, kind: IdentityKind, powers: &[&str]) -> Client {
        self.issue(name, kind, powers);
        client_of(self.port, &Security::open(&self.path(name)).unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// As [`Server::path`], as text.
    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Replaces a file in the directory of the server, as editors do.
    pub fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(".new"), text).unwrap();
        fs::rename(self.path(".new"), self.path(name)).unwrap();
    }

    /// Writes a program.
    pub fn program(&self, name: &str, script: &str) {
        self.write(name, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The text of a configuration with these generators.
    pub fn configuration(&self, generators: &str) -> String {
        let security = match &self.authority {
            None => "insecure = true".to_owned(),
            Some(_) => format!("tls = \"{}\"", self.text("server")),
        };
        let (state, port) = (self.text("state"), self.port);
        format!("{security}\nlisten = \"127.0.0.1:{port}\"\nstate = \"{state}\"\n{generators}")
    }

    /// Replaces the configuration.
    pub fn configure(&self, generators: &str) {
        self.write("config.toml", &self.configuration(generators));
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_filegen-server"));
        command.arg("--config").arg(self.path("config.toml")).stdin(Stdio::null());
        command
    }

    /// Starts it; what it logs is added to a file.
    pub async fn start(&mut self) {
        let log = File::options().create(true).append(true).open(self.path("log")).unwrap();
        let mut process =
            self.command().stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        eventually_async("filegen-server answers", async || {
            if let Some(status) = process.try_wait().unwrap() {
                panic!("filegen-server ended: {status}: {}", self.log());
            }
            let answer = self.client.get("/healthz").await.map_err(|error| error.to_string())?;
            if answer.0 == 200 { Ok(()) } else { Err(format!("{answer:?}")) }
        })
        .await;
        self.process = Some(process);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// SIGTERM; gives how it ended.
    pub fn terminate(&mut self) -> ExitStatus {
        let mut process = self.process.take().unwrap();
        kill(Pid::from_raw(i32::try_from(process.id()).unwrap()), Signal::SIGTERM).unwrap();
        eventually("filegen-server stops", || process.try_wait().unwrap())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn audit_log(&self) -> String {
        fs::read_to_string(self.path("state/audit/audit.log")).unwrap()
    }

    /// The records of a method or decision in the audit log: who, what, and its arguments.
    pub fn audited(&self, method: &str) -> Vec<String> {
        let records = self.audit_log();
        let records =
            records.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        records
            .filter(|record| record["method"] == method || record["decision"] == method)
            .map(|record| {
                let shown = |key: &str| record[key].as_str().unwrap_or("-").to_owned();
                format!("{} {} {}", shown("user"), shown("kind"), shown("arguments"))
            })
            .collect()
    }

    /// A page, as it reads and not as it is escaped.
    pub async fn page(&self, path: &str) -> String {
        let (status, body) = self.client.get(path).await.unwrap();
        assert_eq!(status, 200);
        let body = String::from_utf8(body.to_vec()).unwrap();
        body.replace("&#39;", "'")
            .replace("&#34;", "\"")
            .replace("&#60;", "<")
            .replace("&#62;", ">")
            .replace("&#38;", "&")
    }

    /// The values of its own metrics, one in each line.
    pub async fn metrics(&self) -> String {
        let metrics = self.page("/metrics").await;
        let own = metrics.lines().filter(|line| line.starts_with("dominator_filegen_"));
        own.map(|line| format!("{}\n", line.trim_start_matches("dominator_filegen_"))).collect()
    }

    /// What becomes of these paths for each machine.
    pub async fn generate(&self, machines: &[Machine], paths: &[&str]) -> Vec<Vec<GeneratedFile>> {
        let wanted = |machine: &Machine| WantedFiles {
            machine: machine.clone(),
            algorithm: Algorithm::Blake3,
            paths: paths.iter().map(|path| path.parse().unwrap()).collect(),
            key: None,
            outputs: String::new(),
        };
        self.generate_for(machines.iter().map(wanted).collect()).await
    }

    /// The same of these questions.
    pub async fn generate_for(&self, machines: Vec<WantedFiles>) -> Vec<Vec<GeneratedFile>> {
        let request = GenerateRequest { machines, is_for_use: false };
        self.client.call_within::<Generate>(&request, PATIENCE).await.unwrap().machines
    }

    /// The files of a machine: the text of each, or why it cannot be made.
    pub async fn files(&self, machine: &Machine, paths: &[&str]) -> Vec<Result<String, String>> {
        let made = self.generate(std::slice::from_ref(machine), paths).await.remove(0);
        let mut files = Vec::new();
        for file in made {
            files.push(match file {
                GeneratedFile::Failed(why) => Err(why),
                GeneratedFile::Made(made) => Ok(self.content(&made, &machine.hostname).await),
            });
        }
        files
    }

    pub async fn content(&self, made: &GeneratedContent, hostname: &str) -> String {
        let reply = if made.is_secret {
            secrets(&self.client, made.id, hostname).await.unwrap()
        } else {
            let request = GetContentsRequest { ids: vec![made.id] };
            self.client.call::<GetContents>(&request).await.unwrap()
        };
        assert!(reply.absent.is_empty());
        let bytes = &reply.contents[0].bytes.0;
        assert_eq!(Algorithm::Blake3.digest(bytes), made.id);
        String::from_utf8(bytes.clone()).unwrap()
    }

    /// The one file of a machine.
    pub async fn file(&self, machine: &Machine, path: &str) -> Result<String, String> {
        self.files(machine, &[path]).await.remove(0)
    }

    /// Waits until a file of a machine is this one.
    pub async fn wait_for_file(&self, machine: &Machine, path: &str, expected: &str) {
        eventually_async(expected, async || {
            let file = self.file(machine, path).await;
            if file.as_deref() == Ok(expected) { Ok(()) } else { Err(file) }
        })
        .await;
    }

    /// Waits for another version of the generators than `have`.
    pub async fn next(&self, have: Option<ObjectId>) -> (ObjectId, Generators) {
        eventually_async("the generators change", async || {
            let request = GetGeneratorsRequest { have, wait_ms: 20_000 };
            let reply = self.client.call_within::<GetGenerators>(&request, PATIENCE).await;
            let GetGeneratorsReply { version, generators } = reply.unwrap();
            generators.map(|generators| (version, generators))
        })
        .await
    }

    /// Runs filegen-client as an operator would; gives its exit code, output and messages.
    pub fn tool(&self, words: &[&str]) -> (Option<i32>, String, String) {
        let flags = match &self.authority {
            None => vec!["--insecure".to_owned()],
            Some(_) => vec!["--tls".to_owned(), self.text("operator")],
        };
        let output: Output = Command::new(testing::program("filegen-client"))
            .args(["--filegen-server", &format!("127.0.0.1:{}", self.port)])
            .args(flags)
            .args(words)
            .env("HOME", self.directory.path())
            .current_dir(self.directory.path())
            .output()
            .unwrap();
        exit_and_output(&output)
    }
}

/// Asks for a secret that was made for this machine.
pub async fn secrets(
    client: &Client,
    id: ObjectId,
    hostname: &str,
) -> Result<GetContentsReply, CallError> {
    let request = GetSecretsRequest { ids: vec![id], hostnames: vec![hostname.to_owned()] };
    client.call::<GetSecrets>(&request).await
}

/// True if a file below `directory`, or one of its name, has this text.
pub fn contains(directory: &Path, text: &str) -> bool {
    let has = |bytes: &[u8]| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    fs::read_dir(directory).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() { contains(&path, text) } else { has(&fs::read(&path).unwrap()) }
    })
}
