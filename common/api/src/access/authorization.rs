//! Decides whether a call is allowed: by the rule of its method, its caller, and the owners of what
//! it is about.
//!
//! A directory belongs to its own owners and to those of every directory above it: ownership below
//! a directory is delegated, not taken away from it. The owners in an image's notes count in
//! addition to those of its directories.
//!
//! # Invariants
//!
//! * A caller with the power is never refused, except for methods that their authority may not
//!   vouch for.
//! * A caller without a valid certificate owns nothing, and neither does a machine or a service.
//! * A refusal says what would have been enough.

use super::{Access, Identity, IdentityKind, Owners};

/// How many owned items a refusal names.
const NAMED_MAX: usize = 4;

/// An image, directory or machine that a call is about, or a directory above it, with its owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedItem {
    /// A description, such as `directory base`.
    pub what: String,
    pub owners: Owners,
}

/// Why a call is refused, and what it would need.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeniedError {
    /// The caller has no certificate of a trusted authority.
    #[error("{method} needs a certificate that this server's authorities signed")]
    Unknown { method: String },
    /// The caller has neither the power nor owns what the call is about.
    #[error("{} may not call {method}{}: {}", shown(.user), toward(.about), needs(.method, .owned))]
    Power {
        /// The caller, in words.
        user: Option<String>,
        method: String,
        /// What the call is about; empty if that does not matter.
        about: String,
        /// The items whose owners could call; `None` if owners could not.
        owned: Option<Vec<OwnedItem>>,
    },
    /// The caller has not the power, and its kind cannot be an owner.
    #[error(
        "{} may not call {method}{}: it needs the power {method}; owners are users, and the \
         certificate is that of {}", shown(.user), toward(.about), of_kind(*.kind)
    )]
    Kind {
        user: Option<String>,
        kind: IdentityKind,
        method: String,
        /// What the call is about; empty if that does not matter.
        about: String,
    },
    /// The zone of the caller's authority does not include the method.
    #[error(
        "{} may not call {method}: the authority that signed their certificate may not vouch for \
         callers of it (zones.toml)", shown(.user)
    )]
    Zone { user: Option<String>, method: String },
    /// An owner adds owners that they do not belong to.
    #[error(
        "{} may not make {names} an owner of {about}: an owner can give it to groups that they \
         are in and to themselves; for others it needs the power {method}, or an owner of a \
         directory above it", shown(.user)
    )]
    Foreign {
        user: Option<String>,
        method: String,
        /// What the call is about.
        about: String,
        /// The owners to be added.
        names: String,
    },
}

fn shown(user: &Option<String>) -> &str {
    user.as_deref().unwrap_or("a caller without a certificate")
}

fn of_kind(kind: IdentityKind) -> &'static str {
    match kind {
        IdentityKind::Unstated | IdentityKind::User => "a user",
        IdentityKind::Service => "a service",
        IdentityKind::Machine => "a machine",
        IdentityKind::Unknown => "a kind of holder that this release does not know",
    }
}

fn toward(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!(" for {what}") }
}

fn needs(method: &str, owned: &Option<Vec<OwnedItem>>) -> String {
    let Some(owned) = owned else { return format!("it needs the power {method}") };
    let owned: Vec<&OwnedItem> = owned.iter().filter(|one| !one.owners.is_empty()).collect();
    if owned.is_empty() {
        return format!("it needs the power {method}, because nobody owns it");
    }
    let words = |one: &&OwnedItem| format!("{} ({})", one.owners.in_words(), one.what);
    let mut named: Vec<String> = owned.iter().take(NAMED_MAX).map(words).collect();
    if owned.len() > NAMED_MAX {
        named.push("...".to_owned());
    }
    format!("it needs the power {method}, or an owner: {}", named.join(", or "))
}

/// Checks whether `identity` may call `method`, whose rule is `access`, for what is described by
/// `about`. `owned` holds that item and the directories above it.
///
/// # Errors
///
/// Says what is needed.
pub fn authorize(
    method: &str,
    access: Access,
    identity: &Identity,
    about: &str,
    owned: &[OwnedItem],
) -> Result<(), DeniedError> {
    let refuse = |owned: Option<&[OwnedItem]>| DeniedError::Power {
        user: identity.in_words(),
        method: method.to_owned(),
        about: about.to_owned(),
        owned: owned.map(<[OwnedItem]>::to_vec),
    };
    if identity.zone.as_ref().is_some_and(|zone| !zone.has(method)) {
        return Err(DeniedError::Zone { user: identity.in_words(), method: method.to_owned() });
    }
    if identity.powers.has(method) {
        return Ok(());
    }
    match access {
        Access::Authenticated if identity.user.is_some() => Ok(()),
        Access::Authenticated => Err(DeniedError::Unknown { method: method.to_owned() }),
        Access::Power => Err(refuse(None)),
        Access::PowerOrOwner if !identity.kind.may_own() => Err(DeniedError::Kind {
            user: identity.in_words(),
            kind: identity.kind,
            method: method.to_owned(),
            about: about.to_owned(),
        }),
        Access::PowerOrOwner if owned.iter().any(|one| one.owners.include(identity)) => Ok(()),
        Access::PowerOrOwner => Err(refuse(Some(owned))),
    }
}

/// Checks whether `identity` may use `method` to replace the owners of `own`, which is below
/// `above`, by `wanted`.
///
/// Callers with the power and owners of something above may set any owners. Owners of only the item
/// itself may add groups that they are in and themselves. Any owner may remove others.
///
/// # Errors
///
/// Says what is needed.
pub fn authorize_owners(
    method: &str,
    identity: &Identity,
    above: &[OwnedItem],
    own: &OwnedItem,
    wanted: &Owners,
) -> Result<(), DeniedError> {
    let access = Access::PowerOrOwner;
    if authorize(method, access, identity, &own.what, above).is_ok() {
        return Ok(());
    }
    let all: Vec<OwnedItem> = [own].into_iter().chain(above).cloned().collect();
    authorize(method, access, identity, &own.what, &all)?;
    let groups = wanted.groups.difference(&own.owners.groups);
    let groups: Vec<&String> = groups.filter(|group| !identity.groups.contains(*group)).collect();
    let users = wanted.users.difference(&own.owners.users);
    let users: Vec<&String> = users.filter(|user| identity.user.as_ref() != Some(*user)).collect();
    if groups.is_empty() && users.is_empty() {
        return Ok(());
    }
    let foreign = Owners::new(groups.into_iter().cloned(), users.into_iter().cloned());
    Err(DeniedError::Foreign {
        user: identity.in_words(),
        method: method.to_owned(),
        about: own.what.clone(),
        names: foreign.in_words(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Powers;
    use super::*;

    fn identity(user: &str, groups: &[&str], powers: &[&str]) -> Identity {
        Identity {
            user: (!user.is_empty()).then(|| user.to_owned()),
            groups: groups.iter().map(|group| (*group).to_owned()).collect(),
            powers: Powers::new(powers.iter().copied()),
            ..Identity::default()
        }
    }

    fn of_kind(kind: IdentityKind, identity: Identity) -> Identity {
        Identity { kind, ..identity }
    }

    fn owned(what: &str, groups: &[&str], users: &[&str]) -> OwnedItem {
        let owners = Owners::new(groups.iter().copied(), users.iter().copied());
        OwnedItem { what: what.to_owned(), owners }
    }

    const DELETE: &str = "ImageServer.DeleteImage";

    /// `web/prod/7`, in a directory of `web-prod` in one of `web`.
    fn image() -> Vec<OwnedItem> {
        vec![
            owned("image web/prod/7", &["release"], &["alice"]),
            owned("directory web/prod", &["web-prod"], &[]),
            owned("directory web", &["web", "infra"], &["bob"]),
        ]
    }

    #[test]
    fn who_may_call_what() {
        use Access::{Authenticated, Power, PowerOrOwner};
        use IdentityKind::{Machine, Service, Unknown, User};
        let unknown = || DeniedError::Unknown { method: DELETE.to_owned() };
        let power = |user: &str, owned: Option<Vec<OwnedItem>>| DeniedError::Power {
            user: (!user.is_empty()).then(|| user.to_owned()),
            method: DELETE.to_owned(),
            about: "image web/prod/7".to_owned(),
            owned,
        };
        let nobodys = || vec![owned("image web/prod/7", &[], &[])];
        let kind = |user: &str, kind| DeniedError::Kind {
            user: Some(user.to_owned()),
            kind,
            method: DELETE.to_owned(),
            about: "image web/prod/7".to_owned(),
        };
        #[rustfmt::skip]
        let table = [
            (Authenticated, Identity::unrestricted(),                          image(), Ok(())),
            (Authenticated, identity("eve", &[], &[]),                     image(), Ok(())),
            (Authenticated, identity("", &["web"], &["Subd.*"]),           image(), Err(unknown())),
            (Power,         Identity::unrestricted(),                          image(), Ok(())),
            (Power,         identity("eve", &[], &["ImageServer.*"]),      image(), Ok(())),
            (Power,         identity("alice", &["web"], &["Subd.*"]),      image(), Err(power("alice", None))),
            (PowerOrOwner,  Identity::unrestricted(),                          nobodys(), Ok(())),
            (PowerOrOwner,  identity("eve", &[], &["*.DeleteImage"]),      image(), Ok(())),
            (PowerOrOwner,  identity("alice", &[], &[]),                   image(), Ok(())),
            (PowerOrOwner,  identity("bob", &[], &[]),                     image(), Ok(())),
            (PowerOrOwner,  identity("eve", &["release"], &[]),            image(), Ok(())),
            (PowerOrOwner,  identity("eve", &["web-prod"], &[]),           image(), Ok(())),
            (PowerOrOwner,  identity("eve", &["x", "infra"], &[]),         image(), Ok(())),
            (PowerOrOwner,  identity("eve", &["dba"], &["*.AddImage"]),    image(), Err(power("eve", Some(image())))),
            (PowerOrOwner,  identity("", &["web", "release"], &[]),        image(), Err(power("", Some(image())))),
            (PowerOrOwner,  identity("alice", &["web"], &[]),              nobodys(), Err(power("alice", Some(nobodys())))),
            (PowerOrOwner,  identity("alice", &["web"], &[]),              vec![],  Err(power("alice", Some(vec![])))),
            // Machines and services are no owners, by whatever name or group.
            (Authenticated, of_kind(Machine, identity("alice", &[], &[])), image(), Ok(())),
            (Authenticated, of_kind(Unknown, identity("alice", &[], &[])), image(), Ok(())),
            (Power,         of_kind(Machine, identity("a", &[], &["*.*"])), image(), Ok(())),
            (Power,         of_kind(Machine, identity("a", &[], &[])),     image(), Err(power("machine a", None))),
            (PowerOrOwner,  of_kind(Machine, identity("a", &[], &["*.*"])), image(), Ok(())),
            (PowerOrOwner,  of_kind(User, identity("alice", &[], &[])),    image(), Ok(())),
            (PowerOrOwner,  of_kind(User, identity("eve", &["web"], &[])), image(), Ok(())),
            (PowerOrOwner,  of_kind(Machine, identity("alice", &[], &[])), image(), Err(kind("machine alice", Machine))),
            (PowerOrOwner,  of_kind(Machine, identity("a", &["web"], &[])), image(), Err(kind("machine a", Machine))),
            (PowerOrOwner,  of_kind(Service, identity("alice", &[], &[])), image(), Err(kind("service alice", Service))),
            (PowerOrOwner,  of_kind(Service, identity("a", &["web"], &[])), image(), Err(kind("service a", Service))),
            (PowerOrOwner,  of_kind(Unknown, identity("alice", &["web"], &[])), image(), Err(kind("alice (of an unknown kind)", Unknown))),
        ];
        for (access, identity, owned, want) in table {
            let got = authorize(DELETE, access, &identity, "image web/prod/7", &owned);
            assert_eq!(got, want, "{access:?} {identity:?}");
        }
    }

    #[test]
    fn an_authority_vouches_for_no_more_than_its_zone() {
        let of_zone = |method: &str, identity: Identity| {
            let identity = Identity { zone: Some(Powers::new([method])), ..identity };
            let owned = [owned("image a", &["web"], &[])];
            authorize(DELETE, Access::PowerOrOwner, &identity, "image a", &owned)
        };
        let refused = DeniedError::Zone { user: Some("eve".to_owned()), method: DELETE.to_owned() };
        for identity in [identity("eve", &[], &["*.*"]), identity("eve", &["web"], &[])] {
            assert_eq!(of_zone("Subd.*", identity.clone()), Err(refused.clone()));
            assert_eq!(of_zone("ImageServer.*", identity), Ok(()));
        }
        assert_eq!(
            refused.to_string(),
            "eve may not call ImageServer.DeleteImage: the authority that signed their \
             certificate may not vouch for callers of it (zones.toml)"
        );
    }

    #[test]
    fn a_refusal_says_what_is_needed() {
        let refuse = |access, identity: &Identity, about: &str, owned: &[OwnedItem]| {
            authorize(DELETE, access, identity, about, owned).unwrap_err().to_string()
        };
        let eve = identity("eve", &["dba"], &[]);
        assert_eq!(
            refuse(Access::PowerOrOwner, &eve, "image web/prod/7", &image()),
            "eve may not call ImageServer.DeleteImage for image web/prod/7: it needs the power \
             ImageServer.DeleteImage, or an owner: group release; user alice (image web/prod/7), \
             or group web-prod (directory web/prod), or groups infra, web; user bob (directory web)"
        );
        assert_eq!(
            refuse(Access::PowerOrOwner, &eve, "image a", &[owned("image a", &[], &[])]),
            "eve may not call ImageServer.DeleteImage for image a: it needs the power \
             ImageServer.DeleteImage, because nobody owns it"
        );
        assert_eq!(
            refuse(Access::Power, &eve, "", &[]),
            "eve may not call ImageServer.DeleteImage: it needs the power ImageServer.DeleteImage"
        );
        assert_eq!(
            refuse(Access::Authenticated, &identity("", &[], &[]), "", &[]),
            "ImageServer.DeleteImage needs a certificate that this server's authorities signed"
        );
        assert_eq!(
            refuse(
                Access::PowerOrOwner,
                &of_kind(IdentityKind::Machine, identity("alice", &[], &[])),
                "image web/prod/7",
                &image()
            ),
            "machine alice may not call ImageServer.DeleteImage for image web/prod/7: it needs the \
             power ImageServer.DeleteImage; owners are users, and the certificate is that of a \
             machine"
        );
        let many: Vec<OwnedItem> = (0..9).map(|n| owned(&format!("d{n}"), &["g"], &[])).collect();
        let text = refuse(Access::PowerOrOwner, &identity("", &[], &[]), "x", &many);
        assert!(text.starts_with("a caller without a certificate may not call"), "{text}");
        assert!(text.ends_with("group g (d3), or ..."), "{text}");
    }

    #[test]
    fn who_may_give_what_to_whom() {
        const CHANGE: &str = "ImageServer.ChangeOwner";
        let above = [owned("directory web", &["web"], &["bob"])];
        let own = owned("directory web/prod", &["web-prod", "old"], &[]);
        let wanted = |groups: &[&str], users: &[&str]| owned("", groups, users).owners;
        let foreign = |user: &str, names: &str| {
            Err(DeniedError::Foreign {
                user: Some(user.to_owned()),
                method: CHANGE.to_owned(),
                about: "directory web/prod".to_owned(),
                names: names.to_owned(),
            })
        };
        let eve = || identity("eve", &["web-prod", "eves"], &[]);
        let nobody = || identity("mallory", &["x"], &["*.AddImage"]);
        let denied = || {
            Err(DeniedError::Power {
                user: Some("mallory".to_owned()),
                method: CHANGE.to_owned(),
                about: "directory web/prod".to_owned(),
                owned: Some(vec![own.clone(), above[0].clone()]),
            })
        };
        let of_machine = || {
            Err(DeniedError::Kind {
                user: Some("machine eve".to_owned()),
                kind: IdentityKind::Machine,
                method: CHANGE.to_owned(),
                about: "directory web/prod".to_owned(),
            })
        };
        #[rustfmt::skip]
        let table = [
            (Identity::unrestricted(),                   wanted(&["any"], &["who"]),        Ok(())),
            (identity("x", &[], &["*.ChangeOwner"]), wanted(&["any"], &[]),             Ok(())),
            (identity("x", &["web"], &[]),           wanted(&["any"], &["who"]),        Ok(())),
            (identity("bob", &[], &[]),              wanted(&["any"], &["who"]),        Ok(())),
            (eve(), wanted(&["eves"], &[]),                                             Ok(())),
            (eve(), wanted(&["web-prod"], &["eve"]),                                    Ok(())),
            (eve(), wanted(&[], &[]),                                                   Ok(())),
            (eve(), wanted(&["web-prod", "old"], &[]),                                  Ok(())),
            (eve(), wanted(&["web-prod", "dba", "web"], &[]), foreign("eve", "groups dba, web")),
            (eve(), wanted(&["web-prod"], &["alice"]),        foreign("eve", "user alice")),
            (nobody(), wanted(&["x"], &[]),                                             denied()),
            (nobody(), wanted(&["web-prod", "old"], &[]),                               denied()),
            (of_kind(IdentityKind::User, eve()), wanted(&["eves"], &["eve"]),           Ok(())),
            (of_kind(IdentityKind::Machine, eve()), wanted(&[], &[]),                   of_machine()),
        ];
        for (identity, wanted, want) in table {
            let got = authorize_owners(CHANGE, &identity, &above, &own, &wanted);
            assert_eq!(got, want, "{identity:?} {wanted:?}");
        }
    }
}
