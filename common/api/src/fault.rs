//! The error that a server answers instead of a reply.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a call was not carried out. Callers branch on this, never on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FaultCode {
    /// The request cannot be understood, or breaks a rule.
    BadRequest,
    /// The server does not speak the caller's version of the protocol.
    Version,
    /// The method is unknown, or reserved for a later release.
    NoMethod,
    /// What the call is about does not exist.
    NotFound,
    /// What the call is about was deleted; its name is never used again.
    Gone,
    /// It exists already.
    Exists,
    /// Another update or fetch is under way.
    Busy,
    /// The machine has changed since the caller's last poll: poll and plan again.
    Stale,
    /// The request or one of its parts is larger than the server accepts.
    TooLarge,
    /// There is no space left.
    NoSpace,
    /// The caller may not do this.
    Denied,
    /// The server cannot do this now; the same call may succeed later.
    Unavailable,
    /// Something failed inside the server.
    Internal,
    /// The machine itself does not allow it for now: it is paused locally, or its disruption
    /// command refused. The same call may succeed later.
    Held,
    /// The machine requires trusted signatures, and the image lacks them.
    Untrusted,
    /// The caller changes things too often: the same call succeeds in a moment.
    Throttled,
}

impl FaultCode {
    pub const ALL: [Self; 16] = [
        Self::BadRequest,
        Self::Version,
        Self::NoMethod,
        Self::NotFound,
        Self::Gone,
        Self::Exists,
        Self::Busy,
        Self::Stale,
        Self::TooLarge,
        Self::NoSpace,
        Self::Denied,
        Self::Unavailable,
        Self::Internal,
        Self::Held,
        Self::Untrusted,
        Self::Throttled,
    ];

    /// Returns the name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BadRequest => "bad-request",
            Self::Version => "version",
            Self::NoMethod => "no-method",
            Self::NotFound => "not-found",
            Self::Gone => "gone",
            Self::Exists => "exists",
            Self::Busy => "busy",
            Self::Stale => "stale",
            Self::TooLarge => "too-large",
            Self::NoSpace => "no-space",
            Self::Denied => "denied",
            Self::Unavailable => "unavailable",
            Self::Internal => "internal",
            Self::Held => "held",
            Self::Untrusted => "untrusted",
            Self::Throttled => "throttled",
        }
    }

    /// Returns the HTTP status of the code.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest | Self::Version => 400,
            Self::Denied | Self::Untrusted => 403,
            Self::NoMethod | Self::NotFound => 404,
            Self::Exists | Self::Busy | Self::Stale | Self::Held => 409,
            Self::Gone => 410,
            Self::TooLarge => 413,
            Self::Throttled => 429,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::NoSpace => 507,
        }
    }
}

/// The error of a call, as it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// The code, on which callers branch.
    pub code: FaultCode,
    /// The text for people: what was refused, where, and what to do.
    pub message: String,
}

impl Fault {
    /// Returns a fault with `code` and a text for people.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}
