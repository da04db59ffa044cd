//! The settings of a bucket: its address, credentials and limits.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// The settings of a bucket.
#[derive(Clone, Debug)]
pub struct BucketSettings {
    pub bucket: String,
    /// The prefix of all keys; may be empty.
    pub prefix: String,
    /// The address of the server, if it is not that of the region of AWS.
    pub endpoint: Option<String>,
    /// The region.
    pub region: Option<String>,
    /// A file with the credentials, as `~/.aws/credentials`.
    pub credentials: Option<PathBuf>,
    /// A file with the certificates of authorities that vouch for the server, beside those of the
    /// system.
    pub authorities: Option<PathBuf>,
    /// How long an object must be unneeded before it is removed, in seconds.
    pub unneeded_for: Duration,
    /// How much of this server's own disk objects may take, in bytes.
    pub cache_bytes_max: u64,
}

/// Why a text is not the address of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketAddressError {
    #[error("`{text}` is no bucket: write s3://NAME or s3://NAME/PREFIX")]
    Form { text: String },
    #[error("`{name}` is no name of a bucket: 3 to 63 of a-z, 0-9, `.` and `-`")]
    Name { name: String },
    #[error(
        "the prefix `{prefix}` has something else in it than a-z, A-Z, 0-9, `.`, `_`, `-`, `/`"
    )]
    Prefix { prefix: String },
}

/// The bucket and the prefix of `s3://NAME/PREFIX`.
pub fn address(text: &str) -> Result<(String, String), BucketAddressError> {
    let form = || BucketAddressError::Form { text: text.to_owned() };
    let rest = text.strip_prefix("s3://").ok_or_else(form)?;
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let is_name =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-".contains(&byte);
    if !(3..=63).contains(&name.len()) || !name.bytes().all(is_name) {
        return Err(BucketAddressError::Name { name: name.to_owned() });
    }
    let prefix = prefix.trim_end_matches('/');
    let is_part = |part: &str| {
        let is_key = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        !["", ".", ".."].contains(&part) && part.bytes().all(is_key)
    };
    let is_prefix = prefix.is_empty() || prefix.split('/').all(is_part);
    // Enough is left for the name of an image.
    if !is_prefix || prefix.len() > 100 {
        return Err(BucketAddressError::Prefix { prefix: prefix.to_owned() });
    }
    Ok((name.to_owned(), prefix.to_owned()))
}

/// Credentials for a bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketCredentials {
    pub key_id: String,
    pub secret: String,
    /// The session token of temporary keys.
    pub token: Option<String>,
}

/// The credentials of `profile` in a file as `~/.aws/credentials`.
#[must_use]
pub fn credentials(text: &str, profile: &str) -> Option<BucketCredentials> {
    let mut current = None;
    let (mut key_id, mut secret, mut token) = (None, None, None);
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            current = Some(name.trim());
            continue;
        }
        // A file without sections is of one profile.
        if current.is_some_and(|name| name != profile) {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = Some(value.trim().to_owned());
        match name.trim() {
            "aws_access_key_id" => key_id = value,
            "aws_secret_access_key" => secret = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    Some(BucketCredentials { key_id: key_id?, secret: secret?, token })
}

impl BucketSettings {
    /// The file with the credentials, if there is one: the one that was named, one that systemd
    /// gives, or that of the user, unless the environment has them.
    #[must_use]
    pub fn credentials_file(&self) -> Option<PathBuf> {
        if let Some(path) = &self.credentials {
            return Some(path.clone());
        }
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let of_systemd = set("CREDENTIALS_DIRECTORY").map(|path| Path::new(&path).join("bucket"));
        if let Some(path) = of_systemd.filter(|path| path.exists()) {
            return Some(path);
        }
        if set("AWS_ACCESS_KEY_ID").is_some() {
            return None;
        }
        let of_user = set("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
        let of_home = || set("HOME").map(|home| Path::new(&home).join(".aws/credentials"));
        of_user.or_else(of_home).filter(|path| path.exists())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused() {
        let pair = |name: &str, prefix: &str| Ok((name.to_owned(), prefix.to_owned()));
        assert_eq!(address("s3://images"), pair("images", ""));
        assert_eq!(address("s3://my.images/"), pair("my.images", ""));
        assert_eq!(address("s3://images/eu/prod/"), pair("images", "eu/prod"));
        for text in
            ["images", "https://images", "s3://", "s3://x", "s3://Images", "s3://images/a//b"]
        {
            assert!(address(text).is_err(), "{text}");
        }
        assert!(address("s3://images/../x").is_err());
        assert!(address(&format!("s3://images/{}", "x".repeat(101))).is_err());
    }

    #[test]
    fn credentials_are_those_of_the_profile() {
        let text = "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\
                    [other]\naws_access_key_id=C\naws_secret_access_key=D\naws_session_token=E\n";
        let of = |profile| {
            credentials(text, profile)
                .map(|found| (found.key_id, found.secret, found.token.unwrap_or_default()))
        };
        let triple = |a: &str, b: &str, c: &str| Some((a.to_owned(), b.to_owned(), c.to_owned()));
        assert_eq!(of("default"), triple("A", "B=", ""));
        assert_eq!(of("other"), triple("C", "D", "E"));
        assert_eq!(of("none"), None);
        let bare = credentials("aws_access_key_id=A\naws_secret_access_key=B\n", "default");
        assert_eq!(bare.map(|found| found.key_id), Some("A".to_owned()));
    }
}
