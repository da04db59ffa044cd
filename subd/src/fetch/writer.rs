//! Hashes and writes what comes from a source, on a thread that may wait for the disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::subd::FetchFailure;
use bytes::Bytes;
use model::object::ObjectId;
use model::report::report;
use tokio::sync::mpsc;

use super::ledger::{Ledger, Origin};
use super::source_error::SourceError;
use super::space;
use crate::cache::{Cache, CacheError, Receiving};
use crate::root::Root;

/// What a reader hands to its writer.
pub(super) enum Piece {
    /// An object begins.
    Begin {
        id: ObjectId,
        size_bytes: u64,
        /// True if what comes is what its partial lacks.
        rest: bool,
    },
    Chunk(Bytes),
    End,
}

/// Writes what one request brings.
pub(super) struct Writer {
    pub cache: Arc<Cache>,
    pub root: Arc<Root>,
    pub ledger: Arc<Ledger>,
    pub source: Arc<str>,
    /// What was asked for, with the sizes in bytes.
    pub wanted: BTreeMap<ObjectId, u64>,
    /// Bytes that arrived since subd started.
    pub fetched_bytes: Arc<AtomicU64>,
}

/// The object that is being received.
struct Current<'cache> {
    id: ObjectId,
    receiving: Receiving<'cache>,
    /// How much of it is in the ledger as arrived, in bytes.
    counted: u64,
    /// Where what came before that is from.
    origins: Vec<Origin>,
    /// Where the object's suspect stretches end, in bytes; if it is received from its start.
    checkpoints: Vec<u64>,
    /// Its digests there, as far as it has come.
    digests: Vec<ObjectId>,
}

impl Writer {
    /// Writes until the sender is gone. After a wrong object the others are still taken; the
    /// trouble is told at the end.
    pub fn run(&self, mut pieces: mpsc::Receiver<Piece>) -> Result<(), SourceError> {
        let mut current: Option<Current<'_>> = None;
        let mut trouble: Option<SourceError> = None;
        while let Some(piece) = pieces.blocking_recv() {
            let result = match piece {
                Piece::Begin { id, size_bytes, rest } => {
                    current = Some(self.begin(id, size_bytes, rest)?);
                    Ok(())
                }
                Piece::Chunk(chunk) => match &mut current {
                    Some(current) => self.write(current, &chunk),
                    None => Ok(()),
                },
                Piece::End => current.take().map_or(Ok(()), |current| self.end(current)),
            };
            match result {
                Ok(()) => {}
                Err(error @ (SourceError::Lie(_) | SourceError::Unfit(_))) => {
                    if let Some(current) = current.take() {
                        self.ledger.lose(current.counted);
                    }
                    trouble = Some(match trouble {
                        None => error,
                        Some(earlier) => earlier.or_worse(error),
                    });
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(current) = current {
            self.keep(current)?;
        }
        trouble.map_or(Ok(()), Err)
    }

    fn begin(&self, id: ObjectId, size_bytes: u64, rest: bool) -> Result<Current<'_>, SourceError> {
        match self.wanted.get(&id) {
            None => {
                return Err(SourceError::Lie(format!("it sent {id}, which nobody asked for")));
            }
            Some(wanted) if *wanted != size_bytes => {
                let text = format!("it has {size_bytes} bytes for object {id} of {wanted} bytes");
                return Err(SourceError::Lie(text));
            }
            Some(_) => {}
        }
        let fail = |error| self.trouble(size_bytes, error);
        let resumed = if rest { self.cache.resume(id, size_bytes).map_err(fail)? } else { None };
        let Some(receiving) = resumed else {
            if rest {
                return Err(SourceError::Unfit(format!("what had arrived of object {id} is gone")));
            }
            self.ledger.lose(counted(&self.ledger.take_origins(&id)));
            self.check_space(size_bytes)?;
            let checkpoints = self.ledger.suspects(&id).iter().map(|origin| origin.end).collect();
            let receiving = self.cache.receive(id, size_bytes).map_err(fail)?;
            let (origins, digests) = (Vec::new(), Vec::new());
            return Ok(Current { id, receiving, counted: 0, origins, checkpoints, digests });
        };
        let end = receiving.got_bytes();
        self.check_space(size_bytes - end)?;
        let mut origins = self.ledger.take_origins(&id);
        if origins.is_empty() {
            origins.push(Origin { source: None, end, digest: receiving.digest() });
        }
        let (checkpoints, digests) = (Vec::new(), Vec::new());
        let counted = counted(&origins);
        Ok(Current { id, receiving, counted, origins, checkpoints, digests })
    }

    /// Others write to the disk too: what fitted at the start may not fit any more.
    fn check_space(&self, bytes: u64) -> Result<(), SourceError> {
        let space = self.root.space();
        let space =
            space.map_err(|error| SourceError::Local(FetchFailure::Local(report(&error))))?;
        space::check(std::iter::once(bytes), space).map_err(SourceError::Local)
    }

    fn write(&self, current: &mut Current<'_>, chunk: &[u8]) -> Result<(), SourceError> {
        let mut rest = chunk;
        while !rest.is_empty() {
            let next = current.checkpoints.get(current.digests.len()).copied();
            let before = next.map_or(u64::MAX, |end| end - current.receiving.got_bytes());
            let length =
                usize::try_from(before).map_or(rest.len(), |before| before.min(rest.len()));
            let (part, after) = rest.split_at(length);
            let written = current.receiving.write(part);
            written.map_err(|error| self.trouble(length as u64, error))?;
            current.counted += length as u64;
            self.ledger.bytes.fetch_add(length as u64, Ordering::Relaxed);
            if next == Some(current.receiving.got_bytes()) {
                current.digests.push(current.receiving.digest());
            }
            rest = after;
        }
        Ok(())
    }

    fn end(&self, current: Current<'_>) -> Result<(), SourceError> {
        let Current { id, receiving, counted, mut origins, digests, .. } = current;
        let (got_bytes, digest) = (receiving.got_bytes(), receiving.digest());
        let error = match receiving.finish() {
            Ok(()) => {
                self.ledger.convict(&id, &digests);
                self.ledger.objects.fetch_add(1, Ordering::Relaxed);
                self.fetched_bytes.fetch_add(got_bytes, Ordering::Relaxed);
                self.ledger.arrive(id);
                return Ok(());
            }
            Err(error) => error,
        };
        self.ledger.lose(counted);
        let own = origins.iter().all(|origin| origin.source.as_ref() == Some(&self.source));
        if own || !matches!(error, CacheError::Wrong { .. }) {
            return Err(self.trouble(got_bytes, error));
        }
        let source = Some(Arc::clone(&self.source));
        origins.push(Origin { source, end: got_bytes, digest });
        self.ledger.suspect(id, origins);
        Err(SourceError::Unfit(format!("what several sources sent of object {id} does not fit")))
    }

    /// Keeps what has arrived of an object that was cut.
    fn keep(&self, current: Current<'_>) -> Result<(), SourceError> {
        let Current { id, receiving, counted, mut origins, .. } = current;
        let (end, digest) = (receiving.got_bytes(), receiving.digest());
        let kept = receiving.keep().map_err(|error| self.trouble(end, error))?;
        if kept == 0 {
            self.ledger.lose(counted);
        } else {
            origins.push(Origin { source: Some(Arc::clone(&self.source)), end, digest });
            self.ledger.put_origins(id, origins);
        }
        Ok(())
    }

    /// What an error of the cache means for the fetch; `need_bytes` were to be written.
    fn trouble(&self, need_bytes: u64, error: CacheError) -> SourceError {
        if let CacheError::Wrong { .. } = error {
            return SourceError::Lie(report(&error));
        }
        if !error.is_full() {
            return SourceError::Local(FetchFailure::Local(report(&error)));
        }
        let free_bytes = self.root.space().map_or(0, |space| space.free_bytes);
        SourceError::Local(FetchFailure::InsufficientSpace { need_bytes, free_bytes })
    }
}

/// How much of what came from `origins` came in this fetch, in bytes.
fn counted(origins: &[Origin]) -> u64 {
    let earlier = origins.iter().filter(|origin| origin.source.is_none()).map(|origin| origin.end);
    let end = origins.last().map_or(0, |origin| origin.end);
    end - earlier.max().unwrap_or(0)
}
