//! The questions of a day, in a table.

use super::*;

/// Plays a story: at each second of the given ones an event, and what is asked then. Between them
/// it is woken whenever it wants, and then asks what `answers` tells of.
struct Story {
    core: Disruption,
    now: u64,
    asked: Vec<(u64, Question)>,
    answer: Option<Permission>,
}

impl Story {
    fn new(answer: Permission) -> Self {
        let answer = Some(answer);
        Self { core: Disruption::new(), now: 0, asked: Vec::new(), answer }
    }

    fn event(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let question = self.core.step(Duration::from_secs(self.now), event);
            if let Some(question) = question {
                self.asked.push((self.now, question));
                next = Some(Event::Answer(self.answer));
            }
        }
    }

    /// Lets time pass until `until`, in seconds; returns the questions that are no checks.
    fn run(&mut self, until: u64) -> Vec<(u64, &'static str)> {
        loop {
            let wake = self.core.wake_at();
            let wake = wake.as_secs() + u64::from(wake.subsec_nanos() > 0);
            if wake > until {
                break;
            }
            self.now = wake.max(self.now);
            self.event(Event::Wake);
        }
        self.now = until;
        self.acts()
    }

    fn acts(&mut self) -> Vec<(u64, &'static str)> {
        let asked = std::mem::take(&mut self.asked);
        let acts = asked.into_iter().filter(|(_, question)| *question != Question::Check);
        acts.map(|(at, question)| (at, question.name())).collect()
    }
}

#[test]
fn a_permission_counts_only_after_the_wish() {
    let mut story = Story::new(Permission::Permitted);
    assert_eq!(story.run(100), []);
    assert_eq!(story.core.permission(), None);
    story.event(Event::Want);
    assert_eq!(story.acts(), [(100, "request")]);
    assert_eq!(story.core.permission(), Some(Permission::Permitted));
    story.event(Event::Release);
    assert_eq!(story.acts(), [(100, "cancel")]);
    assert_eq!(story.core.permission(), None);
}

#[test]
fn wishes_are_repeated_and_given_back() {
    #[rustfmt::skip]
    let table = [
        // answer                wanted  until  asked at
        (Permission::Denied,     true,   190,   vec![0, 60, 120, 180]),
        (Permission::Requested,  true,   2_000, vec![0, 900, 1_800]),
        (Permission::Permitted,  true,   2_000, vec![0, 900, 1_800]),
        (Permission::Permitted,  false,  4_000, vec![1_860, 3_720]),
        (Permission::Requested,  false,  2_000, vec![900, 1_800]),
        (Permission::Denied,     false,  2_000, vec![1_860]),
    ];
    for (answer, wanted, until, times) in table {
        let question = if wanted { "request" } else { "cancel" };
        let asked: Vec<_> = times.into_iter().map(|at| (at, question)).collect();
        let mut story = Story::new(answer);
        if wanted {
            story.event(Event::Want);
        }
        assert_eq!(story.run(until), asked, "{answer:?} {wanted}");
    }
}

#[test]
fn it_looks_often_while_it_waits_and_seldom_otherwise() {
    let checks = |wanted: bool| {
        let mut story = Story::new(Permission::Requested);
        if wanted {
            story.event(Event::Want);
        }
        story.now = 0;
        while story.core.wake_at() < Duration::from_secs(600) {
            story.now = story.core.wake_at().as_secs() + 1;
            story.event(Event::Wake);
        }
        story.asked.iter().filter(|(_, question)| *question == Question::Check).count()
    };
    assert!((35..60).contains(&checks(true)), "{}", checks(true));
    assert!((5..12).contains(&checks(false)), "{}", checks(false));
}

#[test]
fn a_change_of_mind_during_a_call_is_acted_upon_after_it() {
    let mut core = Disruption::new();
    let at = Duration::from_secs;
    assert_eq!(core.step(at(0), Event::Want), Some(Question::Request));
    assert_eq!(core.step(at(1), Event::Release), None);
    assert_eq!(core.step(at(2), Event::Want), None);
    // The answer is to the first wish; the second is made all the same.
    let permitted = Event::Answer(Some(Permission::Permitted));
    assert_eq!(core.step(at(3), permitted), Some(Question::Request));
    assert_eq!(core.permission(), None);
    assert_eq!(core.step(at(4), permitted), None);
    assert_eq!(core.permission(), Some(Permission::Permitted));
}

#[test]
fn a_command_that_fails_permits_nothing_and_is_called_again() {
    let mut core = Disruption::new();
    let at = Duration::from_secs;
    assert_eq!(core.step(at(0), Event::Want), Some(Question::Request));
    assert_eq!(core.step(at(1), Event::Answer(None)), None);
    assert_eq!((core.permission(), core.wake_at()), (None, at(61)));
    assert_eq!(core.step(at(61), Event::Wake), Some(Question::Request));
    assert_eq!(core.step(at(62), Event::Answer(Some(Permission::Permitted))), None);
    assert_eq!(core.permission(), Some(Permission::Permitted));
    assert_eq!(core.step(at(63), Event::Wake), Some(Question::Check));
    assert_eq!(core.step(at(64), Event::Answer(None)), None);
    assert_eq!(core.permission(), None);
    // An answer to nothing is no news.
    assert_eq!(core.step(at(65), Event::Answer(Some(Permission::Permitted))), None);
    assert_eq!(core.permission(), None);
}

#[test]
fn exit_codes_have_meanings() {
    let codes = [-1, 0, 1, 2, 3].map(Permission::of_exit_code);
    let (permitted, requested) = (Some(Permission::Permitted), Some(Permission::Requested));
    assert_eq!(codes, [None, permitted, requested, Some(Permission::Denied), None]);
}
