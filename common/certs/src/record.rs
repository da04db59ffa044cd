//! Records of issued and revoked certificates: lines of JSON in files that only grow.
// tidy: core

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use api::certificate::Certificate;

/// An issued certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    /// What the holder is; absent if the certificate does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Host names and addresses of the holder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Patterns of the methods that the holder may call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub powers: Vec<String>,
    /// Groups of the holder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Start of validity, in seconds since 1970.
    pub not_before: i64,
    /// End of validity, in seconds since 1970.
    pub not_after: i64,
    /// True for the certificate of an authority.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_authority: bool,
    /// `sha256:` and the digest of the certificate.
    pub fingerprint: String,
    /// `sha256:` and the digest of its public key; absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Record {
    /// Returns the record of `certificate`.
    #[must_use]
    pub fn new(certificate: &Certificate) -> Self {
        let identity = &certificate.identity;
        Self {
            serial: certificate.serial.clone(),
            name: certificate.common_name.clone(),
            kind: identity.kind.name().map(str::to_owned),
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

/// Reason for a revocation, with the names of RFC 5280.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// No reason given
    #[default]
    Unspecified,
    /// Others have or may have the key
    KeyCompromise,
    /// Others have or may have the key of the authority
    CaCompromise,
    /// The holder has changed its organization
    AffiliationChanged,
    /// Another certificate replaces it
    Superseded,
    /// The machine or daemon no longer exists
    CessationOfOperation,
    /// The holder has lost the powers in it
    PrivilegeWithdrawn,
}

impl Reason {
    /// Returns true if the key is exposed, so that all certificates with it must be revoked.
    #[must_use]
    pub fn is_key(self) -> bool {
        matches!(self, Self::KeyCompromise | Self::CaCompromise)
    }
}

/// Identifies a certificate to revoke.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RevocationTarget {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    /// `sha256:` and the digest of its public key, if known.
    pub key: Option<String>,
}

impl RevocationTarget {
    /// Identifies `certificate`.
    #[must_use]
    pub fn from_certificate(certificate: &Certificate) -> Self {
        let Certificate { serial, common_name, key, .. } = certificate;
        Self { serial: serial.clone(), name: common_name.clone(), key: Some(key.clone()) }
    }

    /// Identifies the certificate of `record`.
    #[must_use]
    pub fn from_record(record: &Record) -> Self {
        let Record { serial, name, key, .. } = record;
        Self { serial: serial.clone(), name: name.clone(), key: key.clone() }
    }

    /// Returns true if the certificate of `record` has or may have the same key. If one of the keys
    /// is unknown, certificates of the same holder are assumed to share one.
    #[must_use]
    pub fn may_share_key(&self, record: &Record) -> bool {
        match (&self.key, &record.key) {
            (Some(one), Some(other)) => one == other,
            _ => self.name == record.name,
        }
    }
}

/// Whether new certificates may be issued for the key of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStatus {
    /// Not revoked.
    Good,
    /// A certificate with the key was revoked.
    Revoked,
    /// A certificate of the same holder was revoked for its key, but its record does not say which
    /// key. If the certificate is as old as such records, its key counts as revoked.
    Doubtful,
}

/// Returns the status of the key of `certificate`. A key is not used again for whatever reason a
/// certificate with it was revoked, because a new key costs nothing.
#[must_use]
pub fn key_status(certificate: &Certificate, revoked: &[Revocation]) -> KeyStatus {
    let has_key = |one: &Revocation| {
        one.serial == certificate.serial || one.key.as_ref() == Some(&certificate.key)
    };
    let is_doubtful = |one: &Revocation| {
        one.key.is_none() && one.reason.is_key() && one.name == certificate.common_name
    };
    if revoked.iter().any(has_key) {
        KeyStatus::Revoked
    } else if revoked.iter().any(is_doubtful) {
        KeyStatus::Doubtful
    } else {
        KeyStatus::Good
    }
}

/// A revoked certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Its serial number, in hexadecimal digits.
    pub serial: String,
    /// The common name of the holder.
    pub name: String,
    pub reason: Reason,
    /// Time of the revocation, in seconds since 1970.
    pub revoked_at: i64,
    /// `sha256:` and the digest of its public key, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// A line that cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[error("invalid line {line}")]
pub struct LineError {
    /// Number of the line, from 1.
    pub line: usize,
    pub source: serde_json::Error,
}

/// Encodes `row` as a line with its line feed.
///
/// # Panics
///
/// If `row` has maps whose keys are not strings.
#[must_use]
pub fn line(row: &impl Serialize) -> String {
    serde_json::to_string(row).expect("rows are structures with string keys") + "\n"
}

/// Returns the length of the complete lines in `bytes`. A line that was cut off when the machine
/// stopped has no line feed, and nothing depends on it.
#[must_use]
pub fn complete_lines(bytes: &[u8]) -> usize {
    bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)
}

/// Decodes the complete lines of `bytes`.
///
/// # Errors
///
/// [`LineError`] for the first invalid line.
pub fn rows<Row: DeserializeOwned>(bytes: &[u8]) -> Result<Vec<Row>, LineError> {
    let lines = bytes[..complete_lines(bytes)].split(|byte| *byte == b'\n').enumerate();
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
            kind: None,
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
        let stated = line(&Record { kind: Some("machine".into()), ..record.clone() });
        assert_eq!(stated, written.replace(",\"not_b", ",\"kind\":\"machine\",\"not_b"));
        let twice = format!("{written}{written}");
        for cut in written.len()..twice.len() {
            let cut = &twice.as_bytes()[..cut];
            assert_eq!(rows::<Record>(cut).unwrap(), std::slice::from_ref(&record));
            assert_eq!(complete_lines(cut), written.len());
        }
        assert_eq!(rows::<Record>(twice.as_bytes()).unwrap(), [record.clone(), record]);
        assert_eq!(rows::<Record>(b"").unwrap(), []);
        let error = rows::<Record>(format!("{written}junk\n").as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "invalid line 2");
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
            kind: None,
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
            let meant =
                RevocationTarget { serial: "01".into(), name: "web1".into(), key: key(digest) };
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
        use KeyStatus::{Doubtful, Good, Revoked};
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
            assert_eq!(key_status(&certificate, &revoked), want, "{revoked:?}");
        }
    }
}
