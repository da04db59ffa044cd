//! What operators ask of one machine by hand, over the wire.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use api::fault::FaultCode;
use api::subd::{
    Commit, CommitRequest, GetFiles, GetFilesRequest, Limits, PIECE_BYTES_MAX, PIECES_MAX, Pause,
    Paused, Piece, Prepare, Resume, SetConfiguration, SetConfigurationRequest,
};
use model::tree::Time;
use rpc::client::CallError;
use serde_json::Value;

use crate::fixture::{Edit, PATIENCE, Source, Sub, path, request};

fn pause(until: Time, reason: &str) -> Paused {
    Paused { until, reason: reason.to_owned() }
}

/// The clock of `sub`, and so many seconds.
async fn in_seconds(sub: &Sub, seconds: i64) -> Time {
    let clock = sub.poll().await.clock;
    Time { seconds: clock.seconds + seconds, ..clock }
}

fn refusal(error: &CallError) -> (FaultCode, String) {
    let fault = error.fault().unwrap();
    (fault.code, fault.message.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_that_cannot_be_written_is_not_in_force_and_its_repetition_is() {
    let place = tempfile::tempdir().unwrap();
    let sub = Sub::start_on(place.path(), &[]).await;
    let paused = pause(in_seconds(&sub, 3_600).await, "disk swap");
    let limits = Limits { scan_percent: Some(1), ..Limits::default() };
    let configuration = SetConfigurationRequest { scan: None, limits: Some(limits) };
    // No file can be renamed over a directory.
    let state = place.path().join(".subd/state/state.json");
    if state.exists() {
        std::fs::remove_file(&state).unwrap();
    }
    std::fs::create_dir(&state).unwrap();
    for _ in 0..2 {
        let error = sub.client.call::<Pause>(&paused).await.unwrap_err();
        assert_eq!(refusal(&error).0, FaultCode::Internal);
        let error = sub.client.call::<SetConfiguration>(&configuration).await.unwrap_err();
        assert_eq!(refusal(&error).0, FaultCode::Internal);
        let reply = sub.poll().await;
        assert_eq!((reply.paused, reply.limits.told), (None, Limits::default()));
    }
    std::fs::remove_dir(&state).unwrap();
    sub.client.call::<Pause>(&paused).await.unwrap();
    sub.client.call::<SetConfiguration>(&configuration).await.unwrap();
    sub.stop().await;
    let sub = Sub::start_on(place.path(), &[]).await;
    let reply = sub.poll().await;
    assert_eq!((reply.paused, reply.limits.told), (Some(paused), limits));
    // The end of a pause is an order, too.
    std::fs::rename(&state, place.path().join("aside")).unwrap();
    std::fs::create_dir(&state).unwrap();
    let error = sub.client.call::<Resume>(&()).await.unwrap_err();
    assert_eq!(refusal(&error).0, FaultCode::Internal);
    assert!(sub.poll().await.paused.is_some());
    std::fs::remove_dir(&state).unwrap();
    sub.client.call::<Resume>(&()).await.unwrap();
    assert_eq!(sub.poll().await.paused, None);
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_refuses_prepare_and_commit_over_restarts_until_it_is_ended() {
    let (place, source) = (tempfile::tempdir().unwrap(), Source::start().await);
    let sub = Sub::start_on(place.path(), &[]).await;
    let (_, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source).file("/f", "f").done();
    let (_, needs) = sub.plan(&want).await;
    sub.fetch_for(1, &source, &needs).await;
    let (reply, plan) = sub.plan(&want).await;
    let staged = request(2, &reply, &want, plan);
    sub.prepare(&staged).await.unwrap();
    let paused = pause(in_seconds(&sub, 3_600).await, "disk swap");
    sub.client.call::<Pause>(&paused).await.unwrap();
    assert_eq!(sub.poll().await.paused, Some(paused.clone()));
    let until = model::display::utc(paused.until);
    let held = (FaultCode::Held, format!("updates are paused until {until}: disk swap"));
    let commit = sub.client.call::<Commit>(&CommitRequest { update_id: 2 }).await;
    assert_eq!(refusal(&commit.unwrap_err()), held);
    sub.stop().await;

    let sub = Sub::start_on(place.path(), &[]).await;
    assert_eq!(sub.poll().await.paused, Some(paused));
    let (reply, plan) = sub.plan(&want).await;
    let again = request(3, &reply, &want, plan);
    let prepare = sub.client.call::<Prepare>(&again).await;
    assert_eq!(refusal(&prepare.unwrap_err()), held);
    assert!(!sub.at("/f").exists());

    sub.client.call::<Resume>(&()).await.unwrap();
    assert_eq!(sub.poll().await.paused, None);
    sub.prepare(&again).await.unwrap();
    sub.commit(3).await;
    assert_eq!(std::fs::read_to_string(sub.at("/f")).unwrap(), "f");
    sub.stop().await;
    source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_ends_by_itself_and_that_is_news() {
    let sub = Sub::start().await;
    let paused = pause(in_seconds(&sub, 2).await, "a moment");
    sub.client.call::<Pause>(&paused).await.unwrap();
    let reply = sub.poll().await;
    assert_eq!(reply.paused, Some(paused));
    let ended = sub.poll_until(|reply| reply.paused.is_none()).await;
    assert!(ended.version.status > reply.version.status);
    sub.stop().await;
}

/// The pause that subd has saved in `file`.
fn saved_pause(file: &Path) -> Value {
    let state: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    state["paused"].clone()
}

fn save_pause(file: &Path, paused: Value) {
    let mut state: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    state["paused"] = paused;
    std::fs::write(file, state.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_ends_by_elapsed_time_over_restarts_and_changes_of_the_clock() {
    let years = 20 * 365 * 24 * 3_600;
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join(".subd/state/state.json");
    let mut sub = Sub::start_on(place.path(), &[]).await;
    let paused = pause(in_seconds(&sub, 3_600).await, "disk swap");
    sub.client.call::<Pause>(&paused).await.unwrap();
    // With the end that it has by a clock that was set back since, or forward.
    let moved = |mut saved: Value, seconds: i64| {
        let seconds = paused.until.seconds + seconds;
        saved["until"] = serde_json::to_value(Time { seconds, ..paused.until }).unwrap();
        saved
    };
    let is_near = |until: Time| (until.seconds - paused.until.seconds).abs() <= 5;
    for seconds in [years, -years] {
        sub.stop().await;
        save_pause(&file, moved(saved_pause(&file), seconds));
        sub = Sub::start_on(place.path(), &[]).await;
        let shown = sub.poll().await.paused.unwrap();
        assert!(is_near(shown.until), "{shown:?} {paused:?}");
        assert_eq!(shown, pause(shown.until, "disk swap"));
        testing::eventually_async("the right end is saved", async || {
            is_near(serde_json::from_value(saved_pause(&file)["until"].clone()).unwrap())
        })
        .await;
    }
    let short = pause(in_seconds(&sub, 5).await, "a moment");
    sub.client.call::<Pause>(&short).await.unwrap();
    sub.stop().await;
    save_pause(&file, moved(saved_pause(&file), years));
    let sub = Sub::start_on(place.path(), &[]).await;
    sub.poll_until(|reply| reply.paused.is_none()).await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_an_earlier_release_saved_is_in_force() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join(".subd/state/state.json");
    let sub = Sub::start_on(place.path(), &[]).await;
    let paused = pause(in_seconds(&sub, 3_600).await, "disk swap");
    sub.client.call::<Pause>(&paused).await.unwrap();
    sub.stop().await;
    save_pause(&file, serde_json::to_value(&paused).unwrap());
    let sub = Sub::start_on(place.path(), &[]).await;
    assert_eq!(sub.poll().await.paused, Some(paused));
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_without_a_reason_or_a_near_end_is_refused() {
    let sub = Sub::start().await;
    let month = 30 * 24 * 3_600;
    let table = [
        (3_600, " ", "a pause needs a reason"),
        (-1, "late", " is over: the machine's clock says "),
        (month + 60, "long", " is too far away: a pause lasts at most 30 days"),
    ];
    for (seconds, reason, expected) in table {
        let paused = pause(in_seconds(&sub, seconds).await, reason);
        let error = sub.client.call::<Pause>(&paused).await.unwrap_err();
        let (code, text) = refusal(&error);
        assert_eq!(code, FaultCode::BadRequest, "{text}");
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(sub.poll().await.paused, None);
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gives_pieces_of_regular_files_and_of_nothing_else() {
    let sub = Sub::start().await;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    std::fs::create_dir(sub.at("/d")).unwrap();
    std::fs::write(sub.at("/d/f"), "0123456789").unwrap();
    std::fs::write(sub.at("/empty"), "").unwrap();
    symlink(outside.path().join("secret"), sub.at("/link")).unwrap();
    symlink(outside.path(), sub.at("/way")).unwrap();
    nix::unistd::mkfifo(&sub.at("/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let piece = |text: &str, offset, length| Piece { path: path(text), offset, length };
    let pieces = vec![
        piece("/d/f", 2, 3),
        piece("/d/f", 8, 100),
        piece("/d/f", 10, 1),
        piece("/d/f", u64::MAX, u32::MAX),
        piece("/empty", 0, 1),
        piece("/d", 0, 1),
        piece("/", 0, 1),
        piece("/link", 0, 1),
        piece("/way/secret", 0, 1),
        piece("/fifo", 0, 1),
        piece("/absent", 0, 1),
        piece("/.subd/state/state.json", 0, 1),
        piece("/.subd", 0, 1),
    ];
    let request = GetFilesRequest { pieces };
    let call = sub.client.call::<GetFiles>(&request);
    let reply = tokio::time::timeout(PATIENCE, call).await.unwrap().unwrap();
    let shown: Vec<String> = reply
        .pieces
        .into_iter()
        .map(|piece| match piece {
            Ok(content) => {
                let text = String::from_utf8(content.bytes.0).unwrap();
                format!("{text} of {}", content.size_bytes)
            }
            Err(why) => why,
        })
        .collect();
    assert_eq!(
        shown,
        [
            "234 of 10",
            "89 of 10",
            " of 10",
            " of 10",
            " of 0",
            "/d is not a regular file",
            "cannot open the directory above /: EINVAL: Invalid argument",
            "/link is not a regular file",
            "cannot open the directory /way: ELOOP: Too many symbolic links encountered",
            "/fifo is not a regular file",
            "cannot read the status of /absent: ENOENT: No such file or directory",
            "/.subd/state/state.json is subd's own",
            "/.subd is subd's own",
        ]
    );
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gives_no_more_of_files_than_a_reply_may_hold() {
    let sub = Sub::start().await;
    let size = 20 << 20;
    std::fs::File::create(sub.at("/large")).unwrap().set_len(size).unwrap();
    let piece = |index: usize| Piece {
        path: path("/large"),
        offset: index as u64 * u64::from(PIECE_BYTES_MAX),
        length: u32::MAX,
    };
    let ask = |count: usize| GetFilesRequest { pieces: (0..count).map(piece).collect() };
    let reply = sub.client.call::<GetFiles>(&ask(PIECES_MAX)).await.unwrap();
    let lengths: Vec<usize> =
        reply.pieces.iter().map(|piece| piece.as_ref().unwrap().bytes.0.len()).collect();
    assert_eq!(lengths, [PIECE_BYTES_MAX as usize; 8]);
    let error = sub.client.call::<GetFiles>(&ask(PIECES_MAX + 1)).await.unwrap_err();
    let too_many = "257 pieces: at most 256 are accepted".to_owned();
    assert_eq!(refusal(&error), (FaultCode::TooLarge, too_many));
    // All of many callers are served, if they try again while too many replies wait to be read.
    let request = ask(8);
    let calls = (0..16).map(async |_| {
        loop {
            match sub.client.call_within::<GetFiles>(&request, PATIENCE).await {
                Err(error) if error.code() == Some(FaultCode::Unavailable) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                other => break other,
            }
        }
    });
    let calls = futures_util::future::join_all(calls);
    let replies = tokio::time::timeout(PATIENCE, calls).await.unwrap();
    assert!(replies.iter().all(Result::is_ok));
    tokio::time::timeout(Duration::from_secs(5), sub.stop()).await.unwrap();
}
