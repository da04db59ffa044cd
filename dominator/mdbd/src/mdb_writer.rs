//! Makes the file: takes what the sources give, and puts what follows from it on the disk.
//!
//! One thread owns the merged and the file; everyone else looks at what it publishes in [`Shared`].

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::mdb::{Machines, parse};
use model::object::{Algorithm, ObjectId};
use model::report::report;
use model::tree::Time;
use prometheus_client::metrics::counter::Counter;
use rpc::audit_log::AuditLog;
use tokio::sync::{mpsc, watch};

use super::core::render::render;
use super::core::settings::Origin;
use super::disk;
use super::source::News;
use crate::core::merged_sources::{Decision, MergedSources, SourceReport, decide};
use crate::last_good::LastGood;
use system::clock::wall;

/// The mode of a new file: the dominator may run as another user.
const MODE: u32 = 0o644;

/// The machine database that the file holds.
#[derive(Debug)]
pub struct PublishedMdb {
    /// What it is known by.
    pub version: ObjectId,
    /// Its machines.
    pub machines: Machines,
}

impl PublishedMdb {
    fn new(machines: Machines) -> Self {
        let version = Algorithm::Blake3.digest(render(&machines).as_bytes());
        Self { version, machines }
    }
}

/// How mdbd is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The sources, in their order.
    pub sources: Vec<SourceReport>,
    /// Those that have given nothing yet; as long as there are any the file stays as it was.
    pub missing: Vec<String>,
    /// When the file was last written.
    pub written: Option<Time>,
    /// True if the file stays as it was because it would lose all machines.
    pub is_held: bool,
    /// Why the file cannot be read or written.
    pub file_error: Option<String>,
    /// Why what a source gave cannot be kept over a restart.
    pub keep_error: Option<String>,
}

/// What the writer publishes.
#[derive(Debug)]
pub struct Shared {
    /// The file.
    pub file: PathBuf,
    /// Where the sources are, in their order.
    pub origins: Vec<String>,
    /// How often the file was written.
    pub writes: Counter,
    audit: AuditLog,
    status: Mutex<Status>,
    published: watch::Sender<Option<Arc<PublishedMdb>>>,
}

impl Shared {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(file: PathBuf, origins: &[Origin], audit: AuditLog) -> Arc<Self> {
        Arc::new(Self {
            file,
            origins: origins.iter().map(Origin::to_string).collect(),
            writes: Counter::default(),
            audit,
            status: Mutex::default(),
            published: watch::Sender::new(None),
        })
    }

    /// How mdbd is doing.
    #[must_use]
    pub fn status(&self) -> Status {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the file holds, and news of it; `None` if there is no file, or it is none that mdbd
    /// has written.
    #[must_use]
    pub fn published(&self) -> watch::Receiver<Option<Arc<PublishedMdb>>> {
        self.published.subscribe()
    }
}

#[derive(Debug)]
pub struct MdbWriter {
    merged: MergedSources,
    origins: Vec<Origin>,
    last_good: LastGood,
    shared: Arc<Shared>,
    /// For each source, why what it gave is not kept; it is tried again.
    keep_errors: Vec<Option<String>>,
}

impl MdbWriter {
    /// A writer that knows what the sources gave in a former run. What it cannot know is logged,
    /// and read anew.
    #[must_use]
    pub fn new(
        merged: MergedSources,
        origins: Vec<Origin>,
        last_good: LastGood,
        shared: Arc<Shared>,
    ) -> Self {
        let keep_errors = vec![None; origins.len()];
        let mut writer = Self { merged, origins, last_good, shared, keep_errors };
        let names: Vec<String> =
            writer.merged.reports().into_iter().map(|report| report.name).collect();
        if let Err(error) =
            writer.last_good.forget_all_but(&names.iter().map(String::as_str).collect())
        {
            tracing::warn!("cannot remove what is kept of former sources: {error}");
        }
        for (index, name) in names.iter().enumerate() {
            match writer.last_good.load(name, &writer.origins[index]) {
                Ok(None) => {}
                Ok(Some((bytes, changed))) => {
                    if let Err(error) = writer.merged.recall(index, &bytes, changed) {
                        let error = report(&error);
                        tracing::warn!("what is kept of source {name} is not used: {error}");
                    }
                }
                Err(error) => tracing::warn!("cannot read what is kept of source {name}: {error}"),
            }
        }
        let written = modified(&writer.shared.file);
        writer.shared.locked().written = written;
        // Until there is something better, what was in force before is in force.
        if let Ok(Some(bytes)) = disk::read(&writer.shared.file)
            && let Some(Ok(machines)) = str::from_utf8(&bytes).ok().map(parse)
        {
            writer.publish(machines);
        }
        writer
    }

    /// Works until nobody sends `news` any more. Blocks.
    pub fn run(mut self, mut news: mpsc::Receiver<News>) {
        self.settle();
        while let Some(first) = news.blocking_recv() {
            self.note(first);
            while let Ok(next) = news.try_recv() {
                self.note(next);
            }
            self.settle();
        }
    }

    /// Takes what a source gave, and keeps it.
    fn note(&mut self, news: News) {
        let (index, now) = (news.index, wall());
        let before = self.merged.reports().swap_remove(index);
        match news.data {
            Err(why) => self.merged.fail(index, why, now),
            Ok(bytes) => {
                let is_new = self.merged.take(index, &bytes, now);
                if is_new || self.keep_errors[index].is_some() {
                    self.keep(index, &bytes);
                }
            }
        }
        let after = self.merged.reports().swap_remove(index);
        let name = &after.name;
        let why = |report: &SourceReport| report.trouble.as_ref().map(|t| t.why.clone());
        match (why(&before), why(&after)) {
            (old, Some(why)) if old.as_ref() != Some(&why) => {
                tracing::error!("source {name}: {why}; its last data, if any, stay in force");
            }
            (Some(_), None) => tracing::info!("source {name} is in order again"),
            _ => {}
        }
        if before.changed != after.changed {
            tracing::info!(machines = after.machines, "source {name} has given other data");
        }
    }

    /// Keeps what a source gave, if that is what is in force.
    fn keep(&mut self, index: usize, bytes: &[u8]) {
        let SourceReport { name, changed, trouble, .. } = self.merged.reports().swap_remove(index);
        let (Some(changed), None) = (changed, trouble) else { return };
        let kept = self.last_good.store(&name, &self.origins[index], changed, bytes);
        let error = kept.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|_| self.keep_errors[index] != error) {
            tracing::error!("what source {name} gave cannot be kept over a restart: {error}");
        }
        self.keep_errors[index] = error;
    }

    /// Makes the file say what the sources say, if that may be.
    fn settle(&mut self) {
        let merged = self.merged.merged();
        let settled = merged.as_ref().map_or(Ok(None), |machines| self.write(machines).map(Some));
        let (is_held, file_error) = match &settled {
            Ok(decision) => (*decision == Some(Decision::Hold), None),
            Err(error) => (false, Some(error.to_string())),
        };
        let written = modified(&self.shared.file);
        let new = Status {
            sources: self.merged.reports(),
            missing: self.merged.missing(),
            written,
            is_held,
            file_error,
            keep_error: self.keep_errors.iter().flatten().next().cloned(),
        };
        let old = std::mem::replace(&mut *self.shared.locked(), new.clone());
        if let Some(error) = new.file_error.filter(|error| old.file_error.as_ref() != Some(error)) {
            tracing::error!("the file stays as it was: {error}");
        }
        if is_held && !old.is_held {
            tracing::error!("the file stays as it was: the sources give no machine at all");
        }
        // Whoever follows and then looks at the page must not see the status of before.
        if let (Some(machines), Ok(Some(Decision::Keep | Decision::Write(_)))) = (merged, settled) {
            self.publish(machines);
        }
    }

    fn write(&self, machines: &Machines) -> io::Result<Decision> {
        let present = disk::read(&self.shared.file)?;
        let decision = decide(machines, present.as_deref());
        if let Decision::Write(text) = &decision {
            if let Some(directory) = self.shared.file.parent() {
                fs_err::create_dir_all(directory)?;
            }
            disk::replace(&self.shared.file, text.as_bytes(), MODE)?;
            self.shared.writes.inc();
            tracing::info!(machines = machines.len(), "the machine database was written");
            let (file, count) = (self.shared.file.display(), machines.len());
            let arguments = format!("file={file} machines={count}");
            self.shared.audit.decided("write-mdb", &arguments, "a source says something else");
        }
        Ok(decision)
    }

    /// Tells those who follow what the file holds now.
    fn publish(&self, machines: Machines) {
        let new = PublishedMdb::new(machines);
        self.shared.published.send_if_modified(|force| {
            let is_new = force.as_ref().is_none_or(|force| force.version != new.version);
            if is_new {
                *force = Some(Arc::new(new));
            }
            is_new
        });
    }
}

/// When the file was last written.
fn modified(file: &std::path::Path) -> Option<Time> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(file).ok()?;
    let nanoseconds = u32::try_from(metadata.mtime_nsec()).unwrap_or_default();
    Some(Time { seconds: metadata.mtime(), nanoseconds })
}
