//! The texts that explain each status to operators: what it means, what the machine waits for, what
//! happens next, and what an operator may do.
// tidy: core

use api::dominator::Status;
use api::dominator::explain::Suggestion;
use api::dominator::rollback::Rollback;

use super::{Now, Sub};

/// The texts for the status that a machine has now.
pub(super) struct StatusTexts {
    pub(super) meaning: &'static str,
    pub(super) waits_for: String,
    pub(super) next: String,
    pub(super) remedies: Vec<Suggestion>,
}

impl StatusTexts {
    fn new(meaning: &'static str, waits_for: &str, next: &str, remedies: Vec<Suggestion>) -> Self {
        Self { meaning, waits_for: waits_for.to_owned(), next: next.to_owned(), remedies }
    }
}

/// Returns a remedy that no command of the dominator carries out.
fn by_hand(what: &str) -> Suggestion {
    Suggestion { command: String::new(), what: what.to_owned() }
}

fn command(command: String, what: &str) -> Suggestion {
    Suggestion { command, what: what.to_owned() }
}

const AFTER_ANSWER: &str = "when subd answers, the state of the machine is compared with its image";
const REPAIRED_AT_ONCE: &str =
    "subd scans continuously; a difference from the image is repaired as soon as it is found";
const BLOCKED_NEXT: &str = "the paths are tried again after a minute, then after longer times, and \
                            when the machine is scanned by order";
const AGAIN_WITHIN_10_MINUTES: &str = "the update is tried again, within ten minutes";

const REMOVE_DISABLE_UPDATES: &str =
    "remove DisableUpdates from its record in the machine database";
const MEND_HISTORY: &str = "see what `domtool status` says of the history; free space in the state \
                            directory of the dominator, or repair its medium";

fn enable_updates() -> Suggestion {
    command("domtool enable-updates".to_owned(), "enables updates of all machines again")
}

impl Sub {
    /// Returns the texts for the status that the machine has now.
    pub(super) fn status_texts(&self, now: Now) -> StatusTexts {
        let mut texts = self.texts_of_status();
        self.add_what_prevents_updates(&mut texts, now);
        if self.paused(now.wall).is_some() && self.shown.status != Status::Paused {
            let what = "ends the pause, which otherwise prevents the next update";
            texts.remedies.push(self.remedy("resume", what));
        }
        if let Some(Rollback { from, .. }) = self.rollback() {
            let what = format!("ends the rollback: the machine gets {from} again");
            texts.remedies.push(self.remedy_with("rollback", "--end", &what));
        }
        if texts.remedies.is_empty() {
            // Time alone mends nothing that fails.
            let has_alarms = self.view.as_ref().is_some_and(|view| !view.report.alarms.is_empty());
            texts.remedies.push(by_hand(match (self.calls.are_failing(), has_alarms) {
                (true, _) => {
                    "see in the detail why it fails; remove the cause, unless it soon succeeds"
                }
                (false, true) => "remove the cause of its alarms",
                (false, false) => "nothing has to be done",
            }));
        }
        texts
    }

    // tidy: table
    fn texts_of_status(&self) -> StatusTexts {
        match self.shown.status {
            Status::Connecting => StatusTexts::new(
                "the machine has not been reached since the dominator started or the machine was \
                 added",
                "the first answer of its subd",
                AFTER_ANSWER,
                Vec::new(),
            ),
            Status::Unreachable => StatusTexts::new(
                "subd on the machine cannot be connected to, or did not answer in time",
                "the machine, its network, or its subd",
                &format!("it is polled again within five seconds; {AFTER_ANSWER}"),
                vec![by_hand("check that the machine is on, its name resolves, and subd runs")],
            ),
            Status::PollFailed => StatusTexts::new(
                "the answer at its address is not a valid answer of subd, or its tree could not be \
                 read",
                "a valid answer",
                &format!("it is polled again within five seconds; {AFTER_ANSWER}"),
                vec![by_hand("check that subd listens at this address, and its version")],
            ),
            Status::WrongMachine => StatusTexts::new(
                "another machine than the one in the record answers; nothing is changed on it",
                "an answer of the right machine, or an operator who confirms this one",
                "every answer is checked; updates continue when the right machine answers",
                vec![
                    by_hand("see the detail; correct the address in the machine database"),
                    self.remedy_with(
                        "trust",
                        "--why TEXT",
                        "confirms that it is the right machine, for example after a reinstallation",
                    ),
                ],
            ),
            Status::ImageUndefined => StatusTexts::new(
                "no image is required of the machine: it is polled, and not changed",
                "a RequiredImage in its record of the machine database, or a default image",
                "a change of the machine database takes effect at once",
                vec![by_hand("if it is to have an image, add a RequiredImage to its record")],
            ),
            Status::ImageNotReady => StatusTexts::new(
                "the required image is not on the image server, is incomplete, or is invalid",
                "the image",
                "the dominator notices at once when the image is uploaded",
                vec![
                    by_hand("look for its name: imagetool list; upload it, or edit the record"),
                    command("domtool status".to_owned(), "shows errors of the image server"),
                ],
            ),
            Status::Rescanning => StatusTexts::new(
                "its tree is not known, or was not scanned since the last update",
                "the end of a scan, or of its comparison with the image",
                "the scanned tree is compared with the image",
                Vec::new(),
            ),
            Status::Synced => StatusTexts::new(
                "it equals its image; a scan after the last change has verified that",
                "nothing",
                REPAIRED_AT_ONCE,
                vec![self.remedy("fast-update", "has it scanned and compared now")],
            ),
            Status::UpdatesDisabled => self.texts_of_disabled(),
            Status::Paused => StatusTexts::new(
                "it differs from its image, and an operator has paused its updates",
                "the end of the pause, or an operator who ends it",
                "objects are fetched during the pause; after it the update is staged and carried \
                 out",
                vec![self.remedy("resume", "ends the pause now"), self.show_plan()],
            ),
            Status::Held => self.texts_of_held(),
            Status::UnsafeUpdate => StatusTexts::new(
                "the update would destroy too much, and needs the approval of an operator",
                "the approval of an operator, another image, or another tree",
                "nothing happens until then",
                vec![
                    self.show_plan(),
                    self.remedy(
                        "clear-safety-shutoff",
                        "approves this update and no other; only if the dangers are intended",
                    ),
                    by_hand("if the image is wrong, correct the record in the machine database"),
                ],
            ),
            Status::Blocked => StatusTexts::new(
                "paths that its image requires cannot be changed, so that the image is held back",
                "removal of the obstacle, another image, or an operator who lets it go on",
                BLOCKED_NEXT,
                vec![
                    by_hand("remove the obstacle, or change the image or its filter"),
                    self.update_now(),
                    self.remedy_with(
                        "go-on",
                        "--why TEXT",
                        "installs the image without these paths; only if it works without them",
                    ),
                ],
            ),
            Status::PartlySynced => StatusTexts::new(
                "it equals its image, except for paths that cannot be changed",
                "removal of the obstacles",
                BLOCKED_NEXT,
                vec![
                    by_hand("remove the obstacles, or change the image or its filter"),
                    self.update_now(),
                ],
            ),
            Status::WaitingForBudget => StatusTexts::new(
                "it differs from its image, and the permitted number of machines is being updated",
                "its turn",
                "its update starts when updates of other machines have ended",
                vec![self.update_now()],
            ),
            Status::ImageStopped => StatusTexts::new(
                "updates to its image have stopped, because too many of them failed",
                "an operator who resumes them, or another image",
                "nothing happens until then",
                vec![
                    by_hand(
                        "find out why the updates failed, and correct the image under a new name",
                    ),
                    command(
                        format!("domtool resume-image {} --why TEXT", self.image_name()),
                        "resumes updates to it, if the image was not the cause",
                    ),
                ],
            ),
            Status::InsufficientSpace => StatusTexts::new(
                "the objects that it needs do not fit on its root file-system",
                "free space or inodes on its root file-system",
                "it continues when a poll reports enough free space, within about a minute",
                vec![by_hand("free space on the machine"), self.update_now()],
            ),
            Status::Fetching => StatusTexts::new(
                "it fetches objects into its cache; the live files do not change",
                "the objects that are still missing",
                "when all have arrived, the update is staged and then carried out",
                Vec::new(),
            ),
            Status::Preparing => StatusTexts::new(
                "it stages an update beside the live files, which do not change",
                "the end of the staging",
                "the staged update is carried out",
                Vec::new(),
            ),
            Status::Updating => StatusTexts::new(
                "it carries out an update: changes files, then runs triggers and the health check",
                "the end of the update, which a poll reports",
                "the changed paths are scanned again and compared with the image",
                Vec::new(),
            ),
            Status::Rebooting => StatusTexts::new(
                "a reboot is part of its last update, and it has not started again",
                "the next boot of the machine",
                "when it answers after the boot, the update is complete, and its tree is compared \
                 with the image",
                vec![by_hand("if it does not reboot by itself, reboot it")],
            ),
            Status::NotConverging => StatusTexts::new(
                "an update was carried out, and the same changes are needed again",
                "the next attempt",
                AGAIN_WITHIN_10_MINUTES,
                vec![
                    by_hand(
                        "find out what undoes the update (another tool, a service that writes its \
                         own files), stop it, or add these paths to the filter of the image",
                    ),
                    self.retry_now(),
                ],
            ),
            Status::SignatureRefused => StatusTexts::new(
                "it accepts only signed images, and refused this one: see the detail",
                "signatures by enough of the keys that it trusts",
                "the image is offered again when its signatures change, and within ten minutes",
                vec![
                    command(
                        format!("imagetool sign {} --key FILE", self.image_name()),
                        "signs the image, if its content is right",
                    ),
                    by_hand(
                        "if no operator ordered this update: the dominator or the image server may \
                         be compromised",
                    ),
                    self.retry_now(),
                ],
            ),
            Status::UpdateFailed => StatusTexts::new(
                "the update was not staged, or a step failed and all steps were rolled back",
                "the next attempt",
                AGAIN_WITHIN_10_MINUTES,
                vec![
                    by_hand("read the detail, and the log of subd on the machine"),
                    self.retry_now(),
                    self.update_now(),
                ],
            ),
            Status::UpdateStuck => StatusTexts::new(
                "an update cannot be closed: the tree may be mixed, or its end cannot be recorded",
                "repair of the cause, such as a full disk or a failing medium",
                "subd tries again by itself; then the update continues",
                vec![by_hand("examine the machine soon: disk full, read-only, or failing?")],
            ),
            Status::HealthFailed => StatusTexts::new(
                "its update failed the health check of the image, and was undone",
                "another image, or an operator who orders a retry",
                "until then it is kept at its former image, and drift from that is repaired",
                vec![
                    by_hand("correct the image under a new name"),
                    self.remedy("retry", "updates it to this image once more"),
                ],
            ),
            Status::TriggerFailed => StatusTexts::new(
                "it equals its image, but a service could not be stopped, started or reloaded",
                "an operator, or the next update",
                REPAIRED_AT_ONCE,
                vec![
                    by_hand("see the detail, and repair the service by hand"),
                    self.remedy("retry", "runs the triggers that failed again"),
                ],
            ),
            Status::WaitingForComputedFiles => StatusTexts::new(
                "its image has computed files whose content is not known: see the detail",
                "the filegen-server that makes the content",
                "until then it stays at the image that it has, and drift from that is repaired; \
                 the server is asked again, within ten minutes",
                vec![by_hand(
                    "check that the filegen-server runs, and makes this file for this machine: \
                     filegen-client get HOST PATH",
                )],
            ),
            Status::SubdTooOld => StatusTexts::new(
                "its image needs a newer subd than the machine has",
                "a newer subd",
                AGAIN_WITHIN_10_MINUTES,
                vec![
                    by_hand(
                        "require an image first that differs from its former one in the newer \
                         subd, and then this image",
                    ),
                    self.retry_now(),
                ],
            ),
            Status::Provisioning => StatusTexts::new(
                "plugins make the resources that its image asks for; its files do not change",
                "the plugins, which may take days",
                "when all resources are there the update waits for its turn and is carried out; \
                 until then drift from its former image is repaired",
                vec![self.list_resources()],
            ),
            Status::ProvisionFailed => StatusTexts::new(
                "a plugin could not make a resource of its image, and its files were not changed",
                "the next attempt, or another image",
                "until then it is kept at its former image; the resources that are not there are \
                 asked for again, within ten minutes",
                vec![
                    self.list_resources(),
                    by_hand("remove what the plugin names, or correct the image under a new name"),
                    self.retry_now(),
                ],
            ),
            Status::FetchFailed => StatusTexts::new(
                "it did not get all objects that it needs; those that arrived stay in its cache",
                "the next attempt",
                "the missing objects are fetched again, within ten minutes",
                vec![
                    by_hand("check that the machine can reach the object server"),
                    self.retry_now(),
                    self.update_now(),
                ],
            ),
        }
    }

    fn texts_of_disabled(&self) -> StatusTexts {
        let (waits_for, remedy) = if self.machine.disable_updates {
            let waits_for = "the removal of DisableUpdates from its record";
            (waits_for, by_hand(REMOVE_DISABLE_UPDATES))
        } else if self.brake.is_none() && self.history_error.is_some() {
            ("the dominator to be able to record its orders", by_hand(MEND_HISTORY))
        } else {
            ("the end of the brake", enable_updates())
        };
        StatusTexts::new(
            "it differs from its image, and updates are disabled",
            waits_for,
            "then the update is carried out",
            vec![remedy],
        )
    }

    fn texts_of_held(&self) -> StatusTexts {
        let is_paused = self.view.as_ref().is_some_and(|view| view.report.paused.is_some());
        let (waits_for, next, remedy) = if is_paused {
            let resume = format!("subtool --subd {} resume", self.machine.hostname);
            (
                "the end of the pause on the machine",
                "the update continues at once when a poll reports the end",
                command(resume, "ends the pause on the machine"),
            )
        } else if self.held_by_other().is_some() {
            let take =
                format!("subtool --subd {} take-over --dominator NAME", self.machine.hostname);
            (
                "the other dominator to give it no orders for an hour, or an operator",
                "the machine is asked again about every minute",
                command(take, "gives it to the dominator NAME; stop one of the two first"),
            )
        } else {
            let what = "has this update carried out once, although it is disruptive";
            (
                "the machine to allow the update",
                "the machine is asked again about every minute",
                self.remedy_with("force-disruptive", "--why TEXT", what),
            )
        };
        StatusTexts::new(
            "it differs from its image, and the machine itself does not allow an update now",
            waits_for,
            next,
            vec![remedy],
        )
    }

    /// Adds to the next step that the brake, a pause or the history prevents it.
    fn add_what_prevents_updates(&self, texts: &mut StatusTexts, now: Now) {
        let leads_to_update = matches!(
            self.shown.status,
            Status::Connecting
                | Status::Unreachable
                | Status::PollFailed
                | Status::Rescanning
                | Status::InsufficientSpace
                | Status::UnsafeUpdate
                | Status::Blocked
                | Status::PartlySynced
                | Status::FetchFailed
                | Status::WaitingForComputedFiles
                | Status::SubdTooOld
                | Status::ProvisionFailed
                | Status::SignatureRefused
                | Status::UpdateFailed
                | Status::NotConverging
        );
        if !leads_to_update {
            return;
        }
        if self.machine.disable_updates {
            texts.next.push_str("; but its record says DisableUpdates");
            texts.remedies.push(by_hand(REMOVE_DISABLE_UPDATES));
        } else if self.brake.is_some() {
            texts.next.push_str("; but no update is carried out while updates are disabled");
            texts.remedies.push(enable_updates());
        } else if self.paused(now.wall).is_some() {
            texts.next.push_str("; but no update is carried out before the end of the pause");
        } else if self.history_error.is_some() {
            texts.next.push_str("; but no update is carried out before it can be recorded");
            texts.remedies.push(by_hand(MEND_HISTORY));
        }
    }

    fn retry_now(&self) -> Suggestion {
        self.remedy("retry", "tries again now")
    }

    fn update_now(&self) -> Suggestion {
        self.remedy("fast-update", "scans and tries again now, and shows the progress")
    }

    fn list_resources(&self) -> Suggestion {
        let command_line = format!("domtool resource list --host {}", self.machine.hostname);
        command(command_line, "lists its resources, and what plugins say of them")
    }

    fn show_plan(&self) -> Suggestion {
        self.remedy("show-sub", "shows the whole plan, and everything that the machine reports")
    }

    /// Returns a domtool command about this machine, and what it does.
    fn remedy(&self, name: &str, what: &str) -> Suggestion {
        command(format!("domtool {name} {}", self.machine.hostname), what)
    }

    fn remedy_with(&self, name: &str, arguments: &str, what: &str) -> Suggestion {
        command(format!("domtool {name} {} {arguments}", self.machine.hostname), what)
    }
}
