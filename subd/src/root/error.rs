//! What can go wrong in the managed tree: which operation, on what, and the kernel's answer.

use std::path::PathBuf;

use model::escape::escape;
use model::path::TreePath;
use nix::errno::Errno;

/// A failed operation on the managed tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    #[error("cannot open the root `{}`", path.display())]
    Open { path: PathBuf, source: Errno },
    #[error("cannot see /proc/self/fd: is /proc mounted?")]
    NoProc { source: Errno },
    #[error("cannot {operation} {path}")]
    Call {
        /// What was tried, such as `rename`.
        operation: &'static str,
        path: TreePath,
        source: Errno,
    },
    #[error("cannot {operation} `{name}` in {directory}: {why}")]
    BadName { operation: &'static str, directory: TreePath, name: String, why: &'static str },
    #[error("{path} is no regular file")]
    NotRegular { path: TreePath },
}

impl RootError {
    pub(super) fn call(operation: &'static str, path: TreePath, source: Errno) -> Self {
        Self::Call { operation, path, source }
    }

    /// The error of `operation` on `name`, which may be no name at all.
    pub(super) fn entry(
        operation: &'static str,
        directory: &TreePath,
        name: &[u8],
        source: Errno,
    ) -> Self {
        match directory.join(name) {
            Ok(path) => Self::call(operation, path, source),
            Err(_) => Self::bad_name(operation, directory, name, "it is no name"),
        }
    }

    pub(super) fn bad_name(
        operation: &'static str,
        directory: &TreePath,
        name: &[u8],
        why: &'static str,
    ) -> Self {
        Self::BadName { operation, directory: directory.clone(), name: escape(name), why }
    }

    /// What the kernel said; `None` if it was not asked.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open { source, .. } | Self::NoProc { source } | Self::Call { source, .. } => {
                Some(*source)
            }
            Self::BadName { .. } | Self::NotRegular { .. } => None,
        }
    }

    /// True if the entry does not exist.
    pub fn is_absent(&self) -> bool {
        self.errno() == Some(Errno::ENOENT)
    }
}
