//! Orders about rollouts: start, stop, cancel, roll back, resolve, and votes.

use std::collections::BTreeSet;
use std::sync::Arc;

use model::tree::Time;

use super::{Editor, EnvironmentState, RolloutRecord, State, UNFINISHED_MAX};
use crate::decide;
use crate::definition::Subject;
use crate::document::{
    Event, FailureEvent, Kind, Revision, Rollout, RolloutState, Scan, StartEvent, Step, StepState,
    VoteEvent, name_of,
};
use crate::steps::Said;

/// Starts a rollout.
#[derive(Clone, Debug, Default)]
pub struct StartOrder {
    /// Each as `NAME@REVISION`; of a rollback also of an old revision.
    pub environments: Vec<String>,
    pub kind: Kind,
    pub scan: Scan,
    /// True not to wait for windows, freezes, soaking, a least duration and the age of an image.
    pub urgent: bool,
    /// True to bring images although they are deprecated.
    pub allow_deprecated: bool,
}

/// What is ordered of a rollout that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutOrder {
    /// Machines stay as they are.
    Stop,
    /// It has not begun, and does not begin.
    Cancel,
    /// What it has changed goes back.
    RollBack,
    /// Its rollback has failed: its machines get the committed revisions.
    Resolve,
}

impl State {
    /// Starts a rollout, or lets it wait. One of the same environments that waits is replaced.
    /// Returns its number.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 400, 404, or 409 for a revision that is not the newest, or
    /// if the caller has started too many.
    pub fn start(&mut self, order: &StartOrder, by: &Editor) -> Result<u64, Said> {
        let number = self.next_rollout();
        let id = format!("r{number}");
        let rollout = match order.kind {
            Kind::Rollback => self.back(&id, order)?,
            _ => self.forward(&id, order)?,
        };
        if rollout.steps.iter().all(|step| step.revision == step.from) {
            let message = "all that is named is committed already: nothing is to be done";
            return Err(Said::new(409, message));
        }
        let mut rollout = Rollout {
            kind: order.kind,
            urgent: order.urgent,
            allow_deprecated: order.allow_deprecated,
            by: by.who.clone(),
            ..rollout
        };
        rollout.state = RolloutState::Pending;
        let named: BTreeSet<&str> = order.environments.iter().map(|text| name_in(text)).collect();
        let is_brought = |name: &String| named.contains(name.as_str());
        let is_replaced = |record: &RolloutRecord| {
            let waits = record.rollout.state == RolloutState::Pending;
            waits && record.rollout.changing().iter().any(is_brought)
        };
        let others = self.unfinished().filter(|record| !is_replaced(record));
        let theirs = others.filter(|record| record.rollout.by == by.who).count();
        if order.kind == Kind::User && theirs >= UNFINISHED_MAX {
            let message = format!(
                "{} has started {UNFINISHED_MAX} rollouts that have not ended: wait for one, or \
                 stop one",
                by.who
            );
            return Err(Said::new(409, message));
        }
        for record in self.rollouts.values_mut().filter(|record| is_replaced(record)) {
            let record = Arc::make_mut(record);
            record.end(RolloutState::Canceled, format!("replaced by {id}"), by.now);
        }
        if order.kind != Kind::Cleanup {
            self.withdraw_cleanups(&rollout, &named, by.now);
        }
        let touched = rollout.steps.iter().filter(|step| is_brought(&step.environment));
        for step in touched {
            if let Some(environment) = self.environments.get_mut(&step.environment) {
                let environment = Arc::make_mut(environment);
                environment.activate(&step.environment, &mut self.members);
                environment.started = environment.started.max(step.revision.unwrap_or_default());
            }
        }
        let since = rollout.steps.iter().map(|step| (step.id.clone(), by.now)).collect();
        let (why, created) = (by.why.clone(), by.now);
        let record =
            RolloutRecord { number, rollout, why, created, since, ..RolloutRecord::default() };
        let brought = record.rollout.steps.clone();
        self.rollouts.insert(number, Arc::new(record));
        for step in brought.iter().filter(|step| step.revision != step.from) {
            self.note_kept(&step.environment, step.revision.unwrap_or_default());
        }
        self.forget_old();
        Ok(number)
    }

    /// Returns the rollout of newest revisions. Environments that only depend on those named keep
    /// their revisions.
    fn forward(&self, id: &str, order: &StartOrder) -> Result<Rollout, Said> {
        let start = StartEvent {
            id: id.to_owned(),
            environments: order.environments.clone(),
            by: String::new(),
        };
        let mut document = self.document(None);
        document.scan = order.scan;
        document.event = Some(Event::Start(start));
        let answer = decide(&document);
        if let Some(said) = answer.event.filter(|said| said.code != 200) {
            return Err(said);
        }
        let rollout = answer.rollout.or(answer.pending);
        let mut rollout = rollout.ok_or_else(|| Said::new(400, "nothing is to be done"))?;
        let named = |name: &str| order.environments.iter().any(|text| name_in(text) == name);
        // A cleanup takes nothing else on.
        if order.kind == Kind::Cleanup {
            rollout.steps.retain(|step| named(&step.environment));
        }
        for step in rollout.steps.iter_mut().filter(|step| !named(&step.environment)) {
            step.revision = step.from;
        }
        // What depends on them, and has never been brought anywhere, is not concerned.
        rollout.steps.retain(|step| step.revision != Some(0));
        for step in &mut rollout.steps {
            *step = fresh(step);
        }
        Ok(rollout)
    }

    /// Returns the rollout back to old revisions.
    fn back(&self, id: &str, order: &StartOrder) -> Result<Rollout, Said> {
        let mut steps = Vec::new();
        for text in &order.environments {
            let (name, revision) = match text.split_once('@') {
                Some((name, text)) => {
                    let number: Result<Revision, _> = text.parse();
                    let bad = |_| Said::new(400, format!("`{text}` is no revision"));
                    (name, Some(number.map_err(bad)?))
                }
                None => (text.as_str(), None),
            };
            let missing = || Said::new(404, format!("there is no environment `{name}`"));
            let environment = self.environments.get(name).ok_or_else(missing)?;
            let former = environment.former.last().copied().filter(|former| *former > 0);
            let revision = revision.or(former).ok_or_else(|| {
                Said::new(404, format!("{name} has no former revision: name one, as {name}@N"))
            })?;
            let is_content = environment.subject() == Some(Subject::Content);
            // Some machine may have had what was started since, and goes back to what it has now.
            let is_last = environment.started <= environment.committed;
            if is_content && (Some(revision) != former || !is_last) {
                let message = format!(
                    "machines have the content before the last change only: restore the former \
                     configuration of the filegen-server of {name}"
                );
                return Err(Said::new(409, message));
            }
            if revision > 0 && !environment.revisions.contains_key(&revision) {
                return Err(Said::new(404, format!("{name} has no revision {revision}")));
            }
            steps.push(Step {
                id: name.to_owned(),
                environment: name.to_owned(),
                revision: Some(revision),
                from: Some(environment.committed),
                ..Step::default()
            });
        }
        if steps.is_empty() {
            return Err(Said::new(400, "no environment is named"));
        }
        Ok(Rollout { id: id.to_owned(), kind: Kind::Rollback, steps, ..Rollout::default() })
    }

    /// Carries out an order about a rollout.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 404 for an unknown rollout, 409 if its state does not allow
    /// it.
    pub fn order(&mut self, id: &str, order: RolloutOrder, by: &Editor) -> Result<String, Said> {
        let record = Arc::clone(self.find(id)?);
        let state = record.rollout.state;
        let who = &by.who;
        if !record.rollout.kind.is_gated() {
            let message = format!(
                "{id} follows by itself from what machines are: mend them, or make its environment \
                 not active"
            );
            return Err(Said::new(409, message));
        }
        match (order, state) {
            (RolloutOrder::Cancel, RolloutState::Pending) => {
                self.end(&record, RolloutState::Canceled, format!("canceled by {who}"), by.now);
                Ok(format!("{id} is canceled"))
            }
            (RolloutOrder::Stop, RolloutState::Running | RolloutState::RollingBack) => {
                let changed = self.deactivate(&record);
                self.end(&record, RolloutState::Stopped, format!("stopped by {who}"), by.now);
                let known = changed.iter().filter_map(|name| self.environments.get(name));
                let means: BTreeSet<&str> = known.map(|one| one.inactive_means()).collect();
                let (changed, means) = (changed.join(", "), Vec::from_iter(means).join("; "));
                let stopped = format!("{id} is stopped; machines stay as they are");
                Ok(format!("{stopped}; not active: {changed}; {means}"))
            }
            (RolloutOrder::RollBack, RolloutState::Running) => {
                let open = record.rollout.steps.iter().find(|step| !step.state.is_finished());
                let step = open.map(|step| step.id.clone()).unwrap_or_default();
                let reason = format!("rolled back by {who}");
                let event = Event::Failure(FailureEvent { step, reason });
                self.happen(&record, event).map(|_| format!("{id} is rolled back"))
            }
            (RolloutOrder::Resolve, RolloutState::RollbackFailed) => {
                for name in record.rollout.changing() {
                    if let Some(environment) = self.environments.get_mut(&name) {
                        Arc::make_mut(environment).moved.clear();
                    }
                }
                self.end(&record, RolloutState::RolledBack, format!("resolved by {who}"), by.now);
                Ok(format!("{id} is resolved"))
            }
            (_, state) => {
                let (order, state) = (order.text(), name_of(&state));
                Err(Said::new(409, format!("{id} is {state}: it cannot be {order}")))
            }
        }
    }

    /// Takes a vote.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 403, 404, 409 or 410.
    pub fn vote(&mut self, id: &str, vote: VoteEvent) -> Result<String, Said> {
        let record = Arc::clone(self.find(id)?);
        self.happen(&record, Event::Vote(vote))
    }

    /// Fails if the voter has voted about this plan.
    ///
    /// # Errors
    ///
    /// [`Said`] has the code of HTTP: 404 or 410.
    pub fn expect_no_vote(&self, id: &str, vote: &VoteEvent) -> Result<(), Said> {
        let mut steps = self.find(id)?.rollout.steps.iter();
        let step = steps.find(|step| step.id == vote.step);
        match step.and_then(|step| step.vote_of(&vote.voter, &vote.digest)) {
            None => Ok(()),
            Some(_) => Err(Said::new(410, format!("{} has voted already", vote.voter))),
        }
    }

    /// Returns the rollout with this id, such as `r12`.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 404.
    pub fn find(&self, id: &str) -> Result<&Arc<RolloutRecord>, Said> {
        let number = id.strip_prefix('r').and_then(|number| number.parse::<u64>().ok());
        let found = number.and_then(|number| self.rollouts.get(&number));
        found.ok_or_else(|| Said::new(404, format!("there is no rollout `{id}`")))
    }

    /// Lets an event happen, without a look at machines.
    fn happen(&mut self, record: &RolloutRecord, event: Event) -> Result<String, Said> {
        let mut document = self.document(Some(record));
        document.event = Some(event);
        let mut rollout = record.rollout.clone();
        // Only the event: what follows from it is decided with the machines.
        let said = crate::decide::take_event(&document, &mut rollout);
        if said.code != 200 {
            return Err(said);
        }
        if let Some(record) = self.rollouts.get_mut(&record.number) {
            Arc::make_mut(record).rollout = rollout;
        }
        Ok(said.message)
    }

    pub(super) fn end(
        &mut self,
        record: &RolloutRecord,
        state: RolloutState,
        cause: String,
        now: Time,
    ) {
        if let Some(record) = self.rollouts.get_mut(&record.number) {
            Arc::make_mut(record).end(state, cause, now);
        }
    }

    /// Makes the environments of a rollout inactive: their machines keep what they have.
    fn deactivate(&mut self, record: &RolloutRecord) -> Vec<String> {
        let names = record.rollout.changing();
        for name in &names {
            if let Some(environment) = self.environments.get_mut(name) {
                Arc::make_mut(environment).deactivate();
                self.members.remove(name);
            }
        }
        names.into_iter().collect()
    }

    /// Makes an environment active, or not. Returns false if it was so.
    ///
    /// # Errors
    ///
    /// [`Said`] with code 404.
    pub fn set_active(&mut self, name: &str, active: bool) -> Result<bool, Said> {
        let missing = || Said::new(404, format!("there is no environment `{name}`"));
        let environment = self.environments.get_mut(name).ok_or_else(missing)?;
        if environment.active == active && (active || environment.deactivated) {
            return Ok(false);
        }
        let environment = Arc::make_mut(environment);
        match active {
            true => environment.activate(name, &mut self.members),
            false => {
                environment.deactivate();
                self.members.remove(name);
            }
        }
        Ok(true)
    }
}

/// Returns the environment of `NAME@REVISION`, or of `NAME`.
fn name_in(text: &str) -> &str {
    text.split('@').next().unwrap_or_default()
}

/// Returns a step of which nothing has been done.
fn fresh(step: &Step) -> Step {
    Step {
        id: step.id.clone(),
        environment: step.environment.clone(),
        revision: step.revision,
        from: step.from,
        ..Step::default()
    }
}

impl RolloutRecord {
    pub(super) fn end(&mut self, state: RolloutState, cause: String, now: Time) {
        for step in self.rollout.steps.iter_mut().filter(|step| !step.state.is_finished()) {
            step.state = StepState::Aborted;
            step.cause.clone_from(&cause);
        }
        (self.rollout.state, self.rollout.cause) = (state, cause);
        self.ended = Some(now);
    }
}

impl EnvironmentState {
    fn deactivate(&mut self) {
        (self.active, self.deactivated) = (false, true);
    }

    /// Says what follows while it is not active.
    #[must_use]
    pub fn inactive_means(&self) -> &'static str {
        match self.subject() {
            Some(Subject::Content) => "newer content waits until somebody starts it",
            _ => {
                "tasks that end by themselves are not restarted, and new machines get nothing; \
                 files are still repaired"
            }
        }
    }
}

impl RolloutOrder {
    fn text(self) -> &'static str {
        match self {
            Self::Stop => "stopped",
            Self::Cancel => "canceled",
            Self::RollBack => "rolled back",
            Self::Resolve => "resolved",
        }
    }
}
