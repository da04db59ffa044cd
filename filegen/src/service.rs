//! Makes files for machines, and keeps their content for a while.

mod outside_work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use api::fault::{Fault, FaultCode};
use api::file_generator::{
    BATCH_BYTES, ComputedContent, FILES_MAX, GenerateReply, GenerateRequest, GeneratedContent,
    GeneratedFile, Generators, GetContentsReply, IDS_MAX, MACHINES_MAX, SignContentsReply,
    SignContentsRequest, WantedFiles,
};
use certs::pairs::{Pair, PairError, PairStore, WantedPair};
use model::display::error_chain;
use model::escape::ByteText;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::tree::Time;
use rpc::audit_log::AuditLog;
use system::clock::{since_epoch, wall};
use system::durable::DurableError;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::core::certificates::PairPart;
use super::core::contents::{Content, Contents};
use super::core::results::{Now, ResultKey, Results};
use super::generators::{GeneratorSet, LoadedGenerator, Maker, PairIssuer, Subject};
use super::loading::LoadError;
use super::revisions::{Kept, Revisions};
use super::signing::{Signer, WantedPaths};

use outside_work::{Pending, Work};

/// The generators in force, as callers see them.
#[derive(Debug)]
pub struct Published {
    /// The digest of what [`Published::told`] returns.
    pub version: ObjectId,
    pub set: Arc<GeneratorSet>,
    /// Why the newest configuration is not in force; empty if it is.
    pub error: String,
    /// The revisions.
    pub kept: Arc<Kept>,
    /// The public key that signs contents, if one does.
    pub signer: Option<Arc<str>>,
}

impl Published {
    fn new(
        set: Arc<GeneratorSet>,
        error: String,
        kept: Arc<Kept>,
        signer: Option<Arc<str>>,
    ) -> Self {
        let version = Algorithm::Blake3.digest(b"");
        let mut published = Self { version, set, error, kept, signer };
        published.version = digest(&published.told());
        published
    }

    /// Returns what callers are told.
    #[must_use]
    pub fn told(&self) -> Generators {
        Generators {
            generators: self.set.described(&self.kept),
            error: self.error.clone(),
            renewals: self.set.renewals,
            numbering: self.kept.numbering,
            revision: self.kept.revision,
            orders: self.kept.orders.values().cloned().collect(),
            signer: self.signer.as_deref().map(str::to_owned),
        }
    }
}

fn digest(told: &Generators) -> ObjectId {
    let told = serde_json::to_vec(told).expect("texts can be encoded");
    Algorithm::Blake3.digest(&told)
}

/// What was made of one path.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    pub made: u64,
    pub failures: u64,
    /// The last failure, its machine, and when it was.
    pub last_failure: Option<(Time, String)>,
}

/// The certificates with their keys that a request needs, or errors: by path, and by the index of
/// the machine in the request.
type Pairs = BTreeMap<TreePath, BTreeMap<usize, Result<Arc<Pair>, String>>>;

/// What is kept over restarts.
#[derive(Debug)]
pub struct Stores {
    pub pairs: PairStore,
    pub revisions: Revisions,
    /// `None` if contents are not signed.
    pub signer: Option<Signer>,
}

/// The state of filegen-server.
#[derive(Debug)]
pub struct Service {
    published: watch::Sender<Arc<Published>>,
    /// Locked while other generators are put in force, so that readers wait for no disk.
    publishing: Mutex<()>,
    contents: Mutex<Contents>,
    results: Mutex<Results<Work>>,
    statistics: Mutex<BTreeMap<TreePath, Statistics>>,
    pairs: PairStore,
    revisions: Revisions,
    signer: Option<Arc<Signer>>,
    /// Limits rendering to the processors.
    renderers: Arc<Semaphore>,
    audit: AuditLog,
    start: Instant,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Service {
    /// Returns a service with the generators `set`, which keeps `bytes_max` bytes of content.
    ///
    /// # Errors
    ///
    /// If the number of the revision cannot be kept.
    pub fn new(
        set: GeneratorSet,
        bytes_max: usize,
        Stores { pairs, revisions, signer }: Stores,
        audit: AuditLog,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Result<Arc<Self>, DurableError> {
        let set = Arc::new(set.renewed(pairs.renewals()));
        revisions.number(&set.versions())?;
        let line = signer.as_ref().map(|signer| signer.public_line().into());
        let published = Published::new(set, String::new(), revisions.kept(), line);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Arc::new(Self {
            published: watch::Sender::new(Arc::new(published)),
            publishing: Mutex::default(),
            contents: Mutex::new(Contents::new(bytes_max)),
            results: Mutex::default(),
            statistics: Mutex::default(),
            pairs,
            revisions,
            signer: signer.map(Arc::new),
            renderers: Arc::new(Semaphore::new(processors)),
            audit,
            start: Instant::now(),
            tasks,
            stop,
        }))
    }

    /// Watches the generators in force.
    #[must_use]
    pub fn published(&self) -> watch::Receiver<Arc<Published>> {
        self.published.subscribe()
    }

    /// Returns what was made of each path.
    #[must_use]
    pub fn statistics(&self) -> BTreeMap<TreePath, Statistics> {
        locked(&self.statistics).clone()
    }

    /// Returns the size of the content that is kept, in bytes.
    #[must_use]
    pub fn content_bytes(&self) -> usize {
        locked(&self.contents).bytes()
    }

    /// Returns when the next content of each generator ends, in seconds since 1970.
    #[must_use]
    pub fn next_ends(&self) -> BTreeMap<ObjectId, u64> {
        let now = self.now();
        let mut ends = locked(&self.results).next_ends(now);
        for generator in self.published.borrow().set.by_path.values() {
            if let Maker::Pair(issuer, _) = &generator.maker {
                let path = issuer.settings.path.to_string();
                let renewal = self.pairs.next_renewal(&path, now.wall_seconds);
                ends.extend(renewal.map(|at| (generator.version, at)));
            }
        }
        ends
    }

    fn now(&self) -> Now {
        Now { wall_seconds: since_epoch().as_secs(), elapsed: self.start.elapsed() }
    }

    /// Puts a set in force; one with an error leaves the former one in force. Blocks.
    pub fn take(&self, set: Result<GeneratorSet, LoadError>) {
        let (before, new) = self.publish(|before| match set {
            Ok(set) => (set, String::new()),
            Err(error) => (GeneratorSet::clone(&before.set), error_chain(&error)),
        });
        if !new.error.is_empty() {
            tracing::error!("the former generators stay in force: {}", new.error);
        } else if new.version != before.version {
            let count = new.set.by_path.len();
            let revision = new.kept.revision;
            tracing::info!(generators = count, revision, "generators are in force");
            let arguments = format!("generators={count} revision={revision}");
            let why = "the configuration or a file that it names changed";
            self.audit.record_decision("load-generators", &arguments, why);
            let used: BTreeSet<ObjectId> =
                new.set.by_path.values().map(|generator| generator.version).collect();
            locked(&self.results).retain(|version| used.contains(version));
        }
    }

    /// Puts in force what `change` makes of the former generators, or keeps these because of an
    /// error. Returns what was in force before, and what is now.
    fn publish(
        &self,
        change: impl FnOnce(&Published) -> (GeneratorSet, String),
    ) -> (Arc<Published>, Arc<Published>) {
        let _publishing = locked(&self.publishing);
        let before = Arc::clone(&self.published.borrow());
        let (set, error) = change(&before);
        let set = set.renewed(self.pairs.renewals());
        let (set, error) = match self.revisions.number(&set.versions()) {
            Ok(()) => (Arc::new(set), error),
            Err(error) => {
                let why = "the number of the content revision cannot be kept";
                (Arc::clone(&before.set), format!("{why}: {}", error_chain(&error)))
            }
        };
        let signer = before.signer.clone();
        let new = Arc::new(Published::new(set, error, self.revisions.kept(), signer));
        self.published.send_replace(Arc::clone(&new));
        (before, new)
    }

    /// Has the certificates of these machines made anew, or of all. Returns the machines that have
    /// any. Blocks.
    ///
    /// # Errors
    ///
    /// If that cannot be kept.
    pub fn renew(&self, hostnames: Option<&[String]>) -> Result<BTreeSet<String>, PairError> {
        let renewed = self.pairs.renew(hostnames, self.now().wall_seconds)?;
        self.publish(|before| (GeneratorSet::clone(&before.set), before.error.clone()));
        Ok(renewed)
    }

    /// Stops a content revision, for this reason, or resumes it. Returns the number of the order.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// If there was no such revision, or that cannot be kept.
    pub fn order_revision(&self, revision: u64, stopped: Option<&str>) -> Result<u64, Fault> {
        let newest = self.revisions.kept().revision;
        if revision == 0 || revision > newest {
            let text = format!("there is no content revision {revision}: the newest is {newest}");
            return Err(Fault::new(FaultCode::NotFound, text));
        }
        let number = self.revisions.order(revision, stopped);
        let number =
            number.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
        self.publish(|before| (GeneratorSet::clone(&before.set), before.error.clone()));
        Ok(number)
    }

    /// Makes files.
    ///
    /// # Errors
    ///
    /// A fault if the request is too large.
    pub async fn generate(
        self: Arc<Self>,
        request: GenerateRequest,
    ) -> Result<GenerateReply, Fault> {
        let files: usize = request.machines.iter().map(|wanted| wanted.paths.len()).sum();
        if request.machines.len() > MACHINES_MAX || files > FILES_MAX {
            let text = format!(
                "a request is for at most {MACHINES_MAX} machines and {FILES_MAX} files; this one \
                 is for {} and {files}",
                request.machines.len()
            );
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        let internal = |error: &str| Fault::new(FaultCode::Internal, error);
        let permit = Arc::clone(&self.renderers).acquire_owned().await;
        let permit = permit.map_err(|error| internal(&error.to_string()))?;
        let wanted = |wanted: &WantedFiles| (wanted.machine.hostname.clone(), wanted.paths.clone());
        let signer = self.signer.clone().filter(|_| request.is_for_use);
        let wanted: WantedPaths = match &signer {
            Some(_) => request.machines.iter().map(wanted).collect(),
            None => Vec::new(),
        };
        let service = Arc::clone(&self);
        let made = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            service.make(request)
        });
        let (mut machines, pending) = made.await.map_err(|error| internal(&error.to_string()))?;
        self.wait_outside(&mut machines, pending).await;
        let Some(signer) = signer else { return Ok(GenerateReply { machines }) };
        let remembered = tokio::task::spawn_blocking(move || {
            if let Err(error) = signer.remember(&wanted, &machines) {
                tracing::error!("new content is not signed: {}", error_chain(&error));
            }
            machines
        });
        let machines = remembered.await.map_err(|error| internal(&error.to_string()))?;
        Ok(GenerateReply { machines })
    }

    /// Signs contents.
    ///
    /// # Errors
    ///
    /// `NotFound` for content that was not made for the machine, `BadRequest` without a key.
    pub async fn sign(
        self: Arc<Self>,
        request: SignContentsRequest,
    ) -> Result<SignContentsReply, Fault> {
        let Some(signer) = self.signer.clone() else {
            let text = "this filegen-server signs nothing: start it with --signing-key";
            return Err(Fault::new(FaultCode::BadRequest, text));
        };
        let now = self.now().wall_seconds;
        let signed = tokio::task::spawn_blocking(move || signer.sign(request, now)).await;
        let signed =
            signed.map_err(|error| Fault::new(FaultCode::Internal, error_chain(&error)))?;
        Ok(SignContentsReply { signatures: signed? })
    }

    /// Makes the files that need nothing from outside. Returns the others too.
    fn make(&self, request: GenerateRequest) -> (Vec<Vec<GeneratedFile>>, Vec<Pending>) {
        let set = Arc::clone(&self.published.borrow().set);
        let pairs = self.pairs_of(&set, &request);
        let (mut machines, mut pending) = (Vec::new(), Vec::new());
        let mut made: BTreeMap<&TreePath, (u64, u64, String)> = BTreeMap::new();
        for (index, WantedFiles { machine, algorithm, paths, key: _, outputs }) in
            request.machines.into_iter().enumerate()
        {
            let subject = Subject::new(machine, outputs);
            let hostname: Arc<str> = subject.machine.hostname.as_str().into();
            let mut files = Vec::with_capacity(paths.len());
            for path in &paths {
                let Some((path, generator)) = set.by_path.get_key_value(path) else {
                    files.push(GeneratedFile::Failed(format!("no generator makes {path}")));
                    continue;
                };
                let (content, until) = if let Maker::Pair(issuer, part) = &generator.maker {
                    match pairs.get(&issuer.settings.path).and_then(|made| made.get(&index)) {
                        Some(Ok(pair)) => (Ok(content_of(pair, *part)), pair.renew_at_seconds),
                        Some(Err(why)) => (Err(why.clone()), 0),
                        None => (Err("it was not made".to_owned()), 0),
                    }
                } else if let Some(content) = generator.make(&subject) {
                    (content, 0)
                } else {
                    let record = Arc::clone(subject.json());
                    let key = ResultKey {
                        generator: generator.version,
                        record: Algorithm::Blake3.digest(&record),
                        algorithm,
                    };
                    let (at, generator) = ((index, files.len()), Arc::clone(generator));
                    let hostname = Arc::clone(&hostname);
                    pending.push(Pending { at, key, generator, hostname, record });
                    files.push(GeneratedFile::Failed("it is still being made".to_owned()));
                    continue;
                };
                let (good, bad, error) = made.entry(path).or_default();
                files.push(match content {
                    Ok(content) => {
                        *good += 1;
                        let kept = self.keep(generator, &content, algorithm, &hostname, until);
                        GeneratedFile::Made(kept)
                    }
                    Err(why) => {
                        *bad += 1;
                        *error = format!("{hostname}: {why}");
                        GeneratedFile::Failed(why)
                    }
                });
            }
            machines.push(files);
        }
        for (path, (good, bad, error)) in made {
            self.count(path, good, bad, error);
        }
        (machines, pending)
    }

    /// Returns the certificates, with keys, that a request asks for: by their path, for machines by
    /// their index in the request.
    fn pairs_of(&self, set: &GeneratorSet, request: &GenerateRequest) -> Pairs {
        let mut wanted: BTreeMap<&TreePath, (&PairIssuer, Vec<usize>)> = BTreeMap::new();
        let is_pair = |generator: &Arc<LoadedGenerator>| matches!(generator.maker, Maker::Pair(..));
        if !set.by_path.values().any(is_pair) {
            return Pairs::new();
        }
        for (index, machine) in request.machines.iter().enumerate() {
            for generator in machine.paths.iter().filter_map(|path| set.by_path.get(path)) {
                let Maker::Pair(issuer, _) = &generator.maker else { continue };
                let (_, indices) =
                    wanted.entry(&issuer.settings.path).or_insert_with(|| (issuer, Vec::new()));
                if indices.last() != Some(&index) {
                    indices.push(index);
                }
            }
        }
        let now = self.now().wall_seconds;
        let made = |(path, (issuer, indices)): (&TreePath, (&PairIssuer, Vec<usize>))| {
            let authority = &issuer.register.authority().certificate().fingerprint;
            let (mut made, mut asked) = (BTreeMap::new(), Vec::new());
            let mut wanted: Vec<WantedPair> = Vec::new();
            for index in indices {
                let WantedFiles { machine, key, .. } = &request.machines[index];
                let key = key.as_ref().map(|key| &*key.0);
                match issuer.settings.wanted(machine, key, authority) {
                    Ok(pair) => {
                        asked.push(index);
                        wanted.push(pair);
                    }
                    Err(why) => drop(made.insert(index, Err(why))),
                }
            }
            let pairs = self.pairs.get_or_make(&issuer.register, &wanted, now);
            made.extend(asked.into_iter().zip(pairs));
            (path.clone(), made)
        };
        wanted.into_iter().map(made).collect()
    }

    /// Counts files that were made, and failures, of which `error` is the last.
    fn count(&self, path: &TreePath, made: u64, failures: u64, error: String) {
        if failures > 0 {
            tracing::warn!(%path, failures, "a file is not made: {error}");
        }
        let mut statistics = locked(&self.statistics);
        let counted = statistics.entry(path.clone()).or_default();
        counted.made += made;
        counted.failures += failures;
        if failures > 0 {
            counted.last_failure = Some((wall(), error));
        }
    }

    /// Keeps the content of a file that is valid until `valid_until_seconds`.
    fn keep(
        &self,
        generator: &LoadedGenerator,
        content: &Arc<Content>,
        algorithm: Algorithm,
        hostname: &str,
        valid_until_seconds: u64,
    ) -> GeneratedContent {
        let id = content.id(algorithm);
        let size_bytes = u32::try_from(content.bytes.len()).unwrap_or(u32::MAX);
        let is_secret = generator.definition.is_secret;
        if is_secret {
            locked(&self.contents).keep_secret(id, content, hostname);
        } else {
            locked(&self.contents).keep(id, content);
        }
        let generator = generator.version;
        GeneratedContent { id, size_bytes, valid_until_seconds, generator, is_secret }
    }

    /// Returns content by digest, up to a limit; `get` looks one up.
    fn collect(
        ids: &[ObjectId],
        mut get: impl FnMut(ObjectId) -> Option<Arc<Content>>,
    ) -> Result<GetContentsReply, Fault> {
        if ids.len() > IDS_MAX {
            let text = format!("at most {IDS_MAX} digests can be asked for, not {}", ids.len());
            return Err(Fault::new(FaultCode::TooLarge, text));
        }
        let (mut reply, mut bytes) = (GetContentsReply::default(), 0);
        for &id in ids {
            let Some(content) = get(id) else {
                reply.absent.push(id);
                continue;
            };
            bytes += content.bytes.len();
            if bytes > BATCH_BYTES && !reply.contents.is_empty() {
                break;
            }
            let bytes = ByteText(content.bytes.to_vec());
            reply.contents.push(ComputedContent { id, bytes });
        }
        Ok(reply)
    }

    /// Returns content that is not secret.
    ///
    /// # Errors
    ///
    /// A fault if too much is asked for.
    pub fn contents(&self, ids: &[ObjectId]) -> Result<GetContentsReply, Fault> {
        Self::collect(ids, |id| locked(&self.contents).get(id))
    }

    /// Returns secrets that were made for one of `hostnames`.
    ///
    /// # Errors
    ///
    /// A fault if too much is asked for.
    pub fn secrets(
        &self,
        ids: &[ObjectId],
        hostnames: &[String],
    ) -> Result<GetContentsReply, Fault> {
        Self::collect(ids, |id| {
            let hostnames = hostnames.iter().map(String::as_str);
            locked(&self.contents).get_secret(id, hostnames)
        })
    }
}

/// Returns the content of the file that is this part of a pair.
fn content_of(pair: &Pair, part: PairPart) -> Arc<Content> {
    let text = match part {
        PairPart::Certificate => &pair.certificate_pem,
        PairPart::Key => &pair.key_pem,
    };
    Content::new(text.as_bytes())
}
