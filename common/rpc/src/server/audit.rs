//! Records calls that change something, around their handlers.
//!
//! That a call begins is on the medium before its handler is asked, so that nothing is changed that
//! is not on record, and how it ended before its caller is answered.

use std::sync::{Arc, OnceLock};

use super::page::Page;
use super::{Caller, PageHandler, Routes};
use crate::audit_log::{AuditCollector, AuditError, AuditLog, AuditStatus};
use crate::page_frame::{html_escape, pairs};
use api::audit::brief::{Brief, WHO_BYTES_MAX, WHY_BYTES_MAX, short};
use api::audit::record::{Act, Event, Outcome};
use api::fault::{Fault, FaultCode};
use api::method::{Effect, Method};
use model::report::report;

/// Where the calls of a router are recorded, once that is known.
#[derive(Clone, Default)]
pub(super) struct Recorder(Arc<OnceLock<AuditLog>>);

/// Has `routes` record in `log`.
pub(super) fn attach(routes: &mut Routes, log: &AuditLog) {
    if routes.recorder.0.set(log.clone()).is_err() {
        tracing::error!("a server has two audit logs: only the first is written");
        return;
    }
    let (collected, shown) = (AuditCollector(log.clone()), log.clone());
    routes.metrics.registry().register_collector(Box::new(collected));
    let frame = routes.frame.clone();
    let handler: PageHandler = Arc::new(move |_| {
        let html = frame.render("Audit log", &page(shown.status().as_ref()));
        Box::pin(async move { Ok(Page::Html(html)) })
    });
    routes.pages.insert("/audit", handler);
}

fn page(status: Option<&AuditStatus>) -> String {
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
    /// A call of `M`, which its handler has not seen yet. An upload has no request.
    pub(super) fn call<M: Method>(&self, caller: &Caller, request: Option<&M::Request>) -> Call {
        let log = match M::EFFECT {
            Effect::Tells => None,
            Effect::Changes | Effect::Relieves => self.0.get(),
        };
        Call(log.map(|log| {
            let brief = request.map(M::brief).unwrap_or_default();
            Recorded::new(log, caller, M::NAME, M::EFFECT, brief)
        }))
    }

    /// Records that a call of `method` is refused before its request is read.
    pub(super) fn denied(&self, caller: &Caller, method: &str, effect: Effect, fault: &Fault) {
        if effect == Effect::Tells {
            return;
        }
        let Some(log) = self.0.get() else { return };
        if log.admits(caller.identity.user.as_deref()) {
            let Recorded { act, .. } = Recorded::new(log, caller, method, effect, Brief::default());
            log.record_soon(Event::Denied { act, text: short(&fault.message, WHY_BYTES_MAX) });
        }
    }
}

/// A call, before it is carried out.
pub(super) struct Call(Option<Recorded>);

struct Recorded {
    log: AuditLog,
    act: Act,
    has_power: bool,
    effect: Effect,
}

impl Call {
    /// Carries the call out with `handler`, on record if it changes anything.
    pub(super) async fn carried_out<T, Fut>(self, handler: impl FnOnce() -> Fut) -> Result<T, Fault>
    where
        Fut: Future<Output = Result<T, Fault>>,
    {
        let Self(Some(recorded)) = self else { return handler().await };
        let Recorded { log, act, has_power, effect } = recorded;
        let method = act.method.clone();
        // So that nobody without the power fills the log, or pushes out of it what others did.
        // What is carried out is on record before, whoever asks.
        let counted = (!has_power).then(|| act.user.clone());
        if let Some(user) = &counted
            && log.is_spent(user.as_deref())
        {
            let _is_recorded = log.admits(user.as_deref());
            let text = "too many of your calls came to nothing: try again in a minute";
            return Err(Fault::new(FaultCode::Unavailable, text));
        }
        let of = match log.record(Event::Begun(act)).await {
            Ok(of) => of,
            // The writer has logged what it is.
            Err(_) if effect == Effect::Relieves => return handler().await,
            Err(error) => return Err(refusal(&method, &error)),
        };
        let open = Open { log, counted, method, of, is_open: true };
        let result = handler().await;
        open.end(result.as_ref().err()).await;
        result
    }
}

impl Recorded {
    fn new(log: &AuditLog, caller: &Caller, method: &str, effect: Effect, brief: Brief) -> Self {
        let user = caller.identity.user.as_deref();
        let groups: Vec<&str> = caller.identity.groups.iter().map(String::as_str).collect();
        let act = Act {
            user: user.map(|user| short(user, WHO_BYTES_MAX)),
            groups: short(&groups.join(","), WHO_BYTES_MAX),
            address: caller.address.to_string(),
            method: method.to_owned(),
            arguments: brief.arguments,
            why: brief.why,
            who: brief.who,
        };
        let has_power = caller.identity.powers.has(method);
        Self { log: log.clone(), act, has_power, effect }
    }
}

/// Nothing is done that cannot be recorded.
fn refusal(method: &str, error: &AuditError) -> Fault {
    let code = match error {
        AuditError::Write { is_full: true, .. } => FaultCode::NoSpace,
        _ => FaultCode::Unavailable,
    };
    let text = format!("{method} was not carried out, because it cannot be recorded: ");
    Fault::new(code, text + &report(error))
}

/// A call that is carried out.
struct Open {
    log: AuditLog,
    /// Whose, if it counts that it came to nothing: a user, or somebody without a certificate.
    counted: Option<Option<String>>,
    method: String,
    of: u64,
    is_open: bool,
}

impl Open {
    /// Counts it. It is recorded already.
    fn count(&self) {
        if let Some(user) = &self.counted {
            let _is_recorded = self.log.admits(user.as_deref());
        }
    }

    async fn end(mut self, fault: Option<&Fault>) {
        self.is_open = false;
        let (outcome, text) = match fault {
            None => (Outcome::Done, String::new()),
            Some(fault) => {
                let outcome = match fault.code {
                    FaultCode::Denied => Outcome::Denied,
                    _ => Outcome::Failed,
                };
                (outcome, short(&fault.message, WHY_BYTES_MAX))
            }
        };
        if outcome != Outcome::Done {
            self.count();
        }
        let method = std::mem::take(&mut self.method);
        // That it was done is not undone if that cannot be recorded; the writer has logged it.
        let _written = self.log.record(Event::Ended { of: self.of, method, outcome, text }).await;
    }
}

impl Drop for Open {
    /// Nobody waited for the end: the caller went away, or the handler panicked.
    fn drop(&mut self) {
        if !self.is_open {
            return;
        }
        let text = match std::thread::panicking() {
            true => "the handler panicked",
            false => "the caller went away, or the daemon stopped: it may have been done or not",
        };
        self.count();
        self.log.record_soon(Event::Ended {
            of: self.of,
            method: std::mem::take(&mut self.method),
            outcome: Outcome::Left,
            text: text.to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::audit_log::{Keep, Settings};
    use api::access::{Identity, Powers};
    use api::audit::quota::PER_MINUTE;
    use api::audit::record::open;
    use api::subd::{Commit, CommitRequest};

    fn caller(powers: Powers) -> Caller {
        let groups = BTreeSet::from(["web".to_owned(), "dba".to_owned()]);
        let identity = Identity { user: Some("mallory".to_owned()), groups, powers, zone: None };
        let address = "10.0.0.7:1".parse().unwrap();
        Caller { address, local: address, unpacks: false, identity: Arc::new(identity) }
    }

    /// A log, its file, and what records in it.
    async fn recording() -> (tempfile::TempDir, AuditLog, Recorder) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let settings = Settings { path, bytes_max: 1 << 20, keep: Keep::Files(1) };
        let log = AuditLog::open(settings, "testd").await.unwrap();
        let recorder = Recorder::default();
        recorder.0.set(log.clone()).unwrap();
        (directory, log, recorder)
    }

    fn events(directory: &tempfile::TempDir) -> Vec<Event> {
        let text = std::fs::read_to_string(directory.path().join("audit.log")).unwrap();
        let record = |line: &str| open(line.as_bytes()).unwrap().record.unwrap();
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
                Event::Denied { .. } => denied += 1,
                Event::Ended { outcome, .. } => {
                    assert_ne!(outcome, Outcome::Done);
                    ended += 1;
                }
                Event::Begun(act) => {
                    let Act { user, groups, address, .. } = act;
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
        while !log.is_spent(Some("mallory")) {
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
            begun += u32::from(matches!(event, Event::Begun(_)));
            done += u32::from(matches!(event, Event::Ended { outcome: Outcome::Done, .. }));
        }
        assert_eq!((begun, done), (1, 1));
    }
}
