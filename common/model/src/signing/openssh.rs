//! The public formats of OpenSSH, for ed25519 only: public keys and `SSHSIG` signatures.
//!
//! The signature is PEM armor around the blob of OpenSSH's document `PROTOCOL.sshsig`. The parser
//! is strict: every byte must belong to the format, and nothing may follow it. Private keys are
//! read
//! in the crate `certs` only.

use data_encoding::{BASE64, BASE64_NOPAD};
use ring::signature::{ED25519, UnparsedPublicKey};
use sha2::{Digest as _, Sha256, Sha512};

/// The only key type that is accepted.
pub const KEY_TYPE: &str = "ssh-ed25519";

const PEM_BEGIN: &str = "-----BEGIN SSH SIGNATURE-----";
const PEM_END: &str = "-----END SSH SIGNATURE-----";
const MAGIC: &[u8] = b"SSHSIG";
const VERSION: u32 = 1;

/// An ed25519 public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

/// Records why a key or a signature failed to parse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Invalid {
    /// The key has another type.
    KeyType(String),
    Format(&'static str),
}

impl PublicKey {
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Parses a line of a `.pub` file. Returns the key and its comment.
    pub(super) fn parse_line(line: &str) -> Result<(Self, &str), Invalid> {
        let (key_type, rest) = line.split_once(' ').ok_or(Invalid::Format("no key"))?;
        let (text, comment) = rest.split_once(' ').unwrap_or((rest, ""));
        if key_type != KEY_TYPE {
            return Err(Invalid::KeyType(key_type.to_owned()));
        }
        let blob = BASE64.decode(text.as_bytes()).map_err(|_| Invalid::Format("invalid base64"))?;
        Ok((Self::from_blob(&blob)?, comment.trim()))
    }

    fn from_blob(blob: &[u8]) -> Result<Self, Invalid> {
        let bytes = typed_value(blob, "the public key is cut short")?;
        bytes.try_into().map(Self).map_err(|_| Invalid::Format("the public key is not of 32 bytes"))
    }

    fn blob(&self) -> Vec<u8> {
        let mut blob = Vec::new();
        put_string(&mut blob, KEY_TYPE.as_bytes());
        put_string(&mut blob, &self.0);
        blob
    }

    /// Returns the line of a `.pub` file, without a comment.
    pub(super) fn to_line(self) -> String {
        format!("{KEY_TYPE} {}", BASE64.encode(&self.blob()))
    }

    /// Returns the fingerprint, as `ssh-keygen -l` shows it.
    pub fn fingerprint(&self) -> String {
        format!("SHA256:{}", BASE64_NOPAD.encode(&Sha256::digest(self.blob())))
    }
}

/// A signature that was parsed, and not yet verified.
#[derive(Debug)]
pub(super) struct SshSignature {
    pub(super) key: PublicKey,
    /// The purpose for which it was made.
    pub(super) namespace: Vec<u8>,
    reserved: Vec<u8>,
    hash: Hash,
    signature: [u8; 64],
}

#[derive(Clone, Copy, Debug)]
enum Hash {
    Sha256,
    Sha512,
}

impl SshSignature {
    /// Parses the PEM text that `ssh-keygen -Y sign` writes.
    pub(super) fn parse(text: &str) -> Result<Self, Invalid> {
        let text = text.trim_end_matches(['\r', '\n']);
        let inner = text.strip_prefix(PEM_BEGIN).and_then(|text| text.strip_suffix(PEM_END));
        let inner = inner.ok_or(Invalid::Format("the PEM armor is missing"))?;
        if !inner.starts_with(['\r', '\n']) || !inner.ends_with('\n') {
            return Err(Invalid::Format("the PEM armor has no lines of its own"));
        }
        let base64: String = inner.chars().filter(|char| !matches!(char, '\r' | '\n')).collect();
        let blob =
            BASE64.decode(base64.as_bytes()).map_err(|_| Invalid::Format("invalid base64"))?;
        Self::from_blob(&blob)
    }

    fn from_blob(blob: &[u8]) -> Result<Self, Invalid> {
        const CUT: &str = "the signature is cut short";
        let rest =
            blob.strip_prefix(MAGIC).ok_or(Invalid::Format("it does not begin with SSHSIG"))?;
        let (version, mut rest) = rest.split_first_chunk().ok_or(Invalid::Format(CUT))?;
        if u32::from_be_bytes(*version) != VERSION {
            return Err(Invalid::Format("unknown version"));
        }
        let mut next = || take_string(&mut rest).ok_or(Invalid::Format(CUT));
        let (key, namespace, reserved) = (next()?, next()?, next()?);
        let (hash, signature) = (next()?, next()?);
        if !rest.is_empty() {
            return Err(Invalid::Format("bytes follow the signature"));
        }
        let hash = match hash {
            b"sha256" => Hash::Sha256,
            b"sha512" => Hash::Sha512,
            _ => return Err(Invalid::Format("unknown hash algorithm")),
        };
        if namespace.is_empty() {
            return Err(Invalid::Format("the namespace is empty"));
        }
        Ok(Self {
            key: PublicKey::from_blob(key)?,
            namespace: namespace.to_vec(),
            reserved: reserved.to_vec(),
            hash,
            signature: typed_value(signature, CUT)?
                .try_into()
                .map_err(|_| Invalid::Format("the signature is not of 64 bytes"))?,
        })
    }

    /// Returns true if the key signed `message`.
    pub(super) fn verifies(&self, message: &[u8]) -> bool {
        let (hash, digest) = match self.hash {
            Hash::Sha256 => ("sha256", Sha256::digest(message).to_vec()),
            Hash::Sha512 => ("sha512", Sha512::digest(message).to_vec()),
        };
        let mut signed = MAGIC.to_vec();
        for field in [&self.namespace, &self.reserved, hash.as_bytes(), &digest] {
            put_string(&mut signed, field);
        }
        UnparsedPublicKey::new(&ED25519, self.key.0).verify(&signed, &self.signature).is_ok()
    }
}

/// Returns the value of a key or signature: a type, which must be [`KEY_TYPE`], and the value.
fn typed_value<'a>(mut blob: &'a [u8], cut: &'static str) -> Result<&'a [u8], Invalid> {
    let key_type = take_string(&mut blob).ok_or(Invalid::Format(cut))?;
    if key_type != KEY_TYPE.as_bytes() {
        return Err(Invalid::KeyType(crate::escape::escape(key_type)));
    }
    let value = take_string(&mut blob).ok_or(Invalid::Format(cut))?;
    if blob.is_empty() { Ok(value) } else { Err(Invalid::Format("bytes follow the value")) }
}

/// Takes a string of the SSH protocol: its length as four bytes, then the bytes.
fn take_string<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, after) = rest.split_first_chunk()?;
    let (string, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    *rest = after;
    Some(string)
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend(u32::try_from(string.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend(string);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

    use super::*;

    /// Made by `ssh-keygen -Y sign -n file` with keys that nobody uses.
    const ED25519_SIGNATURE: &str = include_str!("../../../certs/tests/keys/other-namespace.sig");
    const ECDSA_SIGNATURE: &str = include_str!("../../../certs/tests/keys/ecdsa.sig");

    fn blob(text: &str) -> Vec<u8> {
        let lines: String = text.lines().filter(|line| !line.starts_with('-')).collect();
        BASE64.decode(lines.as_bytes()).unwrap()
    }

    fn armored(blob: &[u8]) -> String {
        format!("{PEM_BEGIN}\n{}\n{PEM_END}\n", BASE64.encode(blob))
    }

    #[test]
    fn a_signature_is_parsed_whole_or_refused() {
        let good = blob(ED25519_SIGNATURE);
        let parsed = SshSignature::parse(ED25519_SIGNATURE).unwrap();
        assert_eq!(parsed.namespace, b"file");
        assert!(!parsed.verifies(b"another message"));
        SshSignature::parse(&armored(&good)).unwrap();
        SshSignature::parse(&ED25519_SIGNATURE.replace('\n', "\r\n")).unwrap();
        for length in 0..good.len() {
            assert!(SshSignature::from_blob(&good[..length]).is_err(), "{length} bytes");
        }
        assert!(SshSignature::from_blob(&[good.as_slice(), b"\0"].concat()).is_err());
        // No length that the blob claims leads behind its end.
        for index in 0..good.len() - 3 {
            let mut bytes = good.clone();
            bytes[index..index + 4].fill(0xff);
            let _ = SshSignature::from_blob(&bytes).map(|signature| signature.verifies(b""));
        }
        assert_eq!(
            SshSignature::parse(ECDSA_SIGNATURE).unwrap_err(),
            Invalid::KeyType("ecdsa-sha2-nistp256".to_owned())
        );
    }

    #[test]
    fn the_armor_is_strict() {
        let good = ED25519_SIGNATURE;
        let table = [
            "".to_owned(),
            "x".to_owned(),
            PEM_BEGIN.to_owned(),
            format!("{PEM_BEGIN}{PEM_END}"),
            format!("{PEM_BEGIN}\n{PEM_END}"),
            format!("x{good}"),
            format!("{good}x"),
            format!("{good}{good}"),
            good.replace("U1NIU0lH", "U1NIU0l*"),
            good.replace("U1NIU0lH", "U1NI U0lH"),
            good.replace("U1NIU0lH", "U1NIU0lI"),
            good.replace("P8L\n", "P8L=\n"),
            good.replace("P8L\n", "P8\n"),
        ];
        for text in table {
            assert!(SshSignature::parse(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_key_is_parsed_or_refused() {
        let mut key = Vec::new();
        put_string(&mut key, KEY_TYPE.as_bytes());
        put_string(&mut key, &[7; 32]);
        let line = |blob: &[u8]| format!("{KEY_TYPE} {} a comment ", BASE64.encode(blob));
        assert_eq!(PublicKey::parse_line(&line(&key)), Ok((PublicKey([7; 32]), "a comment")));
        for length in 0..key.len() {
            assert!(PublicKey::parse_line(&line(&key[..length])).is_err(), "{length} bytes");
        }
        assert!(PublicKey::parse_line(&line(&[key.as_slice(), b"\0"].concat())).is_err());
        for index in 0..19 {
            let mut bytes = key.clone();
            bytes[index] ^= 1;
            assert!(PublicKey::parse_line(&line(&bytes)).is_err(), "byte {index}");
        }
        for text in ["", "ssh-ed25519", "ssh-ed25519 ", "ssh-rsa AAAA", "ssh-ed25519 AAA"] {
            assert!(PublicKey::parse_line(text).is_err(), "{text}");
        }
    }
}
