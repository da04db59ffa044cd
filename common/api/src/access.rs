//! Who may call a method.
//!
//! [`Access`] is the rule that a method carries; [`ruling`] decides by it, by who calls, and by who
//! owns what the call is about.

pub mod identity;
pub mod ruling;

pub use identity::{Identity, Owners, OwnersError, Powers};
pub use ruling::{DeniedError, Owned, judge, judge_owners};

use serde::{Deserialize, Serialize};

/// The access rule that each method carries.
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
    /// What the rule asks for, in words.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Authenticated => "any certificate",
            Self::Power => "a certificate with the power",
            Self::PowerOrOwner => "a certificate with the power, or of an owner",
        }
    }
}
