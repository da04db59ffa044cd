//! Says what is wrong with a certificate and what lies beside it.
// tidy: core

use api::certificate::Certificate;

use super::{until, written};

/// One that ends in fewer days is told of.
const SOON_SECONDS: i64 = 14 * 86_400;

/// What is known of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// It was not looked for: a file was named, not a directory.
    NotLookedFor,
    /// There is none.
    Missing,
    /// It is the one of the certificate; with the mode of its file.
    Belongs { mode: u32 },
    /// It is another one; with the mode of its file.
    Other { mode: u32 },
    /// It cannot be read.
    Unreadable { why: String },
}

/// An authority that vouches for a certificate, directly or by another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) name: String,
    pub(super) not_after: i64,
}

/// What is known of the authorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// Those that vouch for it, the nearest first.
    pub(super) links: Vec<Link>,
    /// True if the last one is in `ca.pem`; `None` if there is no such file.
    pub(super) is_trusted: Option<bool>,
}

/// A certificate, and what was found with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) certificate: Certificate,
    pub(super) key: Key,
    pub(super) chain: Chain,
    /// A list beside it says that it is revoked.
    pub(super) is_revoked: bool,
    /// Until when the list beside it may be used, if there is one.
    pub(super) list_until: Option<i64>,
    /// True if it is meant to be one of an authority.
    pub(super) as_authority: bool,
}

/// What is wrong, in words; nothing if all is in order.
pub(super) fn faults(facts: &Facts, now: i64) -> Vec<String> {
    let mut faults = Vec::new();
    let certificate = &facts.certificate;
    if certificate.not_after < now {
        faults
            .push(format!("it ended on {}: issue another one", until(now, certificate.not_after)));
    } else if certificate.not_after - now < SOON_SECONDS {
        faults.push(format!("it ends soon, on {}: renew it", until(now, certificate.not_after)));
    }
    if certificate.not_before > now {
        faults.push(format!(
            "it is valid only from {} on: is the clock right?",
            written(certificate.not_before)
        ));
    }
    if facts.is_revoked {
        faults.push("it is revoked: crl.pem lists it".to_owned());
    }
    if facts.list_until.is_some_and(|until| until < now) {
        faults.push("crl.pem is too old: make it anew with domtool cert revoke".to_owned());
    }
    if certificate.is_authority && !facts.as_authority {
        faults.push("it is the certificate of an authority: no daemon takes it".to_owned());
    }
    if facts.as_authority && !certificate.is_authority {
        faults.push("it is not the certificate of an authority".to_owned());
    }
    key_faults(&facts.key, facts.as_authority, &mut faults);
    if facts.chain.is_trusted == Some(false) {
        let last = facts.chain.links.last().map_or(&certificate.issuer, |link| &link.name);
        faults.push(format!("no authority in ca.pem vouches for it, the last is {last}"));
    }
    for link in facts.chain.links.iter().filter(|link| link.not_after < now) {
        faults.push(format!("its authority {} ended on {}", link.name, until(now, link.not_after)));
    }
    faults
}

fn key_faults(key: &Key, as_authority: bool, faults: &mut Vec<String>) {
    let file = if as_authority { "ca.key" } else { "key.pem" };
    match key {
        Key::NotLookedFor => return,
        Key::Missing => faults.push(format!("there is no {file} beside it")),
        Key::Unreadable { why } => faults.push(format!("its key cannot be read: {why}")),
        Key::Other { .. } => faults.push(format!("{file} is not its key")),
        Key::Belongs { .. } => {}
    }
    let (Key::Belongs { mode } | Key::Other { mode }) = key else { return };
    // A group of its own may read a key, so that several daemons of one user group can.
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
                links: vec![Link { name: "Example root".into(), not_after: now + 900 * day }],
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
                &["it ended on 2030-03-14T17:46:40Z (3 days ago): issue another one"]),
            (with(&|facts| facts.certificate.not_after = now + 3 * day),
                &["it ends soon, on 2030-03-20T17:46:40Z (3 days left): renew it"]),
            (with(&|facts| facts.certificate.not_before = now + 1),
                &["it is valid only from 2030-03-17T17:46:41Z on: is the clock right?"]),
            (with(&|facts| facts.is_revoked = true), &["it is revoked: crl.pem lists it"]),
            (with(&|facts| facts.list_until = Some(now - 1)),
                &["crl.pem is too old: make it anew with domtool cert revoke"]),
            (with(&|facts| facts.certificate.is_authority = true),
                &["it is the certificate of an authority: no daemon takes it"]),
            (with(&|facts| facts.as_authority = true), &["it is not the certificate of an authority"]),
            (with(&|facts| facts.key = Key::NotLookedFor), &[]),
            (with(&|facts| facts.key = Key::Missing), &["there is no key.pem beside it"]),
            (with(&|facts| facts.key = Key::Unreadable { why: "no".into() }),
                &["its key cannot be read: no"]),
            (with(&|facts| facts.key = Key::Belongs { mode: 0o100_640 }), &[]),
            (with(&|facts| facts.key = Key::Belongs { mode: 0o100_660 }),
                &["others can read or change key.pem: chmod 600 key.pem"]),
            (with(&|facts| facts.key = Key::Other { mode: 0o100_644 }),
                &["key.pem is not its key",
                  "everybody can read key.pem: chmod 600 key.pem, or make a new key"]),
            (with(&|facts| facts.chain.is_trusted = None), &[]),
            (with(&|facts| facts.chain.is_trusted = Some(false)),
                &["no authority in ca.pem vouches for it, the last is Example root"]),
            (with(&|facts| facts.chain = Chain { links: Vec::new(), is_trusted: Some(false) }),
                &["no authority in ca.pem vouches for it, the last is Example root"]),
            (with(&|facts| facts.chain.links[0].not_after = now - 2 * day),
                &["its authority Example root ended on 2030-03-15T17:46:40Z (2 days ago)"]),
        ];
        for (facts, want) in table {
            assert_eq!(faults(facts, now), *want, "{facts:?}");
        }
    }
}
