//! That a scan stays within what it is to cover, and says where there is more.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use model::filter::Filter;
use model::scope::Coverage;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Uid, setfsuid};

use super::*;

fn fill(at: &Path) {
    for directory in ["etc/local", "home/user", "var/log", "srv"] {
        fs::create_dir_all(at.join(directory)).unwrap();
    }
    for file in ["etc/motd", "etc/local/x", "home/user/y", "var/log/syslog", "srv/data"] {
        fs::write(at.join(file), file).unwrap();
    }
}

fn recorded(snapshot: &Snapshot) -> Vec<String> {
    tree(snapshot).nodes().map(|(path, _)| path.to_string()).collect()
}

#[tokio::test]
async fn kept_and_excluded_paths_are_left_out_and_their_directories_named() {
    let filter = Filter::new(["/home", "/var/log/.*"]).unwrap();
    let settings = ScanSettings { coverage: Coverage::Full(filter), ..ScanSettings::default() };
    let fixture = Fixture::with(settings, &["/etc/local$"], on_demand(), fill);
    let snapshot = fixture.rescan().await;
    let expected = ["/", "/etc", "/etc/motd", "/srv", "/srv/data", "/var", "/var/log"];
    assert_eq!(recorded(&snapshot), expected);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, paths(&["/", "/etc", "/var/log"]));
    fs::remove_file(fixture.at("var/log/syslog")).unwrap();
    let next = fixture.rescan().await;
    let report = next.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, paths(&["/", "/etc"]));
    assert_eq!(tree(&next).digest(), tree(&snapshot).digest());
    assert_eq!(next.revision, snapshot.revision + 1);
}

#[tokio::test]
async fn a_sparse_scan_looks_at_listed_paths_alone() {
    let listed = ["/", "/etc", "/etc/motd", "/etc/absent", "/srv", "/srv/data"];
    let coverage = Coverage::Paths(paths(&listed).into_iter().collect());
    let settings = ScanSettings { coverage, ..ScanSettings::default() };
    let fixture = Fixture::with(settings, &[], on_demand(), fill);
    let snapshot = fixture.rescan().await;
    assert_eq!(recorded(&snapshot), ["/", "/etc", "/etc/motd", "/srv", "/srv/data"]);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, paths(&["/", "/etc"]));
}

#[tokio::test]
async fn hard_links_inside_are_links_and_outside_are_named() {
    let outside = TempDir::new().unwrap();
    let filter = Filter::new(["/kept"]).unwrap();
    let settings = ScanSettings { coverage: Coverage::Full(filter), ..ScanSettings::default() };
    let fixture = Fixture::with(settings, &[], on_demand(), |at| {
        fs::create_dir_all(at.join("kept")).unwrap();
        fs::create_dir_all(at.join(".subd/undo")).unwrap();
        for name in ["inside", "outside", "with-kept", "with-own"] {
            fs::write(at.join(name), name).unwrap();
        }
        fs::hard_link(at.join("inside"), at.join("a")).unwrap();
        fs::hard_link(at.join("inside"), at.join("z")).unwrap();
        fs::hard_link(at.join("outside"), outside.path().join("x")).unwrap();
        fs::hard_link(at.join("outside"), at.join("second")).unwrap();
        fs::hard_link(at.join("with-kept"), at.join("kept/x")).unwrap();
        fs::hard_link(at.join("with-own"), at.join(".subd/undo/x")).unwrap();
    });
    let snapshot = fixture.rescan().await;
    let link = |path: &str| match tree(&snapshot).get(&path.parse().unwrap()) {
        Some(model::tree::Child::Leaf(Leaf::HardLink(carrier))) => Some(carrier.to_string()),
        _ => None,
    };
    assert_eq!(link("/a"), None);
    assert_eq!(link("/inside").as_deref(), Some("/a"));
    assert_eq!(link("/z").as_deref(), Some("/a"));
    assert_eq!(link("/outside"), None);
    assert_eq!(link("/second").as_deref(), Some("/outside"));
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.externally_linked, paths(&["/outside", "/with-kept", "/with-own"]));

    fs::remove_file(outside.path().join("x")).unwrap();
    fs::remove_file(fixture.at("a")).unwrap();
    let snapshot = fixture.rescan().await;
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.externally_linked, paths(&["/with-kept", "/with-own"]));
    let carrier = tree(&snapshot).get(&"/inside".parse().unwrap());
    assert!(matches!(carrier, Some(model::tree::Child::Leaf(Leaf::File(_)))));
}

#[test]
fn what_lies_under_mounts_is_scanned_and_what_is_mounted_is_not() {
    let directory = TempDir::new().unwrap();
    let at = directory.path();
    for below in ["tmpfs", "same", "source/d"] {
        fs::create_dir_all(at.join(below)).unwrap();
    }
    for file in ["file", "over", "source/x", "tmpfs/under"] {
        fs::write(at.join(file), file).unwrap();
    }
    // A mount namespace of this thread, and of those that it starts.
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).unwrap();
    mount(Some("tmpfs"), &at.join("tmpfs"), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    let bind = |from: &str, to: &str| {
        mount(Some(&at.join(from)), &at.join(to), none, MsFlags::MS_BIND, none).unwrap();
    };
    bind("source", "same");
    bind("source/x", "over");

    let scan = |root: Root| {
        let scanner = start_on(Arc::new(root), ScanSettings::default(), &[], on_demand());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let snapshot = runtime.block_on(scanner.rescan_now()).unwrap();
        scanner.stop();
        assert_eq!(snapshot.report.as_ref().unwrap().unreadable, []);
        snapshot
    };
    let snapshot = scan(Root::open(at).unwrap());
    let sources = ["/source", "/source/d", "/source/x"];
    let mut expected = vec!["/", "/file", "/over", "/same"];
    expected.extend(sources.iter().chain(&["/tmpfs", "/tmpfs/under"]));
    assert_eq!(recorded(&snapshot), expected);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, []);
    let used = ["/over", "/same", "/tmpfs"];
    let used = used.map(|path| (path.parse().unwrap(), model::plan::Occupant::MountPoint));
    assert_eq!(report.occupied, used);
    // Where it may not look under them it leaves mount points alone.
    let snapshot = scan(Root::open_as_seen(at).unwrap());
    assert_eq!(recorded(&snapshot), ["/", "/file", "/source", "/source/d", "/source/x"]);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!((&report.kept_directories, &report.occupied), (&paths(&["/"]), &Vec::new()));
}

#[test]
fn what_cannot_be_read_is_reported_and_kept() {
    let directory = TempDir::new().unwrap();
    let at = directory.path();
    fs::set_permissions(at, Permissions::from_mode(0o755)).unwrap();
    fs::create_dir_all(at.join("a/closed")).unwrap();
    for file in ["a/open", "a/secret", "z"] {
        fs::write(at.join(file), file).unwrap();
    }
    fs::set_permissions(at.join("a/closed"), Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(at.join("a/secret"), Permissions::from_mode(0o600)).unwrap();
    // The scanner's thread takes over the powers of this one.
    setfsuid(Uid::from_raw(65_534));
    let scanner = start(at, ScanSettings::default(), &[], on_demand());
    setfsuid(Uid::from_raw(0));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let snapshot = runtime.block_on(scanner.rescan_now()).unwrap();
    assert_eq!(recorded(&snapshot), ["/", "/a", "/a/open", "/z"]);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, paths(&["/a"]));
    let denied = |path: &str| (path.parse().unwrap(), "Permission denied".to_owned());
    assert_eq!(report.unreadable, [denied("/a/closed"), denied("/a/secret")]);

    fs::set_permissions(at.join("a/secret"), Permissions::from_mode(0o644)).unwrap();
    let snapshot = runtime.block_on(scanner.rescan_now()).unwrap();
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.unreadable, [denied("/a/closed")]);
}
