//! Random numbers from the kernel.

/// Returns a random number.
#[must_use]
pub fn random() -> u64 {
    u64::from_ne_bytes(random_bytes())
}

/// Returns random bytes, fit for keys.
///
/// # Panics
///
/// If the kernel has no random numbers, which no supported kernel does.
#[must_use]
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("getrandom failed: {error}"),
        }
    }
    bytes
}
