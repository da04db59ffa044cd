//! Authorities in directories, used by several at once.

use std::os::unix::fs::PermissionsExt as _;

use super::super::authority::AuthorityOptions;
use super::*;

fn authority() -> Authority {
    Authority::create(&AuthorityOptions::default()).unwrap()
}

fn request(name: &str) -> Request {
    Request { name: name.into(), ..Request::default() }
}

fn der_of(issued: &Issued) -> Vec<u8> {
    use rustls::pki_types::pem::PemObject as _;
    let pem = issued.certificate_pem.as_bytes();
    rustls::pki_types::CertificateDer::from_pem_slice(pem).unwrap().to_vec()
}

#[test]
fn an_authority_is_made_once_and_only_for_its_owner() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ca");
    Register::create(&path, authority()).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&path.join("ca.key"))), (0o700, 0o600));
    let names = |path: &Path| {
        let entries = std::fs::read_dir(path).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&path), ["ca.key", "ca.pem"]);
    let again = Register::create(&path, authority()).unwrap_err().to_string();
    let want =
        format!("{} exists: an authority is never overwritten", path.join("ca.key").display());
    assert_eq!(again, want);
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert_eq!(
        Register::open(&empty).unwrap_err().to_string(),
        format!("{} is not the directory of an authority: it has no ca.key", empty.display())
    );
    let root = Register::open(&path).unwrap();
    let called = |name: &str| {
        let options = AuthorityOptions { name: name.into(), ..AuthorityOptions::default() };
        root.lock().unwrap().create_intermediate(&options)
    };
    let below = called("Zone");
    let twice = called("Zone").unwrap_err().to_string();
    let want = "the authority has made an intermediate called Zone before: give another --name";
    assert_eq!(twice, want);
    assert_eq!(called("Other").unwrap().certificate().common_name, "Other");
    let made = Register::create(&empty, below.unwrap()).unwrap();
    assert_eq!(names(&empty), ["ca.key", "ca.pem", "chain.pem"]);
    let opened = Register::open(&empty).unwrap();
    assert_eq!(opened.authority().certificate(), made.authority().certificate());
    assert_eq!(opened.authority().chain_pem(), made.authority().chain_pem());
    assert_eq!(opened.authority().ca_pem(), root.authority().ca_pem());
}

#[test]
fn what_was_killed_while_it_was_put_in_place_is_made_again() {
    let root = authority();
    let below = || {
        let options = AuthorityOptions { name: "Zone".into(), ..AuthorityOptions::default() };
        root.create_intermediate(&options).unwrap()
    };
    // Where the second file cannot be put in place, the key is not there either.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    std::fs::create_dir(path.join("ca.pem")).unwrap();
    let error = Register::create(path, below()).unwrap_err();
    assert!(matches!(error, RegisterError::Files(_) | RegisterError::Io(_)), "{error:?}");
    assert_eq!(["chain.pem", "ca.key"].map(|name| path.join(name).exists()), [true, false]);
    std::fs::remove_dir(path.join("ca.pem")).unwrap();
    // What a kill leaves, after each of the files.
    std::fs::write(path.join(".ca.key.new"), "cut").unwrap();
    for put in [&["chain.pem"][..], &["chain.pem", "ca.pem"]] {
        for again in [below(), authority()] {
            for name in put {
                std::fs::write(path.join(name), root.ca_pem()).unwrap();
            }
            let error = Register::open(path).unwrap_err();
            assert!(matches!(error, RegisterError::None { .. }), "{error:?}");
            let made = Register::create(path, again).unwrap();
            let opened = Register::open(path).unwrap();
            assert_eq!(opened.authority().certificate(), made.authority().certificate());
            assert!(!path.join(".ca.key.new").exists());
            std::fs::remove_file(path.join("ca.key")).unwrap();
        }
    }
    // One whose key is kept elsewhere, and the directory of a daemon, are not overwritten.
    let table = [
        ("issued.jsonl", "exists: an authority is never overwritten"),
        ("key.pem", "exists: make the authority in a directory of its own"),
    ];
    for (name, why) in table {
        let file = path.join(name);
        std::fs::write(&file, "").unwrap();
        let refused = Register::create(path, authority()).unwrap_err().to_string();
        assert_eq!(refused, format!("{} {why}", file.display()));
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn what_several_issue_and_revoke_at_once_is_all_on_record() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ca");
    Register::create(&path, authority()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let register = Register::open(path).unwrap();
                for index in 0..5 {
                    let name = format!("web{thread}-{index}");
                    let held = register.lock().unwrap();
                    let issued = held.issue(&request(&name), None).unwrap();
                    drop(held);
                    let revoked = [RevocationTarget::from_certificate(&issued.certificate)];
                    let done = register.lock().unwrap().revoke(&revoked, Reason::Superseded);
                    assert_eq!(done.unwrap().new.len(), 1);
                }
            });
        }
    });
    let register = Register::open(&path).unwrap();
    let held = register.lock().unwrap();
    let issued = held.issued().unwrap();
    let mut names: Vec<&str> = issued.iter().map(|record| record.name.as_str()).collect();
    names.sort_unstable();
    let want: Vec<String> =
        (0..4).flat_map(|thread| (0..5).map(move |index| format!("web{thread}-{index}"))).collect();
    assert_eq!(names, want);
    let serials = |mut serials: Vec<String>| {
        serials.sort();
        serials
    };
    let revoked = held.revoked().unwrap();
    assert_eq!(
        serials(revoked.into_iter().map(|one| one.serial).collect()),
        serials(issued.into_iter().map(|one| one.serial).collect()),
    );
}

#[test]
fn each_list_has_a_higher_number_and_all_that_is_revoked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ca");
    let register = Register::create(&path, authority()).unwrap();
    let held = register.lock().unwrap();
    let mut ders = Vec::new();
    // Which of all that were issued are in the list.
    let listed = |ders: &[Vec<u8>]| -> Vec<bool> {
        let lists = revocation_lists_of(&path.join("crl.pem")).unwrap();
        ders.iter().map(|der| lists[0].lists(der)).collect()
    };
    let good = held.issue(&request("good"), None).unwrap();
    ders.push(der_of(&good));
    let want = |ders: &[Vec<u8>]| -> Vec<bool> { (0..ders.len()).map(|at| at > 0).collect() };
    let mut serials = Vec::new();
    let mut number = 0;
    for name in ["one", "two", "three"] {
        let issued = held.issue(&request(name), None).unwrap();
        ders.push(der_of(&issued));
        serials.push(issued.certificate.serial.clone());
        let meant = RevocationTarget::from_certificate(&issued.certificate);
        let done = held.revoke(&[meant.clone(), meant], Reason::KeyCompromise).unwrap();
        assert_eq!((done.new.len(), done.count), (1, serials.len()));
        assert_eq!(listed(&ders), want(&ders));
        let next = list_number(&path.join("crl.pem")).unwrap();
        assert!(next > number, "{next} after {number}");
        number = next;
    }
    // Once more changes nothing but the list, also when that was lost or damaged.
    for damage in [Some("junk"), None] {
        match damage {
            Some(junk) => std::fs::write(path.join("crl.pem"), junk).unwrap(),
            None => std::fs::remove_file(path.join("crl.pem")).unwrap(),
        }
        let meant = |serial: &String| RevocationTarget {
            serial: serial.clone(),
            name: "x".into(),
            key: None,
        };
        let all: Vec<RevocationTarget> = serials.iter().map(meant).collect();
        let done = held.revoke(&all, Reason::Superseded).unwrap();
        let nothing = Revoked { new: Vec::new(), count: 3, path: path.join("crl.pem") };
        assert_eq!(done, nothing);
        assert_eq!(listed(&ders), want(&ders));
    }
    // A line that was cut off is not there; one that is no line is an error.
    let revoked = path.join("revoked.jsonl");
    let text = std::fs::read_to_string(&revoked).unwrap();
    std::fs::write(&revoked, &text[..text.len() - 2]).unwrap();
    assert_eq!(held.revoked().unwrap().len(), 2);
    std::fs::write(&revoked, "junk\n").unwrap();
    let error = model::display::error_chain(&held.revoke(&[], Reason::Superseded).unwrap_err());
    let want = format!("cannot read {}: invalid line 1: ", revoked.display());
    assert!(error.starts_with(&want), "{error}");
}
