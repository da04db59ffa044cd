//! Freed memory goes back to the kernel. Alone in its process: it looks at the size of the process.

use std::thread::sleep;
use std::time::Duration;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// How long a process that does nothing may keep it, in seconds. With the settings, it does not.
const SECONDS_MAX: u32 = 60;

#[test]
fn freed_memory_between_blocks_in_use_is_given_back_while_the_process_does_nothing() {
    let resident_kib = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let before = resident_kib();
    let mut blocks: Vec<Option<Box<[u8; 1024]>>> = Vec::new();
    blocks.resize_with(100_000, || Some(Box::new([1; 1024])));
    let full = resident_kib();
    assert!(full > before + 90_000, "{full} and {before}");
    for (number, block) in blocks.iter_mut().enumerate() {
        if number % 1_000 != 0 {
            *block = None;
        }
    }
    let is_given_back = || resident_kib() < before + 20_000;
    let waited =
        (0..SECONDS_MAX).take_while(|_| !is_given_back()).map(|_| sleep(Duration::from_secs(1)));
    let waited = waited.count();
    assert!(is_given_back(), "{} after {full}, and {before} before, in {waited} s", resident_kib());
    // The last block is still in use.
    assert_eq!(blocks.iter().flatten().count(), 100);
}
