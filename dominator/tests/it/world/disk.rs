//! Disks. The one of the dominator, on which an update is recorded before its Commit is sent, is
//! slow, and may be full. Those of machines may be full, too.

use std::sync::Arc;
use std::time::Duration;

use dominator::core::changes::OrderedUpdate;
use dominator::core::sub::{Event, Failure, FailureKind, RequestId};
use model::plan::{Action, Operation};
use model::tree::{File, Leaf, Metadata, Node, Time, Tree, TreeBuilder};

use super::{CALL_LIMIT, Happening, Message, World};
use crate::model::Request;

pub struct Disk {
    is_full: bool,
    /// The most time for a record, in milliseconds.
    pub delay_max: u64,
    /// The trouble that drivers know of.
    trouble: Option<Arc<str>>,
    /// The number of updates that were not ordered, because they could not be recorded.
    pub refused: u64,
}

impl Default for Disk {
    fn default() -> Self {
        Self { is_full: false, delay_max: 5, trouble: None, refused: 0 }
    }
}

impl World {
    /// Fills the disk, or frees it.
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
            self.step(host, Event::HistoryFailing(self.disk.trouble.clone()));
        }
    }

    /// Returns the first event of a driver about the disk.
    pub(super) fn recorder(&self) -> Event {
        Event::HistoryFailing(self.disk.trouble.clone())
    }

    /// Starts to record the update of a Commit.
    pub(super) fn record(
        &mut self,
        host: usize,
        request_id: RequestId,
        ordered: Box<OrderedUpdate>,
    ) {
        self.open(host, request_id, false);
        let run = self.run;
        let delay = Duration::from_millis(self.random.below(self.disk.delay_max));
        self.schedule(delay, Happening::Recorded { host, run, request_id, ordered });
    }

    /// Ends the recording. Sends the Commit if it was successful and the update is still wanted.
    pub(super) fn recorded(&mut self, host: usize, request_id: RequestId, ordered: &OrderedUpdate) {
        if self.disk.is_full {
            let text = "no space left on device";
            self.disk.refused += 1;
            self.tell_recorder(Some(text.into()));
            return self.not_sent(host, request_id, FailureKind::NotRecorded, text);
        }
        self.on_record(host, ordered);
        let update_id = ordered.update_id;
        let Some(driver) = &self.drivers[host] else { return };
        let why = if self.brake.is_some() {
            "the brake was pulled"
        } else if self.is_paused(host) {
            "the machine was paused"
        } else if self.identities.has_identity_mismatch(&self.machines[host].hostname) {
            "it may be another machine"
        } else if !driver.sub.is_commit_wanted(update_id) {
            "something else is wanted now"
        } else if !self.begin_update(host) {
            "the claim was withdrawn"
        } else {
            let image = &self.images[&self.machines[host].required_image];
            let is_required = ordered.image.digest == image.digest;
            let is_room = self.is_room(host, ordered);
            let is_kept = self.is_kept_at(host, ordered.image.name());
            assert!(is_required || is_room || is_kept, "host {host}: to another image");
            self.must_be_known(host);
            self.must_be_allowed(host, ordered.image.name());
            self.must_be_staged(host, update_id);
            let message = Message::Ask(Request::Commit(update_id));
            return self.send(host, "commit", (request_id, message), CALL_LIMIT);
        };
        self.not_sent(host, request_id, FailureKind::Cancelled, why);
    }

    /// True if the update only makes room for the required image.
    fn is_room(&self, host: usize, ordered: &OrderedUpdate) -> bool {
        let required = &self.images[&self.machines[host].required_image];
        let is_extra = |operation: &Operation| {
            let has = |tree: &Tree| tree.get(&operation.path).is_some();
            operation.action == Action::Remove && !has(&required.tree) && !has(&ordered.image.tree)
        };
        ordered.former.as_ref() == Some(ordered.image.name())
            && ordered.planned.plan.operations.iter().all(is_extra)
    }

    /// Fills the disk of a machine with a file that no image has.
    pub fn fill_machine(&mut self, host: usize) {
        let model = &mut self.models[host];
        let mut builder = TreeBuilder::new(model.sub.tree.algorithm());
        for (path, node) in model.sub.tree.nodes() {
            builder.insert(path, node).unwrap();
        }
        let runaway = File {
            metadata: Metadata::new(0o644, 0, 0),
            mtime: Time::default(),
            size_bytes: 1 << 20,
            object: model.sub.tree.algorithm().digest(b"runaway").into(),
        };
        builder.insert("/lib/runaway".parse().unwrap(), Node::Leaf(Leaf::File(runaway))).unwrap();
        model.drift(builder.finish().unwrap(), &mut self.random);
        model.disk_bytes = Some(model.used_bytes());
    }

    fn not_sent(&mut self, host: usize, request_id: RequestId, kind: FailureKind, why: &str) {
        let failure = Failure { kind, text: why.to_owned() };
        self.note(host, &format!("gets no commit: {why}"));
        let (event, run) = (Box::new(Event::CallFailed(request_id, failure)), self.run);
        self.schedule(Duration::from_millis(1), Happening::ToDominator { host, run, event });
    }
}
