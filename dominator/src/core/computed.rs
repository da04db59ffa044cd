//! Decides which content of computed files is asked for from which filegen-server, and when.
//!
//! Content is asked for when nothing is known of it, when the record of the machine or the
//! generator of the path has changed since it was made, and when it is no longer valid. When the
//! server fails, known content stays in use.
//!
//! # Invariants
//!
//! * Known content is in the store ([`crate::storage::computed`]) before it is known here.
//! * A failure never removes known content.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::codec::{Encoding, encode};
use api::file_generator::{
    FILES_MAX, GenerateRequest, GeneratedContent, MACHINES_MAX, WantedFiles,
};
use model::backoff::{doubled, jittered};
use model::image::ComputedRule;
use model::image::computed::{ComputedFile, ComputedFiles, Unknown};
use model::mdb::Machine;
use model::object::{Algorithm, CompactId, ObjectId};
use model::path::TreePath;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::core::timing::{HOLD_LONGEST, Now, RETRY_FIRST};

/// The shortest time between two questions for the same file, whatever the server says.
const VALID_SHORTEST: Duration = Duration::from_secs(5);

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

    fn of_record(machine: &Machine) -> Self {
        let bytes = encode(Encoding::Bincode, "machine", machine);
        Self::of(&Algorithm::Blake3.digest(&bytes.expect("a record is a plain structure")))
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

/// All that is known of the computed files of one machine, as it is stored.
pub type StoredFiles = Vec<(Arc<ComputedRule>, KnownContent)>;

/// One computed file of one machine.
#[derive(Debug)]
struct FileState {
    rule: Arc<ComputedRule>,
    known: Option<KnownContent>,
    /// When it is asked for, on the clock of [`Now::elapsed`]; `None` if there is no reason to, or
    /// while it is being asked for.
    ask_at: Option<Duration>,
    failures: u32,
    /// Why the last question failed.
    why: Option<Arc<str>>,
}

#[derive(Debug)]
struct MachineFiles {
    machine: Arc<Machine>,
    record: MadeFrom,
    algorithm: Algorithm,
    files: Box<[FileState]>,
}

/// Why content is not known that no question has failed for.
pub const BEING_ASKED: &str = "it is being asked";

/// The versions of the generators of one server, by path.
type Versions = BTreeMap<TreePath, ObjectId>;

/// How often in a row a server did not tell of its generators, and why.
#[derive(Debug, Default)]
struct Silence {
    failures: u32,
    why: String,
}

/// A question to one server.
#[derive(Clone, Debug)]
pub struct Batch {
    pub source: Arc<str>,
    pub request: GenerateRequest,
    /// The digests of the records in the request.
    pub records: Vec<MadeFrom>,
}

/// The answer for one machine of a batch: what became of its paths, in their order.
pub type BatchAnswer = Vec<Result<KnownContent, Arc<str>>>;

/// The computed files of all machines.
#[derive(Debug, Default)]
pub struct ComputedTable {
    machines: BTreeMap<String, MachineFiles>,
    /// What was known before the dominator was restarted, of machines that want nothing yet.
    restored: BTreeMap<String, StoredFiles>,
    rules: BTreeSet<Arc<ComputedRule>>,
    generators: BTreeMap<String, Versions>,
    /// The servers that did not tell of their generators when they were asked last: changes of
    /// these are not seen.
    silences: BTreeMap<String, Silence>,
    /// The machines of which something else is known than when that was last taken.
    changed: BTreeSet<String>,
}

impl ComputedTable {
    /// Starts with what was stored.
    #[must_use]
    pub fn new(restored: BTreeMap<String, StoredFiles>) -> Self {
        Self { restored, ..Self::default() }
    }

    /// Sets the computed files that a machine needs.
    pub fn want(
        &mut self,
        machine: &Arc<Machine>,
        algorithm: Algorithm,
        rules: &[ComputedRule],
        now: Now,
    ) {
        let hostname = &machine.hostname;
        let mut before: BTreeMap<Arc<ComputedRule>, KnownContent> =
            match self.machines.remove(hostname) {
                Some(files) => {
                    let files = files.files.into_iter();
                    files.filter_map(|file| Some((file.rule, file.known?))).collect()
                }
                None => self.restored.remove(hostname).into_iter().flatten().collect(),
            };
        if rules.is_empty() {
            if !before.is_empty() {
                self.changed.insert(hostname.clone());
            }
            return;
        }
        before.retain(|_, known| known.object.id().algorithm() == algorithm);
        self.changed.insert(hostname.clone());
        let record = MadeFrom::of_record(machine);
        let files = rules.iter().map(|rule| {
            let known = before.remove(rule);
            let rule = self.shared_rule(rule);
            let versions = self.generators.get(&rule.source);
            let ask_at = next_question(versions, &rule, known.as_ref(), record, now);
            FileState { rule, known, ask_at, failures: 0, why: None }
        });
        let files = files.collect();
        let files = MachineFiles { machine: Arc::clone(machine), record, algorithm, files };
        self.machines.insert(hostname.clone(), files);
    }

    /// Forgets a machine that is not managed any more.
    pub fn forget(&mut self, hostname: &str) {
        self.machines.remove(hostname);
        self.restored.remove(hostname);
        self.changed.remove(hostname);
    }

    /// Forgets what was stored of machines that are not managed any more.
    pub fn forget_others(&mut self, is_managed: impl Fn(&str) -> bool) {
        self.restored.retain(|hostname, _| is_managed(hostname));
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

    /// Takes that a server has told of its generators: `versions`, or that they are as before.
    pub fn take_generators(&mut self, source: &str, versions: Option<Versions>, now: Now) {
        self.silences.remove(source);
        if let Some(versions) = versions {
            self.set_generators(source, versions, now);
        }
    }

    /// Takes the versions of the generators of a server, which have changed.
    pub fn set_generators(&mut self, source: &str, versions: Versions, now: Now) {
        let former = self.generators.insert(source.to_owned(), versions);
        let versions = self.generators.get(source);
        for (hostname, files) in &mut self.machines {
            let record = files.record;
            for file in files.files.iter_mut().filter(|file| file.rule.source == source) {
                let is_of = |versions, known| is_current(versions, &file.rule, known, record);
                if file
                    .known
                    .as_ref()
                    .is_some_and(|known| is_of(former.as_ref(), known) != is_of(versions, known))
                {
                    self.changed.insert(hostname.clone());
                }
                // One that failed is tried again with the new generator, one that is asked for not.
                if file.ask_at.is_some() || file.known.is_some() {
                    let known = file.known.as_ref();
                    file.ask_at = next_question(versions, &file.rule, known, record, now);
                }
            }
        }
    }

    /// Returns when the next question to a server is due.
    #[must_use]
    pub fn ask_at(&self, source: &str) -> Option<Duration> {
        let files = self.machines.values().flat_map(|files| files.files.iter());
        files.filter(|file| file.rule.source == source).filter_map(|file| file.ask_at).min()
    }

    /// Returns the next question to a server, if one is due.
    pub fn next_batch(&mut self, source: &Arc<str>, now: Now) -> Option<Batch> {
        let mut batch = Batch {
            source: Arc::clone(source),
            request: GenerateRequest::default(),
            records: Vec::new(),
        };
        let mut count = 0;
        for files in self.machines.values_mut() {
            if count > 0 && count + files.files.len() > FILES_MAX {
                break;
            }
            let mut paths = Vec::new();
            for file in files.files.iter_mut().filter(|file| *file.rule.source == **source) {
                if file.ask_at.take_if(|at| *at <= now.elapsed).is_some() {
                    paths.push(file.rule.path.clone());
                }
            }
            count += paths.len();
            if !paths.is_empty() {
                let machine = Machine::clone(&files.machine);
                let wanted = WantedFiles { machine, algorithm: files.algorithm, paths };
                batch.request.machines.push(wanted);
                batch.records.push(files.record);
            }
            if batch.records.len() == MACHINES_MAX {
                break;
            }
        }
        (!batch.records.is_empty()).then_some(batch)
    }

    /// Takes the answers to a batch, one for each of its machines.
    pub fn take(&mut self, batch: &Batch, answers: Vec<BatchAnswer>, now: Now, jitter: u16) {
        for ((wanted, record), answer) in
            batch.request.machines.iter().zip(&batch.records).zip(answers)
        {
            for (path, answer) in wanted.paths.iter().zip(answer) {
                let file = (&*wanted.machine.hostname, path, &*batch.source);
                self.take_file(file, wanted.algorithm, *record, answer, now, jitter);
            }
        }
    }

    /// Takes that this content was lost: it is asked for again.
    pub fn lost(&mut self, ids: &[ObjectId], now: Now) {
        for (hostname, files) in &mut self.machines {
            for file in &mut files.files {
                let is_lost = |known: &mut KnownContent| ids.contains(&known.object.id());
                if file.known.take_if(is_lost).is_some() {
                    file.ask_at = Some(now.elapsed);
                    self.changed.insert(hostname.clone());
                }
            }
        }
    }

    /// Takes that a batch was not answered, for this reason. Its files are asked for again after a
    /// pause.
    pub fn failed(&mut self, batch: &Batch, why: &str, now: Now, jitter: u16) {
        let why: Arc<str> = why.into();
        let answer = |wanted: &WantedFiles| vec![Err(Arc::clone(&why)); wanted.paths.len()];
        let answers = batch.request.machines.iter().map(answer).collect();
        self.take(batch, answers, now, jitter);
    }

    fn take_file(
        &mut self,
        (hostname, path, source): (&str, &TreePath, &str),
        algorithm: Algorithm,
        record: MadeFrom,
        answer: Result<KnownContent, Arc<str>>,
        now: Now,
        jitter: u16,
    ) {
        let Some(files) = self.machines.get_mut(hostname) else { return };
        let is_same = files.algorithm == algorithm;
        let current = files.record;
        let mut all = files.files.iter_mut();
        let is_meant =
            |file: &&mut FileState| file.rule.path == *path && file.rule.source == source;
        let Some(file) = all.find(is_meant).filter(|_| is_same) else { return };
        let versions = self.generators.get(source);
        match answer {
            Ok(known) => {
                let is_of_now =
                    |known: &KnownContent| is_current(versions, &file.rule, known, current);
                let is_news = file.why.is_some()
                    || !file
                        .known
                        .as_ref()
                        .is_some_and(|before| before.object == known.object && is_of_now(before));
                // The record or the generator may have changed since it was asked for. Two servers
                // of one name may have different generators: they are asked now and then.
                file.ask_at = match (record == current, is_of_now(&known)) {
                    (false, _) => Some(now.elapsed),
                    (true, false) => Some(now.elapsed + VALID_SHORTEST),
                    (true, true) => end_of(&known, now),
                };
                (file.failures, file.why) = (0, None);
                file.known = Some(known);
                if is_news {
                    self.changed.insert(hostname.to_owned());
                }
            }
            Err(why) => {
                file.failures = file.failures.saturating_add(1);
                let pause = doubled(RETRY_FIRST, HOLD_LONGEST, file.failures);
                file.ask_at = Some(now.elapsed + jittered(pause, jitter));
                if file.why.as_deref() != Some(&*why) {
                    file.why = Some(why);
                    self.changed.insert(hostname.to_owned());
                }
            }
        }
    }

    /// Takes the machines of which something else is known than when this was called last.
    pub fn take_changed(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.changed)
    }

    /// Returns what is known of the computed files of a machine, and why the rest is not. Content
    /// that was made from a former record or by a former generator is in both.
    #[must_use]
    pub fn known(&self, hostname: &str) -> (ComputedFiles, Vec<Unknown>) {
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        let files = self.machines.get(hostname);
        let all =
            files.into_iter().flat_map(|files| files.files.iter().map(|file| (file, files.record)));
        for (file, record) in all {
            let versions = self.generators.get(&file.rule.source);
            let is_of_now = |known: &KnownContent| is_current(versions, &file.rule, known, record);
            if let Some(content) = &file.known {
                known.push(ComputedFile {
                    rule: Arc::clone(&file.rule),
                    object: content.object.clone(),
                    size_bytes: content.size_bytes.into(),
                    since: content.since,
                });
            }
            if !file.known.as_ref().is_some_and(is_of_now) {
                let why = file.why.clone().unwrap_or_else(|| BEING_ASKED.into());
                unknown.push(Unknown { rule: Arc::clone(&file.rule), why });
            }
        }
        (ComputedFiles::new(known), unknown)
    }

    /// True if the computed files of the machine are those of this record.
    #[must_use]
    pub fn has_record(&self, machine: &Machine) -> bool {
        let files = self.machines.get(&machine.hostname);
        files.is_some_and(|files| files.record == MadeFrom::of_record(machine))
    }

    /// Returns what is to be stored of a machine.
    #[must_use]
    pub fn stored(&self, hostname: &str) -> StoredFiles {
        let files = self.machines.get(hostname);
        let files = files.into_iter().flat_map(|files| files.files.iter());
        files.filter_map(|file| Some((Arc::clone(&file.rule), file.known.clone()?))).collect()
    }

    /// Returns the machines of which something is known, and the digests of all known content.
    #[must_use]
    pub fn needed(&self) -> (BTreeSet<String>, BTreeSet<ObjectId>) {
        let machines = self.machines.keys().chain(self.restored.keys()).cloned();
        let files = self.machines.values().flat_map(|files| files.files.iter());
        let known = files.filter_map(|file| file.known.as_ref());
        let restored = self.restored.values().flatten().map(|(_, known)| known);
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
                let Some(known) = &file.known else { continue };
                let end = known.valid_until_seconds;
                let is_over = end > 0 && end.saturating_add(OVERDUE) < now;
                if !is_over && file.why.is_none() {
                    continue;
                }
                let (count, _) = troubles.entry(&file.rule.source).or_insert_with(|| {
                    let why = file.why.as_deref().unwrap_or("it is past its end");
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

/// Returns when the content of a file is to be asked for, if its server has generators of these
/// versions.
fn next_question(
    versions: Option<&Versions>,
    rule: &ComputedRule,
    known: Option<&KnownContent>,
    record: MadeFrom,
    now: Now,
) -> Option<Duration> {
    match known {
        Some(known) if is_current(versions, rule, known, record) => end_of(known, now),
        _ => Some(now.elapsed),
    }
}

/// True if content was made from the present record by the present generator, as far as the
/// versions of the server's generators are known.
fn is_current(
    versions: Option<&Versions>,
    rule: &ComputedRule,
    known: &KnownContent,
    record: MadeFrom,
) -> bool {
    let is_of_generator =
        |versions: &Versions| versions.get(&rule.path).map(MadeFrom::of) == Some(known.generator);
    known.record == record && versions.is_none_or(is_of_generator)
}

/// Returns when content must be made again, on the clock of [`Now::elapsed`]; `None` if never.
fn end_of(known: &KnownContent, now: Now) -> Option<Duration> {
    let end = known.valid_until_seconds;
    let left = end.saturating_sub(u64::try_from(now.wall.seconds).unwrap_or(0));
    (end > 0).then(|| now.elapsed + Duration::from_secs(left).max(VALID_SHORTEST))
}

#[cfg(test)]
mod tests;
