//! `fs2objectcache` as a process, on real trees.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Output};

use api::subd::CacheReport;
use model::object::{Algorithm, ObjectId};

use crate::fixture::{Edit, Source, Sub};

fn tool(root: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(testing::program("fs2objectcache"));
    command.arg("--root").arg(root).args(["--format", "json"]).args(flags);
    command.stdin(std::process::Stdio::null());
    command
}

/// The exit code, what was printed as JSON, and what was said.
fn run(root: &Path, flags: &[&str]) -> (i32, serde_json::Value, String) {
    let Output { status, stdout, stderr } = tool(root, flags).output().unwrap();
    let value = serde_json::from_slice(&stdout).unwrap_or_default();
    (status.code().unwrap(), value, String::from_utf8(stderr).unwrap())
}

/// What the objects in `directory` hold, by name; each is checked to be what its name says, and to
/// belong to root alone.
fn objects(directory: &Path) -> BTreeMap<ObjectId, Vec<u8>> {
    let mut objects = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let id: ObjectId = entry.file_name().to_str().unwrap().parse().unwrap();
        let content = fs::read(entry.path()).unwrap();
        assert_eq!(id.algorithm().digest(&content), id);
        let metadata = entry.metadata().unwrap();
        let standard = (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777, metadata.nlink());
        assert_eq!(standard, (0, 0, 0o600, 1), "{id}");
        objects.insert(id, content);
    }
    objects
}

/// The paths of all that is no directory, relative to `root`, `.subd` left out.
fn left(root: &Path) -> Vec<String> {
    let mut paths = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let relative = path.strip_prefix(root).unwrap();
            if relative == Path::new(".subd") {
                continue;
            }
            if path.symlink_metadata().unwrap().is_dir() {
                directories.push(path);
            } else {
                paths.push(relative.to_str().unwrap().to_owned());
            }
        }
    }
    paths.sort();
    paths
}

fn contents(texts: &[&str]) -> BTreeMap<ObjectId, Vec<u8>> {
    let object = |text: &&str| (Algorithm::Blake3.digest(text.as_bytes()), text.as_bytes().into());
    texts.iter().map(object).collect()
}

/// A tree with files of every kind that matters here.
fn fill(root: &Path) {
    fs::create_dir_all(root.join("d/deep")).unwrap();
    for (name, content) in [("a", "one"), ("d/b", "two"), ("d/deep/c", "one"), ("empty", "")] {
        fs::write(root.join(name), content).unwrap();
    }
    fs::write(root.join("su"), "set-id").unwrap();
    fs::set_permissions(root.join("su"), fs::Permissions::from_mode(0o4755)).unwrap();
    xattr::set(root.join("su"), "user.origin", b"x").unwrap();
    fs::write(root.join("linked"), "linked").unwrap();
    fs::hard_link(root.join("linked"), root.join("d/linked")).unwrap();
    fs::write(root.join("theirs"), "theirs").unwrap();
    chown(root.join("theirs"), Some(1_000), Some(1_000)).unwrap();
    symlink("a", root.join("link")).unwrap();
    nix::unistd::mkfifo(&root.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
}

const FILLED: [&str; 6] = ["one", "two", "", "set-id", "linked", "theirs"];

#[test]
fn every_file_becomes_an_object_of_root_alone() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path();
    fill(root);
    let (inode, copied) = (
        fs::metadata(root.join("d/b")).unwrap().ino(),
        fs::metadata(root.join("theirs")).unwrap().ino(),
    );
    let (code, sums, said) = run(root, &["--yes"]);
    assert_eq!(code, 0, "{said}");
    let expected = serde_json::json!({
        "moved": 5, "copied": 3, "duplicates": 2, "bytes": 33, "left": 0, "left_paths": [],
        "objects": 6,
    });
    assert_eq!(sums, expected);
    let cache = root.join(".subd/objects");
    assert_eq!(objects(&cache), contents(&FILLED));
    assert_eq!(left(root), ["fifo", "link"]);
    assert!(root.join("d/deep").is_dir());
    let of = |text: &str| cache.join(Algorithm::Blake3.digest(text.as_bytes()).to_string());
    assert_eq!(fs::metadata(of("two")).unwrap().ino(), inode);
    // Its owner may have kept a descriptor of the old inode.
    assert_ne!(fs::metadata(of("theirs")).unwrap().ino(), copied);
    assert_eq!(xattr::list(of("set-id")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(root.join(".subd/intake")).unwrap().count(), 0);
    let (code, sums, _) = run(root, &["--yes"]);
    assert_eq!((code, &sums["moved"], &sums["objects"]), (0, &0.into(), &6.into()));
}

#[test]
fn what_is_being_written_excluded_or_immutable_stays() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path();
    for name in ["log", "kept", "gone"] {
        fs::write(root.join(name), name).unwrap();
    }
    let _writer = fs::OpenOptions::new().append(true).open(root.join("log")).unwrap();
    let (code, sums, said) = run(root, &["--yes", "--exclude", "/kept"]);
    assert_eq!(code, 3, "{said}");
    assert_eq!(sums["left_paths"], serde_json::json!([["/log", "a process is writing it"]]));
    assert!(said.ends_with("left: /log: a process is writing it\n"), "{said}");
    assert_eq!(left(root), ["kept", "log"]);
    assert_eq!(objects(&root.join(".subd/objects")), contents(&["gone"]));
}

#[test]
fn what_is_another_on_each_machine_or_the_filter_keeps_stays() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("root");
    let files = ["etc/fstab", "etc/motd", "etc/ssh/ssh_host_rsa_key", "etc/subd/deep/x", "srv/a"];
    for path in files {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), path).unwrap();
    }
    let filter = place.path().join("filter");
    let flags = ["--yes", "--filter", filter.to_str().unwrap()];
    for text in [None, Some("# comment\n/etc/(fstab$\n")] {
        if let Some(text) = text {
            fs::write(&filter, text).unwrap();
        }
        let (code, _, said) = run(&root, &flags);
        assert!(code == 2 && said.contains("filter"), "{said}");
        assert!(text.is_none() || said.contains("line 2: "), "{said}");
    }
    fs::write(&filter, "# comment\n/srv/.*\n").unwrap();
    let (code, _, said) = run(&root, &flags);
    assert_eq!(code, 0, "{said}");
    assert_eq!(left(&root), [files[0], files[2], files[3], files[4]]);
    let (code, _, said) = run(&root, &[&flags[..], &["--take-own"]].concat());
    assert_eq!((code, left(&root)), (0, vec!["srv/a".to_owned()]), "{said}");
}

#[test]
fn it_asks_and_spares_the_running_system_and_the_root_of_a_running_subd() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path();
    fs::write(root.join("f"), "f").unwrap();
    let (code, _, said) = run(root, &[]);
    let what = format!("All regular files of {} are taken out of the tree", root.display());
    assert!(said.starts_with(&what), "{said}");
    let end = "error: not confirmed: nothing was done\nhint: --yes confirms without being asked\n";
    assert!(code == 2 && said.ends_with(end), "{said}");
    let slash = root.join("slash");
    symlink("/", &slash).unwrap();
    for path in ["/", slash.to_str().unwrap(), "/proc/self/root"] {
        let (code, _, said) = run(Path::new(path), &["--yes", "--exclude", "/"]);
        let refused = format!("error: `{path}` is the root of the running system");
        assert!(code == 2 && said.starts_with(&refused), "{said}");
    }
    let (code, _, said) = run(&root.join("absent"), &["--yes"]);
    assert!(code == 1 && said.starts_with("error: cannot read the status of `"), "{said}");
    assert!(!root.join(".subd").exists());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sub = runtime.block_on(Sub::start_on(root, &[]));
    let (code, _, said) = run(root, &["--yes"]);
    assert!(code == 1 && said.contains("another subd manages this root already"), "{said}");
    runtime.block_on(sub.stop());
    fs::write(root.join(".subd/journal/update"), "an update that was cut short").unwrap();
    let (code, _, said) = run(root, &["--yes"]);
    assert!(code == 1 && said.contains("was cut short, and has to be finished first"), "{said}");
    assert!(said.ends_with("hint: start subd on this tree, or subd --recover\n"), "{said}");
    assert_eq!(fs::read_to_string(root.join("f")).unwrap(), "f");
}

#[test]
fn a_cache_elsewhere_gets_copies_and_one_inside_the_tree_is_left_alone() {
    let (place, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let root = place.path();
    fill(root);
    let elsewhere = memory.path().join("objects");
    let flags = ["--yes", "--objects", elsewhere.to_str().unwrap()];
    let (code, sums, said) = run(root, &flags);
    assert_eq!((code, &sums["moved"], &sums["copied"]), (0, &0.into(), &8.into()), "{said}");
    assert_eq!(objects(&elsewhere), contents(&FILLED));
    assert_eq!(left(root), ["fifo", "link"]);
    fs::write(root.join("again"), "again").unwrap();
    let inside = root.join("my objects");
    let flags = ["--yes", "--digest", "sha512", "--objects", inside.to_str().unwrap()];
    for round in 0..2 {
        let (code, sums, said) = run(root, &flags);
        assert_eq!((code, &sums["objects"]), (0, &1.into()), "{round}: {said}");
        let id = Algorithm::Sha512.digest(b"again");
        assert_eq!(objects(&inside), BTreeMap::from([(id, b"again".to_vec())]));
    }
}

/// Every content of `root`, in the tree, on the way, or in the cache.
fn anywhere(root: &Path) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let read = |path: &Path| fs::read(path).unwrap();
    for path in left(root) {
        found.push(read(&root.join(path)));
    }
    for directory in [".subd/objects", ".subd/intake"] {
        if let Ok(entries) = fs::read_dir(root.join(directory)) {
            found.extend(entries.map(|entry| read(&entry.unwrap().path())));
        }
    }
    found
}

#[test]
fn killed_anywhere_it_loses_nothing_and_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path();
    let texts: Vec<String> = (0..3_000).map(|number| format!("content {number}")).collect();
    for (number, text) in texts.iter().enumerate() {
        let path = root.join(format!("f{number}"));
        fs::write(&path, text).unwrap();
        if number % 7 == 0 {
            chown(&path, Some(1_000), None).unwrap();
        }
    }
    for round in 0..6_u64 {
        let mut child = tool(root, &["--yes"]).stderr(std::process::Stdio::null()).spawn().unwrap();
        // Killed a moment later, wherever that is.
        std::thread::sleep(std::time::Duration::from_millis(20 + 15 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut missing: std::collections::BTreeSet<&[u8]> =
            texts.iter().map(|text| text.as_bytes()).collect();
        for content in anywhere(root) {
            missing.remove(content.as_slice());
        }
        assert_eq!(missing.len(), 0, "round {round}: {missing:?}");
    }
    let (code, sums, said) = run(root, &["--yes"]);
    assert_eq!((code, &sums["objects"]), (0, &3_000.into()), "{said}");
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_eq!(objects(&root.join(".subd/objects")), contents(&texts));
    assert_eq!(left(root), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_installation_fetches_only_the_difference() {
    let (place, source) = (tempfile::tempdir().unwrap(), Source::start().await);
    let root = place.path();
    for number in 0..200 {
        fs::write(root.join(format!("old-{number}")), format!("content {number}")).unwrap();
    }
    let (code, sums, said) = run(root, &["--yes"]);
    assert_eq!((code, &sums["objects"]), (0, &200.into()), "{said}");
    let sub = Sub::start_on(root, &[]).await;
    let (reply, empty) = sub.tree().await;
    let Some(CacheReport::Full(cached)) = reply.cache else { panic!("{reply:?}") };
    assert_eq!(cached.len(), 200);
    // The same contents under other names, and a few that are new.
    let mut edit = Edit::of(&empty, &source).directory("/usr", 0o755);
    for number in 0..205 {
        edit = edit.file(&format!("/usr/new-{number}"), &format!("content {number}"));
    }
    let want = edit.done();
    let (_, plan) = sub.plan(&want).await;
    let missing: Vec<api::subd::FetchObject> = plan
        .objects()
        .into_iter()
        .filter(|(id, _)| !cached.contains(id))
        .map(|(id, need)| api::subd::FetchObject { id, size_bytes: need.size_bytes })
        .collect();
    let last = sub.fetch(1, &[&source], &missing).await;
    assert_eq!((last.error, last.objects), (None, 5));
    let (reply, plan) = sub.plan(&want).await;
    sub.prepare(&crate::fixture::request(2, &reply, &want, plan)).await.unwrap();
    sub.commit(2).await;
    assert_eq!(sub.tree().await.1.digest(), want.digest());
    sub.stop().await;
    source.stop().await;
}
