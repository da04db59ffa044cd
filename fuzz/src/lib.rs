//! What peers and files say, made up: every decoder and parser reads it without harm.
//!
//! A [`Target`] is a function of bytes that panics when something is read that must not be, or is
//! not read as it was written. libFuzzer makes up the bytes (`.ci/fuzz`); what it found to matter
//! is in `fuzz/corpus`, and is read again by an ordinary test, with any toolchain.

pub mod archives;
pub mod images;
pub mod memory;
pub mod seeds;
pub mod signing;
pub mod texts;
pub mod trees;
pub mod trust;
pub mod wire;

/// Something that reads bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is called; the folder of its corpus has the same name.
    pub name: &'static str,
    /// The longest input that is worth a try, in bytes.
    pub bytes_max: usize,
    /// How much memory may be taken: for each byte of the input, and besides.
    pub memory: memory::Allowance,
    run: fn(&[u8]),
}

impl Target {
    const fn new(name: &'static str, bytes_max: usize, run: fn(&[u8])) -> Self {
        Self { name, bytes_max, memory: memory::Allowance::USUAL, run }
    }

    const fn allowing(self, memory: memory::Allowance) -> Self {
        Self { memory, ..self }
    }

    /// Reads `bytes`.
    ///
    /// # Panics
    ///
    /// If that does harm.
    pub fn run(&self, bytes: &[u8]) {
        if bytes.len() <= self.bytes_max {
            memory::within(self.memory, bytes.len(), || (self.run)(bytes));
        }
    }
}

/// All targets, by name.
pub const TARGETS: &[Target] = &[
    Target::new("acl", 512, archives::acl),
    Target::new("audit", 8 << 10, signing::audit),
    Target::new("certificate", 4 << 10, trust::certificate),
    Target::new("chunk", 16 << 10, wire::chunk),
    Target::new("directory", 8 << 10, trees::directory),
    Target::new("filter", 1 << 10, images::filter).allowing(memory::Allowance::PATTERNS),
    Target::new("image", 8 << 10, images::image).allowing(memory::Allowance::PATTERNS),
    Target::new("keys", 4 << 10, signing::keys),
    Target::new("mdb", 8 << 10, images::mdb),
    Target::new("methods", 8 << 10, wire::methods).allowing(memory::Allowance::PATTERNS),
    Target::new("oci", 32 << 10, archives::oci).allowing(memory::Allowance::ARCHIVE),
    Target::new("packages", 16 << 10, archives::packages),
    Target::new("pax", 4 << 10, archives::pax),
    Target::new("rpm", 64 << 10, archives::rpm),
    Target::new("signature", 4 << 10, signing::signature),
    Target::new("stream", 16 << 10, wire::stream),
    Target::new("tar", 32 << 10, archives::tar).allowing(memory::Allowance::ARCHIVE),
    Target::new("texts", 1 << 10, texts::texts),
    Target::new("tree-text", 8 << 10, trees::text),
    Target::new("trigger", 4 << 10, images::trigger).allowing(memory::Allowance::PATTERNS),
    Target::new("zones", 4 << 10, trust::zones),
];

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
