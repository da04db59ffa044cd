//! Methods that operators call on one machine: scan now, pause, resume, take over, check health,
//! run failed triggers again, get files; and the hold of a dominator.
//!
//! # Invariants
//!
//! * While updates are paused no Prepare and no Commit is accepted; what was committed before is
//!   finished.
//! * A pause survives a restart of subd, and ends by itself.
//! * Only regular files of the managed tree are returned, never anything of `/.subd`.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::subd::{
    CheckHealth, ForgetIssued, ForgetIssuedReply, ForgetIssuedRequest, GetFiles, GetFilesReply,
    GetFilesRequest, HoldMachine, HoldMachineRequest, Hurry, PIECE_BYTES_MAX, PIECES_MAX, Pause,
    Piece, PieceContent, Resume, RetryTriggers, ScanNow, TakeOver, TakeOverReply, TakeOverRequest,
};
use model::display::error_chain;
use model::escape::ByteText;
use model::lock::locked;
use rpc::server::Router;
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::interface::{Service, too_many};
use crate::root::{Kind, Root, Status, subd_directory};
use crate::state::holder::{self, Holder};
use crate::state::pause::SavedPause;
use crate::state::{ReportState, State};
use crate::update::admission;
use system::clock::wall;

/// How much file content one reply carries, in bytes.
const FILES_BYTES_MAX: usize = 8 << 20;

/// How often the clock is read during a pause, because it may be set.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Adds the methods of this module to `router`.
pub fn add_methods(router: Router<Arc<Service>>) -> Router<Arc<Service>> {
    router
        .method::<ScanNow, _>(async |service, _, request| {
            // An operator who looks again may have removed an obstacle.
            service.report_state.change_refusals(|refusals, _| refusals.clear());
            service.scanner.boost(request.content, request.media);
            blocking(move || match &service.updater.own_certificates {
                Some(own) => own
                    .forgive()
                    .map(|()| Done {})
                    .map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error))),
                None => Ok(Done {}),
            })
            .await
        })
        .method::<Pause, _>(async |service, _, paused| {
            let (now, boot) = (wall(), service.report_state.read(State::boot_now));
            admission::check_pause(&paused, now)?;
            let until = model::display::utc(paused.until);
            tracing::warn!(until, reason = paused.reason, "updates are paused");
            let pause = SavedPause::new(paused, now, boot);
            change_pause(&service.report_state, |paused| *paused = Some(pause)).await
        })
        .method::<Resume, _>(async |service, _, ()| {
            tracing::info!("updates resume");
            change_pause(&service.report_state, |paused| *paused = None).await
        })
        .method::<HoldMachine, _>(async |service, _, request| {
            blocking(move || service.hold(&request)).await
        })
        .method::<TakeOver, _>(async |service, _, request| {
            blocking(move || service.take_over(request)).await
        })
        .method::<CheckHealth, _>(async |service, _, ()| service.updater.check_health().await)
        .method::<Hurry, _>(async |service, _, ()| {
            tracing::warn!("an operator called the next update urgent: default limits are lifted");
            service.budgets.hurry();
            Ok(Done {})
        })
        .method::<RetryTriggers, _>(async |service, _, ()| {
            service.updater.retry_triggers()?;
            Ok(Done {})
        })
        .method::<ForgetIssued, _>(async |service, _, request| {
            let ForgetIssuedRequest { path, why } = request;
            let Some(trust) = service.updater.trust.clone() else {
                return Ok(ForgetIssuedReply { issued: None });
            };
            tracing::warn!(%path, why, "it is forgotten when its content was signed");
            let issued = blocking(move || trust.forget_issued(&path)).await?;
            Ok(ForgetIssuedReply { issued })
        })
        .method::<GetFiles, _>(async |service, _, request| {
            // One call at a time limits the memory.
            let turn = service.giving_files.clone().acquire_owned().await;
            blocking(move || {
                let reply = give(&service.root, &request);
                drop(turn);
                reply
            })
            .await
        })
}

impl Service {
    /// Lets a dominator hold the machine. Blocks.
    fn hold(&self, request: &HoldMachineRequest) -> Result<Done, Fault> {
        let _turn = locked(&self.configuring);
        let now = wall();
        let holder = self.report_state.read(|state| state.persisted.holder.clone());
        let new = holder::hold(holder.as_ref(), self.only_dominator.as_deref(), request, now)?;
        if holder::must_be_saved(holder.as_ref(), &new) {
            self.set_holder(Some(new))?;
        }
        Ok(Done {})
    }

    /// Gives the machine to another dominator. Blocks.
    fn take_over(&self, request: TakeOverRequest) -> Result<TakeOverReply, Fault> {
        let _turn = locked(&self.configuring);
        let now = wall();
        let holder = self.report_state.read(|state| state.persisted.holder.clone());
        let former = holder.filter(|holder| holder.holds(now)).map(|holder| holder.dominator);
        tracing::warn!(
            former = former.as_deref().unwrap_or("none"),
            new = request.dominator.as_deref().unwrap_or("the first that asks"),
            "another dominator takes over"
        );
        self.set_holder(request.dominator.map(|name| Holder::appointed(name, now)))?;
        Ok(TakeOverReply { former })
    }

    fn set_holder(&self, holder: Option<Holder>) -> Result<(), Fault> {
        let persisted = self.report_state.persist(|persisted| persisted.holder = holder);
        persisted.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))
    }
}

/// Refuses if updates are paused.
pub fn refuse_if_paused(report_state: &ReportState) -> Result<(), Fault> {
    report_state.read(|state| admission::refuse_if_paused(state.pause_in_force()))
}

async fn change_pause(
    report_state: &Arc<ReportState>,
    change: impl FnOnce(&mut Option<SavedPause>) + Send + 'static,
) -> Result<Done, Fault> {
    let report_state = Arc::clone(report_state);
    blocking(move || {
        let persisted = report_state.persist(|persisted| change(&mut persisted.paused));
        persisted.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
        Ok(Done {})
    })
    .await
}

/// Ends pauses when their time is over, and corrects their ends when the clock was set, until
/// `stop` is cancelled.
pub async fn end_pauses(report_state: Arc<ReportState>, stop: CancellationToken) {
    let mut versions = report_state.watch();
    loop {
        versions.borrow_and_update();
        let look = |state: &State| (state.persisted.paused.clone(), state.boot_now());
        let (pause, boot) = report_state.read(look);
        let now = wall();
        let left = pause.as_ref().map(|pause| pause.left(now, &boot));
        if left == Some(Duration::ZERO) {
            tracing::info!("the pause is over: updates resume");
            // Write-behind: after a crash the pause ends again.
            let end = report_state.persist_behind(move |_, persisted| {
                // Another pause may have been set in the meantime.
                if persisted.paused == pause {
                    persisted.paused = None;
                }
            });
            end.await;
            continue;
        }
        let corrected = pause.as_ref().and_then(|pause| pause.corrected(now, &boot));
        if let Some(corrected) = corrected {
            let until = model::display::utc(corrected.until);
            tracing::warn!(until, "the end of the pause is saved anew, by the clock as it is now");
            let correct = move |paused: &mut Option<SavedPause>| {
                // Another pause may have been set in the meantime.
                if *paused == pause {
                    *paused = Some(corrected);
                }
            };
            if change_pause(&report_state, correct).await.is_ok() {
                continue;
            }
        }
        let wait = async {
            match left {
                Some(left) => tokio::time::sleep(left.min(CLOCK_CHECK_INTERVAL)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            news = versions.changed() => if news.is_err() { return },
            () = wait => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Reads pieces of files.
fn give(root: &Root, request: &GetFilesRequest) -> Result<GetFilesReply, Fault> {
    if request.pieces.len() > PIECES_MAX {
        return Err(too_many(request.pieces.len(), PIECES_MAX, "pieces"));
    }
    let mut reply = GetFilesReply { pieces: Vec::new() };
    let mut bytes = 0;
    for piece in &request.pieces {
        if bytes >= FILES_BYTES_MAX {
            break;
        }
        let content = read_piece(root, piece);
        bytes += content.as_ref().map_or(0, |content| content.bytes.0.len());
        reply.pieces.push(content);
    }
    Ok(reply)
}

fn read_piece(root: &Root, piece: &Piece) -> Result<PieceContent, String> {
    let path = &piece.path;
    if path.starts_with(&subd_directory()) {
        return Err(format!("{path} is subd's own"));
    }
    let (directory, name) = root.parent(path).map_err(|error| error_chain(&error))?;
    // Opening a device has effects, so its kind is checked first.
    if directory.stat(name).map_err(|error| error_chain(&error))?.kind != Kind::File {
        return Err(format!("{path} is not a regular file"));
    }
    let file = directory.open_file(name).map_err(|error| error_chain(&error))?;
    let unread = |error: std::io::Error| format!("cannot read {path}: {error}");
    let status = Status::of(&file).map_err(|errno| unread(errno.into()))?;
    let there = status.size_bytes.saturating_sub(piece.offset);
    let length = there.min(piece.length.min(PIECE_BYTES_MAX).into());
    let mut bytes = vec![0; usize::try_from(length).expect("a piece is small")];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], piece.offset + filled as u64) {
            // The file was truncated.
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(unread(error)),
        }
    }
    bytes.truncate(filled);
    let Status { size_bytes, mtime, .. } = status;
    Ok(PieceContent { size_bytes, mtime, bytes: ByteText(bytes) })
}
