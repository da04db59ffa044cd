//! A new release for the whole fleet: thousands of paths change on each machine, again and again.
//! Measures what the dominator keeps of it.

use std::time::Duration;

use anyhow::Context as _;

use super::Run;
use crate::bench::fixture::Change;
use crate::bench::measure::{mebibytes, memory_of};

/// The change from the first image to the new release.
pub(super) const RELEASE: Change =
    Change { name: "release", seed: 0x5eed_4000, files: 3_000, bytes: 3_000_000 };

/// How often all machines get another image.
const UPDATES: usize = 4;

/// When the memory is read after an update and after a restart.
const REST: Duration = Duration::from_secs(60);

/// The goal: the memory after an update, as a multiple of that after a restart.
const KEPT_WANTED: f64 = 1.1;

impl Run {
    /// Updates all machines to the release and back in turn, and compares the memory afterwards
    /// with that after a restart.
    pub(super) fn release(
        &mut self,
        release: &dyn Fn(usize) -> String,
        other: &dyn Fn(usize) -> String,
    ) -> anyhow::Result<()> {
        let (files, mut after) = (RELEASE.files, 0);
        for number in 1..=UPDATES {
            let image_of = if number % 2 == 1 { release } else { other };
            self.update(image_of, &format!("{number} of {UPDATES}: "), files)?;
            after = self
                .rest(&format!("a minute after update {number} of {UPDATES} by {files} files"))?;
        }
        self.restart()?;
        let fresh = self.rest("a minute after a restart")?;
        self.row("the same, after the last update beside after a restart", mebibytes(after as f64));
        if let Some(row) = self.rows.last_mut() {
            row.peer = mebibytes(fresh as f64);
            row.ratio = Some(after as f64 / fresh as f64);
            row.wanted = format!("{KEPT_WANTED} times");
        }
        Ok(())
    }

    /// Adds a line for the memory a minute from now, and returns it, in bytes.
    pub(super) fn rest(&mut self, when: &str) -> anyhow::Result<u64> {
        std::thread::sleep(REST);
        let memory = memory_of(self.dominator()?).context("the dominator has ended")?;
        self.memory(when, memory.now);
        Ok(memory.now)
    }
}
