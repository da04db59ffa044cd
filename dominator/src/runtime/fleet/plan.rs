//! Previews updates: makes plans from what is in memory, and changes nothing. A machine that does
//! not scan with the settings of an image does so once for its plan.
//!
//! Machines that are alike share their plans ([`crate::runtime::recent`]) as they do in an update,
//! so that a fleet on few images costs few plans. Callers are served one at a time, and a call that
//! takes too long answers for the first machines only.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use api::dominator::Status;
use api::dominator::orders::DefaultImage;
use api::dominator::plan::{
    CheckMdbReply, MACHINES_MAX, MachinePlan, NoPlanReason, PlanMachineReply, PlanMachineRequest,
    PlanMachinesReply, PlanOutcome,
};
use api::fault::FaultCode;
use api::planning::preview::{FetchTotals, FormerImage, PlanSummary, Preview};
use api::subd::{PreviewScan, PreviewScanReply, PreviewScanRequest};
use model::display::{error_chain, size};
use model::filter::Patterns;
use model::image::ImageName;
use model::image::composition::nothing;
use model::image::required::RequiredImage;
use model::mdb::{Machine, Machines, MdbDiff};
use model::object::ObjectId;
use model::scope::Scope;
use model::tree::Tree;

use super::{Fleet, OrderError};
use crate::core::required_image;
use crate::core::rollback::Rollbacks;
use crate::core::sub::PreviewInput;
use crate::runtime::driver::{Handle, client_of, peer_of};
use crate::runtime::shared::Shared;
use api::planning::{PlanJob, PlanKey, Planned};

/// How long one call plans before it answers with what it has.
const TIME_MAX: Duration = Duration::from_secs(2);

/// How long the tree of a sub may take to read, if it was not read before.
const READ_LIMIT: Duration = Duration::from_secs(10);

/// How many plans are held with their summaries: the next machine may have the same.
const COUNTED_MAX: usize = 16;

/// What is missing for a plan, and a text that explains it.
#[derive(Debug)]
struct MissingPart {
    gap: NoPlanReason,
    why: String,
    /// True if the machine scans for the plan now: the caller asks again.
    is_scanning: bool,
}

impl From<(NoPlanReason, String)> for MissingPart {
    fn from((gap, why): (NoPlanReason, String)) -> Self {
        Self { gap, why, is_scanning: false }
    }
}

impl Fleet {
    /// Previews an update of one machine.
    pub async fn plan_machine(
        &self,
        request: PlanMachineRequest,
    ) -> Result<PlanMachineReply, OrderError> {
        let PlanMachineRequest { hostname, image } = request;
        let _turn = self.planning.lock().await;
        let (handle, mut machine) = self.find(&hostname)?;
        let mut run = PreviewRun::new(&self.shared);
        if let Some(image) = image {
            machine.required_image = self.with_bundles(&hostname, image);
            run.rollbacks = Arc::default();
        }
        let required = run.required_name(&machine);
        let made = run.plan(&handle, &machine).await;
        let made = made.map_err(|missing| {
            let MissingPart { gap, why, is_scanning } = missing;
            OrderError::NoPlan { hostname, gap, why, is_scanning }
        })?;
        let (preview, mut waits) = handle.with_sub(|sub| {
            let nothing = Default::default();
            let cached = sub.view().map_or(&nothing, |view| &*view.cache);
            let preview = Preview::new(&made.image, &made.planned, cached, &made.former);
            (preview, sub.update_obstacles(&machine, required.as_ref()))
        });
        if let Some(why) = self.shared.history.trouble() {
            let why = format!("the history cannot be written: {why}");
            waits.push((Status::UpdatesDisabled, why));
        }
        if let Some(brake) = self.shared.gate.brake() {
            let why = format!("updates of all machines are disabled: {}", brake.reason);
            waits.push((Status::UpdatesDisabled, why));
        }
        Ok(PlanMachineReply { preview, waits })
    }

    /// Previews updates of `machines`, or of the first of them, if these were their records.
    pub async fn plan_machines(
        &self,
        machines: Vec<Machine>,
    ) -> Result<PlanMachinesReply, OrderError> {
        if machines.len() > MACHINES_MAX {
            return Err(OrderError::TooManyMachines);
        }
        let _turn = self.planning.lock().await;
        let end = self.shared.clock.elapsed() + TIME_MAX;
        let mut run = PreviewRun::new(&self.shared);
        let mut plans = Vec::new();
        // Environments say more than the records.
        let records = machines.iter().map(|one| (one.hostname.clone(), Arc::new(one.clone())));
        let effective = self.effective(&records.collect()).records;
        for machine in machines.iter().filter_map(|one| effective.get(&one.hostname)) {
            if !plans.is_empty() && self.shared.clock.elapsed() > end {
                break;
            }
            let known = self.find(&machine.hostname).ok();
            plans.push(run.preview(known, machine).await);
        }
        Ok(PlanMachinesReply { updates: run.updates, machines: plans })
    }

    /// Returns what `machines` would change of the database in force, and whether they would be
    /// held.
    pub fn check_mdb(&self, machines: &Machines) -> CheckMdbReply {
        let inner = self.locked();
        let held = inner.admission.hold_reason(machines).map(|doubt| doubt.to_string());
        let in_force = inner.admission.in_force();
        drop(inner);
        let edit = MdbDiff::between(&in_force, machines);
        let names = |machines: Vec<Machine>| machines.into_iter().map(|one| one.hostname).collect();
        CheckMdbReply {
            held,
            brake: self.shared.gate.brake().map(|brake| (*brake).clone()),
            added: names(edit.added),
            removed: names(edit.removed),
            changed: edit.changed.into_iter().map(|changed| changed.hostname).collect(),
        }
    }

    pub(super) fn find(&self, hostname: &str) -> Result<(Arc<Handle>, Machine), OrderError> {
        let inner = self.locked();
        let watched = inner.watched(hostname)?;
        Ok((Arc::clone(&watched.handle), Machine::clone(&watched.machine)))
    }
}

/// A plan with what it was made from.
struct MadePlan {
    image: Arc<RequiredImage>,
    planned: Arc<Planned>,
    former: Arc<FormerImage>,
}

/// The summary of a plan on machines with one former image.
struct CountedPlan {
    planned: Arc<Planned>,
    image: ObjectId,
    former: Option<ImageName>,
    update: u32,
    lack: FetchTotals,
}

/// The work for one caller: what is loaded for one machine serves the next.
struct PreviewRun<'a> {
    shared: &'a Arc<Shared>,
    /// The image of machines whose record names none.
    default: Option<Arc<DefaultImage>>,
    rollbacks: Arc<Rollbacks>,
    images: BTreeMap<ImageName, Result<Arc<RequiredImage>, String>>,
    formers: BTreeMap<ImageName, Arc<FormerImage>>,
    scopes: Vec<(ObjectId, Patterns, Scope)>,
    counted: VecDeque<CountedPlan>,
    last: Option<Arc<Planned>>,
    updates: Vec<PlanSummary>,
}

impl<'a> PreviewRun<'a> {
    fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            default: shared.default_image(),
            rollbacks: shared.state.rollbacks.get(),
            images: BTreeMap::new(),
            formers: BTreeMap::new(),
            scopes: Vec::new(),
            counted: VecDeque::new(),
            last: None,
            updates: Vec::new(),
        }
    }

    /// Previews an update to the record `machine`; `known` is its present record.
    async fn preview(
        &mut self,
        known: Option<(Arc<Handle>, Machine)>,
        machine: &Machine,
    ) -> MachinePlan {
        let mut waits = Vec::new();
        let made = match self.reached(known, machine).await {
            Ok(handle) => {
                let required = self.required_name(machine);
                waits = handle.with_sub(|sub| sub.update_obstacles(machine, required.as_ref()));
                self.plan(&handle, machine).await.map(|made| self.outlook(&handle, made))
            }
            Err(missing) => Err(missing),
        };
        let outlook = made.unwrap_or_else(|MissingPart { gap, why, is_scanning }| {
            waits.extend(is_scanning.then(|| (Status::Rescanning, why.clone())));
            PlanOutcome::Unknown { gap, why }
        });
        MachinePlan { hostname: machine.hostname.clone(), outlook, waits }
    }

    /// Returns the handle of the machine that the record means, if there is one. A missing image is
    /// reported first.
    async fn reached(
        &mut self,
        known: Option<(Arc<Handle>, Machine)>,
        machine: &Machine,
    ) -> Result<Arc<Handle>, MissingPart> {
        match self.required(machine).await {
            // The machine may have bundles that leave.
            Err(missing) if missing.gap != NoPlanReason::ImageUndefined => return Err(missing),
            _ => {}
        }
        let Some((handle, known)) = known else {
            return Err((NoPlanReason::NewMachine, "it is not managed yet".to_owned()).into());
        };
        let port = self.shared.subd_port;
        if peer_of(&known, port) == peer_of(machine, port) {
            return Ok(handle);
        }
        let why = "the record has another address, where another machine may be".to_owned();
        Err((NoPlanReason::OtherAddress, why).into())
    }

    /// Returns the name of the image that a machine with the record `machine` must have.
    fn required_name(&self, machine: &Machine) -> Option<ImageName> {
        let default = self.default.as_deref();
        let rollback = self.rollbacks.of(machine, default);
        required_image::required(machine, default, rollback.map(|rollback| &**rollback))
    }

    /// Returns the image that a machine with the record `machine` must have.
    async fn required(&mut self, machine: &Machine) -> Result<Arc<RequiredImage>, MissingPart> {
        let Some(name) = self.required_name(machine) else {
            let why = "the record names no image for it, and there is no default image".to_owned();
            return Err((NoPlanReason::ImageUndefined, why).into());
        };
        Ok(self.image(&name).await.map_err(|why| (NoPlanReason::ImageMissing, why))?)
    }

    /// Returns the required image, or nothing if none is required, together with the bundles of the
    /// `last` image of the machine that leave with it.
    async fn with_leaving(
        &mut self,
        required: Result<Arc<RequiredImage>, MissingPart>,
        last: Option<ImageName>,
    ) -> Result<Arc<RequiredImage>, MissingPart> {
        let has_bundles = last.as_ref().is_some_and(ImageName::has_only_bundles);
        let image = match required {
            Err(missing) if missing.gap == NoPlanReason::ImageUndefined && has_bundles => nothing(),
            required => required?,
        };
        let Some(last) = last.filter(|last| !image.name().leaving(last).is_empty()) else {
            return Ok(image);
        };
        let image = self.shared.images.with_leaving(&image, &last).await;
        Ok(image.map_err(|why| (NoPlanReason::ImageMissing, why))?)
    }

    /// Makes the plan for the image that `machine` requires.
    async fn plan(&mut self, handle: &Handle, machine: &Machine) -> Result<MadePlan, MissingPart> {
        let required = self.required(machine).await;
        let input = handle.with_sub(|sub| sub.preview_input());
        let last = input.as_ref().ok().and_then(|input| input.last_image.clone());
        let image = self.with_leaving(required, last).await?;
        let mut input = input?;
        let scope = self.scope(&image, &input.exclusions);
        if (scope != input.scope || input.tree.is_none()) && !input.is_right_machine {
            let why = "it may be another machine than the one that is meant, and is not asked for \
                       its tree";
            return Err((NoPlanReason::NotReached, why.to_owned()).into());
        }
        if scope != input.scope {
            self.scan_for(machine, &image, scope, &mut input).await?;
        }
        let tree = match &input.tree {
            Some(tree) => tree.clone(),
            None => self.read(machine, &input).await?,
        };
        let preview = self.shared.computed.preview(machine, &image, &input.exclusions);
        let (computed, failures) = preview.await;
        if let Some(why) = failures.into_iter().next() {
            let why = format!("the content of computed files is not known: {why}");
            return Err((NoPlanReason::Impossible, why).into());
        }
        let job = PlanJob {
            key: PlanKey { image: image.digest, scan: input.scan_number, computed: 0 },
            tree,
            scan: input.scan,
            exclusions: input.exclusions,
            image: Arc::clone(&image),
            computed: Arc::new(computed),
            refused: input.refused,
        };
        let planned =
            self.shared.planned(job).await.map_err(|why| (NoPlanReason::Impossible, why))?;
        let planned = self.shared_plan(planned);
        let former = self.former(input.last_image).await;
        Ok(MadePlan { image, planned, former })
    }

    /// Has a machine that does not scan with the settings of `image` do so for this plan, and takes
    /// what it found as `input`. Its own settings stay.
    async fn scan_for(
        &self,
        machine: &Machine,
        image: &RequiredImage,
        scope: Scope,
        input: &mut PreviewInput,
    ) -> Result<(), MissingPart> {
        // Other callers wait for this one: it asks again.
        let request = PreviewScanRequest { scan: image.scan.clone(), wait_ms: 0 };
        let client = client_of(machine, self.shared);
        let (why, is_scanning) = match client.call_within::<PreviewScan>(&request, READ_LIMIT).await
        {
            Ok(PreviewScanReply { scan: Some(scan), left_alone, .. }) if scan.scope == scope => {
                input.refused = Arc::new(input.refused.with(left_alone));
                (input.scan, input.tree) = (Arc::new(scan), None);
                return Ok(());
            }
            Ok(PreviewScanReply { scan: Some(_), .. }) => {
                ("and found other paths".to_owned(), false)
            }
            Ok(PreviewScanReply { hashed_bytes, .. }) => {
                (format!("and does so for this plan now: {} hashed", size(hashed_bytes)), true)
            }
            Err(error) => match error.code() {
                Some(FaultCode::NoMethod) => {
                    let why = "and its subd is of a release that cannot do so for a plan; they are \
                               sent before the update";
                    (why.to_owned(), false)
                }
                code => {
                    let why = format!("and does not do so for this plan: {}", error_chain(&error));
                    (why, code == Some(FaultCode::Busy))
                }
            },
        };
        let why = format!("it does not scan with the settings of {}, {why}", image.name());
        Err(MissingPart { gap: NoPlanReason::OtherScan, why, is_scanning })
    }

    async fn image(&mut self, name: &ImageName) -> Result<Arc<RequiredImage>, String> {
        if let Some(found) = self.images.get(name) {
            return found.clone();
        }
        let found = self.shared.images.look_up(name).await;
        self.images.insert(name.clone(), found.clone());
        found
    }

    async fn former(&mut self, name: Option<ImageName>) -> Arc<FormerImage> {
        let Some(name) = name else { return Arc::default() };
        if let Some(found) = self.formers.get(&name) {
            return Arc::clone(found);
        }
        let (triggers, unknown) = match self.shared.images.triggers(&name).await {
            Ok(triggers) => (triggers, None),
            Err(why) => (Default::default(), Some(why)),
        };
        let former = Arc::new(FormerImage { image: Some(name.clone()), triggers, unknown });
        self.formers.insert(name, Arc::clone(&former));
        former
    }

    fn scope(&mut self, image: &RequiredImage, exclusions: &Patterns) -> Scope {
        if !image.leaving.is_empty() {
            return Scope::of(&image.scan, exclusions.lines());
        }
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

    /// Reads the tree of a machine that was not compared yet.
    async fn read(&self, machine: &Machine, input: &PreviewInput) -> Result<Tree, MissingPart> {
        let client = client_of(machine, self.shared);
        let reading = self.shared.reader.from_sub(&client, input.scan.root, None);
        let why = match tokio::time::timeout(READ_LIMIT, reading).await {
            Ok(Ok(tree)) => return Ok(tree),
            Ok(Err(error)) => error_chain(&error),
            Err(_) => format!("it did not come within {} s", READ_LIMIT.as_secs()),
        };
        Err((NoPlanReason::NotScanned, format!("its tree cannot be read: {why}")).into())
    }

    /// Returns the plan of the last machine, if it is the same.
    fn shared_plan(&mut self, planned: Planned) -> Arc<Planned> {
        let last = self.last.as_ref();
        match last.filter(|last| Arc::ptr_eq(&last.plan, &planned.plan)) {
            Some(last) => Arc::clone(last),
            None => Arc::clone(self.last.insert(Arc::new(planned))),
        }
    }

    /// Returns the summary of the plan for this machine.
    fn outlook(&mut self, handle: &Handle, made: MadePlan) -> PlanOutcome {
        let MadePlan { image, planned, former } = made;
        let is_same = |counted: &CountedPlan| {
            Arc::ptr_eq(&counted.planned.plan, &planned.plan)
                && counted.image == image.digest
                && counted.former == former.image
        };
        let (update, lack) = match self.counted.iter().find(|counted| is_same(counted)) {
            Some(counted) => (counted.update, counted.lack),
            None => {
                let update = self.update_number(PlanSummary::of(&image, &planned, &former));
                let lack = FetchTotals::of(&planned);
                let planned = Arc::clone(&planned);
                let (image, former) = (image.digest, former.image.clone());
                self.counted.push_back(CountedPlan { planned, image, former, update, lack });
                if self.counted.len() > COUNTED_MAX {
                    self.counted.pop_front();
                }
                (update, lack)
            }
        };
        let (fetch_objects, fetch_bytes) =
            handle.with_sub(|sub| sub.objects_to_fetch(lack, &planned));
        PlanOutcome::Update { update, fetch_objects, fetch_bytes }
    }

    /// Returns the number of an update among those that differ.
    fn update_number(&mut self, update: PlanSummary) -> u32 {
        let known = self.updates.iter().position(|known| *known == update);
        let number = known.unwrap_or_else(|| {
            self.updates.push(update);
            self.updates.len() - 1
        });
        u32::try_from(number).expect("there are no more updates than machines in one call")
    }
}
