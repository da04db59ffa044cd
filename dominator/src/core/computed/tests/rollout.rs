//! How changes of content go from first machines to all, or back.
// tidy: core

use api::dominator::content::{ContentCause, ContentChangeId, ContentOrder, ContentStage};
use api::file_generator::RevisionOrder;

use super::*;
use crate::core::computed::rollout::{ContentOrderError, FIRST_LONGEST};
use crate::core::image_breaker::UpdateFailure;

const LIMITS: FailureLimits = FailureLimits { percent: 10, blocked_percent: 20, failures_min: 3 };

pub(super) fn revision(number: u64) -> ContentChangeId {
    ContentChangeId { source: SOURCE.to_owned(), cause: ContentCause::Revision(number) }
}

fn of_path(path: &str) -> ContentChangeId {
    let cause = ContentCause::Path(path.parse().unwrap());
    ContentChangeId { source: SOURCE.to_owned(), cause }
}

/// A fleet with the file `/x`, whose machines have the content that was made last for them.
pub(super) struct Fleet {
    pub(super) asked: Asked,
    pub(super) at: u64,
    count: usize,
    /// The version of the generator of `/x`.
    pub(super) version: String,
    pub(super) revision: u64,
}

impl Fleet {
    pub(super) fn new(count: usize) -> Self {
        let mut asked = Asked(ComputedTable::default());
        asked.0.set_limits(LIMITS);
        let version = "1".to_owned();
        let mut fleet = Self { asked, at: 0, count, version, revision: 1 };
        fleet.tell_generators(Vec::new());
        for host in fleet.hosts() {
            fleet.asked.want(&host, "nyc", &["/x"], 0);
        }
        fleet.ask();
        fleet.in_sync(&fleet.hosts());
        assert_eq!(fleet.having("1 nyc"), count);
        fleet
    }

    pub(super) fn hosts(&self) -> Vec<String> {
        (0..self.count).map(|host| format!("h{host:05}")).collect()
    }

    pub(super) fn tell_generators(&mut self, orders: Vec<RevisionOrder>) {
        let all = generators(self.revision, &[("/x", &self.version, self.revision)]);
        self.asked.set_generators(&Generators { orders, ..all }, self.at);
    }

    /// Has the generator make other content.
    pub(super) fn edit(&mut self, version: &str) {
        (self.version, self.revision) = (version.to_owned(), self.revision + 1);
        self.tell_generators(Vec::new());
        self.ask();
    }

    /// Asks for all that is due, which the server makes.
    pub(super) fn ask(&mut self) {
        self.at += 1;
        while let Some(batch) = self.asked.0.next_batch(&SOURCE.into(), now(self.at)) {
            let all = batch.request.machines.iter().zip(&batch.records);
            let made = all.map(|(wanted, record)| {
                let text = format!("{} {}", self.version, wanted.machine.location);
                let content = GeneratedContent {
                    id: id(&text),
                    size_bytes: 0,
                    valid_until_seconds: 0,
                    generator: id(&self.version),
                    is_secret: false,
                };
                vec![Ok(KnownContent::new(&content, *record, 9, Time::default()))]
            });
            let answers = made.collect();
            self.asked.0.take(&batch, answers, now(self.at), 500);
        }
        self.asked.0.advance(now(self.at));
    }

    fn report(&mut self, host: &str, report: ContentReport) {
        let round = self.asked.0.known(host).round;
        self.asked.0.report(host, round, report, now(self.at));
    }

    pub(super) fn in_sync(&mut self, hosts: &[String]) {
        for host in hosts {
            self.report(host, ContentReport::Is(Standing::InSync));
        }
    }

    pub(super) fn fail(&mut self, hosts: &[String]) {
        for host in hosts {
            self.report(host, ContentReport::Failed(UpdateFailure::Health));
        }
    }

    /// How many machines are to have this content.
    pub(super) fn having(&self, text: &str) -> usize {
        let has = |host: &String| self.asked.known(host) == [("/x".to_owned(), id(text))];
        self.hosts().iter().filter(|host| has(host)).count()
    }

    /// The machines on which `change` is tried.
    pub(super) fn trying(&self, change: &ContentChangeId) -> Vec<String> {
        self.asked
            .0
            .changes
            .get(change)
            .map_or_else(Vec::new, |change| change.trying.iter().cloned().collect())
    }

    pub(super) fn stage(&self, change: &ContentChangeId) -> Option<ContentStage> {
        self.asked.0.changes.get(change).map(|change| change.stage.clone())
    }

    /// Restarts the dominator.
    pub(super) fn restart(&mut self) {
        let stored = self.hosts().into_iter().map(|host| {
            let files = self.asked.0.stored(&host);
            (host, files)
        });
        let stored = stored.collect();
        self.asked.0.is_saved = false;
        let changes = self.asked.0.take_changes().unwrap();
        self.asked = Asked(ComputedTable::new(stored, changes));
        self.asked.0.set_limits(LIMITS);
        self.at = 0;
        self.tell_generators(Vec::new());
        for host in self.hosts() {
            self.asked.want(&host, "nyc", &["/x"], 0);
        }
    }
}

#[test]
fn a_revision_goes_to_first_machines_and_then_to_all() {
    let mut fleet = Fleet::new(10_000);
    fleet.edit("2");
    let first = fleet.trying(&revision(2));
    assert_eq!((first.len(), fleet.having("2 nyc")), (10, 10));
    // Those that wait are in sync with what they have, and say so.
    let other = fleet.asked.0.known("h05000");
    assert_eq!((other.unknown.len(), other.update), (0, ContentUpdate::None));
    let held = "content of files:6972/2 waits, which is being tried on the first machines";
    assert_eq!(other.held.as_deref(), Some(held));
    // One fails and is replaced; it goes back.
    fleet.fail(&first[..1]);
    assert_eq!(fleet.trying(&revision(2)).len(), 10);
    assert_eq!((fleet.having("2 nyc"), fleet.asked.known(&first[0])[0].1), (10, id("1 nyc")));
    // All are verified, after a restart of the dominator too.
    fleet.in_sync(&first[1..5]);
    fleet.restart();
    assert_eq!((fleet.trying(&revision(2)).len(), fleet.having("2 nyc")), (6, 10));
    fleet.in_sync(&fleet.trying(&revision(2)));
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::Open));
    assert_eq!(fleet.having("2 nyc"), 10_000);
    assert_eq!(fleet.asked.0.known("h05000").update, ContentUpdate::Change);
    // A machine that is added later gets it at once.
    fleet.asked.want("new", "nyc", &["/x"], fleet.at);
    fleet.ask();
    assert_eq!(fleet.asked.known("new"), [("/x".to_owned(), id("2 nyc"))]);
}

#[test]
fn a_bad_revision_is_undone_at_the_third_failure_and_a_good_one_may_follow() {
    let mut fleet = Fleet::new(10_000);
    fleet.edit("bad");
    let first = fleet.trying(&revision(2));
    fleet.in_sync(&first[3..]);
    fleet.fail(&first[..2]);
    assert_eq!(fleet.having("bad nyc"), 10);
    let another = fleet.trying(&revision(2));
    fleet.fail(&another[..1]);
    let why = "3 of 10 machines failed after the update to it (3 failed the health check), which \
               are enough of the first machines";
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::Stopped(why.to_owned())));
    assert_eq!((fleet.having("bad nyc"), fleet.having("1 nyc")), (0, 10_000));
    // The server is told, until it knows.
    let told = [(2, Some(why.to_owned()))];
    assert_eq!(fleet.asked.0.orders_to_tell(SOURCE), told);
    fleet.asked.0.told_order(SOURCE, 2, true, 5);
    assert_eq!(fleet.asked.0.orders_to_tell(SOURCE), []);
    // It stays stopped: after a restart, and when what was made is asked for again.
    fleet.restart();
    fleet.in_sync(&fleet.hosts());
    fleet.ask();
    assert_eq!((fleet.having("1 nyc"), fleet.trying(&revision(2)).len()), (10_000, 0));
    let held = format!("content of files:6972/2 waits, which is stopped: {why}");
    assert_eq!(fleet.asked.0.known("h00009").held, Some(held.clone()));
    // A new machine does not get it either.
    fleet.asked.want("new", "nyc", &["/x"], fleet.at);
    fleet.ask();
    assert_eq!(fleet.asked.unknown("new"), [("/x".to_owned(), held)]);
    // The next revision is tried. It reverts the edit for all but a few machines.
    fleet.edit("3");
    assert_eq!((fleet.having("3 nyc"), fleet.stage(&revision(3))), (10, Some(ContentStage::First)));
    assert_eq!(fleet.asked.0.changes.get(&revision(2)).unwrap().waiting.len(), 0);
    fleet.in_sync(&fleet.trying(&revision(3)));
    let new = fleet.asked.0.known("new");
    let has = new.files.iter().map(|file| file.object.id()).collect::<Vec<_>>();
    assert_eq!((has, new.unknown.len(), new.held), (vec![id("3 nyc")], 0, None));
    // A machine without content that waited for what was stopped, when that is taken back.
    assert_eq!(fleet.stage(&revision(3)), Some(ContentStage::Open));
    fleet.edit("4");
    fleet.asked.want("newer", "nyc", &["/x"], fleet.at);
    fleet.ask();
    assert_eq!(fleet.asked.0.known("newer").files.iter().count(), 0);
    fleet.asked.0.order(&revision(4), ContentOrder::RollBack, "", now(fleet.at)).unwrap();
    fleet.edit("3");
    let newer = fleet.asked.0.known("newer");
    let has = newer.files.iter().map(|file| file.object.id()).collect::<Vec<_>>();
    assert_eq!((has, newer.unknown.len(), newer.held), (vec![id("3 nyc")], 0, None));
}

#[test]
fn a_revision_that_is_taken_back_leaves_machines_as_they_are() {
    let mut fleet = Fleet::new(100);
    fleet.edit("2");
    assert_eq!(fleet.having("2 nyc"), 3);
    fleet.edit("1");
    // The first machines of the former one go back as a change of their own.
    assert_eq!((fleet.having("1 nyc"), fleet.having("2 nyc")), (97, 3));
    fleet.in_sync(&fleet.trying(&revision(2)));
    fleet.in_sync(&fleet.trying(&revision(3)));
    assert_eq!(fleet.having("1 nyc"), 100);
}

#[test]
fn in_a_small_fleet_a_change_is_stopped_when_all_machines_have_failed() {
    let mut fleet = Fleet::new(2);
    fleet.edit("bad");
    let first = fleet.trying(&revision(2));
    fleet.fail(&first[..1]);
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::First));
    fleet.fail(&first[1..]);
    let why = "2 of 2 machines failed after the update to it (2 failed the health check), which \
               are enough of the first machines";
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::Stopped(why.to_owned())));
    assert_eq!(fleet.having("1 nyc"), 2);
}

#[test]
fn edits_of_records_are_changes_of_their_paths() {
    let mut fleet = Fleet::new(1_000);
    // A few machines: at once.
    fleet.asked.want("h00000", "sfo", &["/x"], fleet.at);
    fleet.in_sync(&fleet.hosts());
    fleet.ask();
    assert_eq!(fleet.having("1 sfo"), 1);
    fleet.in_sync(&["h00000".to_owned()]);
    assert_eq!(fleet.stage(&of_path("/x")), None, "it is over");
    // Many: the first of them first.
    for host in &fleet.hosts()[1..] {
        fleet.asked.want(host, "ams", &["/x"], fleet.at);
    }
    fleet.in_sync(&fleet.hosts());
    fleet.ask();
    assert_eq!((fleet.having("1 ams"), fleet.having("1 nyc")), (3, 996));
    fleet.in_sync(&fleet.trying(&of_path("/x")));
    assert_eq!(fleet.having("1 ams"), 999);
    // Of those that follow, so many that they are a rollout, more fail than may.
    let hosts = fleet.hosts();
    fleet.in_sync(&hosts[10..12]);
    fleet.fail(&hosts[30..33]);
    assert!(matches!(fleet.stage(&of_path("/x")), Some(ContentStage::Stopped(_))));
    assert_eq!((fleet.having("1 ams"), fleet.having("1 nyc")), (0, 999));
    // The edit is taken back: nothing is stopped any more.
    for host in &fleet.hosts()[1..] {
        fleet.asked.want(host, "nyc", &["/x"], fleet.at);
    }
    fleet.ask();
    assert_eq!(fleet.stage(&of_path("/x")), None);
}

#[test]
fn a_machine_is_tried_with_one_change_at_a_time_and_left_out_when_its_image_changes() {
    let mut fleet = Fleet::new(1_000);
    let hosts = fleet.hosts();
    fleet.edit("2");
    let first = fleet.trying(&revision(2));
    fleet.edit("3");
    let others = fleet.trying(&revision(3));
    assert_eq!((first.as_slice(), others.as_slice()), (&hosts[..3], &hosts[3..6]));
    // The first ones of the former revision get the next one when theirs is verified, and it is
    // open.
    fleet.in_sync(&others);
    assert_eq!((fleet.having("3 nyc"), fleet.having("2 nyc")), (997, 3));
    // One that does not get it is given the next, and the former one waits for nobody.
    let edited = ["h00500", "h00501", "h00502", "h00503"].map(str::to_owned);
    edited.iter().for_each(|host| fleet.asked.want(host, "sfo", &["/x"], fleet.at));
    fleet.ask();
    fleet.asked.0.order(&of_path("/x"), ContentOrder::Open, "", now(fleet.at)).unwrap();
    let getting =
        |fleet: &Fleet, id: &ContentChangeId| fleet.asked.0.changes.get(id).unwrap().getting.len();
    assert_eq!(getting(&fleet, &of_path("/x")), 4);
    assert_eq!(getting(&fleet, &revision(3)), 994 - 4);
    edited.iter().for_each(|host| fleet.asked.want(host, "nyc", &["/x"], fleet.at));
    fleet.ask();
    fleet.asked.0.order(&of_path("/x"), ContentOrder::Open, "", now(fleet.at)).unwrap();
    fleet.in_sync(&edited);
    fleet.in_sync(&first);
    assert_eq!(fleet.having("3 nyc"), 1_000);
    fleet.in_sync(&hosts);

    fleet.edit("4");
    let first = fleet.trying(&revision(4));
    let rules = rules(&["/x"]);
    let (digest, algorithm) = (id("another image"), Algorithm::Blake3);
    let image = WantedImage { digest, algorithm, rules: &rules };
    fleet.asked.0.want(&machine(&first[0], "nyc"), image, now(fleet.at));
    fleet.asked.0.advance(now(fleet.at));
    assert_eq!(fleet.asked.known(&first[0])[0].1, id("3 nyc"));
    assert_eq!((fleet.having("4 nyc"), fleet.trying(&revision(4)).len()), (3, 3));
    assert!(!fleet.trying(&revision(4)).contains(&first[0]));
    // Another does not come to an end.
    fleet.at += FIRST_LONGEST.as_secs();
    fleet.asked.0.advance(now(fleet.at));
    assert_eq!(fleet.having("4 nyc"), 3);
    assert_eq!(fleet.stage(&revision(4)), Some(ContentStage::First));
    assert!(!fleet.trying(&revision(4)).contains(&first[1]));
}

#[test]
fn machines_that_do_not_answer_are_not_first_and_those_out_of_sync_come_last() {
    let mut fleet = Fleet::new(1_000);
    let hosts = fleet.hosts();
    for host in &hosts {
        fleet.report(host, ContentReport::Is(Standing::Away));
    }
    fleet.report(&hosts[7], ContentReport::Is(Standing::Settled));
    fleet.report(&hosts[8], ContentReport::Is(Standing::Settled));
    fleet.report(&hosts[9], ContentReport::Is(Standing::InSync));
    fleet.edit("2");
    assert_eq!(fleet.trying(&revision(2)), hosts[7..10]);
    let mut fleet = Fleet::new(1_000);
    fleet.report(&hosts[0], ContentReport::Is(Standing::Settled));
    fleet.edit("2");
    assert_eq!(fleet.trying(&revision(2)), hosts[1..4]);
    // A report about what it had before says nothing.
    let round = fleet.asked.0.known(&hosts[1]).round;
    let at = now(fleet.at);
    fleet.asked.0.report(&hosts[1], round - 1, ContentReport::Is(Standing::InSync), at);
    let failed = ContentReport::Failed(UpdateFailure::Stuck);
    fleet.asked.0.report(&hosts[1], round - 1, failed, at);
    assert_eq!(fleet.trying(&revision(2)), hosts[1..4]);
}

#[test]
fn operators_stop_resume_hasten_and_undo_changes() {
    let mut fleet = Fleet::new(1_000);
    let id2 = revision(2);
    let order = |fleet: &mut Fleet, order| fleet.asked.0.order(&id2, order, "noon", now(fleet.at));
    let unknown = Err(ContentOrderError::Unknown(revision(2)));
    assert_eq!(order(&mut fleet, ContentOrder::Stop), unknown);
    fleet.edit("2");
    let not_stopped = Err(ContentOrderError::NotStopped(revision(2)));
    assert_eq!(order(&mut fleet, ContentOrder::Resume), not_stopped);
    assert_eq!(order(&mut fleet, ContentOrder::Stop), Ok(()));
    assert_eq!(order(&mut fleet, ContentOrder::Stop), Err(ContentOrderError::Stopped(revision(2))));
    assert_eq!(fleet.having("2 nyc"), 3);
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.having("2 nyc"), 3, "no more get it");
    // Anew, with three more.
    assert_eq!(order(&mut fleet, ContentOrder::Resume), Ok(()));
    assert_eq!((fleet.having("2 nyc"), fleet.trying(&revision(2)).len()), (6, 3));
    assert_eq!(order(&mut fleet, ContentOrder::Open), Ok(()));
    assert_eq!(fleet.having("2 nyc"), 1_000);
    assert_eq!(order(&mut fleet, ContentOrder::Open), Err(ContentOrderError::Open(revision(2))));
    fleet.in_sync(&fleet.hosts());
    // Much later, as long as nothing else has changed.
    assert_eq!(order(&mut fleet, ContentOrder::RollBack), Ok(()));
    assert_eq!(fleet.having("1 nyc"), 1_000);
    let why = ContentStage::Stopped("by order: noon".to_owned());
    assert_eq!(fleet.stage(&revision(2)), Some(why));
    assert_eq!(
        order(&mut fleet, ContentOrder::RollBack),
        Err(ContentOrderError::NoFormer(revision(2)))
    );
}

#[test]
fn what_a_server_has_stopped_is_stopped_and_late_news_change_nothing() {
    let mut fleet = Fleet::new(1_000);
    fleet.edit("2");
    fleet.in_sync(&fleet.trying(&revision(2)));
    assert_eq!(fleet.having("2 nyc"), 1_000);
    let stopped = |number, why: Option<&str>| {
        vec![RevisionOrder { revision: 2, number, stopped: why.map(str::to_owned) }]
    };
    fleet.tell_generators(stopped(3, Some("bad at the other dominator")));
    assert_eq!(fleet.having("1 nyc"), 1_000);
    fleet.tell_generators(stopped(2, None));
    assert_eq!((fleet.having("1 nyc"), fleet.asked.0.orders_to_tell(SOURCE)), (1_000, vec![]));
    fleet.tell_generators(stopped(4, None));
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.having("2 nyc"), 3, "it is tried anew");
}

#[test]
fn a_server_whose_numbers_begin_anew_leaves_no_old_stage_behind() {
    let mut fleet = Fleet::new(1_000);
    fleet.edit("2");
    fleet.in_sync(&fleet.trying(&revision(2)));
    assert_eq!(fleet.stage(&revision(2)), Some(ContentStage::Open));
    // It was restored from a backup before the edit, and is edited in another way.
    (fleet.version, fleet.revision) = ("1".to_owned(), 1);
    fleet.tell_generators(Vec::new());
    assert_eq!(fleet.stage(&revision(2)), None);
    fleet.edit("bad");
    assert_eq!(fleet.having("bad nyc"), 3);
}

/// Has certificates made by a generator of this version and revision; `text` is that of a machine.
fn certify(fleet: &mut Fleet, version: &str, revision: u64, text: impl Fn(&str) -> String) {
    let mut all = generators(revision, &[("/x", version, revision)]);
    all.generators[0].kind = "certificate".to_owned();
    fleet.asked.set_generators(&all, fleet.at);
    for host in fleet.hosts() {
        let files = fleet.asked.0.machines.get_mut(&host).unwrap();
        files.files[0].ask_at = Some(now(fleet.at).elapsed);
    }
    let batch = fleet.asked.0.next_batch(&SOURCE.into(), now(fleet.at)).unwrap();
    let machines = batch.request.machines.iter().zip(&batch.records);
    let made = machines.map(|(wanted, record)| {
        let content = GeneratedContent {
            id: id(&text(&wanted.machine.hostname)),
            size_bytes: 0,
            valid_until_seconds: 9_000,
            generator: id(version),
            is_secret: true,
        };
        vec![Ok(KnownContent::new(&content, *record, 9, Time::default()))]
    });
    fleet.asked.0.take(&batch, made.collect(), now(fleet.at), 500);
    fleet.asked.0.advance(now(fleet.at));
}

#[test]
fn certificates_that_are_renewed_by_order_are_a_content_revision() {
    let mut fleet = Fleet::new(100);
    let all = |_: &str| "first".to_owned();
    certify(&mut fleet, "1", 1, all);
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.having("first"), 100);

    // All of them: first machines come first, unless an operator calls it urgent.
    certify(&mut fleet, "2", 2, |_| "second".to_owned());
    assert_eq!(fleet.having("second"), 3);
    assert_eq!(fleet.asked.0.known("h00000").update, ContentUpdate::Change);
    let order = ContentOrder::Open;
    fleet.asked.0.order(&revision(2), order, "it is urgent", now(fleet.at)).unwrap();
    assert_eq!(fleet.having("second"), 100);
    fleet.in_sync(&fleet.hosts());

    // As few as there may be first machines have it at once.
    let few = ["h00007", "h00008", "h00009"];
    let text = |host: &str| if few.contains(&host) { "third" } else { "second" }.to_owned();
    certify(&mut fleet, "3", 3, text);
    assert_eq!((fleet.having("third"), fleet.having("second")), (3, 97));
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.asked.0.known("h00007").update, ContentUpdate::None);
}

#[test]
fn certificates_that_are_renewed_by_age_do_not_wait() {
    let mut fleet = Fleet::new(100);
    certify(&mut fleet, "1", 1, |_| "renewed".to_owned());
    assert_eq!(fleet.having("renewed"), 100);
    assert_eq!(fleet.asked.0.known("h00001").update, ContentUpdate::Renewal);
    fleet.in_sync(&fleet.hosts());
    assert_eq!(fleet.asked.0.known("h00001").update, ContentUpdate::None);
}
