//! The disk of the dominator: what a Commit orders is on it before the Commit is sent. It takes its
//! time, and may be full.

use std::sync::Arc;
use std::time::Duration;

use dominator::core::changes::Ordered;
use dominator::core::sub::{Event, Failure, FailureKind, Ticket};

use super::{CALL_LIMIT, Happening, Message, World};
use crate::model::Request;

pub struct Disk {
    is_full: bool,
    /// The longest that a record takes, in milliseconds.
    pub delay_max: u64,
    /// What the drivers were told.
    trouble: Option<Arc<str>>,
    /// Updates that were not ordered, because they could not be recorded.
    pub refused: u64,
}

impl Default for Disk {
    fn default() -> Self {
        Self { is_full: false, delay_max: 5, trouble: None, refused: 0 }
    }
}

impl World {
    /// The disk is full, or not any more.
    pub fn fill_disk(&mut self, is_full: bool) {
        self.note(0, &format!("the disk is full: {is_full}"));
        self.disk.is_full = is_full;
        if !is_full {
            self.tell_recorder(None);
        }
    }

    fn tell_recorder(&mut self, trouble: Option<Arc<str>>) {
        if self.disk.trouble == trouble {
            return;
        }
        self.disk.trouble = trouble;
        for host in 0..self.models.len() {
            self.step(host, Event::HistoryTrouble(self.disk.trouble.clone()));
        }
    }

    /// What a driver is told that starts.
    pub(super) fn recorder(&self) -> Event {
        Event::HistoryTrouble(self.disk.trouble.clone())
    }

    /// Puts on record what a Commit orders.
    pub(super) fn record(&mut self, host: usize, ticket: Ticket, ordered: Box<Ordered>) {
        self.open(host, ticket, false);
        let run = self.run;
        let delay = Duration::from_millis(self.random.below(self.disk.delay_max));
        self.schedule(delay, Happening::Recorded { host, run, ticket, ordered });
    }

    /// It is on record, or cannot be: the Commit is sent, if that is still wanted.
    pub(super) fn recorded(&mut self, host: usize, ticket: Ticket, ordered: &Ordered) {
        if self.disk.is_full {
            let text = "no space left on device";
            self.disk.refused += 1;
            self.tell_recorder(Some(text.into()));
            return self.not_sent(host, ticket, FailureKind::Unsent, text);
        }
        self.on_record(host, ordered);
        let update_id = ordered.update_id;
        let Some(driver) = &self.drivers[host] else { return };
        let why = if self.brake.is_some() {
            "the brake was pulled"
        } else if self.is_paused(host) {
            "the machine was paused"
        } else if self.roster.is_doubted(&self.machines[host].hostname) {
            "it may be another machine"
        } else if !driver.sub.still_orders(update_id) {
            "something else is wanted now"
        } else if !self.begin_update(host) {
            "leave was taken back"
        } else {
            let image = &self.images[&self.machines[host].required_image];
            assert_eq!(ordered.image.digest, image.digest, "host {host}: to another image");
            self.must_be_known(host);
            self.must_be_allowed(host);
            self.must_be_staged(host, update_id);
            let message = Message::Ask(Request::Commit(update_id));
            return self.send(host, "commit", ticket, message, CALL_LIMIT);
        };
        self.not_sent(host, ticket, FailureKind::Braked, why);
    }

    fn not_sent(&mut self, host: usize, ticket: Ticket, kind: FailureKind, why: &str) {
        let failure = Failure { kind, text: why.to_owned() };
        self.note(host, &format!("gets no commit: {why}"));
        let (event, run) = (Box::new(Event::CallFailed(ticket, failure)), self.run);
        self.schedule(Duration::from_millis(1), Happening::ToDominator { host, run, event });
    }
}
