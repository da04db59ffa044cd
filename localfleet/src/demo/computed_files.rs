//! The last part of the demo: `/etc/resolv.conf` is another one at each location.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use model::mdb::Machine;

use super::{STEP_MAX, say};
use crate::fleet::Fleet;

/// The computed file, relative to a root.
const PATH: &str = "etc/resolv.conf";

const CONFIG: &str = r#"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"
"#;

const TEMPLATE: &str = r#"# made for {{ Hostname }} at {{ Location }}
nameserver {{ "192.0.2.1" if Location == "nyc" else "198.51.100.1" }}
"#;

/// The image of this part.
const IMAGE: &str = "demo/3";

/// Starts a filegen-server, updates the machines to an image with a computed file, and edits the
/// location of a machine. `tree` is the source of the image before.
pub(super) fn show(fleet: &mut Fleet, directory: &Path, tree: &Path) -> anyhow::Result<()> {
    let generators = directory.join("filegen");
    fs::create_dir_all(&generators).context("cannot make a directory")?;
    let config = generators.join("config.toml");
    fs::write(&config, CONFIG).context("cannot write")?;
    fs::write(generators.join("resolv.conf.j2"), TEMPLATE).context("cannot write")?;
    say("Starting a filegen-server, which makes /etc/resolv.conf from a template.");
    let server = fleet.start_filegen(&config)?;
    fleet.keep(server);

    let placeholder = tree.join(PATH);
    fs::create_dir_all(tree.join("etc")).context("cannot make a directory")?;
    if fs::symlink_metadata(&placeholder).is_ok() {
        fs::remove_file(&placeholder).context("cannot remove a file")?;
    }
    fs::write(&placeholder, "").context("cannot write")?;
    let list = generators.join("computed-files");
    fs::write(&list, format!("/{PATH} {}\n", fleet.addresses().filegen)).context("cannot write")?;
    say(&format!("Uploading the second version with that computed file as {IMAGE}."));
    let [filter, triggers] = ["filter", "triggers"].map(|name| directory.join(name));
    let output = fleet.imagetool(&[
        "add".as_ref(),
        "--computed".as_ref(),
        list.as_os_str(),
        IMAGE.as_ref(),
        tree.as_os_str(),
        filter.as_os_str(),
        triggers.as_os_str(),
    ])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "imagetool add failed: {}", said.trim());

    let mut machines: Vec<Machine> = fleet.subs.iter().map(|sub| sub.record()).collect();
    for (index, machine) in machines.iter_mut().enumerate() {
        machine.required_image = IMAGE.to_owned();
        machine.location = if index % 2 == 0 { "nyc" } else { "sfo" }.to_owned();
    }
    say(&format!("Editing the machine database: locations, and {IMAGE} for every machine."));
    fleet.replace_mdb(&machines)?;
    let took = fleet.wait_synced(IMAGE, STEP_MAX, |_| {})?;
    say(&format!("All synced with {IMAGE}, {:.2} s after the edit.", took.as_secs_f64()));
    for machine in &machines {
        wait_for_location(fleet, machine)?;
    }

    let moved = &mut machines[0];
    moved.location = "sfo".to_owned();
    let moved = moved.clone();
    say(&format!("Editing the machine database: {} is at sfo now.", moved.hostname));
    let start = Instant::now();
    fleet.replace_mdb(&machines)?;
    wait_for_location(fleet, &moved)?;
    say(&format!("Its /{PATH} changed {:.2} s after the edit:", start.elapsed().as_secs_f64()));
    let content = fs::read_to_string(path_of(fleet, &moved)?).context("cannot read")?;
    content.lines().for_each(|line| say(&format!("  {line}")));
    fleet.wait_synced(IMAGE, STEP_MAX, |_| {})?;
    let poll = fleet.detail(&moved.hostname)?.poll.context("a synced machine was polled")?;
    let operations = poll.last_update.map(|update| update.operations);
    ensure!(operations == Some(1), "the last update had {operations:?} operations");
    say("That was an update of one file, on one machine.");
    Ok(())
}

fn path_of(fleet: &Fleet, machine: &Machine) -> anyhow::Result<PathBuf> {
    let sub = fleet.subs.iter().find(|sub| sub.hostname == machine.hostname);
    Ok(sub.context("it is a machine of the fleet")?.root.join(PATH))
}

/// Waits until the computed file of a machine is that of its location.
fn wait_for_location(fleet: &mut Fleet, machine: &Machine) -> anyhow::Result<()> {
    let path = path_of(fleet, machine)?;
    let wanted = format!("# made for {} at {}\n", machine.hostname, machine.location);
    let start = Instant::now();
    while !fs::read_to_string(&path).unwrap_or_default().starts_with(&wanted) {
        fleet.check()?;
        if start.elapsed() > STEP_MAX {
            bail!("{} is not that of {} after {STEP_MAX:?}", path.display(), machine.location);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
