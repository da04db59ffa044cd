//! That kept entries are counted by their owners beside the scanner, and within its limits.

use std::fs;

use api::fault::FaultCode;
use api::subd::{CountOwnersReply, CountOwnersRequest, OWNERS_MAX};
use model::filter::Filter;
use model::scope::Coverage;
use nix::unistd::chown;

use super::*;

/// Long enough for any count.
const LONG_MS: u32 = 60_000;

/// Asks for the users 7 and 8 and the group 9 of what is kept below /var.
fn below_var(time_ms: u32) -> CountOwnersRequest {
    let coverage = Coverage::Full(Filter::new(["/var/.*"]).unwrap());
    let scan = ScanSettings { coverage, ..ScanSettings::default() };
    CountOwnersRequest { scan, users: vec![7, 8], groups: vec![9], time_ms }
}

fn fill(at: &Path) {
    for directory in ["etc", "var/mail"] {
        fs::create_dir_all(at.join(directory)).unwrap();
        for name in ["a", "b"] {
            let file = at.join(directory).join(name);
            fs::write(&file, name).unwrap();
            chown(&file, Some(8.into()), Some(9.into())).unwrap();
        }
    }
    chown(&at.join("var/mail"), Some(7.into()), None).unwrap();
}

fn root(fixture: &Fixture) -> Arc<Root> {
    Arc::new(Root::open(fixture.directory.path()).unwrap())
}

#[tokio::test]
async fn kept_entries_are_counted_by_settings_that_are_not_in_force_until_the_time_is_over() {
    let fixture = Fixture::new(fill);
    let before = fixture.settle().await;
    let root = root(&fixture);
    let count = async |request| fixture.scanner.count_owners(Arc::clone(&root), request).await;
    let all =
        CountOwnersReply { users: vec![1, 2], groups: vec![2], looked_at: 7, unfinished: None };
    assert_eq!(count(below_var(LONG_MS)).await.unwrap(), all);
    let late = count(below_var(0)).await.unwrap();
    let why = "it would take too long within the limits of the machine".to_owned();
    assert_eq!((late.users, late.unfinished), (vec![0, 0], Some(why)));
    let many = CountOwnersRequest { users: vec![0; OWNERS_MAX], ..below_var(LONG_MS) };
    assert_eq!(count(many).await.unwrap_err().code, FaultCode::TooLarge);

    // An update comes first.
    let pause = fixture.scanner.pause().await.unwrap();
    let early = count(below_var(LONG_MS)).await.unwrap();
    let why = "the machine stopped to scan, as for an update".to_owned();
    assert_eq!((early.users, early.unfinished), (vec![0, 0], Some(why)));
    drop(pause);
    assert_eq!(count(below_var(LONG_MS)).await.unwrap(), all);
    assert!(Arc::ptr_eq(&fixture.rescan().await, &before));
}

#[tokio::test]
async fn one_count_at_a_time_waits_for_its_share_and_ends_with_its_caller() {
    let directory = TempDir::new().unwrap();
    fill(directory.path());
    let root = Arc::new(Root::open(directory.path()).unwrap());
    let told = Limits { cpu_percent: Some(1), ..Limits::default() };
    let budgets = Arc::new(Budgets::new(Ceilings::NONE, told, Speeds::default()));
    // An hour of work at this share.
    let _rest = budgets.cpu.charge(36_000_000);
    let none = Patterns::new::<&str>([]).unwrap();
    let settings = ScanSettings::default();
    let scanner = Scanner::start(Arc::clone(&root), none, settings, on_demand(), budgets).unwrap();
    {
        let mut first = Box::pin(scanner.count_owners(Arc::clone(&root), below_var(LONG_MS)));
        let limit = Duration::from_millis(300);
        assert!(tokio::time::timeout(limit, &mut first).await.is_err(), "it was to wait");
        let second = scanner.count_owners(Arc::clone(&root), below_var(LONG_MS)).await;
        assert_eq!(second.unwrap_err().code, FaultCode::Busy);
    }
    let start = Instant::now();
    while scanner.count_owners(Arc::clone(&root), below_var(0)).await.is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "the first one does not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
