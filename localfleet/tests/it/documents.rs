//! The command lines of the documents: programs take each of them, and they work as printed.

mod command_lines;
mod executed;
mod with_daemons;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Command;
use localfleet::programs::command_lines as programs;

use command_lines::{Block, CommandLine, blocks_of, lines_of, spans_of};

/// What the documents run beside the programs of the project.
const NOT_OURS: [&str; 31] = [
    ".ci/fuzz",
    "b3sum",
    "cargo",
    "cat",
    "chown",
    "cmp",
    "cp",
    "curl",
    "debootstrap",
    "echo",
    "export",
    "find",
    "grep",
    "head",
    "install",
    "jq",
    "mkdir",
    "mmdebstrap",
    "mv",
    "rm",
    "rsync",
    "sed",
    "skopeo",
    "sleep",
    "ssh-keygen",
    "systemctl",
    "systemd-machine-id-setup",
    "systemd-nspawn",
    "tar",
    "tr",
    "useradd",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The documents for users, by their paths in the repository.
pub fn documents() -> BTreeMap<String, String> {
    let repository = repository();
    let in_docs = fs::read_dir(repository.join("docs")).unwrap();
    let paths = in_docs.map(|entry| entry.unwrap().path()).chain([repository.join("README.md")]);
    let documents = paths.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&repository).unwrap().display().to_string();
        (name, fs::read_to_string(path).unwrap())
    };
    documents.map(read).collect()
}

/// Returns what is wrong with a command line, if something is.
fn fault(line: &CommandLine, programs: &[Command]) -> Option<String> {
    let name = line.program();
    let Some(program) = programs.iter().find(|program| program.get_name() == name) else {
        return (!NOT_OURS.contains(&name)).then(|| format!("what is {name}?"));
    };
    // The words after the name are parsed as by the program itself.
    let parsed = program.clone().try_get_matches_from(&line.words);
    parsed.err().map(|error| error.to_string().lines().take(3).collect::<Vec<_>>().join(" "))
}

/// Returns the flags of a command in the running text that the program does not have. Such a
/// command need not be whole.
fn unknown_flags(words: &[String], programs: &[Command]) -> Vec<String> {
    let Some(program) = programs.iter().find(|program| program.get_name() == words[0]) else {
        return Vec::new();
    };
    let mut path = vec![program];
    for word in &words[1..] {
        let below = path.last().unwrap().find_subcommand(word);
        path.extend(below);
    }
    let has = |flag: &str| {
        let flags = path.iter().flat_map(|command| command.get_arguments());
        flags.into_iter().any(|argument| {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            argument.get_long().into_iter().chain(aliases).any(|long| long == flag)
        })
    };
    let flags = words.iter().filter_map(|word| word.strip_prefix("--"));
    let flags = flags.map(|flag| flag.split(['=', ',', ')']).next().unwrap_or_default());
    let is_unknown =
        |flag: &&str| !flag.is_empty() && !["help", "version"].contains(flag) && !has(flag);
    flags.filter(is_unknown).map(str::to_owned).collect()
}

/// The kinds of blocks. In those of the kinds `sh` and `console` are commands, and nowhere else.
const KINDS: [&str; 6] = ["sh", "console", "bash", "json", "toml", "text"];

fn faults(name: &str, text: &str) -> Vec<String> {
    let programs = programs();
    let is_wrong = |block: &Block<'_>| {
        let kind = block.kind.split(' ').next().unwrap_or_default();
        let has_prompt = block.lines.iter().any(|(_, line)| line.starts_with("$ "));
        !KINDS.contains(&kind) || (has_prompt && kind != "console")
    };
    let of_blocks = blocks_of(text).into_iter().filter(is_wrong);
    let of_blocks =
        of_blocks.map(|block| format!("{name}:{}: a block of kind `{}`", block.number, block.kind));
    let of_lines = lines_of(text).into_iter().filter_map(|line| {
        let why = fault(&line, &programs)?;
        Some(format!("{name}:{}: {}: {why}", line.number, line.words.join(" ")))
    });
    let of_spans = spans_of(text).into_iter().flat_map(|(number, words)| {
        let unknown = unknown_flags(&words, &programs);
        let text = words.join(" ");
        unknown.into_iter().map(move |flag| format!("{name}:{number}: {text}: no flag --{flag}"))
    });
    of_blocks.chain(of_lines).chain(of_spans).collect()
}

#[test]
fn programs_take_the_command_lines_of_the_documents() {
    let documents = documents();
    let faults: Vec<String> =
        documents.iter().flat_map(|(name, text)| faults(name, text)).collect();
    assert_eq!(faults, Vec::<String>::new(), "\n{}\n", faults.join("\n"));
    let ours: Vec<Command> = programs().into();
    let count = documents
        .values()
        .flat_map(|text| lines_of(text))
        .filter(|line| ours.iter().any(|program| program.get_name() == line.program()));
    let count = count.count();
    assert!(count > 100, "{count} command lines were found");
}

#[test]
fn shells_can_read_the_scripts_of_the_documents() {
    for (name, text) in documents() {
        for block in blocks_of(&text).into_iter().filter(|block| block.kind == "bash") {
            let lines: Vec<&str> = block.lines.iter().map(|(_, line)| *line).collect();
            let shell = lines[0].rsplit('/').next().unwrap();
            let words = ["-n", "-c", &lines.join("\n")];
            let output = std::process::Command::new(shell).args(words).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}:{}: {said}", block.number);
        }
    }
}

#[test]
fn a_misspelt_flag_command_or_program_is_found() {
    let block = |kind: &str, text: &str| format!("Text.\n\n```{kind}\n{text}\n```\n");
    let table = [
        (block("sh", "domtool list-subs --status synced  # all"), 0),
        (block("sh", "domtool list-subs --statuss synced"), 1),
        (block("", "domtool list-subs"), 1),
        (block("text", "$ domtool list-subs"), 1),
        (block("sh", "domtol list-subs"), 1),
        (block("console", "$ imagetool tar web/1 |\n    imagetool scan-filtr f -\nother"), 1),
        (block("console", "# domtool cert show DIR; echo $?\n 3"), 0),
        (block("sh", "sudo_is_unknown -u x"), 1),
        (block("sh", "for_all=1 domtool pause 'web*' --until 2h \\\n    --why 'a b'"), 0),
        (block("text", "domtool is not run --here"), 0),
        ("Run `domtool pause HOST --unti 2h` now.".to_owned(), 1),
        ("Run `domtool pause HOST --until 2h` or `rsync --x`.".to_owned(), 0),
    ];
    for (text, count) in table {
        let faults = faults("a.md", &text);
        assert_eq!(faults.len(), count, "{text}{faults:?}");
    }
}
