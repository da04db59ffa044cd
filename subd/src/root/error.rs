//! What can go wrong in the managed tree: which operation, on what, and the kernel's answer.

use std::path::PathBuf;

use model::escape::escape;
use model::path::TreePath;
use nix::errno::Errno;

/// A failed operation on the managed tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    /// The root itself could not be opened.
    #[error("cannot open the root `{}`", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: Errno,
    },
    /// Entries cannot be reached by descriptor.
    #[error("cannot see /proc/self/fd: is /proc mounted?")]
    NoProc {
        /// What the kernel said.
        source: Errno,
    },
    /// The kernel refused an operation.
    #[error("cannot {operation} {path}")]
    Call {
        /// What was tried, such as `rename`.
        operation: &'static str,
        /// To what.
        path: TreePath,
        /// What the kernel said.
        source: Errno,
    },
    /// A name is none: empty, `.`, `..`, too long, or with a slash in it.
    #[error("cannot {operation} `{name}` in {directory}: {why}")]
    BadName {
        /// What was tried.
        operation: &'static str,
        /// Where.
        directory: TreePath,
        /// The name, escaped.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Something else than a regular file is where one was to be read.
    #[error("{path} is no regular file")]
    NotRegular {
        /// The path.
        path: TreePath,
    },
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
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open { source, .. } | Self::NoProc { source } | Self::Call { source, .. } => {
                Some(*source)
            }
            Self::BadName { .. } | Self::NotRegular { .. } => None,
        }
    }

    /// True if the entry does not exist.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.errno() == Some(Errno::ENOENT)
    }
}
