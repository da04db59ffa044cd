//! Deletes images that have expired, as long as the clock can be trusted.
//!
//! [`TrustedClock`] decides whether it can, and [`crate::core::image_expiry`] which images expire.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::image_server::expiry::AcceptClockReply;
use model::display::{error_chain, utc};
use model::image::ImageName;
use model::lock::locked;
use model::tree::Time;
use rpc::audit_log::AuditLog;
use system::clock::wall;
use system::trusted_clock::{ClockReading, ClockTrust, ClockUse, SavedClock, TrustedClock};

use crate::core::image_expiry::{Due, due};
use crate::store::{Store, files, layout};

const CLOCK_USE: ClockUse = ClockUse {
    stopped: "no image expires",
    resumed: "images expire",
    accept: "imagetool accept-clock",
};

#[derive(Debug)]
struct State {
    clock: TrustedClock,
    /// Expired images that are in use.
    overdue: Vec<ImageName>,
    expired: u64,
}

/// Deletes the expired images of one store.
pub struct Expiry {
    store: Arc<Store>,
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
        let saved: Option<SavedClock> =
            files::read(store.data(), layout::CLOCK).unwrap_or_else(|error| {
                tracing::error!("cannot read the saved clock: {}", error_chain(&error));
                None
            });
        let settle = i64::try_from(settle.as_secs()).unwrap_or(i64::MAX);
        let clock = TrustedClock::new(CLOCK_USE, saved.as_ref(), settle);
        let state = Mutex::new(State { clock, overdue: Vec::new(), expired: 0 });
        Self { store, is_replica, audit: AuditLog::none(), state }
    }

    /// Records expired images in `audit`.
    #[must_use]
    pub fn recording(self, audit: AuditLog) -> Self {
        Self { audit, ..self }
    }

    /// Reads the clocks, and deletes expired images.
    pub fn tick(&self) {
        let now = ClockReading::now();
        let trusted = {
            let mut state = self.state();
            let trusted = state.clock.read(now);
            self.save(&mut state, now);
            trusted
        };
        if let Some(now) = trusted
            && !self.is_replica
        {
            self.expire(now);
        }
    }

    fn save(&self, state: &mut State, now: ClockReading) {
        let Some(clock) = state.clock.unsaved(now) else { return };
        match files::write(self.store.data(), layout::CLOCK, &clock) {
            Ok(()) => state.clock.note_saved(now),
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
        let now = ClockReading::now();
        let mut state = self.state();
        let jumped_seconds = state.clock.accept(now);
        self.save(&mut state, now);
        AcceptClockReply { now: wall(), jumped_seconds }
    }

    /// Returns whether the clock was trusted when it was last read.
    #[must_use]
    pub fn trust(&self) -> ClockTrust {
        self.state().clock.trust()
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
