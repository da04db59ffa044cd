//! The calls in an audit log: joins the record of the beginning of a call with that of its end.
// tidy: core

use std::collections::BTreeMap;

use api::access::Powers;
use api::audit::record::{AuditEvent, AuditRecord, AuditedCall, CallOutcome};
use serde::Serialize;

/// One call, or one decision or event of the daemon itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Call {
    /// The number of its first record.
    pub sequence: u64,
    pub time: String,
    pub daemon: String,
    /// The user in the certificate; empty for a caller without one, and for the daemon itself.
    pub user: String,
    pub groups: String,
    /// The address of the caller.
    pub address: String,
    /// The method, or the decision or event.
    pub method: String,
    pub arguments: String,
    /// `done`, `denied`, `failed`, or `unknown` if the log has no end of the call.
    pub outcome: &'static str,
    /// Why it was denied or failed.
    pub text: String,
    /// The reason that the caller gave.
    pub why: String,
    /// The user as the caller stated it.
    pub who: String,
}

/// Selects calls.
#[derive(Clone, Debug, Default)]
pub struct CallFilter {
    /// Earliest time, in the format of records.
    pub since: Option<String>,
    /// Latest time.
    pub until: Option<String>,
    /// Users, by certificate or as stated; empty for all.
    pub users: Vec<String>,
    /// Patterns of methods; empty for all.
    pub methods: Vec<String>,
}

impl CallFilter {
    fn matches(&self, row: &Call) -> bool {
        let is_caller = |user: &String| *user == row.user || *user == row.who;
        // All times are in UTC and have the same number of digits.
        self.since.as_ref().is_none_or(|since| row.time >= *since)
            && self.until.as_ref().is_none_or(|until| row.time <= *until)
            && (self.users.is_empty() || self.users.iter().any(is_caller))
            && (self.methods.is_empty()
                || self.methods.iter().any(|pattern| is_match(pattern, &row.method)))
    }
}

/// Returns true if `pattern`, in which `*` matches any text, matches a method or a decision.
fn is_match(pattern: &str, name: &str) -> bool {
    let dotted = |text: &str| {
        if text.contains('.') { text.to_owned() } else { format!("daemon.{text}") }
    };
    Powers::new([dotted(pattern)]).has(&dotted(name)) || pattern == "*"
}

/// Collects calls from records, in their order.
#[derive(Debug, Default)]
pub struct Calls {
    calls: Vec<Call>,
    /// Index of each call without an end, by the number of its first record.
    open: BTreeMap<u64, usize>,
}

impl Calls {
    /// Adds the next record.
    pub fn add(&mut self, record: AuditRecord) {
        let AuditRecord { sequence, time, daemon, event, .. } = record;
        let row = Call { sequence, time, daemon, outcome: "done", ..Call::default() };
        let with_act = |row: Call, act: AuditedCall, outcome| Call {
            user: act.user.unwrap_or_default(),
            groups: act.groups,
            address: act.address,
            method: act.method,
            arguments: act.arguments,
            why: act.why,
            who: act.who,
            outcome,
            ..row
        };
        let row = match event {
            AuditEvent::File { .. } => return,
            AuditEvent::Started { version } => {
                Call { method: "started".into(), arguments: format!("version={version}"), ..row }
            }
            AuditEvent::Torn { bytes, text, .. } => {
                let arguments = format!("bytes={bytes}");
                Call { method: "torn".into(), arguments, text, ..row }
            }
            AuditEvent::Begun(act) => {
                self.open.insert(sequence, self.calls.len());
                with_act(row, act, "unknown")
            }
            AuditEvent::Ended { of, method, outcome, text } => {
                let outcome = match outcome {
                    CallOutcome::Done => "done",
                    CallOutcome::Denied => "denied",
                    CallOutcome::Failed => "failed",
                    CallOutcome::Left => "unknown",
                };
                match self.open.remove(&of).and_then(|at| self.calls.get_mut(at)) {
                    Some(begun) => {
                        (begun.outcome, begun.text) = (outcome, text);
                        return;
                    }
                    // Its beginning is in a file that was not read.
                    None => Call { sequence: of, method, outcome, text, ..row },
                }
            }
            AuditEvent::Denied { act, text } => Call { text, ..with_act(row, act, "denied") },
            AuditEvent::DeniedMore { caller, count } => {
                let arguments = format!("calls={count}");
                let method = "more-denied".to_owned();
                Call { user: caller, method, arguments, outcome: "denied", ..row }
            }
            AuditEvent::Decided { decision, arguments, why } => {
                Call { method: decision, arguments, why, ..row }
            }
            AuditEvent::Missed { count, text } => {
                let (method, arguments) = ("missed".into(), format!("records={count}"));
                Call { method, arguments, outcome: "failed", text, ..row }
            }
        };
        self.calls.push(row);
    }

    /// Returns the newest `limit` calls that match `filter`; all of them if `limit` is 0.
    #[must_use]
    pub fn finish(self, filter: &CallFilter, limit: usize) -> Vec<Call> {
        let mut rows: Vec<Call> =
            self.calls.into_iter().filter(|row| filter.matches(row)).collect();
        if limit > 0 {
            rows.drain(..rows.len().saturating_sub(limit));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use api::audit::record::{Chain, check_line};
    use model::tree::Time;

    use super::*;

    fn act(user: Option<&str>, method: &str) -> AuditedCall {
        let user = user.map(str::to_owned);
        let address = "10.0.0.7:1".to_owned();
        AuditedCall { user, address, method: method.to_owned(), ..AuditedCall::default() }
    }

    fn ended(of: u64, outcome: CallOutcome) -> AuditEvent {
        AuditEvent::Ended { of, method: "A.B".to_owned(), outcome, text: "why".to_owned() }
    }

    fn rows(filter: &CallFilter, limit: usize) -> Vec<(u64, String, &'static str)> {
        let events = [
            AuditEvent::File { file: 1 },
            ended(0, CallOutcome::Done),
            AuditEvent::Begun(act(Some("alice"), "ImageServer.DeleteImage")),
            AuditEvent::Begun(act(None, "ImageServer.AddImage")),
            ended(3, CallOutcome::Done),
            AuditEvent::Denied {
                act: act(Some("mallory"), "Subd.Resume"),
                text: "no power".to_owned(),
            },
            AuditEvent::Decided {
                decision: "expire-image".to_owned(),
                arguments: String::new(),
                why: String::new(),
            },
        ];
        let mut chain = Chain::new("testd", None);
        let mut rows = Calls::default();
        for (second, event) in events.into_iter().enumerate() {
            let time = Time { seconds: second as i64, nanoseconds: 0 };
            let line = chain.append(time, event);
            rows.add(check_line(line.trim_end().as_bytes()).unwrap().record.unwrap());
        }
        let rows = rows.finish(filter, limit).into_iter();
        rows.map(|row| (row.sequence, row.method, row.outcome)).collect()
    }

    #[test]
    fn a_call_is_one_row() {
        let row = |sequence, method: &str, outcome| (sequence, method.to_owned(), outcome);
        let all = [
            row(0, "A.B", "done"),
            row(3, "ImageServer.DeleteImage", "done"),
            row(4, "ImageServer.AddImage", "unknown"),
            row(6, "Subd.Resume", "denied"),
            row(7, "expire-image", "done"),
        ];
        let wanted = |user: &str, method: &str, since: &str| {
            let list = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            CallFilter {
                since: list(since),
                until: None,
                users: list(user).into_iter().collect(),
                methods: list(method).into_iter().collect(),
            }
        };
        assert_eq!(rows(&CallFilter::default(), 0), all);
        assert_eq!(rows(&CallFilter::default(), 2), all[3..]);
        assert_eq!(rows(&wanted("alice", "", ""), 0), all[1..2]);
        assert_eq!(rows(&wanted("", "ImageServer.*", ""), 0), all[1..3]);
        assert_eq!(rows(&wanted("", "expire-*", ""), 0), all[4..]);
        assert_eq!(rows(&wanted("", "*", "1970-01-01T00:00:05.000000Z"), 0), all[3..]);
    }
}
