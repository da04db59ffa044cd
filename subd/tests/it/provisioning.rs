//! Resources on a machine: a subd that is a process of its own, with shell plugins that fail in all
//! ways, and that is killed at each stage.

mod kept;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use api::fault::FaultCode;
use api::subd::{
    Commit, CommitRequest, ContinueProvisioning, ContinueProvisioningRequest, GetResources,
    GetResourcesRequest, LastUpdate, Provision, ProvisionRequest, ProvisioningStage, ResourceState,
    ResourcesReport, SetConfiguration, UpdateOutcome,
};
use model::display::error_chain;
use model::filter::Filter;
use model::image::HealthCheck;
use model::object::ObjectId;
use model::scope::{Coverage, ScanSettings};
use model::tree::{Metadata, Tree};
use model::trigger::Triggers;
use testing::{eventually, eventually_async};

use crate::fixture::{Edit, Source, Sub, file, request, scan_by};
use crate::process::Process;

const TRIGGERS: &str = r#"[{"MatchLines": ["/etc/dominator/resources\\.d/.*"],
    "Service": "resources", "Kind": "provision"}]"#;

const BINDINGS: &str = "[[provisioner]]\nname = \"mark\"\nkinds = [\"mark\"]\nuser = \"root\"\n\
    timeout_s = 2\n";

/// Makes a directory for each resource, and records that. Files in `/srv` say how it fails.
const PLUGIN: &str = r#"#!/bin/sh
request=$(cat)
[ -n "$request" ] || exit 1
echo "$1" >> /srv/calls
token() { echo '{"tasks": [{"running": {"token": "'$1'"}}]}'; exit; }
success() {
    echo '{"tasks": [{"success": {"outputs": {"'$id'": {"port": 5, "word": "secret"}}}}]}'
    exit
}
case $1:$request in
    *'"desired":[{"id":"'*) id=${request#*'"desired":[{"id":"'}; id=${id%%'"'*}; new=1 ;;
    *) id=${request#*'"previous":[{"id":"'}; id=${id%%'"'*}; new= ;;
esac
size=${request#*'"size":'} size=${size%%[!0-9]*}
make() {
    [ -z "$new$size" ] || echo "$size" > "/srv/size-$id"
    if [ -n "$new" ]; then mkdir "/srv/made/$id" 2>/dev/null && echo "made $id" >> /srv/log
    else rmdir "/srv/made/$id" 2>/dev/null && echo "destroyed $id" >> /srv/log; fi
    true
}
if [ "$1" = plan ]; then
    [ -e /srv/late ] && { echo 'no login' >&2; exit 1; }
    op=create; [ -d "/srv/made/$id" ] && op=none
    [ -n "$new" ] || op=delete
    echo '{"changes": [{"id": "'$id'", "op": "'$op'", "text": "make its directory"}]}'
    exit
fi
while [ -e /srv/wait ]; do sleep 0.05; done
if [ "$1" = status ]; then
    [ -e /srv/other ] && token other
    [ -e /srv/token ] && token t-1
    make; success
fi
if [ -e /srv/hang ]; then sleep 1000 & echo $! >> /srv/pids; sleep 1000; fi
[ -e /srv/garbage ] && { make; echo '{"tasks": ['; exit; }
[ -e /srv/flood ] && { make; cat /dev/zero; }
[ -e /srv/late ] && { make; echo 'no room' >&2; echo 'the quota is used up' >&2; exit 1; }
[ -e /srv/token ] || [ -e /srv/other ] && token t-1
make; success
"#;

const DB: &str = r#"{"id": "db", "kind": "mark", "spec": {}, "sensitive": ["word"],
    "reader": "web"}"#;
const USER: &str = r#"{"id": "user", "kind": "mark", "needs": ["db"], "on_removal": "destroy"}"#;

const ALONE: &str = r#"{"id": "user", "kind": "mark", "on_removal": "destroy"}"#;

/// A machine whose subd runs.
struct Machine {
    place: tempfile::TempDir,
    source: Source,
    process: Option<Process>,
    update: u64,
}

/// An update that is staged.
struct Staged {
    id: u64,
    digest: ObjectId,
}

fn copy_program(program: &str, root: &Path) {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
    for path in libraries.filter(|word| !word.ends_with(':')).chain([program]) {
        let to = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(path, to).unwrap();
    }
}

impl Machine {
    async fn start(flags: &[&str]) -> Self {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        for program in ["/bin/sh", "/usr/bin/cat", "/usr/bin/mkdir", "/usr/bin/rmdir"] {
            copy_program(program, root);
        }
        copy_program("/usr/bin/sleep", root);
        for directory in ["dev", "etc", "proc", "run", "srv/made"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
        let source = Source::start().await;
        let mut machine = Self { place, source, process: None, update: 0 };
        machine.boot(flags);
        let filter = Filter::new(["/srv/.*", "/run/.*", "/usr/bin/.*", "/bin/.*", "/lib.*"]);
        let coverage = Coverage::Full(filter.unwrap());
        let settings = ScanSettings { coverage, ..ScanSettings::default() };
        let process = machine.process.as_ref().unwrap();
        process.client.call::<SetConfiguration>(&scan_by(settings)).await.unwrap();
        machine
    }

    fn boot(&mut self, flags: &[&str]) {
        let flags = [&["--insecure", "--hostname", "test"], flags].concat();
        self.process = Some(Process::start_with(self.place.path(), &flags));
    }

    /// subd is killed at once, and started again.
    fn kill(&mut self) {
        self.process.take();
        self.boot(&DIRECT);
    }

    fn at(&self, path: &str) -> PathBuf {
        self.place.path().join(path)
    }

    fn set(&self, name: &str) {
        fs::write(self.at("srv").join(name), "").unwrap();
    }

    fn unset(&self, name: &str) {
        fs::remove_file(self.at("srv").join(name)).unwrap();
    }

    fn lines(&self, name: &str) -> Vec<String> {
        let text = fs::read_to_string(self.at("srv").join(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn sub(&self) -> Sub {
        let client = self.process.as_ref().unwrap().client.clone();
        Sub::elsewhere(self.place.path(), client)
    }

    async fn want(&self, version: &str, resources: &[(&str, &str)]) -> Tree {
        let (_, tree) = self.sub().tree().await;
        let mut edit = Edit::of(&tree, &self.source)
            .file("/etc/version", version)
            .file("/etc/passwd", "web:x:1234:1235::/:/bin/false\n");
        let is_there = |path: &str| tree.get(&path.parse().unwrap()).is_some();
        if is_there("/etc/dominator") {
            edit = edit.remove("/etc/dominator");
        }
        if !resources.is_empty() {
            edit = edit
                .directory("/etc/dominator", 0o755)
                .directory("/etc/dominator/resources.d", 0o755)
                .file("/etc/dominator/provisioners.toml", BINDINGS);
            for (id, text) in resources {
                edit = edit.file(&format!("/etc/dominator/resources.d/{id}.json"), text);
            }
            for directory in ["/usr/lib", "/usr/lib/dominator"] {
                edit = edit.directory(directory, 0o755);
            }
            let plugin = file(&self.source, PLUGIN, Metadata::new(0o755, 0, 0));
            edit = edit.put("/usr/lib/dominator/dom-provisioner-mark", plugin);
        }
        edit.done()
    }

    async fn stage(&mut self, version: &str, resources: &[(&str, &str)]) -> Staged {
        self.stage_checked(version, resources, None).await
    }

    async fn stage_checked(
        &mut self,
        version: &str,
        resources: &[(&str, &str)],
        health_check: Option<HealthCheck>,
    ) -> Staged {
        self.update += 1;
        let (sub, id) = (self.sub(), self.update);
        let want = self.want(version, resources).await;
        let (_, needs) = sub.plan(&want).await;
        sub.fetch_for(id, &self.source, &needs).await;
        let (reply, plan) = sub.plan(&want).await;
        let mut request = request(id, &reply, &want, plan.without_blocked());
        let triggers = if resources.is_empty() { "[]" } else { TRIGGERS };
        request.triggers = Triggers::from_json(triggers).unwrap();
        request.health_check = health_check;
        let reply = sub.prepare(&request).await.unwrap();
        let staged = api::subd::Activity::Prepared { update_id: id };
        assert_eq!(reply.activity, staged, "{:?}", reply.last_update);
        Staged { id, digest: want.digest() }
    }

    async fn provision(&self, staged: &Staged) {
        let request = ProvisionRequest { update_id: staged.id };
        self.sub().client.call::<Provision>(&request).await.unwrap();
    }

    async fn go_on(&self, staged: &Staged, step: u32) {
        let request = ContinueProvisioningRequest { image_digest: staged.digest, step };
        self.sub().client.call::<ContinueProvisioning>(&request).await.unwrap();
    }

    async fn report(&self) -> ResourcesReport {
        let request = GetResourcesRequest::default();
        let reply = self.sub().client.call::<GetResources>(&request).await.unwrap();
        reply.report.unwrap()
    }

    async fn until(&self, stage: &ProvisioningStage) {
        eventually_async("the stage of the resources", async || {
            let report = self.report().await;
            match &report.provisioning {
                Some(now) if now.stage == *stage => Ok(()),
                _ => Err(format!("{report:?}")),
            }
        })
        .await;
    }

    async fn failed(&self) -> String {
        eventually_async("provisioning fails", async || {
            let report = self.report().await;
            match report.provisioning.as_ref().map(|one| one.stage.clone()) {
                Some(ProvisioningStage::Failed { error }) => Ok(error),
                _ => Err(format!("{report:?}")),
            }
        })
        .await
    }

    /// Provisions all waves of a staged update.
    async fn all(&self, staged: &Staged) {
        self.provision(staged).await;
        let mut step = 0;
        loop {
            let waits = eventually_async("a wave ends", async || {
                let report = self.report().await;
                match report.provisioning.as_ref().map(|one| &one.stage) {
                    Some(ProvisioningStage::Waits { .. }) => Ok(true),
                    Some(ProvisioningStage::Finished) => Ok(false),
                    _ => Err(format!("{report:?}")),
                }
            });
            if !waits.await {
                return;
            }
            self.go_on(staged, step).await;
            step += 1;
        }
    }

    async fn commit(&self, staged: &Staged) -> LastUpdate {
        self.sub().commit(staged.id).await
    }

    async fn commit_is_refused(&self, staged: &Staged) -> String {
        let request = CommitRequest { update_id: staged.id };
        let error = self.sub().client.call::<Commit>(&request).await.unwrap_err();
        assert_eq!(error.code(), Some(FaultCode::Unavailable), "{error}");
        error_chain(&error)
    }

    /// The resources and their states.
    async fn states(&self) -> Vec<(String, ResourceState, bool)> {
        let resources = self.report().await.resources;
        resources.into_iter().map(|one| (one.id, one.state, one.is_orphan)).collect()
    }
}

const DIRECT: [&str; 2] = ["--supervisor", "direct"];

fn made(id: &str) -> (String, ResourceState, bool) {
    (id.to_owned(), ResourceState::Made, false)
}

#[tokio::test(flavor = "multi_thread")]
async fn resources_are_made_before_the_update_and_leave_after_it() {
    let mut machine = Machine::start(&DIRECT).await;
    let first = machine.stage("1", &[("db", DB), ("user", USER)]).await;
    let refused = machine.commit_is_refused(&first).await;
    assert!(refused.contains("not provisioned: db, user"), "{refused}");

    // A repeated call starts nothing, and each wave waits for leave.
    machine.provision(&first).await;
    machine.provision(&first).await;
    machine.until(&ProvisioningStage::Waits { wave: 2, waves: 2 }).await;
    assert_eq!(machine.lines("calls"), ["provision"]);
    assert_eq!(machine.lines("log"), ["made db"]);
    assert!(machine.commit_is_refused(&first).await.contains("not provisioned: user"));
    machine.go_on(&first, 0).await;
    machine.go_on(&first, 0).await;
    machine.until(&ProvisioningStage::Finished).await;
    assert_eq!(machine.states().await, [made("db"), made("user")]);
    let files = machine.at("run/dominator/resources");
    assert!(!files.exists());
    let last = machine.commit(&first).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    let text = fs::read_to_string(files.join("db.json")).unwrap();
    assert_eq!(text, "{\n  \"port\": 5,\n  \"word\": \"secret\"\n}\n");
    let of = |name: &str| fs::metadata(files.join(name)).unwrap();
    assert_eq!(of("db.json").mode() & 0o7777, 0o600);
    // Its reader is known since the update brought the user.
    assert_eq!((of("db.json").uid(), of("db.json").gid()), (1234, 1235));
    assert_eq!((of("user.json").uid(), of("user.json").gid()), (0, 0));
    let report = machine.report().await;
    assert_eq!(report.resources[0].outputs, r#"{"port":5}"#);
    let request = GetResourcesRequest { have: None };
    let client = machine.sub().client;
    let version = client.call::<GetResources>(&request).await.unwrap().version;
    let known = GetResourcesRequest { have: Some(version) };
    assert_eq!(client.call::<GetResources>(&known).await.unwrap().report, None);

    // What is as it was is in no call; what goes is destroyed only after the update.
    let second = machine.stage("2", &[("db", DB)]).await;
    machine.all(&second).await;
    assert_eq!(machine.lines("log"), ["made db", "made user"]);
    assert_eq!(machine.commit(&second).await.outcome, UpdateOutcome::Done);
    eventually("the resource is destroyed", || match machine.lines("log") {
        log if log == ["made db", "made user", "destroyed user"] => Ok(()),
        log => Err(format!("{log:?}")),
    });

    // Without resources, what is to be kept is an orphan.
    let third = machine.stage("3", &[]).await;
    assert_eq!(machine.commit(&third).await.outcome, UpdateOutcome::Done);
    assert_eq!(machine.states().await, [("db".to_owned(), ResourceState::Made, true)]);
    assert_eq!(fs::read_dir(&files).unwrap().count(), 0);
    assert_eq!(machine.lines("calls"), ["provision"; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_plugin_does_wrong_fails_the_resource_and_is_tried_again() {
    let table = [
        ("hang", "has not answered `provision` within 2 s, and was killed"),
        ("garbage", "EOF while parsing"),
        ("flood", "prints more than 1048576 bytes"),
        ("late", "exit status: 1: the quota is used up"),
        ("other", "answered with another token than it was asked about"),
    ];
    let mut machine = Machine::start(&DIRECT).await;
    for (number, (fault, words)) in table.into_iter().enumerate() {
        let (id, version) = (format!("r{number}"), number.to_string());
        let text = format!(r#"{{"id": "{id}", "kind": "mark"}}"#);
        let staged = machine.stage(&version, &[(&id, &text)]).await;
        machine.set(fault);
        machine.provision(&staged).await;
        let said = machine.failed().await;
        assert!(said.starts_with(&format!("{id}: mark: ")) && said.contains(words), "{said}");
        machine.commit_is_refused(&staged).await;
        machine.unset(fault);
        machine.go_on(&staged, 0).await;
        machine.until(&ProvisioningStage::Finished).await;
        let log = machine.lines("log");
        assert_eq!(log.iter().filter(|line| **line == format!("made {id}")).count(), 1, "{log:?}");
    }
    // All of the group was killed: in the root they have numbers of their own, so look for names.
    let sleeping = Command::new("pgrep").args(["-f", "^sleep 1000$"]).output().unwrap();
    let root = machine.place.path().to_owned();
    let in_root = |pid: &str| fs::read_link(format!("/proc/{pid}/root")).ok() == Some(root.clone());
    let text = String::from_utf8(sleeping.stdout).unwrap();
    assert_eq!(text.lines().filter(|pid| in_root(pid)).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_resource_is_made_once_although_subd_is_killed() {
    let mut machine = Machine::start(&DIRECT).await;
    machine.set("wait");
    machine.set("token");
    let first = machine.stage("1", &[("user", ALONE)]).await;
    machine.provision(&first).await;
    let called = |count: usize, verb: &'static str| {
        move |machine: &Machine| {
            eventually("the plugin is called", || {
                let calls = machine.lines("calls");
                let found = calls.iter().filter(|line| *line == verb).count();
                if found >= count { Ok(()) } else { Err(format!("{calls:?}")) }
            });
        }
    };
    // Before the token is known.
    called(1, "provision")(&machine);
    machine.kill();
    called(2, "provision")(&machine);
    machine.unset("wait");
    // While it is asked about.
    called(1, "status")(&machine);
    machine.kill();
    called(2, "status")(&machine);
    assert_eq!(machine.lines("log"), Vec::<String>::new());
    machine.unset("token");
    machine.until(&ProvisioningStage::Finished).await;
    let provisions = |machine: &Machine| {
        machine.lines("calls").iter().filter(|line| *line == "provision").count()
    };
    assert_eq!(provisions(&machine), 2);
    // Before the Commit: the update is staged again, and nothing is called.
    machine.kill();
    let again = machine.stage("1", &[("user", ALONE)]).await;
    machine.provision(&again).await;
    assert_eq!(machine.commit(&again).await.outcome, UpdateOutcome::Done);
    assert_eq!(provisions(&machine), 2);
    // While it is destroyed.
    machine.set("wait");
    let second = machine.stage("2", &[]).await;
    assert_eq!(machine.commit(&second).await.outcome, UpdateOutcome::Done);
    called(3, "provision")(&machine);
    machine.kill();
    called(4, "provision")(&machine);
    machine.unset("wait");
    eventually("it is destroyed", || match machine.lines("log") {
        log if log == ["made user", "destroyed user"] => Ok(()),
        log => Err(format!("{log:?}")),
    });
    eventually_async("nothing is left", async || {
        let states = machine.states().await;
        if states.is_empty() { Ok(()) } else { Err(format!("{states:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_image_replaces_what_is_on_the_way_and_drift_is_repaired_meanwhile() {
    let mut machine = Machine::start(&DIRECT).await;
    let zero = machine.stage("0", &[("db", DB)]).await;
    machine.all(&zero).await;
    assert_eq!(machine.commit(&zero).await.outcome, UpdateOutcome::Done);

    machine.set("token");
    let first = machine.stage("1", &[("db", DB), ("user", USER)]).await;
    machine.provision(&first).await;
    machine.until(&ProvisioningStage::Running { wave: 2, waves: 2 }).await;
    fs::write(machine.at("etc/version"), "drift").unwrap();
    machine.sub().rescanned().await;
    let repair = machine.stage("0", &[("db", DB)]).await;
    assert_eq!(repair.digest, zero.digest);
    assert_eq!(machine.commit(&repair).await.outcome, UpdateOutcome::Done);
    machine.until(&ProvisioningStage::Running { wave: 2, waves: 2 }).await;

    let more = DB.replace(r#""spec": {}"#, r#""spec": {"size": 2}"#);
    let second = machine.stage("2", &[("db", &more)]).await;
    machine.provision(&second).await;
    machine.until(&ProvisioningStage::Running { wave: 0, waves: 1 }).await;
    machine.unset("token");
    machine.until(&ProvisioningStage::Finished).await;
    assert_eq!(machine.lines("log"), ["made db", "made user"]);
    assert_eq!(machine.commit(&second).await.outcome, UpdateOutcome::Done);
    eventually("what only the former image had goes", || match machine.lines("log") {
        log if log == ["made db", "made user", "destroyed user"] => Ok(()),
        log => Err(format!("{log:?}")),
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undone_update_leaves_resources_as_they_were() {
    let flags = [&DIRECT[..], &["--health-command", "env"]].concat();
    let mut machine = Machine::start(&flags).await;
    let sized = |size: u32| DB.replace(r#""spec": {}"#, &format!(r#""spec": {{"size": {size}}}"#));
    let size = |machine: &Machine| machine.lines("size-db").concat();
    let first = machine.stage("1", &[("db", &sized(1))]).await;
    machine.all(&first).await;
    assert_eq!(machine.commit(&first).await.outcome, UpdateOutcome::Done);
    assert_eq!(size(&machine), "1");

    let kept = r#"{"id": "kept", "kind": "mark"}"#;
    let (command, db) = (vec!["false".to_owned()], sized(2));
    let check = HealthCheck { command, within_seconds: 1, undo: true };
    let resources = [("db", db.as_str()), ("kept", kept), ("user", USER)];
    let sick = machine.stage_checked("2", &resources, Some(check)).await;
    machine.all(&sick).await;
    assert_eq!(size(&machine), "2");
    let outcome = machine.commit(&sick).await.outcome;
    assert!(matches!(outcome, UpdateOutcome::Undone(_)), "{outcome:?}");
    eventually_async("the resources are as before", async || {
        let (states, size) = (machine.states().await, size(&machine));
        let orphan = ("kept".to_owned(), ResourceState::Made, true);
        let is_so = states == [made("db"), orphan] && size == "1";
        if is_so { Ok(()) } else { Err(format!("{size} {:?}", machine.report().await)) }
    })
    .await;
    let mut log = machine.lines("log");
    assert_eq!(log.pop().as_deref(), Some("destroyed user"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_whose_root_is_another_provisions_only_if_told_to() {
    let mut machine = Machine::start(&[]).await;
    let staged = machine.stage("1", &[("db", DB)]).await;
    let request = ProvisionRequest { update_id: staged.id };
    let error = machine.sub().client.call::<Provision>(&request).await.unwrap_err();
    assert_eq!(error.code(), Some(FaultCode::Unavailable));
    let refused = machine.commit_is_refused(&staged).await;
    assert!(refused.contains("--supervisor direct"), "{refused}");
    assert!(machine.report().await.not_run.is_some());
    assert_eq!(machine.lines("calls"), Vec::<String>::new());
    let plain = machine.stage("2", &[]).await;
    assert_eq!(machine.commit(&plain).await.outcome, UpdateOutcome::Done);
}
