//! The order of grants, by table and by random claims.

use super::limits::LocationLimit;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Duration {
    SECOND * u32::try_from(seconds).unwrap()
}

fn limits(given: &[&str], each: Option<&str>) -> MachineLimits {
    let given: Vec<LocationLimit> = given.iter().map(|text| text.parse().unwrap()).collect();
    MachineLimits::new(None, &given, each.and_then(|each| MachineLimit::parse(each).unwrap()))
}

fn budget(updating: MachineLimits, high_impact: MachineLimits) -> Budget {
    let mut budget = Budget::new(updating, high_impact);
    let population = [("nyc/a", 10), ("nyc/b", 10), ("sfo", 20), ("", 5)];
    budget.set_machines(&population.iter().map(|(at, count)| ((*at).to_owned(), *count)).collect());
    budget
}

fn demand(class: UpdateClass, impact: Impact, location: &str, since: u64) -> Demand {
    Demand { class, impact, location: location.to_owned(), since: at(since) }
}

use Impact::{High, Plain};
use UpdateClass::{Repair, Rollout};

#[test]
fn each_limit_that_covers_a_machine_must_have_a_place() {
    let none = || limits(&[], None);
    let many = |class, impact, location: &'static str, count: usize| {
        vec![(class, impact, location); count]
    };
    let mixed = || {
        [
            many(Rollout, Plain, "nyc/a", 6),
            many(Rollout, High, "nyc/b", 6),
            many(Rollout, High, "sfo", 6),
            many(Repair, Plain, "nyc/a", 6),
        ]
        .concat()
    };
    // Limits of updates; of high impact; claims; how many of nyc/a, nyc/b, sfo and of the repairs
    // are granted.
    let table = [
        ("none", none(), none(), [6, 6, 6, 6]),
        ("the fleet", limits(&["8"], None), none(), [6, 0, 0, 2]),
        ("a share, rounded up", limits(&["10%"], None), none(), [4, 0, 0, 1]),
        ("a location and below", limits(&["nyc=4"], None), none(), [3, 0, 6, 1]),
        ("a share of a location", limits(&["nyc/a=50%"], None), none(), [4, 6, 6, 1]),
        ("each location", limits(&[], Some("2")), none(), [1, 1, 1, 1]),
        ("high impact alone", none(), limits(&["4"], None), [6, 3, 0, 6]),
        ("high impact at each", none(), limits(&[], Some("1")), [6, 1, 1, 6]),
        ("both", limits(&["12", "nyc=8"], None), limits(&["sfo=2"], None), [6, 0, 1, 2]),
        ("one place for both", limits(&["1"], None), none(), [0, 0, 0, 1]),
    ];
    for (name, updating, high_impact, expected) in table {
        let mut budget = budget(updating, high_impact);
        for (index, (class, impact, location)) in mixed().into_iter().enumerate() {
            budget.ask(ClaimantId(index as u64), demand(class, impact, location, index as u64));
        }
        let granted = budget.grant(at(30), true);
        let of = |range: std::ops::Range<u64>| {
            granted.iter().filter(|claimant| range.contains(&claimant.0)).count()
        };
        assert_eq!([of(0..6), of(6..12), of(12..18), of(18..24)], expected, "{name}");
    }
}

#[test]
fn the_oldest_comes_first_and_what_it_waits_for_is_told() {
    let mut budget = budget(limits(&["8"], None), limits(&[], Some("1")));
    for claimant in 0..8 {
        budget.ask(ClaimantId(claimant), demand(Rollout, Plain, "sfo", 10 - claimant));
    }
    let claimants = |claimants: &[u64]| {
        claimants.iter().map(|claimant| ClaimantId(*claimant)).collect::<Vec<_>>()
    };
    assert_eq!(budget.grant(at(20), false), [], "nothing is known yet");
    assert_eq!(budget.grant(at(20), true), claimants(&[7, 6, 5, 4, 3, 2]));
    let text =
        "6 machines under way of the 6 that --max-updating 8 allows at once beside repairs; ";
    assert_eq!(budget.why(ClaimantId(1)), format!("{text}none waits before it"));
    assert_eq!(budget.why(ClaimantId(0)), format!("{text}1 waits before it"));
    // A repeated claim keeps its place in the queue, and a granted one stays granted.
    budget.ask(ClaimantId(1), demand(Rollout, Plain, "sfo", 9));
    budget.ask(ClaimantId(7), demand(Rollout, Plain, "sfo", 3));
    assert_eq!((budget.grant(at(20), true), budget.totals()), (vec![], (6, 2)));
    // A repair does not wait for the rollout, and both classes are granted in turn.
    budget.ask(ClaimantId(20), demand(Repair, High, "nyc/a", 11));
    budget.ask(ClaimantId(21), demand(Rollout, High, "nyc/a", 1));
    assert_eq!(budget.grant(at(20), true), claimants(&[20]));
    budget.ask(ClaimantId(22), demand(Repair, High, "nyc/a", 12));
    budget.release(ClaimantId(20));
    budget.release(ClaimantId(7));
    assert_eq!(budget.grant(at(20), true), claimants(&[21]));
    let text = "1 machine under way of the 1 that --max-high-impact-per-location 1 (nyc/a) allows \
                at once; none waits before it";
    assert_eq!(budget.why(ClaimantId(22)), text);
    let uses: Vec<String> = budget
        .uses()
        .into_iter()
        .map(|of| {
            let LimitUse { limit, places, for_repairs, repairs, rollouts, waiting } = of;
            format!("{limit}: {repairs}+{rollouts} of {places} ({for_repairs}), {waiting} wait")
        })
        .collect();
    let expected = [
        "--max-updating 8: 0+6 of 8 (2), 3 wait",
        "--max-high-impact-per-location 1 (nyc/a): 0+1 of 1 (0), 1 wait",
    ];
    assert_eq!(uses, expected);
}

#[test]
fn what_is_under_way_already_counts_whatever_the_limit() {
    let mut budget = budget(limits(&["3"], None), limits(&[], None));
    for claimant in 0..5 {
        budget.count(ClaimantId(claimant), demand(Rollout, Plain, "sfo", 0));
    }
    budget.ask(ClaimantId(9), demand(Repair, Plain, "sfo", 0));
    for claimant in 0..2 {
        assert_eq!(budget.grant(at(1), true), []);
        budget.release(ClaimantId(claimant));
    }
    assert_eq!(budget.grant(at(1), true), []);
    budget.release(ClaimantId(2));
    assert_eq!(budget.grant(at(1), true), [ClaimantId(9)]);
}

#[test]
fn a_fleet_that_shrinks_keeps_what_is_granted() {
    let mut budget = budget(limits(&["20%"], None), limits(&[], None));
    for claimant in 0..9 {
        budget.ask(ClaimantId(claimant), demand(Rollout, Plain, "sfo", claimant));
    }
    assert_eq!(budget.grant(at(20), true).len(), 7);
    budget.set_machines(&BTreeMap::from([("sfo".to_owned(), 20)]));
    assert_eq!((budget.grant(at(20), true), budget.totals()), (vec![], (7, 2)));
    for claimant in 0..5 {
        budget.release(ClaimantId(claimant));
    }
    assert_eq!(budget.grant(at(20), true), [ClaimantId(7)]);
    // An operator changes the configuration.
    budget.set_limits(limits(&["sfo=2"], None), limits(&[], None));
    assert_eq!((budget.grant(at(20), true), budget.totals()), (vec![], (3, 1)));
    budget.set_limits(limits(&[], None), limits(&[], None));
    assert_eq!(budget.grant(at(20), true), [ClaimantId(8)]);
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// Counts the granted claims again, and compares them with each limit.
fn must_be_within(budget: &Budget) {
    for scope in &budget.scopes {
        let of = |class: Option<UpdateClass>| {
            let counted = budget.claims.values().filter(|claim| {
                let demand = &claim.demand;
                let covers = match &scope.place {
                    Place::Fleet => true,
                    Place::Below(prefix) => is_within(&demand.location, prefix),
                    Place::Each(exact) => demand.location == *exact,
                };
                claim.is_held
                    && covers
                    && (scope.impact == Plain || demand.impact == High)
                    && class.is_none_or(|class| demand.class == class)
            });
            u32::try_from(counted.count()).unwrap()
        };
        let used = [of(Some(Repair)), of(Some(Rollout))];
        assert_eq!(used, scope.used, "{}", scope.flag());
        assert!(of(None) <= scope.places.all, "{}: {used:?}", scope.flag());
        if !scope.places.is_common() {
            assert!(used[0] <= scope.places.repairs, "{}: {used:?}", scope.flag());
            assert!(used[1] <= scope.places.all - scope.places.repairs, "{used:?}");
        }
    }
}

#[test]
fn whatever_happens_no_limit_is_passed_nobody_starves_and_all_is_given_back() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let each = ["1", "2", "5"][random.below(3) as usize];
        let fleet = ["1", "2", "4", "none"][random.below(4) as usize];
        let mut budget = budget(
            limits(&[fleet, "nyc=3"], (seed % 2 == 0).then_some(each)),
            limits(&["2", "sfo=1"], (seed % 3 == 0).then_some("1")),
        );
        // Granted claims, with the time of their release.
        let mut held: BTreeMap<ClaimantId, u64> = BTreeMap::new();
        let mut waiting: BTreeMap<ClaimantId, u64> = BTreeMap::new();
        let mut longest = 0;
        let (mut last, end) = (0, 30_000);
        let mut now = 0;
        while now < end || !(held.is_empty() && waiting.is_empty()) {
            // While the first machine waits, others make claims that need fewer places.
            if now < end && waiting.len() < 30 {
                last += 1;
                let class = if random.below(3) == 0 { Repair } else { Rollout };
                let impact = if random.below(8) == 0 { High } else { Plain };
                let location = ["nyc/a", "nyc/b", "sfo", ""][random.below(4) as usize];
                budget.ask(ClaimantId(last), demand(class, impact, location, now));
                waiting.insert(ClaimantId(last), now);
            }
            if random.below(50) == 0
                && let Some((claimant, _)) = waiting.pop_last()
            {
                budget.release(claimant);
            }
            for claimant in budget.grant(at(now), true) {
                let since = waiting.remove(&claimant).expect("who is granted has asked");
                longest = longest.max(now - since);
                held.insert(claimant, now + 1 + random.below(40));
            }
            must_be_within(&budget);
            now += 1 + random.below(5);
            let over: Vec<ClaimantId> = held
                .iter()
                .filter(|(_, until)| **until <= now)
                .map(|(claimant, _)| *claimant)
                .collect();
            for claimant in over {
                budget.release(claimant);
                held.remove(&claimant);
            }
            assert!(now < end + 10_000, "seed {seed}: {} wait for ever", waiting.len());
        }
        assert_eq!(budget.totals(), (0, 0));
        assert!(budget.uses().iter().all(|of| (of.repairs, of.rollouts, of.waiting) == (0, 0, 0)));
        // After ten minutes, thirty claims wait before it, each for at most forty seconds.
        assert!(longest < 600 + 31 * 45, "seed {seed}: a claim waited for {longest} s");
    }
}
