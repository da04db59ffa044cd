//! How a peer stands while its connection lasts.

use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::sync::watch;

use super::explain::explain;
use super::trust::{Trust, Vouched};
use crate::tls::tls_config::{Credentials, now};
use api::access::Identity;

/// How often the wall clock is asked at least whether a certificate has ended: it may jump.
const ASK_EVERY: Duration = Duration::from_secs(600);

/// What a peer has shown itself to be.
#[derive(Clone, Debug)]
pub(super) enum Role {
    Caller,
    Server(ServerName<'static>),
}

/// A peer that has shown a certificate, as long as its connection lasts.
pub(crate) struct PeerSession {
    credentials: watch::Receiver<Arc<Credentials>>,
    chain: Vec<CertificateDer<'static>>,
    role: Role,
    identity: Arc<Identity>,
    until: u64,
}

/// What is needed to know, call by call, whether a certificate still lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Until(u64);

impl Until {
    /// True if it has ended.
    pub(crate) fn is_over(self) -> bool {
        now().as_secs() > self.0
    }
}

impl PeerSession {
    pub(super) fn new(
        mut credentials: watch::Receiver<Arc<Credentials>>,
        chain: Vec<CertificateDer<'static>>,
        role: Role,
    ) -> Result<Self, rustls::Error> {
        // What was verified in the handshake may have been revoked since.
        let Vouched { identity, until } =
            judge(&credentials.borrow_and_update().trust, &chain, &role)?;
        Ok(Self { credentials, chain, role, identity: Arc::new(identity), until })
    }

    /// Who it is, and what it may do.
    pub(crate) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.identity)
    }

    /// Until when it lasts, if nothing happens.
    pub(crate) fn until(&self) -> Until {
        Until(self.until)
    }

    /// Waits until the peer can no longer be believed to be who it was; says why.
    pub(crate) async fn lost(mut self) -> String {
        loop {
            let left = Duration::from_secs((self.until + 1).saturating_sub(now().as_secs()));
            tokio::select! {
                changed = self.credentials.changed() => if changed.is_err() {
                    // Nothing changes any more, but time.
                    tokio::time::sleep(left.min(ASK_EVERY)).await;
                },
                () = tokio::time::sleep(left.min(ASK_EVERY)) => {}
            }
            let judged =
                judge(&self.credentials.borrow_and_update().trust, &self.chain, &self.role);
            match judged {
                Ok(Vouched { identity, until }) => {
                    if identity != *self.identity {
                        return "what it may do has changed".to_owned();
                    }
                    self.until = until;
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
) -> Result<Vouched, rustls::Error> {
    let now = UnixTime::since_unix_epoch(now());
    match role {
        Role::Caller => trust.caller(chain, now),
        Role::Server(name) => trust.server(chain, name, now),
    }
}
