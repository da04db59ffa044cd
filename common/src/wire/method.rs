//! A method: one request and its reply, defined once for client and server.
// tidy: core

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::access::Access;

/// The largest request or reply of most methods, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// One request and its reply.
///
/// A method is an empty enum that implements this trait; see [`crate::api`].
pub trait Method: 'static {
    /// `Service.Method`, as certificates, metrics and logs know it.
    const NAME: &'static str;
    /// Who may call it.
    const ACCESS: Access;
    /// The largest request, in bytes.
    const REQUEST_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    /// The largest reply, in bytes.
    const REPLY_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
    /// What the client sends.
    type Request: Serialize + DeserializeOwned + Send + 'static;
    /// What the server answers.
    type Reply: Serialize + DeserializeOwned + Send + 'static;
}

/// What there is to know of a method without its types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MethodInfo {
    /// `Service.Method`.
    pub name: &'static str,
    /// Who may call it.
    pub access: Access,
    /// True if the name is kept for a later release and nothing answers to it yet.
    pub reserved: bool,
}

impl MethodInfo {
    /// What there is to know of `M`.
    #[must_use]
    pub const fn of<M: Method>() -> Self {
        Self { name: M::NAME, access: M::ACCESS, reserved: false }
    }

    /// A name that is kept for a later release.
    #[must_use]
    pub const fn reserve(name: &'static str, access: Access) -> Self {
        Self { name, access, reserved: true }
    }
}
