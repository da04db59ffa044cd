//! Provisioning that is interrupted anywhere goes on: each resource is made once, by one key, and
//! removed once.
//!
//! subd's own code provisions two resources, one after the other, and then an image that has only
//! the first, in a program of one thread. Each of its calls that change something, or have to do
//! with processes, kills the program, or fails; then the program is run again.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::sync::Arc;

use api::subd::{ContinueProvisioningRequest, ProvisioningStage, ResourcesReport};
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use provisioning::image::Definition;
use serde_json::json;
use subd::provisioning::plugins::Plugins;
use subd::provisioning::provisioner::{Provisioner, Surroundings};
use subd::provisioning::records;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::persisted_state::StateDirectory;
use testing::crash_points::{Sample, Scratch, entries, in_one_line};
use testing::strace::{Class, Fault, Faults, MARK, Point, calls, points};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::interrupted::{IMPATIENT, PATIENT, patience, program};
use crate::machine::wait_for_children;

/// The environment variable with the directory, for the program that is killed.
pub const DIRECTORY_VARIABLE: &str = "CRASH_PROVISION";

/// How often what has failed is tried again.
const RETRIES: usize = 3;

const BINDINGS: &str = "[[provisioner]]\nname = \"mark\"\nkinds = [\"mark\"]\nuser = \"root\"\n";

const DB: &str = r#"{"id": "db", "kind": "mark"}"#;
const USER: &str = r#"{"id": "user", "kind": "mark", "needs": ["db"], "on_removal": "destroy"}"#;

/// Stands for subd as what becomes a plugin. Its arguments are a word, when it must end, the root,
/// a user, the plugin and a verb.
const RUNNER: &str = "#!/bin/sh\nexec \"$5\" \"$6\"\n";

/// Makes a directory for a resource, or removes it, and records each key that it is asked with.
/// DIRECTORY stands for its place.
const PLUGIN: &str = r#"#!/bin/sh
request=$(cat)
key=${request#*'"key":"'} key=${key%%'"'*}
case $request in
    *'"desired":[{"id":"'*) id=${request#*'"desired":[{"id":"'}; id=${id%%'"'*}
        mkdir -p "DIRECTORY/made/$id"; word=make ;;
    *) id=${request#*'"previous":[{"id":"'}; id=${id%%'"'*}
        rm -rf "DIRECTORY/made/$id"; word=remove ;;
esac
echo "$word $id $key" >> DIRECTORY/keys
echo '{"tasks": [{"success": {"outputs": {"'$id'": {"port": 5}}}}]}'
"#;

/// The name, the digest and the resource files of an image.
fn image(number: usize) -> (ImageName, ObjectId, BTreeMap<&'static str, &'static str>) {
    let name = format!("test/{number}");
    let digest = Algorithm::Blake3.digest(name.as_bytes());
    let mut files = BTreeMap::from([("db.json", DB), ("user.json", USER)]);
    files.retain(|name, _| number == 1 || *name == "db.json");
    (ImageName::new(&name).unwrap(), digest, files)
}

/// Provisions the machine in `directory`.
pub fn provision(directory: &Path) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(directory)));
    match done {
        Ok(report) => println!("done {}", serde_json::to_string(&report).unwrap()),
        Err(error) => println!("failed {error}"),
    }
    ExitCode::SUCCESS
}

async fn run(directory: &Path) -> Result<ResourcesReport, Box<dyn Error>> {
    let root = Root::open(&directory.join("root"))?;
    let state = StateDirectory::lock(Directories::state(&root, None)?)?;
    let records = records::load(&state)?;
    // The calls from here on are counted.
    assert!(std::fs::metadata(MARK).is_err());
    let plugins = Plugins {
        copies: directory.join("root/.subd/plugins"),
        root: directory.join("root"),
        program: directory.join("runner"),
        uses_installed: false,
    };
    let news = Arc::new(Notify::new());
    let told = Arc::clone(&news);
    let surroundings = Surroundings {
        tell: Box::new(move || told.notify_one()),
        last_update: Box::new(|| None),
        checks: None,
    };
    let stop = CancellationToken::new();
    let provisioner = Provisioner::new(records, plugins, ("test", "boot"), surroundings, stop);
    tokio::select! {
        biased;
        () = provisioner.serve() => Err("it has ended".into()),
        done = both_images(directory, &provisioner, &news) => done,
    }
}

/// Orders what a dominator and an update order.
async fn both_images(
    directory: &Path,
    provisioner: &Provisioner,
    news: &Notify,
) -> Result<ResourcesReport, Box<dyn Error>> {
    let plugin = PLUGIN.replace("DIRECTORY", &directory.display().to_string());
    let copy = Algorithm::Blake3.digest(plugin.as_bytes());
    for number in [1, 2] {
        let (name, digest, files) = image(number);
        if number == 1 && is_second_known(provisioner) {
            continue;
        }
        let definition: Definition = serde_json::from_value(
            json!({"bindings": BINDINGS, "files": files, "plugins": {"mark": copy}}),
        )?;
        provisioner.plugins.keep(&copy.to_string(), plugin.as_bytes())?;
        provisioner.provision(&name, digest, &definition).map_err(|fault| fault.message)?;
        finish(provisioner, digest, news).await?;
        provisioner.activated(digest, &definition)?;
    }
    until(news, || {
        let report = provisioner.report();
        Ok((report.resources.len() == 1).then_some(report))
    })
    .await
}

/// True if the first image has been replaced, so that it must not come again.
fn is_second_known(provisioner: &Provisioner) -> bool {
    let (_, second, _) = image(2);
    provisioner.report().provisioning.is_some_and(|report| report.image_digest == second)
}

async fn finish(
    provisioner: &Provisioner,
    image_digest: ObjectId,
    news: &Notify,
) -> Result<(), Box<dyn Error>> {
    let mut retries = RETRIES;
    until(news, || {
        let report = provisioner.report().provisioning.ok_or("nothing is provisioned")?;
        match report.stage {
            ProvisioningStage::Finished => return Ok(Some(())),
            ProvisioningStage::Running { .. } => return Ok(None),
            ProvisioningStage::Failed { error } if retries == 0 => return Err(error.into()),
            ProvisioningStage::Failed { .. } => retries -= 1,
            ProvisioningStage::Waits { .. } => {}
            ProvisioningStage::Awaits { text } => return Err(text.into()),
        }
        let request = ContinueProvisioningRequest { image_digest, step: report.step };
        provisioner.go_on(&request).map_err(|fault| fault.message)?;
        Ok(None)
    })
    .await
}

async fn until<T>(
    news: &Notify,
    mut look: impl FnMut() -> Result<Option<T>, Box<dyn Error>>,
) -> Result<T, Box<dyn Error>> {
    let patience = patience();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        tokio::time::timeout(patience, news.notified()).await?;
    }
}

/// What is there after all.
#[derive(Debug, PartialEq)]
struct Outcome {
    report: serde_json::Value,
    made: Vec<String>,
    /// The different keys, each with what it was for.
    keys: BTreeSet<String>,
    outputs: Vec<(String, String)>,
    copies: usize,
}

fn command(directory: &Path, patience: &str) -> Command {
    program(DIRECTORY_VARIABLE, directory, patience)
}

fn make(directory: &Path) {
    std::fs::create_dir_all(directory.join("root/.subd/state")).unwrap();
    std::fs::create_dir(directory.join("made")).unwrap();
    let runner = directory.join("runner");
    std::fs::write(&runner, RUNNER).unwrap();
    std::fs::set_permissions(&runner, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

/// Reads what is there after `output`, of a program that must have done all.
fn outcome(directory: &Path, output: &Output) -> Result<Outcome, String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    let report = last.strip_prefix("done ").ok_or_else(|| in_one_line(output))?;
    let mut report: serde_json::Value = serde_json::from_str(report).unwrap();
    // It also counts what was tried again.
    report["provisioning"].as_object_mut().unwrap().remove("step");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let outputs = entries(&directory.join("root/run/dominator/resources"));
    let keys = read(&directory.join("keys")).replace(&*directory.to_string_lossy(), "");
    Ok(Outcome {
        report,
        made: entries(&directory.join("made")).iter().map(|path| name(path)).collect(),
        keys: keys.lines().map(str::to_owned).collect(),
        outputs: outputs.iter().map(|path| (name(path), read(path))).collect(),
        copies: entries(&directory.join("root/.subd/plugins")).len(),
    })
}

/// Interrupts it at each call.
pub fn at_any_call() -> Result<(), String> {
    let (scratch, sample) = (Scratch::new(), Sample::from_environment());
    let directory = scratch.free_path();
    make(&directory);
    let log = directory.join("strace.log");
    let output = Faults::default().trace(&command(&directory, PATIENT), &log).output().unwrap();
    let want = outcome(&directory, &output)?;
    if (want.made.len(), want.keys.len(), want.copies) != (1, 3, 1) {
        return Err(format!("{want:?}"));
    }
    let all = calls(&log, &directory);
    let first = all.iter().position(|call| call.class == Class::Mark).unwrap();
    let changes = |class| class == Class::Change;
    let mut tried =
        points(&all[first..], |class| changes(class) || class == Class::Process, Fault::Kill);
    for fault in [Fault::Io, Fault::Space] {
        tried.extend(points(&all[first..], changes, fault));
    }
    let survive = |point: &Point, _| {
        let directory = scratch.free_path();
        make(&directory);
        let log = directory.join("strace.log");
        let faults = Faults::from(point);
        let output = faults.inject(&command(&directory, IMPATIENT), &log).output().unwrap();
        wait_for_children(&directory);
        if !faults.happened(&log) {
            return Err(format!("the point was not reached: {}", in_one_line(&output)));
        }
        let again = command(&directory, PATIENT).output().unwrap();
        let got = outcome(&directory, &again)?;
        if got != want {
            return Err(format!("{got:?} instead of {want:?}"));
        }
        std::fs::remove_dir_all(&directory).unwrap();
        Ok(())
    };
    sample.enumerate("provisioning", tried, survive, |_| String::new())
}
