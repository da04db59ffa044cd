//! Fetches the directories and owners of the master when they have changed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::private::{
    GetPrivateDirectories, GetPrivateDirectoriesRequest, PrivateDirectory,
};
use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectories, TroubledDirectories,
};
use model::display::{error_chain, safe_text};
use model::image::ImageName;
use rpc::client::Peer;
use system::random::random;

use super::fetch::Fetcher;
use crate::core::directories::readers::verify;
use crate::core::directories::{DIRECTORIES_MAX, Directories};
use crate::core::replication::directories::{
    DirectoriesDecision, Draft, LocalState, PageOutcome, decide, explain,
};
use crate::core::replication::queue::{ERROR_BYTES_MAX, backoff};
use crate::store::Store;

/// How often fetching starts again because the directories changed meanwhile, before it fails.
const ROUNDS_MAX: u32 = 8;

const TOO_FAST: &str = "they change faster than they come";

/// How the local directories compare with those of the master.
#[derive(Debug, Default)]
pub(super) struct DirectoriesSync {
    /// The version that the master last reported.
    pub master_version: Option<DirectoriesVersion>,
    /// The version that was fetched since the start, with the machines that may read private
    /// images. A former release did not fetch these.
    fetched: Option<DirectoriesVersion>,
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
        let mut decision = decide(version, local_state(store));
        if decision == DirectoriesDecision::Nothing
            && store.private.is_some()
            && self.fetched != version
        {
            decision = DirectoriesDecision::Fetch;
        }
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
        self.fetched = fetched;
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
            PageOutcome::Whole(mut directories) => {
                if let Some(lists) = fetch_readers(fetcher, master, version).await? {
                    directories.set_readers(lists);
                    break directories;
                }
                if rounds == ROUNDS_MAX {
                    return Err(TOO_FAST.to_owned());
                }
                (draft, rounds) = (Draft::default(), rounds + 1);
            }
            PageOutcome::Changed if version.is_none() => return Ok(None),
            PageOutcome::Changed if rounds == ROUNDS_MAX => {
                return Err(TOO_FAST.to_owned());
            }
            PageOutcome::Changed => (draft, rounds) = (Draft::default(), rounds + 1),
        }
    };
    let (version, count) = (fetched.version(), fetched.count());
    let replaced = fetcher.blocking(move |store| {
        let may_replace = |local: &Directories| match decide(version, known_state(local)) {
            DirectoriesDecision::Fetch => true,
            // The same version without the machines that may read private images.
            DirectoriesDecision::Nothing => local.readers() != fetched.readers(),
            DirectoriesDecision::Blocked(_) => false,
        };
        store.directories.replace_all(fetched.clone(), may_replace)
    });
    if replaced.await? {
        tracing::info!(directories = count, %master, "took the directories of the master");
    }
    Ok(version)
}

/// Returns the machines that may read private images, by directory; `None` if the directories have
/// changed since that version.
async fn fetch_readers(
    fetcher: &Fetcher,
    master: &Peer,
    version: Option<DirectoriesVersion>,
) -> Result<Option<BTreeMap<ImageName, BTreeSet<String>>>, String> {
    let mut lists = BTreeMap::new();
    let mut request = GetPrivateDirectoriesRequest::default();
    loop {
        let reply = match fetcher.client.call::<GetPrivateDirectories>(&request).await {
            Ok(reply) => reply,
            // The master is older, or gives this server no private images.
            Err(error) if matches!(error.code(), Some(FaultCode::NoMethod | FaultCode::Denied)) => {
                tracing::info!(%master, "no private images: {}", error_chain(&error));
                return Ok(Some(BTreeMap::new()));
            }
            Err(error) => return Err(error_chain(&error)),
        };
        if reply.version != version {
            return Ok(None);
        }
        let last = reply.directories.last().map(|last| last.name.clone());
        if last <= request.after || lists.len() > DIRECTORIES_MAX {
            return if reply.more {
                Err("the master's private directories are not sorted".to_owned())
            } else {
                Ok(Some(lists))
            };
        }
        for PrivateDirectory { name, machines, .. } in reply.directories {
            machines.iter().try_for_each(|one| verify(one)).map_err(|error| error.to_string())?;
            lists.insert(name, machines);
        }
        if !reply.more {
            return Ok(Some(lists));
        }
        request.after = last;
    }
}
