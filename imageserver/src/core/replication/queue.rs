//! The work queue of a replica, by image name.
//!
//! A newer change of a name replaces an older one. Only one change of a name is carried out at a
//! time. A change that fails is retried after a growing delay and does not block others.
// tidy: core

use std::collections::BTreeMap;
use std::time::Duration;

use api::image_server::replication::{ImageChange, ReplicationTrouble};
use model::image::ImageName;

/// How long to wait after the first failure.
pub const WAIT_MIN: Duration = Duration::from_millis(250);

/// The longest wait.
pub const WAIT_MAX: Duration = Duration::from_secs(30);

/// How often a blocked change is decided on again: the local state may have changed.
pub const RECHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The longest text of an error that is saved, in bytes.
pub const ERROR_BYTES_MAX: usize = 2_000;

/// Returns how long to wait after that many failures. `random` spreads the retries of many servers.
#[must_use]
pub fn backoff(failures: u32, random: u64) -> Duration {
    let wait = WAIT_MIN.saturating_mul(1 << failures.min(16)).min(WAIT_MAX);
    let thousandths = u32::try_from(random % 1_000).unwrap_or(0);
    // Between four fifths and all of it.
    wait * 4 / 5 + wait * thousandths / 5_000
}

/// How work on a name ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The change is made.
    Done,
    /// The change cannot be made; the image stays as it is.
    Blocked(ReplicationTrouble, String),
    /// The change failed and is retried.
    Failed(String),
}

#[derive(Clone, Debug)]
enum State {
    /// Due at that time.
    Waiting(Duration),
    /// Running; true if the name has changed meanwhile.
    Running(bool),
}

#[derive(Clone, Debug)]
struct Work {
    change: ImageChange,
    state: State,
    failures: u32,
    trouble: Option<(ReplicationTrouble, String)>,
    bytes_left: u64,
    /// The order of the changes; the oldest goes first.
    turn: u64,
}

/// The changes that are still to be made.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    work: BTreeMap<ImageName, Work>,
    turns: u64,
}

impl Queue {
    /// Queues a change, due at `now`.
    pub fn put(&mut self, now: Duration, change: ImageChange) {
        self.turns += 1;
        let turn = self.turns;
        let bytes_left = match &change {
            ImageChange::Image { bytes, .. } => *bytes,
            ImageChange::Ended { .. } => 0,
        };
        if let Some(work) = self.work.get_mut(change.name()) {
            let is_new = work.change != change;
            work.change = change;
            match &mut work.state {
                State::Running(has_changed) => *has_changed |= is_new,
                State::Waiting(_) if !is_new && work.trouble.is_some() => {}
                State::Waiting(at) => *at = now,
            }
            return;
        }
        let (name, state) = (change.name().clone(), State::Waiting(now));
        let work = Work { change, state, failures: 0, trouble: None, bytes_left, turn };
        self.work.insert(name, work);
    }

    /// Makes waiting changes due at once: all of them, or those of that name.
    pub fn hurry(&mut self, now: Duration, name: Option<&ImageName>) {
        for (key, work) in &mut self.work {
            if name.is_none_or(|name| name == key)
                && let State::Waiting(at) = &mut work.state
            {
                *at = now.min(*at);
            }
        }
    }

    /// Returns the next change that is due. It is running until [`Queue::end`].
    pub fn next(&mut self, now: Duration) -> Option<ImageChange> {
        let due = |work: &&mut Work| matches!(work.state, State::Waiting(at) if at <= now);
        let work = self.work.values_mut().filter(due).min_by_key(|work| work.turn)?;
        work.state = State::Running(false);
        Some(work.change.clone())
    }

    /// Returns when the next change is due; `None` if none is waiting.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        let times = self.work.values().filter_map(|work| match work.state {
            State::Waiting(at) => Some(at),
            State::Running(_) => None,
        });
        times.min()
    }

    /// Records the outcome of a running change.
    pub fn end(&mut self, now: Duration, name: &ImageName, outcome: Outcome, random: u64) {
        let Some(work) = self.work.get_mut(name) else { return };
        let has_changed = matches!(work.state, State::Running(true));
        self.turns += 1;
        work.turn = self.turns;
        let wait = match outcome {
            Outcome::Done if !has_changed => {
                self.work.remove(name);
                return;
            }
            Outcome::Done => {
                (work.trouble, work.failures) = (None, 0);
                Duration::ZERO
            }
            Outcome::Blocked(trouble, text) => {
                (work.trouble, work.failures) = (Some((trouble, text)), 0);
                RECHECK_INTERVAL
            }
            Outcome::Failed(why) => {
                let wait = backoff(work.failures, random);
                work.failures += 1;
                work.trouble = Some((ReplicationTrouble::Failing, why));
                wait
            }
        };
        work.state = State::Waiting(now + if has_changed { Duration::ZERO } else { wait });
    }

    /// Records how many bytes are still to be fetched for `name`.
    pub fn left(&mut self, name: &ImageName, bytes: u64) {
        if let Some(work) = self.work.get_mut(name) {
            work.bytes_left = bytes;
        }
    }

    /// Returns true if no change of that name is queued, or it is blocked.
    #[must_use]
    pub fn is_settled(&self, name: &ImageName) -> bool {
        self.work.get(name).is_none_or(|work| !work.is_behind())
    }

    /// Returns true if no change of that name is queued.
    #[must_use]
    pub fn is_empty_of(&self, name: &ImageName) -> bool {
        !self.work.contains_key(name)
    }

    /// Returns why the change of that name cannot be made here.
    #[must_use]
    pub fn trouble(&self, name: &ImageName) -> Option<ReplicationTrouble> {
        self.work.get(name)?.trouble.as_ref().map(|(trouble, _)| *trouble)
    }

    /// Returns how many changes are still to be made, and how many bytes are to be fetched for them
    /// at most; without blocked ones.
    #[must_use]
    pub fn behind(&self) -> (u64, u64) {
        let behind = self.work.values().filter(|work| work.is_behind());
        behind.fold((0, 0), |(names, bytes), work| (names + 1, bytes + work.bytes_left))
    }

    /// Returns the changes in trouble, sorted by name.
    pub fn troubles(&self) -> impl Iterator<Item = (&ImageName, ReplicationTrouble, &str)> {
        self.work.iter().filter_map(|(name, work)| {
            work.trouble.as_ref().map(|(trouble, text)| (name, *trouble, text.as_str()))
        })
    }
}

impl Work {
    /// Returns true if it will be done by itself.
    fn is_behind(&self) -> bool {
        matches!(self.trouble, None | Some((ReplicationTrouble::Failing, _)))
    }
}

#[cfg(test)]
mod tests {
    use api::image_server::replication::ImageEnd;
    use model::object::Algorithm;

    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn image(text: &str, notes: &[u8], bytes: u64) -> ImageChange {
        let [digest, notes] = [text.as_bytes(), notes].map(|text| Algorithm::Blake3.digest(text));
        ImageChange::Image { name: name(text), digest, notes, expires_at: None, bytes }
    }

    fn ended(text: &str) -> ImageChange {
        ImageChange::Ended { name: name(text), how: ImageEnd::Expired, digest: None }
    }

    const fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn changes_are_taken_in_order_and_each_name_once() {
        let mut queue = Queue::default();
        let now = seconds(1);
        queue.put(now, image("b", b"1", 10));
        queue.put(now, image("a", b"1", 5));
        queue.put(now, image("b", b"2", 10));
        assert_eq!(queue.behind(), (2, 15));
        assert_eq!(queue.next(now), Some(image("b", b"2", 10)));
        assert_eq!(queue.next(now), Some(image("a", b"1", 5)));
        assert_eq!((queue.next(now), queue.due()), (None, None));
        queue.left(&name("b"), 3);
        assert_eq!(queue.behind(), (2, 8));

        // It ends while the other is under way: that is done after it.
        queue.put(now, ended("b"));
        assert_eq!(queue.next(now), None);
        queue.end(now, &name("b"), Outcome::Done, 0);
        queue.end(now, &name("a"), Outcome::Done, 0);
        assert_eq!(queue.next(now), Some(ended("b")));
        queue.end(now, &name("b"), Outcome::Done, 0);
        assert_eq!((queue.behind(), queue.due()), ((0, 0), None));
    }

    #[test]
    fn what_fails_waits_longer_each_time_and_holds_up_nothing() {
        let mut queue = Queue::default();
        let mut now = Duration::ZERO;
        queue.put(now, image("a", b"1", 5));
        let mut waits = Vec::new();
        for _ in 0..9 {
            assert_eq!(queue.next(now), Some(image("a", b"1", 5)));
            queue.put(now, ended("b"));
            assert_eq!(queue.next(now), Some(ended("b")));
            queue.end(now, &name("b"), Outcome::Done, 0);
            queue.end(now, &name("a"), Outcome::Failed("disk".to_owned()), 999);
            let at = queue.due().unwrap();
            waits.push((at - now).as_millis());
            now = at;
        }
        assert_eq!(waits, [249, 499, 999, 1_999, 3_999, 7_998, 15_996, 29_994, 29_994]);
        let (all, failing) = (name("a"), ReplicationTrouble::Failing);
        assert_eq!(queue.troubles().collect::<Vec<_>>(), [(&all, failing, "disk")]);
        assert!(!queue.is_settled(&all));
        // The same again, as a list tells it, is no reason to try at once; another change is.
        assert_eq!(queue.next(now), Some(image("a", b"1", 5)));
        queue.end(now, &name("a"), Outcome::Failed("disk".to_owned()), 0);
        queue.put(now, image("a", b"1", 5));
        assert_eq!(queue.next(now), None);
        queue.put(now, image("a", b"2", 5));
        assert_eq!(queue.next(now), Some(image("a", b"2", 5)));
        queue.end(now, &name("a"), Outcome::Failed("disk".to_owned()), 0);
        queue.hurry(now, Some(&name("b")));
        assert_eq!(queue.next(now), None);
        queue.hurry(now, None);
        assert_eq!(queue.next(now), Some(image("a", b"2", 5)));
        queue.end(now, &name("a"), Outcome::Done, 0);
        assert_eq!(queue.troubles().count(), 0);
    }

    #[test]
    fn what_is_kept_is_not_behind_and_is_looked_at_again() {
        let mut queue = Queue::default();
        let now = seconds(1);
        queue.put(now, ended("a"));
        assert_eq!(queue.next(now), Some(ended("a")));
        queue.end(
            now,
            &name("a"),
            Outcome::Blocked(ReplicationTrouble::Held, "in use".to_owned()),
            0,
        );
        assert_eq!(queue.behind(), (0, 0));
        assert!(queue.is_settled(&name("a")));
        assert_eq!(queue.trouble(&name("a")), Some(ReplicationTrouble::Held));
        assert_eq!(queue.due(), Some(now + RECHECK_INTERVAL));
        assert_eq!(queue.next(now + RECHECK_INTERVAL), Some(ended("a")));
    }

    #[test]
    fn many_do_not_try_again_at_once() {
        assert_eq!(backoff(0, 0), Duration::from_millis(200));
        assert_eq!(backoff(u32::MAX, 0), seconds(24));
        assert!(backoff(u32::MAX, u64::MAX) < WAIT_MAX);
    }
}
