//! Warns of callers that may be owners only because their certificates do not say what they are.

use std::collections::BTreeSet;
use std::sync::Mutex;

use api::access::{Identity, IdentityKind};
use model::lock::locked;

/// How many names are remembered. There is no warning of others.
const NAMES_MAX: usize = 1_024;

/// The callers that were warned of.
#[derive(Debug, Default)]
pub(super) struct UnstatedOwners(Mutex<BTreeSet<String>>);

impl UnstatedOwners {
    /// Warns of `identity`, which calls `method` without its power, if its certificate states no
    /// kind and this is its first such call.
    pub(super) fn warn_once(&self, identity: &Identity, method: &str) {
        let Some(user) = self.note(identity, method) else { return };
        tracing::warn!(
            "{user} calls {method} as an owner, and the certificate of {user} does not say that \
             this is a user; the next release takes such a certificate for no owner: issue it \
             again with domtool cert issue --kind user"
        );
    }

    fn note<'a>(&self, identity: &'a Identity, method: &str) -> Option<&'a str> {
        let user = identity.user.as_deref()?;
        if identity.kind != IdentityKind::Unstated || identity.powers.has(method) {
            return None;
        }
        let mut names = locked(&self.0);
        let is_new = names.len() < NAMES_MAX && names.insert(user.to_owned());
        is_new.then_some(user)
    }
}

#[cfg(test)]
mod tests {
    use api::access::Powers;

    use super::*;

    #[test]
    fn each_owner_without_a_kind_is_warned_of_once() {
        let owners = UnstatedOwners::default();
        let of = |user: &str, kind| Identity {
            user: (!user.is_empty()).then(|| user.to_owned()),
            kind,
            powers: Powers::new(["ImageServer.Collect"]),
            ..Identity::default()
        };
        let mut got = Vec::new();
        for (user, kind, method) in [
            ("", IdentityKind::Unstated, "ImageServer.DeleteImage"),
            ("alice", IdentityKind::User, "ImageServer.DeleteImage"),
            ("alice", IdentityKind::Unstated, "ImageServer.Collect"),
            ("alice", IdentityKind::Unstated, "ImageServer.DeleteImage"),
            ("alice", IdentityKind::Unstated, "ImageServer.ChangeTags"),
            ("bob", IdentityKind::Unstated, "ImageServer.DeleteImage"),
        ] {
            got.extend(owners.note(&of(user, kind), method).map(|user| format!("{user} {method}")));
        }
        assert_eq!(got, ["alice ImageServer.DeleteImage", "bob ImageServer.DeleteImage"]);
        let many = (0..NAMES_MAX).filter(|number| {
            let identity = of(&number.to_string(), IdentityKind::Unstated);
            owners.note(&identity, "Dominator.Trust").is_some()
        });
        assert_eq!(many.count(), NAMES_MAX - 2);
    }
}
