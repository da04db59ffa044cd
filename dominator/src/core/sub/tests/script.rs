//! Runs a state machine by a script, and writes its events, statuses and effects as lines.
// tidy: core

use core::time::Duration;
use std::sync::Arc;

use api::dominator::orders::StoppedImage;
use api::subd::{
    Activity, CacheReport, FetchFailure, FreeSpace, GetResourcesReply, GetTaskStatesRequest,
    LastFetch, LastUpdate, OrderTaskRequest, PollReply, ResourcesReport, ScanReport, SubVersion,
    UpdateOutcome,
};
use expect_test::Expect;
use model::filter::Filter;
use model::image::{Content, FORMAT, ImageName};
use model::mdb::Machine;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::plan::{RefusedChange, RefusedChanges, RefusedKind};
use model::scope::{ScanSettings, Scope};
use model::tree::text::from_text;
use model::tree::{Time, Tree};
use model::trigger::Triggers;

use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, Release};
use crate::core::computed::rollout::ContentReport;
use crate::core::identity::{IdentityReport, IdentityVerdict};
use crate::core::sub::{
    Call, Context, Effect, Event, Failure, FailureKind, ImageState, Now, RequestId, Sub, TaskEffect,
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
        signers: Vec::new(),
    };
    ImageState::Ready(Arc::new(RequiredImage::new(content, tree)))
}

/// A state machine with a fake shell, which answers the requests that the tests do not.
pub(super) struct Script {
    pub(super) sub: Sub,
    now: Duration,
    /// The offset of the time of day from [`Script::now`], in seconds.
    pub(super) clock_error: i64,
    /// The last request for a scan.
    pub(super) scan_asked: Option<RequestId>,
    pub(super) image: ImageState,
    pub(super) planned: ImageState,
    /// The next reply of the sub to a poll.
    pub(super) reply: PollReply,
    scanned: Tree,
    /// The tree that it was expected to have when its tree was read last.
    pub(super) expected: Option<Tree>,
    /// The changes that the sub refuses; `None` for an earlier release.
    pub(super) refused: Option<RefusedChanges>,
    /// Why it is another machine that answers.
    pub(super) mismatch: Option<Arc<str>>,
    /// Why the machine takes orders from another dominator.
    pub(super) other_holder: Option<String>,
    /// The former image that can be loaded.
    pub(super) former: Option<Arc<RequiredImage>>,
    pub(super) polled: RequestId,
    /// How long that poll may wait for news.
    pub(super) poll_wait_ms: u32,
    /// The call that is under way; `None` for a Commit.
    pub(super) called: Option<(RequestId, Option<Call>)>,
    /// The question about tasks that is under way.
    pub(super) asked: Option<(RequestId, GetTaskStatesRequest)>,
    lines: String,
    /// The answer to all claims.
    pub(super) answer: ClaimAnswer,
    /// What was reported of computed files.
    pub(super) reports: Vec<(u64, ContentReport)>,
    /// The images to which updates have stopped.
    pub(super) stopped: Vec<StoppedImage>,
    /// What the sub says of its resources; `None` for an earlier release.
    pub(super) resources: Option<ResourcesReport>,
    /// How often it was asked for them.
    pub(super) resources_asked: u32,
    /// Writes lines of ended updates too.
    pub(super) writes_ends: bool,
}

impl Script {
    pub(super) fn new(image: ImageState) -> Self {
        let machine = Arc::new(Machine { hostname: "web".into(), ..Machine::default() });
        let now = Now { elapsed: Duration::ZERO, wall: Time::default() };
        let scanned = tree(&[]);
        let version = SubVersion { instance: 7, generation: 1, status: 1 };
        let reply = PollReply {
            cache: Some(CacheReport::Full(Vec::new())),
            space: FreeSpace { free_bytes: 1 << 30, free_inodes: 1_000 },
            ..PollReply::idle(version, Scope::of(&ScanSettings::default(), &[]))
        };
        let mut script = Self {
            sub: Sub::new(machine, 0, now),
            now: Duration::ZERO,
            clock_error: 0,
            scan_asked: None,
            reports: Vec::new(),
            image,
            planned: ImageState::Undefined,
            reply,
            scanned,
            expected: None,
            refused: Some(RefusedChanges::default()),
            mismatch: None,
            other_holder: None,
            former: None,
            polled: RequestId(0),
            poll_wait_ms: 0,
            called: None,
            asked: None,
            lines: String::new(),
            answer: ClaimAnswer::Granted,
            stopped: Vec::new(),
            resources: Some(ResourcesReport::default()),
            resources_asked: 0,
            writes_ends: false,
        };
        script.scan(&[]);
        script.assign();
        script
    }

    /// A sub that scans in the right scope, has these files, and has recorded the image.
    pub(super) fn scanning(image: ImageState, files: &[(&str, &str)]) -> Self {
        let mut script = Self::new(image);
        script.first_scan(files);
        script
    }

    /// The sub answers for the first time: it has these files, and got the image before.
    pub(super) fn first_scan(&mut self, files: &[(&str, &str)]) {
        let image = Arc::clone(self.image.ready().expect("the image is ready"));
        self.reply.scope = Scope::of(&image.scan, &self.reply.exclusions);
        self.reply.last_image = Some(image.name().clone());
        self.scan(files);
        self.poll();
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

    /// The sub refuses to change these paths, as its next report says.
    pub(super) fn refuse_changes(&mut self, paths: &[&str]) {
        let refused = paths.iter().map(|path| RefusedChange {
            path: path.parse().unwrap(),
            kind: RefusedKind::Any,
            why: "it is busy".to_owned(),
        });
        self.refused = Some(refused.collect());
        self.reply.version.generation += 1;
        let scan = self.reply.scan.as_mut().expect("it was scanned");
        scan.unreadable =
            paths.iter().map(|path| (path.parse().unwrap(), "it is busy".to_owned())).collect();
    }

    /// The directory at `path` has too many entries.
    pub(super) fn leave_alone(&mut self, path: &str) {
        let path: TreePath = path.parse().unwrap();
        let (kind, why) = (RefusedKind::LeftAlone, "it has too many entries".to_owned());
        let scan = self.reply.scan.as_mut().expect("it was scanned");
        scan.unreadable.push((path.clone(), why.clone()));
        scan.kept_directories.push(path.clone());
        self.refused = Some([RefusedChange { path, kind, why }].into_iter().collect());
        self.reply.version.generation += 1;
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
        self.step("assigned", Event::Assigned { machine, image, planned, rollback: None });
    }

    pub(super) fn poll(&mut self) {
        self.reply.version.status += 1;
        let reply = Box::new(self.reply.clone());
        self.step("polled", Event::Polled(self.polled, reply));
    }

    pub(super) fn accept(&mut self) -> Option<Call> {
        let (request_id, call) = self.called.take().expect("a call is under way");
        self.step("accepted", Event::Accepted(request_id));
        call
    }

    pub(super) fn refuse(&mut self, kind: FailureKind, text: &str) {
        let (request_id, _) = self.called.take().expect("a call is under way");
        let failure = Failure { kind, text: text.to_owned() };
        self.step("failed", Event::CallFailed(request_id, failure));
    }

    pub(super) fn time(&self) -> Now {
        let seconds = i64::try_from(self.now.as_secs()).unwrap() + self.clock_error;
        Now { elapsed: self.now, wall: Time { seconds, nanoseconds: 0 } }
    }

    pub(super) fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.step("wake", Event::Wake);
    }

    /// Steps, and steps again with the answers that the shell would bring at once: trees and plans.
    pub(super) fn step(&mut self, name: &str, event: Event) {
        let now = self.time();
        let sources = ["images:6971".to_owned()];
        let stopped = self.stopped.clone();
        let context = Context { jitter: 500, sources: &sources, stopped: &stopped };
        let effects = self.sub.step(now, event, &context);
        let mut done = Vec::new();
        let mut next = Vec::new();
        for effect in effects {
            match effect {
                Effect::Poll(request_id, request) => {
                    self.polled = request_id;
                    self.poll_wait_ms = request.wait_ms;
                    if request.have.is_none() {
                        done.push("poll for all".to_owned());
                    }
                }
                Effect::ReadTree(request_id, root, expected) => {
                    assert_eq!(root, self.scanned.digest());
                    self.expected = expected;
                    next.push(Event::TreeRead(
                        request_id,
                        self.scanned.clone(),
                        self.refused.clone().map(Arc::new),
                    ));
                }
                Effect::ReadLeaving(request_id, required, _) => {
                    let former = self.former.as_ref();
                    let image = former.ok_or_else(|| "it does not answer".to_owned());
                    let image = image.map(|former| Arc::new(required.after(former).unwrap()));
                    next.push(Event::LeavingRead(request_id, image));
                }
                Effect::ReadFormer(request_id, _) => {
                    next.push(Event::FormerRead(request_id, self.former.clone()));
                }
                Effect::ReadResources(request_id, request) => {
                    self.resources_asked += 1;
                    let reply = match &self.resources {
                        Some(report) => {
                            let version = object(&format!("{report:?}"));
                            let is_known = request.have == Some(version);
                            let report = (!is_known).then(|| report.clone());
                            Ok(GetResourcesReply { version, report })
                        }
                        None => {
                            let (kind, text) = (FailureKind::NoMethod, "no method".to_owned());
                            Err(Failure { kind, text })
                        }
                    };
                    next.push(Event::ResourcesRead(request_id, Box::new(reply)));
                }
                Effect::WantComputed(..) => {}
                Effect::Task(TaskEffect::Ask(request_id, request)) => {
                    self.asked = Some((request_id, request));
                }
                Effect::Task(TaskEffect::Tell(event)) => {
                    done.push(format!("{} {}", event.name, event.text));
                }
                Effect::Task(TaskEffect::OrderEnded(task, number)) => {
                    done.push(format!("order {number} about {task} has ended"));
                }
                Effect::Task(TaskEffect::Resume(tasks)) => done.push(format!("resume {tasks:?}")),
                Effect::ResourceOutputs(_) => {}
                Effect::ReportContent(round, report) => self.reports.push((round, report)),
                Effect::Plan(request_id, job) => {
                    next.push(Event::Planned(request_id, Ok(Arc::new(job.run().unwrap()))));
                }
                Effect::Call(request_id, Call::Hold) => match &self.other_holder {
                    None => next.push(Event::Accepted(request_id)),
                    Some(why) => {
                        let (kind, text) = (FailureKind::Held, why.clone());
                        next.push(Event::CallFailed(request_id, Failure { kind, text }));
                    }
                },
                Effect::Call(request_id, call) => {
                    done.push(match &call {
                        Call::Fetch(request) => {
                            format!("fetch {}: {}", request.fetch_id, request.objects.len())
                        }
                        Call::Prepare(request, _) => format!(
                            "prepare {}: {} operations",
                            request.update_id,
                            request.plan.operations.len()
                        ),
                        Call::Provision(request) => format!("provision {}", request.update_id),
                        Call::ContinueProvisioning(request) => {
                            format!("continue provisioning after step {}", request.step)
                        }
                        Call::GiveUpProvisioning(_) => "give up provisioning".to_owned(),
                        Call::AddObjects(ids) => format!("add {} objects", ids.len()),
                        Call::Hold => unreachable!("it is answered above"),
                        Call::RetryTriggers => "run triggers again".to_owned(),
                        Call::Cleanup(request) => format!("cleanup of {}", request.objects.len()),
                        Call::Offer(request) => {
                            format!("offer with {} signatures", request.signatures.len())
                        }
                        Call::SetConfiguration(_) => "set-configuration".to_owned(),
                        Call::OrderTask(request) => {
                            let OrderTaskRequest { task, order, number, .. } = request;
                            format!("{} {task} as {number}", order.name())
                        }
                        Call::SetNotRestarted(request) => {
                            format!("do not restart {:?}", request.tasks)
                        }
                    });
                    let former = self.called.replace((request_id, Some(call)));
                    assert!(former.is_none(), "two calls at one time");
                }
                Effect::Commit(request_id, ordered) => {
                    done.push(format!("commit {}", ordered.update_id));
                    let former = self.called.replace((request_id, None));
                    assert!(former.is_none(), "two calls at one time");
                }
                Effect::ReportIdentity(IdentityReport::Seen(number, _)) => {
                    let mismatch = self.mismatch.clone();
                    next.push(Event::IdentityJudged(IdentityVerdict { number, mismatch }));
                }
                Effect::ReportIdentity(_) | Effect::OrderAnswered(_) => {}
                Effect::Scan(request_id, _) => {
                    self.scan_asked = Some(request_id);
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
                        Claim::Health { image, is_ill } => {
                            done.push(format!("{image} is ill: {is_ill}"));
                            continue;
                        }
                        Claim::Blocked(parts) => {
                            let parts: Vec<&str> = parts.iter().map(ImageName::as_str).collect();
                            done.push(format!("is blocked for {}", parts.join(", ")));
                            continue;
                        }
                    };
                    next.push(Event::Claimed(purpose, self.answer.clone()));
                }
                Effect::Release(Release::Update(end)) => {
                    if self.writes_ends {
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

    pub(super) fn ended(&mut self, update_id: u64, outcome: UpdateOutcome, verified: Option<u64>) {
        self.reply.activity = Activity::Idle;
        let image = ImageName::new("base").unwrap();
        if outcome == UpdateOutcome::Done {
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

    /// Answers all calls from the plan to the Commit.
    pub(super) fn commit(&mut self) {
        let Some(Call::Prepare(request, _)) = self.accept() else { panic!("nothing to prepare") };
        self.reply.activity = Activity::Prepared { update_id: request.update_id };
        self.poll();
        self.accept();
        self.reply.activity = Activity::Updating { update_id: request.update_id };
        self.poll();
    }

    /// Returns how the claim for the last update ended.
    pub(super) fn last_end(&self) -> String {
        let line = self.lines.lines().rfind(|line| line.contains("release: "));
        line.and_then(|line| line.rsplit(": ").next()).unwrap_or_default().to_owned()
    }

    pub(super) fn check(&self, expected: Expect) {
        expected.assert_eq(&self.lines);
    }
}
