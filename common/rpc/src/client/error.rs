//! Why a call failed, and what its caller should do about it.

use std::io;
use std::time::Duration;

use api::codec::CodecError;
use api::fault::{Fault, FaultCode};

/// A call that gave no reply. Each names the server and the method.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The server cannot be reached.
    #[error("cannot connect to {peer}")]
    Connect {
        /// The server.
        peer: String,
        /// What the kernel or the resolver said.
        source: io::Error,
    },
    /// There was no reply in time.
    #[error("{method} at {peer}: no reply within {limit:?}")]
    TimedOut {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The connection broke.
    #[error("{method} at {peer}: the connection was lost")]
    Lost {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// What the transport said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// What answers is no daemon of this product.
    #[error("{method} at {peer}: {what}")]
    Protocol {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// What came instead of a reply.
        what: String,
    },
    /// The request cannot be encoded or the reply cannot be decoded.
    #[error("{method} at {peer}")]
    Codec {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// What is wrong.
        source: CodecError,
    },
    /// What was to be uploaded could not be read.
    #[error("{method} to {peer}: cannot read what is to be sent")]
    Source {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// What the source said.
        source: io::Error,
    },
    /// The server refused, or failed.
    #[error("{method} at {peer}")]
    Fault {
        /// The method.
        method: &'static str,
        /// The server.
        peer: String,
        /// What it answered.
        source: Fault,
    },
}

/// What the caller should do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Try again, after a pause: the cause may pass by itself.
    Wait,
    /// Try another server: this one is not to be trusted for now.
    Switch,
    /// Tell the operator: nothing will change by itself.
    Report,
}

impl CallError {
    /// What the server answered, if it did.
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Fault { source, .. } => Some(source),
            _ => None,
        }
    }

    /// The code of [`CallError::fault`].
    #[must_use]
    pub fn code(&self) -> Option<FaultCode> {
        self.fault().map(|fault| fault.code)
    }

    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Connect { .. } | Self::TimedOut { .. } | Self::Lost { .. } => Remedy::Wait,
            Self::Protocol { .. } | Self::Codec { .. } => Remedy::Switch,
            Self::Source { .. } => Remedy::Report,
            Self::Fault { source, .. } => match source.code {
                FaultCode::Busy | FaultCode::Stale | FaultCode::Unavailable => Remedy::Wait,
                FaultCode::Internal | FaultCode::NotFound => Remedy::Switch,
                _ => Remedy::Report,
            },
        }
    }
}
