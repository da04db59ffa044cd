//! The definition of a method: its request and its reply, for client and server.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::access::Access;
use crate::audit::call_details::CallDetails;

/// The largest request or reply of most methods, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// What a call changes. The audit log records all calls that change something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// It returns something, or repeats a periodic report. It is not recorded.
    Tells,
    /// It changes or runs something. It is carried out only if it can be recorded.
    Changes,
    /// As [`Effect::Changes`], but it prevents changes or frees space. So it is carried out even if
    /// it cannot be recorded, such as on a full disk; that is logged.
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
    /// What a call changes. There is no default, so that none is forgotten.
    const EFFECT: Effect;
    /// The largest request, in bytes.
    const REQUEST_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    /// The largest reply, in bytes.
    const REPLY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    type Request: Serialize + DeserializeOwned + Send + 'static;
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// Describes a call for the audit log: names and numbers that say what is changed, and the
    /// reason, but no secret and no content.
    #[must_use]
    fn audit_details(_request: &Self::Request) -> CallDetails {
        CallDetails::default()
    }
}

/// The properties of a method without its types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MethodInfo {
    /// `Service.Method`.
    pub name: &'static str,
    /// Who may call it.
    pub access: Access,
    pub effect: Effect,
    /// True if the name is reserved for a later release.
    pub reserved: bool,
}

impl MethodInfo {
    /// Returns the properties of `M`.
    #[must_use]
    pub const fn of<M: Method>() -> Self {
        Self { name: M::NAME, access: M::ACCESS, effect: M::EFFECT, reserved: false }
    }

    /// Returns a reserved method.
    #[must_use]
    pub const fn reserve(name: &'static str, access: Access) -> Self {
        Self { name, access, effect: Effect::Tells, reserved: true }
    }
}
