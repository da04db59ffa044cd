//! Loads the images that machines must have from the image server, and caches others.

mod cache;
mod composed;
mod definition;
mod leaving;
mod small_file;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::expiry::{HoldImages, HoldImagesRequest, NAMES_MAX};
use api::image_server::{GetImage, GetImageRequest};
use model::display::error_chain;
use model::image::ImageName;
use model::image::composition::{self, LeftOut};
use model::image::required::RequiredImage;
use model::lock::locked;
use model::object::ObjectId;
use model::signing::Signature;
use rollouts::view::ImageNotes;
use rpc::client::{CallError, Client};
use rpc::trees::{GetImageError, TreeReader};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::orders::Order;
use crate::core::required_image::{deprecation, image_warning};
use crate::core::sub::ImageState;
use crate::core::timing::{RETRY_FIRST, RETRY_LONGEST};
use crate::runtime::clock::{Clock, jitter};
use crate::runtime::recent::Plans;
use crate::runtime::saver::Saver;
use crate::storage::{Storage, StorageError, with_order};
use model::backoff::{doubled, jittered};

/// How long the image server waits for an image that it does not have.
const WAIT: Duration = Duration::from_secs(55);

/// How often the notes of an image are read, before jitter. So long after an image is deleted
/// machines may still be updated to it.
const NOTES_INTERVAL: Duration = Duration::from_secs(15);

/// How long the image server may take to answer: one that hangs is known within half a minute.
const NOTES_LIMIT: Duration = Duration::from_secs(10);

/// How often the images in use are held, before jitter.
const HOLD_INTERVAL: Duration = Duration::from_secs(60);

/// How long the digests of images are gathered before they are saved.
const GATHER_TIME: Duration = Duration::from_millis(500);

/// How long a hold lasts: a dominator may be down for this long.
const HOLD_SECONDS: u32 = 900;

/// How long the image server may take to answer.
const HOLD_LIMIT: Duration = Duration::from_secs(30);

/// The remark on a loaded image that the image server does not know.
const NOT_THERE: &str = "is not on the image server, which may be the wrong one or empty: machines \
                         that lack files of the image cannot be updated to it";

/// An image that has another content under its name than it had when it was used first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedImage {
    pub name: ImageName,
    /// The digest of the content that was used.
    pub known: ObjectId,
    /// The digest of the content that the image server has.
    pub other: ObjectId,
}

impl fmt::Display for ChangedImage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, known, other } = self;
        write!(
            formatter,
            "image-changed: the image server has the content {other} under the name {name}, which \
             was used with {known}; no machine gets it before an operator says that it is right: \
             domtool accept-image {name} --why TEXT"
        )
    }
}

/// Replaces the signatures of a loaded image. Returns true if they differ.
fn sign(state: &mut ImageState, digest: ObjectId, signatures: Vec<Signature>) -> bool {
    let ImageState::Ready(image) = state else { return false };
    if image.digest != digest || image.signatures == signatures {
        return false;
    }
    let signed = RequiredImage::clone(image).with_signatures(signatures);
    // `with_signatures` drops them if they are too many.
    let is_new = signed.signatures != image.signatures;
    *image = Arc::new(signed);
    is_new
}

#[derive(Debug)]
struct WantedImage {
    state: watch::Sender<ImageState>,
    /// True until the image server has answered, or could not be asked, for the first time.
    is_asked_for: AtomicBool,
    /// Why machines should not depend on it any more.
    remark: Mutex<Option<String>>,
    /// What matters to rollouts; `None` while it is not known.
    rollout_notes: Mutex<Option<ImageNotes>>,
    /// The digest of what the image server has under this name, if it is not what was used.
    other: Mutex<Option<ObjectId>>,
    /// The ids of its resources of the fleet; `None` while they are not known.
    fleet_resources: Mutex<Option<BTreeSet<String>>>,
    /// Notified when the image is to be loaded again.
    reload: Notify,
    /// Notified when its notes are to be read now.
    read_notes: Notify,
    cancel: CancellationToken,
}

#[derive(Debug)]
pub struct Images {
    /// Plans that were made for these images.
    pub plans: Plans,
    client: Client,
    clock: Clock,
    reader: Arc<TreeReader>,
    /// Has the digests of the images that were used.
    state: Arc<Storage>,
    /// Saves them behind: after a crash those of the last second are not known.
    saver: Saver,
    wanted: Mutex<BTreeMap<ImageName, Arc<WantedImage>>>,
    /// Errors of the image server itself, by the image for which they occurred.
    troubles: Mutex<BTreeMap<ImageName, String>>,
    /// Images that no machine must have.
    known: Mutex<cache::ImageCache>,
    /// Images together with bundles that leave, as long as machines need them.
    leaving: Mutex<Vec<leaving::LeavingImage>>,
    /// Held while one of these is made.
    making_leaving: tokio::sync::Mutex<()>,
    /// Images that are only held at the image server.
    kept: Mutex<BTreeSet<ImageName>>,
    /// Held while a former image is loaded.
    asking: tokio::sync::Mutex<()>,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Notified when other images are wanted.
    changed: Notify,
}

impl Images {
    /// Loads images with `client`. Its tasks are in `tracker` and end when `stop` is cancelled.
    pub fn new(
        client: Client,
        clock: Clock,
        reader: Arc<TreeReader>,
        state: Arc<Storage>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            plans: Plans::default(),
            client,
            clock,
            reader,
            state,
            saver: Saver::new("the digests of images", GATHER_TIME, RETRY_LONGEST),
            wanted: Mutex::default(),
            troubles: Mutex::default(),
            known: Mutex::default(),
            leaving: Mutex::default(),
            making_leaving: tokio::sync::Mutex::default(),
            kept: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            tracker,
            stop,
            changed: Notify::new(),
        })
    }

    /// Starts to load the images of `names` that are new, with the parts of those that are
    /// composed, and stops watching images that are not named.
    pub fn want(self: &Arc<Self>, names: &BTreeSet<ImageName>) {
        let parts = names.iter().filter(|name| name.is_composed()).flat_map(ImageName::parts);
        let names: &BTreeSet<ImageName> = &parts.chain(names.iter().cloned()).collect();
        let mut wanted = locked(&self.wanted);
        let mut troubles = locked(&self.troubles);
        wanted.retain(|name, image| {
            let is_wanted = names.contains(name);
            if !is_wanted {
                // It is the former image of machines that get the next one.
                if let ImageState::Ready(former) = &*image.state.borrow() {
                    self.cache_former(name, former);
                }
                image.cancel.cancel();
                troubles.remove(name);
            }
            is_wanted
        });
        for name in names {
            if wanted.contains_key(name) {
                continue;
            }
            let (state, fleet_resources) = match name.is_nothing() {
                true => (ImageState::Ready(composition::nothing()), Some(BTreeSet::new())),
                false => {
                    let why = format!("asking the image server for {name}");
                    (ImageState::Missing(why.into()), None)
                }
            };
            let image = Arc::new(WantedImage {
                state: watch::Sender::new(state),
                is_asked_for: AtomicBool::new(!name.is_nothing() && !name.is_composed()),
                remark: Mutex::default(),
                rollout_notes: Mutex::default(),
                other: Mutex::default(),
                fleet_resources: Mutex::new(fleet_resources),
                reload: Notify::new(),
                read_notes: Notify::new(),
                cancel: self.stop.child_token(),
            });
            wanted.insert(name.clone(), Arc::clone(&image));
            if name.is_nothing() {
                continue;
            }
            self.changed.notify_one();
            let (images, name) = (Arc::clone(self), name.clone());
            self.tracker.spawn(async move {
                let cancel = image.cancel.clone();
                let follow = async {
                    match name.is_composed() {
                        true => images.follow_composed(&name, &image).await,
                        false => images.follow_image(name, &image).await,
                    }
                };
                cancel.run_until_cancelled(follow).await;
            });
        }
    }

    /// True if the image server has not answered yet for a wanted image, or a part of it.
    pub fn is_asked_for(&self, name: &ImageName) -> bool {
        let wanted = locked(&self.wanted);
        let mut parts = name.parts().filter_map(|part| wanted.get(&part));
        parts.any(|part| part.is_asked_for.load(Ordering::Relaxed))
    }

    /// Returns what matters to rollouts about a wanted image; `None` while it is not known.
    pub fn rollout_notes(&self, name: &ImageName) -> Option<ImageNotes> {
        let wanted = locked(&self.wanted);
        let mut parts = name.parts();
        let mut of_part = || Some(locked(&wanted.get(&parts.next()?)?.rollout_notes).clone());
        let mut notes = of_part()??;
        while let Some(part) = of_part() {
            let part = part?;
            notes.uploaded = notes.uploaded.max(part.uploaded);
            notes.deprecated = notes.deprecated.or(part.deprecated);
        }
        Some(notes)
    }

    /// Returns the bundles that do not fit into an image whose parts are wanted; `None` while they
    /// are not loaded.
    pub fn left_out(&self, name: &ImageName) -> Option<Vec<LeftOut>> {
        if !name.is_composed() {
            return Some(Vec::new());
        }
        if let Some(image) = self.loaded(name) {
            return Some(image.left_out.clone());
        }
        let parts: Option<Vec<_>> = name.parts().map(|part| self.loaded(&part)).collect();
        Some(composition::left_out(parts?))
    }

    /// Returns the resources of the fleet that a wanted image has; `None` while that is not known.
    pub fn fleet_resources_of(&self, name: &ImageName) -> Option<BTreeSet<String>> {
        locked(&locked(&self.wanted).get(name)?.fleet_resources).clone()
    }

    /// Returns the resources of the fleet that the wanted images have; `None` while that is not
    /// known of all.
    pub fn fleet_resources(&self) -> Option<BTreeSet<String>> {
        let wanted = locked(&self.wanted);
        let mut all = BTreeSet::new();
        for image in wanted.values() {
            all.extend(locked(&image.fleet_resources).clone()?);
        }
        (!wanted.is_empty()).then_some(all)
    }

    /// Says which images may be wanted again: they are held at the image server too.
    pub fn keep(&self, names: BTreeSet<ImageName>) {
        let former = std::mem::replace(&mut *locked(&self.kept), names);
        if former != *locked(&self.kept) {
            self.changed.notify_one();
        }
    }

    /// Holds the wanted and the kept images on the image server, so that they do not expire, under
    /// the name `holder`. Never returns.
    pub async fn hold(self: Arc<Self>, holder: String) {
        let mut is_failing = false;
        loop {
            let names: Vec<_> = {
                let (wanted, kept) = (locked(&self.wanted), locked(&self.kept));
                let kept = kept.iter().filter(|name| !wanted.contains_key(*name));
                let all = wanted.keys().chain(kept);
                // Their parts are wanted too.
                let is_there = |name: &&ImageName| !name.is_composed() && !name.is_nothing();
                all.filter(is_there).take(NAMES_MAX).cloned().collect()
            };
            // Without a machine database the holds from before the start stay.
            if !names.is_empty() {
                let request =
                    HoldImagesRequest { holder: holder.clone(), names, seconds: HOLD_SECONDS };
                match self.client.call_within::<HoldImages>(&request, HOLD_LIMIT).await {
                    Ok(_) => is_failing = false,
                    Err(error) if !is_failing => {
                        is_failing = true;
                        let why = error_chain(&error);
                        tracing::warn!(
                            "the image server does not know which images are in use: {why}"
                        );
                    }
                    Err(_) => {}
                }
            }
            // New images are held at once.
            let pause = tokio::time::sleep(jittered(HOLD_INTERVAL, jitter()));
            tokio::select! {
                () = pause => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// Returns a receiver of the state of a wanted image; `None` if [`Images::want`] did not name
    /// it.
    pub fn watch(&self, name: &ImageName) -> Option<watch::Receiver<ImageState>> {
        let wanted = locked(&self.wanted);
        Some(wanted.get(name)?.state.subscribe())
    }

    /// Returns why the image server did not answer for a wanted image; `None` if it answered for
    /// each.
    pub fn trouble(&self) -> Option<String> {
        locked(&self.troubles).values().next().cloned()
    }

    /// Returns the warnings about wanted images.
    pub fn remarks(&self) -> Vec<(ImageName, String)> {
        let wanted = locked(&self.wanted);
        let remark = |image: &WantedImage| match &*image.state.borrow() {
            ImageState::Missing(why) => Some(why.to_string()),
            _ => locked(&image.remark).clone(),
        };
        let remarks =
            wanted.iter().filter_map(|(name, image)| Some((name.clone(), remark(image)?)));
        remarks.collect()
    }

    async fn follow_image(&self, name: ImageName, wanted: &WantedImage) {
        loop {
            let follow = async {
                self.load(name.clone(), wanted).await;
                self.follow_notes(&name, wanted).await;
            };
            tokio::select! {
                () = follow => {}
                () = wanted.reload.notified() => {}
            }
        }
    }

    /// Saves the digests of images until `stop` is cancelled.
    pub async fn save_known(self: Arc<Self>, stop: CancellationToken) {
        let state = Arc::clone(&self.state);
        self.saver.run(move || state.known_images.save(), &stop).await;
    }

    /// Compares the digest of an image with that which it had when it was used first. Notes it if
    /// it was never used.
    fn check_known(&self, name: &ImageName, other: ObjectId) -> Result<(), ChangedImage> {
        let known = self.state.known_images.get().get(name).copied();
        match known {
            Some(known) if known != other => Err(ChangedImage { name: name.clone(), known, other }),
            Some(_) => Ok(()),
            None => {
                self.state.known_images.modify_behind(|known| {
                    known.insert(name.clone(), other);
                });
                self.saver.notify();
                Ok(())
            }
        }
    }

    /// Returns the wanted images that have another content than before.
    pub fn changed(&self) -> Vec<ChangedImage> {
        let known = self.state.known_images.get();
        let wanted = locked(&self.wanted);
        let changed = wanted.iter().filter_map(|(name, image)| {
            let (known, other) = (*known.get(name)?, (*locked(&image.other))?);
            Some(ChangedImage { name: name.clone(), known, other })
        });
        changed.collect()
    }

    /// Takes the content that the image server has under the name of a changed image. Returns its
    /// digest; `None` if the image has not changed. Blocks on the disk.
    pub fn accept(
        &self,
        name: &ImageName,
        order: &Order,
    ) -> Result<Option<ObjectId>, StorageError> {
        let Some(changed) = self.changed().into_iter().find(|changed| changed.name == *name) else {
            return Ok(None);
        };
        let accept = |known: &mut BTreeMap<ImageName, ObjectId>| {
            known.insert(name.clone(), changed.other);
            Ok::<_, StorageError>(())
        };
        self.state.known_images.modify_through(accept, with_order(order))?;
        if let Some(image) = locked(&self.wanted).get(name) {
            *locked(&image.other) = None;
            image.reload.notify_one();
        }
        Ok(Some(changed.other))
    }

    /// Has the notes of a wanted image, such as its signatures, read now.
    pub fn read_notes(&self, name: &ImageName) {
        let wanted = locked(&self.wanted);
        let parts = name.parts().filter_map(|part| wanted.get(&part));
        parts.for_each(|part| part.read_notes.notify_one());
    }

    /// Reads the notes of a loaded image again and again. Returns when the image was deleted: no
    /// machine gets it any more.
    async fn follow_notes(&self, name: &ImageName, wanted: &WantedImage) {
        loop {
            let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
            let image = self.client.call_within::<GetImage>(&request, NOTES_LIMIT).await;
            let code = image.as_ref().err().and_then(CallError::code);
            let trouble = match image {
                Ok(image) => {
                    let digest = image.content.digest();
                    let changed = self.check_known(name, digest).err();
                    *locked(&wanted.other) = changed.is_some().then_some(digest);
                    *locked(&wanted.remark) = changed
                        .map(|changed| changed.to_string())
                        .or_else(|| image_warning(&image.notes, self.clock.now().wall));
                    *locked(&wanted.rollout_notes) = Some(ImageNotes {
                        uploaded: image.notes.created_on,
                        deprecated: deprecation(&image.notes),
                    });
                    let signatures = image.notes.signatures;
                    wanted.state.send_if_modified(|state| sign(state, digest, signatures));
                    None
                }
                Err(_) if code == Some(FaultCode::Gone) => return,
                // What is known of the image stays: it may be the wrong server, or an empty one.
                Err(_) if code == Some(FaultCode::NotFound) => {
                    *locked(&wanted.remark) = Some(NOT_THERE.to_owned());
                    None
                }
                Err(error) => Some(error_chain(&error)),
            };
            self.set_error(name, trouble);
            self.read_fleet_resources(wanted).await;
            tokio::select! {
                () = tokio::time::sleep(jittered(NOTES_INTERVAL, jitter())) => {}
                () = wanted.read_notes.notified() => {}
            }
        }
    }

    async fn load(&self, name: ImageName, wanted: &WantedImage) {
        let mut failures = 0;
        // The first call does not wait, so that a missing image is reported at once.
        let mut wait = Duration::ZERO;
        loop {
            let answer = self.reader.image(&self.client, &name, wait).await;
            wanted.is_asked_for.store(false, Ordering::Relaxed);
            let (text, is_patient, is_of_server) = match answer {
                Ok(image) => match self.check_known(&name, image.digest) {
                    Ok(()) => {
                        tracing::info!(image = %name, digest = %image.digest, "image loaded");
                        self.set_error(&name, None);
                        // It may have another content than before.
                        *locked(&wanted.fleet_resources) = None;
                        wanted.state.send_replace(ImageState::Ready(image));
                        return;
                    }
                    Err(changed) => {
                        *locked(&wanted.other) = Some(changed.other);
                        (changed.to_string(), false, false)
                    }
                },
                Err(error) => {
                    let is_of_image = matches!(
                        error,
                        GetImageError::NotThere { .. }
                            | GetImageError::Gone { .. }
                            | GetImageError::Image { .. }
                    );
                    let is_patient = matches!(error, GetImageError::NotThere { .. });
                    (error_chain(&error), is_patient, !is_of_image)
                }
            };
            failures = if is_patient { 1 } else { failures + 1 };
            let trouble = is_of_server.then(|| text.clone());
            if failures == 1 {
                tracing::warn!(image = %name, "{text}");
            }
            self.set_error(&name, trouble);
            wanted.state.send_if_modified(|state| {
                let is_new = !matches!(state, ImageState::Missing(old) if **old == *text);
                if is_new {
                    *state = ImageState::Missing(text.into());
                }
                is_new
            });
            if is_patient && wait.is_zero() {
                // The image is missing: the next call waits for it.
                wait = WAIT;
                continue;
            }
            wait = if is_patient { WAIT } else { Duration::ZERO };
            let pause = doubled(RETRY_FIRST, RETRY_LONGEST, failures);
            tokio::time::sleep(jittered(pause, jitter())).await;
        }
    }

    fn set_error(&self, name: &ImageName, trouble: Option<String>) {
        let mut troubles = locked(&self.troubles);
        match trouble {
            Some(trouble) => troubles.insert(name.clone(), trouble),
            None => troubles.remove(name),
        };
    }
}
