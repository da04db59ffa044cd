//! Takes the directories of the master, with their owners, whenever it tells of others.

use std::time::Duration;

use api::image_server::replication::Link;
use api::image_server::replication::directories::{
    DirectoriesTrouble, DirectoriesVersion, GetMadeDirectories, TroubledDirectories,
};
use model::report::report;
use model::words::plain;
use tokio::time::Instant;

use super::follower::{ERROR_BYTES_MAX, Follower};
use crate::clock::random;
use crate::core::directories::Directories;
use crate::core::replication::directories::{Decision, Draft, Own, Step, decide};
use crate::core::replication::queue::{WAIT_MIN, backoff};
use crate::store::Store;

/// How often it is begun anew because directories have changed meanwhile, before it waits.
const ROUNDS_MAX: u32 = 8;

/// How this server stands with the directories of its master.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// What the master told last.
    pub told: Option<DirectoriesVersion>,
    /// True from then on until they are here.
    is_taking: bool,
    failures: u32,
    trouble: Option<TroubledDirectories>,
}

impl Standing {
    /// True if they are as they should be, as far as that can be.
    pub fn is_settled(&self) -> bool {
        !self.is_taking
    }

    /// What is wrong.
    pub fn trouble(&self) -> Option<TroubledDirectories> {
        self.trouble.clone()
    }
}

fn own(store: &Store) -> Own {
    if store.directories.damage().is_some() {
        return Own::Damaged;
    }
    known(&store.directories.now())
}

fn known(directories: &Directories) -> Own {
    Own::Known(directories.version(), directories.count())
}

impl Follower {
    /// Takes note of the version that the master has. True if there is something to do.
    pub(super) fn hear_of_directories(
        &self,
        standing: &mut Standing,
        theirs: Option<DirectoriesVersion>,
    ) -> bool {
        standing.told = theirs;
        let decision = decide(theirs, own(&self.store));
        let former = standing.trouble.as_ref().map(|troubled| troubled.trouble);
        standing.is_taking = decision == Decision::Take;
        match decision {
            Decision::Take => {}
            Decision::Nothing => (standing.trouble, standing.failures) = (None, 0),
            Decision::Keep(trouble) if former == Some(trouble) => {}
            Decision::Keep(trouble) => {
                let text = self.text_of_directories(trouble);
                tracing::error!(trouble = trouble.name(), "{text}");
                standing.trouble = Some(TroubledDirectories { trouble, text });
            }
        }
        standing.is_taking
    }

    fn text_of_directories(&self, trouble: DirectoriesTrouble) -> String {
        let master = self.master();
        match trouble {
            DirectoriesTrouble::OnlyHere => format!(
                "the master {master} has no directories, or cannot use what it has: those that are \
                 here stay. If it has lost them, stop it and give it the file `directories` of \
                 this server's data directory"
            ),
            DirectoriesTrouble::Conflict => format!(
                "the directories of the master {master} began apart from those that are here, \
                 which stay. If its are right, move the file `directories` of this server's data \
                 directory away, and restart this server; if these are, stop the master and give \
                 it that file"
            ),
            DirectoriesTrouble::NewerHere => format!(
                "the directories of the master {master} are older than those that are here, which \
                 stay until its were changed as often. If it was restored from a backup, stop it \
                 and give it the file `directories` of this server's data directory; if its are \
                 right, move that file away, and restart this server"
            ),
            DirectoriesTrouble::Damaged => format!(
                "the file `directories` of this server's data directory is damaged: move it away \
                 and restart this server, and they come again from the master {master}"
            ),
            DirectoriesTrouble::Failing => {
                format!("the directories cannot be had from the master {master}")
            }
        }
    }

    /// Takes directories whenever there are others.
    pub(super) async fn follow_directories(&self) {
        loop {
            self.directories_told.notified().await;
            while !self.state().directories.is_settled() {
                let wait = match self.take_directories().await {
                    Ok(()) if self.state().directories.is_settled() => break,
                    // There are others by now.
                    Ok(()) => WAIT_MIN,
                    Err(why) => self.directories_failed(&why),
                };
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Takes note that the directories did not come; gives how long to wait.
    fn directories_failed(&self, why: &str) -> Duration {
        let chance = u16::try_from(random() % 1_000).unwrap_or_default();
        let trouble = DirectoriesTrouble::Failing;
        let head = self.text_of_directories(trouble);
        let text = plain(&format!("{head}, and are asked for again: {why}"), ERROR_BYTES_MAX);
        let mut state = self.state();
        // While the master is away that is told already.
        let is_told = state.link() != Link::Connected
            || state.directories.trouble.as_ref().is_some_and(|former| former.text == text);
        if !is_told {
            tracing::error!("{text}");
        }
        let standing = &mut state.directories;
        let wait = backoff(standing.failures, chance);
        standing.failures += 1;
        standing.trouble = Some(TroubledDirectories { trouble, text });
        wait
    }

    async fn take_directories(&self) -> Result<(), String> {
        let mut draft = Draft::default();
        let mut rounds = 0;
        let theirs = loop {
            let reply = self.fetch_client().call::<GetMadeDirectories>(&draft.request()).await;
            let reply = reply.map_err(|error| report(&error))?;
            let version = reply.version;
            match draft.take(reply).map_err(|error| report(&error))? {
                Step::More => {}
                Step::Whole(directories) => break directories,
                Step::Changed if version.is_none() => {
                    self.hear_again(None);
                    return Ok(());
                }
                Step::Changed if rounds == ROUNDS_MAX => {
                    return Err("they change faster than they come".to_owned());
                }
                Step::Changed => (draft, rounds) = (Draft::default(), rounds + 1),
            }
        };
        let (version, count) = (theirs.version(), theirs.count());
        let taken = self.blocking(move |store, _| {
            let may = |own: &Directories| decide(version, known(own)) == Decision::Take;
            store.directories.take(theirs, may).map_err(|error| report(&error))
        });
        if taken.await? {
            let master = self.master();
            tracing::info!(directories = count, %master, "took the directories of the master");
        }
        self.hear_again(version);
        Ok(())
    }

    /// Finds out whether what has come is what was told.
    fn hear_again(&self, version: Option<DirectoriesVersion>) {
        let mut state = self.state();
        // What was told meanwhile may be newer, or older than what has come.
        let theirs = match (version, state.directories.told) {
            (Some(came), Some(told)) if came.line == told.line && came.changes > told.changes => {
                Some(came)
            }
            (None, _) => None,
            (_, told) => told,
        };
        self.hear_of_directories(&mut state.directories, theirs);
        state.note_level();
        drop(state);
        self.progress.notify_waiters();
    }

    /// Waits until the directories that the master had are here, or cannot be, but not for longer
    /// than `limit`.
    pub async fn directories_settled(&self, theirs: Option<DirectoriesVersion>, limit: Duration) {
        let deadline = Instant::now() + limit;
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            if decide(theirs, own(&self.store)) != Decision::Take {
                return;
            }
            tokio::select! {
                () = progress => {}
                () = tokio::time::sleep_until(deadline) => return,
            }
        }
    }
}
