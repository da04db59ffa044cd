//! Samples of environments and rollouts.

use std::collections::BTreeMap;

use api::dominator::rollouts::*;
use model::mdb::Machine;
use model::tree::Time;
use rollouts::batch::{Batch, BatchState};
use rollouts::definition::{Definition, EnvironmentEdit, Source, Start};
use rollouts::document::*;
use rollouts::plan::{Class, StepPlan};
use rollouts::selector::{HostPatterns, Selector};
use rollouts::state::EditOutcome;
use rollouts::strategy::*;
use rollouts::window::Window;

fn text(text: &str) -> String {
    text.to_owned()
}

fn time(seconds: i64) -> Time {
    Time { seconds, nanoseconds: 5 }
}

fn selector() -> Selector {
    Selector {
        hosts: HostPatterns::new(vec![text("web*")]),
        locations: vec![text("nyc")],
        tags: [(text("tier"), vec![text("front")])].into(),
    }
}

fn strategy() -> Strategy {
    Strategy {
        method: Method::StopThenStart,
        min_healthy_percent: 75,
        min_batch: 2,
        canary: Some(3),
        soak_s: 60,
        timeout_s: 1_800,
        windows: vec![Window { zone: text("UTC"), begins: text("0 2 * * *"), minutes: 90 }],
        min_duration_s: 1_200,
        min_image_age_s: 86_400,
        requires_from: [super::name("web/4")].into(),
        analysis: Some([(text("limit"), text("2 %"))].into()),
    }
}

fn approval() -> Approval {
    Approval {
        voters: [text("ann"), text("bob")].into(),
        min_approvals: 2,
        min_rejections: 1,
        author_alone: true,
        rollback: RollbackApproval::Same,
        timeout_s: 7_200,
    }
}

fn group() -> Group {
    Group { name: text("prod"), depends_on: vec![text("lab")], approval: Some(approval()) }
}

fn definition() -> Definition {
    Definition {
        name: text("web"),
        group: Some(text("prod")),
        owner_groups: vec![text("webs")],
        owner_users: vec![text("ann")],
        select: selector(),
        source: Source::Image("web/8".parse().expect("it is a name")),
        start: Start::Auto,
        depends_on: vec![text("db")],
        strategy: strategy(),
        approval: Some(approval()),
        provides: [(text("http"), "2.1".to_owned().try_into().expect("it is a version"))].into(),
        requires: [(text("sql"), ">=15".to_owned().try_into().expect("it is a range"))].into(),
        disjoint: true,
    }
}

pub fn edit_environments() -> (EditEnvironmentsRequest, EditEnvironmentsReply) {
    let Definition { name, group: of, select, source, start, depends_on, .. } = definition();
    let Definition { strategy, approval, provides, requires, owner_groups, owner_users, .. } =
        definition();
    let edit = EnvironmentEdit {
        name,
        base: Some(4),
        source,
        group: of,
        owner_groups: Some(owner_groups),
        owner_users: Some(owner_users),
        select: Some(select),
        start: Some(start),
        depends_on: Some(depends_on),
        strategy: Some(strategy),
        approval,
        provides: Some(provides),
        requires: Some(requires),
        disjoint: Some(true),
    };
    let request = EditEnvironmentsRequest {
        groups: vec![group()],
        environments: vec![edit],
        whole: true,
        dry_run: true,
        why: text("why"),
        who: text("who"),
    };
    let outcome = EditOutcome {
        name: text("web"),
        revision: Some(5),
        what: text("updated"),
        warnings: vec![text("it selects no machine")],
    };
    (request, EditEnvironmentsReply { outcomes: vec![outcome] })
}

pub fn order_environment() -> (OrderEnvironmentRequest, OrderedReply) {
    let order = EnvironmentOrder::Delete { force: true };
    let request =
        OrderEnvironmentRequest { name: text("web"), order, why: text("why"), who: text("who") };
    (request, ordered())
}

fn ordered() -> OrderedReply {
    OrderedReply { message: text("done") }
}

pub fn list_environments() -> (ListEnvironmentsRequest, ListEnvironmentsReply) {
    let request = ListEnvironmentsRequest {
        names: vec![text("web")],
        group: text("prod"),
        all_revisions: true,
    };
    let revision = RevisionInfo {
        number: 5,
        definition: definition(),
        author: text("ann"),
        why: text("why"),
        at: time(7),
        images: vec![(text("web/8"), 3)],
        kept: vec![text("libs/1")],
        content: 7,
    };
    let environment = EnvironmentInfo {
        name: text("web"),
        newest: 5,
        committed: 4,
        active: true,
        selected: 6,
        machines: 7,
        healthy: 8,
        moved: 9,
        conflicts: vec![text("web1")],
        rollout: text("r12"),
        closed: Some(text("closed")),
        revisions: vec![revision],
    };
    (request, ListEnvironmentsReply { groups: vec![group()], environments: vec![environment] })
}

fn plan() -> StepPlan {
    let class =
        Class { from: text("web/7"), to: text("web/8"), machines: 3, hosts: vec![text("web1")] };
    StepPlan {
        environment: text("web"),
        revision: 5,
        from: 4,
        classes: vec![class],
        unknown_images: [text("web/8")].into(),
        digest: text("8d1f"),
    }
}

pub fn plan_rollout() -> (PlanRolloutRequest, PlanRolloutReply) {
    let machine = Machine {
        hostname: text("web1"),
        tags: BTreeMap::from([(text("tier"), text("front"))]),
        ..Machine::default()
    };
    let environments = vec![text("web@5")];
    let request = PlanRolloutRequest { environments, machines: Some(vec![machine]) };
    (request, PlanRolloutReply { plans: vec![plan()] })
}

pub fn start_rollout() -> (StartRolloutRequest, StartRolloutReply) {
    let request = StartRolloutRequest {
        environments: vec![text("web@5")],
        scan: Scan::Plan,
        rollback: true,
        urgent: true,
        allow_deprecated: true,
        why: text("why"),
        who: text("who"),
    };
    (request, StartRolloutReply { id: text("r12") })
}

pub fn order_rollout() -> (OrderRolloutRequest, OrderedReply) {
    let order = RolloutVerb::Resolve;
    let request =
        OrderRolloutRequest { id: text("r12"), order, why: text("why"), who: text("who") };
    (request, ordered())
}

pub fn vote_on_step() -> (VoteOnStepRequest, OrderedReply) {
    let request = VoteOnStepRequest {
        rollout: text("r12"),
        step: text("web"),
        vote: Choice::Reject,
        digest: text("8d1f"),
        once: true,
        why: text("why"),
        who: text("who"),
    };
    (request, ordered())
}

pub fn list_rollouts() -> (ListRolloutsRequest, ListRolloutsReply) {
    let request =
        ListRolloutsRequest { ids: vec![text("r12")], environment: text("web"), unfinished: true };
    let step = Step {
        id: text("web-back"),
        environment: text("web"),
        revision: Some(4),
        from: Some(5),
        direction: Direction::Back,
        state: StepState::Applying,
        cause: text("a step of the rollout has failed"),
        digest: Some(text("8d1f")),
        plan_is_empty: true,
        votes: vec![Vote { voter: text("ann"), vote: Choice::Approve, digest: text("8d1f") }],
        applied: true,
        soaked: true,
        healthy_for_s: Some(6),
        applying_for_s: Some(7),
        analysis: Some(Analysis { advice: Advice::Wait, why: text("2 % errors") }),
        created_resources: vec![CreatedResource {
            id: text("foodb"),
            on_removal: OnRemoval::Destroy,
        }],
        destroy: vec![text("foodb")],
    };
    let rollout = Rollout {
        id: text("r12"),
        kind: Kind::Mdb,
        state: RolloutState::RollingBack,
        cause: text("web failed"),
        by: text("ann"),
        urgent: true,
        allow_deprecated: true,
        steps: vec![step],
    };
    let batch = Batch {
        step: text("web-back"),
        machines: 10,
        healthy: 9,
        may_take_down: 2,
        canary: 1,
        done: 4,
        failed: vec![text("web2")],
        hosts: vec![text("web3")],
        state: BatchState::Go,
        reason: text("1 of 5 left"),
    };
    let info = RolloutInfo {
        rollout,
        why: text("why"),
        created: time(8),
        ended: Some(time(9)),
        since: vec![(text("web-back"), time(8))],
        batches: vec![batch],
        plans: vec![plan()],
        locks: vec![text("db")],
    };
    (request, ListRolloutsReply { rollouts: vec![info], paused: Some(text("brake")) })
}
