//! Decides when the machine's disruption command is called, and with which argument.
//!
//! The command knows whether the machine may be disturbed now, for example because too many others
//! are. It is called with `check`, `request` or `cancel`, and its exit code is the permission: 0
//! permitted, 1 requested, 2 denied.
//!
//! # Invariants
//!
//! * One call at a time.
//! * A permission counts only if it was returned after it was requested.
//! * `request` is never called when nothing is wanted, `cancel` never when something is.
// tidy: core

use std::time::Duration;

/// The argument of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Check,
    Request,
    Cancel,
}

impl Question {
    /// Returns the argument.
    pub fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Request => "request",
            Self::Cancel => "cancel",
        }
    }
}

/// The answer of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// The machine may be disturbed.
    Permitted,
    /// The request is known and not granted yet.
    Requested,
    /// Nothing is requested, or the request is refused.
    Denied,
}

impl Permission {
    /// Returns the answer of an exit code; `None` if it is an error.
    pub fn of_exit_code(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::Permitted),
            1 => Some(Self::Requested),
            2 => Some(Self::Denied),
            _ => None,
        }
    }

    /// Returns how long after this answer a request is repeated.
    fn repeat_after(self) -> Duration {
        match self {
            Self::Denied => MINUTE,
            Self::Permitted | Self::Requested => 15 * MINUTE,
        }
    }

    /// Returns how long after this answer a cancel is repeated, while nothing is wanted.
    fn cancel_after(self) -> Duration {
        match self {
            Self::Requested => 15 * MINUTE,
            Self::Permitted | Self::Denied => 31 * MINUTE,
        }
    }
}

const MINUTE: Duration = Duration::from_secs(60);

/// The first and the longest pause between two checks after a change, while permission is wanted.
const WANTED_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// The same while no permission is wanted.
const IDLE_PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(5 * 60));

/// How long after a failure the command is called again.
const FAILED_PAUSE: Duration = MINUTE;

/// The known permission, and the next calls. Times are counted from the start of subd.
#[derive(Clone, Debug)]
pub struct Disruption {
    permission: Option<Permission>,
    wanted: bool,
    /// True if a request or cancel was answered that began after `wanted` last changed.
    answered: bool,
    /// The call that runs; true if it began before `wanted` last changed.
    running: Option<(Question, bool)>,
    /// The time of the next check, and the pause after it.
    check: (Duration, Duration),
    /// When the request or the cancel is repeated.
    next_request_at: Duration,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Wake,
    /// Work of high impact is wanted.
    Want,
    /// No work of high impact is wanted any more.
    Release,
    /// The call has ended; `None` if the command failed.
    Answer(Option<Permission>),
}

impl Disruption {
    /// Starts with nothing wanted. What was wanted before a restart is not known: it is cancelled
    /// only after a while, so that a restart during an update does not lose it.
    pub fn new() -> Self {
        Self {
            permission: None,
            wanted: false,
            answered: false,
            running: None,
            check: (Duration::ZERO, IDLE_PAUSES.0),
            next_request_at: Permission::Permitted.cancel_after(),
        }
    }

    /// True if work of high impact is wanted.
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Returns the permission that the command returned since the work is wanted; `None` if it has
    /// not answered yet.
    pub fn permission(&self) -> Option<Permission> {
        self.permission.filter(|_| self.wanted && self.answered)
    }

    /// Handles `event` at `now`. Returns the question to ask now, if there is one. While a question
    /// is asked no other is returned.
    pub fn step(&mut self, now: Duration, event: Event) -> Option<Question> {
        match event {
            Event::Wake => {}
            Event::Want if self.wanted => {}
            Event::Want => self.change_wanted(now, true),
            Event::Release if !self.wanted => {}
            Event::Release => self.change_wanted(now, false),
            Event::Answer(answer) => self.take_answer(now, answer),
        }
        if self.running.is_some() {
            return None;
        }
        let question = if now >= self.next_request_at {
            if self.wanted { Question::Request } else { Question::Cancel }
        } else if now >= self.check.0 {
            Question::Check
        } else {
            return None;
        };
        self.running = Some((question, false));
        Some(question)
    }

    /// Returns the time of the next wake-up, while no question is asked.
    pub fn wake_at(&self) -> Duration {
        self.next_request_at.min(self.check.0)
    }

    fn change_wanted(&mut self, now: Duration, wanted: bool) {
        (self.wanted, self.answered, self.next_request_at) = (wanted, false, now);
        if let Some((_, stale)) = &mut self.running {
            *stale = true;
        }
    }

    fn take_answer(&mut self, now: Duration, answer: Option<Permission>) {
        let Some((question, stale)) = self.running.take() else { return };
        let (first, longest) = if self.wanted { WANTED_PAUSES } else { IDLE_PAUSES };
        let Some(permission) = answer else {
            self.check = (now + FAILED_PAUSE, first);
            // The earlier answer may no longer be valid.
            self.permission = None;
            if question != Question::Check && !stale {
                self.next_request_at = now + FAILED_PAUSE;
            }
            return;
        };
        let changed = self.permission != Some(permission);
        let pause = if changed || question != Question::Check { first } else { self.check.1 };
        let pause = pause.min(longest);
        self.check = (now + pause, (pause + pause / 2).min(longest));
        self.permission = Some(permission);
        if stale {
            return;
        }
        self.answered = self.answered || question != Question::Check;
        if question != Question::Check || changed {
            let after =
                if self.wanted { permission.repeat_after() } else { permission.cancel_after() };
            let next = now + after;
            // A check may make the next call earlier, never later.
            self.next_request_at =
                if question == Question::Check { self.next_request_at.min(next) } else { next };
        }
    }
}

impl Default for Disruption {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
