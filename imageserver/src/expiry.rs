//! Deletes images that have expired, as long as the clock can be trusted.
//!
//! [`crate::core::image_expiry`] decides whether it can, and which images expire. This module reads
//! the clocks, deletes images, and logs while none may expire.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::image_server::expiry::AcceptClockReply;
use model::display::{error_chain, utc};
use model::image::ImageName;
use model::lock::locked;
use model::tree::Time;
use rpc::audit_log::AuditLog;
use serde::{Deserialize, Serialize};
use system::clock::wall;

use crate::clock::{boot_id, reading};
use crate::core::image_expiry::{ClockReading, ClockTrust, ClockWatch, Due, SavedClock, due};
use crate::store::{Store, files, layout};

/// How often the clock is saved, in seconds.
const SAVE_INTERVAL: i64 = 300;

/// The file format of [`SavedClock`].
#[derive(Serialize, Deserialize)]
struct ClockFile {
    boot_id: String,
    wall: i64,
    offset: i64,
}

#[derive(Debug)]
struct State {
    watch: ClockWatch,
    trust: ClockTrust,
    saved_at: Option<i64>,
    /// Expired images that are in use.
    overdue: Vec<ImageName>,
    expired: u64,
}

/// Deletes the expired images of one store.
pub struct Expiry {
    store: Arc<Store>,
    boot_id: String,
    /// True on a replica, where the master decides when images expire.
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
        let saved = files::read(store.data(), layout::CLOCK).unwrap_or_else(|error| {
            tracing::error!("cannot read the saved clock: {}", error_chain(&error));
            None
        });
        let saved =
            saved.map(|ClockFile { boot_id, wall, offset }| SavedClock { boot_id, wall, offset });
        let settle = i64::try_from(settle.as_secs()).unwrap_or(i64::MAX);
        let watch = ClockWatch::new(saved.as_ref(), &boot_id, settle, reading());
        let state = State {
            watch,
            trust: ClockTrust::Settling(settle),
            saved_at: None,
            overdue: Vec::new(),
            expired: 0,
        };
        Self { store, boot_id, is_replica, audit: AuditLog::none(), state: Mutex::new(state) }
    }

    /// Records expired images in `audit`.
    #[must_use]
    pub fn recording(self, audit: AuditLog) -> Self {
        Self { audit, ..self }
    }

    /// Reads the clocks, and deletes expired images.
    pub fn tick(&self) {
        let now = reading();
        if self.read(now) == ClockTrust::Trusted && !self.is_replica {
            // Uses the trusted reading, not a later one.
            self.expire(Time { seconds: now.wall, nanoseconds: 0 });
        }
    }

    /// Reads the clocks, and logs when they are no longer trusted.
    fn read(&self, now: ClockReading) -> ClockTrust {
        let mut state = self.state();
        let (trust, before) = (state.watch.read(now), state.trust);
        state.trust = trust;
        match (before, trust) {
            (ClockTrust::Jumped(_), ClockTrust::Jumped(_)) => {}
            (_, ClockTrust::Jumped(seconds)) => tracing::error!(
                seconds,
                "the clock jumped: no image expires until it is back, or an operator says that it \
                 is right with `imagetool accept-clock`"
            ),
            (ClockTrust::Jumped(_), ClockTrust::Settling(seconds)) => {
                tracing::warn!(
                    "the clock is back: images expire again if it stays for {seconds} s"
                );
            }
            (ClockTrust::Jumped(_) | ClockTrust::Settling(_), ClockTrust::Trusted) => {
                tracing::info!("the clock is trusted: images expire");
            }
            _ => {}
        }
        if trust == ClockTrust::Trusted {
            self.save(&mut state, now);
        }
        trust
    }

    fn save(&self, state: &mut State, now: ClockReading) {
        if state.saved_at.is_some_and(|at| now.since_boot < at + SAVE_INTERVAL) {
            return;
        }
        let SavedClock { boot_id, wall, offset } = state.watch.saved(&self.boot_id, now);
        let file = ClockFile { boot_id, wall, offset };
        match files::write(self.store.data(), layout::CLOCK, &file) {
            Ok(()) => state.saved_at = Some(now.since_boot),
            Err(error) => tracing::error!("cannot save the clock: {}", error_chain(&error)),
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
                    tracing::error!(
                        image = %name, "cannot read who uses it: {}", error_chain(&error)
                    );
                    continue;
                }
            };
            match due(Some(expires_at), now, is_held) {
                Due::No => {}
                Due::InUse => overdue.push(name),
                Due::Expires => self.delete(&name, expires_at, now),
            }
        }
        let mut state = self.state();
        for name in &overdue {
            if !state.overdue.contains(name) {
                tracing::error!(
                    image = %name,
                    "an expired image is in use and stays: extend its expiry with `imagetool \
                     change-expiry`, or assign another image to its machines"
                );
            }
        }
        state.overdue = overdue;
    }

    /// Deletes an image, unless its expiry was extended meanwhile.
    fn delete(&self, name: &ImageName, expires_at: Time, now: Time) {
        let mark = format!(
            "expired at {}, as it was to at {}; the name is never used again\n",
            utc(now),
            utc(expires_at)
        );
        let is_due = |at: Option<Time>| due(at, now, false) == Due::Expires;
        match self.store.images.expire(name, &mark, is_due) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(image = %name, "an image expired");
                let why = format!("it was to expire at {}", utc(expires_at));
                self.audit.record_decision("expire-image", &format!("image={name}"), &why);
                self.state().expired += 1;
            }
            Err(error) => tracing::error!(image = %name, "cannot expire: {}", error_chain(&error)),
        }
    }

    /// Accepts the wall clock as an operator requests.
    pub fn accept(&self) -> AcceptClockReply {
        let now = reading();
        let mut state = self.state();
        let jumped_seconds = match state.watch.read(now) {
            ClockTrust::Jumped(seconds) => seconds,
            ClockTrust::Trusted | ClockTrust::Settling(_) => 0,
        };
        state.watch.accept(now);
        state.trust = ClockTrust::Trusted;
        state.saved_at = None;
        self.save(&mut state, now);
        AcceptClockReply { now: wall(), jumped_seconds }
    }

    /// Returns whether the clock was trusted when it was last read.
    #[must_use]
    pub fn trust(&self) -> ClockTrust {
        self.state().trust
    }

    /// Returns the expired images that are in use.
    #[must_use]
    pub fn overdue(&self) -> Vec<ImageName> {
        self.state().overdue.clone()
    }

    /// Returns how many images have expired since the start.
    #[must_use]
    pub fn expired(&self) -> u64 {
        self.state().expired
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}
