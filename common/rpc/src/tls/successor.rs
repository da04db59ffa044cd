//! Judges files that are to take the place of those in use, so that nobody is locked out by them.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

use super::credentials::Credentials;
use super::explain::explain;
use super::files::{Files, FilesDigest, ReadFile, TlsError};
use super::replacement::{ReplacementError, Shown, judge};
use super::tls_config::Security;
use super::trust::VerifiedPeer;
use api::certificate::Certificate;
use system::clock::since_epoch;

/// How a caller has shown who it is, and who it takes the server for.
#[derive(Debug, PartialEq, Eq)]
pub struct CallerProof {
    /// The certificate of the caller, and those between it and its authority.
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// The name that it has connected to; `None` if that was an address.
    pub(super) server_name: Option<String>,
    /// The files of this side that the connection was made with.
    pub(super) files: FilesDigest,
}

impl CallerProof {
    /// Returns which files of the server the connection was made with.
    #[must_use]
    pub fn files(&self) -> FilesDigest {
        self.files
    }
}

/// Why files lock a caller out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuccessorError {
    #[error("they cannot be used")]
    Files(#[from] TlsError),
    #[error("they do not accept the certificate of the caller: {why}")]
    Caller { why: String },
    #[error("the new certificate would not be accepted as that of {name}: {why}")]
    Own { name: String, why: String },
}

/// Returns the name, or the address, that a caller has connected to.
fn name_of(proof: &CallerProof, local: std::net::IpAddr) -> String {
    proof.server_name.clone().unwrap_or_else(|| local.to_canonical().to_string())
}

impl Security {
    /// Checks files that are to take the place of those in use: whether they fit together, whether
    /// the caller of `proof` would be accepted with them, and whether it would accept their
    /// certificate if it trusted the same authorities. `local` is the address that it has
    /// connected to.
    ///
    /// If the certificate in use is not of its own authorities, the new one need not be either.
    /// Returns the digest of the files; `None` without TLS.
    ///
    /// # Errors
    ///
    /// [`SuccessorError`] says what would lock the caller out.
    pub fn check_successor(
        &self,
        read: ReadFile<'_>,
        proof: &CallerProof,
        local: std::net::IpAddr,
    ) -> Result<Option<FilesDigest>, SuccessorError> {
        let Self::Tls(config) = self else { return Ok(None) };
        let present = config.credentials.borrow().clone();
        let dir = config.directory();
        let next = Credentials::of(dir, Files::of(dir, read)?)?;
        let now = UnixTime::since_unix_epoch(since_epoch());
        let refused = |error: rustls::Error| SuccessorError::Caller { why: explain(&error) };
        let then = next.trust.caller(&proof.chain, now).map_err(refused)?.identity;
        if let Ok(VerifiedPeer { identity, .. }) = present.trust.caller(&proof.chain, now) {
            let methods = api::methods().into_iter();
            let mut lost = methods
                .filter(|method| identity.may_call(method.name) && !then.may_call(method.name));
            if let Some(method) = lost.next() {
                let why = format!("it may not call {} any more", method.name);
                return Err(SuccessorError::Caller { why });
            }
        }
        let name = name_of(proof, local);
        let own = |credentials: &Credentials| {
            let server_name = ServerName::try_from(name.clone());
            let server_name = server_name.map_err(|error| error.to_string())?;
            let judged = credentials.trust.server(&credentials.own_chain, &server_name, now);
            judged.map(drop).map_err(|error| explain(&error))
        };
        match own(&next) {
            Err(why) if own(&present).is_ok() => Err(SuccessorError::Own { name, why }),
            _ => Ok(Some(next.digest)),
        }
    }

    /// Checks files of which only the certificate is another than in use, and is to take its place
    /// after its end: whether it gives the same machine nothing that it did not have. `proof` and
    /// `local` are those of the caller that brings it.
    ///
    /// # Errors
    ///
    /// [`ReplacementError`] says why it must not.
    pub fn check_replacement(
        &self,
        read: ReadFile<'_>,
        proof: &CallerProof,
        local: std::net::IpAddr,
    ) -> Result<Option<FilesDigest>, ReplacementError> {
        let Self::Tls(config) = self else { return Ok(None) };
        let present = config.credentials.borrow().clone();
        if self.present_files() != Some(present.digest) {
            return Err(ReplacementError::Changed);
        }
        let dir = config.directory();
        let next = Credentials::of(dir, Files::of(dir, read)?)?;
        let name = name_of(proof, local);
        // Both by the authorities in use.
        let shown = |credentials: &Credentials, at: Duration| {
            let (chain, at) = (&credentials.own_chain, UnixTime::since_unix_epoch(at));
            let server_name = ServerName::try_from(name.clone());
            let server_name = server_name.map_err(|error| error.to_string())?;
            let judged = present.trust.server(chain, &server_name, at);
            let judged = judged.and_then(|_| present.trust.caller(chain, at));
            let VerifiedPeer { identity, .. } = judged.map_err(|error| explain(&error))?;
            let Certificate { key, not_after, .. } = credentials.own.clone();
            Ok(Shown { key, not_after, identity })
        };
        let (now, end) = (since_epoch(), u64::try_from(present.own.not_after).unwrap_or_default());
        let before = shown(&present, Duration::from_secs(end))
            .map_err(|why| ReplacementError::Present { name: name.clone(), why })?;
        let then = shown(&next, now)
            .map_err(|why| ReplacementError::Refused { name: name.clone(), why })?;
        judge(&before, &then, now.as_secs().cast_signed())?;
        Ok(Some(next.digest))
    }

    /// Returns the digest of the files as they are now, whether or not they are in use; `None`
    /// without TLS, and if they cannot be read.
    #[must_use]
    pub fn present_files(&self) -> Option<FilesDigest> {
        Some(Files::read(self.directory()?).ok()?.digest)
    }

    /// Waits until the program uses other files than the connection of `proof` was made with.
    pub async fn replaced(&self, proof: Option<&CallerProof>) {
        let (Self::Tls(config), Some(proof)) = (self, proof) else {
            return std::future::pending().await;
        };
        let mut credentials = config.credentials.subscribe();
        let is_other = |credentials: &Arc<Credentials>| credentials.digest != proof.files;
        if credentials.wait_for(is_other).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
