//! Says what would be done, and does nothing: plans are made from the machines as they are known,
//! in the memory of the dominator, and thrown away.
//!
//! Machines that are alike share their plans ([`crate::runtime::plan_cache`]), as they do when an
//! update is made,
//! so that a fleet on few images costs few plans. One caller at a time is served, and no call takes
//! long: whoever asks about many machines asks again for the rest.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::dominator::orders::DefaultImage;
use api::dominator::plan::{
    CheckMdbReply, Gap, MACHINES_MAX, MachinePlan, Outlook, PlanMachineReply, PlanMachineRequest,
    PlanMachinesReply,
};
use api::planning::preview::{Former, Lack, Preview, Summary};
use model::filter::Patterns;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::mdb::{Edit, Machine, Machines};
use model::object::ObjectId;
use model::report::report;
use model::scope::Scope;
use model::tree::Tree;
use rpc::client::Client;

use super::{Fleet, OrderError};
use crate::core::default_image;
use crate::core::sub::WhatIfInput;
use crate::runtime::driver::{Handle, Shared, peer_of};
use api::planning::{PlanJob, PlanKey, Planned};

/// How long one call plans before it answers with what it has.
const TIME_MAX: Duration = Duration::from_secs(2);

/// How long a sub may take to tell its tree, if nobody has asked for it before.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// How many plans are held with what they come to, because the next machine may have the same.
const COUNTED_MAX: usize = 16;

/// What is missing for a plan, also in words.
type Missing = (Gap, String);

impl Fleet {
    /// What an update of one machine would do.
    ///
    /// # Errors
    ///
    /// [`OrderError::Unknown`], or [`OrderError::NoPlan`].
    pub async fn plan_machine(
        &self,
        request: PlanMachineRequest,
    ) -> Result<PlanMachineReply, OrderError> {
        let PlanMachineRequest { hostname, image } = request;
        let _turn = self.planning.lock().await;
        let (handle, mut machine) = self.find(&hostname)?;
        if let Some(image) = image {
            machine.required_image = image.as_str().to_owned();
        }
        let mut round = Round::new(&self.shared);
        let made = round.plan(&handle, &machine).await;
        let made = made.map_err(|(gap, why)| OrderError::NoPlan { hostname, gap, why })?;
        let (preview, mut waits) = handle.look(|sub| {
            let nothing = Default::default();
            let cached = sub.view().map_or(&nothing, |view| &view.cache);
            let preview = Preview::new(&made.image, &made.planned, cached, &made.former);
            (preview, sub.would_wait(&machine))
        });
        if let Some(why) = self.shared.history.trouble() {
            let why = format!("what is ordered cannot be put on record: {why}");
            waits.push((Status::UpdatesDisabled, why));
        }
        if let Some(brake) = self.shared.gate.brake() {
            let why = format!("updates of all machines are disabled: {}", brake.reason);
            waits.push((Status::UpdatesDisabled, why));
        }
        Ok(PlanMachineReply { preview, waits })
    }

    /// What would be done to `machines`, or the first of them, if these were their records.
    ///
    /// # Errors
    ///
    /// [`OrderError::TooManyMachines`].
    pub async fn plan_machines(
        &self,
        machines: Vec<Machine>,
    ) -> Result<PlanMachinesReply, OrderError> {
        if machines.len() > MACHINES_MAX {
            return Err(OrderError::TooManyMachines);
        }
        let _turn = self.planning.lock().await;
        let start = Instant::now();
        let mut round = Round::new(&self.shared);
        let mut plans = Vec::new();
        for machine in &machines {
            if !plans.is_empty() && start.elapsed() > TIME_MAX {
                break;
            }
            let known = self.find(&machine.hostname).ok();
            plans.push(round.look(known, machine).await);
        }
        Ok(PlanMachinesReply { updates: round.updates, machines: plans })
    }

    /// What `machines` would change of the database in force, and whether they would be held.
    #[must_use]
    pub fn check_mdb(&self, machines: &Machines) -> CheckMdbReply {
        let inner = self.inner.lock().expect("no holder panics");
        let held = inner.intake.hold_reason(machines).map(|doubt| doubt.to_string());
        let in_force = inner.intake.in_force();
        drop(inner);
        let edit = Edit::between(&in_force, machines);
        let names = |machines: Vec<Machine>| machines.into_iter().map(|one| one.hostname).collect();
        CheckMdbReply {
            held,
            brake: self.shared.gate.brake().map(|brake| (*brake).clone()),
            added: names(edit.added),
            removed: names(edit.removed),
            changed: edit.changed.into_iter().map(|changed| changed.hostname).collect(),
        }
    }

    fn find(&self, hostname: &str) -> Result<(Arc<Handle>, Machine), OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let watched = inner.watched(hostname)?;
        Ok((Arc::clone(&watched.handle), Machine::clone(&watched.machine)))
    }
}

fn unknown((gap, why): Missing) -> Outlook {
    Outlook::Unknown { gap, why }
}

/// A plan with what it was made from.
struct Made {
    image: Arc<RequiredImage>,
    planned: Arc<Planned>,
    former: Arc<Former>,
}

/// What a plan comes to on machines with one former image.
struct Counted {
    planned: Arc<Planned>,
    image: ObjectId,
    former: Option<ImageName>,
    update: u32,
    lack: Lack,
}

/// The work for one caller: what is found for one machine serves the next.
struct Round<'a> {
    shared: &'a Arc<Shared>,
    /// The image of machines whose record names none.
    default: Option<Arc<DefaultImage>>,
    images: BTreeMap<ImageName, Result<Arc<RequiredImage>, String>>,
    formers: BTreeMap<ImageName, Arc<Former>>,
    scopes: Vec<(ObjectId, Patterns, Scope)>,
    counted: VecDeque<Counted>,
    last: Option<Arc<Planned>>,
    updates: Vec<Summary>,
}

impl<'a> Round<'a> {
    fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            default: shared.default_image.borrow().clone(),
            images: BTreeMap::new(),
            formers: BTreeMap::new(),
            scopes: Vec::new(),
            counted: VecDeque::new(),
            last: None,
            updates: Vec::new(),
        }
    }

    /// What would be done to a machine that is `known` by one record, under another.
    async fn look(
        &mut self,
        known: Option<(Arc<Handle>, Machine)>,
        machine: &Machine,
    ) -> MachinePlan {
        let (outlook, waits) = match self.reached(known, machine).await {
            Ok(handle) => {
                let outlook = match self.plan(&handle, machine).await {
                    Ok(made) => self.count(&handle, made),
                    Err(missing) => unknown(missing),
                };
                (outlook, handle.look(|sub| sub.would_wait(machine)))
            }
            Err(missing) => (unknown(missing), Vec::new()),
        };
        MachinePlan { hostname: machine.hostname.clone(), outlook, waits }
    }

    /// The machine that the record means, if it is looked after. That the image is missing is worth
    /// more to know.
    async fn reached(
        &mut self,
        known: Option<(Arc<Handle>, Machine)>,
        machine: &Machine,
    ) -> Result<Arc<Handle>, Missing> {
        self.required(machine).await?;
        let Some((handle, known)) = known else {
            return Err((Gap::NewMachine, "it is not looked after yet".to_owned()));
        };
        let port = self.shared.subd_port;
        if peer_of(&known, port) == peer_of(machine, port) {
            return Ok(handle);
        }
        let why = "the record has another address, where another machine may be".to_owned();
        Err((Gap::OtherAddress, why))
    }

    /// The image that `machine` requires, by its record or by default.
    async fn required(&mut self, machine: &Machine) -> Result<Arc<RequiredImage>, Missing> {
        let Some(name) = default_image::required(machine, self.default.as_deref()) else {
            let why = "the record names no image for it, and there is no default image".to_owned();
            return Err((Gap::ImageUndefined, why));
        };
        self.image(&name).await.map_err(|why| (Gap::ImageMissing, why))
    }

    /// The plan of the machine for the image that `machine` requires.
    async fn plan(&mut self, handle: &Handle, machine: &Machine) -> Result<Made, Missing> {
        let image = self.required(machine).await?;
        let prospect = handle.look(|sub| sub.what_if())?;
        if self.scope(&image, &prospect.exclusions) != prospect.scope {
            let name = image.name();
            let why = format!("it does not scan as {name} asks; before the update it is told to");
            return Err((Gap::OtherScan, why));
        }
        let tree = match &prospect.tree {
            Some(tree) => tree.clone(),
            None if !prospect.is_right_machine => {
                let why = "it may be another machine than the one that is meant, and is not asked \
                           for its tree";
                return Err((Gap::NotReached, why.to_owned()));
            }
            None => self.read(machine, &prospect).await?,
        };
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: prospect.scan_number },
            tree,
            scan: prospect.scan,
            exclusions: prospect.exclusions,
            image: Arc::clone(&image),
        };
        let planned = self.shared.planned(job).await.map_err(|why| (Gap::Impossible, why))?;
        let planned = self.held(planned);
        let former = self.former(prospect.last_image).await;
        Ok(Made { image, planned, former })
    }

    async fn image(&mut self, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        if let Some(found) = self.images.get(name) {
            return found.clone();
        }
        let found = self.shared.images.look_up(name).await;
        self.images.insert(name.clone(), found.clone());
        found
    }

    async fn former(&mut self, name: Option<ImageName>) -> Arc<Former> {
        let Some(name) = name else { return Arc::default() };
        if let Some(found) = self.formers.get(&name) {
            return Arc::clone(found);
        }
        let (triggers, unknown) = match self.shared.images.triggers(&name).await {
            Ok(triggers) => (triggers, None),
            Err(why) => (Default::default(), Some(why)),
        };
        let former = Arc::new(Former { image: Some(name.clone()), triggers, unknown });
        self.formers.insert(name, Arc::clone(&former));
        former
    }

    fn scope(&mut self, image: &RequiredImage, exclusions: &Patterns) -> Scope {
        let known = self
            .scopes
            .iter()
            .find(|(known, lines, _)| *known == image.digest && lines == exclusions);
        if let Some((_, _, scope)) = known {
            return *scope;
        }
        let scope = Scope::of(&image.scan, exclusions.lines());
        self.scopes.push((image.digest, exclusions.clone(), scope));
        scope
    }

    /// The tree of a machine that nobody had to compare yet.
    async fn read(&self, machine: &Machine, prospect: &WhatIfInput) -> Result<Tree, Missing> {
        let client = Client::new(peer_of(machine, self.shared.subd_port), &self.shared.security);
        let reading = self.shared.reader.from_sub(&client, prospect.scan.root);
        let why = match tokio::time::timeout(READ_LIMIT, reading).await {
            Ok(Ok(tree)) => return Ok(tree),
            Ok(Err(error)) => report(&error),
            Err(_) => format!("it did not come within {} s", READ_LIMIT.as_secs()),
        };
        Err((Gap::NotScanned, format!("its tree cannot be read: {why}")))
    }

    /// The same as was found for the last machine, if it is the same.
    fn held(&mut self, planned: Planned) -> Arc<Planned> {
        let last = self.last.as_ref();
        match last.filter(|last| Arc::ptr_eq(&last.plan, &planned.plan)) {
            Some(last) => Arc::clone(last),
            None => Arc::clone(self.last.insert(Arc::new(planned))),
        }
    }

    /// What the plan comes to on this machine.
    fn count(&mut self, handle: &Handle, made: Made) -> Outlook {
        let Made { image, planned, former } = made;
        let is_same = |counted: &Counted| {
            Arc::ptr_eq(&counted.planned.plan, &planned.plan)
                && counted.image == image.digest
                && counted.former == former.image
        };
        let (update, lack) = match self.counted.iter().find(|counted| is_same(counted)) {
            Some(counted) => (counted.update, counted.lack),
            None => {
                let update = self.number_of(Summary::of(&image, &planned, &former));
                let lack = Lack::of(&planned);
                let planned = Arc::clone(&planned);
                let (image, former) = (image.digest, former.image.clone());
                self.counted.push_back(Counted { planned, image, former, update, lack });
                if self.counted.len() > COUNTED_MAX {
                    self.counted.pop_front();
                }
                (update, lack)
            }
        };
        let (fetch_objects, fetch_bytes) = handle.look(|sub| sub.would_fetch(lack, &planned));
        Outlook::Update { update, fetch_objects, fetch_bytes }
    }

    /// The number of an update among those that differ.
    fn number_of(&mut self, update: Summary) -> u32 {
        let known = self.updates.iter().position(|known| *known == update);
        let number = known.unwrap_or_else(|| {
            self.updates.push(update);
            self.updates.len() - 1
        });
        u32::try_from(number).expect("there are no more updates than machines in one call")
    }
}
