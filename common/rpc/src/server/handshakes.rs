//! The connections whose handshake has not ended, and which of them gives way to a new one.
//!
//! They have places of their own, so that nobody keeps others out by connections that never say
//! who they are. If all places are taken, the oldest of them is ended, first of those from sources
//! that have not shown a certificate lately: a handshake takes milliseconds, and one that lasts is
//! most likely no handshake.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;

use super::connection_counts::{Full, Source, give, take};

/// The limits of unfinished handshakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandshakeLimits {
    /// From all sources.
    pub(super) all: usize,
    /// From one source.
    pub(super) source: usize,
    /// From one source that has shown a certificate lately.
    pub(super) known_source: usize,
}

/// How long a source is known after it has shown a certificate.
const KNOWN_FOR: Duration = Duration::from_secs(3_600);

/// The most known sources.
const KNOWN_MAX: usize = 16_384;

/// The unfinished handshakes. `T` ends one of them.
#[derive(Debug)]
pub(super) struct Handshakes<T> {
    limits: HandshakeLimits,
    /// By number: the oldest come first.
    all: BTreeMap<u64, Handshake<T>>,
    by_source: BTreeMap<Source, usize>,
    /// Sources that have shown a certificate, and when, on a clock that starts with the server.
    known: BTreeMap<Source, Duration>,
    last: u64,
}

#[derive(Debug)]
struct Handshake<T> {
    source: Source,
    is_known: bool,
    end: T,
}

impl<T> Handshakes<T> {
    pub(super) fn new(limits: HandshakeLimits) -> Self {
        let (all, by_source) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, all, by_source, known: BTreeMap::new(), last: 0 }
    }

    /// Adds a handshake, which `end` ends. Returns its number, and what ends the one that gives way
    /// to it.
    pub(super) fn enter(
        &mut self,
        source: Source,
        end: T,
        now: Duration,
    ) -> Result<(u64, Option<T>), Full> {
        let is_known =
            self.known.get(&source).is_some_and(|shown| now.saturating_sub(*shown) < KNOWN_FOR);
        let limit = if is_known { self.limits.known_source } else { self.limits.source };
        take(&mut self.by_source, &source, 1, limit)?;
        let ended = if self.all.len() >= self.limits.all {
            let unknown = self.all.iter().find(|(_, one)| !one.is_known);
            unknown.or_else(|| self.all.iter().next()).map(|(number, _)| *number)
        } else {
            None
        };
        let ended = ended.and_then(|number| self.remove(number));
        self.last += 1;
        self.all.insert(self.last, Handshake { source, is_known, end });
        Ok((self.last, ended))
    }

    /// Removes a handshake that has ended.
    pub(super) fn leave(&mut self, number: u64) {
        self.remove(number);
    }

    fn remove(&mut self, number: u64) -> Option<T> {
        let Handshake { source, end, .. } = self.all.remove(&number)?;
        give(&mut self.by_source, &source, 1);
        Some(end)
    }

    /// Notes that a source has shown a certificate.
    pub(super) fn note_known(&mut self, source: Source, now: Duration) {
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&source) {
            self.known.retain(|_, shown| now.saturating_sub(*shown) < KNOWN_FOR);
        }
        if self.known.len() < KNOWN_MAX || self.known.contains_key(&source) {
            self.known.insert(source, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: u8) -> Source {
        Source::of(core::net::IpAddr::from([10, 0, 0, number]))
    }

    const LIMITS: HandshakeLimits = HandshakeLimits { all: 4, source: 2, known_source: 3 };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_oldest_of_unknown_sources_gives_way() {
        let mut handshakes = Handshakes::new(LIMITS);
        handshakes.note_known(source(1), seconds(0));
        let mut enter = |from, end| handshakes.enter(source(from), end, seconds(1));
        assert_eq!(enter(1, "known"), Ok((1, None)));
        assert_eq!(enter(2, "a"), Ok((2, None)));
        assert_eq!(enter(2, "b"), Ok((3, None)));
        assert_eq!(enter(2, "c"), Err(Full));
        assert_eq!(enter(3, "d"), Ok((4, None)));
        assert_eq!(enter(4, "e"), Ok((5, Some("a"))));
        assert_eq!(enter(1, "known too"), Ok((6, Some("b"))));
        assert_eq!(enter(1, "and too"), Ok((7, Some("d"))));
        assert_eq!(enter(1, "and"), Err(Full));
        assert_eq!(enter(5, "f"), Ok((8, Some("e"))));
        assert_eq!(enter(5, "g"), Ok((9, Some("f"))));
        handshakes.leave(9);
        assert_eq!(handshakes.enter(source(5), "h", seconds(1)), Ok((10, None)));
    }

    #[test]
    fn if_all_are_known_the_oldest_gives_way_and_nothing_is_known_for_ever() {
        let mut handshakes = Handshakes::new(LIMITS);
        for number in 1..=5 {
            handshakes.note_known(source(number), seconds(0));
        }
        for number in 1..=4 {
            let (_, ended) = handshakes.enter(source(number), number, seconds(1)).unwrap();
            assert_eq!(ended, None);
        }
        assert_eq!(handshakes.enter(source(5), 5, seconds(1)), Ok((5, Some(1))));
        assert_eq!(handshakes.enter(source(9), 9, seconds(1)), Ok((6, Some(2))));
        assert_eq!(handshakes.enter(source(4), 10, seconds(3_600)), Ok((7, Some(9))));
        assert_eq!(handshakes.enter(source(4), 11, seconds(3_600)), Err(Full), "two are enough");
    }

    #[test]
    fn known_sources_are_limited_and_nothing_is_left() {
        let mut handshakes: Handshakes<()> = Handshakes::new(LIMITS);
        for number in 0..20_000_u32 {
            let address = core::net::Ipv4Addr::from_bits(number);
            handshakes.note_known(Source::of(address.into()), seconds(number.into()));
        }
        assert!(handshakes.known.len() <= KNOWN_MAX, "{}", handshakes.known.len());
        let (number, _) = handshakes.enter(source(1), (), seconds(0)).unwrap();
        handshakes.leave(number);
        handshakes.leave(number);
        assert!(handshakes.all.is_empty() && handshakes.by_source.is_empty());
    }
}
