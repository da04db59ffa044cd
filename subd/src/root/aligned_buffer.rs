//! Memory for reads around the page cache (`O_DIRECT`).

/// What such reads begin and end at, in bytes: in the file and in memory. No device in use asks
/// for more.
pub const ALIGNMENT: usize = 4_096;

/// Memory to read to, aligned to [`ALIGNMENT`].
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// Allocates `length` bytes.
    #[must_use]
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + ALIGNMENT];
        // The vector never grows, so it stays where it is.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, length }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.length]
    }
}
