//! What is written where, with which mode, and what is left alone.

use std::collections::BTreeMap;

use super::super::authority::{Authority, AuthorityOptions, Request};
use super::*;

fn authority() -> Authority {
    Authority::create(&AuthorityOptions::default()).unwrap()
}

fn issue(authority: &Authority, name: &str) -> Issued {
    authority.issue(&Request { name: name.into(), ..Request::default() }).unwrap()
}

/// Returns the files in a directory, hidden ones too, with mode and content.
fn files(directory: &Path) -> BTreeMap<String, (u32, String)> {
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    let row = |entry: std::fs::DirEntry| {
        let mode = entry.metadata().unwrap().permissions().mode() & 0o7777;
        let text = std::fs::read_to_string(entry.path()).unwrap();
        (entry.file_name().into_string().unwrap(), (mode, text))
    };
    entries.map(row).collect()
}

fn of_issued(authority: &Authority, issued: &Issued) -> BTreeMap<String, (u32, String)> {
    BTreeMap::from([
        ("ca.pem".to_owned(), (0o644, authority.ca_pem().to_owned())),
        ("cert.pem".to_owned(), (0o644, issued.certificate_pem.clone())),
        ("key.pem".to_owned(), (0o600, issued.key_pem.clone())),
    ])
}

#[test]
fn a_new_directory_has_all_and_only_its_owner_reads_the_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a/tls");
    // What a run that was killed has left.
    std::fs::create_dir_all(directory.path().join("a/.tls.new/x")).unwrap();
    let (authority, other) = (authority(), authority());
    let issued = issue(&authority, "web1");
    issued.write(&path, authority.ca_pem(), Replace::Own).unwrap();
    assert_eq!(files(&path), of_issued(&authority, &issued));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
    assert_eq!(std::fs::read_dir(directory.path().join("a")).unwrap().count(), 1);
    assert!(
        super::super::pem::key_belongs(
            &path.join("key.pem"),
            &certificates_of(&path.join("cert.pem")).unwrap()[0]
        )
        .unwrap()
    );
    assert!(super::super::pem::is_signed_by(
        &certificates_of(&path.join("cert.pem")).unwrap()[0],
        &certificates_of(&path.join("ca.pem")).unwrap()[0],
    ));
    // The same name, another authority.
    std::fs::write(directory.path().join("other"), other.ca_pem()).unwrap();
    assert!(!super::super::pem::is_signed_by(
        &certificates_of(&path.join("cert.pem")).unwrap()[0],
        &certificates_of(&directory.path().join("other")).unwrap()[0],
    ));
}

#[test]
fn the_same_holder_is_renewed_and_others_are_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let authority = authority();
    let first = issue(&authority, "web1");
    first.write(path, authority.ca_pem(), Replace::Own).unwrap();
    // An operator has given the key to a group, trusts others too, and has a list of zones.
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path.join("key.pem"), mode(0o644)).unwrap();
    let trusted = self::authority().ca_pem().to_owned() + authority.ca_pem();
    std::fs::write(path.join("ca.pem"), &trusted).unwrap();
    std::fs::write(path.join("zones.toml"), "").unwrap();
    // What a run that was killed has left, and a trap.
    std::os::unix::fs::symlink("/etc/passwd", path.join(".key.pem.new")).unwrap();
    let second = issue(&authority, "web1");
    second.write(path, authority.ca_pem(), Replace::Own).unwrap();
    let mut want = of_issued(&authority, &second);
    want.insert("ca.pem".to_owned(), (0o644, trusted));
    want.insert("key.pem".to_owned(), (0o640, second.key_pem));
    want.insert("zones.toml".to_owned(), (0o644, String::new()));
    assert_eq!(files(path), want);

    let refused = |issued: &Issued, authority: &Authority| {
        let error = issued.write(path, authority.ca_pem(), Replace::Own).unwrap_err().to_string();
        assert_eq!(files(path), want);
        error.replace(&path.display().to_string(), "DIR")
    };
    let other = self::authority();
    assert_eq!(
        refused(&issue(&authority, "web2"), &authority),
        "DIR has the certificate of web1, not of web2"
    );
    assert_eq!(
        refused(&issue(&other, "web1"), &other),
        "DIR/ca.pem does not have the authority that issues this certificate"
    );
    let third = issue(&other, "web2");
    third.write(path, other.ca_pem(), Replace::Any).unwrap();
    let mut want = of_issued(&other, &third);
    want.get_mut("key.pem").unwrap().0 = 0o640;
    want.insert("zones.toml".to_owned(), (0o644, String::new()));
    assert_eq!(files(path), want);
    std::fs::remove_file(path.join("cert.pem")).unwrap();
    let error = third.write(path, other.ca_pem(), Replace::Own).unwrap_err().to_string();
    assert_eq!(
        error.replace(&path.display().to_string(), "DIR"),
        "DIR/key.pem exists without a certificate that names its holder"
    );
}

#[test]
fn a_renewal_for_the_same_key_replaces_one_file() {
    use std::os::unix::fs::MetadataExt as _;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let authority = authority();
    let first = issue(&authority, "web1");
    first.write(path, authority.ca_pem(), Replace::Own).unwrap();
    let inodes = || {
        ["ca.pem", "cert.pem", "key.pem"]
            .map(|name| std::fs::metadata(path.join(name)).unwrap().ino())
    };
    let before = inodes();
    let request = Request { name: "web1".into(), ..Request::default() };
    let second = authority.issue_for_key(&request, &first.key_pem).unwrap();
    second.write(path, authority.ca_pem(), Replace::Own).unwrap();
    let after = inodes();
    assert_eq!((after[0], after[2]), (before[0], before[2]));
    assert_ne!(after[1], before[1]);
}

#[test]
fn lines_are_added_behind_the_last_whole_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lines");
    append(&path, "one\n", 0o600).unwrap();
    append(&path, "two\n", 0o600).unwrap();
    assert_eq!(files(directory.path())["lines"], (0o600, "one\ntwo\n".to_owned()));
    std::fs::write(&path, "one\ntw").unwrap();
    append(&path, "three\n", 0o600).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\nthree\n");
    std::fs::write(&path, "on").unwrap();
    append(&path, "two\n", 0o600).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
}

#[test]
fn a_machine_does_not_replace_a_user_of_its_name() {
    use IdentityKind::{Machine, Unstated, User};
    let authority = authority();
    let of = |kind| {
        let request = Request { name: "alice".into(), kind, ..Request::default() };
        authority.issue(&request).unwrap()
    };
    #[rustfmt::skip]
    let table = [
        (User,     User,     None),
        (Unstated, User,     None),
        (Machine,  Unstated, None),
        (User,     Machine,  Some("has the certificate of alice, not of machine alice")),
        (Machine,  User,     Some("has the certificate of machine alice, not of alice")),
    ];
    for (old, new, error) in table {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tls");
        of(old).write(&path, authority.ca_pem(), Replace::Own).unwrap();
        let before = files(&path);
        let new = of(new);
        let got =
            new.write(&path, authority.ca_pem(), Replace::Own).map_err(|error| error.to_string());
        match error {
            None => assert_eq!(files(&path), of_issued(&authority, &new)),
            Some(error) => {
                assert_eq!(got, Err(format!("{} {error}", path.display())));
                assert_eq!(files(&path), before);
                new.write(&path, authority.ca_pem(), Replace::Any).unwrap();
                assert_eq!(files(&path), of_issued(&authority, &new));
            }
        }
    }
}
