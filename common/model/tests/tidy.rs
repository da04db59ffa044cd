//! Rules of the workspace that the compiler does not know.
//!
//! Each rule is a function from text to complaints, so that it can be seen to fail.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The folders of the crates of this workspace, in the order of their layers. A crate may depend
/// only on those that are named behind it.
const MAY_DEPEND: [(&str, &[&str]); 27] = [
    ("common/no-schema", &[]),
    ("common/model", &["no-schema"]),
    ("common/provisioning", &["model"]),
    ("common/tasks", &["model"]),
    ("common/rollouts", &["model", "provisioning", "tasks"]),
    ("common/api", &["model", "provisioning", "rollouts", "tasks"]),
    ("common/system", &["model"]),
    ("common/database", &["model"]),
    ("common/certs", &["api", "model", "system"]),
    ("common/rpc", &["api", "model", "provisioning", "rollouts", "system", "tasks"]),
    ("common/daemon", &["api", "model", "provisioning", "rpc", "system"]),
    ("common/tool", &["api", "daemon", "model", "rpc", "system"]),
    ("common/testing", &["api", "model"]),
    ("common/web", &["rpc"]),
    (
        "dominator",
        &["api", "daemon", "database", "model", "provisioning", "rollouts", "rpc", "system"],
    ),
    (
        "dominator/domtool",
        &[
            "api",
            "certs",
            "daemon",
            "dominator",
            "model",
            "provisioning",
            "rollouts",
            "rpc",
            "system",
            "tasks",
            "tool",
        ],
    ),
    ("dominator/mdbd", &["api", "daemon", "model", "rpc", "system", "web"]),
    ("filegen", &["api", "certs", "daemon", "database", "model", "rpc", "system", "web"]),
    ("filegen/filegen-client", &["api", "daemon", "filegen", "model", "rpc", "system", "tool"]),
    ("fuzz", &["api", "imagetool", "model", "provisioning", "rollouts", "rpc", "tasks"]),
    ("imageserver", &["api", "daemon", "model", "provisioning", "rpc", "system", "tasks", "tool"]),
    (
        "imagetool",
        &["api", "certs", "daemon", "model", "provisioning", "rpc", "system", "tasks", "tool"],
    ),
    ("localfleet", EVERYTHING),
    ("subd", &["api", "daemon", "model", "provisioning", "rpc", "system", "tasks"]),
    ("subd/fs2objectcache", &["api", "daemon", "model", "rpc", "subd", "system", "tool"]),
    ("subd/provisioners", &["model", "provisioning"]),
    ("subd/subtool", &["api", "daemon", "model", "provisioning", "rpc", "system", "tool"]),
];

/// What the crate that sees everything may depend on.
const EVERYTHING: &[&str] = &[
    "api",
    "certs",
    "daemon",
    "dominator",
    "domtool",
    "filegen",
    "filegen-client",
    "fs2objectcache",
    "imageserver",
    "imagetool",
    "mdbd",
    "model",
    "provisioning",
    "rollouts",
    "rpc",
    "subd",
    "subtool",
    "system",
    "tasks",
    "testing",
    "tool",
];

/// What tests may depend on besides.
const TESTS: &[&str] = &["certs", "daemon", "domtool", "mdbd", "tasks", "testing"];

/// Crates that decide and do not act, whole: every file of theirs is a core.
const PURE_CRATES: [&str; 5] = [
    "common/api/src/",
    "common/model/src/",
    "common/provisioning/src/",
    "common/rollouts/src/",
    "common/tasks/src/",
];

/// What pure crates must not depend on.
const BANNED_IN_PURE_CRATES: [&str; 9] =
    ["fs-err", "governor", "h2", "hyper", "nix", "rustix", "rustls", "tokio", "tracing"];

/// The mark of a module that decides and does not act.
const MARK: &str = "// tidy: core";

/// What a core must not name.
const BANNED_IN_CORES: [&str; 15] = [
    "tokio",
    "std::fs",
    "fs_err",
    "std::net",
    "std::process",
    "std::env",
    "std::thread",
    "Instant::now",
    "SystemTime",
    "rand",
    "tracing",
    "HashMap",
    "HashSet",
    "hyper",
    "nix",
];

/// Modules that must be cores, with all below them; so must everything in a folder `core`.
const CORES: &[&str] = &[
    "imageserver/src/store/layout",
    "imageserver/src/store/record",
    "subd/src/fetch/policy",
    "subd/src/limits/rates",
    "subd/src/root/used_paths",
    "subd/src/trust/verification",
];

/// Names of files that have no subject.
const NO_SUBJECT: [&str; 5] = ["utils.rs", "util.rs", "helpers.rs", "misc.rs", "mod.rs"];

const FILE_LINES_MAX: usize = 900;

const LINE_COLUMNS_MAX: usize = 100;

/// The most lines of a function, from `fn` to its closing brace. Tests are exempt.
const FUNCTION_LINES_MAX: usize = 70;

/// The mark above a function that is one flat table and may have more lines.
const TABLE_MARK: &str = "// tidy: table";

/// Words that once named modules and types, and that nobody could guess.
const METAPHORS: [&str; 11] = [
    "board",
    "desk",
    "door",
    "guest",
    "harvest",
    "herd",
    "keeper",
    "remains",
    "seat",
    "undertaking",
    "wounds",
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// All Rust files of the workspace by their path in it.
fn sources() -> BTreeMap<String, String> {
    let root = workspace();
    let mut sources = BTreeMap::new();
    let skip = |name: &str| name == "target" || (name.starts_with('.') && name.len() > 1);
    let walk = walkdir::WalkDir::new(&root)
        .into_iter()
        .filter_entry(|entry| entry.depth() == 0 || !skip(&entry.file_name().to_string_lossy()));
    for entry in walk {
        let entry = entry.unwrap();
        if entry.path().extension().is_some_and(|extension| extension == "rs") {
            let path = entry.path().strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            sources.insert(path, std::fs::read_to_string(entry.path()).unwrap());
        }
    }
    assert!(sources.contains_key("common/model/tests/tidy.rs"), "{:?}", sources.keys());
    sources
}

/// Complaints of `rule` over all sources.
fn complaints(rule: impl Fn(&str, &str) -> Vec<String>) -> Vec<String> {
    sources().iter().flat_map(|(path, text)| rule(path, text)).collect()
}

/// Rules of dependencies: `manifest` is the text of the `Cargo.toml` in `folder`.
fn dependencies(folder: &str, manifest: &str) -> Vec<String> {
    let manifest: toml::Table = manifest.parse().unwrap();
    let Some((_, allowed)) = MAY_DEPEND.iter().find(|(known, _)| *known == folder) else {
        return vec![format!("{folder}: add this crate to MAY_DEPEND")];
    };
    let name = |folder: &str| folder.rsplit('/').next().unwrap().to_owned();
    let crates: BTreeSet<String> = MAY_DEPEND.iter().map(|(folder, _)| name(folder)).collect();
    let is_pure = PURE_CRATES.iter().any(|pure| pure.strip_suffix("/src/") == Some(folder));
    let mut complaints = Vec::new();
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        let Some(table) = manifest.get(section).and_then(toml::Value::as_table) else { continue };
        let of_tests = if section == "dev-dependencies" { TESTS } else { &[] };
        for (key, value) in table {
            let package = value.get("package").and_then(toml::Value::as_str).unwrap_or(key);
            let is_allowed = allowed.contains(&package) || of_tests.contains(&package);
            if crates.contains(package) && !is_allowed {
                complaints.push(format!("{folder} must not depend on {package}"));
            }
            let acts = section == "dependencies" && BANNED_IN_PURE_CRATES.contains(&package);
            if is_pure && acts {
                complaints.push(format!("{folder} decides only, and must not depend on {package}"));
            }
        }
    }
    complaints
}

/// `text` without comments; string literals stay.
fn code_of(text: &str) -> String {
    let mut code = String::new();
    for line in text.lines() {
        let mut quoted = false;
        let mut before = ' ';
        let mut end = line.len();
        for (at, character) in line.char_indices() {
            match character {
                '"' if before != '\\' && before != '\'' => quoted = !quoted,
                '/' if !quoted && line[at + 1..].starts_with('/') => {
                    end = at;
                    break;
                }
                _ => {}
            }
            before = character;
        }
        code.push_str(&line[..end]);
        code.push('\n');
    }
    code
}

/// True if `code` has `word` and neither side of it goes on.
fn names(code: &str, word: &str) -> bool {
    let inside = |character: char| character.is_alphanumeric() || character == '_';
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(inside) && !after.is_some_and(inside)
    })
}

fn is_marked(text: &str) -> bool {
    text.lines().any(|line| line == MARK)
}

fn core_names_no_world(path: &str, text: &str) -> Vec<String> {
    let is_pure = PURE_CRATES.iter().any(|pure| path.starts_with(pure));
    let is_pure = is_pure && !path.ends_with("/tests.rs");
    if !is_marked(text) && !is_pure {
        return Vec::new();
    }
    // `use std::{fs, ..}` would slip through the whole words.
    let code = code_of(text).replace("use std::{", "std::{");
    let grouped = code.contains("std::{").then_some("std::{");
    let banned = BANNED_IN_CORES.into_iter().filter(|word| names(&code, word));
    banned.chain(grouped).map(|word| format!("{path} is a core and names {word}")).collect()
}

fn must_be_core(path: &str) -> bool {
    let tests = path.ends_with("/tests.rs") || path.ends_with("/generate.rs");
    let listed = CORES.iter().any(|core| {
        path.strip_prefix(core).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    });
    let folder = path.contains("/core/") || path.ends_with("/core.rs");
    (listed || folder) && !tests
}

fn cores_are_marked(path: &str, text: &str) -> Vec<String> {
    let missing = must_be_core(path) && !is_marked(text);
    missing.then(|| format!("{path} must have the line `{MARK}`")).into_iter().collect()
}

/// A crate that does not take over the lints of the workspace has none.
fn has_lints(folder: &str, manifest: &str) -> Vec<String> {
    let missing = !manifest.contains("\n[lints]\nworkspace = true\n");
    missing.then(|| format!("{folder} must have the lints of the workspace")).into_iter().collect()
}

fn has_header(path: &str, text: &str) -> Vec<String> {
    let missing = !text.starts_with("//!");
    missing.then(|| format!("{path} must begin with //!")).into_iter().collect()
}

fn has_subject(path: &str, _text: &str) -> Vec<String> {
    let name = path.rsplit('/').next().unwrap();
    let bad = NO_SUBJECT.contains(&name);
    bad.then(|| format!("{path}: name the file by its subject")).into_iter().collect()
}

fn is_short(path: &str, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let long = lines > FILE_LINES_MAX;
    long.then(|| format!("{path} has {lines} lines")).into_iter().collect()
}

fn is_narrow(path: &str, text: &str) -> Vec<String> {
    // Tables, which rustfmt leaves alone, may be wide.
    let mut skipped = false;
    let mut complaints = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim() == "#[rustfmt::skip]" {
            skipped = true;
        }
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX && !skipped {
            complaints.push(format!("{path}:{} has {columns} columns", index + 1));
        }
        if skipped && (line.trim() == "];" || line.trim_end().ends_with("];")) {
            skipped = false;
        }
    }
    complaints
}

/// The functions of a file in `src` that have too many lines, each as path and name.
fn long_functions(path: &str, text: &str) -> Vec<String> {
    if !path.contains("src/") || path.ends_with("/tests.rs") || path.contains("/tests/") {
        return Vec::new();
    }
    let product = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    let lines: Vec<&str> = product.lines().collect();
    let mut long = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let visible = code.strip_prefix("pub").unwrap_or(code).trim_start();
        let visible = match visible.strip_prefix('(') {
            Some(rest) => rest.split_once(") ").map_or("", |(_, rest)| rest),
            None => visible,
        };
        let mut words = visible.split(' ').skip_while(|word| ["async", "const"].contains(word));
        if words.next() != Some("fn") {
            continue;
        }
        let name = words.next().unwrap_or_default().split(['(', '<']).next().unwrap();
        let signature_end = lines[start..].iter().find(|line| line.ends_with(['{', ';', '}']));
        if signature_end.is_none_or(|line| !line.ends_with('{')) {
            continue;
        }
        let is_end = |line: &&str| line.strip_prefix(indent) == Some("}");
        let length = 1 + lines[start..].iter().take_while(|line| !is_end(line)).count();
        // The lines directly above: attributes and comments.
        let above = lines[..start].iter().rev().map(|line| line.trim());
        let mut above =
            above.take_while(|line| !line.is_empty() && !line.ends_with(['}', '{', ';']));
        if length > FUNCTION_LINES_MAX && !above.any(|line| line == TABLE_MARK) {
            long.push(format!("{path} {name}"));
        }
    }
    long
}

/// Names of files and types that are metaphors.
fn names_are_plain(path: &str, text: &str) -> Vec<String> {
    let mut named: Vec<String> =
        path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    for line in text.lines() {
        let words: Vec<&str> = line.split([' ', '(', '<', '{', ';', ':']).collect();
        if let Some(at) = words.iter().position(|word| ["struct", "enum", "trait"].contains(word))
            && at <= 3
            && let Some(name) = words.get(at + 1)
        {
            named.push(name.to_lowercase());
        }
    }
    let metaphors = named.iter().filter(|name| METAPHORS.contains(&name.as_str()));
    metaphors.map(|name| format!("{path}: `{name}` is a metaphor")).collect()
}

/// Paths of this workspace that a document names and that do not exist.
fn missing_paths(document: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let quoted = document.split('`').skip(1).step_by(2);
    let is_path = |text: &&str| {
        let known = ["common/", "dominator/", "imageserver/", "imagetool/", "localfleet/", "subd/"];
        let plain = |character: char| character.is_alphanumeric() || "/_-.".contains(character);
        known.iter().any(|folder| text.starts_with(folder)) && text.chars().all(plain)
    };
    quoted.filter(is_path).filter(|path| !exists(path)).map(str::to_owned).collect()
}

#[track_caller]
fn assert_none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn dependencies_point_one_way() {
    let root: toml::Table =
        std::fs::read_to_string(workspace().join("Cargo.toml")).unwrap().parse().unwrap();
    let mut folders = BTreeSet::new();
    for member in root["workspace"]["members"].as_array().unwrap() {
        match member.as_str().unwrap().strip_suffix("/*") {
            None => {
                folders.insert(member.as_str().unwrap().to_owned());
            }
            Some(parent) => {
                for entry in std::fs::read_dir(workspace().join(parent)).unwrap() {
                    let name = entry.unwrap().file_name().into_string().unwrap();
                    folders.insert(format!("{parent}/{name}"));
                }
            }
        }
    }
    let known: BTreeSet<String> =
        MAY_DEPEND.iter().map(|(folder, _)| (*folder).to_owned()).collect();
    assert_eq!(folders, known);
    for folder in folders {
        let manifest = workspace().join(&folder).join("Cargo.toml");
        let manifest = std::fs::read_to_string(manifest).unwrap();
        assert_none(&dependencies(&folder, &manifest));
        assert_none(&has_lints(&folder, &manifest));
    }
}

#[test]
fn cores_name_no_clock_disk_network_or_chance() {
    assert_none(&complaints(core_names_no_world));
    assert_none(&complaints(cores_are_marked));
    let all = sources();
    for core in CORES {
        assert!(all.contains_key(&format!("{core}.rs")), "{core} is listed and does not exist");
    }
}

#[test]
fn files_have_a_header_and_a_subject_and_a_limit() {
    let rules: [fn(&str, &str) -> Vec<String>; 5] =
        [has_header, has_subject, is_short, is_narrow, names_are_plain];
    assert_none(&complaints(|path, text| rules.iter().flat_map(|rule| rule(path, text)).collect()));
}

#[test]
fn functions_are_short() {
    assert_none(&complaints(long_functions));
}

/// What the agent must not be built of: what makes certificates, manual pages or schemas, or
/// decrypts keys.
const BANNED_IN_SUBD: [&str; 8] =
    ["aes", "clap_complete", "clap_mangen", "rcgen", "rsa", "schemars", "ssh-cipher", "ssh-key"];

/// The most crates that subd is built of.
const SUBD_CRATES_MAX: usize = 190;

#[test]
fn the_agent_is_built_of_little() {
    let tree = ["tree", "-p", "subd", "-e", "normal,build", "--prefix", "none", "--locked"];
    let output = std::process::Command::new(env!("CARGO"))
        .args(tree)
        .arg("--offline")
        .current_dir(workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let crates: BTreeSet<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    let name = |line: &&str| line.split(' ').next().unwrap_or_default().to_owned();
    let names: BTreeSet<String> = crates.iter().map(name).collect();
    assert!(names.contains("ring"), "{names:?}");
    for banned in BANNED_IN_SUBD {
        assert!(!names.contains(banned), "subd must not be built of {banned}");
    }
    assert!(crates.len() <= SUBD_CRATES_MAX, "subd is built of {} crates", crates.len());
}

#[test]
fn documents_name_paths_that_exist() {
    let root = workspace();
    for document in ["CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/TESTING.md"] {
        let text = std::fs::read_to_string(root.join(document)).unwrap();
        let missing = missing_paths(&text, |path| root.join(path).exists());
        assert_eq!(missing, [""; 0], "{document}");
    }
    assert_eq!(missing_paths("`subd/src/x.rs` and `a b`, `web/1`", |_| false), ["subd/src/x.rs"]);
}

#[test]
fn each_rule_is_seen_to_fail() {
    let one = |text: &str| vec![text.to_owned()];
    assert_eq!(
        dependencies("subd", "[dependencies]\nrpc.workspace = true\ndominator.workspace = true"),
        one("subd must not depend on dominator")
    );
    assert_eq!(
        dependencies("subd", "[dependencies]\ncerts.workspace = true"),
        one("subd must not depend on certs")
    );
    assert_eq!(dependencies("subd", "[dev-dependencies]\ncerts.workspace = true"), [""; 0]);
    assert_eq!(
        dependencies(
            "common/api",
            "[dev-dependencies]\nx = { package = \"subd\", path = \"../subd\" }"
        ),
        one("common/api must not depend on subd")
    );
    assert_eq!(
        dependencies("common/model", "[dependencies]\ntokio.workspace = true"),
        one("common/model decides only, and must not depend on tokio")
    );
    assert_eq!(
        dependencies("newcomer", "[dependencies]"),
        one("newcomer: add this crate to MAY_DEPEND")
    );

    let core = |code: &str| core_names_no_world("a.rs", &format!("//! A.\n{MARK}\n{code}\n"));
    for word in BANNED_IN_CORES {
        assert_eq!(
            core(&format!("use {word}::x;")),
            one(&format!("a.rs is a core and names {word}"))
        );
    }
    assert_eq!(
        core_names_no_world("common/model/src/a.rs", "use tokio::x;"),
        one("common/model/src/a.rs is a core and names tokio")
    );
    assert_eq!(core("use std::{fs, io};"), one("a.rs is a core and names std::{"));
    assert_eq!(core("let a = \"//\"; tokio::x();"), one("a.rs is a core and names tokio"));
    for harmless in ["// tokio", "let operand = 1;", "/// Of `std::fs`.", "x(); // rand", "unix"] {
        assert_eq!(core(harmless), Vec::<String>::new(), "{harmless}");
    }
    assert_eq!(core_names_no_world("a.rs", "//! A.\nuse tokio::x;"), Vec::<String>::new());

    for path in ["subd/src/root/used_paths.rs", "subd/src/core/scan.rs"] {
        assert_eq!(
            cores_are_marked(path, "//! A.\n"),
            one(&format!("{path} must have the line `{MARK}`"))
        );
        assert_eq!(cores_are_marked(path, &format!("//! A.\n{MARK}\n")), Vec::<String>::new());
    }
    assert_eq!(
        cores_are_marked("subd/src/root/used_paths_by.rs", "//! A.\n"),
        Vec::<String>::new()
    );

    assert_eq!(has_lints("a", "[package]\n"), one("a must have the lints of the workspace"));

    assert_eq!(has_header("a.rs", "use x;"), one("a.rs must begin with //!"));
    assert_eq!(has_subject("a/utils.rs", ""), one("a/utils.rs: name the file by its subject"));
    assert_eq!(has_subject("a/mod.rs", ""), one("a/mod.rs: name the file by its subject"));
    assert_eq!(is_short("a.rs", &"\n".repeat(901)), one("a.rs has 901 lines"));
    assert_eq!(is_narrow("a.rs", &"x".repeat(101)), one("a.rs:1 has 101 columns"));
    assert_eq!(names_are_plain("a/desk.rs", ""), one("a/desk.rs: `desk` is a metaphor"));
    assert_eq!(names_are_plain("a.rs", "pub struct Seat {"), one("a.rs: `seat` is a metaphor"));
    assert_eq!(is_narrow("a.rs", &"ä".repeat(100)), Vec::<String>::new());

    let function = |above: &str, lines: usize| {
        let body = "        x();\n".repeat(lines - 2);
        let text =
            format!("impl A {{\n{above}    pub(super) async fn a(x: u8) {{\n{body}    }}\n}}\n");
        long_functions("a/src/b.rs", &text)
    };
    assert_eq!(function("", 71), one("a/src/b.rs a"));
    assert_eq!(function("", 70), Vec::<String>::new());
    assert_eq!(function(&format!("    {TABLE_MARK}\n    #[must_use]\n"), 71), [""; 0]);
    assert_eq!(function(&format!("    {TABLE_MARK}\n\n"), 71), one("a/src/b.rs a"));
}
