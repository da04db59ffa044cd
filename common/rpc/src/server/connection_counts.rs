//! Counts how many connections each peer has, and refuses those beyond its limit.
//!
//! After the TLS handshake a connection belongs to a user, or it is *anonymous*, if the peer showed
//! no certificate. Each user, each source address of anonymous peers and all anonymous peers
//! together have a limit, so that none of them can use up all connections. Before that it is one of
//! the [`handshakes`](super::handshakes).
// tidy: core

use core::net::{IpAddr, Ipv6Addr};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The source of a connection: an IPv4 address, or the 64 bits of an IPv6 address that name a
/// network, because the owner of one of its addresses has all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Source(IpAddr);

impl Source {
    pub(super) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(IpAddr::V4(address)),
            IpAddr::V6(address) => {
                let network = address.to_bits() >> 64 << 64;
                Self(IpAddr::V6(Ipv6Addr::from_bits(network)))
            }
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            IpAddr::V4(address) => write!(formatter, "{address}"),
            IpAddr::V6(network) => write!(formatter, "{network}/64"),
        }
    }
}

/// The limits of open connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// Connections of one user, from all sources.
    pub(super) user: usize,
    /// Anonymous connections from one source.
    pub(super) strangers: usize,
    /// All anonymous connections.
    pub(super) all_strangers: usize,
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Refusal {
    /// Too many connections from its source within a short time.
    Rate,
    /// Too many failed handshakes from its source.
    Failures,
    /// Too many unfinished handshakes, from its source or in total.
    Arriving,
    /// Too many connections of the user.
    User,
    /// Too many anonymous connections, from its source or in total.
    Strangers,
    /// The handshake failed.
    Handshake,
    /// The handshake took too long.
    Slow,
}

impl Refusal {
    pub(super) const ALL: [Self; 7] = [
        Self::Rate,
        Self::Failures,
        Self::Arriving,
        Self::User,
        Self::Strangers,
        Self::Handshake,
        Self::Slow,
    ];

    /// Returns the label in metrics, and the reason for logs.
    pub(super) fn label_and_text(self) -> (&'static str, &'static str) {
        match self {
            Self::Rate => ("rate", "too many connections within a short time"),
            Self::Failures => ("failures", "too many failed handshakes"),
            Self::Arriving => ("arriving", "too many unfinished handshakes"),
            Self::User => ("user", "the user has too many connections"),
            Self::Strangers => {
                ("strangers", "callers without a certificate have too many connections")
            }
            Self::Handshake => ("handshake", "the handshake failed"),
            Self::Slow => ("slow", "the handshake took too long"),
        }
    }
}

/// The owner of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConnectionKind {
    /// It belongs to this user.
    User(String),
    /// The peer showed no certificate.
    Anonymous(Source),
}

/// The connections that are open, by whom they belong to.
#[derive(Debug)]
pub(super) struct ConnectionCounts {
    limits: Limits,
    users: BTreeMap<String, usize>,
    strangers: BTreeMap<Source, usize>,
    all_strangers: usize,
}

impl ConnectionCounts {
    pub(super) fn new(limits: Limits) -> Self {
        let (users, strangers) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, users, strangers, all_strangers: 0 }
    }

    /// Counts a connection, or returns why it is refused. Call [`ConnectionCounts::leave`] once for
    /// each counted connection.
    pub(super) fn enter(&mut self, kind: &ConnectionKind) -> Result<(), Refusal> {
        match kind {
            ConnectionKind::User(user) => {
                take(&mut self.users, user, 1, self.limits.user).map_err(|Full| Refusal::User)
            }
            ConnectionKind::Anonymous(source) => {
                if self.all_strangers >= self.limits.all_strangers {
                    return Err(Refusal::Strangers);
                }
                take(&mut self.strangers, source, 1, self.limits.strangers)
                    .map_err(|Full| Refusal::Strangers)?;
                self.all_strangers += 1;
                Ok(())
            }
        }
    }

    /// Stops counting a connection that has ended.
    pub(super) fn leave(&mut self, kind: &ConnectionKind) {
        match kind {
            ConnectionKind::User(user) => give(&mut self.users, user, 1),
            ConnectionKind::Anonymous(source) => {
                give(&mut self.strangers, source, 1);
                self.all_strangers = self.all_strangers.saturating_sub(1);
            }
        }
    }
}

/// The limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Adds `count` to the count of `key`, which may be `limit` at most.
pub(super) fn take<Key: Ord + Clone>(
    counts: &mut BTreeMap<Key, usize>,
    key: &Key,
    count: usize,
    limit: usize,
) -> Result<(), Full> {
    let before = counts.get(key).copied().unwrap_or(0);
    let after = before.checked_add(count).filter(|after| *after <= limit).ok_or(Full)?;
    counts.insert(key.clone(), after);
    Ok(())
}

/// Returns `count` to the limit of `key`. Keys with a count of zero are removed, so the map never
/// has more entries than there are connections.
pub(super) fn give<Key: Ord + Clone>(counts: &mut BTreeMap<Key, usize>, key: &Key, count: usize) {
    if let Entry::Occupied(mut entry) = counts.entry(key.clone()) {
        match entry.get().checked_sub(count) {
            None | Some(0) => drop(entry.remove()),
            Some(left) => *entry.get_mut() = left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    const LIMITS: Limits = Limits { user: 2, strangers: 2, all_strangers: 3 };

    #[test]
    fn a_source_is_an_address_or_a_network_that_one_has_whole() {
        let table = [
            ("10.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("::1", "::/64"),
        ];
        for (address, want) in table {
            assert_eq!(source(address).to_string(), want);
        }
    }

    #[test]
    fn nobody_takes_the_places_of_others() {
        let mut counts = ConnectionCounts::new(LIMITS);
        let stranger = |text| ConnectionKind::Anonymous(source(text));
        let user = |name: &str| ConnectionKind::User(name.to_owned());
        let mut enter = |kind: ConnectionKind| counts.enter(&kind);
        let table = [
            (user("a"), [Ok(()), Ok(()), Err(Refusal::User), Err(Refusal::User)]),
            (
                stranger("10.0.0.1"),
                [Ok(()), Ok(()), Err(Refusal::Strangers), Err(Refusal::Strangers)],
            ),
            (
                stranger("10.0.0.2"),
                [Ok(()), Err(Refusal::Strangers), Err(Refusal::Strangers), Err(Refusal::Strangers)],
            ),
        ];
        for (kind, want) in table {
            let got = [(); 4].map(|()| enter(kind.clone()));
            assert_eq!(got, want, "{kind:?}");
        }
        assert_eq!(enter(user("b")), Ok(()));
        // A connection that ends frees a place.
        counts.leave(&stranger("10.0.0.1"));
        assert_eq!(counts.enter(&stranger("10.0.0.2")), Ok(()));
    }

    proptest! {
        #[test]
        fn when_all_have_gone_nothing_is_kept(kinds in proptest::collection::vec(0_u8..6, 0..60)) {
            let mut counts = ConnectionCounts::new(LIMITS);
            let mut state = Vec::new();
            for number in kinds {
                let at = source(&format!("10.0.0.{}", number % 3));
                let kind = match number / 3 {
                    0 => ConnectionKind::User(format!("user{number}")),
                    _ => ConnectionKind::Anonymous(at),
                };
                if counts.enter(&kind).is_ok() {
                    state.push(kind);
                }
                prop_assert!(counts.all_strangers <= LIMITS.all_strangers);
                prop_assert_eq!(counts.strangers.values().sum::<usize>(), counts.all_strangers);
            }
            for kind in state {
                counts.leave(&kind);
            }
            let left = (counts.users.len(), counts.strangers.len(), counts.all_strangers);
            prop_assert_eq!(left, (0, 0, 0));
        }
    }
}
