//! What an authority keeps of the certificates that it has issued and revoked: lines of JSON, to
//! which lines are only ever added.
// tidy: core

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use api::certificate::Certificate;

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    /// The host names and addresses that it is for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// What the holder may do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub powers: Vec<String>,
    /// The groups that the holder is in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Not valid before, in seconds since 1970.
    pub not_before: i64,
    /// Not valid after, in seconds since 1970.
    pub not_after: i64,
    /// True if it is an authority.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_authority: bool,
    /// `sha256:` and the digest of the certificate.
    pub fingerprint: String,
    /// `sha256:` and the digest of its public key; earlier records have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Record {
    /// What is kept of `certificate`.
    #[must_use]
    pub fn of(certificate: &Certificate) -> Self {
        let identity = &certificate.identity;
        Self {
            serial: certificate.serial.clone(),
            name: certificate.common_name.clone(),
            hosts: certificate.hosts.clone(),
            powers: identity.powers.patterns().map(str::to_owned).collect(),
            groups: identity.groups.iter().cloned().collect(),
            not_before: certificate.not_before,
            not_after: certificate.not_after,
            is_authority: certificate.is_authority,
            fingerprint: certificate.fingerprint.clone(),
            key: Some(certificate.key.clone()),
        }
    }
}

/// Why a certificate is revoked, in the words of RFC 5280.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// It is not said
    #[default]
    Unspecified,
    /// Somebody else has, or may have, the key
    KeyCompromise,
    /// The key of an authority is known to others
    CaCompromise,
    /// The holder belongs to others now
    AffiliationChanged,
    /// Another certificate takes its place
    Superseded,
    /// The machine or daemon is no more
    CessationOfOperation,
    /// The holder may no longer do what it says
    PrivilegeWithdrawn,
}

impl Reason {
    /// True if the key is the reason: no certificate with it may count any more.
    #[must_use]
    pub fn is_key(self) -> bool {
        matches!(self, Self::KeyCompromise | Self::CaCompromise)
    }
}

/// A certificate that is to be revoked, on record or not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Meant {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    /// `sha256:` and the digest of its public key, if it is known.
    pub key: Option<String>,
}

impl Meant {
    /// What names `certificate`.
    #[must_use]
    pub fn of(certificate: &Certificate) -> Self {
        let Certificate { serial, common_name, key, .. } = certificate;
        Self { serial: serial.clone(), name: common_name.clone(), key: Some(key.clone()) }
    }

    /// What names the certificate on `record`.
    #[must_use]
    pub fn on(record: &Record) -> Self {
        let Record { serial, name, key, .. } = record;
        Self { serial: serial.clone(), name: name.clone(), key: key.clone() }
    }

    /// True if the certificate on `record` has the key of this one, or may have it: where only one
    /// of them is known, those of one holder are taken to have one.
    #[must_use]
    pub fn may_share_key(&self, record: &Record) -> bool {
        match (&self.key, &record.key) {
            (Some(one), Some(other)) => one == other,
            _ => self.name == record.name,
        }
    }
}

/// Whether the key of a certificate may still be vouched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStanding {
    /// Nothing is known against it.
    Good,
    /// It must not be: a certificate with it was revoked.
    Revoked,
    /// A certificate of the same holder was revoked for its key, and which key that was is not on
    /// record. Then the key is as good as revoked, if the certificate is as old as such records.
    Doubtful,
}

/// What `revoked` says of the key of `certificate`. For whatever reason a certificate was revoked,
/// its key is not used again: it costs nothing to make another.
#[must_use]
pub fn key_standing(certificate: &Certificate, revoked: &[Revocation]) -> KeyStanding {
    let has_key = |one: &Revocation| {
        one.serial == certificate.serial || one.key.as_ref() == Some(&certificate.key)
    };
    let is_doubtful = |one: &Revocation| {
        one.key.is_none() && one.reason.is_key() && one.name == certificate.common_name
    };
    if revoked.iter().any(has_key) {
        KeyStanding::Revoked
    } else if revoked.iter().any(is_doubtful) {
        KeyStanding::Doubtful
    } else {
        KeyStanding::Good
    }
}

/// A certificate that counts no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    /// Why.
    pub reason: Reason,
    /// When, in seconds since 1970.
    pub revoked_at: i64,
    /// `sha256:` and the digest of its public key, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// A line that is none of those that are written.
#[derive(Debug, thiserror::Error)]
#[error("line {line} cannot be read")]
pub struct LineError {
    /// Which line, the first one being 1.
    pub line: usize,
    /// What is wrong with it.
    pub source: serde_json::Error,
}

/// One line, with its line feed.
///
/// # Panics
///
/// If `row` cannot be JSON, which every row here can.
#[must_use]
pub fn line(row: &impl Serialize) -> String {
    serde_json::to_string(row).expect("rows are plain structures, with texts as keys") + "\n"
}

/// The length of the lines of `bytes` that are whole: one that was cut off when the machine
/// stopped has no line feed, and nothing depends on it.
#[must_use]
pub fn whole(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)
}

/// The rows of the whole lines of `bytes`.
///
/// # Errors
///
/// [`LineError`] for the first line that is none.
pub fn rows<Row: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<Row>, LineError> {
    let lines = bytes[..whole(bytes)].split(|byte| *byte == b'\n').enumerate();
    lines
        .filter(|(_, line)| !line.is_empty())
        .map(|(index, line)| {
            serde_json::from_slice(line).map_err(|source| LineError { line: index + 1, source })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn lines_are_read_back_and_one_that_was_cut_off_is_not_there() {
        let record = Record {
            serial: "ab01".into(),
            name: "web1".into(),
            hosts: Vec::new(),
            powers: Vec::new(),
            groups: Vec::new(),
            not_before: 1,
            not_after: 2,
            is_authority: false,
            fingerprint: "sha256:00".into(),
            key: None,
        };
        let written = line(&record);
        expect![[r#"
            {"serial":"ab01","name":"web1","not_before":1,"not_after":2,"fingerprint":"sha256:00"}
        "#]]
        .assert_eq(&written);
        let twice = format!("{written}{written}");
        for cut in written.len()..twice.len() {
            let cut = &twice.as_bytes()[..cut];
            assert_eq!(rows::<Record>(cut).unwrap(), std::slice::from_ref(&record));
            assert_eq!(whole(cut), written.len());
        }
        assert_eq!(rows::<Record>(twice.as_bytes()).unwrap(), [record.clone(), record]);
        assert_eq!(rows::<Record>(b"").unwrap(), []);
        let error = rows::<Record>(format!("{written}junk\n").as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "line 2 cannot be read");
        let revocation = Revocation {
            serial: "ab01".into(),
            name: "web1".into(),
            reason: Reason::KeyCompromise,
            revoked_at: 5,
            key: None,
        };
        expect![[r#"
            {"serial":"ab01","name":"web1","reason":"key-compromise","revoked_at":5}
        "#]]
        .assert_eq(&line(&revocation));
        let revocation = Revocation { key: Some("11".into()), ..revocation };
        expect![[r#"
            {"serial":"ab01","name":"web1","reason":"key-compromise","revoked_at":5,"key":"11"}
        "#]]
        .assert_eq(&line(&revocation));
        assert_eq!(rows::<Revocation>(line(&revocation).as_bytes()).unwrap(), [revocation]);
    }

    fn key(key: &str) -> Option<String> {
        Some(key.to_owned()).filter(|key| !key.is_empty())
    }

    #[test]
    fn what_has_one_key_is_known_and_without_digests_what_has_one_holder() {
        let record = |name: &str, digest: &str| Record {
            serial: "02".into(),
            name: name.into(),
            hosts: Vec::new(),
            powers: Vec::new(),
            groups: Vec::new(),
            not_before: 1,
            not_after: 2,
            is_authority: false,
            fingerprint: "sha256:00".into(),
            key: key(digest),
        };
        let table = [
            ("a", record("web1", "a"), true),
            ("a", record("web9", "a"), true),
            ("a", record("web1", "b"), false),
            ("a", record("web1", ""), true),
            ("a", record("web9", ""), false),
            ("", record("web1", "b"), true),
            ("", record("web1", ""), true),
            ("", record("web9", "b"), false),
        ];
        for (digest, record, want) in table {
            let meant = Meant { serial: "01".into(), name: "web1".into(), key: key(digest) };
            assert_eq!(meant.may_share_key(&record), want, "{digest} {record:?}");
        }
    }

    #[test]
    fn a_key_is_revoked_with_any_certificate_that_has_it() {
        let certificate = Certificate {
            common_name: "web1".into(),
            issuer: "root".into(),
            hosts: Vec::new(),
            identity: api::access::Identity::default(),
            not_before: 0,
            not_after: 9,
            serial: "02".into(),
            fingerprint: "sha256:00".into(),
            key: "a".into(),
            is_authority: false,
        };
        let revocation = |serial: &str, name: &str, digest: &str, reason| Revocation {
            serial: serial.into(),
            name: name.into(),
            reason,
            revoked_at: 5,
            key: key(digest),
        };
        use KeyStanding::{Doubtful, Good, Revoked};
        let (plain, stolen) = (Reason::Unspecified, Reason::KeyCompromise);
        let table = [
            (vec![], Good),
            (vec![revocation("02", "web1", "", plain)], Revoked),
            (vec![revocation("01", "web1", "a", plain)], Revoked),
            (vec![revocation("01", "web9", "a", stolen)], Revoked),
            (vec![revocation("01", "web1", "b", stolen)], Good),
            (vec![revocation("01", "web1", "", stolen)], Doubtful),
            (vec![revocation("01", "web1", "", plain)], Good),
            (vec![revocation("01", "web9", "", stolen)], Good),
            (
                vec![revocation("01", "web1", "", stolen), revocation("03", "web1", "a", plain)],
                Revoked,
            ),
        ];
        for (revoked, want) in table {
            assert_eq!(key_standing(&certificate, &revoked), want, "{revoked:?}");
        }
    }
}
