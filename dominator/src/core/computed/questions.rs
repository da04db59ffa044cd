//! The questions to filegen-servers: when the content of a file is asked for, and what becomes of
//! the answer.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::content::{ContentCause, ContentChangeId};
use api::file_generator::{BATCH_BYTES, FILES_MAX, GenerateRequest, MACHINES_MAX, WantedFiles};
use model::backoff::{doubled, jittered};
use model::image::ComputedRule;
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;

use super::changes::{Change, Changes};
use super::gates::Gates;
use super::rollout::ChangedContent;
use super::{ComputedTable, Contents, Failed, FileState, KnownContent, MadeFrom, Versions};
use crate::core::timing::{HOLD_LONGEST, Now, RETRY_FIRST};

/// The shortest time between two questions for the same file, whatever the server says.
pub(super) const VALID_SHORTEST: Duration = Duration::from_secs(5);

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

impl ComputedTable {
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
            request: GenerateRequest { is_for_use: true, ..GenerateRequest::default() },
            records: Vec::new(),
        };
        let (mut count, mut bytes) = (0, 0);
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
                let key = self.keys.get(&machine.hostname).cloned();
                let outputs = self.outputs.get(&machine.hostname);
                let outputs = outputs.map(|outputs| outputs.to_string()).unwrap_or_default();
                bytes += outputs.len();
                let algorithm = files.algorithm;
                let wanted = WantedFiles { machine, algorithm, paths, key, outputs };
                batch.request.machines.push(wanted);
                batch.records.push(files.record);
            }
            if batch.records.len() == MACHINES_MAX || bytes > BATCH_BYTES {
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
            let is_former = wanted.key.as_ref() != self.keys.get(&wanted.machine.hostname);
            for (path, answer) in wanted.paths.iter().zip(answer) {
                // What was made for a former key does not fit.
                let versions = self.generators.get(&*batch.source);
                if is_former && (answer.is_err() || may_be_certificate(versions, path)) {
                    self.ask_again(&wanted.machine.hostname, path, &batch.source, now);
                    continue;
                }
                let file = (&*wanted.machine.hostname, path, &*batch.source);
                self.take_file(file, wanted.algorithm, *record, answer, now, jitter);
            }
        }
    }

    /// Takes that this content was lost: it is asked for again.
    pub fn lost(&mut self, ids: &[ObjectId], now: Now) {
        for (hostname, files) in &mut self.machines {
            for file in &mut files.files {
                if file.contents.retain(|known| !ids.contains(&known.object.id())) {
                    file.ask_at = Some(now.elapsed);
                    self.changed.insert(hostname.clone());
                }
            }
            self.changes.set_waiting(hostname, &files.waits());
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

    /// Has the files of a machine asked for again, because a server does not know any more what it
    /// made for it.
    pub fn make_again(&mut self, hostname: &str, source: &str, now: Now) {
        let Some(files) = self.machines.get_mut(hostname) else { return };
        for file in files.files.iter_mut().filter(|file| file.rule.source == source) {
            file.ask_at = Some(now.elapsed);
        }
    }

    /// Has a file asked for again that was asked for with a former key.
    fn ask_again(&mut self, hostname: &str, path: &TreePath, source: &str, now: Now) {
        let Some(files) = self.machines.get_mut(hostname) else { return };
        let is_meant =
            |file: &&mut FileState| file.rule.path == *path && file.rule.source == source;
        if let Some(file) = files.files.iter_mut().find(is_meant) {
            file.ask_at = Some(now.elapsed);
        }
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
                let is_news = file.failed.is_some()
                    || file.is_for_former_key
                    || !file
                        .contents
                        .newest()
                        .is_some_and(|before| before.object == known.object && is_of_now(before));
                file.ask_at = asked_again(record == current, is_of_now(&known), &known, now);
                (file.failed, file.is_for_former_key) = (None, false);
                if is_news {
                    self.changed.insert(hostname.to_owned());
                }
                let changes = (&self.changes, &self.gates);
                match place_of(changes, (hostname, versions), file, &known) {
                    Place::None => {
                        let again = now.elapsed + VALID_SHORTEST;
                        file.ask_at = Some(file.ask_at.map_or(again, |at| at.min(again)));
                    }
                    Place::Same => {
                        (file.contents.used, file.contents.next) = (Some(known), None);
                    }
                    Place::Used { is_renewal } => {
                        file.contents = Contents { used: Some(known), ..Contents::default() };
                        files.is_renewing |= is_renewal;
                        files.use_others();
                    }
                    Place::Next(id) => {
                        let (change, _) = self.changes.entry(id, now.wall);
                        let next = ChangedContent { change, content: known };
                        file.contents.next = Some(Box::new(next));
                        self.is_saved = false;
                    }
                }
                self.changes.set_waiting(hostname, &files.waits());
            }
            Err(why) => {
                let former = file.failed.take();
                let count = former.as_ref().map_or(0, |former| former.count).saturating_add(1);
                let pause = doubled(RETRY_FIRST, HOLD_LONGEST, count);
                file.ask_at = Some(now.elapsed + jittered(pause, jitter));
                if former.is_none_or(|former| former.why != why) {
                    self.changed.insert(hostname.to_owned());
                }
                file.failed = Some(Box::new(Failed { count, why }));
            }
        }
    }
}

/// What becomes of content that was made.
enum Place {
    /// Nothing: it is not known what changed.
    None,
    /// The machine has it already.
    Same,
    /// It is used at once.
    Used { is_renewal: bool },
    /// It waits until this change may go to the machine.
    Next(ContentChangeId),
}

/// Decides what becomes of content `new` of a file.
fn place_of(
    (changes, gates): (&Changes, &Gates),
    (hostname, versions): (&str, Option<&Versions>),
    FileState { rule, contents, .. }: &FileState,
    new: &KnownContent,
) -> Place {
    let id = |cause| ContentChangeId { source: rule.source.clone(), cause };
    let version = versions.and_then(|versions| versions.get(&rule.path));
    let version = version.filter(|version| version.version == new.generator);
    let Some(used) = &contents.used else {
        let id = version.map(|version| id(ContentCause::Revision(version.revision)));
        // It is not known of which content revision it is.
        if id.is_none() && gates.are_for(hostname, &rule.source) {
            return Place::None;
        }
        let is_closed = |id: &ContentChangeId| {
            let may_get = |host: &str| gates.allow(host, id);
            let is_closed = |change: &Change| change.is_closed(may_get);
            !may_get(hostname) || changes.get(id).is_some_and(is_closed)
        };
        return match id.filter(is_closed) {
            Some(id) => Place::Next(id),
            None => Place::Used { is_renewal: false },
        };
    };
    if used.object == new.object {
        return Place::Same;
    }
    let is_as_before =
        |before: &KnownContent| (before.generator, before.record) == (new.generator, new.record);
    match version {
        Some(version) if version.is_certificate && contents.newest().is_some_and(is_as_before) => {
            match &contents.next {
                Some(next) => Place::Next(ContentChangeId::clone(&next.change)),
                None => Place::Used { is_renewal: true },
            }
        }
        _ if used.generator == new.generator => {
            Place::Next(id(ContentCause::Path(rule.path.clone())))
        }
        Some(version) => Place::Next(id(ContentCause::Revision(version.revision))),
        None => Place::None,
    }
}

/// Returns when content is to be asked for again that was made just now. The record or the
/// generator may have changed since it was asked for. Two servers of one name may have different
/// generators: they are asked now and then.
fn asked_again(
    is_of_record: bool,
    is_of_generator: bool,
    known: &KnownContent,
    now: Now,
) -> Option<Duration> {
    match (is_of_record, is_of_generator) {
        (false, _) => Some(now.elapsed),
        (true, false) => Some(now.elapsed + VALID_SHORTEST),
        (true, true) => end_of(known, now),
    }
}

/// Returns when the content of a file is to be asked for, if its server has generators of these
/// versions.
pub(super) fn next_question(
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

/// Returns false if a server with generators of these versions makes something else than
/// certificates for a path.
pub(super) fn may_be_certificate(versions: Option<&Versions>, path: &TreePath) -> bool {
    let version = versions.and_then(|versions| versions.get(path));
    version.is_none_or(|version| version.is_certificate)
}

/// True if content was made from the present record by the present generator, as far as the
/// versions of the server's generators are known.
pub(super) fn is_current(
    versions: Option<&Versions>,
    rule: &ComputedRule,
    known: &KnownContent,
    record: MadeFrom,
) -> bool {
    let is_of_generator = |versions: &Versions| {
        versions.get(&rule.path).map(|version| version.version) == Some(known.generator)
    };
    known.record == record && versions.is_none_or(is_of_generator)
}

/// Returns when content must be made again, on the clock of [`Now::elapsed`]; `None` if never.
fn end_of(known: &KnownContent, now: Now) -> Option<Duration> {
    let end = known.valid_until_seconds;
    let left = end.saturating_sub(u64::try_from(now.wall.seconds).unwrap_or(0));
    (end > 0).then(|| now.elapsed + Duration::from_secs(left).max(VALID_SHORTEST))
}
