//! `filegen-client`, as an operator runs it.

use std::process::{Child, Command, Stdio};

use model::object::Algorithm;
use testing::{eventually, exit_and_output};

use crate::server::{Server, free_port, machine};

const CONFIG: &str = r#"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"

[[generator]]
path = "/etc/key"
kind = "template"
file = "key.j2"
secret = true

[[generator]]
path = "/etc/host.key"
kind = "program"
command = ["bin/key"]

[[generator]]
path = "/etc/motd"
kind = "file"
file = "motd"
"#;

const FLEET: &str = r#"[
{"Hostname": "db1", "Location": "sfo", "RequiredImage": "db/1"},
{"Hostname": "web1", "Location": "nyc", "RequiredImage": "web/1"},
{"Hostname": "web2", "Location": "sfo", "PlannedImage": "web/1"}
]"#;

fn configured() -> Server {
    let server = Server::new();
    server.write("resolv.conf.j2", "search {{ Location }}.example\nnameserver 192.0.2.1\n");
    server.write("key.j2", "s3cret of {{ Location }}\n");
    server.write("motd", "Welcome\n");
    server.program("bin/key", "echo '{\"Data\": \"YQ==\", \"SecondsValid\": 3600}'");
    server.write("fleet.json", FLEET);
    server.configure(CONFIG);
    server
}

#[tokio::test(flavor = "multi_thread")]
async fn list_and_get_show_what_is_made() {
    let mut server = configured();
    server.start().await;
    let (code, out, said) = server.tool(&["list"]);
    assert_eq!((code, &*said), (Some(0), ""));
    let (_, told) = server.next(None).await;
    let version = |path: &str| {
        let one = told.generators.iter().find(|one| one.path.to_string() == path).unwrap();
        one.version.hex()[..12].to_owned()
    };
    let expected = format!(
        " PATH              KIND      SECRET  REVISION  VERSION\n \
         /etc/host.key     program   yes     1         {}\n \
         /etc/key          template  yes     1         {}\n \
         /etc/motd         file              1         {}\n \
         /etc/resolv.conf  template          1         {}\n",
        version("/etc/host.key"),
        version("/etc/key"),
        version("/etc/motd"),
        version("/etc/resolv.conf"),
    );
    assert_eq!(out, expected);

    let get = |words: &[&str]| server.tool(&[&["get", "--mdb", "fleet.json"], words].concat());
    let text = "search nyc.example\nnameserver 192.0.2.1\n".to_owned();
    assert_eq!(get(&["web1", "/etc/resolv.conf"]), (Some(0), text, String::new()));
    let (code, out, _) = get(&["web1", "/etc/key", "--format", "json"]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["is_secret"], &json["bytes"]), (&true.into(), &r"s3cret of nyc\n".into()));
    let table = [
        (
            ["web9", "/etc/key"],
            "error: the machine database has no web9\nhint: domtool mdb show lists the machines\n",
        ),
        (
            ["web1", "/etc/none"],
            "error: /etc/none cannot be made for web1: no generator makes \
             /etc/none\nhint: filegen-client list shows the paths that can be made\n",
        ),
    ];
    for (words, said) in table {
        assert_eq!(get(&words), (Some(1), String::new(), said.to_owned()));
    }
    let (code, _, said) = get(&["web1", "etc/key"]);
    assert_eq!(code, Some(2), "{said}");

    let measure = ["bench", "/etc/motd", "--mdb", "fleet.json", "--time", "1s"];
    let (code, out, _) = server.tool(&measure);
    assert_eq!(code, Some(0));
    assert!(out.contains(" files for 3 machines in ") && out.ends_with(", 0 failures\n"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn diff_shows_where_a_configuration_changes_files_and_no_secret() {
    let mut server = configured();
    server.start().await;
    let diff = |words: &[&str]| server.tool(&[&["diff", "--mdb", "fleet.json"], words].concat());
    assert_eq!(diff(&["config.toml"]), (Some(0), String::new(), String::new()));

    server.write(
        "new/resolv.conf.j2",
        "search {{ Location }}.example\n\
         nameserver {{ '192.0.2.1' if Location == 'nyc' else '192.0.2.2' }}\n",
    );
    server.write("new/key.j2", "n3w of {{ Location }}\n");
    server.program("new/bin/key", "exit 1");
    server.write("new/more.j2", "{{ Tags.rack }}");
    let new = CONFIG.replace(
        "\"/etc/motd\"\nkind = \"file\"\nfile = \"motd\"",
        "\"/etc/more\"\nkind = \"template\"\nfile = \"more.j2\"",
    );
    server.write("new/config.toml", &new);
    let digest = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
    let short = |text: &str| digest(text).hex()[..12].to_owned();
    let (now, then) = (short("s3cret of sfo\n"), short("n3w of sfo\n"));
    let expected = format!(
        "/etc/host.key: made otherwise, which is not compared\n\
         /etc/key: changes on 3 of 3 machines: db1, web1, web2\n  \
           db1: {now} becomes {then}\n\
         /etc/more: cannot be made for 3 machines; db1: the template fails: line 1: undefined \
         value\n\
         /etc/motd: made no more\n\
         /etc/resolv.conf: changes on 2 of 3 machines: db1, web2\n  \
           db1:\n  \
           - nameserver 192.0.2.1\n  \
           + nameserver 192.0.2.2\n"
    );
    assert_eq!(diff(&["new/config.toml"]), (Some(3), expected, String::new()));
    let (code, json, _) = diff(&["new/config.toml", "--format", "json"]);
    assert_eq!(code, Some(3));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let key = |now: &str, then: &str| {
        let [now, then] = [now, then].map(|text| digest(text).to_string());
        serde_json::json!({"now": now, "then": then})
    };
    let expected = serde_json::json!({"compared": {
        "changed": {
            "db1": key("s3cret of sfo\n", "n3w of sfo\n"),
            "web1": key("s3cret of nyc\n", "n3w of nyc\n"),
            "web2": key("s3cret of sfo\n", "n3w of sfo\n"),
        },
        "failed": {},
    }});
    assert_eq!(json["/etc/key"], expected);

    server.write("new/more.j2", "{{ Tags.rack");
    let more = server.text("new/more.j2");
    let (code, out, said) = diff(&["new/config.toml"]);
    assert_eq!((code, &*out), (Some(1), ""));
    let expected = format!("error: the configuration is not valid: {more}: line 1: ");
    assert!(said.starts_with(&expected), "{said}");
}

/// An imageserver, which ends with the test.
struct ImageServer(Child);

impl Drop for ImageServer {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn check_makes_all_files_of_an_image_before_it_is_used() {
    let mut server = configured();
    server.start().await;
    let images = format!("127.0.0.1:{}", free_port());
    let started = Command::new(testing::program("imageserver"))
        .args(["--insecure", "--log", "warn", "--listen", &images, "--data"])
        .arg(server.path("images"))
        .stdin(Stdio::null())
        .spawn();
    let _images = ImageServer(started.unwrap());
    let imagetool = |words: &[&str]| {
        let mut command = Command::new(testing::program("imagetool"));
        command.args(["--insecure", "--imageserver", &images]).args(words);
        exit_and_output(&command.current_dir(server.directory.path()).output().unwrap())
    };
    eventually("the imageserver answers", || {
        let (code, _, said) = imagetool(&["list"]);
        if code == Some(0) { Ok(()) } else { Err(said) }
    });
    for path in ["key", "resolv.conf", "host.key"] {
        server.write(&format!("tree/etc/{path}"), "a placeholder");
    }
    let port = server.port;
    let source = format!("127.0.0.1:{port}");
    let list = format!("/etc/key {source}\n/etc/resolv.conf {source}\n/etc/host.key {source}\n");
    server.write("computed", &list);
    server.write("filter", "/var/.*\n");
    let words =
        ["add", "--computed", "computed", "web/1", "tree", "filter", "-", "--required-paths="];
    let (code, _, said) = imagetool(&words);
    assert_eq!(code, Some(0), "{said}");

    let check = |more: &[&str]| {
        server.tool(
            &[&["check", "web/1", "--mdb", "fleet.json", "--imageserver", &images], more].concat(),
        )
    };
    let good = |text: &str| (Some(0), text.to_owned(), String::new());
    assert_eq!(check(&[]), good("6 files for 2 machines: 0 cannot be made\n"));
    assert_eq!(check(&["--all"]), good("9 files for 3 machines: 0 cannot be made\n"));

    server.write("resolv.conf.j2", "{{ 'nyc.example' if Location == 'nyc' else Tags.domain }}\n");
    server.wait_for_file(&machine("web1", "nyc"), "/etc/resolv.conf", "nyc.example\n").await;
    let expected = format!(
        "web2 /etc/resolv.conf: the template fails: line 1: undefined value (from {source})\n\
         6 files for 2 machines: 1 cannot be made\n"
    );
    assert_eq!(check(&[]), (Some(3), expected, String::new()));
    server.write("fleet.json", "[{\"Hostname\": \"db1\"}]");
    let said = "error: no machine of the machine database requires or plans web/1\n\
                hint: --all checks the image for every machine\n";
    assert_eq!(check(&[]), (Some(1), String::new(), said.to_owned()));
}
