//! What a machine does next about a task.

use jiff::{SignedDuration, Timestamp};
use model::boot_time::BootTime;
use model::permit::PermitError;
use model::task_order::{TaskOrder, next_of_dominator, next_of_machine};
use tasks::file::Restart;
use tasks::supervise::{
    Attempt, End, Exit, Next, OrderError, Phase, Situation, Step, TaskRecord, next_attempt, step,
    take_numbered_order, take_order,
};
use tasks::{Task, Template};

use crate::{at, present, schedule, task};

const NOON: &str = "2022-12-15T12:00:00Z";

/// A task on a machine, with a clock that is set by hand.
struct Machine {
    task: Task,
    template: Template,
    now: Timestamp,
    record: TaskRecord,
    live: Option<String>,
    ended: Option<(String, End)>,
    paused: bool,
    attempts: u32,
}

impl Machine {
    fn new(fields: &str) -> Self {
        Self {
            task: task(fields),
            template: present(),
            now: at(NOON),
            record: TaskRecord::default(),
            live: None,
            ended: None,
            paused: false,
            attempts: 0,
        }
    }

    fn step(&mut self) -> Step {
        self.attempts += 1;
        let attempt = format!("attempt {}", self.attempts);
        let observed = match (&self.live, &self.ended) {
            (Some(live), _) => Attempt::Live { attempt: live.clone() },
            (None, Some((attempt, end))) => {
                Attempt::Ended { attempt: attempt.clone(), end: end.clone() }
            }
            (None, None) => Attempt::None,
        };
        let situation = Situation {
            task: &self.task,
            template: &self.template,
            now: self.now,
            boot_now: &self.boot_now(),
            paused: self.paused,
            observed: &observed,
            next_attempt: &attempt,
        };
        let done = step(&situation, &mut self.record);
        if done.start.is_some() {
            assert_eq!(self.live, None, "two would be live");
            self.live = Some(attempt);
        }
        done
    }

    fn end(&mut self, exit: Exit) {
        let end = End { at: self.now, asked: false, exit };
        self.ended = self.live.take().map(|attempt| (attempt, end));
    }

    fn order(&mut self, order: TaskOrder) -> Result<(), OrderError> {
        let defined = Some((&self.task, &self.template));
        take_order(order, "why", self.now, defined, &mut self.record)
    }

    /// The machine was booted an hour before noon.
    fn boot_now(&self) -> BootTime {
        let since = self.now.duration_since(at(NOON)).as_secs() + 3_600;
        BootTime { boot_id: "one".to_owned(), ms: since.unsigned_abs() * 1_000 }
    }

    /// Takes a permit that ends after so long.
    fn permit(&mut self, number: u64, seconds: u64) -> Result<(), PermitError> {
        let now = self.boot_now();
        self.record.permit.take(number, &now.after_ms(seconds * 1_000), &now)
    }

    fn wait(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }

    fn starts(&mut self) -> bool {
        self.step().start.is_some()
    }

    fn stops(&mut self) -> Option<String> {
        self.step().stop
    }
}

#[test]
fn a_task_is_started_again_with_longer_pauses() {
    let mut machine = Machine::new(r#""restart": {"backoff_s": [2, 9]}"#);
    assert!(machine.starts());
    let mut pauses = Vec::new();
    for _ in 0..5 {
        machine.end(Exit::Code(1));
        let until = machine.step().wake_at.unwrap();
        pauses.push(until.duration_since(machine.now).as_secs());
        machine.now = until;
        assert!(machine.starts());
    }
    assert_eq!(pauses, [2, 4, 8, 9, 9]);
    // It ran for long enough to begin anew.
    machine.wait(9);
    machine.end(Exit::Signal(9));
    assert_eq!(machine.step().wake_at, Some(machine.now + SignedDuration::from_secs(2)));
    // A clock that was set back does not hold it for ever.
    machine.wait(-1_000_000);
    assert!(!machine.starts());
    machine.wait(9);
    assert!(machine.starts());
}

#[test]
fn what_is_not_restarted_waits_after_its_own_end_only() {
    let mut machine = Machine::new(r#""restart": {"backoff_s": [2, 9]}"#);
    machine.record.not_restarted = Some("why".to_owned());
    // Nothing has ended yet.
    assert!(machine.starts());
    machine.end(Exit::Code(1));
    assert_eq!(machine.step().wake_at, None);
    machine.wait(1_000);
    assert!(!machine.starts());
    assert_eq!(machine.record.runs[0].why_not_restarted(Some("why")), Some("why"));
    // An operator wants it.
    machine.order(TaskOrder::Restart).unwrap();
    assert!(machine.starts());
    // The machine was started again.
    machine.end(Exit::Rebooted);
    assert!(machine.starts());
    machine.end(Exit::Signal(11));
    assert!(!machine.starts());
    machine.record.not_restarted = None;
    machine.wait(2);
    assert!(machine.starts());
    // What could not be started, or was killed with its guard, has not ended by itself.
    machine.record.not_restarted = Some("why".to_owned());
    for exit in [Exit::NotStarted("no".to_owned()), Exit::Unwatched] {
        machine.end(exit);
        assert!(!machine.starts());
        machine.wait(9);
        assert!(machine.starts());
    }
}

#[test]
fn an_exclusive_task_that_is_not_restarted_gives_its_permit_up() {
    let mut machine = Machine::new(r#""exclusive": true"#);
    machine.record.not_restarted = Some("why".to_owned());
    machine.permit(1, 600).unwrap();
    assert!(machine.starts());
    machine.end(Exit::Code(1));
    machine.step();
    assert_eq!(machine.record.permit.until, None);
}

#[test]
fn the_policy_decides_about_the_end() {
    use Exit::{Code, NotStarted, Rebooted, Signal, Unwatched};
    let again = |after| Next::Again { after: SignedDuration::from_secs(after), failures: 1 };
    let now = |failures| Next::Again { after: SignedDuration::ZERO, failures };
    let over = |succeeded| Next::Ended { succeeded };
    let absent = || NotStarted("no".to_owned());
    #[rustfmt::skip]
    let table = [
        (Code(0), false,    again(1), over(true),  over(true)),
        (Code(3), false,    again(1), again(1),    over(false)),
        (Signal(9), false,  again(1), again(1),    over(false)),
        (Unwatched, false,  again(1), again(1),    over(false)),
        (absent(), false,   again(1), again(1),    over(false)),
        (Rebooted, false,   now(0),   now(0),      over(false)),
        (Code(0), true,     now(0),   now(0),      over(false)),
    ];
    for (exit, asked, always, on_failure, never) in table {
        let end = End { at: at(NOON), asked, exit };
        for (policy, want) in [("always", always), ("on-failure", on_failure), ("never", never)] {
            let restart: Restart =
                serde_json::from_str(&format!(r#"{{"policy": "{policy}"}}"#)).unwrap();
            let next = next_attempt(&restart, &end, SignedDuration::ZERO, 0);
            assert_eq!(next, want, "{policy}: {:?}", end.exit);
        }
    }
}

#[test]
fn a_new_version_starts_only_when_the_old_one_is_gone() {
    let mut machine = Machine::new("");
    assert!(machine.starts());
    machine.template = Template("cd".repeat(32));
    let why = machine.stops().unwrap();
    assert!(why.ends_with("is deleted"), "{why}");
    // It is asked once more, and nothing starts.
    assert_eq!(machine.step().start, None);
    machine.end(Exit::Code(0));
    assert!(machine.starts());
    assert_eq!(machine.record.runs.len(), 1);
    assert_eq!(machine.record.runs[0].template, machine.template);
}

#[test]
fn an_update_stops_a_task_and_it_comes_back() {
    let mut machine = Machine::new(r#""restart": {"policy": "never"}"#);
    assert!(machine.starts());
    machine.paused = true;
    assert!(machine.stops().unwrap().ends_with("makes room for an update"));
    machine.end(Exit::Signal(15));
    assert!(!machine.starts());
    machine.paused = false;
    assert!(machine.starts());
    // One that was ended by the machine did not succeed, and is not started again.
    machine.end(Exit::Rebooted);
    assert!(!machine.starts());
    assert_eq!(machine.record.runs[0].phase, Phase::Ended { succeeded: false });
}

#[test]
fn what_was_recorded_and_not_started_is_started() {
    let mut machine = Machine::new(r#""restart": {"policy": "never"}"#);
    assert!(machine.starts());
    // subd was killed between the record and the start.
    machine.live = None;
    assert!(machine.starts());
    assert_eq!(machine.record.runs[0].starts, 1);
    // What no record knows is stopped.
    machine.record = TaskRecord::default();
    assert_eq!(machine.stops().as_deref(), Some("no record knows it"));
}

#[test]
fn a_task_runs_between_its_hours() {
    let hours = schedule("UTC", "start 0 13 * * *; stop 0 14 * * *");
    let mut machine = Machine::new(&hours);
    let done = machine.step();
    assert_eq!((done.start, done.wake_at), (None, Some(at("2022-12-15T13:00:00Z"))));
    machine.wait(3_600);
    assert!(machine.starts());
    machine.wait(3_600);
    assert!(machine.stops().unwrap().ends_with("is deleted"));
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    assert_eq!(machine.record.runs, []);
}

#[test]
fn orders_are_taken_where_they_fit() {
    let mut machine = Machine::new("");
    let order = |machine: &mut Machine, order| machine.order(order);
    assert_eq!(order(&mut machine, TaskOrder::Hold), Err(OrderError::NoRun));
    assert_eq!(order(&mut machine, TaskOrder::Release), Err(OrderError::NotHeld));
    assert_eq!(order(&mut machine, TaskOrder::Resume), Err(OrderError::NotSuspended));
    assert!(machine.starts());
    order(&mut machine, TaskOrder::Hold).unwrap();
    assert!(machine.stops().unwrap().ends_with("is held: why"));
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    assert_eq!(order(&mut machine, TaskOrder::Restart), Err(OrderError::Held));
    order(&mut machine, TaskOrder::Release).unwrap();
    assert!(machine.starts());
    order(&mut machine, TaskOrder::Restart).unwrap();
    assert!(machine.stops().unwrap().ends_with("is restarted"));
    machine.end(Exit::Code(0));
    assert!(machine.starts());
    order(&mut machine, TaskOrder::Suspend).unwrap();
    assert!(machine.stops().is_some());
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    assert_eq!(machine.record.runs, []);
    order(&mut machine, TaskOrder::Resume).unwrap();
    assert!(machine.starts());
    // One that has ended starts again by order.
    let mut machine = Machine::new(r#""restart": {"policy": "never"}"#);
    assert!(machine.starts());
    machine.end(Exit::Code(1));
    assert!(!machine.starts());
    order(&mut machine, TaskOrder::Restart).unwrap();
    assert!(machine.starts());
}

#[test]
fn an_operator_starts_a_task_outside_of_its_hours() {
    let hours = schedule("UTC", "start 0 13 * * *; stop 0 14 * * *; stop 30 12 * * *");
    let mut machine = Machine::new(&hours);
    assert!(!machine.starts());
    machine.order(TaskOrder::Start).unwrap();
    assert_eq!(machine.order(TaskOrder::Start), Err(OrderError::HasRun));
    let started = machine.step();
    let (run, stop_at) = (Some("job-1671105600-0".to_owned()), Some(at("2022-12-15T12:30:00Z")));
    assert_eq!((started.start, started.stop_at), (run, stop_at));
    machine.wait(1_799);
    assert_eq!(machine.stops(), None);
    machine.wait(1);
    assert!(machine.stops().unwrap().ends_with("is deleted"));
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    // What an operator keeps stopped is not started.
    machine.order(TaskOrder::Suspend).unwrap();
    assert_eq!(machine.order(TaskOrder::Start), Err(OrderError::Held));
}

#[test]
fn an_exclusive_task_lives_only_with_a_permit() {
    let mut machine = Machine::new(r#""exclusive": true, "stop_timeout_s": 20"#);
    assert!(!machine.starts());
    machine.permit(4, 300).unwrap();
    let started = machine.step();
    // 20 s to stop and 10 s to be gone are left then.
    assert_eq!((started.start.is_some(), started.stop_at_boot_ms), (true, Some(3_870_000)));
    machine.wait(200);
    machine.permit(4, 300).unwrap();
    assert_eq!((machine.stops(), machine.step().stop_at_boot_ms), (None, Some(4_070_000)));
    // What was sent before comes late.
    machine.permit(4, 5).unwrap();
    assert_eq!(machine.permit(3, 300), Err(PermitError::Superseded));
    assert_eq!(machine.step().stop_at_boot_ms, Some(4_070_000));
    machine.wait(270);
    assert!(machine.stops().unwrap().starts_with("the permit of job-"));
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    // It may be given to another machine now, so it cannot be prolonged.
    machine.wait(30);
    assert!(!machine.starts());
    assert_eq!(machine.permit(4, 300), Err(PermitError::Superseded));
    machine.permit(5, 300).unwrap();
    assert!(machine.starts());
    // A machine that cannot use a permit gives it up.
    machine.order(TaskOrder::Hold).unwrap();
    assert!(machine.stops().is_some());
    assert!(machine.record.permit.until.is_some());
    machine.end(Exit::Code(0));
    assert!(!machine.starts());
    assert_eq!((machine.record.permit.number, &machine.record.permit.until), (5, &None));
    machine.order(TaskOrder::Release).unwrap();
    assert_eq!(machine.permit(5, 300), Err(PermitError::Superseded));
    assert!(!machine.starts());
}

#[test]
fn of_numbered_orders_the_highest_wins() {
    let mut machine = Machine::new("");
    assert!(machine.starts());
    let order = |machine: &mut Machine, number, order| {
        let defined = Some((&machine.task, &machine.template));
        let taken =
            take_numbered_order(number, (order, "why"), machine.now, defined, &mut machine.record);
        (taken, machine.record.order_number, machine.record.runs[0].held_by.is_some())
    };
    let superseded = |latest| Err(OrderError::Superseded { latest });
    use TaskOrder::{Hold, Release, Restart, Resume};
    let table = [
        (4, Hold, (Ok(()), 4, true)),
        // The answer to the first was lost.
        (4, Hold, (Ok(()), 4, true)),
        (2, Release, (superseded(4), 4, true)),
        // It does not fit, and another with the number may.
        (6, Restart, (Err(OrderError::Held), 4, true)),
        (6, Release, (Ok(()), 6, false)),
        // It is so.
        (8, Release, (Ok(()), 8, false)),
        (10, Resume, (Ok(()), 10, false)),
    ];
    for (number, given, expected) in table {
        assert_eq!(order(&mut machine, number, given), expected, "{number}");
    }
    // The machine's own operator has the next one, which no dominator gives.
    machine.order(Hold).unwrap();
    assert_eq!(machine.record.order_number, 11);
    assert_eq!(machine.order(Hold).map(|()| machine.record.order_number), Ok(13));
    assert_eq!(order(&mut machine, 12, Release), (superseded(13), 13, true));
    let next = [0, 1, 2, 12, 13, u64::MAX]
        .map(|number| (next_of_machine(number), next_of_dominator(number)));
    let last = (u64::MAX, u64::MAX - 1);
    assert_eq!(next, [(1, 2), (3, 2), (3, 4), (13, 14), (15, 14), last]);
}

#[test]
fn a_permit_ends_with_the_boot() {
    let mut machine = Machine::new(r#""exclusive": true"#);
    let until = BootTime { boot_id: "other".to_owned(), ms: 1 << 40 };
    let now = machine.boot_now();
    assert_eq!(machine.record.permit.take(1, &until, &now), Err(PermitError::Ended));
    machine.record.permit.until = Some(until);
    assert!(!machine.starts());
    assert_eq!(machine.record.permit.until, None);
}
