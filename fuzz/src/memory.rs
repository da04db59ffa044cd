//! How much memory a reading takes.

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// How much memory a reading may take at one time.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// For each byte that is read, in bytes.
    pub for_each: usize,
    /// Besides, in bytes.
    pub besides: usize,
}

impl Allowance {
    /// Of what is made of a few structures.
    pub const USUAL: Self = Self { for_each: 2_048, besides: 4 << 20 };

    /// Of patterns, which become automata.
    pub const PATTERNS: Self = Self { for_each: 2_048, besides: 256 << 20 };

    /// Of what may be compressed.
    pub const ARCHIVE: Self = Self { for_each: 16_384, besides: 64 << 20 };
}

/// Runs `read`, which reads `bytes` bytes; other threads must be idle.
///
/// # Panics
///
/// If more memory is taken than is allowed.
pub fn within(allowance: Allowance, bytes: usize, read: impl FnOnce()) {
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    read();
    let taken = ALLOCATED.peak_usage().saturating_sub(before);
    let allowed = allowance.for_each * bytes + allowance.besides;
    assert!(taken <= allowed, "{bytes} bytes took {taken} bytes of memory, {allowed} are allowed");
}
