//! One signature: a statement, and its signature by `ssh-keygen -Y sign`.

use serde::{Deserialize, Serialize};

use super::openssh::{Invalid, KEY_TYPE, PublicKey, SshSignature};
use super::statement::{NAMESPACE, STATEMENT_BYTES_MAX, Statement, StatementError};
use crate::JsonSchema;
use crate::image::ImageName;
use crate::object::ObjectId;

/// The most signatures that one image has.
pub const SIGNATURES_MAX: usize = 16;

/// The longest signature, in bytes. One of ed25519 has about 320.
pub const SIGNATURE_BYTES_MAX: usize = 2_048;

/// A signed statement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Signature {
    /// The text that is signed.
    pub statement: String,
    /// The signature, as `ssh-keygen -Y sign` writes it.
    pub signature: String,
}

/// Why a signature is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The signed text is not a statement.
    #[error("the signed text is not a statement")]
    Statement {
        /// What is wrong with it.
        #[source]
        source: StatementError,
    },
    /// The signature is too long.
    #[error("a signature has at most {SIGNATURE_BYTES_MAX} bytes, this has {length}")]
    TooLong {
        /// Its length, in bytes.
        length: usize,
    },
    /// It is not a signature of OpenSSH.
    #[error("it is no signature by an ssh-ed25519 key, as `ssh-keygen -Y sign` makes it: {why}")]
    Format {
        /// What is wrong.
        why: String,
    },
    /// It is by a key of another kind.
    #[error("it is by a key of the kind {kind}: only {KEY_TYPE} counts")]
    Kind { kind: String },
    /// It was made for another purpose.
    #[error("it was made for `{namespace}`, not for `{wanted}`")]
    Namespace { namespace: String, wanted: &'static str },
    /// The key did not sign this text.
    #[error("the key {key} did not sign this statement")]
    Wrong {
        /// The fingerprint of the key.
        key: String,
    },
    /// It is about another image.
    #[error("it is about the image {image} with the digest {digest}")]
    OtherImage { image: ImageName, digest: ObjectId },
}

/// A verified statement with its key, which may not be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// What is signed.
    pub statement: Statement,
    /// The key that signed it.
    key: PublicKey,
}

impl Checked {
    /// The fingerprint of the key, as `ssh-keygen -l` shows it.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        self.key.fingerprint()
    }

    /// The key itself.
    pub(super) fn key(&self) -> &PublicKey {
        &self.key
    }
}

impl Signature {
    /// Parses the signature, and verifies that its key has signed the statement.
    pub fn check(&self) -> Result<Checked, SignatureError> {
        let statement: Statement =
            self.statement.parse().map_err(|source| SignatureError::Statement { source })?;
        Ok(Checked { statement, key: self.key(NAMESPACE)? })
    }

    /// Verifies that the statement was signed for this purpose, and returns the key that did.
    pub(super) fn key(&self, wanted: &'static str) -> Result<PublicKey, SignatureError> {
        let length = self.signature.len();
        if length > SIGNATURE_BYTES_MAX {
            return Err(SignatureError::TooLong { length });
        }
        let signature = SshSignature::parse(&self.signature).map_err(|invalid| match invalid {
            Invalid::KeyType(kind) => SignatureError::Kind { kind },
            Invalid::Format(why) => SignatureError::Format { why: why.to_owned() },
        })?;
        let key = signature.key;
        if signature.namespace != wanted.as_bytes() {
            let namespace = crate::escape::escape(&signature.namespace);
            return Err(SignatureError::Namespace { namespace, wanted });
        }
        if !signature.verifies(self.statement.as_bytes()) {
            return Err(SignatureError::Wrong { key: key.fingerprint() });
        }
        Ok(key)
    }

    /// As [`Signature::check`], and refuses one that is not about this image.
    pub fn check_for(
        &self,
        image: &ImageName,
        digest: &ObjectId,
    ) -> Result<Checked, SignatureError> {
        let checked = self.check()?;
        if checked.statement.image != *image || checked.statement.digest != *digest {
            let Statement { image, digest, .. } = checked.statement;
            return Err(SignatureError::OtherImage { image, digest });
        }
        Ok(checked)
    }
}

/// Why signatures are not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignaturesError {
    /// A signature is not for this image.
    #[error("signature {number} is refused")]
    Bad {
        /// The number of the signature, from 1.
        number: usize,
        #[source]
        source: SignatureError,
    },
    /// A signature is older than the existing one of the same key.
    #[error("a signature by {key} is there that is newer than this")]
    Older {
        /// The fingerprint of the key.
        key: String,
    },
    /// There are too many.
    #[error(
        "an image has at most {SIGNATURES_MAX} signatures; `imagetool sign NAME --remove \
         FINGERPRINT` takes one away"
    )]
    TooMany,
    /// A signature to be removed does not exist.
    #[error("there is no signature by {key}")]
    NotThere {
        /// The fingerprint.
        key: String,
    },
}

/// Returns the signatures `have` without those of the keys `remove`, and with `add`. An image has
/// one signature of each key; a new one replaces the former.
pub fn changed(
    have: &[Signature],
    add: &[Signature],
    remove: &[String],
    (image, digest): (&ImageName, &ObjectId),
) -> Result<Vec<Signature>, SignaturesError> {
    let mut all: Vec<(Checked, Signature)> = Vec::new();
    for signature in have {
        // Stored signatures were checked when they were added; invalid ones may be removed.
        if let Ok(checked) = signature.check_for(image, digest) {
            all.push((checked, signature.clone()));
        }
    }
    for key in remove {
        let before = all.len();
        all.retain(|(checked, _)| checked.fingerprint() != *key);
        if all.len() == before {
            return Err(SignaturesError::NotThere { key: key.clone() });
        }
    }
    if add.len() > SIGNATURES_MAX {
        return Err(SignaturesError::TooMany);
    }
    for (index, signature) in add.iter().enumerate() {
        let checked = signature
            .check_for(image, digest)
            .map_err(|source| SignaturesError::Bad { number: index + 1, source })?;
        let former = all.iter_mut().find(|(former, _)| former.key == checked.key);
        match former {
            Some((former, _)) if former.statement.signed > checked.statement.signed => {
                return Err(SignaturesError::Older { key: checked.fingerprint() });
            }
            Some(former) => *former = (checked, signature.clone()),
            None => all.push((checked, signature.clone())),
        }
    }
    if all.len() > SIGNATURES_MAX {
        return Err(SignaturesError::TooMany);
    }
    Ok(all.into_iter().map(|(_, signature)| signature).collect())
}

/// How many signatures are parsed, and how long they may be: for callers that get them from others.
#[derive(Clone, Copy, Debug)]
pub struct SignatureLimits {
    /// The most signatures.
    pub count: usize,
    /// The longest statement, in bytes.
    pub statement_bytes: usize,
}

/// The signatures of an image.
pub const IMAGE_SIGNATURES: SignatureLimits =
    SignatureLimits { count: SIGNATURES_MAX, statement_bytes: STATEMENT_BYTES_MAX };

impl SignatureLimits {
    /// Returns true if the signatures are few and short enough to be parsed.
    #[must_use]
    pub fn allow(self, signatures: &[Signature]) -> bool {
        signatures.len() <= self.count
            && signatures.iter().all(|signature| {
                signature.statement.len() <= self.statement_bytes
                    && signature.signature.len() <= SIGNATURE_BYTES_MAX
            })
    }
}
