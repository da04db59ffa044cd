//! The real mdbd as a process, with real sources.

use rpc::tls::Security;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::dominator::{GetStatus, ListSubs, ListSubsRequest};
use api::fault::FaultCode;
use api::mdb::{GetMdb, GetMdbReply, GetMdbRequest};
use rpc::client::{CallError, Client, Peer};
use tempfile::TempDir;
use testing::{eventually_async, exit_and_output};

use crate::operating::{OF_ALL, explained, told};
use crate::stage::{end_of, free_port, wait_until, wait_until_up};
use crate::web::Web;

struct Mdbd {
    directory: TempDir,
    port: u16,
    client: Client,
    authorities: Option<PathBuf>,
    process: Option<Child>,
}

impl Drop for Mdbd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn client_of(port: u16) -> Client {
    Client::new(Peer::parse(&format!("127.0.0.1:{port}"), 0).unwrap(), &Security::Insecure)
}

impl Mdbd {
    /// An mdbd that is not started yet.
    fn new() -> Self {
        let port = free_port();
        let directory = tempfile::tempdir().unwrap();
        Self { directory, port, client: client_of(port), authorities: None, process: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Replaces a file in the directory of the test.
    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path("new"), text).unwrap();
        std::fs::rename(self.path("new"), self.path(name)).unwrap();
    }

    /// Writes the configuration, in which `DIR` is the directory of the test.
    fn configure(&self, sources: &str) {
        let directory = self.directory.path().to_str().unwrap();
        let text = format!(
            "insecure = true\ninterval = 1\nlog = \"warn\"\nlisten = \"127.0.0.1:{}\"\n\
             mdb = \"DIR/out/mdb\"\nstate = \"DIR/state\"\n{sources}",
            self.port
        );
        self.write("config.toml", &text.replace("DIR", directory));
    }

    fn command(&self) -> Command {
        let mut command = Command::new(testing::program("mdbd"));
        command.arg("--config").arg(self.path("config.toml")).stdin(Stdio::null());
        command.env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
        command.envs(self.authorities.iter().map(|file| ("SSL_CERT_FILE", file)));
        command
    }

    async fn start(&mut self) {
        let process = self.process.insert(self.command().spawn().unwrap());
        wait_until_up("mdbd", &self.client, process).await;
    }

    /// SIGKILL.
    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// SIGTERM; gives how it ended.
    fn terminate(&mut self) -> std::process::ExitStatus {
        let process = self.process.take().unwrap();
        let id = nix::unistd::Pid::from_raw(i32::try_from(process.id()).unwrap());
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
        end_of("mdbd", process)
    }

    fn mdb(&self) -> String {
        std::fs::read_to_string(self.path("out/mdb")).unwrap_or_default()
    }

    async fn page(&self, path: &str) -> (u16, String) {
        let (status, body) = self.client.get(path).await.unwrap();
        // As it reads, not as it is escaped.
        let body = String::from_utf8(body.to_vec()).unwrap();
        (status, body.replace("&#39;", "'").replace("&#34;", "\"").replace("&#38;", "&"))
    }

    /// Waits until the file has these machines, one in each line.
    async fn wait_for(&self, machines: &[&str]) {
        let expected = match machines {
            [] => "[]\n".to_owned(),
            machines => format!("[\n{}\n]\n", machines.join(",\n")),
        };
        eventually_async(&expected, async || {
            let mdb = self.mdb();
            if mdb == expected { Ok(()) } else { Err(mdb) }
        })
        .await;
    }

    /// Waits until the page shows all of `parts`.
    async fn wait_for_page(&self, parts: &[&str]) {
        eventually_async("the page has all parts", async || {
            let (_, page) = self.page("/").await;
            match parts.iter().find(|part| !page.contains(**part)) {
                None => Ok(()),
                Some(missing) => Err(format!("no {missing} in {page}")),
            }
        })
        .await;
    }

    /// Waits until every source has been read once more, twice at the least.
    async fn wait_for_round(&self) {
        tokio::time::sleep(Duration::from_millis(3_000)).await;
    }

    async fn get(&self, request: GetMdbRequest) -> Result<GetMdbReply, CallError> {
        self.client.call::<GetMdb>(&request).await
    }
}

const THREE: &str = r#"
[[source]]
name = "inventory"
url = "http://127.0.0.9:PORT/machines?key=secret"

[[source]]
name = "racks"
command = ["/bin/sh", "-c", "cat DIR/racks; exit $(cat DIR/code)"]
format = "hosts"
exclude-hosts = "old.*"

[[source]]
name = "by-hand"
file = "DIR/by-hand.json"
"#;

/// An mdbd with three sources of all kinds, and its web server.
async fn three() -> (Mdbd, Web) {
    let (mdbd, web) = (Mdbd::new(), Web::default());
    let port = web.start("127.0.0.9").await;
    let top = "exclude-hosts = \".*-test\"\n";
    mdbd.configure(&format!("{top}{}", THREE.replace("PORT", &port.to_string())));
    web.document(
        "/machines?key=secret",
        r#"[{"Hostname": "web1", "RequiredImage": "web/1", "Tags": {"row": "7"}, "Rack": 4},
            {"Hostname": "web-test"}]"#,
    );
    mdbd.write("racks", "# all racks\nweb1\ndb1 db/1 db/2\nold1\n");
    mdbd.write("code", "0");
    mdbd.write(
        "by-hand.json",
        "// exceptions\n[{\"Hostname\": \"db1\", \"DisableUpdates\": true}]",
    );
    (mdbd, web)
}

const DB1: &str =
    r#"{"Hostname":"db1","RequiredImage":"db/1","PlannedImage":"db/2","DisableUpdates":true}"#;
const WEB1: &str = r#"{"Hostname":"web1","RequiredImage":"web/1","Tags":{"row":"7"}}"#;

#[tokio::test(flavor = "multi_thread")]
async fn sources_of_all_kinds_become_one_file() {
    let (mut mdbd, web) = three().await;
    mdbd.start().await;
    mdbd.wait_for(&[DB1, WEB1]).await;
    assert!(web.requests()[0].contains("\r\nhost: 127.0.0.9:"), "{:?}", web.requests());

    // Who follows is told of a change at once, and of nothing when there is none.
    // The file is seen a moment before it is known to be durable.
    let first = mdbd.get(GetMdbRequest { have: None, wait_ms: 20_000 }).await.unwrap();
    let hosts = |reply: &GetMdbReply| -> Vec<String> {
        reply.machines.iter().flatten().map(|machine| machine.hostname.clone()).collect()
    };
    assert_eq!(hosts(&first), ["db1", "web1"]);
    let have = Some(first.version);
    let same = mdbd.get(GetMdbRequest { have, wait_ms: 100 }).await.unwrap();
    assert_eq!(same, GetMdbReply { version: first.version, machines: None });
    let news = mdbd.get(GetMdbRequest { have, wait_ms: 20_000 });
    let edit = async {
        // In place.
        std::fs::write(mdbd.path("by-hand.json"), "[{\"Hostname\": \"web1\", \"SubdPort\": 7}]")
            .unwrap();
    };
    let started = Instant::now();
    let (news, ()) = tokio::join!(news, edit);
    let news = news.unwrap();
    println!("from the edit to the follower: {:?}", started.elapsed());
    assert_ne!(news.version, first.version);
    let ports: Vec<_> = news.machines.unwrap().iter().map(|machine| machine.subd_port).collect();
    assert_eq!(ports, [None, Some(7)]);
    let web1 = r#"{"Hostname":"web1","SubdPort":7,"RequiredImage":"web/1","Tags":{"row":"7"}}"#;
    let db1 = r#"{"Hostname":"db1","RequiredImage":"db/1","PlannedImage":"db/2"}"#;
    mdbd.wait_for(&[db1, web1]).await;

    let page = format!("url http://127.0.0.9:{}/machines", web_port(&web));
    mdbd.wait_for_page(&["inventory", &page, "command /bin/sh", "by-hand.json", "s ago"]).await;
    let (_, page) = mdbd.page("/").await;
    assert!(!page.contains("secret") && !page.contains("class=\"bad\">"), "{page}");
    mdbd.write(
        "by-hand.json",
        "[\n{\"Hostname\": \"web1\", \"SubdPort\": 7, \"PlanedImage\": \"\"}]",
    );
    let named =
        "Source by-hand: line 2: the key `PlanedImage` is unknown; is `PlannedImage` meant?";
    mdbd.wait_for_page(&[named]).await;

    let (_, metrics) = mdbd.page("/metrics").await;
    let own = explained("## mdbd: the machine database from several sources");
    assert_eq!(&told(&metrics) - &explained(OF_ALL), own);
    for (path, part) in [
        ("/healthz", "ok\n"),
        ("/metrics", "dominator_mdbd_machines 2\n"),
        ("/metrics", "dominator_mdbd_source_machines{source=\"racks\"} 2\n"),
        ("/metrics", "dominator_mdbd_source_failing{source=\"inventory\"} 0\n"),
        ("/metrics", "dominator_mdbd_writes_total 2\n"),
    ] {
        let (status, body) = mdbd.page(path).await;
        assert_eq!(status, 200);
        assert!(body.contains(part), "{part} in {body}");
    }

    // Whoever waits for news does not keep it from ending.
    let waiting = mdbd.client.clone();
    let have = Some(news.version);
    let request = GetMdbRequest { have, wait_ms: 60_000 };
    let waiting = tokio::spawn(async move { waiting.call::<GetMdb>(&request).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    assert!(mdbd.terminate().success());
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(waiting.await.unwrap().unwrap().machines, None);
}

/// The port that requests were sent to.
fn web_port(web: &Web) -> String {
    let request = web.requests().remove(0);
    let host = request.lines().find_map(|line| line.strip_prefix("host: 127.0.0.9:")).unwrap();
    host.to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_fails_keeps_its_last_data_over_sigkill_and_restart() {
    let (mut mdbd, web) = three().await;
    mdbd.start().await;
    mdbd.wait_for(&[DB1, WEB1]).await;
    let stamp = |mdbd: &Mdbd| {
        let metadata = std::fs::metadata(mdbd.path("out/mdb")).unwrap();
        (metadata.ino(), metadata.mtime(), metadata.mtime_nsec(), metadata.ctime_nsec())
    };
    let written = stamp(&mdbd);
    mdbd.wait_for_round().await;
    assert_eq!(stamp(&mdbd), written, "nothing changed, and the file was written");

    // All three fail, each in its own way; what the command printed before it failed is not taken.
    web.raw("/machines?key=secret", "HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n");
    mdbd.write("code", "3");
    mdbd.write("racks", "web9\n");
    std::fs::remove_file(mdbd.path("by-hand.json")).unwrap();
    let errors = [
        "/machines answers 500 Internal Server Error (since ",
        "/bin/sh: exit status: 3 (since ",
        "there is no file ",
    ];
    mdbd.wait_for_page(&errors).await;
    let (_, metrics) = mdbd.page("/metrics").await;
    assert!(metrics.contains("mdbd_source_failing{source=\"by-hand\"} 1"), "{metrics}");
    assert_eq!(mdbd.page("/healthz").await.0, 200);
    assert_eq!(stamp(&mdbd), written);

    mdbd.kill();
    mdbd.start().await;
    mdbd.wait_for_page(&errors).await;
    mdbd.wait_for_page(&["not since the start"]).await;
    mdbd.wait_for_round().await;
    assert_eq!(stamp(&mdbd), written, "a restart has written the file");
    assert_eq!(mdbd.page("/healthz").await.0, 200);

    // Not even the file is needed: what is kept is enough to make it again.
    mdbd.kill();
    std::fs::remove_file(mdbd.path("out/mdb")).unwrap();
    mdbd.start().await;
    mdbd.wait_for(&[DB1, WEB1]).await;
    mdbd.wait_for_page(&errors).await;

    // One comes back, and takes effect while the others still fail.
    mdbd.write("code", "0");
    let db1 = r#"{"Hostname":"db1","DisableUpdates":true}"#;
    mdbd.wait_for(&[db1, WEB1, r#"{"Hostname":"web9"}"#]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_are_not_in_order_are_refused_as_a_whole() {
    let (mut mdbd, web) = three().await;
    mdbd.start().await;
    mdbd.wait_for(&[DB1, WEB1]).await;
    web.document("/machines?key=secret", "[{\"Hostname\": \"web2\"}, {\"Hostname\": \"web2\"}]");
    mdbd.write("racks", "web3\nweb4 a b c\n");
    mdbd.write("by-hand.json", "[\n{\"Hostname\": \"web5\"},\n{\"Hostname\": ");
    mdbd.wait_for_page(&[
        "host name web2 was given already",
        "line 2: unexpected `c` after HOST",
        "at line 3",
    ])
    .await;
    mdbd.wait_for(&[DB1, WEB1]).await;

    // Sources that are in order and have no machine do not empty the file: what the last of them
    // had stays.
    web.document("/machines?key=secret", "[]");
    mdbd.write("racks", "# none\n");
    mdbd.write("by-hand.json", "[]");
    mdbd.wait_for_page(&["Held back: the sources give no machine at all"]).await;
    let held = mdbd.mdb();
    assert!(held.contains("Hostname"), "{held}");
    mdbd.wait_for_round().await;
    assert_eq!(mdbd.mdb(), held);
    let (_, metrics) = mdbd.page("/metrics").await;
    assert!(metrics.contains("dominator_mdbd_held 1\n"), "{metrics}");
    let reply = mdbd.get(GetMdbRequest::default()).await.unwrap();
    assert!(!reply.machines.unwrap().is_empty());
    // Unless an operator means it.
    std::fs::remove_file(mdbd.path("out/mdb")).unwrap();
    mdbd.wait_for(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_before_every_source_has_given_something() {
    let (mut mdbd, _web) = three().await;
    std::fs::remove_file(mdbd.path("by-hand.json")).unwrap();
    mdbd.start().await;
    mdbd.wait_for_page(&["waits for sources that have given nothing yet: by-hand<"]).await;
    mdbd.wait_for_round().await;
    assert!(!mdbd.path("out/mdb").exists());
    let (status, body) = mdbd.page("/healthz").await;
    assert_eq!(status, 503);
    assert!(body.contains("given nothing yet: by-hand<"), "{body}");
    let refused = mdbd.get(GetMdbRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Some(FaultCode::Unavailable), "{refused:?}");

    // Who waits gets it when it is there.
    let request = GetMdbRequest { have: None, wait_ms: 20_000 };
    let edit = async { mdbd.write("by-hand.json", "[]") };
    let (reply, ()) = tokio::join!(mdbd.get(request), edit);
    assert_eq!(reply.unwrap().machines.unwrap().len(), 2);
    assert_eq!(mdbd.page("/healthz").await.0, 200);

    // A source that is new waits too, and the file stays; what is kept of others is forgotten.
    mdbd.kill();
    let before = mdbd.mdb();
    mdbd.configure("[[source]]\nname = \"late\"\ncommand = [\"sleep\", \"9\"]\ntimeout = 1\n");
    mdbd.start().await;
    mdbd.wait_for_page(&["given nothing yet: late<", "not done within 1 s (since "]).await;
    assert_eq!(mdbd.mdb(), before);
    assert!(!mdbd.path("state/sources/racks").exists());
    let reply = mdbd.get(GetMdbRequest::default()).await.unwrap();
    assert_eq!(reply.machines.unwrap().len(), 2, "the file is in force as long as it is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_come_over_tls_and_redirections() {
    let (mut mdbd, plain, secure) = (Mdbd::new(), Web::default(), Web::default());
    let http = format!("http://127.0.0.9:{}", plain.start("127.0.0.9").await);
    let (port, authority) = secure.start_secure("127.0.0.9").await;
    let https = format!("https://127.0.0.9:{port}");
    let (stranger, _) = secure.start_secure("127.0.0.9").await;
    mdbd.write("authority.pem", &authority);
    mdbd.authorities = Some(mdbd.path("authority.pem"));

    plain.redirect("/a", "/b/c?d");
    plain.redirect("/b/c?d", "e");
    plain.redirect("/b/e", &format!("{https}/list"));
    secure.document("/list", "web1 web/1");
    secure.redirect("/down", &format!("{http}/b"));
    plain.redirect("/loop", "loop");
    plain.raw("/endless", "HTTP/1.1 200 OK\r\n\r\nweb1\nweb2");
    plain.raw("/cut", "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nweb1\nweb2");
    plain.raw("/large", "HTTP/1.1 200 OK\r\ncontent-length: 268435457\r\n\r\n");
    plain.raw("/odd", "SSH-2.0-x\r\n\r\n");
    let chunks = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nweb2\r\n0\r\n\r\n";
    plain.raw("/chunks", chunks);
    let sources = [
        ("through", format!("{http}/a"), ""),
        ("chunks", format!("{http}/chunks"), ""),
        ("absent", format!("{http}/absent"), "/absent answers 404 Not Found (since "),
        ("down", format!("{https}/down"), "a redirection from https to http is not followed"),
        ("loop", format!("{http}/loop"), "/loop leads to more than 5 other addresses"),
        ("endless", format!("{http}/endless"), "without saying how long it is"),
        ("cut", format!("{http}/cut"), "/cut gave no whole answer: "),
        ("large", format!("{http}/large"), "/large has more than 268435456 bytes"),
        ("odd", format!("{http}/odd"), "/odd gave no whole answer: "),
        (
            "stranger",
            format!("https://127.0.0.9:{stranger}/list"),
            "no TLS with https://127.0.0.9:",
        ),
        ("nobody", format!("http://127.0.0.9:{}/", free_port()), "cannot connect to http://127"),
    ];
    let tables: Vec<String> = sources
        .iter()
        .map(|(name, url, _)| {
            format!("[[source]]\nname = \"{name}\"\nurl = \"{url}\"\nformat = \"hosts\"\n")
        })
        .collect();
    mdbd.configure(&tables.concat());
    mdbd.start().await;
    let errors: Vec<&str> = sources.iter().map(|(_, _, error)| *error).collect();
    mdbd.wait_for_page(&errors).await;
    mdbd.kill();
    mdbd.configure(&tables[..2].concat());
    mdbd.start().await;
    mdbd.wait_for(&[r#"{"Hostname":"web1","RequiredImage":"web/1"}"#, r#"{"Hostname":"web2"}"#])
        .await;
}

struct Dominator(Child);

impl Drop for Dominator {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dominator_follows() {
    let mut mdbd = Mdbd::new();
    mdbd.configure("[[source]]\nname = \"list\"\nfile = \"DIR/list\"\nformat = \"hosts\"\n");
    mdbd.write("list", "a x/1\nb\n");
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dominator"));
    command.args(["--insecure", "--log", "off", "--imageserver", "127.0.0.1:1", "--listen"]);
    command.arg(format!("127.0.0.1:{port}")).arg("--state").arg(mdbd.path("dominator"));
    command.arg("--mdb-server").arg(format!("127.0.0.1:{}", mdbd.port)).stdin(Stdio::null());
    let mut dominator = Dominator(command.spawn().unwrap());
    let client = client_of(port);
    wait_until_up("the dominator", &client, &mut dominator.0).await;
    let machines = async |expected: &str| {
        eventually_async(expected, async || {
            let subs = client.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap().subs;
            let subs = subs.iter().map(|sub| format!("{} {}", sub.hostname, sub.required_image));
            let subs = subs.collect::<Vec<String>>().join(", ");
            if subs == expected { Ok(()) } else { Err(subs) }
        })
        .await;
    };
    let trouble = async |part: Option<&str>| {
        eventually_async(&format!("the error of the MDB is {part:?}"), async || {
            let error = client.call::<GetStatus>(&()).await.unwrap().mdb_error;
            match (&error, part) {
                (None, None) => Ok(()),
                (Some(error), Some(part)) if error.contains(part) => Ok(()),
                _ => Err(error),
            }
        })
        .await;
    };

    trouble(Some("cannot connect to 127.0.0.1:")).await;
    mdbd.start().await;
    machines("a x/1, b ").await;
    trouble(None).await;
    mdbd.write("list", "a x/2\nc\n");
    machines("a x/2, c ").await;

    // While the server is away the last machines stay; when it is back it is followed again.
    mdbd.kill();
    trouble(Some("127.0.0.1:")).await;
    machines("a x/2, c ").await;
    mdbd.start().await;
    trouble(None).await;
    mdbd.write("list", "a x/3\n");
    machines("a x/3").await;
}

#[test]
fn what_is_wrong_is_said_before_anything_is_done() {
    let mdbd = Mdbd::new();
    let run = |text: &str, arguments: &[&str]| {
        mdbd.configure(text);
        let output = mdbd.command().args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let file = "[[source]]\nname = \"a\"\nfile = \"/a\"\n";
    let table: [(&str, &[&str], i32, &str); 7] = [
        ("", &[], 1, "config.toml: there is no [[source]]"),
        (
            "[[source]]\nname = \"a\"\nfil = \"/a\"",
            &[],
            1,
            "number 1 is invalid: unknown field `fil`",
        ),
        ("[[sources]]\n", &[], 2, "there is no flag --sources; known: "),
        (file, &["--hosts", "("], 1, "bad --hosts or --exclude-hosts: `(` is not a pattern"),
        (file, &["--interval", "0"], 2, "invalid value '0' for '--interval <DURATION>'"),
        (file, &["--tls", "/t"], 2, "--insecure and --tls /t contradict each other"),
        (file, &["--listen", "nonsense:x"], 1, "cannot listen: "),
    ];
    for (text, arguments, code, part) in table {
        let (got, said) = run(text, arguments);
        assert_eq!(got, Some(code), "{said}");
        assert!(said.contains(part), "{part} in {said}");
    }
    let output = Command::new(testing::program("mdbd")).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(help.contains("[[source]]") && help.contains("--interval"), "{help}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_written_is_shown_and_tried_again() {
    let (mut mdbd, _web) = three().await;
    std::fs::create_dir_all(mdbd.path("out/mdb")).unwrap();
    mdbd.start().await;
    mdbd.wait_for_page(&["The file stays as it was: ", "out/mdb is no regular file<"]).await;
    let (_, metrics) = mdbd.page("/metrics").await;
    assert!(metrics.contains("dominator_mdbd_file_failing 1\n"), "{metrics}");
    std::fs::remove_dir(mdbd.path("out/mdb")).unwrap();
    mdbd.wait_for(&[DB1, WEB1]).await;

    let kept = mdbd.path("state/sources/by-hand");
    std::fs::remove_file(&kept).unwrap();
    std::fs::create_dir(&kept).unwrap();
    mdbd.write("by-hand.json", "[]");
    mdbd.wait_for_page(&["cannot be kept over a restart: "]).await;
    let db1 = r#"{"Hostname":"db1","RequiredImage":"db/1","PlannedImage":"db/2"}"#;
    mdbd.wait_for(&[db1, WEB1]).await;
    std::fs::remove_dir(&kept).unwrap();
    wait_until("the data are kept", async || kept.is_file()).await;
    let (_, page) = mdbd.page("/").await;
    assert!(!page.contains("The file stays as it was"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_mdbd_runs_with_one_state_directory() {
    let (mut mdbd, _web) = three().await;
    mdbd.start().await;
    let second = mdbd.command().args(["--listen", "127.0.0.1:0"]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let (_, _, talk) = exit_and_output(&second);
    assert!(
        talk.contains("state is in use: another mdbd runs with this state directory"),
        "{talk}"
    );
}
