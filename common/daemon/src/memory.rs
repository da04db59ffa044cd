//! How long the allocator keeps freed memory (docs/decisions/0012-allocator.md).

use std::sync::Mutex;

use model::lock::locked;
use tikv_jemalloc_ctl::{Access as _, AsName as _};

/// The setting of the allocator: after how many milliseconds freed pages go back to the kernel. The
/// first arena has all memory but blocks of several megabytes (`.cargo/config.toml`).
const DECAY_MS: &[u8] = b"arena.0.dirty_decay_ms\0";

/// How long pages are kept while a [`FreedMemory`] exists, in milliseconds.
const KEPT_MS: isize = 1_000;

static USES: Mutex<Uses> = Mutex::new(Uses { count: 0, former_ms: 0 });

/// How many [`FreedMemory`] exist, and the setting before the first of them.
struct Uses {
    count: usize,
    former_ms: isize,
}

/// Has the allocator keep freed memory for a second, until this is dropped: for work that makes and
/// drops large buffers all the time. To get the same pages from the kernel again would cost half as
/// much as all the rest.
#[derive(Debug)]
pub struct FreedMemory(());

impl FreedMemory {
    /// Begins to keep it.
    #[must_use]
    pub fn keep() -> Self {
        let mut uses = locked(&USES);
        uses.count += 1;
        if uses.count == 1 {
            uses.former_ms = exchange(KEPT_MS);
        }
        Self(())
    }
}

impl Drop for FreedMemory {
    fn drop(&mut self) {
        let mut uses = locked(&USES);
        uses.count -= 1;
        if uses.count == 0 {
            // If it is 0, what is kept goes back at once.
            exchange(uses.former_ms);
        }
    }
}

/// Changes the setting. Returns the former one.
fn exchange(milliseconds: isize) -> isize {
    DECAY_MS.name().update(milliseconds).unwrap_or_else(|error| {
        tracing::debug!("the allocator has no such setting: {error}");
        0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: crate::Jemalloc = crate::Jemalloc;

    #[test]
    fn the_setting_is_put_back_when_the_last_use_ends() {
        let setting = || -> isize { DECAY_MS.name().read().unwrap() };
        let before = setting();
        assert_ne!(before, KEPT_MS);
        let first = FreedMemory::keep();
        let second = FreedMemory::keep();
        drop(first);
        assert_eq!(setting(), KEPT_MS);
        drop(second);
        assert_eq!(setting(), before);
    }
}
