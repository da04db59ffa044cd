//! Writes the file from the data of the sources.
//!
//! One thread owns the merged sources and the file; others read what it publishes in [`Shared`].

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::display::error_chain;
use model::mdb::{Machines, parse};
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use prometheus_client::metrics::counter::Counter;
use rpc::audit_log::AuditLog;
use system::clock::wall;
use tokio::sync::{mpsc, watch};

use super::core::formats::render;
use super::core::merged_sources::{Decision, MergedSources, SourceReport, decide};
use super::core::settings::Origin;
use super::source::Delivery;
use super::storage::{self, LastGood};

/// Mode of a new file: the dominator may run as another user.
const MODE: u32 = 0o644;

/// The machine database in the file.
#[derive(Debug)]
pub struct PublishedMdb {
    pub version: ObjectId,
    pub machines: Machines,
}

impl PublishedMdb {
    fn new(machines: Machines) -> Self {
        let version = Algorithm::Blake3.digest(render(&machines).as_bytes());
        Self { version, machines }
    }
}

/// The state of mdbd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// State of each source, in their order.
    pub sources: Vec<SourceReport>,
    /// Sources without data; while there are any, the file is not written.
    pub missing: Vec<String>,
    /// Modification time of the file.
    pub written: Option<Time>,
    /// True while the file is not written because it would lose all machines.
    pub is_held: bool,
    /// Error of reading or writing the file.
    pub file_error: Option<String>,
    /// Error of saving the data of a source.
    pub save_error: Option<String>,
}

/// State that the writer publishes.
#[derive(Debug)]
pub struct Shared {
    pub file: PathBuf,
    /// Descriptions of the sources, in their order.
    pub origins: Vec<String>,
    pub writes: Counter,
    audit: AuditLog,
    status: Mutex<Status>,
    published: watch::Sender<Option<Arc<PublishedMdb>>>,
}

impl Shared {
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

    #[must_use]
    pub fn status(&self) -> Status {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches the machine database in the file; `None` if there is no valid file.
    #[must_use]
    pub fn published(&self) -> watch::Receiver<Option<Arc<PublishedMdb>>> {
        self.published.subscribe()
    }
}

/// Merges the sources and writes the file.
#[derive(Debug)]
pub struct MdbWriter {
    merged: MergedSources,
    origins: Vec<Origin>,
    last_good: LastGood,
    shared: Arc<Shared>,
    /// For each source, the error of saving its data, which is then retried.
    save_errors: Vec<Option<String>>,
}

impl MdbWriter {
    /// Returns a writer with the data of a former run. Unreadable data are logged and ignored.
    #[must_use]
    pub fn new(
        merged: MergedSources,
        origins: Vec<Origin>,
        last_good: LastGood,
        shared: Arc<Shared>,
    ) -> Self {
        let save_errors = vec![None; origins.len()];
        let mut writer = Self { merged, origins, last_good, shared, save_errors };
        let names: Vec<String> =
            writer.merged.reports().into_iter().map(|report| report.name).collect();
        if let Err(error) = writer.last_good.retain(&names.iter().map(String::as_str).collect()) {
            tracing::warn!("cannot remove saved data of former sources: {error}");
        }
        for (index, name) in names.iter().enumerate() {
            match writer.last_good.load(name, &writer.origins[index]) {
                Ok(None) => {}
                Ok(Some((bytes, changed))) => {
                    if let Err(error) = writer.merged.restore(index, &bytes, changed) {
                        let error = error_chain(&error);
                        tracing::warn!("the saved data of source {name} are invalid: {error}");
                    }
                }
                Err(error) => {
                    tracing::warn!("cannot read the saved data of source {name}: {error}");
                }
            }
        }
        let written = modified(&writer.shared.file);
        writer.shared.locked().written = written;
        // The database of the former run is in force until there is a new one.
        if let Ok(Some(bytes)) = storage::read(&writer.shared.file)
            && let Some(Ok(machines)) = str::from_utf8(&bytes).ok().map(parse)
        {
            writer.publish(machines);
        }
        writer
    }

    /// Handles deliveries until all senders are dropped. Blocks.
    pub fn run(mut self, mut deliveries: mpsc::Receiver<Delivery>) {
        self.update_file();
        while let Some(first) = deliveries.blocking_recv() {
            self.accept(first);
            while let Ok(next) = deliveries.try_recv() {
                self.accept(next);
            }
            self.update_file();
        }
    }

    /// Accepts and saves the data of a source.
    fn accept(&mut self, delivery: Delivery) {
        let (index, now) = (delivery.index, wall());
        let before = self.merged.reports().swap_remove(index);
        match delivery.data {
            Err(why) => self.merged.fail(index, why, now),
            Ok(bytes) => {
                let is_new = self.merged.accept(index, &bytes, now);
                if is_new || self.save_errors[index].is_some() {
                    self.save(index, &bytes);
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
            (Some(_), None) => tracing::info!("source {name} works again"),
            _ => {}
        }
        if before.changed != after.changed {
            tracing::info!(machines = after.machines, "source {name} has delivered other data");
            if let Some(misspelt) = &after.misspelt_keys {
                tracing::warn!("source {name}: {misspelt}");
            }
        }
    }

    /// Saves the data of a source if they are in force.
    fn save(&mut self, index: usize, bytes: &[u8]) {
        let SourceReport { name, changed, trouble, .. } = self.merged.reports().swap_remove(index);
        let (Some(changed), None) = (changed, trouble) else { return };
        let saved = self.last_good.store(&name, &self.origins[index], changed, bytes);
        let error = saved.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|_| self.save_errors[index] != error) {
            tracing::error!("the data of source {name} cannot be kept over a restart: {error}");
        }
        self.save_errors[index] = error;
    }

    /// Writes the file if necessary and allowed, and publishes the state.
    fn update_file(&mut self) {
        let merged = self.merged.merged();
        let result = merged.as_ref().map_or(Ok(None), |machines| self.write(machines).map(Some));
        let (is_held, file_error) = match &result {
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
            save_error: self.save_errors.iter().flatten().next().cloned(),
        };
        let old = std::mem::replace(&mut *self.shared.locked(), new.clone());
        if let Some(error) = new.file_error.filter(|error| old.file_error.as_ref() != Some(error)) {
            tracing::error!("the file stays as it was: {error}");
        }
        if is_held && !old.is_held {
            tracing::error!("the file stays as it was: the sources have no machine at all");
        }
        // Published last: a follower that then reads the page must see the new status.
        if let (Some(machines), Ok(Some(Decision::Keep | Decision::Write(_)))) = (merged, result) {
            self.publish(machines);
        }
    }

    fn write(&self, machines: &Machines) -> io::Result<Decision> {
        let present = storage::read(&self.shared.file)?;
        let decision = decide(machines, present.as_deref());
        if let Decision::Write(text) = &decision {
            if let Some(directory) = self.shared.file.parent() {
                fs_err::create_dir_all(directory)?;
            }
            storage::replace(&self.shared.file, text.as_bytes(), MODE)?;
            self.shared.writes.inc();
            tracing::info!(machines = machines.len(), "wrote the machine database");
            let (file, count) = (self.shared.file.display(), machines.len());
            let arguments = format!("file={file} machines={count}");
            self.shared.audit.record_decision(
                "write-mdb",
                &arguments,
                "the data of a source changed",
            );
        }
        Ok(decision)
    }

    /// Publishes the content of the file if it has changed.
    fn publish(&self, machines: Machines) {
        let new = PublishedMdb::new(machines);
        self.shared.published.send_if_modified(|published| {
            let is_new = published.as_ref().is_none_or(|old| old.version != new.version);
            if is_new {
                *published = Some(Arc::new(new));
            }
            is_new
        });
    }
}

/// Returns the modification time of the file.
fn modified(file: &std::path::Path) -> Option<Time> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(file).ok()?;
    let nanoseconds = u32::try_from(metadata.mtime_nsec()).unwrap_or_default();
    Some(Time { seconds: metadata.mtime(), nanoseconds })
}
