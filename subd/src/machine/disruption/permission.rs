//! Decides when the machine's disruption command is asked, and what.
//!
//! The command knows whether the machine may be disturbed now, for example because too many others
//! are. It is called with `check` (tell the permission), `request` (ask for it) or `cancel` (give
//! it back), and its exit code is the permission: 0 permitted, 1 requested, 2 denied.
//!
//! # Invariants
//!
//! * One call at a time.
//! * A permission counts only if it was told after the wish was.
//! * `request` is never called when nothing is wanted, `cancel` never when something is.
// tidy: core

use std::time::Duration;

/// What the command is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Tell the permission.
    Check,
    /// Ask for permission.
    Request,
    /// Give it back.
    Cancel,
}

impl Question {
    /// The word, as the command knows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Request => "request",
            Self::Cancel => "cancel",
        }
    }
}

/// What the command answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// The machine may be disturbed.
    Permitted,
    /// The wish is known and not granted yet.
    Requested,
    /// Nothing is wished, or it is refused.
    Denied,
}

impl Permission {
    /// What an exit code means; `None` if it is an error.
    #[must_use]
    pub fn of_exit_code(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::Permitted),
            1 => Some(Self::Requested),
            2 => Some(Self::Denied),
            _ => None,
        }
    }

    /// How long after it was told a wish is repeated.
    fn repeat_after(self) -> Duration {
        match self {
            Self::Denied => MINUTE,
            Self::Permitted | Self::Requested => 15 * MINUTE,
        }
    }

    /// How long after it was told, while nothing is wished, it is given back once more.
    fn give_back_after(self) -> Duration {
        match self {
            Self::Requested => 15 * MINUTE,
            Self::Permitted | Self::Denied => 31 * MINUTE,
        }
    }
}

const MINUTE: Duration = Duration::from_secs(60);

/// The first pause between two checks after a change, and the longest one, while something is
/// wished.
const WISHING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// The same while nothing is wished.
const IDLE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(5 * 60));

/// How long after a failure the command is called again.
const FAILED: Duration = MINUTE;

/// What is known of the permission, and what comes next. Times are counted from the start of subd.
#[derive(Clone, Debug)]
pub struct Disruption {
    permission: Option<Permission>,
    wanted: bool,
    /// True if a request or cancel that was begun since the last change of mind was answered.
    answered: bool,
    /// The call that runs; true if it was begun before the latest change of mind.
    running: Option<(Question, bool)>,
    /// When it is checked, and the pause after that.
    check: (Duration, Duration),
    /// When the wish is repeated, or given back.
    act: Duration,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Wake,
    /// Somebody wants to do work of high impact.
    Want,
    /// Nobody wants to any more.
    Release,
    /// The call has ended; `None` if the command failed.
    Answer(Option<Permission>),
}

impl Disruption {
    /// At the start nothing is wanted, and what was wanted before is not known: it is given back
    /// only after a while, so that a restart in the middle does not lose it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            permission: None,
            wanted: false,
            answered: false,
            running: None,
            check: (Duration::ZERO, IDLE.0),
            act: Permission::Permitted.give_back_after(),
        }
    }

    /// True if work of high impact is wanted.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// The permission that the command has told since the work is wanted; `None` if it has not yet.
    #[must_use]
    pub fn permission(&self) -> Option<Permission> {
        self.permission.filter(|_| self.wanted && self.answered)
    }

    /// Takes note of `event` at `now`; gives the question to ask now, if there is one. While one is
    /// asked no other is given.
    pub fn step(&mut self, now: Duration, event: Event) -> Option<Question> {
        match event {
            Event::Wake => {}
            Event::Want if self.wanted => {}
            Event::Want => self.turn(now, true),
            Event::Release if !self.wanted => {}
            Event::Release => self.turn(now, false),
            Event::Answer(answer) => self.take(now, answer),
        }
        if self.running.is_some() {
            return None;
        }
        let question = if now >= self.act {
            if self.wanted { Question::Request } else { Question::Cancel }
        } else if now >= self.check.0 {
            Question::Check
        } else {
            return None;
        };
        self.running = Some((question, false));
        Some(question)
    }

    /// When it wants to be woken next, while no question is asked.
    #[must_use]
    pub fn wake_at(&self) -> Duration {
        self.act.min(self.check.0)
    }

    fn turn(&mut self, now: Duration, wanted: bool) {
        (self.wanted, self.answered, self.act) = (wanted, false, now);
        if let Some((_, stale)) = &mut self.running {
            *stale = true;
        }
    }

    fn take(&mut self, now: Duration, answer: Option<Permission>) {
        let Some((question, stale)) = self.running.take() else { return };
        let (first, longest) = if self.wanted { WISHING } else { IDLE };
        let Some(permission) = answer else {
            self.check = (now + FAILED, first);
            // What it said before may not hold any more.
            self.permission = None;
            if question != Question::Check && !stale {
                self.act = now + FAILED;
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
                if self.wanted { permission.repeat_after() } else { permission.give_back_after() };
            let next = now + after;
            // A check may bring the next wish nearer, and never puts it off.
            self.act = if question == Question::Check { self.act.min(next) } else { next };
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
