//! A state machine on a stage: what happens to it and what it makes of that become lines.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::subd::{
    Activity, CacheReport, FetchFailure, LastFetch, LastUpdate, Outcome, PollReply, ScanReport,
    Space, Version,
};
use expect_test::Expect;
use model::filter::Filter;
use model::image::{Content, FORMAT, ImageName};
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::scope::{ScanSettings, Scope};
use model::tree::text::from_text;
use model::tree::{Time, Tree};
use model::trigger::Triggers;

use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release};
use crate::core::identity::{IdentityReport, IdentityVerdict};
use crate::core::sub::{
    Call, Context, Effect, Event, Failure, FailureKind, ImageState, Now, Sub, Ticket,
};
use model::image::required::RequiredImage;

pub(super) fn object(content: &str) -> ObjectId {
    Algorithm::Blake3.digest(content.as_bytes())
}

pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
    let lines: Vec<String> = files
        .iter()
        .map(|(path, content)| {
            format!("f 644 0:0 1.000000000 {} {} {path}\n", content.len(), object(content))
        })
        .collect();
    from_text(Algorithm::Blake3, &lines.concat()).unwrap()
}

pub(super) fn image(name: &str, files: &[(&str, &str)]) -> ImageState {
    let tree = tree(files);
    let content = Content {
        format: FORMAT,
        name: ImageName::new(name).unwrap(),
        root: tree.digest(),
        filter: Some(Filter::new(["/kept"]).unwrap()),
        triggers: Triggers::default(),
        computed: Vec::new(),
        health_check: None,
    };
    ImageState::Ready(Arc::new(RequiredImage::new(content, tree)))
}

/// A sub with a stage hand that plays all others: it answers what each test does not want to.
pub(super) struct Script {
    pub(super) sub: Sub,
    now: Duration,
    /// How far the time of day is from [`Script::now`], in seconds.
    pub(super) clock_error: i64,
    /// The last question for a scan at once.
    pub(super) scan_asked: Option<Ticket>,
    pub(super) image: ImageState,
    pub(super) planned: ImageState,
    /// What the sub would report.
    pub(super) reply: PollReply,
    scanned: Tree,
    pub(super) polled: Ticket,
    /// The call that is under way; that of a Commit is none of the others.
    pub(super) called: Option<(Ticket, Option<Call>)>,
    lines: String,
    /// What the claim service says to every claim.
    pub(super) answer: ClaimAnswer,
    /// Writes lines of ends of updates too.
    pub(super) tells_ends: bool,
}

impl Script {
    pub(super) fn new(image: ImageState) -> Self {
        let machine = Arc::new(Machine { hostname: "web".into(), ..Machine::default() });
        let now = Now { elapsed: Duration::ZERO, wall: Time::default() };
        let scanned = tree(&[]);
        let version = Version { instance: 7, generation: 1, status: 1 };
        let reply = PollReply {
            cache: Some(CacheReport::Full(Vec::new())),
            space: Space { free_bytes: 1 << 30, free_inodes: 1_000 },
            ..PollReply::idle(version, Scope::of(&ScanSettings::default(), &[]))
        };
        let mut script = Self {
            sub: Sub::new(machine, 0, now),
            now: Duration::ZERO,
            clock_error: 0,
            scan_asked: None,
            image,
            planned: ImageState::Undefined,
            reply,
            scanned,
            polled: Ticket(0),
            called: None,
            lines: String::new(),
            answer: ClaimAnswer::Granted,
            tells_ends: false,
        };
        script.scan(&[]);
        script.assign();
        script
    }

    /// As a sub that scans in the right scope, has these files, and was told of the image.
    pub(super) fn scanning(image: ImageState, files: &[(&str, &str)]) -> Self {
        let mut script = Self::new(image.clone());
        let ImageState::Ready(image) = image else { panic!("the image is ready") };
        script.reply.scope = Scope::of(&image.scan, &script.reply.exclusions);
        script.reply.last_image = Some(image.name().clone());
        script.scan(files);
        script.poll();
        script
    }

    pub(super) fn scan(&mut self, files: &[(&str, &str)]) {
        self.scanned = tree(files);
        self.reply.version.generation += 1;
        self.reply.scan = Some(ScanReport {
            scope: self.reply.scope,
            root: self.scanned.digest(),
            totals: self.scanned.root().totals(),
            kept_directories: Vec::new(),
            externally_linked: Vec::new(),
            occupied: Vec::new(),
            times: Default::default(),
            unreadable: Vec::new(),
        });
    }

    pub(super) fn cache(&mut self, contents: &[&str]) {
        let mut objects: Vec<ObjectId> = contents.iter().map(|content| object(content)).collect();
        objects.sort();
        self.reply.version.generation += 1;
        self.reply.cache = Some(CacheReport::Full(objects));
    }

    pub(super) fn assign(&mut self) {
        let machine = Arc::clone(&self.sub.machine);
        let image = self.image.clone();
        let planned = self.planned.clone();
        self.step("assigned", Event::Assigned { machine, image, planned });
    }

    pub(super) fn poll(&mut self) {
        self.reply.version.status += 1;
        let reply = Box::new(self.reply.clone());
        self.step("polled", Event::Polled(self.polled, reply));
    }

    pub(super) fn accept(&mut self) -> Option<Call> {
        let (ticket, call) = self.called.take().expect("a call is under way");
        self.step("accepted", Event::Accepted(ticket));
        call
    }

    pub(super) fn refuse(&mut self, kind: FailureKind, text: &str) {
        let (ticket, _) = self.called.take().expect("a call is under way");
        let failure = Failure { kind, text: text.to_owned() };
        self.step("failed", Event::CallFailed(ticket, failure));
    }

    pub(super) fn time(&self) -> Now {
        let seconds = i64::try_from(self.now.as_secs()).unwrap() + self.clock_error;
        Now { elapsed: self.now, wall: Time { seconds, nanoseconds: 0 } }
    }

    pub(super) fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.step("wake", Event::Wake);
    }

    /// Steps, and steps again with what the shell would bring at once: trees and plans.
    pub(super) fn step(&mut self, name: &str, event: Event) {
        let now = self.time();
        let sources = ["images:6971".to_owned()];
        let context = Context { jitter: 500, sources: &sources };
        let effects = self.sub.step(now, event, &context);
        let mut done = Vec::new();
        let mut next = Vec::new();
        for effect in effects {
            match effect {
                Effect::Poll(ticket, request) => {
                    self.polled = ticket;
                    if request.have.is_none() {
                        done.push("poll for all".to_owned());
                    }
                }
                Effect::ReadTree(ticket, root) => {
                    assert_eq!(root, self.scanned.digest());
                    next.push(Event::TreeRead(ticket, self.scanned.clone()));
                }
                Effect::Plan(ticket, job) => {
                    next.push(Event::Planned(ticket, Ok(Arc::new(job.run().unwrap()))));
                }
                Effect::Call(ticket, call) => {
                    done.push(match &call {
                        Call::Fetch(request) => {
                            format!("fetch {}: {}", request.fetch_id, request.objects.len())
                        }
                        Call::Prepare(request) => format!(
                            "prepare {}: {} operations",
                            request.update_id,
                            request.plan.operations.len()
                        ),
                        Call::Cleanup(request) => format!("cleanup of {}", request.objects.len()),
                        Call::Offer(request) => {
                            format!("offer with {} signatures", request.signatures.len())
                        }
                        Call::SetConfiguration(_) => "set-configuration".to_owned(),
                    });
                    let former = self.called.replace((ticket, Some(call)));
                    assert!(former.is_none(), "two calls at one time");
                }
                Effect::Commit(ticket, ordered) => {
                    done.push(format!("commit {}", ordered.update_id));
                    let former = self.called.replace((ticket, None));
                    assert!(former.is_none(), "two calls at one time");
                }
                Effect::ReportIdentity(IdentityReport::Seen(number, _)) => {
                    next.push(Event::IdentityJudged(IdentityVerdict { number, wrong: None }));
                }
                Effect::ReportIdentity(_) | Effect::OrderAnswered(_) => {}
                Effect::Scan(ticket, _) => {
                    self.scan_asked = Some(ticket);
                    done.push("scan".to_owned());
                }
                Effect::Claim(claim) => {
                    let purpose = match claim {
                        Claim::Update(_) => ClaimKind::Update,
                        Claim::Fetch(_) => ClaimKind::Fetch,
                        Claim::UnderWay(_) => {
                            done.push("is under way".to_owned());
                            continue;
                        }
                    };
                    next.push(Event::Claimed(purpose, self.answer.clone()));
                }
                Effect::Release(Release::Update(end)) => {
                    if self.tells_ends {
                        done.push(format!("release: {end:?}"));
                    }
                }
                Effect::Release(Release::Fetch) | Effect::ActivityKnown => {}
                Effect::StatusChanged(..) | Effect::UpdateEnded(..) => {}
            }
        }
        if next.is_empty() {
            let start: String = self.sub.detail().chars().take(50).collect();
            let (seconds, status) = (self.now.as_secs(), self.sub.status());
            self.lines.push_str(&format!("{seconds:<3} {name:<8} {status:<16} {start}\n"));
        }
        for line in done {
            self.lines.push_str(&format!("             -> {line}\n"));
        }
        for event in next {
            self.step(name, event);
        }
    }

    pub(super) fn ended(&mut self, update_id: u64, outcome: Outcome, verified: Option<u64>) {
        self.reply.activity = Activity::Idle;
        let image = ImageName::new("base").unwrap();
        if outcome == Outcome::Done {
            self.reply.last_image = Some(image.clone());
        }
        self.reply.last_update = Some(LastUpdate {
            verified_generation: verified,
            operations: 1,
            ..LastUpdate::new(update_id, image, outcome)
        });
    }

    pub(super) fn fetched(&mut self, fetch_id: u64, error: Option<FetchFailure>) {
        self.reply.activity = Activity::Idle;
        self.reply.last_fetch = Some(LastFetch { fetch_id, error, ..LastFetch::default() });
    }

    /// From the plan to the update that was told to go.
    pub(super) fn commit(&mut self) {
        let Some(Call::Prepare(request)) = self.accept() else { panic!("nothing to prepare") };
        self.reply.activity = Activity::Prepared { update_id: request.update_id };
        self.poll();
        self.accept();
        self.reply.activity = Activity::Updating { update_id: request.update_id };
        self.poll();
    }

    /// How the last claim for an update has ended.
    pub(super) fn last_end(&self) -> String {
        let line = self.lines.lines().rfind(|line| line.contains("release: "));
        line.and_then(|line| line.rsplit(": ").next()).unwrap_or_default().to_owned()
    }

    pub(super) fn check(&self, expected: Expect) {
        expected.assert_eq(&self.lines);
    }
}
