//! Signed images: what is signed, by which keys, and whether the signatures are enough.
//!
//! What is signed is a [`Statement`]: a short text that binds the name of an image, the digest of
//! its signed part ([`crate::image::Content::digest`]), when it was signed, and until when that
//! counts. It is signed with ed25519 in the format `SSHSIG` of OpenSSH, so that `ssh-keygen -Y`
//! makes and verifies the same signatures. `docs/IMAGE-FORMAT.md` has the bytes.
//!
//! An image server keeps signatures and trusts nobody; a machine has a list of keys of its own
//! ([`TrustedKeys`]), and [`endorse`] says whether enough of them stand behind an image.

pub mod contents;
pub mod endorsement;
pub mod keys;
pub mod openssh;
pub mod signature;
pub mod signers;
pub mod statement;

pub use contents::ContentsStatement;
pub use endorsement::{Endorsed, Policy, Unendorsed, endorse};
pub use keys::TrustedKeys;
pub use signature::{Checked, SIGNATURES_MAX, Signature, SignatureError};
pub use signers::ContentSigner;
pub use statement::{NAMESPACE, Statement, StatementError};
