//! What an audit log tells, one row for each call: its beginning and its end together.
// tidy: core

use std::collections::BTreeMap;

use api::access::Powers;
use api::audit::record::{Act, Event, Outcome, Record};
use serde::Serialize;

/// One call, or one thing that a daemon tells of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The number of the record with which it began.
    pub sequence: u64,
    /// When.
    pub time: String,
    /// The daemon.
    pub daemon: String,
    /// The user of the certificate; empty for a caller without one, and for the daemon itself.
    pub user: String,
    /// The groups of the user.
    pub groups: String,
    /// Where the call came from.
    pub address: String,
    /// The method, or what the daemon decided or tells.
    pub method: String,
    pub arguments: String,
    /// `done`, `denied`, `failed`, or `unknown` if no end is on record.
    pub outcome: &'static str,
    /// Why it was not done.
    pub text: String,
    /// Why it was asked for.
    pub why: String,
    /// Who, by the caller's own word.
    pub who: String,
}

/// Which rows are wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Not before this moment, as records write it.
    pub since: Option<String>,
    /// Not after this moment.
    pub until: Option<String>,
    /// Of these users, by certificate or by their own word; of all if it is empty.
    pub users: Vec<String>,
    /// Of methods like these; of all if it is empty.
    pub methods: Vec<String>,
}

impl Wanted {
    fn has(&self, row: &Row) -> bool {
        let is_of = |user: &String| *user == row.user || *user == row.who;
        // All moments are written with as many digits, in UTC.
        self.since.as_ref().is_none_or(|since| row.time >= *since)
            && self.until.as_ref().is_none_or(|until| row.time <= *until)
            && (self.users.is_empty() || self.users.iter().any(is_of))
            && (self.methods.is_empty()
                || self.methods.iter().any(|pattern| is_like(pattern, &row.method)))
    }
}

/// True if `pattern`, in which `*` stands for anything, matches a method or a decision.
fn is_like(pattern: &str, name: &str) -> bool {
    let dotted = |text: &str| {
        if text.contains('.') { text.to_owned() } else { format!("daemon.{text}") }
    };
    Powers::new([dotted(pattern)]).has(&dotted(name)) || pattern == "*"
}

/// Puts records together to rows, in their order.
#[derive(Debug, Default)]
pub struct Rows {
    rows: Vec<Row>,
    /// Where the rows are of calls whose end is not known yet.
    open: BTreeMap<u64, usize>,
}

impl Rows {
    /// Takes the next record.
    pub fn add(&mut self, record: Record) {
        let Record { sequence, time, daemon, event, .. } = record;
        let row = Row { sequence, time, daemon, outcome: "done", ..Row::default() };
        let of_act = |row: Row, act: Act, outcome| Row {
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
            Event::File { .. } => return,
            Event::Started { version } => {
                Row { method: "started".into(), arguments: format!("version={version}"), ..row }
            }
            Event::Torn { bytes, text, .. } => {
                let arguments = format!("bytes={bytes}");
                Row { method: "torn".into(), arguments, text, ..row }
            }
            Event::Begun(act) => {
                self.open.insert(sequence, self.rows.len());
                of_act(row, act, "unknown")
            }
            Event::Ended { of, method, outcome, text } => {
                let outcome = match outcome {
                    Outcome::Done => "done",
                    Outcome::Denied => "denied",
                    Outcome::Failed => "failed",
                    Outcome::Left => "unknown",
                };
                match self.open.remove(&of).and_then(|at| self.rows.get_mut(at)) {
                    Some(begun) => {
                        (begun.outcome, begun.text) = (outcome, text);
                        return;
                    }
                    // It began in a file that is not here.
                    None => Row { sequence: of, method, outcome, text, ..row },
                }
            }
            Event::Denied { act, text } => Row { text, ..of_act(row, act, "denied") },
            Event::DeniedMore { caller, count } => {
                let arguments = format!("calls={count}");
                let method = "more-denied".to_owned();
                Row { user: caller, method, arguments, outcome: "denied", ..row }
            }
            Event::Decided { decision, arguments, why } => {
                Row { method: decision, arguments, why, ..row }
            }
            Event::Missed { count, text } => {
                let (method, arguments) = ("missed".into(), format!("records={count}"));
                Row { method, arguments, outcome: "failed", text, ..row }
            }
        };
        self.rows.push(row);
    }

    /// Those that are wanted: at most `limit`, the newest; all if that is 0.
    #[must_use]
    pub fn finish(self, wanted: &Wanted, limit: usize) -> Vec<Row> {
        let mut rows: Vec<Row> = self.rows.into_iter().filter(|row| wanted.has(row)).collect();
        if limit > 0 {
            rows.drain(..rows.len().saturating_sub(limit));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use api::audit::record::{Chain, open};
    use model::tree::Time;

    use super::*;

    fn act(user: Option<&str>, method: &str) -> Act {
        let user = user.map(str::to_owned);
        let address = "10.0.0.7:1".to_owned();
        Act { user, address, method: method.to_owned(), ..Act::default() }
    }

    fn ended(of: u64, outcome: Outcome) -> Event {
        Event::Ended { of, method: "A.B".to_owned(), outcome, text: "why".to_owned() }
    }

    fn rows(wanted: &Wanted, limit: usize) -> Vec<(u64, String, &'static str)> {
        let events = [
            Event::File { file: 1 },
            ended(0, Outcome::Done),
            Event::Begun(act(Some("alice"), "ImageServer.DeleteImage")),
            Event::Begun(act(None, "ImageServer.AddImage")),
            ended(3, Outcome::Done),
            Event::Denied { act: act(Some("mallory"), "Subd.Resume"), text: "no power".to_owned() },
            Event::Decided {
                decision: "expire-image".to_owned(),
                arguments: String::new(),
                why: String::new(),
            },
        ];
        let mut chain = Chain::new("testd", None);
        let mut rows = Rows::default();
        for (second, event) in events.into_iter().enumerate() {
            let time = Time { seconds: second as i64, nanoseconds: 0 };
            let line = chain.append(time, event);
            rows.add(open(line.trim_end().as_bytes()).unwrap().record.unwrap());
        }
        let rows = rows.finish(wanted, limit).into_iter();
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
            Wanted {
                since: list(since),
                until: None,
                users: list(user).into_iter().collect(),
                methods: list(method).into_iter().collect(),
            }
        };
        assert_eq!(rows(&Wanted::default(), 0), all);
        assert_eq!(rows(&Wanted::default(), 2), all[3..]);
        assert_eq!(rows(&wanted("alice", "", ""), 0), all[1..2]);
        assert_eq!(rows(&wanted("", "ImageServer.*", ""), 0), all[1..3]);
        assert_eq!(rows(&wanted("", "expire-*", ""), 0), all[4..]);
        assert_eq!(rows(&wanted("", "*", "1970-01-01T00:00:05.000000Z"), 0), all[3..]);
    }
}
