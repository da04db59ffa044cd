//! Puts content into the cache that a caller sends: that of computed files.

use api::fault::{Fault, FaultCode};
use api::file_generator::CONTENT_BYTES_MAX;
use api::subd::AddObjectsRequest;
use model::display::{error_chain, size};

use crate::cache::CacheError;
use crate::fetch::{Fetcher, policy, refuse_during_update};

impl Fetcher {
    /// Adds the contents that are not cached, in their order, until one is refused. Each is cached
    /// as a whole or not at all. Blocks.
    ///
    /// # Errors
    ///
    /// `BadRequest` for content that has another digest, `TooLarge` for content that is too long,
    /// `NoSpace`, `Busy` during an update.
    pub fn add(&self, request: &AddObjectsRequest) -> Result<(), Fault> {
        let contents = &request.contents;
        if let Some(long) = contents.iter().find(|one| one.bytes.0.len() > CONTENT_BYTES_MAX) {
            let text = format!(
                "object {} has {} bytes: at most {CONTENT_BYTES_MAX} are accepted",
                long.id,
                long.bytes.0.len()
            );
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        self.report_state.read(refuse_during_update)?;
        let missing = contents.iter().filter(|one| self.cache.size_of(&one.id).is_none());
        let sizes = missing.map(|one| one.bytes.0.len() as u64);
        let space = self.root.space();
        let space = space.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
        if let Some(need_bytes) = policy::shortage(sizes, space) {
            return Err(no_space(need_bytes, space.free_bytes));
        }
        let (mut objects, mut bytes) = (0_u64, 0);
        let added = contents.iter().try_for_each(|one| {
            let is_new = self.cache.add(one.id, &one.bytes.0);
            let length = one.bytes.0.len() as u64;
            if is_new.map_err(|error| self.cannot_add(length, &error))? {
                objects += 1;
                bytes += length;
            }
            Ok(())
        });
        // They are few, and an update waits for them.
        self.budgets.write.note(bytes);
        let ids: Vec<_> = contents.iter().map(|one| one.id).collect();
        self.report_state.add_to_cache(&ids, |id| self.cache.size_of(id).is_some());
        tracing::info!(objects, bytes, "objects were added to the cache");
        added
    }

    /// Converts an error of the cache. `need_bytes` were to be written.
    fn cannot_add(&self, need_bytes: u64, error: &CacheError) -> Fault {
        match error {
            CacheError::Wrong { .. } => Fault::new(FaultCode::BadRequest, error_chain(error)),
            error if error.is_full() => {
                let free_bytes = self.root.space().map_or(0, |space| space.free_bytes);
                no_space(need_bytes, free_bytes)
            }
            error => Fault::new(FaultCode::Internal, error_chain(error)),
        }
    }
}

fn no_space(need_bytes: u64, free_bytes: u64) -> Fault {
    let (need, free) = (size(need_bytes), size(free_bytes));
    Fault::new(FaultCode::NoSpace, format!("the objects need {need}, {free} are free"))
}
