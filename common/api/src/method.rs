//! A method: one request and its reply, defined once for client and server.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::access::Access;
use crate::audit::brief::Brief;

/// The largest request or reply of most methods, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// What a call does to what outlasts it. The audit log has all that change something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// It tells something, or says again what is said every few minutes. It is not recorded.
    Tells,
    /// It changes something, or runs something. It is carried out only if it can be recorded.
    Changes,
    /// As [`Effect::Changes`], but it holds changes back, or makes room. So it is carried out even
    /// where it cannot be recorded, as on a full disk, and that is logged.
    Relieves,
}

/// One request and its reply.
///
/// A method is an empty enum that implements this trait; see [`crate`].
pub trait Method: 'static {
    /// `Service.Method`, as certificates, metrics and logs know it.
    const NAME: &'static str;
    /// Who may call it.
    const ACCESS: Access;
    /// What a call does. There is no default, so that none is forgotten.
    const EFFECT: Effect;
    /// The largest request, in bytes.
    const REQUEST_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    /// The largest reply, in bytes.
    const REPLY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    /// What the client sends.
    type Request: Serialize + DeserializeOwned + Send + 'static;
    /// What the server answers.
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// What a call asks for, for the audit log: names and numbers that say what is changed, and
    /// why, but nothing secret and no content.
    #[must_use]
    fn brief(_request: &Self::Request) -> Brief {
        Brief::default()
    }
}

/// What there is to know of a method without its types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MethodInfo {
    /// `Service.Method`.
    pub name: &'static str,
    /// Who may call it.
    pub access: Access,
    /// What a call does.
    pub effect: Effect,
    /// True if the name is kept for a later release and nothing answers to it yet.
    pub reserved: bool,
}

impl MethodInfo {
    /// What there is to know of `M`.
    #[must_use]
    pub const fn of<M: Method>() -> Self {
        Self { name: M::NAME, access: M::ACCESS, effect: M::EFFECT, reserved: false }
    }

    /// A name that is kept for a later release.
    #[must_use]
    pub const fn reserve(name: &'static str, access: Access) -> Self {
        Self { name, access, effect: Effect::Tells, reserved: true }
    }
}
