//! What the drivers of all machines share, and what they count.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::dominator::orders::DefaultImage;
use api::planning::{PlanError, PlanJob, Planned};
use api::subd::HoldMachineRequest;
use model::display::error_chain;
use model::object::ObjectSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use rpc::audit_log::AuditLog;
use rpc::client::CallMemory;
use rpc::tls::Security;
use rpc::trees::TreeReader;
use tokio::sync::watch;

use crate::core::sources::Sources;
use crate::core::vote_links::VoteLinks;
use crate::runtime::claim_service::ClaimService;
use crate::runtime::clock::Clock;
use crate::runtime::commit_gate::CommitGate;
use crate::runtime::computed::ComputedService;
use crate::runtime::dial_limiter::DialLimiter;
use crate::runtime::history::History;
use crate::runtime::identities::Identities;
use crate::runtime::images::Images;
use crate::runtime::interned::Interned;
use crate::runtime::permits::PermitService;
use crate::runtime::task_orders::TaskOrderService;
use crate::runtime::webhooks::Webhooks;
use crate::storage::Storage;

/// What all drivers share.
#[derive(Debug)]
pub struct Shared {
    pub vote_links: VoteLinks,
    pub webhooks: Webhooks,
    pub security: Security,
    pub clock: Clock,
    pub reader: Arc<TreeReader>,
    pub images: Arc<Images>,
    pub gate: CommitGate,
    pub history: History,
    pub audit: AuditLog,
    pub identities: Arc<Identities>,
    pub state: Arc<Storage>,
    /// Notified after the default image has changed, and images are loaded for it.
    pub default_image_changed: watch::Sender<()>,
    pub metrics: DriverCounters,
    pub claim_service: Arc<ClaimService>,
    pub computed: Arc<ComputedService>,
    pub task_orders: Arc<TaskOrderService>,
    pub permits: Arc<PermitService>,
    pub sources: Sources,
    /// This dominator, as subs know it.
    pub holder: HoldMachineRequest,
    /// Limits how often subs that do not answer are dialled.
    pub dial_limiter: DialLimiter,
    /// The object caches that subs have reported.
    pub caches: Interned<ObjectSet>,
    /// For the large messages of the calls to subs.
    pub machine_memory: CallMemory,
    /// The port of subs whose record names none.
    pub subd_port: u16,
    /// How long ago the certificate of a machine may have ended that gets another one; zero if none
    /// does.
    pub renew_expired: Duration,
    /// How long after it has left the machine database the tasks of a machine are stopped.
    pub departing_after: Duration,
}

impl Shared {
    /// Returns the image of machines whose record names none.
    pub fn default_image(&self) -> Option<Arc<DefaultImage>> {
        Option::clone(&self.state.default_image.get())
    }

    /// Makes the plan for a machine, or returns one that was made for an equal machine.
    /// The error says why no plan can be made.
    pub async fn planned(self: &Arc<Self>, job: PlanJob) -> Result<Planned, String> {
        if let Some(planned) = self.images.plans.find(&job) {
            return Ok(planned);
        }
        // To hand the job over to a thread would take longer.
        if job.is_in_place() {
            return self.plan(&job).map_err(|error| error_chain(&error));
        }
        let shared = Arc::clone(self);
        let planned = self.reader.compute(move || {
            // Another driver may have made the same meanwhile.
            if let Some(planned) = shared.images.plans.find(&job) {
                return Ok(planned);
            }
            shared.plan(&job)
        });
        match planned.await {
            Ok(Ok(planned)) => Ok(planned),
            Ok(Err(error)) => Err(error_chain(&error)),
            Err(error) => Err(error.text()),
        }
    }

    fn plan(&self, job: &PlanJob) -> Result<Planned, PlanError> {
        let started = Instant::now();
        let planned = job.run();
        self.metrics.planned(started.elapsed());
        planned.map(|planned| self.images.plans.add(job, planned))
    }
}

/// The upper limits of the buckets of plan durations, in seconds.
const PLAN_SECONDS: [f64; 9] = [0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0];

#[derive(Debug)]
pub struct DriverCounters {
    polls: Counter,
    polls_failed: Counter,
    plans: Histogram,
}

impl Default for DriverCounters {
    fn default() -> Self {
        Self {
            polls: Counter::default(),
            polls_failed: Counter::default(),
            plans: Histogram::new(PLAN_SECONDS),
        }
    }
}

impl DriverCounters {
    /// Counts a poll.
    pub fn polled(&self, answered: bool) {
        if answered { &self.polls } else { &self.polls_failed }.inc();
    }

    /// Counts a plan.
    pub fn planned(&self, took: Duration) {
        self.plans.observe(took.as_secs_f64());
    }

    /// Registers the counters.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("polls", "Polls that subs have answered", self.polls.clone());
        registry.register(
            "polls_failed",
            "Polls that subs have not answered",
            self.polls_failed.clone(),
        );
        registry.register_with_unit(
            "plan",
            "Time that it took to make a plan; the count is that of plans",
            Unit::Seconds,
            self.plans.clone(),
        );
    }
}
