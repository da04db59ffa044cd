//! Why a call failed, and what its caller should do about it.

use std::io;
use std::time::Duration;

use crate::tls::EndedCertificate;
use api::codec::CodecError;
use api::fault::{Fault, FaultCode};

/// Why a call failed. Each variant names the server and the method.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    #[error("cannot connect to {peer}")]
    Connect { peer: String, source: io::Error },
    #[error("{method} at {peer}: no reply within {limit:?}")]
    TimedOut { method: &'static str, peer: String, limit: Duration },
    #[error("{method} at {peer}: the connection was lost")]
    Lost { method: &'static str, peer: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The peer is not a daemon of this product.
    #[error("{method} at {peer}: {what}")]
    Protocol {
        method: &'static str,
        peer: String,
        /// What the peer sent instead of a reply.
        what: String,
    },
    /// The request cannot be encoded, or the reply cannot be decoded.
    #[error("{method} at {peer}")]
    Codec { method: &'static str, peer: String, source: CodecError },
    #[error("{method} to {peer}: cannot read what is to be sent")]
    Source { method: &'static str, peer: String, source: io::Error },
    /// The server refused the call, or failed.
    #[error("{method} at {peer}")]
    Fault { method: &'static str, peer: String, source: Fault },
}

/// What the caller should do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Retry after a pause: the cause may disappear by itself.
    Wait,
    /// Use another server: this one does not work correctly for now.
    Switch,
    /// Report to the operator: the cause does not disappear by itself.
    Report,
}

/// A hint where a peer answers, and TLS with it fails.
const TLS_HINT: &str = "something answers at this address, so the address is not the cause: \
    domtool cert show DIR shows for which names a certificate is, and who issued it";

impl CallError {
    /// Returns the fault, if the server answered one.
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Fault { source, .. } => Some(source),
            _ => None,
        }
    }

    /// Returns the code of [`CallError::fault`].
    #[must_use]
    pub fn code(&self) -> Option<FaultCode> {
        self.fault().map(|fault| fault.code)
    }

    /// Returns a hint for whoever runs a tool that cannot connect: `unreached`, or another one if
    /// TLS failed with what answers. `None` for other errors.
    #[must_use]
    pub fn connect_hint(&self, unreached: &'static str) -> Option<&'static str> {
        match self {
            // The kind of the errors of rustls.
            Self::Connect { source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                Some(TLS_HINT)
            }
            Self::Connect { .. } => Some(unreached),
            _ => None,
        }
    }

    /// Returns true if there is no connection because the certificate of the server has ended. That
    /// need not be all that is wrong with it.
    #[must_use]
    pub fn is_of_ended_certificate(&self) -> bool {
        let Self::Connect { source, .. } = self else { return false };
        source.get_ref().is_some_and(|inner| inner.is::<EndedCertificate>())
    }

    /// Returns what to do about the error.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Connect { .. } | Self::TimedOut { .. } | Self::Lost { .. } => Remedy::Wait,
            Self::Protocol { .. } | Self::Codec { .. } => Remedy::Switch,
            Self::Source { .. } => Remedy::Report,
            Self::Fault { source, .. } => match source.code {
                FaultCode::Busy
                | FaultCode::Stale
                | FaultCode::Unavailable
                | FaultCode::Throttled => Remedy::Wait,
                FaultCode::Internal | FaultCode::NotFound => Remedy::Switch,
                _ => Remedy::Report,
            },
        }
    }
}
