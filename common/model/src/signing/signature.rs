//! One signature: a statement, and what `ssh-keygen -Y sign` makes of it.

use serde::{Deserialize, Serialize};

use super::openssh::{Invalid, KEY_TYPE, PublicKey, SshSignature};
use super::statement::{NAMESPACE, STATEMENT_BYTES_MAX, Statement, StatementError};
use crate::image::ImageName;
use crate::object::ObjectId;

/// The most signatures that one image has.
pub const SIGNATURES_MAX: usize = 16;

/// The longest signature, in bytes. One of ed25519 has about 320.
pub const SIGNATURE_BYTES_MAX: usize = 2_048;

/// A statement that somebody signed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The text that is signed.
    pub statement: String,
    /// The signature, as `ssh-keygen -Y sign` writes it.
    pub signature: String,
}

/// A signature that says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// It is no statement that is signed.
    #[error("what is signed is no statement on an image")]
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
    /// It is no signature of OpenSSH.
    #[error("it is no signature by an ssh-ed25519 key, as `ssh-keygen -Y sign` makes it: {why}")]
    Format {
        /// What is wrong.
        why: String,
    },
    /// It is by a key of another kind.
    #[error("it is by a key of the kind {kind}: only {KEY_TYPE} counts")]
    Kind {
        /// Which.
        kind: String,
    },
    /// It was made for another purpose.
    #[error("it was made for `{namespace}`, not for `{NAMESPACE}`")]
    Namespace {
        /// For which.
        namespace: String,
    },
    /// The key did not sign this text.
    #[error("the key {key} did not sign this statement")]
    Wrong {
        /// The fingerprint of the key.
        key: String,
    },
    /// It is about another image.
    #[error("it is about the image {image} with the digest {digest}")]
    OtherImage {
        /// The name that it has.
        image: ImageName,
        /// The digest that it has.
        digest: ObjectId,
    },
}

/// What a signature says, and by which key. Whether that key is trusted is not said.
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
    /// Reads it, and verifies that the key that it names has signed the statement.
    ///
    /// # Errors
    ///
    /// [`SignatureError`].
    pub fn check(&self) -> Result<Checked, SignatureError> {
        let statement: Statement =
            self.statement.parse().map_err(|source| SignatureError::Statement { source })?;
        let length = self.signature.len();
        if length > SIGNATURE_BYTES_MAX {
            return Err(SignatureError::TooLong { length });
        }
        let signature = SshSignature::parse(&self.signature).map_err(|invalid| match invalid {
            Invalid::KeyType(kind) => SignatureError::Kind { kind },
            Invalid::Format(why) => SignatureError::Format { why: why.to_owned() },
        })?;
        let key = signature.key;
        if signature.namespace != NAMESPACE.as_bytes() {
            let namespace = crate::escape::escape(&signature.namespace);
            return Err(SignatureError::Namespace { namespace });
        }
        if !signature.verifies(self.statement.as_bytes()) {
            return Err(SignatureError::Wrong { key: key.fingerprint() });
        }
        Ok(Checked { statement, key })
    }

    /// As [`Signature::check`], and refuses one that is not about this image.
    ///
    /// # Errors
    ///
    /// [`SignatureError`].
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

/// Signatures that an image cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignaturesError {
    /// One says nothing of this image.
    #[error("signature {number} is refused")]
    Bad {
        /// Which, from 1 on.
        number: usize,
        /// Why.
        #[source]
        source: SignatureError,
    },
    /// One is older than what is there of the same key.
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
    /// One is to be removed that is not there.
    #[error("there is no signature by {key}")]
    NotThere {
        /// The fingerprint.
        key: String,
    },
}

/// The signatures of an image when those by the keys `remove` are taken from `have` and `add` is
/// added. Each key has one: a later one takes the place of the former.
///
/// # Errors
///
/// [`SignaturesError`].
pub fn changed(
    have: &[Signature],
    add: &[Signature],
    remove: &[String],
    (image, digest): (&ImageName, &ObjectId),
) -> Result<Vec<Signature>, SignaturesError> {
    let mut all: Vec<(Checked, Signature)> = Vec::new();
    for signature in have {
        // What is on the disk was checked when it came; what does not count any more may go.
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

/// True if what is to be read is short enough to be looked at: for callers that take signatures
/// from somebody.
#[must_use]
pub fn are_bounded(signatures: &[Signature]) -> bool {
    signatures.len() <= SIGNATURES_MAX
        && signatures.iter().all(|signature| {
            signature.statement.len() <= STATEMENT_BYTES_MAX
                && signature.signature.len() <= SIGNATURE_BYTES_MAX
        })
}
