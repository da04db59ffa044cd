//! Locks that ignore panics of other threads.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, even after a thread panicked while it held the lock. Only for values that a panic
/// cannot leave inconsistent.
pub fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
