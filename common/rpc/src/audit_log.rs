//! Writes the audit log of a daemon ([`api::audit`]).
//!
//! One task writes, so that there is one order. It writes all waiting records with one write and
//! one `fdatasync`, so that many concurrent callers cost little more than one.

mod files;
mod metrics;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

pub use files::{AuditSettings, Retention, files_of, read_line};
pub use metrics::AuditCollector;

use api::audit::call_details::{ARGUMENTS_BYTES_MAX, WHY_BYTES_MAX, escape_and_cut};
use api::audit::quota::Quota;
use api::audit::record::{AuditEvent, ChainHead};
use files::Files;
use model::display::error_chain;
use model::lock::locked;
use model::time_parse;

/// How many records may wait to be written; further callers wait.
const WAITING_MAX: usize = 1_024;

/// How many records are written at once.
const BATCH_MAX: usize = 256;

/// How often pending reports are checked.
const TICK: Duration = Duration::from_secs(20);

/// How often the head is logged while it changes.
const LOG_HEAD_INTERVAL: Duration = Duration::from_secs(3_600);

/// Flags of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct AuditArgs {
    /// File of the audit log, which records every change, who requested it and its outcome. The
    /// default is audit/audit.log in the data directory of this daemon. Read it with `domtool audit
    /// show`, and check it with `domtool audit verify`
    #[arg(long, value_name = "FILE", help_heading = "Audit log")]
    pub audit_log: Option<PathBuf>,

    /// Size at which a new file is started, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 16, help_heading = "Audit log",
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub audit_max_size: u64,

    /// How many full files are kept, such as 20, or for how long, such as 400d
    #[arg(long, value_name = "FILES|DURATION", default_value = "20", value_parser = parse_retention,
          help_heading = "Audit log")]
    pub audit_keep: Retention,
}

fn parse_retention(text: &str) -> Result<Retention, String> {
    let bad = |_| format!("`{text}` is neither a number of files nor a duration such as 400d");
    match text.parse() {
        Ok(files) => Ok(Retention::Files(files)),
        Err(_) => time_parse::duration(text).map(Retention::For).map_err(bad),
    }
}

impl AuditArgs {
    /// Returns the settings of a daemon with the data directory `directory`.
    #[must_use]
    pub fn settings(&self, directory: &Path) -> AuditSettings {
        let path = self.audit_log.clone().unwrap_or_else(|| directory.join("audit/audit.log"));
        AuditSettings { path, bytes_max: self.audit_max_size << 20, keep: self.audit_keep }
    }
}

/// Why the audit log cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuditError {
    #[error("cannot use the audit log `{}`", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "another process writes the audit log `{}`: give each daemon its own with --audit-log",
        path.display()
    )]
    Locked { path: PathBuf },
    #[error("cannot write the audit log `{}`: {text}", path.display())]
    Write {
        path: PathBuf,
        text: String,
        /// True if there is no space.
        is_full: bool,
    },
    #[error("the audit log is closed: the daemon stops")]
    Closed,
}

/// The state of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditStatus {
    /// The file that is written.
    pub path: PathBuf,
    /// Its number.
    pub file: u64,
    /// The newest record.
    pub head: Option<ChainHead>,
    /// How many records could not be written since the start.
    pub missed: u64,
    /// The error of the last write, if it failed.
    pub error: Option<String>,
}

/// The audit log of a daemon; without one nothing is recorded. Clones share it.
#[derive(Clone, Default)]
pub struct AuditLog(Option<Arc<Inner>>);

struct Inner {
    jobs: mpsc::Sender<Job>,
    shared: Arc<Shared>,
}

struct Shared {
    status: Mutex<AuditStatus>,
    quota: Mutex<Quota>,
    started: Instant,
}

/// A job for the writer, with the channel of the caller that waits.
enum Job {
    /// Records that the daemon has started.
    Start(oneshot::Sender<()>),
    Record(AuditEvent, Option<oneshot::Sender<Result<u64, Failure>>>),
    /// Ends the writer.
    Close(oneshot::Sender<()>),
}

/// The error of a write, for all callers that wait for it.
#[derive(Clone)]
struct Failure {
    text: Arc<str>,
    is_full: bool,
}

impl fmt::Debug for AuditLog {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("AuditLog").field(&self.status()).finish()
    }
}

impl AuditLog {
    /// Returns a log that records nothing.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Opens the log of `daemon`, and records its start. If the disk is full or read-only the
    /// daemon starts and can be queried, and refuses what must be recorded until the disk is
    /// writable.
    pub async fn open(settings: AuditSettings, daemon: &'static str) -> Result<Self, AuditError> {
        let (path, known) = (settings.path.clone(), settings.clone());
        let opening = tokio::task::spawn_blocking(move || Files::open(known, daemon)).await;
        let opened = opening.map_err(|lost| AuditError::Open {
            path: path.clone(),
            source: io::Error::other(lost),
        })?;
        let files = match opened {
            Ok(files) => Ok(files),
            Err(AuditError::Open { path, source }) if is_temporary(&source) => {
                Err(error_chain(&AuditError::Open { path, source }))
            }
            Err(error) => return Err(error),
        };
        Ok(Self::start(settings, daemon, files).await)
    }

    /// As [`AuditLog::open`], for a daemon that starts despite any error of its log: it refuses
    /// what must be recorded until the error is fixed.
    pub async fn open_or_retry(settings: AuditSettings, daemon: &'static str) -> Self {
        match Self::open(settings.clone(), daemon).await {
            Ok(log) => log,
            Err(error) => Self::start(settings, daemon, Err(error_chain(&error))).await,
        }
    }

    async fn start(
        settings: AuditSettings,
        daemon: &'static str,
        files: Result<Files, String>,
    ) -> Self {
        let (files, error) = match files {
            Ok(files) => (Some(files), None),
            Err(error) => {
                tracing::error!("{error}: changes are refused");
                (None, Some(error))
            }
        };
        let (file, head) = files.as_ref().map_or((0, None), |open| (open.number(), open.head()));
        let path = settings.path.clone();
        let shared = Arc::new(Shared {
            status: Mutex::new(AuditStatus { path, file, head, missed: 0, error }),
            quota: Mutex::default(),
            started: Instant::now(),
        });
        let (jobs, receiver) = mpsc::channel(WAITING_MAX);
        let (is_started, logged, missed) = (false, None, 0);
        let known = Arc::clone(&shared);
        let writer = Writer { files, settings, daemon, is_started, shared: known, logged, missed };
        tokio::spawn(writer.run(receiver));
        let log = Self(Some(Arc::new(Inner { jobs, shared })));
        let (done, written) = oneshot::channel();
        if log.0.as_ref().is_some_and(|inner| inner.jobs.try_send(Job::Start(done)).is_ok()) {
            // The writer has logged an error.
            let _written = written.await;
        }
        log.log_head();
        log
    }

    /// Records `event`, and waits until it is on the medium. Returns its number; 0 without a log.
    pub async fn record(&self, event: AuditEvent) -> Result<u64, AuditError> {
        let Some(inner) = &self.0 else { return Ok(0) };
        let (done, result) = oneshot::channel();
        inner.jobs.send(Job::Record(event, Some(done))).await.map_err(|_| inner.closed())?;
        inner.result(result.await)
    }

    /// As [`AuditLog::record`], on a thread that may block. Errors are logged.
    pub fn record_blocking(&self, event: AuditEvent) {
        let Some(inner) = &self.0 else { return };
        let (done, result) = oneshot::channel();
        // The writer has logged an error.
        if inner.jobs.blocking_send(Job::Record(event, Some(done))).is_ok() {
            let _written = result.blocking_recv();
        }
    }

    /// Records `event` without waiting. It is lost, and logged, if too many records wait.
    pub fn record_soon(&self, event: AuditEvent) {
        let Some(inner) = &self.0 else { return };
        match inner.jobs.try_reserve() {
            Ok(place) => place.send(Job::Record(event, None)),
            Err(_) => {
                tracing::error!(?event, "this is not in the audit log");
                locked(&inner.shared.status).missed += 1;
            }
        }
    }

    /// Records a decision of the daemon itself, on a thread that may block.
    pub fn record_decision(&self, decision: &str, arguments: &str, why: &str) {
        let (decision, arguments) =
            (decision.into(), escape_and_cut(arguments, ARGUMENTS_BYTES_MAX));
        let why = escape_and_cut(why, WHY_BYTES_MAX);
        self.record_blocking(AuditEvent::Decided { decision, arguments, why });
    }

    /// Counts a failed call of `user`, or of a caller without a certificate. Returns true if it is
    /// to be recorded.
    #[must_use]
    pub fn admits(&self, user: Option<&str>) -> bool {
        self.with_quota(|quota| quota.admit(user))
    }

    /// Returns true if no more such calls of `user` are recorded for now.
    #[must_use]
    pub fn is_exhausted(&self, user: Option<&str>) -> bool {
        self.with_quota(|quota| quota.is_exhausted(user))
    }

    /// Asks the quota of failed calls, after it was brought up to date. Returns false without a
    /// log.
    fn with_quota(&self, ask: impl FnOnce(&mut Quota) -> bool) -> bool {
        let Some(inner) = &self.0 else { return false };
        for event in inner.shared.refused() {
            self.record_soon(event);
        }
        ask(&mut locked(&inner.shared.quota))
    }

    /// Returns the state; `None` without a log.
    #[must_use]
    pub fn status(&self) -> Option<AuditStatus> {
        self.0.as_ref().map(|inner| locked(&inner.shared.status).clone())
    }

    /// Waits until all pending records are written, closes the files, and logs the head. A daemon
    /// calls this last.
    pub async fn close(&self) {
        let Some(inner) = &self.0 else { return };
        let (done, result) = oneshot::channel();
        if inner.jobs.send(Job::Close(done)).await.is_ok() {
            let _closed = result.await;
        }
        self.log_head();
    }

    fn log_head(&self) {
        if let Some(AuditStatus { head: Some(head), path, .. }) = self.status() {
            log_head(&path, head);
        }
    }
}

/// Logs the head, so that it is known outside of the audit log.
fn log_head(path: &Path, head: ChainHead) {
    tracing::info!(file = %path.display(), "the head of the audit log is {head}");
}

impl Inner {
    /// Returns why nothing is written any more.
    fn closed(&self) -> AuditError {
        let status = locked(&self.shared.status);
        match &status.error {
            None => AuditError::Closed,
            Some(text) => {
                let (path, text) = (status.path.clone(), text.clone());
                AuditError::Write { path, text, is_full: false }
            }
        }
    }

    fn result(
        &self,
        result: Result<Result<u64, Failure>, oneshot::error::RecvError>,
    ) -> Result<u64, AuditError> {
        let written = result.map_err(|_| self.closed())?;
        written.map_err(|Failure { text, is_full }| {
            let path = locked(&self.shared.status).path.clone();
            AuditError::Write { path, text: text.to_string(), is_full }
        })
    }
}

impl Shared {
    /// Returns the counts of refused calls, once per minute.
    fn refused(&self) -> Vec<AuditEvent> {
        let minute = self.started.elapsed().as_secs() / 60;
        let more = locked(&self.quota).tick(minute).into_iter();
        more.map(|more| AuditEvent::DeniedMore { caller: more.caller, count: more.count }).collect()
    }
}

/// Returns true for errors that may disappear, so that the log is opened again later.
fn is_temporary(error: &io::Error) -> bool {
    is_full(error) || error.kind() == io::ErrorKind::ReadOnlyFilesystem
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The task that writes the log.
struct Writer {
    /// `None` until they could be opened.
    files: Option<Files>,
    settings: AuditSettings,
    daemon: &'static str,
    /// True if the start of the daemon is recorded.
    is_started: bool,
    shared: Arc<Shared>,
    /// The head that was logged last, and when.
    logged: Option<(Instant, Option<ChainHead>)>,
    /// How many of the missed records are reported in the log.
    missed: u64,
}

impl Writer {
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                count = jobs.recv_many(&mut batch, BATCH_MAX) => if count == 0 { return },
                _ = ticks.tick() => {
                    let events = self.shared.refused().into_iter();
                    batch.extend(events.map(|event| Job::Record(event, None)));
                    self.log_head_if_due();
                }
            }
            let (mut begun, mut ended, mut records) = (None, None, Vec::new());
            for job in batch {
                match job {
                    Job::Start(done) => begun = Some(done),
                    Job::Close(done) => ended = Some(done),
                    Job::Record(event, done) => records.push((event, done)),
                }
            }
            if begun.is_some() || !records.is_empty() {
                match tokio::task::spawn_blocking(move || self.write(records)).await {
                    Ok(writer) => self = writer,
                    // Without a writer every change is refused.
                    Err(error) => return tracing::error!("the audit log is lost: {error}"),
                }
            }
            // The receiver may be gone.
            let _delivered = begun.map(|done| done.send(()));
            if let Some(done) = ended {
                // The files must be unlocked before the answer.
                drop(self);
                let _delivered = done.send(());
                return;
            }
        }
    }

    /// Logs the head from time to time.
    fn log_head_if_due(&mut self) {
        let (head, now) = (self.files.as_ref().and_then(Files::head), Instant::now());
        let is_due = self.logged.is_none_or(|(at, logged)| {
            logged != head && now.duration_since(at) >= LOG_HEAD_INTERVAL
        });
        if is_due {
            if let (Some(head), Some(_)) = (head, self.logged) {
                log_head(&locked(&self.shared.status).path, head);
            }
            self.logged = Some((now, head));
        }
    }

    fn write(mut self, batch: Vec<Waiting>) -> Self {
        let (missed, text) = {
            let status = locked(&self.shared.status);
            (status.missed, status.error.clone())
        };
        let mut events = Vec::new();
        if !self.is_started {
            events.push(AuditEvent::Started { version: env!("CARGO_PKG_VERSION").to_owned() });
        }
        if missed > self.missed {
            let text = text.clone().unwrap_or_else(|| "too many at one time".to_owned());
            events.push(AuditEvent::Missed { count: missed - self.missed, text });
        }
        let offset = events.len() as u64;
        events.extend(batch.iter().map(|(event, _)| event.clone()));
        let result = self.files().and_then(|files| {
            files.append(events).map_err(|error| Failure {
                is_full: is_full(&error),
                text: error.to_string().into(),
            })
        });
        let mut status = locked(&self.shared.status);
        if let Some(files) = &self.files {
            (status.file, status.head) = (files.number(), files.head());
        }
        match &result {
            Ok(_) => {
                (self.is_started, self.missed, status.error) = (true, missed, None);
                if text.is_some() {
                    tracing::info!("the audit log can be written again");
                }
            }
            Err(Failure { text, .. }) => {
                for (event, _) in &batch {
                    tracing::error!(error = %text, ?event, "this is not in the audit log");
                }
                status.missed += batch.len() as u64;
                status.error = Some(text.to_string());
            }
        }
        drop(status);
        for (index, (_, done)) in (0..).zip(batch) {
            let answer = result.clone().map(|first| first + offset + index);
            // The receiver may be gone.
            done.map(|done| done.send(answer));
        }
        self
    }

    /// Returns the files; opens them if that failed before.
    fn files(&mut self) -> Result<&mut Files, Failure> {
        let files = match self.files.take() {
            Some(files) => files,
            None => Files::open(self.settings.clone(), self.daemon).map_err(|error| Failure {
                is_full: matches!(&error, AuditError::Open { source, .. } if is_full(source)),
                text: error_chain(&error).into(),
            })?,
        };
        Ok(self.files.insert(files))
    }
}

/// A record, and the channel of its caller.
type Waiting = (AuditEvent, Option<oneshot::Sender<Result<u64, Failure>>>);
