//! Content revisions that wait for environments: a machine gets one when a rollout brings it.
//!
//! # Invariant
//!
//! * Whatever else says that a change may go to a machine, a gate that does not holds.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::content::{ContentCause, ContentChangeId};
use rollouts::content::{ContentLimits, ContentRevision, NewestContent};
use rollouts::document::MachineTaskState;

use super::rollout::Standing;
use super::{ComputedTable, FileState, Versions};
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
    /// Takes the newest content revision of a server. Returns true if it was another one.
    fn take_newest(&mut self, server: &str, newest: ContentRevision) -> bool {
        self.newest.insert(server.to_owned(), newest) != Some(newest)
    }

    fn limits_of(&self, hostname: &str, server: &str) -> Option<&Vec<ContentRevision>> {
        self.limits.get(hostname)?.get(server)
    }

    /// True if an environment decides about content of this server on this machine.
    pub(super) fn are_for(&self, hostname: &str, server: &str) -> bool {
        self.limits_of(hostname, server).is_some()
    }

    /// True if a change may go to a machine as far as environments are concerned. Until a server
    /// has told how it numbers its revisions, none may.
    pub(super) fn allow(&self, hostname: &str, change: &ContentChangeId) -> bool {
        self.verdict(hostname, change) == Some(true)
    }

    /// Returns whether a change may go to a machine; `None` while that is not known.
    fn verdict(&self, hostname: &str, change: &ContentChangeId) -> Option<bool> {
        let ContentCause::Revision(number) = change.cause else { return Some(true) };
        let Some(limits) = self.limits_of(hostname, &change.source) else { return Some(true) };
        let newest = self.newest.get(&change.source)?;
        Some(limits.iter().all(|limit| limit.allows(ContentRevision { number, ..*newest })))
    }
}

impl ComputedTable {
    /// Sets which content revisions may go to which machines.
    pub fn set_gates(&mut self, limits: ContentGates, now: Now) {
        let before = std::mem::replace(&mut self.gates.limits, limits);
        let hosts: BTreeSet<&String> = before.keys().chain(self.gates.limits.keys()).collect();
        let is_other = |host: &&&String| before.get(**host) != self.gates.limits.get(**host);
        let hosts: Vec<String> =
            hosts.iter().filter(is_other).map(|host| (*host).clone()).collect();
        hosts.iter().for_each(|hostname| self.apply_gates(hostname));
        self.advance(now);
    }

    /// Takes the newest content revision of a server.
    pub(super) fn take_newest(&mut self, server: &str, newest: ContentRevision) {
        if !self.gates.take_newest(server, newest) {
            return;
        }
        let gated = self.gates.limits.iter().filter(|(_, limits)| limits.contains_key(server));
        let gated: Vec<String> = gated.map(|(hostname, _)| hostname.clone()).collect();
        gated.iter().for_each(|hostname| self.apply_gates(hostname));
    }

    /// Takes a machine back to its former content if it may not have what it has. What it may have
    /// now is looked at by [`Self::advance`].
    pub(super) fn apply_gates(&mut self, hostname: &str) {
        self.changes.can_get(hostname, |change| self.gates.allow(hostname, change));
        let Some(files) = self.machines.get(hostname) else { return };
        let contents = files.files.iter().map(|file| &file.contents);
        let changed = contents.flat_map(|contents| [&contents.former, &contents.next]);
        let tried = files.trial.iter().map(|trial| &trial.change);
        let changes = changed.flatten().map(|changed| &changed.change).chain(tried);
        let is_held =
            |change: &&Arc<ContentChangeId>| self.gates.verdict(hostname, change) == Some(false);
        let undone: BTreeSet<_> = changes.filter(is_held).cloned().collect();
        for change in undone {
            self.changes.taken_back(&change, hostname);
            self.undo_on(&change, hostname);
        }
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
        let Some(files) = self.machines.get(hostname) else {
            // Its image is not loaded yet.
            let stored = self.restored.get(hostname)?.files.iter();
            let has_files = { stored }.any(|(rule, _)| rule.source == server);
            return has_files.then_some(MachineTaskState::Starting);
        };
        let mut of_server = files.files.iter().filter(|file| file.rule.source == server).peekable();
        of_server.peek()?;
        let limits = self.gates.limits_of(hostname, server);
        let has_heard = limits.is_some_and(|limits| limits.contains(&content));
        let (true, Some(versions)) = (has_heard, self.generators.get(server)) else {
            return Some(MachineTaskState::Starting);
        };
        let states: Vec<MachineTaskState> =
            of_server.map(|file| self.file_state(hostname, file, content, versions)).collect();
        let is_any = |state| states.contains(&state);
        let is_verified =
            files.trial.is_none() && matches!(files.standing, Standing::InSync | Standing::Held);
        Some(match is_verified && !is_any(MachineTaskState::Starting) {
            _ if is_any(MachineTaskState::Failed) => MachineTaskState::Failed,
            true => MachineTaskState::Synced,
            false => MachineTaskState::Starting,
        })
    }

    /// Returns how far the content of a file has come that is of this content revision or an
    /// earlier one.
    fn file_state(
        &self,
        hostname: &str,
        file: &FileState,
        content: ContentRevision,
        versions: &Versions,
    ) -> MachineTaskState {
        let numbering = self.gates.newest.get(&file.rule.source).map(|newest| newest.numbering);
        let is_of_it = |number: u64| {
            numbering.is_some_and(|numbering| content.allows(ContentRevision { numbering, number }))
        };
        let next = file.contents.next.as_ref().map(|next| &next.change);
        if let Some(change) = next
            && let ContentCause::Revision(number) = change.cause
        {
            return match self.changes.get(change) {
                _ if !is_of_it(number) => MachineTaskState::Synced,
                Some(change) if change.has_failed(hostname) => MachineTaskState::Failed,
                _ => MachineTaskState::Starting,
            };
        }
        // It may not be made yet.
        let newest = file.contents.newest();
        let is_awaited = versions.get(&file.rule.path).is_some_and(|version| {
            let is_made = newest.is_some_and(|known| known.generator == version.version);
            is_of_it(version.revision) && !is_made
        });
        match (is_awaited, &file.failed) {
            (true, Some(_)) => MachineTaskState::Failed,
            (true, None) => MachineTaskState::Starting,
            (false, _) => MachineTaskState::Synced,
        }
    }
}
