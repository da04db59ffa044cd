//! Accepts only signed images, if the machine's own configuration has trusted keys.
//!
//! | module | what |
//! |---|---|
//! | [`verification`] | decides whether a plan leads to the signed tree and nothing else (core) |
//! | [`contents`] | decides whether the content of computed files is signed (core) |
//! | [`offered_images`] | the images that were offered last |
//! | [`accepted_image`] | the file with the image that was accepted last |
//!
//! A dominator offers the signed part of the image, its signatures and the address of an object
//! server before it sends a plan. None of these is trusted: signatures are verified first, and each
//! further digest is verified by the one before, from the signed part to its tree. Of a composed
//! image each part is offered, and the image is composed here.
//!
//! # Invariants
//!
//! * Nothing over the network changes which keys are trusted, how many must sign, or which image
//!   was accepted last. Only an operator can have it forgotten when content was signed. The keys
//!   are read again for each verification, so that an image can change them.
//! * If keys, record or clock cannot be read, nothing is accepted. The same holds if keys were
//!   trusted once, and no flag names them now.
//! * No directory is fetched before the root of the tree was verified by signatures.
//! * A plan is verified with the scan for which it is staged.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{OfferImageRequest, PrepareRequest, SOURCES_MAX};
use model::display::error_chain;
use model::filter::Patterns;
use model::image::Content;
use model::image::composition::compose;
use model::image::required::RequiredImage;
use model::lock::locked;
use model::path::TreePath;
use model::plan::RefusedChanges;
use model::signing::contents::CONTENTS_SIGNATURES;
use model::signing::keys::TEXT_BYTES_MAX;
use model::signing::signature::IMAGE_SIGNATURES;
use model::signing::{Signature, TrustedKeys};
use model::tree::Tree;
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use rpc::trees::TreeReader;
use system::clock::wall;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::machine::IdentitySource;
use crate::state::Snapshot;
use crate::state::persisted_state::StateDirectory;
use crate::trust::offered_images::OfferedImages;
use crate::trust::verification::{
    AcceptedImage, Refusal, SigningPolicy, UpdateCase, VerifiedUpdate,
};

pub mod accepted_image;
pub mod contents;
pub mod offered_images;
pub mod verification;

/// How long an offer waits for the directories of the tree before it answers `Busy`.
const OFFER_WAIT: Duration = Duration::from_secs(20);

/// The port of object servers.
const SOURCE_PORT: u16 = daemon::IMAGESERVER_PORT;

/// The flags that say which images are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Signed images (nothing over the network changes these)")]
pub struct TrustArgs {
    /// Accept only images that are signed by these keys: a file with an ed25519 public key of
    /// OpenSSH on each line. `images="web/,base/debian-12"` before a key lets it sign only these.
    #[arg(long, value_name = "FILE")]
    pub trusted_keys: Option<PathBuf>,

    /// How many different keys must have signed an image.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "trusted_keys")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16))]
    pub signatures_needed: u32,

    /// Also accept signed images that are older than the image that was accepted last.
    #[arg(long, requires = "trusted_keys")]
    pub allow_older_images: bool,
}

/// Decides which images are accepted; holds those that were offered last.
#[derive(Debug)]
pub struct Trust {
    /// `None` where keys were trusted once and no flag names them now.
    keys: Option<PathBuf>,
    needed: u32,
    allow_older: bool,
    state: Arc<StateDirectory>,
    offered: Mutex<OfferedImages>,
    /// The signatures of the content of computed files that were offered last.
    contents: Mutex<Arc<[Signature]>>,
    /// Where the host name of the machine is read.
    identity: IdentitySource,
    /// Held while directories are fetched.
    turn: Arc<tokio::sync::Mutex<()>>,
    reader: Arc<TreeReader>,
    security: Security,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The trusted keys, the image accepted last, the time and the names, as they are now.
struct TrustState {
    keys: TrustedKeys,
    last: Option<AcceptedImage>,
    now: u64,
    /// The names of the machine: those of its certificate, or its host name without TLS.
    names: Vec<String>,
}

impl Trust {
    /// Sets up what `args` ask for; `None` if every image is accepted. A machine that was once
    /// started with trusted keys accepts no image when it is started without them, so that removing
    /// the configuration file does not open it.
    pub fn new(
        args: &TrustArgs,
        state: Arc<StateDirectory>,
        security: Security,
        identity: IdentitySource,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Option<Arc<Self>> {
        let keys = args.trusted_keys.clone();
        match &keys {
            None if !accepted_image::takes_only_signed(&state) => return None,
            None => {}
            // Also before the first update, so that it outlasts the flags.
            Some(_) => {
                if let Err(error) = accepted_image::store_only_signed(&state) {
                    let error = error_chain(&error);
                    tracing::error!("cannot record that only signed images are accepted: {error}");
                }
            }
        }
        let trust = Self {
            keys,
            needed: args.signatures_needed,
            allow_older: args.allow_older_images,
            state,
            offered: Mutex::default(),
            contents: Mutex::default(),
            identity,
            turn: Arc::default(),
            reader: Arc::new(TreeReader::new(1)),
            security,
            tasks,
            stop,
        };
        match trust.trust_state() {
            Ok(TrustState { keys, last, .. }) => {
                let (needed, trusted) = (trust.needed, keys.len());
                let last = last.map(|last| last.to_string());
                tracing::info!(needed, trusted, last, "only signed images are accepted");
            }
            // A subd that runs and reports this can be repaired over the network; one that has
            // ended cannot.
            Err(refusal) => tracing::error!("no update is accepted: {}", error_chain(&refusal)),
        }
        Some(Arc::new(trust))
    }

    /// Describes the trusted keys for the page.
    pub fn text(&self) -> String {
        match self.trust_state() {
            Err(refusal) => format!("none is accepted: {}", error_chain(&refusal)),
            Ok(TrustState { keys, last, .. }) => {
                let (needed, trusted) = (self.needed, keys.len());
                let last = last.map_or_else(|| "none yet".to_owned(), |last| last.to_string());
                format!("signed by {needed} of {trusted} keys; accepted last: {last}")
            }
        }
    }

    fn trust_state(&self) -> Result<TrustState, Refusal> {
        let path = self.keys.as_deref().ok_or(Refusal::KeysGone)?;
        let text = read_keys(path).map_err(|why| Refusal::Local { why })?;
        let keys = TrustedKeys::read(&text, self.needed).map_err(|error| Refusal::Local {
            why: format!("the trusted keys in {} cannot be used: {error}", path.display()),
        })?;
        let last = accepted_image::load(&self.state);
        let last = last.map_err(|error| Refusal::Local { why: error_chain(&error) })?;
        let now = u64::try_from(wall().seconds).unwrap_or_default();
        let mut names = self.security.own_hosts().unwrap_or_else(|| vec![self.identity.hostname()]);
        names.retain(|name| contents::is_own_name(name));
        Ok(TrustState { keys, last, now, names })
    }

    fn policy<'a>(&self, trust_state: &'a TrustState) -> SigningPolicy<'a> {
        SigningPolicy {
            keys: &trust_state.keys,
            needed: self.needed,
            now: trust_state.now,
            allow_older: self.allow_older,
            last: trust_state.last.as_ref(),
            names: &trust_state.names,
        }
    }

    /// Accepts an offer: verifies the signatures, and fetches the directories of the tree that
    /// `scanned` does not have.
    ///
    /// # Errors
    ///
    /// `Untrusted` if too few keys have signed it, or an image was accepted that is newer; `Busy`
    /// while the directories come; `Unavailable` if no source gives them.
    pub async fn offer(
        self: &Arc<Self>,
        request: OfferImageRequest,
        scanned: Option<Tree>,
    ) -> Result<(), Fault> {
        let OfferImageRequest { content, signatures, sources } = request;
        if !IMAGE_SIGNATURES.allow(&signatures) || sources.len() > SOURCES_MAX {
            let text = "the offer has too many signatures or sources";
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        let trust = Arc::clone(self);
        let (content, signatures) = crate::blocking(move || {
            let trust_state = trust.trust_state().map_err(|refusal| fault_of(&refusal))?;
            verification::verify_offer(&content, &signatures, &trust.policy(&trust_state))
                .map_err(|refusal| fault_of(&refusal))?;
            Ok((content, signatures))
        })
        .await?;
        let busy = || {
            Fault::new(
                FaultCode::Busy,
                "the directories of the signed tree are still being fetched",
            )
        };
        let turn = tokio::time::timeout(OFFER_WAIT, Arc::clone(&self.turn).lock_owned());
        let turn = turn.await.map_err(|_| busy())?;
        if locked(&self.offered).sign(&content, &signatures) {
            return Ok(());
        }
        // In a task of its own, so that it finishes even if the caller disconnects.
        let trust = Arc::clone(self);
        let getting = self.tasks.spawn(async move {
            let stop = trust.stop.clone();
            let getting = trust.get(content, signatures, &sources, scanned);
            let result = stop.run_until_cancelled(getting).await;
            drop(turn);
            result.unwrap_or_else(|| Err(Fault::new(FaultCode::Unavailable, "subd is stopping")))
        });
        match tokio::time::timeout(OFFER_WAIT, getting).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => Err(Fault::new(FaultCode::Internal, error.to_string())),
            Err(_) => Err(busy()),
        }
    }

    /// Takes the signatures of the content of computed files. They are verified with the next
    /// update.
    ///
    /// # Errors
    ///
    /// `TooLarge`.
    pub fn offer_contents(&self, signatures: Vec<Signature>) -> Result<(), Fault> {
        if !CONTENTS_SIGNATURES.allow(&signatures) {
            let text = "there are too many signatures of contents, or they are too long";
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        *locked(&self.contents) = signatures.into();
        Ok(())
    }

    /// Forgets when the content of a computed file was signed. Returns what is forgotten. Blocks.
    ///
    /// # Errors
    ///
    /// `Internal` if that cannot be read or written.
    pub fn forget_issued(&self, path: &TreePath) -> Result<Option<u64>, Fault> {
        let forgotten = accepted_image::forget_issued(&self.state, path);
        forgotten.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))
    }

    async fn get(
        &self,
        content: Content,
        signatures: Vec<Signature>,
        sources: &[String],
        scanned: Option<Tree>,
    ) -> Result<(), Fault> {
        if let Some(scanned) = &scanned {
            self.reader.store.share(scanned);
        }
        let mut troubles = Vec::new();
        for source in sources {
            let got = match Peer::parse(source, SOURCE_PORT) {
                Ok(peer) => {
                    let client = Client::new(peer, &self.security);
                    let tree = self.reader.from_image_server(&client, content.root).await;
                    tree.map_err(|error| error.text())
                }
                Err(error) => Err(error_chain(&error)),
            };
            match got {
                Ok(tree) => {
                    let image = verified(content, tree).await?;
                    locked(&self.offered).insert(image.with_signatures(signatures));
                    return Ok(());
                }
                Err(why) => troubles.push(format!("{source}: {why}")),
            }
        }
        if troubles.is_empty() {
            troubles.push("no source was named".to_owned());
        }
        let text = format!("the signed tree of {} cannot be fetched: ", content.name);
        Err(Fault::new(FaultCode::Unavailable, text + &troubles.join("; ")))
    }

    /// Verifies that a plan leads from `scan` to the signed tree, except for what is `refused`.
    /// Blocks.
    pub fn verify(
        &self,
        request: &PrepareRequest,
        scan: &Snapshot,
        refused: &RefusedChanges,
        exclusions: &Patterns,
    ) -> Result<VerifiedUpdate, Fault> {
        let verified = self.verified_update(request, scan, refused, exclusions);
        verified.map_err(|refusal| {
            let (update_id, image) = (request.update_id, &request.image);
            tracing::warn!(update_id, %image, "refused an update: {}", error_chain(&refusal));
            fault_of(&refusal)
        })
    }

    fn verified_update(
        &self,
        request: &PrepareRequest,
        scan: &Snapshot,
        refused: &RefusedChanges,
        exclusions: &Patterns,
    ) -> Result<VerifiedUpdate, Refusal> {
        let trust_state = self.trust_state()?;
        let parts = locked(&self.offered).parts(&request.image);
        let parts = parts.map_err(|image| Refusal::Unsigned { image })?;
        let image = compose(parts).map_err(|error| Refusal::Local { why: error.to_string() })?;
        let policy = self.policy(&trust_state);
        let leaving = locked(&self.offered)
            .leaving(&image, &scan.settings, |bundle| policy.may_leave(bundle));
        let image = image.with_leaving(leaving).map_err(|source| Refusal::Tree { source })?;
        let (image, contents) = (&image, &*Arc::clone(&locked(&self.contents)));
        let case = UpdateCase { request, image, contents, scan, refused, exclusions };
        verification::verify_update(&case, &policy)
    }
}

/// Returns the image, if content and tree belong together.
async fn verified(content: Content, tree: Tree) -> Result<RequiredImage, Fault> {
    crate::blocking(move || match content.verify(&tree) {
        Ok(()) => Ok(RequiredImage::new(content, tree)),
        Err(error) => Err(Fault::new(FaultCode::Untrusted, error_chain(&error))),
    })
    .await
}

fn fault_of(refusal: &Refusal) -> Fault {
    Fault::new(FaultCode::Untrusted, error_chain(refusal))
}

fn read_keys(path: &Path) -> Result<String, String> {
    let limit = TEXT_BYTES_MAX as u64 + 1;
    let mut text = String::new();
    let read = fs_err::File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text));
    read.map(|_| text).map_err(|error| format!("the trusted keys cannot be read: {error}"))
}
