//! The verification of a peer while its connection lasts.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::credentials::Credentials;
use super::explain::explain;
use super::successor::CallerProof;
use super::trust::{Trust, VerifiedPeer};
use api::access::Identity;
use system::clock::since_epoch;

/// How often the expiry of a certificate is checked at least, because the wall clock may jump.
const ASK_EVERY: Duration = Duration::from_secs(600);

/// The role of a peer.
#[derive(Clone, Debug)]
pub(super) enum Role {
    Caller,
    /// Its certificate may have ended at most so long ago, if it is a machine.
    Server(ServerName<'static>, Duration),
}

/// A peer with a certificate, while its connection lasts.
pub(crate) struct PeerSession {
    credentials: watch::Receiver<Arc<Credentials>>,
    proof: Arc<CallerProof>,
    role: Role,
    /// The identity of a caller. That of a server is empty: nobody asks what a server may do, and
    /// the powers of each machine would take 3 KiB of a dominator's memory.
    identity: Arc<Identity>,
    until: u64,
    is_of_machines: bool,
}

/// The expiry of a peer's certificates, to check for each call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Until(u64);

impl Until {
    /// Returns true if they have expired.
    pub(crate) fn is_over(self) -> bool {
        since_epoch().as_secs() > self.0
    }
}

impl PeerSession {
    pub(super) fn new(
        mut credentials: watch::Receiver<Arc<Credentials>>,
        proof: CallerProof,
        role: Role,
    ) -> Result<Self, rustls::Error> {
        // The certificate may have been revoked since the handshake.
        let VerifiedPeer { identity, until, is_of_machines } =
            judge(&credentials.borrow_and_update().trust, &proof.chain, &role)?;
        let (identity, proof) = (Arc::new(identity), Arc::new(proof));
        Ok(Self { credentials, proof, role, identity, until, is_of_machines })
    }

    /// Returns user, groups and powers of a caller; of a server nothing.
    pub(crate) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.identity)
    }

    /// Returns how the peer has shown who it is.
    pub(crate) fn proof(&self) -> Arc<CallerProof> {
        Arc::clone(&self.proof)
    }

    /// Returns the public key of the peer, in DER (SubjectPublicKeyInfo).
    pub(crate) fn public_key(&self) -> Option<Arc<[u8]>> {
        let (_, certificate) = X509Certificate::from_der(self.proof.chain.first()?).ok()?;
        Some(certificate.tbs_certificate.subject_pki.raw.into())
    }

    /// Returns true if an authority of the peer certifies machines only.
    pub(crate) fn is_of_machines(&self) -> bool {
        self.is_of_machines
    }

    /// Returns when the certificates expire.
    pub(crate) fn until(&self) -> Until {
        Until(self.until)
    }

    /// Waits until the peer of `session` is no longer trusted, or until what a caller may do
    /// changes. Returns the reason. Without a session, it waits forever. The session is boxed,
    /// because this future would reserve its memory three times.
    pub(crate) async fn lost(session: Option<Box<Self>>) -> String {
        let Some(mut session) = session else { return std::future::pending().await };
        loop {
            let left =
                Duration::from_secs((session.until + 1).saturating_sub(since_epoch().as_secs()));
            tokio::select! {
                changed = session.credentials.changed() => if changed.is_err() {
                    // The credentials no longer change.
                    tokio::time::sleep(left.min(ASK_EVERY)).await;
                },
                () = tokio::time::sleep(left.min(ASK_EVERY)) => {}
            }
            let judged = judge(
                &session.credentials.borrow_and_update().trust,
                &session.proof.chain,
                &session.role,
            );
            match judged {
                Ok(VerifiedPeer { identity, until, is_of_machines }) => {
                    if (&identity, is_of_machines) != (&*session.identity, session.is_of_machines) {
                        return "what it may do has changed".to_owned();
                    }
                    session.until = until;
                }
                Err(error) => return explain(&error),
            }
        }
    }
}

fn judge(
    trust: &Trust,
    chain: &[CertificateDer<'_>],
    role: &Role,
) -> Result<VerifiedPeer, rustls::Error> {
    let now = UnixTime::since_unix_epoch(since_epoch());
    match role {
        Role::Caller => trust.caller(chain, now),
        Role::Server(name, within) => {
            let verified = trust.server_ended_within(chain, name, now, *within)?;
            Ok(VerifiedPeer { identity: Identity::default(), ..verified })
        }
    }
}
