//! Why a machine is as it is, what it waits for, and what an operator may do about it.
//!
//! All of it is read from what the state machine decides by, so it cannot tell another story.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;

use api::dominator::Status;
use api::dominator::explain::{Differs, Explanation, Has, ImageSource, MustHave, Remedy};
use api::dominator::orders::UpdatePause;
use model::object::ObjectId;
use model::plan::{Action, Difference};
use model::tree::Time;

use super::{ImageState, Now, Polling, Reach, Sub};
use crate::core::sub::missing_objects::Missing;
use crate::core::sub::next_effects::path_of;

/// How many paths an explanation names.
pub const PATHS_EXPLAINED: usize = 100;

/// How many former decisions it tells.
const DECISIONS_TOLD: usize = 5;

/// What a status means for a machine now.
struct Story {
    means: &'static str,
    waits_for: String,
    next: String,
    may: Vec<Remedy>,
}

fn small(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl Sub {
    /// Explains the machine at this time.
    #[must_use]
    pub fn explain(&self, now: Now) -> Explanation {
        let story = self.story(now);
        let mut decided = self.history.newest_first();
        decided.truncate(DECISIONS_TOLD);
        Explanation {
            hostname: self.machine.hostname.clone(),
            status: self.status,
            detail: self.detail.clone(),
            since: self.since,
            means: story.means.to_owned(),
            has: self.has(),
            must_have: self.must_have(),
            differs: self.differs(),
            paused: self.paused(now.wall).map(|pause| UpdatePause::clone(pause)),
            decided,
            waits_for: story.waits_for,
            next: story.next,
            next_at: self.next_at(now),
            may: story.may,
        }
    }

    fn has(&self) -> Has {
        let report = self.view.as_ref().map(|view| &view.report);
        Has {
            image: report
                .and_then(|report| report.last_image.clone())
                .map_or_else(String::new, String::from),
            root: self.scanned_root(),
            last_update: report.and_then(|report| report.last_update.clone()),
            last_seen: self.last_seen,
            last_synced: self.last_synced,
        }
    }

    fn scanned_root(&self) -> Option<ObjectId> {
        Some(self.view.as_ref()?.scan.as_ref()?.root)
    }

    fn must_have(&self) -> MustHave {
        let source = match (self.machine.required(), self.default_image()) {
            (Some(_), _) => ImageSource::Record,
            (None, Some(default)) => ImageSource::Default(default.clone()),
            (None, None) => ImageSource::Nobody,
        };
        let (digest, root, missing) = match &self.image {
            ImageState::Ready(image) => (Some(image.digest), Some(image.tree.digest()), None),
            ImageState::Missing(why) => (None, None, Some(why.to_string())),
            ImageState::Undefined => (None, None, None),
        };
        MustHave {
            image: self.required().map_or_else(String::new, String::from),
            source,
            digest,
            root,
            missing,
            planned: self.machine.planned().map_or_else(String::new, String::from),
            disable_updates: self.machine.disable_updates,
        }
    }

    fn differs(&self) -> Option<Differs> {
        let (image, view) = (self.image.digest()?, self.view.as_ref()?);
        let planned = self.planned.as_ref().filter(|planned| planned.key.image == image)?;
        let missing = Missing::of(planned, view);
        let mut actions: BTreeMap<&str, u32> = BTreeMap::new();
        let mut reasons: BTreeMap<Difference, u32> = BTreeMap::new();
        for operation in &planned.plan.operations {
            let action = match operation.action {
                Action::Create(_) => "create",
                Action::Replace { .. } => "replace",
                Action::Change(_) => "change",
                Action::Remove => "remove",
            };
            *actions.entry(action).or_default() += 1;
            for reason in &operation.reason {
                *reasons.entry(*reason).or_default() += 1;
            }
        }
        let blocked = planned.plan.blocked.iter();
        Some(Differs {
            operations: small(planned.plan.operations.len()),
            actions: actions.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
            reasons: reasons
                .into_iter()
                .map(|(reason, count)| (reason.name().to_owned(), count))
                .collect(),
            paths: planned.plan.operations.iter().take(PATHS_EXPLAINED).map(path_of).collect(),
            blocked: blocked
                .take(PATHS_EXPLAINED)
                .map(|blocked| format!("{}: {}", blocked.path, blocked.why))
                .collect(),
            dangers: planned.dangers.clone(),
            is_cleared: self.cleared == Some(planned.digest),
            missing_objects: small(missing.count),
            missing_bytes: missing.bytes,
        })
    }

    /// When something is done at the latest, if that is known.
    fn next_at(&self, now: Now) -> Option<Time> {
        let held = || {
            let hold = self.hold.as_ref().filter(|hold| hold.status == self.status)?;
            Some(hold.end(self.scans))
        };
        let told_again = || self.call_again.as_ref().map(|(at, _)| *at);
        let elapsed = match self.status {
            Status::Unreachable | Status::PollFailed => match (&self.reach, self.polling) {
                (Reach::Bad(_), Polling::Due(at)) => Some(at),
                (Reach::Bad(_), Polling::UnderWay(_)) => None,
                _ => self.read_again.as_ref().map(|(at, _)| *at),
            },
            Status::Paused => return self.paused(now.wall).map(|pause| pause.until),
            Status::Synced | Status::TriggerFailed => None,
            _ => held().or_else(told_again),
        };
        let left = elapsed?.saturating_sub(now.elapsed);
        Some(after(now.wall, left))
    }

    /// A command about this machine, and what it does.
    fn remedy(&self, command: &str, what: &str) -> Remedy {
        let command = format!("domtool {command} {}", self.machine.hostname);
        Remedy { command, what: what.to_owned() }
    }

    /// As [`Sub::remedy`], of a command that needs these words too.
    fn remedy_with(&self, command: &str, words: &str, what: &str) -> Remedy {
        let Remedy { command, what } = self.remedy(command, what);
        Remedy { command: format!("{command} {words}"), what }
    }

    fn story(&self, now: Now) -> Story {
        let mut story = self.story_of_status(now);
        if self.paused(now.wall).is_some() && self.status != Status::Paused {
            let what = "ends the pause of its updates, which else keeps it from the next one";
            story.may.push(self.remedy("resume", what));
        }
        if story.may.is_empty() {
            story.may.push(by_hand("nothing has to be done"));
        }
        story
    }

    fn story_of_status(&self, now: Now) -> Story {
        let retry = || self.remedy("retry", "tries again now");
        let hurry =
            || self.remedy("fast-update", "scans and tries again now, and shows how it goes");
        let look = || self.remedy("show-sub", "shows the whole plan, and all that it reports");
        let tell = |means, waits_for: &str, next: &str, may| Story {
            means,
            waits_for: waits_for.to_owned(),
            next: next.to_owned(),
            may,
        };
        let goes_on = "when it answers, its state is compared with its image, and it goes on from \
                       there";
        match self.status {
            Status::Connecting => tell(
                "it was not reached yet since the dominator started or the machine was added",
                "the first answer of its subd",
                goes_on,
                Vec::new(),
            ),
            Status::Unreachable => tell(
                "there was no connection to its subd, or no answer in time",
                "the machine, its network, or its subd",
                &format!("it is polled again, with pauses of at most half a minute; {goes_on}"),
                vec![by_hand("see whether the machine is on, its name resolves, and subd runs")],
            ),
            Status::PollFailed => tell(
                "something answers at its address, but not as a subd should, or its tree could not \
                 be read",
                "a proper answer",
                &format!("it is asked again, with pauses of at most half a minute; {goes_on}"),
                vec![by_hand("see whether that is its subd, and of which version")],
            ),
            Status::WrongMachine => tell(
                "what answers is another machine than the one that is meant, and is left alone",
                "the right machine, or an operator who says that it is the right one",
                "every answer is looked at, and it goes on when the machine is the right one",
                vec![
                    by_hand("see the detail; correct its address in the machine database"),
                    self.remedy_with(
                        "trust",
                        "--why TEXT",
                        "says that it is the right one, such as after a reinstall",
                    ),
                ],
            ),
            Status::ImageUndefined => tell(
                "nobody says which image it must have: it is watched, and left as it is",
                "a RequiredImage in its record of the machine database, or a default image",
                "an edit of the machine database is seen at once",
                vec![by_hand("nothing has to be done if that is meant; else edit its record")],
            ),
            Status::ImageNotReady => tell(
                "the image that it must have is not on the image server, not complete, or no good",
                "the image",
                "the dominator hears of the image at once when it is uploaded",
                vec![
                    by_hand("look for its name: imagetool list; upload it, or edit the record"),
                    Remedy {
                        command: "domtool status".to_owned(),
                        what: "shows what is wrong with the image server, if anything".to_owned(),
                    },
                ],
            ),
            Status::Rescanning => tell(
                "its tree is not known yet, or not as it is since the last update",
                "the end of a scan, or of its comparison with the image",
                "what it has is compared with what it must have",
                Vec::new(),
            ),
            Status::Fetching => tell(
                "it gets objects into its cache; nothing visible changes",
                "the objects that are still missing",
                "when all have arrived the update is staged, and then carried out",
                Vec::new(),
            ),
            Status::InsufficientSpace => tell(
                "the objects that it needs do not fit",
                "free space or inodes on its root file-system",
                "it goes on when a poll reports enough free space, within a minute or so",
                vec![by_hand("make room on the machine"), hurry()],
            ),
            Status::Preparing => tell(
                "it stages an update beside the live files; nothing visible changes",
                "the end of the staging",
                "the staged update is carried out",
                Vec::new(),
            ),
            Status::Updating => tell(
                "it carries out an update: files change, then triggers run, then the health check",
                "the end of the update, which a poll reports",
                "what the update has touched is scanned again, and compared with the image",
                Vec::new(),
            ),
            Status::Rebooting => tell(
                "a reboot is part of its last update, and it has not come up again",
                "another boot of the machine",
                "when it answers after the boot, the update is complete, and its tree is compared \
                 with the image",
                vec![by_hand("if it never goes down, reboot it by hand")],
            ),
            Status::Synced => tell(
                "it equals its image, and a scan after the last change has verified that",
                "nothing",
                "it scans for ever; what differs from the image is repaired as soon as it is seen",
                vec![self.remedy("fast-update", "has it scanned and compared now")],
            ),
            Status::UpdatesDisabled => self.story_of_disabled(),
            Status::Paused => tell(
                "it differs from its image, and an operator has paused its updates",
                "the end of the pause, or an operator who ends it",
                "objects are fetched meanwhile; then the update is staged and carried out",
                vec![self.remedy("resume", "ends the pause now"), look()],
            ),
            Status::Held => self.story_of_held(),
            Status::UnsafeUpdate => tell(
                "the update would destroy too much, and is not made without an operator's word",
                "an operator's word, another image, or another tree",
                "nothing, until then",
                vec![
                    look(),
                    self.remedy(
                        "clear-safety-shutoff",
                        "lets this update pass, and no other; only if the dangers are meant",
                    ),
                    by_hand("if the image is wrong, correct the record in the machine database"),
                ],
            ),
            Status::Blocked => tell(
                "something that has to change cannot be changed",
                "the obstacle to go, or another image",
                "every new scan of the machine is compared anew",
                vec![by_hand("remove the obstacle, or change the image or its filter"), hurry()],
            ),
            Status::WaitingForBudget => tell(
                "it differs from its image, and as many machines as may be are under way already",
                "its turn",
                "it goes on by itself when others have come to their end",
                vec![hurry()],
            ),
            Status::ImageStopped => tell(
                "updates to its image have stopped, because they failed too often elsewhere",
                "an operator's word, or another image",
                "nothing, until then",
                vec![
                    by_hand(
                        "find out why the others failed, and correct the image under a new name",
                    ),
                    Remedy {
                        command: format!("domtool resume-image {} --why TEXT", self.image_name()),
                        what: "if the fault was elsewhere: lets updates to it go on".to_owned(),
                    },
                ],
            ),
            Status::NotConverging => tell(
                "an update was carried out, and the same has to be done again",
                "the next try",
                "the same update is made again, with pauses of at most ten minutes",
                vec![
                    by_hand(
                        "find what undoes it (another tool, a service that writes its own files), \
                         stop it, or let the filter of the image keep these paths",
                    ),
                    retry(),
                ],
            ),
            Status::SignatureRefused => tell(
                "it takes only signed images, and refused this one: see the detail",
                "signatures by enough of the keys that it trusts",
                "it is offered again when there are other signatures, and with pauses of at most \
                 ten minutes",
                vec![
                    Remedy {
                        command: format!("imagetool sign {} --key FILE", self.image_name()),
                        what: "signs the image, if it is what it should be".to_owned(),
                    },
                    by_hand(
                        "if nobody here has ordered this update: somebody may have taken over the \
                         dominator or the image server",
                    ),
                    retry(),
                ],
            ),
            Status::UpdateFailed => tell(
                "the update was not staged, or a step failed and all was put back",
                "the next try",
                "the update is made again, with pauses of at most ten minutes",
                vec![by_hand("read the detail, and subd's log on the machine"), retry(), hurry()],
            ),
            Status::UpdateStuck => tell(
                "an update can neither be finished nor put back: the tree is mixed",
                "the end of the fault that keeps it, such as a full disk or a failing medium",
                "the machine itself tries again; then it goes on from where it is",
                vec![by_hand("look at the machine soon: full disk, read-only, failing medium?")],
            ),
            Status::HealthFailed => tell(
                "its update failed the health check of the image, and was put back",
                "another image, or an operator's word",
                "nothing, until then: what drifts is not repaired",
                vec![
                    by_hand("correct the image under a new name"),
                    self.remedy("retry", "offers it this image once more"),
                ],
            ),
            Status::TriggerFailed => tell(
                "it equals its image, but a service could not be stopped, started or reloaded",
                "the next update, which clears this",
                "it scans for ever; what differs from the image is repaired as soon as it is seen",
                vec![by_hand("act on the service by hand; see the detail")],
            ),
            Status::FetchFailed => tell(
                "it did not get all objects that it needs; what had arrived is kept",
                "the next try",
                "the rest is fetched again, with pauses of at most ten minutes",
                vec![
                    by_hand("see whether the object server can be reached from the machine"),
                    retry(),
                    hurry(),
                ],
            ),
        }
        .unless_nothing_may_be_done(self, now)
    }

    fn story_of_disabled(&self) -> Story {
        let (waits_for, may) = if self.machine.disable_updates {
            let record = by_hand("take DisableUpdates out of its record in the machine database");
            ("its record in the machine database to say otherwise", record)
        } else if self.brake.is_none() && self.unrecordable.is_some() {
            let room = "see what `domtool status` says of the history; make room in the state \
                        directory of the dominator, or see to its medium";
            ("the dominator to be able to put on record what it orders", by_hand(room))
        } else {
            let brake = Remedy {
                command: "domtool enable-updates".to_owned(),
                what: "releases the brake for all machines".to_owned(),
            };
            ("the brake to be released", brake)
        };
        Story {
            means: "it differs from its image, and updates are disabled",
            waits_for: waits_for.to_owned(),
            next: "then the update is made".to_owned(),
            may: vec![may],
        }
    }

    fn story_of_held(&self) -> Story {
        let is_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let (waits_for, next, may) = if is_paused {
            let resume = Remedy {
                command: format!("subtool --subd {} resume", self.machine.hostname),
                what: "ends the pause on the machine".to_owned(),
            };
            ("the end of the pause on the machine", "it goes on at once when that is seen", resume)
        } else {
            let what = "has this update made, once, although it disturbs";
            let force = self.remedy_with("force-disruptive", "--why TEXT", what);
            ("the machine to allow it", "it is asked again about every minute", force)
        };
        Story {
            means: "it differs from its image, and the machine itself does not allow an update now",
            waits_for: waits_for.to_owned(),
            next: next.to_owned(),
            may: vec![may],
        }
    }
}

impl Story {
    /// What is done next, if the brake or a pause lets it be done.
    fn unless_nothing_may_be_done(mut self, sub: &Sub, now: Now) -> Self {
        let is_on_its_way = matches!(
            sub.status,
            Status::Connecting
                | Status::Unreachable
                | Status::PollFailed
                | Status::Rescanning
                | Status::InsufficientSpace
                | Status::UnsafeUpdate
                | Status::Blocked
                | Status::FetchFailed
                | Status::SignatureRefused
                | Status::UpdateFailed
                | Status::NotConverging
        );
        if is_on_its_way && sub.brake.is_some() {
            self.next.push_str("; but nothing is carried out before the brake is released");
        } else if is_on_its_way && sub.paused(now.wall).is_some() {
            self.next.push_str("; but nothing is carried out before the end of the pause");
        } else if is_on_its_way && sub.unrecordable.is_some() {
            self.next.push_str("; but nothing is carried out before it can be put on record");
        }
        self
    }
}

/// Something that no command of the dominator does.
fn by_hand(what: &str) -> Remedy {
    Remedy { command: String::new(), what: what.to_owned() }
}

fn after(time: Time, left: Duration) -> Time {
    let nanoseconds = u64::from(time.nanoseconds) + u64::from(left.subsec_nanos());
    let seconds = left.as_secs().saturating_add(nanoseconds / 1_000_000_000);
    Time {
        seconds: time.seconds.saturating_add(i64::try_from(seconds).unwrap_or(i64::MAX)),
        nanoseconds: u32::try_from(nanoseconds % 1_000_000_000).unwrap_or_default(),
    }
}
