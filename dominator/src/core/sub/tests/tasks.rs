//! Daemon tasks: when the machine is asked for them, and orders about them.
// tidy: core

use api::dominator::tasks::WantedTaskOrder;
use api::subd::{
    DEPARTED_WHY, GetTaskStatesReply, GetTaskStatesRequest, PermitReport, TaskOrder, TaskReport,
    TaskState, TaskStates, TasksVersion,
};
use expect_test::expect;
use model::boot_time::BootTime;
use model::image::required::RequiredImage;
use model::tree::Time;
use model::trigger::Triggers;

use super::*;

fn report(state: TaskState, order_number: u64) -> TaskReport {
    TaskReport {
        name: "logd".to_owned(),
        state,
        detail: "why".to_owned(),
        run: None,
        started: None,
        starts: 1,
        last_end: None,
        health: None,
        next_at: None,
        again_at: None,
        permit: None,
        order_number,
        not_restarted: None,
    }
}

fn order(order: TaskOrder, number: u64) -> WantedTaskOrder {
    let (task, why, who) = ("logd".to_owned(), "swap".to_owned(), "ann".to_owned());
    WantedTaskOrder { task, order, why, who, since: Time::default(), number }
}

impl Script {
    fn synced() -> Self {
        Self::scanning(image("base", &[("/a", "1")]), &[("/a", "1")])
    }

    /// Returns the question that was asked since the last time.
    fn question(&mut self) -> Option<GetTaskStatesRequest> {
        self.asked.map(|(_, request)| request)
    }

    fn answer(&mut self, version: u64, tasks: Option<Vec<TaskReport>>) {
        let (request_id, _) = self.asked.take().expect("it was asked");
        let states = tasks.map(|tasks| TaskStates { tasks, ..TaskStates::default() });
        let said_at = BootTime { boot_id: "one".to_owned(), ms: version };
        let reply = GetTaskStatesReply { version: TasksVersion(version), said_at, states };
        self.step("told", Event::TasksTold(request_id, Box::new(Ok(reply))));
    }

    fn answer_not(&mut self, kind: FailureKind) {
        let (request_id, _) = self.asked.take().expect("it was asked");
        let failure = Failure { kind, text: "no".to_owned() };
        self.step("not told", Event::TasksTold(request_id, Box::new(Err(failure))));
    }

    fn order(&mut self, orders: &[WantedTaskOrder]) {
        let order = SubOrder::WantTaskOrders(orders.to_vec());
        self.step("ordered", Event::Ordered(order));
    }
}

fn asks(have: Option<u64>) -> Option<GetTaskStatesRequest> {
    Some(GetTaskStatesRequest { have: have.map(TasksVersion) })
}

#[test]
fn a_machine_is_asked_after_a_poll_with_another_status() {
    let mut script = Script::synced();
    assert_eq!(script.question(), asks(None));
    assert_eq!(script.sub.tasks(), Err("the machine has not told them yet".to_owned()));
    // One question at a time.
    let first = script.asked;
    script.poll();
    assert_eq!(script.asked, first);
    script.answer(3, Some(vec![report(TaskState::Running, 0)]));
    assert_eq!(script.question(), asks(Some(3)));
    script.answer(3, None);
    let tasks = vec![report(TaskState::Running, 0)];
    let running = TaskStates { tasks, ..TaskStates::default() };
    assert_eq!(script.sub.tasks(), Ok(running.clone()));
    // A poll that has waited for nothing.
    script.reply.version.status -= 1;
    script.poll();
    assert_eq!(script.question(), None);
    script.poll();
    assert_eq!(script.question(), asks(Some(3)));
    // What is known stays known.
    script.answer_not(FailureKind::Unreachable);
    assert_eq!((script.question(), script.sub.tasks()), (None, Ok(running)));
    script.wait(2);
    assert_eq!(script.question(), asks(Some(3)));
    script.answer(4, Some(Vec::new()));
    assert_eq!(script.sub.tasks(), Ok(TaskStates::default()));
    // Also while the machine takes no orders, and an update is under way.
    script.reply.activity = Activity::Updating { update_id: 9 };
    script.step("brake", Event::Brake(Some("storm".into())));
    script.poll();
    assert_eq!(script.question(), asks(Some(4)));
}

#[test]
fn permits_are_counted_from_each_answer() {
    let mut script = Script::synced();
    let permit = PermitReport { number: 1, until: None, is_wanted: true, is_live: false };
    let exclusive = TaskReport { permit: Some(permit), ..report(TaskState::Held, 0) };
    script.answer(3, Some(vec![exclusive]));
    assert_eq!(script.sub.tasks_said_at().unwrap().1.ms, 3);
    script.wait(60);
    script.reply.version.status -= 1;
    script.poll();
    assert_eq!(script.question(), asks(Some(3)));
    script.answer(3, None);
    assert_eq!(script.sub.tasks_said_at().unwrap().0, Duration::from_secs(60));
}

#[test]
fn a_machine_that_does_not_tell_is_left_in_peace() {
    let mut script = Script::synced();
    script.answer_not(FailureKind::NoMethod);
    let unknown = Err("its subd is of an earlier release, which does not tell".to_owned());
    script.wait(1_000);
    script.poll();
    assert_eq!((script.question(), script.sub.tasks()), (None, unknown));
    // Its subd is another one.
    script.reply.version.instance += 1;
    script.poll();
    assert_eq!(script.question(), asks(None));
    // The certificate of an earlier release lacks the power.
    script.answer_not(FailureKind::Refused);
    let unknown = Err("the machine does not tell: no".to_owned());
    script.poll();
    assert_eq!((script.question(), script.sub.tasks()), (None, unknown));
    assert_eq!(script.sub.status(), Status::Synced);
    script.wait(599);
    assert_eq!(script.question(), None);
    script.wait(1);
    assert_eq!(script.question(), asks(None));
    script.answer(3, Some(vec![report(TaskState::Running, 0)]));
    assert_eq!(script.sub.tasks().unwrap().tasks.len(), 1);
}

#[test]
fn what_a_machine_tells_is_cut() {
    let mut script = Script::synced();
    let detail = "\x1b[2J".to_owned() + &"x".repeat(1_000);
    script.answer(3, Some(vec![TaskReport { detail, ..report(TaskState::Running, 0) }]));
    let kept = &script.sub.tasks().unwrap().tasks[0].detail;
    assert!(kept.len() < 600 && !kept.contains('\x1b'), "{kept}");
    script.poll();
    let many = (0..6_000).map(|_| report(TaskState::Running, 0)).collect();
    script.answer(4, Some(many));
    let unknown = script.sub.tasks().map(|states| states.tasks.len());
    assert_eq!(unknown, Err("the machine tells more of its tasks than is kept".to_owned()));
}

#[test]
fn trouble_is_told_when_it_lasts() {
    let mut script = Script::synced();
    script.answer(3, Some(vec![report(TaskState::Unhealthy, 0)]));
    assert_eq!(script.sub.task_troubles().count(), 0);
    script.wait(59);
    script.wait(1);
    assert_eq!(script.sub.task_troubles().count(), 1);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   told     synced           equals base
        59  wake     synced           equals base
        60  wake     synced           equals base
                     -> task-unhealthy logd: unhealthy: why
    "#]]);
}

#[test]
fn orders_are_given_until_the_machine_has_taken_them() {
    let mut script = Script::synced();
    script.step("brake", Event::Brake(Some("storm".into())));
    script.order(&[order(TaskOrder::Hold, 2), order(TaskOrder::Suspend, 4)]);
    script.answer(3, Some(vec![report(TaskState::Running, 0)]));
    script.refuse(FailureKind::Unreachable, "no answer");
    script.wait(1);
    script.wait(1);
    script.accept();
    assert_eq!(script.sub.wanted_task_orders(), [order(TaskOrder::Suspend, 4)]);
    script.refuse(FailureKind::Refused, "no such task");
    assert_eq!(script.sub.wanted_task_orders(), []);
    let why = "the machine refused to suspend it: no such task";
    assert_eq!(script.sub.refused_task_order("logd"), Some(why));
    script.order(&[order(TaskOrder::Release, 6)]);
    assert_eq!(script.sub.refused_task_order("logd"), None);
    script.accept();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   brake    synced           equals base
        0   ordered  synced           equals base
        0   told     synced           equals base
                     -> hold logd as 2
        0   failed   synced           equals base
        1   wake     synced           equals base
                     -> hold logd as 2
        2   wake     synced           equals base
        2   accepted synced           equals base
                     -> order 2 about logd has ended
                     -> suspend logd as 4
        2   failed   synced           equals base
                     -> order 4 about logd has ended
        2   ordered  synced           equals base
                     -> release logd as 6
        2   accepted synced           equals base
                     -> order 6 about logd has ended
    "#]]);
}

#[test]
fn what_was_suspended_because_the_machine_had_left_is_resumed() {
    let mut script = Script::synced();
    let detail = format!("suspended: {DEPARTED_WHY}");
    let departed = TaskReport { detail, ..report(TaskState::Suspended, 5) };
    let detail = "suspended: disk swap".to_owned();
    let other = TaskReport { name: "db".to_owned(), detail, ..report(TaskState::Suspended, 2) };
    script.answer(3, Some(vec![other, departed]));
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   told     synced           equals base
                     -> resume [("logd", 5)]
    "#]]);
}

#[test]
fn orders_of_a_restored_backup_are_forgotten() {
    let mut script = Script::synced();
    script.order(&[order(TaskOrder::Hold, 6), order(TaskOrder::Suspend, 8)]);
    assert_eq!(script.called, None);
    script.answer(3, Some(vec![report(TaskState::Running, 7)]));
    assert_eq!(script.sub.wanted_task_orders(), [order(TaskOrder::Suspend, 8)]);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base
        0   ordered  synced           equals base
                     -> order 6 about logd has ended
        0   told     synced           equals base
                     -> suspend logd as 8
    "#]]);
}

#[test]
fn no_orders_are_given_while_another_dominator_holds_the_machine() {
    let mut script = Script::synced();
    script.answer(3, Some(vec![report(TaskState::Running, 0)]));
    script.other_holder = Some("held by other".to_owned());
    script.order(&[order(TaskOrder::Hold, 2)]);
    script.wait(1);
    assert_eq!(script.called, None);
    script.other_holder = None;
    script.wait(60);
    assert!(matches!(script.accept(), Some(Call::OrderTask(_))));
    assert_eq!(script.sub.wanted_task_orders(), []);
}

impl Script {
    /// A machine with a bundle that has brought a task.
    fn with_bundle() -> Self {
        let part = |name, files: &[(&str, &str)]| match image(name, files) {
            ImageState::Ready(image) => RequiredImage::clone(&image),
            other => panic!("{other:?}"),
        };
        let mut bundle = part("job/1", &[("/b", "1")]);
        bundle.content.filter = None;
        let triggers = r#"[{"MatchLines": ["/b"], "Service": "logd", "Kind": "task"}]"#;
        bundle.content.triggers = Triggers::from_json(triggers).unwrap();
        let parts = vec![Arc::new(part("base", &[("/a", "1")])), Arc::new(bundle)];
        let composed = model::image::composition::compose(parts).unwrap();
        let have = [("/a", "1"), ("/b", "1")];
        let mut script = Self::scanning(ImageState::Ready(Arc::new(composed)), &have);
        let required_image = "base + job/1".to_owned();
        script.reply.last_image = Some(required_image.parse().unwrap());
        script.sub.machine = Arc::new(Machine { required_image, ..(*script.sub.machine).clone() });
        script.poll();
        script
    }
}

#[test]
fn a_sick_task_counts_against_the_part_that_has_brought_it() {
    let mut script = Script::with_bundle();
    script.answer(3, Some(vec![report(TaskState::Unhealthy, 0)]));
    script.wait(61);
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base + job/1
        0   polled   synced           equals base + job/1
        0   told     synced           equals base + job/1
        61  wake     synced           equals base + job/1
                     -> task-unhealthy logd: unhealthy: why
                     -> job/1 is ill: true
    "#]]);
}

#[test]
fn tasks_of_environments_that_are_not_active_are_not_restarted() {
    let mut script = Script::with_bundle();
    let set = |script: &mut Script, parts: &[(&str, &str)]| {
        let part = |(part, name): &(&str, &str)| (part.parse().unwrap(), (*name).to_owned());
        let order = SubOrder::SetInactive(parts.iter().map(part).collect());
        script.step("ordered", Event::Ordered(order));
    };
    let taken = |script: &mut Script, version, tasks| {
        script.accept();
        script.poll();
        script.answer(version, Some(tasks));
    };
    let why = Some("the environment hello is not active".to_owned());
    let left = TaskReport { not_restarted: why, ..report(TaskState::Running, 0) };
    // Nothing is known of its tasks yet; another task is not of the bundle.
    set(&mut script, &[("job/1", "hello")]);
    let other = TaskReport { name: "other".to_owned(), ..report(TaskState::Running, 0) };
    script.answer(3, Some(vec![report(TaskState::Running, 0), other.clone()]));
    script.accept();
    // It has taken that, and has not told yet.
    script.wait(1);
    script.poll();
    script.answer(4, Some(vec![left.clone(), other.clone()]));
    // Its state was lost.
    script.poll();
    script.answer(3, Some(vec![report(TaskState::Running, 0), other.clone()]));
    script.refuse(FailureKind::Unavailable, "no");
    script.wait(60);
    taken(&mut script, 4, vec![left.clone(), other]);
    // Of an active environment it is restarted.
    set(&mut script, &[]);
    taken(&mut script, 5, vec![report(TaskState::Running, 0)]);
    assert_eq!(script.called, None);
    // They are other ones when the machine takes what it was told.
    set(&mut script, &[("job/1", "hello")]);
    set(&mut script, &[]);
    taken(&mut script, 6, vec![left.clone()]);
    script.accept();
    script.poll();
    // No image is required any more.
    script.image = ImageState::Undefined;
    script.assign();
    script.answer(7, Some(vec![left]));
    script.accept();
    script.check(expect![[r#"
        0   assigned connecting       not reached yet
                     -> poll for all
        0   polled   rescanning       reading the new scan
        0   polled   synced           equals base + job/1
        0   polled   synced           equals base + job/1
        0   ordered  synced           equals base + job/1
        0   told     synced           equals base + job/1
                     -> do not restart {"logd": "the environment hello is not active"}
        0   accepted synced           equals base + job/1
        1   wake     synced           equals base + job/1
        1   polled   synced           equals base + job/1
        1   told     synced           equals base + job/1
        1   polled   synced           equals base + job/1
        1   told     synced           equals base + job/1
                     -> do not restart {"logd": "the environment hello is not active"}
        1   failed   synced           equals base + job/1
        61  wake     synced           equals base + job/1
                     -> do not restart {"logd": "the environment hello is not active"}
        61  accepted synced           equals base + job/1
        61  polled   synced           equals base + job/1
        61  told     synced           equals base + job/1
        61  ordered  synced           equals base + job/1
                     -> do not restart {}
        61  accepted synced           equals base + job/1
        61  polled   synced           equals base + job/1
        61  told     synced           equals base + job/1
        61  ordered  synced           equals base + job/1
                     -> do not restart {"logd": "the environment hello is not active"}
        61  ordered  synced           equals base + job/1
        61  accepted synced           equals base + job/1
        61  polled   synced           equals base + job/1
        61  told     synced           equals base + job/1
                     -> do not restart {}
        61  accepted synced           equals base + job/1
        61  polled   synced           equals base + job/1
        61  assigned image-undefined  the machine database names no image for it
                     -> do not restart {}
        61  told     image-undefined  the machine database names no image for it
        61  accepted image-undefined  the machine database names no image for it
                     -> do not restart {}
    "#]]);
}
