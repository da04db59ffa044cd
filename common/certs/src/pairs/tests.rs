//! What is kept, for how long, and in how many lines.

use std::time::Duration;

use model::object::Algorithm;

use super::*;
use crate::authority::{Authority, AuthorityOptions};

const DAY: u64 = 86_400;

fn wanted(hostname: &str) -> WantedPair {
    let lifetime = Duration::from_secs(30 * DAY);
    WantedPair {
        path: "/etc/tls/cert.pem".to_owned(),
        request: Request { name: hostname.to_owned(), lifetime, ..Request::default() },
        key: None,
        made_from: Algorithm::Blake3.digest(hostname.as_bytes()),
        renew_after: 0.5,
    }
}

struct Lab {
    directory: tempfile::TempDir,
    register: Register,
    now: u64,
}

impl Lab {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(&AuthorityOptions::default()).unwrap();
        let register = Register::create(&directory.path().join("ca"), authority).unwrap();
        let now = system::clock::since_epoch().as_secs();
        Self { directory, register, now }
    }

    fn open(&self) -> PairStore {
        PairStore::open(self.directory.path()).unwrap()
    }

    fn get(&self, store: &PairStore, hostname: &str, days: u64) -> Arc<Pair> {
        let now = self.now + days * DAY;
        let made = store.get_or_make(&self.register, &[wanted(hostname)], now);
        let [Ok(pair)] = &made[..] else { panic!("{made:?}") };
        Arc::clone(pair)
    }

    fn lines(&self) -> usize {
        fs::read_to_string(self.directory.path().join(FILE)).unwrap().lines().count()
    }
}

#[test]
fn a_pair_stays_until_it_is_due_or_its_renewal_is_ordered() {
    let lab = Lab::new();
    let store = lab.open();
    let first = lab.get(&store, "web1", 0);
    assert!(first.renew_at_seconds.abs_diff(lab.now + 15 * DAY) <= 1, "{}", first.renew_at_seconds);
    assert_eq!(lab.get(&store, "web1", 14), first);
    let second = lab.get(&store, "web1", 15);
    assert_ne!(second.key_pem, first.key_pem);
    assert_eq!((lab.get(&lab.open(), "web1", 0), store.renewals()), (Arc::clone(&second), 0));

    // The order is about machines that have pairs, also if it is given twice.
    let hostnames = ["web1", "web2"].map(str::to_owned);
    for _ in 0..2 {
        let renewed = store.renew(Some(&hostnames), lab.now).unwrap();
        assert_eq!((renewed, store.renewals()), (["web1".to_owned()].into(), 1));
    }
    let store = lab.open();
    assert_eq!(store.renewals(), 1);
    let third = lab.get(&store, "web1", 0);
    assert_ne!(third.key_pem, second.key_pem);
    assert_eq!(store.next_renewal("/etc/tls/cert.pem", lab.now), Some(third.renew_at_seconds));
    assert_eq!(store.renew(None, lab.now).unwrap(), ["web1".to_owned()].into());
}

#[test]
fn lines_of_no_use_are_removed_when_there_are_many() {
    let lab = Lab::new();
    let store = lab.open();
    let old = lab.get(&store, "old", 0);
    let kept = lab.get(&store, "kept", 10);
    store.renew(Some(&["nobody".to_owned()]), lab.now).unwrap();
    let path = lab.directory.path().join(FILE);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.repeat(600)).unwrap();
    let store = lab.open();
    assert_eq!(lab.get(&store, "old", 0), old);
    assert_eq!(lab.lines(), 1_200);
    // The pair that is due goes; what counts the renewals stays.
    let new = lab.get(&store, "new", 16);
    assert_eq!(lab.lines(), 3);
    let store = lab.open();
    assert_eq!([lab.get(&store, "kept", 16), lab.get(&store, "new", 16)], [kept, new]);
    assert_ne!(lab.get(&store, "old", 0), old);
}

#[test]
fn what_ends_with_its_authority_is_not_renewed_and_who_has_a_pair_keeps_it() {
    let mut lab = Lab::new();
    let lifetime = Duration::from_secs(10 * DAY);
    let options = AuthorityOptions { lifetime, ..AuthorityOptions::default() };
    let authority = Authority::create(&options).unwrap();
    lab.register = Register::create(&lab.directory.path().join("short"), authority).unwrap();
    let store = lab.open();
    let pair = lab.get(&store, "web1", 0);
    let end = lab.register.authority().certificate().not_after;
    assert_eq!(pair.renew_at_seconds.cast_signed(), end);
    assert_eq!(lab.get(&store, "web1", 9), pair);

    // What cannot be recorded concerns those that have none yet.
    fs::remove_dir_all(lab.directory.path().join("short")).unwrap();
    let wanted = ["web1", "web2"].map(wanted);
    let made = store.get_or_make(&lab.register, &wanted, lab.now);
    let [Ok(kept), Err(why)] = &made[..] else { panic!("{made:?}") };
    assert_eq!(kept, &pair);
    assert!(why.starts_with("cannot record the certificates of machines: "), "{why}");
}

#[test]
fn an_authority_that_has_ended_makes_nothing() {
    let mut lab = Lab::new();
    let start = Some(i64::try_from(lab.now).unwrap() - 7_200);
    let lifetime = Duration::from_secs(7_100);
    let options = AuthorityOptions { lifetime, start, ..AuthorityOptions::default() };
    let authority = Authority::create(&options).unwrap();
    lab.register = Register::create(&lab.directory.path().join("ended"), authority).unwrap();
    let made = lab.open().get_or_make(&lab.register, &[wanted("web1")], lab.now);
    let [Err(why)] = &made[..] else { panic!("{made:?}") };
    assert!(why.starts_with("the authority expired on "), "{why}");
}
