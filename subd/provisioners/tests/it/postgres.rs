//! A real example: a role and a database of a PostgreSQL server that the test starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use testing::program;

use crate::{directory, install};

/// A server in a directory, which is stopped in the end.
struct Server {
    directory: tempfile::TempDir,
    programs: PathBuf,
}

impl Server {
    fn start() -> Self {
        let directory = directory();
        let versions = fs::read_dir("/usr/lib/postgresql").expect("Debian's postgresql is needed");
        let newest = versions.map(|entry| entry.unwrap().path()).max().unwrap();
        let server = Self { directory, programs: newest.join("bin") };
        let data = server.path("data");
        server.done("install", &["-d", "-o", "postgres", "-m", "700", &data]);
        server.as_postgres("initdb", &["-D", &data, "--auth=peer", "--no-sync"]);
        let options = format!("-c listen_addresses='' -k {data}");
        let log = server.path("data/log");
        server.as_postgres("pg_ctl", &["start", "-w", "-D", &data, "-o", &options, "-l", &log]);
        server
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    fn done(&self, program: &str, words: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(words).current_dir(self.directory.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        output
    }

    fn as_postgres(&self, program: &str, words: &[&str]) -> Output {
        let program = self.programs.join(program).display().to_string();
        let user = ["--reuid=postgres", "--regid=postgres", "--clear-groups", "--", &program];
        self.done("setpriv", &[&user, words].concat())
    }

    /// What a query returns, in lines.
    fn sql(&self, query: &str) -> String {
        let words = ["-XAtq", "-h", &self.path("data"), "-d", "postgres", "-c", query];
        String::from_utf8(self.as_postgres("psql", &words).stdout).unwrap()
    }

    fn provision(&self, words: &[&str]) -> (Option<i32>, Value, String) {
        let output = Command::new(program("subtool"))
            .args(["provision", "--format", "json", "--local", &self.path("resources")])
            .args(["--state", &self.path("state")])
            .args(words)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default(), said)
    }

    fn resource(&self, id: &str, text: &Value) {
        fs::write(self.path(&format!("resources/{id}.json")), text.to_string()).unwrap();
    }

    fn database(&self, connections: u32) {
        let spec = json!({"socket": self.path("data"), "owner": "foo", "connections": connections});
        self.resource(
            "foodb",
            &json!({"id": "foodb", "kind": "postgres-database", "needs": ["foo"], "spec": spec,
                "on_removal": "destroy"}),
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.as_postgres("pg_ctl", &["stop", "-m", "immediate", "-D", &self.path("data")]);
    }
}

#[test]
fn a_role_and_a_database_are_created_changed_kept_from_shrinking_and_destroyed() {
    let server = Server::start();
    fs::create_dir(server.path("resources")).unwrap();
    let binding = "[[provisioner]]\nname = 'postgres'\nuser = 'postgres'\n\
                   kinds = ['postgres-role', 'postgres-database']\n";
    fs::write(server.path("resources/provisioners.toml"), binding).unwrap();
    let plugin = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/dom-provisioner-postgres");
    let text = fs::read_to_string(plugin).unwrap();
    install(Path::new(&server.path("resources/dom-provisioner-postgres")), &text);
    let spec = json!({"socket": server.path("data")});
    server.resource(
        "foo",
        &json!({"id": "foo", "kind": "postgres-role", "spec": spec, "on_removal": "destroy",
            "sensitive": ["password"]}),
    );
    server.database(10);

    let (code, out, said) = server.provision(&[]);
    assert_eq!((code, &out["created"]), (Some(0), &json!(["foo", "foodb"])), "{out} {said}");
    assert_eq!(out["outputs"], json!({"foo": {"user": "foo"}, "foodb": {}}));
    let databases = "SELECT datname, datconnlimit, pg_get_userbyid(datdba) FROM pg_database \
                     WHERE NOT datistemplate AND datname <> 'postgres'";
    assert_eq!(server.sql(databases), "foodb|10|foo\n");
    assert_eq!(server.provision(&[]).1["unchanged"], json!(["foo", "foodb"]));

    server.database(20);
    let (code, plan, _) = server.provision(&["--plan", "--ask-plugins"]);
    let change = json!([{"id": "foodb", "op": "update", "text": "postgres-database foodb"}]);
    assert_eq!((code, &plan["calls"][0]["asked"]["changes"]), (Some(3), &change));
    assert_eq!(server.provision(&[]).1["changed"], json!(["foodb"]));
    assert_eq!(server.sql(databases), "foodb|20|foo\n");

    server.database(5);
    let refused = "a database keeps its 20 connections: 5 are fewer";
    let (_, plan, _) = server.provision(&["--plan", "--ask-plugins"]);
    assert_eq!(plan["calls"][0]["asked"]["changes"][0]["error"], refused);
    let (code, out, _) = server.provision(&[]);
    let failed = json!([{"id": "foodb", "provisioner": "postgres", "error": refused}]);
    assert_eq!((code, &out["failed"]), (Some(1), &failed));
    assert_eq!(server.sql(databases), "foodb|20|foo\n");

    for id in ["foo", "foodb"] {
        fs::remove_file(server.path(&format!("resources/{id}.json"))).unwrap();
    }
    let (code, out, said) = server.provision(&[]);
    assert_eq!((code, &out["destroyed"]), (Some(0), &json!(["foodb", "foo"])), "{out} {said}");
    assert_eq!(server.sql(databases), "");
    assert_eq!(server.sql("SELECT rolname FROM pg_roles WHERE rolname = 'foo'"), "");
}
