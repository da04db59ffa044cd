//! Takes only images that are signed, where the machine's own configuration has trusted keys.
//!
//! | module | what |
//! |---|---|
//! | [`verification`] | decides whether a plan leads to the signed tree, and to nothing else (core) |
//! | [`record`] | which image was accepted last, over restarts |
//!
//! Whoever orders updates offers the signed part of the image, its signatures and the address of an
//! object server before it sends a plan. Nothing of that is trusted: signatures are verified first,
//! and from then on each digest follows from the one before, from the signed part to its tree.
//!
//! # Invariants
//!
//! * Nothing over the network changes which keys are trusted, how many must sign, or what was
//!   accepted last. The keys are read anew for each judgement, so that an image can bring others.
//! * If keys, record or clock cannot be read, nothing is accepted. Nor is anything where keys were
//!   trusted once, and no flag names them any more.
//! * No directory is asked for before signatures have vouched for the root of the tree.
//! * What is judged is the scan that the plan is staged upon.

pub mod verification;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{OfferImageRequest, PrepareRequest, SOURCES_MAX};
use model::filter::Patterns;
use model::image::Content;
use model::image::required::RequiredImage;
use model::report::report;
use model::signing::keys::TEXT_BYTES_MAX;
use model::signing::signature::are_bounded;
use model::signing::{Signature, TrustedKeys};
use model::tree::Tree;
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use rpc::trees::Reader;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::verification::{Refusal, SigningPolicy, UpdateCase, VerifiedUpdate};
use crate::state::accepted_image::AcceptedImage;
use crate::state::persisted_state::StateDirectory;
use crate::state::snapshot::Snapshot;
use system::clock::wall;

/// How long an offer waits for the directories of the tree before it answers that they come.
const OFFER_WAIT: Duration = Duration::from_secs(20);

/// The port of object servers.
const SOURCE_PORT: u16 = daemon::IMAGESERVER_PORT;

/// The flags that say whose images are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Signed images (nothing over the network changes these)")]
pub struct TrustArgs {
    /// Take only images that are signed by these keys: a file with an ed25519 public key of
    /// OpenSSH on each line. `images="web/,base/debian-12"` before a key lets it sign only these.
    #[arg(long, value_name = "FILE")]
    pub trusted_keys: Option<PathBuf>,

    /// How many different keys must have signed an image.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "trusted_keys")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16))]
    pub signatures_needed: u32,

    /// Take signed images that are older than the one that was taken last, too.
    #[arg(long, requires = "trusted_keys")]
    pub allow_older_images: bool,
}

/// An image that was offered, signed by enough keys when it was, and whole.
#[derive(Debug)]
struct OfferedImage {
    image: RequiredImage,
    signatures: Vec<Signature>,
}

/// Whose images are taken, and which was offered last.
#[derive(Debug)]
pub struct Trust {
    /// `None` where they were trusted once and are not named any more.
    keys: Option<PathBuf>,
    needed: u32,
    allow_older: bool,
    state: Arc<StateDirectory>,
    offered: Mutex<Option<Arc<OfferedImage>>>,
    /// Held while directories are fetched.
    turn: Arc<tokio::sync::Mutex<()>>,
    reader: Arc<Reader>,
    security: Security,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// What the local configuration and the record say now.
struct TrustState {
    keys: TrustedKeys,
    last: Option<AcceptedImage>,
    now: u64,
}

impl Trust {
    /// What `args` ask for; `None` if every image is taken. A machine that was told once to take
    /// only signed images takes none when it is not told whose: the configuration file that says so
    /// may be gone, and it must not be enough to make it go.
    #[must_use]
    pub fn of(
        args: &TrustArgs,
        state: Arc<StateDirectory>,
        security: Security,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Option<Arc<Self>> {
        let keys = args.trusted_keys.clone();
        match &keys {
            None if !state.takes_only_signed() => return None,
            None => {}
            // Before the first update, too; and whatever becomes of the flags.
            Some(_) => {
                if let Err(error) = state.store_only_signed() {
                    let error = report(&error);
                    tracing::error!("cannot note that only signed images are taken: {error}");
                }
            }
        }
        let trust = Self {
            keys,
            needed: args.signatures_needed,
            allow_older: args.allow_older_images,
            state,
            offered: Mutex::default(),
            turn: Arc::default(),
            reader: Arc::new(Reader::new(1)),
            security,
            tasks,
            stop,
        };
        match trust.trust_state() {
            Ok(TrustState { keys, last, .. }) => {
                let (needed, trusted) = (trust.needed, keys.len());
                let last = last.map(|last| last.to_string());
                tracing::info!(needed, trusted, last, "takes only images that are signed");
            }
            // A machine that scans and says so can be mended; one whose subd ends can not.
            Err(refusal) => tracing::error!("no update is accepted: {}", report(&refusal)),
        }
        Some(Arc::new(trust))
    }

    /// In words, for the page.
    #[must_use]
    pub fn in_words(&self) -> String {
        match self.trust_state() {
            Err(refusal) => format!("none is accepted: {}", report(&refusal)),
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
        let last = self.state.load_accepted();
        let last = last.map_err(|error| Refusal::Local { why: report(&error) })?;
        let now = u64::try_from(wall().seconds).unwrap_or_default();
        Ok(TrustState { keys, last, now })
    }

    fn policy<'a>(&self, trust_state: &'a TrustState) -> SigningPolicy<'a> {
        SigningPolicy {
            keys: &trust_state.keys,
            needed: self.needed,
            now: trust_state.now,
            allow_older: self.allow_older,
            last: trust_state.last.as_ref(),
        }
    }

    /// Takes what is offered: verifies the signatures, and gets the directories of the tree that
    /// are not those of `scanned`.
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
        if !are_bounded(&signatures) || sources.len() > SOURCES_MAX {
            let text = "the offer has too many signatures or sources";
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        let trust = Arc::clone(self);
        let (content, signatures) = crate::blocking(move || {
            let trust_state = trust.trust_state().map_err(|refusal| fault_of(&refusal))?;
            verification::verify_signatures(&content, &signatures, &trust.policy(&trust_state))
                .map_err(|refusal| fault_of(&refusal))?;
            Ok((content, signatures))
        })
        .await?;
        let busy = || Fault::new(FaultCode::Busy, "still gets the directories of the signed tree");
        let turn = tokio::time::timeout(OFFER_WAIT, Arc::clone(&self.turn).lock_owned());
        let turn = turn.await.map_err(|_| busy())?;
        if self.take_signatures(&content, &signatures) {
            return Ok(());
        }
        // It is finished even if the caller goes away, so that the next one finds it.
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

    /// Takes other signatures of the image that was offered last; false if that is another one.
    fn take_signatures(&self, content: &Content, signatures: &[Signature]) -> bool {
        let mut slot = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(offered) = slot.as_ref().filter(|offered| offered.image.content == *content)
        else {
            return false;
        };
        let (image, signatures) = (offered.image.clone(), signatures.to_vec());
        *slot = Some(Arc::new(OfferedImage { image, signatures }));
        true
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
                Err(error) => Err(report(&error)),
            };
            match got {
                Ok(tree) => {
                    let image = verified(content, tree).await?;
                    let offered = Arc::new(OfferedImage { image, signatures });
                    let mut slot = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
                    *slot = Some(offered);
                    return Ok(());
                }
                Err(why) => troubles.push(format!("{source}: {why}")),
            }
        }
        if troubles.is_empty() {
            troubles.push("no source was named".to_owned());
        }
        let text = format!("the signed tree of {} is not to be had: ", content.name);
        Err(Fault::new(FaultCode::Unavailable, text + &troubles.join("; ")))
    }

    /// Judges a plan upon the scan that it is staged upon. Blocks.
    ///
    /// # Errors
    ///
    /// `Untrusted`, with the reason.
    pub fn verify(
        &self,
        request: &PrepareRequest,
        scan: &Snapshot,
        exclusions: &Patterns,
    ) -> Result<VerifiedUpdate, Fault> {
        let verified = self.verified_update(request, scan, exclusions);
        verified.map_err(|refusal| {
            let (update_id, image) = (request.update_id, &request.image);
            tracing::warn!(update_id, %image, "refused an update: {}", report(&refusal));
            fault_of(&refusal)
        })
    }

    fn verified_update(
        &self,
        request: &PrepareRequest,
        scan: &Snapshot,
        exclusions: &Patterns,
    ) -> Result<VerifiedUpdate, Refusal> {
        let trust_state = self.trust_state()?;
        let offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let offered = offered
            .filter(|offered| offered.image.digest == request.image_digest)
            .ok_or_else(|| Refusal::Unsigned { image: request.image.clone() })?;
        let OfferedImage { image, signatures } = &*offered;
        let case = UpdateCase { request, image, signatures, scan, exclusions };
        verification::verify_update(&case, &self.policy(&trust_state))
    }
}

/// The image, if content and tree belong together and any machine could have it.
async fn verified(content: Content, tree: Tree) -> Result<RequiredImage, Fault> {
    crate::blocking(move || match content.verify(&tree) {
        Ok(()) => Ok(RequiredImage::new(content, tree)),
        Err(error) => Err(Fault::new(FaultCode::Untrusted, report(&error))),
    })
    .await
}

fn fault_of(refusal: &Refusal) -> Fault {
    Fault::new(FaultCode::Untrusted, report(refusal))
}

fn read_keys(path: &Path) -> Result<String, String> {
    let limit = TEXT_BYTES_MAX as u64 + 1;
    let mut text = String::new();
    let read = fs_err::File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text));
    read.map(|_| text).map_err(|error| format!("the trusted keys cannot be read: {error}"))
}
