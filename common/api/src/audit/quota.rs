//! Limits how many failed and refused calls are recorded one by one.
//!
//! Callers without any power can still call. So that they cannot fill the log or push other records
//! out of it, only some such calls are recorded for each user and minute. The others are counted,
//! and the count is recorded when the minute is over. Callers without a certificate share one
//! count, because addresses cost nothing.

use std::collections::BTreeMap;

/// How many calls of one user are recorded in one minute.
pub const PER_MINUTE: u32 = 10;

/// How many calls of all callers without a certificate are recorded in one minute.
pub const STRANGERS_PER_MINUTE: u32 = 20;

/// How many users have a count of their own; the others share one.
pub const USERS_MAX: usize = 1_000;

/// The caller that is recorded for users beyond [`USERS_MAX`].
pub const OTHERS: &str = "other users";

/// The caller that is recorded for callers without a certificate.
pub const STRANGERS: &str = "callers without a certificate";

/// Counts the calls of the current minute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    minute: u64,
    users: BTreeMap<String, u32>,
    others: u32,
    strangers: u32,
}

/// Calls of one caller that were not recorded one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unrecorded {
    pub caller: String,
    pub count: u32,
}

impl Quota {
    /// Counts a call of `user`, or of a caller without a certificate. Returns true if it is to be
    /// recorded.
    pub fn admit(&mut self, user: Option<&str>) -> bool {
        let is_known = |user| self.users.contains_key(user) || self.users.len() < USERS_MAX;
        let (count, most) = match user {
            None => (&mut self.strangers, STRANGERS_PER_MINUTE),
            Some(user) if is_known(user) => {
                (self.users.entry(user.to_owned()).or_default(), PER_MINUTE)
            }
            Some(_) => (&mut self.others, PER_MINUTE),
        };
        *count = count.saturating_add(1);
        *count <= most
    }

    /// Returns true if no more calls of `user` are recorded in this minute.
    #[must_use]
    pub fn is_exhausted(&self, user: Option<&str>) -> bool {
        match user {
            None => self.strangers >= STRANGERS_PER_MINUTE,
            Some(user) => match self.users.get(user) {
                Some(count) => *count >= PER_MINUTE,
                None => self.users.len() >= USERS_MAX && self.others >= PER_MINUTE,
            },
        }
    }

    /// Sets the current minute, counted from any start. When a minute has passed, returns the calls
    /// that were counted in it and not recorded.
    pub fn tick(&mut self, minute: u64) -> Vec<Unrecorded> {
        if minute == self.minute {
            return Vec::new();
        }
        let counted = std::mem::replace(self, Self { minute, ..Self::default() });
        let users = counted.users.into_iter().map(|(user, count)| (user, count, PER_MINUTE));
        let shared = [
            (OTHERS, counted.others, PER_MINUTE),
            (STRANGERS, counted.strangers, STRANGERS_PER_MINUTE),
        ];
        let shared = shared.map(|(caller, count, most)| (caller.to_owned(), count, most));
        users
            .chain(shared)
            .filter(|(_, count, most)| count > most)
            .map(|(caller, count, most)| Unrecorded { caller, count: count - most })
            .collect()
    }
}
