//! Which objects another server is asked for, and when it is asked again.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use model::object::ObjectId;

/// The most objects that are asked for at once.
pub const BATCH_MAX: usize = 1_000;

/// How long to wait after the first time that an object did not come.
const WAIT_MIN: Duration = Duration::from_secs(60);

/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(3_600);

/// What is known of the objects that are wanted.
#[derive(Debug, Default)]
pub struct Repairs {
    /// How often each did not come, and when it is asked for again.
    waiting: BTreeMap<ObjectId, (u32, Duration)>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Ask for these.
    For(Vec<ObjectId>),
    /// Wait until then, unless what is wanted changes before.
    Later(Duration),
    /// Wait until something is wanted.
    Never,
}

impl Repairs {
    /// What is asked for at `now` if `wanted` are. What did not come once is asked for alone: it
    /// may be the one that breaks off the answer.
    pub fn next(&mut self, now: Duration, wanted: &BTreeSet<ObjectId>) -> Ask {
        self.waiting.retain(|id, _| wanted.contains(id));
        let fresh = wanted.iter().filter(|id| !self.waiting.contains_key(id));
        let fresh: Vec<ObjectId> = fresh.take(BATCH_MAX).copied().collect();
        if !fresh.is_empty() {
            return Ask::For(fresh);
        }
        let first = self.waiting.iter().min_by_key(|(_, (_, at))| *at);
        match first {
            None => Ask::Never,
            Some((id, (_, at))) if *at <= now => Ask::For(vec![*id]),
            Some((_, (_, at))) => Ask::Later(*at),
        }
    }

    /// Takes note that `asked` were asked for; those that are still wanted did not come.
    pub fn asked(&mut self, now: Duration, asked: &[ObjectId]) {
        for id in asked {
            let (times, at) = self.waiting.entry(*id).or_default();
            let wait = WAIT_MIN.saturating_mul(1 << (*times).min(10)).min(WAIT_MAX);
            *times += 1;
            *at = now + wait;
        }
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn what_does_not_come_is_asked_for_less_and_less_often() {
        let seconds = Duration::from_secs;
        let [one, two] = [&b"1"[..], b"2"].map(|content| Algorithm::Blake3.digest(content));
        let both = BTreeSet::from([one, two]);
        let all: Vec<ObjectId> = both.iter().copied().collect();
        let mut repairs = Repairs::default();
        assert_eq!(repairs.next(seconds(0), &BTreeSet::new()), Ask::Never);
        assert_eq!(repairs.next(seconds(0), &both), Ask::For(all.clone()));
        repairs.asked(seconds(0), &all);
        // One of them came.
        let only = BTreeSet::from([one]);
        assert_eq!(repairs.next(seconds(1), &only), Ask::Later(seconds(60)));
        let mut waits = Vec::new();
        let mut now = seconds(60);
        for _ in 0..9 {
            assert_eq!(repairs.next(now, &only), Ask::For(vec![one]));
            repairs.asked(now, &[one]);
            let Ask::Later(at) = repairs.next(now, &only) else { panic!("it has just been asked") };
            waits.push((at - now).as_secs());
            now = at;
        }
        assert_eq!(waits, [120, 240, 480, 960, 1_920, 3_600, 3_600, 3_600, 3_600]);
        // One that is lost now does not wait for the other.
        assert_eq!(repairs.next(now - seconds(9), &both), Ask::For(vec![two]));
        // One that was healed and is lost again begins anew.
        assert_eq!(repairs.next(now, &BTreeSet::new()), Ask::Never);
        assert_eq!(repairs.next(now, &only), Ask::For(vec![one]));
    }
}
