//! Loads the images that machines must have from the image server, and caches others.

mod cache;
mod holds;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::{GetImage, GetImageRequest};
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::report::report;
use model::signing::Signature;
use rpc::client::{CallError, Client};
use rpc::trees::Reader;
use rpc::trees::image::GetImageError;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::sub::ImageState;
use crate::core::timing::{RETRY_FIRST, RETRY_LONGEST};
use crate::core::warnings::remark;
use crate::runtime::plan_cache::Plans;
use model::backoff::{doubled, jittered};
use system::{clock::wall, random::random};

/// How long the image server is asked to wait for an image that it does not have.
const WAIT: Duration = Duration::from_secs(55);

/// How often the notes of an image are read, before jitter.
const NOTES_INTERVAL: Duration = Duration::from_secs(60);

/// How long the image server may take to answer.
const NOTES_LIMIT: Duration = Duration::from_secs(30);

/// A number from 0 to 999.
fn jitter() -> u16 {
    u16::try_from(random() % 1_000).unwrap_or_default()
}

/// A remark on an image; and its digest with its signatures.
type News = (Option<String>, Option<(ObjectId, Vec<Signature>)>);

/// Gives the image that is at hand these signatures, if they are others; says whether it did.
fn sign(state: &mut ImageState, digest: ObjectId, signatures: Vec<Signature>) -> bool {
    let ImageState::Ready(image) = state else { return false };
    if image.digest != digest || image.signatures == signatures {
        return false;
    }
    let signed = RequiredImage::clone(image).with_signatures(signatures);
    // Too many of them are none.
    let is_new = signed.signatures != image.signatures;
    *image = Arc::new(signed);
    is_new
}

#[derive(Debug)]
struct Wanted {
    state: watch::Sender<ImageState>,
    /// Why machines should not depend on it any more.
    remark: Mutex<Option<String>>,
    cancel: CancellationToken,
}

#[derive(Debug)]
pub struct Images {
    /// Plans to these images.
    pub plans: Plans,
    client: Client,
    reader: Arc<Reader>,
    wanted: Mutex<BTreeMap<ImageName, Arc<Wanted>>>,
    /// What is wrong with the image server itself, by the image that met it.
    troubles: Mutex<BTreeMap<ImageName, String>>,
    /// What is known of others.
    known: Mutex<cache::Known>,
    /// Held while one of them is asked for.
    asking: tokio::sync::Mutex<()>,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Other images are wanted than before.
    changed: Notify,
}

impl Images {
    /// Gets images over `client`; its tasks are in `tracker` and end when `stop` is cancelled.
    #[must_use]
    pub fn new(
        client: Client,
        reader: Arc<Reader>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            plans: Plans::default(),
            client,
            reader,
            wanted: Mutex::default(),
            troubles: Mutex::default(),
            known: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            tracker,
            stop,
            changed: Notify::new(),
        })
    }

    /// Starts to get those of `names` that are new, and lets go of images that are not named.
    pub fn want(self: &Arc<Self>, names: &BTreeSet<ImageName>) {
        let mut wanted = self.wanted.lock().expect("no holder panics");
        let mut troubles = self.troubles.lock().expect("no holder panics");
        wanted.retain(|name, image| {
            let keep = names.contains(name);
            if !keep {
                // Machines that had it are compared with it when they get the next one.
                if let ImageState::Ready(former) = &*image.state.borrow() {
                    self.was_wanted(name, former);
                }
                image.cancel.cancel();
                troubles.remove(name);
            }
            keep
        });
        for name in names {
            if wanted.contains_key(name) {
                continue;
            }
            let missing = ImageState::Missing(format!("asking the image server for {name}").into());
            let image = Arc::new(Wanted {
                state: watch::Sender::new(missing),
                remark: Mutex::default(),
                cancel: self.stop.child_token(),
            });
            wanted.insert(name.clone(), Arc::clone(&image));
            self.changed.notify_one();
            let (images, name) = (Arc::clone(self), name.clone());
            self.tracker.spawn(async move {
                let cancel = image.cancel.clone();
                cancel.run_until_cancelled(images.look_after(name, &image)).await;
            });
        }
    }

    /// Tells the state of a wanted image; `None` if nobody has asked for it with
    /// [`Images::want`].
    #[must_use]
    pub fn watch(&self, name: &ImageName) -> Option<watch::Receiver<ImageState>> {
        let wanted = self.wanted.lock().expect("no holder panics");
        Some(wanted.get(name)?.state.subscribe())
    }

    /// What is wrong with the image server, if something is.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.troubles.lock().expect("no holder panics").values().next().cloned()
    }

    /// What operators should know of the images that are wanted.
    #[must_use]
    pub fn remarks(&self) -> Vec<(ImageName, String)> {
        let wanted = self.wanted.lock().expect("no holder panics");
        let remark = |image: &Wanted| match &*image.state.borrow() {
            ImageState::Missing(why) => Some(why.to_string()),
            _ => image.remark.lock().expect("no holder panics").clone(),
        };
        let remarks =
            wanted.iter().filter_map(|(name, image)| Some((name.clone(), remark(image)?)));
        remarks.collect()
    }

    async fn look_after(&self, name: ImageName, wanted: &Wanted) {
        self.get_until_there(name.clone(), wanted).await;
        loop {
            match self.ask_for_notes(&name).await {
                Ok((remark, signed)) => {
                    self.note_trouble(&name, None);
                    *wanted.remark.lock().expect("no holder panics") = remark;
                    if let Some((digest, signatures)) = signed {
                        wanted.state.send_if_modified(|state| sign(state, digest, signatures));
                    }
                }
                // What was known of the image stays.
                Err(error) => self.note_trouble(&name, Some(report(&error))),
            }
            tokio::time::sleep(jittered(NOTES_INTERVAL, jitter())).await;
        }
    }

    /// Why machines should not depend on an image any more, and who has signed which digest, by
    /// what its server says of it now.
    async fn ask_for_notes(&self, name: &ImageName) -> Result<News, CallError> {
        let request = GetImageRequest { name: name.clone(), wait_ms: 0 };
        match self.client.call_within::<GetImage>(&request, NOTES_LIMIT).await {
            Ok(image) => {
                let remark = remark(&image.notes, wall());
                Ok((remark, Some((image.content.digest(), image.notes.signatures))))
            }
            Err(error) if matches!(error.code(), Some(FaultCode::NotFound | FaultCode::Gone)) => {
                let text = "was deleted from the image server: machines cannot be updated to it";
                Ok((Some(text.to_owned()), None))
            }
            Err(error) => Err(error),
        }
    }

    async fn get_until_there(&self, name: ImageName, wanted: &Wanted) {
        let mut failures = 0;
        // The first answer comes at once, so that an image that is missing is known to be.
        let mut wait = Duration::ZERO;
        loop {
            let error = match self.reader.image(&self.client, &name, wait).await {
                Ok(image) => {
                    tracing::info!(image = %name, digest = %image.digest, "image loaded");
                    self.note_trouble(&name, None);
                    wanted.state.send_replace(ImageState::Ready(image));
                    return;
                }
                Err(error) => error,
            };
            let text = report(&error);
            let is_patient = matches!(error, GetImageError::NotThere { .. });
            failures = if is_patient { 1 } else { failures + 1 };
            let trouble = match &error {
                GetImageError::NotThere { .. }
                | GetImageError::Gone { .. }
                | GetImageError::Image { .. } => None,
                _ => Some(text.clone()),
            };
            if failures == 1 {
                tracing::warn!(image = %name, "{text}");
            }
            self.note_trouble(&name, trouble);
            wanted.state.send_if_modified(|state| {
                let is_new = !matches!(state, ImageState::Missing(old) if **old == *text);
                if is_new {
                    *state = ImageState::Missing(text.into());
                }
                is_new
            });
            if is_patient && wait.is_zero() {
                // It is known to be missing; now the server says when it comes.
                wait = WAIT;
                continue;
            }
            wait = if is_patient { WAIT } else { Duration::ZERO };
            let pause = doubled(RETRY_FIRST, RETRY_LONGEST, failures);
            tokio::time::sleep(jittered(pause, jitter())).await;
        }
    }

    fn note_trouble(&self, name: &ImageName, trouble: Option<String>) {
        let mut troubles = self.troubles.lock().expect("no holder panics");
        match trouble {
            Some(trouble) => troubles.insert(name.clone(), trouble),
            None => troubles.remove(name),
        };
    }
}
