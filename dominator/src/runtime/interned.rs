//! Equal values of many machines, each held once, for as long as a machine holds it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::{Arc, Mutex, Weak};

use model::lock::locked;

/// The fewest values at which those that nobody holds are removed.
const PURGE_MIN: usize = 1_024;

#[derive(Debug)]
struct Known<T> {
    /// By hash. Values with the same hash that differ are not shared.
    values: BTreeMap<u64, Weak<T>>,
    purge_at: usize,
}

/// Does not keep values alive.
#[derive(Debug)]
pub struct Interned<T>(Mutex<Known<T>>);

impl<T> Default for Interned<T> {
    fn default() -> Self {
        Self(Mutex::new(Known { values: BTreeMap::new(), purge_at: PURGE_MIN }))
    }
}

impl<T: Eq + Hash> Interned<T> {
    /// Returns the equal value that others hold, or `value` if nobody
    /// holds one.
    pub fn share(&self, value: &Arc<T>) -> Arc<T> {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        let hash = hasher.finish();
        let mut known = locked(&self.0);
        match known.values.get(&hash).and_then(Weak::upgrade) {
            Some(other) if other == *value => return other,
            Some(_) => return Arc::clone(value),
            None => {}
        }
        known.values.insert(hash, Arc::downgrade(value));
        if known.values.len() > known.purge_at {
            known.values.retain(|_, value| value.strong_count() > 0);
            known.purge_at = PURGE_MIN.max(known.values.len() * 2);
        }
        Arc::clone(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_one_as_long_as_somebody_holds_it() {
        let interned = Interned::default();
        let [one, two, other] = ["x", "x", "y"].map(|text| Arc::new(text.to_owned()));
        let shared = interned.share(&one);
        assert!(Arc::ptr_eq(&shared, &one));
        assert!(Arc::ptr_eq(&interned.share(&two), &one));
        assert!(Arc::ptr_eq(&interned.share(&other), &other));
        drop((one, shared));
        assert!(Arc::ptr_eq(&interned.share(&two), &two));
    }

    #[test]
    fn what_nobody_holds_is_forgotten() {
        let interned = Interned::default();
        let held: Vec<Arc<usize>> = (0..10).map(|number| interned.share(&number.into())).collect();
        for number in 10..10 * PURGE_MIN {
            interned.share(&number.into());
        }
        assert!(locked(&interned.0).values.len() <= PURGE_MIN + 1);
        let again = held.iter().map(|value| interned.share(&Arc::new(**value)));
        assert!(again.zip(&held).all(|(again, held)| Arc::ptr_eq(&again, held)));
    }
}
