//! Content revisions that wait for environments: a machine gets one when a rollout brings it.
//!
//! # Invariant
//!
//! * Whatever else says that a change may go to a machine, a gate that does not holds.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::content::{ContentCause, ContentChangeId, ContentStage};
use rollouts::content::{ContentLimits, ContentRevision, NewestContent};
use rollouts::document::MachineTaskState;

use super::ComputedTable;
use super::rollout::Standing;
use crate::core::timing::Now;

/// Which content revisions may go to which machines, by host name. Others are not gated.
pub type ContentGates = BTreeMap<String, ContentLimits>;

/// The gates, and what is known of the servers.
#[derive(Debug, Default)]
pub(super) struct Gates {
    limits: ContentGates,
    newest: NewestContent,
}

impl Gates {
    /// Takes the newest content revision of a server.
    pub(super) fn take_newest(&mut self, server: &str, newest: ContentRevision) {
        self.newest.insert(server.to_owned(), newest);
    }

    /// True if a change may go to a machine as far as environments are concerned. Until a server
    /// has told how it numbers its revisions, none may.
    pub(super) fn allow(&self, hostname: &str, change: &ContentChangeId) -> bool {
        self.verdict(hostname, change) == Some(true)
    }

    /// Returns whether a change may go to a machine; `None` while that is not known.
    fn verdict(&self, hostname: &str, change: &ContentChangeId) -> Option<bool> {
        let ContentCause::Revision(number) = change.cause else { return Some(true) };
        let limits = self.limits.get(hostname).and_then(|limits| limits.get(&change.source));
        let Some(limits) = limits else { return Some(true) };
        let newest = self.newest.get(&change.source)?;
        Some(limits.iter().all(|limit| limit.allows(ContentRevision { number, ..*newest })))
    }
}

impl ComputedTable {
    /// Sets which content revisions may go to which machines. A machine goes back to its former
    /// content if it may not have what it has.
    pub fn set_gates(&mut self, limits: ContentGates, now: Now) {
        let before = std::mem::replace(&mut self.gates.limits, limits);
        let hosts: BTreeSet<&String> = before.keys().chain(self.gates.limits.keys()).collect();
        let is_other = |host: &&&String| before.get(**host) != self.gates.limits.get(**host);
        let hosts: Vec<String> =
            hosts.iter().filter(is_other).map(|host| (*host).clone()).collect();
        for hostname in hosts {
            self.changes.can_get(&hostname);
            let Some(files) = self.machines.get(&hostname) else { continue };
            let contents = files.files.iter().map(|file| &file.contents);
            let changed = contents.flat_map(|contents| [&contents.former, &contents.next]);
            let tried = files.trial.iter().map(|trial| &trial.change);
            let changes = changed.flatten().map(|changed| &changed.change).chain(tried);
            let is_held = |change: &&Arc<ContentChangeId>| {
                self.gates.verdict(&hostname, change) == Some(false)
            };
            let undone: BTreeSet<_> = changes.filter(is_held).cloned().collect();
            for change in undone {
                self.changes.taken_back(&change, &hostname);
                self.undo_on(&change, &hostname);
            }
        }
        self.advance(now);
    }

    /// Returns the newest content revision of each server that has told it.
    #[must_use]
    pub fn newest_content(&self) -> &NewestContent {
        &self.gates.newest
    }

    /// Returns how a machine is with the content of a server, if it may have that of this content
    /// revision; `None` if it has no files of it.
    #[must_use]
    pub fn content_state(
        &self,
        hostname: &str,
        server: &str,
        content: ContentRevision,
    ) -> Option<MachineTaskState> {
        let files = self.machines.get(hostname)?;
        let mut of_server = files.files.iter().filter(|file| file.rule.source == server).peekable();
        of_server.peek()?;
        let limits = self.gates.limits.get(hostname).and_then(|limits| limits.get(server));
        if !limits.is_some_and(|limits| limits.contains(&content)) {
            // It has not heard of it yet.
            return Some(MachineTaskState::Starting);
        }
        let next = of_server.filter_map(|file| file.contents.next.as_ref());
        let mut waits = next
            .map(|next| &next.change)
            .filter(|change| self.gates.allow(hostname, change))
            .map(|change| self.changes.get(change))
            .peekable();
        if waits.peek().is_some() {
            let has_failed = waits.flatten().any(|change| {
                let is_stopped = matches!(change.stage, ContentStage::Stopped(_));
                is_stopped || !change.may_try(hostname)
            });
            let failed = has_failed.then_some(MachineTaskState::Failed);
            return Some(failed.unwrap_or(MachineTaskState::Starting));
        }
        Some(match (&files.trial, files.standing) {
            (None, Standing::InSync | Standing::Held) => MachineTaskState::Synced,
            _ => MachineTaskState::Starting,
        })
    }
}
