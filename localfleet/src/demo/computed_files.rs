//! The last part of the demo: `/etc/resolv.conf` is another one at each location, and each machine
//! has a certificate of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::certificate::Certificate;
use certs::pem::{certificates_of, key_belongs};
use model::mdb::Machine;

use super::{STEP_MAX, say};
use crate::fleet::Fleet;

/// The computed files, relative to a root.
const PATH: &str = "etc/resolv.conf";
const CERTIFICATE: &str = "etc/demo-tls/cert.pem";
const KEY: &str = "etc/demo-tls/key.pem";

const CONFIG: &str = r#"
[[generator]]
path = "/etc/resolv.conf"
kind = "template"
file = "resolv.conf.j2"

[[generator]]
path = "/etc/demo-tls/cert.pem"
kind = "certificate"
authority = "machines-ca"
key = "server"
key_path = "/etc/demo-tls/key.pem"
"#;

const TEMPLATE: &str = r#"# made for {{ Hostname }} at {{ Location }}
nameserver {{ "192.0.2.1" if Location == "nyc" else "198.51.100.1" }}
"#;

/// The image of this part.
const IMAGE: &str = "demo/3";

/// Starts a filegen-server, updates the machines to an image with computed files, edits the
/// location of a machine, and renews its certificate. `tree` is the source of the image before.
pub(super) fn show(fleet: &mut Fleet, directory: &Path, tree: &Path) -> anyhow::Result<()> {
    let generators = directory.join("filegen");
    fs::create_dir_all(&generators).context("cannot make a directory")?;
    let config = generators.join("config.toml");
    fs::write(&config, CONFIG).context("cannot write")?;
    fs::write(generators.join("resolv.conf.j2"), TEMPLATE).context("cannot write")?;
    say("Making an authority that certifies machines only, below that of the fleet.");
    fleet.certificates().make_authority_for_machines(&generators.join("machines-ca"))?;
    say("Starting a filegen-server, which makes certificates, and a file from a template.");
    let server = fleet.start_filegen(&config)?;
    fleet.keep(server);

    let list = generators.join("computed-files");
    let source = fleet.addresses().filegen;
    let mut lines = String::new();
    for (path, mode) in [(PATH, 0o644), (CERTIFICATE, 0o644), (KEY, 0o600)] {
        place(&tree.join(path), mode)?;
        lines.push_str(&format!("/{path} {source}\n"));
    }
    fs::write(&list, lines).context("cannot write")?;
    say(&format!("Uploading the second version with these computed files as {IMAGE}."));
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
    let content = fs::read_to_string(path_of(fleet, &moved, PATH)?).context("cannot read")?;
    content.lines().for_each(|line| say(&format!("  {line}")));
    fleet.wait_synced(IMAGE, STEP_MAX, |_| {})?;
    let poll = fleet.detail(&moved.hostname)?.poll.context("a synced machine was polled")?;
    let operations = poll.last_update.map(|update| update.operations);
    ensure!(operations == Some(1), "the last update had {operations:?} operations");
    say("That was an update of one file, on one machine.");
    renew(fleet, &moved)
}

/// Makes a file whose content does not matter, in place of what is there.
fn place(path: &Path, mode: u32) -> anyhow::Result<()> {
    let parent = path.parent().context("it is below a root")?;
    fs::create_dir_all(parent).context("cannot make a directory")?;
    if fs::symlink_metadata(path).is_ok() {
        fs::remove_file(path).context("cannot remove a file")?;
    }
    fs::write(path, "").context("cannot write")?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).context("cannot set a mode")
}

/// Renews the certificate of a machine, and waits until it has that and the key for it.
fn renew(fleet: &mut Fleet, machine: &Machine) -> anyhow::Result<()> {
    let hostname = &machine.hostname;
    let [certificate, key] = [CERTIFICATE, KEY].map(|path| path_of(fleet, machine, path));
    let (certificate, key) = (certificate?, key?);
    let before = Certificate::read(&certificates_of(&certificate)?[0])?;
    let kind = before.identity.kind.in_words(&before.common_name);
    say(&format!("{hostname} has a certificate of the {kind} in /{CERTIFICATE}. Renewing it:"));
    let start = Instant::now();
    let output = fleet.filegen_client(&["renew", hostname, "--why", "to show it"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "filegen-client: {output:?}");
    say(&format!("  {}", said.trim()));
    let is_new = |der: &[u8]| Certificate::read(der).is_ok_and(|read| read.serial != before.serial);
    loop {
        // Both are replaced within milliseconds, but not in one moment.
        let shown = certificates_of(&certificate).unwrap_or_default();
        if let Some(der) = shown.first()
            && is_new(der)
            && key_belongs(&key, der).unwrap_or(false)
        {
            break;
        }
        fleet.check()?;
        if start.elapsed() > STEP_MAX {
            bail!("{} is not renewed after {STEP_MAX:?}", certificate.display());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = start.elapsed().as_secs_f64();
    say(&format!("It has another certificate and key, {took:.2} s after that."));
    fleet.wait_synced(IMAGE, STEP_MAX, |_| {})?;
    Ok(())
}

fn path_of(fleet: &Fleet, machine: &Machine, path: &str) -> anyhow::Result<PathBuf> {
    let sub = fleet.subs.iter().find(|sub| sub.hostname == machine.hostname);
    Ok(sub.context("it is a machine of the fleet")?.root.join(path))
}

/// Waits until the computed file of a machine is that of its location.
fn wait_for_location(fleet: &mut Fleet, machine: &Machine) -> anyhow::Result<()> {
    let path = path_of(fleet, machine, PATH)?;
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
