//! Certificates that a server makes for machines, with the keys that it made for them, or for keys
//! that never leave their machines.
//!
//! They are kept in one file that only its owner can read, one line of JSON each; a later line
//! replaces an earlier one of the same path, machine and request. A certificate is recorded by its
//! authority first, then kept here, and only then given out, so that a restart renews nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use fs_err as fs;
use model::display::error_chain;
use model::lock::locked;
use model::object::ObjectId;
use serde::{Deserialize, Serialize};

use super::authority::{AuthorityError, Request};
use super::files::{Content, FilesError, append, replace_files};
use super::record::{complete_lines, line};
use super::register::{Register, RegisterError};

/// The name of the file in the state directory.
const FILE: &str = "certificates.jsonl";

/// The most pairs that are kept, so that who asks for many machines fills no disk.
const PAIRS_MAX: usize = 200_000;

/// The file is written anew when it has this many lines more than twice those in force.
const SURPLUS_LINES: usize = 1_000;

/// A certificate with its key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The path that the certificate is for, on the machine.
    path: String,
    /// The host name of the machine.
    hostname: String,
    /// The digest of all that decides what the certificate says.
    made_from: ObjectId,
    /// When another one is made, in seconds since 1970.
    pub renew_at_seconds: u64,
    /// The certificate and the intermediate authorities.
    pub certificate_pem: String,
    /// The key, a secret; empty if it is on the machine only.
    pub key_pem: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Pair({} of {})", self.path, self.hostname)
    }
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Line<Pair> {
    Pair(Pair),
    Renewals { renewals: u64 },
}

/// The pair that a machine is to have.
#[derive(Clone, Debug)]
pub struct WantedPair {
    /// The path of the certificate.
    pub path: String,
    /// Its name is that of the machine.
    pub request: Request,
    /// The public key of the machine; `None` to make a key.
    pub key: Option<Vec<u8>>,
    /// The digest of all that decides what the certificate says.
    pub made_from: ObjectId,
    /// After which part of its validity it is renewed, from 0 to 1.
    pub renew_after: f64,
}

/// Why pairs cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    #[error("cannot read the certificates of machines")]
    Read(#[source] io::Error),
    #[error("cannot keep the certificates of machines")]
    Write(#[source] FilesError),
    #[error("certificates of {PAIRS_MAX} machines are kept: no more can be made")]
    Full,
    #[error("cannot record the certificates of machines")]
    Register(#[from] RegisterError),
}

/// The pairs that were made.
#[derive(Debug)]
pub struct PairStore {
    directory: PathBuf,
    state: Mutex<State>,
    /// How often pairs were to be made anew.
    renewals: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// By path, host name, and what they were made from.
    pairs: BTreeMap<(String, String, ObjectId), Arc<Pair>>,
    /// How many lines the file has.
    lines: usize,
}

impl PairStore {
    /// Opens the pairs in `directory`. A line that cannot be read is left out: its machine gets
    /// another certificate.
    ///
    /// # Errors
    ///
    /// If the file exists and cannot be read.
    pub fn open(directory: &Path) -> Result<Self, PairError> {
        let path = directory.join(FILE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(PairError::Read(error)),
        };
        let (mut state, mut renewals) = (State::default(), 0);
        let lines = bytes[..complete_lines(&bytes)].split(|byte| *byte == b'\n');
        for (index, line) in lines.enumerate().filter(|(_, line)| !line.is_empty()) {
            state.lines = index + 1;
            match serde_json::from_slice(line) {
                Ok(Line::Pair(pair)) => state.take(Arc::new(pair)),
                Ok(Line::<Pair>::Renewals { renewals: counted }) => renewals = counted,
                // The error may quote the key.
                Err(error) => tracing::error!(
                    "{} is damaged in line {}, column {}: the machine of that line gets another \
                     certificate",
                    path.display(),
                    index + 1,
                    error.column()
                ),
            }
        }
        let (state, renewals) = (Mutex::new(state), AtomicU64::new(renewals));
        Ok(Self { directory: directory.to_owned(), state, renewals })
    }

    /// Returns a pair for each of `wanted`, or the text of an error: the pair that was made for the
    /// same request, unless it is to be renewed, or else one that is made now with `register`.
    /// `now` is in seconds since 1970. Blocks.
    pub fn get_or_make(
        &self,
        register: &Register,
        wanted: &[WantedPair],
        now: u64,
    ) -> Vec<Result<Arc<Pair>, String>> {
        let mut state = locked(&self.state);
        let known: Vec<Option<Arc<Pair>>> =
            wanted.iter().map(|wanted| state.current(wanted, now)).collect();
        let missing = wanted.iter().zip(&known).filter(|(_, known)| known.is_none());
        let missing: Vec<&WantedPair> = missing.map(|(wanted, _)| wanted).collect();
        let made = match self.make(&mut state, register, &missing, now) {
            Ok(made) => {
                made.into_iter().map(|made| made.map_err(|error| error_chain(&error))).collect()
            }
            Err(error) => vec![Err(error_chain(&error)); missing.len()],
        };
        let mut made = made.into_iter();
        known.into_iter().filter_map(|known| known.map(Ok).or_else(|| made.next())).collect()
    }

    /// Makes pairs, and keeps them.
    fn make(
        &self,
        state: &mut State,
        register: &Register,
        missing: &[&WantedPair],
        now: u64,
    ) -> Result<Vec<Result<Arc<Pair>, AuthorityError>>, PairError> {
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        if state.pairs.len() + missing.len() > PAIRS_MAX {
            state.pairs.retain(|_, pair| now < pair.renew_at_seconds);
            if state.pairs.len() + missing.len() > PAIRS_MAX {
                return Err(PairError::Full);
            }
        }
        let requests: Vec<(&Request, Option<&[u8]>)> =
            missing.iter().map(|wanted| (&wanted.request, wanted.key.as_deref())).collect();
        let issued = register.lock()?.issue_all(&requests)?;
        let last = register.authority().certificate().not_after;
        let made: Vec<Result<Arc<Pair>, AuthorityError>> = missing
            .iter()
            .zip(issued)
            .map(|(wanted, issued)| {
                let issued = issued?;
                let end = u64::try_from(issued.certificate.not_after).unwrap_or_default();
                let left = end.saturating_sub(now);
                // Another one would end with the authority too.
                let is_last = issued.certificate.not_after >= last;
                let part = if is_last { 1.0 } else { wanted.renew_after };
                Ok(Arc::new(Pair {
                    path: wanted.path.clone(),
                    hostname: wanted.request.name.clone(),
                    made_from: wanted.made_from,
                    renew_at_seconds: now + (left as f64 * part) as u64,
                    certificate_pem: issued.certificate_pem,
                    key_pem: issued.key_pem,
                }))
            })
            .collect();
        let made_now: Vec<Arc<Pair>> = made.iter().flatten().cloned().collect();
        self.keep(state, made_now, self.renewals(), now)?;
        Ok(made)
    }

    /// Has the pairs of these machines made anew when they are next asked for; `None` for all of
    /// them. Returns those of the machines that have pairs.
    ///
    /// # Errors
    ///
    /// If that cannot be kept.
    pub fn renew(
        &self,
        hostnames: Option<&[String]>,
        now: u64,
    ) -> Result<BTreeSet<String>, PairError> {
        let hostnames: Option<BTreeSet<&String>> =
            hostnames.map(|hostnames| hostnames.iter().collect());
        let is_meant = |pair: &&Arc<Pair>| {
            hostnames.as_ref().is_none_or(|hostnames| hostnames.contains(&pair.hostname))
        };
        let mut state = locked(&self.state);
        let pairs: Vec<Arc<Pair>> = state.pairs.values().filter(is_meant).cloned().collect();
        let is_later = |pair: &&Arc<Pair>| now < pair.renew_at_seconds;
        let due = |pair: &Arc<Pair>| Arc::new(Pair { renew_at_seconds: 0, ..Pair::clone(pair) });
        let changed: Vec<Arc<Pair>> = pairs.iter().filter(is_later).map(due).collect();
        if !changed.is_empty() {
            let renewals = self.renewals() + 1;
            self.keep(&mut state, changed, renewals, now)?;
        }
        Ok(pairs.iter().map(|pair| pair.hostname.clone()).collect())
    }

    /// Returns how often [`PairStore::renew`] has found pairs, since the file was made.
    #[must_use]
    pub fn renewals(&self) -> u64 {
        self.renewals.load(Ordering::Acquire)
    }

    /// Returns when the next pair for `path` is renewed, in seconds since 1970.
    #[must_use]
    pub fn next_renewal(&self, path: &str, now: u64) -> Option<u64> {
        let state = locked(&self.state);
        let is_meant = |pair: &&Arc<Pair>| pair.path == path && now < pair.renew_at_seconds;
        let pairs = state.pairs.values().filter(is_meant);
        pairs.map(|pair| pair.renew_at_seconds).min()
    }

    /// Takes pairs and the number of renewals when they are on the disk.
    fn keep(
        &self,
        state: &mut State,
        pairs: Vec<Arc<Pair>>,
        renewals: u64,
        now: u64,
    ) -> Result<(), PairError> {
        let mut lines: String = pairs.iter().map(|pair| line(&Line::Pair(&**pair))).collect();
        if renewals != self.renewals() {
            lines += &renewals_line(renewals);
        }
        append(&self.directory.join(FILE), &lines, 0o600).map_err(PairError::Write)?;
        state.lines += lines.lines().count();
        self.renewals.store(renewals, Ordering::Release);
        pairs.into_iter().for_each(|pair| state.take(pair));
        self.shorten(state, now);
        Ok(())
    }

    /// Writes the file anew if most of its lines are of no use.
    fn shorten(&self, state: &mut State, now: u64) {
        if state.lines <= 2 * state.pairs.len() + SURPLUS_LINES {
            return;
        }
        state.pairs.retain(|_, pair| now < pair.renew_at_seconds);
        let lines = state.pairs.values().map(|pair| line(&Line::Pair(&**pair)));
        let text: String = lines.chain([renewals_line(self.renewals())]).collect();
        let content = Content { name: FILE, text: &text, mode: 0o600 };
        match replace_files(&self.directory, &[content]) {
            Ok(()) => state.lines = state.pairs.len() + 1,
            // The longer file is as good.
            Err(error) => tracing::warn!("cannot shorten {FILE}: {error}"),
        }
    }
}

fn renewals_line(renewals: u64) -> String {
    line(&Line::<&Pair>::Renewals { renewals })
}

impl State {
    fn take(&mut self, pair: Arc<Pair>) {
        let key = (pair.path.clone(), pair.hostname.clone(), pair.made_from);
        self.pairs.insert(key, pair);
    }

    fn current(&self, wanted: &WantedPair, now: u64) -> Option<Arc<Pair>> {
        let key = (wanted.path.clone(), wanted.request.name.clone(), wanted.made_from);
        self.pairs.get(&key).filter(|pair| now < pair.renew_at_seconds).cloned()
    }
}

#[cfg(test)]
mod tests;
