//! Freed memory goes back to the kernel. Alone in its process: it looks at the size of the process.
#![cfg(target_env = "gnu")]

use daemon::memory::give_back;

#[test]
fn freed_memory_between_blocks_in_use_is_given_back() {
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
    give_back();
    let after = resident_kib();
    assert!(after < before + 20_000, "{after} after {full}, and {before} before");
    // The last block is still in use.
    assert_eq!(blocks.iter().flatten().count(), 100);
}
