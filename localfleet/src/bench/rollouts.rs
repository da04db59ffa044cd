//! What decisions about environments and rollouts of many machines cost: the functions that a
//! dominator calls, without one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::tree::Time;
use rollouts::advance::advance;
use rollouts::content::ContentRevision;
use rollouts::document::{Analysis, MachineTaskState};
use rollouts::gate::effective;
use rollouts::plan::plan;
use rollouts::state::{Editor, Edits, SharedMachines, StartOrder, State};
use rollouts::view::{ImageNotes, Question, Seen, View};
use serde_json::json;

use super::Bench;
use super::measure::{Row, Samples, seconds};

/// How many environments there are.
const ENVIRONMENTS: usize = 200;

/// All machines are healthy, and have what they must have at once.
struct Healthy(SharedMachines);

impl View for Healthy {
    fn machine(&self, hostname: &str) -> Option<Seen> {
        let image = self.0.get(hostname)?.required_image.clone();
        let state = MachineTaskState::Synced;
        let (left_out, ill, unknown, held_out) = (<_>::default(), <_>::default(), false, false);
        Some(Seen { image, left_out, state, ill, reachable: true, unknown, held_out })
    }

    fn left_out(&self, _: &str) -> Option<BTreeMap<String, String>> {
        Some(BTreeMap::new())
    }

    fn digest(&self, image: &str) -> Option<ObjectId> {
        Some(Algorithm::Blake3.digest(image.as_bytes()))
    }

    fn notes(&self, _: &str) -> Option<ImageNotes> {
        Some(ImageNotes { uploaded: Time::default(), deprecated: None })
    }

    fn content(&self, _: &str, _: &str, _: ContentRevision) -> Option<MachineTaskState> {
        None
    }

    fn newest_content(&self, _: &str) -> Option<ContentRevision> {
        None
    }

    fn analysis(&mut self, _: Question<'_>) -> Option<Analysis> {
        None
    }

    fn healthy_for_s(&mut self, _: u64, _: &str, healthy: bool) -> u64 {
        if healthy { u64::MAX } else { 0 }
    }
}

fn fleet(subs: u32) -> SharedMachines {
    let machine = |number: u32| {
        let tier = (number as usize % ENVIRONMENTS).to_string();
        let machine = Machine {
            hostname: format!("host{number:05}.example.com"),
            required_image: "base/1".to_owned(),
            location: format!("site{}/rack{}", number % 7, number % 101),
            tags: [("role".to_owned(), "server".to_owned()), ("tier".to_owned(), tier)].into(),
            ..Machine::default()
        };
        (machine.hostname.clone(), Arc::new(machine))
    };
    (0..subs).map(machine).collect()
}

/// Measures the gate, a plan, and a step from its start until all its machines are ordered.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let subs = bench.arguments.subs;
    let mdb = fleet(subs);
    let by = Editor { who: String::new(), why: String::new(), now: Time::default() };
    let mut state = State::default();
    let edit = |name: String, image: &str, select: serde_json::Value| {
        let strategy = json!({"min_healthy_percent": 0, "canary": 0});
        let edit = json!({"name": name, "select": select, "source": {"image": image},
                          "strategy": strategy});
        serde_json::from_value(edit).context("an edit is valid")
    };
    let environments: anyhow::Result<Vec<_>> = (0..ENVIRONMENTS)
        .map(|tier| {
            edit(format!("e{tier}"), "base/2", json!({"tags": {"tier": [tier.to_string()]}}))
        })
        .collect();
    let edits = Edits { environments: environments?, ..Edits::default() };
    let refused = |said: rollouts::steps::Said| anyhow!("{}", said.message);
    state.edit(edits, &by, &mdb).map_err(refused)?;
    let names: Vec<String> = (0..ENVIRONMENTS).map(|tier| format!("e{tier}@1")).collect();
    let start = StartOrder { environments: names, ..StartOrder::default() };
    state.start(&start, &by).map_err(refused)?;

    let began = Instant::now();
    let mut passes = 0;
    while state.unfinished().next().is_some() && passes < 1_000 {
        let now = effective(&state, &mdb).records;
        advance(&mut state, &mdb, &mut Healthy(now), by.now);
        passes += 1;
    }
    let all_ordered = began.elapsed().as_secs_f64();
    let (mut gate, mut planning) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs() {
        let began = Instant::now();
        let records = effective(&state, &mdb).records;
        gate.add(began.elapsed().as_secs_f64());
        anyhow::ensure!(records.values().all(|one| one.required_image == "base/2"), "not gated");
        let began = Instant::now();
        for tier in 0..ENVIRONMENTS {
            let digest = |image: &str| Some(Algorithm::Blake3.digest(image.as_bytes()));
            let plan = plan(&state, &mdb, &format!("e{tier}"), 0, digest);
            anyhow::ensure!(plan.classes.len() == 1, "{plan:?}");
        }
        planning.add(began.elapsed().as_secs_f64());
    }
    let row = |what: &str, samples: &Samples, goal: f64| Row {
        what: format!("{subs} subs in {ENVIRONMENTS} environments: {what}"),
        ours: samples.shown(seconds),
        peer: String::new(),
        ratio: Some(samples.median() / goal),
        wanted: seconds(goal),
    };
    let mut ordered = Samples::default();
    ordered.add(all_ordered);
    Ok(vec![
        row("which image each machine must have", &gate, 0.02),
        row("a plan of all environments", &planning, 2.0),
        row(&format!("a rollout of all, decided in {passes} passes"), &ordered, 10.0),
    ])
}
