//! Damaged databases are found, and are restored or salvaged.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use api::dominator::Brake;
use database::DatabaseError;
use model::mdb::Machine;
use tempfile::TempDir;

use super::*;
use crate::core::orders::Order;
use crate::storage::{SharedMachines, with_order};

const MACHINES: usize = 300;

fn machines() -> SharedMachines {
    let text: Vec<String> = (0..MACHINES)
        .map(|number| format!(r#"{{"Hostname": "h{number}", "RequiredImage": "web/{number}"}}"#))
        .collect();
    let machines = model::mdb::parse(&format!("[{}]", text.join(","))).unwrap();
    machines.into_iter().map(|(name, machine): (_, Machine)| (name, Arc::new(machine))).collect()
}

fn identities() -> Vec<(Arc<str>, Option<KnownIdentity>)> {
    let known = |number: usize| KnownIdentity {
        machine_id: format!("id{number}"),
        is_own: true,
        trust: None,
    };
    (0..MACHINES).map(|number| (format!("h{number}").into(), Some(known(number)))).collect()
}

/// A state directory with a brake, machines, identities and an order.
fn state() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    state.machines.set(Some(machines())).unwrap();
    state.save_identities(&identities(), None).unwrap();
    let brake = Brake { reason: "storm".into(), who: "ops".into(), since: Time::default() };
    let order = Order::new("disable-updates", "ops").why("storm");
    let brake = Some(Arc::new(brake));
    state.brake.set_through(brake, with_order::<StorageError>(&order)).unwrap();
    directory
}

fn expected() -> DatabaseSummary {
    let brake = Some("storm".to_owned());
    DatabaseSummary { machines: MACHINES, identities: MACHINES, brake, copied: None }
}

fn names(directory: &Path) -> Vec<String> {
    let name =
        |entry: io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = std::fs::read_dir(directory).unwrap().map(name).collect();
    names.sort();
    names
}

/// Changes a byte of `file` at `offset`.
fn flip(file: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x11], offset).unwrap();
}

/// The offsets of the pages of `file` that are in use, about.
fn used_pages(file: &Path) -> Vec<u64> {
    let bytes = std::fs::read(file).unwrap();
    let is_used = |page: &[u8]| page.iter().any(|byte| *byte != 0);
    let pages = bytes.chunks(4_096).enumerate().filter(|(_, page)| is_used(page));
    pages.map(|(number, _)| number as u64 * 4_096).collect()
}

#[test]
fn a_byte_that_changed_is_found_at_the_start_or_has_no_effect() {
    let good = state();
    let file = good.path().join(FILE);
    let (mut damaged, mut harmless) = (0, 0);
    for page in used_pages(&file) {
        for offset in [1, 700, 2_048, 4_000] {
            let directory = tempfile::tempdir().unwrap();
            let copy = directory.path().join(FILE);
            std::fs::copy(&file, &copy).unwrap();
            flip(&copy, page + offset);
            // Without the check nothing panics.
            if let Ok(database) = OpenDatabase::open(&copy) {
                let _any = Storage::prepare(database, false).map(|state| state.identities());
            }
            match Storage::open(directory.path()) {
                Ok(state) => {
                    harmless += 1;
                    assert_eq!(state.machines.get().as_ref().as_ref(), Some(&machines()));
                    assert_eq!(state.identities().unwrap().len(), MACHINES, "{page} {offset}");
                    assert_eq!(state.brake.get().as_ref().as_ref().unwrap().reason, "storm");
                }
                Err(
                    StorageError::Damaged { .. }
                    | StorageError::Database(DatabaseError::Open { .. }),
                ) => damaged += 1,
                Err(error) => panic!("{page} {offset}: {error:?}"),
            }
        }
    }
    assert!(damaged > 40, "{damaged} of {}", damaged + harmless);
}

#[test]
fn the_error_of_a_damaged_database_says_what_to_do() {
    let directory = state();
    let path = directory.path();
    let text = StorageError::Damaged { path: path.join(FILE), what: "a bad page".into() };
    let (file, state) = (path.join(FILE), path.display().to_string());
    let expected = format!(
        "the database {} is damaged: a bad page. Stop the dominator and restore a backup: domtool \
         database restore BACKUP --state {state}; without a backup, save what can be read: domtool \
         database salvage --state {state}",
        file.display()
    );
    assert_eq!(text.to_string(), expected);
}

#[test]
fn a_database_that_was_found_damaged_is_neither_read_nor_written() {
    let directory = state();
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(state.damage(), None);
    let read = state.database.with("read", |_| -> Result<(), redb::Error> {
        panic!("a page makes no sense");
    });
    let is_damaged = |error: &StorageError| match error {
        StorageError::Damaged { what, .. } => what == "a page makes no sense",
        _ => false,
    };
    assert!(is_damaged(&read.unwrap_err()));
    assert_eq!(state.damage(), Some("a page makes no sense"));
    assert!(is_damaged(&state.record(&Order::new("retry", "ann")).unwrap_err()));
    assert!(is_damaged(&state.identities().unwrap_err()));
    // What is in memory stays.
    assert_eq!(state.brake.get().as_ref().as_ref().unwrap().reason, "storm");
}

#[test]
fn a_backup_is_checked_before_it_takes_the_place_of_the_database() {
    let directory = state();
    let path = directory.path();
    assert_eq!(check(path).unwrap(), expected());
    // A copy of the file is no backup, and yet the dominator must not go on from it.
    let backup = path.join("backup");
    std::fs::copy(path.join(FILE), &backup).unwrap();
    let before = std::fs::read(&backup).unwrap();

    let other = tempfile::tempdir().unwrap();
    assert_eq!(restore(&backup, other.path()).unwrap(), expected());
    assert_eq!(names(other.path()), [FILE]);
    let state = Storage::open(other.path()).unwrap();
    let brake = state.brake.get().as_ref().as_ref().unwrap().reason.clone();
    assert!(brake.starts_with("the dominator was started on the backup of 2"), "{brake}");
    assert!(brake.ends_with("they were disabled because: storm"), "{brake}");
    assert_eq!(state.machines.get().as_ref().as_ref(), Some(&machines()));

    // A running dominator is not disturbed.
    let running = restore(&backup, other.path()).unwrap_err();
    assert!(matches!(running, StorageError::InUse { .. }), "{running}");
    assert!(matches!(check(other.path()).unwrap_err(), StorageError::InUse { .. }));
    drop(state);
    assert_eq!(restore(&backup, other.path()).unwrap(), expected());
    assert_eq!(names(other.path()), [FILE, REPLACED]);
    assert_eq!(std::fs::read(&backup).unwrap(), before, "a backup is not changed");

    // A damaged or cut backup changes nothing.
    let former = std::fs::read(other.path().join(FILE)).unwrap();
    let bytes = std::fs::read(&backup).unwrap();
    for cut in [0, 100, bytes.len() / 2] {
        let damaged = other.path().join("damaged");
        std::fs::File::create(&damaged).unwrap().write_all(&bytes[..cut]).unwrap();
        let result = restore(&damaged, other.path());
        assert!(result.is_err(), "{cut}: {result:?}");
        std::fs::remove_file(&damaged).unwrap();
        assert_eq!(names(other.path()), [FILE, REPLACED]);
        assert_eq!(std::fs::read(other.path().join(FILE)).unwrap(), former);
    }
    assert!(matches!(
        restore(&path.join("none"), other.path()),
        Err(StorageError::File { verb: "copy", .. })
    ));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(check(empty.path()).unwrap_err(), StorageError::Missing { .. }));
    assert_eq!(names(empty.path()), [""; 0]);
}

#[test]
fn what_can_be_read_of_a_damaged_database_is_saved() {
    let good = state();
    let file = good.path().join(FILE);
    let (mut salvaged, mut whole) = (0, 0);
    for page in used_pages(&file).into_iter().skip(1) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::copy(&file, path.join(FILE)).unwrap();
        flip(&path.join(FILE), page + 1);
        let damaged = std::fs::read(path.join(FILE)).unwrap();
        let Ok(saved) = salvage(path) else {
            assert_eq!(names(path), [FILE]);
            assert_eq!(std::fs::read(path.join(FILE)).unwrap(), damaged);
            continue;
        };
        salvaged += 1;
        assert_eq!(names(path), [FILE, REPLACED]);
        assert_eq!(std::fs::read(path.join(REPLACED)).unwrap(), damaged);
        assert_eq!(check(path).unwrap(), saved.database);
        let state = Storage::open(path).unwrap();
        let brake = state.brake.get().as_ref().as_ref().unwrap().reason.clone();
        assert!(brake.starts_with("the database was damaged, and has only what could"), "{brake}");
        if saved.lost == ["the history of updates and statuses"] {
            whole += 1;
            assert_eq!(
                saved,
                Salvaged { database: expected(), orders: 1, lost: saved.lost.clone() }
            );
        }
    }
    assert!(salvaged > 3 && whole > 0, "{salvaged} salvaged, {whole} of them whole");
}
