//! Checks that objects fit on the file-system with a reserve for the machine.
//!
//! Space that an update would free does not count: what it removes is kept until the update is
//! verified, so that it can be undone.
// tidy: core

use api::subd::{FetchFailure, Space};

/// The least that a file takes on the usual file-systems, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// The reserve for the machine is this, in bytes, or a hundredth of the free space.
const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// The reserve for the machine, in inodes.
const RESERVE_INODES: u64 = 256;

/// Returns the bytes needed to write files of `sizes` bytes and leave a reserve; `None` if they fit
/// into `space`.
pub fn shortage(sizes: impl Iterator<Item = u64>, space: Space) -> Option<u64> {
    let blocks = |size: u64| size.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    let (mut sum, mut need_inodes) = (0_u64, RESERVE_INODES);
    for size in sizes {
        sum = sum.saturating_add(blocks(size));
        need_inodes += 1;
    }
    let reserve = RESERVE_BYTES_MAX.min(space.free_bytes / 100);
    let need_bytes = sum.saturating_add(reserve);
    (need_bytes > space.free_bytes || need_inodes > space.free_inodes).then_some(need_bytes)
}

/// Checks that files of `sizes` bytes fit into `space` and leave a reserve.
///
/// # Errors
///
/// [`FetchFailure::InsufficientSpace`] if they do not.
pub fn check(sizes: impl Iterator<Item = u64>, space: Space) -> Result<(), FetchFailure> {
    match shortage(sizes, space) {
        None => Ok(()),
        Some(need_bytes) => {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes: space.free_bytes })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_counted_in_blocks_with_a_reserve() {
        let space = |free_bytes, free_inodes| Space { free_bytes, free_inodes };
        let two = || [1, 4_097].into_iter();
        assert_eq!(check(two(), space(12_412, 258)), Ok(()));
        let failure = |need_bytes, free_bytes| {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes })
        };
        assert_eq!(check(two(), space(12_400, 258)), failure(12_412, 12_400));
        assert_eq!(check(two(), space(1_000_000, 257)), failure(22_288, 1_000_000));
        let huge = [u64::MAX, u64::MAX].into_iter();
        assert!(check(huge, space(u64::MAX - 1, u64::MAX)).is_err());
    }
}
