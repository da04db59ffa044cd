//! Brings a machine back that was off past the end of its certificate: gives it another one for
//! the same key. `core::computed` decides which.

use std::sync::Arc;
use std::time::Duration;

use api::subd::{ReplaceCertificate, ReplaceCertificateRequest};
use rpc::client::{CallError, Client, Peer};

use super::{ComputedService, PushError};
use crate::core::computed::ended_certificates::NoCertificate;

/// Why a machine does not get another certificate.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("it has not shown a key")]
    NoKey,
    #[error(transparent)]
    None(#[from] NoCertificate),
    #[error("the certificate cannot be read")]
    Content(#[from] PushError),
}

impl ComputedService {
    /// Gives a machine another certificate whose own ended at most `ended_within` ago. Nothing else
    /// is called on the connection that is made for this.
    ///
    /// # Errors
    ///
    /// `ReplaceError` says why it has none.
    pub async fn replace_certificate(
        self: &Arc<Self>,
        peer: Peer,
        ended_within: Duration,
    ) -> Result<(), ReplaceError> {
        let hostname = peer.host.clone();
        self.locked().table.may_replace(&hostname, self.clock.now())?;
        let client = Client::of_ended(peer, &self.security, ended_within);
        let key = client.connected_key().await?.ok_or(ReplaceError::NoKey)?;
        let id = {
            let mut inner = self.locked();
            let id = inner.table.replacement(&hostname, &key, self.clock.now());
            if id.is_err() {
                // It may have to be asked for with the key.
                inner.servers.values().for_each(|server| server.notify_one());
            }
            id
        };
        let contents = self.contents([id?].into()).await?;
        for content in contents {
            let request = ReplaceCertificateRequest { chain: content.bytes };
            client.call::<ReplaceCertificate>(&request).await?;
        }
        Ok(())
    }
}
