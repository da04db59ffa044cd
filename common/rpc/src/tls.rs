//! TLS: who is at the other end of a connection, and nobody in between.
//!
//! A program holds one certificate with its key, the authorities that it trusts, and the lists of
//! what they have revoked: the files of one directory (`files`), which a daemon reads again when
//! they change (`tls_config`). Servers are always verified, by the name that was asked for. Callers
//! are asked for a certificate; one that is shown must be good, and what a caller without one may
//! do is for each method and page to say.
//!
//! # Invariants
//!
//! * There is no way from TLS to plain text: what a program speaks is decided when it starts.
//! * A peer is trusted as long as its certificate is: when that ends or is revoked, or its
//!   authority goes, the connection does, with all that waits on it (`peer_session`).
//! * Files that are wrong are never taken instead of files that were right.
//! * No session is resumed: each connection is verified whole.

mod explain;
mod explained_stream;
mod files;
mod lists;
mod peer_session;
mod tls_config;
mod trust;
mod verifier;
pub mod zones;

pub(crate) use crate::tls::peer_session::PeerSession;
pub use crate::tls::tls_config::{Security, WARN_BEFORE};
pub use explain::explain;
pub use files::{FILES, TlsError};
