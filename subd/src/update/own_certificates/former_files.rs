//! Keeps the former TLS files of subd while it is not known whether a dominator accepts others, and
//! puts them back.
//!
//! They are in the state directory, in `tls-files.json`, which only root may read. The order keeps
//! a way back after a crash at any point: they are on the medium before others become live; that
//! they are put back is on the medium before the first of them is; and what is half done is done
//! when subd starts, before it needs them.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::subd::{UpdateOutcome, UpdatePhase};
use model::display::{error_chain, utc};
use model::escape::ByteText;
use model::lock::locked;
use rpc::server::Caller;
use rpc::tls::{FILE_BYTES_MAX, FILES, FilesDigest, TlsError, read_file};
use system::clock::wall;
use system::durable::{Durable, DurableError, PrettyJson};
use tokio::time::Instant;

use super::put_back::{FormerFile, FormerFiles, Next, Record, RefusedFiles, Seen, next};
use super::{ChangedCertificates, OwnCertificates};
use crate::blocking;
use crate::root::{Directory, Root, RootError, errno_of};
use crate::state::directories::{Directories, remove_all};
use crate::state::persisted_state::{PersistError, StateDirectory, StateFile};
use crate::update::Updater;
use crate::update::stage::StageError;

const RECORD: &str = "tls-files.json";

/// The longest record that is read, in bytes: all files, and what their escapes add.
const RECORD_BYTES_MAX: u64 = 8 * FILE_BYTES_MAX;

/// The name of a file in the staging area until it is moved to its place.
const STAGED: &[u8] = b"tls-file";

/// How long to wait before it is tried again to put files back.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Why former files are not put back.
#[derive(Debug, thiserror::Error)]
enum PutBackError {
    #[error("cannot replace them")]
    Files(#[from] RootError),
    #[error("cannot record it")]
    Record(#[from] DurableError),
    #[error("cannot report it")]
    State(#[from] PersistError),
}

/// The record in memory and on the medium.
pub(super) type SavedRecord = Durable<Record, StateFile, PrettyJson>;

/// Reads the record. One that is not valid is logged and left out: then the files that are live
/// stay.
pub(super) fn load(state: &StateDirectory) -> SavedRecord {
    let file = || state.file(state.directory(), RECORD, RECORD_BYTES_MAX);
    Durable::load_or_default_as(file(), PrettyJson).unwrap_or_else(|error| {
        tracing::error!("no former TLS files are known: {}", error_chain(&error));
        Durable::new(file(), PrettyJson, Record::default())
    })
}

/// Puts files back if that had begun before subd was stopped. Called before they are needed.
pub fn finish(root: &Root, directories: &Directories, state: &StateDirectory) {
    let record = load(state).get();
    let begun = record.former.as_ref().filter(|former| former.putting_back.is_some());
    if let Some(former) = begun
        && let Err(error) = restore(root, directories, former)
    {
        tracing::error!("cannot put the former TLS files back: {}", error_chain(&error));
    }
}

/// Makes the files what they were. May be repeated.
fn restore(root: &Root, area: &Directories, former: &FormerFiles) -> Result<(), RootError> {
    let directory = root.directory(&former.directory)?;
    for (name, file) in &former.files {
        let name = name.as_bytes();
        match file {
            Some(file) if !is_live(&directory, name, file) => {
                put_in_place(&directory, area, name, file)?;
            }
            Some(_) => {}
            None => remove_all(&directory, name)?,
        }
    }
    directory.sync()
}

/// Makes one file as it is to be. After a crash it is the former or this one; the caller syncs the
/// directory.
pub(super) fn put_in_place(
    directory: &Directory,
    area: &Directories,
    name: &[u8],
    file: &FormerFile,
) -> Result<(), RootError> {
    remove_all(&area.staging, STAGED)?;
    let write = |mut to: std::fs::File| {
        let written = to.write_all(&file.content.0);
        written.map_err(|error| area.staging.error("write", STAGED, errno_of(error)))
    };
    area.reserve.write_file(&area.staging, STAGED, RootError::is_full, write)?;
    area.staging.set_owner(STAGED, file.uid, file.gid)?;
    area.staging.set_mode(STAGED, file.mode)?;
    let synced = area.staging.open_file(STAGED)?.sync_all();
    synced.map_err(|error| area.staging.error("sync", STAGED, errno_of(error)))?;
    area.staging.rename_over(STAGED, directory, name)
}

/// True if the file is as it was.
fn is_live(directory: &Directory, name: &[u8], file: &FormerFile) -> bool {
    let read = || -> Option<bool> {
        let opened = directory.open_seen(name).ok()?;
        let status = &opened.status;
        let is_same = (status.mode, status.uid, status.gid) == (file.mode, file.uid, file.gid)
            && status.size_bytes == file.content.0.len() as u64;
        let mut content = Vec::new();
        std::io::Read::read_to_end(&mut &opened.file, &mut content).ok()?;
        Some(is_same && content == file.content.0)
    };
    read().unwrap_or(false)
}

impl ChangedCertificates {
    /// Keeps the present files in case that no dominator reaches subd with those of the update
    /// `update_id`, which are `ordered`. Blocks.
    ///
    /// # Errors
    ///
    /// [`StageError::PutBack`] for files for which others were put back,
    /// [`StageError::FormerFiles`] if they cannot be kept.
    pub fn keep_former(
        &self,
        own: &OwnCertificates,
        root: &Root,
        update_id: u64,
        ordered: FilesDigest,
    ) -> Result<(), StageError> {
        let Record { former, refused } = Record::clone(&own.record.get());
        let begun = former.as_ref().and_then(|former| former.putting_back.as_ref());
        let refused = refused.as_ref().filter(|refused| refused.is_in_force(ordered, wall()));
        if let Some(RefusedFiles { why, until, .. }) = begun.or(refused) {
            return Err(StageError::PutBack { why: why.clone(), until: utc(*until) });
        }
        let present = own.security.present_files();
        let reached = [Some(self.proof.files()), *locked(&own.reached)];
        let is_tried = |former: &FormerFiles| {
            present.is_none_or(|present| former.ordered.contains(&present))
                && !reached.contains(&present)
        };
        let former = match former.filter(is_tried) {
            Some(former) => Some(former),
            None => own.present(root, present)?,
        };
        let former = former.map(|mut former| {
            former.order(update_id, ordered);
            former
        });
        let kept = own.record.modify(|record| record.former = former);
        own.news.notify_one();
        kept.map_err(not_kept)
    }
}

fn not_kept(source: DurableError) -> StageError {
    StageError::FormerFiles { source: PersistError::File { source } }
}

impl OwnCertificates {
    /// Reads the present files, whose digest is `present`. `None` if subd could not use them
    /// either.
    fn present(
        &self,
        root: &Root,
        present: Option<FilesDigest>,
    ) -> Result<Option<FormerFiles>, StageError> {
        let (Some(digest), Some(path)) = (present, self.security.directory()) else {
            return Ok(None);
        };
        let files = FILES.iter().map(|(name, _)| {
            let file = self.file(root, path, name)?;
            Ok(((*name).to_owned(), file))
        });
        let files = files.collect::<Result<_, StageError>>()?;
        let (directory, ordered) = (self.directory.clone(), Vec::new());
        let former =
            FormerFiles { directory, digest, files, update_id: 0, ordered, putting_back: None };
        Ok((self.security.present_files() == present).then_some(former))
    }

    /// Reads the file `name` of the directory `path`.
    pub(super) fn file(
        &self,
        root: &Root,
        path: &Path,
        name: &str,
    ) -> Result<Option<FormerFile>, StageError> {
        let (content, mode) = match read_file(&path.join(name)) {
            Ok(read) => read,
            Err(TlsError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(source) => return Err(StageError::LockedOut { source: source.into() }),
        };
        // That of a symlink is the one to give to the file that takes its place.
        let staged = |source| StageError::Root { path: self.directory.clone(), source };
        let directory = root.directory(&self.directory).map_err(staged)?;
        let status = directory.stat(name.as_bytes()).map_err(staged)?;
        let (uid, gid) = (status.uid, status.gid);
        Ok(Some(FormerFile { content: ByteText(content), mode: mode & 0o7777, uid, gid }))
    }

    /// Notes that `caller` has reached subd.
    pub fn note_caller(&self, caller: &Caller) {
        let Some(proof) = &caller.proof else { return };
        let record = self.record.get();
        let is_tried = |former: &FormerFiles| former.ordered.contains(&proof.files());
        if record.former.as_ref().is_some_and(is_tried)
            && ["Subd.Prepare", "Subd.Commit"].iter().all(|method| caller.identity.may_call(method))
        {
            *locked(&self.reached) = Some(proof.files());
            self.news.notify_one();
        }
    }

    /// Lets files be tried again for which others were put back. Blocks.
    ///
    /// # Errors
    ///
    /// [`PersistError`] if that cannot be written.
    pub fn forgive(&self) -> Result<(), PersistError> {
        Ok(self.record.modify(|record| record.refused = None)?)
    }

    /// Returns true if files are being put back.
    pub fn is_putting_back(&self) -> Option<u64> {
        let record = self.record.get();
        let former = record.former.as_ref().filter(|former| former.putting_back.is_some())?;
        Some(former.update_id)
    }
}

impl Updater {
    /// Puts the former TLS files back if no dominator has reached subd in time with others that an
    /// update has brought, until subd is stopped.
    pub(in crate::update) async fn watch_own_certificates(self: Arc<Self>) {
        let Some(own) = &self.own_certificates else { return };
        let mut versions = self.report_state.watch();
        let mut tried: Option<(FilesDigest, Instant)> = None;
        loop {
            versions.borrow_and_update();
            let record = own.record.get();
            let mut wait = None;
            if let Some(former) = &record.former {
                let seen = self.seen(own, &mut tried).await;
                match next(former, &seen, own.reached_within) {
                    Next::Nothing => {}
                    Next::Wait(left) => wait = Some(left),
                    Next::Forget => {
                        if let Err(error) = own.record.modify(|record| record.forget(&seen)) {
                            tracing::error!("{}", error_chain(&error));
                            wait = Some(RETRY_AFTER);
                        }
                    }
                    Next::PutBack(files) => {
                        if let Err(error) = Arc::clone(&self).put_back(files).await {
                            tracing::error!("cannot put the former TLS files back: {error}");
                            wait = Some(RETRY_AFTER);
                        }
                    }
                }
            }
            let is_kept = own.record.get().former.is_some();
            let sleep = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                news = versions.changed(), if is_kept => if news.is_err() { return },
                () = own.news.notified() => {}
                () = sleep => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Looks at the files. `tried` has those that were seen last, and since when they are tried.
    async fn seen(
        &self,
        own: &OwnCertificates,
        tried: &mut Option<(FilesDigest, Instant)>,
    ) -> Seen {
        let security = own.security.clone();
        let looking = tokio::task::spawn_blocking(move || security.present_files()).await;
        let present = looking.unwrap_or_default();
        let (update, is_stuck) =
            self.report_state.read(|state| (state.update, state.stuck.is_some()));
        let is_changing = matches!(update, UpdatePhase::Preparing(_) | UpdatePhase::Updating(_));
        if tried.is_some_and(|(files, _)| Some(files) != present) {
            *tried = None;
        }
        if tried.is_none() && !is_changing {
            *tried = present.map(|present| (present, Instant::now()));
        }
        let waited = tried.map_or(Duration::ZERO, |(_, since)| since.elapsed());
        Seen { present, update, is_stuck, reached: *locked(&own.reached), waited }
    }

    /// Puts the former files in the place of `refused`, unless an update is under way.
    async fn put_back(self: Arc<Self>, refused: FilesDigest) -> Result<(), String> {
        let Some(own) = &self.own_certificates else { return Ok(()) };
        let record = own.record.get();
        let Some(former) = &record.former else { return Ok(()) };
        let update_id = former.update_id;
        let is_begun = former.putting_back.is_some();
        let taken = self.report_state.try_change(|state| {
            let is_own = state.update == UpdatePhase::Preparing(update_id) && is_begun;
            if !is_own && !matches!(state.update, UpdatePhase::Idle | UpdatePhase::Prepared(_)) {
                return Err(());
            }
            state.update = UpdatePhase::Preparing(update_id);
            Ok(Some(()))
        });
        if taken.is_err() {
            return Ok(());
        }
        let updater = Arc::clone(&self);
        let done = blocking(move || {
            updater.discard(None);
            Ok(updater.put_former_files_back(refused).map_err(|error| error_chain(&error)))
        });
        let done = done.await.map_err(|fault| fault.message).flatten();
        self.report_state.set_cache(|| self.cache.ids());
        let paths = FILES.iter().filter_map(|(name, _)| own.directory.join(name.as_bytes()).ok());
        if let Ok(snapshot) = self.scanner.scan_touched(paths.collect()).await {
            self.report_state.take_snapshot(snapshot, self.identity.read(&self.root));
        }
        // Until they are there no other update may begin.
        if own.is_putting_back().is_none() {
            self.report_state.change(|state| state.update = UpdatePhase::Idle);
        }
        done
    }

    /// Blocks.
    fn put_former_files_back(&self, files: FilesDigest) -> Result<(), PutBackError> {
        let Some(own) = &self.own_certificates else { return Ok(()) };
        let why = format!(
            "no dominator reached subd within {} after its own TLS files had changed",
            format_args!("{:?}", own.reached_within)
        );
        own.record.modify(|record| {
            let refused = RefusedFiles::new(files, why, record.refused.as_ref(), wall());
            if let Some(former) = &mut record.former
                && former.putting_back.is_none()
            {
                former.putting_back = Some(refused);
            }
        })?;
        let record = own.record.get();
        let Some(former) = &record.former else { return Ok(()) };
        let Some(refused) = &former.putting_back else { return Ok(()) };
        restore(&self.root, &self.directories, former)?;
        tracing::warn!(
            update_id = former.update_id,
            "{}: the former ones are put back",
            refused.why
        );
        // Both may be repeated.
        self.report_state.persist(|persisted| {
            let last = persisted.last_update.as_mut();
            if let Some(last) = last.filter(|last| last.update_id == former.update_id) {
                let text = format!("{}: the former ones were put back", refused.why);
                last.outcome = UpdateOutcome::RolledBack(text);
            }
        })?;
        let refused = refused.clone();
        own.record.modify(|record| *record = Record { former: None, refused: Some(refused) })?;
        Ok(())
    }
}
