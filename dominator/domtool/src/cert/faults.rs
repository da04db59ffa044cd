//! Finds faults of a certificate and the files beside it.
// tidy: core

use api::certificate::Certificate;

use super::{time_and_distance, time_text};

/// An end within this time is a fault.
const SOON_SECONDS: i64 = 14 * 86_400;

/// The key file beside a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Not checked: the operator named a file, not a directory.
    NotChecked,
    Missing,
    /// The key of the certificate, with the mode of its file.
    Belongs {
        mode: u32,
    },
    /// Another key, with the mode of its file.
    Other {
        mode: u32,
    },
    Unreadable {
        why: String,
    },
}

/// An authority in the chain of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) name: String,
    pub(super) not_after: i64,
    /// True if it certifies machines only.
    pub(super) is_for_machines: bool,
}

/// The authorities of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// The issuer, its issuer, and so on.
    pub(super) links: Vec<Link>,
    /// True if the last one is in `ca.pem`; `None` without that file.
    pub(super) is_trusted: Option<bool>,
}

/// A certificate and the files beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) certificate: Certificate,
    pub(super) key: Key,
    pub(super) chain: Chain,
    /// True if a revocation list beside it has it.
    pub(super) is_revoked: bool,
    /// End of validity of the revocation list beside it.
    pub(super) list_until: Option<i64>,
    /// True if it should be the certificate of an authority.
    pub(super) as_authority: bool,
}

/// Describes all faults.
pub(super) fn faults(facts: &Facts, now: i64) -> Vec<String> {
    let mut faults = Vec::new();
    let certificate = &facts.certificate;
    if certificate.not_after < now {
        let end = time_and_distance(now, certificate.not_after);
        faults.push(format!("the certificate expired on {end}: issue another one"));
    } else if certificate.not_after - now < SOON_SECONDS {
        let end = time_and_distance(now, certificate.not_after);
        faults.push(format!("the certificate expires soon, on {end}: renew it"));
    }
    if certificate.not_before > now {
        faults.push(format!(
            "the certificate is not valid before {}: is the clock right?",
            time_text(certificate.not_before)
        ));
    }
    if facts.is_revoked {
        faults.push("the certificate is revoked: crl.pem lists it".to_owned());
    }
    if facts.list_until.is_some_and(|until| until < now) {
        faults.push("crl.pem has expired: make a new one with domtool cert revoke".to_owned());
    }
    if certificate.is_authority && !facts.as_authority {
        faults.push("the certificate is that of an authority: daemons refuse it".to_owned());
    }
    if facts.as_authority && !certificate.is_authority {
        faults.push("the certificate is not that of an authority".to_owned());
    }
    key_faults(&facts.key, facts.as_authority, &mut faults);
    if facts.chain.is_trusted == Some(false) {
        let last = facts.chain.links.last().map_or(&certificate.issuer, |link| &link.name);
        faults.push(format!(
            "the chain does not lead to an authority in ca.pem; it ends with {last}"
        ));
    }
    for link in facts.chain.links.iter().filter(|link| link.not_after < now) {
        let end = time_and_distance(now, link.not_after);
        faults.push(format!("the authority {} expired on {end}", link.name));
    }
    faults
}

fn key_faults(key: &Key, as_authority: bool, faults: &mut Vec<String>) {
    let file = if as_authority { "ca.key" } else { "key.pem" };
    match key {
        Key::NotChecked => return,
        Key::Missing => faults.push(format!("{file} is missing")),
        Key::Unreadable { why } => faults.push(format!("cannot read {file}: {why}")),
        Key::Other { .. } => faults.push(format!("{file} is not the key of the certificate")),
        Key::Belongs { .. } => {}
    }
    let (Key::Belongs { mode } | Key::Other { mode }) = key else { return };
    // A group may read a key, so that several daemons can share it.
    let allowed = if as_authority { 0o600 } else { 0o640 };
    if mode & 0o007 != 0 {
        faults.push(format!("everybody can read {file}: chmod 600 {file}, or make a new key"));
    } else if mode & 0o777 & !(allowed | 0o100) != 0 {
        faults.push(format!("others can read or change {file}: chmod 600 {file}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_said_plainly() {
        let day = 86_400;
        let now = 1_900_000_000;
        let good = Facts {
            certificate: Certificate {
                common_name: "web1".into(),
                issuer: "Example root".into(),
                hosts: Vec::new(),
                identity: api::access::Identity::default(),
                not_before: now - day,
                not_after: now + 90 * day,
                serial: "01".into(),
                fingerprint: "sha256:00".into(),
                key: "sha256:00".into(),
                is_authority: false,
            },
            key: Key::Belongs { mode: 0o100_600 },
            chain: Chain {
                links: vec![Link {
                    name: "Example root".into(),
                    not_after: now + 900 * day,
                    is_for_machines: false,
                }],
                is_trusted: Some(true),
            },
            is_revoked: false,
            list_until: Some(now + day),
            as_authority: false,
        };
        let with = |change: &dyn Fn(&mut Facts)| {
            let mut facts = good.clone();
            change(&mut facts);
            facts
        };
        #[rustfmt::skip]
        let table: &[(Facts, &[&str])] = &[
            (good.clone(), &[]),
            (with(&|facts| facts.certificate.not_after = now - 3 * day),
                &["the certificate expired on 2030-03-14T17:46:40Z (3 days ago): issue another one"]),
            (with(&|facts| facts.certificate.not_after = now + 3 * day),
                &["the certificate expires soon, on 2030-03-20T17:46:40Z (3 days left): renew it"]),
            (with(&|facts| facts.certificate.not_before = now + 1),
                &["the certificate is not valid before 2030-03-17T17:46:41Z: is the clock right?"]),
            (with(&|facts| facts.is_revoked = true), &["the certificate is revoked: crl.pem lists it"]),
            (with(&|facts| facts.list_until = Some(now - 1)),
                &["crl.pem has expired: make a new one with domtool cert revoke"]),
            (with(&|facts| facts.certificate.is_authority = true),
                &["the certificate is that of an authority: daemons refuse it"]),
            (with(&|facts| facts.as_authority = true),
                &["the certificate is not that of an authority"]),
            (with(&|facts| facts.key = Key::NotChecked), &[]),
            (with(&|facts| facts.key = Key::Missing), &["key.pem is missing"]),
            (with(&|facts| facts.key = Key::Unreadable { why: "no".into() }),
                &["cannot read key.pem: no"]),
            (with(&|facts| facts.key = Key::Belongs { mode: 0o100_640 }), &[]),
            (with(&|facts| facts.key = Key::Belongs { mode: 0o100_660 }),
                &["others can read or change key.pem: chmod 600 key.pem"]),
            (with(&|facts| facts.key = Key::Other { mode: 0o100_644 }),
                &["key.pem is not the key of the certificate",
                  "everybody can read key.pem: chmod 600 key.pem, or make a new key"]),
            (with(&|facts| facts.chain.is_trusted = None), &[]),
            (with(&|facts| facts.chain.is_trusted = Some(false)),
                &["the chain does not lead to an authority in ca.pem; it ends with Example root"]),
            (with(&|facts| facts.chain = Chain { links: Vec::new(), is_trusted: Some(false) }),
                &["the chain does not lead to an authority in ca.pem; it ends with Example root"]),
            (with(&|facts| facts.chain.links[0].not_after = now - 2 * day),
                &["the authority Example root expired on 2030-03-15T17:46:40Z (2 days ago)"]),
        ];
        for (facts, want) in table {
            assert_eq!(faults(facts, now), *want, "{facts:?}");
        }
    }
}
