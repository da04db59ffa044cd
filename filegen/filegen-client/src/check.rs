//! `filegen-client check`: whether all computed files of an image can be made for its machines.

use std::collections::BTreeMap;

use api::file_generator::{GenerateRequest, GeneratedFile, WantedFiles};
use api::image_server::{GetImage, GetImageRequest};
use daemon::{EXIT_DONE, EXIT_PARTLY, IMAGESERVER_PORT};
use model::display::counted;
use model::image::ImageName;
use model::mdb::Machine;
use model::object::Algorithm;
use model::path::TreePath;
use rpc::client::Client;
use serde::Serialize;
use tool::Output;

use super::files::{LIMIT, batch, generate, machines};
use super::{Servers, ToolError};

/// How many failures a table has.
const NAMED: usize = 50;

/// What was checked.
#[derive(Serialize)]
struct Checked {
    machines: usize,
    /// The files that were made, and not.
    files: usize,
    failures: Vec<Failure>,
}

/// A file that cannot be made.
#[derive(Serialize)]
struct Failure {
    hostname: String,
    path: TreePath,
    source: String,
    why: String,
}

/// Checks all computed files of `image`, for its machines or for `all`.
pub async fn run(servers: &Servers, image: &ImageName, all: bool) -> Result<Output, ToolError> {
    let client = servers.client(&servers.arguments.imageserver, IMAGESERVER_PORT)?;
    let request = GetImageRequest { name: image.clone(), wait_ms: 0 };
    let content = client.call_within::<GetImage>(&request, LIMIT).await?.content;
    let algorithm = content.root.algorithm();
    let mut sources: BTreeMap<String, Vec<TreePath>> = BTreeMap::new();
    for rule in content.computed {
        sources.entry(rule.source).or_default().push(rule.path);
    }
    let mut machines = machines(servers).await?;
    let is_of_image = |machine: &Machine| {
        let image = Some(image);
        machine.required().as_ref() == image || machine.planned().as_ref() == image
    };
    machines.retain(|machine| all || is_of_image(machine));
    if machines.is_empty() {
        return Err(ToolError::NoMachines { image: image.clone() });
    }
    let mut checked = Checked { machines: machines.len(), files: 0, failures: Vec::new() };
    for (source, paths) in sources {
        let client = servers.generator(&source)?;
        checked.files += machines.len() * paths.len();
        for batch in machines.chunks(batch(paths.len())) {
            let failures = failures(&client, batch, algorithm, &paths, &source).await?;
            checked.failures.extend(failures);
        }
    }
    let code = if checked.failures.is_empty() { EXIT_DONE } else { EXIT_PARTLY };
    let text = servers.arguments.format.render(&checked, table);
    Ok(Output { text, code })
}

/// Has files made, and returns those that are not. Files that take long are asked for again, as
/// long as some of them get done.
async fn failures(
    client: &Client,
    machines: &[Machine],
    algorithm: Algorithm,
    paths: &[TreePath],
    source: &str,
) -> Result<Vec<Failure>, ToolError> {
    let mut wanted: Vec<WantedFiles> = machines
        .iter()
        .map(|machine| WantedFiles {
            machine: machine.clone(),
            algorithm,
            paths: paths.to_vec(),
            key: None,
            outputs: String::new(),
        })
        .collect();
    let mut count = usize::MAX;
    loop {
        let request = GenerateRequest { machines: wanted, is_for_use: false };
        let made = generate(client, &request).await?;
        let (mut failures, mut again) = (Vec::new(), Vec::new());
        for (mut one, files) in request.machines.into_iter().zip(made) {
            let mut failed = Vec::new();
            for (path, file) in one.paths.iter().zip(files) {
                let GeneratedFile::Failed(why) = file else { continue };
                failed.push(path.clone());
                let (hostname, path) = (one.machine.hostname.clone(), path.clone());
                failures.push(Failure { hostname, path, source: source.to_owned(), why });
            }
            if !failed.is_empty() {
                one.paths = failed;
                again.push(one);
            }
        }
        if failures.is_empty() || failures.len() == count {
            return Ok(failures);
        }
        (count, wanted) = (failures.len(), again);
    }
}

fn table(checked: &Checked) -> String {
    let mut text = String::new();
    for failure in checked.failures.iter().take(NAMED) {
        let Failure { hostname, path, source, why } = failure;
        text.push_str(&format!("{hostname} {path}: {why} (from {source})\n"));
    }
    if let more @ 1.. = checked.failures.len().saturating_sub(NAMED) {
        text.push_str(&format!("and {more} more\n"));
    }
    let files = counted(checked.files as u64, "file");
    let machines = counted(checked.machines as u64, "machine");
    let failures = checked.failures.len();
    text.push_str(&format!("{files} for {machines}: {failures} cannot be made\n"));
    text
}
