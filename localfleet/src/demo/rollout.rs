//! The demo of rollouts: two environments of which one depends on the other, a vote, a canary, and
//! a bad revision that goes back by itself.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::dominator::rollouts::{ListRolloutsReply, RolloutInfo, StartRolloutReply};
use rollouts::document::{RolloutState, StepState, name_of};
use serde_json::{Value, json};

use super::{Demo, STEP_MAX, converge, is_kept, say, verify};
use crate::compare::compare;
use crate::fleet::Fleet;
use crate::source_trees;

/// How often a rollout is looked at.
const INTERVAL: Duration = Duration::from_millis(100);

/// A fleet whose first machines are in the environment `db`, and the others in `web`.
struct Shown<'a> {
    demo: &'a Demo,
    fleet: &'a mut Fleet,
    databases: usize,
}

impl Demo {
    /// Runs the whole sequence of the demo of rollouts, and returns the fleet, still running.
    ///
    /// # Errors
    ///
    /// If a step fails, or a comparison of trees finds a difference.
    pub fn show_rollouts(&self) -> anyhow::Result<Fleet> {
        ensure!(self.subs >= 3, "the demo of rollouts needs at least 3 subs");
        let first = self.first_version()?;
        let mut fleet = self.start_fleet()?;
        self.add(&fleet, "demo/1", &first, &[])?;
        say("Editing the machine database: every machine must have demo/1.");
        converge(&mut fleet, "demo/1")?;
        verify(&fleet, &first)?;
        let second = self.copied_version(&first, "version-2")?;
        self.add(&fleet, "demo/2", &second, &[])?;
        let sick = self.copied_version(&second, "version-3")?;
        let check = self.directory.join("health.json");
        let fails = json!({"command": ["false"], "within_seconds": 1, "undo": true});
        fs::write(&check, fails.to_string()).context("cannot write")?;
        self.add(&fleet, "demo/3", &sick, &["--health-check".as_ref(), check.as_os_str()])?;

        let mut shown = Shown { demo: self, fleet: &mut fleet, databases: self.subs / 3 };
        shown.make_environments()?;
        shown.verify(&first, &first)?;
        shown.release(&first, &second)?;
        shown.go_back(&second)?;
        Ok(fleet)
    }

    fn copied_version(&self, former: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let tree = self.directory.join(name);
        source_trees::copy(former, &tree)?;
        let changed = source_trees::next_version(&tree, &is_kept)?;
        say(&format!("Made another version, with {changed} changed files."));
        Ok(tree)
    }
}

impl Shown<'_> {
    fn make_environments(&self) -> anyhow::Result<()> {
        let hosts = self.fleet.subs.iter().map(|sub| sub.hostname.clone());
        let (db, web): (Vec<_>, Vec<_>) =
            hosts.enumerate().partition(|(index, _)| *index < self.databases);
        let names = |part: Vec<(usize, String)>| Vec::from_iter(part.into_iter().map(|one| one.1));
        let strategy = json!({"min_healthy_percent": 50, "canary": 1, "soak_s": 1});
        let db = json!({
            "name": "db", "select": {"hosts": names(db)}, "source": {"image": "demo/2"},
            "strategy": strategy,
        });
        say("Making the environments db, and web, which comes after db and needs a vote.");
        self.edit("create", &db)?;
        let author = self.ask(&["env", "show", "db"])?["revisions"][0]["author"].clone();
        let approval = json!({"voters": [author], "min_approvals": 1, "author_alone": true});
        self.edit(
            "create",
            &json!({
                "name": "web", "select": {"hosts": names(web)}, "source": {"image": "demo/2"},
                "strategy": strategy, "depends_on": ["db"], "approval": approval,
            }),
        )?;
        say("No machine has changed by that.");
        Ok(())
    }

    /// Brings the second version to all.
    fn release(&mut self, first: &Path, second: &Path) -> anyhow::Result<()> {
        let id = self.start(&["db@1", "web@1"])?;
        let waiting = self.follow(&id, waits_for_votes)?;
        say("db has the second version; web waits for a vote, and has the first.");
        self.verify(second, first)?;
        self.vote(&waiting)?;
        self.end(&id, RolloutState::Succeeded)?;
        self.verify(second, second)
    }

    /// Brings a version to `web` whose health check fails.
    fn go_back(&mut self, second: &Path) -> anyhow::Result<()> {
        say("Making a revision of web with demo/3, whose health check fails everywhere.");
        self.edit("update", &json!({"name": "web", "source": {"image": "demo/3"}}))?;
        let id = self.start(&["web@2"])?;
        let waiting = self.follow(&id, waits_for_votes)?;
        self.vote(&waiting)?;
        self.end(&id, RolloutState::RolledBack)?;
        self.fleet.wait_synced("demo/2", STEP_MAX, |_| {})?;
        self.verify(second, second)?;
        let ask = ["events", "--kind", "update", "--image", "demo/3"];
        let events = self.run(&ask.map(AsRef::as_ref))?;
        let has_tried = |host: &&str| events.contains(&format!("{host} "));
        let hosts = self.fleet.subs.iter().map(|sub| sub.hostname.as_str());
        let tried: Vec<&str> = hosts.filter(has_tried).collect();
        ensure!(tried.len() == 1, "{tried:?} have tried demo/3:\n{events}");
        say(&format!("Only the canary, {}, has ever tried demo/3.", tried[0]));
        Ok(())
    }

    /// Compares each tree: those of `db` with one source, those of `web` with another.
    fn verify(&self, db: &Path, web: &Path) -> anyhow::Result<()> {
        say("Comparing the tree of each machine with its source.");
        for (index, sub) in self.fleet.subs.iter().enumerate() {
            let expected = if index < self.databases { db } else { web };
            if let Some(first) = compare(expected, &sub.root, &is_kept)?.first() {
                bail!("{} differs from {}: {first}", sub.hostname, expected.display());
            }
        }
        say("All are equal, attribute by attribute.");
        Ok(())
    }

    /// Runs domtool, which must succeed. Returns what it printed.
    fn run(&self, words: &[&OsStr]) -> anyhow::Result<String> {
        let output = self.fleet.domtool(words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "domtool {words:?}: {}", said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn ask(&self, words: &[&str]) -> anyhow::Result<Value> {
        let words = [&["--format", "json"], words].concat();
        let text = self.run(&Vec::from_iter(words.iter().map(AsRef::as_ref)))?;
        serde_json::from_str(&text).context("domtool printed no JSON")
    }

    fn edit(&self, verb: &str, environment: &Value) -> anyhow::Result<()> {
        let file = self.demo.directory.join("environment.json");
        fs::write(&file, environment.to_string()).context("cannot write")?;
        let done = self.run(&["env".as_ref(), verb.as_ref(), file.as_os_str()])?;
        say(&format!("  domtool env {verb}: {}", done.trim()));
        Ok(())
    }

    fn start(&self, environments: &[&str]) -> anyhow::Result<String> {
        let words = [&["rollout", "start", "--why", "to show it"], environments].concat();
        let reply: StartRolloutReply = serde_json::from_value(self.ask(&words)?)?;
        say(&format!("  domtool rollout start {}: {}", environments.join(" "), reply.id));
        Ok(reply.id)
    }

    /// Shows how a rollout goes on, until `is_reached`.
    fn follow(
        &mut self,
        id: &str,
        is_reached: fn(&RolloutInfo) -> bool,
    ) -> anyhow::Result<RolloutInfo> {
        let start = Instant::now();
        let mut last = Vec::new();
        loop {
            self.fleet.check()?;
            let reply: ListRolloutsReply =
                serde_json::from_value(self.ask(&["rollout", "show", id])?)?;
            let info = reply.rollouts.into_iter().next().context("there is no rollout")?;
            let lines = lines(&info);
            let seconds = start.elapsed().as_secs_f64();
            for line in lines.iter().filter(|line| !last.contains(*line)) {
                say(&format!("  {seconds:>7.2} s  {line}"));
            }
            last = lines;
            if is_reached(&info) {
                return Ok(info);
            }
            ensure!(start.elapsed() < STEP_MAX, "{id} has not come so far within {STEP_MAX:?}");
            sleep(INTERVAL);
        }
    }

    fn end(&mut self, id: &str, state: RolloutState) -> anyhow::Result<()> {
        let info = self.follow(id, |info| info.ended.is_some())?;
        let (is, expected) = (name_of(&info.rollout.state), name_of(&state));
        ensure!(info.rollout.state == state, "{id} is {is}, and not {expected}");
        Ok(())
    }

    /// Approves the plan that waits, with the form of the page of the rollout.
    fn vote(&self, info: &RolloutInfo) -> anyhow::Result<()> {
        let id = &info.rollout.id;
        let (step, plan) = info.steps_with_plans().next().context("nothing waits for votes")?;
        let fields = [
            ("rollout", id.as_str()),
            ("step", &step.id),
            ("digest", &plan.digest),
            ("why", "seen"),
            ("vote", "approve"),
        ];
        let page = format!("/rollouts/{id}");
        let (status, content) = self.fleet.submit(&page, "/vote", &fields)?;
        ensure!(status == 303, "the form: {status}: {}", String::from_utf8_lossy(&content));
        say(&format!("Approved the plan {} of {} on the page {page}.", plan.digest, step.id));
        Ok(())
    }
}

fn waits_for_votes(info: &RolloutInfo) -> bool {
    info.rollout.steps.iter().any(|step| step.state == StepState::AwaitingApproval)
}

fn lines(info: &RolloutInfo) -> Vec<String> {
    let rollout = &info.rollout;
    let line = |what: &str, state: String, why: &str| match why {
        "" => format!("{what} is {state}"),
        why => format!("{what} is {state}: {why}"),
    };
    let mut lines = vec![line(&rollout.id, name_of(&rollout.state), &rollout.cause)];
    let steps = rollout.steps.iter();
    lines.extend(steps.map(|step| line(&step.id, name_of(&step.state), &step.cause)));
    lines.extend(info.batches.iter().map(|batch| {
        let (done, machines, reason) = (batch.done, batch.machines, &batch.reason);
        format!("{}: {done} of {machines} done: {reason}", batch.step)
    }));
    lines
}
