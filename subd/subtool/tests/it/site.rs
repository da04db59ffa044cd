//! A directory of resources, with plugins that are shell scripts.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// A directory of resources and a state directory.
pub struct Site {
    directory: tempfile::TempDir,
}

/// How `subtool provision` ended.
#[derive(Debug, PartialEq)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: Value,
    pub said: String,
}

impl Ended {
    pub fn of(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            out: serde_json::from_slice(&output.stdout).unwrap_or_default(),
            said: String::from_utf8(output.stderr.clone()).unwrap(),
        }
    }
}

impl Site {
    /// A site whose kind `k` is made by the plugin `shell`, which runs `script` as root.
    pub fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let site = Self { directory };
        fs::create_dir(site.resources()).unwrap();
        site.write("provisioners.toml", &binding("shell", "k", "root"));
        site.plugin("shell", script);
        site
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn resources(&self) -> PathBuf {
        self.path("resources")
    }

    /// Writes a file beside the resources.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.resources().join(name), text).unwrap();
    }

    /// Writes a resource of the kind `k`, with the further fields.
    pub fn resource(&self, id: &str, fields: &Value) {
        let mut all = fields.clone();
        all["id"] = json!(id);
        if all.get("kind").is_none() {
            all["kind"] = json!("k");
        }
        self.write(&format!("{id}.json"), &all.to_string());
    }

    pub fn remove(&self, id: &str) {
        fs::remove_file(self.resources().join(format!("{id}.json"))).unwrap();
    }

    /// Makes a plugin of a script; `$log` is the file `log` of the site. A child writes the file:
    /// one that this process had open for writing could not be run while another thread forks.
    pub fn plugin(&self, name: &str, script: &str) {
        let to = self.resources().join(format!("dom-provisioner-{name}"));
        let text = format!("#!/bin/sh\nlog='{}'\n{script}\n", self.path("log").display());
        let mut install = Command::new("install")
            .args(["-m", "755", "/dev/stdin"])
            .arg(to)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(install.wait().unwrap().success());
    }

    /// `subtool provision` with the further words.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_subtool"));
        command.arg("provision").arg("--local").arg(self.resources());
        command.arg("--state").arg(self.path("state")).args(words);
        command.env("HOME", self.directory.path()).env("SECRET", "of-the-caller");
        command
    }

    pub fn run(&self, words: &[&str]) -> Ended {
        Ended::of(&self.command(words).args(["--format", "json"]).output().unwrap())
    }

    pub fn spawn(&self) -> std::process::Child {
        let mut command = self.command(&["--format", "json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What plugins wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn state(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("state/state.json")).unwrap()).unwrap()
    }

    pub fn has(&self, name: &str) -> bool {
        Path::new(&self.path(name)).exists()
    }
}

/// A binding of one kind, for the file of the bindings.
pub fn binding(name: &str, kind: &str, user: &str) -> String {
    format!(
        "[[provisioner]]\nname = '{name}'\nkinds = ['{kind}']\nuser = '{user}'\ntimeout_s = 60\n"
    )
}

/// Answers with success, and logs the verb and the key.
pub const LOGS: &str = r#"
key=$(sed 's/.*"key":"\([0-9a-f]*\)","desired.*/\1/')
echo "$1 $key" >>"$log"
echo '{"tasks": [{"success": {}}]}'"#;
