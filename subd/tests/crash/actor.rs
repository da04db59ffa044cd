//! The program that is killed: makes one update with subd's own code, in one thread.
//!
//! It plans, takes content of a computed file, stages, commits and frees, as the dominator and the
//! daemon do, without network and without waiting. The last line of its output is the outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use api::subd::{ExpectedState, Health, LastUpdate, PrepareRequest};
use model::display::error_chain;
use model::image::{HealthCheck, ImageName};
use model::object::Algorithm;
use model::plan::{RefusedChanges, ScannedTree, plan};
use model::scope::{Attributes, ScanSettings, Scope};
use model::tree::text::from_text;
use model::tree::{TimePrecision, Tree};
use model::trigger::Triggers;
use subd::cache::Cache;
use subd::machine::IdentitySource;
use subd::machine::services::ServiceDriver;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::note_update;
use subd::state::persisted_state::{PersistError, SavedState, StateDirectory};
use subd::update::executor::{Executor, JournalState, Machine};
use subd::update::prepared::{Prepared, StageContext, UpdateSpec, forget_taken, free};
use subd::update::running_update::FinalTree;
use subd::update::step_plan::plan_steps;
use subd::update::update_task::TimedServices;
use testing::strace::MARK;
use tokio_util::sync::CancellationToken;

use crate::fixture::{COMPUTED, kept_directories, new_triggers};
use crate::machine::service_command;

/// Updates the machine in `directory`.
pub fn update(directory: &Path) -> ExitCode {
    match run(directory) {
        Ok(text) => println!("{text}"),
        Err(error) => println!("not-started {error}"),
    }
    ExitCode::SUCCESS
}

/// Stores the outcome, as the daemon does.
struct Notes {
    saved: SavedState,
}

impl Machine for Notes {
    fn check_health(&self, _: &HealthCheck) -> Health {
        Health::Passed
    }

    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError> {
        self.saved.doubt();
        Ok(self.saved.modify(|persisted| note_update(persisted, last, done))?)
    }
}

fn run(directory: &Path) -> Result<String, Box<dyn Error>> {
    let tree = |name| -> Result<Tree, Box<dyn Error>> {
        let text = std::fs::read_to_string(directory.join(name))?;
        Ok(from_text(Algorithm::Blake3, &text)?)
    };
    let (scanned, want) = (tree("have.txt")?, tree("want.txt")?);
    let root = Root::open(&directory.join("root"))?;
    let state = StateDirectory::lock(Directories::state(&root, None)?)?;
    let directories = Directories::open(&root)?;
    let saved = state.load()?;
    let (cache, _) = Cache::open(directories.objects.clone())?;
    let have = ScannedTree {
        tree: &scanned,
        kept_directories: &kept_directories(),
        externally_linked: &BTreeSet::new(),
        occupied: &BTreeMap::new(),
        refused: &RefusedChanges::default(),
        times: TimePrecision::default(),
    };
    let plan = plan(&have, &want);
    // The calls from here on are counted.
    assert!(std::fs::metadata(MARK).is_err());
    let content = COMPUTED.1.as_bytes();
    if let Err(error) = cache.add(Algorithm::Blake3.digest(content), content) {
        return Ok(format!("not-prepared {}", error_chain(&error)));
    }
    let step_plan = plan_steps(&plan, |_| None)?;
    let scope = Scope::of(&ScanSettings::default(), &[]);
    let order = UpdateSpec::new(PrepareRequest {
        update_id: 7,
        expects: ExpectedState { instance: 1, root: scanned.digest(), scope },
        image: ImageName::new("test/new")?,
        image_digest: want.digest(),
        plan: plan.into(),
        triggers: new_triggers(),
        health_check: None,
        force_disruption: false,
        expires_seconds: 60,
    });
    let (scanned, managed) = (&scanned, Attributes::Basic);
    let stop = &CancellationToken::new();
    let (root, directories, cache) = (&root, &directories, &cache);
    let context = StageContext { root, directories, cache, scanned, managed, stop };
    let prepared = match Prepared::stage(&context, order, &step_plan) {
        Ok(prepared) => prepared,
        Err(error) => return Ok(format!("not-prepared {}", error_chain(&error))),
    };
    let identity = IdentitySource::new(None);
    let driver = ServiceDriver::choose(Some(&service_command(directory)), false, false);
    let services =
        TimedServices { driver: &driver, tasks: None, time_max: Duration::from_secs(60) };
    let boot_id = identity.boot_id();
    let executor = Executor { root, directories, services: Some(&services), boot_id };
    let journal = prepared.journal(&saved.get().triggers, &Default::default(), boot_id);
    let notes = Notes { saved };
    let (update, ended) = executor.commit(&notes, journal);
    if ended.settled != Some(FinalTree::Old) {
        forget_taken(&update, cache);
    }
    if ended.journal == JournalState::Closed {
        free(&update, directories, cache);
    }
    let word = match ended.settled {
        Some(FinalTree::New) => "done",
        Some(FinalTree::Old) => "rolled-back",
        None => "stuck",
    };
    Ok(format!("{word} {:?} {:?}", ended.last.outcome, ended.journal))
}
