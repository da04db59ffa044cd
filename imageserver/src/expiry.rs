//! Lets images go when their time has come, as long as the time can be believed.
//!
//! [`trust`] decides whether it can, [`mod@due`] which images go. This reads the clocks, deletes,
//! and tells operators when it may not.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::image_server::expiry::AcceptClockReply;
use model::image::ImageName;
use model::lock::locked;
use model::report::report;
use model::tree::Time;
use model::when::moment;
use rpc::audit_log::AuditLog;
use serde::{Deserialize, Serialize};

use crate::clock::{boot_id, reading, wall};
use crate::core::clock_trust::{Kept, Reading, Trust, Watch};
use crate::core::image_expiry::{Due, due};
use crate::store::{Store, files, layout};

/// How often what was believed is kept, in seconds.
const KEEP_INTERVAL: i64 = 300;

/// How [`Kept`] is written.
#[derive(Serialize, Deserialize)]
struct KeptFile {
    boot_id: String,
    wall: i64,
    offset: i64,
}

#[derive(Debug)]
struct State {
    watch: Watch,
    trust: Trust,
    kept_at: Option<i64>,
    /// Images whose time has come, but which are in use.
    overdue: Vec<ImageName>,
    expired: u64,
}

/// Lets the images of one store expire.
pub struct Expiry {
    store: Arc<Store>,
    boot_id: String,
    /// The master says when images go, not the clock of this machine.
    is_replica: bool,
    audit: AuditLog,
    state: Mutex<State>,
}

impl Expiry {
    /// Begins to watch the clocks. Nothing expires before they have agreed for `settle`, and
    /// nothing at all on a replica.
    #[must_use]
    pub fn new(store: Arc<Store>, settle: Duration, is_replica: bool) -> Self {
        let boot_id = boot_id();
        let kept = files::read(store.data(), layout::CLOCK).unwrap_or_else(|error| {
            tracing::error!("what the clock showed before is not known: {}", report(&error));
            None
        });
        let kept = kept.map(|KeptFile { boot_id, wall, offset }| Kept { boot_id, wall, offset });
        let settle = i64::try_from(settle.as_secs()).unwrap_or(i64::MAX);
        let watch = Watch::new(kept.as_ref(), &boot_id, settle, reading());
        let state = State {
            watch,
            trust: Trust::Settling(settle),
            kept_at: None,
            overdue: Vec::new(),
            expired: 0,
        };
        Self { store, boot_id, is_replica, audit: AuditLog::none(), state: Mutex::new(state) }
    }

    /// Has what expires recorded in `audit`.
    #[must_use]
    pub fn recording(self, audit: AuditLog) -> Self {
        Self { audit, ..self }
    }

    /// Reads the clocks, and deletes the images whose time has come.
    pub fn tick(&self) {
        let now = reading();
        if self.read(now) == Trust::Trusted && !self.is_replica {
            // The time that was believed, not another that is read later.
            self.expire(Time { seconds: now.wall, nanoseconds: 0 });
        }
    }

    /// Takes note of what the clocks show, and tells if that is not believed any more.
    fn read(&self, now: Reading) -> Trust {
        let mut state = self.state();
        let (trust, before) = (state.watch.read(now), state.trust);
        state.trust = trust;
        match (before, trust) {
            (Trust::Jumped(_), Trust::Jumped(_)) => {}
            (_, Trust::Jumped(seconds)) => tracing::error!(
                seconds,
                "the clock jumped: no image expires until it is back, or an operator says that it \
                 is right with `imagetool accept-clock`"
            ),
            (Trust::Jumped(_), Trust::Settling(seconds)) => {
                tracing::warn!(
                    "the clock is back: images expire again if it stays for {seconds} s"
                );
            }
            (Trust::Jumped(_) | Trust::Settling(_), Trust::Trusted) => {
                tracing::info!("the clock is believed: images expire");
            }
            _ => {}
        }
        if trust == Trust::Trusted {
            self.keep(&mut state, now);
        }
        trust
    }

    fn keep(&self, state: &mut State, now: Reading) {
        if state.kept_at.is_some_and(|at| now.since_boot < at + KEEP_INTERVAL) {
            return;
        }
        let Kept { boot_id, wall, offset } = state.watch.keep(&self.boot_id, now);
        let file = KeptFile { boot_id, wall, offset };
        match files::write(self.store.data(), layout::CLOCK, &file) {
            Ok(()) => state.kept_at = Some(now.since_boot),
            Err(error) => tracing::error!("what the clock shows is not kept: {}", report(&error)),
        }
    }

    fn expire(&self, now: Time) {
        let mut overdue = Vec::new();
        for (name, expires_at) in self.store.images.expiring() {
            if due(Some(expires_at), now, false) == Due::No {
                continue;
            }
            let is_held = match self.store.holding.holders(&name) {
                Ok(holders) => !holders.is_empty(),
                Err(error) => {
                    tracing::error!(image = %name, "who uses it is not known: {}", report(&error));
                    continue;
                }
            };
            match due(Some(expires_at), now, is_held) {
                Due::No => {}
                Due::Stays => overdue.push(name),
                Due::Goes => self.delete(&name, expires_at, now),
            }
        }
        let mut state = self.state();
        for name in &overdue {
            if !state.overdue.contains(name) {
                tracing::error!(
                    image = %name,
                    "an image whose time has come is in use, and stays: put its expiry off with \
                     `imagetool change-expiry`, or let machines have another"
                );
            }
        }
        state.overdue = overdue;
    }

    /// Deletes an image, unless its expiry was put off meanwhile.
    fn delete(&self, name: &ImageName, expires_at: Time, now: Time) {
        let mark = format!(
            "expired at {}, as it was to at {}; the name is never used again\n",
            moment(now),
            moment(expires_at)
        );
        let is_due = |at: Option<Time>| due(at, now, false) == Due::Goes;
        match self.store.images.expire(name, &mark, is_due) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(image = %name, "an image expired");
                let why = format!("it was to expire at {}", moment(expires_at));
                self.audit.decided("expire-image", &format!("image={name}"), &why);
                self.state().expired += 1;
            }
            Err(error) => tracing::error!(image = %name, "cannot expire: {}", report(&error)),
        }
    }

    /// Believes what the clock shows: an operator says that it is right.
    pub fn accept(&self) -> AcceptClockReply {
        let now = reading();
        let mut state = self.state();
        let jumped_seconds = match state.watch.read(now) {
            Trust::Jumped(seconds) => seconds,
            Trust::Trusted | Trust::Settling(_) => 0,
        };
        state.watch.accept(now);
        state.trust = Trust::Trusted;
        state.kept_at = None;
        self.keep(&mut state, now);
        AcceptClockReply { now: wall(), jumped_seconds }
    }

    /// Whether the time was believed when it was last looked at.
    #[must_use]
    pub fn trust(&self) -> Trust {
        self.state().trust
    }

    /// The images whose time has come, but which are in use.
    #[must_use]
    pub fn overdue(&self) -> Vec<ImageName> {
        self.state().overdue.clone()
    }

    /// How many images have expired since the start.
    #[must_use]
    pub fn expired(&self) -> u64 {
        self.state().expired
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}
