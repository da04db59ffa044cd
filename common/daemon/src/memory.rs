//! Gives back to the kernel what the process has freed.
//!
//! The allocator of glibc keeps freed memory for later, unless it is the end of its heap: after a
//! tree was replaced by another one, the process would keep the memory of both. Every other
//! allocator is left alone.
//!
//! This is the only file with unsafe code: no safe library calls `mallopt` and `malloc_trim`.
#![allow(unsafe_code)]

use std::thread;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// How often freed memory is given back at most.
const INTERVAL: Duration = Duration::from_secs(10);

/// The process must have worked this many times as long as the last time took: the allocator looks
/// at every hole of the heap, while threads wait.
const WORK_FACTOR: u32 = 20;

/// Gives back freed memory from now on, for as long as the process lives: seconds after it has
/// worked, and never while it does nothing. Called by a daemon before it starts threads.
pub fn give_back_regularly() {
    configure();
    let watch = thread::Builder::new().name("memory".to_owned()).spawn(|| {
        let (mut last, mut took) = (cpu_time(), Duration::ZERO);
        loop {
            thread::sleep(INTERVAL);
            let start = cpu_time();
            if start.saturating_sub(last) > took * WORK_FACTOR {
                give_back();
                last = cpu_time();
                took = last.saturating_sub(start);
            }
        }
    });
    if let Err(error) = watch {
        tracing::warn!(%error, "freed memory is not given back to the system");
    }
}

/// The processor time of this process.
fn cpu_time() -> Duration {
    // Linux knows this clock.
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// Returns all unused pages of the heap to the kernel.
#[cfg(target_env = "gnu")]
pub fn give_back() {
    // SAFETY: it takes the locks of the allocator itself, and changes nothing that is in use.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(target_env = "gnu")]
fn configure() {
    for (parameter, value) in PARAMETERS {
        // SAFETY: it takes the locks of the allocator itself, and both are plain numbers.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            tracing::warn!("the allocator refuses its parameter {parameter}");
        }
    }
}

/// Threads share two heaps, because a hole in one heap is of no use to the others. Large blocks
/// are no part of a heap: without this setting, the allocator would take them in once one was
/// freed.
#[cfg(target_env = "gnu")]
const PARAMETERS: [(libc::c_int, libc::c_int); 2] =
    [(libc::M_ARENA_MAX, 2), (libc::M_MMAP_THRESHOLD, 1 << 20)];

#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}

#[cfg(not(target_env = "gnu"))]
fn configure() {}
