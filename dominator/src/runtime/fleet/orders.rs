//! Orders about single machines, about stopped images, and about the default image.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::dominator::content::OrderContentChangeRequest;
use api::dominator::explain::{Explanation, ImageSource};
use api::dominator::orders::{
    DefaultImage, PauseUpdatesReply, PauseUpdatesRequest, ResumeUpdatesReply, ResumeUpdatesRequest,
    SetDefaultImageReply, SetDefaultImageRequest, WATCH_WAIT_MS_MAX, WatchSubReply,
    WatchSubRequest,
};
use api::dominator::permits::{Fence, FenceMachineRequest};
use model::display::{counted, error_chain, safe_text, utc};
use model::image::ImageName;
use model::lock::locked;

use super::{Fleet, FleetState, OrderError};
use crate::core::mdb_diff::images_of;
use crate::core::orders::Order;
use crate::core::orders::{PauseError, Pauses, pause};
use crate::core::required_image::{DefaultImageError, count_moved};
use crate::core::rollouts::check_default;
use crate::core::selectors::select_hosts;
use crate::core::sub::{Sub, SubOrder};
use crate::storage::with_order;

/// The longest list of names and patterns that is recorded, in bytes.
const ABOUT_BYTES_MAX: usize = 2_000;

impl Fleet {
    /// Pauses the updates of machines: when this has returned, no Commit is sent to them until the
    /// pause ends, after a restart neither. On an error nothing is paused.
    pub async fn pause_updates(
        self: &Arc<Self>,
        request: PauseUpdatesRequest,
    ) -> Result<PauseUpdatesReply, OrderError> {
        let now = self.shared.clock.now().wall;
        let PauseUpdatesRequest { hosts, end, reason, who } = request;
        let new = pause(end, reason, who, now).map_err(|source| OrderError::Pause { source })?;
        let (new, about) = (Arc::new(new), named(&hosts));
        let until = format!("until {}", utc(new.until));
        let order = Order::new("pause", &new.who).about(&about).what(until).why(&new.reason);
        let order = order.checked()?;
        let pause = Arc::clone(&new);
        let save = move |fleet: &Self| {
            let change = |pauses: &mut Pauses| {
                let inner = fleet.locked();
                let hostnames = select_hosts(&hosts, &inner.watched)?;
                pauses.remove_ended(&inner.watched, now);
                pauses.pause(hostnames.clone(), &pause);
                Ok(hostnames)
            };
            fleet.state().pauses.modify_through(change, with_order(&order))
        };
        let hostnames: Vec<String> = self.on_thread(save).await?;
        tracing::warn!(
            who = %new.who, reason = %new.reason, until = %utc(new.until),
            hosts = about, "updates of {} are paused", machines(hostnames.len())
        );
        // The state machines learn of the pause before Commits are dropped. Otherwise each would
        // send its Commit again at once, and again.
        self.send_pauses(&hostnames);
        self.shared.gate.drop_commits(&hostnames).await;
        Ok(PauseUpdatesReply { hostnames, until: new.until })
    }

    /// Ends pauses of machines. On an error they stay paused.
    pub async fn resume_updates(
        self: &Arc<Self>,
        request: ResumeUpdatesRequest,
    ) -> Result<ResumeUpdatesReply, OrderError> {
        let now = self.shared.clock.now().wall;
        let ResumeUpdatesRequest { hosts, who, why } = request;
        let about = named(&hosts);
        let order = Order::new("resume", &who).about(&about).why(&why).checked()?;
        let save = move |fleet: &Self| {
            let change = |pauses: &mut Pauses| {
                let inner = fleet.locked();
                let hostnames = pauses.resume(select_hosts(&hosts, &inner.watched)?, now);
                pauses.remove_ended(&inner.watched, now);
                if hostnames.is_empty() {
                    return Err(OrderError::Pause { source: PauseError::NotPaused { hosts } });
                }
                Ok(hostnames)
            };
            fleet.state().pauses.modify_through(change, with_order(&order))
        };
        let hostnames: Vec<String> = self.on_thread(save).await?;
        let count = machines(hostnames.len());
        tracing::warn!(%who, %why, hosts = about, "updates of {count} go on");
        self.send_pauses(&hostnames);
        Ok(ResumeUpdatesReply { hostnames })
    }

    /// Sends their present pauses to these machines.
    fn send_pauses(&self, hostnames: &[String]) {
        // The pauses are read while `inner` is locked: of two calls the later one has the later
        // pauses.
        let inner = self.locked();
        let pauses = self.state().pauses.get();
        for hostname in hostnames {
            if let Some(watched) = inner.watched.get(hostname) {
                let pause = pauses.get(hostname).cloned();
                watched.handle.order(SubOrder::Pause(pause), &self.shared);
            }
        }
    }

    /// Removes the pauses of machines that left the machine database. Blocks on the disk.
    pub(super) fn forget_pauses(&self) {
        let now = self.shared.clock.now().wall;
        let forgotten = self.state().pauses.modify(|pauses| {
            let mut tidied = pauses.clone();
            let has_changed = tidied.remove_ended(&self.locked().watched, now);
            if has_changed {
                *pauses = tidied;
            }
            has_changed
        });
        match forgotten {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!("pauses of machines that left the machine database are forgotten");
            }
            // The next change of the machine database tries it again.
            Err(error) => tracing::error!(
                "cannot forget pauses of machines that left the machine database: {}",
                error_chain(&error)
            ),
        }
    }

    /// Lets the pending update of one machine go on although the machine asks not to be disrupted.
    pub async fn force_disruptive(
        self: &Arc<Self>,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::new("force-disruptive", who).about(hostname).why(why);
        let order = order.reasoned("the machine is to be disturbed")?;
        let otherwise = format!("no update of {hostname} is pending that could be forced");
        let (pending, force) = (Sub::has_pending_plan, SubOrder::ForceDisruptive);
        self.order_if(hostname, order, pending, force, otherwise).await
    }

    /// Allows the pending unsafe update of one machine.
    pub async fn clear_safety(
        self: &Arc<Self>,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::new("clear-safety-shutoff", who).about(hostname).why(why).checked()?;
        let otherwise = format!("no unsafe update of {hostname} is pending");
        let (pending, clear) = (Sub::has_unsafe_plan, SubOrder::ClearSafety);
        self.order_if(hostname, order, pending, clear, otherwise).await
    }

    /// Installs the required image on one machine without the paths that are blocked there.
    pub async fn go_on(
        self: &Arc<Self>,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::new("go-on", who).about(hostname).why(why);
        let order = order.reasoned("the image is to be installed without the blocked paths")?;
        let otherwise = format!("no update of {hostname} is held back by blocked paths");
        let (is_held, go_on) = (Sub::is_held_by_blocked_paths, SubOrder::GoOn);
        self.order_if(hostname, order, is_held, go_on, otherwise).await
    }

    /// Retries now what failed on one machine and is held back.
    pub async fn retry(
        self: &Arc<Self>,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::new("retry", who).about(hostname).why(why).checked()?;
        let otherwise = format!("nothing that failed is held back on {hostname}");
        self.read_notes(hostname)?;
        self.order_if(hostname, order, Sub::can_retry, SubOrder::Retry, otherwise).await
    }

    /// Has the notes of the required image read now. If it was signed since, the machine gets the
    /// signatures as soon as they are known.
    fn read_notes(&self, hostname: &str) -> Result<(), OrderError> {
        if let Some(image) = self.handle(hostname)?.with_sub(Sub::required) {
            self.shared.images.read_notes(&image);
        }
        Ok(())
    }

    /// Gives an order to one machine if it `is_of_use`; it is recorded first. The error says
    /// `otherwise` if it has no effect.
    async fn order_if(
        self: &Arc<Self>,
        hostname: &str,
        order: Order,
        is_of_use: fn(&Sub) -> bool,
        sub_order: SubOrder,
        otherwise: String,
    ) -> Result<(), OrderError> {
        let handle = self.handle(hostname)?;
        if handle.with_sub(is_of_use) {
            self.audit(order.clone()).await?;
            if handle.order(sub_order, &self.shared) {
                let Order { verb, who, why, .. } = &order;
                tracing::warn!(who, why, host = hostname, "{verb} is carried out");
                return Ok(());
            }
        }
        let (status, detail) = handle.with_sub(|sub| (sub.status(), sub.detail().to_owned()));
        Err(OrderError::NoEffect { why: otherwise, status, detail })
    }

    /// Updates one machine now; [`Fleet::watch`] reports the progress.
    pub async fn fast_update(
        self: &Arc<Self>,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let handle = self.handle(hostname)?;
        self.read_notes(hostname)?;
        self.audit(Order::new("fast-update", who).about(hostname).why(why)).await?;
        handle.order(SubOrder::FastUpdate, &self.shared);
        tracing::warn!(who, why, host = hostname, "the machine is updated now");
        Ok(())
    }

    /// Fences a machine, or ends that. On an error nothing is changed.
    pub async fn fence(
        self: &Arc<Self>,
        FenceMachineRequest { hostname, is_off, why, who }: FenceMachineRequest,
    ) -> Result<(), OrderError> {
        if is_off && !self.shared.permits.is_holder(&hostname) {
            self.handle(&hostname)?;
        }
        let verb = if is_off { "fence" } else { "unfence" };
        let order = Order::new(verb, &who).about(&hostname).why(&why);
        let order = order.reasoned("the machine is known to be off, or to be one of all again")?;
        let since = self.shared.clock.now().wall;
        let (named, ordered_by, reason) = (hostname.clone(), who.clone(), why.clone());
        let save = move |fleet: &Self| {
            let change = |fences: &mut BTreeMap<String, Fence>| {
                if !is_off {
                    let hostname = hostname.clone();
                    let ended = fences.remove(&hostname);
                    return ended.map(drop).ok_or(OrderError::NotFenced { hostname });
                }
                let fence =
                    Fence { hostname: hostname.clone(), who: ordered_by, why: reason, since };
                fences.insert(hostname.clone(), fence);
                Ok(())
            };
            fleet.state().fences.modify_through(change, with_order(&order))?;
            fleet.shared.permits.take_fences();
            Ok(())
        };
        self.on_thread(save).await?;
        tracing::warn!(who, why, host = named, "{verb} is carried out");
        Ok(())
    }

    /// Waits until the status of a machine differs from the caller's version, and returns it.
    pub async fn watch(&self, request: WatchSubRequest) -> Result<WatchSubReply, OrderError> {
        let handle = self.handle(&request.hostname)?;
        let wait = Duration::from_millis(request.wait_ms.min(WATCH_WAIT_MS_MAX).into());
        let news = handle.news(request.have);
        let _is_there = tokio::time::timeout(wait, news).await;
        // The machine may have left, or have another driver.
        Ok(self.handle(&request.hostname)?.with_sub(|sub| sub.watch_reply()))
    }

    /// Explains the status of one machine.
    pub fn explain(&self, hostname: &str) -> Result<Explanation, OrderError> {
        let now = self.shared.clock.now();
        let mut explanation = self.handle(hostname)?.with_sub(|sub| sub.explain(now));
        let environment = self.environment_of(hostname);
        if let Some(environment) = environment.filter(|_| explanation.must_have.is_ordinary()) {
            explanation.must_have.source = ImageSource::Environment(environment);
        }
        Ok(explanation)
    }

    /// Sets the image of machines that the machine database gives none, or takes it away. On an
    /// error nothing is changed.
    pub async fn set_default_image(
        self: &Arc<Self>,
        request: SetDefaultImageRequest,
    ) -> Result<SetDefaultImageReply, OrderError> {
        let SetDefaultImageRequest { image, machines_max, who, why } = request;
        let named = image.as_ref().map_or("none", |image| image.as_str()).to_owned();
        let order = Order::new("set-default-image", &who).about(&named).why(&why).checked()?;
        let since = self.shared.clock.now().wall;
        let ordered_by = who.clone();
        let save = move |fleet: &Self| {
            // A rollback is checked against the default, and ends with it.
            let _decision = locked(&fleet.mdb_decisions);
            check_default(&fleet.rollout_state(), image.as_ref())?;
            let change = |default: &mut Option<Arc<DefaultImage>>| {
                let before = default.as_ref().map(|default| &default.image);
                let inner = fleet.locked();
                let records = inner.watched.values().map(|watched| &*watched.machine);
                let (machines, moves) = count_moved(records, before, image.as_ref());
                if let Some(image) = image.clone().filter(|_| moves > machines_max) {
                    let moved = counted(moves.into(), "machine");
                    let source = DefaultImageError { image, moved };
                    return Err(OrderError::DefaultImage { source });
                }
                let new =
                    image.map(|image| Arc::new(DefaultImage { image, who: ordered_by, since }));
                Ok((machines, std::mem::replace(default, new)))
            };
            let set = fleet.state().default_image.modify_through(change, with_order(&order))?;
            fleet.forget_rollbacks();
            Ok(set)
        };
        let (machines, former) = self.on_thread(save).await?;
        tracing::warn!(%who, %why, image = named, machines, "the default image is set");
        {
            let inner = self.locked();
            let after = self.wanted_images(&inner);
            // The old image stays until no driver watches it.
            let former = former.map(|former| former.image.clone());
            self.shared.images.want(&after.iter().cloned().chain(former).collect());
            self.shared.default_image_changed.send_replace(());
            self.shared.images.want(&after);
        }
        Ok(SetDefaultImageReply { machines })
    }

    /// Resumes updates to an image that have stopped. On an error the image stays stopped. Blocks
    /// on the disk.
    pub fn resume_image(&self, image: &ImageName, why: &str, who: &str) -> Result<(), OrderError> {
        let order = Order::new("resume-image", who).about(image).why(why);
        let order = order.reasoned("updates to the image are to go on")?;
        if !self.shared.claim_service.resume(image, &order)? {
            return Err(OrderError::NotStopped { image: image.clone() });
        }
        tracing::warn!(who, why, %image, "updates to this image go on");
        Ok(())
    }

    /// Carries out an order about a change of the content of computed files. On an error nothing
    /// is changed.
    pub async fn order_content(
        self: &Arc<Self>,
        request: OrderContentChangeRequest,
    ) -> Result<(), OrderError> {
        let OrderContentChangeRequest { id, order, why, who } = request;
        let record = Order::new("content", &who).about(&id).what(order.name().to_owned()).why(&why);
        self.audit(record.reasoned("that is ordered about the change of content")?).await?;
        self.shared.computed.order(&id, order, &why).await?;
        tracing::warn!(who, why, change = %id, order = order.name(), "content is ordered about");
        Ok(())
    }

    /// Takes the content that the image server has under the name of an image that has changed.
    /// Blocks on the disk.
    pub fn accept_image(&self, image: &ImageName, who: &str, why: &str) -> Result<(), OrderError> {
        let order = Order::new("accept-image", who).about(image).why(why);
        let order = order.reasoned("the changed image is to be used")?;
        let accepted = self.shared.images.accept(image, &order)?;
        let digest = accepted.ok_or_else(|| OrderError::NotChanged { image: image.clone() })?;
        tracing::warn!(who, why, %image, %digest, "the content of a changed image is accepted");
        Ok(())
    }

    /// Trusts the machine that answers for a record. Blocks on the disk.
    pub fn trust(&self, hostname: &str, who: &str, why: &str) -> Result<(), OrderError> {
        let _known = self.handle(hostname)?;
        Ok(self.shared.identities.trust(hostname, who, why)?)
    }

    /// Returns the images that machines must have, or will get next.
    pub(super) fn wanted_images(&self, inner: &FleetState) -> BTreeSet<ImageName> {
        let mut images = images_of(&inner.effective);
        images.extend(self.rollout_images());
        images.extend(self.shared.default_image().map(|default| default.image.clone()));
        images.extend(self.rollback_images(inner.effective.values()));
        images
    }
}

/// Returns the names and patterns of an order, cut to what is recorded.
pub(super) fn named(hosts: &[String]) -> String {
    let text = safe_text(&hosts.join(" "), ABOUT_BYTES_MAX);
    if text.len() > ABOUT_BYTES_MAX { format!("{text} ({} names)", hosts.len()) } else { text }
}

pub(super) fn machines(count: usize) -> String {
    counted(count as u64, "machine")
}
