//! The commands of README.md, and those of docs/PROTOCOL.md with curl: they are run as printed,
//! with real daemons.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use localfleet::fleet::daemon_process::Daemon;
use tempfile::TempDir;
use testing::{eventually, exit_and_output};

use super::documents;
use crate::converges::programs;

/// The address of the image server in the documents.
const DOCUMENTED: &str = "server1:6971";

/// Returns the fenced block of a document that contains `text`.
fn block(document: &str, text: &str) -> String {
    let document = &documents()[document];
    let mut parts = document.split("```").skip(1).step_by(2);
    let block = parts.find(|block| block.contains(text)).unwrap();
    block.split_once('\n').unwrap().1.to_owned()
}

/// An image server and a dominator with the certificates of README.md.
struct Site {
    directory: TempDir,
    bin: PathBuf,
    imageserver: (Daemon, String),
    dominator: (Daemon, String),
}

impl Site {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_owned();
        let bin = programs(&path);
        fs::write(path.join("mdb"), r#"[{"Hostname": "web1"}]"#).unwrap();
        let commands = block("README.md", "domtool cert ca ./ca");
        let commands = commands.replace("/var/lib/Dominator/mdb", "./mdb");
        let (code, _, said) = exit_and_output(&shell(&path, &bin, &commands));
        assert_eq!(code, Some(0), "{said}");
        let imageserver =
            start(&path, &bin, "imageserver", &["--tls", "server1", "--data", "data"]);
        let images = format!("localhost:{}", imageserver.1);
        let words = ["--tls", "dom1", "--mdb", "mdb", "--state", "state", "--imageserver", &images];
        let dominator = start(&path, &bin, "dominator", &words);
        Self { directory, bin, imageserver, dominator }
    }

    /// Runs commands; returns their exit code, output and messages.
    fn run(&self, commands: &str) -> (Option<i32>, String, String) {
        exit_and_output(&shell(self.directory.path(), &self.bin, commands))
    }
}

/// Runs `commands` in `directory`, which has the home of their user.
fn shell(directory: &Path, bin: &Path, commands: &str) -> std::process::Output {
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", commands]).current_dir(directory).env("PATH", path);
    shell.env("HOME", directory.join("home")).env("USER", "ann").output().unwrap()
}

/// Starts a daemon on any port of 127.0.0.1; returns the port too. Words that name files there are
/// relative to `directory`.
fn start(directory: &Path, bin: &Path, name: &str, words: &[&str]) -> (Daemon, String) {
    let is_file = |word: &str| !word.starts_with("--") && !word.contains(':');
    let absolute = |word: &&str| match is_file(word) {
        true => directory.join(word).into_os_string(),
        false => (*word).into(),
    };
    let listen = ["--listen", "127.0.0.1:0"].map(Into::into);
    let words = words.iter().map(absolute).chain(listen).collect();
    let log = directory.join(format!("{name}.log"));
    let mut daemon = Daemon::start(name, &bin.join(name), words, log.clone()).unwrap();
    let port = eventually("the daemon listens", || {
        daemon.check().unwrap();
        let log = fs::read_to_string(&log).unwrap_or_default();
        let (_, rest) = log.split_once("listening on https://127.0.0.1:")?;
        rest.split_once('\n').map(|(port, _)| port.trim().to_owned())
    });
    (daemon, port)
}

#[test]
fn tools_on_the_machines_of_the_daemons_work_with_the_certificates_of_the_readme() {
    let mut site = Site::start();
    let (images, dominator) = (&site.imageserver.1, &site.dominator.1);
    for (host, command) in [
        ("localhost", format!("imagetool --imageserver localhost:{images} list")),
        ("localhost", format!("domtool --dominator localhost:{dominator} list-subs")),
    ] {
        let (code, _, said) = site.run(&command);
        assert_eq!(code, Some(0), "{host}: {command}: {said}");
    }
    // The error names the cause, which is not the address.
    for command in [
        format!("imagetool --imageserver 127.0.0.1:{images} list"),
        format!("domtool --dominator 127.0.0.1:{dominator} list-subs"),
        format!("subtool --subd 127.0.0.1:{dominator} poll"),
    ] {
        let (code, _, said) = site.run(&command);
        assert_eq!(code, Some(1), "{command}: {said}");
        assert!(said.contains(", localhost, and not for 127.0.0.1: use a name that it"), "{said}");
        assert!(said.contains("hint: something answers at this address, so"), "{said}");
    }
    site.dominator.0.stop().unwrap();
    site.imageserver.0.stop().unwrap();
}

/// Replaces each number, with its fraction and separators, by `N`.
fn without_numbers(text: &str) -> String {
    let mut shown = String::new();
    for character in text.chars() {
        match character {
            '0'..='9' if shown.ends_with('N') => {}
            '0'..='9' => shown.push('N'),
            '.' | ',' if shown.ends_with('N') => {}
            // A column is as wide as its number.
            ' ' if shown.ends_with(' ') => {}
            _ => shown.push(character),
        }
    }
    shown
}

#[test]
fn the_sessions_of_the_readme_are_as_printed() {
    let mut site = Site::start();
    let (images, dominator) = (&site.imageserver.1, &site.dominator.1);
    let at = |path: &str| site.directory.path().join(path);
    let config =
        format!("imageserver = \"localhost:{images}\"\ndominator = \"localhost:{dominator}\"\n");
    fs::write(at("home/.config/dominator/config.toml"), config).unwrap();
    fs::create_dir_all(at("tree/bin")).unwrap();
    fs::create_dir_all(at("tree/etc")).unwrap();
    fs::write(at("tree/etc/motd"), "welcome\n").unwrap();
    fs::write(at("tree/bin/web"), vec![7; 35_700]).unwrap();
    for (command, expected) in sessions(&block("README.md", "$ imagetool add")) {
        if let Some(name) = command.strip_prefix("cat ") {
            fs::write(at(name), expected).unwrap();
            continue;
        }
        let (code, printed, said) = site.run(&command);
        assert_eq!(code, Some(0), "{command}: {said}");
        let added = said.lines().filter(|line| line.starts_with("Added"));
        let shown = added.map(|line| format!("{line}\n")).collect::<String>() + &printed;
        assert_eq!(without_numbers(&shown), without_numbers(&expected), "{command}");
    }
    fs::write(at("FILE"), r#"[{"Hostname": "web1", "RequiredImage": "web/1"}]"#).unwrap();
    let commands = block("README.md", "domtool list-subs ");
    for line in commands.lines() {
        let (command, _) = line.split_once(" # ").unwrap();
        let command = command.replace("HOST", "web1");
        // This one ends only when it is told to.
        let command =
            command.replace("domtool events --follow", "timeout 2 domtool events --follow");
        let (code, printed, said) = site.run(&command);
        let expected: &[i32] = match &command {
            followed if followed.starts_with("timeout") => &[124],
            // The machine is away: what it has is not known.
            plan if plan.contains(" plan ") => &[3],
            _ => &[0],
        };
        assert!(code.is_some_and(|code| expected.contains(&code)), "{command}: {code:?}: {said}");
        assert!(printed.contains("web1") || command.contains(" disable-updates "), "{printed}");
    }
    site.dominator.0.stop().unwrap();
    site.imageserver.0.stop().unwrap();
}

/// Splits a block of the kind `console` into commands and what they print.
fn sessions(block: &str) -> Vec<(String, String)> {
    let mut sessions: Vec<(String, String)> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), sessions.last_mut()) {
            (Some(command), _) => sessions.push((command.to_owned(), String::new())),
            (None, Some((_, printed))) => printed.push_str(&format!("{line}\n")),
            (None, None) => {}
        }
    }
    sessions
}

/// Returns what curl prints without what differs each time.
fn comparable(printed: &str) -> String {
    let printed = printed.replace('\r', "");
    let lines = printed.trim().lines().map(|line| match line.starts_with("date: ") {
        true => "date: ...",
        false => line.trim_end(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn calls_with_curl_are_answered_as_the_document_says() {
    let mut site = Site::start();
    symlink("home/.config/dominator/tls", site.directory.path().join("tls")).unwrap();
    let connect = format!("{DOCUMENTED}:127.0.0.1:{}", site.imageserver.1);
    let mut before = format!("curl() {{ command curl -sS --connect-to {connect} \"$@\"; }}\n");
    let sessions = sessions(&block("docs/PROTOCOL.md", "$ curl -i"));
    assert!(sessions.len() > 5, "{sessions:?}");
    for (command, expected) in sessions {
        if !command.starts_with("curl") {
            before.push_str(&format!("{command}\n"));
            continue;
        }
        let (code, printed, said) = site.run(&format!("{before}{command}"));
        assert_eq!(code, Some(0), "{command}: {said}");
        assert_eq!(comparable(&printed), comparable(&expected), "{command}");
    }
    site.dominator.0.stop().unwrap();
    site.imageserver.0.stop().unwrap();
}
