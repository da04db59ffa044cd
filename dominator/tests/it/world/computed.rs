//! The filegen-server of the simulation, and how the dominator asks it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::file_generator::{GeneratedContent, Generator, Generators};
use dominator::core::computed::rollout::ContentReport;
use dominator::core::computed::{
    Batch, BatchAnswer, ComputedTable, KnownContent, KnownFiles, StoredChange, StoredFiles,
    WantedImage,
};
use dominator::core::sub::Event;
use model::image::ComputedRule;
use model::image::computed::{ComputedFile, ComputedFiles, fill_in};
use model::image::required::RequiredImage;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::{Time, Tree};

use super::{Happening, World, no_limits};

/// The source of all computed files of the simulation.
pub const SOURCE: &str = "filegen:6972";

/// How often first machines are looked at.
const ADVANCE_INTERVAL: Duration = Duration::from_secs(5);

/// How long all content is valid, in seconds.
const VALID_SECONDS: u64 = 7_200;

/// Content that the server makes for one machine.
fn content(hostname: &str, path: &str, version: u64) -> String {
    // Machines share content, as those of one location do.
    format!("{path} of {} by {version}", hostname.len())
}

fn version_id(version: u64) -> ObjectId {
    Algorithm::Blake3.digest(&version.to_le_bytes())
}

/// What happens between the dominator and the server.
pub enum FilegenEvent {
    GeneratorsChanged,
    Ask,
    /// The answers to a batch; `None` if the server is away.
    Generated(Batch, Option<Vec<BatchAnswer>>),
    /// Something else is known of a machine.
    Known(usize, Box<KnownFiles>),
    /// The time has come to look at first machines.
    Advance,
}

#[derive(Default)]
pub struct Filegen {
    table: ComputedTable,
    /// What survives a crash of the dominator.
    stored: BTreeMap<String, StoredFiles>,
    stored_changes: Vec<StoredChange>,
    version: u64,
    is_away: bool,
    /// The next time at which the server is asked.
    asking: Option<Duration>,
    /// The computed files of each machine that its state machine was told: those whose content is
    /// that of now.
    told: BTreeMap<usize, BTreeSet<ComputedRule>>,
}

impl World {
    /// Makes the server answer, or not.
    pub fn set_filegen_away(&mut self, is_away: bool) {
        self.note(0, &format!("the filegen-server is away: {is_away}"));
        self.filegen.is_away = is_away;
    }

    /// Changes what the server makes for all machines.
    pub fn change_generators(&mut self) {
        self.filegen.version += 1;
        self.note(0, &format!("the filegen-server has version {}", self.filegen.version));
        self.schedule_filegen(Duration::from_secs(1), FilegenEvent::GeneratorsChanged);
    }

    /// Starts the dominator's part anew, with what it had stored.
    pub(super) fn start_asking(&mut self) {
        let (files, changes) = (&self.filegen.stored, &self.filegen.stored_changes);
        self.filegen.table = ComputedTable::new(files.clone(), changes.clone());
        self.filegen.table.set_limits(no_limits().failures);
        self.filegen.asking = None;
        self.filegen.told.clear();
        self.schedule_filegen(Duration::from_secs(2), FilegenEvent::GeneratorsChanged);
        self.schedule_filegen(ADVANCE_INTERVAL, FilegenEvent::Advance);
    }

    fn schedule_filegen(&mut self, delay: Duration, event: FilegenEvent) {
        let run = self.run;
        self.schedule(delay, Happening::Filegen { run, event: Box::new(event) });
    }

    pub(super) fn filegen_event(&mut self, event: FilegenEvent) {
        match event {
            FilegenEvent::GeneratorsChanged => self.take_generators(),
            FilegenEvent::Ask => self.ask_filegen(),
            FilegenEvent::Generated(batch, made) => self.take_generated(&batch, made),
            FilegenEvent::Known(host, known) => {
                let unknown = &known.unknown;
                let is_of_now =
                    |file: &&ComputedFile| unknown.iter().all(|unknown| unknown.rule != file.rule);
                let rules = known.files.iter().filter(is_of_now).map(|file| (*file.rule).clone());
                self.filegen.told.insert(host, rules.collect());
                self.step(host, Event::ComputedKnown(known));
            }
            FilegenEvent::Advance => {
                let now = self.time();
                self.filegen.table.advance(now);
                self.tell_computed();
                self.schedule_filegen(ADVANCE_INTERVAL, FilegenEvent::Advance);
            }
        }
    }

    /// True if the machine lacks content of its required image.
    pub(super) fn lacks_content(&self, host: usize) -> bool {
        let image = &self.images[self.required(host)];
        let told = self.filegen.told.get(&host);
        let is_told = |rule: &ComputedRule| told.is_some_and(|rules| rules.contains(rule));
        !image.content.computed.iter().all(is_told)
    }

    pub(super) fn want_computed(&mut self, machine: &Arc<Machine>, image: &RequiredImage) {
        let (algorithm, rules) = (image.tree.algorithm(), &image.content.computed);
        let wanted = WantedImage { digest: image.digest, algorithm, rules };
        let now = self.time();
        self.filegen.table.want(machine, wanted, now);
        self.tell_files(&machine.hostname);
        self.tell_computed();
    }

    /// Takes what the dominator's part for one machine says of its files.
    pub(super) fn report_content(&mut self, host: usize, round: u64, report: ContentReport) {
        let (hostname, now) = (self.machines[host].hostname.clone(), self.time());
        self.filegen.table.report(&hostname, round, report, now);
        self.tell_computed();
    }

    /// Takes the versions of the generators, once the server answers.
    fn take_generators(&mut self) {
        if self.filegen.is_away {
            let again = FilegenEvent::GeneratorsChanged;
            return self.schedule_filegen(Duration::from_secs(10), again);
        }
        let version = version_id(self.filegen.version);
        let rules = self.images.values().flat_map(|image| &image.content.computed);
        let revision = self.filegen.version + 1;
        let generator = |rule: &ComputedRule| Generator {
            path: rule.path.clone(),
            kind: "template".to_owned(),
            version,
            is_secret: false,
            revision,
            resources: Vec::new(),
        };
        let generators = rules.map(generator).collect();
        let generators = Generators { generators, numbering: 1, revision, ..Generators::default() };
        let now = self.time();
        self.filegen.table.take_generators(SOURCE, Some(&generators), now);
        self.tell_computed();
    }

    fn ask_filegen(&mut self) {
        if self.filegen.asking.is_none_or(|at| at > self.now) {
            return;
        }
        self.filegen.asking = None;
        let now = self.time();
        while let Some(batch) = self.filegen.table.next_batch(&SOURCE.into(), now) {
            let delay = Duration::from_millis(1 + self.random.below(self.faults.delay_max));
            let answers = match self.filegen.is_away {
                true => None,
                false => Some(self.answers(&batch)),
            };
            self.schedule_filegen(delay, FilegenEvent::Generated(batch, answers));
        }
        self.schedule_asking();
    }

    fn answers(&self, batch: &Batch) -> Vec<BatchAnswer> {
        let now = u64::try_from(self.time().wall.seconds).unwrap_or(0);
        let valid_until_seconds = if self.troubles.is_timeless { 0 } else { now + VALID_SECONDS };
        let all = batch.request.machines.iter().zip(&batch.records);
        let of_machine = all.map(|(wanted, record)| {
            let made = wanted.paths.iter().map(|path| {
                let hostname = &wanted.machine.hostname;
                let content = content(hostname, &path.to_string(), self.filegen.version);
                let made = GeneratedContent {
                    id: wanted.algorithm.digest(content.as_bytes()),
                    size_bytes: 0,
                    valid_until_seconds,
                    generator: version_id(self.filegen.version),
                    is_secret: false,
                };
                let size_bytes = u32::try_from(content.len()).expect("it is short");
                Ok(KnownContent::new(&made, *record, size_bytes, Time::default()))
            });
            made.collect()
        });
        of_machine.collect()
    }

    fn take_generated(&mut self, batch: &Batch, made: Option<Vec<BatchAnswer>>) {
        let (now, jitter) = (self.time(), self.random.below(1_000) as u16);
        match made {
            Some(answers) => self.filegen.table.take(batch, answers, now, jitter),
            None => self.filegen.table.failed(batch, "connection refused", now, jitter),
        }
        self.tell_computed();
    }

    /// Tells a machine what is known of its files.
    fn tell_files(&mut self, hostname: &str) {
        let known = self.filegen.table.known(hostname);
        let host = self.machines.iter().position(|machine| machine.hostname == *hostname);
        let host = host.expect("only machines want files");
        self.schedule_filegen(Duration::ZERO, FilegenEvent::Known(host, Box::new(known)));
    }

    /// Tells machines what is known of their files, and stores it.
    fn tell_computed(&mut self) {
        for hostname in self.filegen.table.take_changed() {
            self.tell_files(&hostname);
            let stored = self.filegen.table.stored(&hostname);
            self.filegen.stored.insert(hostname, stored);
        }
        if let Some(changes) = self.filegen.table.take_changes() {
            self.filegen.stored_changes = changes;
        }
        self.schedule_asking();
    }

    fn schedule_asking(&mut self) {
        let Some(at) = self.filegen.table.ask_at(SOURCE) else { return };
        let at = at.max(self.now + Duration::from_millis(50));
        if self.filegen.asking.is_none_or(|known| at < known) {
            self.filegen.asking = Some(at);
            self.schedule_filegen(at - self.now, FilegenEvent::Ask);
        }
    }

    /// Returns the tree that a machine must have, by what the server would make now.
    pub(super) fn required_tree(&self, host: usize, image: &RequiredImage, seen: &Tree) -> Tree {
        let hostname = &self.machines[host].hostname;
        let files = image.content.computed.iter().map(|rule| {
            let content = content(hostname, &rule.path.to_string(), self.filegen.version);
            ComputedFile {
                rule: Arc::new(rule.clone()),
                object: image.tree.algorithm().digest(content.as_bytes()).into(),
                size_bytes: content.len() as u64,
                since: Time::default(),
            }
        });
        fill_in(&image.tree, &ComputedFiles::new(files.collect()), seen).unwrap()
    }
}
