//! A dominator that is killed at a write to its database while a rollout goes on.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use api::dominator::rollouts::{
    EditEnvironments, EditEnvironmentsRequest, ListEnvironments, ListEnvironmentsRequest,
    ListRollouts, ListRolloutsRequest, StartRollout, StartRolloutRequest, VoteOnStep,
    VoteOnStepRequest,
};
use api::method::Method;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rollouts::document::{Choice, RolloutState, StepState};
use rustix::fs::inotify;
use testing::crash_points::Sample;

use crate::rollouts::Fleet;
use crate::stage::PATIENCE;

const WEB: &str = r#"{"name": "web", "select": {"hosts": ["web*"]}, "source": {"image": "v2"},
    "strategy": {"min_healthy_percent": 50},
    "approval": {"voters": ["bob"], "min_approvals": 1}}"#;

/// Counts the writes to a file, and sends SIGKILL to a process at one of them.
struct Watch {
    writes: Arc<AtomicUsize>,
    /// The number of the write, from 1; `None` for none.
    at: Option<usize>,
}

impl Watch {
    fn start(file: &Path, process: u32, at: Option<usize>) -> Self {
        let queue = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&queue, file, inotify::WatchFlags::MODIFY).unwrap();
        let writes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&writes);
        let process = Pid::from_raw(i32::try_from(process).unwrap());
        // It ends with the test.
        std::thread::spawn(move || {
            let mut buffer = [std::mem::MaybeUninit::uninit(); 4_096];
            let mut events = inotify::Reader::new(&queue, &mut buffer);
            while events.next().is_ok() {
                if Some(counted.fetch_add(1, Ordering::SeqCst) + 1) == at {
                    let _ended = kill(process, Signal::SIGKILL);
                    return;
                }
            }
        });
        Self { writes, at }
    }

    fn writes(&self) -> usize {
        self.writes.load(Ordering::SeqCst)
    }

    fn has_killed(&self) -> bool {
        self.at.is_some_and(|at| self.writes() >= at)
    }
}

async fn call<M: Method>(fleet: &Fleet, request: &M::Request) -> Result<M::Reply, String> {
    fleet.stage.client.call::<M>(request).await.map_err(|error| error.to_string())
}

/// What the dominator has acknowledged, and must not lose.
#[derive(Default)]
struct Acknowledged {
    edit: bool,
    start: bool,
    vote: bool,
}

/// Does the next thing that somebody does who wants a rollout of `web`. Returns true at its end,
/// when nothing of it is left.
async fn go_on(fleet: &Fleet, acknowledged: &mut Acknowledged) -> Result<bool, String> {
    let request = ListEnvironmentsRequest::default();
    let environments = call::<ListEnvironments>(fleet, &request).await?.environments;
    if environments.is_empty() {
        assert!(!acknowledged.edit, "the edit is lost");
        let request = EditEnvironmentsRequest {
            groups: Vec::new(),
            environments: vec![serde_json::from_str(WEB).unwrap()],
            whole: false,
            dry_run: false,
            why: String::new(),
            who: "ann".to_owned(),
        };
        call::<EditEnvironments>(fleet, &request).await?;
        acknowledged.edit = true;
    }
    let rollouts = call::<ListRollouts>(fleet, &ListRolloutsRequest::default()).await?.rollouts;
    let Some(info) = rollouts.first() else {
        assert!(!acknowledged.start, "the rollout is lost");
        let request = StartRolloutRequest {
            environments: vec!["web@1".to_owned()],
            why: "a new release".to_owned(),
            who: "ann".to_owned(),
            ..StartRolloutRequest::default()
        };
        call::<StartRollout>(fleet, &request).await?;
        acknowledged.start = true;
        return Ok(false);
    };
    assert_eq!(rollouts.len(), 1, "{rollouts:?}");
    let waiting = info.rollout.steps.iter().find(|step| step.state == StepState::AwaitingApproval);
    if let Some(step) = waiting.filter(|step| step.votes.is_empty()) {
        assert!(!acknowledged.vote, "the vote is lost");
        let request = VoteOnStepRequest {
            rollout: info.rollout.id.clone(),
            step: step.id.clone(),
            vote: Choice::Approve,
            digest: step.digest.clone().unwrap_or_default(),
            once: false,
            why: String::new(),
            who: "bob".to_owned(),
        };
        call::<VoteOnStep>(fleet, &request).await?;
        acknowledged.vote = true;
    }
    match info.rollout.state {
        RolloutState::Succeeded => Ok(environments.iter().all(|web| {
            let left = (web.committed, web.newest, web.moved, web.rollout.as_str(), web.healthy);
            left == (1, 1, 0, "", 4)
        })),
        RolloutState::Pending | RolloutState::Running => Ok(false),
        other => panic!("{other:?}: {info:?}"),
    }
}

/// Brings a revision to four machines. The dominator is killed at write `at`. Returns the number of
/// writes.
async fn roll_out(at: Option<usize>) -> Result<usize, String> {
    let mut fleet = Fleet::new().await;
    let database = fleet.stage.directory.path().join("state/dominator.redb");
    let watch = Watch::start(&database, fleet.stage.id(), at);
    let (start, mut was_killed) = (Instant::now(), false);
    let mut acknowledged = Acknowledged::default();
    loop {
        let done = go_on(&fleet, &mut acknowledged).await;
        if watch.has_killed() && !was_killed {
            was_killed = true;
            fleet.stage.kill();
            fleet.stage.start().await;
            continue;
        }
        match done {
            Ok(true) => break,
            _ if start.elapsed() < PATIENCE => {}
            other => return Err(format!("no end: {other:?}")),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    fleet.wait_for(&["v2"; 4]).await;
    Ok(watch.writes())
}

#[test]
fn a_rollout_survives_a_kill_at_each_write_of_the_database() {
    let run = |at| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(roll_out(at))
    };
    let writes = run(None).unwrap();
    let points = (1..=writes).collect();
    let summary = |survived: &[(usize, &usize)]| format!("{} survived, ", survived.len());
    Sample::from_environment()
        .enumerate("rollout", points, |at, _| run(Some(*at)), summary)
        .unwrap();
}
