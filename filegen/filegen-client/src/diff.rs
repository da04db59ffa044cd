//! `filegen-client diff`: on which machines another configuration would change files.

use std::collections::BTreeMap;
use std::path::Path;

use api::file_generator::{GeneratedFile, Generator};
use daemon::EXIT_DONE;
use filegen::generators::{GeneratorSet, Subject};
use filegen::loading::load;
use model::display::counted;
use model::mdb::Machine;
use model::object::Algorithm;
use model::path::TreePath;
use rpc::client::Client;
use serde::Serialize;
use tool::{EXIT_DIFFERENT, Output};

use super::files::{BATCH, generate, machines, request};
use super::show::generators;
use super::{SERVER, Servers, ToolError};

/// How many machines of a path a table names.
const NAMED: usize = 5;

/// What would become of a path.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Change {
    /// It is made no more.
    Removed,
    /// It is made by a program or web server, which is another one or is asked otherwise.
    NotCompared,
    Compared {
        /// The machines that get other content, or content where nothing could be made.
        changed: Vec<String>,
        /// The machines for which it cannot be made, with the reason.
        failed: BTreeMap<String, String>,
    },
}

/// Compares what the configuration in `config` makes with what the server makes now.
pub async fn run(servers: &Servers, config: &Path) -> Result<Output, ToolError> {
    let (_, set) = load(config);
    let set = set.map_err(|source| ToolError::Load { source })?;
    let machines = machines(servers).await?;
    let client = servers.generator(SERVER)?;
    let present = generators(&client).await?.generators;
    let (mut changes, compared) = by_version(&present, &set);
    for batch in machines.chunks(BATCH) {
        compare(&client, batch, &set, &compared, &mut changes).await?;
    }
    changes.retain(|_, change| match change {
        Change::Compared { changed, failed } => !changed.is_empty() || !failed.is_empty(),
        _ => true,
    });
    let code = if changes.is_empty() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = servers.arguments.format.render(&changes, |changes| {
        changes.iter().map(|(path, change)| text(path, change, machines.len())).collect()
    });
    Ok(Output { text, code })
}

/// Returns the changes that need no content, and the paths to compare.
fn by_version(
    present: &[Generator],
    set: &GeneratorSet,
) -> (BTreeMap<TreePath, Change>, Vec<TreePath>) {
    let new: BTreeMap<TreePath, Generator> =
        set.described().into_iter().map(|one| (one.path.clone(), one)).collect();
    let old: BTreeMap<&TreePath, &Generator> = present.iter().map(|one| (&one.path, one)).collect();
    let removed = old.keys().filter(|path| !new.contains_key(path));
    let mut changes: BTreeMap<_, _> =
        removed.map(|path| ((*path).clone(), Change::Removed)).collect();
    let mut compared = Vec::new();
    for (path, generator) in new {
        if old.get(&path).is_some_and(|old| old.version == generator.version) {
            continue;
        }
        if matches!(&*generator.kind, "program" | "url") {
            changes.insert(path, Change::NotCompared);
        } else {
            let none = Change::Compared { changed: Vec::new(), failed: BTreeMap::new() };
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
        let subject = Subject::new(machine.clone());
        for (path, file) in paths.iter().zip(files) {
            let made = set.by_path.get(path).and_then(|generator| generator.make(&subject));
            let Some(Change::Compared { changed, failed }) = changes.get_mut(path) else {
                continue;
            };
            match (made, file) {
                (Some(Ok(new)), GeneratedFile::Made(old))
                    if new.id(Algorithm::Blake3) == old.id => {}
                (Some(Ok(_)), _) => changed.push(machine.hostname.clone()),
                (Some(Err(why)), _) => {
                    failed.insert(machine.hostname.clone(), why);
                }
                (None, _) => {}
            }
        }
    }
    Ok(())
}

fn text(path: &TreePath, change: &Change, machines: usize) -> String {
    let (changed, failed) = match change {
        Change::Removed => return format!("{path}: made no more\n"),
        Change::NotCompared => return format!("{path}: made otherwise, which is not compared\n"),
        Change::Compared { changed, failed } => (changed, failed),
    };
    let mut text = String::new();
    if !changed.is_empty() {
        let named = changed[..changed.len().min(NAMED)].join(", ");
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
