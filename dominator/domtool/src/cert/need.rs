//! Decides whether a certificate must be made, or renewed, or can stay as it is.
// tidy: core

use core::time::Duration;
use std::collections::BTreeSet;

use api::certificate::Certificate;

/// A certificate that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) hosts: Vec<String>,
    pub(super) powers: Vec<String>,
    pub(super) groups: Vec<String>,
}

/// A certificate that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) certificate: Certificate,
    /// The key beside it is its key.
    pub(super) key_belongs: bool,
    /// The authority that is to issue has issued it.
    pub(super) is_ours: bool,
    /// It, or another one with its key, was revoked.
    pub(super) is_revoked: bool,
}

/// What must be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A key and a certificate must be made.
    New,
    /// A certificate must be made for the key that is there.
    Renewal,
    /// Nothing.
    Nothing,
}

/// What must be done about `wanted`. A certificate that ends in less than `renew_before` is
/// renewed, unless it lasts until `last`, when the authority ends itself.
pub(super) fn need(
    wanted: &Wanted,
    found: Option<&Found>,
    now: i64,
    last: i64,
    renew_before: Duration,
) -> Need {
    // A key that others may have must not be vouched for again.
    let Some(found) = found.filter(|found| {
        found.key_belongs
            && found.is_ours
            && !found.is_revoked
            && found.certificate.common_name == wanted.name
    }) else {
        return Need::New;
    };
    let certificate = &found.certificate;
    let set = |texts: &[String]| texts.iter().cloned().collect::<BTreeSet<String>>();
    let powers = certificate.identity.powers.patterns().map(str::to_owned).collect();
    let is_as_wanted = set(&certificate.hosts) == set(&wanted.hosts)
        && set(&wanted.powers) == powers
        && set(&wanted.groups) == certificate.identity.groups;
    let left = certificate.not_after.saturating_sub(now);
    let enough = i64::try_from(renew_before.as_secs()).unwrap_or(i64::MAX);
    let lasts = left >= enough || certificate.not_after >= last;
    if is_as_wanted && lasts { Need::Nothing } else { Need::Renewal }
}

/// How long before its end a certificate of this lifetime is renewed if it is not said: 30 days,
/// but no more than a third of its life.
pub(super) fn renew_before(lifetime: Duration) -> Duration {
    (lifetime / 3).min(Duration::from_secs(30 * 86_400))
}

#[cfg(test)]
mod tests {
    use api::access::{Identity, Powers};

    use super::*;

    #[test]
    fn what_is_good_for_long_stays_and_a_doubtful_key_goes() {
        let day = 86_400;
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let wanted = Wanted {
            name: "web1".into(),
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
                    groups: BTreeSet::new(),
                    powers: Powers::new(["ObjectServer.GetObjects"]),
                    zone: None,
                },
                not_before: 0,
                not_after: 100 * day,
                serial: "01".into(),
                fingerprint: "sha256:00".into(),
                key: "sha256:00".into(),
                is_authority: false,
            },
            key_belongs: true,
            is_ours: true,
            is_revoked: false,
        };
        let with = |change: fn(&mut Found)| {
            let mut found = good.clone();
            change(&mut found);
            Some(found)
        };
        let table = [
            ("good", Some(good.clone()), 70, Need::Nothing),
            ("ends soon", Some(good.clone()), 71, Need::Renewal),
            ("has ended", Some(good.clone()), 200, Need::Renewal),
            ("none", None, 0, Need::New),
            ("revoked", with(|found| found.is_revoked = true), 0, Need::New),
            ("other key", with(|found| found.key_belongs = false), 0, Need::New),
            ("other authority", with(|found| found.is_ours = false), 0, Need::New),
            ("other name", with(|found| found.certificate.common_name = "x".into()), 0, Need::New),
            ("other host", with(|found| found.certificate.hosts.truncate(1)), 0, Need::Renewal),
            (
                "other powers",
                with(|found| found.certificate.identity.powers = Powers::all()),
                0,
                Need::Renewal,
            ),
            (
                "other groups",
                with(|found| found.certificate.identity.groups = ["web".to_owned()].into()),
                0,
                Need::Renewal,
            ),
        ];
        for (name, found, days, want) in table {
            let before = Duration::from_secs(30 * 86_400);
            let last = 101 * day;
            assert_eq!(need(&wanted, found.as_ref(), days * day, last, before), want, "{name}");
        }
        let before = Duration::from_secs(30 * 86_400);
        // A renewal could not last longer.
        assert_eq!(need(&wanted, Some(&good), 99 * day, 100 * day, before), Need::Nothing);
        assert_eq!(renew_before(Duration::from_secs(365 * 86_400)).as_secs(), 30 * 86_400);
        assert_eq!(renew_before(Duration::from_secs(9)).as_secs(), 3);
    }
}
