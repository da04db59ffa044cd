//! Fetches the directories and owners of the master when they have changed.

use std::time::Duration;

use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectories, TroubledDirectories,
};
use model::display::{error_chain, safe_text};
use rpc::client::Peer;
use system::random::random;

use super::fetch::Fetcher;
use crate::core::directories::Directories;
use crate::core::replication::directories::{
    DirectoriesDecision, Draft, LocalState, PageOutcome, decide, explain,
};
use crate::core::replication::queue::{ERROR_BYTES_MAX, backoff};
use crate::store::Store;

/// How often fetching starts again because the directories changed meanwhile, before it fails.
const ROUNDS_MAX: u32 = 8;

/// How the local directories compare with those of the master.
#[derive(Debug, Default)]
pub(super) struct DirectoriesSync {
    /// The version that the master last reported.
    pub master_version: Option<DirectoriesVersion>,
    /// True while that version must be fetched.
    is_fetching: bool,
    failures: u32,
    trouble: Option<TroubledDirectories>,
}

impl DirectoriesSync {
    /// Returns true if nothing is left to fetch.
    pub fn is_settled(&self) -> bool {
        !self.is_fetching
    }

    pub fn trouble(&self) -> Option<TroubledDirectories> {
        self.trouble.clone()
    }

    /// Records the version that the master has. Returns true if its directories must be fetched.
    pub fn note_master_version(
        &mut self,
        store: &Store,
        master: &Peer,
        version: Option<DirectoriesVersion>,
    ) -> bool {
        self.master_version = version;
        let decision = decide(version, local_state(store));
        let former = self.trouble.as_ref().map(|troubled| troubled.trouble);
        self.is_fetching = decision == DirectoriesDecision::Fetch;
        match decision {
            DirectoriesDecision::Fetch => {}
            DirectoriesDecision::Nothing => (self.trouble, self.failures) = (None, 0),
            DirectoriesDecision::Blocked(trouble) if former == Some(trouble) => {}
            DirectoriesDecision::Blocked(trouble) => {
                let text = explain(trouble, &master.to_string());
                tracing::error!(trouble = trouble.name(), "{text}");
                self.trouble = Some(TroubledDirectories { trouble, text });
            }
        }
        self.is_fetching
    }

    /// Records that the directories of that version were fetched; `None` if the master has none.
    pub fn note_fetched(
        &mut self,
        store: &Store,
        master: &Peer,
        fetched: Option<DirectoriesVersion>,
    ) {
        // The version that the master reported meanwhile may be newer or older.
        let version = match (fetched, self.master_version) {
            (Some(fetched), Some(reported))
                if fetched.line == reported.line && fetched.changes > reported.changes =>
            {
                Some(fetched)
            }
            (None, _) => None,
            (_, reported) => reported,
        };
        self.note_master_version(store, master, version);
    }

    /// Records that the directories could not be fetched. Returns how long to wait.
    pub fn note_failure(&mut self, master: &Peer, is_connected: bool, why: &str) -> Duration {
        let trouble = DirectoriesTrouble::Failing;
        let head = explain(trouble, &master.to_string());
        let text = safe_text(&format!("{head}, and are asked for again: {why}"), ERROR_BYTES_MAX);
        let is_new = self.trouble.as_ref().is_none_or(|former| former.text != text);
        // While there is no connection, that is logged already.
        if is_connected && is_new {
            tracing::error!("{text}");
        }
        let wait = backoff(self.failures, random());
        self.failures += 1;
        self.trouble = Some(TroubledDirectories { trouble, text });
        wait
    }
}

/// Returns the state of the local directories.
pub(super) fn local_state(store: &Store) -> LocalState {
    if store.directories.damage().is_some() {
        return LocalState::Damaged;
    }
    known_state(&store.directories.now())
}

fn known_state(directories: &Directories) -> LocalState {
    LocalState::Known(directories.version(), directories.count())
}

/// Replaces the local directories by those of the master. Returns their version; `None` if the
/// master has none.
pub(super) async fn fetch_directories(
    fetcher: &Fetcher,
    master: &Peer,
) -> Result<Option<DirectoriesVersion>, String> {
    let mut draft = Draft::default();
    let mut rounds = 0;
    let fetched = loop {
        let reply = fetcher.client.call::<GetMadeDirectories>(&draft.request()).await;
        let reply = reply.map_err(|error| error_chain(&error))?;
        let version = reply.version;
        match draft.take(reply).map_err(|error| error_chain(&error))? {
            PageOutcome::More => {}
            PageOutcome::Whole(directories) => break directories,
            PageOutcome::Changed if version.is_none() => return Ok(None),
            PageOutcome::Changed if rounds == ROUNDS_MAX => {
                return Err("they change faster than they come".to_owned());
            }
            PageOutcome::Changed => (draft, rounds) = (Draft::default(), rounds + 1),
        }
    };
    let (version, count) = (fetched.version(), fetched.count());
    let replaced = fetcher.blocking(move |store| {
        let may_replace =
            |local: &Directories| decide(version, known_state(local)) == DirectoriesDecision::Fetch;
        store.directories.replace_all(fetched, may_replace)
    });
    if replaced.await? {
        tracing::info!(directories = count, %master, "took the directories of the master");
    }
    Ok(version)
}
