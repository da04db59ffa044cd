//! Keeps over a restart which images are in use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use model::image::ImageName;
use model::lock::locked;
use model::report::report;

use crate::core::image_holds::{Holder, Holds, TooManyError};
use crate::store::contract::Holding;
use crate::store::{error::StoreError, files, layout};

/// The images that are in use.
pub struct LocalHolding {
    data: PathBuf,
    started: Instant,
    holds: Mutex<Holds>,
}

impl LocalHolding {
    pub(in crate::store) fn open(data: &Path) -> Self {
        let kept = files::read(data, layout::HOLDS).unwrap_or_else(|error| {
            let why = report(&error);
            tracing::error!("which images were in use is not known until dominators say so: {why}");
            None
        });
        Self {
            data: data.to_owned(),
            started: Instant::now(),
            holds: Mutex::new(Holds::new(kept.unwrap_or_default())),
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        locked(&self.holds)
    }
}

impl Holding for LocalHolding {
    fn note(
        &self,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u32,
    ) -> Result<(), TooManyError> {
        let mut holds = self.holds();
        if holds.note(self.now(), holder, names, seconds.into())?
            && let Err(error) = files::write(&self.data, layout::HOLDS, &holds.kept())
        {
            // It counts all the same, until the server is restarted.
            tracing::error!("which images are in use is not kept: {}", report(&error));
        }
        Ok(())
    }

    fn holders(&self, name: &ImageName) -> Result<Vec<Holder>, StoreError> {
        Ok(self.holds().holders(self.now(), name))
    }

    fn count(&self) -> usize {
        self.holds().held(self.now()).len()
    }
}
