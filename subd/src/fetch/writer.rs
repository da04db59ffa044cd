//! Hashes and writes what a source sends, on a blocking thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use api::subd::FetchFailure;
use bytes::Bytes;
use model::display::error_chain;
use model::object::ObjectId;
use tokio::sync::mpsc;

use crate::cache::receive::Receiving;
use crate::cache::{Cache, CacheError};
use crate::fetch::policy;
use crate::fetch::policy::SourceError;
use crate::fetch::record::{FetchRecord, Segment};
use crate::root::Root;

/// A message of a reader to its writer.
pub(super) enum WriterMessage {
    Begin {
        id: ObjectId,
        size_bytes: u64,
        /// True if what follows is the missing end of a partial.
        rest: bool,
    },
    Chunk(Bytes),
    End,
    /// All of an object that is too small to be kept in part.
    Whole {
        id: ObjectId,
        content: Bytes,
    },
}

/// Writes the objects of one request.
pub(super) struct Writer {
    pub cache: Arc<Cache>,
    pub root: Arc<Root>,
    pub record: Arc<FetchRecord>,
    pub source: Arc<str>,
    /// The requested objects, with their sizes in bytes.
    pub wanted: BTreeMap<ObjectId, u64>,
    /// Bytes that arrived since subd started.
    pub fetched_bytes: Arc<AtomicU64>,
}

/// The object that is being received.
struct CurrentObject<'cache> {
    id: ObjectId,
    receiving: Receiving<'cache>,
    /// How much of it was counted in the record, in bytes.
    counted: u64,
    /// Its segments before that.
    segments: Vec<Segment>,
    /// The ends of the object's suspect segments in bytes, if it is received from its start.
    checkpoints: Vec<u64>,
    /// Its digests there, as far as it was received.
    digests: Vec<ObjectId>,
}

impl Writer {
    /// Writes until the sender is dropped. After a wrong object the others are still written; the
    /// error is returned at the end.
    pub fn run(&self, mut pieces: mpsc::Receiver<WriterMessage>) -> Result<(), SourceError> {
        let mut current: Option<CurrentObject<'_>> = None;
        let mut trouble: Option<SourceError> = None;
        while let Some(piece) = pieces.blocking_recv() {
            let result = match piece {
                WriterMessage::Begin { id, size_bytes, rest } => {
                    current = Some(self.begin(id, size_bytes, rest)?);
                    Ok(())
                }
                WriterMessage::Chunk(chunk) => match &mut current {
                    Some(current) => self.write(current, &chunk),
                    None => Ok(()),
                },
                WriterMessage::End => current.take().map_or(Ok(()), |current| self.end(current)),
                WriterMessage::Whole { id, content } => self.add(id, &content),
            };
            match result {
                Ok(()) => {}
                Err(error @ (SourceError::Lie(_) | SourceError::Unfit(_))) => {
                    if let Some(current) = current.take() {
                        self.record.lose(current.counted);
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
            self.keep_partial(current)?;
        }
        trouble.map_or(Ok(()), Err)
    }

    fn begin(
        &self,
        id: ObjectId,
        size_bytes: u64,
        rest: bool,
    ) -> Result<CurrentObject<'_>, SourceError> {
        self.check_wanted(&id, size_bytes)?;
        let fail = |error| self.cache_error(size_bytes, error);
        let resumed = if rest { self.cache.resume(id, size_bytes).map_err(fail)? } else { None };
        let Some(receiving) = resumed else {
            if rest {
                return Err(SourceError::Unfit(format!("the partial of object {id} was lost")));
            }
            self.record.lose(counted(&self.record.take_segments(&id)));
            self.check_space(size_bytes)?;
            let checkpoints = self.record.suspects(&id).iter().map(|segment| segment.end).collect();
            let receiving = self.cache.receive(id, size_bytes).map_err(fail)?;
            let (segments, digests) = (Vec::new(), Vec::new());
            return Ok(CurrentObject { id, receiving, counted: 0, segments, checkpoints, digests });
        };
        let end = receiving.got_bytes();
        self.check_space(size_bytes - end)?;
        let mut segments = self.record.take_segments(&id);
        if segments.is_empty() {
            segments.push(Segment { source: None, end, digest: receiving.digest() });
        }
        let (checkpoints, digests) = (Vec::new(), Vec::new());
        let counted = counted(&segments);
        Ok(CurrentObject { id, receiving, counted, segments, checkpoints, digests })
    }

    /// Checks that an object of that size was requested.
    fn check_wanted(&self, id: &ObjectId, size_bytes: u64) -> Result<(), SourceError> {
        match self.wanted.get(id) {
            None => Err(SourceError::Lie(format!("it sent {id}, which was not requested"))),
            Some(wanted) if *wanted != size_bytes => {
                let text = format!("it has {size_bytes} bytes for object {id} of {wanted} bytes");
                Err(SourceError::Lie(text))
            }
            Some(_) => Ok(()),
        }
    }

    /// Adds an object that has come as a whole.
    fn add(&self, id: ObjectId, content: &[u8]) -> Result<(), SourceError> {
        let size_bytes = content.len() as u64;
        self.check_wanted(&id, size_bytes)?;
        self.check_space(size_bytes)?;
        self.cache.add(id, content).map_err(|error| self.cache_error(size_bytes, error))?;
        self.record.bytes.fetch_add(size_bytes, Ordering::Relaxed);
        self.arrived(id, size_bytes);
        Ok(())
    }

    fn arrived(&self, id: ObjectId, size_bytes: u64) {
        self.record.objects.fetch_add(1, Ordering::Relaxed);
        self.fetched_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        self.record.arrive(id);
    }

    /// Other programs write to the disk too, so space may have become short since the start.
    fn check_space(&self, bytes: u64) -> Result<(), SourceError> {
        let space = self.root.space();
        let space =
            space.map_err(|error| SourceError::Local(FetchFailure::Local(error_chain(&error))))?;
        policy::check_space(std::iter::once(bytes), space).map_err(SourceError::Local)
    }

    fn write(&self, current: &mut CurrentObject<'_>, chunk: &[u8]) -> Result<(), SourceError> {
        let mut rest = chunk;
        while !rest.is_empty() {
            let next = current.checkpoints.get(current.digests.len()).copied();
            let before = next.map_or(u64::MAX, |end| end - current.receiving.got_bytes());
            let length =
                usize::try_from(before).map_or(rest.len(), |before| before.min(rest.len()));
            let (part, after) = rest.split_at(length);
            let written = current.receiving.write(part);
            written.map_err(|error| self.cache_error(length as u64, error))?;
            current.counted += length as u64;
            self.record.bytes.fetch_add(length as u64, Ordering::Relaxed);
            if next == Some(current.receiving.got_bytes()) {
                current.digests.push(current.receiving.digest());
            }
            rest = after;
        }
        Ok(())
    }

    fn end(&self, current: CurrentObject<'_>) -> Result<(), SourceError> {
        let CurrentObject { id, receiving, counted, mut segments, digests, .. } = current;
        let (got_bytes, digest) = (receiving.got_bytes(), receiving.digest());
        let error = match receiving.finish() {
            Ok(()) => {
                self.record.convict(&id, &digests);
                self.arrived(id, got_bytes);
                return Ok(());
            }
            Err(error) => error,
        };
        self.record.lose(counted);
        let is_only_source =
            segments.iter().all(|segment| segment.source.as_ref() == Some(&self.source));
        if is_only_source || !matches!(error, CacheError::Wrong { .. }) {
            return Err(self.cache_error(got_bytes, error));
        }
        let source = Some(Arc::clone(&self.source));
        segments.push(Segment { source, end: got_bytes, digest });
        self.record.suspect(id, segments);
        Err(SourceError::Unfit(format!("what several sources sent of object {id} does not fit")))
    }

    /// Keeps what was received of an incomplete object.
    fn keep_partial(&self, current: CurrentObject<'_>) -> Result<(), SourceError> {
        let CurrentObject { id, receiving, counted, mut segments, .. } = current;
        let (end, digest) = (receiving.got_bytes(), receiving.digest());
        let kept_bytes = receiving.keep_partial().map_err(|error| self.cache_error(end, error))?;
        if kept_bytes == 0 {
            self.record.lose(counted);
        } else {
            segments.push(Segment { source: Some(Arc::clone(&self.source)), end, digest });
            self.record.put_segments(id, segments);
        }
        Ok(())
    }

    /// Converts an error of the cache. `need_bytes` were to be written.
    fn cache_error(&self, need_bytes: u64, error: CacheError) -> SourceError {
        if let CacheError::Wrong { .. } = error {
            return SourceError::Lie(error_chain(&error));
        }
        if !error.is_full() {
            return SourceError::Local(FetchFailure::Local(error_chain(&error)));
        }
        let free_bytes = self.root.space().map_or(0, |space| space.free_bytes);
        SourceError::Local(FetchFailure::InsufficientSpace { need_bytes, free_bytes })
    }
}

/// Returns how much of `segments` was received in this fetch, in bytes.
fn counted(segments: &[Segment]) -> u64 {
    let earlier =
        segments.iter().filter(|segment| segment.source.is_none()).map(|segment| segment.end);
    let end = segments.last().map_or(0, |segment| segment.end);
    end - earlier.max().unwrap_or(0)
}
