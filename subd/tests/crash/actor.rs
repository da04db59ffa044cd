//! The program that is killed: makes one update with subd's own code, in one thread.
//!
//! It plans, stages, commits and frees, as the dominator and the daemon do it, without network and
//! without waiting. The last line of its output is how that ended.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use api::subd::{Expects, Health, LastUpdate, PrepareRequest};
use model::image::{HealthCheck, ImageName};
use model::object::Algorithm;
use model::plan::{Have, plan};
use model::report::report;
use model::scope::{Attributes, ScanSettings, Scope};
use model::tree::text::from_text;
use model::tree::{Times, Tree};
use model::trigger::Triggers;
use subd::cache::Cache;
use subd::machine::identity::IdentitySource;
use subd::machine::services::{ServiceDriver, TIME_MAX};
use subd::root::Root;
use subd::state::directories::Home;
use subd::state::persisted_state::{Saved, SavedError, StateDirectory};
use subd::state::report_state::note_update;
use subd::update::executor::{Executor, Machine, Remains, Settled};
use subd::update::prepared::{Bench, Order, Prepared, forget_taken, free};
use subd::update::step_plan::arrange;
use subd::update::update_task::Driven;

use crate::fixture::{kept_directories, new_triggers};
use crate::machine::service_command;
use crate::strace::MARK;

/// Updates the machine in `directory`.
pub fn update(directory: &Path) -> ExitCode {
    match run(directory) {
        Ok(text) => println!("{text}"),
        Err(error) => println!("not-started {error}"),
    }
    ExitCode::SUCCESS
}

/// What remembers, in the place of the daemon.
struct Notes {
    state: StateDirectory,
    saved: RefCell<Saved>,
}

impl Machine for Notes {
    fn check_health(&self, _: &HealthCheck) -> Health {
        Health::Passed
    }

    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), SavedError> {
        note_update(&mut self.saved.borrow_mut(), last, done);
        self.state.store(|| self.saved.borrow().clone())
    }
}

fn run(directory: &Path) -> Result<String, Box<dyn Error>> {
    let tree = |name| -> Result<Tree, Box<dyn Error>> {
        let text = std::fs::read_to_string(directory.join(name))?;
        Ok(from_text(Algorithm::Blake3, &text)?)
    };
    let (scanned, want) = (tree("have.txt")?, tree("want.txt")?);
    let root = Root::open(&directory.join("root"))?;
    let state = StateDirectory::lock(Home::state(&root, None)?)?;
    let home = Home::open(&root)?;
    let saved = state.load()?;
    let (cache, _) = Cache::open(home.objects.clone())?;
    let have = Have {
        tree: &scanned,
        kept_directories: &kept_directories(),
        externally_linked: &BTreeSet::new(),
        occupied: &BTreeMap::new(),
        times: Times::default(),
    };
    let plan = plan(&have, &want);
    // The calls from here on are counted.
    assert!(std::fs::metadata(MARK).is_err());
    let arrangement = arrange(&plan, |_| None)?;
    let scope = Scope::of(&ScanSettings::default(), &[]);
    let order = Order::new(PrepareRequest {
        update_id: 7,
        expects: Expects { instance: 1, root: scanned.digest(), scope },
        image: ImageName::new("test/new")?,
        image_digest: want.digest(),
        plan,
        triggers: new_triggers(),
        health_check: None,
        force_disruption: false,
        expires_seconds: 60,
    });
    let (scanned, managed) = (&scanned, Attributes::Basic);
    let bench = Bench { root: &root, home: &home, cache: &cache, scanned, managed };
    let prepared = match Prepared::stage(&bench, order, &arrangement) {
        Ok(prepared) => prepared,
        Err(error) => return Ok(format!("not-prepared {}", report(&error))),
    };
    let identity = IdentitySource::new(None);
    let driver = ServiceDriver::choose(Some(&service_command(directory)), false, false);
    let services = Driven { driver: &driver, time_max: TIME_MAX };
    let boot_id = identity.boot_id();
    let executor = Executor { root: &root, home: &home, services: Some(&services), boot_id };
    let journal = prepared.journal(&saved.triggers, boot_id);
    let notes = Notes { state, saved: RefCell::new(saved) };
    let (update, ended) = executor.commit(&notes, journal);
    if ended.settled != Some(Settled::Old) {
        forget_taken(&update, &cache);
    }
    if ended.journal == Remains::Closed {
        free(&update, &home, &cache);
    }
    let word = match ended.settled {
        Some(Settled::New) => "done",
        Some(Settled::Old) => "rolled-back",
        None => "stuck",
    };
    Ok(format!("{word} {:?} {:?}", ended.last.outcome, ended.journal))
}
