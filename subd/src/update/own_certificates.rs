//! Refuses updates that would lock the dominator out: after which subd's own TLS files do not fit
//! together, or one of the two would not accept the certificate of the other. What cannot be known
//! before is tried: see [`put_back`]. After the end of the certificate another one is taken:
//! `replacement`.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use model::object::ObjectId;
use model::path::TreePath;
use model::plan::{Action, Plan};
use model::tree::{Leaf, Node};
use rpc::server::Caller;
use rpc::tls::{
    CallerProof, FILE_BYTES_MAX, FILES, FilesDigest, Security, SuccessorError, TlsError, read_file,
};
use tokio::sync::Notify;

use crate::cache::Cache;
use crate::state::persisted_state::StateDirectory;

pub mod former_files;
pub mod put_back;
mod replacement;

/// The TLS files of subd, below the managed root.
#[derive(Debug)]
pub struct OwnCertificates {
    security: Security,
    /// Their directory in the root.
    directory: TreePath,
    /// The former files, while others are tried.
    record: former_files::SavedRecord,
    /// The files with which a dominator has reached subd, of those that are tried.
    reached: Mutex<Option<FilesDigest>>,
    /// Wakes the task that watches this.
    news: Notify,
    /// How long a dominator may take to reach subd with other files.
    reached_within: Duration,
}

/// What an update makes of the files.
#[derive(Debug)]
pub struct ChangedCertificates {
    security: Security,
    /// By the name of the file.
    changes: BTreeMap<&'static str, Change>,
    /// How the caller has shown who it is, and the address that it has connected to.
    proof: Arc<CallerProof>,
    local: IpAddr,
}

/// What an update makes of one file.
#[derive(Debug)]
enum Change {
    /// It is gone, or something else than a regular file.
    Gone,
    /// The content and the mode; `None` for the present content.
    Becomes(Option<ObjectId>, u32),
}

impl OwnCertificates {
    /// Returns the TLS files of `security`; `None` without TLS, or if they are outside of `root`.
    /// What is known of former ones is in `state`. A dominator must reach subd with others within
    /// `reached_within`.
    #[must_use]
    pub fn below(
        root: &Path,
        security: &Security,
        state: &StateDirectory,
        reached_within: Duration,
    ) -> Option<Self> {
        let directory = security.directory()?.canonicalize().ok()?;
        let below = directory.strip_prefix(root.canonicalize().ok()?).ok()?;
        let directory = TreePath::new(format!("/{}", below.to_str()?)).ok()?;
        Some(Self {
            security: security.clone(),
            directory,
            record: former_files::load(state),
            reached: Mutex::default(),
            news: Notify::new(),
            reached_within,
        })
    }

    /// Returns what an update that `caller` orders makes of the files; `None` if it changes none of
    /// them.
    #[must_use]
    pub fn changed_by(&self, plan: &Plan, caller: &Caller) -> Option<ChangedCertificates> {
        Some(ChangedCertificates {
            security: self.security.clone(),
            changes: self.changes(plan)?,
            proof: Arc::clone(caller.proof.as_ref()?),
            local: caller.local.ip(),
        })
    }

    /// Returns what a plan makes of the files, by their names; `None` if it changes none of them.
    fn changes(&self, plan: &Plan) -> Option<BTreeMap<&'static str, Change>> {
        let mut changes = BTreeMap::new();
        for (name, _) in FILES {
            let path = self.directory.join(name.as_bytes()).ok()?;
            for operation in &plan.operations {
                let node = match &operation.action {
                    Action::Create(node) | Action::Change(node) | Action::Replace { node, .. }
                        if operation.path == path =>
                    {
                        node
                    }
                    Action::Remove if operation.path == path => {
                        changes.insert(name, Change::Gone);
                        continue;
                    }
                    Action::Replace { displaced, .. } if displaced.contains(&path) => {
                        changes.insert(name, Change::Gone);
                        continue;
                    }
                    _ => continue,
                };
                let Node::Leaf(Leaf::File(file)) = node else {
                    changes.insert(name, Change::Gone);
                    continue;
                };
                let stays = matches!(operation.action, Action::Change(_));
                let object = (!stays).then(|| file.object.id());
                changes.insert(name, Change::Becomes(object, file.metadata.mode));
            }
        }
        (!changes.is_empty()).then_some(changes)
    }
}

impl ChangedCertificates {
    /// Checks the files that there would be, and returns their digest. Their content is in `cache`.
    /// Blocks.
    ///
    /// # Errors
    ///
    /// [`SuccessorError`] if the caller would be locked out.
    pub fn check(&self, cache: &Cache) -> Result<Option<FilesDigest>, SuccessorError> {
        let read = |path: &Path| {
            let failed = |source| TlsError::Read { path: path.to_owned(), source };
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            match self.changes.get(name) {
                None => read_file(path),
                Some(Change::Gone) => {
                    let text = "it would not be a regular file any more";
                    Err(failed(io::Error::new(ErrorKind::NotFound, text)))
                }
                Some(Change::Becomes(None, mode)) => {
                    read_file(path).map(|(bytes, _)| (bytes, *mode))
                }
                Some(Change::Becomes(Some(id), mode)) => {
                    let read = cache.read(id, FILE_BYTES_MAX);
                    Ok((read.map_err(|error| failed(io::Error::other(error)))?, *mode))
                }
            }
        };
        self.security.check_successor(&read, &self.proof, self.local)
    }
}
