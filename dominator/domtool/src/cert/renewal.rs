//! Decides whether a certificate is made, renewed or left as it is.
// tidy: core

use core::time::Duration;
use std::collections::BTreeSet;

use api::access::IdentityKind;
use api::certificate::Certificate;
use certs::sets::Set;

/// A certificate to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) kind: IdentityKind,
    pub(super) hosts: Vec<String>,
    pub(super) powers: Vec<String>,
    pub(super) groups: Vec<String>,
}

/// An existing certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) certificate: Certificate,
    /// True if the key file beside it has its key.
    pub(super) key_belongs: bool,
    /// True if it was issued by the authority that issues now.
    pub(super) is_same_issuer: bool,
    /// True if it, or another certificate with its key, was revoked.
    pub(super) is_revoked: bool,
}

/// The step that gives a holder the wanted certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Make a key and a certificate.
    Create,
    /// Issue a certificate for the existing key.
    Renew,
    /// Leave the certificate as it is.
    Keep,
}

/// Returns the step for `wanted`. A certificate that expires in less than `renew_before` is
/// renewed, unless it is valid until `authority_end`: a renewal could not be valid for longer.
pub(super) fn next_step(
    wanted: &Wanted,
    found: Option<&Found>,
    now: i64,
    authority_end: i64,
    renew_before: Duration,
) -> Step {
    // No certificate is issued for a key that others may have.
    let Some(found) = found.filter(|found| {
        found.key_belongs
            && found.is_same_issuer
            && !found.is_revoked
            && found.certificate.common_name == wanted.name
            && found.certificate.identity.kind.agrees(wanted.kind)
    }) else {
        return Step::Create;
    };
    let certificate = &found.certificate;
    let set = |texts: &[String]| texts.iter().cloned().collect::<BTreeSet<String>>();
    let powers = certificate.identity.powers.patterns().map(str::to_owned).collect();
    let is_as_wanted = certificate.identity.kind == wanted.kind
        && set(&certificate.hosts) == set(&wanted.hosts)
        && set(&wanted.powers) == powers
        && set(&wanted.groups) == certificate.identity.groups;
    let left = certificate.not_after.saturating_sub(now);
    let enough = i64::try_from(renew_before.as_secs()).unwrap_or(i64::MAX);
    let lasts = left >= enough || certificate.not_after >= authority_end;
    if is_as_wanted && lasts { Step::Keep } else { Step::Renew }
}

/// Returns the kind of a new certificate with the powers of `sets`: the one that is `stated` by
/// the operator, or by the certificate `found` of the same name, or that the sets tell. Where
/// `found` states none, a daemon and a person with powers of their own look the same, and nothing
/// is stated as before.
pub(super) fn wanted_kind(
    stated: Option<IdentityKind>,
    found: Option<&Certificate>,
    sets: &[Set],
) -> IdentityKind {
    let is_stated = |kind: &IdentityKind| *kind != IdentityKind::Unstated;
    let found_kind = found.map(|found| found.identity.kind).filter(is_stated);
    let of_sets = sets.iter().map(|set| set.kind());
    // A daemon with the powers of a person is a daemon.
    let told = of_sets.max_by_key(|kind| *kind != IdentityKind::User);
    let default = match found {
        Some(found) if !found.hosts.is_empty() => IdentityKind::Unstated,
        _ => IdentityKind::User,
    };
    stated.or(found_kind).or(told).unwrap_or(default)
}

/// Returns true if `found` may be the certificate of the machine `name`: a machine has a
/// certificate for its own name as a host.
pub(super) fn may_be_machine(found: &Found, name: &str) -> bool {
    let Certificate { identity, hosts, common_name, .. } = &found.certificate;
    common_name == name
        && match identity.kind {
            IdentityKind::Unstated => hosts.iter().any(|host| host == name),
            kind => kind == IdentityKind::Machine,
        }
}

/// Returns the default time before its end at which a certificate is renewed: 30 days, but at most
/// a third of its lifetime.
pub(super) fn default_renew_before(lifetime: Duration) -> Duration {
    (lifetime / 3).min(Duration::from_secs(30 * 86_400))
}

#[cfg(test)]
mod tests {
    use api::access::{Identity, Powers};

    use super::*;

    // tidy: table
    #[test]
    fn what_is_good_for_long_stays_and_a_doubtful_key_goes() {
        let day = 86_400;
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let wanted = Wanted {
            name: "web1".into(),
            kind: IdentityKind::Machine,
            hosts: texts(&["web1", "192.0.2.7"]),
            powers: texts(&["ObjectServer.GetObjects"]),
            groups: Vec::new(),
        };
        let good = Found {
            certificate: Certificate {
                common_name: "web1".into(),
                issuer: "root".into(),
                hosts: texts(&["192.0.2.7", "web1"]),
                identity: Identity {
                    user: Some("web1".into()),
                    kind: IdentityKind::Machine,
                    powers: Powers::new(["ObjectServer.GetObjects"]),
                    ..Identity::default()
                },
                not_before: 0,
                not_after: 100 * day,
                serial: "01".into(),
                fingerprint: "sha256:00".into(),
                key: "sha256:00".into(),
                is_authority: false,
            },
            key_belongs: true,
            is_same_issuer: true,
            is_revoked: false,
        };
        let with = |change: fn(&mut Found)| {
            let mut found = good.clone();
            change(&mut found);
            Some(found)
        };
        let table = [
            ("good", Some(good.clone()), 70, Step::Keep),
            ("ends soon", Some(good.clone()), 71, Step::Renew),
            ("has ended", Some(good.clone()), 200, Step::Renew),
            ("none", None, 0, Step::Create),
            ("revoked", with(|found| found.is_revoked = true), 0, Step::Create),
            ("other key", with(|found| found.key_belongs = false), 0, Step::Create),
            ("other authority", with(|found| found.is_same_issuer = false), 0, Step::Create),
            (
                "other name",
                with(|found| found.certificate.common_name = "x".into()),
                0,
                Step::Create,
            ),
            ("other host", with(|found| found.certificate.hosts.truncate(1)), 0, Step::Renew),
            (
                "no kind",
                with(|found| found.certificate.identity.kind = IdentityKind::Unstated),
                0,
                Step::Renew,
            ),
            (
                "other kind",
                with(|found| found.certificate.identity.kind = IdentityKind::User),
                0,
                Step::Create,
            ),
            (
                "other powers",
                with(|found| found.certificate.identity.powers = Powers::all()),
                0,
                Step::Renew,
            ),
            (
                "other groups",
                with(|found| found.certificate.identity.groups = ["web".to_owned()].into()),
                0,
                Step::Renew,
            ),
        ];
        for (name, found, days, want) in table {
            let before = Duration::from_secs(30 * 86_400);
            let last = 101 * day;
            assert_eq!(
                next_step(&wanted, found.as_ref(), days * day, last, before),
                want,
                "{name}"
            );
        }
        let before = Duration::from_secs(30 * 86_400);
        // A renewal could not last longer.
        assert_eq!(next_step(&wanted, Some(&good), 99 * day, 100 * day, before), Step::Keep);
        assert_eq!(default_renew_before(Duration::from_secs(365 * 86_400)).as_secs(), 30 * 86_400);
        assert_eq!(default_renew_before(Duration::from_secs(9)).as_secs(), 3);
    }

    fn certificate(kind: IdentityKind, hosts: &[&str]) -> Certificate {
        Certificate {
            common_name: "web1".into(),
            issuer: "root".into(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            identity: Identity { user: Some("web1".into()), kind, ..Identity::default() },
            not_before: 0,
            not_after: 1,
            serial: "01".into(),
            fingerprint: "sha256:00".into(),
            key: "sha256:00".into(),
            is_authority: false,
        }
    }

    #[test]
    fn a_kind_is_stated_or_kept_or_told_by_the_sets() {
        use IdentityKind::{Machine, Service, Unknown, Unstated, User};
        let table = [
            (Some(Machine), None, vec![], Machine),
            (Some(User), Some(certificate(Service, &["a"])), vec![Set::Mdbd], User),
            (None, Some(certificate(Service, &[])), vec![Set::Viewer], Service),
            (None, Some(certificate(Unknown, &[])), vec![], Unknown),
            (None, Some(certificate(Unstated, &["a"])), vec![Set::Subd], Machine),
            (None, Some(certificate(Unstated, &["a"])), vec![Set::Operator], User),
            (None, Some(certificate(Unstated, &["a"])), vec![], Unstated),
            (None, Some(certificate(Unstated, &[])), vec![], User),
            (None, None, vec![], User),
            (None, None, vec![Set::Viewer, Set::Uploader], User),
            (None, None, vec![Set::Viewer, Set::Dominator], Service),
            (None, None, vec![Set::Imageserver, Set::Viewer], Service),
        ];
        for (stated, found, sets, want) in table {
            let got = wanted_kind(stated, found.as_ref(), &sets);
            assert_eq!(got, want, "{stated:?} {found:?} {sets:?}");
        }
    }

    #[test]
    fn a_person_is_not_taken_for_a_machine() {
        use IdentityKind::{Machine, Unstated, User};
        let table = [
            (certificate(Machine, &[]), "web1", true),
            (certificate(User, &["web1"]), "web1", false),
            (certificate(Unstated, &["192.0.2.1", "web1"]), "web1", true),
            (certificate(Unstated, &[]), "web1", false),
            (certificate(Unstated, &["web2"]), "web2", false),
        ];
        for (certificate, name, want) in table {
            let found =
                Found { certificate, key_belongs: true, is_same_issuer: true, is_revoked: false };
            assert_eq!(may_be_machine(&found, name), want, "{found:?} {name}");
        }
    }
}
