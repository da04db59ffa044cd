//! Orders about single machines, about stopped images, and about the default image.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::explain::Explanation;
use api::dominator::orders::{
    DefaultImage, PauseUpdatesReply, PauseUpdatesRequest, ResumeUpdatesReply, ResumeUpdatesRequest,
    SetDefaultImageReply, SetDefaultImageRequest, UpdatePause, WATCH_WAIT_MS_MAX, WatchSubReply,
    WatchSubRequest,
};
use model::image::ImageName;
use model::report::report;
use model::words::{counted, plain};

use super::{Fleet, Inner, OrderError};
use crate::core::default_image::{DefaultImageError, moved};
use crate::core::order::Order;
use crate::core::pauses::{PauseError, Pauses, pause};
use crate::core::selectors::hosts_of;
use crate::core::sub::{Sub, SubOrder};
use system::clock::wall;

/// The longest list of names and patterns that is recorded, in bytes.
const ABOUT_BYTES_MAX: usize = 2_000;

impl Fleet {
    /// Pauses the updates of machines: when this has returned, no Commit is sent to them until the
    /// time has come, after a restart neither.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; nothing is paused by this then.
    pub async fn pause_updates(
        &self,
        request: PauseUpdatesRequest,
    ) -> Result<PauseUpdatesReply, OrderError> {
        let _ordering = self.orders.lock().await;
        let now = wall();
        let paused = |source| OrderError::Pause { source };
        let PauseUpdatesRequest { hosts, end, reason, who } = request;
        let new = Arc::new(pause(end, reason, who, now).map_err(paused)?);
        let (hostnames, pauses) = {
            let inner = self.inner.lock().expect("no holder panics");
            let hostnames = hosts_of(&hosts, &inner.watched)?;
            let mut pauses = self.shared.gate.pauses();
            pauses.tidy(&inner.watched, now);
            pauses.pause(hostnames.clone(), &new);
            (hostnames, pauses)
        };
        let order = Order::of("pause", &new.who).about(named(&hosts)).why(&new.reason);
        self.keep_pauses(&pauses, order).await?;
        tracing::warn!(
            who = %new.who, reason = %new.reason, until = %model::when::moment(new.until),
            hosts = named(&hosts), "updates of {} are paused", machines(hostnames.len())
        );
        // The state machines learn of the pause before Commits are dropped. Otherwise each would
        // send
        // its Commit again at once, and again.
        self.shared.gate.set_pauses(pauses.clone());
        self.tell_pauses(&hostnames, Some(&new));
        self.shared.gate.pause(pauses, &hostnames).await;
        Ok(PauseUpdatesReply { hostnames, until: new.until })
    }

    /// Ends pauses of machines.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; they stay paused then.
    pub async fn resume_updates(
        &self,
        request: ResumeUpdatesRequest,
    ) -> Result<ResumeUpdatesReply, OrderError> {
        let _ordering = self.orders.lock().await;
        let now = wall();
        let refused = |source| OrderError::Pause { source };
        let ResumeUpdatesRequest { hosts, who, why } = request;
        let (hostnames, pauses) = {
            let inner = self.inner.lock().expect("no holder panics");
            let hostnames = hosts_of(&hosts, &inner.watched)?;
            let mut pauses = self.shared.gate.pauses();
            let hostnames = pauses.resume(hostnames, now);
            pauses.tidy(&inner.watched, now);
            (hostnames, pauses)
        };
        if hostnames.is_empty() {
            return Err(refused(PauseError::NotPaused { hosts }));
        }
        let order = Order::of("resume", &who).about(named(&hosts)).why(&why);
        self.keep_pauses(&pauses, order).await?;
        let count = machines(hostnames.len());
        tracing::warn!(%who, %why, hosts = named(&hosts), "updates of {count} go on");
        self.shared.gate.set_pauses(pauses);
        self.tell_pauses(&hostnames, None);
        Ok(ResumeUpdatesReply { hostnames })
    }

    async fn keep_pauses(&self, pauses: &Pauses, order: Order) -> Result<(), OrderError> {
        let order = order.checked()?;
        let kept = pauses.kept();
        self.write(move |state| state.set_pauses(&kept, Some(&order))).await
    }

    fn tell_pauses(&self, hostnames: &[String], pause: Option<&Arc<UpdatePause>>) {
        let inner = self.inner.lock().expect("no holder panics");
        for watched in hostnames.iter().filter_map(|hostname| inner.watched.get(hostname)) {
            watched.handle.order(SubOrder::Pause(pause.cloned()), &self.shared);
        }
    }

    /// Removes the pauses of machines that left the machine database. Blocks on the disk.
    pub(super) fn forget_pauses(&self) {
        let _ordering = self.orders.blocking_lock();
        let mut pauses = self.shared.gate.pauses();
        let has_changed = {
            let inner = self.inner.lock().expect("no holder panics");
            pauses.tidy(&inner.watched, wall())
        };
        if !has_changed {
            return;
        }
        tracing::warn!("pauses of machines that left the machine database are forgotten");
        if let Err(error) = self.state.set_pauses(&pauses.kept(), None) {
            // They would come back with a restart, and be forgotten then.
            tracing::error!("cannot save that: {}", report(&error));
        }
        self.shared.gate.set_pauses(pauses);
    }

    /// Lets the pending update of one machine go on although the machine asks not to be disturbed.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine or update, or the order cannot be recorded.
    pub async fn force_disruptive(
        &self,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::of("force-disruptive", who).about(hostname).why(why);
        let order = order.reasoned("the machine is to be disturbed")?;
        let pending = Sub::has_pending_plan;
        if self.order_if(hostname, order, pending, SubOrder::ForceDisruptive).await? {
            return Ok(());
        }
        let (hostname, status, detail) = self.state_of(hostname)?;
        Err(OrderError::NothingToForce { hostname, status, detail })
    }

    /// Brings one machine up to date now; [`Fleet::watch`] tells how it goes.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine, or the order cannot be recorded.
    pub async fn fast_update(
        &self,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let handle = self.handle(hostname)?;
        self.audit(Order::of("fast-update", who).about(hostname).why(why)).await?;
        handle.order(SubOrder::FastUpdate, &self.shared);
        tracing::warn!(who, why, host = hostname, "is brought up to date now");
        Ok(())
    }

    /// Waits until the status of a machine is another than the caller knows, and tells it.
    ///
    /// # Errors
    ///
    /// [`OrderError::Unknown`].
    pub async fn watch(&self, request: WatchSubRequest) -> Result<WatchSubReply, OrderError> {
        let handle = self.handle(&request.hostname)?;
        let wait = Duration::from_millis(request.wait_ms.min(WATCH_WAIT_MS_MAX).into());
        let news = handle.news(request.have);
        let _is_there = tokio::time::timeout(wait, news).await;
        // The machine may have left, or be looked after anew.
        Ok(self.handle(&request.hostname)?.look(|sub| sub.watched()))
    }

    /// Explains one machine.
    ///
    /// # Errors
    ///
    /// [`OrderError::Unknown`].
    pub fn explain(&self, hostname: &str) -> Result<Explanation, OrderError> {
        let now = self.shared.clock.now();
        Ok(self.handle(hostname)?.look(|sub| sub.explain(now)))
    }

    /// Sets the image of machines that the machine database gives none, or takes it away.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; nothing is changed then.
    pub async fn set_default_image(
        &self,
        request: SetDefaultImageRequest,
    ) -> Result<SetDefaultImageReply, OrderError> {
        let SetDefaultImageRequest { image, machines_max, who, why } = request;
        let named = image.as_ref().map_or("none", |image| image.as_str()).to_owned();
        let order = Order::of("set-default-image", &who).about(&named).why(&why).checked()?;
        let _ordering = self.orders.lock().await;
        let (machines, new) = {
            let inner = self.inner.lock().expect("no holder panics");
            let before = inner.default.as_ref().map(|default| &default.image);
            let records = inner.watched.values().map(|watched| &*watched.machine);
            let (machines, moves) = moved(records, before, image.as_ref());
            if let Some(image) = image.clone().filter(|_| moves > machines_max) {
                let moved = counted(moves.into(), "machine");
                let source = DefaultImageError::Moves { image, moved };
                return Err(OrderError::DefaultImage { source });
            }
            (machines, image.map(|image| DefaultImage { image, who: who.clone(), since: wall() }))
        };
        let kept = new.clone();
        self.write(move |state| state.set_default_image(kept.as_ref(), &order)).await?;
        tracing::warn!(%who, %why, image = named, machines, "the default image is set");
        let mut inner = self.inner.lock().expect("no holder panics");
        let new = new.map(Arc::new);
        let before = inner.wanted();
        inner.default = new.clone();
        let after = inner.wanted();
        // The old one stays until nobody looks at it.
        self.shared.images.want(&before.union(&after).cloned().collect());
        self.shared.default_image.send_replace(new);
        self.shared.images.want(&after);
        Ok(SetDefaultImageReply { machines })
    }

    /// Resumes updates to an image that have stopped. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the image stays stopped then.
    pub fn resume_image(&self, image: &ImageName, why: &str, who: &str) -> Result<(), OrderError> {
        let order = Order::of("resume-image", who).about(image).why(why);
        let order = order.reasoned("updates to the image are to go on")?;
        let resumed = self.shared.claim_service.resume(image, &self.state, &order);
        if !resumed.map_err(|source| OrderError::State { source })? {
            return Err(OrderError::NotStopped { image: image.clone() });
        }
        tracing::warn!(who, why, %image, "updates to this image go on");
        Ok(())
    }

    /// Trusts the machine that answers for a record. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine, or it cannot be trusted.
    pub fn trust(&self, hostname: &str, who: &str, why: &str) -> Result<(), OrderError> {
        let _known = self.handle(hostname)?;
        Ok(self.shared.identities.trust(hostname, who, why)?)
    }
}

impl Inner {
    /// The images that machines must have, or will get next.
    pub(super) fn wanted(&self) -> std::collections::BTreeSet<ImageName> {
        let mut images = self.intake.current().images();
        images.extend(self.default.as_ref().map(|default| default.image.clone()));
        images
    }
}

/// What an order was about, as it is recorded: not more names than a line takes.
fn named(hosts: &[String]) -> String {
    let text = plain(&hosts.join(" "), ABOUT_BYTES_MAX);
    if text.len() > ABOUT_BYTES_MAX { format!("{text} ({} names)", hosts.len()) } else { text }
}

fn machines(count: usize) -> String {
    counted(count as u64, "machine")
}
