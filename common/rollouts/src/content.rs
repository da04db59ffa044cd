//! Environments that gate the content revisions of a filegen-server: a machine gets the content of
//! computed files when a rollout brings its revision.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::JsonSchema;
use model::mdb::Machine;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::document::Revision;
use crate::gate::Gate;
use crate::state::{EnvironmentState, State, StoredRevision};
use crate::view::View;

/// The author of revisions that follow from content revisions.
pub const CONTENT_AUTHOR: &str = "the filegen-server";

/// A content revision of a filegen-server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ContentRevision {
    /// Another one if the server has begun anew with its numbers.
    pub numbering: u64,
    pub number: u64,
}

/// The newest content revisions that are known, by server, as images name it.
pub type NewestContent = BTreeMap<String, ContentRevision>;

/// Which content revisions may go to a machine, by server: those up to each of these.
pub type ContentLimits = BTreeMap<String, Vec<ContentRevision>>;

impl ContentRevision {
    /// True if a machine may have `other` that may have this one.
    #[must_use]
    pub fn allows(self, other: Self) -> bool {
        self.numbering == other.numbering && other.number <= self.number
    }
}

impl StoredRevision {
    /// Returns the content that it brings, as operators see it: `HOST:PORT/NUMBER`.
    pub(crate) fn content_text(&self) -> Option<String> {
        let (source, content) = (self.definition.source.content()?, self.content?);
        Some(format!("{source}/{}", content.number))
    }

    /// Says why the content of this revision can be had no more, if so: a filegen-server makes that
    /// of its newest content revision.
    pub(crate) fn replaced_content(&self, view: &impl View) -> Option<String> {
        let source = self.definition.source.content()?;
        let newest = view.newest_content(source).filter(|newest| Some(*newest) != self.content)?;
        Some(format!(
            "{source} has content revision {} now: start the revision with that",
            newest.number
        ))
    }
}

impl EnvironmentState {
    /// True if its filegen-server has another content revision than its newest revision.
    #[must_use]
    pub fn awaits(&self, newest: &NewestContent) -> bool {
        let last = self.revisions.last_key_value().map(|(_, last)| last);
        last.is_some_and(|last| {
            let content = last.definition.source.content().and_then(|server| newest.get(server));
            content.is_some_and(|content| last.content != Some(*content))
        })
    }
}

impl EnvironmentState {
    /// Lets revisions bring no content that a server has forgotten, because it was restored from a
    /// backup: it gives the same numbers again to other content.
    fn forget_content(&mut self, newest: &NewestContent) {
        for stored in self.revisions.values_mut() {
            let newest = stored.definition.source.content().and_then(|server| newest.get(server));
            if let (Some(content), Some(newest)) = (&mut stored.content, newest)
                && content.numbering == newest.numbering
            {
                content.number = content.number.min(newest.number);
            }
        }
    }
}

impl State {
    /// Makes a new revision of each environment whose filegen-server has another content revision
    /// than its newest revision. A former one that nobody has started goes. Returns the
    /// environments.
    pub fn take_content(&mut self, newest: &NewestContent, now: Time) -> Vec<(String, Revision)> {
        let mut drafts = Vec::new();
        for (name, environment) in &mut self.environments {
            if !environment.awaits(newest) {
                continue;
            }
            Arc::make_mut(environment).forget_content(newest);
            let Some((&number, last)) = environment.revisions.last_key_value() else { continue };
            let Some(server) = last.definition.source.content() else { continue };
            let Some(content) = newest.get(server).copied() else { continue };
            let is_draft = last.author == CONTENT_AUTHOR && !environment.was_started(number);
            let revision = StoredRevision {
                author: CONTENT_AUTHOR.to_owned(),
                why: format!("content revision {}", content.number),
                at: now,
                content: Some(content),
                order: 0,
                ..last.clone()
            };
            let environment = Arc::make_mut(environment);
            if is_draft {
                environment.revisions.remove(&number);
            }
            environment.revisions.insert(number + 1, revision);
            drafts.push((name.clone(), number + 1));
        }
        drafts
    }
}

impl Gate<'_> {
    /// Returns which content revisions may go to the machine; servers that are not named are not
    /// gated.
    #[must_use]
    pub fn content_limits(&self, machine: &Machine) -> ContentLimits {
        let mut limits = ContentLimits::new();
        for stored in self.revisions_of(machine) {
            let source = stored.definition.source.content();
            if let Some((source, content)) = source.zip(stored.content) {
                limits.entry(source.to_owned()).or_default().push(content);
            }
        }
        limits
    }
}
