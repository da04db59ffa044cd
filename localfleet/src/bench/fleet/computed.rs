//! A fleet with three computed files on each machine, beside the same fleet without them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::dominator::content::{ContentChange, ContentStage};

use super::{LIMIT, ORDERED_WANTED, Run};
use crate::bench::measure::seconds;
use crate::simulator::control::ClearFirstTimes;
use crate::simulator::machines::monotonic;

/// The computed files, and the templates that make them. Each machine has another content of the
/// first one.
const FILES: [(&str, &str); 3] = [
    ("etc/host.conf", "host {{ Hostname }}\n"),
    ("etc/resolv.conf", "nameserver 192.0.2.1\nsearch {{ Location }}.example\n"),
    ("etc/site.conf", "site {{ Location }}\nimage {{ RequiredImage }}\n"),
];

/// The files of a certificate of each machine.
const CERTIFICATE: [&str; 2] = ["etc/tls/cert.pem", "etc/tls/key.pem"];

/// The goal of an urgent renewal of all certificates, in seconds.
const RENEWAL_WANTED: f64 = 300.0;

/// The goals: the time to all synced as a multiple of that without computed files, and what a
/// machine may take, in bytes.
const START_WANTED: f64 = 1.5;
const MEMORY_WANTED: f64 = 1_024.0;

impl Run {
    /// Gives computed files to all machines, edits a template, and compares starts of the dominator
    /// and its memory with those before. Then gives certificates to all, and renews these.
    pub(super) fn computed(
        &mut self,
        directory: &Path,
        image_of: &dyn Fn(usize) -> String,
    ) -> anyhow::Result<()> {
        let (plain, plain_memory) = self.started("without computed files")?;
        self.make_generators(directory)?;
        let paths = FILES.map(|(path, _)| path);
        let images = self.upload(directory, "computed", &paths, image_of)?;
        let server = self.all.fleet.start_filegen(&directory.join("config.toml"))?;
        self.all.fleet.keep(server);
        self.update(&|number| images[number % images.len()].clone(), "", FILES.len())?;
        self.edit_template(&directory.join("1.j2"))?;
        let (known, known_memory) = self.started("three computed files, content known")?;
        let added = (known_memory as f64 - plain_memory as f64) / self.subs as f64;
        self.row("memory that three computed files add to a machine", format!("{added:.0} bytes"));
        if let Some(row) = self.rows.last_mut() {
            row.ratio = Some(added / MEMORY_WANTED);
            row.wanted = format!("{MEMORY_WANTED:.0} bytes");
        }
        fs::remove_file(self.all.fleet.mdb().with_file_name("dominator").join("computed.redb"))
            .context("cannot remove what is known")?;
        let (unknown, _) = self.started("three computed files, content not known")?;
        for (what, took) in [("known", known), ("not known", unknown)] {
            let what = format!("start with computed files, content {what}, beside without");
            self.row(&what, seconds(took));
            if let Some(row) = self.rows.last_mut() {
                row.peer = seconds(plain);
                row.ratio = Some(took / plain);
                row.wanted = format!("{START_WANTED} times");
            }
        }
        if self.all.fleet.certificates().authority_file().is_none() {
            // With --insecure there are no certificates.
            return Ok(());
        }
        let paths = [&paths[..], &CERTIFICATE].concat();
        let image_of = |number: usize| images[number % images.len()].clone();
        let images = self.upload(directory, "certified", &paths, &image_of)?;
        let what = "certificates: ";
        self.update(&|number| images[number % images.len()].clone(), what, CERTIFICATE.len())?;
        self.renew_all()
    }

    /// Makes the configuration of the filegen-server.
    fn make_generators(&self, directory: &Path) -> anyhow::Result<()> {
        let fleet = &self.all.fleet;
        let mut config = String::new();
        if fleet.certificates().authority_file().is_some() {
            fleet.certificates().make_authority_for_machines(&directory.join("ca"))?;
            let [path, key_path] = CERTIFICATE;
            config = format!(
                "[[generator]]\npath = \"/{path}\"\nkind = \"certificate\"\n\
                 authority = \"ca\"\nkey = \"server\"\nkey_path = \"/{key_path}\"\n"
            );
        }
        for (number, (path, template)) in FILES.iter().enumerate() {
            fs::write(directory.join(format!("{number}.j2")), template).context("cannot write")?;
            config.push_str(&format!(
                "[[generator]]\npath = \"/{path}\"\nkind = \"template\"\nfile = \"{number}.j2\"\n"
            ));
        }
        fs::write(directory.join("config.toml"), config).context("cannot write")
    }

    /// Uploads the images `NAME-NUMBER`: those of the machines, with computed files at `paths`.
    /// Returns their names.
    fn upload(
        &self,
        directory: &Path,
        name: &str,
        paths: &[&str],
        image_of: &dyn Fn(usize) -> String,
    ) -> anyhow::Result<Vec<String>> {
        let layer = directory.join(name);
        let list = directory.join(format!("{name}.list"));
        let source = self.all.fleet.addresses().filegen;
        let lines: Vec<String> = paths.iter().map(|path| format!("/{path} {source}\n")).collect();
        fs::write(&list, lines.concat()).context("cannot write")?;
        for path in paths.iter().map(|path| layer.join(path)) {
            fs::create_dir_all(path.parent().unwrap_or(&layer)).context("cannot make it")?;
            fs::write(path, "").context("cannot write")?;
        }
        let add = |number: usize| {
            let (base, name) = (image_of(number), format!("{name}-{number}"));
            let words: [PathBuf; 6] = [
                "add-overlay".into(),
                format!("--computed={}", list.display()).into(),
                name.clone().into(),
                base.into(),
                layer.clone(),
                "--required-paths=".into(),
            ];
            let output = self.all.fleet.imagetool(&words)?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "imagetool: {said}");
            Ok(name)
        };
        (0..usize::try_from(super::IMAGES)?).map(add).collect()
    }

    /// Gives a change of content to all machines as soon as it is known, without first machines.
    fn hasten_content(&mut self) -> anyhow::Result<()> {
        let (fleet, start) = (&self.all.fleet, Instant::now());
        let change = loop {
            let output = fleet.domtool(&["--format", "json", "computed", "list"])?;
            let changes: Vec<ContentChange> = serde_json::from_slice(&output.stdout)?;
            if let Some(change) = changes.iter().find(|change| change.stage == ContentStage::First)
            {
                break change.id.to_string();
            }
            ensure!(start.elapsed() < LIMIT, "there is no change of content");
            std::thread::sleep(Duration::from_millis(50));
        };
        let words = ["computed", "resume", &change, "--urgent", "--why", "a measurement"];
        let output = fleet.domtool(&words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "domtool: {said}");
        Ok(())
    }

    /// Edits a template, which changes a file of each machine.
    fn edit_template(&mut self, template: &Path) -> anyhow::Result<()> {
        let what = "urgent edit of a template";
        let last = self.change_content(what, |_| {
            let text = fs::read_to_string(template).context("cannot read a template")?;
            fs::write(template, format!("# edited\n{text}")).context("cannot write a template")
        })?;
        self.wanted(&format!("{what} until the last is ordered"), last, ORDERED_WANTED);
        Ok(())
    }

    /// Has all certificates made anew.
    fn renew_all(&mut self) -> anyhow::Result<()> {
        let what = "urgent renewal of all certificates";
        let last = self.change_content(what, |run| {
            let words = ["renew", "--all", "--why", "a measurement"];
            let output = run.all.fleet.filegen_client(&words)?;
            ensure!(output.status.success(), "filegen-client: {output:?}");
            Ok(())
        })?;
        self.wanted(&format!("{what} until the last is ordered"), last, RENEWAL_WANTED);
        Ok(())
    }

    /// Makes a change of the content of each machine. Returns the seconds until the last one is
    /// ordered.
    fn change_content(
        &mut self,
        what: &str,
        change: impl FnOnce(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        eprintln!("{}: {what}", self.name);
        self.all.ask::<ClearFirstTimes>(&())?;
        let before = self.cpu()?;
        let start_ns = monotonic();
        change(self)?;
        self.hasten_content()?;
        let subs = self.subs;
        self.all.wait(what, LIMIT, |all| Ok(all.report()?.verified as usize >= subs))?;
        let first_times = self.all.first_times()?;
        let last = first_times.iter().filter_map(|times| times.prepare).max().unwrap_or(start_ns);
        self.last(&format!("{what} until the last has it"), &first_times, start_ns, |times| {
            times.verified
        });
        self.all.wait_all_synced(what, LIMIT)?;
        self.spent(what, before)?;
        Ok(Duration::from_nanos(last.saturating_sub(start_ns)).as_secs_f64())
    }
}
