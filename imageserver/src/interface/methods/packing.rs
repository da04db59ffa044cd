//! Packs objects on their way to those who take them packed.
//!
//! There are as many packers as processors. A stream of objects uses one if it is free, and sends
//! a chunk as it is if not: what limits it then is the processor, not the network.

use std::io;
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::available_parallelism;

use bytes::BufMut;
use model::lock::locked;
use rpc::packing::{self, CONTENT_BYTES_MIN, Packer};

/// What packs. A clone shares everything.
#[derive(Clone)]
pub struct Packers {
    packers: Arc<[Mutex<Packer>]>,
}

impl Packers {
    /// Packs with this level of zstd; level 0 never does.
    ///
    /// # Errors
    ///
    /// If there is no memory for it.
    pub fn new(level: i32) -> io::Result<Self> {
        let count = match level {
            0 => 0,
            _ => available_parallelism().map_or(1, usize::from),
        };
        let packers = (0..count).map(|_| Packer::new(level).map(Mutex::new));
        Ok(Self { packers: packers.collect::<io::Result<_>>()? })
    }

    /// True if an object of so many bytes is worth being packed.
    pub(super) fn is_worth(&self, size_bytes: u64) -> bool {
        !self.packers.is_empty() && size_bytes >= CONTENT_BYTES_MIN as u64
    }

    /// Appends a chunk of an object stream. False if `content` is as it was, because it gains too
    /// little; the rest of the same object will not gain more.
    pub(super) fn append(&self, content: &[u8], out: &mut impl BufMut) -> bool {
        for packer in self.packers.iter() {
            let mut packer = match packer.try_lock() {
                Ok(packer) => packer,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            let packed = packer.pack(content);
            packing::append(out, content, packed);
            return packed.is_some();
        }
        packing::append(out, content, None);
        true
    }

    /// The zstd frame that `content` becomes. Waits for a packer: who asks for frames takes nothing
    /// else.
    ///
    /// # Errors
    ///
    /// If there is no memory for it.
    pub(super) fn frame(&self, content: &[u8]) -> io::Result<Vec<u8>> {
        // Those who wait are spread by what they wait with: it need not be even.
        let turn = content.len() % self.packers.len();
        let mut packer = locked(&self.packers[turn]);
        packer.frame(content)
    }
}
