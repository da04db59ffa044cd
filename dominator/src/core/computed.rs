//! Decides which content of computed files is asked for from which filegen-server, and when.
//!
//! Content is asked for when nothing is known of it, when the record of the machine or the
//! generator of the path has changed since it was made, and when it is no longer valid. When the
//! server fails, known content stays in use. Other content than a machine has is used when
//! [`rollout`] lets it.
//!
//! # Invariants
//!
//! * Known content is in the store ([`crate::storage::computed`]) before it is known here.
//! * A failure never removes known content.
// tidy: core

mod changes;
pub mod ended_certificates;
pub mod gates;
mod questions;
pub mod rollout;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::codec::{Encoding, encode};
use api::file_generator::{GeneratedContent, Generators};
use model::escape::ByteText;
use model::image::ComputedRule;
use model::image::computed::{ComputedFile, ComputedFiles, Unknown};
use model::mdb::Machine;
use model::object::{Algorithm, CompactId, ObjectId};
use model::path::TreePath;
use model::tree::Time;
use rollouts::content::ContentRevision;
use serde::{Deserialize, Serialize};

use crate::core::image_breaker::FailureLimits;
use crate::core::timing::Now;

use changes::Changes;
pub use changes::StoredChange;
use gates::Gates;
pub use questions::{Batch, BatchAnswer};
use questions::{is_current, may_be_certificate, next_question};
use rollout::{ChangedContent, ContentUpdate, Standing, Trial};

/// After how many failures in a row a server counts as silent.
const SILENT_AFTER: u32 = 2;

/// How long content may be past its end before it is reported, in seconds.
const OVERDUE: u64 = 60;

/// The start of the digest of a record or a generator: content that was made from equal ones need
/// not be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeFrom([u8; 16]);

impl MadeFrom {
    fn of(digest: &ObjectId) -> Self {
        Self(*digest.digest().first_chunk().expect("a digest has 32 bytes"))
    }

    /// Returns that of a machine and the outputs of its resources.
    fn of_record(machine: &Machine, outputs: &str) -> Self {
        let bytes = encode(Encoding::Bincode, "machine", machine);
        let mut bytes = bytes.expect("a record is a plain structure");
        bytes.extend(outputs.as_bytes());
        Self::of(&Algorithm::Blake3.digest(&bytes))
    }
}

/// Content that a filegen-server has made for a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownContent {
    pub object: CompactId,
    pub size_bytes: u32,
    /// When this content was first seen, for whichever machine.
    pub since: Time,
    /// When it must be made again, in seconds since 1970; 0 if never.
    pub valid_until_seconds: u64,
    pub record: MadeFrom,
    pub generator: MadeFrom,
}

impl KnownContent {
    /// Returns content that was made from `record`. It has `size_bytes`, and was first seen at
    /// `since`.
    #[must_use]
    pub fn new(content: &GeneratedContent, record: MadeFrom, size_bytes: u32, since: Time) -> Self {
        Self {
            object: content.id.into(),
            size_bytes,
            since,
            valid_until_seconds: content.valid_until_seconds,
            record,
            generator: MadeFrom::of(&content.generator),
        }
    }
}

/// The content of one computed file of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// What the machine is to have.
    used: Option<KnownContent>,
    /// What it is to have later.
    next: Option<Box<ChangedContent>>,
    /// What it had before the last change.
    former: Option<Box<ChangedContent>>,
}

impl Contents {
    /// Returns what was made last.
    fn newest(&self) -> Option<&KnownContent> {
        self.next.as_ref().map(|next| &next.content).or(self.used.as_ref())
    }

    fn all(&self) -> impl Iterator<Item = &KnownContent> {
        let changed = [&self.next, &self.former].into_iter().flatten();
        self.used.iter().chain(changed.map(|changed| &changed.content))
    }

    /// Forgets content that is not wanted. Returns true if there was some.
    fn retain(&mut self, is_wanted: impl Fn(&KnownContent) -> bool) -> bool {
        let is_lost = |content: &mut KnownContent| !is_wanted(content);
        let is_changed_lost = |changed: &mut Box<ChangedContent>| !is_wanted(&changed.content);
        let lost = [
            self.used.take_if(is_lost).is_some(),
            self.next.take_if(is_changed_lost).is_some(),
            self.former.take_if(is_changed_lost).is_some(),
        ];
        lost.contains(&true)
    }
}

/// All that is known of the computed files of one machine, as it is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFiles {
    pub files: Vec<(Arc<ComputedRule>, Contents)>,
    /// The digest of the image that they belong to.
    pub image: Option<ObjectId>,
    pub trial: Option<Trial>,
    /// The public key of the machine that the files are for: see
    /// [`api::file_generator::WantedFiles::key`]. `None` while one may be for a former key.
    pub key: Option<ByteText>,
    /// The outputs of its resources: see [`api::file_generator::WantedFiles::outputs`].
    pub outputs: Arc<str>,
}

/// One computed file of one machine.
#[derive(Debug)]
struct FileState {
    rule: Arc<ComputedRule>,
    contents: Contents,
    /// When it is asked for, on the clock of [`Now::elapsed`]; `None` if there is no reason to, or
    /// while it is being asked for.
    ask_at: Option<Duration>,
    failed: Option<Box<Failed>>,
    /// True if it is, or may be, a certificate for a former key of the machine.
    is_for_former_key: bool,
}

impl FileState {
    /// Sets when it is asked for, from what is known of it.
    fn schedule(&mut self, versions: Option<&Versions>, record: MadeFrom, now: Now) {
        self.ask_at = match self.is_for_former_key {
            true => Some(now.elapsed),
            false => next_question(versions, &self.rule, self.contents.newest(), record, now),
        };
    }

    /// Takes that the machine has another key: certificates, and what is not known to be none, are
    /// asked for again.
    fn ask_for_key(&mut self, versions: Option<&Versions>, now: Now) {
        // While it is being asked for, the answer tells.
        let is_asked = self.failed.is_some() || self.contents.newest().is_some();
        if is_asked && may_be_certificate(versions, &self.rule.path) {
            self.is_for_former_key = true;
            self.ask_at = Some(now.elapsed);
        }
    }

    /// Why the last question failed.
    fn why(&self) -> Option<&str> {
        self.failed.as_ref().map(|failed| &*failed.why)
    }
}

/// How often in a row a question has failed, and why it did the last time.
#[derive(Debug)]
struct Failed {
    count: u32,
    why: Arc<str>,
}

#[derive(Debug)]
struct MachineFiles {
    machine: Arc<Machine>,
    record: MadeFrom,
    algorithm: Algorithm,
    /// The digest of the image that has the files.
    image: CompactId,
    files: Box<[FileState]>,
    /// Counts how often the content in use changed.
    round: u64,
    standing: Standing,
    trial: Option<Trial>,
    /// True if certificates were renewed because of their age, and are not verified yet.
    is_renewing: bool,
    /// When it was last given a certificate after its own had ended, on the clock of
    /// [`Now::elapsed`].
    replaced_at: Option<Duration>,
}

/// What a machine is told of its computed files.
#[derive(Clone, Debug, Default)]
pub struct KnownFiles {
    /// What it is to have.
    pub files: Arc<ComputedFiles>,
    /// What is not known, and why. Content that was made from a former record or by a former
    /// generator is in both.
    pub unknown: Arc<[Unknown]>,
    /// Why other content is not in use yet, if there is some.
    pub held: Option<String>,
    /// The number of these files, for [`ComputedTable::report`].
    pub round: u64,
    pub update: ContentUpdate,
}

/// The image whose computed files a machine needs.
#[derive(Clone, Copy, Debug)]
pub struct WantedImage<'a> {
    pub digest: ObjectId,
    pub algorithm: Algorithm,
    pub rules: &'a [ComputedRule],
}

/// Why content is not known that no question has failed for.
pub const BEING_ASKED: &str = "it is being asked";

/// The generator of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GeneratorVersion {
    version: MadeFrom,
    /// The content revision since which it has this version.
    revision: u64,
    is_certificate: bool,
}

/// The generators of one server, by path.
type Versions = BTreeMap<TreePath, GeneratorVersion>;

fn versions_of(generators: &Generators) -> Versions {
    let versions = generators.generators.iter().map(|generator| {
        let version = GeneratorVersion {
            version: MadeFrom::of(&generator.version),
            revision: generator.revision,
            is_certificate: generator.kind == "certificate",
        };
        (generator.path.clone(), version)
    });
    versions.collect()
}

/// How often in a row a server did not tell of its generators, and why.
#[derive(Debug, Default)]
struct Silence {
    failures: u32,
    why: String,
}

/// The computed files of all machines.
#[derive(Debug, Default)]
pub struct ComputedTable {
    /// Boxed, because half of a node of the map may be empty.
    machines: BTreeMap<String, Box<MachineFiles>>,
    /// The public keys that machines have shown last.
    keys: BTreeMap<String, ByteText>,
    /// The outputs of the resources of machines that have some.
    outputs: BTreeMap<String, Arc<str>>,
    /// What was known before the dominator was restarted, of machines that want nothing yet.
    restored: BTreeMap<String, StoredFiles>,
    rules: BTreeSet<Arc<ComputedRule>>,
    generators: BTreeMap<String, Versions>,
    /// The servers that did not tell of their generators when they were asked last: changes of
    /// these are not seen.
    silences: BTreeMap<String, Silence>,
    /// The machines of which something else is known than when that was last taken.
    changed: BTreeSet<String>,
    changes: Changes,
    gates: Gates,
    /// False if the changes are not as they were last taken to be stored.
    is_saved: bool,
}

impl ComputedTable {
    /// Starts with what was stored.
    #[must_use]
    pub fn new(restored: BTreeMap<String, StoredFiles>, changes: Vec<StoredChange>) -> Self {
        let mut changes = Changes::new(changes);
        let (mut keys, mut outputs) = (BTreeMap::new(), BTreeMap::new());
        for (hostname, stored) in &restored {
            if let Some(key) = &stored.key {
                keys.insert(hostname.clone(), key.clone());
            }
            if !stored.outputs.is_empty() {
                outputs.insert(hostname.clone(), Arc::clone(&stored.outputs));
            }
            let Some(trial) = &stored.trial else { continue };
            if let Some(change) = changes.get_mut(&trial.change) {
                change.got(hostname, trial.is_first);
            }
        }
        Self { keys, outputs, restored, changes, is_saved: true, ..Self::default() }
    }

    /// Sets when updates to changed content stop.
    pub fn set_limits(&mut self, limits: FailureLimits) {
        self.changes.set_limits(limits);
    }

    /// Sets the computed files that a machine needs. Tell the machine afterwards what is known of
    /// them: [`Self::take_changed`] has it only if something else than before is to be stored.
    pub fn want(&mut self, machine: &Arc<Machine>, image: WantedImage<'_>, now: Now) {
        let WantedImage { digest, algorithm, rules } = image;
        let hostname = &machine.hostname;
        if self.machines.get(hostname).is_some_and(|files| files.image.id() != digest) {
            // Whatever happens next may be due to the image.
            self.withdraw(hostname);
        }
        let stored = match self.machines.contains_key(hostname) {
            true => self.stored(hostname),
            false => self.restored.remove(hostname).unwrap_or_default(),
        };
        let former = self.machines.remove(hostname);
        if rules.is_empty() {
            if !stored.files.is_empty() {
                self.changed.insert(hostname.clone());
            }
            return self.changes.forget(hostname);
        }
        let is_same_image = stored.image == Some(digest);
        let trial = stored.trial.map(|trial| Trial { since: now.elapsed, ..trial });
        let mut before: BTreeMap<Arc<ComputedRule>, Contents> = stored.files.into_iter().collect();
        // The machine may have shown another key before this was called, and told other outputs.
        let is_other_key = stored.key.as_ref() != self.key(hostname);
        let has_other_outputs = *stored.outputs != *self.outputs(hostname);
        let mut is_changed = !is_same_image || is_other_key || has_other_outputs;
        for contents in before.values_mut() {
            is_changed |= contents.retain(|known| known.object.id().algorithm() == algorithm);
        }
        let record = MadeFrom::of_record(machine, self.outputs(hostname));
        let files = rules.iter().map(|rule| {
            let contents = before.remove(rule).unwrap_or_default();
            let rule = self.shared_rule(rule);
            let versions = self.generators.get(&rule.source);
            let mut file =
                FileState { rule, contents, ask_at: None, failed: None, is_for_former_key: false };
            file.schedule(versions, record, now);
            if is_other_key {
                file.ask_for_key(versions, now);
            }
            file
        });
        let files = files.collect();
        if is_changed || !before.is_empty() {
            self.changed.insert(hostname.clone());
        }
        let files = MachineFiles {
            files,
            machine: Arc::clone(machine),
            record,
            algorithm,
            image: digest.into(),
            round: former.as_ref().map_or(0, |files| files.round + 1),
            standing: Standing::Away,
            trial,
            is_renewing: former.as_ref().is_some_and(|files| files.is_renewing),
            replaced_at: former.and_then(|files| files.replaced_at),
        };
        self.changes.take_machine(hostname, &files.waits(), files.trial.as_ref(), now.wall);
        self.machines.insert(hostname.clone(), Box::new(files));
        if !is_same_image {
            // The image may have changed while the dominator was not running.
            self.withdraw(hostname);
        }
        self.apply_gates(hostname);
    }

    /// Takes the public key that a machine has shown. What could not be made, and what may be made
    /// for another key, is asked for again. Returns false if it is the key that is known.
    pub fn take_key(&mut self, hostname: &str, key: &[u8], now: Now) -> bool {
        if self.key(hostname).is_some_and(|known| *known.0 == *key) {
            return false;
        }
        self.keys.insert(hostname.to_owned(), ByteText(key.to_vec()));
        let Some(files) = self.machines.get_mut(hostname) else { return true };
        for file in &mut files.files {
            file.ask_for_key(self.generators.get(&file.rule.source), now);
        }
        self.changed.insert(hostname.to_owned());
        true
    }

    /// Takes the outputs of the resources of a machine, as JSON. What was made of others is asked
    /// for again. Returns false if they are those that are known.
    pub fn take_outputs(&mut self, hostname: &str, outputs: &str, now: Now) -> bool {
        if self.outputs(hostname) == outputs {
            return false;
        }
        match outputs {
            "" => drop(self.outputs.remove(hostname)),
            _ => drop(self.outputs.insert(hostname.to_owned(), outputs.into())),
        }
        let Some(files) = self.machines.get_mut(hostname) else { return true };
        files.record = MadeFrom::of_record(&files.machine, outputs);
        for file in &mut files.files {
            // What was tried with the former ones may succeed with these.
            match file.failed {
                Some(_) => file.ask_at = Some(now.elapsed),
                None => file.schedule(self.generators.get(&file.rule.source), files.record, now),
            }
        }
        self.changed.insert(hostname.to_owned());
        true
    }

    /// Returns the outputs of the resources of a machine, as JSON.
    #[must_use]
    pub fn outputs(&self, hostname: &str) -> &str {
        self.outputs.get(hostname).map(|outputs| &**outputs).unwrap_or_default()
    }

    /// Returns the public key that a machine has shown last.
    #[must_use]
    pub fn key(&self, hostname: &str) -> Option<&ByteText> {
        self.keys.get(hostname)
    }

    /// Forgets a machine that is not managed any more.
    pub fn forget(&mut self, hostname: &str) {
        self.machines.remove(hostname);
        self.keys.remove(hostname);
        self.outputs.remove(hostname);
        self.restored.remove(hostname);
        self.changed.remove(hostname);
        self.changes.forget(hostname);
    }

    /// Forgets what was stored of machines that are not managed any more.
    pub fn forget_others(&mut self, is_managed: impl Fn(&str) -> bool) {
        let gone: Vec<String> =
            self.restored.keys().filter(|hostname| !is_managed(hostname)).cloned().collect();
        gone.iter().for_each(|hostname| self.forget(hostname));
    }

    fn shared_rule(&mut self, rule: &ComputedRule) -> Arc<ComputedRule> {
        match self.rules.get(rule) {
            Some(known) => Arc::clone(known),
            None => {
                let rule = Arc::new(rule.clone());
                self.rules.insert(Arc::clone(&rule));
                rule
            }
        }
    }

    /// Takes that a server could not be asked for its generators, for this reason. Returns how
    /// often in a row that was so.
    pub fn could_not_ask(&mut self, source: &str, why: String) -> u32 {
        let silence = self.silences.entry(source.to_owned()).or_default();
        *silence = Silence { failures: silence.failures.saturating_add(1), why };
        silence.failures
    }

    /// Takes that a server has told of its generators: what they are, or that they are as before.
    pub fn take_generators(&mut self, source: &str, generators: Option<&Generators>, now: Now) {
        self.silences.remove(source);
        if let Some(generators) = generators {
            let newest =
                ContentRevision { numbering: generators.numbering, number: generators.revision };
            self.take_numbering(source, generators.numbering, generators.revision, now);
            self.take_newest(source, newest);
            self.set_generators(source, versions_of(generators), now);
            self.take_orders(source, &generators.orders, now);
        }
    }

    fn set_generators(&mut self, source: &str, versions: Versions, now: Now) {
        let former = self.generators.insert(source.to_owned(), versions);
        let versions = self.generators.get(source);
        for (hostname, files) in &mut self.machines {
            let record = files.record;
            for file in files.files.iter_mut().filter(|file| file.rule.source == source) {
                let is_of = |versions, known| is_current(versions, &file.rule, known, record);
                if file
                    .contents
                    .newest()
                    .is_some_and(|known| is_of(former.as_ref(), known) != is_of(versions, known))
                {
                    self.changed.insert(hostname.clone());
                }
                // One that failed is tried again with the new generator, one that is asked for not.
                if file.ask_at.is_some() || file.contents.newest().is_some() {
                    file.schedule(versions, record, now);
                }
            }
        }
    }

    /// Takes the machines of which something else is known than when this was called last.
    pub fn take_changed(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed)
    }

    /// Returns what a machine is told of its computed files.
    #[must_use]
    pub fn known(&self, hostname: &str) -> KnownFiles {
        let Some(files) = self.machines.get(hostname) else { return KnownFiles::default() };
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        for file in &files.files {
            let versions = self.generators.get(&file.rule.source);
            let is_of_now =
                |known: &KnownContent| is_current(versions, &file.rule, known, files.record);
            if let Some(content) = &file.contents.used {
                known.push(ComputedFile {
                    rule: Arc::clone(&file.rule),
                    object: content.object.clone(),
                    size_bytes: content.size_bytes.into(),
                    since: content.since,
                });
            }
            let waits = file.contents.next.as_ref().filter(|_| file.contents.used.is_none());
            if let Some(next) = waits {
                let why = self.waiting_text(hostname, &next.change).into();
                unknown.push(Unknown { rule: Arc::clone(&file.rule), why });
            } else if !file.contents.newest().is_some_and(is_of_now) {
                let failed = file.failed.as_ref();
                let why = failed.map_or_else(|| BEING_ASKED.into(), |failed| failed.why.clone());
                unknown.push(Unknown { rule: Arc::clone(&file.rule), why });
            }
        }
        KnownFiles {
            files: Arc::new(ComputedFiles::new(known)),
            unknown: unknown.into(),
            held: self.held_text(files),
            round: files.round,
            update: files.update(),
        }
    }

    /// True if the computed files of the machine are those of this record.
    #[must_use]
    pub fn has_record(&self, machine: &Machine) -> bool {
        let files = self.machines.get(&machine.hostname);
        files.is_some_and(|files| {
            files.record == MadeFrom::of_record(machine, self.outputs(&machine.hostname))
        })
    }

    /// Returns what is to be stored of a machine.
    #[must_use]
    pub fn stored(&self, hostname: &str) -> StoredFiles {
        let Some(files) = self.machines.get(hostname) else {
            return self.restored.get(hostname).cloned().unwrap_or_default();
        };
        let key = self.keys.get(hostname);
        let key = key.filter(|_| files.files.iter().all(|file| !file.is_for_former_key));
        let stored = files.files.iter().filter(|file| file.contents.all().next().is_some());
        StoredFiles {
            files: stored.map(|file| (Arc::clone(&file.rule), file.contents.clone())).collect(),
            image: Some(files.image.id()),
            trial: files.trial.clone(),
            key: key.cloned(),
            outputs: self.outputs.get(hostname).cloned().unwrap_or_default(),
        }
    }

    /// Returns the changes of content that are to be stored, if they are others than when this was
    /// called last.
    pub fn take_changes(&mut self) -> Option<Vec<StoredChange>> {
        (!std::mem::replace(&mut self.is_saved, true)).then(|| self.changes.stored())
    }

    /// Returns the machines of which something is known, and the digests of all known content.
    #[must_use]
    pub fn needed(&self) -> (BTreeSet<String>, BTreeSet<ObjectId>) {
        let machines = self.machines.keys().chain(self.restored.keys()).cloned();
        let files = self.machines.values().flat_map(|files| files.files.iter());
        let known = files.flat_map(|file| file.contents.all());
        let restored = self.restored.values().flat_map(|stored| &stored.files);
        let restored = restored.flat_map(|(_, contents)| contents.all());
        (machines.collect(), known.chain(restored).map(|known| known.object.id()).collect())
    }

    /// Describes for each server why it is silent, or the files in use that could not be made again
    /// or are past their end.
    #[must_use]
    pub fn troubles(&self, now: Time) -> BTreeMap<&str, String> {
        let now = u64::try_from(now.seconds).unwrap_or(0);
        let mut troubles: BTreeMap<&str, (usize, String)> = BTreeMap::new();
        for (hostname, files) in &self.machines {
            for file in &files.files {
                // What is in use may wait for other content for longer than it is valid.
                let Contents { used, next, .. } = &file.contents;
                let newest = next.as_ref().map(|next| &next.content);
                let Some(known) = used.as_ref().or(newest) else { continue };
                let end = known.valid_until_seconds;
                let is_over = end > 0 && end.saturating_add(OVERDUE) < now;
                if !is_over && file.failed.is_none() {
                    continue;
                }
                let (count, _) = troubles.entry(&file.rule.source).or_insert_with(|| {
                    let why = file.why().unwrap_or("it is past its end");
                    (0, format!("{} of {hostname}: {why}", file.rule.path))
                });
                *count += 1;
            }
        }
        let text = |(count, first): (usize, String)| match count {
            1 => first,
            _ => format!("{first}; and {} more files", count - 1),
        };
        let troubles = troubles.into_iter().map(|(source, trouble)| (source, text(trouble)));
        let silences = self.silences.iter().filter(|(_, silence)| silence.failures >= SILENT_AFTER);
        let silences = silences.map(|(source, silence)| (source.as_str(), silence.why.clone()));
        troubles.chain(silences).collect()
    }
}

#[cfg(test)]
mod tests;
