//! Permits of a few machines, step by step.
// tidy: core

use super::*;

const TIME: Duration = Duration::from_secs(300);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn boot(seconds: u64) -> BootTime {
    BootTime { boot_id: "5a".to_owned(), ms: seconds * 1_000 }
}

/// A fleet of machines whose clocks show what that of the dominator does.
struct Fleet(Permits);

impl Fleet {
    /// Starts with no permits of an earlier start left.
    fn open() -> Self {
        Self(Permits::new(TIME, Duration::ZERO, Duration::ZERO, 0))
    }

    /// Takes that the machine has heard of `number`, and has a permit until `until` seconds.
    /// Returns the number and the end of the one that it gets.
    fn says(
        &mut self,
        hostname: &str,
        at: u64,
        (number, until): (u64, Option<u64>),
        is_live: bool,
    ) -> Option<(u64, u64)> {
        let until = until.map(boot);
        // One that has given it up and still runs wants none.
        let is_wanted = until.is_some() || !is_live;
        let permit = PermitReport { number, until, is_wanted, is_live };
        let said = PermitsHeard {
            said_at: boot(at),
            takes_orders: true,
            permits: [("job".to_owned(), permit)].into(),
        };
        self.0.take(hostname, said, seconds(at));
        let given = self.0.give(hostname, seconds(at)).pop();
        given.map(|request| (request.number, request.until.ms / 1_000))
    }

    fn holders(&self, at: u64) -> Vec<(String, u64, u64)> {
        let holders = self.0.holders(seconds(at)).remove("job").unwrap_or_default();
        let holder = |holder: &Holder| {
            (holder.hostname.to_string(), holder.number, holder.ends_in.as_secs())
        };
        holders.iter().map(holder).collect()
    }
}

#[test]
fn one_gets_the_permit_when_former_ones_have_ended_and_keeps_it() {
    let mut fleet = Fleet::open();
    assert_eq!(fleet.0.opens_in(seconds(15)), seconds(300));
    assert_eq!(fleet.says("a", 314, (6, None), false), None);
    assert_eq!(fleet.says("a", 315, (6, None), false), Some((7, 615)));
    assert_eq!(fleet.says("b", 320, (0, None), false), None);
    // What it did not hear of is sent again, and not prolonged.
    assert_eq!(fleet.says("a", 330, (6, None), false), Some((7, 615)));
    assert_eq!(fleet.says("a", 340, (7, Some(615)), true), Some((7, 640)));
    assert_eq!(fleet.says("b", 400, (0, None), false), None);
    assert_eq!(fleet.holders(400), [("a".to_owned(), 7, 255)]);
    // It has given it up, and the other is next.
    assert_eq!(fleet.says("a", 500, (7, None), true), None);
    assert_eq!(fleet.says("b", 501, (0, None), false), None, "a process is left");
    assert_eq!(fleet.says("b", 700, (0, None), false), None, "it is still");
    fleet.0.take("a", PermitsHeard::default(), seconds(701));
    assert_eq!(fleet.says("b", 702, (0, None), false), Some((8, 1_002)));
}

#[test]
fn a_machine_that_loses_a_task_which_runs_is_not_waited_for_longer_than_its_permit_lasts() {
    let mut fleet = Fleet::open();
    assert_eq!(fleet.says("a", 400, (0, None), false), Some((1, 700)));
    assert_eq!(fleet.says("a", 410, (1, None), true), None);
    fleet.0.take("a", PermitsHeard::default(), seconds(420));
    assert_eq!(fleet.says("b", 714, (0, None), false), None);
    assert_eq!(fleet.says("b", 715, (0, None), false), Some((2, 1_015)));
}

#[test]
fn a_fenced_machine_gets_none_and_is_a_conflict_if_it_runs_the_task() {
    let mut fleet = Fleet::open();
    assert_eq!(fleet.says("a", 400, (0, None), false), Some((1, 700)));
    assert_eq!(fleet.says("b", 401, (0, None), false), None);
    fleet.0.set_fenced(["a".into()].into());
    assert_eq!(fleet.0.next(seconds(402)), ["b".into()].into());
    assert_eq!(fleet.says("b", 403, (0, None), false), Some((2, 703)));
    assert_eq!(fleet.says("a", 404, (0, None), false), None);
    assert_eq!(fleet.holders(404), [("b".to_owned(), 2, 314)]);
    assert_eq!(fleet.says("a", 405, (1, Some(700)), true), None);
    let holders: BTreeSet<String> = fleet.holders(405).into_iter().map(|holder| holder.0).collect();
    assert_eq!(holders, ["a".to_owned(), "b".to_owned()].into());
    assert_eq!(fleet.says("b", 406, (2, Some(703)), true), Some((2, 706)));
    fleet.0.set_fenced(BTreeSet::new());
    assert_eq!(fleet.says("b", 407, (2, Some(706)), true), None, "two have a permit");
    assert_eq!(fleet.says("a", 408, (1, Some(700)), true), None);
    assert_eq!(fleet.says("b", 715, (2, None), false), Some((3, 1_015)), "both have ended");

    let mut fleet = Fleet::open();
    assert_eq!(fleet.says("a", 400, (0, None), false), Some((1, 700)));
    fleet.0.set_fenced(["a".into()].into());
    assert_eq!(fleet.says("a", 410, (1, Some(700)), true), None);
}

#[test]
fn a_machine_that_does_not_take_what_it_is_sent_makes_room_for_others() {
    let mut fleet = Fleet::open();
    let (first, other) = match place("job", "a") < place("job", "b") {
        true => ("a", "b"),
        false => ("b", "a"),
    };
    assert_eq!(fleet.says(other, 390, (0, None), false), Some((1, 690)));
    assert_eq!(fleet.says(other, 400, (1, None), false), Some((2, 700)));
    for at in [460, 520, 580, 640, 700] {
        assert_eq!(fleet.says(other, at, (1, None), false), Some((2, 700)), "at {at}");
        assert_eq!(fleet.says(first, at, (0, None), false), None);
    }
    assert_eq!(fleet.says(other, 720, (1, None), false), None);
    assert_eq!(fleet.says(first, 721, (0, None), false), Some((3, 1_021)));
}

#[test]
fn a_permit_of_an_earlier_start_goes_on_at_once_and_ends_where_nobody_answers() {
    let mut fleet = Fleet::open();
    assert_eq!(fleet.says("b", 9, (0, None), false), None);
    assert_eq!(fleet.says("a", 10, (7, Some(110)), true), Some((7, 310)));
    fleet.0.leave("a", seconds(20));
    // 310 s and 5 % of 300 s.
    assert_eq!(fleet.says("b", 324, (0, None), false), None);
    assert_eq!(fleet.says("b", 325, (0, None), false), Some((8, 625)));
    assert_eq!(fleet.holders(325), [("b".to_owned(), 8, 315)]);
}
