//! Rules that hold for all schedules, runs and moments, and harm that no input does.

use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{Timestamp, ToSpan as _};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tasks::cron::Cron;
use tasks::runs::RunTemplate;
use tasks::{Decision, Observed, Run, RunState, Task, condition, decide};

use crate::{at, present, schedule, task, zone};

const ZONES: [&str; 6] = [
    "UTC",
    "America/New_York",
    "America/Sao_Paulo",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
    "Pacific/Apia",
];

const DAYS: &str = "\\*|\\?|\\*/(2|10)|(1[0-9]|[1-9]),28|29|31|5/7";

/// Fields that are valid, from seldom to often.
fn expression() -> impl Strategy<Value = String> {
    let minute = "\\*|\\*/(7|20)|[1-5]?[0-9]|[0-9]-3[0-9]/4";
    let hour = "\\*|\\*/5|1?[0-9]|[0-3],2[0-3]|1-3";
    let month = "\\*|\\?|feb|JAN-Jun|2,11|\\*/5";
    let weekday = "\\*|\\?|SUN|MON-FRI|\\*/3|6";
    (minute, hour, DAYS, month, weekday).prop_map(|(minute, hour, day, month, weekday)| {
        format!("{minute} {hour} {day} {month} {weekday}")
    })
}

fn moment() -> impl Strategy<Value = Timestamp> {
    let second = at("2010-01-01T00:00:00Z").as_second()..at("2030-01-01T00:00:00Z").as_second();
    (second, 0..1_000_000_000)
        .prop_map(|(second, nanosecond)| Timestamp::new(second, nanosecond).unwrap())
}

/// A task with one of many schedules, or without one.
fn any_task() -> impl Strategy<Value = Task> {
    let event = (select(vec!["start", "stop"]), expression());
    let events = vec(event.prop_map(|(action, cron)| format!("{action} {cron}")), 1..4);
    let hours =
        (select(ZONES.to_vec()), events, -4_000..4_000).prop_map(|(zone, events, offset)| {
            // A stop that can happen, for those with start events.
            let text = schedule(zone, &format!("{}; stop 0 17 * * *", events.join(";")));
            text.replace(r#""events""#, &format!(r#""offset_s": {offset}, "events""#))
        });
    let hours = prop_oneof![4 => hours, 1 => Just(String::new())];
    let fields = ["", r#""exclusive": true"#, r#""on_template_change": "recreate""#];
    (hours, select(fields.to_vec())).prop_map(|(hours, fields)| {
        let both: Vec<&str> =
            [fields, &hours].into_iter().filter(|text| !text.is_empty()).collect();
        task(&both.join(", "))
    })
}

prop_compose! {
    /// A run that is due within some days around `now`.
    fn any_run(now: Timestamp)(
        id in prop::option::weighted(0.9, 0..12_u32),
        hours in prop::option::weighted(0.9, -100..3_i64),
        template in select(vec![RunTemplate::Same, RunTemplate::Other, RunTemplate::Of(present())]),
        state in select(vec![
            RunState::Unknown, RunState::Held, RunState::Starting, RunState::Running,
            RunState::Succeeded, RunState::Failed, RunState::Stopping, RunState::Gone,
        ]),
        (held, manual, deleting) in any::<(bool, bool, bool)>(),
        held_by in prop::option::weighted(0.2, Just("alice".to_owned())),
    ) -> Run {
        let scheduled_at = hours.map(|hours| now.checked_add(hours.hours()).unwrap());
        let (name, run_id) = (String::new(), id);
        Run { name, run_id, scheduled_at, template, state, held, held_by, manual, deleting }
    }
}

fn any_observed(now: Timestamp) -> impl Strategy<Value = Observed> {
    let runs = vec(any_run(now), 0..6).prop_map(|mut runs| {
        for (index, run) in runs.iter_mut().enumerate() {
            run.name = format!("old-{index}");
        }
        runs
    });
    (any::<bool>(), any::<Option<bool>>(), runs).prop_map(|(suspended, permit, runs)| {
        // Seldom.
        Observed { suspended: suspended && runs.len() == 1, permit, runs }
    })
}

/// Carries a decision out: what is deleted is gone at once.
fn carry_out(observed: &mut Observed, decision: &Decision) {
    observed.runs.retain(|run| decision.delete.iter().all(|gone| gone.name != run.name));
    for run in &mut observed.runs {
        if decision.release.iter().any(|released| released.name == run.name) {
            (run.held, run.state) = (false, RunState::Starting);
        }
    }
    for new in &decision.create {
        observed.runs.push(Run {
            name: new.name.clone(),
            run_id: Some(new.run_id),
            scheduled_at: Some(new.scheduled_at),
            template: RunTemplate::Same,
            state: if new.held { RunState::Held } else { RunState::Starting },
            held: new.held,
            held_by: None,
            manual: new.manual,
            deleting: false,
        });
    }
}

/// Runs that were started and may be live.
fn live(observed: &Observed) -> usize {
    let is_live = |run: &&Run| !run.is_finished() && run.state != RunState::Gone && !run.is_held();
    observed.runs.iter().filter(is_live).count()
}

proptest! {
    #[test]
    fn the_previous_is_not_after_now_and_the_next_is_after(
        text in expression(), name in select(ZONES.to_vec()), now in moment(),
    ) {
        let (cron, zone): (Cron, TimeZone) = (text.parse().unwrap(), zone(name));
        let (previous, next) = (cron.previous(&zone, now), cron.next(&zone, now));
        if let Some(previous) = previous {
            prop_assert!(previous <= now && cron.fires(&zone, previous));
            prop_assert_eq!(cron.previous(&zone, previous), Some(previous));
            // Nothing fires in between, from either side.
            prop_assert_eq!(cron.next(&zone, previous), next);
        }
        if let Some(next) = next {
            prop_assert!(next > now && cron.fires(&zone, next));
            let before = next.checked_sub(1.second()).unwrap();
            prop_assert_eq!(cron.next(&zone, before), Some(next));
            if before >= now {
                prop_assert_eq!(cron.previous(&zone, before), previous);
            }
        }
        prop_assert_eq!(cron.can_fire(), next.is_some() || previous.is_some());
    }

    #[test]
    fn a_moment_is_between_its_events(task in any_task(), now in moment()) {
        let moment = task.moment(now);
        prop_assert!(moment.previous.as_ref().is_none_or(|event| event.time <= now));
        prop_assert!(moment.next.as_ref().is_none_or(|event| event.time > now));
        prop_assert!(moment.last_stop <= moment.previous.as_ref().map(|event| event.time));
        if moment.should_run && task.schedule.is_some() {
            prop_assert!(moment.period_start.is_some_and(|start| start <= now));
            prop_assert!(moment.period_start > moment.last_stop);
        }
        // Nothing changes until the next event.
        if let Some(next) = &moment.next {
            let later = task.moment(next.time.checked_sub(1.nanosecond()).unwrap());
            prop_assert_eq!(later.should_run, moment.should_run);
            prop_assert_eq!(later.last_stop, moment.last_stop);
        }
    }

    #[test]
    fn a_decision_that_is_carried_out_leaves_nothing_to_do_but_a_release(
        (task, now, seen) in (any_task(), moment()).prop_flat_map(|(task, now)| {
            (Just(task), Just(now), any_observed(now))
        }),
    ) {
        let mut observed = seen;
        let moment = task.moment(now);
        let first = decide(&task, &present(), &moment, &observed);
        prop_assert!(first.create.len() <= 1 && first.release.len() <= 1);
        let names: Vec<&String> = observed.runs.iter().map(|run| &run.name).collect();
        prop_assert!(first.create.iter().all(|new| !names.contains(&&new.name)));
        // What starts is alone.
        let starts = first.create.iter().filter(|new| !new.held).count() + first.release.len();
        if starts > 0 {
            prop_assert_eq!((starts, live(&observed)), (1, 0));
            prop_assert!(observed.permits(&task));
        }
        carry_out(&mut observed, &first);
        let second = decide(&task, &present(), &moment, &observed);
        prop_assert!(second.create.is_empty() && second.delete.is_empty(), "{:?}", second);
        carry_out(&mut observed, &second);
        let third = decide(&task, &present(), &moment, &observed);
        prop_assert!(third.is_idle(), "{:?}", third);
        prop_assert_eq!(third.refused, first.refused);
        if starts > 0 || !second.release.is_empty() {
            prop_assert_eq!(live(&observed), 1);
        }
    }

    #[test]
    fn a_condition_follows_from_what_is_there(
        (task, now, seen) in (any_task(), moment()).prop_flat_map(|(task, now)| {
            (Just(task), Just(now), any_observed(now))
        }),
    ) {
        let moment = task.moment(now);
        let told = condition(&task, &present(), &moment, &seen);
        let is_there = seen.runs.iter().any(|run| run.state != RunState::Gone);
        prop_assert!(is_there || !told.running);
        prop_assert!(!told.running || !seen.suspended || !told.expected);
    }

    #[test]
    fn no_text_does_harm(text in "[ -~\\n]{0,80}|\\PC{0,40}|[0-9*/,?@a-z -]{0,60}") {
        let none = TimeZoneDatabase::none();
        let _task = Task::parse(&text, &none);
        let _runs = Observed::parse(&text);
        let _zone = tasks::zone::find(&text, &none);
        let quoted = serde_json::to_string(&text).unwrap();
        let hours = schedule("UTC", "stop 0 17 * * *");
        let with_text = hours.replace(r#""0 17 * * *""#, &quoted);
        let _task = Task::parse(&format!(r#"{{"name": "a", "argv": ["/a"], {with_text}}}"#), &none);
        let daily = [Cron::daily(&text, "MON"), Cron::daily("09:00", &text)];
        for cron in [text.parse(), Cron::with_seconds(&text)].into_iter().chain(daily) {
            match cron {
                Ok(cron) => {
                    let now = at("2024-02-29T00:00:00Z");
                    let found = cron.next(&TimeZone::UTC, now);
                    prop_assert!(found.is_none_or(|found| cron.fires(&TimeZone::UTC, found)));
                    // What it shows can be read again.
                    if !cron.to_string().contains(':') {
                        prop_assert_eq!(Cron::with_seconds(&cron.to_string()), Ok(cron));
                    }
                }
                Err(error) => prop_assert!(error.to_string().len() < 300, "{}", error),
            }
        }
    }
}
