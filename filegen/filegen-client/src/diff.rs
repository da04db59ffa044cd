//! `filegen-client diff`: on which machines another configuration would change files.
//!
//! Of a secret, digests are told and nothing else.

use std::collections::BTreeMap;
use std::path::Path;

use api::file_generator::{GeneratedFile, Generator, GetContents, GetContentsRequest};
use daemon::EXIT_DONE;
use filegen::generators::{GeneratorSet, Subject};
use filegen::loading::load;
use filegen::revisions::Kept;
use model::display::counted;
use model::escape::escape;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use rpc::client::Client;
use serde::Serialize;
use tool::{EXIT_DIFFERENT, Format, Output};

use super::files::{LIMIT, batch, generate, machines, request};
use super::show::generators;
use super::{SERVER, Servers, ToolError};

/// How many machines of a path a table names.
const NAMED: usize = 5;

/// How many lines of the former and of the new content a table shows.
const LINES: usize = 10;

/// Digits of a digest that a table shows.
const DIGITS: usize = 12;

/// What would become of a path.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Change {
    /// It is made no more.
    Removed,
    /// It is made otherwise by a program, web server or authority: nothing is made to compare it.
    NotCompared,
    Compared {
        /// The machines that get other content, or content where nothing could be made.
        changed: BTreeMap<String, Digests>,
        /// The machines for which it cannot be made, with the reason.
        failed: BTreeMap<String, String>,
    },
}

/// The content of a machine.
#[derive(Serialize)]
struct Digests {
    /// `None` if nothing can be made now.
    now: Option<ObjectId>,
    then: ObjectId,
}

/// By path, what changes in the file of one machine, for a table: lines that begin with `-` and
/// `+`.
type Examples = BTreeMap<TreePath, String>;

/// Compares what the configuration in `config` makes with what the server makes now.
pub async fn run(servers: &Servers, config: &Path) -> Result<Output, ToolError> {
    let (_, set) = load(config);
    let set = set.map_err(|source| ToolError::Load { source })?;
    let machines = machines(servers).await?;
    let client = servers.generator(SERVER)?;
    let present = generators(&client).await?;
    // Renewals are part of the versions.
    let set = set.renewed(present.renewals);
    let (mut changes, compared) = by_version(&present.generators, &set);
    let mut examples = Examples::new();
    for batch in machines.chunks(batch(compared.len())) {
        compare(&client, batch, &set, &compared, &mut changes).await?;
        if servers.arguments.format == Format::Table {
            for path in &compared {
                if !examples.contains_key(path)
                    && let Some(example) = example(&client, batch, &set, path, &changes).await?
                {
                    examples.insert(path.clone(), example);
                }
            }
        }
    }
    changes.retain(|_, change| match change {
        Change::Compared { changed, failed } => !changed.is_empty() || !failed.is_empty(),
        _ => true,
    });
    let code = if changes.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = servers.arguments.format.render(&changes, |changes| {
        let text = |(path, change)| {
            text(path, change, machines.len()) + examples.get(path).map_or("", String::as_str)
        };
        changes.iter().map(text).collect()
    });
    Ok(Output { text, code })
}

/// Returns the changes that need no content, and the paths to compare.
fn by_version(
    present: &[Generator],
    set: &GeneratorSet,
) -> (BTreeMap<TreePath, Change>, Vec<TreePath>) {
    let new: BTreeMap<TreePath, Generator> =
        set.described(&Kept::default()).into_iter().map(|one| (one.path.clone(), one)).collect();
    let old: BTreeMap<&TreePath, &Generator> = present.iter().map(|one| (&one.path, one)).collect();
    let removed = old.keys().filter(|path| !new.contains_key(path));
    let mut changes: BTreeMap<_, _> =
        removed.map(|path| ((*path).clone(), Change::Removed)).collect();
    let mut compared = Vec::new();
    for (path, generator) in new {
        if old.get(&path).is_some_and(|old| old.version == generator.version) {
            continue;
        }
        if matches!(&*generator.kind, "program" | "url" | "certificate") {
            changes.insert(path, Change::NotCompared);
        } else {
            let none = Change::Compared { changed: BTreeMap::new(), failed: BTreeMap::new() };
            changes.insert(path.clone(), none);
            compared.push(path);
        }
    }
    (changes, compared)
}

async fn compare(
    client: &Client,
    machines: &[Machine],
    set: &GeneratorSet,
    paths: &[TreePath],
    changes: &mut BTreeMap<TreePath, Change>,
) -> Result<(), ToolError> {
    if paths.is_empty() {
        return Ok(());
    }
    let present = generate(client, &request(machines, Algorithm::Blake3, paths)).await?;
    for (machine, files) in machines.iter().zip(present) {
        let subject = Subject::new(machine.clone(), String::new());
        for (path, file) in paths.iter().zip(files) {
            let made = set.by_path.get(path).and_then(|generator| generator.make(&subject));
            let Some(Change::Compared { changed, failed }) = changes.get_mut(path) else {
                continue;
            };
            match (made, file) {
                (Some(Ok(new)), GeneratedFile::Made(old))
                    if new.id(Algorithm::Blake3) == old.id => {}
                (Some(Ok(new)), file) => {
                    let now = match file {
                        GeneratedFile::Made(old) => Some(old.id),
                        GeneratedFile::Failed(_) => None,
                    };
                    let digests = Digests { now, then: new.id(Algorithm::Blake3) };
                    changed.insert(machine.hostname.clone(), digests);
                }
                (Some(Err(why)), _) => {
                    failed.insert(machine.hostname.clone(), why);
                }
                (None, _) => {}
            }
        }
    }
    Ok(())
}

/// Returns what changes at `path` on the first of `machines` on which something does.
async fn example(
    client: &Client,
    machines: &[Machine],
    set: &GeneratorSet,
    path: &TreePath,
    changes: &BTreeMap<TreePath, Change>,
) -> Result<Option<String>, ToolError> {
    let (Some(Change::Compared { changed, .. }), Some(generator)) =
        (changes.get(path), set.by_path.get(path))
    else {
        return Ok(None);
    };
    let Some((machine, Digests { now, then })) = machines
        .iter()
        .find_map(|machine| changed.get(&machine.hostname).map(|digests| (machine, digests)))
    else {
        return Ok(None);
    };
    let hostname = &machine.hostname;
    let short = |id: &ObjectId| id.hex()[..DIGITS].to_owned();
    let old = now.as_ref().map_or_else(|| "nothing".to_owned(), short);
    let digests = format!("  {hostname}: {old} becomes {}\n", short(then));
    if generator.definition.is_secret {
        return Ok(Some(digests));
    }
    let mut old = Vec::new();
    if let Some(id) = now {
        let request = GetContentsRequest { ids: vec![*id] };
        let mut reply = client.call_within::<GetContents>(&request, LIMIT).await?;
        match reply.contents.pop() {
            // It is a secret now, or gone already.
            None => return Ok(Some(digests)),
            Some(content) => old = content.bytes.0,
        }
    }
    let new = generator.make(&Subject::new(machine.clone(), String::new()));
    let (Some(Ok(new)), Ok(old)) = (new, String::from_utf8(old)) else {
        return Ok(Some(digests));
    };
    let Ok(new) = std::str::from_utf8(&new.bytes) else { return Ok(Some(digests)) };
    Ok(Some(format!("  {hostname}:\n{}", changed_lines(&old, new))))
}

/// Returns the lines between the first and the last that differ.
fn changed_lines(old: &str, new: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.split('\n').collect(), new.split('\n').collect());
    let same = |(old, new): &(&&str, &&str)| old == new;
    let before = old.iter().zip(&new).take_while(same).count();
    let (old, new) = (&old[before..], &new[before..]);
    let after = old.iter().rev().zip(new.iter().rev()).take_while(same).count();
    let mut text = String::new();
    for (sign, lines) in [('-', &old[..old.len() - after]), ('+', &new[..new.len() - after])] {
        for line in lines.iter().take(LINES) {
            text.push_str(&format!("  {sign} {}\n", escape(line.as_bytes())));
        }
        if let more @ 1.. = lines.len().saturating_sub(LINES) {
            text.push_str(&format!("  {sign} and {}\n", counted(more as u64, "more line")));
        }
    }
    text
}

fn text(path: &TreePath, change: &Change, machines: usize) -> String {
    let (changed, failed) = match change {
        Change::Removed => return format!("{path}: made no more\n"),
        Change::NotCompared => return format!("{path}: made otherwise, which is not compared\n"),
        Change::Compared { changed, failed } => (changed, failed),
    };
    let mut text = String::new();
    if !changed.is_empty() {
        let named: Vec<&str> = changed.keys().take(NAMED).map(String::as_str).collect();
        let named = named.join(", ");
        let more = if changed.len() > NAMED { ", ..." } else { "" };
        let all = counted(machines as u64, "machine");
        text.push_str(&format!("{path}: changes on {} of {all}: {named}{more}\n", changed.len()));
    }
    if let Some((hostname, why)) = failed.first_key_value() {
        let all = counted(failed.len() as u64, "machine");
        text.push_str(&format!("{path}: cannot be made for {all}; {hostname}: {why}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_between_the_first_and_the_last_change_are_shown() {
        let table = [
            ("a\nb\nc\n", "a\nx\ny\nc\n", "  - b\n  + x\n  + y\n"),
            ("a\n", "a\nb\n", "  + b\n"),
            ("a\nb\n", "b\n", "  - a\n"),
            ("", "a\n", "  + a\n"),
            ("a\n", "a", "  - \n"),
            ("a\x1b\n", "b\n", "  - a\\x1b\n  + b\n"),
        ];
        for (old, new, expected) in table {
            assert_eq!(changed_lines(old, new), expected, "{old:?} {new:?}");
        }
        let many: String = (0..12).map(|number| format!("{number}\n")).collect();
        let shown = changed_lines("", &many);
        assert!(shown.ends_with("  + 9\n  + and 2 more lines\n"), "{shown}");
    }
}
