//! Roots with mounts in them, roots of every kind of file-system, swap files.
//!
//! Each test has a mount namespace of its own: that of its thread, and of those it starts.

mod kinds;
mod obstacles;
mod read_only;

use std::path::Path;
use std::process::Command;

use api::fault::FaultCode;
use api::subd::UpdateOutcome;
use model::path::TreePath;
use model::plan::{Action, Blocked, Obstacle, Occupant, Operation, Plan};
use model::tree::Tree;
use model::tree::text::to_text;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use testing::eventually;

use crate::fixture::{Edit, Source, Sub, path, request};

/// Runs `test` where its mounts are nobody else's, and go with it.
fn in_own_mounts<T: Future<Output = ()>>(test: impl FnOnce() -> T) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).unwrap();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().build().unwrap().block_on(test());
}

/// Runs a command that must succeed; gives what it prints.
#[track_caller]
fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Unmounts `at` as soon as nobody uses it. A task of subd may look at it just now.
fn unmount(at: &Path) {
    eventually("it is unmounted", || umount2(at, MntFlags::empty()));
}

fn mount_tmpfs(at: &Path) {
    mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
}

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

/// What is reported as used by the kernel.
async fn occupied(sub: &Sub) -> Vec<(String, Occupant)> {
    let (reply, _) = sub.tree().await;
    let occupied = reply.scan.unwrap().occupied;
    occupied.into_iter().map(|(path, occupant)| (path.to_string(), occupant)).collect()
}

fn removal(text: &str) -> Plan {
    let reason = vec![model::plan::Difference::Extra];
    let operation = Operation { path: path(text), action: Action::Remove, reason };
    Plan { operations: vec![operation], blocked: Vec::new() }
}

/// Why Prepare refuses `plan`, from a dominator that does not look at what is occupied.
async fn refusal(sub: &Sub, id: u64, want: &Tree, plan: Plan) -> (FaultCode, String) {
    let (reply, _) = sub.plan(want).await;
    let error = sub.prepare(&request(id, &reply, want, plan)).await.unwrap_err();
    let report = model::display::error_chain(&error);
    let (_whom, why) = report.split_once(": ").unwrap();
    (error.code().unwrap(), why.to_owned())
}

#[test]
fn what_lies_under_mounts_is_kept_equal_and_the_mounts_stay() {
    in_own_mounts(async || {
        let (sub, source) = (Sub::start().await, Source::start().await);
        let aside = tempfile::tempdir().unwrap();
        let (_, empty) = sub.tree().await;
        let names = ["bind", "overlay", "tmpfs"];
        let mut edit = Edit::of(&empty, &source).file("/file", "under").directory("/m", 0o755);
        for name in names {
            edit = edit.directory(&format!("/m/{name}"), 0o755);
            edit = edit.file(&format!("/m/{name}/old"), "old");
        }
        let first = edit.done();
        assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
        for below in ["bind", "lower", "upper", "work"] {
            std::fs::create_dir(aside.path().join(below)).unwrap();
        }
        std::fs::write(aside.path().join("file"), "above").unwrap();
        bind(&aside.path().join("bind"), &sub.at("/m/bind"));
        bind(&aside.path().join("file"), &sub.at("/file"));
        mount_tmpfs(&sub.at("/m/tmpfs"));
        let directory = aside.path().display();
        let target = sub.at("/m/overlay");
        run(&format!(
            "cd {directory}; \
             mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work {}",
            target.display()
        ));
        for name in names {
            std::fs::write(sub.at(&format!("/m/{name}/above")), name).unwrap();
        }
        // Nothing of what is mounted is seen, and nothing is missing.
        assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
        let used = ["/file", "/m/bind", "/m/overlay", "/m/tmpfs"];
        let used = used.map(|path| (path.to_owned(), Occupant::MountPoint));
        assert_eq!(occupied(&sub).await, used);
        // All under the mounts is changed, the mount points themselves included.
        let mut edit = Edit::of(&first, &source);
        for name in names {
            edit = edit
                .metadata(&format!("/m/{name}"), |metadata| metadata.mode = 0o700)
                .file(&format!("/m/{name}/new"), "new")
                .remove(&format!("/m/{name}/old"));
        }
        let second = edit.metadata("/file", |metadata| metadata.mode = 0o600).done();
        assert_eq!(sub.converge(2, &source, &second).await.outcome, UpdateOutcome::Done);
        assert_eq!(to_text(&sub.rescanned().await), to_text(&second));
        for name in names {
            let at = |file: &str| sub.at(&format!("/m/{name}/{file}"));
            assert_eq!(std::fs::read_to_string(at("above")).unwrap(), name);
            assert!(!at("new").exists());
            std::fs::write(at("more"), "it can be written").unwrap();
        }
        assert_eq!(std::fs::read_to_string(sub.at("/file")).unwrap(), "above");
        unmount(&sub.at("/file"));
        assert_eq!(std::fs::read_to_string(sub.at("/file")).unwrap(), "under");
        for name in names {
            unmount(&sub.at(&format!("/m/{name}")));
            assert_eq!(std::fs::read_to_string(sub.at(&format!("/m/{name}/new"))).unwrap(), "new");
        }
        assert_eq!(to_text(&sub.rescanned().await), to_text(&second));
        assert_eq!(occupied(&sub).await, []);
        source.stop().await;
        sub.stop().await;
    });
}

#[test]
fn what_is_or_holds_a_mount_point_is_blocked_and_refused() {
    in_own_mounts(async || {
        let (sub, source) = (Sub::start().await, Source::start().await);
        let (_, empty) = sub.tree().await;
        let edit = Edit::of(&empty, &source).directory("/m", 0o755).directory("/m/p", 0o755);
        let first = edit.file("/f", "f").done();
        assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
        mount_tmpfs(&sub.at("/m/p"));
        std::fs::write(sub.at("/m/p/x"), "x").unwrap();
        // Nobody has reported it yet.
        let (code, why) = refusal(&sub, 2, &first, removal("/m/p")).await;
        assert!(
            (code == FaultCode::Stale || code == FaultCode::BadRequest)
                && why.starts_with("/m/p must not be moved: it is or holds a mount point (/m/p)"),
            "{code:?} {why}"
        );
        sub.rescanned().await;
        for text in ["/m", "/m/p"] {
            let (code, why) = refusal(&sub, 2, &first, removal(text)).await;
            let expected = format!("{text} must not be moved: it is or holds a mount point (/m/p)");
            assert_eq!((code, why), (FaultCode::BadRequest, expected));
        }
        let (_, plan) = sub.plan(&empty).await;
        let blocked = |text| Blocked { path: path(text), why: Obstacle::MountPoint };
        assert_eq!(plan.blocked, [blocked("/m"), blocked("/m/p")]);
        let file = Edit::of(&first, &source).remove("/m").file("/m", "file").done();
        let (_, plan) = sub.plan(&file).await;
        assert_eq!(plan.blocked, [blocked("/m")]);
        assert_eq!(std::fs::read(sub.at("/m/p/x")).unwrap(), b"x");
        unmount(&sub.at("/m/p"));
        sub.rescanned().await;
        assert_eq!(sub.converge(3, &source, &file).await.outcome, UpdateOutcome::Done);
        source.stop().await;
        sub.stop().await;
    });
}

#[test]
fn a_mount_that_comes_between_prepare_and_commit_stays() {
    in_own_mounts(async || {
        let (sub, source) = (Sub::start().await, Source::start().await);
        let aside = tempfile::tempdir().unwrap();
        std::fs::write(aside.path().join("x"), "above").unwrap();
        let (_, empty) = sub.tree().await;
        let edit = Edit::of(&empty, &source).directory("/d", 0o755).directory("/d/p", 0o755);
        let first = edit.file("/a", "a").file("/b", "b").directory("/gone", 0o755).done();
        assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
        let replaced = Edit::of(&first, &source).file("/a", "new").remove("/d").file("/d", "file");
        let table = [
            // The directory above the mount point is exchanged.
            ("/d/p", replaced.done(), "/d changed since it was scanned: it is or holds a mount"),
            // A file is exchanged.
            ("/b", Edit::of(&first, &source).file("/a", "new").file("/b", "new").done(), "/b "),
            // A file and an empty directory are removed.
            ("/b", Edit::of(&first, &source).file("/a", "new").remove("/b").done(), "/b "),
            ("/gone", Edit::of(&first, &source).file("/a", "n").remove("/gone").done(), "/gone "),
        ];
        for (id, (mounted, want, expected)) in (10..).zip(table) {
            let (_, plan) = sub.plan(&want).await;
            sub.fetch_for(id, &source, &plan).await;
            let (reply, plan) = sub.plan(&want).await;
            sub.prepare(&request(id, &reply, &want, plan)).await.unwrap();
            let at = sub.at(mounted);
            let is_directory = at.is_dir();
            bind(&aside.path().join(if is_directory { "." } else { "x" }), &at);
            let UpdateOutcome::RolledBack(why) = sub.commit(id).await.outcome else { panic!() };
            assert!(why.starts_with(expected), "{why}");
            let seen = if is_directory { at.join("x") } else { at.clone() };
            assert_eq!(std::fs::read_to_string(seen).unwrap(), "above");
            assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
            unmount(&at);
            sub.rescanned().await;
        }
        let want = Edit::of(&first, &source).remove("/d").file("/d", "file").done();
        assert_eq!(sub.converge(2, &source, &want).await.outcome, UpdateOutcome::Done);
        source.stop().await;
        sub.stop().await;
    });
}

/// Ends swapping to a file, whatever happens.
struct Swap(std::path::PathBuf);

impl Drop for Swap {
    fn drop(&mut self) {
        let _ended = Command::new("swapoff").arg(&self.0).status();
    }
}

#[test]
fn an_active_swap_file_is_blocked_and_refused() {
    in_own_mounts(async || {
        // A file-system that can hold one, whatever the machine has for temporary files.
        let disk = kinds::Disk::new("ext4", "mkfs.ext4 -q", 16);
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let (_, empty) = sub.tree().await;
        let swap = sub.at("/d/swap");
        std::fs::create_dir(sub.at("/d")).unwrap();
        run(&format!(
            "dd if=/dev/zero of={0} bs=4096 count=64 status=none; chmod 600 {0}; mkswap -q {0}; \
             swapon {0}",
            swap.display()
        ));
        let swapping = Swap(swap);
        sub.rescanned().await;
        assert_eq!(occupied(&sub).await, [("/d/swap".to_owned(), Occupant::SwapFile)]);
        let (_, plan) = sub.plan(&empty).await;
        let blocked: Vec<(TreePath, Obstacle)> =
            plan.blocked.into_iter().map(|blocked| (blocked.path, blocked.why)).collect();
        let expected = ["/d", "/d/swap"].map(|text| (path(text), Obstacle::SwapFile));
        let (_, scanned) = sub.tree().await;
        let (code, why) = refusal(&sub, 1, &scanned, removal("/d/swap")).await;
        drop(swapping);
        assert!(expected.iter().all(|one| blocked.contains(one)), "{blocked:?}");
        let reason = "/d/swap must not be moved: it is or holds an active swap file (/d/swap)";
        assert_eq!((code, why), (FaultCode::BadRequest, reason.to_owned()));
        sub.rescanned().await;
        assert_eq!(sub.converge(2, &source, &empty).await.outcome, UpdateOutcome::Done);
        source.stop().await;
        sub.stop().await;
    });
}
