//! The key that signs images: a private key of OpenSSH.
// tidy: core

use ssh_key::private::{Ed25519Keypair, KeypairData};
use ssh_key::{Algorithm, HashAlg, LineEnding, PrivateKey};

use model::signing::contents::{CONTENTS_NAMESPACE, ContentsStatement};
use model::signing::openssh::PublicKey;
use model::signing::signature::Signature;
use model::signing::statement::{NAMESPACE, Statement};

/// A private key, ready to sign.
#[derive(Clone)]
pub struct SigningKey(PrivateKey);

/// A key that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    #[error("not an OpenSSH private key, as `ssh-keygen -t ed25519` makes it: {why}")]
    Format { why: String },
    #[error("unsupported kind of key, {kind}: images are signed with ssh-ed25519")]
    Kind { kind: String },
    #[error("the key is encrypted and needs a passphrase")]
    Encrypted,
    #[error("wrong passphrase of the key")]
    Passphrase,
    #[error("a key cannot be made: {why}")]
    Make { why: String },
    #[error("signing failed: {why}")]
    Sign { why: String },
}

impl SigningKey {
    /// Reads the text of a key file; `passphrase` decrypts an encrypted key.
    ///
    /// # Errors
    ///
    /// [`KeyError`]; [`KeyError::Encrypted`] if a passphrase is needed and none was given.
    pub fn read(text: &str, passphrase: Option<&str>) -> Result<Self, KeyError> {
        let key = PrivateKey::from_openssh(text)
            .map_err(|error| KeyError::Format { why: error.to_string() })?;
        if key.algorithm() != Algorithm::Ed25519 {
            return Err(KeyError::Kind { kind: key.algorithm().to_string() });
        }
        match (key.is_encrypted(), passphrase) {
            (false, _) => Ok(Self(key)),
            (true, None) => Err(KeyError::Encrypted),
            (true, Some(passphrase)) => {
                key.decrypt(passphrase).map(Self).map_err(|_| KeyError::Passphrase)
            }
        }
    }

    /// Returns the key, without a passphrase, that follows from a random `seed`.
    ///
    /// # Errors
    ///
    /// [`KeyError::Make`].
    pub fn from_seed(seed: &[u8; 32], comment: &str) -> Result<Self, KeyError> {
        let pair = KeypairData::from(Ed25519Keypair::from_seed(seed));
        let key = PrivateKey::new(pair, comment);
        key.map(Self).map_err(|error| KeyError::Make { why: error.to_string() })
    }

    /// Returns the text of a key file.
    ///
    /// # Errors
    ///
    /// [`KeyError::Make`].
    pub fn private_text(&self) -> Result<String, KeyError> {
        let text = self.0.to_openssh(LineEnding::LF);
        match text {
            Ok(text) => Ok(text.as_str().to_owned()),
            Err(error) => Err(KeyError::Make { why: error.to_string() }),
        }
    }

    /// Signs `statement`.
    pub fn sign(&self, statement: &Statement) -> Result<Signature, KeyError> {
        self.sign_text(NAMESPACE, statement.to_string())
    }

    /// Signs the content of computed files.
    pub fn sign_contents(&self, statement: &ContentsStatement) -> Result<Signature, KeyError> {
        self.sign_text(CONTENTS_NAMESPACE, statement.to_string())
    }

    fn sign_text(&self, namespace: &str, text: String) -> Result<Signature, KeyError> {
        let failed = |error: ssh_key::Error| KeyError::Sign { why: error.to_string() };
        let signature = self.0.sign(namespace, HashAlg::Sha512, text.as_bytes()).map_err(failed)?;
        let signature = signature.to_pem(LineEnding::LF).map_err(failed)?;
        Ok(Signature { statement: text, signature })
    }

    /// Returns the fingerprint of the key, as `ssh-keygen -l` shows it.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let key = self.0.public_key().key_data().ed25519().map(|key| PublicKey::new(key.0));
        key.map(|key| key.fingerprint()).unwrap_or_default()
    }

    /// Returns the line for a file of trusted keys.
    ///
    /// # Errors
    ///
    /// [`KeyError::Sign`] if its comment is not text.
    pub fn public_line(&self) -> Result<String, KeyError> {
        let line = self.0.public_key().to_openssh();
        line.map_err(|error| KeyError::Sign { why: error.to_string() })
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "SigningKey({})", self.fingerprint())
    }
}
