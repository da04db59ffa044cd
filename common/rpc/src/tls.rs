//! TLS: authentication of peers and encryption of connections.
//!
//! A program has one certificate with its key, the trusted authorities, and their revocation lists:
//! the files of one directory (`files`), which a daemon reads again when they change
//! (`tls_config`). Servers are always verified, by the requested name. Callers are asked for a
//! certificate; if one is shown it must be valid. Each method and page decides what callers without
//! one may do.
//!
//! # Invariants
//!
//! * There is no fallback from TLS to plain text: the mode is decided at the start.
//! * A peer is trusted as long as its certificate is valid: when it expires or is revoked, or its
//!   authority is removed, the connection is closed with all its calls (`peer_session`).
//! * Invalid files never replace valid ones. A connection that was made with other files takes no
//!   further calls: its caller connects again, with those in use.
//! * No session is resumed: each connection is verified completely.

mod credentials;
mod explain;
mod files;
mod handshake;
mod lists;
mod peer_session;
mod replacement;
mod successor;
mod tls_config;
mod trust;
mod verifier;
pub mod zones;

pub use explain::explain;
pub use files::{FILE_BYTES_MAX, FILES, FilesDigest, ReadFile, TlsError, read as read_file};
pub(crate) use handshake::EndedCertificate;
pub(crate) use peer_session::PeerSession;
pub use replacement::ReplacementError;
pub use successor::{CallerProof, SuccessorError};
pub use tls_config::{Security, WARN_BEFORE};
