//! Records calls that change something, before and after their handlers.
//!
//! The beginning of a call is on the medium before its handler runs, so that every change is
//! recorded; the end is on the medium before the caller is answered.

use std::sync::{Arc, OnceLock};

use super::caller::Caller;
use crate::audit_log::{AuditError, AuditLog, AuditStatus};
use crate::page_frame::{html_escape, pairs};
use api::audit::call_details::{CallDetails, WHO_BYTES_MAX, WHY_BYTES_MAX, escape_and_cut};
use api::audit::record::{AuditEvent, AuditedCall, CallOutcome};
use api::fault::{Fault, FaultCode};
use api::method::{Effect, Method};
use model::display::error_chain;

/// The audit log of a router, once it is set.
#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<OnceLock<AuditLog>>);

/// Returns the page that shows how the log is doing.
pub(super) fn page(status: Option<&AuditStatus>) -> String {
    let Some(status) = status else {
        return "<p>This daemon records nothing.</p>".to_owned();
    };
    let head = status.head.map_or_else(|| "none".to_owned(), |head| head.to_string());
    let state = match &status.error {
        None => "written".to_owned(),
        Some(error) => format!("NOT WRITTEN, and most changes are refused: {error}"),
    };
    let facts = pairs([
        ("State", state),
        ("Head", head.clone()),
        ("Files so far", status.file.to_string()),
        ("Records that could not be written", status.missed.to_string()),
    ]);
    format!(
        "{facts}<p>Whoever keeps the head can say later whether the log is still the same: \
         <code>domtool audit verify --expect-head {} FILE</code></p>",
        html_escape(&head)
    )
}

impl Recorder {
    /// Records in `log` from now on. Returns false if a log was set before.
    pub(super) fn set(&self, log: &AuditLog) -> bool {
        self.0.set(log.clone()).is_ok()
    }

    /// Describes a call of `M` before its handler runs. An upload has no request.
    pub(super) fn call<M: Method>(&self, caller: &Caller, request: Option<&M::Request>) -> Call {
        let log = match M::EFFECT {
            Effect::Tells => None,
            Effect::Changes | Effect::Relieves => self.0.get(),
        };
        Call(log.map(|log| {
            let details = request.map(M::audit_details).unwrap_or_default();
            RecordedCall::new(log, caller, M::NAME, M::EFFECT, details)
        }))
    }

    /// Records that a call of `method` is refused before its request is read.
    pub(super) fn denied(&self, caller: &Caller, method: &str, effect: Effect, fault: &Fault) {
        if effect == Effect::Tells {
            return;
        }
        let Some(log) = self.0.get() else { return };
        if log.admits(caller.identity.in_words().as_deref()) {
            let RecordedCall { act, .. } =
                RecordedCall::new(log, caller, method, effect, CallDetails::default());
            log.record_soon(AuditEvent::Denied {
                act,
                text: escape_and_cut(&fault.message, WHY_BYTES_MAX),
            });
        }
    }
}

/// A call, before it is carried out.
pub(super) struct Call(Option<RecordedCall>);

struct RecordedCall {
    log: AuditLog,
    act: AuditedCall,
    has_power: bool,
    effect: Effect,
}

impl Call {
    /// Runs `handler`, and records the call if it changes anything.
    pub(super) async fn carried_out<T, Fut>(self, handler: impl FnOnce() -> Fut) -> Result<T, Fault>
    where
        Fut: Future<Output = Result<T, Fault>>,
    {
        let Self(Some(recorded)) = self else { return handler().await };
        let RecordedCall { log, act, has_power, effect } = recorded;
        let method = act.method.clone();
        // Limited, so that callers without the power cannot fill the log or push other records out
        // of it. Every call that is carried out is recorded before, whoever makes it.
        let counted = (!has_power).then(|| act.user.clone());
        if let Some(user) = &counted
            && log.is_exhausted(user.as_deref())
        {
            let _is_recorded = log.admits(user.as_deref());
            let text = "too many of your calls came to nothing: try again in a minute";
            return Err(Fault::new(FaultCode::Unavailable, text));
        }
        let of = match log.record(AuditEvent::Begun(act)).await {
            Ok(of) => of,
            // The writer has logged the error.
            Err(_) if effect == Effect::Relieves => return handler().await,
            Err(error) => return Err(refusal(&method, &error)),
        };
        let running = RunningCall { log, counted, method, of, has_not_ended: true };
        let result = handler().await;
        running.end(result.as_ref().err()).await;
        result
    }
}

impl RecordedCall {
    fn new(
        log: &AuditLog,
        caller: &Caller,
        method: &str,
        effect: Effect,
        details: CallDetails,
    ) -> Self {
        let user = caller.identity.in_words();
        let groups: Vec<&str> = caller.identity.groups.iter().map(String::as_str).collect();
        let act = AuditedCall {
            user: user.map(|user| escape_and_cut(&user, WHO_BYTES_MAX)),
            groups: escape_and_cut(&groups.join(","), WHO_BYTES_MAX),
            address: caller.address.to_string(),
            method: method.to_owned(),
            arguments: details.arguments,
            why: details.why,
            who: details.who,
        };
        let has_power = caller.identity.powers.has(method);
        Self { log: log.clone(), act, has_power, effect }
    }
}

/// The fault of a call that cannot be recorded, and so is not carried out.
fn refusal(method: &str, error: &AuditError) -> Fault {
    let code = match error {
        AuditError::Write { is_full: true, .. } => FaultCode::NoSpace,
        _ => FaultCode::Unavailable,
    };
    let text = format!("{method} was not carried out, because it cannot be recorded: ");
    Fault::new(code, text + &error_chain(error))
}

/// A call whose handler runs.
struct RunningCall {
    log: AuditLog,
    /// The caller, if a failure is counted: a user, or `None` inside for a caller without a
    /// certificate.
    counted: Option<Option<String>>,
    method: String,
    of: u64,
    has_not_ended: bool,
}

impl RunningCall {
    /// Counts a failed call, which is recorded already.
    fn count(&self) {
        if let Some(user) = &self.counted {
            let _is_recorded = self.log.admits(user.as_deref());
        }
    }

    async fn end(mut self, fault: Option<&Fault>) {
        self.has_not_ended = false;
        let (outcome, text) = match fault {
            None => (CallOutcome::Done, String::new()),
            Some(fault) => {
                let outcome = match fault.code {
                    FaultCode::Denied => CallOutcome::Denied,
                    _ => CallOutcome::Failed,
                };
                (outcome, escape_and_cut(&fault.message, WHY_BYTES_MAX))
            }
        };
        if outcome != CallOutcome::Done {
            self.count();
        }
        let method = std::mem::take(&mut self.method);
        // If the end cannot be recorded the writer has logged it.
        let _written =
            self.log.record(AuditEvent::Ended { of: self.of, method, outcome, text }).await;
    }
}

impl Drop for RunningCall {
    /// Records calls whose caller disconnected, or whose handler panicked.
    fn drop(&mut self) {
        if !self.has_not_ended {
            return;
        }
        let text = match std::thread::panicking() {
            true => "the handler panicked",
            false => "the caller went away, or the daemon stopped: it may have been done or not",
        };
        self.count();
        self.log.record_soon(AuditEvent::Ended {
            of: self.of,
            method: std::mem::take(&mut self.method),
            outcome: CallOutcome::Left,
            text: text.to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::audit_log::{AuditSettings, Retention};
    use api::access::{Identity, Powers};
    use api::audit::quota::PER_MINUTE;
    use api::audit::record::check_line;
    use api::subd::{Commit, CommitRequest};

    fn caller(powers: Powers) -> Caller {
        let groups = BTreeSet::from(["web".to_owned(), "dba".to_owned()]);
        let identity =
            Identity { user: Some("mallory".to_owned()), groups, powers, ..Identity::default() };
        let address = "10.0.0.7:1".parse().unwrap();
        Caller {
            address,
            local: address,
            unpacks: false,
            identity: Arc::new(identity),
            proof: None,
        }
    }

    /// A log, its file, and what records in it.
    async fn recording() -> (tempfile::TempDir, AuditLog, Recorder) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let settings = AuditSettings { path, bytes_max: 1 << 20, keep: Retention::Files(1) };
        let log = AuditLog::open(settings, "testd").await.unwrap();
        let recorder = Recorder::default();
        recorder.0.set(log.clone()).unwrap();
        (directory, log, recorder)
    }

    fn events(directory: &tempfile::TempDir) -> Vec<AuditEvent> {
        let text = std::fs::read_to_string(directory.path().join("audit.log")).unwrap();
        let record = |line: &str| check_line(line.as_bytes()).unwrap().record.unwrap();
        text.lines().map(|line| record(line).event).collect()
    }

    #[tokio::test]
    async fn whoever_gets_nothing_done_does_not_fill_the_log() {
        let (directory, log, recorder) = recording().await;
        let fault = |code| Fault::new(code, "no");
        let request = CommitRequest { update_id: 1 };
        // Refused by their rule, by their handler, failed, and given up by the caller.
        for index in 0..400 {
            let caller = caller(Powers::default());
            let call = recorder.call::<Commit>(&caller, Some(&request));
            let code = match index % 4 {
                0 => {
                    let denied = fault(FaultCode::Denied);
                    recorder.denied(&caller, "Subd.Resume", Effect::Changes, &denied);
                    recorder.denied(&caller, "Subd.Poll", Effect::Tells, &denied);
                    continue;
                }
                1 => {
                    let call = call.carried_out(std::future::pending::<Result<(), Fault>>);
                    let _left = tokio::time::timeout(Duration::from_millis(20), call).await;
                    continue;
                }
                2 => FaultCode::Denied,
                _ => FaultCode::NotFound,
            };
            let result: Result<(), Fault> = call.carried_out(|| async { Err(fault(code)) }).await;
            result.unwrap_err();
        }
        log.close().await;
        let (mut begun, mut denied, mut ended) = (0, 0, 0);
        for event in events(&directory) {
            match event {
                AuditEvent::Denied { .. } => denied += 1,
                AuditEvent::Ended { outcome, .. } => {
                    assert_ne!(outcome, CallOutcome::Done);
                    ended += 1;
                }
                AuditEvent::Begun(act) => {
                    let AuditedCall { user, groups, address, .. } = act;
                    assert_eq!(user.as_deref(), Some("mallory"));
                    assert_eq!((groups.as_str(), address.as_str()), ("dba,web", "10.0.0.7:1"));
                    begun += 1;
                }
                _ => {}
            }
        }
        assert_eq!(begun, ended);
        // A minute may have ended meanwhile.
        assert!((PER_MINUTE..=2 * PER_MINUTE).contains(&(denied + ended)), "{denied} {ended}");
    }

    #[tokio::test]
    async fn nothing_is_done_unseen_for_whoever_was_refused_often() {
        let (directory, log, recorder) = recording().await;
        let (mallory, admin) = (caller(Powers::default()), caller(Powers::all()));
        while !log.is_exhausted(Some("mallory")) {
            let denied = Fault::new(FaultCode::Denied, "no");
            recorder.denied(&mallory, "Subd.Resume", Effect::Changes, &denied);
        }
        let request = CommitRequest { update_id: 1 };
        let call = recorder.call::<Commit>(&mallory, Some(&request));
        let handler = || async { panic!("it is asked before the call is on record") };
        let refused: Result<(), Fault> = call.carried_out(handler).await;
        assert_eq!(refused.unwrap_err().code, FaultCode::Unavailable);
        // Of somebody who has the power no count is kept.
        let call = recorder.call::<Commit>(&admin, Some(&request));
        call.carried_out(|| async { Ok(()) }).await.unwrap();
        log.close().await;
        let (mut begun, mut done) = (0, 0);
        for event in events(&directory) {
            begun += u32::from(matches!(event, AuditEvent::Begun(_)));
            done +=
                u32::from(matches!(event, AuditEvent::Ended { outcome: CallOutcome::Done, .. }));
        }
        assert_eq!((begun, done), (1, 1));
    }
}
