//! How many connections each peer may have.
//!
//! A connection *arrives*, and is known by its address only. When it has shown a certificate, or
//! none, it *settles*: it is of a user, or of a stranger. Nobody may take so many places that
//! nothing is left for others: no address with what arrives, no user, no stranger.
// tidy: core

use core::net::{IpAddr, Ipv6Addr};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Where connections come from: an IPv4 address, or the 64 bits of an IPv6 address that name a
/// network, because who has one of its addresses has them all.
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

/// The most connections at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    /// That arrive from one source.
    pub(super) arriving: usize,
    /// Of one user, wherever they come from.
    pub(super) user: usize,
    /// Of strangers from one source.
    pub(super) strangers: usize,
    /// Of all strangers.
    pub(super) all_strangers: usize,
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Refusal {
    /// Too many came from its source within a short time.
    Rate,
    /// Too many from its source failed to say who they are.
    Failures,
    /// Too many from its source have not yet said who they are.
    Arriving,
    /// The user has too many.
    User,
    /// Strangers have too many, from its source or all together.
    Strangers,
    /// It has not shown who it is, or nobody whom this server trusts.
    Handshake,
    /// It took too long to show who it is.
    Slow,
}

impl Refusal {
    /// All of them.
    pub(super) const ALL: [Self; 7] = [
        Self::Rate,
        Self::Failures,
        Self::Arriving,
        Self::User,
        Self::Strangers,
        Self::Handshake,
        Self::Slow,
    ];

    /// The word that metrics have for it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Failures => "failures",
            Self::Arriving => "arriving",
            Self::User => "user",
            Self::Strangers => "strangers",
            Self::Handshake => "handshake",
            Self::Slow => "slow",
        }
    }

    /// What is wrong, in words.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Rate => "too many connections within a short time",
            Self::Failures => "too many connections that failed to say who they are",
            Self::Arriving => "too many connections that have not yet said who they are",
            Self::User => "the user has too many connections",
            Self::Strangers => "callers without a certificate have too many connections",
            Self::Handshake => "the handshake failed",
            Self::Slow => "the handshake took too long",
        }
    }
}

/// A connection, as far as it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Guest {
    /// It has not said who it is.
    Arriving(Source),
    /// It is of this user.
    User(String),
    /// It has shown no certificate.
    Stranger(Source),
}

/// Who is there.
#[derive(Debug)]
pub(super) struct Book {
    limits: Limits,
    arriving: BTreeMap<Source, usize>,
    users: BTreeMap<String, usize>,
    strangers: BTreeMap<Source, usize>,
    all_strangers: usize,
}

impl Book {
    pub(super) fn new(limits: Limits) -> Self {
        let (arriving, strangers) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, arriving, users: BTreeMap::new(), strangers, all_strangers: 0 }
    }

    /// Lets a connection in, or gives why not; [`Book::leave`] is due for each that was let in.
    pub(super) fn enter(&mut self, guest: &Guest) -> Result<(), Refusal> {
        match guest {
            Guest::Arriving(source) => take(&mut self.arriving, source, 1, self.limits.arriving)
                .map_err(|Full| Refusal::Arriving),
            Guest::User(user) => {
                take(&mut self.users, user, 1, self.limits.user).map_err(|Full| Refusal::User)
            }
            Guest::Stranger(source) => {
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

    /// Notes that a connection has gone, or has become another guest.
    pub(super) fn leave(&mut self, guest: &Guest) {
        match guest {
            Guest::Arriving(source) => give(&mut self.arriving, source, 1),
            Guest::User(user) => give(&mut self.users, user, 1),
            Guest::Stranger(source) => {
                give(&mut self.strangers, source, 1);
                self.all_strangers = self.all_strangers.saturating_sub(1);
            }
        }
    }
}

/// One has as much as one may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Takes `count` for `key`, which may have `limit` at most.
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

/// Gives `count` back. Nothing is kept of whom nothing is left: the book is no longer than there
/// are connections.
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

    const LIMITS: Limits = Limits { arriving: 3, user: 2, strangers: 2, all_strangers: 3 };

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
        let mut book = Book::new(LIMITS);
        let stranger = |text| Guest::Stranger(source(text));
        let user = |name: &str| Guest::User(name.to_owned());
        let arriving = |text| Guest::Arriving(source(text));
        let mut enter = |guest: Guest| book.enter(&guest);
        let table = [
            (arriving("10.0.0.1"), [Ok(()), Ok(()), Ok(()), Err(Refusal::Arriving)]),
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
        for (guest, want) in table {
            let got = [(); 4].map(|()| enter(guest.clone()));
            assert_eq!(got, want, "{guest:?}");
        }
        assert_eq!([enter(arriving("10.0.0.2")), enter(user("b"))], [Ok(()), Ok(())]);
        // Whoever goes makes room.
        book.leave(&stranger("10.0.0.1"));
        assert_eq!(book.enter(&stranger("10.0.0.2")), Ok(()));
    }

    proptest! {
        #[test]
        fn when_all_have_gone_nothing_is_kept(guests in proptest::collection::vec(0_u8..9, 0..60)) {
            let mut book = Book::new(LIMITS);
            let mut inside = Vec::new();
            for number in guests {
                let at = source(&format!("10.0.0.{}", number % 3));
                let guest = match number / 3 {
                    0 => Guest::Arriving(at),
                    1 => Guest::User(format!("user{number}")),
                    _ => Guest::Stranger(at),
                };
                if book.enter(&guest).is_ok() {
                    inside.push(guest);
                }
                prop_assert!(book.all_strangers <= LIMITS.all_strangers);
                prop_assert_eq!(book.strangers.values().sum::<usize>(), book.all_strangers);
            }
            for guest in inside {
                book.leave(&guest);
            }
            let left = (book.arriving.len(), book.users.len(), book.strangers.len());
            prop_assert_eq!((left, book.all_strangers), ((0, 0, 0), 0));
        }
    }
}
