//! Connects the verification in rustls handshakes to [`Trust`].

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::trust::Trust;
use api::certificate::Certificate;

/// Verifies callers; accepts callers without a certificate.
#[derive(Debug)]
pub(super) struct Callers {
    pub(super) trust: Arc<Trust>,
    pub(super) subjects: Vec<DistinguishedName>,
}

/// Verifies servers, and accepts machines whose certificate ended at most so long ago.
#[derive(Debug)]
pub(super) struct Servers {
    pub(super) trust: Arc<Trust>,
    pub(super) ended_within: Duration,
}

fn chain<'a>(leaf: &CertificateDer<'a>, between: &[CertificateDer<'a>]) -> Vec<CertificateDer<'a>> {
    std::iter::once(leaf).chain(between).cloned().collect()
}

impl ClientCertVerifier for Callers {
    fn offer_client_auth(&self) -> bool {
        true
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.subjects
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let chain = chain(leaf, between);
        let verified = self.trust.caller(&chain, now);
        if let Err(Error::InvalidCertificate(CertificateError::Revoked)) = &verified
            && let Ok(certificate) = Certificate::read(leaf)
        {
            let caller = certificate.identity.in_words().unwrap_or_default();
            tracing::warn!(caller, "refused: its certificate was revoked");
        }
        verified.map(|_peer| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.trust.provider().signature_verification_algorithms;
        verify_tls12_signature(message, leaf, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.trust.provider().signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust.provider().signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.trust.server_ended_within(&chain(leaf, between), name, now, self.ended_within)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.trust.provider().signature_verification_algorithms;
        verify_tls12_signature(message, leaf, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.trust.provider().signature_verification_algorithms;
        verify_tls13_signature(message, leaf, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust.provider().signature_verification_algorithms.supported_schemes()
    }
}
