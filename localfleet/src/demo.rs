//! The demos: a fleet converges, drifts, is repaired and is updated; and it gets rollouts.

mod computed_files;
pub mod make_drift;
mod rollout;

use std::ffi::OsStr;
use std::fs;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::dominator::SubSummary;

use crate::compare::compare;
use crate::demo::make_drift::make_drift;
use crate::fleet::{Addresses, Fleet, Options};
use crate::source_trees;

/// The filter of the images of the demo.
const FILTER: &str = "/tmp/.*\n/var/tmp/.*\n/var/log/.*\n/proc/.*\n/sys/.*\n/run/.*\n/dev/.*\n";

/// The triggers of the images of the demo.
const TRIGGERS: &str = r#"[
    {"MatchLines": ["/etc/.*"], "Service": "configuration"},
    {"MatchLines": ["/usr/.*", "/opt/.*"], "Service": "programs"}
]
"#;

/// The timeout of one step of the demo.
const STEP_MAX: Duration = Duration::from_secs(300);

/// The settings of the demo.
pub struct Demo {
    /// The directory of the programs.
    pub programs: PathBuf,
    /// A new directory for everything.
    pub directory: PathBuf,
    /// The source of the image, if the user gives one: an archive or a directory.
    pub image: Option<PathBuf>,
    /// The number of subs.
    pub subs: usize,
    /// Set to end the demo.
    pub stop: Arc<AtomicBool>,
}

impl Demo {
    /// Runs the whole sequence and returns the fleet, still running.
    ///
    /// # Errors
    ///
    /// If a step fails, or a comparison of trees finds a difference.
    pub fn run(&self) -> anyhow::Result<Fleet> {
        let version_1 = self.first_version()?;
        let mut fleet = self.start_fleet()?;
        say("Uploading the first version as image demo/1.");
        self.add(&fleet, "demo/1", self.image.as_deref().unwrap_or(&version_1), &[])?;
        say("Editing the machine database: every machine must have demo/1.");
        converge(&mut fleet, "demo/1")?;
        verify(&fleet, &version_1)?;

        repair(&mut fleet, &version_1)?;

        let version_2 = self.directory.join("version-2");
        say("Copying the first version, to make a second one from it.");
        source_trees::copy(&version_1, &version_2)?;
        let changed = source_trees::next_version(&version_2, &is_kept)?;
        say(&format!("Uploading a second version, with {changed} changed files, as demo/2."));
        self.add(&fleet, "demo/2", &version_2, &[])?;
        say("Editing the machine database: every machine must have demo/2.");
        converge(&mut fleet, "demo/2")?;
        show_update(&fleet)?;
        verify(&fleet, &version_2)?;
        computed_files::show(&mut fleet, &self.directory, &version_2)?;
        Ok(fleet)
    }

    /// Starts the daemons, and gives each machine a file that it keeps.
    fn start_fleet(&self) -> anyhow::Result<Fleet> {
        let options = Options {
            programs: self.programs.clone(),
            directory: self.directory.clone(),
            subs: self.subs,
            subd_flags: Vec::new(),
            dominator_flags: Vec::new(),
            insecure: false,
            addresses: Addresses::standard(),
            stop: Arc::clone(&self.stop),
        };
        say(&format!("Starting an imageserver, a dominator and {} subds.", self.subs));
        let start = Instant::now();
        let fleet = Fleet::start(options)?;
        say(&format!("All of them answer, after {:.2} s.", start.elapsed().as_secs_f64()));
        for sub in &fleet.subs {
            let log = sub.root.join("var/log");
            fs::create_dir_all(&log).context("cannot make a directory")?;
            fs::write(log.join("machine.log"), "belongs to this machine\n")
                .context("cannot write")?;
        }
        self.write_rules()?;
        Ok(fleet)
    }

    fn first_version(&self) -> anyhow::Result<PathBuf> {
        let directory = self.directory.join("version-1");
        match &self.image {
            Some(image) => {
                say(&format!("Reading {} as the first version of the image.", image.display()));
                source_trees::from_image(image, &directory)
            }
            None => {
                say("Making the first version of the image from files of this machine.");
                source_trees::from_this_machine(&directory, &say)?;
                Ok(directory)
            }
        }
    }

    fn write_rules(&self) -> anyhow::Result<()> {
        fs::write(self.directory.join("filter"), FILTER).context("cannot write the filter")?;
        fs::write(self.directory.join("triggers"), TRIGGERS).context("cannot write the triggers")
    }

    fn add(
        &self,
        fleet: &Fleet,
        name: &str,
        source: &Path,
        flags: &[&OsStr],
    ) -> anyhow::Result<()> {
        let (filter, triggers) = (self.directory.join("filter"), self.directory.join("triggers"));
        let start = Instant::now();
        let words: [&OsStr; 5] = [
            "add".as_ref(),
            name.as_ref(),
            source.as_os_str(),
            filter.as_os_str(),
            triggers.as_os_str(),
        ];
        let output = fleet.imagetool(&[&words, flags].concat())?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "imagetool add failed: {}", said.trim());
        say(&format!("{} ({:.2} s)", said.trim(), start.elapsed().as_secs_f64()));
        Ok(())
    }
}

fn converge(fleet: &mut Fleet, image: &str) -> anyhow::Result<()> {
    let mut table = StatusTable::new();
    fleet.require(Some(image))?;
    let took = fleet.wait_synced(image, STEP_MAX, |subs| table.show(subs))?;
    table.finish();
    say(&format!("All synced with {image}, {:.2} s after the edit.", took.as_secs_f64()));
    Ok(())
}

fn repair(fleet: &mut Fleet, reference: &Path) -> anyhow::Result<()> {
    let sub = &fleet.subs[fleet.subs.len() / 2];
    let (hostname, root) = (sub.hostname.clone(), sub.root.clone());
    say(&format!("Changing files of {hostname}:"));
    let start = Instant::now();
    let drifts = make_drift(&root, &is_kept)?;
    for one in &drifts {
        say(&format!("  /{}: {}", one.path.display(), one.what));
    }
    let mut open: Vec<_> = drifts.iter().collect();
    while !open.is_empty() {
        fleet.check()?;
        if start.elapsed() > STEP_MAX {
            bail!("{hostname} was not repaired within {STEP_MAX:?}");
        }
        let mut still = Vec::new();
        for one in open {
            if is_repaired(&root, reference, &one.path)? {
                let after = start.elapsed().as_secs_f64();
                say(&format!("  repaired after {after:.2} s: /{}", one.path.display()));
            } else {
                still.push(one);
            }
        }
        open = still;
        std::thread::sleep(Duration::from_millis(10));
    }
    verify(fleet, reference)
}

/// True if `path` is the same in both trees, or in neither.
fn is_repaired(root: &Path, reference: &Path, path: &Path) -> anyhow::Result<bool> {
    let (left, right) = (root.join(path), reference.join(path));
    let there = |path: &Path| fs::symlink_metadata(path).is_ok();
    match (there(&left), there(&right)) {
        (true, true) => match compare(&left, &right, &|_| false) {
            Ok(differences) => Ok(differences.is_empty()),
            // The path is being replaced at this moment.
            Err(_) => Ok(false),
        },
        (left, right) => Ok(left == right),
    }
}

fn show_update(fleet: &Fleet) -> anyhow::Result<()> {
    for sub in &fleet.subs {
        let detail = fleet.detail(&sub.hostname)?;
        let poll = detail.poll.context("a synced machine was polled")?;
        let update = poll.last_update.context("a machine that was updated reports its update")?;
        let (objects, bytes) = poll.last_fetch.map_or((0, 0), |fetch| (fetch.objects, fetch.bytes));
        let window_ms = Duration::from_nanos(update.window_ns).as_secs_f64() * 1e3;
        say(&format!(
            "  {}: fetched {objects} objects ({bytes} bytes), {} operations, inconsistent for \
             {window_ms:.2} ms",
            sub.hostname, update.operations
        ));
    }
    Ok(())
}

/// Compares each machine's tree with `reference`, and checks that kept files are unchanged.
fn verify(fleet: &Fleet, reference: &Path) -> anyhow::Result<()> {
    say("Comparing the tree of each machine with the source.");
    for sub in &fleet.subs {
        let differences = compare(reference, &sub.root, &is_kept)?;
        if let Some(first) = differences.first() {
            bail!("{}: {} differences, the first: {first}", sub.hostname, differences.len());
        }
        let kept = fs::read_to_string(sub.root.join("var/log/machine.log")).unwrap_or_default();
        ensure!(kept == "belongs to this machine\n", "{} lost a file that it keeps", sub.hostname);
    }
    say(&format!("{} trees are equal to the source, attribute by attribute.", fleet.subs.len()));
    Ok(())
}

/// Paths, relative to a root, that belong to subd or that [`FILTER`] keeps.
fn is_kept(path: &Path) -> bool {
    let kept = ["tmp", "var/tmp", "var/log", "proc", "sys", "run", "dev"];
    path.starts_with(".subd")
        || kept.iter().any(|kept| path.starts_with(kept) && path != Path::new(kept))
}

fn say(text: &str) {
    println!("{text}");
}

/// The live table of machines on stderr: redrawn in place on a terminal, else a line for each
/// change.
struct StatusTable {
    start: Instant,
    terminal: bool,
    lines: usize,
    last: Vec<String>,
}

impl StatusTable {
    fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { start: Instant::now(), terminal, lines: 0, last: Vec::new() }
    }

    /// Shows `subs`, if they differ from what was shown last.
    fn show(&mut self, subs: &[SubSummary]) {
        let rows: Vec<String> = subs
            .iter()
            .map(|sub| {
                let address = sub.address.map_or_else(String::new, |address| address.to_string());
                let detail: String = sub.detail.chars().take(60).collect();
                format!("{:<8} {address:<18} {:<16} {detail}", sub.hostname, sub.status)
            })
            .collect();
        if rows == self.last {
            return;
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let mut text = String::new();
        if self.terminal {
            if self.lines > 0 {
                // Up to the first line of the table, and clear from there.
                text.push_str(&format!("\x1b[{}A\x1b[J", self.lines));
            }
            text.push_str(&format!("  {seconds:>7.2} s  HOST     ADDRESS            STATUS\n"));
            for row in &rows {
                text.push_str(&format!("             {row}\n"));
            }
            self.lines = rows.len() + 1;
        } else {
            for row in rows.iter().filter(|row| !self.last.contains(row)) {
                text.push_str(&format!("  {seconds:>7.2} s  {row}\n"));
            }
        }
        self.last = rows;
        // A closed terminal must not stop the fleet.
        let _ignored = std::io::stderr().write_all(text.as_bytes());
    }

    /// Ends the table in place: what follows is below it.
    fn finish(&mut self) {
        self.lines = 0;
        self.last.clear();
    }
}
