//! Machines that leave a fleet: when their tasks are stopped, and when they are forgotten.
// tidy: core

use api::dominator::departing::DepartingState::{
    Elsewhere, Left, Stopped, Stopping, Undecided, Waiting,
};

use super::*;

const AFTER: Duration = Duration::from_secs(900);
const WEEK: i64 = 7 * 86_400;

fn at(seconds: i64) -> Time {
    Time { seconds, nanoseconds: 0 }
}

fn leave(departing: &mut Departing, hostname: &str, tasks: Option<u32>, now: i64) {
    let machine = Machine { hostname: hostname.to_owned(), ..Machine::default() };
    departing.leave(Arc::new(machine), tasks, at(now));
}

/// Machines that have left at 0, with a task each.
fn left(count: usize) -> Departing {
    let mut departing = Departing::default();
    (0..count).for_each(|number| leave(&mut departing, &format!("m{number:03}"), Some(1), 0));
    departing
}

fn states(departing: &Departing) -> Vec<DepartingState> {
    departing.0.values().map(|departed| departed.state).collect()
}

fn resource() -> ResourceReport {
    ResourceReport {
        id: "db".to_owned(),
        kind: "marked".to_owned(),
        provisioner: "mark".to_owned(),
        state: api::subd::ResourceState::Made,
        text: String::new(),
        drift: None,
        is_orphan: false,
        needs: Vec::new(),
        outputs: "{}".to_owned(),
    }
}

#[test]
fn few_are_stopped_after_their_time_and_many_wait_for_an_operator() {
    // Machines that left, machines that are listed, seconds since then, whether stops are allowed.
    let table = [
        (1, 9, 899, true, Waiting),
        (1, 9, 900, true, Stopping),
        (1, 9, 900, false, Waiting),
        (3, 0, 900, true, Stopping),
        (4, 90, 0, true, Undecided),
        (4, 90, 900, true, Undecided),
        (4, 90, 900, false, Undecided),
        (4, 396, 900, true, Stopping),
        (5, 396, 900, true, Undecided),
    ];
    for (count, listed, seconds, may_stop, expected) in table {
        let mut departing = left(count);
        let decisions = departing.decide(at(seconds), listed, AFTER, may_stop);
        assert_eq!(states(&departing), vec![expected; count], "{count} of {listed}");
        let decided = if expected == Waiting { 0 } else { count };
        assert_eq!(decisions.len(), decided, "{count} of {listed}");
    }
}

#[test]
fn those_that_wait_for_an_operator_go_on_waiting_when_fewer_are_left() {
    let mut departing = left(4);
    departing.decide(at(1), 9, AFTER, true);
    let mut raised = AlarmSet::default();
    departing.raise_alarm(&mut raised);
    let mut expected = AlarmSet::default();
    let text = "4 of the machines that have left the machine database keep their tasks until an \
                operator decides, because they were too many at once: domtool departing list";
    expected.add(DEPARTING, "", Some(at(1)), text.to_owned());
    assert_eq!(raised, expected);

    departing.order("m000", DepartingOrder::Stop, ("ann", "gone"), at(2));
    departing.order("m001", DepartingOrder::Leave, ("ann", "moved"), at(2));
    departing.order("m002", DepartingOrder::Forget, ("ann", "moved"), at(2));
    departing.decide(at(5_000), 9, AFTER, true);
    assert_eq!(states(&departing), [Stopping, Left, Undecided]);
    let reported: Vec<(String, String)> =
        departing.report(AFTER).into_iter().map(|one| (one.who, one.why)).collect();
    let said = |who: &str, why: &str| (who.to_owned(), why.to_owned());
    assert_eq!(reported, [said("ann", "gone"), said("ann", "moved"), said("", "")]);
    // One more is one of few.
    leave(&mut departing, "new", None, 5_000);
    departing.decide(at(5_900), 9, AFTER, true);
    assert_eq!(states(&departing), [Stopping, Left, Undecided, Stopping]);
    // It is never forgotten while it waits, and leaves once.
    leave(&mut departing, "m003", Some(1), 5_900);
    departing.decide(at(10 * WEEK), 9, AFTER, true);
    assert_eq!(departing.0["m003"].state, Undecided);
    assert_eq!(departing.0["m003"].since, at(0));
    let saved = serde_json::to_string(&departing).unwrap();
    assert_eq!(serde_json::from_str::<Departing>(&saved).unwrap(), departing);
}

#[test]
fn what_is_over_is_forgotten_unless_it_has_resources() {
    // State, tasks, resources that it told of, seconds since then; the decision, and whether it
    // stays.
    let none = Some(Vec::new());
    let some = Some(vec![resource()]);
    let table = [
        (Stopped, Some(0), None, 0, None, true),
        (Stopped, Some(0), none.clone(), 0, None, false),
        (Stopped, Some(0), some.clone(), 2 * WEEK, None, true),
        (Stopped, Some(2), none.clone(), WEEK - 1, None, true),
        (Stopped, Some(2), none.clone(), WEEK, Some(Decision::Forget), false),
        (Stopped, Some(2), some.clone(), 2 * WEEK, None, true),
        (Left, Some(2), none.clone(), WEEK, Some(Decision::Forget), false),
        (Elsewhere, None, none.clone(), WEEK, Some(Decision::Forget), false),
        (Stopping, None, none.clone(), WEEK - 1, None, true),
        (Stopping, None, none, WEEK, Some(Decision::GiveUp), false),
        (Stopping, None, some, WEEK, Some(Decision::GiveUp), true),
    ];
    for (state, tasks, resources, seconds, decision, stays) in table {
        let mut departing = Departing::default();
        leave(&mut departing, "m", tasks, 0);
        let departed = departing.0.get_mut("m").unwrap();
        departed.set(state, String::new(), at(0));
        departed.resources = resources;
        let case = format!("{departed:?} after {seconds}");
        let decisions = departing.decide(at(seconds), 9, AFTER, true);
        let decided: Vec<Decision> = decisions.into_iter().map(|(_, decision)| decision).collect();
        assert_eq!(decided, decision.into_iter().collect::<Vec<_>>(), "{case}");
        assert_eq!(departing.0.contains_key("m"), stays, "{case}");
    }
}

/// A fleet from which machines leave, to which some come back, and of which some are decided, in
/// any order: at no look are more stopped than may leave at once, and none while more are
/// undecided.
#[test]
fn never_are_many_stopped_without_an_operator() {
    for seed in 0..200_u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut departing = Departing::default();
        let fleet = usize::try_from(10 + next(600)).unwrap();
        let mut now = 0;
        for _ in 0..100 {
            now += i64::try_from(next(600)).unwrap();
            for _ in 0..next(6) {
                let hostname = format!("m{:03}", next(fleet as u64));
                match next(4) {
                    0 => drop(departing.0.remove(&hostname)),
                    1 => departing.order(&hostname, DepartingOrder::Leave, ("ann", "y"), at(now)),
                    _ => leave(&mut departing, &hostname, Some(1), now),
                }
            }
            let undecided = departing.0.values().filter(|one| one.is_undecided()).count();
            let listed = fleet - departing.0.len();
            let decisions = departing.decide(at(now), listed, AFTER, true);
            let stopped = decisions.iter().filter(|(_, one)| *one == Decision::Stop).count();
            let most = at_once_max(listed + undecided);
            assert!(stopped <= most, "seed {seed}: {stopped} of {fleet}");
            assert!(stopped == 0 || undecided <= most, "seed {seed}: {undecided} of {fleet}");
        }
    }
}

#[test]
fn what_could_start_is_suspended_and_what_has_ended_for_good_is_not() {
    let report = |state, detail: &str, next_at| TaskReport {
        name: "job".to_owned(),
        state,
        detail: detail.to_owned(),
        run: None,
        started: None,
        starts: 1,
        last_end: None,
        health: None,
        next_at,
        again_at: None,
        permit: None,
        order_number: 0,
        not_restarted: None,
    };
    let stopping = report(TaskState::Stopping, "suspended: the machine is full", None);
    assert!(!must_suspend(&stopping));
    assert!(must_suspend(&report(TaskState::Stopping, "replaced", None)));
    // It is suspended, and a process of it may live.
    assert!(!has_stopped(&stopping));
    // The state, and whether it is suspended without and with a schedule.
    let table = [
        (TaskState::NotRun, false, false),
        (TaskState::Refused, false, false),
        (TaskState::Suspended, false, false),
        (TaskState::Held, false, true),
        (TaskState::Idle, false, true),
        (TaskState::Starting, true, true),
        (TaskState::Running, true, true),
        (TaskState::Unhealthy, true, true),
        (TaskState::Waiting, true, true),
        (TaskState::Succeeded, false, true),
        (TaskState::Failed, false, true),
    ];
    for (state, without, with) in table {
        assert_eq!(must_suspend(&report(state, "", None)), without, "{state:?}");
        assert_eq!(has_stopped(&report(state, "", None)), !without, "{state:?}");
        assert_eq!(must_suspend(&report(state, "", Some(at(9)))), with, "{state:?}");
    }
}
