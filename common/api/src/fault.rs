//! What a server answers when it does not do what a call asks.

use serde::{Deserialize, Serialize};

/// Why a call was not carried out. Callers branch on this, never on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// It existed, was deleted, and its name is never used again.
    Gone,
    /// It exists already.
    Exists,
    /// Another update or fetch is under way.
    Busy,
    /// The machine has changed since the caller looked: poll, and plan again.
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
    /// The machine itself does not allow it for now: paused by hand, or by what guards it from
    /// disruption. The same call may succeed later.
    Held,
    /// The machine takes only images that are signed, and this is not one, or not all of it is.
    Untrusted,
}

impl FaultCode {
    /// All of them.
    pub const ALL: [Self; 15] = [
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
    ];

    /// The word that JSON and metrics have for it.
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
        }
    }

    /// The HTTP status that goes with the code.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::BadRequest | Self::Version => 400,
            Self::Denied | Self::Untrusted => 403,
            Self::NoMethod | Self::NotFound => 404,
            Self::Exists | Self::Busy | Self::Stale | Self::Held => 409,
            Self::Gone => 410,
            Self::TooLarge => 413,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::NoSpace => 507,
        }
    }
}

/// A refusal or a failure, as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// What a caller branches on.
    pub code: FaultCode,
    /// What a person reads: what was refused, where, and what to do.
    pub message: String,
}

impl Fault {
    /// A fault with `code` and a text for people.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}
