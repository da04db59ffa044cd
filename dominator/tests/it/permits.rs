//! Permits of an exclusive task in fleets on a bad network, with machines that decide about them as
//! real ones do: never two run it, and when all is well again, one does. `PERMIT_SEEDS` sets how
//! many fleets there are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::subd::{PermitReport, PermitTaskRequest};
use dominator::core::permits::{Permits, PermitsHeard};
use model::boot_time::BootTime;
use model::permit::Permit;
use testing::random::Random;

const TASK: &str = "ledger";

/// In milliseconds, as all times here.
const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const PERMIT_TIME: u64 = 5 * MINUTE;
const STOP_TIMEOUT_S: u32 = 30;

/// How long the bad times last, and then how long what was sent may still be on its way.
const BAD: u64 = 180 * MINUTE;
const DELAY_MAX: u64 = 10 * MINUTE;

/// Within this time of peace one machine runs the task.
const RUNS_WITHIN: u64 = 2 * PERMIT_TIME;

/// A clock that is up to 2 % wrong.
#[derive(Clone, Copy, Debug)]
struct Clock {
    started: u64,
    per_mille: u64,
}

impl Clock {
    fn start(random: &mut Random, now: u64) -> Self {
        Self {
            started: now,
            per_mille: [980, 1_020, 980 + random.below(41)][random.below(3) as usize],
        }
    }

    fn shows(&self, now: u64) -> u64 {
        (now - self.started) * self.per_mille / 1_000
    }
}

#[derive(Debug)]
struct Machine {
    clock: Clock,
    boot: u64,
    /// On the medium.
    permit: Permit,
    is_wanted: bool,
    is_off: bool,
    subd_is_down: bool,
    is_cut_off: bool,
    is_listed: bool,
    /// When the process that runs must be gone, by the guard; it goes earlier if it is asked to.
    runs_until: Option<u64>,
}

impl Machine {
    fn now(&self, now: u64) -> BootTime {
        BootTime { boot_id: self.boot.to_string(), ms: self.clock.shows(now) }
    }

    fn answers(&self) -> bool {
        !self.is_off && !self.subd_is_down
    }
}

#[derive(Clone, Debug)]
enum Event {
    Ask { start: u64, machine: usize },
    Asked { start: u64, machine: usize },
    Answered { start: u64, machine: usize, said: PermitsHeard },
    Permitted { machine: usize, request: PermitTaskRequest },
    Look { machine: usize },
    Trouble,
}

struct Fleet {
    random: Random,
    now: u64,
    machines: Vec<Machine>,
    events: BTreeMap<(u64, u64), Event>,
    last_event: u64,
    permits: Permits,
    clock: Clock,
    /// Numbers the starts of the dominator; `None` while it is down.
    start: Option<u64>,
    starts: u64,
    fenced: BTreeSet<usize>,
    is_bad: bool,
    /// How often another machine than before has run the task.
    moves: u64,
    last: Option<usize>,
}

fn name(machine: usize) -> String {
    format!("host{machine}")
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let machines = 2 + random.below(4) as usize;
        let clock = Clock::start(&mut random, 0);
        let mut fleet = Self {
            machines: Vec::new(),
            now: 0,
            events: BTreeMap::new(),
            last_event: 0,
            permits: permits(0),
            clock,
            start: Some(1),
            starts: 1,
            fenced: BTreeSet::new(),
            is_bad: true,
            moves: 0,
            last: None,
            random,
        };
        for machine in 0..machines {
            let clock = Clock::start(&mut fleet.random, 0);
            fleet.machines.push(Machine {
                clock,
                boot: 0,
                permit: Permit::default(),
                is_wanted: true,
                is_off: false,
                subd_is_down: false,
                is_cut_off: false,
                is_listed: true,
                runs_until: None,
            });
            fleet.after(0, Event::Ask { start: 1, machine });
        }
        fleet.after(0, Event::Trouble);
        fleet
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.last_event += 1;
        self.events.insert((self.now + delay, self.last_event), event);
    }

    /// Sends a message, that may be lost, late, or come twice.
    fn send(&mut self, event: &Event) {
        if !self.is_bad {
            let delay = self.random.below(SECOND);
            return self.after(delay, event.clone());
        }
        let copies = [0, 1, 1, 1, 1, 1, 1, 2][self.random.below(8) as usize];
        for _ in 0..copies {
            let delay = match self.random.below(10) {
                0 => self.random.below(DELAY_MAX),
                1 => self.random.below(MINUTE),
                _ => self.random.below(SECOND),
            };
            self.after(delay, event.clone());
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.clock.shows(self.now))
    }

    fn run_until(&mut self, end: u64) {
        while let Some(((at, _), event)) = self.events.first_key_value()
            && *at <= end
        {
            let (at, event) = (*at, event.clone());
            self.events.pop_first();
            self.now = at;
            self.happens(event);
            self.check();
        }
        self.now = end;
    }

    fn running(&self) -> Vec<usize> {
        let runs = |machine: &Machine| machine.runs_until.is_some_and(|until| until > self.now);
        (0..self.machines.len()).filter(|machine| runs(&self.machines[*machine])).collect()
    }

    /// Never two.
    fn check(&mut self) {
        let running = self.running();
        assert!(running.len() < 2, "{running:?} at {}: {:#?}", self.now, self.machines);
        if let [machine] = running[..]
            && self.last != Some(machine)
        {
            self.last = Some(machine);
            self.moves += 1;
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Ask { start, machine } => self.ask(start, machine),
            Event::Asked { start, machine } => self.asked(start, machine),
            Event::Answered { start, machine, said } => {
                if self.start == Some(start) && self.machines[machine].is_listed {
                    self.answered(machine, said);
                }
            }
            Event::Permitted { machine, request } => self.permitted(machine, &request),
            Event::Look { machine } => self.look(machine),
            Event::Trouble => self.trouble(),
        }
    }

    fn ask(&mut self, start: u64, machine: usize) {
        if self.start != Some(start) {
            return;
        }
        let period = self.permits.period().as_millis() as u64;
        self.after(period, Event::Ask { start, machine });
        if self.machines[machine].is_listed && !self.machines[machine].is_cut_off {
            self.send(&Event::Asked { start, machine });
        }
    }

    fn asked(&mut self, start: u64, machine: usize) {
        let asked = &self.machines[machine];
        if !asked.answers() {
            return;
        }
        self.look(machine);
        let asked = &self.machines[machine];
        let is_live = asked.runs_until.is_some_and(|until| until > self.now);
        let permit = PermitReport {
            number: asked.permit.number,
            until: asked.permit.until.clone(),
            is_wanted: asked.is_wanted || is_live,
            is_live,
        };
        let said = PermitsHeard {
            said_at: asked.now(self.now),
            takes_orders: true,
            permits: [(TASK.to_owned(), permit)].into(),
        };
        if !asked.is_cut_off {
            self.send(&Event::Answered { start, machine, said });
        }
    }

    fn answered(&mut self, machine: usize, said: PermitsHeard) {
        let elapsed = self.elapsed();
        self.permits.take(&name(machine), said, elapsed);
        self.give(machine);
        for next in self.permits.next(elapsed) {
            let next = (0..self.machines.len()).find(|machine| *name(*machine) == *next).unwrap();
            self.give(next);
        }
    }

    fn give(&mut self, machine: usize) {
        let given = self.permits.give(&name(machine), self.elapsed());
        for request in given {
            if !self.machines[machine].is_cut_off {
                self.send(&Event::Permitted { machine, request });
            }
        }
    }

    fn permitted(&mut self, machine: usize, request: &PermitTaskRequest) {
        let permitted = &mut self.machines[machine];
        if permitted.answers() {
            let now = permitted.now(self.now);
            // Some come too late.
            let _refused = permitted.permit.take(request.number, &request.until, &now);
            self.look(machine);
        }
    }

    /// What subd and the guard of the task do.
    fn look(&mut self, machine: usize) {
        let (now, answers) = (self.now, self.machines[machine].answers());
        let looked = &mut self.machines[machine];
        let boot_now = looked.now(now);
        looked.runs_until.take_if(|until| *until <= now);
        if !answers {
            return;
        }
        let may_run = looked.permit.stop_at_ms(STOP_TIMEOUT_S, &boot_now).is_some();
        let left = looked.permit.until.as_ref().and_then(|until| until.ms_since(&boot_now));
        // The last of the process is gone when the permit ends.
        let end = now + left.unwrap_or(0) * 1_000 / looked.clock.per_mille;
        match looked.runs_until {
            None if may_run && looked.is_wanted => looked.runs_until = Some(end),
            Some(_) if may_run && looked.is_wanted => looked.runs_until = Some(end),
            Some(until) => {
                let takes = self.random.below(u64::from(STOP_TIMEOUT_S) * SECOND + 10 * SECOND);
                looked.runs_until = Some(until.min(now + takes));
            }
            None => looked.permit.give_up(looked.is_wanted, &boot_now),
        }
        if let Some(until) = looked.runs_until {
            self.after(until - now, Event::Look { machine });
        }
    }

    fn trouble(&mut self) {
        if !self.is_bad {
            return;
        }
        let pause = self.random.below(4 * MINUTE);
        self.after(pause, Event::Trouble);
        let machine = self.random.below(self.machines.len() as u64) as usize;
        if self.random.chance(50) {
            return self.mend(machine);
        }
        let elapsed = self.elapsed();
        let troubled = &mut self.machines[machine];
        match self.random.below(9) {
            0 | 1 => troubled.is_cut_off = !troubled.is_cut_off,
            2 => troubled.subd_is_down = !troubled.subd_is_down,
            3 => troubled.is_wanted = !troubled.is_wanted,
            4 => {
                let is_off = !troubled.is_off;
                self.set_off(machine, is_off);
            }
            5 => {
                self.set_off(machine, true);
                self.set_off(machine, false);
            }
            6 if self.start.is_some() => {
                troubled.is_listed = !troubled.is_listed;
                if !troubled.is_listed {
                    self.permits.leave(&name(machine), elapsed);
                }
            }
            7 => self.fence(machine),
            _ => self.restart_dominator(),
        }
    }

    fn set_off(&mut self, machine: usize, is_off: bool) {
        let set = &mut self.machines[machine];
        if !is_off && set.is_off {
            set.boot += 1;
            set.clock = Clock::start(&mut self.random, self.now);
        }
        set.is_off = is_off;
        set.runs_until = None;
    }

    /// Fences a machine that is off then, or ends that.
    fn fence(&mut self, machine: usize) {
        if !self.fenced.remove(&machine) {
            self.set_off(machine, true);
            self.fenced.insert(machine);
        }
        self.tell_fenced();
        if self.random.chance(50) {
            self.set_off(machine, false);
        }
    }

    fn tell_fenced(&mut self) {
        let fenced = self.fenced.iter().map(|machine| name(*machine).into());
        self.permits.set_fenced(fenced.collect());
    }

    /// Stops the dominator, or starts it again, on another host perhaps.
    fn restart_dominator(&mut self) {
        if self.start.take().is_some() && self.is_bad && self.random.chance(50) {
            return;
        }
        self.starts += 1;
        self.start = Some(self.starts);
        self.clock = Clock::start(&mut self.random, 0);
        self.permits = permits(self.clock.shows(self.now));
        self.tell_fenced();
        for machine in 0..self.machines.len() {
            self.after(0, Event::Ask { start: self.starts, machine });
        }
    }

    fn mend(&mut self, machine: usize) {
        if self.start.is_none() {
            self.restart_dominator();
        }
        if self.fenced.contains(&machine) {
            self.fence(machine);
        }
        if self.machines[machine].is_off {
            self.set_off(machine, false);
        }
        let mended = &mut self.machines[machine];
        (mended.is_wanted, mended.is_listed) = (true, true);
        (mended.is_cut_off, mended.subd_is_down) = (false, false);
    }

    /// All is well from now on, but for what is on its way.
    fn heal(&mut self) {
        self.is_bad = false;
        (0..self.machines.len()).for_each(|machine| self.mend(machine));
    }
}

fn permits(now: u64) -> Permits {
    let time = Duration::from_millis(PERMIT_TIME);
    Permits::new(time, time, Duration::from_millis(now), 0)
}

/// Returns how often the task has moved.
fn run(seed: u64) -> u64 {
    let mut fleet = Fleet::new(seed);
    fleet.run_until(BAD);
    fleet.heal();
    fleet.run_until(BAD + DELAY_MAX + RUNS_WITHIN);
    let running = fleet.running();
    assert_eq!(running.len(), 1, "seed {seed}: {:#?} {:#?}", fleet.machines, fleet.permits);
    for minute in 1..=30 {
        fleet.run_until(BAD + DELAY_MAX + RUNS_WITHIN + minute * MINUTE);
        assert_eq!(fleet.running(), running, "seed {seed}: it stays where it is");
    }
    let holders = fleet.permits.holders(fleet.elapsed());
    let holders: Vec<&str> = holders[TASK].iter().map(|holder| &*holder.hostname).collect();
    assert_eq!(holders, [name(running[0])], "seed {seed}");
    fleet.moves
}

#[test]
fn never_two_machines_run_an_exclusive_task() {
    let seeds: u64 =
        std::env::var("PERMIT_SEEDS").map_or(100, |seeds| seeds.parse().expect("a number"));
    let halves = [0, 1].map(|half| {
        std::thread::spawn(move || {
            (0..seeds).filter(|seed| seed % 2 == half).map(run).collect::<Vec<u64>>()
        })
    });
    let moves: Vec<u64> = halves.into_iter().flat_map(|half| half.join().unwrap()).collect();
    let total: u64 = moves.iter().sum();
    println!("{seeds} fleets: the task has moved {total} times");
    assert!(total > 5 * seeds, "it has moved {total} times in {seeds} fleets");
}
