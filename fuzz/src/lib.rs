//! Fuzz targets for every decoder and parser of what peers send and files contain.
//!
//! A [`Target`] is a function of bytes that panics if a decoder accepts what it must refuse, or
//! does not read what was written. libFuzzer makes the bytes (`.ci/fuzz`). The inputs that it found
//! to matter are in `fuzz/corpus`, and an ordinary test reads them again, with any toolchain.

pub mod archives;
pub mod images;
pub mod provisioning;
pub mod rollouts;
pub mod seeds;
pub mod tasks;
pub mod texts;
pub mod trust;
pub mod wire;

use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// How much memory the decoding of an input may take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Bytes of memory for each byte of the input.
    for_each: usize,
    /// Further bytes.
    fixed: usize,
}

impl Allowance {
    /// For a few structures.
    const USUAL: Self = Self { for_each: 2_048, fixed: 4 << 20 };

    /// For patterns, which become automata.
    const PATTERNS: Self = Self { for_each: 2_048, fixed: 64 << 20 };

    /// For what may be compressed.
    const ARCHIVE: Self = Self { for_each: 16_384, fixed: 64 << 20 };
}

/// Runs `read`, which reads `bytes` bytes. Other threads must be idle.
fn within(allowance: Allowance, bytes: usize, read: impl FnOnce()) {
    let before = ALLOCATED.current_usage();
    ALLOCATED.reset_peak_usage();
    read();
    let taken = ALLOCATED.peak_usage().saturating_sub(before);
    let allowed = allowance.for_each * bytes + allowance.fixed;
    assert!(taken <= allowed, "{bytes} bytes took {taken} bytes of memory, {allowed} are allowed");
}

/// A decoder or parser under test.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of the target and of the folder of its corpus.
    pub name: &'static str,
    /// The longest input that is tried, in bytes.
    pub bytes_max: usize,
    pub memory: Allowance,
    run: fn(&[u8]),
}

impl Target {
    const fn new(name: &'static str, bytes_max: usize, run: fn(&[u8])) -> Self {
        Self { name, bytes_max, memory: Allowance::USUAL, run }
    }

    const fn allowing(self, memory: Allowance) -> Self {
        Self { memory, ..self }
    }

    /// Reads `bytes`.
    ///
    /// # Panics
    ///
    /// If the decoder has a bug, or takes too much memory.
    pub fn run(&self, bytes: &[u8]) {
        if bytes.len() <= self.bytes_max {
            within(self.memory, bytes.len(), || (self.run)(bytes));
        }
    }
}

/// All targets, sorted by name.
pub const TARGETS: &[Target] = &[
    Target::new("acl", 512, archives::acl),
    Target::new("audit", 8 << 10, trust::audit),
    Target::new("certificate", 4 << 10, trust::certificate),
    Target::new("chunk", 16 << 10, wire::chunk),
    Target::new("directory", 8 << 10, images::directory),
    Target::new("filter", 1 << 10, images::filter).allowing(Allowance::PATTERNS),
    Target::new("image", 8 << 10, images::image).allowing(Allowance::PATTERNS),
    Target::new("keys", 4 << 10, trust::keys),
    Target::new("mdb", 8 << 10, images::mdb),
    Target::new("methods", 8 << 10, wire::methods).allowing(Allowance::PATTERNS),
    Target::new("oci", 32 << 10, archives::oci).allowing(Allowance::ARCHIVE),
    Target::new("packages", 16 << 10, archives::packages),
    Target::new("pax", 4 << 10, archives::pax),
    Target::new("provisioning", 8 << 10, provisioning::provisioning),
    Target::new("rollout", 8 << 10, rollouts::rollout),
    Target::new("rpm", 64 << 10, archives::rpm),
    Target::new("signature", 4 << 10, trust::signature),
    Target::new("stream", 16 << 10, wire::stream),
    Target::new("tar", 32 << 10, archives::tar).allowing(Allowance::ARCHIVE),
    Target::new("task", 8 << 10, tasks::task),
    Target::new("texts", 1 << 10, texts::texts),
    Target::new("tree-text", 8 << 10, images::text),
    Target::new("trigger", 4 << 10, images::trigger).allowing(Allowance::PATTERNS),
    Target::new("zones", 4 << 10, trust::zones),
];

/// Returns the target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
