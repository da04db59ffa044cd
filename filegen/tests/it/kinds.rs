//! What each kind of generator makes.

use std::collections::BTreeSet;

use model::mdb::Machine;

use crate::server::{Server, machine};
use crate::web::Web;

const CONFIG: &str = r#"
[[generator]]
path = "/etc/motd"
kind = "file"
file = "motd"

[[generator]]
path = "/etc/ca.pem"
kind = "directory"
directory = "ca"
by = "Location"

[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"
variables = "servers.toml"

[[generator]]
path = "/etc/mdb.json"
kind = "mdb"

[[generator]]
path = "/etc/key"
kind = "program"
command = ["bin/key", "--site", "nyc"]

[[generator]]
path = "/etc/a token"
kind = "url"
url = "http://127.0.0.1:PORT/token?of=all"
"#;

const PATHS: [&str; 6] =
    ["/etc/motd", "/etc/ca.pem", "/etc/resolv.conf", "/etc/mdb.json", "/etc/key", "/etc/a token"];

/// The record of web1 as programs and web servers get it.
const WEB1: &str = r#"{
  "Hostname": "web1",
  "IpAddress": null,
  "SubdPort": null,
  "RequiredImage": "",
  "PlannedImage": "",
  "DisableUpdates": false,
  "OwnerGroups": [],
  "OwnerUsers": [],
  "Location": "nyc/r4",
  "Tags": {
    "tier": "front"
  }
}
"#;

/// A server with generators of all kinds, and its web server.
async fn all_kinds() -> (Server, Web, Machine) {
    let (server, web) = (Server::new(), Web::default());
    let port = web.start().await;
    server.write("motd", "Welcome\n");
    server.write("ca/nyc/r4", "the authority of rack 4\n");
    server.write("ca/*", "the authority of all\n");
    server.write("ca/.hidden", "");
    server.write(
        "resolv.conf.j2",
        "# {{ Hostname }}, {{ Tags.tier }}\n\
         {% for server in Variables.servers -%}\nnameserver {{ server }}\n{% endfor %}\n",
    );
    server.write("servers.toml", "servers = [\"192.0.2.1\", \"192.0.2.2\"]\n");
    let script = "printf '{\"Data\": \"%s\"}' \"$( (echo \"$@\"; pwd; cat) | base64 -w0)\"";
    server.program("bin/key", script);
    web.document(
        "/token?of=all&pathname=%2fetc%2fa%20token",
        r#"{"Data": "dG9rZW4K", "SecondsValid": 0}"#,
    );
    server.configure(&CONFIG.replace("PORT", &port.to_string()));
    let tags = [("tier".to_owned(), "front".to_owned())].into();
    (server, web, Machine { tags, ..machine("web1", "nyc/r4") })
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_makes_its_file() {
    let (mut server, web, web1) = all_kinds().await;
    server.start().await;
    let expected = [
        "Welcome\n",
        "the authority of rack 4\n",
        "# web1, front\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n\n",
        WEB1,
        &format!("--site nyc /etc/key\n/\n{WEB1}"),
        "token\n",
    ];
    assert_eq!(server.files(&web1, &PATHS).await, expected.map(|text| Ok(text.to_owned())));
    let requests = [format!("post /token?of=all&pathname=%2fetc%2fa%20token\n{WEB1}")];
    assert_eq!(web.requests(), requests);

    let (_, told) = server.next(None).await;
    let shown = told.generators.iter().map(|one| (one.path.to_string(), one.is_secret));
    let expected = [
        ("/etc/a token", false),
        ("/etc/ca.pem", false),
        ("/etc/key", true),
        ("/etc/mdb.json", false),
        ("/etc/motd", false),
        ("/etc/resolv.conf", false),
    ];
    let expected: Vec<_> =
        expected.iter().map(|(path, secret)| ((*path).to_owned(), *secret)).collect();
    assert_eq!((shown.collect::<Vec<_>>(), told.error), (expected, String::new()));
}

/// The names in the first columns of the tables of a part of the handbook.
fn explained(heading: &str) -> BTreeSet<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/OPERATING.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, part) = text.split_once(&format!("\n{heading}\n")).unwrap();
    let part = part.split("\n##").next().unwrap();
    let rows = part.lines().filter(|line| line.starts_with("| `dominator_"));
    let names = rows.flat_map(|row| row.split(" | ").next().unwrap().split('`'));
    let names = names.filter(|name| name.starts_with("dominator_"));
    names.map(|name| name.split('{').next().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_metric_is_explained_in_the_handbook() {
    let (mut server, _web, web1) = all_kinds().await;
    server.start().await;
    server.files(&web1, &PATHS).await;
    let metrics = server.page("/metrics").await;
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE dominator_filegen_"));
    let told: BTreeSet<String> = types
        .map(|line| match line.split_once(' ').unwrap() {
            (name, "counter") => format!("dominator_filegen_{name}_total"),
            (name, _) => format!("dominator_filegen_{name}"),
        })
        .collect();
    assert_eq!(told, explained("### The page and the metrics of filegen-server"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_gives_the_same_digests() {
    let (mut server, _web, web1) = all_kinds().await;
    server.start().await;
    let before =
        (server.next(None).await, server.generate(std::slice::from_ref(&web1), &PATHS).await);
    server.kill();
    server.start().await;
    let after = (server.next(None).await, server.generate(&[web1], &PATHS).await);
    assert_eq!(before, after);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_leads_elsewhere_gets_nothing() {
    let (mut server, _web, _) = all_kinds().await;
    server.start().await;
    let unknown = machine("web2", "lon/r1");
    let paths = ["/etc/ca.pem", "/etc/resolv.conf", "/etc/none"];
    assert_eq!(
        server.files(&unknown, &paths).await,
        [
            Ok("the authority of all\n".to_owned()),
            Err("the template fails: line 1: undefined value".to_owned()),
            Err("no generator makes /etc/none".to_owned()),
        ]
    );
    // `motd` is beside the directory.
    for location in ["../motd", "nyc/../../motd", "/etc/passwd", ".", "nyc//r4"] {
        let why = format!("Location is `{location}`, which is no path below the directory");
        assert_eq!(server.file(&machine("web3", location), "/etc/ca.pem").await, Err(why));
    }
    // A hidden file is none of the directory's.
    assert_eq!(
        server.file(&machine("web4", ".hidden"), "/etc/ca.pem").await,
        Ok("the authority of all\n".to_owned())
    );
    assert_eq!(
        server.metrics().await,
        "generators 6\n\
         configuration_failing 0\n\
         content_bytes 321\n\
         next_end_timestamp_seconds 0\n\
         files_made_total{path=\"/etc/a token\"} 0\n\
         files_made_total{path=\"/etc/ca.pem\"} 2\n\
         files_made_total{path=\"/etc/key\"} 0\n\
         files_made_total{path=\"/etc/mdb.json\"} 0\n\
         files_made_total{path=\"/etc/motd\"} 0\n\
         files_made_total{path=\"/etc/resolv.conf\"} 0\n\
         failures_total{path=\"/etc/a token\"} 0\n\
         failures_total{path=\"/etc/ca.pem\"} 5\n\
         failures_total{path=\"/etc/key\"} 0\n\
         failures_total{path=\"/etc/mdb.json\"} 0\n\
         failures_total{path=\"/etc/motd\"} 0\n\
         failures_total{path=\"/etc/resolv.conf\"} 1\n"
    );
}
