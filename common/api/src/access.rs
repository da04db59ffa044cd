//! Who may call a method.
//!
//! [`Access`] is the rule of a method. [`authorization`] decides from the rule, the caller, and the
//! owners of what the call is about.

pub mod authorization;
pub mod identity;

pub use authorization::{DeniedError, OwnedItem, authorize, authorize_owners};
pub use identity::{Identity, IdentityKind, Owners, OwnersError, Powers};

use serde::{Deserialize, Serialize};

/// The access rule of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Any caller with a valid certificate.
    Authenticated,
    /// A caller whose certificate has a pattern that matches the method's name.
    Power,
    /// As [`Access::Power`], or an owner of the machine or image that the call is about.
    PowerOrOwner,
}

impl Access {
    /// Describes what the rule requires.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Authenticated => "any certificate",
            Self::Power => "a certificate with the power",
            Self::PowerOrOwner => "a certificate with the power, or of an owner",
        }
    }
}
