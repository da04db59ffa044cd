//! What operators ask of this machine by hand: scan now, pause, check its health, give files.
//!
//! # Invariants
//!
//! * While updates are paused no Prepare and no Commit is accepted, from whomever; what was
//!   committed before is finished.
//! * A pause outlasts a restart of subd, and ends by itself.
//! * Only regular files of the managed tree are given, never anything of `/.subd`.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::subd::{
    CheckHealth, GetFiles, GetFilesReply, GetFilesRequest, PIECE_BYTES_MAX, PIECES_MAX, Pause,
    Paused, Piece, PieceContent, Resume, ScanNow,
};
use model::escape::ByteText;
use model::path::TreePath;
use model::report::report;
use model::scope::SUBD_DIRECTORY;
use rpc::server::Router;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::interface::server::{Service, too_many};
use crate::root::{Kind, Root, RootError, Status};
use crate::state::persisted_state::StateDirectory;
use crate::state::report_state::ReportState;
use crate::update::pause;
use system::clock::wall;

/// How much of files one reply carries before it stops, in bytes.
const FILES_BYTES_MAX: usize = 8 << 20;

/// How often the clock is looked at during a pause: it may have been set.
const CLOCK_LOOK: Duration = Duration::from_secs(30);

/// `router` with the methods of this module.
#[must_use]
pub fn add_methods(router: Router, service: &Arc<Service>) -> Router {
    let given = || Arc::clone(service);
    let (scan, stopper, starter, files) = (given(), given(), given(), given());
    let check = given();
    router
        .method::<ScanNow, _, _>(move |_, request| {
            scan.scanner.boost(request.content, request.media);
            async move { Ok(Done {}) }
        })
        .method::<Pause, _, _>(move |_, paused| {
            let service = Arc::clone(&stopper);
            async move {
                pause::check(&paused, wall())?;
                let until = model::when::moment(paused.until);
                tracing::warn!(until, reason = paused.reason, "updates are paused");
                set_pause(&service.report_state, &service.state, Some(paused)).await
            }
        })
        .method::<Resume, _, _>(move |_, ()| {
            let service = Arc::clone(&starter);
            async move {
                tracing::info!("updates go on");
                set_pause(&service.report_state, &service.state, None).await
            }
        })
        .method::<CheckHealth, _, _>(move |_, ()| {
            let updater = Arc::clone(&check.updater);
            async move { updater.check_health().await }
        })
        .method::<GetFiles, _, _>(move |_, request| {
            let service = Arc::clone(&files);
            async move {
                // One at a time, so that many callers do not fill the memory.
                let turn = service.giving_files.clone().acquire_owned().await;
                blocking(move || {
                    let reply = give(&service.root, &request);
                    drop(turn);
                    reply
                })
                .await
            }
        })
}

/// Refuses if updates are paused.
///
/// # Errors
///
/// `Held` says until when, and why.
pub fn refuse_if_paused(report_state: &ReportState) -> Result<(), Fault> {
    report_state.read(|state| pause::refuse_if_paused(state.persisted.paused.as_ref(), wall()))
}

async fn set_pause(
    report_state: &Arc<ReportState>,
    state: &Arc<StateDirectory>,
    paused: Option<Paused>,
) -> Result<Done, Fault> {
    let (report_state, state) = (Arc::clone(report_state), Arc::clone(state));
    blocking(move || {
        let persisted =
            report_state.persist(&state, |persisted| persisted.paused.clone_from(&paused));
        persisted.map_err(|error| Fault::new(FaultCode::Internal, report(&error)))?;
        Ok(Done {})
    })
    .await
}

/// Ends pauses when their time is over, until `stop` is cancelled.
pub async fn end_pauses(
    report_state: Arc<ReportState>,
    state: Arc<StateDirectory>,
    stop: CancellationToken,
) {
    let mut versions = report_state.watch();
    let mut in_force: Option<(Paused, Instant)> = None;
    loop {
        versions.borrow_and_update();
        let paused = report_state.read(|state| state.persisted.paused.clone());
        in_force = match (paused, in_force) {
            (Some(paused), Some((known, since))) if paused == known => Some((known, since)),
            (Some(paused), _) => Some((paused, Instant::now())),
            (None, _) => None,
        };
        let left =
            in_force.as_ref().map(|(paused, since)| pause::left(paused, wall(), since.elapsed()));
        if left == Some(Duration::ZERO) {
            tracing::info!("the pause is over: updates go on");
            report_state.change(|state| {
                // Another pause may have been set meanwhile.
                state
                    .persisted
                    .paused
                    .take_if(|paused| in_force.as_ref().is_some_and(|(ended, _)| paused == ended));
            });
            if let Err(error) = report_state.save(&state).await {
                tracing::warn!("the end of the pause is not on the disk: {}", report(&error));
            }
            continue;
        }
        let look = async {
            match left {
                Some(left) => tokio::time::sleep(left.min(CLOCK_LOOK)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            news = versions.changed() => if news.is_err() { return },
            () = look => {}
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
    let own = TreePath::new(SUBD_DIRECTORY).expect("the constant is a path");
    if path.starts_with(&own) {
        return Err(format!("{path} is subd's own"));
    }
    let said = |error: &RootError| report(error);
    let (directory, name) = root.parent(path).map_err(|error| said(&error))?;
    // To open a device is to use it; so look before.
    if directory.stat(name).map_err(|error| said(&error))?.kind != Kind::File {
        return Err(format!("{path} is no regular file"));
    }
    let file = directory.open_file(name).map_err(|error| said(&error))?;
    let unread = |error: std::io::Error| format!("cannot read {path}: {error}");
    let status = Status::of(&file).map_err(|errno| unread(errno.into()))?;
    let there = status.size_bytes.saturating_sub(piece.offset);
    let length = there.min(piece.length.min(PIECE_BYTES_MAX).into());
    let mut bytes = vec![0; usize::try_from(length).expect("a piece is small")];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], piece.offset + filled as u64) {
            // It has become shorter.
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
